"""Traffic made from distributions: when requests come, how long they are, and conversations of several turns."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from random import Random

from twin.clock import PS


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps with mean 1 / rate."""

    rate: float
    """Arrivals per second."""

    def instants(self, rng: Random) -> Iterator[int]:
        """Picoseconds from the start of the run, without end. Each gap is rounded once, so that sums are exact."""
        now = 0
        while True:
            now += round(rng.expovariate(self.rate) * PS)
            yield now


@dataclass(frozen=True, slots=True)
class Constant:
    """Evenly spaced arrivals, the first at the start of the run."""

    rate: float
    """Arrivals per second."""

    def instants(self, rng: Random) -> Iterator[int]:
        """Picoseconds from the start of the run, without end. Rounding does not add up: the k-th comes at k / rate."""
        gap = PS / Fraction(str(self.rate))
        number = 0
        while True:
            yield round(number * gap)
            number += 1


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number of tokens."""

    tokens: int

    @property
    def least(self) -> int:
        """The smallest number that can be drawn."""
        return self.tokens

    def draw(self, rng: Random) -> int:
        """Tokens of one request."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any number of tokens from low to high, both included, equally likely."""

    low: int
    high: int

    @property
    def least(self) -> int:
        """The smallest number that can be drawn."""
        return self.low

    def draw(self, rng: Random) -> int:
        """Tokens of one request."""
        return rng.randint(self.low, self.high)


Arrivals = Poisson | Constant
Length = Fixed | Uniform


class Shares:
    """Names drawn with given probabilities."""

    __slots__ = ("names", "_bounds")

    def __init__(self, shares: dict[str, float]) -> None:
        self.names = tuple(shares)
        self._bounds = tuple(accumulate(shares.values()))

    def draw(self, rng: Random) -> str:
        """One name. A single name costs no draw."""
        if len(self.names) == 1:
            return self.names[0]
        mark = rng.random() * self._bounds[-1]
        for name, bound in zip(self.names, self._bounds, strict=True):
            if mark < bound:
                return name
        return self.names[-1]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations: each turn's prompt is all that was said before plus the user's new words."""

    turns: int
    """Requests of one conversation."""
    system_prompt_tokens: int
    """Tokens at the start of every prompt, the same in all conversations of the stream; 0 = none."""
    think_ps: int
    """From the end of a reply to the next turn."""
