"""The study of a search in its database: what was tried, what comes next, and what a worker left that is gone."""

import hashlib
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from twin.errors import InputError
from twin.whatif.axes import Axis, Range, grid, overrides_of, text_of
from twin.whatif.trial import Tried, values_of

if TYPE_CHECKING:
    from twin.whatif.optimize import Search

WAITS_S = (0.1, 0.3, 1.0, 3.0)
"""Between attempts to open a database whose tables another worker is just making."""

ELSEWHERE_S = 86_400.0
"""A trial of another machine that has not ended after so long is taken for lost."""


def this_worker() -> str:
    """`host/pid/token`, by which trials are known that nobody will end any more."""
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"


def open_study(search: "Search", storage: str | None) -> Any:
    """The study of this search, new or gone on with. Raises InputError for a storage that holds another, or fails."""
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
    for wait_s in (*WAITS_S, None):
        try:
            study = optuna.create_study(
                storage=storage,
                sampler=sampler,
                study_name="twin",
                directions=directions,
                load_if_exists=True,
            )
            break
        except Exception as error:  # whatever a database and its driver may raise
            if wait_s is None or not _is_a_race(error):
                raise InputError(storage_text(storage, error)) from None
            time.sleep(wait_s)
    mark = mark_of(search)
    before = study.user_attrs.get("mark")
    if before is None:
        study.set_user_attr("mark", mark)
    elif before != mark:
        raise InputError(
            f"--storage {without_password(storage or 'memory')}: holds another search (other keys, goals, seeds, "
            "scenario or contents of files, or of another version of the twin); name another folder or database, or "
            "repeat the command that began it to go on"
        )
    return study


def _is_a_race(error: BaseException | None) -> bool:
    """Whether two workers made the same tables, or the same study, at once."""
    while error is not None:
        text = str(error)
        if "UNIQUE" in text or "already exists" in text or "locked" in text or "duplicate" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def storage_errors(storage: str | None) -> Iterator[None]:
    """What a database refuses in the middle of a search (a full disk, a lost connection) becomes an InputError."""
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except StorageInternalError as error:
        raise InputError(storage_text(storage, error.__cause__ or error)) from None


def storage_text(storage: str | None, error: BaseException) -> str:
    """A failure of a database in one line, without the password."""
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    password = _password(storage or "")
    if password:
        why = why.replace(password, "***")
    return f"--storage {without_password(storage or 'memory')}: {without_password(why)}"


def without_password(text: str) -> str:
    """The text with the passwords of URLs and connection strings in it covered."""
    text = re.sub(r"(://[^\s:/@]*):[^\s]*@", r"\1:***@", text)
    return re.sub(r"(?i)(password=)[^&\s]+", r"\1***", text)


def _password(url: str) -> str:
    found = re.search(r"://[^\s:/@]*:([^\s]*)@", url)
    return found[1] if found else ""


def mark_of(search: "Search") -> str:
    """Twelve hex digits that differ where what is searched, or what its figures rest on, does."""
    axes = [
        [axis.key, list(axis.values)]
        if isinstance(axis, Axis)
        else [axis.key, axis.low, axis.high, axis.is_log]
        for axis in search.axes
    ]
    goals = [goal.name for goal in search.goals]
    told = [search.scenario.to_dict(), axes, goals, list(search.seeds), dict(search.basis)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


# --- what is to be tried ------------------------------------------------------------------


def revive(study: Any) -> None:
    """What a worker that is gone had begun is to be tried again."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        if not _is_gone(trial.user_attrs.get("worker"), time.time() - begun):
            continue
        params = _params_of(trial)
        study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        if params and "tried" not in trial.user_attrs:
            study.enqueue_trial(params)


def _is_gone(worker: Any, age_s: float) -> bool:
    """Whether the process of a trial has ended: known of this machine, of others taken to be so after a day."""
    host, _, rest = str(worker or "").partition("/")
    pid = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdecimal():
        return age_s > ELSEWHERE_S
    if int(pid) == os.getpid():
        return True  # an earlier process of this number: this one has begun nothing yet
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _params_of(trial: Any) -> dict[str, Any]:
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def pending(study: Any) -> list[dict[str, Any]]:
    """What waits to be tried, or is being tried."""
    from optuna.trial import TrialState

    states = (TrialState.RUNNING, TrialState.WAITING)
    return [_params_of(trial) for trial in study.get_trials(deepcopy=False, states=states)]


def enqueue_present(study: Any, search: "Search", tried: Mapping[str, Tried]) -> None:
    """The configuration as it is, if it lies in the space: the answer is then no worse than the present."""
    point = _present(search)
    if point is None or key_of(search.axes, point) in tried:
        return
    params = params_of(search.axes, point)
    if params not in pending(study):
        study.enqueue_trial(params)


def _present(search: "Search") -> list[Any] | None:
    document = search.scenario.to_dict()
    point: list[Any] = []
    for axis in search.axes:
        value: Any = document
        for step in axis.key.split("."):
            if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            elif isinstance(value, Mapping) and step in value:
                value = value[step]
            else:
                return None
        if isinstance(axis, Range):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not axis.low <= value <= axis.high:
                return None
        elif value not in axis.values:
            return None
        point.append(value)
    return point


def enqueue_rest(study: Any, search: "Search", tried: Mapping[str, Tried], room: int) -> None:
    """Where the trials suffice for the whole space nothing need be guessed: up to `room` of what is not tried yet."""
    axes = [axis for axis in search.axes if isinstance(axis, Axis)]
    if len(axes) < len(search.axes) or size_of(axes) > search.trials:
        return
    from optuna.trial import TrialState

    waiting = [
        _params_of(t) for t in study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    ]
    for point in grid(axes):
        if len(waiting) >= room:
            return
        params = params_of(axes, point)
        if key_of(axes, point) not in tried and params not in waiting:
            study.enqueue_trial(params)
            waiting.append(params)


def params_of(axes: Sequence[Axis | Range], point: Sequence[Any]) -> dict[str, Any]:
    """A point as Optuna knows it: values on a scale by their place, others as text."""
    return {
        axis.key: value
        if isinstance(axis, Range)
        else sorted(axis.values).index(value)
        if axis.is_numeric
        else text_of(value)
        for axis, value in zip(axes, point, strict=True)
    }


def suggest(trial: Any, axes: Sequence[Axis | Range]) -> list[Any]:
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


def size_of(axes: Sequence[Axis | Range]) -> float:
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


# --- what became of it --------------------------------------------------------------------


def tell(study: Any, trial: Any, entry: Tried, search: "Search") -> None:
    """Keep what a trial came to; a search that goes on knows it by that."""
    import optuna

    with taken_twice():
        trial.set_user_attr("key", entry.key)
        trial.set_user_attr("tried", entry.to_dict())
        if entry.figures:
            for constraint, over in zip(search.constraints, entry.excess, strict=True):
                trial.set_constraint(constraint.name, over)
            study.tell(trial, values_of(entry, search), skip_if_finished=True)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)


@contextmanager
def taken_twice() -> Iterator[None]:
    """A database without locks on rows may give a trial to two workers: what the second says of it is not needed."""
    from optuna.exceptions import UpdateFinishedTrialError

    with suppress(UpdateFinishedTrialError):
        yield


def remembered(study: Any) -> Iterator[Tried]:
    """What was tried before, and by other workers. Raises InputError for entries that this does not write."""
    for trial in study.get_trials(deepcopy=False):
        found = trial.user_attrs.get("tried")
        if found is None:
            continue
        try:
            yield Tried.from_dict(found)
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"--storage: trial {trial.number} of the study is damaged; name another folder or database"
            ) from None
