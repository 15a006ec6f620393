"""The distributions of a scenario file as data: rates that change, times, lengths, numbers.

Like all models of the file, they mirror it and nothing else.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from twin.workload.lengths import lognormal

MIN_RATE, MAX_RATE = 1e-6, 1e6
"""Requests per second."""

Count = Annotated[int, Field(ge=1, le=10**9)]
Tokens = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=10**9)]
Instant = Annotated[float, Field(ge=0, le=10**9)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MAX_RATE)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[dict[Name, Share], Field(min_length=1)]
Cv = Annotated[float, Field(ge=0.01, le=30)]
Entry = Annotated[list[Annotated[float, Field(ge=0, le=10**9)]], Field(min_length=2, max_length=2)]
Entries = Annotated[list[Entry], Field(min_length=1, max_length=20_000)]


class Section(BaseModel):
    """A mapping of the file: no unknown keys, no conversions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def by_key(*keys: str, number: bool = False) -> Discriminator:
    """Tells the models of a union apart by the key that is written; without any of them it is the last.

    With `number`, what is no mapping is meant for the member tagged [number]. Tags are the keys in brackets, so that
    they can be left out of messages.
    """

    def kind(value: Any) -> str:
        if not isinstance(value, Mapping | BaseModel):
            return "[number]" if number else f"[{keys[-1]}]"
        written = value if isinstance(value, Mapping) else vars(value)
        return f"[{next((key for key in keys if written.get(key) is not None), keys[-1])}]"

    return Discriminator(kind)


# --- rates ------------------------------------------------------------------------------------


class SineWave(Section):
    """mean * (1 + amplitude * cos(2 pi (t - peak) / period))."""

    mean: Rate
    """Per second."""
    amplitude: Annotated[float, Field(ge=0, le=1)]
    """Relative to the mean: 0.5 = from half to one and a half times."""
    period: Seconds = 86_400.0
    """Seconds; the default is a day."""
    peak: Instant = 0.0
    """When the rate is highest, seconds from the start of the run."""


class SineRate(Section):
    """A rate that swings, as over a day."""

    sine: SineWave


class StepsRate(Section):
    """A rate that jumps."""

    steps: Entries
    """[seconds, per second]: each rate holds until the next."""
    repeat: Seconds | None = None
    """Begin again after so many seconds; None = the last rate is held."""

    @model_validator(mode="after")
    def _sound(self) -> "StepsRate":
        _check_rates("steps", self.steps, self.repeat)
        return self


class PointsRate(Section):
    """A rate that goes in straight lines: ramps, or any curve."""

    points: Entries
    """[seconds, per second] with straight lines between."""
    repeat: Seconds | None = None
    """Begin again after so many seconds, with a last line back to the first rate; None = the last rate is held."""

    @model_validator(mode="after")
    def _sound(self) -> "PointsRate":
        _check_rates("points", self.points, self.repeat)
        return self


def _check_rates(key: str, entries: list[list[float]], repeat: float | None) -> None:
    if entries[0][0] != 0:
        raise ValueError(f"the first entry of {key} must be at 0 seconds, got {entries[0][0]:g}")
    _check_ascending(key, [time for time, _ in entries], strictly=True)
    if repeat is not None and repeat <= entries[-1][0]:
        last = entries[-1][0]
        raise ValueError(
            f"repeat must be later than the last entry of {key} ({last:g}), got {repeat:g}"
        )
    highest = max(rate for _, rate in entries)
    if not MIN_RATE <= highest <= MAX_RATE:
        raise ValueError(
            f"the highest rate in {key} must be >= {MIN_RATE:g} and <= {MAX_RATE:g}, got {highest:g}"
        )


def _check_ascending(key: str, values: list[float], strictly: bool) -> None:
    for before, after in pairwise(values):
        if after < before or (strictly and after == before):
            raise ValueError(f"the entries of {key} must ascend; {after:g} stands after {before:g}")


def check_quantiles(key: str, entries: list[list[float]], least: float) -> None:
    """Raises ValueError unless `entries` are [probability, value] of a distribution with values from `least` on."""
    if len(entries) < 2 or entries[0][0] != 0 or entries[-1][0] != 1:
        raise ValueError(
            f"{key} must begin with probability 0 and end with 1, e.g. [[0, 5], [0.5, 80], [1, 900]]"
        )
    _check_ascending(f"{key} (probabilities)", [p for p, _ in entries], strictly=False)
    _check_ascending(f"{key} (values)", [value for _, value in entries], strictly=False)
    if entries[0][1] < least:
        raise ValueError(f"the values of {key} must be >= {least:g}, got {entries[0][1]:g}")


