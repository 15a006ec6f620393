"""What kind of load a run was under: open or closed loop, from where, how fast."""

from collections.abc import Mapping, Sequence
from typing import Any

from twin.clock import to_seconds
from twin.simulation import Result
from twin.workload.arrivals import Batches, Bursts, Curve, Renewal
from twin.workload.gaps import Equal, Exponential, Gamma, Weibull
from twin.workload.sessions import Always
from twin.workload.streams import Stream
from twin.workload.synthetic import Closed, MixedStream, SyntheticStream

OPEN, CLOSED = "open", "closed"


def traffic(result: Result, offered: Mapping[int, int]) -> list[dict[str, Any]]:
    """For each stream: the loop it is (`open`: requests come whatever becomes of those before; `closed`: users wait
    for their reply), its arrivals in words, and requests per second of simulated time that came of it.
    `offered` says how many requests each had.
    """
    simulated_s = to_seconds(result.simulated_ps)
    written = result.scenario.document["traffic"]
    return [
        {
            "stream": number,
            "load": load_of(stream),
            "arrivals": told(stream, written[number]),
            "offered": offered.get(number, 0),
            "offered_rps": offered.get(number, 0) / simulated_s if simulated_s else None,
        }
        for number, stream in enumerate(result.scenario.traffic)
    ]


def timeout_warning(left: int, offered: int) -> str | None:
    """What time-outs did to the figures, `left` of `offered` requests having met one; None if nobody left."""
    if not left:
        return None
    return (
        f"{left:,} of {offered:,} requests left at a time-out of their client; what was generated for them "
        "was work for nothing, and counts as neither good nor completed"
    )


def load_of(stream: Stream) -> str:
    """OPEN or CLOSED."""
    closed = isinstance(stream, SyntheticStream) and isinstance(stream.arrivals, Closed)
    return CLOSED if closed else OPEN


def configured_rate(streams: Sequence[Stream]) -> float | None:
    """Requests per second of all streams together where each has one rate that does not change; else None."""
    rates = []
    for stream in streams:
        arrivals = stream.arrivals if isinstance(stream, SyntheticStream) else None
        if not isinstance(arrivals, Renewal) or not isinstance(arrivals.rate, float):
            return None
        assert isinstance(stream, SyntheticStream)
        if stream.sessions is not None:
            return None
        rates.append(arrivals.rate)
    return sum(rates) if rates else None


def told(stream: Stream, written: dict[str, Any]) -> str:
    """The arrivals of a stream in a few words; `written` is its entry in the scenario."""
    if isinstance(stream, MixedStream):
        rate = sum(_mean_rate(part.arrivals) for part in stream.parts)
        return f"preset {written['preset']}: {len(stream.parts)} clients, {_rate(rate)} on average"
    if not isinstance(stream, SyntheticStream):
        return f"trace {written['trace']}"
    words = _arrivals(stream.arrivals)
    if stream.sessions is not None:
        words += (
            ", each a conversation" if stream.sessions.tools is None else ", each an agent's task"
        )
    return f"preset {written['preset']}: {words}" if written.get("preset") else words


def _arrivals(arrivals: Renewal | Batches | Closed) -> str:
    match arrivals:
        case Closed(users=users, think=think):
            pause = (
                f", {to_seconds(think.ps):g} s" if isinstance(think, Always) else ", think times"
            )
            return f"{users:,} users{pause} between requests"
        case Batches():
            often = (
                "" if arrivals.every_ps is None else f" every {to_seconds(arrivals.every_ps):g} s"
            )
            times = "" if len(arrivals.at_ps) == 1 else f" at {len(arrivals.at_ps)} instants"
            return f"{arrivals.size:,} at once{times}{often}"
    if isinstance(arrivals.rate, Bursts):
        return f"bursts of {arrivals.rate.burst_rate:g}/s over {arrivals.rate.rate:g}/s"
    return f"{_gaps(arrivals)}, {_rate(arrivals.rate)}"


def _gaps(arrivals: Renewal) -> str:
    match arrivals.gaps:
        case Equal():
            return "constant"
        case Exponential():
            return "poisson"
        case Gamma(cv=cv):
            return f"gamma with CV {cv:g}"
        case Weibull(cv=cv):
            return f"weibull with CV {cv:g}"
    return f"measured gaps with CV {arrivals.gaps.cv:.3g}"


def _rate(rate: float | Curve | Bursts) -> str:
    if isinstance(rate, Curve):
        rates = [end for piece in rate.written for end in (piece.start, piece.end)]
        rates += [] if rate.held is None else [rate.held]
        return f"{min(rates):.4g} to {max(rates):.4g}/s"
    return f"{rate:.4g}/s" if isinstance(rate, float) else f"{rate.mean:.4g}/s"


def _mean_rate(arrivals: Renewal | Batches | Closed) -> float:
    return arrivals.mean_rate if isinstance(arrivals, Renewal) else 0.0
