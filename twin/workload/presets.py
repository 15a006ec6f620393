"""Traffic fitted on published traces: what a packaged preset says, and where it comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One fitted trace."""

    name: str
    title: str
    source: str
    """Repository, commit and file."""
    licence: str
    rows: int
    """Requests it was fitted on."""
    notes: tuple[str, ...]
    streams: tuple[Mapping[str, Any], ...]
    """Each as a scenario could spell it out under `traffic:`, without requests and duration; several make a mix."""
    trace: Mapping[str, Any]
    """Figures of the trace itself: rate and cv (None if it has no times), prompt_tokens and output_tokens, each with
    mean, p50, p90 and p99; of a mix, these of each of its `clients`."""
    fit: Mapping[str, Any]
    """The same figures of requests made from the preset."""

    @property
    def rate(self) -> float | None:
        """Requests (conversations) per second in the trace; None if it has no times."""
        rate = self.trace["rate"]
        return None if rate is None else float(rate)


def parse_preset(data: Mapping[str, Any]) -> Preset:
    """The preset in a packaged file."""
    streams: Sequence[Mapping[str, Any]] = data["streams"]
    return Preset(
        name=data["name"],
        title=data["title"],
        source=data["source"],
        licence=data["licence"],
        rows=data["rows"],
        notes=tuple(data["notes"]),
        streams=tuple(streams),
        trace=data["trace"],
        fit=data["fit"],
    )
