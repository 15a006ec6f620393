"""All traffic of a run as one: which request is due next, whichever stream it comes from.

A stream is asked for its requests one at a time, so that a long trace or an endless process costs no memory. The next
turn of a conversation is due a think time after the reply to the one before, which only the run can tell: streams
are told of every request that ended (`on_finish`) and may answer with one more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush, merge
from itertools import count, islice
from random import Random
from typing import NamedTuple, Protocol

from twin.workload.formats import count_lines, read_azure
from twin.workload.request import Request
from twin.workload.synthetic import Arrivals, Length, Sessions, Shares


@dataclass(frozen=True)
class Clients:
    """Who is behind a stream and what they ask for beside the text."""

    tiers: dict[str, float]
    """Tier -> share of the requests; the shares add up to 1."""
    tenants: dict[str, float]
    """Tenant -> share of the requests."""
    max_tokens: int | None
    """The limit every request declares; None = none declared."""
    ttft_timeout_ps: int | None
    """A client leaves without a first token this long after arrival; None = never."""
    total_timeout_ps: int | None
    """A client leaves without a complete reply this long after arrival; None = never."""


@dataclass(frozen=True)
class SyntheticStream:
    """Requests drawn from distributions."""

    clients: Clients
    arrivals: Arrivals
    """When requests come, or, with sessions, when conversations begin."""
    prompt_tokens: Length
    """Length of a prompt, or, with sessions, of what the user adds in each turn."""
    output_tokens: Length
    requests: int | None
    """Requests in all, later turns included; None = no such limit."""
    duration_ps: int | None
    """Requests (conversations) come before this instant; None = no such limit."""
    sessions: Sessions | None
    """None = every request stands alone."""


@dataclass(frozen=True)
class TraceStream:
    """Requests as recorded in a file."""

    clients: Clients
    path: str
    speedup: Fraction
    """Instants are divided by it: 2 doubles the rate."""
    requests: int | None
    """Rows to take from the start; None = all."""


Stream = SyntheticStream | TraceStream


class Ended(Protocol):
    """What a stream needs to know of a request that has left the system (a request record)."""

    stream: int
    session: str | None
    outcome: str
    finish_ps: int | None
    output_tokens: int


class Arrival(NamedTuple):
    """A request and its place among all others: (due_ps, stream, number, turn) is unique and orders them."""

    due_ps: int
    stream: int
    number: int
    """The how-manieth request or conversation of the stream, from 0."""
    turn: int
    request: Request
    line: int | None
    """Line of the trace file."""


class _Maker:
    """Builds the requests of one stream, each source of chance from a generator of its own."""

    def __init__(self, clients: Clients, stream: int, num_streams: int, seed: int) -> None:
        self._clients = clients
        self._stream = stream
        self._content = count(stream, num_streams)
        self._tiers = Shares(clients.tiers)
        self._tenants = Shares(clients.tenants)
        self._tier_rng = Random(f"{seed}/tiers/{stream}")
        self._tenant_rng = Random(f"{seed}/tenants/{stream}")

    def content(self) -> int:
        """A content id that no other text of the run has."""
        return next(self._content)

    def client(self) -> tuple[str, str]:
        """(tier, tenant) of the next client."""
        return self._tiers.draw(self._tier_rng), self._tenants.draw(self._tenant_rng)

    def request(
        self,
        due_ps: int,
        prompt: tuple[tuple[int, int], ...],
        output_tokens: int,
        client: tuple[str, str],
        session: str | None = None,
    ) -> Request:
        """A request without its index, which it gets when its turn comes among all streams."""
        clients = self._clients
        return Request(
            index=-1,
            arrival_ps=due_ps,
            prompt=prompt,
            prompt_tokens=sum(tokens for _, tokens in prompt),
            output_tokens=output_tokens,
            max_tokens=clients.max_tokens,
            reply=self.content(),
            tier=client[0],
            tenant=client[1],
            session=session,
            stream=self._stream,
            ttft_timeout_ps=clients.ttft_timeout_ps,
            total_timeout_ps=clients.total_timeout_ps,
        )


class TraceSource:
    """The requests of a trace file."""

    def __init__(self, spec: TraceStream, stream: int, num_streams: int, seed: int) -> None:
        self._spec = spec
        self._stream = stream
        self._make = _Maker(spec.clients, stream, num_streams, seed)

    def expected(self) -> int | None:
        """About how many requests there will be; None if that is not known."""
        rows = count_lines(self._spec.path)
        return rows if self._spec.requests is None else min(rows, self._spec.requests)

    def arrivals(self) -> Iterator[Arrival]:
        """Requests in order of their instants. Raises InputError at a row that cannot be read."""
        make = self._make
        speedup, divisor = self._spec.speedup.as_integer_ratio()
        for number, row in enumerate(islice(read_azure(self._spec.path), self._spec.requests)):
            due_ps = (2 * row.at_ps * divisor + speedup) // (2 * speedup)
            prompt = ((make.content(), row.prompt_tokens),)
            request = make.request(due_ps, prompt, row.output_tokens, make.client())
            yield Arrival(due_ps, self._stream, number, 0, request, row.line)

    def on_finish(self, record: Ended) -> Arrival | None:
        """A recorded request stands alone: nothing follows."""
        return None


@dataclass(slots=True)
class _Conversation:
    number: int
    turn: int
    lengths: list[tuple[int, int]]
    """(user tokens, output tokens) of every turn, drawn at its start, so that no reply's time changes them."""
    client: tuple[str, str]
    prompt: tuple[tuple[int, int], ...]
    reply: int


