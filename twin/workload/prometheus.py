"""Traffic of a live server, from what Prometheus keeps of it: `vllm:*` counters and histograms of lengths.

Most teams have these and no trace. They say how many requests ended when and how long prompts and replies were, by
bucket; they do not say how clumped arrivals were within a step, nor which lengths went together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Any

REQUESTS = "request_success_total"
"""Requests that ended, whatever the reason."""
PROMPT, OUTPUT = "request_prompt_tokens", "request_generation_tokens"
"""Histograms of tokens of the requests that ended."""

LEAST_BEND, MOST_BEND = 0.02, 0.98


class UnusableError(ValueError):
    """The answers of Prometheus do not make a stream; the message says why and what to do."""


def selector(metric: str, labels: Mapping[str, str]) -> str:
    """The series of a metric of vLLM with these labels.

    Some exporters turn the colon of `vllm:` into an underscore (prometheus_client 0.23 and later towards servers that
    ask for OpenMetrics); both are taken.
    """
    matchers = [f'__name__=~"vllm[:_]{metric}"']
    for name, value in labels.items():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        matchers.append(f'{name}="{escaped}"')
    return "{" + ",".join(matchers) + "}"


def increase(metric: str, labels: Mapping[str, str], seconds: int, by: str = "") -> str:
    """A query: by how much a metric rose in the last so many seconds, summed over all series (by one label)."""
    return f"sum{f' by ({by})' if by else ''} (increase({selector(metric, labels)}[{seconds}s]))"


@dataclass(frozen=True)
class Histogram:
    """Counts of requests by length."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending, the last one infinite."""
    counts: tuple[float, ...]
    """Requests in each bucket alone, not cumulated."""
    total: float
    """Tokens of all requests."""

    @property
    def requests(self) -> float:
        """Requests in all buckets."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Tokens of a request."""
        return self.total / self.requests


def histogram(metric: str, buckets: Sequence[Any], total: Sequence[Any]) -> Histogram:
    """The histogram in the answers to `increase` of _bucket by le, and of _sum. Raises UnusableError."""
    cumulated: dict[float, float] = {}
    for series in buckets:
        bound = float(series["metric"].get("le", "nan").replace("+Inf", "inf"))
        value = float(series["value"][1])
        if bound != bound or not isfinite(value):
            raise UnusableError(
                f"vllm:{metric}_bucket: the increase for le={series['metric'].get('le')} is {series['value'][1]}; "
                "choose a window without such samples"
            )
        cumulated[bound] = cumulated.get(bound, 0.0) + value
    if not cumulated or not total:
        raise UnusableError(
            f"vllm:{metric}: no samples in the window, although requests were counted; do scrapes drop histograms?"
        )
    if inf not in cumulated:
        raise UnusableError(f"vllm:{metric}_bucket: there is no bucket le=+Inf")
    bounds = sorted(cumulated)
    counts, reached = [], 0.0
    for bound in bounds:
        # Scrapes of several servers do not happen at one instant; a bucket may lag a little behind the one below.
        counts.append(max(0.0, cumulated[bound] - reached))
        reached = max(reached, cumulated[bound])
    tokens = float(total[0]["value"][1])
    if not reached > 0 or not isfinite(tokens):
        raise UnusableError(
            f"vllm:{metric}: no request in the window ({reached:g} counted, {tokens:g} tokens)"
        )
    return Histogram(tuple(bounds), tuple(counts), tokens)


def quantiles(lengths: Histogram) -> list[list[float]]:
    """[probability, tokens] points for a histogram, such that their mean is the histogram's as far as that can be.

    Within a bucket the quantiles go over a point in the middle (of probability) that lies at one and the same share of
    every bucket's width; that share makes the mean come out. The last bucket ends where vLLM's series of bounds (1, 2,
    5, 10, ...) would go on.
    """
    edges = _edges(lengths.bounds)
    parts = [(low, high, n) for (low, high), n in zip(edges, lengths.counts, strict=True) if n > 0]
    # A bucket from a to b with the middle at a + c (b - a) has the mean a + (b - a) (1 + 2 c) / 4.
    low_mean = sum(n * (low + (high - low) / 4) for low, high, n in parts)
    slope = sum(n * (high - low) / 2 for low, high, n in parts)
    bend = min(max((lengths.total - low_mean) / slope, LEAST_BEND), MOST_BEND)
    points: list[tuple[float, float]] = [(0.0, parts[0][0])]
    reached = 0.0
    for low, high, n in parts:
        here = reached / lengths.requests
        reached += n
        there = reached / lengths.requests
        points += [(here, low), ((here + there) / 2, low + bend * (high - low)), (there, high)]
    points[-1] = (1.0, points[-1][1])
    rounded = [(round(p, 6), float(f"{value:.5g}")) for p, value in points]
    return [list(point) for point in dict.fromkeys(rounded)]


