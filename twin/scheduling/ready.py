"""A sorted queue: cheap at both ends, in order when walked."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Key = tuple[Any, ...]


class SortedQueue(Generic[T]):
    """(key, item) pairs in the order of their keys, which must differ from each other.

    Removing the first pair only moves a mark; the list is trimmed once half of it lies before the mark.
    """

    __slots__ = ("_pairs", "_start")

    def __init__(self) -> None:
        self._pairs: list[tuple[Key, T]] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._pairs) - self._start

    def __iter__(self) -> Iterator[tuple[Key, T]]:
        for i in range(self._start, len(self._pairs)):
            yield self._pairs[i]

    def add(self, key: Key, item: T) -> None:
        """Insert `item` at its place."""
        pairs = self._pairs
        if not pairs or pairs[-1][0] < key:
            pairs.append((key, item))
        else:
            insort(pairs, (key, item), lo=self._start)

    def first(self) -> tuple[Key, T]:
        """The pair with the smallest key; the queue must not be empty."""
        return self._pairs[self._start]

    def remove(self, key: Key) -> None:
        """Take out the pair with `key`, which must be there."""
        pairs, start = self._pairs, self._start
        if pairs[start][0] == key:
            self._start = start + 1
            is_empty = self._start == len(pairs)
            if is_empty or (self._start > 32 and 2 * self._start > len(pairs)):
                del pairs[: self._start]
                self._start = 0
            return
        i = bisect_left(pairs, key, lo=start, key=_key)
        assert pairs[i][0] == key, "remove() of a pair that is not there"
        del pairs[i]


def _key(pair: tuple[Key, Any]) -> Key:
    return pair[0]
