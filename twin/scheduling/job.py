"""What a policy knows of a request and of the engine, and what it asks of the engine."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False, init=False)
class Job:
    """A request as the policy sees it: never its true output length. Instants are seconds on the host's clock."""

    rid: Hashable
    """Unique among the jobs a policy holds."""
    arrival: float
    prompt_tokens: int
    max_tokens: int
    """Output limit; max_model_len - prompt_tokens or more means that the client declared none."""
    tier: str = "ONLINE"
    tenant: str = "default"
    ttft_deadline: float | None = None
    """Abort if there is no token by then."""
    deadline: float | None = None
    """Abort if it is not complete by then."""
    seq: int = -1
    """Number of the submit call at the policy, which sets it."""

    # Written out: what a dataclass makes would be the one part of it that is not compiled.
    def __init__(
        self,
        rid: Hashable,
        arrival: float,
        prompt_tokens: int,
        max_tokens: int,
        tier: str = "ONLINE",
        tenant: str = "default",
        ttft_deadline: float | None = None,
        deadline: float | None = None,
        seq: int = -1,
    ) -> None:
        self.rid = rid
        self.arrival = arrival
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.tier = tier
        self.tenant = tenant
        self.ttft_deadline = ttft_deadline
        self.deadline = deadline
        self.seq = seq


class Host(Protocol):
    """What `begin_step` may ask of the engine: its state after the last update, the same in both hosts."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out."""

    @property
    def free_slots(self) -> int:
        """max_num_active_seqs - len(running)."""

    @property
    def watermark_blocks(self) -> int:
        """Blocks to keep free when a job is admitted beside others."""

    @property
    def running(self) -> Sequence[Job]:
        """In the engine's order; those that have finished but are not processed yet are included."""

    def blocks_of(self, job: Job) -> int:
        """Blocks of `job` that nobody shares."""

    def tokens_of(self, job: Job) -> tuple[int, int]:
        """(computed tokens, known output tokens)."""

    def blocks_for(self, job: Job) -> int:
        """ceil(min(prompt + known output, max_model_len) / block_size); prefix hits are not counted."""


@dataclass(slots=True)
class Plan:
    """What the host does before it schedules: aborts one by one, then preemptions, in this order."""

    abort: list[tuple[Job, str]] = field(default_factory=list)
    """(job, reason): timeout:ttft or timeout:total."""
    preempt: list[Job] = field(default_factory=list)
