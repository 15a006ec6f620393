"""Who must give way so that a job ranked above can run: decided on one snapshot of the engine."""

from collections.abc import Iterator, Sequence

from twin.scheduling.config import TierConfig
from twin.scheduling.entry import Entry
from twin.scheduling.job import Host


class Room:
    """Slots, blocks and caps as they would be after what has been decided so far."""

    def __init__(
        self, tiers: Sequence[TierConfig], jobs: Sequence[int], tokens: Sequence[int]
    ) -> None:
        self._tiers = tiers
        self._jobs = jobs
        self._tokens = tokens
        self.slots = 0
        self.blocks = 0
        self.alive = 0
        """Jobs that would run."""

    def allows(self, entry: Entry) -> bool:
        """Whether the caps of its tier let the job run."""
        tier = self._tiers[entry.tier]
        jobs, tokens = self._jobs[entry.tier], self._tokens[entry.tier]
        if tier.max_running is not None and jobs >= tier.max_running:
            return False
        limit = tier.max_running_tokens
        return limit is None or jobs == 0 or tokens + entry.size <= limit

    def give(self, entry: Entry, blocks: int) -> None:
        """A running job goes and leaves its slot and `blocks`."""
        self._count(entry, -1)
        self.slots += 1
        self.blocks += blocks

    def take(self, entry: Entry, blocks: int) -> None:
        """A waiting job runs."""
        self._count(entry, 1)
        self.slots -= 1
        self.blocks -= blocks
        self.alive += 1

    def _count(self, entry: Entry, jobs: int) -> None:
        # The policy's own counts are shared until something changes.
        self._jobs, self._tokens = list(self._jobs), list(self._tokens)
        self._jobs[entry.tier] += jobs
        self._tokens[entry.tier] += jobs * entry.size


def choose_victims(
    waiting: Iterator[Entry], victims: list[Entry], room: Room, host: Host
) -> list[Entry]:
    """Running jobs to preempt, in order, so that waiting ones ranked above them fit.

    `waiting` comes in the order of admission, `victims` in run_key order (taken from its end, changed). For each
    waiting job that no cap stops, victims ranked strictly below it are taken until it fits; if all of them do not
    suffice, none is taken for it and planning ends, since nothing behind it would be admitted either.
    """
    chosen: list[Entry] = []
    stopped: set[int] = set()
    for entry in waiting:
        if not victims or victims[-1].rank <= entry.rank:
            break
        if entry.tier in stopped or not room.allows(entry):
            stopped.add(entry.tier)
            continue
        need = host.blocks_for(entry.job)
        taken = _make_room(entry, need, victims, room, host)
        if taken is None:
            break
        for victim, blocks in taken:
            victims.pop()
            room.alive -= 1
            room.give(victim, blocks)
            chosen.append(victim)
        room.take(entry, need)
    return chosen


def _make_room(
    entry: Entry, need: int, victims: list[Entry], room: Room, host: Host
) -> list[tuple[Entry, int]] | None:
    """The fewest victims from the end that make the job fit, with their blocks; None if all do not suffice."""
    slots, blocks, alive = room.slots, room.blocks, room.alive
    taken: list[tuple[Entry, int]] = []
    for victim in reversed(victims):
        if slots >= 1 and need + (host.watermark_blocks if alive else 0) <= blocks:
            return taken
        if victim.rank <= entry.rank:
            return None
        freed = host.blocks_of(victim.job)
        taken.append((victim, freed))
        slots, blocks, alive = slots + 1, blocks + freed, alive - 1
    fits = slots >= 1 and need + (host.watermark_blocks if alive else 0) <= blocks
    return taken if fits else None
