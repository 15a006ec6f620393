"""A run in a folder: summary.json, requests.parquet, timeseries.parquet, events.jsonl and report.html."""

import json
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twin.errors import InputError
from twin.report.html import write_html
from twin.report.json_summary import to_json
from twin.report.parquet import write_requests, write_series
from twin.simulation import Result

FILES = (
    "summary.json",
    "requests.parquet",
    "timeseries.parquet",
    "events.jsonl",
    "report.html",
)
OF_SINGLE_REQUESTS = ("requests.parquet", "events.jsonl")
"""Files that need records."""

NEEDED = ("plotly", "pyarrow")


def files_in(folder: Path) -> list[Path]:
    """The files that a run is written to, those included that are only there while it is."""
    return [folder / name for file in FILES for name in (file, f".{file}.part")]


def check_folder(folder: Path, force: bool) -> None:
    """Whether results can be written there, before a run is spent on them; makes the folder.

    Raises InputError for a file of that name, for a folder that is not empty unless `force`, and where a package that
    writing needs is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(
            f"--out needs {' and '.join(missing)}; pip install 'vllm-twin[report]' brings what is missing"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}") from None
    if occupied and not force:
        raise InputError(
            f"--out {folder}: the folder is not empty; name another, or --force to overwrite the results in it"
        )


def write_folder(
    folder: Path, result: Result, summary: Mapping[str, Any], names: Collection[str] = FILES
) -> None:
    """Write an observed run, or only the files `names`. Raises InputError where that fails.

    Each file appears, or replaces an older one, only when it is complete. Where records are not kept, the files that
    tell of single requests are not written, and older ones, which tell of another run, are removed.
    """
    series = result.series
    assert series is not None, "the run was not observed"
    files: dict[str, Callable[[Path], None]] = {
        "summary.json": lambda path: _write_text(path, to_json(dict(summary))),
        "requests.parquet": lambda path: write_requests(path, result.records),
        "timeseries.parquet": lambda path: write_series(path, series),
        "events.jsonl": lambda path: _write_events(path, result),
        "report.html": lambda path: write_html(path, result, summary),
    }
    for name in names:
        write = files[name]
        part = folder / f".{name}.part"
        try:
            if result.kept is None and name in OF_SINGLE_REQUESTS:
                (folder / name).unlink(missing_ok=True)
                continue
            write(part)
            part.replace(folder / name)
        except OSError as error:
            raise InputError(f"--out {folder / name}: {error.strerror or error}") from None
        finally:
            part.unlink(missing_ok=True)


def _write_events(path: Path, result: Result) -> None:
    with path.open("w", encoding="utf-8") as file:
        for event in result.log:
            file.write(json.dumps(event.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
