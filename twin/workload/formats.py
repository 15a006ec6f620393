"""What is in a trace file: rows of (instant, prompt tokens, output tokens), or what is wrong with it and where.

Rows are streamed: a long trace takes no more memory than a short one.

Read today: the Azure LLM inference trace, a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens
(github.com/Azure/AzurePublicDataset), plain or gzip (by the suffix .gz).
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from datetime import date
from difflib import get_close_matches
from typing import IO, NamedTuple

from twin.clock import PS
from twin.errors import InputError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_STAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,12}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_COUNT = re.compile(r"[0-9]{1,12}")


class TraceRow(NamedTuple):
    """One request of a trace."""

    line: int
    """Line of the file, from 1."""
    at_ps: int
    """Picoseconds after the first row."""
    prompt_tokens: int
    output_tokens: int


def read_azure(path: str) -> Iterator[TraceRow]:
    """The rows of an Azure trace in file order, read as they are asked for.

    Raises InputError, at the row it concerns, for whatever cannot be read exactly: columns that are missing, a stamp
    that is no instant, tokens that are no whole number from 1 on, rows that go back in time, bytes that are no text.
    """
    last_line, last_stamp = 0, ""
    start_ps = last_ps = 0
    zoned = False
    stamp_at, prompt_at, output_at = 0, 1, 2
    width = 0
    for line, row in _csv_rows(path):
        if not row:
            continue
        if not width:
            stamp_at, prompt_at, output_at = _columns(path, line, row)
            width = len(row)
            continue
        if len(row) != width:
            raise InputError(
                f"{path} line {line}: {len(row)} fields where the header has {width}; "
                "complete the row or remove it (a file cut short ends like this)"
            )
        stamp = row[stamp_at].strip()
        now_ps, has_zone = _instant(path, line, stamp)
        if not last_line:
            start_ps, zoned = now_ps, has_zone
        elif has_zone != zoned:
            raise InputError(
                f"{path} line {line}: TIMESTAMP: {stamp!r} {'has a' if has_zone else 'has no'} time zone, the rows "
                f"before {'have none' if has_zone else 'have one'}; write all stamps the same way"
            )
        elif now_ps < last_ps:
            raise InputError(
                f"{path} line {line}: TIMESTAMP: {stamp!r} is before {last_stamp!r} of line {last_line}; "
                "sort the file by TIMESTAMP"
            )
        last_line, last_stamp, last_ps = line, stamp, now_ps
        yield TraceRow(
            line,
            now_ps - start_ps,
            _tokens(path, line, AZURE_COLUMNS[1], row[prompt_at]),
            _tokens(path, line, AZURE_COLUMNS[2], row[output_at]),
        )
    if not width:
        raise InputError(
            f"{path}: the file is empty; expected a header {','.join(AZURE_COLUMNS)} and rows"
        )
    if not last_line:
        raise InputError(
            f"{path}: there is a header but no row under it; a trace needs at least one request"
        )


def count_lines(path: str) -> int:
    """Lines of a file, quickly, without looking at what they hold: a guess at how many rows are to come."""
    with _open_bytes(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _open_bytes(path: str) -> IO[bytes]:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _csv_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of a CSV file; whatever stops the reading becomes an InputError."""
    line = 0
    try:
        with (gzip.open if path.endswith(".gz") else open)(
            path, "rt", encoding="utf-8-sig", newline=""
        ) as file:
            reader = csv.reader(file)
            for row in reader:
                line = reader.line_num
                yield line, row
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} after line {line}: not text in UTF-8 (byte 0x{error.object[error.start]:02x}); "
            "a trace is a CSV file, plain or with the suffix .gz"
        ) from None
    except csv.Error as error:
        raise InputError(f"{path} after line {line}: not readable as CSV: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} after line {line}: not a whole gzip file: {error}; fetch it again or unpack it"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _columns(path: str, line: int, header: list[str]) -> tuple[int, int, int]:
    names = [name.strip() for name in header]
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        near = get_close_matches(missing[0], names, n=1)
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        shown = ", ".join(repr(name[:40]) for name in names[:8])
        raise InputError(
            f"{path} line {line}: no column {missing[0]!r} in the header ({shown}); "
            f"the Azure LLM trace has {', '.join(AZURE_COLUMNS)}{hint}"
        )
    doubled = [name for name in AZURE_COLUMNS if names.count(name) > 1]
    if doubled:
        raise InputError(f"{path} line {line}: column {doubled[0]!r} is there twice; keep one")
    stamp, prompt, output = (names.index(name) for name in AZURE_COLUMNS)
    return stamp, prompt, output


def _instant(path: str, line: int, stamp: str) -> tuple[int, bool]:
    """(picoseconds since the year 1, whether the stamp names a time zone), from the digits, exactly."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        raise InputError(
            f"{path} line {line}: TIMESTAMP: {stamp[:60]!r} is no instant; write YYYY-MM-DD HH:MM:SS, "
            "with up to 12 decimals and a zone like +00:00 if you like"
        )
    year, month, day, hour, minute, second, decimals, zone = match.groups()
    try:
        days = date(int(year), int(month), int(day)).toordinal()
    except ValueError as error:
        raise InputError(f"{path} line {line}: TIMESTAMP: {stamp!r}: {error}") from None
    if int(hour) > 23 or int(minute) > 59 or int(second) > 59:
        raise InputError(
            f"{path} line {line}: TIMESTAMP: {stamp!r} has no such time of day; at most 23:59:59"
        )
    seconds = ((days * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
    if zone and zone != "Z":
        offset = (int(zone[1:3]) * 60 + int(zone[4:6])) * 60
        seconds += offset if zone[0] == "-" else -offset
    return seconds * PS + int((decimals or "").ljust(12, "0")), zone is not None


def _tokens(path: str, line: int, column: str, value: str) -> int:
    text = value.strip()
    tokens = int(text) if _COUNT.fullmatch(text) else 0
    if tokens < 1:
        raise InputError(
            f"{path} line {line}: {column}: {value[:60]!r} must be a whole number of tokens, at least 1; "
            "correct the row or remove it"
        )
    return tokens
