"""Measured runs from their folders: the requests of each as columns, and the objectives beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twin.errors import InputError
from twin.whatif.store import read_json


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The requests of one run, as columns; durations in seconds, NaN where a request has none."""

    tiers: Any
    """Name of the tier, by request."""
    prompt_tokens: Any
    arrival_s: Any
    finish_s: Any
    """NaN for a request that was still inside."""
    completed: Any
    """Whether it reached its end."""
    durations: Mapping[str, Any]
    """ttft, tpot, e2e, queue, prefill; of completed requests for e2e."""
    objectives: Mapping[str, Mapping[str, float]]
    """Of the summary beside it; empty without one."""


def read_measured(folder: Path) -> list[MeasuredRun]:
    """The run in a folder with requests.parquet, or those of its sub-folders. Raises InputError for anything else."""
    try:
        files = [folder / "requests.parquet"]
        if not files[0].is_file():
            files = sorted(folder.glob("*/requests.parquet"))
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    if not files:
        raise InputError(
            f"{folder}: holds no requests.parquet, nor does a folder in it; "
            "twin run --out DIR and twin-real replay --out DIR write one"
        )
    return [_read_run(file) for file in files]


NEEDED = (
    "tier",
    "arrival_s",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "prompt_tokens",
    "output_tokens",
    "outcome",
)


def _read_run(path: Path) -> MeasuredRun:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        missing = [name for name in NEEDED if name not in names]
        if missing:
            raise InputError(
                f"{path}: has no column {', '.join(missing)}; it is no table of requests"
            )
        table = pq.read_table(path, columns=list(NEEDED))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from None
    if not table.num_rows:
        raise InputError(f"{path}: holds no request")

    def numbers(name: str) -> Any:
        return np.asarray(table[name].to_numpy(), dtype=np.float64)

    arrival, first, finish = numbers("arrival_s"), numbers("first_token_s"), numbers("finish_s")
    start, output = numbers("first_scheduled_s"), numbers("output_tokens")
    completed = np.array([o == "completed" for o in table["outcome"].to_pylist()])
    # The last token of a completed request comes when it finishes.
    between = np.where(
        completed & (output >= 2), (finish - first) / np.maximum(output - 1, 1), np.nan
    )
    durations = {
        "ttft": first - arrival,
        "tpot": between,
        "e2e": np.where(completed, finish - arrival, np.nan),
        "queue": start - arrival,
        "prefill": first - start,
    }
    return MeasuredRun(
        np.array(table["tier"].to_pylist(), dtype=object),
        numbers("prompt_tokens"),
        arrival, finish, completed, durations, _objectives(path.parent / "summary.json"),
    )  # fmt: skip


def _objectives(path: Path) -> dict[str, dict[str, float]]:
    if not path.is_file():
        return {}
    found = read_json(path)
    told = found.get("objectives") if isinstance(found, dict) else None
    if not isinstance(told, dict):
        return {}
    return {
        tier: {
            name: float(of["limit_s"])
            for name, of in judged.items()
            if isinstance(of, dict) and isinstance(of.get("limit_s"), int | float)
        }
        for tier, judged in told.items()
        if isinstance(judged, dict)
    }
