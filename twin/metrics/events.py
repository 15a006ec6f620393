"""What happened to single requests, beyond their records: one line each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twin.clock import to_seconds

KINDS = ("refusal", "timeout", "abort", "preemption", "promotion", "resumption")
"""Kinds of events, in the order of one instant; docs/metrics.md says what each tells."""


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


def in_order(events: Iterable[Event]) -> list[Event]:
    """Events by instant, replica, kind and request: an engine may tell of one later than it was."""
    return sorted(events, key=lambda e: (e.at_ps, _number(e), KINDS.index(e.kind), e.request))


def _number(event: Event) -> int:
    return -1 if event.replica is None else event.replica


Listener = Callable[[Event], None]
"""Told of every event as it happens."""
