"""Which replica gets a request: pure functions of what is known when it arrives."""

from collections.abc import Callable, Sequence
from typing import Protocol


class Load(Protocol):
    """What a router may look at in a replica."""

    @property
    def num_inflight(self) -> int:
        """Requests sent there that have not ended."""


def round_robin(routed: int, replicas: Sequence[Load]) -> int:
    """Each replica in turn; `routed` requests were placed before this one."""
    return routed % len(replicas)


def least_connections(routed: int, replicas: Sequence[Load]) -> int:
    """The replica with the fewest requests in flight, the first of them if several have as few."""
    best, fewest = 0, replicas[0].num_inflight
    for index, replica in enumerate(replicas):
        if replica.num_inflight < fewest:
            best, fewest = index, replica.num_inflight
    return best


Router = Callable[[int, Sequence[Load]], int]
"""(requests placed before, replicas) -> index of the replica."""

ROUTERS: dict[str, Router] = {
    "round_robin": round_robin,
    "least_connections": least_connections,
}
