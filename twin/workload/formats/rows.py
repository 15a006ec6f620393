"""What every format is read into and written from: rows, and what is wrong with those that are none."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class TraceRow(NamedTuple):
    """One request of a trace. None = the trace does not say."""

    line: int
    """Line of the file, or row of a table without lines, from 1."""
    at_ps: int
    """Picoseconds. Relative clocks keep their zero; dates and epochs count from the first row."""
    prompt_tokens: int
    output_tokens: int
    prompt: tuple[tuple[int, int], ...] | None = None
    """Content as (content id, tokens) from the first token on, ids unique within the file. Where the segments add up
    to less than prompt_tokens, the rest is text that no other request has."""
    reply: int | None = None
    """Content id of the generated text."""
    max_tokens: int | None = None
    tier: str | None = None
    tenant: str | None = None
    session: str | None = None
    ttft_timeout_ps: int | None = None
    total_timeout_ps: int | None = None
    id: str | None = None
    """Name of the request. Names need not be unique: requests are told apart by their position."""


class Fault(NamedTuple):
    """A line that is no request."""

    line: int
    kind: str
    """For counting: a key of FAULT_KINDS."""
    problem: str
    """Field, value, bound and what to do."""
    fatal: bool = False
    """Nothing after it can be read."""


FAULT_KINDS = {
    "empty": "no request in the file",
    "file": "file not readable to its end",
    "text": "not text",
    "fields": "fields missing or too many",
    "json": "no JSON object",
    "stamp": "stamp that is no instant",
    "clock": "stamp of another clock",
    "order": "back in time",
    "tokens": "tokens that are no whole number from 1 on",
    "failed": "failed request without a reply",
    "content": "prompt content that does not fit the length",
    "value": "other value",
}
"""Kind of a fault -> what such lines are called in a count."""


class MalformedError(ValueError):
    """A line is no request; the reader turns it into a Fault."""

    def __init__(self, kind: str, problem: str, fatal: bool = False) -> None:
        super().__init__(problem)
        self.kind = kind
        self.fatal = fatal


HELD = {
    "prefixes": "which prompts share a prefix",
    "replies": "which prompts contain an earlier reply",
    "start": "the time before the first request",
    "tiers": "tiers",
    "tenants": "tenants",
    "sessions": "sessions",
    "max_tokens": "declared max_tokens",
    "timeouts": "time-outs",
    "ids": "request ids",
}
"""What a format may or may not be able to hold -> how it is called."""

Rows = Iterator[TraceRow | Fault]


@dataclass(frozen=True)
class Format:
    """A kind of trace file."""

    name: str
    """As `format:` and `--format` take it."""
    title: str
    kind: str
    """csv, jsonl or parquet."""
    columns: tuple[str, ...]
    """Columns or keys by which it is recognised, all of them necessary."""
    holds: frozenset[str]
    """Keys of HELD."""
    read: Callable[[str], Rows]
    """Rows of the file at a path, in its order, read as they are asked for."""
    write: Callable[[str, Iterable[TraceRow]], None] | None = None
    """Write rows to a path; None = the format is read only."""
    unfit: Callable[[TraceRow], str | None] | None = None
    """What of the prefixes of a row it would not keep, although it holds prefixes."""
    block_tokens: int | None = None
    """Tokens of a hash block."""


def losses(target: Format, row: TraceRow, first: bool) -> Iterator[str]:
    """What of a row would not survive in the target format: keys of HELD, or sentences of the format's own.

    `first` says that it is the first row of the trace.
    """
    present = {
        "prefixes": row.prompt is not None,
        "replies": row.reply is not None,
        "start": first and row.at_ps != 0,
        "tiers": row.tier is not None,
        "tenants": row.tenant is not None,
        "sessions": row.session is not None,
        "max_tokens": row.max_tokens is not None,
        "timeouts": row.ttft_timeout_ps is not None or row.total_timeout_ps is not None,
        "ids": row.id is not None,
    }
    for feature, there in present.items():
        if there and feature not in target.holds:
            yield feature
    if target.unfit is not None and "prefixes" in target.holds and row.prompt is not None:
        problem = target.unfit(row)
        if problem is not None:
            yield problem
