"""The Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

Those of 2023 have stamps without a zone and seven decimals, those of 2024 a zone and six
(github.com/Azure/AzurePublicDataset, CC-BY-4.0). They tell nothing of prefixes, sessions or users.
"""

from collections.abc import Iterable, Iterator
from datetime import date

from twin.clock import PS
from twin.workload.formats.files import write_lines
from twin.workload.formats.lines import Parse, read_csv
from twin.workload.formats.rows import Format, Rows, TraceRow
from twin.workload.formats.values import Clock, tokens

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
DAY_PS = 86_400 * PS
EPOCH_DAY = date(1970, 1, 1).toordinal()


def read(path: str) -> Rows:
    """Rows as published."""
    return read_csv(path, COLUMNS, _parser)


def _parser(position: dict[str, int]) -> Parse:
    stamp_at, prompt_at, output_at = (position[name] for name in COLUMNS)
    clock = Clock(COLUMNS[0])

    def parse(line: int, fields: list[str]) -> TraceRow:
        return TraceRow(
            line,
            clock.date(line, fields[stamp_at].strip()),
            tokens(COLUMNS[1], fields[prompt_at]),
            tokens(COLUMNS[2], fields[output_at]),
        )

    return parse


def write(path: str, rows: Iterable[TraceRow]) -> None:
    """Rows with stamps from 1970-01-01 on."""
    write_lines(path, _lines(rows))


def _lines(rows: Iterable[TraceRow]) -> Iterator[str]:
    yield ",".join(COLUMNS)
    for row in rows:
        yield f"{_stamp(row.at_ps)},{row.prompt_tokens},{row.output_tokens}"


def _stamp(at_ps: int) -> str:
    days, rest_ps = divmod(at_ps, DAY_PS)
    seconds, decimals = divmod(rest_ps, PS)
    hours, rest = divmod(seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    fraction = f"{decimals:012d}".rstrip("0").ljust(7, "0")
    day = date.fromordinal(EPOCH_DAY + days).isoformat()
    return f"{day} {hours:02d}:{minutes:02d}:{seconds:02d}.{fraction}"


FORMAT = Format("azure", "Azure LLM inference trace", "csv", COLUMNS, frozenset(), read, write)
