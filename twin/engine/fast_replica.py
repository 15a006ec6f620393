"""A replica that visits only the boundaries between steps at which something happens.

Between two such boundaries the same requests decode on; `FastCore` tells for how many plans that is sure, the step
times of a stretch are arithmetic progressions, and a request that arrives cuts it at the first boundary after it.
Records, counters and final state are those of `Replica`, to the byte.
"""

import math
from array import array
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from twin.agenda import Entry
from twin.clock import NEVER_PS, ceil_ps, times, to_seconds
from twin.engine.core import EngineCore, Step
from twin.engine.fast_core import FastCore
from twin.engine.jump import Jump
from twin.engine.replica import MAX_IDLE_PLANS, EngineStats, Replica, Stuck
from twin.engine.request import EngineRequest
from twin.metrics.gauges import Gauges
from twin.metrics.token_times import StepGaps, Timeline
from twin.workload.request import Request

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int; compiled, one of 64 bits


class FastReplica(Replica):
    """`Replica` with jumps."""

    def _make_core(self) -> EngineCore:
        self._fast = FastCore(self._config, self.policy)
        self._fast.on_detach = self._give_tokens
        return self._fast

    def _start(self) -> None:
        self._depth = 2 if self._config.async_scheduling else 1
        self._timeline = Timeline(first=1)  # of plans, which are numbered from 1
        self._counted_from: int | None = None  # first plan whose time is shared among its requests
        self._sizes = array("q")  # tokens computed, with padding, by plan from that one on
        # The jump; how many of its steps are over, as far as the books go; and how many will be at the next visit.
        self._jump: Jump | None = None
        self._over = 0
        self._visit_at = 0
        self._visit: Entry | None = None
        self._on_visit = self._look
        self._idle_since = -1
        self._idle_visits = 0
        self._asleep = False
        self._wake: float = math.inf  # of the policy, and the picosecond for it
        self._wake_at_ps: i64 = NEVER_PS
        self._early: list[
            EngineRequest
        ] = []  # whom the core has though they are due at the next boundary
        # Blocks in use and empty token slots since an instant, and their integrals until then.
        self._used = self._empty = 0
        self._used_ps = self._empty_ps = 0
        self._noted_ps = 0
        self._look()

    # --- the engine loop ------------------------------------------------------------------

    def _look(self, event: Any = None) -> None:
        """A boundary at which something may happen, or the end of a sleep."""
        if self._is_dead:
            return
        now_ps = self._now_ps
        if self._asleep:
            self._meter.wakes(now_ps)
            self._asleep = False
        if self._jump is not None:
            self._land(self._jump, now_ps)
            self._jump = None
            if self._early:
                self._early.clear()
        if self._inbox or self._leaving:
            self._take_in()
        core = self._fast
        while len(core.in_flight) < self._depth and core.requests:
            step = core.schedule(to_seconds(now_ps))
            self._meter.planned(step, now_ps)
            if step.aborted:
                for request, reason in step.aborted:
                    self._give_up(self._lives[request.rid], reason)
            if step.num_tokens:
                step.duration_ps = self._duration(step)
            elif core.in_flight or not step.preempted:
                break
        self._note_kv(now_ps)
        if core.in_flight:
            self._take_off(now_ps)
        else:
            self._doze(now_ps)

    def _note_kv(self, now_ps: int) -> None:
        core = self._fast
        passed_ps = now_ps - self._noted_ps
        self._used_ps += times(self._used, passed_ps)
        self._empty_ps += times(self._empty, passed_ps)
        self._noted_ps = now_ps
        self._used, self._empty = core.blocks.num_usable - core.blocks.num_free, core.empty_slots()

    def _take_off(self, now_ps: int) -> None:
        """The oldest step begins; find the next boundary that must be visited."""
        core = self._fast
        oldest = core.in_flight[0]
        if oldest.admitted:
            self._begin_admitted(oldest, now_ps)
        self._begins(oldest, oldest.duration_ps, now_ps)
        self._jump = jump = Jump(now_ps)
        for step in core.in_flight:
            jump.add(1, step.duration_ps, 0)
        steps = 1
        plans = core.regular_plans()
        if plans:
            number = core.decodes.number
            context = core.decodes.context(core.planned + 1)
            equal, each_ps, first_ps, growth_ps = self._step_time.decode_runs(
                number, number, number, number, context, plans
            )
            if jump.add(equal, each_ps, 0):
                jump.add(plans - equal, first_ps, growth_ps)
            steps = jump.steps - len(core.in_flight) + 1
            if self.policy is not None or self._leaving:
                wake_ps = self._wake_ps(now_ps)
                if wake_ps <= jump.end(steps):
                    steps = jump.find(wake_ps, 1)
        self._over = 0
        self._visit_after(jump, steps, now_ps)

    def _begins(self, step: Step, duration_ps: int, now_ps: int) -> None:
        """An explicit step of this length begins."""
        tokens, stats = step.num_tokens, self._stats
        size = self._step_time.padded[tokens]
        stats.steps += 1
        stats.scheduled_tokens += tokens
        stats.padded_tokens += size - tokens
        stats.busy_ps += duration_ps
        if self._counted_from is not None:
            self._sizes.append(size)
        self._meter.begins(step, size, duration_ps, now_ps)

    def _wake_ps(self, now_ps: int) -> "i64":
        """When, from now on, somebody beside a new request may want something."""
        wake_ps: i64 = NEVER_PS
        if self._leaving:
            wake_ps = min(self._leaving[0][0], NEVER_PS)
        if self.policy is not None:
            wake = self.policy.next_wake(to_seconds(now_ps))
            if wake != self._wake:
                self._wake = wake
                self._wake_at_ps = NEVER_PS if wake == math.inf else min(ceil_ps(wake), NEVER_PS)
            wake_ps = min(wake_ps, self._wake_at_ps)
        return wake_ps

    def _visit_after(self, jump: Jump, steps: int, now_ps: int) -> None:
        """Be there when so many steps of the jump are over."""
        self._visit_at = steps
        if self._visit is not None:
            self._visit.callbacks = []
        self._visit = self._after(jump.end(steps) - now_ps, self._on_visit)

    def _doze(self, now_ps: int) -> None:
        if self._idle_since == now_ps:
            self._idle_visits += 1
            if self._idle_visits > MAX_IDLE_PLANS:
                raise Stuck(f"no progress at {to_seconds(now_ps)} s; {self.holders()}")
        else:
            self._idle_since, self._idle_visits = now_ps, 0
        self._meter.sleeps(now_ps)
        self._asleep = True
        self._sleep(self._on_visit)

    def _wake_up(self) -> None:
        """A request has arrived: it is seen at the first boundary from now on.

        If nothing will be decided there, the queue gets it now, as of that boundary, and nobody need be there.
        """
        core, jump, following = self._fast, self._jump, self._over + 1
        if jump is None:
            super()._wake_up()
        elif following < self._visit_at:
            boundary_ps = jump.end(following)
            first = core.first()
            for request in self._inbox:
                engine = self._lives[request.index].engine
                core.add(engine, to_seconds(boundary_ps))
                self._early.append(engine)
            self._inbox.clear()
            if core.first() is not first or not (self.policy is None or self.policy.is_settled):
                self._visit_after(jump, following, self._now_ps)
            elif self.policy is not None or self._leaving:
                wake_ps = self._wake_ps(boundary_ps)
                if wake_ps <= jump.end(self._visit_at - 1):
                    self._visit_after(jump, jump.find(wake_ps, following), self._now_ps)

    def _land(self, jump: Jump, now_ps: int) -> None:
        """Take in what the steps of the jump gave."""
        core = self._fast
        self._visit = None
        if self._visit_at - self._over > 1:
            self._advance(jump, self._visit_at - 1)
        jump.note(self._timeline, self._visit_at, self._visit_at)
        plan = core.known + 1
        if self._leaving:
            self._let_leave(now_ps - 1)
        step = core.drop_oldest()
        core.known = plan
        if core.first_tokens and core.first_tokens[0][0] <= core.known:
            self._tell_first_tokens()
        if step.apart or plan in core.decodes.ends:
            for output, is_new in core.finish(plan, step, to_seconds(now_ps)):
                life = self._lives[output.request.rid]
                if is_new:
                    self._meter.gave([output])
                    life.token(now_ps)
                if output.finish_reason is not None:
                    self._complete(life, output.finish_reason)
        for step in core.in_flight:
            if not step.duration_ps:
                step.duration_ps = self._duration(step)

    def _advance(self, jump: Jump, over: int) -> None:
        """`over` steps of the jump are, and a plan was made at the end of each, with nothing else to do there."""
        core, meter, first = self._fast, self._meter, self._over + 1
        steps = over - self._over
        jump.note(self._timeline, first, over)
        first_ps, last_ps, next_ps = jump.end(first), jump.end(over), jump.end(over + 1)
        explicit = core.in_flight[1] if len(core.in_flight) > 1 else None
        number = core.decodes.number
        taken = core.make_regular(steps)
        self._note_regular(jump, first, over, number, taken)
        core.known += steps
        self._over = over

        # As many steps began, `explicit` first.
        going_on = core.going_on
        going_on.num_tokens, going_on.limit = number, meter.plans_decodes(number, first_ps)
        alike = steps
        if explicit is not None:
            if not meter.joins(explicit, going_on):
                if explicit.admitted:
                    self._begin_admitted(explicit, first_ps)
                second_ps = jump.end(first + 1)
                self._begins(explicit, second_ps - first_ps, first_ps)
                alike, first_ps = steps - 1, second_ps
            ahead = core.in_flight[-1]
            if ahead.num_tokens != number:
                meter.plans_decodes(ahead.num_tokens, last_ps)
            meter.plan_ahead(ahead)
        if alike:
            stats, size = self._stats, self._step_time.padded[number]
            stats.steps += alike
            stats.scheduled_tokens += alike * number
            stats.padded_tokens += alike * (size - number)
            stats.busy_ps += next_ps - first_ps
            if self._counted_from is not None:
                self._sizes.extend(repeat(size, alike))
            meter.decodes_begin(going_on, size, alike, next_ps - first_ps, last_ps, next_ps)
        if core.first_tokens and core.first_tokens[0][0] <= core.known:
            self._tell_first_tokens()

    def _note_regular(
        self, jump: Jump, first: int, last: int, number: int, taken: list[tuple[int, int]]
    ) -> None:
        """Blocks and slots after plans of `number` tokens, made when the steps `first` to `last` of a jump were over.

        Plan i, from 1, and in `taken` also each that comes a multiple of the block size later, took so many blocks.
        """
        core, size, steps = self._fast, self._config.block_size, last - first + 1
        now_ps = jump.end(last)
        passed_ps = now_ps - self._noted_ps
        blocks_ps = 0
        for i, blocks in taken:
            if i < steps:
                blocks_ps += times(blocks, jump.sum_delays(first + i - 1, last - 1, last, size))
        # Each plan fills a slot for each member; the last one may have left some members out.
        filled_ps = times(number, jump.sum_delays(first, last - 1, last))
        left_out = number - core.decodes.number
        used = core.blocks.num_usable - core.blocks.num_free
        self._used_ps += times(self._used, passed_ps) + blocks_ps
        self._empty_ps += times(self._empty, passed_ps) + times(size, blocks_ps) - filled_ps
        self._noted_ps = now_ps
        self._empty += size * (used - self._used) - steps * number + left_out
        self._used = used

    def _tell_first_tokens(self) -> None:
        core = self._fast
        for plan, request in core.take_first_tokens():
            now_ps = self._timeline.end(plan)
            if self.policy is not None:
                self.policy.first_token(request.job, to_seconds(now_ps))
            self._lives[request.rid].first_token_ps = now_ps
            self._meter.prompt_tokens += request.num_prompt_tokens

    def _give_tokens(self, request: EngineRequest, has_ended: bool = False) -> None:
        """Write down what a member of `decodes` got and took until now."""
        core, meter = self._fast, self._meter
        first, last = request.first_plan, min(core.known, request.end_plan)
        if first <= last:
            self._lives[request.rid].tokens(StepGaps(self._timeline, first, last))
            meter.generation_tokens += last - first + 1
            request.first_plan = last + 1
        over, made = self._timeline.last, core.last_plan(request)
        if self._counted_from is not None:
            self._share_time(request, self._counted_from, min(over, made))
        if has_ended:
            meter.discard(made - max(over, request.work_plan - 1))

    def _share_time(self, request: EngineRequest, counted_from: int, last: int) -> None:
        """Tell the meter what a member had of the steps up to `last`."""
        first, end = max(request.work_plan, counted_from), self._timeline.end
        for plan in range(first, last + 1):
            self._meter.worked(request, self._sizes[plan - counted_from], end(plan) - end(plan - 1))

    # --- what others see ------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A request reaches the replica now."""
        self._catch_up(self._now_ps)
        super().submit(request)
        if self._counted_from is None and self._meter.counts_work:
            # The step that runs has begun already.
            self._counted_from = self._timeline.last + (1 if self._jump is None else 2)

    def kv_used(self, now_ps: int) -> float:
        """Share of the usable KV blocks that is in use just before `now_ps`."""
        self._catch_up(now_ps)
        return super().kv_used(now_ps)

    def settle(self) -> None:
        """Take in a boundary of this very instant, too."""
        self._catch_up(self._now_ps + 1)

    def gauges(self, now_ps: int) -> Gauges:
        """The state just before `now_ps`."""
        self._catch_up(now_ps)
        for request in self._fast.running_requests:
            self._fast.write_out(request)
        gauges = super().gauges(now_ps)
        if self.policy is None or not self._early:
            return gauges
        held, counts = dict(gauges.held), dict(gauges.counts)
        for request in self._early:
            tier = self.policy.tier_of(request.job)
            counts[tier] = counts[tier]._replace(submitted=counts[tier].submitted - 1)
            if self.policy.state_of(request.rid) == "held":
                held[tier] -= 1
        pressure = self.policy.pressure_without([request.job for request in self._early])
        return replace(gauges, held=held, counts=counts, pressure=pressure)

    @property
    def stats(self) -> EngineStats:
        """Counters up to the last boundary that was visited or asked about."""
        stats, known = super().stats, self._fast.known
        for request in self._fast.decodes.everybody():
            stats.generation_tokens += max(0, min(known, request.end_plan) - request.first_plan + 1)
        return stats

    def _catch_up(self, instant_ps: int) -> None:
        """Take in the boundaries before `instant_ps`."""
        jump, over = self._jump, self._over
        if jump is not None and self._visit_at - over > 1 and jump.end(over + 1) < instant_ps:
            self._advance(jump, min(jump.find(instant_ps, over + 1), self._visit_at) - 1)
            self._early.clear()

    def forget_past(self) -> None:
        """Nobody will ask for the steps that have given their tokens to records."""
        oldest = self._timeline.last
        for life in self._lives.values():
            life.own_gaps()
            if life.engine.is_member:
                oldest = min(oldest, life.engine.first_plan - 1)
        if self._counted_from is not None:
            oldest = max(self._timeline.first, min(oldest, self._timeline.last))
            gone = oldest - self._counted_from
            if gone > 0:
                del self._sizes[:gone]
                self._counted_from = oldest
        self._timeline.forget(oldest)

    def first_tokens(self, now_ps: int) -> list[tuple[int, int]]:
        """(request, picoseconds from its arrival to its first token) of those inside that have one before `now_ps`."""
        self._catch_up(now_ps)
        return super().first_tokens(now_ps)

    def _stop(self) -> None:
        """Nothing happens here after now."""
        super()._stop()
        if self._visit is not None:
            self._visit.callbacks = []
        self._jump = None
        self._early.clear()

    def slow(self, factor: float) -> None:
        """Steps that begin after now take `factor` times as long as those of a healthy engine."""
        self.settle()
        super().slow(factor)
        for i, step in enumerate(self._fast.in_flight):
            if i:  # planned, and not begun
                step.duration_ps = 0
        self._look_again()

    def _look_again(self) -> None:
        """Be there at the first boundary from now on."""
        self.settle()
        if self._jump is not None and self._over + 1 < self._visit_at:
            self._visit_after(self._jump, self._over + 1, self._now_ps)
        super()._look_again()

    def _close(self, end_ps: int) -> None:
        """Nothing after `end_ps` counts."""
        self._catch_up(end_ps)
        if self._jump is not None:
            self._jump.note(self._timeline, self._over + 1, self._over + 1)
        for request in self._fast.decodes.everybody():
            self._fast.write_out(request)
            self._give_tokens(request)
        if self.policy is not None:
            for request in self._early:
                self.policy.take_back(request.job)
        passed_ps = end_ps - self._noted_ps
        self._stats.kv_used_block_ps = self._used_ps + self._used * passed_ps
        self._stats.kv_empty_token_ps = self._empty_ps + self._empty * passed_ps
        super()._close(end_ps)

    def _take_back(self, beyond_ps: int) -> None:
        """So much of the step that runs lies beyond the end of the run."""
        self._stats.busy_ps -= beyond_ps
