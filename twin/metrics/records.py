"""What is kept of one request: the raw material of every metric."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from twin.compiled import mypyc_attr

OUTCOMES = ("completed", "refused", "timed_out", "aborted", "unfinished")
"""The ways a request can end. They exclude each other and cover every request."""

LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue", "prefill")
"""The durations of a request that have statistics, under the names that objectives use."""


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class RequestRecord:
    """The life of one request. Instants are picoseconds from the start of the run, None where never reached."""

    index: int
    tier: str
    tenant: str
    session: str | None
    stream: int
    replica: int | None
    """Index of the replica it was sent to; None if it was refused before."""
    arrival_ps: int
    first_scheduled_ps: int | None
    """Start of the step that first computed a token of it."""
    first_token_ps: int | None
    finish_ps: int | None
    """When it left the system as its client saw it; None if it was still inside at the end of the run."""
    prompt_tokens: int
    output_tokens: int
    """Tokens delivered."""
    outcome: str
    """One of OUTCOMES."""
    reason: str
    """stop, length, timeout:ttft, timeout:total, too_long, end_of_run, ..."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again because a preemption threw their KV away (prefix hits on the way back not counted)."""
    prefix_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache at first admission."""
    itl_ps: Sequence[int] = field(default_factory=lambda: array("q"))
    """Gaps between consecutive tokens, in order."""
    attempts: int = 1
    """1 + retries of the client."""
    stall_ps: int = 0
    """Time it was preempted: from the start of the first step without it to that of the first one with it again."""
    estimated_wait_ps: int | None = None
    """first_scheduled_ps - arrival_ps as estimated when it arrived; None if it reached no replica."""

    # Written out: what a dataclass makes would be the one part of it that is not compiled.
    def __init__(
        self,
        index: int,
        tier: str,
        tenant: str,
        session: str | None,
        stream: int,
        replica: int | None,
        arrival_ps: int,
        first_scheduled_ps: int | None,
        first_token_ps: int | None,
        finish_ps: int | None,
        prompt_tokens: int,
        output_tokens: int,
        outcome: str,
        reason: str,
        preemptions: int = 0,
        recomputed_tokens: int = 0,
        prefix_hit_tokens: int = 0,
        prefix_query_tokens: int = 0,
        itl_ps: Sequence[int] | None = None,
        attempts: int = 1,
        stall_ps: int = 0,
        estimated_wait_ps: int | None = None,
    ) -> None:
        self.index = index
        self.tier = tier
        self.tenant = tenant
        self.session = session
        self.stream = stream
        self.replica = replica
        self.arrival_ps = arrival_ps
        self.first_scheduled_ps = first_scheduled_ps
        self.first_token_ps = first_token_ps
        self.finish_ps = finish_ps
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.outcome = outcome
        self.reason = reason
        self.preemptions = preemptions
        self.recomputed_tokens = recomputed_tokens
        self.prefix_hit_tokens = prefix_hit_tokens
        self.prefix_query_tokens = prefix_query_tokens
        self.itl_ps = array("q") if itl_ps is None else itl_ps
        self.attempts = attempts
        self.stall_ps = stall_ps
        self.estimated_wait_ps = estimated_wait_ps
