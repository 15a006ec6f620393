"""Who must give way so that a job ranked above can run: decided on one snapshot of the engine."""

from collections.abc import Callable, Iterator, Sequence

from twin.scheduling.config import TierConfig
from twin.scheduling.entry import Entry
from twin.scheduling.job import Host


class Room:
    """Slots, blocks and caps as they would be after what has been decided so far.

    `jobs` and `tokens` are what runs of each tier; the lists are not copied.
    """

    def __init__(self, tiers: Sequence[TierConfig], jobs: list[int], tokens: list[int]) -> None:
        self._max_jobs = [tier.max_running for tier in tiers]
        self._max_tokens = [tier.max_running_tokens for tier in tiers]
        self._has_caps = any(most is not None for most in (*self._max_jobs, *self._max_tokens))
        self._jobs = jobs
        self._tokens = tokens
        self.slots = 0
        self.blocks = 0
        self.alive = 0
        """Jobs that would run."""
        self.taken = 0
        """Waiting jobs that found room."""

    def copy(self) -> "Room":
        """Another one for what is decided from here on."""
        room = Room((), [*self._jobs], [*self._tokens])
        room._max_jobs, room._max_tokens = self._max_jobs, self._max_tokens
        room._has_caps = self._has_caps
        return room

    def allows(self, entry: Entry) -> bool:
        """Whether the caps of its tier let the job run."""
        if not self._has_caps:
            return True
        jobs, tokens = self._jobs[entry.tier], self._tokens[entry.tier]
        most, limit = self._max_jobs[entry.tier], self._max_tokens[entry.tier]
        if most is not None and jobs >= most:
            return False
        return limit is None or jobs == 0 or tokens + entry.size <= limit

    def fits(self, blocks: int, host: Host) -> bool:
        """Whether a job that needs `blocks` can run beside the others."""
        reserve = host.watermark_blocks if self.alive else 0
        return self.slots >= 1 and blocks + reserve <= self.blocks

    def give(self, entry: Entry, blocks: int) -> None:
        """A running job goes and leaves its slot and `blocks`."""
        self._count(entry, -1)
        self.slots += 1
        self.blocks += blocks
        self.alive -= 1

    def take(self, entry: Entry, blocks: int) -> None:
        """A waiting job runs."""
        self._count(entry, 1)
        self.slots -= 1
        self.blocks -= blocks
        self.alive += 1
        self.taken += 1

    def _count(self, entry: Entry, jobs: int) -> None:
        self._jobs[entry.tier] += jobs
        self._tokens[entry.tier] += jobs * entry.size


def choose_victims(
    waiting: Iterator[Entry],
    victims_below: Callable[[int], list[Entry]],
    room: Room,
    host: Host,
    stopped: set[int],
) -> list[Entry]:
    """Running jobs to preempt, in order, so that waiting ones ranked above them fit.

    `waiting` comes in the order of admission and leaves out the tiers that a cap stops, which are added to `stopped`;
    `victims_below(rank)` are the running jobs that may give way to one of that rank, in run_key order. For each
    waiting job they are taken from the end until it fits; if all of them do not suffice, none is taken for it and
    planning ends, since nothing behind it would be admitted either.
    """
    chosen: list[Entry] = []
    victims: list[Entry] | None = None  # looked for once something does not fit
    for entry in waiting:
        if victims is not None and (not victims or victims[-1].rank <= entry.rank):
            break
        if not room.allows(entry):
            stopped.add(entry.tier)
            continue
        need = host.blocks_for(entry.job)
        if not room.fits(need, host):
            if victims is None:
                victims = victims_below(entry.rank)
            taken = _make_room(entry, need, victims, room, host)
            if taken is None:
                break
            for victim, blocks in taken:
                victims.pop()
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
        if victim.rank <= entry.rank:
            return None
        freed = host.blocks_of(victim.job)
        taken.append((victim, freed))
        slots, blocks, alive = slots + 1, blocks + freed, alive - 1
        if slots >= 1 and need + (host.watermark_blocks if alive else 0) <= blocks:
            return taken
    return None
