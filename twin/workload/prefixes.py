"""How much of the prompts of a trace could come from a prefix cache that forgets nothing."""

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from twin.workload.formats.rows import TraceRow

Keys: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.int64]

BATCH = 1 << 18
"""Entries that are looked up together."""


class KeyTable:
    """64-bit keys seen so far, each with the largest value that came with it.

    It takes 16 bytes a key (a dict takes ten times as much): sorted runs, the lengths of which at least double.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, Values]] = []

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._runs)

    def add(self, keys: Keys, values: Values) -> Values:
        """For each entry the largest value (> 0) that came before with its key, 0 if none did."""
        if not len(keys):
            return values
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
        first = np.ones(len(keys), dtype=np.bool_)
        first[1:] = keys[1:] != keys[:-1]
        starts = np.flatnonzero(first)
        group = np.cumsum(first) - 1
        # Values stay below 2**32, so that groups do not mix under the running maximum.
        lift = group << 32
        running = np.maximum.accumulate(values + lift) - lift
        before = np.zeros_like(values)
        before[1:] = running[:-1]
        before[first] = 0
        known = self._find(keys[starts])
        before = np.maximum(before, known[group])  # by entry in the order of keys
        ends = np.append(starts[1:], len(keys)) - 1
        self._insert(keys[starts], running[ends])
        answer: Values = np.empty_like(before)
        answer[order] = before
        return answer

    def _find(self, keys: Keys) -> Values:
        found = np.zeros(len(keys), dtype=np.int64)
        for run_keys, run_values in self._runs:
            at = np.minimum(np.searchsorted(run_keys, keys), len(run_keys) - 1)
            hit = run_keys[at] == keys
            found[hit] = np.maximum(found[hit], run_values[at[hit]])
        return found

    def _insert(self, keys: Keys, values: Values) -> None:
        while self._runs and len(self._runs[-1][0]) < 2 * len(keys):
            more_keys, more_values = self._runs.pop()
            keys = np.concatenate((more_keys, keys))
            values = np.concatenate((more_values, values))
            order = np.argsort(keys, kind="stable")
            keys, values = keys[order], values[order]
            starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
            keys, values = keys[starts], np.maximum.reduceat(values, starts)
        self._runs.append((keys, values))


class InfiniteCache:
    """The prefix hits of requests that come one after another, each finding all that came before it.

    As in the engine, a prompt's last token is always computed, hits are whole blocks, and the text of a reply is
    found too, but for its last token, whose keys and values nobody has computed.
    """

    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size
        self._table = KeyTable()
        self._keys = array("q")
        self._tokens = array("q")
        self._row = array("q")
        """Number in the batch of the row that asks; -1 for the text of a reply, which only is there from now on."""
        self._limits = array("q")
        """By row of the batch: prompt tokens that may be hits."""
        self._hit_tokens = 0
        self.prompt_tokens = 0
        """Tokens looked up."""
        self.rows = 0
        """Rows whose prefixes are known."""

    def add(self, row: TraceRow) -> None:
        """The next request; one whose prefixes are not known is left out."""
        if row.prompt is None:
            return
        number = len(self._limits)
        keys, tokens = self._keys, self._tokens
        chain, end = 0, 0
        for content, length in row.prompt:
            chain = hash((chain, end, content))
            end += length
            keys.append(chain)
            tokens.append(length)
        self._row.extend([number] * len(row.prompt))
        if row.reply is not None and row.output_tokens > 1 and end == row.prompt_tokens:
            keys.append(hash((chain, end, row.reply)))
            tokens.append(row.output_tokens - 1)
            self._row.append(-1)
        self._limits.append(row.prompt_tokens - 1)
        self.prompt_tokens += row.prompt_tokens
        self.rows += 1
        if len(keys) >= BATCH:
            self._flush()

    def hit_tokens(self) -> int:
        """Prompt tokens found in the cache so far."""
        self._flush()
        return self._hit_tokens

    def _flush(self) -> None:
        if not self._limits:
            return
        keys, tokens, row, limits = (
            np.array(column, dtype=np.int64)
            for column in (self._keys, self._tokens, self._row, self._limits)
        )
        found = np.minimum(self._table.add(keys, tokens), tokens)
        asks = row >= 0
        shared = np.zeros(len(limits), dtype=np.int64)
        np.add.at(shared, row[asks], found[asks])
        size = self._block_size
        self._hit_tokens += int((np.minimum(shared, limits) // size * size).sum())
        for column in (self._keys, self._tokens, self._row, self._limits):
            del column[:]
