"""The shared policy inside vLLM: a scheduler for `--scheduler-cls`, with no policy of its own.

vLLM keeps blocks, tokens and the prefix cache. Its waiting queue is replaced by one that shows what the policy admits;
its running list is sorted before each step so that the last one is the victim. The policy comes from
`--additional-config '{"twin": {"policy": ...}}'` (a preset's name or a whole policy as data), a request's tier, tenant
and deadlines from `vllm_xargs`: tier, tenant, ttft_s, total_s.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from twin.scheduling import Job, Plan, Policy, fingerprint, policy_config

logger = logging.getLogger("vllm.twin")

CONFIG_KEY = "twin"
"""Our key in vLLM's additional_config."""
DEFAULT_POLICY = "tiered"

SCHEDULER_NAMES = (
    "waiting",
    "running",
    "requests",
    "_preempt_request",
    "kv_cache_manager",
    "max_num_running_reqs",
    "max_model_len",
    "block_size",
)
"""Names of vLLM's scheduler, beside its public methods, that this module relies on."""


class Tracked:
    """A request between submission and end."""

    __slots__ = ("has_token", "job", "request")

    def __init__(self, request: Request, job: Job) -> None:
        self.request = request
        self.job = job
        self.has_token = False


class PolicyQueue(RequestQueue):
    """vLLM's waiting queue as the policy sees fit: `len` counts all that wait, the rest shows what may run now."""

    def __init__(self, owner: "PolicyScheduling") -> None:
        self._owner = owner
        self.waiting: dict[Any, Request] = {}  # by id

    def add_request(self, request: Request) -> None:
        self.waiting[request.request_id] = request
        job = self._owner.track(request)
        self._owner.ask(lambda policy, now: policy.submit(job, now))

    def peek_request(self) -> Request:
        return self.waiting[self._head().rid]

    def pop_request(self) -> Request:
        job = self._head()
        self._owner.ask(lambda policy, now: policy.start(job, now))
        return self.waiting.pop(job.rid)

    def prepend_request(self, request: Request) -> None:
        """vLLM preempted it."""
        self.waiting[request.request_id] = request
        job = self._owner.tracked[request.request_id].job
        self._owner.ask(lambda policy, now: policy.requeue(job, now))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """vLLM took these off and set them aside; it hands them over last one first."""
        for request in reversed(list(requests)):
            self.waiting[request.request_id] = request
            job = self._owner.tracked[request.request_id].job
            self._owner.ask(lambda policy, now, job=job: policy.undo_start(job, now))

    def remove_request(self, request: Request) -> None:
        self.waiting.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def _head(self) -> Job:
        job = self._owner.ask(lambda policy, now: policy.head(now))
        if job is None:
            raise IndexError("nothing may be admitted now")
        return job

    def __bool__(self) -> bool:
        return self._owner.ask(lambda policy, now: policy.head(now)) is not None

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.waiting.values()))


class ArrivalOrder:
    """What is left when the policy has failed: everybody in order of arrival, nobody held, aborted or preempted."""

    def __init__(self, waiting: Iterable[Job]) -> None:
        self._waiting = {job.rid: job for job in waiting}

    def submit(self, job: Job, now: float) -> None:
        self._waiting[job.rid] = job

    requeue = undo_start = submit

    def start(self, job: Job, now: float) -> None:
        del self._waiting[job.rid]

    def first_token(self, job: Job, now: float) -> None:
        pass

    def gone(self, job: Job, now: float, reason: str, output_tokens: int) -> None:
        self._waiting.pop(job.rid, None)

    def begin_step(self, now: float, host: Any) -> Plan:
        return Plan()

    def head(self, now: float) -> Job | None:
        return min(self._waiting.values(), key=self.run_key, default=None)

    def run_key(self, job: Job) -> tuple[Any, ...]:
        return (job.arrival, job.rid)


