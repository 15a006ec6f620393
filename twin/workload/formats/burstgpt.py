"""BurstGPT: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type.

Later releases have Session ID and Elapsed time too (github.com/HPMLL/BurstGPT, CC-BY-4.0). The model becomes the
tenant. A row with 0 response tokens is a request that failed, which says nothing of how long its reply would have been.
"""

from collections.abc import Iterable, Iterator

from twin.clock import PS
from twin.workload.formats.files import write_lines
from twin.workload.formats.lines import Parse, read_csv
from twin.workload.formats.names import csv_field
from twin.workload.formats.rows import Format, MalformedError, Rows, TraceRow
from twin.workload.formats.values import Clock, seconds_text, tokens

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
WRITTEN = (*COLUMNS, "Total tokens", "Log Type")
SESSION = "Session ID"


def read(path: str) -> Rows:
    """Rows as published."""
    return read_csv(path, COLUMNS, _parser)


def _parser(position: dict[str, int]) -> Parse:
    stamp_at, model_at, prompt_at, output_at = (position[name] for name in COLUMNS)
    total_at, session_at = position.get("Total tokens"), position.get(SESSION)
    clock = Clock(COLUMNS[0])

    def parse(line: int, fields: list[str]) -> TraceRow:
        at_ps = clock.number(line, fields[stamp_at], PS)
        if fields[output_at].strip() == "0":
            raise MalformedError(
                "failed", "Response tokens: 0 marks a request that failed; remove the row"
            )
        prompt_tokens = tokens(COLUMNS[2], fields[prompt_at])
        output_tokens = tokens(COLUMNS[3], fields[output_at])
        if total_at is not None and fields[total_at].strip() != str(prompt_tokens + output_tokens):
            raise MalformedError(
                "tokens",
                f"Total tokens: {fields[total_at][:40]!r} must be the sum {prompt_tokens + output_tokens}",
            )
        session = None if session_at is None else fields[session_at].strip() or None
        return TraceRow(
            line,
            at_ps,
            prompt_tokens,
            output_tokens,
            tenant=fields[model_at].strip() or None,
            session=session,
        )

    return parse


def write(path: str, rows: Iterable[TraceRow]) -> None:
    """Rows of the first release's six columns, all of them from the API."""
    write_lines(path, _lines(rows))


def _lines(rows: Iterable[TraceRow]) -> Iterator[str]:
    yield ",".join(WRITTEN)
    for row in rows:
        total = row.prompt_tokens + row.output_tokens
        model = csv_field("tenant", row.tenant or "")
        yield (
            f"{seconds_text(row.at_ps)},{model},{row.prompt_tokens},{row.output_tokens},{total},API log"
        )


FORMAT = Format(
    "burstgpt", "BurstGPT", "csv", COLUMNS, frozenset({"tenants", "start"}), read, write
)
