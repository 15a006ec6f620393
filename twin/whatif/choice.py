"""Which point of a front to take, and which objective it is that stops what would be better."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twin.report.texts import plural
from twin.whatif.figures import Measure
from twin.whatif.trial import Tried, values_of
from twin.whatif.verdict import over_text, value_text

if TYPE_CHECKING:
    from twin.whatif.optimize import Search

CONFIRMED = 8
"""Points of a front that are run again, under seeds that the search has not seen."""
CONFIRM_SEEDS = 5
CLOSE = 0.01
"""Points whose first goal is within this share of the best are equal in it; then the next goal decides."""


def spread(front: Sequence[Tried], search: "Search") -> list[Tried]:
    """At most CONFIRMED points of a front, the ends among them."""
    ordered = sorted(front, key=lambda entry: values_of(entry, search))
    if len(ordered) <= CONFIRMED:
        return list(ordered)
    places = [round(i * (len(ordered) - 1) / (CONFIRMED - 1)) for i in range(CONFIRMED)]
    return [ordered[i] for i in places]


def choose(good: Sequence[Tried], search: "Search") -> Tried | None:
    """The best in the first goal; of those within 1 % of it the best in the second, and so on."""
    left = list(good)
    for i, goal in enumerate(search.goals):
        if not left:
            return None
        values = [values_of(entry, search)[i] for entry in left]
        best = max(values) if goal.more_is_better else min(values)
        left = [e for e, v in zip(left, values, strict=True) if abs(v - best) <= CLOSE * abs(best)]
    return min(left, key=lambda entry: entry.key, default=None)


def text_of_choice(
    chosen: Tried | None, tried: Any, confirmed: Sequence[Tried], search: "Search"
) -> str:
    """The choice and the constraint that binds it."""
    if chosen is None:
        if confirmed:
            nearest = min(confirmed, key=lambda e: max(e.excess, default=0.0))
            kept = sum(entry.is_good for entry in tried)
            return (
                f"{plural(kept, 'configuration')} kept every objective in the search, but none of the {len(confirmed)} "
                f"that were run again did under {CONFIRM_SEEDS} fresh seeds. The nearest, {nearest.key}, breaks "
                f"{_broken(nearest, search)} there; more --seeds in the search tell such from those that hold."
            )
        ran = [entry for entry in tried if entry.figures]
        if not ran:
            return "Nothing could run."
        nearest = min(ran, key=lambda e: max(e.excess, default=0.0))
        return f"Nothing tried meets every objective. The nearest, {nearest.key}, breaks {_broken(nearest, search)}."
    told = ", ".join(
        f"{goal.label} {value_text(value, goal.unit)}"
        for goal, value in zip(search.goals, values_of(chosen, search), strict=True)
    )
    text = f"Take {chosen.key.replace(' ; ', ', ')}: {told}."
    goal = search.goals[0]
    mine = values_of(chosen, search)[0]
    better = [
        entry
        for entry in tried
        if entry.figures
        and not entry.is_good
        and _is_better(goal, values_of(entry, search)[0], mine)
    ]
    if not better:
        nearest_limit = _nearest(chosen, search)
        return (
            text
            + f" Nothing tried is better in {goal.label}, so no constraint binds it.{nearest_limit}"
        )
    nearest = min(better, key=lambda entry: max(entry.excess))
    return (
        f"{text} {_binding(better, search)} binds: {plural(len(better), 'configuration')} better in {goal.label} "
        f"broke an objective; the nearest, {nearest.key.replace(' ; ', ', ')}, breaks {_broken(nearest, search)}."
    )


def _is_better(goal: Measure, value: float, than: float) -> bool:
    gap = value - than if goal.more_is_better else than - value
    return gap > 1e-9 * max(1.0, abs(than))


def _binding(better: Sequence[Tried], search: "Search") -> str:
    """The constraint that stops most of them."""
    counts = {
        m.label: sum(entry.excess[i] > 0 for entry in better)
        for i, m in enumerate(search.constraints)
    }
    return max(counts, key=lambda name: counts[name])


def _nearest(chosen: Tried, search: "Search") -> str:
    if not search.constraints:
        return ""
    i = max(range(len(search.constraints)), key=lambda i: chosen.excess[i])
    m = search.constraints[i]
    value = chosen.figures.get(m.name)
    return f" Nearest to its limit is {m.label}: {value_text(value, m.unit)} of {value_text(m.limit, m.unit)}."


def _broken(entry: Tried, search: "Search") -> str:
    told = [
        over_text(m, entry.figures.get(m.name))
        for i, m in enumerate(search.constraints)
        if entry.excess[i] > 0
    ]
    return ", ".join(told)


def best_text(tried: Any, search: "Search") -> str:
    """The best so far in the first goal, for a progress bar."""
    chosen = choose([entry for entry in tried if entry.is_good], search)
    if chosen is None:
        return "none meets the objectives yet"
    goal = search.goals[0]
    return f"{goal.label} {value_text(values_of(chosen, search)[0], goal.unit)}"
