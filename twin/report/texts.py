"""Words and numbers for people: the same in tables and in the report."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LISTED = 5
"""Streams or refused requests named one by one; the rest are counted."""


def duration(seconds: float | None) -> str:
    """Seconds for reading, to about three digits: 4.21 ms, 813 ms, 1.25 s, 3,512 s; - for None."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    ms = seconds * 1000
    if ms < 9.995:
        return f"{ms:.2f} ms"
    if ms < 99.95:
        return f"{ms:.1f} ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds:,.0f} s"


def limit(seconds: float) -> str:
    """A number of seconds that a person chose, in full: 10 ms, 1 s, 1.25 s."""
    return f"{seconds:,.12g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.12g} ms"


def share(fraction: float | None) -> str:
    """A fraction as a percentage; - for None. Only an exact 1 is 100 %, only an exact 0 is 0 %."""
    if fraction is None:
        return "-"
    percent = fraction * 100
    if 0 < percent < 0.01:
        return "<0.01 %"
    if 99.95 <= percent < 100:
        return ">99.9 %"
    return f"{percent:.2g} %" if percent < 1 else f"{percent:.1f} %"


def count(number: float) -> str:
    """A whole number with thousands separators."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """What one must know of how a run was made, a sentence each: the load of every stream first."""
    yield from _traffic(summary["traffic"])
    if summary["warmup_s"]:
        yield (
            f"Requests that arrived in the first {limit(summary['warmup_s'])} are counted but not measured."
        )
    if summary["percentiles"] != "exact":
        yield (
            f"Percentiles are {summary['percentiles']}: records of single requests were not kept. Counts, means, "
            "goodput and attainment are exact."
        )
    if summary["oracle"]:
        yield "The policy is told the true output lengths (estimator oracle)."
    for timeouts in summary["client_timeouts"]:
        yield _timeouts(timeouts)
    waits = summary["batching_wait_s"]
    if waits:
        named = ", ".join(f"{tier} {limit(wait)}" for tier, wait in waits.items())
        yield (
            f"A request is held for a batch until the first step after {named} at the latest. At low load TTFT lies "
            "above vllm-fcfs by at most this wait plus one step."
        )


def _traffic(streams: Sequence[Mapping[str, Any]]) -> list[str]:
    """What kind of load it was, a line a stream."""
    lines = [
        f"{stream['load']} loop: {stream['arrivals']}"
        for stream in streams[: LISTED if len(streams) > LISTED + 1 else None]
    ]
    return lines + (
        [f"and {len(streams) - len(lines)} more streams"] if len(lines) < len(streams) else []
    )


def _timeouts(timeouts: Mapping[str, Any]) -> str:
    told = []
    if timeouts["ttft_s"] is not None:
        told.append(f"{limit(timeouts['ttft_s'])} for the first token")
    if timeouts["total_s"] is not None:
        told.append(f"{limit(timeouts['total_s'])} for the whole reply")
    return f"Clients of stream {timeouts['stream']} wait {' and '.join(told)}, then leave."


def trust(summary: Mapping[str, Any]) -> str:
    """How far similar runs were off, and in what this run is unlike them, in sentences without a last full stop."""
    found = summary["trust"]
    if found is None:
        return "measured, not predicted"
    if found["foreign"]:
        return f"not validated: the step times are of {'; '.join(found['foreign'])}"
    if found["calibration"]:
        worst = max(found["calibration"].values())
        return f"calibrated: step times fitted to measured steps, mean error {share(worst)} at most"
    near, runs = found["nearest"], found["runs"]
    if near is None:
        return "not validated: nothing measured was ever compared with step times of this origin"
    unlike = f"{'; '.join(found['differs'])}: {found['distance']:g} away, at most {found['limit']:g} counts"
    if not found["validated"]:
        return f"not validated: unlike the nearest measured set-up, {near} ({plural(runs, 'run')}), it has {unlike}"
    half, worst_of = (_by_latency(found[name]) for name in ("errors", "largest"))
    if runs == 1:
        said = ", ".join(f"{name.upper()} {share(error)}" for name, error in half.items())
        told = f"1 run of {near} was off by: {said}"
    else:
        said = ", ".join(
            f"{name.upper()} within {share(error)} (worst {share(worst_of[name])})"
            for name, error in half.items()
        )
        told = f"half of {count(runs)} runs of {near} had {said}"
    told += ". These are means or p50; no p90, p95 or p99 was ever compared"
    return f"{told}. This run has {unlike}" if found["differs"] else told


def _by_latency(errors: Mapping[str, float]) -> dict[str, float]:
    """Latency -> the largest error of its statistics, by name."""
    found: dict[str, float] = {}
    for metric, error in errors.items():
        name = metric.split("_")[0]
        found[name] = max(error, found.get(name, 0.0))
    return dict(sorted(found.items()))
