"""What was measured of requests: the records of the simulator, with what only a client knows beside them.

In a folder: requests.parquet as `twin run --out` writes it (instants from the start, arrival = when the request was
due), with the columns of EXTRA behind; trace.jsonl, the same requests as traffic of the simulator; replay.json, what is
known of the whole.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from twin.clock import PS
from twin.errors import InputError
from twin.metrics.records import RequestRecord
from twin.report.parquet import write_requests
from twin.workload.formats.choose import format_for
from twin.workload.formats.rows import TraceRow
from twin.workload.request import Request

REQUESTS, TRACE, FACTS = "requests.parquet", "trace.jsonl", "replay.json"
EXTRA = (
    "sent_s",
    "max_tokens",
    "planned_prompt_tokens",
    "planned_output_tokens",
    "status",
    "error",
)
"""Columns behind those of the simulator: when the request was written to the connection, the limit it declared, the
lengths that were planned, the HTTP status (0 = no answer) and what the server or the connection said."""


MOST_MISMATCH = 0.01
"""Share of requests whose lengths may differ from the planned ones before that is the first thing to say."""


class Mismatch(NamedTuple):
    """Shares of the completed requests whose lengths differ from the planned ones."""

    either: float
    prompts: float
    replies: float

    def __str__(self) -> str:
        return (
            f"{100 * self.either:.1f} % of the completed requests had other lengths than planned ("
            f"{100 * self.prompts:.1f} % of the prompts, {100 * self.replies:.1f} % of the replies)"
        )


def mismatch(got: Sequence[tuple[int, int]], planned: Sequence[tuple[int, int]]) -> Mismatch:
    """Of requests of which both lengths, of the prompt and of the reply, are known. There must be one."""
    pairs = list(zip(got, planned, strict=True))
    return Mismatch(
        sum(a != b for a, b in pairs) / len(pairs),
        sum(a[0] != b[0] for a, b in pairs) / len(pairs),
        sum(a[1] != b[1] for a, b in pairs) / len(pairs),
    )


@dataclass(frozen=True)
class Measured:
    """One request as its client saw it."""

    record: RequestRecord
    """Arrival is when it was due; lengths are what the server counted."""
    sent_ps: int | None = None
    """When it was written to the connection, the last time if it was tried again; None = not known."""
    max_tokens: int | None = None
    """The limit it declared; None = not known, or none."""
    planned: tuple[int, int] | None = None
    """(prompt tokens, output tokens) that were asked for, where that is known."""
    status: int = 0
    error: str = ""
    request: Request | None = None
    """What the traffic asked for; None for what another tool measured."""

    @property
    def lateness_s(self) -> float | None:
        """Seconds from due to sent, of requests that were sent once."""
        if self.sent_ps is None or self.record.attempts > 1:
            return None
        return (self.sent_ps - self.record.arrival_ps) / PS

    @property
    def sent_ttft_s(self) -> float | None:
        """Time to first token from when the request was sent: what is seen by a client that forgets when it was due."""
        if self.sent_ps is None or self.record.first_token_ps is None:
            return None
        return (self.record.first_token_ps - self.sent_ps) / PS


def write_measured(folder: Path, measured: Sequence[Measured], facts: dict[str, Any]) -> None:
    """Write the three files into a folder that is there. Raises InputError where that fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / REQUESTS
    try:
        write_requests(path, [one.record for one in measured])
        table = pq.read_table(path)
        extra: dict[str, Any] = {
            "sent_s": pa.array([_seconds(one.sent_ps) for one in measured], pa.float64()),
            "max_tokens": pa.array([one.max_tokens for one in measured], pa.int64()),
            "planned_prompt_tokens": pa.array(
                [one.planned and one.planned[0] for one in measured], pa.int64()
            ),
            "planned_output_tokens": pa.array(
                [one.planned and one.planned[1] for one in measured], pa.int64()
            ),
            "status": pa.array([one.status for one in measured], pa.int64()),
            "error": pa.array([one.error for one in measured], pa.string()),
        }
        for name in EXTRA:
            table = table.append_column(name, extra[name])
        pq.write_table(table, path, compression="zstd")
        (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror or error}") from None
    write_trace(folder / TRACE, measured)


def write_trace(path: Path, measured: Sequence[Measured]) -> None:
    """The requests that got tokens as traffic of the simulator: at their due times, with the lengths they had."""
    made = format_for(str(path), None)
    assert made.write is not None
    made.write(str(path), iter(trace_rows(measured)))


