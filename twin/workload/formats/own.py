"""Our own formats twin-csv and twin-jsonl, which hold everything a request has and come back as they were written.

One request a line: arrival_s, prompt_tokens, output_tokens, and as far as they are known prompt (the content), reply,
max_tokens, tier, tenant, session, ttft_timeout_s, total_timeout_s, id. Seconds are exact decimals.

In CSV a prompt is written `id:tokens id:tokens ...`, `-` for one that shares nothing; an empty field is not known. In
JSON lines it is [[id, tokens], ...], and what is not known is left out.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from twin.workload.formats.files import write_lines
from twin.workload.formats.lines import Parse, present, read_csv, read_jsonl
from twin.workload.formats.names import csv_field, name_or_none
from twin.workload.formats.rows import HELD, Format, MalformedError, Rows, TraceRow
from twin.workload.formats.values import (
    MAX_CONTENT,
    MAX_TOKENS,
    Clock,
    content_id,
    duration_ps,
    seconds_text,
    shown,
    tokens,
)

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
COLUMNS = (
    *REQUIRED, "prompt", "reply", "max_tokens", "tier", "tenant", "session", "ttft_timeout_s",
    "total_timeout_s", "id",
)  # fmt: skip
NAMES = ("tier", "tenant", "session", "id")


def _row(line: int, at_ps: int, values: dict[str, Any], prompt: Any) -> TraceRow:
    """The row of what stands in the other fields; "" and None are both nothing."""

    def number(key: str, read: Any) -> Any:
        value = values.get(key)
        return None if value is None or value == "" else read(key, value)

    prompt_tokens = tokens("prompt_tokens", values["prompt_tokens"])
    if prompt is not None and sum([length for _, length in prompt]) > prompt_tokens:
        raise MalformedError(
            "content",
            f"prompt: its parts have {sum(length for _, length in prompt):,} tokens, more than prompt_tokens "
            f"({prompt_tokens:,})",
        )
    return TraceRow(
        line,
        at_ps,
        prompt_tokens,
        tokens("output_tokens", values["output_tokens"]),
        prompt,
        number("reply", content_id),
        number("max_tokens", tokens),
        name_or_none("tier", values.get("tier")),
        name_or_none("tenant", values.get("tenant")),
        name_or_none("session", values.get("session")),
        number("ttft_timeout_s", _timeout),
        number("total_timeout_s", _timeout),
        name_or_none("id", values.get("id")),
    )


def _timeout(field: str, value: Any) -> int:
    timeout_ps = duration_ps(field, value)
    if not timeout_ps:
        raise MalformedError("value", f"{field}: {shown(value)} must be above 0")
    return timeout_ps


def _segment(content: Any, length: Any) -> tuple[int, int]:
    return content_id("prompt", content), tokens("prompt", length)


# --- CSV ----------------------------------------------------------------------------------


def read_own_csv(path: str) -> Rows:
    """Rows of a twin-csv file; columns may be in any order, and those not in REQUIRED may be missing."""
    return read_csv(path, REQUIRED, _csv_parser)


def _csv_parser(position: dict[str, int]) -> Parse:
    unknown = [name for name in position if name not in COLUMNS]
    if unknown:
        raise MalformedError(
            "fields", f"unknown column {unknown[0]!r}; known: {', '.join(COLUMNS)}", fatal=True
        )
    clock = Clock(REQUIRED[0])
    names = list(position)

    def parse(line: int, fields: list[str]) -> TraceRow:
        values = dict(zip(names, fields, strict=True))
        at_ps = clock.number(line, values["arrival_s"], 10**12)
        return _row(line, at_ps, values, _csv_prompt(values.get("prompt", "")))

    return parse


def _csv_prompt(text: str) -> tuple[tuple[int, int], ...] | None:
    text = text.strip()
    if not text:
        return None
    if text == "-":
        return ()
    segments = []
    for part in text.split():
        content, colon, length = part.partition(":")
        if not colon:
            raise MalformedError(
                "content", f"prompt: {shown(part)} is not id:tokens; write e.g. 7:512 8:100"
            )
        segments.append(_segment(content, length))
    return tuple(segments)


def write_own_csv(path: str, rows: Iterable[TraceRow]) -> None:
    """Write a twin-csv file. Raises InputError for a name that spans lines."""
    write_lines(path, _csv_lines(rows))


def _csv_lines(rows: Iterable[TraceRow]) -> Iterator[str]:
    yield ",".join(COLUMNS)
    for row in rows:
        if row.prompt is None:
            prompt = ""
        else:
            prompt = " ".join(f"{content}:{length}" for content, length in row.prompt) or "-"
        fields = [
            seconds_text(row.at_ps),
            str(row.prompt_tokens),
            str(row.output_tokens),
            prompt,
            *("" if value is None else str(value) for value in (row.reply, row.max_tokens)),
            *(csv_field(name, getattr(row, name) or "") for name in NAMES[:3]),
            *(
                "" if ps is None else seconds_text(ps)
                for ps in (row.ttft_timeout_ps, row.total_timeout_ps)
            ),
            csv_field("id", row.id or ""),
        ]
        yield ",".join(fields)


# --- JSON lines ---------------------------------------------------------------------------


def read_own_jsonl(path: str) -> Rows:
    """Rows of a twin-jsonl file."""
    clock = Clock(REQUIRED[0])

    def parse(line: int, values: dict[str, Any]) -> TraceRow:
        for key in REQUIRED:
            present(values, key)
        for key in values:
            if key not in COLUMNS:
                raise MalformedError(
                    "fields", f"unknown key {shown(key)}; known: {', '.join(COLUMNS)}"
                )
        at_ps = clock.number(line, values["arrival_s"], 10**12)
        return _row(line, at_ps, values, _json_prompt(values.get("prompt")))

    return read_jsonl(path, parse)


def _json_prompt(value: Any) -> tuple[tuple[int, int], ...] | None:
    if value is None:
        return None
    try:
        segments = tuple([(content, length) for content, length in value])
    except (TypeError, ValueError):
        raise MalformedError(
            "content", f"prompt: {shown(value)} must be [[id, tokens], ...]"
        ) from None
    for content, length in segments:
        if not (type(content) is int and type(length) is int and 0 <= content < MAX_CONTENT):
            return tuple([_segment(*segment) for segment in segments])
        if not 0 < length <= MAX_TOKENS:
            tokens("prompt", length)
    return segments


def write_own_jsonl(path: str, rows: Iterable[TraceRow]) -> None:
    """Write a twin-jsonl file."""
    write_lines(path, map(_json_line, rows))


def _json_line(row: TraceRow) -> str:
    parts = [
        f'"arrival_s": {seconds_text(row.at_ps)}',
        f'"prompt_tokens": {row.prompt_tokens}',
        f'"output_tokens": {row.output_tokens}',
    ]
    if row.prompt is not None:
        segments = ", ".join(f"[{content}, {length}]" for content, length in row.prompt)
        parts.append(f'"prompt": [{segments}]')
    for key, value in (("reply", row.reply), ("max_tokens", row.max_tokens)):
        if value is not None:
            parts.append(f'"{key}": {value}')
    for key in NAMES:
        name = getattr(row, key)
        if name is not None:
            parts.append(f'"{key}": {json.dumps(name)}')
    for key, ps in (
        ("ttft_timeout_s", row.ttft_timeout_ps),
        ("total_timeout_s", row.total_timeout_ps),
    ):
        if ps is not None:
            parts.append(f'"{key}": {seconds_text(ps)}')
    return "{" + ", ".join(parts) + "}"


CSV = Format(
    "twin-csv", "our own CSV", "csv", REQUIRED, frozenset(HELD), read_own_csv, write_own_csv
)
JSONL = Format(
    "twin-jsonl",
    "our own JSON lines",
    "jsonl",
    REQUIRED,
    frozenset(HELD),
    read_own_jsonl,
    write_own_jsonl,
)
