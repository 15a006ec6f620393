"""The charts of the report as plotly figures in plain data.

Colours are names of the page's CSS variables ("var(--slots)"): the page puts the values of the present theme in.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

import numpy as np

from twin.clock import to_seconds
from twin.metrics.events import Event
from twin.metrics.objectives import Objectives
from twin.metrics.tally import Tally
from twin.metrics.timeseries import TimeSeries
from twin.report.texts import duration
from twin.report.texts import limit as limit_text

Figure = dict[str, Any]

SECONDS = "simulated seconds"

MOST_MARKS = 2000
"""Events marked in a timeline at most, evenly chosen."""

SHARES = (
    *range(90),
    *(90 + i / 4 for i in range(36)),
    *(99 + i / 20 for i in range(18)),
    *(99.9 + i / 100 for i in range(10)),
    100,
)
"""Percentiles that a distribution is drawn through: closer together towards the tail."""


def distributions(tally: Tally, tiers: Sequence[str], objectives: Objectives) -> dict[str, Figure]:
    """TTFT, TPOT and E2E: the share of requests within each time, by tier, with the tiers' limits."""
    figures = {}
    for latency, title in (
        ("ttft", "Time to first token"),
        ("tpot", "Time per output token"),
        ("e2e", "Whole reply"),
    ):
        traces = []
        limits = []
        for number, tier in enumerate(tiers):
            x = tally.tiers[tier].latency[latency].curve(SHARES)
            if not x:
                continue
            traces.append(
                _line(x, [round(float(q), 2) for q in SHARES], tier, f"--tier{number % 6}")
            )
            for name, limit in objectives.get(tier, {}).items():
                if name.partition("_")[0] == latency:
                    limits.append(
                        (limit, f"{tier} {name.partition('_')[2]}", f"var(--tier{number % 6})")
                    )
        figures[latency] = _figure(title, traces, "", "% of requests")
        _scale(figures[latency])
        _mark_limits(figures[latency], limits)
    return figures


def timelines(
    series: TimeSeries,
    log: Iterable[Event],
    tiers: Sequence[str],
    slots: int,
    serving: Sequence[int] | None = None,
) -> dict[str, Figure]:
    """Queue, running, KV, tokens and goodput over time, all replicas together.

    `serving` says how many there were at each instant; None = as many as there are rows.
    """
    times = [to_seconds(at_ps) for at_ps in series.times_ps]
    rows = _by_instant(series)
    replicas = len(series.gauges[0])
    there = [replicas] * len(times) if serving is None else serving
    shown = [(number, tier) for number, tier in enumerate(tiers) if tier in series.tiers]

    def total(name: str) -> list[float | None]:
        return [_sum(row[name] for row in at) for at in rows]

    def mean(name: str) -> list[float]:
        return [
            sum(row[name] for row in at) / max(1, number)
            for at, number in zip(rows, there, strict=True)
        ]

    queue = []
    for number, tier in shown:
        color = f"--tier{number % 6}"
        queue.append(_area(times, total(f"ready.{tier}"), f"{tier} ready", color))
        held = total(f"held.{tier}")
        if any(held):
            queue.append(_area(times, held, f"{tier} held", f"{color}-soft"))
    running = [
        _area(times, total(f"running.{tier}"), tier, f"--tier{number % 6}")
        for number, tier in shown
    ]
    running.append(
        _line(times, [slots * number for number in there], "slots", "--limit", dash="dot")
    )
    wasted = mean("kv_wasted")
    used = [u - w for u, w in zip(mean("kv_used"), wasted, strict=True)]
    kv = [
        _area(times, _percent(used), "tokens", "--kv"),
        _area(times, _percent(wasted), "empty in last pages", "--wasted"),
        _area(times, _percent(mean("kv_cached")), "free, still cached", "--cached"),
    ]
    if replicas > 1:
        fullest = [max(row["kv_used"] for row in at) for at in rows]
        kv.append(_line(times, _percent(fullest), "fullest replica", "--limit", dash="dot"))
    marks = _preemption_marks(list(log))
    prefill = [_line(times, total("prefill_tokens_per_s"), "prefill", "--prefill")]
    decode = [_line(times, total("decode_tokens_per_s"), "decode", "--decode"), *marks]
    goodput = [
        _line(times, total(f"good_per_s.{tier}"), tier, f"--tier{number % 6}")
        for number, tier in shown
    ]
    preemptions = [_bars(times, total("preemptions_per_s"), "preemptions", "--preempted")]
    figures = {
        "queue": _figure("Requests waiting", queue, SECONDS, "requests"),
        "running": _figure("Requests running", running, SECONDS, "requests"),
        "kv": _figure("KV cache", kv, SECONDS, "% of blocks"),
        "decode": _figure("Tokens decoded per second", decode, SECONDS, "tokens/s"),
        "prefill": _figure("Prompt tokens computed per second", prefill, SECONDS, "tokens/s"),
        "goodput": _figure("Good requests per second", goodput, SECONDS, "requests/s"),
        "preempted": _figure("Preemptions per second", preemptions, SECONDS, "1/s"),
    }
    if series.gateway is not None:
        waiting = [_area(times, [float(n) for n in series.gateway], "at the gateway", "--limit")]
        outside = _figure("Requests waiting at the gateway", waiting, SECONDS, "requests")
        figures = {"gateway": outside} | figures
    figures["kv"]["layout"]["yaxis"]["range"] = [0, 100]
    for figure in figures.values():
        figure["layout"]["xaxis"]["range"] = [0, times[-1]]
    return figures


