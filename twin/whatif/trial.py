"""One configuration of a search: its seeds one after the other, and no more of them than it is worth."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twin.whatif.axes import overrides_of
from twin.whatif.figures import NOTHING, Figures, Measure, excess, mean_figures
from twin.whatif.runs import Backend, Task, run_all

if TYPE_CHECKING:
    from twin.whatif.optimize import Search

HOPELESS = 0.25
"""A limit exceeded by this share under the first seed is not met by the others; nor is a goal this far behind."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A configuration that was tried."""

    key: str
    """Its changes, as text."""
    point: tuple[Any, ...]
    figures: Figures
    """Means over the seeds that were run; empty if it could not run."""
    excess: tuple[float, ...]
    """By constraint: log(value / limit), above 0 where it is broken."""
    seeds: int
    """Seeds that were run."""
    stopped: bool
    """Whether it was given up before all seeds were run."""
    error: str | None

    @property
    def is_good(self) -> bool:
        """Whether it ran and keeps every constraint."""
        return bool(self.figures) and all(over <= 0 for over in self.excess) and not self.stopped

    def to_dict(self) -> dict[str, Any]:
        """For databases and JSON."""
        return {
            "key": self.key,
            "point": list(self.point),
            "figures": self.figures,
            "excess": list(self.excess),
            "seeds": self.seeds,
            "stopped": self.stopped,
            "is_good": self.is_good,
            "error": self.error,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Tried":
        """The inverse of `to_dict`."""
        return Tried(
            data["key"], tuple(data["point"]), dict(data["figures"]), tuple(data["excess"]), data["seeds"],
            data["stopped"], data["error"],
        )  # fmt: skip


def values_of(entry: Tried, search: "Search") -> list[float]:
    """Its goals, the worst there is in place of one without a value."""
    found = []
    for goal in search.goals:
        value = entry.figures.get(goal.name)
        worst = 0.0 if goal.more_is_better else NOTHING
        # Figures are quotients of floats: 2 GPUs are 2, not 2.0000000000000004.
        found.append(worst if value is None else float(f"{value:.12g}"))
    return found


def dominates(
    one: Sequence[float], other: Sequence[float], goals: Sequence[Measure], margin: float = 0.0
) -> bool:
    """Whether `one` is no worse in any goal and better in some; with a margin, better by that share in every goal."""
    gains = [
        (a - b if goal.more_is_better else b - a) - margin * abs(b)
        for a, b, goal in zip(one, other, goals, strict=True)
    ]
    return all(gain >= 0 for gain in gains) and (margin > 0 or any(gain > 0 for gain in gains))


def front_of(tried: Iterable[Tried], search: "Search") -> list[Tried]:
    """Those that keep every constraint and that no other such one dominates."""
    good = [entry for entry in tried if entry.is_good]
    values = [values_of(entry, search) for entry in good]
    return [
        entry
        for entry, mine in zip(good, values, strict=True)
        if not any(dominates(other, mine, search.goals) for other in values)
    ]


def try_all(
    search: "Search", points: Sequence[Sequence[Any]], where: Backend, front: Sequence[Tried]
) -> list[Tried]:
    """Try the points, seed by seed; one that is hopeless beside the front after a seed is not run under the next.

    Raises Interrupted after Ctrl-C.
    """
    document = search.scenario.to_dict()
    changes = [overrides_of(search.axes, point) for point in points]
    rows: list[list[Figures]] = [[] for _ in points]
    errors: list[str | None] = [None] * len(points)
    going = set(range(len(points)))
    for k, seed in enumerate(search.seeds):
        tasks = [Task(i, document, changes[i], seed) for i in sorted(going)]
        for run in run_all(tasks, where):
            if run.figures is None:
                errors[run.number] = run.error
                going.discard(run.number)
            else:
                rows[run.number].append(run.figures)
        if k + 1 < len(search.seeds):
            for i in list(going):
                entry = _tried(search, " ; ".join(changes[i]), points[i], rows[i], None, False)
                if is_hopeless(entry, search, front):
                    going.discard(i)
    many = len(search.seeds)
    return [
        _tried(
            search,
            " ; ".join(changes[i]),
            points[i],
            [] if errors[i] else rows[i],
            errors[i],
            errors[i] is None and len(rows[i]) < many,
        )
        for i in range(len(points))
    ]


def is_hopeless(entry: Tried, search: "Search", front: Sequence[Tried]) -> bool:
    """Whether more seeds are not worth their time: far over a limit, or far behind a point of the front in every goal.

    Until something keeps every constraint, everything is worth it.
    """
    if not front:
        return False
    if any(over > math.log1p(HOPELESS) for over in entry.excess):
        return True
    mine = values_of(entry, search)
    return any(dominates(values_of(other, search), mine, search.goals, HOPELESS) for other in front)


def _tried(
    search: "Search",
    key: str,
    point: Sequence[Any],
    rows: Sequence[Figures],
    error: str | None,
    stopped: bool,
) -> Tried:
    means = mean_figures(rows)
    over = tuple(excess(rows, m) for m in search.constraints) if rows else ()
    return Tried(key, tuple(point), means, over, len(rows), stopped, error)
