"""Traffic for a server that had served something before: a trace first, and when that is over, what follows."""

from collections.abc import Sequence
from dataclasses import dataclass

from real.compare_given import FRESH
from twin.workload.formats.rows import TraceRow
from twin.workload.load import Load
from twin.workload.request import Request
from twin.workload.source import Arrival, Ended
from twin.workload.streams import Traffic


@dataclass(slots=True)
class _End:
    """The end of a request on the clock of the traffic that follows."""

    stream: int
    session: str | None
    outcome: str
    finish_ps: int | None
    output_tokens: int


class Warmed:
    """Plays `before` at the instants of the trace, and `later` from `offset_ps` on, as twin.simulation takes traffic.

    Content ids are the same in both.
    """

    load: Load | None = None

    def __init__(self, before: Sequence[TraceRow], offset_ps: int, later: Traffic) -> None:
        self._before, self._offset_ps, self._later = before, offset_ps, later
        self._number = 0

    def expected(self) -> int | None:
        """About how many requests there will be in all."""
        more = self._later.expected()
        return None if more is None else len(self._before) + more

    def next_ps(self) -> int | None:
        """When the next request is due; None if none is known now."""
        if self._number < len(self._before):
            return self._before[self._number].at_ps
        due_ps = self._later.next_ps()
        return None if due_ps is None else due_ps + self._offset_ps

    def next(self) -> Arrival | None:
        """The request that is due next, which stays; None if none is known now."""
        if self._number < len(self._before):
            return self._served(self._number)
        ahead = self._later.next()
        return None if ahead is None else ahead._replace(due_ps=ahead.due_ps + self._offset_ps)

    def pop(self) -> Arrival:
        """Take the next request. Those of the trace have the first indices."""
        number = self._number
        if number < len(self._before):
            self._number += 1
            return self._served(number)
        arrival = self._later.pop()
        arrival.request.index += len(self._before)
        arrival.request.arrival_ps += self._offset_ps
        return arrival._replace(due_ps=arrival.due_ps + self._offset_ps)

    def on_finish(self, record: Ended) -> bool:
        """Tell what follows of a request that has ended; nothing follows one of the trace."""
        if record.index < len(self._before):  # type: ignore[attr-defined]  # a record has one
            return False
        finish_ps = record.finish_ps
        ended = _End(
            record.stream,
            record.session,
            record.outcome,
            None if finish_ps is None else finish_ps - self._offset_ps,
            record.output_tokens,
        )
        return self._later.on_finish(ended)

    def _served(self, number: int) -> Arrival:
        row, fresh = self._before[number], 2 * FRESH + 2 * number
        prompt = row.prompt or ()
        rest = row.prompt_tokens - sum(tokens for _, tokens in prompt)
        request = Request(
            number,
            row.at_ps,
            (*prompt, (fresh, rest)) if rest else prompt,
            row.prompt_tokens,
            row.output_tokens,
            row.max_tokens,
            fresh + 1 if row.reply is None else row.reply,
            row.tier or "ONLINE",
            row.tenant or "default",
            row.session,
            0,
            row.ttft_timeout_ps,
            row.total_timeout_ps,
        )
        return Arrival(row.at_ps, 0, number, 0, request, row.line)
