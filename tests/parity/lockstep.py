"""Two engines side by side in one virtual time, compared after every call."""

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from real.scheduler import make_scheduler as make_policy_scheduler
from tests.parity.twin_host import TwinHost
from tests.parity.vllm_host import VllmHost, make_scheduler
from tests.parity.workload import Ask, Workload
from twin.engine.core import EngineCore
from twin.scheduling import Job, Policy, policy_config

MAX_STEPS = 20_000


class Difference(AssertionError):
    """The two engines disagreed."""


def _compare(what: str, where: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
            for key in ours:
                _compare(f"{what}.{key}", where, ours[key], theirs[key])
        raise Difference(f"{where}: {what} differs\n  ours   {ours}\n  vLLM's {theirs}")


def _compare_states(where: str, twin: TwinHost, vllm: VllmHost) -> None:
    ours, theirs = twin.state(), vllm.state()
    for key in ours:
        _compare(key, where, ours[key], theirs[key])


class Lockstep:
    """Drives both engines through one workload in the order of calls of vLLM's engine loop."""

    def __init__(
        self,
        workload: Workload,
        twin: TwinHost,
        vllm: VllmHost,
        add: Callable[[Ask, float], None],
        next_wake: Callable[[float], float],
        check: Callable[[str], None] = lambda where: None,
        clock: Callable[[float], None] = lambda now: None,
    ) -> None:
        self.workload, self.twin, self.vllm = workload, twin, vllm
        self._add, self._next_wake, self._check, self._clock = add, next_wake, check, clock
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Run to the end; raises Difference where the engines part. Returns what happened how often."""
        twin, vllm, counts = self.twin, self.vllm, self.counts
        arrivals = deque(sorted(self.workload.asks, key=lambda a: (a.arrival, a.seq)))
        leaving = deque(
            sorted((a for a in arrivals if a.leaves is not None), key=lambda a: (a.leaves, a.seq))
        )
        depth = self.workload.depth
        in_flight: deque[tuple[Any, Any, float]] = deque()
        now = 0.0
        idle_rounds = 0
        while arrivals or in_flight or twin.has_requests():
            self._clock(now)
            self._leave(leaving, now)
            while arrivals and arrivals[0].arrival <= now:
                ask = arrivals.popleft()
                counts["tied arrivals"] += ask.arrival == now and bool(in_flight)
                self._add(ask, now)
                counts["requests"] += 1
            self._leave(leaving, now)
            where = f"seed {self.workload.seed} step {counts['steps']} t={now}"
            while len(in_flight) < depth and twin.has_requests():
                step, planned = self._schedule(where, now)
                if not step.scheduled:
                    if step.preempted and not in_flight:
                        continue  # a request gave way to itself before any other was looked at
                    break
                duration = self.workload.durations[counts["steps"] % len(self.workload.durations)]
                in_flight.append((step, planned, duration))
            if in_flight:
                idle_rounds = 0
                step, planned, duration = in_flight.popleft()
                now += duration
                self._clock(now)
                self._leave(leaving, now)
                _compare("outputs", where, twin.update(step, now), vllm.update(planned))
                _compare_states(where + " after update", twin, vllm)
                self._check(where + " after update")
                if counts["steps"] > MAX_STEPS:
                    counts["cut short"] += 1
                    return counts
            else:
                coming = [arrivals[0].arrival] if arrivals else []
                coming += [leaving[0].leaves] if leaving else []
                wake = min([*coming, self._next_wake(now)], default=math.inf)
                if wake == math.inf:
                    _compare("requests left", where, False, twin.has_requests())
                    break
                idle_rounds += 1
                if idle_rounds > 1000:
                    raise Difference(f"{where}: no progress")
                now = max(now, wake)
        _compare("requests left", f"seed {self.workload.seed}", False, vllm.has_requests())
        return counts

    def _leave(self, leaving: deque[Ask], now: float) -> None:
        while leaving and leaving[0].leaves <= now:
            ask = leaving.popleft()
            self.twin.abort(ask, now)
            self.vllm.abort(ask)

    def _schedule(self, where: str, now: float) -> tuple[Any, Any]:
        step = self.twin.schedule(now)
        planned = self.vllm.schedule()
        ours = [(r.rid, n) for r, n in step.scheduled.items()]
        theirs = list(planned[0].num_scheduled_tokens.items())
        _compare("schedule", where, ours, theirs)
        _compare("sampled", where, {r.rid: r in step.sampled for r in step.scheduled}, planned[1])
        _compare_states(where, self.twin, self.vllm)
        self._check(where)
        counts = self.counts
        counts["steps"] += 1
        counts["reactive preemptions"] += len(step.preempted)
        counts["planned preemptions"] += len(step.planned_preempted)
        return step, planned


def run_stock(workload: Workload, core: EngineCore | None = None) -> Counter[str]:
    """One workload on an unmodified vLLM and on ours without a policy."""
    config = workload.config
    twin = TwinHost(core or EngineCore(config), config)
    vllm = VllmHost(make_scheduler(config), config)

    def add(ask: Ask, now: float) -> None:
        twin.add(ask, now)
        vllm.add(ask)

    counts = Lockstep(workload, twin, vllm, add, lambda now: math.inf).run()
    counts["hit tokens"] += twin.core.prefix_hit_tokens
    return counts


def make_job(ask: Ask) -> Job:
    """The job both hosts make of a request."""

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


def run_policy(
    workload: Workload, core: EngineCore | None = None, policy: Policy | None = None
) -> Counter[str]:
    """One workload with the same policy in vLLM, through the adapter that is deployed, and in ours.

    `core` with its `policy` stand in for ours in tests of the harness itself.
    """
    config = workload.config
    policy = policy or Policy(policy_config(workload.policy), config.max_model_len)
    twin = TwinHost(core or EngineCore(config, policy), config)
    scheduler = make_scheduler(config, make_policy_scheduler, {"twin": {"policy": workload.policy}})
    vllm = VllmHost(scheduler, config)
    scheduler.arrival_of = lambda request: request.arrival_time

    def add(ask: Ask, now: float) -> None:
        twin.add(ask, now, make_job(ask))
        extra = {"tier": ask.tier, "tenant": ask.tenant}
        if ask.ttft_timeout is not None:
            extra["ttft_s"] = ask.ttft_timeout
        if ask.total_timeout is not None:
            extra["total_s"] = ask.total_timeout
        vllm.add(ask, extra)

    def check(where: str) -> None:
        if scheduler.policy_errors:
            raise Difference(f"{where}: the policy raised inside vLLM")
        _compare("policy", where, policy.stats(), scheduler.policy.stats())
        for ask in workload.asks:
            ours, theirs = policy.state_of(ask.rid), scheduler.policy.state_of(ask.rid)
            _compare(f"state of {ask.rid}", where, ours, theirs)

    def clock(now: float) -> None:
        scheduler.clock = lambda: now

    def next_wake(now: float) -> float:
        wake = policy.next_wake(now)
        _compare("next_wake", f"t={now}", wake, scheduler.policy.next_wake(now))
        return wake

    counts = Lockstep(workload, twin, vllm, add, next_wake, check, clock).run()
    counts["fall-backs"] += scheduler.policy_errors
    for tier in policy.stats()["tiers"].values():
        for reason, number in tier["releases"].items():
            counts[f"release by {reason}"] += number
        for name in ("promotions", "cap_stops", "undone_starts"):
            counts[name.replace("_", " ")] += tier[name]
        for name, number in tier["ended"].items():
            reason, state = name.rsplit(" ", 1)
            if reason != "finished":
                counts[f"aborted while {state}"] += number
                counts[f"abort: {reason}"] += number
    return counts
