"""How regular arrivals are: the gaps between them at a rate of one, from perfectly even to clumped."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp, lgamma, log1p, sqrt
from random import Random

from twin.workload.quantiles import Points, inverse_cdf, moments


@dataclass(frozen=True, slots=True)
class Equal:
    """All gaps are 1; the first arrival is at the start."""

    cv = 0.0

    def drawn(self, rng: Random) -> Callable[[], float]:
        """A function that gives the next gap, mean 1."""
        return lambda: 1.0


@dataclass(frozen=True, slots=True)
class Exponential:
    """Gaps of a Poisson process: arrivals know nothing of each other. CV 1."""

    cv = 1.0

    def drawn(self, rng: Random) -> Callable[[], float]:
        """A function that gives the next gap, mean 1."""
        return partial(rng.expovariate, 1.0)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps of shape 1 / cv**2 and scale cv**2."""

    cv: float
    """Standard deviation over mean: below 1 more regular than Poisson, above 1 in clumps."""

    def drawn(self, rng: Random) -> Callable[[], float]:
        """A function that gives the next gap, mean 1."""
        return partial(rng.gammavariate, self.cv**-2, self.cv**2)


@dataclass(frozen=True, slots=True)
class Weibull:
    """Weibull gaps of the shape k for which (Γ(1 + 2/k) / Γ(1 + 1/k)**2 - 1) ** 0.5 = cv, scale 1 / Γ(1 + 1/k)."""

    cv: float
    """Standard deviation over mean. For the same cv > 1, fewer tiny gaps and more long ones than Gamma."""

    def drawn(self, rng: Random) -> Callable[[], float]:
        """A function that gives the next gap, mean 1."""
        low, high = 1e-3, 1e6
        for _ in range(200):
            shape = sqrt(low * high)
            if lgamma(1 + 2 / shape) - 2 * lgamma(1 + 1 / shape) > log1p(self.cv**2):
                low = shape
            else:
                high = shape
        shape = sqrt(low * high)
        return partial(rng.weibullvariate, exp(-lgamma(1 + 1 / shape)), shape)


@dataclass(frozen=True, slots=True)
class Table:
    """Gaps as measured: straight lines between quantiles, divided by their mean."""

    points: Points
    """(probability, gap in any unit) from probability 0 to 1, both ascending."""

    @property
    def cv(self) -> float:
        """Standard deviation over mean."""
        return moments(self.points)[1]

    def drawn(self, rng: Random) -> Callable[[], float]:
        """A function that gives the next gap, mean 1."""
        mean = moments(self.points)[0]
        at = inverse_cdf(tuple((p, gap / mean) for p, gap in self.points))
        return lambda: at(rng.random())


Gaps = Equal | Exponential | Gamma | Weibull | Table
