"""The waiting side of the engine: vLLM's two queues and the shared policy behind one interface.

`bool(queue)`, `peek` and `pop` show what may be admitted now; `len` counts everything that waits.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sized
from typing import Any, Protocol

from twin.engine.request import EngineRequest


class WaitingQueue(Protocol):
    """What the engine asks of whoever holds the waiting requests."""

    @property
    def requests(self) -> Sized:
        """All that wait."""

    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def add(self, request: EngineRequest, now: float) -> None:
        """A new request."""

    def peek(self) -> EngineRequest:
        """The request to admit next."""

    def pop(self, now: float) -> EngineRequest:
        """Take off what `peek` shows: it runs, or is set aside until the loop is over."""

    def put_back(self, request: EngineRequest, now: float) -> None:
        """A preempted request waits again."""

    def undo(self, requests: list[EngineRequest], now: float) -> None:
        """Requests popped but only set aside by the admission loop, in that order, wait again in front."""

    def remove(self, request: EngineRequest) -> None:
        """A waiting request has ended."""


class FcfsQueue:
    """vLLM's `policy=fcfs`: arrival order, preempted requests at the front."""

    def __init__(self) -> None:
        self.requests = self._queue = deque[EngineRequest]()

    def __len__(self) -> int:
        return len(self._queue)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, request: EngineRequest, now: float) -> None:
        self._queue.append(request)

    def peek(self) -> EngineRequest:
        return self._queue[0]

    def pop(self, now: float) -> EngineRequest:
        return self._queue.popleft()

    def put_back(self, request: EngineRequest, now: float) -> None:
        self._queue.appendleft(request)

    def undo(self, requests: list[EngineRequest], now: float) -> None:
        self._queue.extendleft(reversed(requests))

    def remove(self, request: EngineRequest) -> None:
        self._queue.remove(request)


class PriorityQueue:
    """vLLM's `policy=priority`: smallest (priority, arrival) first, ties in the order of arrival."""

    def __init__(self) -> None:
        self.requests = self._queue = list[tuple[tuple[int, float, int], EngineRequest]]()

    def __len__(self) -> int:
        return len(self._queue)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, request: EngineRequest, now: float) -> None:
        insort(self._queue, (_priority_key(request), request), key=_first)

    def peek(self) -> EngineRequest:
        return self._queue[0][1]

    def pop(self, now: float) -> EngineRequest:
        return self._queue.pop(0)[1]

    def put_back(self, request: EngineRequest, now: float) -> None:
        self.add(request, now)

    def undo(self, requests: list[EngineRequest], now: float) -> None:
        for request in requests:
            self.add(request, now)

    def remove(self, request: EngineRequest) -> None:
        self._queue[:] = [entry for entry in self._queue if entry[1] is not request]


def _priority_key(request: EngineRequest) -> tuple[int, float, int]:
    return (request.priority, request.arrival, request.seq)


_first: Callable[[Any], Any] = lambda entry: entry[0]  # noqa: E731


class PolicyQueue:
    """The shared policy as the engine's queue: order, holding and caps are its, requests are ours."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.requests = self._waiting = dict[Any, EngineRequest]()  # by rid
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __bool__(self) -> bool:
        return self._policy.head(self._now) is not None

    def begin_step(self, now: float) -> None:
        """All answers until the next call are for the instant `now`."""
        self._now = now

    def add(self, request: EngineRequest, now: float) -> None:
        self._waiting[request.rid] = request
        self._policy.submit(request.job, now)

    def peek(self) -> EngineRequest:
        return self._waiting[self._policy.head(self._now).rid]

    def pop(self, now: float) -> EngineRequest:
        job = self._policy.head(now)
        self._policy.start(job, now)
        return self._waiting.pop(job.rid)

    def put_back(self, request: EngineRequest, now: float) -> None:
        self._waiting[request.rid] = request
        self._policy.requeue(request.job, now)

    def undo(self, requests: list[EngineRequest], now: float) -> None:
        for request in requests:
            self._waiting[request.rid] = request
            self._policy.undo_start(request.job, now)

    def remove(self, request: EngineRequest) -> None:
        del self._waiting[request.rid]
