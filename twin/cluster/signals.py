"""What a router knows of replicas: their state when it was last read, or the requests that it sent there itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twin.clock import NEVER_PS
from twin.cluster.router import Load


class Source(Load, Protocol):
    """A replica whose state can be read."""

    def kv_used(self, now_ps: int) -> float:
        """Share of its KV blocks in use just before `now_ps`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was read of a replica."""

    index: int
    num_inflight: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    at_ps: int = 0
    """When it was read."""


class Frozen:
    """A replica whose metrics stand still: what a router counts itself goes on, the rest is as it was."""

    __slots__ = ("_load", "at_ps", "index", "kv_usage", "num_waiting")

    def __init__(self, load: Load, at_ps: int) -> None:
        self._load = load
        self.at_ps = at_ps
        self.index = load.index
        self.num_waiting = load.num_waiting
        self.kv_usage = load.kv_usage

    @property
    def num_inflight(self) -> int:
        return self._load.num_inflight


class Poll:
    """Reads all replicas at the multiples of an interval. One that was not there at the last reading looks idle.

    Those in `standing` are read no more, and stay as they were. Reading is no event: nothing changes between two
    events, so that `catch_up` before each one suffices.
    """

    def __init__(self, interval_ps: int) -> None:
        self._interval_ps = interval_ps
        self._seen: dict[int, Seen] = {}
        self.standing: set[int] = set()
        """Replicas whose metrics stand still, by index."""
        self.next_ps = interval_ps or NEVER_PS
        """When the replicas are read next; never if the interval is 0."""

    def catch_up(self, until_ps: int, replicas: Iterable[Source]) -> None:
        """Nothing has happened before `until_ps` since the last call: read as of the last multiple until then."""
        at_ps = until_ps - until_ps % self._interval_ps
        self.next_ps = at_ps + self._interval_ps
        old = {i: self._seen.get(i) or Seen(i, at_ps=at_ps) for i in self.standing}
        self._seen = old | {
            r.index: Seen(r.index, r.num_inflight, r.num_waiting, r.kv_used(at_ps), at_ps)
            for r in replicas
            if r.index not in self.standing
        }

    def loads(self, replicas: Sequence[Load]) -> list[Load]:
        """The replicas as they were read."""
        return [self._seen.get(replica.index) or Seen(replica.index) for replica in replicas]


class Own:
    """A replica as one of several routers sees it: of the requests in flight it knows its own."""

    __slots__ = ("_load", "num_inflight")

    def __init__(self, load: Load, num_inflight: int) -> None:
        self._load = load
        self.num_inflight = num_inflight

    @property
    def index(self) -> int:
        return self._load.index

    @property
    def num_waiting(self) -> int:
        return self._load.num_waiting

    @property
    def kv_usage(self) -> float:
        return self._load.kv_usage
