"""What clients of a scenario file do when they are refused or lose their patience, as data. Times are seconds."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from twin.scenario_distributions import Instant, Seconds, Section, Share
from twin.scenario_pods import PhaseTime


class Retries(Section):
    """What clients do whose request fails: they ask again after a back-off."""

    attempts: Annotated[int, Field(ge=2, le=1000)]
    """In all, the first included."""
    backoff: Seconds = 1.0
    """Before the second attempt."""
    multiplier: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Of the back-off, from one attempt to the next."""
    max_backoff: Seconds = 60.0
    jitter: Share = 0.5
    """Share of the back-off that is drawn."""
    outcomes: Annotated[list[Literal["refused", "aborted", "timed_out"]], Field(min_length=1)] = (
        Field(default=["refused", "aborted"])
    )
    """After which they ask again."""
    heeds_retry_after: bool = True
    give_up_after: Seconds | None = None
    """No attempt begins later than so long after the first."""


class StreamRetries(Retries):
    """What the clients of one stream do, in place of those of all."""

    attempts: Annotated[int, Field(ge=1, le=1000)]
    """In all, the first included; 1 = they do not ask again."""


class Disconnects(Section):
    """Clients that leave by themselves, without a time-out; their requests are aborted."""

    share: Share = 1.0
    """Of the requests."""
    after: PhaseTime | None = None
    """From a request's arrival until its client leaves, if it is still there."""
    at: Instant | None = None
    """All clients that are inside at this instant of the run leave."""

    @model_validator(mode="after")
    def _one(self) -> "Disconnects":
        if (self.after is None) == (self.at is None):
            raise ValueError("either after or at says when clients leave")
        return self
