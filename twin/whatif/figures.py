"""The figures of a run that comparisons, sweeps and searches look at: flat names, units, which way is better."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.errors import InputError
from twin.metrics.columns import NONE
from twin.metrics.objectives import Objectives
from twin.metrics.percentiles import STATS
from twin.metrics.records import LATENCIES, OUTCOMES
from twin.report.json_summary import summarize
from twin.simulation import Result

Figures = dict[str, float | None]
"""Name, such as `ONLINE.ttft_p99` or `gpu_hours` -> value; times are seconds. docs/what-if.md lists the names."""

ALL = "all"
"""Stands for every tier together."""

SATURATED_GROWTH = 0.05
"""Above this share of the arrivals that join a growing queue, or fail, a run counts as saturated."""

LEAST_REQUESTS = 20
"""Fewer requests say nothing of a growing queue."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure that is judged."""

    name: str
    label: str
    """For people: `ONLINE TTFT p99`."""
    unit: str
    """s, requests/s, 1 (a share), h, or text of another unit; "" for a plain number."""
    more_is_better: bool
    limit: float | None = None
    """The objective on it, if there is one."""


def figures_of(result: Result) -> Figures:
    """Every figure of a finished run, by flat name. The same run gives the same figures: none is of wall time."""
    summary = summarize(result)
    return dict(_of_summary(summary)) | {"growth": growth_of(result)}


