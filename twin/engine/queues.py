"""The waiting side of the engine: vLLM's two queues and the shared policy behind one interface.

`next` and `take` are about what may be admitted now; `len` counts everything that waits.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Hashable

from twin.engine.request import EngineRequest
from twin.scheduling import Job, Policy


class WaitingQueue(ABC):
    """What the engine asks of whoever holds the waiting requests."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, request: EngineRequest, now: float) -> None:
        """A new request."""

    @abstractmethod
    def next(self) -> EngineRequest | None:
        """The request to admit next, None if there is none; asking has it noted whom a cap stops."""

    def first(self) -> EngineRequest | None:
        """What `next` would say; asking leaves no trace."""
        return self.next()

    @abstractmethod
    def take(self, request: EngineRequest, now: float) -> None:
        """Take off what `next` has shown: it runs, or is set aside until the loop is over."""

    @abstractmethod
    def put_back(self, request: EngineRequest, now: float) -> None:
        """A preempted request waits again."""

    @abstractmethod
    def undo(self, requests: list[EngineRequest], now: float) -> None:
        """Requests taken but only set aside by the admission loop, in that order, wait again in front."""

    @abstractmethod
    def remove(self, request: EngineRequest) -> None:
        """A waiting request has ended."""


class FcfsQueue(WaitingQueue):
    """vLLM's `policy=fcfs`: arrival order, preempted requests at the front."""

    def __init__(self) -> None:
        self._queue: deque[EngineRequest] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: EngineRequest, now: float) -> None:
        self._queue.append(request)

    def next(self) -> EngineRequest | None:
        return self._queue[0] if self._queue else None

    def take(self, request: EngineRequest, now: float) -> None:
        self._queue.popleft()

    def put_back(self, request: EngineRequest, now: float) -> None:
        self._queue.appendleft(request)

    def undo(self, requests: list[EngineRequest], now: float) -> None:
        self._queue.extendleft(reversed(requests))

    def remove(self, request: EngineRequest) -> None:
        self._queue.remove(request)


class PriorityQueue(WaitingQueue):
    """vLLM's `policy=priority`: smallest (priority, arrival) first, ties in the order of arrival."""

    def __init__(self) -> None:
        self._queue: list[tuple[tuple[int, float, int], EngineRequest]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: EngineRequest, now: float) -> None:
        # The number of a request differs from all others, so that requests are never compared.
        insort(self._queue, ((request.priority, request.arrival, request.seq), request))

    def next(self) -> EngineRequest | None:
        return self._queue[0][1] if self._queue else None

    def take(self, request: EngineRequest, now: float) -> None:
        del self._queue[0]

    def put_back(self, request: EngineRequest, now: float) -> None:
        self.add(request, now)

    def undo(self, requests: list[EngineRequest], now: float) -> None:
        for request in requests:
            self.add(request, now)

    def remove(self, request: EngineRequest) -> None:
        self._queue = [entry for entry in self._queue if entry[1] is not request]


class PolicyQueue(WaitingQueue):
    """The shared policy as the engine's queue: order, holding and caps are its, requests are ours."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: dict[Hashable, EngineRequest] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def begin_step(self, now: float) -> None:
        """All answers until the next call are for the instant `now`."""
        self._now = now

    def add(self, request: EngineRequest, now: float) -> None:
        self._waiting[request.rid] = request
        self._policy.submit(request.job, now)

    def next(self) -> EngineRequest | None:
        return self._of(self._policy.head(self._now))

    def first(self) -> EngineRequest | None:
        return self._of(self._policy.peek())

    def _of(self, job: Job | None) -> EngineRequest | None:
        return None if job is None else self._waiting[job.rid]

    def take(self, request: EngineRequest, now: float) -> None:
        self._policy.start(request.job, now)
        del self._waiting[request.rid]

    def put_back(self, request: EngineRequest, now: float) -> None:
        self._waiting[request.rid] = request
        self._policy.requeue(request.job, now)

    def undo(self, requests: list[EngineRequest], now: float) -> None:
        for request in requests:
            self._waiting[request.rid] = request
            self._policy.undo_start(request.job, now)

    def remove(self, request: EngineRequest) -> None:
        del self._waiting[request.rid]
