"""Traces whose prompts are lists of block hashes: JSON lines with timestamp, input_length, output_length, hash_ids.

A hash stands for a block of tokens and all that comes before it, so equal ids are equal prefixes. The unit of the
stamps and the length of a block belong to the format:

mooncake  milliseconds, 512 tokens, the last block may be short     github.com/kvcache-ai/Mooncake, Apache-2.0
sharegpt  milliseconds, 16 tokens, whole blocks only                vLLM's own blocks
alibaba   seconds, 16 tokens, chat_id and parent_chat_id            github.com/alibaba-edu/qwen-bailian-usagetraces-anon

What a reply said is known only from the prompts of later turns, as blocks of their own.
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

from twin.clock import PS
from twin.workload.formats.files import write_lines
from twin.workload.formats.lines import Parse, present, read_jsonl
from twin.workload.formats.names import name_or_none
from twin.workload.formats.rows import Format, MalformedError, Rows, TraceRow
from twin.workload.formats.values import MAX_CONTENT, Clock, content_id, seconds_text, shown, tokens

KEYS = ("timestamp", "input_length", "output_length")
MILLISECOND = PS // 1000


def _read(unit_ps: int, block_tokens: int, chats: bool, path: str) -> Rows:
    return read_jsonl(path, _parser(unit_ps, block_tokens, chats))


def _parser(unit_ps: int, block_tokens: int, chats: bool) -> Parse:
    clock = Clock(KEYS[0])
    roots: dict[str, str] = {}

    def parse(line: int, row: dict[str, Any]) -> TraceRow:
        at_ps = clock.number(line, present(row, KEYS[0]), unit_ps)
        prompt_tokens = tokens(KEYS[1], present(row, KEYS[1]))
        output_tokens = tokens(KEYS[2], present(row, KEYS[2]))
        ids = row.get("hash_ids")
        chat = session = None
        if chats:
            chat = name_or_none("chat_id", present(row, "chat_id"))
            parent = name_or_none("parent_chat_id", row.get("parent_chat_id"))
            session = chat if parent in (None, "-1") else roots.get(str(parent), str(parent))
            if chat is not None and session is not None:
                roots[chat] = session
        return TraceRow(
            line,
            at_ps,
            prompt_tokens,
            output_tokens,
            None if ids is None else _segments(ids, prompt_tokens, block_tokens),
            session=session,
            id=chat,
        )

    return parse


def _segments(ids: Any, prompt_tokens: int, block: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(ids, list):
        raise MalformedError("content", f"hash_ids: {shown(ids)} must be a list of whole numbers")
    blocks = len(ids)
    if (blocks - 1) * block >= prompt_tokens:
        raise MalformedError(
            "content",
            f"hash_ids: {blocks} blocks of {block} tokens do not fit a prompt of {prompt_tokens:,} tokens; is the "
            "format another?",
        )
    for value in ids:
        if type(value) is not int or not 0 <= value < MAX_CONTENT:
            content_id("hash_ids", value)
    if blocks * block > prompt_tokens:
        last = prompt_tokens - (blocks - 1) * block
        return (*((value, block) for value in ids[:-1]), (ids[-1], last))
    return tuple([(value, block) for value in ids])


def ids_fit(row: dict[str, Any], block: int) -> bool:
    """Whether a row has as many hash ids as its prompt has blocks of this length, the last one short or left out."""
    ids, prompt_tokens = row.get("hash_ids"), row.get("input_length")
    if not isinstance(ids, list) or type(prompt_tokens) is not int:
        return False
    return len(ids) in (prompt_tokens // block, -(-prompt_tokens // block))


# --- writing ------------------------------------------------------------------------------


def _write(block_tokens: int, whole: bool, path: str, rows: Iterable[TraceRow]) -> None:
    write_lines(path, _lines(rows, block_tokens, whole))


def _lines(rows: Iterable[TraceRow], block_tokens: int, whole: bool) -> Iterator[str]:
    numbers: dict[tuple[int, int], int] = {}
    fresh = count()
    for row in rows:
        head = (
            f'{{"timestamp": {seconds_text(row.at_ps, MILLISECOND)}, "input_length": {row.prompt_tokens}, '
            f'"output_length": {row.output_tokens}'
        )
        if row.prompt is None:
            yield head + "}"
            continue
        blocks = (
            row.prompt_tokens // block_tokens if whole else -(-row.prompt_tokens // block_tokens)
        )
        ids = []
        for key in block_keys(row, block_tokens, blocks):
            if key is None:
                ids.append(next(fresh))
            elif key in numbers:
                ids.append(numbers[key])
            else:
                ids.append(numbers.setdefault(key, next(fresh)))
        yield f'{head}, "hash_ids": {json.dumps(ids)}}}'


def block_keys(row: TraceRow, block_tokens: int, blocks: int) -> Iterator[tuple[int, int] | None]:
    """What identifies each of the first `blocks` blocks and all before it; None for text that no other request has.

    As in twin.engine.blocks: the contents up to the one in which the block ends, and that position.
    """
    segments = iter(row.prompt or ())
    chain, end = 0, 0
    for number in range(blocks):
        stop = min((number + 1) * block_tokens, row.prompt_tokens)
        while end < stop:
            segment = next(segments, None)
            if segment is None:
                break
            chain = hash((chain, end, segment[0]))
            end += segment[1]
        yield (chain, stop) if end >= stop else None


def _unfit(block_tokens: int, whole: bool, row: TraceRow) -> str | None:
    problem = f"prefixes within a block of {block_tokens} tokens"
    segments = row.prompt or ()
    rest = row.prompt_tokens - sum(tokens for _, tokens in segments)
    inner = segments if rest or whole else segments[:-1]
    return problem if any(tokens % block_tokens for _, tokens in inner) else None


MOONCAKE = Format(
    "mooncake",
    "Mooncake trace (milliseconds, blocks of 512 tokens)",
    "jsonl",
    KEYS,
    frozenset({"prefixes", "start"}),
    partial(_read, MILLISECOND, 512, False),
    partial(_write, 512, False),
    partial(_unfit, 512, False),
    512,
)
SHAREGPT = Format(
    "sharegpt",
    "hashed prompts (milliseconds, blocks of 16 tokens)",
    "jsonl",
    KEYS,
    frozenset({"prefixes", "start"}),
    partial(_read, MILLISECOND, 16, False),
    partial(_write, 16, True),
    partial(_unfit, 16, True),
    16,
)
ALIBABA = Format(
    "alibaba",
    "Alibaba Bailian trace (seconds, blocks of 16 tokens)",
    "jsonl",
    ("chat_id", *KEYS),
    frozenset({"prefixes", "start", "sessions", "ids"}),
    partial(_read, PS, 16, True),
    block_tokens=16,
)