def preemption_histogram(histogram: Mapping[str, int]) -> Figure:
    """How many requests were preempted how often."""
    bars = [_bars(list(histogram), list(histogram.values()), "requests", "--preempted")]
    figure = _figure("Requests by the times they were preempted", bars, "times", "requests")
    figure["layout"]["xaxis"]["type"] = "category"
    figure["layout"]["bargap"] = 0.1 if len(histogram) > 10 else 0.6
    return figure


def _by_instant(series: TimeSeries) -> list[list[dict[str, Any]]]:
    rows = list(series.rows())
    each = len(series.gauges[0])
    return [rows[i : i + each] for i in range(0, len(rows), each)]


def _preemption_marks(log: Sequence[Event]) -> list[Figure]:
    """A mark for each preemption at the foot of the chart, which says on hovering what happened."""
    found = [event for event in log if event.kind == "preemption"]
    if not found:
        return []
    chosen = found[:: -(-len(found) // MOST_MARKS)]
    return [
        {
            "type": "scatter", "mode": "markers", "name": "one preemption",
            "x": [to_seconds(event.at_ps) for event in chosen],
            "y": [0] * len(chosen),
            "text": [describe(event) for event in chosen],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"symbol": "line-ns-open", "size": 12, "color": "var(--mark)"},
        }
    ]  # fmt: skip


def describe(event: Event) -> str:
    """A preemption in words."""
    told = event.details
    why = "KV ran out" if told["cause"] == "out_of_kv" else "a higher tier needed its place"
    return (
        f"request {event.request} ({event.tier}) on replica {event.replica}: {why}; "
        f"{told['lost_tokens']:,} tokens to compute again; "
        f"KV {told['kv_used_before']:.1%} before, {told['kv_used_after']:.1%} after; "
        f"{told['running']} running, {told['waiting']} waiting"
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _percent(shares: Iterable[float]) -> list[float]:
    return [100 * value for value in shares]


def _short(values: Iterable[Any]) -> list[Any]:
    """Six digits are more than a chart can show."""
    return [float(f"{v:.6g}") if isinstance(v, float) else v for v in values]


def _line(x: Any, y: Any, name: str, color: str, dash: str = "solid") -> Figure:
    line = {"color": f"var({color})", "width": 2, "dash": dash}
    trace = {"type": "scatter", "mode": "lines", "name": name, "line": line}
    return trace | {"x": _short(map(float, x)), "y": _short(y)}


def _area(x: Any, y: Any, name: str, color: str) -> Figure:
    shape = {"line": {"width": 0, "shape": "hv"}, "stackgroup": "one", "fillcolor": f"var({color})"}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": _short(x),
        "y": _short(y),
    } | shape


def _bars(x: Any, y: Any, name: str, color: str) -> Figure:
    marker = {"color": f"var({color})"}
    return {"type": "bar", "name": name, "x": _short(x), "y": _short(y), "marker": marker}


def _figure(title: str, traces: list[Figure], x: str, y: str) -> Figure:
    """The page writes the title above the chart."""
    return {
        "title": title,
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": x}},
            "yaxis": {"title": {"text": y}, "rangemode": "tozero"},
            "showlegend": len(traces) > 1,
            "hovermode": "x unified",
        },
    }


def _scale(figure: Figure) -> None:
    """A logarithmic axis of times, each tick with its unit."""
    values = [x for trace in figure["data"] for x in trace["x"] if x > 0]
    if not values:
        return
    ticks = ticks_of(min(values), max(values))
    figure["layout"]["hovermode"] = "closest"
    figure["layout"]["xaxis"] |= {
        "type": "log", "tickvals": ticks, "ticktext": [limit_text(tick) for tick in ticks],
    }  # fmt: skip
    for trace in figure["data"]:
        trace["text"] = [duration(x) for x in trace["x"]]
        trace["hovertemplate"] = "%{y:.4g} % within %{text}"


def ticks_of(low: float, high: float) -> list[float]:
    """Round values for a logarithmic axis, at least two of them within or beside any range of positive values."""
    if high > 3 * low:
        digits = (1, 2, 5) if high < 100 * low else (1,)
        return [digit * 10.0**n for n in range(-6, 8) for digit in digits]
    # Between 1 and 2 or 2 and 5 there might be none: steps as on a linear axis.
    span = max(high - low, 0.1 * high)
    size = 10.0 ** floor(log10(span / 3))
    step = next(digit * size for digit in (5, 2, 1) if 3 * digit * size <= span)
    first = floor(low / step)
    last = max(ceil(high / step), first + 1)
    return [float(f"{k * step:.6g}") for k in range(first, last + 1) if k > 0]


def _mark_limits(figure: Figure, limits: Sequence[tuple[float, str, str]]) -> None:
    layout = figure["layout"]
    values = [x for trace in figure["data"] for x in trace["x"] if x > 0]
    # Left of a line that stands at the left edge, its name would lie over the axis.
    right_of = (
        min(values, default=0.0) * (max(values, default=1.0) / min(values, default=1.0)) ** 0.2
    )
    layout["shapes"] = [
        {
            "type": "line", "x0": limit, "x1": limit, "yref": "paper", "y0": 0, "y1": 1,
            "line": {"color": color, "width": 1, "dash": "dash"},
        }
        for limit, _, color in limits
    ]  # fmt: skip
    layout["annotations"] = [
        {
            "x": float(np.log10(limit)), "yref": "paper", "y": 0.02, "text": f"limit {name}",
            "showarrow": False, "textangle": -90,
            "xanchor": "left" if limit < right_of else "right", "yanchor": "bottom",
            "font": {"color": color, "size": 11},
        }
        for limit, name, color in limits
    ]  # fmt: skip
