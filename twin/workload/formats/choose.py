"""Which format a trace file has, and reading it as that."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from twin.errors import InputError
from twin.workload.formats import azure, burstgpt, hashed, own, parquet
from twin.workload.formats.files import count_lines, first_bytes
from twin.workload.formats.lines import json_object, lines, split
from twin.workload.formats.rows import Fault, Format, MalformedError, Rows, TraceRow

FORMATS: dict[str, Format] = {
    made.name: made
    for made in (
        azure.FORMAT,
        burstgpt.FORMAT,
        hashed.MOONCAKE,
        hashed.SHAREGPT,
        hashed.ALIBABA,
        own.CSV,
        own.JSONL,
        parquet.FORMAT,
    )
}
"""By the names that `format:` and `--format` take."""

LOOKED_AT = 100
"""Lines from the start that decide between formats with the same keys."""


class Detected(NamedTuple):
    """The format of a file, and what spoke for it."""

    format: Format
    why: str


def format_of(path: str, name: str | None = None) -> Detected:
    """The format with this name, or the one the file's beginning speaks for.

    Raises InputError for an unknown name, a file that cannot be read, and one that is like none of them.
    """
    if name is not None:
        return Detected(named(name), "as told")
    if first_bytes(path, 4) == b"PAR1":
        return Detected(FORMATS["twin-parquet"], "by its first bytes")
    objects: list[dict[str, Any]] = []
    no_object = ""
    for item in islice(lines(path), LOOKED_AT):
        if isinstance(item, Fault):
            if item.fatal or not objects:
                raise InputError(f"{path} line {item.line}: {item.problem}")
            continue
        line, text = item
        if text.lstrip().startswith("{"):
            try:
                objects.append(json_object(text))
            except MalformedError as error:
                no_object = no_object or f"{path} line {line}: {error}"
        elif not objects:
            return Detected(_by_header(path, line, split(text)), "by its header")
    if objects:
        return Detected(_by_keys(path, objects), "by its keys")
    raise InputError(
        no_object
        or f"{path}: the file is empty; a trace is CSV with a header, JSON lines or Parquet"
    )


def named(name: str) -> Format:
    """The format with this name. Raises InputError if there is none."""
    if name not in FORMATS:
        raise InputError(f"format {name!r} is not known; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def _by_header(path: str, line: int, header: list[str]) -> Format:
    names = {name.strip() for name in header}
    tables = [made for made in FORMATS.values() if made.kind == "csv"]
    nearest = max(tables, key=lambda made: len(names & set(made.columns)))
    if names & set(nearest.columns):
        return nearest
    found = ", ".join(repr(name.strip()[:40]) for name in header[:8])
    known = "; ".join(f"{made.name}: {', '.join(made.columns)}" for made in tables)
    raise InputError(
        f"{path} line {line}: no header of a known format ({found}); the columns are {known}"
    )


def _by_keys(path: str, objects: list[dict[str, Any]]) -> Format:
    keys = set(objects[0])
    if "arrival_s" in keys:
        return FORMATS["twin-jsonl"]
    if "chat_id" in keys:
        return FORMATS["alibaba"]
    if keys & set(hashed.KEYS):
        mooncake, sharegpt = (
            sum(hashed.ids_fit(row, block) for row in objects) for block in (512, 16)
        )
        return FORMATS["sharegpt" if sharegpt > mooncake else "mooncake"]
    found = ", ".join(repr(key[:40]) for key in list(keys)[:8])
    known = "; ".join(
        f"{m.name}: {', '.join(m.columns)}" for m in FORMATS.values() if m.kind == "jsonl"
    )
    raise InputError(f"{path} line 1: no keys of a known format ({found}); the keys are {known}")


def read_trace(path: str, trace_format: Format) -> Iterator[TraceRow]:
    """The rows of a file. Raises InputError at the first line that is none, or if there is no row at all."""
    empty = True
    for item in trace_format.read(path):
        if isinstance(item, Fault):
            raise InputError(place(path, trace_format, item))
        empty = False
        yield item
    if empty:
        raise InputError(f"{path}: {NO_ROWS}")


def count_rows(path: str, trace_format: Format) -> int:
    """About how many rows a file has, quickly, without looking at what they hold."""
    if trace_format.kind == "parquet":
        return parquet.count_rows(path)
    return count_lines(path) - (trace_format.kind == "csv")


NO_ROWS = "there is no request in it; a trace needs at least one row"


def place(path: str, trace_format: Format, fault: Fault) -> str:
    """A fault as one line, with the file and the line."""
    unit = "row" if trace_format.kind == "parquet" else "line"
    return f"{path} {unit} {fault.line}: {fault.problem}"


def format_for(path: str, name: str | None) -> Format:
    """The format to write: the one with this name, or our own that the suffix of `path` stands for.

    Raises InputError if there is none, or it is read only.
    """
    if name is not None:
        chosen = named(name)
        if chosen.write is None:
            raise InputError(f"format {name!r} is read, but not written")
        return chosen
    plain = path.removesuffix(".gz")
    for suffix, own_name in (
        (".csv", "twin-csv"),
        (".jsonl", "twin-jsonl"),
        (".parquet", "twin-parquet"),
    ):
        if plain.endswith(suffix) and not (suffix == ".parquet" and plain != path):
            return FORMATS[own_name]
    raise InputError(
        f"{path}: the format to write is not clear; end the name in .csv, .jsonl or .parquet (.csv.gz and .jsonl.gz "
        "are packed), or name it with --to"
    )


__all__ = ["FORMATS", "Detected", "Rows", "format_for", "format_of", "named", "place", "read_trace"]
