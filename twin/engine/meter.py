"""What is measured at one engine beside its records: where its time went, what a request can expect to wait, events.

The replica tells the meter what happens, in the order of its loop; the meter decides nothing.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from twin.clock import to_ps, to_seconds
from twin.engine.core import EngineCore, Output, Step
from twin.engine.life import Life
from twin.engine.request import EngineRequest
from twin.metrics.engine_time import QUEUEING, EngineTime, TokenTime, add
from twin.metrics.estimated_wait import WaitEstimate
from twin.metrics.events import Event, Listener
from twin.scheduling import Policy


class Meter:
    """Of one engine. `lives` are the requests inside, kept by the replica."""

    def __init__(
        self,
        index: int,
        core: EngineCore,
        lives: dict[Hashable, Life],
        priorities: dict[str, int],
        listener: Listener | None,
    ) -> None:
        self._index = index
        self._core = core
        self._lives = lives
        self._listener = listener
        self.time = EngineTime()
        self.decode_tokens = 0
        """Computed by requests with one new token at or after the end of their prompt."""
        self.prompt_tokens = 0
        """Of requests that have a first token."""
        self.generation_tokens = 0
        self.limit = "compute"
        """What kept requests from going faster at the last plan."""
        self.step_end_ps = 0
        """When the step that runs, or ran last, is over."""
        self._step_ps = 0
        self._step: Step | None = None
        self._size = 0
        self._plans: deque[Step] = deque()  # that have not begun
        self._recomputed_tokens = 0
        self._lost: list[
            tuple[EngineRequest, dict[str, Any]]
        ] = []  # by the plan that is being made
        self._asleep_since_ps: int | None = None
        self._counts_work = (
            False  # some client may leave, so each request's share of the time is kept
        )
        self._work: dict[Hashable, TokenTime] = {}
        self._work_again: dict[Hashable, TokenTime] = {}
        ranks, holds_ps, preemptible = (
            (priorities, {}, set()) if core.policy is None else _tiers(core.policy)
        )
        self._ranks = ranks
        # Where a policy puts a tier it does not know.
        config = None if core.policy is None else core.policy.config
        self._other_tier = None if config is None else config.default_tier or config.tiers[0].name
        self._preemptible: set[str] = preemptible
        self._yielding: dict[Hashable, int] = {}  # running requests that may give way -> rank
        self._yielding_of = [0] * (max(ranks.values(), default=0) + 1)  # how many, by rank
        self._waits = WaitEstimate(ranks, holds_ps)
        self._has_started = False  # somebody has, since the queue was last empty
        core.on_preempt = self._preempted

    # --- a request ------------------------------------------------------------------------

    def arrives(self, life: Life, now_ps: int) -> None:
        """A request reaches the engine: what it can expect to wait."""
        request, core, tier = life.request, self._core, self._tier(life)
        config = core.config
        blocks = -(-request.prompt_tokens // config.block_size)
        is_full = len(core.running_requests) >= config.active_limit or blocks > core.pool.num_free
        is_queueing = self.limit in QUEUEING
        if self._yielding and any(self._yielding_of[self._ranks.get(tier, 0) + 1 :]):
            is_full = is_queueing = False  # somebody will give way
        left_ps = max(0, self.step_end_ps - now_ps)
        # With async scheduling the step after the present one is planned already.
        lag_ps = left_ps + self._step_ps if left_ps and config.async_scheduling else left_ps
        life.estimated_wait_ps = self._waits.estimate(
            tier, request.prompt_tokens, is_full, is_queueing, lag_ps, now_ps
        )
        life.queued_tokens = request.prompt_tokens
        self._waits.wait(tier, request.prompt_tokens)
        if life.is_impatient:
            self._counts_work = True

    def starts(self, life: Life, now_ps: int) -> None:
        """A step begins that computes for a request that waited when it was planned."""
        stalled_since_ps = life.stalled_since_ps
        life.starts(now_ps)
        if stalled_since_ps is not None:
            stall_ps = now_ps - stalled_since_ps
            self._tell(life, "resumption", now_ps, stall_s=to_seconds(stall_ps))

    def ends(
        self, life: Life, finish_ps: int | None, outcome: str, reason: str, now_ps: int
    ) -> None:
        """A request leaves the engine; its client did at `finish_ps`."""
        if life.queued_tokens:
            self._unqueue(life)
        if self._yielding:
            self._stop_yielding(life.request.index)
        if self._counts_work:
            work = self._work.pop(life.request.index, {})
            again = self._work_again.pop(life.request.index, {})
            if outcome == "timed_out":
                self.time.waste(work, again)
        if outcome == "timed_out":
            assert finish_ps is not None
            left_s = to_seconds(finish_ps)
            self._tell(life, "timeout", now_ps, reason=reason, left_s=left_s)

    def _tier(self, life: Life) -> str:
        """The tier of the policy that a request belongs to."""
        tier = life.request.tier
        return tier if self._other_tier is None or tier in self._ranks else self._other_tier

    def _stop_yielding(self, rid: Hashable) -> None:
        rank = self._yielding.pop(rid, None)
        if rank is not None:
            self._yielding_of[rank] -= 1

    def _unqueue(self, life: Life) -> int:
        tokens = life.queued_tokens
        if tokens:
            self._waits.leave(self._tier(life), tokens)
            life.queued_tokens = 0
        return tokens

    # --- a step ---------------------------------------------------------------------------

    def planned(self, step: Step, now_ps: int) -> None:
        """The core has made a plan, perhaps an empty one."""
        core = self._core
        for request in step.admitted:
            life = self._lives[request.rid]
            tier = self._tier(life)
            if tier in self._preemptible:
                self._yielding[request.rid] = self._ranks[tier]
                self._yielding_of[self._ranks[tier]] += 1
            tokens = self._unqueue(life)
            if tokens:  # for the first time
                self._waits.start(tier, tokens, now_ps)
                self._has_started = True
                self._tell_promotion(life, now_ps)
        self.limit = step.limit = "kv" if step.preempted else self._limit_under(step.num_tokens)
        if self._has_started:
            self._note_queue(now_ps)
        victims: Sequence[Life] = ()
        if self._lost:
            victims = [self._lives[request.rid] for request, _ in self._lost]
            self._tell_preemptions(step, now_ps)
        if step.num_tokens:
            step.victims = victims
            step.num_again = core.recomputed_tokens - self._recomputed_tokens
            self._plans.append(step)
        else:
            for life in victims:
                life.stalled_since_ps = max(now_ps, self.step_end_ps)
        self._recomputed_tokens = core.recomputed_tokens

    def _note_queue(self, now_ps: int) -> None:
        """Tell the estimate once when the queue has emptied."""
        self._has_started = self.limit in QUEUEING
        self._waits.planned(self._has_started, now_ps)

    def _limit_under(self, tokens: int) -> str:
        """What keeps requests from going faster under a plan of so many tokens that preempts nobody."""
        core, config = self._core, self._core.config
        left = config.token_budget - tokens
        if left <= 0:
            return "tokens"
        if not len(core.waiting):
            return "compute"
        first = core.waiting.next()
        if first is not None:
            if len(core.running_requests) >= config.active_limit:
                return "slots"
            if not config.enable_chunked_prefill and first.num_tokens > left:
                return "tokens"
            return "kv"
        return "policy"

    def begins(self, step: Step, size: int, duration_ps: int, now_ps: int) -> None:
        """The oldest planned step begins and takes `duration_ps`; with padding it computes `size` tokens."""
        self._plans.popleft()
        if step.victims:
            for life in step.victims:
                life.stalled_since_ps = now_ps
        if self._counts_work:
            known = 0 if step.is_whole else step.discarded
            step.discarded = known + self._share_work(step, size, duration_ps)
        self._step, self._size, self._step_ps = step, size, duration_ps
        self.step_end_ps = now_ps + duration_ps
        self.decode_tokens += step.num_decodes
        self._take_time(step, size, duration_ps)

    def _take_time(self, step: Step, size: int, duration_ps: int) -> None:
        time, tokens = self.time, step.num_tokens
        time.limit_ps[step.limit] += duration_ps
        if size > tokens:
            add(time.padded, size, size - tokens, duration_ps)
        if step.num_again:
            add(time.recomputed, size, step.num_again, duration_ps)
        if step.discarded:
            add(time.wasted, size, step.discarded, duration_ps)

    def _share_work(self, step: Step, size: int, duration_ps: int) -> int:
        """Note for each request its part of the step; returns the tokens of those that have ended."""
        discarded = 0
        for request, tokens in step.scheduled.items():
            if request.rid not in self._lives:
                discarded += tokens
                continue
            add(self._work.setdefault(request.rid, {}), size, tokens, duration_ps)
            again = step.again.get(request, 0) if step.again else 0
            if again:
                add(self._work_again.setdefault(request.rid, {}), size, again, duration_ps)
        return discarded

    def plans_decodes(self, tokens: int, now_ps: int) -> str:
        """Plans of so many decodes and nothing else are made from `now_ps` on; returns what limits them."""
        self.limit = limit = self._limit_under(tokens)
        if self._has_started:
            self._note_queue(now_ps)
        return limit

    def joins(self, step: Step, going_on: Step) -> bool:
        """Whether the oldest planned step, which begins, counts like those of members only that begin after it."""
        is_one = (
            step.num_tokens == going_on.num_tokens
            and step.limit == going_on.limit
            and not (step.scheduled or step.victims or step.num_again or step.discarded)
        )
        if is_one:
            self._plans.popleft()
        return is_one

    def plan_ahead(self, step: Step) -> None:
        """The last of these plans: it will begin later."""
        step.limit = self.limit
        self._plans.append(step)

    def decodes_begin(
        self, step: Step, size: int, steps: int, total_ps: int, last_ps: int, end_ps: int
    ) -> None:
        """As many steps of such plans as `step` begin, each when the one before is over.

        They take `total_ps` in all, the last one from `last_ps` to `end_ps`; each computes `size` tokens, padded.
        """
        tokens, time = step.num_tokens, self.time
        time.limit_ps[step.limit] += total_ps
        if size > tokens:
            add(time.padded, size, size - tokens, total_ps)
        self._step, self._size = step, size
        self._step_ps, self.step_end_ps = end_ps - last_ps, end_ps
        self.decode_tokens += steps * tokens

    def gave(self, outputs: Sequence[Output]) -> None:
        """A step is over and gave these tokens."""
        self.generation_tokens += len(outputs)
        for output in outputs:
            if output.is_first:
                self.prompt_tokens += output.request.num_prompt_tokens
            if output.finish_reason is not None and not self._counts_work:
                self.discard(output.request.num_in_flight_tokens)

    def discard(self, tokens: int) -> None:
        """So many tokens of the newest plan are of requests that have ended since: their end was not known."""
        if tokens and self._plans:
            self._plans[-1].discarded += tokens

    @property
    def counts_work(self) -> bool:
        """Whether each request's share of the time is kept."""
        return self._counts_work

    def worked(self, request: EngineRequest, size: int, duration_ps: int) -> None:
        """`request` had one of the `size` tokens, padded, of a step."""
        add(self._work.setdefault(request.rid, {}), size, 1, duration_ps)

    # --- no step --------------------------------------------------------------------------

    def sleeps(self, now_ps: int) -> None:
        """Nothing can be planned."""
        self._asleep_since_ps = now_ps if self._core.has_requests() else None

    def wakes(self, now_ps: int) -> None:
        """A plan may be possible again."""
        if self._asleep_since_ps is not None:
            self.time.held_ps += now_ps - self._asleep_since_ps
            self._asleep_since_ps = None

    def cut(self, end_ps: int) -> int:
        """The run is over at `end_ps`; returns the picoseconds of the present step that lie beyond it."""
        self.wakes(end_ps)
        beyond_ps = self.step_end_ps - end_ps
        if beyond_ps <= 0 or self._step is None:
            return 0
        self._take_time(self._step, self._size, -beyond_ps)
        self.step_end_ps = end_ps
        return beyond_ps

    # --- events ---------------------------------------------------------------------------

    def _tell(self, life: Life, kind: str, now_ps: int, **details: Any) -> None:
        if self._listener is not None:
            request = life.request
            self._listener(Event(now_ps, kind, self._index, request.index, request.tier, details))

    def _preempted(self, request: EngineRequest) -> None:
        """Called by the core while it plans, when `request` is about to lose its blocks."""
        core = self._core
        self._stop_yielding(request.rid)
        details: dict[str, Any] = {}
        if self._listener is not None:
            used, usable = core.pool.num_usable - core.pool.num_free, core.pool.num_usable
            details = {
                "lost_tokens": request.num_computed_tokens,
                "output_tokens": request.num_output_tokens,
                "kv_used_before": used / usable,
                "kv_used_after": (used - core.count_sole(request)) / usable,
                "running": len(core.running_requests),
                "waiting": len(core.waiting) + 1,
            }
        self._lost.append((request, details))

    def _tell_preemptions(self, step: Step, now_ps: int) -> None:
        planned = set(step.planned_preempted)
        for request, details in self._lost:
            cause = "policy" if request in planned else "out_of_kv"
            self._tell(self._lives[request.rid], "preemption", now_ps, cause=cause, **details)
        self._lost.clear()

    def _tell_promotion(self, life: Life, now_ps: int) -> None:
        if self._listener is None or self._core.policy is None:
            return
        rank: int = self._core.policy.run_key(life.engine.job)[0]
        ranks = self._ranks.get(self._tier(life), rank) - rank
        if ranks > 0:
            self._tell(life, "promotion", now_ps, ranks=ranks)


def _tiers(policy: Policy) -> tuple[dict[str, int], dict[str, int], set[str]]:
    """(rank by tier, longest hold in picoseconds by tier, tiers below the first that give way) of a policy."""
    config = policy.config
    ranks = {tier.name: rank for tier, rank in zip(config.tiers, config.ranks, strict=True)}
    holds = {t.name: to_ps(t.max_wait) for t in config.tiers if t.holds and t.max_wait is not None}
    return ranks, holds, {t.name for t in config.tiers if t.preemptible and ranks[t.name] > 0}
