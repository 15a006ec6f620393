"""What runs in the next step: the step rule of vLLM's V1 scheduler, decision by decision.

There is no prefill phase and no decode phase. Every request has tokens that are known and tokens that are computed,
and each step lets some requests catch up within the step's tokens and the free KV blocks. With `async_scheduling` a
step is planned while the one before it still runs, so a sampled token may be a placeholder whose value is not known.

The core owns blocks, tokens and the prefix cache. Order, holding, caps, deadlines and victims are the policy's, if
there is one; without one the core does what an unmodified vLLM server does.
"""

from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any, Final

from twin.compiled import mypyc_attr
from twin.engine.blocks import BlockKeys, BlockPool
from twin.engine.config import EngineConfig
from twin.engine.queues import FcfsQueue, PolicyQueue, PriorityQueue, WaitingQueue
from twin.engine.request import EngineRequest, Status
from twin.scheduling import Job, Policy

NOBODY: Final[Set[EngineRequest]] = frozenset()


@mypyc_attr(acyclic=True)
class Step:
    """One planned step: who computes how many tokens, in order, and what the step's duration depends on."""

    num_tokens = 0
    num_seqs = 0
    """Requests that compute something."""
    num_sampled = 0
    """Requests that get a token."""
    prefill_pairs = 0
    """(query, key) pairs of attention in prefill chunks."""
    num_decodes = 0
    decode_context = 0
    """Keys attended to by all decodes together."""
    preempted: Sequence[EngineRequest] = ()
    """Victims of the running loop: blocks had run out."""
    planned_preempted: Sequence[EngineRequest] = ()
    """Victims the policy named before the step."""
    aborted: Sequence[tuple[EngineRequest, str]] = ()
    """Requests whose deadline had passed, with the reason."""
    again: dict[EngineRequest, int] | None = None
    """Those of the scheduled tokens that were computed before a preemption already."""
    is_whole = True
    """Whether `scheduled` lists everything; a fast core leaves out those that go on as ever."""

    duration_ps = 0
    """Filled in by who knows how long steps take; so is what follows, by who measures."""
    limit = "compute"
    """What kept requests from going faster."""
    victims: Sequence[Any] = ()
    """Whom it preempted."""
    num_again = 0
    """Tokens that were computed before."""
    discarded = 0
    """Tokens of requests that ended after it was planned."""

    apart: Sequence[EngineRequest] = ()
    """Requests that have left the members of a fast core since, whose tokens from this step are told one by one."""
    stale: Sequence[EngineRequest] = ()
    """Requests that were preempted before its results came."""

    admitted: Sequence[EngineRequest] = ()
    """Requests that were waiting before."""

    def __init__(self) -> None:
        self.scheduled: dict[EngineRequest, int] = {}
        """Request -> tokens it computes in this step."""
        self.sampled: Set[EngineRequest] = NOBODY
        """Requests that get a token from this step."""


@mypyc_attr(acyclic=True)
class Output:
    """What a step gave to one request."""

    __slots__ = ("finish_reason", "is_first", "request")

    def __init__(self, request: EngineRequest, is_first: bool, finish_reason: str | None) -> None:
        self.request = request
        self.is_first = is_first
        self.finish_reason = finish_reason


