"""What a vLLM server says of itself while it is measured: its /metrics, read now and then."""

import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? ([0-9.eE+-]+|NaN|\+Inf)")
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
        """Counters that both have, as changes since the earlier reading."""
        counters = set(NAMES) - {"running", "waiting", "kv_used"}
        return {
            name: value - earlier.values[name]
            for name, value in self.values.items()
            if name in counters and name in earlier.values
        }


def parse(text: str) -> Reading:
    """A reading from the text of /metrics. Lines of other metrics are passed over unread."""
    values: dict[str, float] = {}
    tiers: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line.startswith(("vllm:", "twin:")):
            continue
        found = _LINE.match(line)
        field = found and _FIELDS.get(found[1])
        if not found or not field:
            continue
        if field in NAMES:
            values[field] = values.get(field, 0.0) + float(found[3])
        elif tier := _TIER.search(found[2] or ""):
            own = tiers.setdefault(field, {})
            own[tier[1]] = own.get(tier[1], 0.0) + float(found[3])
    return Reading(values, tiers)


def read(
    url: str, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None
) -> Reading | None:
    """A reading now; None where the server has no /metrics of vLLM's."""
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            found = parse(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError, urllib.error.URLError):
        return None
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
    computed = changes.get("prompt_tokens", 0) - changes.get("prefix_hit_tokens", 0)
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
