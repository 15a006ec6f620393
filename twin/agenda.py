"""What is to happen when: entries of SimPy's queue that cost less to make and to take out than events of its own.

Both kinds lie in one queue; SimPy's own `step` and its processes take an entry for an event.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from twin.clock import NEVER_PS


class Entry:
    """Something that happens once: `act` is called with it, and what others put into `callbacks` until then."""

    __slots__ = ("_ok", "_value", "callbacks")

    def __init__(self, act: Callable[[Any], object] | None = None) -> None:
        self._ok = True  # for SimPy: it does not fail
        self._value = None
        self.callbacks: list[Callable[[Any], object]] | None = [] if act is None else [act]


def put(env: Any, entry: Entry, priority: int, delay_ps: int) -> None:
    """It happens `delay_ps` from now. At one instant, smaller priorities come first, then what was put there first."""
    heappush(env._queue, (env._now + delay_ps, priority, next(env._eid), entry))


def next_ps(env: Any) -> int:
    """When the next thing happens, in picoseconds; NEVER_PS if nothing will."""
    queue: list[Any] = env._queue
    instant_ps: int = queue[0][0] if queue else NEVER_PS
    return instant_ps


def step(env: Any) -> None:
    """Let the next thing happen. Raises EmptySchedule if there is none."""
    queue: list[Any] = env._queue
    entry = queue[0][3] if queue else None
    if not isinstance(entry, Entry):
        env.step()
        return
    env._now = heappop(queue)[0]
    callbacks, entry.callbacks = entry.callbacks, None
    assert callbacks is not None
    for act in callbacks:
        act(entry)
