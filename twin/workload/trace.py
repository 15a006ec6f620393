"""Requests as they were recorded: a trace file as a stream of traffic."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count, groupby, islice
from operator import attrgetter
from random import Random
from typing import Any

from twin.clock import to_seconds
from twin.compiled import remade
from twin.errors import InputError
from twin.workload.formats.choose import count_rows, format_of, read_trace
from twin.workload.formats.rows import TraceRow
from twin.workload.source import Arrival, Clients, Ended, Maker, Prompt

OWN = ("tier", "tenant", "max_tokens", "ttft_timeout_ps", "total_timeout_ps")
"""What a trace may say of each request itself."""


@dataclass(frozen=True)
class TraceStream:
    """Requests as recorded in a file."""

    clients: Clients
    path: str
    speedup: Fraction
    """Instants are divided by it: 2 doubles the rate."""
    requests: int | None
    """Rows to take from the start (of the window); None = all."""
    format: str | None = None
    """Name in twin.workload.formats.choose.FORMATS; None = the file's beginning tells."""
    window_ps: tuple[int, int] | None = None
    """Only rows of these instants, the second excluded, and the run starts at the first; None = all."""
    tick_ps: int | None = None
    """Rows of one stamp are spread over as much time, at random, not past the next stamp; None = left as they are."""
    assumed_prefix_share: Fraction | None = None
    """Share of each prompt that is the same text in all, for a trace that says nothing of prefixes; None = nothing
    is shared."""
    own: frozenset[str] = frozenset()
    """Out of OWN: what is taken from a row where it says so, instead of from `clients`."""
    tiers_taken: tuple[str, ...] | None = None
    """Tiers a row may have; None = any."""
    tells_prefixes: bool = False
    """Whether the first row says what its prompt shares with others, so that prefix hits mean something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


def rows_of(spec: TraceStream) -> Iterator[TraceRow]:
    """The rows that a stream takes, their instants counted from its start, otherwise as recorded.

    Raises InputError at a line that is no request, and if the window holds none.
    """
    rows = read_trace(spec.path, format_of(spec.path, spec.format).format)
    if spec.window_ps is not None:
        rows = _in_window(rows, spec.path, *spec.window_ps)
    return islice(rows, spec.requests)


def looked_at(spec: TraceStream) -> TraceStream:
    """The stream with what its first row tells.

    Raises InputError if there is none, if it is malformed, and if a share is assumed of prefixes that are known.
    """
    first = next(rows_of(spec))
    if first.prompt is not None and spec.assumed_prefix_share is not None:
        raise InputError(_known(spec, first))
    return replace(spec, tells_prefixes=first.prompt is not None)


def _known(spec: TraceStream, row: TraceRow) -> str:
    return f"{spec.path} line {row.line}: the trace says which prefixes are shared; leave assumed_prefix_share out"


def _in_window(rows: Iterable[TraceRow], path: str, from_ps: int, to_ps: int) -> Iterator[TraceRow]:
    empty, last_ps = True, 0
    for row in rows:
        last_ps = row.at_ps
        if last_ps >= to_ps:
            break
        if last_ps >= from_ps:
            empty = False
            yield row._replace(at_ps=last_ps - from_ps)
    if empty:
        raise InputError(
            f"{path}: no request between {to_seconds(from_ps):g} s and {to_seconds(to_ps):g} s; the last one looked "
            f"at is at {to_seconds(last_ps):g} s"
        )


def spread(rows: Iterable[TraceRow], tick_ps: int, rng: Random) -> Iterator[TraceRow]:
    """Rows of one stamp at random instants within the tick that begins there, in the order of the file.

    A tick ends early where the next stamp comes before its end, so that rows stay in order.
    """
    groups = (list(group) for _, group in groupby(rows, attrgetter("at_ps")))
    group = next(groups, None)
    while group is not None:
        ahead = next(groups, None)
        start_ps = group[0].at_ps
        width_ps = tick_ps if ahead is None else min(tick_ps, ahead[0].at_ps - start_ps)
        offsets = sorted(rng.randrange(width_ps) for _ in group)
        for row, offset_ps in zip(group, offsets, strict=True):
            yield row._replace(at_ps=start_ps + offset_ps)
        group = ahead


class TraceSource:
    """The requests of a trace file."""

    def __init__(self, spec: TraceStream, stream: int, num_streams: int, seed: int) -> None:
        self._spec = spec
        self._stream = stream
        self._tick_rng = Random(f"{seed}/ticks/{stream}")
        # Every other id of this stream is for content of the file, so that no table of ids is needed.
        self._first_content = stream + num_streams
        self._stride = 2 * num_streams
        fresh = count(stream, self._stride)
        self._make = Maker(
            spec.clients, stream, fresh, lambda name: Random(f"{seed}/{name}/{stream}")
        )
        self._shared = None if spec.assumed_prefix_share is None else self._make.content()

    def expected(self) -> int | None:
        """About how many requests there will be; None if that is not known."""
        spec = self._spec
        if spec.window_ps is not None:
            return spec.requests
        rows = count_rows(spec.path, format_of(spec.path, spec.format).format)
        return rows if spec.requests is None else min(rows, spec.requests)

    def arrivals(self) -> Iterator[Arrival]:
        """Requests in order of their instants. Raises InputError at a row that cannot be read."""
        spec, make = self._spec, self._make
        rows = rows_of(spec)
        if spec.tick_ps is not None:
            rows = spread(rows, spec.tick_ps, self._tick_rng)
        speedup, divisor = spec.speedup.as_integer_ratio()
        for number, row in enumerate(rows):
            due_ps = (2 * row.at_ps * divisor + speedup) // (2 * speedup)
            session = None if row.session is None else f"{self._stream}-{row.session}"
            request = make.request(
                due_ps,
                self._prompt(row),
                row.prompt_tokens,
                row.output_tokens,
                make.client(),
                session,
            )
            if row.reply is not None:
                request.reply = self._first_content + self._stride * row.reply
            for name in spec.own:
                value = getattr(row, name)
                if value is not None:
                    setattr(request, name, value)
            if spec.tiers_taken is not None and request.tier not in spec.tiers_taken:
                raise InputError(
                    f"{spec.path} line {row.line}: tier: the policy has no tier {request.tier!r}, only "
                    f"{', '.join(spec.tiers_taken)}; name tiers in the policy, or set tier or tiers of the stream"
                )
            yield Arrival(due_ps, self._stream, number, 0, request, row.line)

    def _prompt(self, row: TraceRow) -> Prompt:
        share = self._spec.assumed_prefix_share
        if row.prompt is None:
            if share is None or self._shared is None:
                return ((self._make.content(), row.prompt_tokens),)
            common = row.prompt_tokens * share.numerator // share.denominator
            parts = ((self._shared, common), (self._make.content(), row.prompt_tokens - common))
            return tuple([part for part in parts if part[1]])
        if share is not None:
            raise InputError(_known(self._spec, row))
        first, stride = self._first_content, self._stride
        known = tuple([(first + stride * content, tokens) for content, tokens in row.prompt])
        rest = row.prompt_tokens - sum([tokens for _, tokens in row.prompt])
        return (*known, (self._make.content(), rest)) if rest else known

    def on_finish(self, record: Ended) -> Arrival | None:
        """A recorded request comes when it was recorded, whatever became of those before: nothing follows."""
        return None
