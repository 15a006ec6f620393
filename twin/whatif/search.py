"""Two questions with one answer each: how few GPUs meet the objectives, and how much more traffic they bear."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twin.errors import InputError
from twin.report.texts import plural
from twin.scenario import Scenario, load_scenario, traffic_presets
from twin.whatif.axes import Axis, check_keys, grid, override, overrides_of, text_of
from twin.whatif.figures import Figures, Measure, excess, mean_figures, mean_of, measure
from twin.whatif.runs import Backend, Task, run_all
from twin.whatif.traffic_scale import scaled
from twin.whatif.verdict import over_text

SEEDS = 3
MOST_REPLICAS = 1024
LARGEST_FACTOR = 1024.0
PRECISION = 0.01
"""Of the factor of traffic, as a share."""


@dataclass(frozen=True, slots=True)
class Look:
    """One configuration that was tried: means over the seeds of the objectives."""

    values: tuple[float | None, ...]
    broken: tuple[str, ...]
    """`ONLINE TTFT p99 1.4 s > 1 s`, of each objective that is missed."""
    error: str | None
    """Why it could not run."""
    figures: Figures

    @property
    def is_good(self) -> bool:
        """Whether every objective is met."""
        return not self.broken and self.error is None


Told = Callable[[str], None]
"""Hears of each configuration that was tried."""


def objectives_of(scenario: Scenario) -> list[Measure]:
    """What must be kept. Raises InputError for a scenario without objectives."""
    found = [
        measure(f"{tier}.{name}", limit)
        for tier, limits in scenario.objectives.items()
        for name, limit in limits.items()
    ]
    if not found:
        raise InputError(
            "the scenario has no objectives, so that nothing says what is enough; write e.g. "
            "objectives: {ONLINE: {ttft_p99: 1.0}}"
        )
    return found


def look(
    document: Mapping[str, Any],
    overrides: Sequence[str],
    seeds: Sequence[int],
    measures: Sequence[Measure],
    backend: Backend,
) -> Look:
    """Run one configuration under every seed."""
    tasks = [Task(i, document, tuple(overrides), seed) for i, seed in enumerate(seeds)]
    rows: list[Figures] = []
    for run in run_all(tasks, backend):
        if run.figures is None:
            return Look((), (), run.error, {})
        rows.append(run.figures)
    means = mean_figures(rows)
    values = tuple(means.get(m.name) for m in measures)
    return Look(values, broken_of(measures, rows), None, means)


def broken_of(measures: Sequence[Measure], rows: Sequence[Figures]) -> tuple[str, ...]:
    """The objectives that are missed on average over replications, with value and limit."""
    return tuple(over_text(m, mean_of(rows, m.name)) for m in measures if excess(rows, m) > 0)


def fewest_gpus(
    scenario: Scenario,
    axes: Sequence[Axis] = (),
    seeds: int = SEEDS,
    most: int = MOST_REPLICAS,
    backend: Backend | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """The least number of replicas that meets every objective, for each combination of other values; the best of all.

    More replicas are taken to be no worse; that the answer meets the objectives and that one replica fewer does not is
    run, not assumed. Raises InputError without objectives, for replicas that an autoscaler counts, and if no count up
    to `most` suffices.
    """
    if scenario.cluster.fleet is not None:
        raise InputError(
            "replicas come and go in this scenario; how few GPUs it needs is gpu_hours in twin optimize. For fixed "
            "replicas leave hpa, keda and the like out"
        )
    check_keys(axes)
    if any(axis.key == "cluster.replicas" for axis in axes):
        raise InputError("--vary cluster.replicas: is what is searched for; leave it out")
    measures, where = objectives_of(scenario), backend or Backend(1)
    first = scenario.run.seed
    document = scenario.to_dict()
    found = []
    for point in grid(axes):
        changes = overrides_of(axes, point)

        def at(replicas: int, changes: tuple[str, ...] = changes) -> Look:
            these = (*changes, override("cluster.replicas", replicas))
            tried = look(document, these, [first + k for k in range(seeds)], measures, where)
            if told is not None:
                state = "meets all" if tried.is_good else tried.error or "; ".join(tried.broken)
                told(
                    f"{', '.join(changes) + ', ' if changes else ''}{plural(replicas, 'replica')}: {state}"
                )
            return tried

        found.append((point, *_least(at, most)))
    rows: list[dict[str, Any]] = []
    for point, replicas, good, below in found:
        each = _gpus_each(document, overrides_of(axes, point), scenario)
        rows.append(
            {
                "values": dict(zip((axis.key for axis in axes), point, strict=True)),
                "replicas": replicas,
                "gpus": None if replicas is None else replicas * each,
                "fewer_breaks": list(below.broken)
                or ([below.error] if below and below.error else []),
                "figures": good.figures if good else {},
            }
        )
    enough = [row for row in rows if row["gpus"] is not None]
    if not enough:
        raise InputError(
            f"no number of replicas up to {most} meets the objectives: {'; '.join(rows[0]['fewer_breaks'])}; "
            "a slower tier, another policy (--vary policy=...) or a looser objective is needed"
        )
    best = min(enough, key=lambda row: row["gpus"])
    return {"best": best, "rows": rows, "text": _fewest_text(best), "seeds": seeds}


def _gpus_each(document: Mapping[str, Any], changes: Sequence[str], scenario: Scenario) -> int:
    if not changes:
        return scenario.hardware.tensor_parallel_size
    return load_scenario(document, changes).hardware.tensor_parallel_size


def _least(at: Callable[[int], Look], most: int) -> tuple[int | None, Look | None, Look]:
    """(the least count that is good, what it gave, what one less gave); None where none up to `most` is."""
    low, high = 0, 1
    nothing = Look((), (), None, {})
    below = nothing
    good = at(high)
    while not good.is_good:
        if good.error is not None or high >= most:
            return None, None, good
        low, below, high = high, good, min(2 * high, most)
        good = at(high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = at(middle)
        if tried.is_good:
            high, good = middle, tried
        else:
            low, below = middle, tried
    return high, good, below


def _fewest_text(best: Mapping[str, Any]) -> str:
    values = ", ".join(f"{key} {text_of(value)}" for key, value in best["values"].items())
    text = f"{plural(best['gpus'], 'GPU')} ({plural(best['replicas'], 'replica')}) meet every objective"
    text += f" with {values}." if values else "."
    if best["fewer_breaks"]:
        text += f" One replica fewer breaks {'; '.join(best['fewer_breaks'])}."
    return text


def headroom(
    scenario: Scenario,
    seeds: int = SEEDS,
    backend: Backend | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """How many times the present traffic the objectives bear, to 1 %; below 1 where they are missed already.

    Raises InputError without objectives.
    """
    measures, where = objectives_of(scenario), backend or Backend(1)
    first, document = scenario.run.seed, scenario.to_dict()
    presets = traffic_presets()

    def rate_of(name: str) -> float | None:
        return presets[name].rate

    def at(factor: float) -> Look:
        more = scaled(document, factor, rate_of)
        tried = look(more, (), [first + k for k in range(seeds)], measures, where)
        if tried.error is not None:
            raise InputError(f"with {factor:.3g} times the traffic: {tried.error}")
        if told is not None:
            told(f"{factor:.3g} times: {'meets all' if tried.is_good else '; '.join(tried.broken)}")
        return tried

    now = at(1.0)
    good = bad = (1.0, now)
    factor = 1.0
    # Twice as much, or half, until it turns.
    while good[1].is_good == bad[1].is_good:
        factor = factor * 2 if now.is_good else factor / 2
        if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
            break
        tried = at(factor)
        if tried.is_good == now.is_good:
            good = bad = (factor, tried)
        elif tried.is_good:
            good = (factor, tried)
        else:
            bad = (factor, tried)
    while good[1].is_good and not bad[1].is_good and bad[0] / good[0] > 1 + PRECISION:
        middle = math.sqrt(bad[0] * good[0])
        tried = at(middle)
        if tried.is_good:
            good = (middle, tried)
        else:
            bad = (middle, tried)
    return _headroom_data(good, bad, now, seeds)


def _headroom_data(
    good: tuple[float, Look], bad: tuple[float, Look], now: Look, seeds: int
) -> dict[str, Any]:
    never = bad[1].is_good
    always = not good[1].is_good
    rate = None if always else good[1].figures.get("requests_per_s")
    at = f" ({rate:.3g} requests/s)" if rate is not None else ""
    if never:
        text = f"More than {good[0]:.0f} times the traffic breaks no objective."
    elif always:
        text = f"Even a {1 / bad[0]:.0f}th of the traffic breaks {'; '.join(bad[1].broken)}: load is not the cause."
    elif now.is_good:
        text = (
            f"{good[0]:.2f} times the traffic{at} is borne, {100 * (good[0] - 1):.0f} % more than now; at "
            f"{bad[0]:.2f} times {'; '.join(bad[1].broken)}."
        )
    else:
        text = (
            f"No headroom: {'; '.join(now.broken)} now. The objectives hold up to {good[0]:.2f} times the "
            f"traffic{at}."
        )
    return {
        "factor": None if always else good[0],
        "breaks_at": None if never else bad[0],
        "broken": list(bad[1].broken),
        "requests_per_s": rate,
        "now_meets": now.is_good,
        "text": text,
        "seeds": seeds,
    }
