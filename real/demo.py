"""Mixed requests against a server, and what its own metrics say of each tier."""

import asyncio
import math
import random
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from real.calls import Call, Reply
from real.client import play
from twin.scenario import Scenario
from twin.scheduling import TierConfig

SECONDS = 8.0
"""Over which the requests arrive."""
SHARES = (0.5, 0.3, 0.2)
"""Of the requests, by tier from the most urgent on; further tiers get none."""


Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Name -> (labels, value) of every sample."""


def play_demo(url: str, model: str, scenario: Scenario, requests: int) -> str:
    """Send the requests; a table by tier from the server's metrics, and one line on what the clients saw."""
    tiers = () if scenario.policy is None else scenario.policy.tiers
    before = samples(fetch_metrics(url))
    replies = asyncio.run(play(url, model, list(_calls(tiers, requests))))
    after = samples(fetch_metrics(url))
    return report(since(before, after), replies)


def _calls(tiers: tuple[TierConfig, ...], requests: int) -> Iterator[Call]:
    rng = random.Random("demo")
    names = [tier.name for tier in tiers if tier.name != "*"][: len(SHARES)] or ["ONLINE"]
    for i in range(requests):
        tier = rng.choices(names, SHARES[: len(names)])[0]
        prompt, output = rng.choice([(40, 16), (200, 32), (600, 64), (1200, 96)])
        prompt = max(1, prompt + rng.randint(-20, 20))
        yield Call(i * SECONDS / requests, "x" * prompt, output, tier)


def fetch_metrics(url: str) -> str:
    """The server's /metrics."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode("utf-8")
    finally:
        connection.close()


def samples(metrics: str) -> Samples:
    """What an exposition holds."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def since(before: Samples, after: Samples) -> Samples:
    """What has been counted since then: the warm-up's requests are in a server's metrics, too."""
    then = {(n, frozenset(labels.items())): v for n, all_ in before.items() for labels, v in all_}
    return {
        name: [
            (labels, value - then.get((name, frozenset(labels.items())), 0.0))
            for labels, value in all_
        ]
        for name, all_ in after.items()
    }


def bound(buckets: list[tuple[float, float]], q: float) -> float | None:
    """The upper bound of the bucket in which a quantile lies, of (upper bound, cumulative count); None without any.

    Nothing is interpolated: histograms with different buckets would contradict each other.
    """
    buckets = sorted(buckets)
    total = buckets[-1][1] if buckets else 0.0
    if total == 0:
        return None
    return next(bound for bound, count in buckets if count >= q * total)


LATENCIES = (
    ("queue", "request_queue_time_seconds"),
    ("TTFT", "time_to_first_token_seconds"),
    ("E2E", "e2e_request_latency_seconds"),
)


def report(found: Samples, replies: list[Reply]) -> str:
    """The table: by tier, or of all requests where vLLM's own order rules and only its own metrics are there."""
    heads = "".join(f"{f'{name} mean':>12}{'p99':>9}" for name, _ in LATENCIES)
    lines = [f"{'tier':<10}{'requests':>9}{heads}   seconds, from /metrics"]
    tiers = dict.fromkeys(labels["tier"] for labels, _ in found.get("twin:requests_total", ()))
    for tier in tiers:
        count = _sum(found, "twin:requests_total", {"tier": tier, "outcome": "completed"})
        lines.append(_row(found, tier, count, "twin:", {"tier": tier}))
    if not tiers:
        lines.append(_row(found, "all", _sum(found, "vllm:request_success_total", {}), "vllm:", {}))
    whole = sum(len(r.token_s) == r.call.max_tokens for r in replies)
    preempted = _sum(found, "vllm:num_preemptions_total", {})
    lines.append(
        f"{whole} of {len(replies)} replies complete, {preempted:.0f} preemptions, "
        f"last reply after {max((r.end_s or 0.0) for r in replies):.1f} s"
    )
    return "\n".join(lines) + "\n"


def _row(found: Samples, head: str, count: float, prefix: str, labels: dict[str, str]) -> str:
    cells: list[str] = []
    known = math.inf
    # From the longest: a request waits no longer than to its first token, and that comes no later than its last.
    for _, latency in reversed(LATENCIES):
        name = prefix + latency
        observed = _sum(found, f"{name}_count", labels)
        mean = _sum(found, f"{name}_sum", labels) / observed if observed else None
        counts: dict[float, float] = {}
        for own, value in _matching(found, f"{name}_bucket", labels):
            upper = float(own["le"])
            counts[upper] = counts.get(upper, 0.0) + value
        p99 = bound(list(counts.items()), 0.99)
        if p99 is not None and observed == count:
            p99 = known = min(p99, known)
        cells.append(f"{'-' if p99 is None else f'<= {p99:g}':>9}")
        cells.append(f"{'-' if mean is None else format(mean, '.3f'):>12}")
    return f"{head:<10}{count:>9.0f}" + "".join(reversed(cells))


def _matching(
    found: Samples, name: str, labels: dict[str, str]
) -> Iterator[tuple[dict[str, str], float]]:
    return ((own, v) for own, v in found.get(name, ()) if labels.items() <= own.items())


def _sum(found: Samples, name: str, labels: dict[str, str]) -> float:
    return sum(value for _, value in _matching(found, name, labels))
