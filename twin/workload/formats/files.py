"""Trace files as they lie there: plain or gzip, read more than once, and replaced as a whole."""

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import IO, Any

from twin.errors import InputError

GZIP = b"\x1f\x8b"


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
