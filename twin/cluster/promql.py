"""The part of PromQL that autoscalers use: read it, and evaluate it over the series of a set of pods.

Selectors with matchers and ranges, `rate` and `increase`, `*_over_time`, `histogram_quantile`, aggregation with `by`,
arithmetic, `or vector(0)`. Results are those of Prometheus: extrapolated rates, linear interpolation in a bucket, NaN
without observations. What is not understood is refused with the place. Every series has a pod; other labels are the
same for all of them.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import lt, sub
from typing import Protocol

from twin.clock import PS

Number = float | tuple[float, ...]
"""A sample, or the cumulative counts of a histogram's buckets."""

Vector = dict[str | None, Number]
"""Pod -> value; None = the pods are aggregated away."""

LOOKBACK_PS = 300 * PS
"""How old the newest sample of a series may be."""


class Series(Protocol):
    """Where samples are kept."""

    def names(self) -> Sequence[str]:
        """Pods that have series."""

    def points(self, pod: str, name: str, since_ps: int, until_ps: int) -> list[tuple[int, Number]]:
        """Samples in (since, until], ascending; staleness markers are left out."""

    def last(self, pod: str, name: str, since_ps: int, until_ps: int) -> Number | None:
        """The newest sample in (since, until]; None if there is none or a staleness marker is newer."""

    def bounds(self, name: str) -> tuple[float, ...]:
        """Upper bounds of a histogram's buckets without infinity."""

    def label(self, name: str) -> str | None:
        """A label of all series; None = its value is not known, so that every matcher holds."""


Node = Callable[[Series, int], Vector]
"""(series, instant) -> result."""


@dataclass(frozen=True)
class Query:
    """A query that was read."""

    text: str
    evaluate: Node = field(compare=False, repr=False)
    names: frozenset[str]
    """Names of the series that it selects."""
    window_ps: int
    """The longest range in it."""

    def __reduce__(self) -> tuple[Callable[[str], "Query"], tuple[str]]:
        return parse_query, (self.text,)


