"""What the policy keeps of a job beside the job itself."""

import math
from typing import Any, Final

from twin.scheduling.job import Job

# Where a job is; one that is in none of these is gone.
HELD: Final = "held"
READY: Final = "ready"
RUNNING: Final = "running"


class Entry:
    """One job inside the policy."""

    __slots__ = (
        "blocked",
        "ending",
        "expected",
        "has_token",
        "job",
        "key",
        "promote_at",
        "promotions",
        "rank",
        "run_key",
        "size",
        "started",
        "state",
        "tag",
        "tier",
        "undo",
        "waited",
        "waiting_since",
        "was_capped",
    )

    def __init__(self, job: Job, tier: int, rank: int, expected: int) -> None:
        self.job = job
        self.tier = tier
        self.rank = rank
        self.expected = expected
        self.size = job.prompt_tokens + expected
        self.state: str = HELD
        self.key: tuple[Any, ...] = ()
        self.run_key: tuple[Any, ...] = ()
        self.tag: int | None = None  # of fair queueing, once charged
        self.waiting_since = job.arrival
        self.waited = 0.0  # before waiting_since
        self.promotions = 0
        self.promote_at = math.inf
        self.started = False
        self.has_token = False
        self.blocked = False  # preempted in this step: not to be admitted in it
        self.ending = False  # its abort is planned, so it is in no queue any more
        self.was_capped = False  # at the head of its queue while its tier was at a cap
        self.undo: tuple[float, float, float, bool] | None = None
