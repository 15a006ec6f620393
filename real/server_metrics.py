"""What a vLLM server says of itself while it is measured: its /metrics, read now and then."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from real.address import FetchError, fetch
from twin.clock import PS
from twin.metrics.gauges import NOT_YET, Gauges
from twin.metrics.timeseries import TimeSeries

NAMES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_used": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_query_tokens": "vllm:prefix_cache_queries_total",
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "steps": "vllm:iteration_tokens_total_count",
    "scheduled_tokens": "vllm:iteration_tokens_total_sum",
}
TIERS = {
    "held": "twin:num_requests_held",
    "ready": "twin:num_requests_ready",
    "running_by_tier": "twin:num_requests_running",
}
ALL = "all"
"""Stands for the tier where the server tells none."""

MOST = float(1 << 53)
"""A number beyond is not exact, and no count of anything."""

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? +(\S+)")
_TIER = re.compile(r'tier="([^"]*)"')
_FIELDS = {name: field for field, name in (NAMES | TIERS).items()}


@dataclass(frozen=True)
class Reading:
    """The server at an instant."""

    values: Mapping[str, float]
    """By the keys of NAMES, engines added up; what the server does not have is left out."""
    tiers: Mapping[str, Mapping[str, float]]
    """By the keys of TIERS and tier; empty on a server without the plug-in."""

    def since(self, earlier: "Reading") -> dict[str, float]:
        """Counters that both have, as changes since the earlier reading; one that fell began anew and says nothing."""
        counters = set(NAMES) - {"running", "waiting", "kv_used"}
        return {
            name: value - earlier.values[name]
            for name, value in self.values.items()
            if name in counters and name in earlier.values and value >= earlier.values[name]
        }


def parse(text: str) -> Reading:
    """A reading from the text of /metrics. Lines of other metrics are passed over unread.

    What has no number that it can have (NaN, infinite, below 0) is not known, also if other engines tell theirs.
    """
    values: dict[str, float] = {}
    unknown: set[str] = set()
    tiers: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line.startswith(("vllm:", "twin:")):
            continue
        found = _LINE.match(line)
        field = found and _FIELDS.get(found[1])
        if not found or not field:
            continue
        number = _number(found[3])
        if number is None:
            unknown.add(field)
        elif field in NAMES:
            values[field] = values.get(field, 0.0) + number
        elif tier := _TIER.search(found[2] or ""):
            own = tiers.setdefault(field, {})
            own[tier[1]] = own.get(tier[1], 0.0) + number
    return Reading(
        {field: value for field, value in values.items() if field not in unknown},
        {field: own for field, own in tiers.items() if field not in unknown},
    )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= MOST else None


def read(
    url: str, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None
) -> Reading | None:
    """A reading now; None where the server has no /metrics of vLLM's, whatever it has there."""
    try:
        page = fetch(f"{url.rstrip('/')}/metrics", headers or {}, timeout_s)
    except FetchError:
        return None
    found = parse(page.decode("utf-8", "replace"))
    return found if found.values else None


def series_of(readings: Sequence[tuple[float, Reading]], end_s: float) -> TimeSeries:
    """Readings (seconds from the start, what was read) as the simulator's time series."""
    if not readings:
        readings = [(0.0, Reading({}, {})), (end_s, Reading({}, {}))]
    first = readings[0][1]
    gauges = [(_gauges(reading, first),) for _, reading in readings]
    tiers = dict.fromkeys(t for one in gauges for t in (*one[0].waiting, *one[0].running))
    times = [round(at_s * PS) for at_s, _ in readings]
    period = times[1] - times[0] if len(times) > 1 else PS
    return TimeSeries(max(period, 1), times, gauges, [{} for _ in times], tuple(tiers))


def _gauges(reading: Reading, first: Reading) -> Gauges:
    values = reading.values
    changes: dict[str, Any] = {name: round(change) for name, change in reading.since(first).items()}
    scheduled = changes.pop("scheduled_tokens", 0)
    computed = max(0, changes.get("prompt_tokens", 0) - changes.get("prefix_hit_tokens", 0))
    held = {tier: round(n) for tier, n in reading.tiers.get("held", {}).items()}
    ready = {tier: round(n) for tier, n in reading.tiers.get("ready", {}).items()}
    running = {tier: round(n) for tier, n in reading.tiers.get("running_by_tier", {}).items()}
    if not ready:
        ready = {ALL: round(values.get("waiting", 0))}
    if not running:
        running = {ALL: round(values.get("running", 0))}
    return replace(
        NOT_YET,
        waiting={tier: n + held.get(tier, 0) for tier, n in ready.items()},
        held=held,
        running=running,
        kv_used=values.get("kv_used", 0.0),
        prefill_tokens=computed,
        decode_tokens=max(0, scheduled - computed),
        **changes,
    )
