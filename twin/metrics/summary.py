"""What became of the requests of a run, how long they took, and how many were good.

docs/metrics.md defines every figure in symbols.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twin.clock import PS
from twin.metrics.objectives import Objectives, parse_objective
from twin.metrics.percentiles import Stats
from twin.metrics.record_table import RecordTable
from twin.metrics.records import LATENCIES, OUTCOMES, RequestRecord
from twin.metrics.tally import Tally, TierTally


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
    objectives: Objectives,
    warmup_ps: int,
    end_ps: int,
    order: Sequence[str] = (),
) -> dict[str, TierSummary]:
    """The figures of every tier that has a request or an objective, all exact.

    `objectives` are limits in seconds by tier and name (`ttft_p99`); `end_ps` is the simulated
    instant at which the run ended. Tiers come in `order`, those not in it after them by name.
    """
    tally = tally_of(records, objectives, warmup_ps)
    return summarize_tally(tally, objectives, end_ps - warmup_ps, order)


def tally_of(records: Iterable[RequestRecord], objectives: Objectives, warmup_ps: int) -> Tally:
    """Records counted, every figure exact."""
    tally = Tally(objectives, warmup_ps, is_exact=True)
    table = records if isinstance(records, RecordTable) else RecordTable(records)
    tally.add(table.columns())
    return tally


def summarize_tally(
    tally: Tally, objectives: Objectives, span_ps: int, order: Sequence[str]
) -> dict[str, TierSummary]:
    """The figures of every tier of a tally; `span_ps` is from the end of the warm-up to the end of the run."""
    rank = {tier: i for i, tier in enumerate(order)}
    return {
        tier: _summarize(tally.tiers[tier], objectives.get(tier, {}), span_ps)
        for tier in sorted(tally.tiers, key=lambda tier: (rank.get(tier, len(rank)), tier))
    }


def total_counts(tiers: Iterable[TierSummary]) -> Counts:
    """The counts of all tiers together."""
    names = (*OUTCOMES, "attempts")
    sums = dict.fromkeys(names, 0)
    for tier in tiers:
        for name in names:
            sums[name] += getattr(tier.counts, name)
    return Counts(**sums)


def _summarize(tally: TierTally, objectives: Mapping[str, float], span_ps: int) -> TierSummary:
    latency = {name: tally.latency[name].stats() for name in LATENCIES}
    return TierSummary(
        counts=Counts(**tally.ended, attempts=tally.attempts),
        measured=tally.measured,
        good=tally.good,
        latency=latency,
        goodput_rps=tally.good * PS / span_ps if span_ps > 0 else None,
        attainment=tally.good / tally.measured if tally.measured else None,
        objectives={
            name: _judge(name, limit, latency, tally.without[name])
            for name, limit in objectives.items()
        },
    )


def _judge(name: str, limit: float, latency: Mapping[str, Stats], without: int) -> Judgement:
    metric, stat = parse_objective(name)
    value: float | None = getattr(latency[metric], stat)
    if value is not None:
        met: bool | None = value <= limit
    else:
        met = False if without else None
    return Judgement(limit_s=limit, value_s=value, met=met, without=without)
