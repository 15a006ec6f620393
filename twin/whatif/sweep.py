"""Many configurations at once: every combination of values under every seed, kept as it goes, resumed later."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from twin.errors import InputError
from twin.interrupt import stop_on_ctrl_c
from twin.scenario import Scenario, load_scenario
from twin.whatif.asked import check_varied
from twin.whatif.axes import Axis, check_keys, grid, is_load, overrides_of, text_of
from twin.whatif.figures import Figures, is_lost, is_saturated, mean_of
from twin.whatif.runs import Backend, Interrupted, Run, Task, run_all

MOST_RUNS = 200_000
"""Of one sweep: the figures of each take 10 kB of memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep runs."""

    scenario: Scenario
    axes: tuple[Axis, ...]
    points: tuple[tuple[Any, ...], ...]
    seeds: tuple[int, ...]
    basis: Mapping[str, str] = field(default_factory=dict)
    """What the figures rest on besides: contents of files, version of the twin."""

    @property
    def size(self) -> int:
        """Runs in all."""
        return len(self.points) * len(self.seeds)

    def task(self, number: int) -> Task:
        """Run `number`: its point is number // seeds."""
        point, seed = divmod(number, len(self.seeds))
        document = self.scenario.to_dict()
        return Task(number, document, overrides_of(self.axes, self.points[point]), self.seeds[seed])

    def to_dict(self) -> dict[str, Any]:
        """All that the rows depend on, to know the sweep again by."""
        return {
            "scenario": self.scenario.to_dict(),
            "axes": [{"key": axis.key, "values": list(axis.values)} for axis in self.axes],
            "seeds": list(self.seeds),
            "basis": dict(self.basis),
        }

    def mark(self) -> str:
        """Twelve hex digits that differ where the plan does."""
        text = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def plan(
    scenario: Scenario, axes: Sequence[Axis], seeds: int, basis: Mapping[str, str] | None = None
) -> Plan:
    """Every combination under the seeds from run.seed upwards.

    Every point is loaded once, so that a key that does not exist is told at once; points that cannot run are not an
    error unless none can. Raises InputError for that, for no axis, and for a key that is varied twice.
    """
    if not axes:
        raise InputError("--vary is missing: say which key takes which values")
    check_keys(axes)
    check_varied(axis.key for axis in axes)
    points = grid(axes)
    document, problem = scenario.to_dict(), ""
    for axis in axes:
        for value in axis.values:
            try:
                load_scenario(document, overrides_of([axis], [value]))
                break
            except InputError as error:
                problem = problem or str(error)
        else:
            # Alone no value may be allowed, and together with those of another key all may be.
            if not any(_runs(document, axes, point) for point in points):
                raise InputError(f"--vary {axis.key}: none of its values can run. {problem}")
    if len(points) * seeds > MOST_RUNS:
        raise InputError(
            f"{len(points):,} combinations under {seeds:,} seeds are more than {MOST_RUNS:,} runs; leave out values or "
            "seeds, or split the sweep into several"
        )
    first = scenario.run.seed
    seeded = tuple(first + k for k in range(seeds))
    return Plan(scenario, tuple(axes), tuple(points), seeded, basis or {})


def _runs(document: Mapping[str, Any], axes: Sequence[Axis], point: Sequence[Any]) -> bool:
    try:
        load_scenario(document, overrides_of(axes, point))
    except InputError:
        return False
    return True


class Journal(Protocol):
    """Where rows are kept while a sweep runs."""

    def rows(self) -> dict[int, "Row"]:
        """What is there already, by number."""

    def add(self, row: "Row") -> None:
        """Keep one more; it outlives the process."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a sweep, as it is kept: nothing of wall time, so that the same sweep gives the same rows."""

    number: int
    figures: Figures | None
    error: str | None


Told = Callable[[int, int, float | None, float], None]
"""(rows there are, rows in all, seconds left as far as one can tell, simulated seconds per second)"""