def _edges(bounds: Sequence[float]) -> list[tuple[float, float]]:
    """Lower and upper edges between whole numbers, so that rounding stays in the bucket."""
    uppers = [bound + 0.5 for bound in bounds[:-1]]
    last = bounds[-2] if len(bounds) > 1 else 1.0
    factor = 2.5 if str(last)[0] == "2" else 2.0
    uppers.append(last * factor + 0.5)
    return list(pairwise([0.5, *uppers]))


@dataclass(frozen=True)
class Observed:
    """What Prometheus said."""

    start_s: float
    """Unix time."""
    step_s: int
    counts: tuple[float | None, ...]
    """Requests that ended in each step; None = no sample."""
    prompt: Histogram
    output: Histogram

    @property
    def seconds(self) -> int:
        """Length of the window."""
        return self.step_s * len(self.counts)

    @property
    def rates(self) -> list[list[float]]:
        """[seconds, requests per second] by step."""
        return [
            [i * self.step_s, float(f"{(count or 0.0) / self.step_s:.5g}")]
            for i, count in enumerate(self.counts)
        ]

    @property
    def requests(self) -> float:
        """Requests that ended in the window."""
        return sum(count for count in self.counts if count is not None)


def step_counts(
    answer: Sequence[Any], start_s: float, step_s: int, steps: int
) -> tuple[float | None, ...]:
    """Requests in each step from the answer to a range query whose i-th sample is at the end of step i."""
    found: list[float | None] = [None] * steps
    for series in answer:
        for time, text in series["values"]:
            place = round((float(time) - start_s) / step_s) - 1
            value = float(text)
            if 0 <= place < steps and isfinite(value):
                found[place] = max(0.0, value)
    return tuple(found)


def stream_of(observed: Observed, cv: float | None) -> dict[str, Any]:
    """The stream as a scenario spells it; `cv` makes gamma arrivals of Poisson ones. Raises UnusableError."""
    if not observed.requests > 0:
        raise UnusableError(
            f"no request ended in the window of {observed.seconds:,} s; choose a longer one, or another --end"
        )
    arrivals: dict[str, Any] = {"process": "poisson" if cv is None else "gamma"}
    if cv is not None:
        arrivals["cv"] = cv
    arrivals["rate"] = {"steps": observed.rates, "repeat": float(observed.seconds)}
    return {
        "arrivals": arrivals,
        "prompt_tokens": {"quantiles": quantiles(observed.prompt)},
        "output_tokens": {"quantiles": quantiles(observed.output)},
        "duration": float(observed.seconds),
    }


def doubts(observed: Observed) -> list[str]:
    """What is missing in the answers or sits badly in the stream, a sentence each."""
    told = []
    missing = sum(count is None for count in observed.counts)
    if missing:
        told.append(
            f"no samples for {missing} of {len(observed.counts)} steps; they are taken as without requests"
        )
    for name, lengths in (("prompt", observed.prompt), ("generation", observed.output)):
        beyond = lengths.counts[-1] / lengths.requests
        if beyond > 0.01:
            told.append(
                f"{100 * beyond:.1f} % of the {name} lengths lie beyond the last bucket ({lengths.bounds[-2]:,.0f} "
                "tokens); how long they are is a guess"
            )
        made = mean_of(quantiles(lengths))
        if abs(made / lengths.mean - 1) > 0.02:
            told.append(
                f"the buckets allow no mean {name} length of {lengths.mean:,.0f} tokens; the stream has {made:,.0f}"
            )
    return told


def mean_of(points: Sequence[Sequence[float]]) -> float:
    """Mean of the straight lines through [probability, value] points."""
    return sum((q - p) * (a + b) / 2 for (p, a), (q, b) in pairwise(points))
