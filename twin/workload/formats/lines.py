"""Lines of trace files, with or without a byte order mark, each found by its number: text, CSV and JSON."""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from typing import Any

from twin.workload.formats.files import open_bytes
from twin.workload.formats.rows import Fault, MalformedError, Rows, TraceRow

LONGEST_LINE = 1 << 24
"""Bytes; a prompt of a million tokens in blocks of 16 takes less than a tenth of it."""

Parse = Callable[[int, Any], TraceRow]
"""(line, fields or JSON object) -> row. Raises MalformedError."""


def lines(path: str) -> Iterator[tuple[int, str] | Fault]:
    """(number, text without its end) of each line that is not blank.

    A line that is not text is a Fault and the next one follows; a file that cannot be read on ends in a fatal one.
    """
    number = 0
    with open_bytes(path) as file:
        readline = partial(file.readline, LONGEST_LINE)
        try:
            for raw in iter(readline, b""):
                number += 1
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                    fault = _no_text_file(raw)
                    if fault is not None:
                        yield fault
                        return
                if len(raw) == LONGEST_LINE:
                    problem = f"the line is longer than {LONGEST_LINE:,} bytes; no trace is"
                    yield Fault(number, "text", problem, fatal=True)
                    return
                try:
                    text = raw.decode()
                except UnicodeDecodeError as error:
                    byte = raw[error.start]
                    yield Fault(number, "text", f"not text in UTF-8 (byte 0x{byte:02x})")
                    continue
                text = text.rstrip("\r\n")
                if text and not text.isspace():
                    yield number, text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            problem = f"not a whole gzip file: {error}; fetch it again"
            yield Fault(number + 1, "file", problem, fatal=True)
        except OSError as error:
            yield Fault(
                number + 1, "file", f"cannot be read: {error.strerror or error}", fatal=True
            )


def _no_text_file(start: bytes) -> Fault | None:
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Fault(1, "text", "the file is in UTF-16; save it as UTF-8", fatal=True)
    if b"\r" in start.rstrip(b"\r\n"):
        return Fault(1, "text", "lines end in CR alone; write them with LF or CRLF", fatal=True)
    if b"\0" in start:
        return Fault(
            1, "text", "the file is binary; a trace is text, plain or gzip, or Parquet", True
        )
    return None


# --- CSV ----------------------------------------------------------------------------------


def read_csv(
    path: str, columns: tuple[str, ...], parser: Callable[[dict[str, int]], Parse]
) -> Rows:
    """Rows of a CSV file with a header, quoted fields without line ends allowed.

    `parser` is given the position of each column and makes the function that reads a row. Raises InputError if the
    file cannot be opened; what is wrong inside comes as Faults.
    """
    parse: Parse | None = None
    width = 0
    for item in lines(path):
        if isinstance(item, Fault):
            yield item
            if item.fatal or parse is None:
                return
            continue
        line, text = item
        fields = split(text)
        try:
            if parse is None:
                width = len(fields)
                parse = parser(_positions(fields, columns))
                continue
            if len(fields) != width:
                raise MalformedError(
                    "fields",
                    f"{len(fields)} fields where the header has {width}; complete the row or remove it (a file cut "
                    "short ends like this)",
                )
            row = parse(line, fields)
        except MalformedError as error:
            yield Fault(line, error.kind, str(error), error.fatal)
            if error.fatal:
                return
            continue
        yield row


def split(text: str) -> list[str]:
    """The fields of a line of CSV."""
    return text.split(",") if '"' not in text else next(csv.reader([text]), [])


def _positions(header: list[str], columns: tuple[str, ...]) -> dict[str, int]:
    names = [name.strip() for name in header]
    missing = [name for name in columns if name not in names]
    if missing:
        # A column that is another one's already is no candidate, and case matters only in the header.
        free = {name.lower(): name for name in reversed(names) if name not in columns}
        near = [free[name] for name in get_close_matches(missing[0].lower(), list(free), n=1)]
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        found = ", ".join(repr(name[:40]) for name in names[:8])
        raise MalformedError(
            "fields",
            f"no column {missing[0]!r} in the header ({found}); needed are {', '.join(columns)}{hint}",
            fatal=True,
        )
    doubled = [name for name in columns if names.count(name) > 1]
    if doubled:
        raise MalformedError(
            "fields", f"column {doubled[0]!r} is there twice; keep one", fatal=True
        )
    return {name: i for i, name in enumerate(names)}


# --- JSON lines ---------------------------------------------------------------------------


def _no_constant(name: str) -> Any:
    raise MalformedError(
        "value", f"{name} is no number that can be used; correct the row or remove it"
    )


DECODER = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant)
"""Reads numbers from their digits."""


def _decoded(text: str) -> Any:
    """What `DECODER.decode` gives; it looks for spaces around, which most lines do not have."""
    if text[:1] == "{":
        value, end = DECODER.raw_decode(text)
        if end == len(text):
            return value
    return DECODER.decode(text)


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a line. Raises MalformedError."""
    try:
        value = _decoded(text)
    except RecursionError:
        raise MalformedError("json", "not readable as JSON: nested too deeply") from None
    except MalformedError:
        raise
    except ValueError as error:
        cut = "" if text.rstrip().endswith("}") else " (a file cut short ends like this)"
        raise MalformedError("json", f"not readable as JSON: {error}{cut}") from None
    if not isinstance(value, dict):
        raise MalformedError("json", "a line must be a JSON object: {...}")
    return value


def read_jsonl(path: str, parse: Parse) -> Rows:
    """Rows of a file with one JSON object a line. Raises InputError if it cannot be opened."""
    for item in lines(path):
        if isinstance(item, Fault):
            yield item
            continue
        line, text = item
        try:
            row = parse(line, json_object(text))
        except MalformedError as error:
            yield Fault(line, error.kind, str(error), error.fatal)
            if error.fatal:
                return
            continue
        yield row


def present(row: dict[str, Any], key: str) -> Any:
    """The value of a key that must be there. Raises MalformedError."""
    try:
        return row[key]
    except KeyError:
        near = get_close_matches(key, row, n=1)
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        raise MalformedError("fields", f"no key {key!r}{hint}") from None