def trace_rows(measured: Sequence[Measured]) -> list[TraceRow]:
    """One row for each request with a reply, in order of arrival; content where it is known."""
    rows = []
    kept = [one for one in measured if one.record.output_tokens]
    asked = {content for one in kept if one.request for content, _ in one.request.prompt}
    for line, one in enumerate(sorted(kept, key=lambda one: one.record.arrival_ps), 1):
        record, request = one.record, one.request
        row = TraceRow(
            line,
            record.arrival_ps,
            record.prompt_tokens,
            record.output_tokens,
            max_tokens=one.max_tokens,
            tier=record.tier,
            tenant=record.tenant,
            session=record.session,
        )
        if request is not None:
            fits = sum(tokens for _, tokens in request.prompt) <= record.prompt_tokens
            row = row._replace(
                prompt=request.prompt if fits else None,
                reply=request.reply if request.reply in asked else None,
                ttft_timeout_ps=request.ttft_timeout_ps,
                total_timeout_ps=request.total_timeout_ps,
            )
        rows.append(row)
    return rows


def read_measured(folder: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """(requests.parquet as columns, replay.json). Raises InputError where there is none, or a column is missing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / REQUESTS if folder.is_dir() else folder
    try:
        columns = pq.read_table(path).to_pydict()
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; give a folder that `twin-real "
            "replay --out` wrote"
        ) from None
    if missing := [name for name in NEEDED if name not in columns]:
        raise InputError(f"{path}: has no column {', '.join(missing)}")
    for name in INSTANTS:
        _check(path, name, columns[name], _is_instant, "a finite number of seconds")
    for name in ("index", "prompt_tokens", "output_tokens", *EXTRA[2:4]):
        _check(path, name, columns.get(name, []), _is_count, "a whole number from 0 on")
    if None in columns["arrival_s"]:
        raise InputError(f"{path}: arrival_s: must be there for every request")
    if None in columns["index"]:
        raise InputError(f"{path}: index: must be there for every request")
    return columns, _facts(path.parent / FACTS)


INSTANTS = ("arrival_s", "first_token_s", "finish_s")
NEEDED = (*INSTANTS, "index", "tier", "prompt_tokens", "output_tokens", "outcome")
"""Columns that a comparison cannot do without."""


def _is_instant(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _check(
    path: Path, name: str, column: Sequence[Any], fits: Callable[[Any], bool], what: str
) -> None:
    for row, value in enumerate(column):
        if value is not None and not fits(value):
            raise InputError(
                f"{path}: {name} of row {row}: {value!r:.60}: must be {what}, or empty"
            )


def _facts(path: Path) -> dict[str, Any]:
    """replay.json; {} where there is none."""
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(known, dict):
        raise InputError(f"{path}: must be one JSON object, as `twin-real replay --out` writes it")
    places = {name: known.get(name, {}) for name in ("scenario", "server", "client")}
    if isinstance(places["scenario"], dict):
        places["scenario.run"] = places["scenario"].get("run", {})
    for place, value in places.items():
        if not isinstance(value, dict):
            raise InputError(f"{path}: {place}: {value!r:.60}: must be an object")
    late = places["client"].get("lateness")
    if late is not None and not (isinstance(late, dict) and _is_instant(late.get("p99_s"))):
        raise InputError(f"{path}: client.lateness: {late!r:.60}: must have a number p99_s")
    traffic = places["scenario"].get("traffic", [])
    if not (isinstance(traffic, list) and all(isinstance(stream, dict) for stream in traffic)):
        raise InputError(f"{path}: scenario.traffic: {traffic!r:.60}: must be a list of objects")
    for number, stream in enumerate(traffic):
        if not isinstance(stream.get("arrivals") or {}, dict):
            raise InputError(f"{path}: scenario.traffic.{number}.arrivals: must be an object")
    seed = places["scenario"].get("run", {}).get("seed")
    if seed is not None and not isinstance(seed, int):
        raise InputError(f"{path}: scenario.run.seed: {seed!r:.60}: must be a whole number")
    return known


def shifted(measured: Sequence[Measured]) -> list[Measured]:
    """The same with the first arrival at 0, for tools whose clock began at some other time."""
    if not measured:
        return []
    start = min(one.record.arrival_ps for one in measured)

    def earlier(at_ps: int | None) -> int | None:
        return None if at_ps is None else at_ps - start

    return [
        replace(
            one,
            record=replace(
                one.record,
                arrival_ps=one.record.arrival_ps - start,
                first_token_ps=earlier(one.record.first_token_ps),
                finish_ps=earlier(one.record.finish_ps),
            ),
            sent_ps=earlier(one.sent_ps),
        )
        for one in measured
    ]


def _seconds(ps: int | None) -> float | None:
    return None if ps is None else ps / PS
