"""Where has this conversation, or this text, been before? Routers that go where the prefix cache may know a prompt.

Both have a load guard. With `guard` c a replica takes no request by affinity that would give it more than
ceil(c * (requests in flight + 1) / replicas), the bound of consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam 2018, arXiv:1608.01350).
"""

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from twin.cluster.router import Load, least_connections
from twin.workload.request import Request

POINTS = 64
"""Of each replica on the ring."""

MOST_PREFIXES = 500_000
"""Prefixes that a router remembers; the one used least recently goes first."""


def bound(loads: Sequence[Load], guard: float | None) -> float:
    """The most requests in flight that a replica may have and still get one more by affinity, plus one."""
    if guard is None:
        return float("inf")
    return ceil(guard * (sum(load.num_inflight for load in loads) + 1) / len(loads))


class SessionAffinity:
    """A conversation goes to the first replica after its own point on a ring of points of all replicas.

    When replicas come or go, only conversations next to their points move. A full replica (guard) passes a request on
    to the next on the ring. Requests without a session go by least connections.
    """

    def __init__(self, guard: float | None) -> None:
        self._guard = guard
        self._replicas: tuple[int, ...] = ()
        self._ring: list[tuple[int, int]] = []  # (point, position)

    def __call__(self, request: Request, loads: Sequence[Load]) -> int:
        if request.session is None:
            return least_connections(request, loads)
        replicas = tuple(load.index for load in loads)
        if replicas != self._replicas:
            self._replicas = replicas
            self._ring = sorted(
                (_point(f"{replica}/{i}"), position)
                for position, replica in enumerate(replicas)
                for i in range(POINTS)
            )
        # Sessions of different streams may have the same name.
        point = _point(f"{request.stream}/{request.session}")
        start, most = bisect_right(self._ring, (point, len(loads))), bound(loads, self._guard)
        for i in range(len(self._ring)):
            position = self._ring[(start + i) % len(self._ring)][1]
            if loads[position].num_inflight < most:
                return position
        raise AssertionError("the bound is above the mean")


class PrefixAffinity:
    """A request goes to a replica that got the longest known beginning of its prompt, the emptiest of these.

    What no replica is known to have had, and what would go to a full one (guard), goes by least connections. Prefixes
    are those at the borders of the prompt's pieces of content; the router knows where it sent them, not what a cache
    still holds.
    """

    def __init__(self, guard: float | None) -> None:
        self._guard = guard
        # Prefix -> replicas that got it; the prefix used least recently comes first.
        self._holders: dict[int, list[int]] = {}

    def __call__(self, request: Request, loads: Sequence[Load]) -> int:
        places = {load.index: position for position, load in enumerate(loads)}
        prefixes = self._prefixes(request)
        best: int | None = None
        for holders in reversed(self._known(prefixes)):
            there = [places[replica] for replica in holders if replica in places]
            if there:
                best = min(there, key=lambda position: (loads[position].num_inflight, position))
                break
        if best is None or loads[best].num_inflight >= bound(loads, self._guard):
            best = least_connections(request, loads)
        self._remember(prefixes, loads[best].index)
        return best

    @staticmethod
    def _prefixes(request: Request) -> list[int]:
        found, prefix = [], 0
        for content, tokens in request.prompt:
            prefix = hash((prefix, content, tokens))  # of integers: the same in every process
            found.append(prefix)
        return found

    def _known(self, prefixes: Sequence[int]) -> list[list[int]]:
        """Who got each of them, up to the first that nobody got."""
        found = []
        for prefix in prefixes:
            holders = self._holders.get(prefix)
            if holders is None:
                break
            found.append(holders)
        return found

    def _remember(self, prefixes: Sequence[int], replica: int) -> None:
        known = self._holders
        for prefix in prefixes:
            holders = known.pop(prefix, [])
            if replica not in holders:
                holders.append(replica)
            known[prefix] = holders
        while len(known) > MOST_PREFIXES:
            del known[next(iter(known))]


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
