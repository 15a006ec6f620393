"""The records of a run in little memory: a packed row a request, read as columns or as records."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from twin.metrics.columns import EXPLICIT, NONE, Columns, Names
from twin.metrics.records import OUTCOMES, RequestRecord
from twin.metrics.token_times import StepGaps, Timeline

FIELDS = (
    ("arrival_ps", "q"), ("first_scheduled_ps", "q"), ("first_token_ps", "q"), ("finish_ps", "q"),
    ("estimated_wait_ps", "q"), ("stall_ps", "q"), ("recomputed_tokens", "q"), ("itl_start", "q"),
    ("itl_count", "i"), ("itl_timeline", "i"), ("index", "i"), ("tier", "i"), ("tenant", "i"), ("session", "i"),
    ("stream", "i"), ("replica", "i"), ("prompt_tokens", "i"), ("output_tokens", "i"), ("outcome", "i"),
    ("reason", "i"), ("preemptions", "i"), ("prefix_hit_tokens", "i"), ("prefix_query_tokens", "i"), ("attempts", "i"),
)  # fmt: skip
"""Columns and their kinds, as `struct` names them. Names stand as numbers, NONE for None. Gaps are `itl_count` of
those between the steps from number `itl_start` on of a timeline, or of a list of gaps."""

ROW: Final = Struct("".join(kind for _, kind in FIELDS))  # without gaps: the long ones come first
ROW_TYPE: Final = np.dtype([(name, f"={kind}") for name, kind in FIELDS])

_OUTCOMES: Final = {outcome: number for number, outcome in enumerate(OUTCOMES)}


class _Texts:
    """Texts that hardly repeat, one behind the other."""

    __slots__ = ("_bytes", "_ends")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("q")

    def add(self, text: str) -> int:
        """Keep a text; its number."""
        self._bytes += text.encode()
        self._ends.append(len(self._bytes))
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> str:
        start = self._ends[number - 1] if number else 0
        return self._bytes[start : self._ends[number]].decode()


class RecordTable(Sequence[RequestRecord]):
    """Records by index, whatever the order they were added in. Each one given back is a new object."""

    def __init__(self, records: Iterable[RequestRecord] = ()) -> None:
        self._tiers, self._tenants, self._reasons = Names[str](), Names[str](), Names[str]()
        self._clear()
        for record in records:
            self.add(record)

    def _clear(self) -> None:
        self._rows = bytearray()
        self._gaps = array("q")
        self._timelines: Names[Timeline] = Names()
        self._sessions = _Texts()
        self._order: npt.NDArray[np.int64] | None = None

    def add(self, record: RequestRecord) -> None:
        """Keep a record. Raises BufferError while columns of the table are in use."""
        gaps = record.itl_ps
        if isinstance(gaps, StepGaps):
            timeline, start = self._timelines[gaps.timeline], gaps.first
            count = gaps.last - start
        else:
            timeline, start, count = EXPLICIT, len(self._gaps), len(gaps)
            self._gaps.extend(gaps)
        session, replica = record.session, record.replica
        scheduled_ps, token_ps = record.first_scheduled_ps, record.first_token_ps
        finish_ps, estimate_ps = record.finish_ps, record.estimated_wait_ps
        self._rows += ROW.pack(
            record.arrival_ps,
            NONE if scheduled_ps is None else scheduled_ps,
            NONE if token_ps is None else token_ps,
            NONE if finish_ps is None else finish_ps,
            NONE if estimate_ps is None else estimate_ps,
            record.stall_ps,
            record.recomputed_tokens,
            start,
            count,
            timeline,
            record.index,
            self._tiers[record.tier],
            self._tenants[record.tenant],
            NONE if session is None else self._sessions.add(session),
            record.stream,
            NONE if replica is None else replica,
            record.prompt_tokens,
            record.output_tokens,
            _OUTCOMES[record.outcome],
            self._reasons[record.reason],
            record.preemptions,
            record.prefix_hit_tokens,
            record.prefix_query_tokens,
            record.attempts,
        )

    def columns(self) -> Columns:
        """All records as columns, in the order they were added."""
        rows = np.frombuffer(self._rows, dtype=ROW_TYPE)
        return Columns(rows, self._gaps, self._tiers, self._reasons, self._timelines)

    def take(self) -> Columns:
        """All records as columns; the table is empty from now on."""
        taken = self.columns()
        self._clear()
        return taken

    # --- as a sequence --------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows) // ROW.size

    @overload
    def __getitem__(self, index: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestRecord]: ...
    def __getitem__(self, index: int | slice) -> RequestRecord | list[RequestRecord]:
        found = self.order()[index]
        if isinstance(index, slice):
            return [self._record(row) for row in found.tolist()]
        return self._record(int(found))

    def __iter__(self) -> Iterator[RequestRecord]:
        return map(self._record, self.order().tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordTable | list):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} records>"

    def order(self) -> npt.NDArray[np.int64]:
        """Position of each record in the columns, by index."""
        if self._order is None or len(self._order) != len(self):
            rows = np.frombuffer(self._rows, dtype=ROW_TYPE)
            self._order = np.argsort(rows["index"], kind="stable")
        return self._order

    def _record(self, row: int) -> RequestRecord:
        (
            arrival_ps, scheduled_ps, token_ps, finish_ps, estimate_ps, stall_ps, recomputed, start, count, timeline,
            index, tier, tenant, session, stream, replica, prompt, output, outcome, reason, preemptions, hits, queried,
            attempts,
        ) = ROW.unpack_from(self._rows, row * ROW.size)  # fmt: skip
        gaps: Sequence[int] = self._gaps[start : start + count]
        if timeline != EXPLICIT:
            gaps = StepGaps(self._timelines.names[timeline], start, start + count)
        return RequestRecord(
            index,
            self._tiers.names[tier],
            self._tenants.names[tenant],
            None if session == NONE else self._sessions[session],
            stream,
            _known(replica),
            arrival_ps,
            _known(scheduled_ps),
            _known(token_ps),
            _known(finish_ps),
            prompt,
            output,
            OUTCOMES[outcome],
            self._reasons.names[reason],
            preemptions,
            recomputed,
            hits,
            queried,
            gaps,
            attempts,
            stall_ps,
            _known(estimate_ps),
        )


def _known(number: int) -> int | None:
    return None if number == NONE else number
