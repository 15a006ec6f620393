"""What was decided about one request, line by line: why it ran when it did."""

from twin.clock import PS
from twin.errors import InputError
from twin.simulation import Result

_EVENTS = (
    ("arrival_ps", "arrived"),
    ("first_scheduled_ps", "first computed"),
    ("first_token_ps", "first token"),
    ("finish_ps", "left"),
)


def render_decisions(result: Result, index: int) -> str:
    """The life of a watched request with the policy's decisions about it, in order of time.

    A decision is told on the scheduler's clock, a float; an instant of the record to the picosecond. Raises InputError
    if there was no such request.
    """
    if not 0 <= index < len(result.records):
        raise InputError(
            f"--explain-request {index}: the run had {len(result.records)} requests, numbered from 0"
        )
    record, decisions = result.records[index], result.decisions[index]
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
        lines.append(
            "  No decision is known: it was refused, or the mode is a stock one, which keeps no log."
        )
    return "\n".join(lines) + "\n"
