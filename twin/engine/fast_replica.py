"""A replica that visits only the boundaries between steps at which something happens.

Between two such boundaries the same requests decode on; `FastCore` tells for how many plans that is sure, the step
times of a stretch are arithmetic progressions, and a request that arrives cuts it at the first boundary after it.
Records, counters and final state are those of `Replica`, to the byte.
"""

import math
from array import array
from itertools import repeat
from typing import Any

from simpy.events import Event

from twin.clock import ceil_ps, to_seconds
from twin.engine.core import EngineCore, Step
from twin.engine.fast_core import FastCore
from twin.engine.jump import Jump
from twin.engine.replica import MAX_IDLE_PLANS, EngineStats, Replica, Stuck
from twin.engine.request import EngineRequest
from twin.metrics.gauges import Gauges
from twin.workload.request import Request


class FastReplica(Replica):
    """`Replica` with jumps."""

    _core: FastCore

    def _make_core(self) -> EngineCore:
        core = FastCore(self._config, self.policy)
        core.on_detach = self._give_tokens
        return core

    def _start(self) -> None:
        self._depth = 2 if self._config.async_scheduling else 1
        self._durations = array("q")  # of plan k at k - 1
        self._sizes = array("q")  # tokens it computed, with padding
        self._counted_from: int | None = None  # first plan whose time is shared among its requests
        self._known_ps = 0  # when plan `known` was over
        self._jump: Jump | None = None
        self._steps = 0  # of the jump, until the next visit
        self._visit: Event | None = None
        self._idle_since = -1
        self._idle_visits = 0
        self._asleep = False
        self._look()

    # --- the engine loop ------------------------------------------------------------------

    def _look(self, event: Any = None) -> None:
        """A boundary at which something may happen, or the end of a sleep."""
        if self._asleep:
            self._meter.wakes(self._now_ps)
            self._asleep = False
        if self._jump is not None:
            self._land(self._jump, self._steps)
            self._jump = None
        self._take_in()
        core = self._core
        while len(core.in_flight) < self._depth and core.has_requests():
            step = core.schedule(to_seconds(self._now_ps))
            self._meter.planned(step, self._now_ps)
            for request, reason in step.aborted:
                self._give_up(self._lives[request.rid], reason)
            if step.num_tokens:
                step.duration_ps = self._duration(step)
            elif core.in_flight or not step.preempted:
                break
        if core.in_flight:
            self._take_off()
        else:
            self._doze()

    def _take_off(self) -> None:
        """The oldest step begins; find the next boundary that must be visited."""
        core, now_ps = self._core, self._now_ps
        oldest = core.in_flight[0]
        self._begin_admitted(oldest, now_ps)
        usable = core.pool.num_usable
        self._count(oldest, oldest.duration_ps, usable - core.pool.num_free, core.empty_slots())
        padded = self._step_time.padded_tokens(oldest.num_tokens)
        self._meter.begins(oldest, padded, oldest.duration_ps, now_ps)
        runs = [(1, step.duration_ps, 0) for step in core.in_flight]
        plans = core.regular_plans()
        if plans:
            number, first = len(core.decodes), core.planned + 1
            runs += self._step_time.decode_runs(
                number, number, number, number, core.decodes.context(first), plans
            )
        self._jump = jump = Jump(now_ps, runs)
        steps = plans + 1
        wake_ps = self._wake_ps()
        if steps > 1 and wake_ps <= jump.end(steps):
            steps = jump.first_boundary(int(wake_ps))
        self._visit_after(steps)

    def _wake_ps(self) -> float:
        """When somebody beside a new request may want something."""
        wake_ps: float = self._leaving[0][0] if self._leaving else math.inf
        if self.policy is not None:
            wake = self.policy.next_wake(to_seconds(self._now_ps))
            if wake < math.inf:
                wake_ps = min(wake_ps, ceil_ps(wake))
        return wake_ps

    def _visit_after(self, steps: int) -> None:
        assert self._jump is not None
        self._steps = steps
        if self._visit is not None:
            self._visit.callbacks = []
        self._visit = self._after(self._jump.end(steps) - self._now_ps)
        self._visit.callbacks = [self._look]

    def _doze(self) -> None:
        if self._idle_since == self._now_ps:
            self._idle_visits += 1
            if self._idle_visits > MAX_IDLE_PLANS:
                raise Stuck(f"no progress at {to_seconds(self._now_ps)} s; {self.holders()}")
        else:
            self._idle_since, self._idle_visits = self._now_ps, 0
        self._meter.sleeps(self._now_ps)
        self._asleep = True
        self._sleep().callbacks = [self._look]

    def _wake_up(self) -> None:
        """A request has arrived: it is seen at the first boundary from now on."""
        if self._jump is None:
            super()._wake_up()
        elif self._steps > 1:
            steps = self._jump.first_boundary(self._now_ps)
            if steps < self._steps:
                self._visit_after(steps)

    def _land(self, jump: Jump, steps: int) -> None:
        """`steps` steps of the jump are over: take in what they gave."""
        core, now_ps = self._core, self._now_ps
        self._visit = None
        self._advance(jump, steps - 1)
        last_ps = now_ps - jump.end(steps - 1)
        self._durations.append(last_ps)
        self._sizes.append(self._step_time.padded_tokens(core.in_flight[0].num_tokens))
        plan = core.known + 1
        self._let_leave(now_ps - 1)
        if core.in_flight[0].is_whole:
            outputs = core.update(core.in_flight.popleft(), to_seconds(now_ps))
            core.known, self._known_ps = plan, now_ps
            self._meter.gave(outputs)
            self._deliver(outputs)
            return
        step = core.drop_oldest()
        core.known, self._known_ps = plan, now_ps
        self._tell_first_tokens()
        for output in core.finish(plan, step.admitted, to_seconds(now_ps)):
            self._complete(self._lives[output.request.rid], output.finish_reason or "")
        for step in core.in_flight:
            if not step.duration_ps:
                step.duration_ps = self._duration(step)

    def _advance(self, jump: Jump, steps: int) -> None:
        """`steps` steps of the jump are over and as many plans are made, with nothing else to do at their ends."""
        if not steps:
            return
        core, now_ps = self._core, jump.end(steps)
        explicit, number = list(core.in_flight), len(core.decodes)
        used = core.pool.num_usable - core.pool.num_free
        empty = core.empty_slots()
        if len(explicit) > 1:
            self._begin_admitted(explicit[1], jump.end(1))
        taken = core.make_regular(steps)
        for piece in jump.durations(steps):
            self._durations.extend(piece)
        self._count_regular(jump, steps, explicit, number, used, empty, taken)
        self._meter_regular(jump, steps, explicit, number)
        core.known += steps
        self._known_ps = now_ps
        self._tell_first_tokens()

    def _meter_regular(self, jump: Jump, steps: int, explicit: list[Step], number: int) -> None:
        """Tell the meter that as many plans were made and as many steps begun."""
        meter, padded = self._meter, self._step_time.padded_tokens
        regular = Step()
        regular.is_whole = regular.named_all = False
        regular.num_tokens = regular.num_decodes = number
        size = padded(number)
        begun = [explicit[1] if len(explicit) > 1 else regular, regular]
        self._sizes.append(padded(explicit[0].num_tokens))
        for i in sorted({1, steps}):
            if i > 2:
                total_ps = jump.end(i) - jump.end(2)
                end_ps = jump.end(i)
                meter.repeated(regular, i - 2, size, total_ps, jump.duration(i - 1), end_ps)
            last = self._core.in_flight[-1] if i == steps else regular
            meter.planned(last, jump.end(i))
            step = begun[min(i, 2) - 1]
            meter.begins(step, padded(step.num_tokens), jump.duration(i), jump.end(i))
            if i < steps:
                self._sizes.append(padded(step.num_tokens))
        self._sizes.extend(repeat(size, steps - 2))
        if not self._core.in_flight[0].num_tokens:
            self._core.in_flight[0].num_tokens = number

    def _count_regular(
        self,
        jump: Jump,
        steps: int,
        explicit: list[Step],
        number: int,
        used: int,
        empty: int,
        taken: list[tuple[int, int]],
    ) -> None:
        """Steps 1 to `steps` of the jump began: `explicit` ones planned before it, then ones of `number` tokens.

        `used` blocks and `empty` token slots are those before the jump's plans, of which plan i took `taken` blocks.
        """
        stats, size = self._stats, self._config.block_size
        start_ps, end_ps = jump.end(1), jump.end(steps + 1)
        alike = steps
        padded = self._step_time.padded_tokens
        if len(explicit) > 1:
            tokens = explicit[1].num_tokens
            stats.scheduled_tokens += tokens
            stats.padded_tokens += padded(tokens) - tokens
            alike -= 1
        stats.steps += steps
        stats.scheduled_tokens += alike * number
        stats.padded_tokens += alike * (padded(number) - number)
        stats.busy_ps += end_ps - start_ps
        block_ps = sum(
            blocks * (end_ps - jump.end(k))
            for i, blocks in taken
            for k in (range(i, steps, size) if i < steps else (i,))
        )
        stats.kv_used_block_ps += used * (end_ps - start_ps) + block_ps
        # Plan i leaves `number` fewer slots empty; the last one may have left some members out.
        left_out = number - len(self._core.decodes)
        filled_ps = number * jump.weighted(steps + 1) - left_out * (end_ps - jump.end(steps))
        stats.kv_empty_token_ps += empty * (end_ps - start_ps) + size * block_ps - filled_ps

    def _tell_first_tokens(self) -> None:
        core = self._core
        if core.has_first_tokens():
            for request, plan in core.first_tokens(
                core.known, lambda k: to_seconds(self._end_ps(k))
            ):
                self._lives[request.rid].first_token_ps = self._end_ps(plan)
                self._meter.prompt_tokens += request.num_prompt_tokens

    def _end_ps(self, plan: int) -> int:
        """When `plan`, whose results are known, was over."""
        return self._known_ps - sum(self._durations[plan : self._core.known])

    def _give_tokens(self, request: EngineRequest, has_ended: bool = False) -> None:
        """Write down what a member of `decodes` got and took until now."""
        core, meter = self._core, self._meter
        first, last = request.first_plan, min(core.known, request.end_plan)
        if first <= last:
            life = self._lives[request.rid]
            life.tokens(self._end_ps(last), self._durations[first:last])
            meter.generation_tokens += last - first + 1
            request.first_plan = last + 1
        begun, made = len(self._durations), core.last_plan(request)
        if self._counted_from is not None:
            start = max(request.work_plan, self._counted_from) - 1
            stop = min(begun, made)
            if start < stop:
                meter.worked(
                    request, zip(self._sizes[start:stop], self._durations[start:stop], strict=True)
                )
        if has_ended:
            meter.discard(made - max(begun, request.work_plan - 1))

    # --- what others see ------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A request reaches the replica now."""
        self._catch_up(self._now_ps)
        super().submit(request)
        if self._counted_from is None and self._meter.counts_work:
            self._counted_from = self._core.known + (2 if self._jump is not None else 1)

    def gauges(self, now_ps: int) -> Gauges:
        """The state just before `now_ps`."""
        self._catch_up(now_ps)
        for request in self._core.running_requests:
            self._core.write_out(request)
        return super().gauges(now_ps)

    @property
    def stats(self) -> EngineStats:
        """Counters up to the last boundary that was visited or asked about."""
        stats, known = super().stats, self._core.known
        for request in self._core.decodes.everybody():
            stats.generation_tokens += max(0, min(known, request.end_plan) - request.first_plan + 1)
        return stats

    def _catch_up(self, instant_ps: int) -> None:
        """Take in the boundaries before `instant_ps`."""
        jump = self._jump
        if jump is None or self._steps == 1:
            return
        steps = min(jump.first_boundary(instant_ps) - 1, self._steps - 1)
        if steps:
            self._advance(jump, steps)
            self._jump = jump.after(steps)
            self._steps -= steps

    def finish_run(self, end_ps: int | None = None) -> None:
        """The run is over at `end_ps`."""
        self._catch_up(self._now_ps if end_ps is None else end_ps)
        if self._jump is not None:
            step = self._core.in_flight[0]
            self._durations.append(self._jump.duration(0))
            self._sizes.append(self._step_time.padded_tokens(step.num_tokens))
        for request in self._core.decodes.everybody():
            self._core.write_out(request)
            self._give_tokens(request)
        super().finish_run(end_ps)
