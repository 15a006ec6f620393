"""The step rule again, so that a step costs what changes in it.

Running requests that compute one token a step are kept as `Decodes`: a plan in which they all go on takes no work per
request. One that is preempted, or finds no token left, leaves the members: its counters are written out, and the steps
in flight name it. `EngineCore` is the reference.

Plans with work are numbered from 1. `planned` is the last one made, `known` the last one whose results are in.
"""

from collections.abc import Callable
from typing import Any

from twin.engine.config import EngineConfig
from twin.engine.core import Output, Step
from twin.engine.decodes import Decodes
from twin.engine.request import EngineRequest, Status
from twin.engine.run_core import RunCore
from twin.scheduling import Job, Policy


class FastCore(RunCore):
    """An `EngineCore` that knows when its next plans are alike."""

    def __init__(self, config: EngineConfig, policy: Policy | None = None) -> None:
        super().__init__(config, policy)
        self.decodes = Decodes(config.block_size)
        self._budget = config.token_budget
        self._is_async = config.async_scheduling
        self.in_flight: list[Step] = []
        """Steps planned whose results are not in, oldest first."""
        self.planned = 0
        self.known = 0
        self._at_plan = 0  # the last plan whose running requests have gone on
        self._taken: dict[
            EngineRequest, int
        ] = {}  # by members so far in a plan made in order: blocks
        self.budget_left = 0
        """Tokens the last plan could have computed beside those it does."""
        self.going_on = Step()
        """Stands for a step of members only that runs, if it was planned in passing."""
        self.going_on.is_whole = False
        self._partial: list[EngineRequest] = []  # running, known tokens not computed to their end
        self._stale: set[EngineRequest] = set()  # preempted with results in flight
        self.first_tokens: list[tuple[int, EngineRequest]] = []
        """(plan, request) of first tokens to come from plans that are made."""
        self.on_detach: Callable[[EngineRequest, bool], None] = lambda request, has_ended: None
        """Told of a member before it leaves `decodes`, while its plans still say what it did, and whether it ends."""

    # --- what the policy sees of us -------------------------------------------------------

    def tokens_of(self, job: Job) -> tuple[int, int]:
        """(computed tokens, known output tokens) of `job`."""
        self.write_out(self.requests[job.rid])
        return super().tokens_of(job)

    def abort(self, request: EngineRequest, now: float, reason: str) -> None:
        """End a request from outside."""
        self.write_out(request)
        self._detach(request, has_ended=True)
        if request in self._partial:
            self._partial.remove(request)
        super().abort(request, now, reason)

    # --- schedule -------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Plan the next step at the instant `now` (seconds)."""
        step = Step()
        victims = self._begin_step(step, now)
        if self.config.long_prefill_token_threshold:
            self._limit = self._chunk_limit()
        self._schedule_fast(step, victims, now)
        if step.num_tokens:
            self.planned += 1
            step.is_whole = False
            self.in_flight.append(step)
        return step

    def _all_fit(self) -> bool:
        """Whether tokens and blocks suffice for every running request, so that their order says nothing."""
        plan, decodes = self.planned + 1, self.decodes
        tokens = decodes.number
        blocks = decodes.takers[plan % self.config.block_size]
        if self._partial:
            for request in self._partial:
                num_new = self._chunk(request)
                tokens += num_new
                blocks += self._blocks_missing(request, request.num_computed_tokens + num_new)
        return tokens <= self._budget and blocks <= self.blocks.num_free

    def _chunk(self, request: EngineRequest) -> int:
        """Tokens that a running request outside the members would compute now."""
        if self._will_have_ended(request):
            return 0
        num_new = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        return self._limit if 0 < self._limit < num_new else num_new

    def _schedule_fast(self, step: Step, victims: list[EngineRequest], now: float) -> None:
        """Everybody that runs goes on, as far as tokens and blocks reach; then admit as ever."""
        plan, decodes = self.planned + 1, self.decodes
        for request in victims:
            self.running_requests.remove(request)
            self._preempt(request, now)
            step.planned_preempted = [*step.planned_preempted, request]
        if self._is_async and plan - 1 in decodes.ends:
            self._rest(plan)
        if self._all_fit():
            blocks = decodes.takers[plan % self.config.block_size]
            if blocks:
                self._take_blocks(blocks)
            budget = self._budget - decodes.number
            if self._partial:
                budget -= self._go_on(step)
        elif self._partial or self._by_priority or decodes.number > self._budget:
            budget = self._go_on_in_order(step, now)
        else:
            budget = self._give_way(step, now)
        self._at_plan = plan
        if len(self.waiting) and not step.preempted:
            self._schedule_waiting(step, now, budget)
        if step.scheduled:
            self._account(step)
        self._add_decodes(step, plan)
        self.budget_left = self._budget - step.num_tokens
        for request in step.scheduled:
            if request in step.sampled:
                self._join(request, plan)
            else:
                self._partial.append(request)

    def _rest(self, plan: int) -> None:
        """With async scheduling, who is sure to get the last token allowed from the step in flight is not planned."""
        for request in self.decodes.ends[plan - 1]:
            if request in self.decodes.members and _ends_by_length(request):
                self.decodes.rest(request)

    def _go_on(self, step: Step) -> int:
        """Compute more of the prompts that run, in running order; returns their tokens."""
        work, self._partial = self._partial, []
        if len(work) > 1:
            work.sort(key=self._order)
        for request in work:
            num_new = self._chunk(request)
            if num_new:
                num_computed = request.num_computed_tokens + num_new
                self._allocate(request, self._blocks_missing(request, num_computed), num_computed)
                step.scheduled[request] = num_new
            else:
                self._partial.append(request)
        return sum(step.scheduled.values())

    def _give_way(self, step: Step, now: float) -> int:
        """Members go on, and the last ones give way until there are blocks for the others; returns the tokens left."""
        self._sort_running()
        decodes, running, plan = self.decodes, self.running_requests, self.planned + 1
        slot, taken = plan % self.config.block_size, 0
        while decodes.takers[slot] - taken > self.blocks.num_free:
            # Those before the first that finds none have got theirs.
            taken += self.blocks.num_free
            self._take_blocks(self.blocks.num_free)
            victim = running.pop()
            self._preempt(victim, now)
            step.preempted = [*step.preempted, victim]
        self._take_blocks(decodes.takers[slot] - taken)
        return self._budget - decodes.number

    def _go_on_in_order(self, step: Step, now: float) -> int:
        """Those that run go on when tokens or blocks are short: the first ones get them; returns the tokens left.

        Who gets no token leaves the members for now; who finds no block takes that of the last one, as in the plain
        rule.
        """
        self._sort_running()
        running, members, size = self.running_requests, self.decodes.members, self.config.block_size
        plan, budget, index = self.planned + 1, self._budget, 0
        taken = self._taken
        taken.clear()
        number, blocks = self.decodes.number, self.decodes.takers[plan % size]
        if number <= budget and blocks <= self.blocks.num_free and not self._by_priority:
            behind = len(running) - len(self._partial)
            if not any(request.is_member for request in running[behind:]):
                self._take_blocks(blocks)  # the members come first and have enough
                budget, index = budget - number, behind
        self._partial = []
        while index < len(running) and budget > 0:
            request = running[index]
            if request.is_member:
                if request not in members:  # its last token is on its way
                    index += 1
                    continue
                num_new, need = 1, int((plan + request.base - 1) % size == 0)
            else:
                num_new = min(self._chunk(request), budget)
                if not num_new:
                    self._partial.append(request)
                    index += 1
                    continue
                need = self._blocks_missing(request, request.num_computed_tokens + num_new)
            while need > self.blocks.num_free:
                victim = self._pick_victim()
                position = running.index(victim) if self._by_priority else len(running) - 1
                del running[position]
                if position < index:
                    index -= 1
                    budget += step.scheduled.pop(victim, 1 if victim in taken else 0)
                self._preempt(victim, now)
                step.preempted = [*step.preempted, victim]
                if victim is request:
                    break
            else:
                if request.is_member:
                    taken[request] = need
                    if need:
                        self._take_blocks(need)
                else:
                    self._allocate(request, need, request.num_computed_tokens + num_new)
                    step.scheduled[request] = num_new
                budget -= num_new
                index += 1
                continue
            if not self.config.goes_on_after_self_preemption:
                break
        taken.clear()
        for request in running[index:]:
            if request in members:
                self.write_out(request)
                self._set_apart(request)
            if not request.is_member:
                self._partial.append(request)
        return budget

    def _take_blocks(self, count: int) -> None:
        """The members take so many blocks; which of them has which is told when one is written out."""
        self.blocks.take(count)
        self.held_blocks += count

    def _order(self, request: EngineRequest) -> Any:
        """Place in the running list."""
        if self.policy is None:
            return request.run_number
        return self.policy.run_key(request.job)

    def _add_decodes(self, step: Step, plan: int) -> None:
        number = self.decodes.number
        step.num_tokens += number
        step.num_seqs += number
        step.num_sampled += number
        step.num_decodes += number
        step.decode_context += self.decodes.sum_base + plan * number

    def _join(self, request: EngineRequest, plan: int) -> None:
        if request.num_tokens == request.num_prompt_tokens:
            self.first_tokens.append((plan, request))
        request.first_plan = plan
        self._add_member(request, plan)

    def _add_member(self, request: EngineRequest, plan: int) -> None:
        limit = request.max_tokens
        if request.output_tokens is not None:
            limit = min(limit, request.output_tokens)
        # The result of plan k is output number base + k - num_prompt_tokens + 1.
        base = request.num_computed_tokens - plan
        request.work_plan = plan + 1
        self.decodes.join(request, plan, limit + request.num_prompt_tokens - 1 - base)

    # --- plans like the last one ----------------------------------------------------------

    def regular_plans(self) -> int:
        """How many plans after the last one are sure to be the same decodes again, whatever the time.

        The last of them may leave out members that get their last token from the step before (async scheduling).
        """
        decodes, config = self.decodes, self.config
        if self._partial or not decodes.number:
            return 0
        if self._stale or any(step.apart for step in self.in_flight):
            return 0
        first_end = decodes.first_end()
        assert first_end is not None
        plans = first_end - self.known - 1
        if plans <= 0:
            return 0
        first = self.first()
        if first is not None:
            if not self._stays_blocked(first):
                return 0
            if config.async_scheduling and self.planned + plans > first_end:
                plans -= 1  # the plan that leaves somebody out has tokens to spare
        elif (
            config.async_scheduling
            and self.planned + plans > first_end
            and self._all_rest(first_end)
        ):
            plans -= 1  # the plan that leaves everybody out is none
        return decodes.plans_within(self.planned + 1, plans, self.blocks.num_free)

    def first(self) -> EngineRequest | None:
        """Who is to be admitted next, None if nobody."""
        return self.waiting.first() if len(self.waiting) else None

    def _all_rest(self, plan: int) -> bool:
        """Whether the plan after `plan` has no member left."""
        ending = self.decodes.ends[plan]
        return len(ending) == self.decodes.number and all(map(_ends_by_length, ending))

    def _stays_blocked(self, first: EngineRequest) -> bool:
        """Whether `first`, and so nothing of what waits, can be admitted while the same decodes go on."""
        last = self.in_flight[-1]
        if last.preempted:
            return False  # it admitted nobody, whatever there was room for
        if self.policy is not None and (last.admitted or not self.policy.is_settled):
            return False  # the policy may plan a preemption now
        if len(self.running_requests) >= self.config.active_limit:
            return True
        if self.decodes.number >= self._budget:
            return True
        if self.budget_left <= 0 or not self.config.enable_chunked_prefill:
            return False
        return self.cache is None or not self._may_hit_more(first)

    def _may_hit_more(self, request: EngineRequest) -> bool:
        """Whether a running request may yet publish the first block that `request` misses."""
        found = len(self._find_prefix(request))
        if found == (request.num_tokens - 1) // self.config.block_size:
            return False
        missing = request.keys.line_at(found)
        return any(
            member.keys.published <= found and member.keys.line_at(found) is missing
            for member in self.decodes.members
        )

    def make_regular(self, plans: int) -> list[tuple[int, int]]:
        """Make `plans` plans of the kind that `regular_plans` promised, as many steps being over meanwhile.

        Returns (which of them, counted from 1, blocks it took) for those that took any: for the last one, and for no
        more than a block size of those before it, which then repeat themselves. `known` and the results are left to the
        caller.
        """
        decodes, size = self.decodes, self.config.block_size
        number = decodes.number
        if len(self.waiting) and number < self._budget:
            self.waiting.next()  # each of the plans looks; the policy counts whom a cap stops
        before, last = plans - 1, self.planned + plans
        taken, total = [], 0
        takers, plan = decodes.takers, self.planned
        for i in range(1, (before if before < size else size) + 1):
            blocks = takers[(plan + i) % size]
            if blocks:
                taken.append((i, blocks))
                total += blocks * ((before - i) // size + 1)
        if self._is_async and last - 1 in decodes.ends:
            self._rest(last)
        blocks = takers[last % size]
        if blocks:
            taken.append((plans, blocks))
        if taken:
            self.blocks.take(total + blocks)
            self.held_blocks += total + blocks
        self.planned = self._at_plan = last
        in_flight = self.in_flight
        self.drop_oldest()
        if in_flight and plans > 1:
            self.drop_oldest()
            in_flight.append(self.going_on)
        step = Step()
        step.is_whole = False
        self._add_decodes(step, last)
        in_flight.append(step)
        return taken

    def drop_oldest(self) -> Step:
        """The oldest step in flight is over; what it gave to members is told by plan numbers."""
        step = self.in_flight.pop(0)
        if step.scheduled:
            for request, num_new in step.scheduled.items():
                request.num_in_flight_tokens -= num_new
                if request.num_stale_output_tokens:
                    request.num_stale_output_tokens -= num_new
                    step.stale = [*step.stale, request]
            if self._stale:
                self._stale = {r for r in self._stale if r.num_stale_output_tokens > 0}
        return step

    def empty_slots(self) -> int:
        """Token slots that running requests hold but have not computed a token for."""
        computed = self.decodes.computed(self.planned)
        if self._partial:
            computed += sum(request.num_computed_tokens for request in self._partial)
        return self.held_blocks * self.config.block_size - computed

    # --- update ---------------------------------------------------------------------------

    def take_first_tokens(self) -> list[tuple[int, EngineRequest]]:
        """First tokens of the known plans as (plan, request); the policy is to be told of each."""
        known, firsts = self.known, self.first_tokens
        number = 0
        while number < len(firsts) and firsts[number][0] <= known:
            number += 1
        taken = [first for first in firsts[:number] if first[1].status is not Status.FINISHED]
        del firsts[:number]
        return taken

    def finish(self, plan: int, step: Step, now: float) -> list[tuple[Output, bool]]:
        """End the members that got their last token from `plan`, and give theirs to those that were set apart since.

        In the order of the plan's schedule: those that it admitted came last. Each is an output and whether its token
        is yet to be told of.
        """
        ending = self.decodes.ends.get(plan, [])
        got = [*ending, *step.apart]
        if len(got) > 1:
            new = {request: i for i, request in enumerate(step.admitted)}
            got.sort(key=lambda r: (1, new[r]) if r in new else (0, self._order(r)))
        outputs = []
        for request in got:
            if request.is_member and request.end_plan == plan:
                outputs.append((self._finish_member(request, plan, now), False))
            elif request.status is not Status.FINISHED:
                outputs.append((self._give_token(request, request in step.stale, now), True))
        return outputs

    def _finish_member(self, request: EngineRequest, plan: int, now: float) -> Output:
        self._publish(request, request.base + plan)
        self.write_out(request)
        self._detach(request, has_ended=True)
        self.running_requests.remove(request)
        self._end(request)
        if self.policy is not None:
            self.policy.gone(request.job, now, "finished", request.num_output_tokens)
        return Output(request, request.num_output_tokens == 1, self._stop_reason(request))

    def _give_token(self, request: EngineRequest, is_stale: bool, now: float) -> Output:
        """As `EngineCore.update` does."""
        is_running = request.status is Status.RUNNING
        request.num_tokens += 1
        if not is_stale:
            request.num_output_placeholders -= 1
        if is_running:
            self._publish(request, request.num_computed_tokens - request.num_output_placeholders)
        is_first = request.num_output_tokens == 1
        if is_first and self.policy is not None:
            self.policy.first_token(request.job, now)
        reason = self._stop_reason(request)
        if reason is not None:
            if is_running:
                self.running_requests.remove(request)
                self._partial.remove(request)
            else:
                self.waiting.remove(request)
            self._end(request)
            if self.policy is not None:
                self.policy.gone(request.job, now, "finished", request.num_output_tokens)
        return Output(request, is_first, reason)

    # --- between the two ways of keeping books --------------------------------------------

    def count_sole(self, request: EngineRequest) -> int:
        """Blocks that would become free if `request` let go of all it holds."""
        self.write_out(request)
        return super().count_sole(request)

    def write_out(self, request: EngineRequest) -> None:
        """Bring the counters of a member up to date, but for its tokens in flight."""
        if not request.is_member:
            return
        made = self.last_plan(request)
        known = max(self.known, request.join_plan - 1)
        request.num_computed_tokens = computed = request.base + made
        request.num_tokens = request.base + known + 1
        is_async = self.config.async_scheduling
        request.num_output_placeholders = made - known if is_async else 0
        request.num_blocks = -(-computed // self.config.block_size)
        self._publish_member(request, made)

    def _publish_member(self, request: EngineRequest, plan: int) -> None:
        """What a member has computed by `plan` is findable: all but the token that the plan did not know yet."""
        computed = request.base + plan
        self._publish(request, computed - 1 if self.config.async_scheduling else computed)

    def _before_find(self, writer: EngineRequest) -> None:
        if writer.is_member:
            in_plan = writer in self.decodes.members
            self._publish_member(writer, self._at_plan if in_plan else writer.end_plan)

    def _before_publish(self, writer: EngineRequest, other: EngineRequest) -> None:
        if writer.is_member:
            plan = self.planned + 1
            if self._at_plan < plan and self._order(other) < self._order(writer):
                plan -= 1  # its turn in this plan is yet to come
            in_plan = writer in self.decodes.members
            self._publish_member(writer, plan if in_plan else writer.end_plan)

    def last_plan(self, request: EngineRequest) -> int:
        """The last plan that a member takes part in, of those made."""
        return self.planned if request in self.decodes.members else request.end_plan

    def _detach(self, request: EngineRequest, has_ended: bool) -> None:
        if request.is_member:
            self.on_detach(request, has_ended)
            self.decodes.leave(request)
            request.is_member = False

    def _set_apart(self, request: EngineRequest) -> None:
        """`request`, written out, is a member no longer but goes on; steps in flight name it."""
        for i, step in enumerate(self.in_flight):
            plan = self.planned - len(self.in_flight) + 1 + i
            if request.join_plan <= plan <= self.last_plan(request):
                step.apart = [*step.apart, request]
                if request not in step.scheduled:
                    step.scheduled[request] = 1
                    request.num_in_flight_tokens += 1
        self._detach(request, has_ended=False)
        if self.first_tokens:
            self.first_tokens = [first for first in self.first_tokens if first[1] is not request]

    def _preempt(self, request: EngineRequest, now: float) -> None:
        if request.is_member:
            self.write_out(request)
            if request in self._taken:
                self._publish_member(request, self.planned + 1)
                request.num_blocks += self._taken.pop(request)
            self._set_apart(request)
        elif request in self._partial:
            self._partial.remove(request)
        super()._preempt(request, now)
        if request.num_stale_output_tokens:
            self._stale.add(request)


def _ends_by_length(request: EngineRequest) -> bool:
    return request.output_tokens is None or request.max_tokens <= request.output_tokens
