"""Measured runs held against each other: their requests in blocks of time, so that no request is taken for independent.

One run a side: requests are cut into blocks that follow each other in time, and how much a figure changes when
other blocks are drawn (bootstrap) says how uncertain it is. Where both runs played the same traffic, the same blocks
are drawn of both. Several runs a side: each run is one value, and nothing is drawn.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import t as student

from twin.errors import InputError
from twin.metrics.objectives import Objectives, parse_objective
from twin.metrics.records import OUTCOMES
from twin.whatif.compare import own_measures, tell
from twin.whatif.figures import (
    ALL,
    SATURATED_GROWTH,
    Figures,
    Measure,
    mean_figures,
    measure,
    queue_growth,
)
from twin.whatif.statistics import Difference, unpaired
from twin.whatif.verdict import judge

if TYPE_CHECKING:
    from twin.whatif.measured_runs import MeasuredRun

BLOCKS = 30
LEAST_BLOCKS = 8
PER_BLOCK = 20
"""Requests in a block at least; shorter runs have fewer blocks."""
DRAWS = 1000
SHARES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}


def compare_measured(
    runs: Sequence[tuple[str, Sequence["MeasuredRun"]]],
    limits: Objectives,
    figures: Sequence[str] = (),
) -> dict[str, Any]:
    """Hold every side against the first.

    All are judged by `limits`, else by the objectives found beside the first run that has any; a side with others
    beside its runs is held to those as well. Raises InputError for a figure that measured requests do not give, and
    for runs that are too short to judge.
    """
    first = runs[0][1]
    whose = "--objectives"
    if not limits:
        whose, side = next(((n, s) for n, s in runs if s[0].objectives), runs[0])
        limits = side[0].objectives
    own = [own_measures(side[0].objectives, limits) for _, side in runs]
    if whose == "--objectives":
        own = [[] for _ in runs]
    for objectives in (limits, *(side[0].objectives for _, side in runs)):
        for tier, of in objectives.items():
            for name in of:
                _check_told(f"objective {tier}.{name}", name)
    measures = _measures(limits, runs, figures)
    family = len(measures) * (len(runs) - 1)
    values = [
        [_figures(run, [*measures, *mine], limits) for run in side]
        for (_, side), mine in zip(runs, own, strict=True)
    ]
    told = []
    ways = []
    for (name, side), rows, mine in zip(runs[1:], values[1:], own[1:], strict=True):
        differ, way = _differ(first, side, values[0], rows, limits)
        ways.append(way)
        found = judge(measures, differ, family, values[0], rows)
        told.append(tell(name, found, rows, "or longer runs", mine))
    how = f"Intervals of {family} figures that hold together with 98 %: {'; '.join(dict.fromkeys(ways))}."
    return {
        "seeds": [],
        "replications": "measured runs",
        "how": how,
        "objectives": {"of": whose, "limits": limits},
        "baseline": {"name": runs[0][0], "figures": mean_figures(values[0])},
        "judged": family,
        "note": "",
        "variants": told,
    }


def _measures(
    limits: Objectives, runs: Sequence[tuple[str, Sequence["MeasuredRun"]]], figures: Sequence[str]
) -> list[Measure]:
    tiers = sorted({str(tier) for _, side in runs for run in side for tier in run.tiers})
    if any(limits.values()) and not any(limits.get(tier) for tier in tiers):
        raise InputError(
            f"objectives of {', '.join(limits)}: no request is of such a tier; there are {', '.join(tiers)}"
        )
    found: dict[str, Measure] = {}
    for tier in tiers:
        of = limits.get(tier, {})
        names = of if any(limits.values()) else ("ttft_p99", "tpot_p99")
        for name in names:
            found[f"{tier}.{name}"] = measure(f"{tier}.{name}", of.get(name))
        found[f"{tier}.goodput"] = measure(f"{tier}.goodput")
    for name in figures:
        asked, (tier, dot, rest) = measure(name), name.rpartition(".")
        if not dot or rest in OUTCOMES or tier.startswith("met."):
            raise InputError(
                f"--figure {name}: measured requests tell latencies, goodput and attainment of a tier"
            )
        if tier not in (*tiers, ALL):
            raise InputError(
                f"--figure {name}: no request is of tier {tier}; there are {', '.join(tiers)}"
            )
        if rest not in ("goodput", "attainment"):
            _check_told(f"--figure {name}", rest)
        found.setdefault(name, asked)
    return list(found.values())


def _check_told(place: str, name: str) -> None:
    """Gaps between tokens are not in a table of requests."""
    if parse_objective(name)[0] == "itl":
        raise InputError(
            f"{place}: gaps between tokens are not compared of measured runs; take tpot"
        )


def _good(run: "MeasuredRun", limits: Objectives) -> Any:
    """Which requests completed within every limit of their tier."""
    good = run.completed.copy()
    for tier, of in limits.items():
        for name, limit in of.items():
            values = run.durations[parse_objective(name)[0]]
            with np.errstate(invalid="ignore"):
                good &= (run.tiers != tier) | ~(values > limit)
    return good


def _statistic(run: "MeasuredRun", name: str, limits: Objectives) -> Callable[[Any], float]:
    """The figure of the requests at given positions; NaN without any. Positions may repeat."""
    tier, _, rest = name.rpartition(".")
    mine = np.ones(len(run.tiers), dtype=bool) if tier == ALL else run.tiers == tier
    if rest in ("goodput", "attainment"):
        good = (_good(run, limits) & mine).astype(float)
        if rest == "attainment":
            return lambda at: float(good[at].sum() / max(1, mine[at].sum()))
        order = np.sort(run.arrival_s)
        span = (order[-1] - order[0]) or math.nan
        rate = len(order) / span
        # Each request stands for the mean gap between arrivals, so that blocks drawn twice count twice.
        return lambda at: float(good[at].sum() / len(at) * rate)
    latency, stat = parse_objective(rest)
    values = np.where(mine, run.durations[latency], np.nan)

    def of(at: Any) -> float:
        known = values[at]
        known = known[~np.isnan(known)]
        if not len(known):
            return math.nan
        return float(known.mean() if stat == "mean" else np.percentile(known, SHARES[stat]))

    return of


def _figures(run: "MeasuredRun", measures: Sequence[Measure], limits: Objectives) -> Figures:
    everything = np.arange(len(run.tiers))
    found: Figures = {}
    for tier in (ALL, *sorted(set(map(str, run.tiers)))):
        mine = np.ones(len(run.tiers), dtype=bool) if tier == ALL else run.tiers == tier
        found[f"{tier}.offered"] = float(mine.sum())
        found[f"{tier}.completed"] = float((mine & run.completed).sum())
    for m in measures:
        value = _statistic(run, m.name, limits)(everything)
        found[m.name] = None if math.isnan(value) else value
    return found


def _differ(
    before: Sequence["MeasuredRun"],
    after: Sequence["MeasuredRun"],
    rows_before: Sequence[Figures],
    rows_after: Sequence[Figures],
    limits: Objectives,
) -> tuple[Callable[[str, float], Difference | None], str]:
    """How two sides are held against each other, and that in words."""
    if min(len(before), len(after)) >= 2:
        way = f"{len(before)} and {len(after)} runs, each one value"
        return lambda name, level: unpaired(
            [row[name] for row in rows_before], [row[name] for row in rows_after], level
        ), way
    a, b = before[0], after[0]
    is_same = _is_same_traffic(a, b)
    cuts = [_blocks(a), _blocks(b)]
    many = min(map(len, cuts))
    if many < LEAST_BLOCKS:
        fewest = min(len(a.tiers), len(b.tiers))
        raise InputError(
            f"a run of {fewest} requests is too short to tell chance from difference; measure at least "
            f"{LEAST_BLOCKS * PER_BLOCK}, or give several runs a side (a folder of run folders)"
        )
    cuts = [
        cut[:many] if len(cut) == many else _blocks(run, many)
        for cut, run in zip(cuts, (a, b), strict=True)
    ]
    if not is_same and (_grows(a) or _grows(b)):
        # Where a queue grows all the time, a whole run is one draw of chance.
        return lambda name, level: None, (
            "the queue grows throughout a run and the traffic differs, so that one run a side tells nothing: measure "
            "several runs a side, or the same traffic"
        )
    way = f"one run a side, {many} blocks of time, drawn {'together' if is_same else 'apart: the traffic differs'}"
    return lambda name, level: _bootstrap(a, b, cuts, is_same, name, limits, level), way


def _is_same_traffic(a: "MeasuredRun", b: "MeasuredRun") -> bool:
    """Whether both played the same requests at the same instants from their start, but for a few milliseconds."""
    if len(a.tiers) != len(b.tiers):
        return False
    shift = (a.arrival_s - a.arrival_s.min()) - (b.arrival_s - b.arrival_s.min())
    return bool(
        (a.tiers == b.tiers).all()
        and (a.prompt_tokens == b.prompt_tokens).all()
        and np.abs(shift).max() <= SAME_INSTANT_S
    )


SAME_INSTANT_S = 0.01


def _grows(run: "MeasuredRun") -> bool:
    end = np.nanmax([run.finish_s, run.arrival_s])
    gone = np.where(np.isnan(run.finish_s), end, run.finish_s)
    started = run.arrival_s + run.durations["queue"]
    started = np.where(np.isnan(started), gone, started)
    return queue_growth(run.arrival_s, started, gone) > SATURATED_GROWTH


def _blocks(run: "MeasuredRun", many: int | None = None) -> list[Any]:
    """Positions of the requests, in blocks that follow each other in time."""
    order = np.argsort(run.arrival_s, kind="stable")
    return np.array_split(order, many or max(1, min(BLOCKS, len(order) // PER_BLOCK)))


def _bootstrap(
    a: "MeasuredRun",
    b: "MeasuredRun",
    cuts: Sequence[Sequence[Any]],
    is_same: bool,
    name: str,
    limits: Objectives,
    level: float,
) -> Difference | None:
    of_a, of_b = _statistic(a, name, limits), _statistic(b, name, limits)
    x, y = of_a(np.concatenate(cuts[0])), of_b(np.concatenate(cuts[1]))
    if math.isnan(x) or math.isnan(y):
        return None
    many = len(cuts[0])
    chance = np.random.default_rng(20260101)  # the same files give the same intervals
    is_relative = x > 0 and y > 0
    gaps = []
    for _ in range(DRAWS):
        at = chance.integers(many, size=many)
        other = at if is_same else chance.integers(many, size=many)
        u = of_a(np.concatenate([cuts[0][i] for i in at]))
        v = of_b(np.concatenate([cuts[1][i] for i in other]))
        if is_relative and u > 0 and v > 0:
            gaps.append(math.log(v / u))
        elif not is_relative and not (math.isnan(u) or math.isnan(v)):
            gaps.append(v - u)
    if len(gaps) < DRAWS // 2:
        return None
    change = math.log(y / x) if is_relative else y - x
    half = float(np.std(gaps, ddof=1)) * float(student.ppf(0.5 + level / 2, many - 1))
    ends = (change, change - half, change + half)
    if is_relative:
        ends = tuple(math.expm1(min(end, 700.0)) for end in ends)  # type: ignore[assignment]
    return Difference(x, y, *ends, is_relative, many)
