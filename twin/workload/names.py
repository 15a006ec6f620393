"""Who is in a trace: tiers, tenants, sessions, and names that stand for more than one thing."""

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from twin.workload.formats.rows import TraceRow
from twin.workload.prefixes import BATCH, KeyTable


class Names:
    """Counts of names, and the first places where a name comes again that should not."""

    def __init__(self) -> None:
        self._tiers: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._sessions: dict[str, tuple[int, int, int]] = {}
        """Session -> (requests, prompt tokens of the last one, content that its prompts begin with)."""
        self._in_sessions = 0
        self._restarts = 0
        self._restart_example: tuple[str, int] = ("", 0)
        self._ids = KeyTable()
        self._new_ids = array("q")
        self._new_lines = array("q")
        self._repeated = 0
        self._repeated_line = 0

    def add(self, row: TraceRow) -> None:
        """The next request."""
        if row.tier is not None:
            self._tiers[row.tier] += 1
        if row.tenant is not None:
            self._tenants[row.tenant] += 1
        if row.session is not None:
            self._session(row, row.session)
        if row.id is not None:
            self._new_ids.append(hash(row.id))
            self._new_lines.append(row.line)
            if len(self._new_ids) >= BATCH:
                self._look_up()

    def _session(self, row: TraceRow, session: str) -> None:
        start = row.prompt[0][0] if row.prompt else -1
        requests, tokens, known_start = self._sessions.get(session, (0, 0, start))
        if requests and (start != known_start or row.prompt_tokens < tokens):
            self._restarts += 1
            if not self._restart_example[1]:
                self._restart_example = (session, row.line)
        self._sessions[session] = (requests + 1, row.prompt_tokens, start)
        self._in_sessions += 1

    def _look_up(self) -> None:
        keys = np.array(self._new_ids, dtype=np.int64)
        lines = np.array(self._new_lines, dtype=np.int64)
        again = self._ids.add(keys, np.ones_like(keys)) > 0
        self._repeated += int(again.sum())
        if again.any() and not self._repeated_line:
            self._repeated_line = int(lines[again][0])
        del self._new_ids[:]
        del self._new_lines[:]

    def result(self, most: int) -> dict[str, Any]:
        """Counts; of tiers and tenants the `most` frequent."""
        if self._new_ids:
            self._look_up()
        turns = [requests for requests, _, _ in self._sessions.values()]
        return {
            "sessions": {
                "count": len(turns),
                "requests": self._in_sessions,
                "turns_mean": self._in_sessions / len(turns) if turns else None,
                "turns_max": max(turns, default=None),
                "restarts": self._restarts,
            },
            "tiers": dict(self._tiers.most_common(most)),
            "tenants": dict(self._tenants.most_common(most)),
            "tenants_count": len(self._tenants),
            "repeated_ids": self._repeated,
        }

    def warnings(self) -> Iterator[str]:
        """What names stand for more than one thing. To be called after `result`."""
        if self._repeated:
            yield (
                f"{self._repeated:,} request ids were there before, the first in line {self._repeated_line}; requests "
                "are told apart by their position, so none is lost"
            )
        if self._restarts:
            session, line = self._restart_example
            yield (
                f"{self._restarts:,} requests do not continue their session, the first in line {line} ({session!r}: "
                "another beginning, or a shorter prompt than before): sessions of one name, or a history that was "
                "cut; each request counts with the content its own line gives"
            )
