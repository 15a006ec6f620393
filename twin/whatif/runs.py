"""Many runs at once: on the cores of this machine with loky of joblib, or on a Ray cluster."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any, Protocol

from twin.errors import InputError
from twin.interrupt import deaf_children, end_with_parent, from_a_thread
from twin.scenario import Scenario, load_scenario
from twin.simulation import simulate
from twin.whatif.figures import Figures, figures_of


@dataclass(frozen=True, slots=True)
class Task:
    """One run to be made."""

    number: int
    document: Mapping[str, Any]
    """The scenario as data, its paths resolved."""
    overrides: tuple[str, ...]
    """As `--set` takes them."""
    seed: int | None
    """None = that of the document."""


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a task."""

    number: int
    figures: Figures | None
    """None if it was refused."""
    error: str | None
    """Why it was refused, in one line."""
    simulated_s: float
    wall_s: float


Done = Callable[[int, int, float], None]
"""(runs made, runs in all, seconds since the first began), called after each."""

Load = Callable[[Mapping[str, Any], Sequence[str], int | None], Scenario]
"""(document, overrides, seed) -> the scenario, or InputError."""


NO_MEMORY = "not enough memory for this run"
"""An error that says nothing of the configuration: with more memory, or fewer beside it, it may run."""


def run_task(task: Task, load: Load = load_scenario) -> Run | None:
    """Make one run; None if Ctrl-C ended it."""
    start = time.perf_counter()
    try:
        result = simulate(load(task.document, task.overrides, task.seed))
    except InputError as error:
        wall_s = time.perf_counter() - start
        return Run(task.number, None, str(error).splitlines()[0], 0.0, wall_s)
    except MemoryError:
        return Run(task.number, None, NO_MEMORY, 0.0, 0.0)
    except KeyboardInterrupt:
        return None
    if result.interrupted:
        return None
    figures = figures_of(result)
    wall_s = time.perf_counter() - start
    return Run(task.number, figures, None, result.simulated_ps / 1e12, wall_s)


class Interrupted(Exception):
    """Ctrl-C ended a series of runs; what was made before has been handed out."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Where runs are made."""

    jobs: int
    """At once."""
    ray: str | None = None
    """Address of a Ray cluster, "" = a local one that is started for this; None = no Ray."""
    load: Load = load_scenario
    """How the scenario of a task is made; with one job at once only. A server of strangers looks at it first."""


IDLE_S = 20
"""Seconds after which a worker that has nothing to do ends."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""For a worker: there are as many as there are cores."""


class Tasks(Protocol):
    """Tasks, of which one need know how many there are before they are made."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Task]: ...


def run_all(tasks: Tasks, backend: Backend) -> Iterator[Run]:
    """The runs in the order in which they end. Raises Interrupted after Ctrl-C, and InputError without Ray.

    Each is handed out as soon as it is there. After Ctrl-C, or where the caller stops, workers are ended at once.
    """
    if not len(tasks):
        return
    if backend.ray is not None:
        yield from _on_ray(tasks, backend)
        return
    if backend.jobs == 1 or len(tasks) == 1:
        for task in tasks:
            run = run_task(task, backend.load)
            if run is None:
                raise Interrupted
            yield run
        return
    yield from _on_cores(tasks, min(backend.jobs, len(tasks)))


def _on_cores(tasks: Tasks, jobs: int) -> Iterator[Run]:
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.backend import resource_tracker
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    # First, because it lets Ctrl-C through to what the thread that starts it starts next.
    resource_tracker.ensure_running()
    with deaf_children():
        pool = get_reusable_executor(
            jobs, timeout=IDLE_S, env=ONE_THREAD, initializer=end_with_parent
        )

    flying, is_over, lock = set[Any](), False, Lock()

    def made() -> Iterator[Run | None]:
        nonlocal flying
        waiting = iter(tasks)
        while True:
            with lock:
                if is_over:
                    return
                room = 2 * jobs - len(flying)
                flying |= {pool.submit(run_task, task) for task in islice(waiting, room)}
            if not flying:
                return
            ready, flying = wait(flying, return_when=FIRST_COMPLETED)
            for future in ready:
                yield future.result()

    is_done = False
    try:
        yield from _until_interrupted(from_a_thread(made()))
        is_done = True
    except KeyboardInterrupt:
        raise Interrupted from None
    except TerminatedWorkerError:
        raise InputError(
            "a worker process was ended from outside, as systems do that run out of memory; fewer --jobs need less"
        ) from None
    finally:
        if not is_done:
            with lock:
                is_over = True
            end = time.monotonic() + 1
            try:
                # The pool's thread stumbles over tasks that it has not yet taken when it is told to end.
                while any(not (f.running() or f.done()) for f in flying) and time.monotonic() < end:
                    time.sleep(0.001)
            finally:
                pool.shutdown(wait=False, kill_workers=True)


def _until_interrupted(runs: Iterable[Run | None]) -> Iterator[Run]:
    for run in runs:
        if run is None:
            raise Interrupted
        yield run


def _on_ray(tasks: Tasks, backend: Backend) -> Iterator[Run]:
    try:
        import ray
    except ImportError:
        raise InputError(
            "--ray needs Ray; pip install 'vllm-twin[optimize,ray]' brings it"
        ) from None
    is_ours = not ray.is_initialized()
    if is_ours:
        local: dict[str, Any] = {"num_cpus": backend.jobs, "include_dashboard": False}
        given: dict[str, Any] = {"address": backend.ray} if backend.ray else local
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **given)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"--ray {backend.ray}: {str(error).splitlines()[0]}") from None
    remote = ray.remote(num_cpus=1)(run_task)
    waiting, flying = iter(tasks), []
    at_once = 2 * max(backend.jobs, int(_resources(ray).get("CPU", 1)))
    try:
        # In this thread: Ray's own code must not be running in another one when it is shut down.
        while True:
            for task in waiting:
                flying.append(remote.remote(task))
                if len(flying) >= at_once:
                    break
            if not flying:
                return
            ready, flying = ray.wait(flying, num_returns=1)
            yield from _until_interrupted(ray.get(ready))
    except KeyboardInterrupt:
        raise Interrupted from None
    except ray.exceptions.RayError as error:
        raise InputError(
            f"--ray: a run failed on the cluster: {str(error).splitlines()[0]}"
        ) from None
    finally:
        for left in flying:
            ray.cancel(left, force=True)
        if is_ours:
            ray.shutdown()


def _resources(ray: Any) -> Any:
    """What the cluster has."""
    return ray.cluster_resources()
