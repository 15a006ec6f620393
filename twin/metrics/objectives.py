"""What is asked of the latencies of a tier: names of objectives, and whether one request meets them."""

from collections.abc import Mapping, Sequence

from twin.clock import to_ps
from twin.metrics.columns import NONE
from twin.metrics.percentiles import STATS
from twin.metrics.records import LATENCIES, RequestRecord
from twin.metrics.token_times import total_ps

Objectives = Mapping[str, Mapping[str, float]]
"""Tier -> <metric>_<statistic> -> limit in seconds."""

Limits = Sequence[tuple[str, int]]
"""(latency, picoseconds) pairs that each request of a tier is judged by."""


def parse_objective(name: str) -> tuple[str, str]:
    """`ttft_p99` -> ("ttft", "p99"). Raises ValueError, naming what exists, for any other form."""
    latency, _, stat = name.rpartition("_")
    if latency not in LATENCIES or stat not in STATS:
        raise ValueError(
            f"{name!r} is not <metric>_<statistic> with a metric out of {', '.join(LATENCIES)} "
            f"and a statistic out of {', '.join(STATS)}, e.g. ttft_p99"
        )
    return latency, stat


def metric_of(name: str) -> str:
    """`ttft_p99` -> "ttft"."""
    return parse_objective(name)[0]


def limits_of(objectives: Mapping[str, float]) -> Limits:
    """The limits that objectives such as {"ttft_p99": 1.0} set to a single request."""
    return tuple((metric_of(name), to_ps(limit)) for name, limit in objectives.items())


def is_good(record: RequestRecord, limits: Limits) -> bool:
    """Whether a request completed within every limit; a duration it does not have meets any."""
    return record.outcome == "completed" and all(
        _duration_ps(record, latency) <= limit_ps for latency, limit_ps in limits
    )


def _duration_ps(record: RequestRecord, latency: str) -> int:
    """Of a completed request; NONE if it has no such duration; for itl its longest gap."""
    match latency:
        case "ttft":
            return _between(record.arrival_ps, record.first_token_ps)
        case "tpot":
            n = len(record.itl_ps)
            return (2 * total_ps(record.itl_ps) + n) // (2 * n) if n else NONE
        case "itl":
            return max(record.itl_ps, default=NONE)
        case "e2e":
            return _between(record.arrival_ps, record.finish_ps)
        case "queue":
            return _between(record.arrival_ps, record.first_scheduled_ps)
        case _:
            return _between(record.first_scheduled_ps, record.first_token_ps)


def _between(start_ps: int | None, end_ps: int | None) -> int:
    return NONE if start_ps is None or end_ps is None else end_ps - start_ps