class EngineCore:
    """One engine. Calls come in the order of vLLM's engine loop: add / abort, schedule, update.

    It is also the policy's host (the `Host` of `twin.scheduling`).
    """

    def __init__(self, config: EngineConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.policy = policy
        self.max_model_len = config.max_model_len
        self.watermark_blocks = config.watermark_blocks
        self.pool: Any = self._make_pool()
        self.requests: dict[Hashable, EngineRequest] = {}
        self.running_requests: list[EngineRequest] = []
        self._by_priority = policy is None and config.scheduling_policy == "priority"
        self._policy_queue = None if policy is None else PolicyQueue(policy)
        self.waiting: WaitingQueue
        if self._policy_queue is not None:
            self.waiting = self._policy_queue
        else:
            self.waiting = PriorityQueue() if self._by_priority else FcfsQueue()
        self.held_blocks = 0
        """Blocks of all running requests, a shared one counted for each."""
        self._admissions = 0
        self._sorted = True  # running_requests is in run_key order
        self._limit = 0  # tokens one request may compute in the current step; 0 = no limit
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self.on_preempt: Callable[[EngineRequest], None] | None = None
        """Told of each request that is about to lose its blocks."""

    def _make_pool(self) -> Any:
        return BlockPool(self.config.num_gpu_blocks, self.config.enable_prefix_caching)

    # --- what the policy sees of us -------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out."""
        free: int = self.pool.num_free
        return free

    @property
    def free_slots(self) -> int:
        """Requests that could be admitted beside the running ones."""
        return self.config.active_limit - len(self.running_requests)

    @property
    def running(self) -> list[Job]:
        """Jobs that run, in the engine's order, those whose end is not known yet included."""
        return [request.job for request in self.running_requests]

    def blocks_of(self, job: Job) -> int:
        """Blocks that would become free if `job` let go of all it holds."""
        return self.count_sole(self.requests[job.rid])

    def tokens_of(self, job: Job) -> tuple[int, int]:
        """(computed tokens, known output tokens) of `job`."""
        request = self.requests[job.rid]
        return request.num_computed_tokens, request.num_output_tokens

    def blocks_for(self, job: Job) -> int:
        """Blocks that all known tokens of `job` fill, prefix hits not deducted."""
        tokens = min(self.requests[job.rid].num_tokens, self.max_model_len)
        return -(-tokens // self.config.block_size)

    # --- in and out -----------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.requests)

    def add(self, request: EngineRequest, now: float) -> None:
        """Take in a new request."""
        self.requests[request.rid] = request
        self.waiting.add(request, now)

    def abort(self, request: EngineRequest, now: float, reason: str) -> None:
        """End a request from outside (its client left): blocks are free at once, results in flight are dropped."""
        if request.status is Status.RUNNING:
            self.running_requests.remove(request)
        else:
            self.waiting.remove(request)
        self._end(request)
        if self.policy is not None:
            self.policy.gone(request.job, now, reason, request.num_output_tokens)

    def _end(self, request: EngineRequest) -> None:
        request.status = Status.FINISHED
        self._let_go(request)
        del self.requests[request.rid]

    # --- schedule -------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Plan the next step at the instant `now` (seconds)."""
        step = Step()
        victims = self._begin_step(step, now)
        self._schedule(step, victims, now)
        return step

    def _begin_step(self, step: Step, now: float) -> list[EngineRequest]:
        """Ask the policy: whom to abort, which is done at once, and whom to preempt."""
        if self.policy is None or self._policy_queue is None:
            return []
        self._policy_queue.begin_step(now)
        plan = self.policy.begin_step(now, self)
        for job, reason in plan.abort:
            request = self.requests[job.rid]
            self.abort(request, now, reason)
            step.aborted = [*step.aborted, (request, reason)]
        return [self.requests[job.rid] for job in plan.preempt] if plan.preempt else []

    def _schedule(self, step: Step, victims: list[EngineRequest], now: float) -> None:
        for request in victims:
            self.running_requests.remove(request)
            self._preempt(request, now)
            step.planned_preempted = [*step.planned_preempted, request]
        self._sort_running()
        budget = self._schedule_running(step, now)
        if not step.preempted:
            self._schedule_waiting(step, now, budget)
        self._account(step)

    def _sort_running(self) -> None:
        """Under a policy of ours the last running request is the one to give way."""
        if self.policy is not None and not self._sorted:
            run_key = self.policy.run_key
            self.running_requests.sort(key=lambda request: run_key(request.job))
            self._sorted = True

    def _chunk_limit(self) -> int:
        """Tokens one request may compute in this step; 0 = no limit."""
        config = self.config
        limit = config.long_prefill_token_threshold
        num_requests = len(self.running_requests) + len(self.waiting)
        if limit and num_requests <= 1:
            return 0
        if limit and config.long_prefill_token_threshold_adaptive:
            return max(limit, config.max_num_batched_tokens // num_requests)
        return limit

    def _schedule_running(self, step: Step, now: float) -> int:
        """Let running requests go on, last ones preempted when blocks run out; returns the tokens left."""
        config, running = self.config, self.running_requests
        budget = config.token_budget
        self._limit = self._chunk_limit()
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            if self._will_have_ended(request):
                index += 1
                continue
            num_new = (
                request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            )
            if 0 < self._limit < num_new:
                num_new = self._limit
            num_new = min(num_new, budget, self.max_model_len - request.num_computed_tokens - 1)
            if num_new == 0:
                index += 1
                continue
            need = self._blocks_missing(request, request.num_computed_tokens + num_new)
            while need > self.pool.num_free:
                victim = self._pick_victim()
                position = running.index(victim) if self._by_priority else len(running) - 1
                del running[position]
                if position < index:
                    index -= 1
                budget += step.scheduled.pop(victim, 0)
                self._preempt(victim, now)
                step.preempted = [*step.preempted, victim]
                if victim is request:
                    break
            else:
                self._allocate(request, need, request.num_computed_tokens + num_new)
                step.scheduled[request] = num_new
                budget -= num_new
                index += 1
                continue
            if not config.goes_on_after_self_preemption:
                break
        return budget

    @staticmethod
    def _will_have_ended(request: EngineRequest) -> bool:
        """Whether the results in flight are sure to bring it to its last token (async scheduling only)."""
        placeholders = request.num_output_placeholders
        return placeholders > 0 and (
            request.num_computed_tokens + 2 - placeholders
            >= request.num_prompt_tokens + request.max_tokens
        )

    def _pick_victim(self) -> EngineRequest:
        if self._by_priority:
            return max(self.running_requests, key=lambda r: (r.priority, r.arrival))
        return self.running_requests[-1]

    def _schedule_waiting(self, step: Step, now: float, budget: int) -> None:
        """Admit from the head of the queue until one does not fit; nothing behind it is tried."""
        config, waiting, size = self.config, self.waiting, self.config.block_size
        admitted: list[EngineRequest] = []
        aside: list[EngineRequest] = []
        limit = config.active_limit
        while budget > 0 and len(self.running_requests) < limit:
            request = waiting.next()
            if request is None:
                break
            if request.num_stale_output_tokens > 0:
                # A result from before its preemption is still to come and may be its last token.
                waiting.take(request, now)
                aside.append(request)
                continue
            hit = self._find_prefix(request)
            num_hit = len(hit) * size
            num_new = request.num_tokens - num_hit
            if 0 < self._limit < num_new:
                num_new = self._limit
            if num_new > budget:
                if not config.enable_chunked_prefill:
                    break
                num_new = budget
            num_computed = num_hit + num_new
            whole = request.num_tokens if config.scheduler_reserve_full_isl else num_computed
            need = -(-min(whole, self.max_model_len) // size) - len(hit)
            if hit:
                need += self._count_free(hit)
            if self.running_requests:
                need += self.watermark_blocks
            if need > self.free_blocks:
                break
            waiting.take(request, now)
            self._admit(request, hit)
            self._allocate(request, self._blocks_missing(request, num_computed), num_computed)
            step.scheduled[request] = num_new
            admitted.append(request)
            budget -= num_new
        if admitted:
            step.admitted = admitted
        if aside:
            waiting.undo(aside, now)

    def _admit(self, request: EngineRequest, hit: Sequence[Any]) -> None:
        num_hit = len(hit) * self.config.block_size
        self._hold(request, hit)
        request.num_computed_tokens = num_hit
        if self.config.enable_prefix_caching and request.num_preemptions == 0:
            request.prefix_hit_tokens = num_hit
            self.prefix_query_tokens += request.num_tokens
            self.prefix_hit_tokens += num_hit
        request.status = Status.RUNNING
        self._admissions += 1
        request.run_number = self._admissions
        self.running_requests.append(request)
        self._sorted = False

    def _blocks_missing(self, request: EngineRequest, num_tokens: int) -> int:
        tokens = min(num_tokens, self.max_model_len)
        return -(-tokens // self.config.block_size) - request.num_blocks

    def _allocate(self, request: EngineRequest, need: int, num_computed: int) -> None:
        """Give `need` blocks; known tokens among the first `num_computed` become findable when they fill a block."""
        if need > 0:
            self._take(request, need)
        self._publish(request, min(num_computed, request.num_tokens))

    def _preempt(self, request: EngineRequest, now: float) -> None:
        """Throw away its KV and let it wait; it starts again from what the prefix cache still holds."""
        if self.on_preempt is not None:
            self.on_preempt(request)
        self._let_go(request)
        request.high_water = max(request.high_water, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        request.status = Status.PREEMPTED
        self.num_preemptions += 1
        self.waiting.put_back(request, now)

    def _account(self, step: Step) -> None:
        """Advance the counters of all scheduled requests and add up what the step's duration depends on."""
        sampled: set[EngineRequest] = set()
        for request, num_new in step.scheduled.items():
            computed = request.num_computed_tokens
            again = min(computed + num_new, request.high_water) - computed
            if again > 0:
                request.recomputed_tokens += again
                self.recomputed_tokens += again
                if step.again is None:
                    step.again = {}
                step.again[request] = again
            if num_new == 1 and computed >= request.num_prompt_tokens:
                step.num_decodes += 1
                step.decode_context += computed + 1
            else:
                step.prefill_pairs += num_new * computed + num_new * (num_new + 1) // 2
            step.num_tokens += num_new
            request.num_computed_tokens = computed + num_new
            request.num_in_flight_tokens += num_new
            if not request.is_prefill_chunk:
                sampled.add(request)
                if self.config.async_scheduling:
                    request.num_output_placeholders += 1
        step.sampled = sampled
        step.num_seqs += len(step.scheduled)
        step.num_sampled += len(sampled)

    # --- blocks ---------------------------------------------------------------------------

    def keys_of(self, prompt: Sequence[tuple[int, int]], reply: int) -> Any:
        """What the prefix cache knows the blocks of a new request by; None without one."""
        return BlockKeys(prompt, reply, self.config.block_size) if self.pool.caching else None

    def _find_prefix(self, request: EngineRequest) -> Sequence[Any]:
        """Cached blocks of its known tokens; the last token is always computed, or nothing could be sampled."""
        if not self.pool.caching:
            return []
        assert request.keys is not None
        most = (request.num_tokens - 1) // self.config.block_size
        found: list[int] = self.pool.find(request.keys.upto(most)[:most])
        return found

    def _count_free(self, hit: Any) -> int:
        """How many blocks of a hit nobody holds."""
        free: int = self.pool.count_unreferenced(hit)
        return free

    def _hold(self, request: EngineRequest, hit: Any) -> None:
        """`request` starts out with the blocks of a hit."""
        self.pool.touch(hit)
        request.blocks = hit
        request.num_blocks = request.num_hashed_blocks = len(hit)
        self.held_blocks += len(hit)

    def _take(self, request: EngineRequest, count: int) -> None:
        """`request` gets `count` more blocks."""
        request.blocks += self.pool.take(count)
        request.num_blocks += count
        self.held_blocks += count

    def _publish(self, request: EngineRequest, num_tokens: int) -> None:
        if not self.pool.caching:
            return
        full = num_tokens // self.config.block_size
        if full > request.num_hashed_blocks:
            assert request.keys is not None
            keys = request.keys.upto(full)
            for i in range(request.num_hashed_blocks, full):
                self.pool.publish(request.blocks[i], keys[i])
            request.num_hashed_blocks = full

    def _let_go(self, request: EngineRequest) -> None:
        """`request` holds no blocks any more."""
        self.pool.release(request.blocks)
        self.held_blocks -= request.num_blocks
        request.blocks = []
        request.num_blocks = request.num_hashed_blocks = 0

    def count_sole(self, request: EngineRequest) -> int:
        """Blocks that would become free if `request` let go of all it holds."""
        sole: int = self.pool.count_sole(request.blocks)
        return sole

    # --- update ---------------------------------------------------------------------------

    def update(self, step: Step, now: float) -> list[Output]:
        """Take in the results of `step`, in the order of its schedule. Returns one Output per token."""
        outputs = []
        ended_running, is_async = False, self.config.async_scheduling
        for request, num_new in step.scheduled.items():
            request.num_in_flight_tokens -= num_new
            is_stale = request.num_stale_output_tokens > 0
            if is_stale:
                request.num_stale_output_tokens -= num_new
            if request.status is Status.FINISHED or request not in step.sampled:
                continue
            was_running = request.status is Status.RUNNING
            request.num_tokens += 1
            if is_async:
                if not is_stale:
                    request.num_output_placeholders -= 1
                if was_running:
                    self._publish(
                        request, request.num_computed_tokens - request.num_output_placeholders
                    )
            is_first = request.num_output_tokens == 1
            reason = self._stop_reason(request)
            if is_first and self.policy is not None:
                self.policy.first_token(request.job, now)
            if reason is not None:
                if was_running:
                    ended_running = True
                else:
                    self.waiting.remove(request)
                self._end(request)
                if self.policy is not None:
                    self.policy.gone(request.job, now, "finished", request.num_output_tokens)
            outputs.append(Output(request, is_first, reason))
        if ended_running:
            self.running_requests = [r for r in self.running_requests if r.status is Status.RUNNING]
        return outputs

    def _stop_reason(self, request: EngineRequest) -> str | None:
        if request.num_output_tokens == request.output_tokens:
            return "stop"
        if (
            request.num_tokens >= self.max_model_len
            or request.num_output_tokens >= request.max_tokens
        ):
            return "length"
        return None
