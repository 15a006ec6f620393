"""Which of several configurations is better on the same traffic: paired seeds, corrected intervals, a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twin.errors import InputError
from twin.scenario import Scenario
from twin.whatif.figures import Figures, Measure, judged, measure
from twin.whatif.runs import Backend, Run, Task, run_all
from twin.whatif.statistics import paired
from twin.whatif.verdict import Judged, conclude, judge, means

SEEDS = 20
"""Replications of each configuration that is not told otherwise. benchmarks/what_if_honesty.py shows what they find."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration."""

    name: str
    scenario: Scenario


Progress = Callable[[int, int], None]
"""(runs made, runs in all)"""


def compare(
    variants: Sequence[Variant],
    seeds: int = SEEDS,
    backend: Backend | None = None,
    progress: Progress | None = None,
    figures: Sequence[str] = (),
) -> dict[str, Any]:
    """Run every variant under the same `seeds` seeds and hold each against the first.

    The seeds are those from run.seed of the first variant upwards, the same for all, so that they meet the same
    arrivals, lengths and faults. `figures` are judged beside the objectives. Raises InputError for fewer than two
    variants or seeds, for a figure that does not exist, and where a variant cannot run; Interrupted after Ctrl-C.
    """
    if len(variants) < 2:
        raise InputError(
            "a comparison needs two configurations; name another scenario, or give --set"
        )
    if seeds < 2:
        raise InputError(
            f"--seeds must be >= 2, got {seeds}: from one run nobody can tell chance from difference"
        )
    first = variants[0].scenario.run.seed
    tasks = [
        Task(i * seeds + k, variant.scenario.to_dict(), (), first + k)
        for i, variant in enumerate(variants)
        for k in range(seeds)
    ]
    rows: list[Figures | None] = [None] * len(tasks)
    for made, run in enumerate(run_all(tasks, backend or Backend(1)), 1):
        rows[run.number] = _figures(run, variants[run.number // seeds])
        if progress is not None:
            progress(made, len(tasks))
    by_variant = [
        [row for row in rows[i * seeds : (i + 1) * seeds] if row is not None]
        for i in range(len(variants))
    ]
    measures = measures_of(variants, figures)
    return {
        "seeds": [first + k for k in range(seeds)],
        "replications": "seeds",
        **judge_all([variant.name for variant in variants], by_variant, measures),
    }


def _figures(run: Run, variant: Variant) -> Figures:
    if run.figures is None:
        raise InputError(f"{variant.name}: {run.error}")
    return run.figures


def measures_of(variants: Sequence[Variant], figures: Sequence[str] = ()) -> list[Measure]:
    """What is judged: the objectives of the first variant that has any, and `figures`."""
    tiers = list(dict.fromkeys(tier for variant in variants for tier in variant.scenario.tiers))
    having = next((v.scenario for v in variants if v.scenario.objectives), variants[0].scenario)
    wanted = {m.name: m for m in judged(having.objectives, tiers)}
    for name in figures:
        wanted.setdefault(name, measure(name))
    return list(wanted.values())


def judge_all(
    names: Sequence[str], rows: Sequence[Sequence[Figures]], measures: Sequence[Measure]
) -> dict[str, Any]:
    """The comparison of replications that share their seeds: rows[i][k] are the figures of variant i under seed k."""
    measures = [
        m for m in measures if any(row.get(m.name) is not None for side in rows for row in side)
    ]
    family = len(measures) * (len(names) - 1)
    before = rows[0]
    told: list[dict[str, Any]] = []
    for name, after in zip(names[1:], rows[1:], strict=True):
        found = judge(
            measures,
            lambda figure, level, after=after: paired(  # type: ignore[misc]
                [row.get(figure) for row in before], [row.get(figure) for row in after], level
            ),
            family,
        )
        told.append(tell(name, found, after))
    is_fixed = len(before) > 1 and all(row == before[0] for row in before)
    note = (
        "The seed changes nothing in this scenario: the figures are exact for this traffic and say nothing of other."
        if is_fixed
        else ""
    )
    return {
        "baseline": {"name": names[0], "figures": means(before, before[0])},
        "judged": family,
        "note": note,
        "variants": told,
    }


def tell(
    name: str, found: Sequence[Judged], after: Sequence[Figures], replications: str = "seeds"
) -> dict[str, Any]:
    """One variant's part of a comparison."""
    verdict = conclude(name, found, replications)
    return {
        "name": name,
        "verdict": verdict.word,
        "text": verdict.text,
        "judged": [j.to_dict() for j in found],
        "figures": means(after, after[0]) if after else {},
    }


def objectives_missed(comparison: Mapping[str, Any]) -> list[str]:
    """`name: objective` of every objective that a variant (the baseline is not one) misses on average."""
    return [
        f"{variant['name']}: {row['label']}"
        for variant in comparison["variants"]
        for row in variant["judged"]
        if row["met"] is False
    ]
