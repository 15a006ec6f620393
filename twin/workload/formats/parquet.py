"""Our own format twin-parquet: what twin-csv holds, in typed columns, read and written in batches of rows.

Instants and time-outs are whole picoseconds; a prompt is two lists, content ids and their tokens. It needs pyarrow
(extra `report`).
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from twin.errors import InputError
from twin.workload.formats.files import replacing
from twin.workload.formats.names import name_or_none
from twin.workload.formats.rows import HELD, Fault, Format, MalformedError, Rows, TraceRow
from twin.workload.formats.values import Clock, content_id, shown, tokens

REQUIRED = ("arrival_ps", "prompt_tokens", "output_tokens")
COLUMNS = {
    "arrival_ps": "int64", "prompt_tokens": "int32", "output_tokens": "int32", "prompt_ids": "list uint64",
    "prompt_id_tokens": "list int32", "reply": "uint64", "max_tokens": "int32", "tier": "string", "tenant": "string",
    "session": "string", "ttft_timeout_ps": "int64", "total_timeout_ps": "int64", "id": "string",
}  # fmt: skip
"""Column -> type."""
BATCH = 16_384
"""Rows in memory at a time."""


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"{path}: Parquet needs pyarrow; install it with: pip install 'vllm-twin[report]'"
        ) from None
    return pyarrow


def read(path: str) -> Rows:
    """Rows of a twin-parquet file. Raises InputError if it cannot be opened or pyarrow is missing."""
    arrow = _pyarrow(path)
    try:
        file = arrow.parquet.ParquetFile(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except arrow.ArrowException as error:
        yield Fault(1, "file", f"not readable as Parquet: {_first_line(error)}", fatal=True)
        return
    with file:
        found = file.schema_arrow.names
        missing = [name for name in REQUIRED if name not in found]
        unknown = [name for name in found if name not in COLUMNS]
        if missing or unknown:
            problem = f"no column {missing[0]!r}" if missing else f"unknown column {unknown[0]!r}"
            yield Fault(1, "fields", f"{problem}; known: {', '.join(COLUMNS)}", fatal=True)
            return
        number = 0
        clock = Clock("arrival_ps")
        try:
            for batch in file.iter_batches(BATCH):
                columns = batch.to_pydict()
                names = list(columns)
                for values in zip(*columns.values(), strict=True):
                    number += 1
                    try:
                        row = _row(number, clock, dict(zip(names, values, strict=True)))
                    except MalformedError as error:
                        yield Fault(number, error.kind, str(error))
                        continue
                    yield row
        except (OSError, arrow.ArrowException) as error:
            yield Fault(number + 1, "file", f"not readable on: {_first_line(error)}", fatal=True)


def count_rows(path: str) -> int:
    """Rows of the file as its footer says; 0 if there is none to be read."""
    arrow = _pyarrow(path)
    try:
        return int(arrow.parquet.read_metadata(path).num_rows)
    except (OSError, arrow.ArrowException):
        return 0


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _row(number: int, clock: Clock, values: dict[str, Any]) -> TraceRow:
    get = values.get
    prompt_tokens = tokens("prompt_tokens", values["prompt_tokens"])
    max_tokens, reply = get("max_tokens"), get("reply")
    return TraceRow(
        number,
        clock.number(number, values["arrival_ps"], 1),
        prompt_tokens,
        tokens("output_tokens", values["output_tokens"]),
        _prompt(get("prompt_ids"), get("prompt_id_tokens"), prompt_tokens),
        None if reply is None else content_id("reply", reply),
        None if max_tokens is None else tokens("max_tokens", max_tokens),
        name_or_none("tier", get("tier")),
        name_or_none("tenant", get("tenant")),
        name_or_none("session", get("session")),
        _timeout("ttft_timeout_ps", get("ttft_timeout_ps")),
        _timeout("total_timeout_ps", get("total_timeout_ps")),
        name_or_none("id", get("id")),
    )


def _timeout(field: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise MalformedError("value", f"{field}: {shown(value)} must be a whole number above 0")
    return value


def _prompt(ids: Any, lengths: Any, prompt_tokens: int) -> tuple[tuple[int, int], ...] | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or not isinstance(lengths, list) or len(ids) != len(lengths):
        raise MalformedError(
            "content", "prompt_ids and prompt_id_tokens must be lists of the same length"
        )
    prompt = tuple(
        [
            (content_id("prompt_ids", content), tokens("prompt_id_tokens", length))
            for content, length in zip(ids, lengths, strict=True)
        ]
    )
    if sum(length for _, length in prompt) > prompt_tokens:
        raise MalformedError(
            "content", f"prompt_id_tokens add up to more than prompt_tokens ({prompt_tokens:,})"
        )
    return prompt


def write(path: str, rows: Iterable[TraceRow]) -> None:
    """Write a twin-parquet file. Raises InputError if it cannot be written or pyarrow is missing."""
    arrow = _pyarrow(path)
    schema = arrow.schema([(name, _type(arrow, kind)) for name, kind in COLUMNS.items()])
    with replacing(path) as part:
        try:
            with arrow.parquet.ParquetWriter(part, schema, compression="zstd") as file:
                for batch in _batches(rows):
                    file.write_batch(arrow.RecordBatch.from_pydict(_columns(batch), schema))
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def _type(arrow: Any, kind: str) -> Any:
    if kind.startswith("list "):
        return arrow.list_(_type(arrow, kind.removeprefix("list ")))
    return getattr(arrow, kind)()


def _batches(rows: Iterable[TraceRow]) -> Iterator[list[TraceRow]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _columns(rows: list[TraceRow]) -> dict[str, list[Any]]:
    same = (name for name in COLUMNS if not name.startswith(("arrival", "prompt_id")))
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in same}
    columns["arrival_ps"] = [row.at_ps for row in rows]
    for name, part in (("prompt_ids", 0), ("prompt_id_tokens", 1)):
        columns[name] = [
            None if row.prompt is None else [segment[part] for segment in row.prompt]
            for row in rows
        ]
    return columns


FORMAT = Format(
    "twin-parquet", "our own Parquet", "parquet", REQUIRED, frozenset(HELD), read, write
)
