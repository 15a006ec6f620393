"""What all sources of requests share: who asks, how a request is made, and its place among the others."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple, Protocol

from twin.compiled import remade
from twin.workload.request import Request

Client = tuple[str, str]
"""(tier, tenant)."""

Chance = Callable[[str], Random]
"""Name of a source of chance of a stream -> its generator, which nothing else uses."""

Prompt = tuple[tuple[int, int], ...]
"""(content id, tokens) from the first token on."""


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

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


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


class Shares:
    """Names drawn with given probabilities."""

    __slots__ = ("_bounds", "names")

    def __init__(self, shares: dict[str, float]) -> None:
        kept = {name: share for name, share in shares.items() if share > 0}
        self.names = tuple(kept)
        self._bounds = tuple(accumulate(kept.values()))

    def draw(self, rng: Random) -> str:
        """One name. A single name costs no draw."""
        if len(self.names) == 1:
            return self.names[0]
        place = bisect_right(self._bounds, rng.random() * self._bounds[-1])
        return self.names[min(place, len(self.names) - 1)]


class Maker:
    """Builds the requests of one stream."""

    def __init__(
        self, clients: Clients, stream: int, content: Iterator[int], chance: Chance
    ) -> None:
        """`content` gives ids that nobody else has."""
        self._stream = stream
        self._max_tokens = clients.max_tokens
        self._ttft_timeout_ps = clients.ttft_timeout_ps
        self._total_timeout_ps = clients.total_timeout_ps
        self.content = content.__next__
        """A content id that no other text of the run has, when called."""
        self._tiers = Shares(clients.tiers)
        self._tenants = Shares(clients.tenants)
        self._tier_rng = chance("tiers")
        self._tenant_rng = chance("tenants")
        only = (*self._tiers.names, *self._tenants.names)
        self._only: Client | None = (only[0], only[1]) if len(only) == 2 else None

    def client(self) -> Client:
        """(tier, tenant) of the next client."""
        if self._only is not None:
            return self._only
        return self._tiers.draw(self._tier_rng), self._tenants.draw(self._tenant_rng)

    def request(
        self,
        due_ps: int,
        prompt: Prompt,
        prompt_tokens: int,
        output_tokens: int,
        client: Client,
        session: str | None = None,
    ) -> Request:
        """A request without its index, which it gets when its turn comes among all streams."""
        tier, tenant = client
        # By position: a million of these are made in a second.
        return Request(
            -1,
            due_ps,
            prompt,
            prompt_tokens,
            output_tokens,
            self._max_tokens,
            self.content(),
            tier,
            tenant,
            session,
            self._stream,
            self._ttft_timeout_ps,
            self._total_timeout_ps,
        )