class QueryError(ValueError):
    """The query cannot be read, or not answered."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*(?:[eE][+-]?\d+)?(?![\w:])|\.\d+)|(?P<name>[A-Za-z_:][\w:]*)"
    r"|(?P<range>\[\s*(?:\d+(?:ms|[smhd]))+\s*\])|(?P<sign>[(){},*/+-])|(?P<text>\"[^\"]*\"|'[^']*')|(?P<op>=~|!~|!=|=))"
)

_RANGED = ("rate", "increase", "avg_over_time", "max_over_time", "min_over_time", "sum_over_time")
_AGGREGATED: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "avg": lambda values: math.fsum(values) / len(values),
    "max": lambda values: max(values, key=lambda v: -math.inf if math.isnan(v) else v),
    "min": lambda values: min(values, key=lambda v: math.inf if math.isnan(v) else v),
    "count": lambda values: float(len(values)),
}
_UNITS = {"ms": PS // 1000, "s": PS, "m": 60 * PS, "h": 3600 * PS, "d": 86_400 * PS}


def parse_query(text: str) -> Query:
    """The query as something to evaluate. Raises QueryError with the place of what is not understood."""
    reader = _Reader(text)
    node = reader.either()
    if reader.peek() != ("", ""):
        reader.fail("the query should end here")
    return Query(text, node, frozenset(reader.selected), reader.window_ps)


class _Reader:
    """Recursive descent over the tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.selected: set[str] = set()
        self.window_ps = 0
        self._at = 0

    def fail(self, problem: str) -> QueryError:
        """Refuse the query."""
        raise QueryError(f"{self.text!r}, at {self.text[self._at :][:20]!r}: {problem}")

    def peek(self) -> tuple[str, str]:
        """(kind, text) of the next token; empty at the end."""
        if not self.text[self._at :].strip():
            return "", ""
        found = _TOKEN.match(self.text, self._at)
        if found is None:
            self.fail("not understood")
        assert found is not None
        kind = str(found.lastgroup)
        return kind, found[kind]

    def take(self, wanted: str | None = None) -> str:
        """The next token, which must be of the wanted kind or text."""
        kind, text = self.peek()
        if not kind or (wanted is not None and wanted not in (kind, text)):
            self.fail(f"expected {wanted}" if wanted else "ends too early")
        found = _TOKEN.match(self.text, self._at)
        assert found is not None
        self._at = found.end()
        return text

    def either(self) -> Node:
        """sum [or sum]..."""
        node = self.sum()
        while self.peek() == ("name", "or"):
            self.take()
            node = _or(node, self.sum())
        return node

    def sum(self) -> Node:
        """product [+- product]..."""
        node = self.product()
        while self.peek()[1] in ("+", "-"):
            node = _binary(self.take(), node, self.product())
        return node

    def product(self) -> Node:
        """atom [*/ atom]..."""
        node = self.atom()
        while self.peek()[1] in ("*", "/"):
            node = _binary(self.take(), node, self.atom())
        return node

    def atom(self) -> Node:
        """A number, a selector, a function or something in brackets."""
        kind, text = self.peek()
        if kind == "number":
            value = float(self.take())
            return lambda series, now_ps: {None: value}
        if text == "(":
            self.take()
            node = self.either()
            self.take(")")
            return node
        if kind != "name":
            self.fail("expected a number, a metric or a function")
        name = self.take()
        following = self.peek()
        if name in _AGGREGATED and following[1] in ("(", "by", "without"):
            return self.aggregation(name)
        if following[1] != "(":
            return self.selector(name)
        if name == "vector":
            self.take("(")
            value = float(self.take("number"))
            self.take(")")
            return lambda series, now_ps: {None: value}
        if name == "histogram_quantile":
            self.take("(")
            quantile = float(self.take("number"))
            self.take(",")
            node = self.either()
            self.take(")")
            return _quantile(quantile, node, self._histogram())
        if name in _RANGED:
            self.take("(")
            chosen = self.take("name")
            node = self.selector(chosen, name)
            self.take(")")
            return node
        self.fail(f"the function {name} is not modelled")
        raise AssertionError

    def _histogram(self) -> str:
        found = sorted(name for name in self.selected if name.endswith("_bucket"))
        if len(found) != 1:
            self.fail("histogram_quantile needs the buckets of one histogram")
        return found[0]

    def aggregation(self, name: str) -> Node:
        """What follows the name of an aggregation."""
        by: set[str] = set()
        written = self.peek()[1] == "by"
        if written:
            by = self.labels()
        if self.peek()[1] == "without":
            self.fail("without is not modelled; use by")
        self.take("(")
        node = self.either()
        self.take(")")
        if not written and self.peek()[1] == "by":
            by = self.labels()
        return _aggregate(name, node, by)

    def labels(self) -> set[str]:
        """by (label, ...)"""
        self.take("by")
        self.take("(")
        found = set()
        while self.peek()[1] != ")":
            found.add(self.take("name"))
            if self.peek()[1] == ",":
                self.take()
        self.take(")")
        return found

    def selector(self, name: str, function: str | None = None) -> Node:
        """What follows the name of a metric; `function` is what it stands in, if that needs a range."""
        self.selected.add(name)
        matchers = []
        if self.peek()[1] == "{":
            self.take()
            while self.peek()[1] != "}":
                matchers.append((self.take("name"), self.take("op"), self.take("text")[1:-1]))
                if self.peek()[1] == ",":
                    self.take()
            self.take("}")
        if function is None:
            if self.peek()[0] == "range":
                self.fail("a range belongs into a function such as rate")
            return _instant(name, tuple(matchers))
        if self.peek()[0] != "range":
            self.fail(f"{function} needs a range such as [1m]")
        span = self.take("range")
        window_ps = sum(int(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+)(ms|[smhd])", span))
        self.window_ps = max(self.window_ps, window_ps)
        return _ranged(function, name, tuple(matchers), window_ps)


Matchers = tuple[tuple[str, str, str], ...]


def _matching(series: Series, matchers: Matchers) -> list[str]:
    """Pods whose series have the labels."""
    return [pod for pod in series.names() if all(_matches(series, pod, *m) for m in matchers)]


def _matches(series: Series, pod: str, label: str, op: str, wanted: str) -> bool:
    value = pod if label == "pod" else series.label(label)
    if value is None:
        return True
    same = value == wanted if op in ("=", "!=") else re.fullmatch(wanted, value) is not None
    return same == (op in ("=", "=~"))


def _instant(name: str, matchers: Matchers) -> Node:
    def evaluate(series: Series, now_ps: int) -> Vector:
        found = (
            (pod, series.last(pod, name, now_ps - LOOKBACK_PS, now_ps))
            for pod in _matching(series, matchers)
        )
        return {pod: value for pod, value in found if value is not None}

    return evaluate


def _ranged(function: str, name: str, matchers: Matchers, window_ps: int) -> Node:
    def evaluate(series: Series, now_ps: int) -> Vector:
        result: Vector = {}
        for pod in _matching(series, matchers):
            points = series.points(pod, name, now_ps - window_ps, now_ps)
            if function in ("rate", "increase"):
                found = _increase(points, now_ps - window_ps, now_ps, function == "rate")
            else:
                found = _over_time(function, [value for _, value in points])
            if found is not None:
                result[pod] = found
        return result

    return evaluate


def _over_time(function: str, values: Sequence[Number]) -> float | None:
    plain = [value for value in values if not isinstance(value, tuple)]
    return _AGGREGATED[function.partition("_")[0]](plain) if plain else None


def _increase(
    points: Sequence[tuple[int, Number]], start_ps: int, end_ps: int, is_rate: bool
) -> Number | None:
    """Prometheus' increase: extrapolated to the ends of the range where samples come near enough to them."""
    if len(points) < 2:
        return None
    times = [at_ps for at_ps, _ in points]
    scale = _Extrapolation(times, start_ps, end_ps, is_rate)
    buckets = [value for _, value in points if isinstance(value, tuple)]
    if not buckets:
        return scale.of([value for _, value in points if not isinstance(value, tuple)])
    if any(any(map(lt, later, earlier)) for earlier, later in pairwise(buckets)):
        return tuple(map(scale.of, zip(*buckets, strict=True)))
    return tuple(map(scale.grown, buckets[0], map(sub, buckets[-1], buckets[0])))


class _Extrapolation:
    """From the growth between the first and the last sample to that of the whole range."""

    def __init__(self, times: Sequence[int], start_ps: int, end_ps: int, is_rate: bool) -> None:
        self._span = (times[-1] - times[0]) / PS
        mean_gap = self._span / (len(times) - 1)
        before, after = (times[0] - start_ps) / PS, (end_ps - times[-1]) / PS
        self._before = mean_gap / 2 if before >= 1.1 * mean_gap else before
        self._after = mean_gap / 2 if after >= 1.1 * mean_gap else after
        self._window = (end_ps - start_ps) / PS if is_rate else None

    def of(self, values: Sequence[float]) -> float:
        """Of a counter with these samples; where it falls it has begun again at 0."""
        gained = values[-1] - values[0]
        gained += sum(b for b, a in pairwise(values) if a < b)
        return self.grown(values[0], gained)

    def grown(self, first: float, gained: float) -> float:
        """Of a counter that was `first` and has gained so much."""
        if not gained:
            return 0.0
        before = self._before
        if gained > 0 and first >= 0:
            before = min(before, self._span * (first / gained))
        factor = (self._span + before + self._after) / self._span
        return gained * (factor if self._window is None else factor / self._window)


def _aggregate(name: str, node: Node, by: set[str]) -> Node:
    fold = _AGGREGATED[name]

    def evaluate(series: Series, now_ps: int) -> Vector:
        groups: dict[str | None, list[Number]] = {}
        for pod, value in node(series, now_ps).items():
            groups.setdefault(pod if "pod" in by or "instance" in by else None, []).append(value)
        result: Vector = {}
        for key, values in groups.items():
            buckets = [value for value in values if isinstance(value, tuple)]
            if buckets and "le" not in by:
                raise QueryError("buckets are aggregated with le among the labels of by")
            if buckets:
                result[key] = tuple(fold(column) for column in zip(*buckets, strict=True))
            else:
                result[key] = fold([value for value in values if not isinstance(value, tuple)])
        return result

    return evaluate


def _quantile(quantile: float, node: Node, name: str) -> Node:
    def evaluate(series: Series, now_ps: int) -> Vector:
        bounds = series.bounds(name)
        return {
            pod: bucket_quantile(quantile, bounds, counts)
            for pod, counts in node(series, now_ps).items()
            if isinstance(counts, tuple)
        }

    return evaluate


def bucket_quantile(quantile: float, bounds: Sequence[float], counts: Sequence[float]) -> float:
    """Prometheus' histogram_quantile: `counts` are cumulative, the last for +Inf; NaN without observations."""
    total = counts[-1] if counts else 0.0
    if not total or math.isnan(total):
        return math.nan
    if not 0 <= quantile <= 1:
        return math.copysign(math.inf, quantile)
    rank = quantile * total
    at = next((i for i, count in enumerate(counts) if count >= rank), len(counts) - 1)
    if at >= len(bounds):
        return bounds[-1]
    below = counts[at - 1] if at else 0.0
    low = bounds[at - 1] if at else 0.0
    inside = counts[at] - below
    return low + (bounds[at] - low) * ((rank - below) / inside) if inside else low


def _or(left: Node, right: Node) -> Node:
    def evaluate(series: Series, now_ps: int) -> Vector:
        return right(series, now_ps) | left(series, now_ps)

    return evaluate


def _binary(op: str, left: Node, right: Node) -> Node:
    def evaluate(series: Series, now_ps: int) -> Vector:
        a, b = left(series, now_ps), right(series, now_ps)
        if set(b) == {None} and set(a) != {None}:
            return {pod: _compute(op, value, b[None]) for pod, value in a.items()}
        if set(a) == {None} and set(b) != {None}:
            return {pod: _compute(op, a[None], value) for pod, value in b.items()}
        return {pod: _compute(op, a[pod], b[pod]) for pod in a if pod in b}

    return evaluate


def _compute(op: str, a: Number, b: Number) -> Number:
    if isinstance(b, tuple):
        raise QueryError("buckets must be the left side of arithmetic")
    if isinstance(a, tuple):
        return tuple(_plain(op, value, b) for value in a)
    return _plain(op, a, b)


def _plain(op: str, a: float, b: float) -> float:
    if op == "*":
        return a * b
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if b:
        return a / b
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, a)
