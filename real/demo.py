"""Mixed requests against a server, and what its own metrics say of each tier."""

import asyncio
import random
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from real.client import Call, Reply, play
from twin.scenario import Scenario
from twin.scheduling import TierConfig

SECONDS = 8.0
"""Over which the requests arrive."""
SHARES = (0.5, 0.3, 0.2)
"""Of the requests, by tier from the most urgent on; further tiers get none."""


def play_demo(url: str, model: str, scenario: Scenario, requests: int) -> str:
    """Send the requests; a table by tier from the server's metrics, and one line on what the clients saw."""
    tiers = () if scenario.policy is None else scenario.policy.tiers
    replies = asyncio.run(play(url, model, list(_calls(tiers, requests))))
    return report(fetch_metrics(url), replies)


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


def samples(metrics: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Name -> (labels, value) of every sample."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def quantile(buckets: list[tuple[float, float]], q: float) -> float | None:
    """As Prometheus estimates it from (upper bound, cumulative count); None without observations."""
    buckets = sorted(buckets)
    total = buckets[-1][1] if buckets else 0.0
    if total == 0:
        return None
    rank, below, low = q * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        below, low = count, bound
    return low


def report(metrics: str, replies: list[Reply]) -> str:
    """The table."""
    found = samples(metrics)
    tiers = list(
        dict.fromkeys(labels["tier"] for labels, _ in found.get("twin:requests_total", ()))
    )
    lines = [
        f"{'tier':<10}{'requests':>9}{'TTFT p50':>10}{'p99':>9}{'queue p50':>11}{'p99':>9}{'E2E p50':>9}{'p99':>9}"
        "   seconds, from /metrics"
    ]
    for tier in tiers:
        count = sum(
            value
            for labels, value in found["twin:requests_total"]
            if labels["tier"] == tier and labels["outcome"] == "completed"
        )
        cells = [f"{tier:<10}{count:>9.0f}"]
        for name, widths in (
            ("time_to_first_token_seconds", (10, 9)),
            ("request_queue_time_seconds", (11, 9)),
            ("e2e_request_latency_seconds", (9, 9)),
        ):
            buckets = [
                (float(labels["le"]), value)
                for labels, value in found.get(f"twin:{name}_bucket", ())
                if labels["tier"] == tier
            ]
            for q, width in zip((0.5, 0.99), widths, strict=True):
                value = quantile(buckets, q)
                cells.append(f"{'-' if value is None else format(value, '.3f'):>{width}}")
        lines.append("".join(cells))
    whole = sum(len(r.token_s) == r.call.max_tokens for r in replies)
    preempted = sum(value for _, value in found.get("vllm:num_preemptions_total", ()))
    lines.append(
        f"{whole} of {len(replies)} replies complete, {preempted:.0f} preemptions, "
        f"last reply after {max((r.end_s or 0.0) for r in replies):.1f} s"
    )
    return "\n".join(lines) + "\n"
