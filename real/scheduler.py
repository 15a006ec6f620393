"""The shared policy inside vLLM: a scheduler for `--scheduler-cls`, with no policy of its own.

vLLM keeps blocks, tokens and the prefix cache. Its waiting queue is replaced by one that shows what the policy admits;
its running list is sorted before a step so that the last one is the victim. The policy comes from
`--additional-config '{"twin": {"policy": ...}}'` (a preset's name or a whole policy as data), a request's tier, tenant
and deadlines from `vllm_xargs` (real.hints).
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from real.exporter import Exporter, State, is_visible
from real.hints import DEFAULT_POLICY, PRIORITY, read_hints, read_settings
from real.vllm_names import check_scheduler, check_version
from real.waiting import ArrivalOrder, KvHoldingQueue, PolicyQueue, Tracked
from twin.scheduling import Job, Plan, Policy, fingerprint, policy_config

logger = logging.getLogger("vllm.twin")


class PolicyScheduling:
    """Mixed into vLLM's schedulers."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Where the policy's time comes from: a clock that nobody sets."""

    def __init__(self, vllm_config: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, **kwargs)
        check_scheduler(self)
        settings = read_settings(vllm_config.additional_config)
        self.policy_config = policy_config(settings.get("policy", DEFAULT_POLICY))
        self.policy: Any = Policy(self.policy_config, self.max_model_len)
        self.policy_fingerprint = fingerprint(self.policy_config)
        self.policy_errors = 0
        """Exceptions of the policy; the first one puts arrival order in its place."""
        self.tracked: dict[str, Tracked] = {}
        self.is_finishing = False
        """Whether vLLM is taking a request out for good."""
        self._without_token: set[str] = set()
        self._to_tell: list[tuple[int, str, str]] = []  # (client, request, reason) of our aborts
        self._bad_hints: set[str] = set()  # fields that were complained about
        self._host = EngineHost(self)
        self._now: float | None = None  # the instant of the step being planned or taken in
        self._is_sorted = True  # self.running is in run_key order
        self.waiting = PolicyQueue(self)
        self.kv_holding_waiting = KvHoldingQueue(self)
        self._exporter = self._make_exporter(vllm_config, settings)
        logger.info("scheduling policy %s", self.policy_fingerprint)
        if untried := not_modelled(vllm_config):
            logger.warning("the simulator does not model %s: its predictions do not hold", untried)

    def _make_exporter(self, vllm_config: Any, settings: dict[str, Any]) -> Exporter | None:
        if not is_visible():
            logger.info("PROMETHEUS_MULTIPROC_DIR is not set: no metrics by tier")
            return None
        name = settings.get("policy_name", settings.get("policy", DEFAULT_POLICY))
        return Exporter(
            self.policy_config,
            self.policy_fingerprint,
            name if isinstance(name, str) else "custom",
            vllm.__version__,
            str(vllm_config.model_config.served_model_name),
            str(vllm_config.parallel_config.data_parallel_index),
        )

    # --- vLLM's public methods ------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Let the policy plan, carry its plan out, then schedule as vLLM does."""
        now = self._now = self.clock()
        try:
            if self.waiting.compiling:
                self.waiting.submit_compiled(now)
            self._carry_out(self._ask(lambda policy, now: policy.begin_step(now, self._host)))
            if not self._is_sorted:
                self._sort_running()
            return super().schedule(*args, **kwargs)
        finally:
            self._now = None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in the results, tell the policy in the order of the schedule and the clients of the aborts."""
        self._now = self.clock()
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self._note_results(outputs, scheduler_output)
            now = self._now
            if self._exporter is not None and self._exporter.is_due(now):
                self._export(lambda exporter: self._export_state(exporter, now))
        finally:
            self._now = None
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
        reason = "error" if finished_status == RequestStatus.FINISHED_ERROR else "client"
        ended: list[Request] = []
        for rid in list(request_ids):
            ended += self._finish(rid, finished_status, reason)
        return ended

    # --- what the queues tell the policy --------------------------------------------------

    def track(self, request: Request) -> None:
        """A request that vLLM queues for the first time, and the job that stands for it."""
        job = self._job_of(request)
        self.tracked[request.request_id] = Tracked(request, job)
        self._without_token.add(request.request_id)

    def submit(self, rid: str) -> None:
        """The request could run from now on."""
        job = self.tracked[rid].job
        self._ask(lambda policy, now: policy.submit(job, now))

    def start(self, tracked: Tracked) -> None:
        """vLLM took it off the queue."""
        tracked.is_started = True
        if tracked.first_start is None:
            tracked.first_start = self._time()
        self.running_changed()
        self._ask(lambda policy, now: policy.start(tracked.job, now))

    def undo_start(self, tracked: Tracked) -> None:
        """vLLM took it off but set it aside."""
        tracked.is_started = False
        if tracked.first_token is None and not tracked.request.num_preemptions:
            tracked.first_start = None
        self._ask(lambda policy, now: policy.undo_start(tracked.job, now))

    def requeue(self, tracked: Tracked) -> None:
        """It no longer runs and waits again."""
        tracked.is_started = False
        self._ask(lambda policy, now: policy.requeue(tracked.job, now))

    def head(self) -> Job | None:
        """Which job may run next."""
        job: Job | None = self._ask(lambda policy, now: policy.head(now))
        return job

    def has_free_slot(self) -> bool:
        """Whether one more request could run."""
        return self._host.free_slots > 0

    def running_changed(self) -> None:
        """Somebody joins the running list, at its end."""
        self._is_sorted = False

    # --- between vLLM and the policy ------------------------------------------------------

    def _time(self) -> float:
        """The instant of this step, or of this call between two steps."""
        return self.clock() if self._now is None else self._now

    def _ask(self, call: Callable[[Any, float], Any]) -> Any:
        """What the policy answers; if it raises, what arrival order answers, from now on."""
        now = self._time()
        try:
            return call(self.policy, now)
        except Exception:
            if isinstance(self.policy, ArrivalOrder):
                raise
            self.policy_errors += 1
            self._export(lambda exporter: exporter.policy_failed())
            logger.exception("the scheduling policy failed; going on in order of arrival")
            queue = self.waiting
            ready = [rid for rid in queue.waiting if rid not in queue.compiling]
            self.policy = ArrivalOrder(self.tracked[rid].job for rid in ready)
            self._is_sorted = False
            return call(self.policy, now)

    def _carry_out(self, plan: Plan) -> None:
        for job, reason in plan.abort:
            tracked = self.tracked.get(str(job.rid))
            if tracked is not None:
                rid = tracked.request.request_id
                self._to_tell.append((tracked.request.client_index, rid, reason))
                self._finish(rid, RequestStatus.FINISHED_ABORTED, reason)
        for job in plan.preempt:
            request = self.tracked[str(job.rid)].request
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())

    def _note_results(self, outputs: Any, scheduler_output: Any) -> None:
        """Tell the policy of first tokens and ends."""
        waited_for = self._without_token
        news = [
            result
            for group in outputs.values()
            for result in group.outputs
            if result.finish_reason is not None or result.request_id in waited_for
        ]
        if len(outputs) > 1 and len(news) > 1:  # vLLM has them by client
            place = {rid: i for i, rid in enumerate(scheduler_output.num_scheduled_tokens)}
            news.sort(key=lambda result: place.get(result.request_id, len(place)))
        for result in news:
            tracked = self.tracked.get(result.request_id)
            if tracked is None:
                continue
            if result.new_token_ids and tracked.first_token is None:
                tracked.first_token = now = self._time()
                waited_for.discard(result.request_id)
                job = tracked.job
                tier, ttft_s = self._tier_name(job), now - job.arrival
                self._export(lambda e, tier=tier, ttft_s=ttft_s: e.first_token(tier, ttft_s))
                self._ask(lambda policy, now, job=job: policy.first_token(job, now))
            # A streaming session goes on after the end of a turn.
            if result.finish_reason is not None and tracked.request.is_finished():
                self._forget(result.request_id, "finished")

    def _job_of(self, request: Request) -> Job:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        hints, wrong = read_hints(extra, request.priority, self.policy_config)
        for name, problem in wrong.items():
            if name not in self._bad_hints:
                self._bad_hints.add(name)
                where = name if name == PRIORITY else f"vllm_xargs.{name}"
                logger.warning("%s %s; the default is used, now and later", where, problem)
            self._export(lambda exporter, name=name: exporter.bad_hint(name))
        arrival = self.arrival_of(request)
        return Job(
            rid=request.request_id,
            arrival=arrival,
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            tier=hints.tier,
            tenant=hints.tenant,
            ttft_deadline=None if hints.ttft_s is None else arrival + hints.ttft_s,
            deadline=None if hints.total_s is None else arrival + hints.total_s,
        )

    def arrival_of(self, request: Request) -> float:
        """When the request reached the server, on our clock; a wall clock that jumps later moves nothing."""
        return self.clock() - max(0.0, time.time() - request.arrival_time)

    def _finish(self, rid: str, status: Any, reason: str) -> list[Request]:
        self.is_finishing = True
        try:
            ended: list[Request] = super().finish_requests(rid, status)
        finally:
            self.is_finishing = False
        for request in ended:
            self._forget(request.request_id, reason)
        return ended

    def _forget(self, rid: str, reason: str) -> None:
        tracked = self.tracked.pop(rid, None)
        if tracked is not None:
            self._without_token.discard(rid)
            job, tokens = tracked.job, tracked.request.num_output_tokens
            self._ask(lambda policy, now: policy.gone(job, now, reason, tokens))
            self._export(lambda exporter: self._export_end(exporter, tracked, reason, tokens))

    # --- metrics --------------------------------------------------------------------------

    def _export(self, call: Callable[[Exporter], None]) -> None:
        """Tell the exporter; one that fails (a full disk) is logged and done without."""
        if self._exporter is None:
            return
        try:
            call(self._exporter)
        except Exception:
            logger.exception("metrics by tier failed; going on without them")
            self._exporter = None

    def _tier_name(self, job: Job) -> str:
        """The policy's name for the tier of a job."""
        return job.tier if len(self.policy_config.tiers) > 1 else self.policy_config.tiers[0].name

    def _export_end(self, exporter: Any, tracked: Tracked, reason: str, tokens: int) -> None:
        tier, job, now = self._tier_name(tracked.job), tracked.job, self._time()
        exporter.gone(tier, reason)
        if (
            reason == "finished"
            and tracked.first_start is not None
            and tracked.first_token is not None
        ):
            tpot_s = (now - tracked.first_token) / (tokens - 1) if tokens > 1 else None
            exporter.completed(tier, tracked.first_start - job.arrival, now - job.arrival, tpot_s)
        if not self.tracked:
            self._export_state(exporter, now)

    def _export_state(self, exporter: Any, now: float) -> None:
        stats = {} if isinstance(self.policy, ArrivalOrder) else self.policy.stats()
        exporter.write(now, stats, self._state)

    def _state(self) -> State:
        pool = self.kv_cache_manager.block_pool
        usable = self.kv_cache_config.num_blocks - 1  # without the null block
        state = State(usable, pool.get_num_free_blocks(), len(self.tracked))
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        for request in self.running:
            held = len(manager.req_to_blocks.get(request.request_id, ())) * self.block_size
            state.add(
                request.num_prompt_tokens,
                held,
                request.num_computed_tokens,
                usable * self.block_size,
            )
        return state

    def _sort_running(self) -> None:
        jobs = self.tracked

        def sort(policy: Any, now: float) -> None:
            self.running.sort(key=lambda request: policy.run_key(jobs[request.request_id].job))

        self._ask(sort)
        self._is_sorted = True


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
        """Requests that could be admitted beside the running ones; a streaming session between two turns keeps its."""
        scheduler = self._scheduler
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        slots: int = scheduler.max_num_active_reqs - taken
        return slots

    @property
    def running(self) -> list[Job]:
        """Running jobs in vLLM's order; none while admission is paused, so that nobody gives way to no one."""
        scheduler = self._scheduler
        if scheduler.pause_state != PauseState.UNPAUSED:
            return []
        tracked = scheduler.tracked
        return [tracked[request.request_id].job for request in scheduler.running]

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


def not_modelled(vllm_config: Any) -> str:
    """What this engine uses that the simulator does not model, separated by commas; empty if nothing."""
    parallel = vllm_config.parallel_config
    found = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "KV connectors": vllm_config.kv_transfer_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
    }
    return ", ".join(name for name, used in found.items() if used)


class PolicyScheduler(PolicyScheduling, Scheduler):
    """vLLM's synchronous scheduler under our policy."""


class AsyncPolicyScheduler(PolicyScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler under our policy."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """The factory for `--scheduler-cls real.scheduler.make_scheduler`.

    Raises RuntimeError under a vLLM it does not know.
    """
    check_version()
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncPolicyScheduler if is_async else PolicyScheduler)(vllm_config, **kwargs)
