"""A search over many keys at once: the configurations of which none is better in every goal, and the one to take.

Goals are figures of a run, the first one being the one that matters most; constraints are the objectives of the
scenario. Optuna proposes (TPE, told of the constraints); the study lies in a database, so that a search can be gone on
with, or be shared by several workers.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twin.errors import InputError
from twin.interrupt import stop_on_ctrl_c
from twin.scenario import Scenario, load_scenario
from twin.whatif.asked import check_figures, check_varied, may_change_tiers
from twin.whatif.axes import Axis, Range, check_keys, overrides_of
from twin.whatif.choice import CONFIRM_SEEDS, best_text, choose, spread, text_of_choice
from twin.whatif.figures import Measure, is_lost, measure
from twin.whatif.runs import Backend, Interrupted, Load
from twin.whatif.study import (
    enqueue_present,
    enqueue_rest,
    key_of,
    open_study,
    remembered,
    revive,
    size_of,
    storage_errors,
    suggest,
    taken_twice,
    tell,
    this_worker,
)
from twin.whatif.trial import Tried, front_of, try_all

SEEDS = 2
AT_ONCE = 8
"""Configurations proposed together: the same for any number of processors, so that the search is the same."""
ROUNDS = 3
"""Times that the next best are run under fresh seeds where none of those before kept its objectives there."""

Told = Callable[[int, int, str], None]
"""(configurations tried, at most, the best so far in words)"""


@dataclass(frozen=True, slots=True)
class Search:
    """What is searched for, and where."""

    scenario: Scenario
    axes: tuple[Axis | Range, ...]
    goals: tuple[Measure, ...]
    constraints: tuple[Measure, ...]
    seeds: tuple[int, ...]
    trials: int
    """Configurations that are run at most."""
    timeout_s: float | None = None
    """No configuration is begun after so many seconds of wall time."""
    basis: Mapping[str, str] = field(default_factory=dict)
    """What the figures rest on besides: contents of files, version of the twin."""


def make_search(
    scenario: Scenario,
    axes: Sequence[Axis | Range],
    goals: Sequence[str] = (),
    seeds: int = SEEDS,
    trials: int = 100,
    timeout_s: float | None = None,
    load: Load = load_scenario,
    basis: Mapping[str, str] | None = None,
) -> Search:
    """Check a search. Without goals: goodput, and beside it GPUs where their number is varied, else latency.

    Raises InputError for no key, for a key twice, and for a goal or a key that does not exist.
    """
    if not axes:
        raise InputError("--vary is missing: say which key may take which values")
    check_keys(axes)
    check_varied(axis.key for axis in axes)
    check_figures(goals, [scenario], may_change_tiers(axes))
    if trials < 1 or seeds < 1:
        raise InputError(f"trials and seeds must be >= 1, got {trials} and {seeds}")
    constraints = tuple(
        measure(f"{tier}.{name}", limit)
        for tier, limits in scenario.objectives.items()
        for name, limit in limits.items()
    )
    names = list(dict.fromkeys(goals)) or _usual_goals(axes, constraints, scenario)
    document = scenario.to_dict()
    for axis in axes:
        problem = ""
        values = axis.values if isinstance(axis, Axis) else _samples(axis)
        for value in values:
            try:
                load(document, overrides_of([axis], [value]), None)
                break
            except InputError as error:
                problem = problem or str(error)
        else:
            raise InputError(f"--vary {axis.key}: none of its values can run. {problem}")
    first = scenario.run.seed
    return Search(
        scenario,
        tuple(axes),
        tuple(measure(name) for name in names),
        constraints,
        tuple(first + k for k in range(seeds)),
        trials,
        timeout_s,
        basis or {},
    )


def _usual_goals(
    axes: Sequence[Axis | Range], constraints: Sequence[Measure], scenario: Scenario
) -> list[str]:
    counted = ("cluster.replicas", "hardware.tensor_parallel_size", "cluster.hpa", "cluster.keda")
    if any(axis.key.startswith(counted) for axis in axes) or scenario.cluster.fleet is not None:
        return ["gpus", "all.goodput"]
    latency = constraints[0].name if constraints else f"{scenario.tiers[0]}.ttft_p99"
    return ["all.goodput", latency]


def _samples(axis: Range) -> tuple[int | float, ...]:
    """The ends of a range and nine values between them."""
    steps = [
        axis.low,
        *(axis.low + k / 10 * (axis.high - axis.low) for k in range(1, 10)),
        axis.high,
    ]
    return tuple(dict.fromkeys(round(value) if axis.is_whole else value for value in steps))


def optimize(
    search: Search,
    storage: str | None = None,
    backend: Backend | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """Search, confirm the best under fresh seeds, choose, and explain the choice.

    `storage` is the URL of a database (None = memory); a study that is there already is gone on with. After Ctrl-C what
    was found by then is told, and marked. Raises Interrupted if that is nothing, and InputError for a storage that
    cannot be used or holds another study, and if nothing could run.
    """
    where = backend or Backend(1)
    with stop_on_ctrl_c(at_once=True) as pressed, storage_errors(storage):
        study = open_study(search, storage)
        tried = {entry.key: entry for entry in remembered(study)}
        revive(study)
        enqueue_present(study, search, tried)
        interrupted = False
        try:
            for batch in _batches(study, search, tried, time.monotonic()):
                _try_batch(study, search, batch, tried, where)
                _check_goals(tried.values(), search)
                if told is not None:
                    told(len(tried), search.trials, best_text(tried.values(), search))
                if pressed:
                    interrupted = True
                    break
        except (Interrupted, KeyboardInterrupt):
            interrupted = True
    if not any(entry.figures for entry in tried.values()):
        if interrupted:
            raise Interrupted
        errors = [entry.error for entry in tried.values() if entry.error]
        raise InputError(f"no configuration could run{': ' + errors[0] if errors else ''}")
    return _conclude(search, tried, where, interrupted)


Batch = Sequence[tuple[Any, str, list[Any]]]
"""(trial of the study, key, point) each."""


def _try_batch(
    study: Any, search: Search, batch: Batch, tried: dict[str, Tried], where: Backend
) -> None:
    front = front_of(tried.values(), search)
    fresh = {text: point for _, text, point in batch if text not in tried}
    made = try_all(search, list(fresh.values()), where, front)
    tried.update(zip(fresh, made, strict=True))
    for trial, text, _ in batch:
        tell(study, trial, tried[text], search)


def _check_goals(tried: Iterable[Tried], search: Search) -> None:
    """Raises InputError for a goal that no run gives a value, so that there is nothing to make better."""
    ran = [entry.figures for entry in tried if entry.figures]
    for goal in search.goals:
        if ran and not any(f.get(goal.name) is not None or is_lost(f, goal.name) for f in ran):
            raise InputError(f"--goal {goal.name}: no run gives it a value; name another")


def _batches(study: Any, search: Search, tried: dict[str, Tried], start: float) -> Iterator[Batch]:
    """What is to be tried next, until trials, time or the space is used up; what others tried by then counts."""
    worker, space = this_worker(), size_of(search.axes)
    asked, most = 0, 5 * search.trials + 50
    while True:
        for entry in remembered(study):
            tried.setdefault(entry.key, entry)
        room = min(AT_ONCE, search.trials - len(tried))
        if len(tried) >= min(search.trials, space) or asked >= most:
            return
        if search.timeout_s is not None and time.monotonic() - start > search.timeout_s:
            return
        enqueue_rest(study, search, tried, room)
        batch = []
        for _ in range(room):
            asked += 1
            trial = study.ask()
            with taken_twice():
                trial.set_user_attr("worker", worker)
                point = suggest(trial, search.axes)
                batch.append((trial, key_of(search.axes, point), point))
        yield batch


def _conclude(
    search: Search, tried: Mapping[str, Tried], where: Backend, interrupted: bool
) -> dict[str, Any]:
    front = front_of(tried.values(), search)
    confirmed: list[Tried] = []
    if not interrupted:
        try:
            confirmed = _confirm(search, tried.values(), where)
        except (Interrupted, KeyboardInterrupt):
            interrupted = True
    if interrupted:
        confirmed = front
    chosen = choose([entry for entry in confirmed if entry.is_good], search)
    return {
        "interrupted": interrupted,
        "tried": len(tried),
        "stopped_early": sum(entry.stopped for entry in tried.values()),
        "refused": sum(not entry.figures for entry in tried.values()),
        "goals": [goal.name for goal in search.goals],
        "keys": [axis.key for axis in search.axes],
        "front": [entry.to_dict() for entry in front],
        "confirmed": [entry.to_dict() for entry in confirmed],
        "chosen": None if chosen is None else chosen.to_dict(),
        "text": text_of_choice(chosen, list(tried.values()), confirmed, search),
        "trials": [entry.to_dict() for entry in tried.values()],
    }


def _confirm(search: Search, tried: Iterable[Tried], where: Backend) -> list[Tried]:
    """The front under seeds that the search has not seen; where none keeps its objectives there, the next best."""
    first = max(search.seeds) + 1
    fresh = tuple(first + k for k in range(CONFIRM_SEEDS))
    again = replace(search, seeds=fresh)
    left = [entry for entry in tried if entry.is_good]
    confirmed: list[Tried] = []
    for _ in range(ROUNDS):
        shown = spread(front_of(left, search), search)
        if not shown or any(entry.is_good for entry in confirmed):
            break
        confirmed += try_all(again, [entry.point for entry in shown], where, [])
        keys = {entry.key for entry in shown}
        left = [entry for entry in left if entry.key not in keys]
    return confirmed