RateCurve = Annotated[
    Annotated[Rate, Tag("[number]")]
    | Annotated[SineRate, Tag("[sine]")]
    | Annotated[StepsRate, Tag("[steps]")]
    | Annotated[PointsRate, Tag("[points]")],
    by_key("steps", "points", "sine", number=True),
]


# --- times ------------------------------------------------------------------------------------


class ExponentialTime(Section):
    """Times of a memoryless process."""

    exponential: Seconds
    """The mean."""


class UniformTime(Section):
    """Any time between two, equally likely."""

    uniform: Annotated[list[Instant], Field(min_length=2, max_length=2)]
    """[lowest, highest], seconds."""

    @model_validator(mode="after")
    def _ordered(self) -> "UniformTime":
        _check_bounds(self.uniform)
        return self


class Spread(Section):
    """A lognormal distribution of times."""

    median: Seconds
    p95: Seconds
    """95 % are shorter."""

    @model_validator(mode="after")
    def _ordered(self) -> "Spread":
        if self.p95 <= self.median:
            raise ValueError(f"p95 must be above the median ({self.median:g}), got {self.p95:g}")
        return self


class LognormalTime(Section):
    """Times of which a few are much longer than most, as those of people."""

    lognormal: Spread


def _check_bounds(bounds: list[Any]) -> None:
    low, high = bounds
    if low > high:
        raise ValueError(
            f"the lower bound {low} is above the upper bound {high}; write [low, high]"
        )


Time = Annotated[
    Annotated[Instant, Tag("[number]")]
    | Annotated[ExponentialTime, Tag("[exponential]")]
    | Annotated[UniformTime, Tag("[uniform]")]
    | Annotated[LognormalTime, Tag("[lognormal]")],
    by_key("uniform", "lognormal", "exponential", number=True),
]


# --- lengths ----------------------------------------------------------------------------------


class FixedLength(Section):
    """Always as many tokens."""

    fixed: Tokens


class UniformLength(Section):
    """Between two numbers of tokens, both included."""

    uniform: Annotated[list[Tokens], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _ordered(self) -> "UniformLength":
        _check_bounds(self.uniform)
        return self


class Lognormal(Section):
    """A lognormal distribution, by its median or mean and its 95th percentile or sigma."""

    median: Annotated[float, Field(ge=1, le=10**9)] | None = None
    mean: Annotated[float, Field(ge=1, le=10**9)] | None = None
    p95: Annotated[float, Field(ge=1, le=10**9)] | None = None
    sigma: Annotated[float, Field(gt=0, le=10)] | None = None
    """Standard deviation of the natural logarithm."""
    max: Tokens | None = None
    """Longer ones do not occur: the distribution is cut off there and scaled up, not clipped; None = no limit."""

    @model_validator(mode="after")
    def _complete(self) -> "Lognormal":
        if (self.median is None) == (self.mean is None):
            raise ValueError("needs median or mean, one of them")
        if (self.p95 is None) == (self.sigma is None):
            raise ValueError("needs p95 or sigma, one of them")
        lognormal(self.median, self.mean, self.p95, self.sigma, self.max)
        return self


class LognormalLength(Section):
    """Many short ones and a long tail."""

    lognormal: Lognormal


class QuantileLength(Section):
    """As measured."""

    quantiles: Entries
    """[probability, tokens] from 0 to 1, straight lines between."""

    @model_validator(mode="after")
    def _sound(self) -> "QuantileLength":
        check_quantiles("quantiles", self.quantiles, 0.5)
        return self


Length = Annotated[
    Annotated[FixedLength, Tag("[fixed]")]
    | Annotated[UniformLength, Tag("[uniform]")]
    | Annotated[LognormalLength, Tag("[lognormal]")]
    | Annotated[QuantileLength, Tag("[quantiles]")],
    by_key("uniform", "lognormal", "quantiles", "fixed"),
]


class UniformCount(Section):
    """Between two numbers, both included."""

    uniform: Annotated[
        list[Annotated[int, Field(ge=0, le=10_000)]], Field(min_length=2, max_length=2)
    ]

    @model_validator(mode="after")
    def _ordered(self) -> "UniformCount":
        _check_bounds(self.uniform)
        return self


class QuantileCount(Section):
    """As measured."""

    quantiles: Entries
    """[probability, number] from 0 to 1, straight lines between, rounded."""

    @model_validator(mode="after")
    def _sound(self) -> "QuantileCount":
        check_quantiles("quantiles", self.quantiles, 0)
        return self


Number = Annotated[
    Annotated[Annotated[int, Field(ge=0, le=10_000)], Tag("[number]")]
    | Annotated[UniformCount, Tag("[uniform]")]
    | Annotated[QuantileCount, Tag("[quantiles]")],
    by_key("quantiles", "uniform", number=True),
]
