"""A search over many keys at once: the configurations of which none is better in every goal, and the one to take.

Goals are figures of a run, the first one being the one that matters most; constraints are the objectives of the
scenario. Optuna proposes (TPE, told of the constraints); the study lies in a database, so that a search can be gone on
with, or be shared by several workers.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twin.errors import InputError
from twin.report.texts import plural
from twin.scenario import Scenario, load_scenario
from twin.whatif.axes import Axis, Range, check_keys, grid, overrides_of, text_of
from twin.whatif.figures import Measure, measure
from twin.whatif.runs import Backend, Interrupted, Load
from twin.whatif.trial import Tried, front_of, try_all, values_of
from twin.whatif.verdict import over_text, value_text

SEEDS = 2
CONFIRM_SEEDS = 5
CONFIRMED = 8
"""Points of the front that are run again, under seeds that the search has not seen."""
AT_ONCE = 8
"""Configurations proposed together: the same for any number of processors, so that the search is the same."""
CLOSE = 0.01
"""Points whose first goal is within this share of the best are equal in it; then the next goal decides."""

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


def make_search(
    scenario: Scenario,
    axes: Sequence[Axis | Range],
    goals: Sequence[str] = (),
    seeds: int = SEEDS,
    trials: int = 100,
    timeout_s: float | None = None,
    load: Load = load_scenario,
) -> Search:
    """Check a search. Without goals: goodput, and beside it GPUs where their number is varied, else latency.

    Raises InputError for no key, for a key twice, and for a goal or a key that does not exist.
    """
    if not axes:
        raise InputError("--vary is missing: say which key may take which values")
    check_keys(axes)
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
        values = (
            axis.values
            if isinstance(axis, Axis)
            else (_number(axis, axis.low), _number(axis, axis.high))
        )
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
    )


def _usual_goals(
    axes: Sequence[Axis | Range], constraints: Sequence[Measure], scenario: Scenario
) -> list[str]:
    counted = ("cluster.replicas", "hardware.tensor_parallel_size", "cluster.hpa", "cluster.keda")
    if any(axis.key.startswith(counted) for axis in axes) or scenario.cluster.fleet is not None:
        return ["gpus", "all.goodput"]
    latency = constraints[0].name if constraints else f"{scenario.tiers[0]}.ttft_p99"
    return ["all.goodput", latency]


def _number(axis: Range, value: float) -> int | float:
    return round(value) if axis.is_whole else value


def optimize(
    search: Search,
    storage: str | None = None,
    backend: Backend | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """Search, confirm the best under fresh seeds, choose, and explain the choice.

    `storage` is the URL of a database (None = memory); a study that is there already is gone on with. After Ctrl-C what
    was found by then is told, and marked. Raises InputError for a storage that cannot be used or holds another study,
    and if nothing could run.
    """
    where = backend or Backend(1)
    study = _study(search, storage)
    tried = {entry.key: entry for entry in _remembered(study, search)}
    start, interrupted = time.monotonic(), False
    try:
        for batch in _batches(study, search, tried, start):
            front = front_of(tried.values(), search)
            fresh = {text: point for _, text, point in batch if text not in tried}
            made = try_all(search, list(fresh.values()), where, front)
            for (_, text, _), entry in zip(_firsts(batch, fresh), made, strict=True):
                tried[text] = entry
            for trial, text, _ in batch:
                _tell(study, trial, tried[text], search)
            if told is not None:
                told(len(tried), search.trials, _best_text(tried.values(), search))
    except (Interrupted, KeyboardInterrupt):
        interrupted = True
    if not any(entry.figures for entry in tried.values()):
        errors = [entry.error for entry in tried.values() if entry.error]
        raise InputError(f"no configuration could run{': ' + errors[0] if errors else ''}")
    return _conclude(search, tried, where, interrupted)


def _firsts(batch: Sequence[Any], fresh: Mapping[str, Any]) -> Iterator[Any]:
    """Of the entries of a batch that ask for something new, the first of each."""
    seen = set()
    for entry in batch:
        if entry[1] in fresh and entry[1] not in seen:
            seen.add(entry[1])
            yield entry


# --- the study ----------------------------------------------------------------------------


def _study(search: Search, storage: str | None) -> Any:
    import warnings

    import optuna
    from optuna.exceptions import ExperimentalWarning

    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(
        seed=search.scenario.run.seed % 2**32,
        n_startup_trials=max(10, min(search.trials // 4, 25)),
    )
    ways = optuna.study.StudyDirection
    directions = [ways.MAXIMIZE if goal.more_is_better else ways.MINIMIZE for goal in search.goals]
    try:
        study = optuna.create_study(
            storage=storage,
            sampler=sampler,
            study_name="twin",
            directions=directions,
            load_if_exists=True,
        )
        mark = _mark(search)
        before = study.user_attrs.get("mark")
        if before is None:
            study.set_user_attr("mark", mark)
            _enqueue_present(study, search)
            _enqueue_all(study, search)
    except InputError:
        raise
    except Exception as error:  # whatever a database and its driver may raise
        raise InputError(f"--storage {storage}: {str(error).splitlines()[0]}") from None
    if before is not None and before != mark:
        raise InputError(
            f"--storage {storage or 'memory'}: holds another search (other keys, goals, seeds or scenario); name "
            "another folder or database, or repeat the command that began it to go on"
        )
    return study


def _mark(search: Search) -> str:
    import hashlib

    axes = [
        [axis.key, list(axis.values)]
        if isinstance(axis, Axis)
        else [axis.key, axis.low, axis.high, axis.is_log]
        for axis in search.axes
    ]
    goals = [goal.name for goal in search.goals]
    told = [search.scenario.to_dict(), axes, goals, list(search.seeds)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def _enqueue_present(study: Any, search: Search) -> None:
    """The configuration as it is, if it lies in the space: the answer is then no worse than the present."""
    document = search.scenario.to_dict()
    params: dict[str, Any] = {}
    for axis in search.axes:
        value: Any = document
        for step in axis.key.split("."):
            if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            elif isinstance(value, Mapping) and step in value:
                value = value[step]
            else:
                return
        if isinstance(axis, Range):
            if not isinstance(value, int | float) or not axis.low <= value <= axis.high:
                return
            params[axis.key] = value
        elif value not in axis.values:
            return
        else:
            places = sorted(axis.values) if axis.is_numeric else []
            params[axis.key] = places.index(value) if places else text_of(value)
    study.enqueue_trial(params)


def _enqueue_all(study: Any, search: Search) -> None:
    """Where the trials suffice for the whole space, nothing need be guessed."""
    axes = [axis for axis in search.axes if isinstance(axis, Axis)]
    if len(axes) < len(search.axes) or _size(axes) > search.trials:
        return
    for point in grid(axes):
        params = {
            axis.key: sorted(axis.values).index(value) if axis.is_numeric else text_of(value)
            for axis, value in zip(axes, point, strict=True)
        }
        study.enqueue_trial(params, skip_if_exists=True)


def _suggest(trial: Any, axes: Sequence[Axis | Range]) -> list[Any]:
    """A point. Values that lie on a scale are proposed by their place on it, so that neighbours teach each other."""
    point: list[Any] = []
    for axis in axes:
        if isinstance(axis, Range):
            if axis.is_whole:
                low, high = int(axis.low), int(axis.high)
                point.append(trial.suggest_int(axis.key, low, high, log=axis.is_log))
            else:
                point.append(trial.suggest_float(axis.key, axis.low, axis.high, log=axis.is_log))
        elif axis.is_numeric:
            point.append(sorted(axis.values)[trial.suggest_int(axis.key, 0, len(axis.values) - 1)])
        else:
            texts = {text_of(value): value for value in axis.values}
            point.append(texts[trial.suggest_categorical(axis.key, list(texts))])
    return point


def _batches(
    study: Any, search: Search, tried: Mapping[str, Tried], start: float
) -> Iterator[list[tuple[Any, str, list[Any]]]]:
    """What is to be tried next, until trials, time or the space is used up."""
    space = _size(search.axes)
    asked, most = 0, 5 * search.trials + 50
    while len(tried) < min(search.trials, space) and asked < most:
        if search.timeout_s is not None and time.monotonic() - start > search.timeout_s:
            return
        batch = []
        room = min(AT_ONCE, search.trials - len(tried))
        for _ in range(room):
            trial = study.ask()
            point = _suggest(trial, search.axes)
            batch.append((trial, key_of(search.axes, point), point))
            asked += 1
        yield batch


def _size(axes: Sequence[Axis | Range]) -> float:
    """Points of the space; infinite with a range of real numbers."""
    size = 1.0
    for axis in axes:
        if isinstance(axis, Axis):
            size *= len(axis.values)
        else:
            size *= axis.high - axis.low + 1 if axis.is_whole else math.inf
    return size


def key_of(axes: Sequence[Axis | Range], point: Sequence[Any]) -> str:
    """A point as text, equal for equal points."""
    return " ; ".join(overrides_of(axes, point))


def _tell(study: Any, trial: Any, entry: Tried, search: Search) -> None:
    import optuna

    trial.set_user_attr("key", entry.key)
    trial.set_user_attr("tried", entry.to_dict())
    if entry.figures:
        for constraint, over in zip(search.constraints, entry.excess, strict=True):
            trial.set_constraint(constraint.name, over)
        study.tell(trial, values_of(entry, search))
    else:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _remembered(study: Any, search: Search) -> Iterator[Tried]:
    for trial in study.trials:
        found = trial.user_attrs.get("tried")
        if found is not None:
            yield Tried.from_dict(found)


# --- the answer ---------------------------------------------------------------------------


def _conclude(
    search: Search, tried: Mapping[str, Tried], where: Backend, interrupted: bool
) -> dict[str, Any]:
    front = front_of(tried.values(), search)
    confirmed = front
    if front and not interrupted:
        shown = _spread(front, search)
        first = max(search.seeds) + 1
        again = Search(
            search.scenario, search.axes, search.goals, search.constraints,
            tuple(first + k for k in range(CONFIRM_SEEDS)), search.trials,
        )  # fmt: skip
        try:
            confirmed = try_all(again, [entry.point for entry in shown], where, [])
        except Interrupted:
            interrupted = True
    good = [entry for entry in confirmed if entry.is_good]
    chosen = _choose(good, search)
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
        "text": _text(chosen, tried.values(), search),
        "trials": [entry.to_dict() for entry in tried.values()],
    }


def _spread(front: Sequence[Tried], search: Search) -> list[Tried]:
    """At most CONFIRMED points of a front, the ends among them."""
    ordered = sorted(front, key=lambda entry: values_of(entry, search))
    if len(ordered) <= CONFIRMED:
        return list(ordered)
    places = [round(i * (len(ordered) - 1) / (CONFIRMED - 1)) for i in range(CONFIRMED)]
    return [ordered[i] for i in places]


def _choose(good: Sequence[Tried], search: Search) -> Tried | None:
    """The best in the first goal; of those within 1 % of it the best in the second, and so on."""
    left = list(good)
    for i, goal in enumerate(search.goals):
        if not left:
            return None
        values = [values_of(entry, search)[i] for entry in left]
        best = max(values) if goal.more_is_better else min(values)
        left = [e for e, v in zip(left, values, strict=True) if abs(v - best) <= CLOSE * abs(best)]
    return min(left, key=lambda entry: entry.key, default=None)


def _text(chosen: Tried | None, tried: Any, search: Search) -> str:
    """The choice and the constraint that binds it."""
    if chosen is None:
        nearest = min(
            (e for e in tried if e.figures), key=lambda e: max(e.excess, default=0.0), default=None
        )
        if nearest is None:
            return "Nothing could run."
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
            + f" Nothing tried has a better {goal.label}, so no constraint binds it.{nearest_limit}"
        )
    nearest = min(better, key=lambda entry: max(entry.excess))
    return (
        f"{text} {_binding(better, search)} binds: {plural(len(better), 'configuration')} with a better {goal.label} "
        f"broke an objective; the nearest, {nearest.key.replace(' ; ', ', ')}, breaks {_broken(nearest, search)}."
    )


def _is_better(goal: Measure, value: float, than: float) -> bool:
    gap = value - than if goal.more_is_better else than - value
    return gap > 1e-9 * max(1.0, abs(than))


def _binding(better: Sequence[Tried], search: Search) -> str:
    """The constraint that stops most of them."""
    counts = {
        m.label: sum(entry.excess[i] > 0 for entry in better)
        for i, m in enumerate(search.constraints)
    }
    return max(counts, key=lambda name: counts[name])


def _nearest(chosen: Tried, search: Search) -> str:
    if not search.constraints:
        return ""
    i = max(range(len(search.constraints)), key=lambda i: chosen.excess[i])
    m = search.constraints[i]
    value = chosen.figures.get(m.name)
    return f" Nearest to its limit is {m.label}: {value_text(value, m.unit)} of {value_text(m.limit, m.unit)}."


def _broken(entry: Tried, search: Search) -> str:
    told = [
        over_text(m, entry.figures.get(m.name))
        for i, m in enumerate(search.constraints)
        if entry.excess[i] > 0
    ]
    return ", ".join(told)


def _best_text(tried: Any, search: Search) -> str:
    chosen = _choose([entry for entry in tried if entry.is_good], search)
    if chosen is None:
        return "none meets the objectives yet"
    goal = search.goals[0]
    return f"{goal.label} {value_text(values_of(chosen, search)[0], goal.unit)}"
