"""What became of the requests of a run, how long they took, and how many were good.

docs/metrics.md defines every figure in symbols.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twin.clock import PS, to_ps
from twin.metrics.percentiles import STATS, Durations, Stats, stats
from twin.metrics.records import RequestRecord

OUTCOMES = ("completed", "refused", "timed_out", "aborted", "unfinished")
"""The ways a request can end. They exclude each other and cover every request."""

LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue", "prefill")
"""The durations that have statistics, under the names that objectives use."""

_NONE = -1
"""Marks in a column a request that has no such duration."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of a group of requests."""

    completed: int
    refused: int
    timed_out: int
    aborted: int
    unfinished: int
    attempts: int
    """Requests plus the retries of their clients."""

    @property
    def offered(self) -> int:
        """All requests of the group."""
        return self.completed + self.refused + self.timed_out + self.aborted + self.unfinished

    def to_dict(self) -> dict[str, int]:
        """The six counts, `offered` first; `attempts` is not among them."""
        return {"offered": self.offered} | {outcome: getattr(self, outcome) for outcome in OUTCOMES}


@dataclass(frozen=True, slots=True)
class Judgement:
    """One objective of one tier, held against the statistic it names."""

    limit_s: float
    value_s: float | None
    """The statistic; None without a sample."""
    met: bool | None
    """None if there was nothing to judge: no request of the tier after the warm-up, or none with
    this duration although all completed (one-token replies have no TPOT)."""
    without: int
    """Requests that are not in the statistic because they ended, or the run did, too early to have
    this duration. They count against attainment."""

    def to_dict(self) -> dict[str, float | bool | None]:
        """For the JSON summary."""
        return {
            "limit_s": self.limit_s,
            "value_s": self.value_s,
            "met": self.met,
            "without": self.without,
        }


@dataclass(frozen=True, slots=True)
class TierSummary:
    """The figures of one tier: counts of all its requests, the rest of those after the warm-up."""

    counts: Counts
    measured: int
    """Requests that arrived at or after the end of the warm-up."""
    good: int
    """Of these, the completed ones that met every objective of the tier."""
    latency: Mapping[str, Stats]
    """By the names in LATENCIES."""
    goodput_rps: float | None
    attainment: float | None
    objectives: Mapping[str, Judgement]
    """By name, such as ttft_p99."""


def summarize_tiers(
    records: Iterable[RequestRecord],
    *,
    objectives: Mapping[str, Mapping[str, float]],
    warmup_ps: int,
    end_ps: int,
    order: Sequence[str] = (),
) -> dict[str, TierSummary]:
    """The figures of every tier that has a request or an objective.

    `objectives` are limits in seconds by tier and name (`ttft_p99`); `end_ps` is the simulated
    instant at which the run ended. Tiers come in `order`, those not in it after them by name.
    """
    by_tier: dict[str, list[RequestRecord]] = {tier: [] for tier in objectives}
    for record in records:
        by_tier.setdefault(record.tier, []).append(record)
    rank = {tier: i for i, tier in enumerate(order)}
    return {
        tier: _summarize(by_tier[tier], objectives.get(tier, {}), warmup_ps, end_ps)
        for tier in sorted(by_tier, key=lambda tier: (rank.get(tier, len(rank)), tier))
    }


def total_counts(tiers: Iterable[TierSummary]) -> Counts:
    """The counts of all tiers together."""
    names = (*OUTCOMES, "attempts")
    sums = dict.fromkeys(names, 0)
    for tier in tiers:
        for name in names:
            sums[name] += getattr(tier.counts, name)
    return Counts(**sums)


def parse_objective(name: str) -> tuple[str, str]:
    """`ttft_p99` -> ("ttft", "p99"). Raises ValueError, naming what exists, for any other form."""
    latency, _, stat = name.rpartition("_")
    if latency not in LATENCIES or stat not in STATS:
        raise ValueError(
            f"{name!r} is not <metric>_<statistic> with a metric out of {', '.join(LATENCIES)} "
            f"and a statistic out of {', '.join(STATS)}, e.g. ttft_p99"
        )
    return latency, stat


