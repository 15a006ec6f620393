"""How long requests are: tokens of prompts and replies, alone or as pairs.

Every distribution is asked by its quantile function, so that one random number makes one length and two lengths can be
made to go together (a Gaussian copula). Lengths are whole and at least 1.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import erf, exp, log, sqrt
from random import Random
from statistics import NormalDist

from twin.workload.quantiles import Points, inverse_cdf

Draw = Callable[[], int]
"""Gives the tokens of the next request."""

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_TINY = 2.0**-53
"""Stands for a random number of exactly 0."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number of tokens."""

    tokens: int

    @property
    def least(self) -> int:
        """The smallest number that can be drawn."""
        return self.tokens

    def quantile(self) -> Callable[[float], int]:
        """The function from a probability in (0, 1) to tokens."""
        return lambda u: self.tokens

    def drawn(self, rng: Random) -> Draw:
        """A function that gives the next length."""
        return lambda: self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any number of tokens from low to high, both included, equally likely."""

    low: int
    high: int

    @property
    def least(self) -> int:
        """The smallest number that can be drawn."""
        return self.low

    def quantile(self) -> Callable[[float], int]:
        """The function from a probability in (0, 1) to tokens."""
        low, count = self.low, self.high - self.low + 1
        return lambda u: low + int(u * count)

    def drawn(self, rng: Random) -> Draw:
        """A function that gives the next length."""
        low, count, draw = self.low, self.high - self.low + 1, rng.getrandbits
        bits = count.bit_length()

        def length() -> int:
            # What Random.randint draws, without the calls inside it.
            found = draw(bits)
            while found >= count:
                found = draw(bits)
            return low + found

        return length


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(mu + sigma z), z standard normal, rounded; values above `most` do not occur (the rest is scaled up)."""

    mu: float
    """Natural logarithm of the median in tokens."""
    sigma: float
    most: int | None = None
    """Longest length; None = no limit."""

    @property
    def least(self) -> int:
        """The smallest number that can be drawn."""
        return 1

    def quantile(self) -> Callable[[float], int]:
        """The function from a probability in (0, 1) to tokens."""
        mu, sigma, z = self.mu, self.sigma, _NORMAL.inv_cdf
        top = 1.0 if self.most is None else _phi((log(self.most + 0.5) - mu) / sigma)
        limit = self.most
        if limit is None:
            return lambda u: int(exp(mu + sigma * z(u or _TINY)) + 0.5) or 1
        return lambda u: min(int(exp(mu + sigma * z(u * top or _TINY)) + 0.5) or 1, limit)

    def drawn(self, rng: Random) -> Draw:
        """A function that gives the next length."""
        at, random = self.quantile(), rng.random
        return lambda: at(random())


def lognormal(
    median: float | None = None,
    mean: float | None = None,
    p95: float | None = None,
    sigma: float | None = None,
    most: int | None = None,
) -> Lognormal:
    """The lognormal with this median or mean, and this 95th percentile or sigma.

    mean = median exp(sigma**2 / 2) and p95 = median exp(1.645 sigma), before the limit `most`. From a mean and a p95
    there are up to two solutions; the one with the smaller sigma is taken. Raises ValueError if there is none.
    """
    if median is not None:
        mu = log(median)
        if sigma is None:
            assert p95 is not None
            if p95 <= median:
                raise ValueError(f"p95 must be above the median ({median:g}), got {p95:g}")
            sigma = (log(p95) - mu) / _Z95
        return Lognormal(mu, sigma, most)
    assert mean is not None
    if sigma is None:
        assert p95 is not None
        spread = log(p95 / mean)
        if not 0 < spread <= _Z95 * _Z95 / 2:
            highest = mean * exp(_Z95 * _Z95 / 2)
            raise ValueError(
                f"no lognormal has the mean {mean:g} and the p95 {p95:g}; the p95 must be above the mean and at most "
                f"{highest:.6g}: write the median in place of the mean"
            )
        sigma = _Z95 - sqrt(_Z95 * _Z95 - 2 * spread)
    return Lognormal(log(mean) - sigma * sigma / 2, sigma, most)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Straight lines between quantiles, rounded to whole tokens (halves up)."""

    points: Points
    """(probability, tokens) from probability 0 to 1, both ascending. With values at halves, the points (F(k), k + 0.5)
    of a cumulative distribution F over whole numbers give exactly that distribution."""
    fewest: int = 1
    """What becomes of values that round to 0: 1 for tokens, 0 for numbers that may be 0."""

    @property
    def least(self) -> int:
        """The smallest number that can be drawn."""
        return int(self.points[0][1] + 0.5) or self.fewest

    def quantile(self) -> Callable[[float], int]:
        """The function from a probability in (0, 1) to tokens."""
        at, fewest = inverse_cdf(self.points), self.fewest
        return lambda u: int(at(u) + 0.5) or fewest

    def drawn(self, rng: Random) -> Draw:
        """A function that gives the next length."""
        at, random, fewest = inverse_cdf(self.points), rng.random, self.fewest
        return lambda: int(at(random()) + 0.5) or fewest


Length = Fixed | Uniform | Lognormal | Quantiles


def _phi(z: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * (1 + erf(z / sqrt(2)))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and reply of a request from two distributions."""

    prompt: Length
    output: Length
    correlation: float = 0.0
    """Of the two normal variables behind them (Gaussian copula); Spearman's rank correlation is
    6 / pi * asin(correlation / 2), up to ties. 0 = independent."""

    @property
    def least(self) -> int:
        """The shortest prompt that can be drawn."""
        return self.prompt.least

    def drawn(self, prompt_rng: Random, output_rng: Random) -> Callable[[], tuple[int, int]]:
        """A function that gives (prompt tokens, output tokens) of the next request."""
        prompt, output = self.prompt.drawn(prompt_rng), self.output.drawn(output_rng)
        if not self.correlation:
            return lambda: (prompt(), output())
        prompt_at, output_at = self.prompt.quantile(), self.output.quantile()
        rho, rest = self.correlation, sqrt(1 - self.correlation**2)
        z = _NORMAL.inv_cdf

        def draw() -> tuple[int, int]:
            u = prompt_rng.random() or _TINY
            v = _phi(rho * z(u) + rest * z(output_rng.random() or _TINY))
            return prompt_at(u), output_at(min(v, 1 - _TINY))

        return draw


@dataclass(frozen=True, slots=True)
class Pairs:
    """(prompt, output) pairs of a trace, drawn with replacement, each row equally likely."""

    source: str
    """The file they come from."""
    prompts: "array[int]"
    outputs: "array[int]"

    @property
    def least(self) -> int:
        """The shortest prompt that can be drawn."""
        return min(self.prompts)

    def drawn(self, prompt_rng: Random, output_rng: Random) -> Callable[[], tuple[int, int]]:
        """A function that gives (prompt tokens, output tokens) of the next request."""
        prompts, outputs, count, random = (
            self.prompts,
            self.outputs,
            len(self.prompts),
            prompt_rng.random,
        )

        def draw() -> tuple[int, int]:
            row = int(random() * count)
            return prompts[row], outputs[row]

        return draw
