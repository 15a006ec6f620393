"""Which jobs of a tier wait for others, and which are released together.

A batch is what a hold releases together, not what runs together. It goes when it is full or when its oldest job has
waited long enough; the instant of the latter is stored when the oldest job changes and only ever moved earlier.
"""

import math
from typing import Final

from twin.scheduling.config import TierConfig
from twin.scheduling.entry import Entry
from twin.scheduling.ready import SortedQueue

RECENT: Final = 16
"""Arrivals from which `adaptive: fill` takes the present rate."""


class Hold:
    """The held jobs of one tier."""

    def __init__(self, config: TierConfig) -> None:
        assert config.max_wait is not None
        self._config = config
        self._max_wait = config.max_wait
        # Jobs that fill a batch, by group; without groups all jobs are one, and batch_size 1 is no limit.
        one = config.batch_size if config.batch_size > 1 else math.inf
        self._full = [float(jobs) for _, jobs in config.groups] or [one]
        self._queues: list[SortedQueue] = [SortedQueue() for _ in self._full]
        self._count = 0
        self._tokens = 0
        self._oldest: Entry | None = None
        self._arrivals: list[float] = []
        self.release_at = math.inf
        """When the oldest held job has waited long enough; infinity while nothing is held."""
        self.due_at = math.inf
        """From when on `release` gives something: `release_at`, or at once (-infinity) when a batch is full."""

    def __len__(self) -> int:
        return self._count

    def group_of(self, entry: Entry) -> int:
        """Number of the length group `entry` belongs to."""
        for i, (bound, _) in enumerate(self._config.groups):
            if entry.size < bound:
                return i
        return len(self._queues) - 1

    def add(self, entry: Entry, now: float, pressure: float) -> None:
        """Hold `entry`; `pressure` (0..1) is how much the first tier queues."""
        age = _age(entry)
        self._queues[self.group_of(entry)].add(age, entry)
        self._count += 1
        self._tokens += entry.size
        if self._oldest is None or age < _age(self._oldest):
            self._set_oldest(entry)
        assert self._oldest is not None
        if self._config.adaptive == "pressure":
            shorter = self._oldest.job.arrival + self._max_wait * (1.0 - 0.5 * pressure)
            self.release_at = min(self.release_at, shorter)
        elif self._config.adaptive == "fill":
            self._arrivals = [*self._arrivals[-(RECENT - 1) :], entry.job.arrival]
            if not self._can_fill():
                self.release_at = min(self.release_at, now)
        self._set_due()

    def remove(self, entry: Entry) -> None:
        """`entry` is held no longer."""
        self._take([entry])

    def _set_due(self) -> None:
        is_full = self._count > 0 and self._full_group() is not None
        self.due_at = -math.inf if is_full else self.release_at

    def release(self) -> tuple[str, list[Entry]]:
        """The batch that is due, as (reason, jobs): size, tokens, time, mix or single."""
        reason, batch = self._next_batch()
        self._take(batch)
        return reason, batch

    def _take(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._queues[self.group_of(entry)].remove(_age(entry))
            self._tokens -= entry.size
        self._count -= len(entries)
        if self._oldest in entries:
            firsts = [queue.first() for queue in self._queues if queue]
            self._set_oldest(min(firsts)[1] if firsts else None)
        self._set_due()

    def _set_oldest(self, oldest: Entry | None) -> None:
        self._oldest = oldest
        self.release_at = oldest.job.arrival + self._max_wait if oldest else math.inf

    def _full_group(self) -> int | None:
        """The shortest group that is full, None if none is."""
        for i, queue in enumerate(self._queues):
            if len(queue) >= self._full[i]:
                return i
        limit = self._config.batch_tokens
        return 0 if limit is not None and self._tokens >= limit else None

    def _next_batch(self) -> tuple[str, list[Entry]]:
        group = self._full_group()
        if self._config.groups:
            if group is not None:
                return "size", self._oldest_of(group, int(self._full[group]))
            return self._late_batch()
        batch: list[Entry] = []
        tokens, limit = 0, self._config.batch_tokens or math.inf
        for _, entry in self._queues[0]:
            tokens += entry.size
            if len(batch) == self._full[0] or (batch and tokens > limit):
                break
            batch.append(entry)
        if group is None:
            return "time", batch
        return ("size" if self._count >= self._full[0] else "tokens"), batch

    def _late_batch(self) -> tuple[str, list[Entry]]:
        """No group is full but the oldest job has waited long enough."""
        assert self._oldest is not None
        both = sum(len(queue) for queue in self._queues[:2])
        if len(self._queues) > 1 and self._queues[0] and self._queues[1]:
            half = min(both, self._config.mix) // 2
            return "mix", self._oldest_of(0, half) + self._oldest_of(1, half)
        return "single", [self._oldest]

    def _oldest_of(self, group: int, count: int) -> list[Entry]:
        return [entry for _, (_, entry) in zip(range(count), self._queues[group], strict=False)]

    def _can_fill(self) -> bool:
        """Whether, at the present rate, a batch fills before it is released anyway. Unknown rate: yes."""
        if len(self._arrivals) < 2:
            return True
        gap = (self._arrivals[-1] - self._arrivals[0]) / (len(self._arrivals) - 1)
        missing = min(
            full - len(queue) for full, queue in zip(self._full, self._queues, strict=True) if queue
        )
        if self._config.batch_tokens is not None:
            mean_size = self._tokens / self._count
            missing = min(missing, (self._config.batch_tokens - self._tokens) / mean_size)
        return self._arrivals[-1] + missing * gap <= self.release_at


def _age(entry: Entry) -> tuple[float, int]:
    return (entry.job.arrival, entry.job.seq)
