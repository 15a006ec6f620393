"""The records of a run in a file, one request a row: CSV or JSON lines."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from twin.clock import PS
from twin.errors import InputError
from twin.metrics.records import RequestRecord

INSTANTS = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
SPANS = ("stall_s", "estimated_wait_s")
TIMES = (*INSTANTS, *SPANS)
"""Columns in seconds, in full to the picosecond."""

COLUMNS = (
    "index", "tier", "tenant", "session", "stream", "replica", *INSTANTS,
    "prompt_tokens", "output_tokens", "outcome", "reason", "preemptions", "recomputed_tokens",
    "prefix_hit_tokens", "prefix_query_tokens", "attempts", "stall_s", "estimated_wait_s",
)  # fmt: skip


def check_path(path: Path) -> None:
    """Whether records can be written to `path`, before a run is spent on them.

    Raises InputError for an ending other than .csv and .jsonl, for a folder and for a folder that does not exist.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise InputError(f"--records {path}: the name must end in .csv or .jsonl")
    if path.is_dir():
        raise InputError(f"--records {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InputError(f"--records {path}: there is no folder {path.parent}; make it first")


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write `records` in their order. Instants are seconds in full, to the picosecond.

    Raises InputError where the file cannot be written.
    """
    write = _write_csv if path.suffix == ".csv" else _write_jsonl
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            write(file, records)
    except OSError as error:
        raise InputError(f"--records {path}: {error.strerror}") from None


def _write_csv(file: TextIO, records: Iterable[RequestRecord]) -> None:
    out = csv.writer(file, lineterminator="\n")
    out.writerow(COLUMNS)
    for record in records:
        out.writerow("" if value is None else value for value in _row(record))


def _write_jsonl(file: TextIO, records: Iterable[RequestRecord]) -> None:
    for record in records:
        cells = zip(COLUMNS, _row(record), strict=True)
        file.write(
            "{" + ", ".join(f'"{name}": {_json(name, cell)}' for name, cell in cells) + "}\n"
        )


def _json(name: str, cell: str | int | None) -> str:
    # A decimal is a JSON number as it stands; a float would lose picoseconds after some hours.
    return cell if name in TIMES and isinstance(cell, str) else json.dumps(cell)


def _row(record: RequestRecord) -> Iterator[str | int | None]:
    for name in COLUMNS:
        if name in TIMES:
            yield _decimal(getattr(record, name.removesuffix("_s") + "_ps"))
        else:
            yield getattr(record, name)


def _decimal(ps: int | None) -> str | None:
    if ps is None:
        return None
    whole, part = divmod(ps, PS)
    return f"{whole}.{part:012d}".rstrip("0").rstrip(".")
