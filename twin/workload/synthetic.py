"""Traffic made from distributions: open loop, closed loop, conversations and agents, texts that begin alike."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from operator import attrgetter
from random import Random
from typing import Any

from twin.clock import PS
from twin.compiled import remade
from twin.workload.arrivals import Batches, Renewal
from twin.workload.lengths import Lengths, Pairs
from twin.workload.sessions import Sessions, Time, Turn, planner
from twin.workload.shared_text import Prefixes, Repeated, Reuse, opening
from twin.workload.source import Arrival, Client, Clients, Ended, Maker, Prompt

REFUSED_PAUSE_PS = PS // 1000
"""A closed-loop client that was refused waits at least this long, so that time goes on."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: each user has one request (conversation) at a time and begins the next after its end."""

    users: int
    """At most so many requests are in flight."""
    think: Time
    """From the end of a request (conversation), whatever its outcome, to the same user's next."""
    ramp_ps: int
    """The users appear evenly over this time; 0 = all at the start."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


@dataclass(frozen=True)
class SyntheticStream:
    """Requests drawn from distributions."""

    clients: Clients
    arrivals: Renewal | Batches | Closed
    """When requests come, or, with sessions, when conversations begin."""
    lengths: Lengths | Pairs
    """Of prompt and reply, or, with sessions, of what the user adds in each turn and of the reply."""
    requests: int | None
    """Requests in all, later turns included; None = no such limit."""
    duration_ps: int | None
    """Requests (conversations) come before this instant; None = no such limit."""
    sessions: Sessions | None = None
    """None = every request stands alone."""
    prefixes: Prefixes | None = None
    """None = no text is shared but the system prompt of sessions."""
    reuse: Reuse | None = None
    """None = no prompt repeats another. Neither sessions nor prefixes go with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def fewest_prompt_tokens(self) -> int:
        """No prompt is shorter."""
        system = self.sessions.system_prompt_tokens if self.sessions else 0
        shared = self.prefixes.tokens if self.prefixes else 0
        return system + shared + self.lengths.least