def _of_summary(summary: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    tiers: Mapping[str, Mapping[str, Any]] = summary["tiers"]
    measured = sum(tier["measured"] for tier in tiers.values())
    good = sum(tier["good"] for tier in tiers.values())
    rates = [tier["goodput_rps"] for tier in tiers.values() if tier["goodput_rps"] is not None]
    yield f"{ALL}.goodput", sum(rates) if rates else None
    yield f"{ALL}.attainment", good / measured if measured else None
    for name in ("offered", *OUTCOMES):
        yield f"{ALL}.{name}", summary["totals"][name]
    for name, tier in tiers.items():
        yield f"{name}.goodput", tier["goodput_rps"]
        yield f"{name}.attainment", tier["attainment"]
        for count in ("offered", *OUTCOMES):
            yield f"{name}.{count}", tier[count]
        for latency in LATENCIES:
            for stat in STATS:
                yield f"{name}.{latency}_{stat}", tier[f"{latency}_s"][stat]
    for name, judged_by in summary["objectives"].items():
        for objective, found in judged_by.items():
            met = found["met"]
            yield f"met.{name}.{objective}", None if met is None else float(met)
    for name, value in summary["throughput"].items():
        yield name, value
    cost, engine = summary["cost"], summary["engine"]
    yield "gpu_hours", cost["gpu_hours"]
    yield "cost", cost["total"]
    span = summary["simulated_s"]
    yield "gpus", cost["gpu_hours"] * 3600 / span if span else None
    yield "gpus_per_replica", summary["tensor_parallel_size"]
    yield "simulated_s", span
    yield "used_share", summary["used_share"]
    yield "in_system_mean", summary["in_system_mean"]
    for name in ("busy_share", "kv_usage_mean", "preemptions", "recomputed_tokens"):
        yield name, engine[name]
    queried = engine["prefix_query_tokens"]
    yield "prefix_hit_share", engine["prefix_hit_tokens"] / queried if queried else None


def growth_of(result: Result) -> float | None:
    """The share of arrivals that a queue without end would be made of, were the run longer, or that failed.

    The number waiting (of a run much longer than a request: the number inside) is averaged over the middle fifth of the
    time of the arrivals and over the last fifth; by how much it grew, over the arrivals in between, is the share that
    finds no service. In a steady run it is about 0, at twice the capacity a half. Requests that were refused, timed out
    or aborted (prompts that are too long aside) count as not served. None where records were not kept or fewer than 20
    requests came.
    """
    if result.kept is None or len(result.kept) < LEAST_REQUESTS:
        return None
    columns = result.kept.columns()
    arrival = np.asarray(columns["arrival_ps"], dtype=np.float64)
    finish = np.asarray(columns["finish_ps"], dtype=np.float64)
    start = np.asarray(columns["first_scheduled_ps"], dtype=np.float64)
    gone = np.where(finish == NONE, float(result.simulated_ps), finish)
    failed = sum(record.outcome in FAILED and record.reason != "too_long" for record in result.kept)
    share = failed / len(result.kept)
    return min(1.0, queue_growth(arrival, np.where(start == NONE, gone, start), gone) + share)


def queue_growth(arrival: Any, started: Any, gone: Any) -> float:
    """`growth_of` without those who failed, from instants by request; who never started did when it left."""
    first, last = float(arrival.min()), float(arrival.max())
    if last <= first:
        return 0.0
    span = last - first
    left = gone if span > LONG_RUN * float(np.median(gone - arrival)) else started
    middle = _mean_inside(arrival, left, first + 0.4 * span, first + 0.6 * span)
    end = _mean_inside(arrival, left, first + 0.8 * span, last)
    came = np.sort(arrival)
    low, high = np.searchsorted(came, [first + 0.5 * span, first + 0.9 * span])
    between = max(1, int(high - low))
    return float(max(0.0, min(1.0, (end - middle) / between)))


LONG_RUN = 10
"""Arrivals over so many times the median stay have a number inside that has settled by the middle."""

FAILED = ("refused", "timed_out", "aborted")


def _mean_inside(arrival: Any, gone: Any, start: float, end: float) -> float:
    """Requests that have come and not gone, averaged over 101 instants."""
    at = np.linspace(start, end, 101)
    came = np.searchsorted(np.sort(arrival), at, side="right")
    left = np.searchsorted(np.sort(gone), at, side="right")
    return float(np.mean(came - left))


def is_saturated(figures: Mapping[str, float | None]) -> bool:
    """Whether more came than the system can take, so that latencies depend on how long the run was."""
    growth = figures.get("growth")
    return growth is not None and growth > SATURATED_GROWTH


def is_lost(figures: Figures, name: str) -> bool:
    """Whether requests of the tier came and none got so far that the figure could be told: all were refused, say.

    A latency is then longer than any, goodput and attainment are 0 for want of any completed request. False for
    figures that are of no tier, and where no request came.
    """
    tier, _, rest = name.rpartition(".")
    offered, completed = (figures.get(f"{tier}.{count}") or 0 for count in ("offered", "completed"))
    if rest in ("goodput", "attainment"):
        return offered > 0 and completed == 0
    if rest.rpartition("_")[0] not in LATENCIES or figures.get(name) is not None:
        return False
    if f"met.{name}" in figures:
        return figures[f"met.{name}"] == 0
    return offered > completed


def mean_of(rows: Sequence[Figures], name: str) -> float | None:
    """The mean of a figure over the replications in which there was something to judge.

    None where it has no value in any, or where in one of them requests came and none was served (`is_lost`): the
    others alone would be the mean of the lucky ones.
    """
    known = [value for row in rows if (value := row.get(name)) is not None]
    if not known or any(row.get(name) is None and is_lost(row, name) for row in rows):
        return None
    return math.fsum(known) / len(known)


def mean_figures(rows: Sequence[Figures]) -> Figures:
    """`mean_of` each figure that any of the replications has."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: mean_of(rows, name) for name in names}


NOTHING = 1e6
"""Stands for the excess over a limit of a figure that has no value although requests were there."""


def excess(rows: Sequence[Figures], of: Measure) -> float:
    """log(mean / limit) of an objective: above 0 where it is broken; 0 where there was nothing to judge."""
    if of.limit is None:
        return 0.0
    if any(is_lost(row, of.name) for row in rows):
        return NOTHING
    value = mean_of(rows, of.name)
    return 0.0 if value is None else math.log(max(value, 1e-12) / of.limit)


WORDS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "queue": "queue time",
    "prefill": "prefill time",
}
_OTHERS = {
    "goodput": ("goodput", "requests/s", True),
    "attainment": ("attainment", "1", True),
    "gpu_hours": ("GPU-hours", "h", False),
    "gpus": ("GPUs", "GPUs", False),
    "cost": ("cost", "", False),
    "requests_per_s": ("throughput", "requests/s", True),
    "output_tokens_per_s": ("output tokens", "tokens/s", True),
    "prompt_tokens_per_s": ("prompt tokens", "tokens/s", True),
    "busy_share": ("busy", "1", False),
    "kv_usage_mean": ("KV usage", "1", False),
    "preemptions": ("preemptions", "", False),
    "recomputed_tokens": ("recomputed tokens", "tokens", False),
    "prefix_hit_share": ("prefix hits", "1", True),
    "used_share": ("used share of capacity", "1", False),
    "in_system_mean": ("requests inside", "requests", False),
    "growth": ("queue growth", "1", False),
    "completed": ("completed", "requests", True),
    "refused": ("refused", "requests", False),
    "timed_out": ("timed out", "requests", False),
    "aborted": ("aborted", "requests", False),
    "unfinished": ("unfinished", "requests", False),
}


UNJUDGED = ("offered", "simulated_s", "gpus_per_replica")
"""Figures of which neither more nor less is better."""


def measure(name: str, limit: float | None = None) -> Measure:
    """The measure called `name`. Raises InputError, naming the forms there are, for one that does not exist."""
    tier, dot, rest = name.rpartition(".")
    latency, _, stat = rest.rpartition("_")
    is_latency = bool(dot) and latency in LATENCIES and stat in STATS
    if is_latency and tier.startswith("met."):
        whose = measure(name.removeprefix("met."))
        return Measure(name, f"{whose.label} kept", "1", True, limit)
    if is_latency and tier != ALL:
        return Measure(name, f"{tier} {WORDS[latency]} {stat}", "s", False, limit)
    if rest in _OTHERS and (bool(dot) == (rest in ("goodput", "attainment", *OUTCOMES))):
        words, unit, more = _OTHERS[rest]
        return Measure(name, words if tier in ("", ALL) else f"{tier} {words}", unit, more, limit)
    if rest in UNJUDGED and bool(dot) == (rest == "offered"):
        raise InputError(
            f"{name}: neither more nor less of it is better, so that it cannot be judged; it is in tables and JSON"
        )
    whole = ", ".join(key for key in _OTHERS if key not in ("goodput", "attainment", *OUTCOMES))
    raise InputError(
        f"{name!r} is no figure of a run; write TIER.<metric>_<statistic> (ONLINE.ttft_p99), TIER.goodput, "
        f"TIER.attainment (TIER may be {ALL}), met.TIER.<objective>, or one of {whole}"
    )


def judged(objectives: Objectives, tiers: Sequence[str]) -> list[Measure]:
    """What a comparison of scenarios judges: every objective, the goodput of every tier, GPU-hours.

    Without any objective: TTFT p99 and TPOT p99 of every tier in their place.
    """
    found = []
    for tier in tiers:
        limits = objectives.get(tier, {})
        names = limits if any(objectives.values()) else ("ttft_p99", "tpot_p99")
        found += [measure(f"{tier}.{name}", limits.get(name)) for name in names]
        found.append(measure(f"{tier}.goodput"))
    return [*found, measure("gpu_hours")]
