"""What was decided about one request, line by line: why it ran when it did."""

from collections.abc import Sequence

from twin.clock import PS
from twin.metrics.records import RequestRecord
from twin.scheduling.decisions import Decision

_EVENTS = (
    ("arrival_ps", "arrived"),
    ("first_scheduled_ps", "first computed"),
    ("first_token_ps", "first token"),
    ("finish_ps", "left"),
)


def render_decisions(record: RequestRecord, decisions: Sequence[Decision]) -> str:
    """The life of a request with the policy's decisions about it, in order of time.

    A decision is known to the scheduler's clock, a float; an instant of the record to the picosecond.
    """
    where = "no replica" if record.replica is None else f"replica {record.replica}"
    lines = [
        f"Request {record.index}: {record.tier}, {record.prompt_tokens:,} prompt tokens, {where}, "
        f"{record.outcome} ({record.reason})"
    ]
    told = [
        (getattr(record, name) / PS, f"* {event}")
        for name, event in _EVENTS
        if getattr(record, name) is not None
    ]
    told += [
        (d.now, f"{d.event:<12} {d.detail}".rstrip())
        for d in decisions
        if d.event != "first token"  # the record has it exactly
    ]
    lines += [f"  {at:>15.6f} s  {text}" for at, text in sorted(told, key=lambda line: line[0])]
    if not decisions:
        lines.append("  No policy of ours decided about it: the stock modes keep no log.")
    return "\n".join(lines) + "\n"
