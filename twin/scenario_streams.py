"""From the keys under `traffic:` to plain streams."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from math import log
from typing import Any

from twin import scenario_distributions as form
from twin import scenario_traffic as schema
from twin.clock import to_ps
from twin.scenario_faults import Origin, unknown
from twin.workload.arrivals import (
    Batches,
    Bursts,
    Curve,
    Piece,
    Renewal,
    points_curve,
    sine_curve,
    steps_curve,
)
from twin.workload.formats.choose import format_of, read_trace
from twin.workload.gaps import Equal, Exponential, Gamma, Gaps, Table, Weibull
from twin.workload.lengths import (
    Fixed,
    Length,
    Lengths,
    Pairs,
    Quantiles,
    Uniform,
    lognormal,
)
from twin.workload.presets import Preset
from twin.workload.sessions import (
    Always,
    ExponentialTime,
    LognormalTime,
    Sessions,
    Time,
    Tools,
    UniformTime,
)
from twin.workload.shared_text import Prefixes, Reuse
from twin.workload.source import Clients
from twin.workload.streams import Stream
from twin.workload.synthetic import Closed, MixedStream, SyntheticStream
from twin.workload.trace import TraceStream, looked_at

MAX_PAIRS = 2_000_000
"""Rows of a trace that `lengths_from` reads at most: 16 MB."""

Z95 = 1.6448536269514722
"""95th percentile of the standard normal distribution."""


def stream_of(
    stream: schema.TraceStream | schema.SyntheticStream | schema.PresetStream,
    index: int,
    taken: tuple[str, ...] | None,
    default_tier: str,
    origin: Origin,
    presets: Callable[[], dict[str, Preset]],
) -> Stream:
    """One entry of `traffic:`. `presets` gives the packaged ones by name."""
    here = ("traffic", index)
    tiers = stream.tiers or {stream.tier or default_tier: 1.0}
    for tier in tiers:
        if taken is not None and tier not in taken:
            key = "tiers" if stream.tiers else "tier"
            origin.fail((*here, key), f"the policy has no such tier: {unknown(tier, taken)}")
    clients = Clients(
        tiers=dict(tiers),
        tenants=dict(stream.tenants or {stream.tenant or "default": 1.0}),
        max_tokens=stream.max_tokens,
        ttft_timeout_ps=_ps(stream.timeouts.ttft),
        total_timeout_ps=_ps(stream.timeouts.total),
    )
    if isinstance(stream, schema.TraceStream):
        return _trace_of(stream, clients, here, taken, origin)
    if isinstance(stream, schema.PresetStream):
        known = presets()
        if stream.preset not in known:
            origin.fail((*here, "preset"), unknown(stream.preset, known))
        return _preset(stream, known[stream.preset], clients, here, origin)
    if stream.lengths_from is not None:
        path = str(origin.resolve(stream.lengths_from, *here, "lengths_from"))
        with origin.placed(*here, "lengths_from", named=True):
            return _synthetic(stream, clients, _pairs(path))
    return _synthetic(stream, clients, None)


def _trace_of(
    stream: schema.TraceStream,
    clients: Clients,
    here: tuple[str | int, ...],
    taken: tuple[str, ...] | None,
    origin: Origin,
) -> TraceStream:
    """What the scenario says of clients holds for all rows; where it is silent, a row may speak for itself."""
    path = str(origin.resolve(stream.trace, *here, "trace"))
    key = "trace" if stream.format is None else "format"
    with origin.placed(*here, key, named=True):
        found = format_of(path, stream.format).format
    said = {
        "tier": stream.tier or stream.tiers,
        "tenant": stream.tenant or stream.tenants,
        "max_tokens": stream.max_tokens,
        "ttft_timeout_ps": stream.timeouts.ttft,
        "total_timeout_ps": stream.timeouts.total,
    }
    held = {"tier": "tiers", "tenant": "tenants", "max_tokens": "max_tokens"}
    written = TraceStream(
        clients=clients,
        path=path,
        speedup=Fraction(str(stream.speedup)),
        requests=stream.requests,
        format=found.name,
        window_ps=None
        if stream.window is None
        else (to_ps(stream.window[0]), to_ps(stream.window[1])),
        tick_ps=_ps(stream.spread_ticks),
        assumed_prefix_share=None
        if stream.assumed_prefix_share is None
        else Fraction(str(stream.assumed_prefix_share)),
        own=frozenset(
            name
            for name, value in said.items()
            if value is None and held.get(name, "timeouts") in found.holds
        ),
        tiers_taken=taken,
    )
    with origin.placed(*here, "trace", named=True):
        return looked_at(written)


def _synthetic(
    stream: schema.SyntheticStream, clients: Clients, pairs: Pairs | None
) -> SyntheticStream:
    if pairs is None:
        prompt, output = _length(stream.prompt_tokens), _length(stream.output_tokens)
        lengths: Lengths | Pairs = Lengths(prompt, output, stream.length_correlation)
    else:
        lengths = pairs
    shared, reuse = stream.prefixes, stream.reuse
    return SyntheticStream(
        clients=clients,
        arrivals=_arrivals(stream.arrivals),
        lengths=lengths,
        requests=stream.requests,
        duration_ps=_ps(stream.duration),
        sessions=None if stream.sessions is None else _sessions(stream.sessions),
        prefixes=None if shared is None else Prefixes(shared.groups, shared.tokens, shared.skew),
        reuse=None if reuse is None else Reuse(_points(reuse.share), reuse.memory),
    )


def _ps(seconds: float | None) -> int | None:
    return None if seconds is None else to_ps(seconds)


def _pairs(path: str) -> Pairs:
    """The lengths of the rows of a trace."""
    prompts, outputs = array("q"), array("q")
    for row in islice(read_trace(path, format_of(path).format), MAX_PAIRS):
        prompts.append(row.prompt_tokens)
        outputs.append(row.output_tokens)
    return Pairs(path, prompts, outputs)


# --- when -------------------------------------------------------------------------------------


def _arrivals(arrivals: Any) -> Renewal | Batches | Closed:
    match arrivals:
        case schema.ClosedArrivals():
            return Closed(arrivals.users, _time(arrivals.think_time), to_ps(arrivals.ramp))
        case schema.BatchArrivals():
            at_ps = tuple(to_ps(schema.clock_seconds(entry)) for entry in arrivals.at)
            return Batches(at_ps, arrivals.size, _ps(arrivals.every))
        case schema.BurstArrivals():
            bursts = Bursts(
                arrivals.rate,
                arrivals.burst_rate,
                to_ps(arrivals.burst),
                to_ps(arrivals.pause),
                arrivals.lengths == "fixed",
            )
            return Renewal(Exponential(), bursts)
    return Renewal(_gaps(arrivals), _rate(arrivals.rate), to_ps(arrivals.tick or 0))


def _gaps(arrivals: schema.RenewalArrivals) -> Gaps:
    match arrivals.process:
        case "constant":
            return Equal()
        case "poisson":
            return Exponential()
        case "gamma":
            return Gamma(arrivals.cv or 1.0)
        case "weibull":
            return Weibull(arrivals.cv or 1.0)
    return Table(_points(arrivals.gaps or []))


def _rate(rate: Any) -> float | Curve:
    match rate:
        case form.SineRate(sine=wave):
            return sine_curve(wave.mean, wave.amplitude, to_ps(wave.period), to_ps(wave.peak))
        case form.StepsRate():
            return steps_curve(_timed(rate.steps), _ps(rate.repeat))
        case form.PointsRate():
            return points_curve(_timed(rate.points), _ps(rate.repeat))
    return float(rate)


def _timed(entries: Iterable[list[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((to_ps(seconds), float(rate)) for seconds, rate in entries)


def _points(entries: Iterable[list[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(p), float(value)) for p, value in entries)


def _time(time: Any) -> Time:
    match time:
        case form.ExponentialTime():
            return ExponentialTime(to_ps(time.exponential))
        case form.UniformTime(uniform=[low, high]):
            return UniformTime(to_ps(low), to_ps(high))
        case form.LognormalTime(lognormal=spread):
            mu = log(spread.median)
            return LognormalTime(mu, (log(spread.p95) - mu) / Z95)
    return Always(to_ps(time))


# --- how long ---------------------------------------------------------------------------------


def _length(length: Any) -> Length:
    match length:
        case form.UniformLength(uniform=[low, high]):
            return Uniform(low, high)
        case form.LognormalLength(lognormal=shape):
            return lognormal(shape.median, shape.mean, shape.p95, shape.sigma, shape.max)
        case form.QuantileLength():
            return Quantiles(_points(length.quantiles))
    return Fixed(length.fixed)


def _number(number: Any, fewest: int) -> Length:
    match number:
        case form.UniformCount(uniform=[low, high]):
            return Uniform(low, high)
        case form.QuantileCount():
            return Quantiles(_points(number.quantiles), fewest)
    return Fixed(number)


def _sessions(sessions: schema.Sessions) -> Sessions:
    tools = sessions.tools
    return Sessions(
        turns=_number(sessions.turns, 1),
        system_prompt_tokens=sessions.system_prompt_tokens,
        think=_time(sessions.think_time),
        tools=None
        if tools is None
        else Tools(
            calls=_number(tools.calls, 0),
            time=_time(tools.time),
            result_tokens=_length(tools.result_tokens),
            output_tokens=_length(tools.output_tokens),
        ),
    )


# --- presets ----------------------------------------------------------------------------------


def _preset(
    stream: schema.PresetStream,
    preset: Preset,
    clients: Clients,
    here: tuple[str | int, ...],
    origin: Origin,
) -> SyntheticStream | MixedStream:
    if stream.rate is None and preset.rate is None:
        origin.fail(
            (*here, "rate"),
            f"is missing; the trace behind {preset.name} has lengths but no times, so give requests per second",
        )
    parts = [part_of(written) for written in preset.streams]
    rates = [_mean_rate(part) for part in parts]
    factor = 1.0 if stream.rate is None else stream.rate / sum(rates)
    duration_ps = _ps(stream.duration)
    if len(parts) == 1:
        return replace(
            _scaled(parts[0], factor, stream),
            clients=clients,
            requests=stream.requests,
            duration_ps=duration_ps,
        )
    named = stream.tenant is not None or stream.tenants is not None
    if not named:
        names = [next(iter(part.clients.tenants)) for part in parts]
        shares = {n: rate / sum(rates) for n, rate in zip(names, rates, strict=True)}
        clients = replace(clients, tenants=shares)
    return MixedStream(
        clients=clients,
        requests=stream.requests,
        parts=tuple(
            replace(
                _scaled(part, factor, stream),
                clients=clients if named else replace(clients, tenants=part.clients.tenants),
                requests=None,
                duration_ps=duration_ps,
            )
            for part in parts
        ),
    )


def part_of(written: Any) -> SyntheticStream:
    """A stream of a preset, as it was fitted. Raises ValueError if it is not what a scenario takes."""
    stream = schema.SyntheticStream.model_validate({**written, "requests": 1})
    nobody = Clients({"ONLINE": 1.0}, {stream.tenant or "default": 1.0}, None, None, None)
    return _synthetic(stream, nobody, None)


def _mean_rate(part: SyntheticStream) -> float:
    assert isinstance(part.arrivals, Renewal)
    return part.arrivals.mean_rate


def _scaled(part: SyntheticStream, factor: float, stream: schema.PresetStream) -> SyntheticStream:
    arrivals = part.arrivals
    assert isinstance(arrivals, Renewal)
    if not stream.ticks:
        arrivals = replace(arrivals, tick_ps=0)
    rate = arrivals.rate
    if stream.steady or isinstance(rate, float):
        return replace(part, arrivals=replace(arrivals, rate=arrivals.mean_rate * factor))
    assert isinstance(rate, Curve)
    pieces = tuple(Piece(p.length_ps, p.start * factor, p.end * factor) for p in rate.written)
    held = None if rate.held is None else rate.held * factor
    return replace(part, arrivals=replace(arrivals, rate=Curve(pieces, held)))
