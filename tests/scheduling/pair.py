"""A small engine that drives the policy and its naive model with the same calls and compares every answer.

Each method is one thing that can happen to a replica; the state machine and the long random runs choose among them.
"""

import copy
import gc
import math
from collections.abc import Hashable
from types import FunctionType, ModuleType
from typing import Any

from tests.scheduling.naive import NaivePolicy
from twin.scheduling import Job, Plan, Policy, PolicyConfig
from twin.scheduling.orders import View

MAX_MODEL_LEN = 8192
BLOCK_SIZE = 256
TENANTS = ("a", "b", "c")


def least_served(job: Job, view: View) -> tuple[Any, ...]:
    """An order of the user's own, by dotted path."""
    return (view.service(job.tenant), -view.expected_output(job), job.arrival, job.seq)


class FakeHost:
    """An engine's slots and blocks, without its tokens' timing."""

    def __init__(self, num_slots: int, num_blocks: int, watermark_blocks: int = 0) -> None:
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.watermark_blocks = watermark_blocks
        self.max_model_len = MAX_MODEL_LEN
        self.running: list[Job] = []
        self.blocks: dict[Hashable, int] = {}
        self.shared: dict[Hashable, int] = {}
        self.output: dict[Hashable, int] = {}

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - sum(self.blocks.values())

    @property
    def free_slots(self) -> int:
        return self.num_slots - len(self.running)

    def blocks_of(self, job: Job) -> int:
        return self.blocks[job.rid] - self.shared[job.rid]

    def tokens_of(self, job: Job) -> tuple[int, int]:
        return (job.prompt_tokens, self.output.get(job.rid, 0))

    def blocks_for(self, job: Job) -> int:
        tokens = min(job.prompt_tokens + self.output.get(job.rid, 0), MAX_MODEL_LEN)
        return -(-tokens // BLOCK_SIZE)

    def has_room(self, job: Job) -> bool:
        reserve = self.watermark_blocks if self.running else 0
        return self.free_slots > 0 and self.blocks_for(job) + reserve <= self.free_blocks

    def admit(self, job: Job, shared: int) -> None:
        self.running.append(job)
        self.blocks[job.rid] = self.blocks_for(job)
        self.shared[job.rid] = min(shared, self.blocks_for(job))

    def drop(self, job: Job) -> None:
        if job in self.running:
            self.running.remove(job)
            del self.blocks[job.rid], self.shared[job.rid]


class Pair:
    """A policy, its naive model and the engine between them."""

    def __init__(self, config: PolicyConfig, host: FakeHost, spread_ids: bool = True) -> None:
        self.config = config
        self.host = host
        self.truth: dict[Hashable, int] = {}
        truth = self.truth.__getitem__ if config.estimator == "oracle" else None
        self.policy = Policy(config, MAX_MODEL_LEN, truth)
        self.naive = NaivePolicy(config, MAX_MODEL_LEN, truth)
        self.is_charged = any(t.order == "fair" or "." in t.order for t in config.tiers)
        self.now = 0.0
        self.jobs: dict[Hashable, Job] = {}
        self.gone_rids: set[Hashable] = set()
        self.preempted: set[Hashable] = set()
        self.ending: set[Hashable] = set()
        self.run_keys: dict[Hashable, tuple[Any, ...]] = {}
        self.moves: dict[Hashable, int] = {}
        self.spread_ids = spread_ids
        self.trace: list[Any] = []

    # --- what happens ---------------------------------------------------------------------

    def submit(
        self,
        tier: str,
        tenant: str,
        prompt_tokens: int,
        declared: int | None = None,
        late: float = 0.0,
        ttft: float | None = None,
        total: float | None = None,
    ) -> Job:
        n, room = len(self.jobs), MAX_MODEL_LEN - prompt_tokens
        rid = f"r{n * 7919 % 10007}" if self.spread_ids else f"r{n}"
        arrival = self.now - late
        job = Job(
            rid,
            arrival,
            prompt_tokens,
            room + n % 3 if declared is None else declared,
            tier,
            tenant,
            None if ttft is None else arrival + ttft,
            None if total is None else arrival + total,
        )
        self.jobs[rid] = job
        self.truth[rid] = 1 + n * 37 % 500
        self.policy.submit(job, self.now)
        self.naive.submit(job, self.now)
        assert job.seq == n
        self.check()
        return job

    def step(
        self, seconds: float, aside: int = 0, budget: int = 99, preempts: bool = False
    ) -> Plan:
        """One step of the engine, `seconds` after the last: `aside` says by its bits which jobs are set aside,
        `budget` how many are admitted at most, `preempts` whether blocks run out in the running loop."""
        self.now += seconds
        self.preempted = set()
        waiting = {r for r in self.alive() if self.policy.state_of(r) != "running"}
        plan = self.policy.begin_step(self.now, self.host)
        expected = self.naive.begin_step(self.now, self.host)
        assert plan == expected
        self.trace.append(
            [(job.seq, why) for job, why in plan.abort] + [job.seq for job in plan.preempt]
        )
        self.ending = {job.rid for job, _ in plan.abort}
        assert len(self.ending) == len(plan.abort)
        assert not self.ending & {job.rid for job in plan.preempt}
        self.check_holds()
        self.check_run_keys(waiting)
        for job, reason in plan.abort:
            self.leave(job, reason)
        for job in plan.preempt:
            self.preempt(job)
        self.host.running.sort(key=self.policy.run_key)
        if preempts and self.host.running:
            self.preempt(self.host.running[-1])
        else:
            self.admit(aside, budget)
        return plan

    def admit(self, aside: int, budget: int) -> None:
        set_aside: list[Job] = []
        while self.host.free_slots > 0 and (job := self.policy.head(self.now)) and budget > 0:
            budget -= 1
            is_aside, aside = aside & 1, aside >> 1
            if not is_aside and not self.host.has_room(job):
                break
            self.policy.start(job, self.now)
            self.naive.start(job, self.now)
            if is_aside:
                set_aside.append(job)
            else:
                self.host.admit(job, shared=aside & 3)
            self.check()
        for job in set_aside:
            self.policy.undo_start(job, self.now)
            self.naive.undo_start(job, self.now)
            self.check()

    def preempt(self, job: Job) -> None:
        self.host.drop(job)
        self.preempted.add(job.rid)
        self.policy.requeue(job, self.now)
        self.naive.requeue(job, self.now)
        self.check()

    def token(self, job: Job, seconds: float = 0.0) -> None:
        """A token of a job that runs, or a stale one of a job preempted since, `seconds` after the last event. The
        policy is told of the first."""
        self.now += seconds
        self.host.output[job.rid] = self.host.output.get(job.rid, 0) + 1
        if self.host.output[job.rid] == 1:
            self.policy.first_token(job, self.now)
            self.naive.first_token(job, self.now)
            self.check()

    def finish(self, job: Job, tokens: int) -> None:
        self.token(job)
        self.host.output[job.rid] += tokens - 1
        self.leave(job, "finished")

    def leave(self, job: Job, reason: str) -> None:
        self.host.drop(job)
        tokens = self.host.output.pop(job.rid, 0)
        self.policy.gone(job, self.now, reason, tokens)
        self.naive.gone(job, self.now, reason, tokens)
        self.gone_rids.add(job.rid)
        self.check()

    # --- what must hold -------------------------------------------------------------------

    def alive(self) -> list[Hashable]:
        return [rid for rid in self.jobs if rid not in self.gone_rids]

    def in_state(self, *states: str) -> list[Hashable]:
        return [rid for rid in self.alive() if self.policy.state_of(rid) in states]

    def states(self) -> list[str | None]:
        """Of all jobs ever submitted, in that order."""
        return [self.policy.state_of(rid) for rid in self.jobs]

    def preempted_alive(self) -> list[Hashable]:
        """Preempted in this step and not gone since."""
        return [rid for rid in self.alive() if rid in self.preempted]

    def tier_name(self, number: int) -> str:
        return self.config.tiers[number % len(self.config.tiers)].name

    def check(self) -> None:
        """Every answer equals the model's, and the invariants that need no memory hold."""
        policy, naive, now = self.policy, self.naive, self.now
        head = policy.head(now)
        assert head is naive.head(now)
        assert head is policy.head(now), "head is idempotent"
        assert head is None or head.rid not in self.preempted, "not again in this step"
        wake = policy.next_wake(now)
        assert wake == naive.next_wake(now)
        assert wake >= now
        assert policy.pressure == naive.pressure
        for tenant in TENANTS if self.is_charged else ():
            assert policy.service(tenant) == naive.service(tenant)
        for rid, job in self.jobs.items():
            state = policy.state_of(rid)
            assert state == naive.state_of(rid)
            assert (state is None) == (rid in self.gone_rids), "nothing vanishes"
            if state in ("ready", "running"):
                assert policy.run_key(job) == naive.run_key(job)
            if state is not None:
                assert policy.expected_output(job) == naive.expected_output(job)
                assert policy.due(job) == naive.due(job)
            if state == "held" and rid not in self.ending:
                wait = self.tier_of(job).max_wait
                assert wait is not None
                assert wake <= max(now, job.arrival + wait)
        self.check_caps()
        self.trace.append((None if head is None else head.seq, wake))

    def tier_of(self, job: Job) -> Any:
        tiers = self.config.tiers
        return tiers[0] if len(tiers) == 1 else next(t for t in tiers if t.name == job.tier)

    def check_caps(self) -> None:
        running = [j for r, j in self.jobs.items() if self.policy.state_of(r) == "running"]
        for tier in self.config.tiers:
            same = [job for job in running if self.tier_of(job) is tier]
            tokens = sum(j.prompt_tokens + self.policy.expected_output(j) for j in same)
            assert tier.max_running is None or len(same) <= tier.max_running
            limit = tier.max_running_tokens
            assert limit is None or tokens <= limit or len(same) == 1

    def check_holds(self) -> None:
        """After begin_step no job is held beyond its wait."""
        for rid in self.alive():
            if rid not in self.ending and self.policy.state_of(rid) == "held":
                job = self.jobs[rid]
                assert self.now < job.arrival + self.tier_of(job).max_wait

    def check_run_keys(self, waiting: set[Hashable]) -> None:
        """run_key moves only up, only while the job waits, at most once a rank."""
        for rid in self.alive():
            if self.policy.state_of(rid) == "held":
                continue
            key = self.policy.run_key(self.jobs[rid])
            before = self.run_keys.setdefault(rid, key)
            if key != before:
                assert rid in waiting
                assert key[0] < before[0]
                self.moves[rid] = self.moves.get(rid, 0) + before[0] - key[0]
                assert self.moves[rid] <= len(self.config.tiers) - 1
                self.run_keys[rid] = key

    def check_end(self) -> None:
        """Once all jobs are gone and their timers have passed, the policy keeps none of them."""
        for rid in self.alive():
            self.leave(self.jobs[rid], "aborted")
        self.host.running.clear()
        self.step(1e6)
        assert self.policy.next_wake(self.now) == math.inf
        seen: set[int] = set()
        unseen: list[Any] = [self.policy]
        while unseen:
            thing = unseen.pop()
            if id(thing) not in seen and not isinstance(thing, type | ModuleType | FunctionType):
                seen.add(id(thing))
                unseen += gc.get_referents(thing)
                assert not isinstance(thing, Job)

    def check_wake(self) -> None:
        """Nothing can change before next_wake, and then something does."""
        wake = self.policy.next_wake(self.now)
        if wake == self.now:
            return
        now = self.answers(self.now)
        last = math.nextafter(min(wake, 1e9), 0.0)
        for instant in (self.now + (last - self.now) / 2, last):
            assert self.answers(instant) == now
        if wake < math.inf:
            assert self.answers(wake) != now

    def answers(self, now: float) -> Any:
        """All that a step at `now` would say, asked of a copy."""
        memo = {id(job): job for job in self.jobs.values()}
        policy = copy.deepcopy(self.policy, memo)
        plan = policy.begin_step(now, self.host)
        aborted = {job.rid for job, _ in plan.abort}
        alive = [self.jobs[rid] for rid in self.alive()]
        states = [(policy.state_of(job.rid), policy.run_key(job)) for job in alive]
        heads = []
        for rid in aborted:
            policy.gone(self.jobs[rid], now, "timeout", 0)
        while (job := policy.head(now)) is not None:
            heads.append(job.rid)
            policy.start(job, now)
        return plan, states, heads


def pair_of(*tiers: dict[str, Any], slots: int = 99, blocks: int = 999, **policy: Any) -> Pair:
    """A policy of these tiers on an engine with these limits."""
    config = PolicyConfig.from_dict({"tiers": list(tiers), **policy})
    return Pair(config, FakeHost(slots, blocks))