class SyntheticSource:
    """The requests of a synthetic stream: first turns by themselves, later ones as replies end."""

    def __init__(self, spec: SyntheticStream, stream: int, num_streams: int, seed: int) -> None:
        self._spec = spec
        self._stream = stream
        self._make = _Maker(spec.clients, stream, num_streams, seed)
        self._arrival_rng = Random(f"{seed}/arrivals/{stream}")
        self._prompt_rng = Random(f"{seed}/lengths/prompt/{stream}")
        self._output_rng = Random(f"{seed}/lengths/output/{stream}")
        self._live: dict[str, _Conversation] = {}
        self._system = self._make.content()

    def expected(self) -> int | None:
        """About how many requests there will be; None if only time limits them."""
        return self._spec.requests

    def arrivals(self) -> Iterator[Arrival]:
        """Requests that nothing need precede, in order of their instants."""
        spec = self._spec
        turns = 1 if spec.sessions is None else spec.sessions.turns
        left = spec.requests
        for number, due_ps in enumerate(spec.arrivals.instants(self._arrival_rng)):
            if left is not None:
                turns = min(turns, left)
                left -= turns
            if turns == 0 or (spec.duration_ps is not None and due_ps >= spec.duration_ps):
                return
            yield self._begin(number, due_ps, turns)

    def _begin(self, number: int, due_ps: int, turns: int) -> Arrival:
        spec, make = self._spec, self._make
        lengths = [
            (spec.prompt_tokens.draw(self._prompt_rng), spec.output_tokens.draw(self._output_rng))
            for _ in range(turns)
        ]
        client = make.client()
        user = (make.content(), lengths[0][0])
        if spec.sessions is None:
            request = make.request(due_ps, (user,), lengths[0][1], client)
            return Arrival(due_ps, self._stream, number, 0, request, None)
        system_tokens = spec.sessions.system_prompt_tokens
        prompt = ((self._system, system_tokens), user) if system_tokens else (user,)
        session = f"{self._stream}-{number}"
        request = make.request(due_ps, prompt, lengths[0][1], client, session)
        self._live[session] = _Conversation(number, 0, lengths, client, prompt, request.reply)
        return Arrival(due_ps, self._stream, number, 0, request, None)

    def on_finish(self, record: Ended) -> Arrival | None:
        """The next turn of the conversation, if the reply is complete and there is one.

        A request that ended otherwise ends its conversation; turns that were never asked are not counted anywhere.
        """
        session = record.session
        if session is None or self._spec.sessions is None:
            return None
        talk = self._live[session]
        talk.turn += 1
        if record.outcome != "completed" or talk.turn == len(talk.lengths):
            del self._live[session]
            return None
        assert record.finish_ps is not None
        user_tokens, output_tokens = talk.lengths[talk.turn]
        due_ps = record.finish_ps + self._spec.sessions.think_ps
        talk.prompt += ((talk.reply, record.output_tokens), (self._make.content(), user_tokens))
        request = self._make.request(due_ps, talk.prompt, output_tokens, talk.client, session)
        talk.reply = request.reply
        return Arrival(due_ps, self._stream, talk.number, talk.turn, request, None)


Source = TraceSource | SyntheticSource


def open_streams(streams: Sequence[Stream], seed: int) -> list[Source]:
    """A source for each stream. No stream's chance depends on another stream."""
    num = len(streams)
    return [
        SyntheticSource(spec, i, num, seed)
        if isinstance(spec, SyntheticStream)
        else TraceSource(spec, i, num, seed)
        for i, spec in enumerate(streams)
    ]


class Traffic:
    """The streams of a run merged: requests in the order (instant, stream, number, turn), numbered from 0."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._first_turns = merge(*(source.arrivals() for source in sources))
        self._ahead = next(self._first_turns, None)
        self._later_turns: list[Arrival] = []
        self._indices = count()

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

    def pop(self) -> Arrival:
        """Take the next request, now with its index. Raises IndexError if there is none."""
        if self._later_turns and (self._ahead is None or self._later_turns[0] < self._ahead):
            arrival = heappop(self._later_turns)
        elif self._ahead is not None:
            arrival, self._ahead = self._ahead, next(self._first_turns, None)
        else:
            raise IndexError("no request is due")
        arrival.request.index = next(self._indices)
        return arrival

    def on_finish(self, record: Ended) -> None:
        """Tell the stream of a request that it has ended; what follows from it is due from now on."""
        arrival = self._sources[record.stream].on_finish(record)
        if arrival is not None:
            heappush(self._later_turns, arrival)