class PolicyScheduling:
    """Mixed into vLLM's schedulers."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Where the policy's time comes from: a clock that nobody sets."""

    def __init__(self, vllm_config: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, **kwargs)
        missing = [name for name in SCHEDULER_NAMES if not hasattr(self, name)]
        if missing:
            raise RuntimeError(
                f"this scheduler does not know vLLM {vllm.__version__}: "
                f"its scheduler has no attribute {', '.join(missing)}"
            )
        settings = (vllm_config.additional_config or {}).get(CONFIG_KEY, {})
        self.policy_config = policy_config(settings.get("policy", DEFAULT_POLICY))
        self.policy: Any = Policy(self.policy_config, self.max_model_len)
        self.policy_fingerprint = fingerprint(self.policy_config)
        self.policy_errors = 0
        """Exceptions of the policy; the first one puts arrival order in its place."""
        self.tracked: dict[str, Tracked] = {}
        self._to_tell: list[tuple[int, str, str]] = []  # (client, request, reason) of our aborts
        self._host = EngineHost(self)
        self._step_now: float | None = None  # the instant of the step being planned
        self.waiting = PolicyQueue(self)
        logger.info("scheduling policy %s", self.policy_fingerprint)

    # --- vLLM's public methods ------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Let the policy plan, carry its plan out, then schedule as vLLM does."""
        self._step_now = self.clock()
        try:
            plan = self.ask(lambda policy, now: policy.begin_step(now, self._host))
            for job, reason in plan.abort:
                self._to_tell.append((self.requests[job.rid].client_index, job.rid, reason))
                self._finish(job.rid, RequestStatus.FINISHED_ABORTED, reason)
            for job in plan.preempt:
                request = self.requests[job.rid]
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
            self._sort_running()
            return super().schedule(*args, **kwargs)
        finally:
            self._step_now = None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in the results, tell the policy in the order of the schedule and the clients of the aborts."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        results = {
            result.request_id: result for group in outputs.values() for result in group.outputs
        }
        for rid in scheduler_output.num_scheduled_tokens:
            result, tracked = results.get(rid), self.tracked.get(rid)
            if result is None or tracked is None:
                continue
            if result.new_token_ids and not tracked.has_token:
                tracked.has_token = True
                job = tracked.job
                self.ask(lambda policy, now, job=job: policy.first_token(job, now))
            if result.finish_reason is not None:
                self._forget(rid, "finished")
        for client, rid, reason in self._to_tell:
            group = outputs.setdefault(client, EngineCoreOutputs())
            group.outputs.append(
                EngineCoreOutput(rid, [], finish_reason=FinishReason.ABORT, stop_reason=reason)
            )
        self._to_tell.clear()
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Request]:
        """One id after the other: vLLM would go through them in the order of a set."""
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        ended: list[Request] = []
        for rid in list(request_ids):
            ended += self._finish(rid, finished_status, "client")
        return ended

    # --- between vLLM and the policy ------------------------------------------------------

    def ask(self, call: Callable[[Any, float], Any]) -> Any:
        """What the policy answers; if it raises, what arrival order answers, from now on."""
        now = self.clock() if self._step_now is None else self._step_now
        try:
            return call(self.policy, now)
        except Exception:
            if isinstance(self.policy, ArrivalOrder):
                raise
            self.policy_errors += 1
            logger.exception("the scheduling policy failed; going on in order of arrival")
            self.policy = ArrivalOrder(self.tracked[rid].job for rid in self.waiting.waiting)
            self._sort_running()
            return call(self.policy, now)

    def track(self, request: Request) -> Job:
        """The job that stands for a request, made when vLLM first queues it."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        arrival = self.arrival_of(request)
        job = Job(
            rid=request.request_id,
            arrival=arrival,
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            tier=self._tier_of(extra),
            tenant=str(extra.get("tenant", "default")),
            ttft_deadline=_deadline(arrival, extra, "ttft_s"),
            deadline=_deadline(arrival, extra, "total_s"),
        )
        self.tracked[request.request_id] = Tracked(request, job)
        return job

    def _tier_of(self, extra: dict[str, Any]) -> str:
        """The tier asked for if there is one of that name, else the default one, else the first.

        Under a policy that takes every request the tier says nothing to it but is what an order of the user's sees.
        """
        names = [tier.name for tier in self.policy_config.tiers]
        tier = extra.get("tier")
        if names == ["*"]:
            return "ONLINE" if tier is None else str(tier)
        if tier in names:
            return str(tier)
        if tier is not None:
            logger.warning("vllm_xargs.tier %r is not one of %s, default used", tier, names)
        return self.policy_config.default_tier or names[0]

    def arrival_of(self, request: Request) -> float:
        """When the request reached the server, on our clock; a wall clock that jumps later moves nothing."""
        return self.clock() - max(0.0, time.time() - request.arrival_time)

    def _finish(self, rid: str, status: Any, reason: str) -> list[Request]:
        ended: list[Request] = super().finish_requests(rid, status)
        for request in ended:
            self._forget(request.request_id, reason)
        return ended

    def _forget(self, rid: str, reason: str) -> None:
        tracked = self.tracked.pop(rid, None)
        if tracked is not None:
            job, tokens = tracked.job, tracked.request.num_output_tokens
            self.ask(lambda policy, now: policy.gone(job, now, reason, tokens))

    def _sort_running(self) -> None:
        jobs = self.tracked
        self.ask(
            lambda policy, now: self.running.sort(
                key=lambda request: policy.run_key(jobs[request.request_id].job)
            )
        )


class EngineHost:
    """What the policy may ask of vLLM's engine (`Host`)."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.max_model_len: int = scheduler.max_model_len
        self.watermark_blocks = int(
            getattr(scheduler.scheduler_config, "watermark", 0.0)
            * scheduler.kv_cache_config.num_blocks
        )

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out."""
        return self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def free_slots(self) -> int:
        """Requests that could be admitted beside the running ones."""
        scheduler = self._scheduler
        limit = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        return limit - len(scheduler.running)

    @property
    def running(self) -> list[Job]:
        """Running jobs in vLLM's order."""
        tracked = self._scheduler.tracked
        return [tracked[request.request_id].job for request in self._scheduler.running]

    def blocks_of(self, job: Job) -> int:
        """Blocks of the job that nobody shares."""
        manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        return sum(block.ref_cnt == 1 for block in manager.req_to_blocks.get(job.rid, ()))

    def tokens_of(self, job: Job) -> tuple[int, int]:
        """(computed tokens, known output tokens)."""
        request = self._scheduler.tracked[job.rid].request
        return request.num_computed_tokens, request.num_output_tokens

    def blocks_for(self, job: Job) -> int:
        """Blocks that all known tokens of the job fill."""
        num_tokens = self._scheduler.tracked[job.rid].request.num_tokens
        return -(-min(num_tokens, self.max_model_len) // self._scheduler.block_size)


def _deadline(arrival: float, extra: dict[str, Any], name: str) -> float | None:
    value = extra.get(name)
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        logger.warning("vllm_xargs.%s is no positive number of seconds, ignored: %r", name, value)
        return None
    return arrival + seconds


class PolicyScheduler(PolicyScheduling, Scheduler):
    """vLLM's synchronous scheduler under our policy."""


class AsyncPolicyScheduler(PolicyScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler under our policy."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """The factory for `--scheduler-cls real.scheduler.make_scheduler`."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncPolicyScheduler if is_async else PolicyScheduler)(vllm_config, **kwargs)
