"""Sweeps and searches as plotly figures in plain data, coloured as those of a run (`twin.report.charts`)."""

import math
from collections.abc import Sequence
from typing import Any

from twin.report.texts import duration
from twin.whatif.axes import Axis, text_of
from twin.whatif.figures import Measure, measure
from twin.whatif.sweep import Plan, Point
from twin.whatif.verdict import value_text

Figure = dict[str, Any]
COLORS = 6


def throughput_latency(
    plan: Plan, points: Sequence[Point], load: Axis | None, latency: str
) -> Figure:
    """Each point by its throughput and latency; with an axis of loads, one line for each of the other combinations."""
    index = None if load is None else plan.axes.index(load)
    groups: dict[str, list[Point]] = {}
    for point in points:
        others = [
            f"{axis.label} {text_of(value)}"
            for i, (axis, value) in enumerate(zip(plan.axes, point.values, strict=True))
            if i != index
        ]
        groups.setdefault(", ".join(others) if load is not None else "", []).append(point)
    traces = []
    for number, (name, members) in enumerate(groups.items()):
        known = [
            p
            for p in members
            if p.mean(latency) is not None and p.mean("requests_per_s") is not None
        ]
        if not known:
            continue
        color = f"var(--tier{number % COLORS})"
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if load is not None else "markers",
                "name": name or "configurations",
                "x": [_short(p.mean("requests_per_s")) for p in known],
                "y": [_short(p.mean(latency)) for p in known],
                "text": [_told(plan, p, latency) for p in known],
                "hovertemplate": "%{text}<extra></extra>",
                "line": {"color": color, "width": 2},
                "marker": {
                    "color": color,
                    "size": 8,
                    "symbol": ["x" if p.is_saturated else "circle" for p in known],
                },
            }
        )
    title = "Throughput against latency"
    figure = figure_of(title, traces, "completed requests/s", f"{measure(latency).label}, s")
    figure["layout"]["yaxis"]["type"] = "log"
    return figure


def _told(plan: Plan, point: Point, latency: str) -> str:
    values = ", ".join(
        f"{axis.label} {text_of(value)}"
        for axis, value in zip(plan.axes, point.values, strict=True)
    )
    told = f"{values}<br>{point.mean('requests_per_s'):.3g} requests/s, {duration(point.mean(latency))}"
    return told + (
        "<br>saturated: latency depends on the length of the run" if point.is_saturated else ""
    )


def heat_map(plan: Plan, points: Sequence[Point], figure: Measure) -> Figure | None:
    """The figure over the first two axes, averaged over the others; None with fewer than two axes."""
    if len(plan.axes) < 2:
        return None
    y_axis, x_axis = plan.axes[0], plan.axes[1]
    cells: dict[tuple[str, str], list[float]] = {}
    for point in points:
        value = point.mean(figure.name)
        if value is not None:
            key = (text_of(point.values[0]), text_of(point.values[1]))
            cells.setdefault(key, []).append(value)
    xs, ys = [text_of(v) for v in x_axis.values], [text_of(v) for v in y_axis.values]
    means = [
        [sum(found) / len(found) if (found := cells.get((y, x))) else None for x in xs] for y in ys
    ]
    made = figure_of(
        f"{figure.label}{unit_text(figure)} by {y_axis.label} and {x_axis.label}",
        [
            {
                "type": "heatmap",
                "x": xs,
                "y": ys,
                "z": [[_short(value) for value in row] for row in means],
                "text": [[value_text(value, figure.unit) for value in row] for row in means],
                "texttemplate": "%{text}",
                "hovertemplate": "%{y}, %{x}: %{text}<extra></extra>",
                "colorscale": "Viridis" if figure.more_is_better else "Cividis",
                "reversescale": not figure.more_is_better,
                "showscale": False,
            }
        ],
        x_axis.label,
        y_axis.label,
    )
    for axis in ("xaxis", "yaxis"):
        made["layout"][axis]["type"] = "category"
        made["layout"][axis].pop("rangemode", None)
    made["layout"]["hovermode"] = "closest"
    return made


def tornado(plan: Plan, points: Sequence[Point], figure: Measure) -> Figure | None:
    """How far each key moves the figure: from the worst to the best of its values, averaged over the other keys."""
    bars = []
    for i, axis in enumerate(plan.axes):
        by_value: dict[str, list[float]] = {}
        for point in points:
            value = point.mean(figure.name)
            if value is not None:
                by_value.setdefault(text_of(point.values[i]), []).append(value)
        means = {name: sum(found) / len(found) for name, found in by_value.items()}
        if len(means) > 1:
            low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
            bars.append((axis.label, low, means[low], high, means[high]))
    if not bars:
        return None
    bars.sort(key=lambda bar: bar[4] - bar[2])
    made = figure_of(
        f"What moves {figure.label} most",
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": figure.label,
                "y": [bar[0] for bar in bars],
                "base": [_short(bar[2]) for bar in bars],
                "x": [_short(bar[4] - bar[2]) for bar in bars],
                "text": [
                    f"{low}: {value_text(a, figure.unit)} to {high}: {value_text(b, figure.unit)}"
                    for _, low, a, high, b in bars
                ],
                "textposition": "auto",
                "hovertemplate": "%{y}: %{text}<extra></extra>",
                "marker": {"color": "var(--tier0)"},
            }
        ],
        f"{figure.label}{unit_text(figure)}",
        "",
    )
    made["layout"]["hovermode"] = "closest"
    made["layout"]["yaxis"] = {"type": "category", "automargin": True}
    made["layout"]["xaxis"]["rangemode"] = "tozero"
    return made


def unit_text(figure: Measure) -> str:
    """`, s` behind a label; a share has no unit."""
    return "" if figure.unit in ("", "1", figure.label) else f", {figure.unit}"


def figure_of(title: str, traces: list[Figure], x: str, y: str) -> Figure:
    """A figure as those of a report."""
    return {
        "title": title,
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": x}},
            "yaxis": {"title": {"text": y}},
            "showlegend": len(traces) > 1,
            "hovermode": "closest",
        },
    }


def _short(value: float | None) -> float | None:
    """Six digits are more than a chart shows."""
    return None if value is None or math.isnan(value) else float(f"{value:.6g}")
