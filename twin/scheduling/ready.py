"""Jobs in the order of their keys: a sorted queue, and one for each rank and tier of those that are ready."""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from typing import Any

from twin.scheduling.entry import Entry
from twin.scheduling.planning import Room

Key = tuple[Any, ...]


class SortedQueue:
    """(key, entry) pairs in the order of their keys, which must differ from each other.

    Removing the first pair only moves a mark; the list is trimmed once half of it lies before the mark.
    """

    __slots__ = ("_pairs", "_start")

    def __init__(self) -> None:
        self._pairs: list[tuple[Key, Entry]] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._pairs) - self._start

    def __iter__(self) -> Iterator[tuple[Key, Entry]]:
        for i in range(self._start, len(self._pairs)):
            yield self._pairs[i]

    def add(self, key: Key, entry: Entry) -> None:
        """Insert `entry` at its place."""
        pairs = self._pairs
        if not pairs or pairs[-1][0] < key:
            pairs.append((key, entry))
        else:
            insort(pairs, (key, entry), lo=self._start)

    def first(self) -> tuple[Key, Entry]:
        """The pair with the smallest key; the queue must not be empty."""
        return self._pairs[self._start]

    def remove(self, key: Key) -> None:
        """Take out the pair with `key`, which must be there."""
        pairs, start = self._pairs, self._start
        if pairs[start][0] == key:
            self._start = start + 1
            if self._start == len(pairs):
                pairs.clear()
                self._start = 0
            elif self._start > 32 and 2 * self._start > len(pairs):
                del pairs[: self._start]
                self._start = 0
            return
        i = bisect_left(pairs, key, lo=start, key=_key)
        assert pairs[i][0] == key, "remove() of a pair that is not there"
        del pairs[i]


class ReadyQueues:
    """The ready jobs, by rank and tier. `room` says whom the cap of its tier lets run."""

    def __init__(self, ranks: int, tiers: int, room: Room) -> None:
        self._queues = [[SortedQueue() for _ in range(tiers)] for _ in range(ranks)]
        self._room = room
        self._number_of = [0] * ranks
        self.number = 0
        """Of jobs."""
        self.capped: list[Entry] = []
        """First jobs of tiers that a cap stops, as of the last `head`."""

    def add(self, entry: Entry) -> None:
        """A job is ready, with the rank and the key it has."""
        self._queues[entry.rank][entry.tier].add(entry.key, entry)
        self._number_of[entry.rank] += 1
        self.number += 1

    def remove(self, entry: Entry) -> None:
        """A job that is there no longer is."""
        self._queues[entry.rank][entry.tier].remove(entry.key)
        self._number_of[entry.rank] -= 1
        self.number -= 1

    def first_rank(self) -> int:
        """The most urgent rank that has a job; there must be one."""
        rank = 0
        while not self._number_of[rank]:
            rank += 1
        return rank

    def head(self) -> Entry | None:
        """The first job of the most urgent rank that has one whose tier may run it."""
        if self.capped:
            self.capped = []
        if not self.number:
            return None
        stopped: list[int] = []
        for rank, number in enumerate(self._number_of):
            if not number:
                continue
            best: tuple[Key, Entry] | None = None
            for tier, queue in enumerate(self._queues[rank]):
                if not len(queue) or tier in stopped:
                    continue
                pair = queue.first()
                if not self._room.allows(pair[1]):
                    stopped.append(tier)
                    self.capped.append(pair[1])
                elif best is None or pair[0] < best[0]:
                    best = pair
            if best is not None:
                return best[1]
        return None

    def in_head_order(self, stopped: Container[int] = ()) -> Iterator[Entry]:
        """All ready jobs in the order of admission, without the rest of a tier that the caller adds to `stopped`."""
        for queues, number in zip(self._queues, self._number_of, strict=True):
            if not number:
                continue
            present = [t for t, queue in enumerate(queues) if len(queue) and t not in stopped]
            if len(present) == 1:
                for _, entry in queues[present[0]]:
                    yield entry
                    if present[0] in stopped:
                        break
                continue
            walks = {tier: iter(queues[tier]) for tier in present}
            firsts = {tier: next(walk) for tier, walk in walks.items()}
            while firsts:
                tier = min(firsts, key=lambda t: firsts[t][0])
                yield firsts[tier][1]
                following = None if tier in stopped else next(walks[tier], None)
                if following is None:
                    del firsts[tier]
                else:
                    firsts[tier] = following


def _key(pair: tuple[Key, Any]) -> Key:
    return pair[0]
