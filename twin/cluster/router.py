"""Which replica gets a request: rules over what a router knows of the replicas when the request arrives.

A router is called with the request and the loads of the replicas that may get it and answers with a position among
them. It sees loads only; what it remembers (whose turn it is, where a conversation went) is its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from twin.cluster.outliers import Ejection
from twin.compiled import remade
from twin.workload.request import Request


class Load(Protocol):
    """What a router may look at in a replica."""

    @property
    def index(self) -> int:
        """Which replica it is, whatever the others are."""

    @property
    def num_inflight(self) -> int:
        """Requests sent there that have not ended."""

    @property
    def num_waiting(self) -> int:
        """Requests there that do not run."""

    @property
    def kv_usage(self) -> float:
        """Share of its KV blocks in use."""


Router = Callable[[Request, Sequence[Load]], int]
"""(request, loads) -> position of the replica it goes to. There is at least one."""


@dataclass(frozen=True)
class Routing:
    """How requests are spread over the replicas."""

    router: str = "least_connections"
    """Name in twin.cluster.routers.ROUTERS."""
    routers: int = 1
    """Copies of the router, each of which knows its own requests only; requests come to one of them at random."""
    poll_ps: int = 0
    """How often the state of the replicas is read; in between routers go by what was read last. 0 = as it is."""
    guard: float | None = 1.25
    """Affinity sends no request to a replica with more than this times the mean load; None = however loaded."""
    stale_after_ps: int | None = None
    """State that is older is stale; None = however old it is, a router goes by it."""
    when_stale: str = "avoid"
    """avoid = stale replicas only where none is fresh; refuse = then nobody is let through."""
    ejection: Ejection | None = None
    """None = however often a replica fails, it gets requests."""
    seed: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._routed = 0

    def __call__(self, request: Request, loads: Sequence[Load]) -> int:
        position = self._routed % len(loads)
        self._routed += 1
        return position


def least_connections(request: Request, loads: Sequence[Load]) -> int:
    """The replica with the fewest requests in flight, the first of them if several have as few."""
    if len(loads) == 1:
        return 0
    best, fewest = 0, loads[0].num_inflight
    for position, load in enumerate(loads):
        if load.num_inflight < fewest:
            best, fewest = position, load.num_inflight
    return best


def queue_aware(request: Request, loads: Sequence[Load]) -> int:
    """The replica where the fewest wait, then the one with the fewest in flight, then the first."""
    return min(range(len(loads)), key=lambda i: (loads[i].num_waiting, loads[i].num_inflight))


def least_kv(request: Request, loads: Sequence[Load]) -> int:
    """The replica with the smallest share of KV in use, then the one with the fewest in flight, then the first."""
    return min(range(len(loads)), key=lambda i: (loads[i].kv_usage, loads[i].num_inflight))


class Uniform:
    """Any replica, all equally likely."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, request: Request, loads: Sequence[Load]) -> int:
        return self._rng.randrange(len(loads))


class PowerOfTwo:
    """Of two different replicas drawn at random the one with fewer requests in flight, the first drawn if equal."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, request: Request, loads: Sequence[Load]) -> int:
        if len(loads) == 1:
            return 0
        first = self._rng.randrange(len(loads))
        second = self._rng.randrange(len(loads) - 1)
        if second >= first:
            second += 1
        return second if loads[second].num_inflight < loads[first].num_inflight else first
