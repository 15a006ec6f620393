"""Read published measurements: tables of numbers as CSV, requests as JSON lines, either packed with gzip or not."""

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from twin.errors import InputError

Row = dict[str, str]


def read_table(path: Path, columns: Sequence[str] = ()) -> list[Row]:
    """The rows of a CSV file with a header.

    Raises InputError where it cannot be read, has no rows or lacks one of the columns.
    """
    with _open(path) as file:
        rows = list(_guarded(path, csv.DictReader(file)))
    if not rows:
        raise InputError(f"{path}: no rows below a header")
    missing = [column for column in columns if column not in rows[0]]
    if missing:
        raise InputError(f"{path}, line 1: there is no column {', '.join(missing)}; add it")
    for number, row in enumerate(rows, 2):
        if any(row[column] is None for column in columns):
            raise InputError(f"{path}, line {number}: fewer values than the header has columns")
    return rows


def check_numbers(
    path: Path, rows: Iterable[tuple[int, Mapping[str, Any]]], columns: Sequence[str]
) -> None:
    """Raises InputError, with line and column, unless all these values are finite numbers; rows are (line, row)."""
    for line, row in rows:
        for column in columns:
            value = row.get(column)
            try:
                known = value is not None and math.isfinite(float(value))
            except (TypeError, ValueError):
                known = False
            if not known:
                raise InputError(
                    f"{path}, line {line}: {column} is {value!r}; it must be a finite number. Correct or drop the row."
                )


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. Raises InputError, with the line, where one is no object."""
    found = []
    with _open(path) as file:
        for number, line in enumerate(_guarded(path, file), 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: no JSON: {error}") from None
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: no JSON object")
            found.append(row)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises InputError where there is none."""
    with _open(path) as file:
        text = "".join(_guarded(path, file))
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: no JSON object")
    return found


def _open(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _guarded(path: Path, rows: Iterator[Any]) -> Iterator[Any]:
    """The rows, with what goes wrong on the way as InputError."""
    try:
        yield from rows
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
