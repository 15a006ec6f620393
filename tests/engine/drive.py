"""Our engine alone on the random workloads of the parity harness, with everything it decided written down."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.parity.twin_host import TwinHost
from tests.parity.workload import Ask, Workload
from twin.engine.core import EngineCore, Step
from twin.scheduling import Job, Policy, policy_config

MAX_STEPS = 20_000


class Endless(AssertionError):
    """A run that should have ended did not."""


class Planned(NamedTuple):
    """One call of `schedule`, by request ids."""

    now: float
    scheduled: tuple[tuple[str, int], ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    planned_preempted: tuple[str, ...]
    aborted: tuple[tuple[str, str], ...]


class Results(NamedTuple):
    """One call of `update`: a token for each of these, and why some of them ended."""

    now: float
    tokens: tuple[tuple[str, str | None], ...]


class Taken(NamedTuple):
    """A request came or its client left."""

    now: float
    event: str
    rid: str


class Wake(NamedTuple):
    """With nothing to run, the policy asked to be woken."""

    now: float
    wake: float


Entry = Planned | Results | Taken | Wake
Check = Callable[[EngineCore, Step, list[Entry]], None]


def make_core(workload: Workload, truth: Mapping[str, int] | None = None) -> EngineCore:
    """The engine of a workload, with its policy if it has one. `truth` is for the estimator `oracle`."""
    if not workload.policy:
        return EngineCore(workload.config)
    config, limit = policy_config(workload.policy), workload.config.max_model_len
    return EngineCore(
        workload.config, Policy(config, limit, None if truth is None else truth.__getitem__)
    )


def drive(
    workload: Workload,
    core: EngineCore | None = None,
    check: Check = lambda core, step, log: None,
) -> list[Entry]:
    """Run a workload to its end; `check` is called after each schedule and each update, `log[-1]` says which.

    The order of calls is that of vLLM's engine loop. Raises Endless if requests are left that nothing can end, or
    after `MAX_STEPS`.
    """
    core = core or make_core(workload)
    host = TwinHost(core, workload.config)
    asks = {ask.rid: ask for ask in workload.asks}
    arrivals = deque(sorted(asks.values(), key=lambda a: (a.arrival, a.seq)))
    leaving = deque(
        sorted((a for a in arrivals if a.leaves is not None), key=lambda a: (a.leaves, a.seq))
    )
    log: list[Entry] = []
    in_flight: deque[tuple[Step, float]] = deque()
    now, steps, idle = 0.0, 0, 0

    def leave() -> None:
        while leaving and leaving[0].leaves <= now:
            ask = leaving.popleft()
            if ask.rid in core.requests:
                log.append(Taken(now, "left", ask.rid))
                host.abort(ask, now)

    while arrivals or in_flight or core.has_requests():
        while arrivals and arrivals[0].arrival <= now:
            ask = arrivals.popleft()
            log.append(Taken(now, "came", ask.rid))
            host.add(ask, now, _job(ask))
        leave()
        while len(in_flight) < workload.depth and core.has_requests():
            step = core.schedule(now)
            log.append(_written_down(step, now))
            check(core, step, log)
            if not step.scheduled:
                if step.preempted and not in_flight:
                    continue  # vLLM's loop plans again at once
                break
            in_flight.append((step, workload.durations[steps % len(workload.durations)]))
            steps += 1
        if in_flight:
            step, duration = in_flight.popleft()
            now, idle = now + duration, 0
            leave()
            outputs = core.update(step, now)
            log.append(Results(now, tuple((o.request.rid, o.finish_reason) for o in outputs)))
            check(core, step, log)
            if steps > MAX_STEPS:
                raise Endless(f"seed {workload.seed}: {len(core.requests)} left at {now} s")
        else:
            coming = [arrivals[0].arrival] if arrivals else []
            coming += [leaving[0].leaves] if leaving else []
            if core.policy is not None and core.has_requests():
                log.append(Wake(now, core.policy.next_wake(now)))
                coming.append(log[-1].wake)
            wake = min(coming, default=math.inf)
            idle += 1
            if idle > 1000 or (wake == math.inf and core.has_requests()):
                raise Endless(f"seed {workload.seed}: {sorted(core.requests)} left at {now} s")
            now = max(now, wake)
    return log


def _written_down(step: Step, now: float) -> Planned:
    return Planned(
        now,
        tuple((request.rid, tokens) for request, tokens in step.scheduled.items()),
        tuple(request.rid for request in step.admitted),
        tuple(request.rid for request in step.preempted),
        tuple(request.rid for request in step.planned_preempted),
        tuple((request.rid, reason) for request, reason in step.aborted),
    )


def _job(ask: Ask) -> Any:
    def after(timeout: float | None) -> float | None:
        return None if timeout is None else ask.arrival + timeout

    return Job(
        ask.rid,
        ask.arrival,
        ask.prompt_tokens,
        ask.max_tokens,
        ask.tier,
        ask.tenant,
        after(ask.ttft_timeout),
        after(ask.total_timeout),
    )
