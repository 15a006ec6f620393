"""What is to happen when: entries of SimPy's queue that cost less to make and to take out than events of its own.

Both kinds lie in one queue; SimPy's own `step` and its processes take an entry for an event.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from twin.clock import NEVER_PS

# Under names that nobody changes, which compiled code need not look up.
PUSH: Final = heappush
POP: Final = heappop

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int; compiled, one of 64 bits


class Entry:
    """Something that happens once: `act` is called with it, and what others put into `callbacks` until then."""

    __slots__ = ("_ok", "_value", "callbacks")

    def __init__(self, act: Callable[[Any], object] | None = None) -> None:
        self._ok = True  # for SimPy: it does not fail
        self._value = None
        self.callbacks: list[Callable[[Any], object]] | None = [] if act is None else [act]


class Agenda:
    """The queue of a SimPy environment."""

    __slots__ = ("_env", "_numbers", "_queue")

    def __init__(self, env: Any) -> None:
        self._env = env
        self._queue: list[Any] = env._queue
        self._numbers = env._eid

    @property
    def now_ps(self) -> int:
        """Picoseconds: SimPy calls its time a float; all our delays are ints."""
        instant_ps: int = self._env._now
        return instant_ps

    def put(self, entry: Entry, priority: int, delay_ps: int) -> None:
        """It happens `delay_ps` from now. At one instant, smaller priorities come first, then what was put first."""
        due_ps: int = self._env._now + delay_ps
        PUSH(self._queue, (due_ps, priority, next(self._numbers), entry))

    def next_ps(self) -> "i64":
        """When the next thing happens; NEVER_PS if nothing will."""
        return self._queue[0][0] if self._queue else NEVER_PS

    def step(self) -> None:
        """Let the next thing happen. Raises EmptySchedule if there is none."""
        queue = self._queue
        entry = queue[0][3] if queue else None
        if not isinstance(entry, Entry):
            self._env.step()
            return
        self._env._now = POP(queue)[0]
        callbacks, entry.callbacks = entry.callbacks, None
        for act in callbacks or ():
            act(entry)
