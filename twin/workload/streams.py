"""All traffic of a run as one: which request is due next, whichever stream it comes from.

A stream is asked for its requests one at a time, so that a long trace or an endless process costs no memory. The next
turn of a conversation is due a think time after the reply to the one before, which only the run can tell: streams
are told of every request that ended (`on_finish`) and may answer with one more.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, merge
from itertools import count

from twin.workload.load import Load
from twin.workload.source import Arrival, Ended
from twin.workload.synthetic import MixedSource, MixedStream, SyntheticSource, SyntheticStream
from twin.workload.trace import TraceSource, TraceStream

Stream = SyntheticStream | MixedStream | TraceStream


Source = TraceSource | SyntheticSource | MixedSource


def open_streams(streams: Sequence[Stream], seed: int) -> list[Source]:
    """A source for each stream. No stream's chance depends on another stream."""
    return [_open(spec, i, len(streams), seed) for i, spec in enumerate(streams)]


def _open(spec: Stream, stream: int, num_streams: int, seed: int) -> Source:
    content = count(stream, num_streams)
    if isinstance(spec, SyntheticStream):
        return SyntheticSource(spec, stream, content, seed)
    if isinstance(spec, MixedStream):
        return MixedSource(spec, stream, content, seed)
    return TraceSource(spec, stream, num_streams, seed)


class Traffic:
    """The streams of a run merged: requests in the order (instant, stream, number, turn), numbered from 0."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        arrivals = [source.arrivals() for source in sources]
        self._first_turns = arrivals[0] if len(arrivals) == 1 else merge(*arrivals)
        self._ahead = next(self._first_turns, None)
        self._later_turns: list[Arrival] = []
        self._indices = count()
        recorded = any(isinstance(source, TraceSource) for source in sources)
        self.load = Load() if recorded else None
        """What was asked for when, all streams together; kept if one of them is a trace."""

    def expected(self) -> int | None:
        """About how many requests there will be in all, as far as that is known."""
        parts = [source.expected() for source in self._sources]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def next_ps(self) -> int | None:
        """When the next request is due; None if none is known now (a reply may still bring one)."""
        if self._later_turns and (self._ahead is None or self._later_turns[0] < self._ahead):
            return self._later_turns[0].due_ps
        return None if self._ahead is None else self._ahead.due_ps

    def next(self) -> Arrival | None:
        """The request that is due next, which stays; None if none is known now."""
        if self._later_turns and (self._ahead is None or self._later_turns[0] < self._ahead):
            return self._later_turns[0]
        return self._ahead

    def pop(self) -> Arrival:
        """Take the next request, now with its index. Raises IndexError if there is none."""
        arrival = self._ahead
        if self._later_turns and (arrival is None or self._later_turns[0] < arrival):
            arrival = heappop(self._later_turns)
        elif arrival is not None:
            self._ahead = next(self._first_turns, None)
        else:
            raise IndexError("no request is due")
        request = arrival.request
        request.index = next(self._indices)
        if self.load is not None:
            self.load.add(arrival.due_ps, request.prompt_tokens, request.output_tokens)
        return arrival

    def on_finish(self, record: Ended) -> bool:
        """Tell the stream of a request that it has ended; whether a request follows from it, due from now on."""
        arrival = self._sources[record.stream].on_finish(record)
        if arrival is None:
            return False
        heappush(self._later_turns, arrival)
        return True
