"""Which of several configurations is better on the same traffic: paired seeds, corrected intervals, a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twin.errors import InputError
from twin.interrupt import stop_on_ctrl_c
from twin.metrics.objectives import Objectives
from twin.report.texts import limit as limit_text
from twin.scenario import Scenario
from twin.whatif.asked import check_figures, within_reach
from twin.whatif.figures import Figures, Measure, is_lost, judged, mean_figures, measure
from twin.whatif.runs import Backend, Interrupted, Run, Task, run_all
from twin.whatif.sides import Side, side_of
from twin.whatif.statistics import paired
from twin.whatif.verdict import Judged, conclude, judge, value_text

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
    arrivals, lengths and faults. All are judged by the objectives of the first that has any; one with other objectives
    of its own is held to those as well. `figures` are judged beside the objectives. Raises InputError for fewer than
    two variants or seeds, for a figure that does not exist, and where a variant cannot run; Interrupted after Ctrl-C.
    """
    if len(variants) < 2:
        raise InputError(
            "a comparison needs two configurations; name another scenario, or give --set"
        )
    if seeds < 2:
        raise InputError(
            f"--seeds must be >= 2, got {seeds}: from one run nobody can tell chance from difference"
        )
    check_figures(figures, [variant.scenario for variant in variants])
    first = variants[0].scenario.run.seed
    whose = next((v for v in variants if v.scenario.objectives), variants[0])
    common = whose.scenario.objectives
    documents = [
        variant.scenario.to_dict() | {"objectives": within_reach(common, variant.scenario)}
        for variant in variants
    ]
    tasks = [
        Task(i * seeds + k, documents[i], (), first + k)
        for i in range(len(variants))
        for k in range(seeds)
    ]
    rows: list[Figures | None] = [None] * len(tasks)
    with stop_on_ctrl_c(at_once=True) as pressed:
        for made, run in enumerate(run_all(tasks, backend or Backend(1)), 1):
            rows[run.number] = _figures(run, variants[run.number // seeds])
            if progress is not None:
                progress(made, len(tasks))
            if pressed:
                raise Interrupted
    by_variant = [
        [row for row in rows[i * seeds : (i + 1) * seeds] if row is not None]
        for i in range(len(variants))
    ]
    measures = measures_of(variants, figures)
    return {
        "seeds": [first + k for k in range(seeds)],
        "replications": "seeds",
        "objectives": {"of": whose.name, "limits": common},
        **judge_all(
            [variant.name for variant in variants],
            by_variant,
            measures,
            [own_measures(variant.scenario.objectives, common) for variant in variants],
            figures,
        ),
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


def own_measures(own: Objectives, common: Objectives) -> list[Measure]:
    """The objectives of one side that the common ones do not hold it to, or hold it to with another limit."""
    return [
        measure(f"{tier}.{name}", limit)
        for tier, limits in own.items()
        for name, limit in limits.items()
        if common.get(tier, {}).get(name) != limit
    ]


def judge_all(
    names: Sequence[str],
    rows: Sequence[Sequence[Figures]],
    measures: Sequence[Measure],
    own: Sequence[Sequence[Measure]] = (),
    asked: Sequence[str] = (),
) -> dict[str, Any]:
    """The comparison of replications that share their seeds: rows[i][k] are the figures of variant i under seed k.

    `own[i]` are objectives that variant i is held to besides. What is in `asked` is told even where it has no value.
    """
    measures = [
        m
        for m in measures
        if m.name in asked
        or any(row.get(m.name) is not None or is_lost(row, m.name) for side in rows for row in side)
    ]
    family = len(measures) * (len(names) - 1)
    before = rows[0]
    told: list[dict[str, Any]] = []
    for i, (name, after) in enumerate(zip(names[1:], rows[1:], strict=True), 1):
        found = judge(
            measures,
            lambda figure, level, after=after: paired(  # type: ignore[misc]
                [row.get(figure) for row in before], [row.get(figure) for row in after], level
            ),
            family,
            before,
            after,
        )
        told.append(tell(name, found, after, own=own[i] if own else ()))
    is_fixed = len(before) > 1 and all(row == before[0] for row in before)
    note = (
        "The seed changes nothing in this scenario: the figures are exact for this traffic and say nothing of other."
        if is_fixed
        else ""
    )
    return {
        "baseline": {"name": names[0], "figures": mean_figures(before)},
        "judged": family,
        "note": note,
        "variants": told,
    }


def tell(
    name: str,
    found: Sequence[Judged],
    after: Sequence[Figures],
    replications: str = "seeds",
    own: Sequence[Measure] = (),
) -> dict[str, Any]:
    """One variant's part of a comparison; `own` are objectives of its own that the others are not judged by."""
    verdict = conclude(name, found, replications)
    held = [_held(m, side_of(after, m.name)) for m in own]
    text = verdict.text
    if held:
        missed = [of["text"] for of in held if of["met"] is False]
        text += f"; of its own objectives it misses {', '.join(missed)}" if missed else (
            "; it keeps its own objectives" if any(of["met"] for of in held) else ""
        )  # fmt: skip
    return {
        "name": name,
        "verdict": verdict.word,
        "text": text,
        "judged": [j.to_dict() for j in found],
        "own_objectives": held,
        "figures": mean_figures(after),
    }


def _held(of: Measure, side: Side) -> dict[str, Any]:
    """An objective that one side alone is held to."""
    value = "no request is served" if side.lost else value_text(side.value, of.unit)
    return {
        "figure": of.name,
        "label": of.label,
        "limit": of.limit,
        "value": side.value,
        "lost": side.lost,
        "met": side.met(of.limit),
        "text": f"{of.label} <= {limit_text(of.limit or 0.0)} ({value})",
    }


def objectives_missed(comparison: Mapping[str, Any]) -> list[str]:
    """`name: objective` of every objective that a variant (the baseline is not one) misses on average.

    These are the objectives that all are judged by, and those that are a variant's own.
    """
    missed: list[str] = []
    for variant in comparison["variants"]:
        name, own = variant["name"], variant["own_objectives"]
        missed += [f"{name}: {row['label']}" for row in variant["judged"] if row["met"] is False]
        missed += [f"{name}: its own {of['text']}" for of in own if of["met"] is False]
    return missed


def objectives_judged(comparison: Mapping[str, Any]) -> bool:
    """Whether any objective of any variant had something to judge."""
    return any(
        row["met"] is not None
        for variant in comparison["variants"]
        for row in (*variant["judged"], *variant["own_objectives"])
    )
