"""What happened to single requests, beyond their records: one line each, in the order in which it happened."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twin.clock import to_seconds

KINDS = ("preemption", "resumption", "promotion", "timeout", "refusal")
"""Kinds of events; docs/metrics.md says what each tells."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of one request."""

    at_ps: int
    kind: str
    """One of KINDS."""
    replica: int | None
    """None if the request reached none."""
    request: int
    """Its index."""
    tier: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else there is to say, by the kind."""

    def to_dict(self) -> dict[str, Any]:
        """As a line of events.jsonl: times are seconds."""
        return {
            "at_s": to_seconds(self.at_ps),
            "kind": self.kind,
            "replica": self.replica,
            "request": self.request,
            "tier": self.tier,
            **self.details,
        }


Listener = Callable[[Event], None]
"""Told of every event as it happens."""