@dataclass(frozen=True)
class MixedStream:
    """Several open-loop streams without sessions that count as one."""

    clients: Clients
    """Tiers and tenants of all parts together."""
    parts: tuple[SyntheticStream, ...]
    requests: int | None
    """Requests of all parts together; None = no such limit."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def fewest_prompt_tokens(self) -> int:
        """No prompt is shorter."""
        return min(part.fewest_prompt_tokens for part in self.parts)


@dataclass(slots=True)
class _Conversation:
    number: int
    turn: int
    plan: list[Turn]
    client: Client
    prompt: Prompt
    prompt_tokens: int
    reply: int


class SyntheticSource:
    """The requests of a synthetic stream: some by themselves, others as replies end."""

    def __init__(
        self, spec: SyntheticStream, stream: int, content: Iterator[int], seed: int, part: str = ""
    ) -> None:
        """`content` gives ids that no other text of the run has; `part` tells the parts of a mixed stream apart."""

        def chance(name: str) -> Random:
            return Random(f"{seed}/{name}/{stream}{part}")

        self._spec = spec
        self._stream = stream
        self._make = Maker(spec.clients, stream, content, chance)
        self._chance = chance
        self._left = spec.requests
        self._number = 0
        self._lengths = spec.lengths.drawn(chance("lengths/prompt"), chance("lengths/output"))
        self._live: dict[str, _Conversation] = {}
        system = spec.sessions.system_prompt_tokens if spec.sessions else 0
        self._opening = opening(system, spec.prefixes, self._make, chance)
        self._repeated = None if spec.reuse is None else Repeated(spec.reuse, chance)
        if spec.sessions is not None:
            self._plan = planner(spec.sessions, self._lengths, chance)
        if isinstance(spec.arrivals, Closed):
            self._user_think = spec.arrivals.think.drawn(chance("users"))

    def expected(self) -> int | None:
        """About how many requests there will be; None if only time limits them."""
        return self._spec.requests

    def arrivals(self) -> Iterator[Arrival]:
        """Requests that nothing need precede, in order of their instants."""
        for due_ps in self._instants():
            arrival = self._begin(due_ps)
            if arrival is None:
                return
            yield arrival

    def _instants(self) -> Iterator[int]:
        how = self._spec.arrivals
        if isinstance(how, Closed):
            return (user * how.ramp_ps // how.users for user in range(how.users))
        return how.instants(self._chance("arrivals"), self._chance("rate"))

    def _begin(self, due_ps: int) -> Arrival | None:
        """The next request, or the first of the next conversation; None if the stream is at its end."""
        spec = self._spec
        if self._left == 0 or (spec.duration_ps is not None and due_ps >= spec.duration_ps):
            return None
        number = self._number
        self._number = number + 1
        if spec.sessions is not None:
            return self._begin_session(number, due_ps)
        if self._left is not None:
            self._left -= 1
        make = self._make
        new_tokens, output_tokens = self._lengths()
        client = make.client()
        prompt: Prompt
        prompt_tokens = new_tokens
        if self._repeated is not None:
            prompt = self._repeated.prompt(new_tokens, make.content())
        elif self._opening is None:
            prompt = ((make.content(), new_tokens),)
        else:
            opening, tokens = self._opening()
            prompt = (*opening, (make.content(), new_tokens))
            prompt_tokens += tokens
        request = make.request(due_ps, prompt, prompt_tokens, output_tokens, client)
        return Arrival(due_ps, self._stream, number, 0, request, None)

    def _begin_session(self, number: int, due_ps: int) -> Arrival:
        plan, make = self._plan(), self._make
        if self._left is not None:
            del plan[self._left :]
            self._left -= len(plan)
        client = make.client()
        first = plan[0]
        opening, tokens = ((), 0) if self._opening is None else self._opening()
        prompt = (*opening, (make.content(), first.new_tokens))
        tokens += first.new_tokens
        session = f"{self._stream}-{number}"
        request = make.request(due_ps, prompt, tokens, first.output_tokens, client, session)
        self._live[session] = _Conversation(number, 0, plan, client, prompt, tokens, request.reply)
        return Arrival(due_ps, self._stream, number, 0, request, None)

    def on_finish(self, record: Ended) -> Arrival | None:
        """What follows a request that has ended: the next turn of its conversation, or what its user asks next.

        A request that was not completed ends its conversation; turns that were never asked are not counted anywhere.
        """
        if record.session is not None:
            turn = self._next_turn(record, record.session)
            if turn is not None:
                return turn
        if not isinstance(self._spec.arrivals, Closed):
            return None
        assert record.finish_ps is not None
        pause_ps = self._user_think()
        if record.outcome == "refused":
            pause_ps = max(pause_ps, REFUSED_PAUSE_PS)
        return self._begin(record.finish_ps + pause_ps)

    def _next_turn(self, record: Ended, session: str) -> Arrival | None:
        talk = self._live[session]
        talk.turn += 1
        if record.outcome != "completed" or talk.turn == len(talk.plan):
            del self._live[session]
            return None
        assert record.finish_ps is not None
        wait_ps, new_tokens, output_tokens = talk.plan[talk.turn]
        due_ps = record.finish_ps + wait_ps
        talk.prompt += (
            (talk.reply, record.output_tokens),
            (self._make.content(), new_tokens),
        )
        talk.prompt_tokens += record.output_tokens + new_tokens
        request = self._make.request(
            due_ps, talk.prompt, talk.prompt_tokens, output_tokens, talk.client, session
        )
        talk.reply = request.reply
        return Arrival(due_ps, self._stream, talk.number, talk.turn, request, None)


class MixedSource:
    """The requests of a mixed stream, in order of their instants."""

    def __init__(self, spec: MixedStream, stream: int, content: Iterator[int], seed: int) -> None:
        self._requests = spec.requests
        self._parts = [
            SyntheticSource(part, stream, content, seed, f".{i}")
            for i, part in enumerate(spec.parts)
        ]

    def expected(self) -> int | None:
        """About how many requests there will be; None if only time limits them."""
        return self._requests

    def arrivals(self) -> Iterator[Arrival]:
        """Requests in order of their instants."""
        merged = merge(*(part.arrivals() for part in self._parts), key=attrgetter("due_ps"))
        for number, arrival in enumerate(islice(merged, self._requests)):
            yield arrival._replace(number=number)

    def on_finish(self, record: Ended) -> Arrival | None:
        """Requests of a mixed stream stand alone: nothing follows."""
        return None