Limits = Sequence[tuple[str, int]]
"""(latency, picoseconds) pairs that each request of a tier is judged by."""


def limits_of(objectives: Mapping[str, float]) -> Limits:
    """The limits that objectives such as {"ttft_p99": 1.0} set to a single request."""
    return tuple((parse_objective(name)[0], to_ps(limit)) for name, limit in objectives.items())


def is_good(record: RequestRecord, limits: Limits) -> bool:
    """Whether a request completed within every limit; a duration it does not have meets any."""
    return record.outcome == "completed" and all(
        _duration_ps(record, latency) <= limit_ps for latency, limit_ps in limits
    )


def _duration_ps(record: RequestRecord, latency: str) -> int:
    """_NONE if it has no such duration; for itl its longest gap."""
    match latency:
        case "ttft":
            return _between(record.arrival_ps, record.first_token_ps)
        case "tpot":
            return _mean_gap(record.itl_ps)
        case "itl":
            return max(record.itl_ps, default=_NONE)
        case "e2e":
            return _between(
                record.arrival_ps, record.finish_ps if record.outcome == "completed" else None
            )
        case "queue":
            return _between(record.arrival_ps, record.first_scheduled_ps)
        case _:
            return _between(record.first_scheduled_ps, record.first_token_ps)


def _summarize(
    records: list[RequestRecord], objectives: Mapping[str, float], warmup_ps: int, end_ps: int
) -> TierSummary:
    measured = [record for record in records if record.arrival_ps >= warmup_ps]
    columns = _columns(measured)
    gaps = _gaps(measured)
    latency = {
        name: stats(gaps if name == "itl" else column[column != _NONE])
        for name, column in columns.items()
    }
    completed = np.array([record.outcome == "completed" for record in measured], dtype=np.bool_)

    met = completed.copy()
    for name, limit in objectives.items():
        met &= columns[parse_objective(name)[0]] <= to_ps(limit)
    good = int(met.sum())

    span_ps = end_ps - warmup_ps
    return TierSummary(
        counts=_count(records),
        measured=len(measured),
        good=good,
        latency={name: latency[name] for name in LATENCIES},
        goodput_rps=good * PS / span_ps if span_ps > 0 else None,
        attainment=good / len(measured) if measured else None,
        objectives={
            name: _judge(name, limit, latency, columns, completed)
            for name, limit in objectives.items()
        },
    )


def _count(records: list[RequestRecord]) -> Counts:
    ended = dict.fromkeys(OUTCOMES, 0)
    for record in records:
        ended[record.outcome] += 1
    return Counts(**ended, attempts=sum(record.attempts for record in records))


def _columns(records: list[RequestRecord]) -> dict[str, Durations]:
    """Picoseconds by latency and request, _NONE where it has no such duration; for itl its longest gap."""

    def column(latency: str) -> Durations:
        durations = (_duration_ps(record, latency) for record in records)
        return np.fromiter(durations, dtype=np.int64, count=len(records))

    return {latency: column(latency) for latency in LATENCIES}


def _between(start_ps: int | None, end_ps: int | None) -> int:
    return _NONE if start_ps is None or end_ps is None else end_ps - start_ps


def _mean_gap(itl_ps: "array[int]") -> int:
    """Mean of the gaps to the nearest picosecond."""
    n = len(itl_ps)
    return (2 * sum(itl_ps) + n) // (2 * n) if n else _NONE


def _gaps(records: list[RequestRecord]) -> Durations:
    """The gaps between tokens of all requests in one array."""
    return np.frombuffer(b"".join(record.itl_ps for record in records), dtype=np.int64)


def _judge(
    name: str,
    limit: float,
    latency: Mapping[str, Stats],
    columns: Mapping[str, Durations],
    completed: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> Judgement:
    metric, stat = parse_objective(name)
    value: float | None = getattr(latency[metric], stat)
    without = int(((columns[metric] == _NONE) & ~completed).sum())
    if value is not None:
        met: bool | None = value <= limit
    else:
        met = False if without else None
    return Judgement(limit_s=limit, value_s=value, met=met, without=without)
