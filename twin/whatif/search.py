"""How few GPUs meet the objectives: a question with one answer, confirmed under seeds that the search has not seen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twin.errors import InputError
from twin.report.texts import plural
from twin.scenario import Scenario, load_scenario
from twin.whatif.asked import check_varied
from twin.whatif.axes import Axis, check_keys, grid, override, overrides_of, text_of
from twin.whatif.figures import Figures, Measure, excess, mean_figures, mean_of, measure
from twin.whatif.runs import Backend, Task, run_all
from twin.whatif.verdict import over_text

SEEDS = 3
MOST_REPLICAS = 1024
FRESH_SEEDS = 5
"""Under which an answer is confirmed."""
MOST_FRESH = 12
"""Answers that are tried under fresh seeds at most."""


class NotMet(InputError):
    """Nothing that was tried meets the objectives."""


@dataclass(frozen=True, slots=True)
class Look:
    """One configuration that was tried: means over the seeds of the objectives."""

    values: tuple[float | None, ...]
    broken: tuple[str, ...]
    """`ONLINE TTFT p99 1.4 s > 1 s`, of each objective that is missed."""
    error: str | None
    """Why it could not run."""
    figures: Figures
    by_seed: tuple[bool, ...] = ()
    """Whether every objective is met under each seed alone."""

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
    rows: list[Figures] = [{}] * len(tasks)
    for run in run_all(tasks, backend):
        if run.figures is None:
            return Look((), (), run.error, {})
        rows[run.number] = run.figures
    means = mean_figures(rows)
    values = tuple(means.get(m.name) for m in measures)
    by_seed = tuple(not broken_of(measures, [row]) for row in rows)
    return Look(values, broken_of(measures, rows), None, means, by_seed)


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
    run, not assumed. An answer that breaks an objective under fresh seeds is not given: one replica more is tried.
    Raises InputError without objectives and for replicas that an autoscaler counts, NotMet if no count up to `most`
    suffices.
    """
    if scenario.cluster.fleet is not None:
        raise InputError(
            "replicas come and go in this scenario; how few GPUs it needs is gpu_hours in twin optimize. For fixed "
            "replicas leave hpa, keda and the like out"
        )
    check_keys(axes)
    check_varied(axis.key for axis in axes)
    if any(axis.key == "cluster.replicas" for axis in axes):
        raise InputError("--vary cluster.replicas: is what is searched for; leave it out")
    measures, where = objectives_of(scenario), backend or Backend(1)
    first = scenario.run.seed
    document = scenario.to_dict()
    found, looks = [], []
    for point in grid(axes):
        changes = overrides_of(axes, point)

        def at(
            replicas: int,
            changes: tuple[str, ...] = changes,
            under: Sequence[int] = tuple(first + k for k in range(seeds)),
            words: str = "",
        ) -> Look:
            these = (*changes, override("cluster.replicas", replicas))
            tried = look(document, these, under, measures, where)
            if told is not None:
                state = "meets all" if tried.is_good else tried.error or "; ".join(tried.broken)
                before = f"{', '.join(changes)}, " if changes else ""
                told(f"{before}{plural(replicas, 'replica')}{words}: {state}")
            return tried

        looks.append(at)
        found.append((point, *_least(at, most)))
    rows: list[dict[str, Any]] = []
    for point, replicas, good, below in found:
        each = _gpus_each(document, overrides_of(axes, point), scenario)
        rows.append(
            {
                "values": dict(zip((axis.key for axis in axes), point, strict=True)),
                "replicas": replicas,
                "gpus": None if replicas is None else replicas * each,
                "gpus_each": each,
                "fewer_breaks": list(below.broken)
                or ([below.error] if below and below.error else []),
                "figures": good.figures if good else {},
                "confirmed": None,
                "fresh_broke": [],
            }
        )
    if not any(row["gpus"] for row in rows):
        raise NotMet(
            f"no number of replicas up to {most} meets the objectives: {'; '.join(rows[0]['fewer_breaks'])}; "
            "a slower tier, another policy (--vary policy=...) or a looser objective is needed"
        )
    fresh = tuple(first + seeds + k for k in range(FRESH_SEEDS))
    best = _confirmed(rows, looks, fresh, most)
    return {
        "best": best,
        "rows": rows,
        "text": _fewest_text(best, len(fresh)),
        "seeds": seeds,
        "fresh_seeds": list(fresh),
    }


def _confirmed(
    rows: list[dict[str, Any]],
    looks: Sequence[Callable[..., Look]],
    fresh: Sequence[int],
    most: int,
) -> dict[str, Any]:
    """The row with the fewest GPUs that keeps the objectives under fresh seeds, too; where it does not, one more."""
    for _ in range(MOST_FRESH):
        enough = [i for i, row in enumerate(rows) if row["gpus"] is not None]
        if not enough:
            break
        i = min(enough, key=lambda i: rows[i]["gpus"])
        row = rows[i]
        tried = looks[i](row["replicas"], under=fresh, words=" under fresh seeds")
        row["confirmed"] = tried.is_good
        if tried.is_good:
            return row
        row["fresh_broke"].append(
            {"replicas": row["replicas"], "broken": list(tried.broken) or [str(tried.error)]}
        )
        if row["replicas"] >= most:
            row["gpus"] = None
        else:
            row["replicas"] += 1
            row["gpus"] += row["gpus_each"]
            row["figures"] = {}
    broke = next(row["fresh_broke"][-1] for row in rows if row["fresh_broke"])
    raise NotMet(
        f"what met the objectives under the seeds of the search broke them under fresh ones, "
        f"{plural(broke['replicas'], 'replica')} among them: {'; '.join(broke['broken'])}; more --seeds tell more"
    )


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


def _fewest_text(best: Mapping[str, Any], fresh: int) -> str:
    values = ", ".join(f"{key} {text_of(value)}" for key, value in best["values"].items())
    verb = "meets" if best["gpus"] == 1 else "meet"
    text = f"{plural(best['gpus'], 'GPU')} ({plural(best['replicas'], 'replica')}) {verb} every objective"
    text += f" with {values}" if values else ""
    text += f", under {fresh} fresh seeds, too."
    for broke in best["fresh_broke"]:
        text += (
            f" {plural(broke['replicas'], 'replica')} met them in the search, and broke {'; '.join(broke['broken'])} "
            "under the fresh seeds."
        )
    if best["fewer_breaks"] and not best["fresh_broke"]:
        text += f" One replica fewer breaks {'; '.join(best['fewer_breaks'])}."
    return text
