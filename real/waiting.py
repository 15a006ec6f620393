"""vLLM's waiting queue as the policy sees fit, and the order that is left when the policy has failed."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.request import Request, RequestStatus

from twin.scheduling import Job, Plan


class Tracked:
    """A request between submission and end."""

    __slots__ = ("first_start", "first_token", "is_started", "job", "request")

    def __init__(self, request: Request, job: Job) -> None:
        self.request = request
        self.job = job
        self.first_start: float | None = None
        """When it was first taken off the queue for good; seconds on the policy's clock."""
        self.first_token: float | None = None
        """When its first token was known."""
        self.is_started = False
        """Whether the policy counts it as running."""


class PolicyQueue(RequestQueue):
    """`len` counts all that wait; `bool`, peek and pop show only what the policy lets run now."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.waiting: dict[Any, Request] = {}  # by id
        self.compiling: dict[Any, Request] = {}
        """Those of the waiting whose grammar is being compiled. The policy hears of them when they could run: it would
        plan preemptions for them before."""
        self._peeked: Job | None = None

    def add_request(self, request: Request) -> None:
        """Also a streaming session that vLLM puts back for its next turn: the same job goes on waiting."""
        rid = request.request_id
        self.waiting[rid] = request
        tracked = self._owner.tracked.get(rid)
        if tracked is None:
            self._owner.track(request)
            if _is_compiling(request):
                self.compiling[rid] = request
            else:
                self._owner.submit(rid)
        elif tracked.is_started:
            self._owner.requeue(tracked)

    def submit_compiled(self, now: float) -> None:
        """Tell the policy of requests whose grammar is ready, or whose deadline has passed meanwhile."""
        for rid, request in [*self.compiling.items()]:
            job = self._owner.tracked[rid].job
            due = min((d for d in (job.ttft_deadline, job.deadline) if d is not None), default=None)
            if not _is_compiling(request) or (due is not None and now >= due):
                del self.compiling[rid]
                self._owner.submit(rid)

    def peek_request(self) -> Request:
        self._peeked = self._head()
        return self.waiting[self._peeked.rid]

    def pop_request(self) -> Request:
        """What was peeked at, even if the policy has failed since: vLLM has allocated blocks for that one."""
        job, self._peeked = self._peeked or self._head(), None
        self._owner.start(self._owner.tracked[job.rid])
        return self.waiting.pop(job.rid)

    def prepend_request(self, request: Request) -> None:
        """vLLM preempted it."""
        self.waiting[request.request_id] = request
        self._owner.requeue(self._owner.tracked[request.request_id])

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """vLLM took these off and set them aside; it hands them over last one first."""
        for request in reversed(list(requests)):
            self.waiting[request.request_id] = request
            self._owner.undo_start(self._owner.tracked[request.request_id])

    def remove_request(self, request: Request) -> None:
        """Only one that ends: vLLM also drops a session from here whose last turn ended while it was preempted, and
        would then never run its next.
        """
        if self._owner.is_finishing or request.is_finished():
            self.waiting.pop(request.request_id, None)
            self.compiling.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def _head(self) -> Job:
        job = self._owner.head()
        if job is None:
            raise IndexError("nothing may be admitted now")
        return job

    def __bool__(self) -> bool:
        """Whether somebody may be admitted: with all slots taken the policy is not asked, as in the simulator."""
        self._peeked = None
        return self._owner.has_free_slot() and self._owner.head() is not None

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.waiting.values()))


class KvHoldingQueue(FCFSRequestQueue):
    """vLLM's queue of requests that wait and keep their blocks; they run first, whatever the policy says."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = owner

    def pop_request(self) -> Request:
        """The policy counts it as running all the time: its slot and blocks are taken."""
        self._owner.running_changed()
        return super().pop_request()


class ArrivalOrder:
    """What is left when the policy has failed: everybody in order of arrival, nobody held, aborted or preempted."""

    def __init__(self, waiting: Iterable[Job]) -> None:
        self._waiting: dict[Any, Job] = {}
        self._heap: list[tuple[float, int, Any]] = []  # of all that ever waited
        for job in waiting:
            self.submit(job, 0.0)

    def submit(self, job: Job, now: float) -> None:
        self._waiting[job.rid] = job
        heapq.heappush(self._heap, (job.arrival, job.seq, job.rid))

    requeue = undo_start = submit

    def start(self, job: Job, now: float) -> None:
        self._waiting.pop(job.rid, None)

    def first_token(self, job: Job, now: float) -> None:
        pass

    def gone(self, job: Job, now: float, reason: str, output_tokens: int) -> None:
        self._waiting.pop(job.rid, None)

    def begin_step(self, now: float, host: Any) -> Plan:
        return Plan()

    def head(self, now: float) -> Job | None:
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][2]] if self._heap else None

    def run_key(self, job: Job) -> tuple[Any, ...]:
        return (job.arrival, job.seq, job.rid)


def _is_compiling(request: Request) -> bool:
    """Whether vLLM would set it aside because its grammar is not ready; one that failed to compile is ready to fail."""
    if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return False
    asked = request.structured_output_request
    return asked is not None and asked.grammar is None
