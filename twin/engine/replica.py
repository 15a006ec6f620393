"""One vLLM replica in virtual time: the engine loop as a SimPy process.

The loop is vLLM's: take in what has arrived, plan until the pipeline is full, wait for the oldest step, take in its
results. With async scheduling the pipeline holds two steps, so a step is planned when the one before it starts.
Clients that leave are noticed where vLLM notices them: before a step's results are taken in and before the next plan.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simpy
from simpy.events import NORMAL

from twin.agenda import Agenda, Entry
from twin.clock import NEVER_PS, ceil_ps, quotient, to_seconds
from twin.engine.config import EngineConfig
from twin.engine.core import EngineCore, Output, Step
from twin.engine.life import Life
from twin.engine.meter import Meter
from twin.engine.request import EngineRequest, Status
from twin.metrics.engine_time import EngineTime
from twin.metrics.events import Listener
from twin.metrics.gauges import LENGTH_GROUPS, Gauges, length_group, tier_counts
from twin.metrics.records import RequestRecord
from twin.scheduling import Job, Policy, PolicyConfig
from twin.step_time.model import StepTime
from twin.workload.request import Request

MAX_IDLE_PLANS = 10_000
"""Plans without work at one instant before the run is declared stuck."""


class Stuck(Exception):
    """No progress is possible: names who waits and who holds what."""


@dataclass(slots=True)
class EngineStats:
    """What one engine did. Token counts are sums over steps; shares are of all usable KV, weighted by time."""

    steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    scheduled_tokens: int = 0
    padded_tokens: int = 0
    """Tokens computed only to reach a captured CUDA-graph size."""
    busy_ps: int = 0
    kv_used_block_ps: int = 0
    """Blocks in use, integrated over busy_ps; integers, so that the sum does not depend on how it is split."""
    kv_empty_token_ps: int = 0
    """Token slots held but empty (last pages), integrated over busy_ps."""
    kv_blocks: int = 0
    """Usable blocks."""
    kv_tokens: int = 0
    """Usable token slots."""
    prompt_tokens: int = 0
    """Of requests that have a first token, as vLLM counts them."""
    generation_tokens: int = 0
    """Tokens generated, as vLLM counts them."""
    decode_tokens: int = 0
    """Tokens computed by requests with one new token at or after the end of their prompt."""
    time: EngineTime = field(default_factory=EngineTime)
    """What busy_ps was for."""

    @property
    def kv_usage_mean(self) -> float:
        """Mean share of KV blocks in use while the engine was busy."""
        return quotient(self.kv_used_block_ps, self.busy_ps * self.kv_blocks or 1)

    @property
    def kv_waste_mean(self) -> float:
        """Mean share of KV token slots held but empty while the engine was busy."""
        return quotient(self.kv_empty_token_ps, self.busy_ps * self.kv_tokens or 1)


class Replica:
    """Serves the requests submitted to it; hands a record to `on_record` for each one that ends.

    `policy_config` None is vLLM without a policy of ours; `priorities` (tier -> number, smaller first) then says what
    its `policy=priority` sorts by. `listener` is told of events.
    """

    def __init__(
        self,
        env: simpy.Environment,
        config: EngineConfig,
        step_time: StepTime,
        policy_config: PolicyConfig | None,
        on_record: Callable[[RequestRecord], None],
        index: int = 0,
        priorities: Mapping[str, int] | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.index = index
        self._env = env
        self._agenda = Agenda(env)
        self._config = config
        self._step_time = self._healthy = step_time
        self._on_record = on_record
        self._priority: int = NORMAL + index
        self._priorities = dict(priorities or {})
        self._lives: dict[Hashable, Life] = {}
        self.policy = (
            None
            if policy_config is None
            else Policy(policy_config, config.max_model_len, self._true_output_tokens)
        )
        self._core = self._make_core()
        by_priority = policy_config is None and config.scheduling_policy == "priority"
        ranks = self._priorities if by_priority else {}
        self._meter = Meter(index, self._core, self._lives, ranks, listener)
        self._inbox: list[Request] = []
        self._leaving: list[tuple[int, int]] = []  # (instant, request) of clients' deadlines
        self._alarm: Entry | None = None
        self._is_dead = False
        usable = config.num_gpu_blocks - 1
        self._stats = EngineStats(kv_blocks=usable, kv_tokens=usable * config.block_size)
        self._start()

    def _make_core(self) -> EngineCore:
        return EngineCore(self._config, self.policy)

    def _start(self) -> None:
        self._env.process(self._run())

    # --- what others see ------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait, held ones and those not taken in yet included."""
        if self._is_dead:
            return len(self._lives) - self.num_running
        return len(self._core.waiting) + len(self._inbox)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._core.running_requests)

    @property
    def num_inflight(self) -> int:
        """Requests submitted and not ended."""
        return len(self._lives)

    @property
    def kv_usage(self) -> float:
        """Share of the usable KV blocks that is in use now."""
        return self.kv_used(self._now_ps)

    def kv_used(self, now_ps: int) -> float:
        """The same just before `now_ps`: not before the last event here and not after the next one anywhere."""
        free: int = self._core.pool.num_free
        usable: int = self._core.pool.num_usable
        return 1.0 - free / usable

    def settle(self) -> None:
        """Whatever happens here now has happened: what is submitted at this instant comes after it."""

    @property
    def stats(self) -> EngineStats:
        """Counters up to now."""
        core, stats = self._core, self._stats
        stats.preemptions = core.num_preemptions
        stats.recomputed_tokens = core.recomputed_tokens
        stats.prefix_hit_tokens = core.prefix_hit_tokens
        stats.prefix_query_tokens = core.prefix_query_tokens
        stats.prompt_tokens = self._meter.prompt_tokens
        stats.generation_tokens = self._meter.generation_tokens
        stats.decode_tokens = self._meter.decode_tokens
        stats.time = self._meter.time
        return stats

    def gauges(self, now_ps: int) -> Gauges:
        """The state just before `now_ps`: not before the last event here and not after the next one anywhere."""
        core, stats = self._core, self.stats
        size, usable = self._config.block_size, core.pool.num_usable
        waiting: dict[str, int] = {}
        running: dict[str, int] = {}
        for life in self._lives.values():
            by_tier = running if life.engine.status is Status.RUNNING else waiting
            by_tier[life.request.tier] = by_tier.get(life.request.tier, 0) + 1
        groups = [[0, 0, 0] for _ in LENGTH_GROUPS]
        for request in core.running_requests:
            group = groups[length_group(request.num_prompt_tokens)]
            slots = request.num_blocks * size
            group[0] += 1
            group[1] += slots
            group[2] += slots - request.num_computed_tokens
        policy = {} if self.policy is None else self.policy.stats()["tiers"]
        return Gauges(
            waiting=waiting,
            held={tier: did["held"] for tier, did in policy.items()},
            counts={tier: tier_counts(did) for tier, did in policy.items()},
            pressure=None if self.policy is None else self.policy.pressure,
            running=running,
            kv_used=1 - core.pool.num_free / usable,
            kv_wasted=sum(empty for _, _, empty in groups) / (usable * size),
            kv_cached=core.pool.num_cached_free / usable,
            kv_by_length=tuple((n, slots, empty) for n, slots, empty in groups),
            steps=stats.steps,
            busy_ps=stats.busy_ps - max(0, self._meter.step_end_ps - now_ps),
            prefill_tokens=stats.scheduled_tokens - stats.decode_tokens,
            decode_tokens=stats.decode_tokens,
            padded_tokens=stats.padded_tokens,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            preemptions=stats.preemptions,
            recomputed_tokens=stats.recomputed_tokens,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
        )

    def submit(self, request: Request) -> None:
        """A request reaches the replica now. It must be able to run: prompt_tokens < max_model_len."""
        config = self._config
        room = config.max_model_len - request.prompt_tokens
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        arrival = to_seconds(request.arrival_ps)
        engine = EngineRequest(
            request.index,
            request.index,
            arrival,
            request.prompt_tokens,
            limit,
            request.output_tokens,
            self._core.keys_of(request.prompt, request.reply),
            self._priorities.get(request.tier, 0),
        )
        life = Life(request, engine)
        if self.policy is not None:
            engine.job = Job(
                request.index,
                arrival,
                request.prompt_tokens,
                limit,
                request.tier,
                request.tenant,
                _seconds(life.ttft_deadline_ps),
                _seconds(life.deadline_ps),
            )
        elif life.is_impatient:
            for deadline_ps in (life.ttft_deadline_ps, life.deadline_ps):
                if deadline_ps is not None:
                    heapq.heappush(self._leaving, (deadline_ps, request.index))
        self._lives[request.index] = life
        self._meter.arrives(life, self._now_ps)
        if self._is_dead:
            self._mind(life)
            return
        self._inbox.append(request)
        self._wake_up()

    def forget_past(self) -> None:
        """Nobody will ask again for what records handed in so far refer to: the steps that gave their tokens."""

    def first_tokens(self, now_ps: int) -> list[tuple[int, int]]:
        """(request, picoseconds from its arrival to its first token) of those inside that have one before `now_ps`."""
        return [
            (life.request.index, life.first_token_ps - life.request.arrival_ps)
            for life in self._lives.values()
            if life.first_token_ps is not None
        ]

    def finish_run(self, end_ps: int | None = None) -> None:
        """The run is over at `end_ps` (None = now): everything still inside is recorded as unfinished.

        Clients that have left by then have timed out, though the engine may not have noticed yet.
        """
        end_ps = self._now_ps if end_ps is None else end_ps
        if not self._is_dead:
            self._close(end_ps)
        self._write_all(end_ps, None, "unfinished", "end_of_run")

    def kill(self, reason: str) -> None:
        """The engine is gone now: everything inside is recorded as aborted, and nothing happens here any more."""
        self._stop()
        self._write_all(self._now_ps, self._now_ps, "aborted", reason)

    def freeze(self) -> None:
        """The engine stops for good and nobody is told: what is inside stays, more may come, and clients leave."""
        self._stop()
        for life in list(self._lives.values()):
            self._mind(life)

    def disconnect(self, reason: str, request: int | None = None) -> None:
        """The connections of all clients, or of that of one request, break now.

        They are aborted, which the engine notices as it does time-outs.
        """
        now_ps = self._now_ps
        for life in self._lives.values() if request is None else [self._lives[request]]:
            life.cut, life.is_impatient = (now_ps, "aborted", reason), True
            heapq.heappush(self._leaving, (now_ps, life.request.index))
        if self._is_dead:
            self._let_frozen_leave()
        else:
            self._look_again()

    def slow(self, factor: float) -> None:
        """Steps that begin after now take `factor` times as long as those of a healthy engine."""
        self._step_time = self._healthy if factor == 1 else self._healthy.slowed(factor)

    def _look_again(self) -> None:
        """Somebody has left: it is seen at the first boundary from now on."""
        if self._alarm is not None:
            self._ring(self._alarm)

    def _stop(self) -> None:
        """Nothing happens here after now."""
        if not self._is_dead:
            self._close(self._now_ps)
            self._is_dead = True
            self._alarm = None

    def _mind(self, life: Life) -> None:
        """In a frozen engine nobody notices that a client leaves; so be there when it does."""
        for deadline_ps in (life.ttft_deadline_ps, life.deadline_ps):
            if deadline_ps is not None:
                delay_ps = max(0, deadline_ps - self._now_ps)
                self._after(delay_ps, lambda _: self._let_frozen_leave())

    def _let_frozen_leave(self) -> None:
        for life in list(self._lives.values()):
            left = life.left(self._now_ps + 1)
            if left is not None:
                self._write(life, *left)

    def _close(self, end_ps: int) -> None:
        """Nothing after `end_ps` counts."""
        self._take_back(self._meter.cut(end_ps))

    def _write_all(self, end_ps: int, finish_ps: int | None, outcome: str, reason: str) -> None:
        for life in list(self._lives.values()):
            left = life.left(end_ps)
            if left is None:
                self._write(life, finish_ps, outcome, reason)
            else:
                self._write(life, *left)

    def holders(self) -> str:
        """Who waits and who holds how many KV blocks, for people."""
        core = self._core
        held = sorted(core.running_requests, key=lambda request: -request.num_blocks)[:5]
        holding = ", ".join(f"request {r.rid}: {r.num_blocks} blocks" for r in held) or "nobody"
        return (
            f"replica {self.index}: {self.num_running} running, {self.num_waiting} waiting, "
            f"{core.pool.num_free} of {core.pool.num_usable} KV blocks free; holding: {holding}"
        )

    # --- the engine loop ------------------------------------------------------------------

    def _run(self) -> Generator[Any, Any, None]:
        core = self._core
        depth = 2 if self._config.async_scheduling else 1
        in_flight: deque[Step] = deque()
        idle_plans = 0
        while True:
            self._take_in()
            while len(in_flight) < depth and core.has_requests():
                step = core.schedule(to_seconds(self._now_ps))
                self._meter.planned(step, self._now_ps)
                for request, reason in step.aborted:
                    self._give_up(self._lives[request.rid], reason)
                if step.scheduled:
                    in_flight.append(step)
                elif in_flight or not step.preempted:
                    break
                # Else a request gave way to itself before any other was looked at: vLLM's loop plans again.
            if in_flight:
                idle_plans = 0
                step = in_flight.popleft()
                step.duration_ps = self._duration(step)
                self._begin(step)
                yield self._after(step.duration_ps)
                if self._is_dead:
                    return
                self._let_leave(self._now_ps - 1)  # a token in the very instant still counts
                outputs = core.update(step, to_seconds(self._now_ps))
                self._meter.gave(outputs)
                self._deliver(outputs)
                continue
            instant = self._now_ps
            self._meter.sleeps(instant)
            yield self._sleep()
            if self._is_dead:
                return
            self._meter.wakes(self._now_ps)
            idle_plans = idle_plans + 1 if self._now_ps == instant else 0
            if idle_plans > MAX_IDLE_PLANS:
                raise Stuck(f"no progress at {to_seconds(instant)} s; {self.holders()}")

    def _take_in(self) -> None:
        now = to_seconds(self._now_ps)
        for request in self._inbox:
            self._core.add(self._lives[request.index].engine, now)
        self._inbox.clear()
        self._let_leave(self._now_ps)

    def _duration(self, step: Step) -> int:
        return self._step_time.step_ps(
            step.num_tokens,
            step.num_seqs,
            step.num_sampled,
            step.prefill_pairs,
            step.num_decodes,
            step.decode_context,
        )

    def _begin(self, step: Step) -> None:
        """The step starts."""
        core, size = self._core, self._config.block_size
        self._begin_admitted(step, self._now_ps)
        empty = sum(r.num_blocks * size - r.num_computed_tokens for r in core.running_requests)
        self._count(step, step.duration_ps, core.pool.num_usable - core.pool.num_free, empty)
        padded = self._step_time.padded_tokens(step.num_tokens)
        self._meter.begins(step, padded, step.duration_ps, self._now_ps)

    def _begin_admitted(self, step: Step, now_ps: int) -> None:
        for request in step.admitted:
            life = self._lives.get(request.rid)
            if life is not None:
                self._meter.starts(life, now_ps)

    def _count(self, step: Step, duration_ps: int, used_blocks: int, empty_slots: int) -> None:
        """A step of `duration_ps` starts, with so many blocks in use and so many of their token slots empty."""
        stats = self._stats
        stats.steps += 1
        stats.scheduled_tokens += step.num_tokens
        stats.padded_tokens += self._step_time.padded_tokens(step.num_tokens) - step.num_tokens
        stats.busy_ps += duration_ps
        stats.kv_used_block_ps += duration_ps * used_blocks
        stats.kv_empty_token_ps += duration_ps * empty_slots

    def _take_back(self, beyond_ps: int) -> None:
        """So much of the step that runs lies beyond the end of the run."""
        core, stats, size = self._core, self._stats, self._config.block_size
        empty = sum(r.num_blocks * size - r.num_computed_tokens for r in core.running_requests)
        stats.busy_ps -= beyond_ps
        stats.kv_used_block_ps -= beyond_ps * (core.pool.num_usable - core.pool.num_free)
        stats.kv_empty_token_ps -= beyond_ps * empty

    def _deliver(self, outputs: list[Output]) -> None:
        now_ps = self._now_ps
        for output in outputs:
            life = self._lives[output.request.rid]
            life.token(now_ps)
            if output.finish_reason is not None:
                self._complete(life, output.finish_reason)

    def _complete(self, life: Life, reason: str) -> None:
        """The engine has produced its last token; whether that is in time is the client's to say."""
        left = life.left(self._now_ps) if life.is_impatient else None
        if left is None:
            self._write(life, self._now_ps, "completed", reason)
        else:
            self._write(life, *left)

    def _after(self, delay_ps: int, act: Callable[[Any], object] | None = None) -> Entry:
        """Something to happen `delay_ps` from now. At one instant, replicas come in the order of their index."""
        entry = Entry(act)
        self._agenda.put(entry, self._priority, delay_ps)
        return entry

    def _sleep(self, act: Callable[[Any], object] | None = None) -> Entry:
        """Until a request arrives, the policy may change its mind, or a client leaves."""
        self._alarm = Entry(act)
        wake_ps = self._leaving[0][0] if self._leaving else NEVER_PS
        if self.policy is not None and self._core.has_requests():
            wake = self.policy.next_wake(to_seconds(self._now_ps))
            if wake < math.inf:
                wake_ps = min(wake_ps, ceil_ps(wake))
        if wake_ps < NEVER_PS:
            self._after(max(0, wake_ps - self._now_ps), partial(self._ring, self._alarm))
        return self._alarm

    @property
    def _now_ps(self) -> int:
        return self._env._now  # type: ignore[return-value]  # SimPy calls its time a float

    def _wake_up(self) -> None:
        if self._alarm is not None:
            self._ring(self._alarm)

    def _ring(self, alarm: Entry, timer: Entry | None = None) -> None:
        if self._alarm is not None and alarm is self._alarm:
            self._alarm = None
            self._agenda.put(alarm, self._priority, 0)

    # --- clients --------------------------------------------------------------------------

    def _let_leave(self, until_ps: int) -> None:
        """Without a policy of ours, a deadline that has passed by `until_ps` is a client that disconnects."""
        while self._leaving and self._leaving[0][0] <= until_ps:
            _, index = heapq.heappop(self._leaving)
            life = self._lives.get(index)
            left = None if life is None else life.left(until_ps + 1)
            if life is not None and left is not None:
                now = to_seconds(self._now_ps)
                if index not in self._core.requests:
                    self._inbox.remove(life.request)
                    if self.policy is not None:
                        self._core.add(life.engine, now)
                if index in self._core.requests:
                    self._core.abort(life.engine, now, left[2])
                self._write(life, *left)

    def _give_up(self, life: Life, reason: str) -> None:
        """The policy has aborted the request because a deadline has passed."""
        left = life.left(self._now_ps + 1)
        self._write(life, *(left or (self._now_ps, "timed_out", reason)))

    def _write(self, life: Life, finish_ps: int | None, outcome: str, reason: str) -> None:
        self._meter.ends(life, finish_ps, outcome, reason, self._now_ps)
        del self._lives[life.request.index]
        self._on_record(life.record(self.index, finish_ps, outcome, reason))

    def _true_output_tokens(self, index: Any) -> int:
        return self._lives[index].request.output_tokens


def _seconds(ps: int | None) -> float | None:
    return None if ps is None else to_seconds(ps)
