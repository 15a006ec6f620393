"""Lines of trace files: plain or gzip, with or without a byte order mark, each found by its number."""

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import IO, Any

from twin.errors import InputError
from twin.workload.formats.rows import Fault, MalformedError, Rows, TraceRow

GZIP = b"\x1f\x8b"
LONGEST_LINE = 1 << 24
"""Bytes; a prompt of a million tokens in blocks of 16 takes less than a tenth of it."""

Parse = Callable[[int, Any], TraceRow]
"""(line, fields or JSON object) -> row. Raises MalformedError."""


class _Unpacked(io.RawIOBase):
    """What is packed in a gzip file, given out as far as it can be unpacked, whatever follows.

    Raises EOFError where the file is cut short, zlib.error where it is damaged, gzip.BadGzipFile where something
    else follows a whole stream; zeros may.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self._raw = raw
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._stream.eof and not self._next_stream():
                return 0
            data = self._stream.decompress(self._packed, len(buffer))
            self._packed = self._stream.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not self._packed and not self._stream.eof:
                self._packed = self._raw.read(1 << 16)
                if not self._packed:
                    raise EOFError("it ends in the middle of its packed data")

    def _next_stream(self) -> bool:
        """Whether another packed stream follows, as in files that were joined."""
        rest = self._stream.unused_data.lstrip(b"\0")
        while len(rest) < len(GZIP):
            more = self._raw.read(1 << 16)
            if not more:
                break
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not rest.startswith(GZIP):
            raise gzip.BadGzipFile("something else follows the packed data")
        self._stream, self._packed = zlib.decompressobj(zlib.MAX_WBITS | 16), rest
        return True


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """The content of a file, unpacked if it is gzip (by its first bytes). Raises InputError if it cannot be opened."""
    try:
        _check_regular(path)
        raw = open(path, "rb")  # noqa: SIM115  closed below
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(path, error) from None
    with raw:
        packed = raw.peek(2)[:2] == GZIP
        yield io.BufferedReader(_Unpacked(raw), 1 << 18) if packed else raw


def first_bytes(path: str, count: int) -> bytes:
    """The file's first bytes as they are. Raises InputError if it cannot be opened."""
    try:
        _check_regular(path)
        with open(path, "rb") as file:
            return file.read(count)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _check_regular(path: str) -> None:
    """Raise OSError for a pipe or a device: a trace is read more than once."""
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
        raise OSError(
            None, "no regular file but a pipe or a device; a trace is read more than once"
        )


def _unreadable(path: str, error: Exception) -> InputError:
    name = path if path and path.isprintable() else repr(path)
    return InputError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}")


def count_lines(path: str) -> int:
    """Lines of a file, quickly, without looking at what they hold: a guess at how many rows are to come."""
    with open_bytes(path) as file:
        try:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        except (EOFError, OSError, zlib.error):
            return 0


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


def ends_in_a_line_end(path: str) -> bool:
    """Whether the last line of a plain file is ended; true for gzip, which tells of a cut by itself."""
    with open(path, "rb") as file:
        if file.read(2) == GZIP:
            return True
        file.seek(0, os.SEEK_END)
        if not file.tell():
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


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


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a line. Raises MalformedError."""
    try:
        value = DECODER.decode(text)
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


# --- writing ------------------------------------------------------------------------------


def write_lines(path: str, text: Iterable[str]) -> None:
    """Write lines (given without their ends) to a file, gzip if its name ends in .gz.

    The file appears, or is replaced, when all of it is written. Raises InputError if it cannot be written.
    """
    with replacing(path) as part:
        try:
            with open(part, "wb") as raw:
                if path.endswith(".gz"):
                    # No name and no time inside: the same lines give the same bytes.
                    with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                        _write_all(packed, text)
                else:
                    _write_all(raw, text)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def _write_all(file: Any, text: Iterable[str]) -> None:
    batch: list[str] = []
    for line in chain(text):
        batch.append(line)
        if len(batch) == 10_000:
            file.write(("\n".join(batch) + "\n").encode())
            batch.clear()
    if batch:
        file.write(("\n".join(batch) + "\n").encode())


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """A name to write to, which becomes `path` at the end, or is removed if that is not reached."""
    part = f"{path}.part"
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if os.path.exists(part):
            os.remove(part)