def sweep(plan: Plan, journal: Journal, backend: Backend, told: Told | None = None) -> None:
    """Make the runs that the journal lacks. Raises Interrupted after Ctrl-C; what was made by then is kept.

    One run is made first and alone: what it took tells how long all will take, before the rest begins.
    """
    there = set(journal.rows())
    left = Tasks(plan, [number for number in range(plan.size) if number not in there])
    done, wall_s, simulated_s = len(there), 0.0, 0.0
    with stop_on_ctrl_c(at_once=True) as pressed:
        for made, run in enumerate(_pilot_first(left, backend), 1):
            journal.add(Row(run.number, run.figures, run.error))
            wall_s += run.wall_s
            simulated_s += run.simulated_s
            if told is not None:
                at_once = 1 if made == 1 and backend.ray is None else min(backend.jobs, len(left))
                remaining = (
                    (len(left) - made) * wall_s / made / max(1, min(backend.jobs, len(left)))
                )
                told(
                    done + made,
                    plan.size,
                    remaining,
                    at_once * simulated_s / wall_s if wall_s else 0.0,
                )
            if pressed:
                raise Interrupted


def _pilot_first(tasks: "Tasks", backend: Backend) -> Iterator[Run]:
    yield from run_all(Tasks(tasks.plan, tasks.numbers[:1]), replace(backend, jobs=1, ray=None))
    yield from run_all(Tasks(tasks.plan, tasks.numbers[1:]), backend)


@dataclass(frozen=True, slots=True)
class Tasks:
    """Runs of a plan, each made into a task when its turn comes: a large sweep has millions of them."""

    plan: Plan
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Task]:
        return map(self.plan.task, self.numbers)


def table_of(plan: Plan, rows: Mapping[int, Row]) -> dict[str, list[Any]]:
    """Columns of the result: point, seed, the values varied, the figures, `saturated`, `error`; by run number."""
    numbers = sorted(rows)
    each = len(plan.seeds)
    names = dict.fromkeys(name for n in numbers for name in rows[n].figures or {})
    table: dict[str, list[Any]] = {
        "point": [n // each for n in numbers],
        "seed": [plan.seeds[n % each] for n in numbers],
    }
    for i, axis in enumerate(plan.axes):
        table[axis.key] = [plan.points[n // each][i] for n in numbers]
    for name in names:
        table[name] = [(rows[n].figures or {}).get(name) for n in numbers]
    table["saturated"] = [
        None if rows[n].figures is None else is_saturated(rows[n].figures or {}) for n in numbers
    ]
    table["error"] = [rows[n].error for n in numbers]
    return table


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of values with the figures of its seeds."""

    values: tuple[Any, ...]
    rows: tuple[Figures, ...]
    """One for each seed that was run."""
    error: str | None
    """Why it could not run."""
    is_beyond: bool = False
    """Whether a lower load saturates the same configuration already."""

    def mean(self, name: str) -> float | None:
        """Of a figure over its seeds; None also where one of them served nobody."""
        return mean_of(self.rows, name)

    def is_lost(self, name: str) -> bool:
        """Whether under one of its seeds requests came and none was served, so that a latency has no mean."""
        return self.mean(name) is None and any(is_lost(row, name) for row in self.rows)

    def span(self, name: str) -> tuple[float, float] | None:
        """Least and most of a figure over the seeds."""
        known = [value for row in self.rows if (value := row.get(name)) is not None]
        return (min(known), max(known)) if known else None

    @property
    def is_saturated(self) -> bool:
        """Whether it is in most of its seeds, or at a lower load already: a short run can look steady."""
        return self.is_beyond or 2 * sum(map(is_saturated, self.rows)) > len(self.rows)


def points_of(plan: Plan, rows: Mapping[int, Row]) -> list[Point]:
    """The points of which something was run, in the order of the plan."""
    each = len(plan.seeds)
    found = []
    for i, values in enumerate(plan.points):
        there = [rows[n] for n in range(i * each, (i + 1) * each) if n in rows]
        if there:
            figures = tuple(row.figures for row in there if row.figures is not None)
            error = next((row.error for row in there if row.error), None)
            found.append(Point(values, figures, error))
    return _beyond(plan, found)


def _beyond(plan: Plan, points: Sequence[Point]) -> list[Point]:
    """The points, those marked whose configuration is saturated at a lower load."""
    index = next((i for i, axis in enumerate(plan.axes) if is_load(axis)), None)
    if index is None:
        return list(points)
    least: dict[str, float] = {}
    for point in points:
        if point.is_saturated:
            key, load = _others(point, index), point.values[index]
            least[key] = min(load, least.get(key, load))
    return [
        replace(point, is_beyond=point.values[index] > least.get(_others(point, index), math.inf))
        for point in points
    ]


def _others(point: Point, index: int) -> str:
    """The values of the other keys, as text."""
    return text_of([value for i, value in enumerate(point.values) if i != index])
