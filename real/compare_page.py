"""The twin beside measured, on one page: scatter of single requests and what was inside over time."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from real.compare import Row, Run, Table
from real.compare_misses import Misses

POINTS = 400
"""Instants of a timeline."""


def page(runs: Sequence[Run], rows: Sequence[Row], misses: dict[str, Misses], notes: Sequence[str]) -> str:  # fmt: skip
    """The page as HTML that opens anywhere, without a network."""
    from plotly.offline import get_plotlyjs

    parts, figures = [], {}
    for number, run in enumerate(runs):
        for name, figure in (("scatter", scatter(run)), ("inside", timeline(run))):
            figures[f"{name}{number}"] = figure
        parts.append(
            f"<h2>{escape(run.name)}: {escape(run.regime)}</h2>"
            f'<div class="pair"><div id="scatter{number}"></div><div id="inside{number}"></div></div>'
            + _misses(misses[run.name])
        )
    data = json.dumps(figures, allow_nan=False).replace("</", "<\\/")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Twin beside measured</title><style>'
        "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ccc}"
        "td:first-child,th:first-child,td:nth-child(2){text-align:left}.pair{display:flex;flex-wrap:wrap}"
        ".pair>div{flex:1 1 420px;height:340px}</style></head><body><h1>Twin beside measured</h1>"
        + "".join(f"<p>{escape(note)}</p>" for note in notes)
        + _table(rows)
        + "".join(parts)
        + f'<script type="application/json" id="figures">{data}</script><script>{get_plotlyjs()}</script><script>'
        "const figures=JSON.parse(document.getElementById('figures').textContent);"
        "for(const id in figures)Plotly.newPlot(id,figures[id].data,figures[id].layout,"
        "{responsive:true,displaylogo:false});</script></body></html>\n"
    )


def scatter(run: Run) -> dict[str, Any]:
    """Time to first token of each request, predicted over measured, on logarithmic axes."""
    if len(run.measured["arrival_s"]) != len(run.predicted["arrival_s"]):
        return _figure("TTFT: other numbers of requests", [], "", "")
    x, y = _ttft(run.measured), _ttft(run.predicted)
    known = [(a, b) for a, b in zip(x, y, strict=True) if a and b and a > 0 and b > 0]
    low = min((min(pair) for pair in known), default=1e-3)
    high = max((max(pair) for pair in known), default=1.0)
    traces = [
        {"x": [a for a, _ in known], "y": [b for _, b in known], "mode": "markers", "type": "scatter",
         "marker": {"size": 5, "opacity": 0.6}, "name": "a request"},
        {"x": [low, high], "y": [low, high], "mode": "lines", "line": {"dash": "dot"}, "name": "equal"},
    ]  # fmt: skip
    figure = _figure("Time to first token", traces, "measured, seconds", "twin, seconds")
    for axis in ("xaxis", "yaxis"):
        figure["layout"][axis]["type"] = "log"
    return figure


def timeline(run: Run) -> dict[str, Any]:
    """Requests inside over time, measured and predicted."""
    ends = [
        t for table in (run.measured, run.predicted) for t in table["finish_s"] if t is not None
    ]
    instants = np.linspace(0.0, max(ends, default=1.0), POINTS)
    traces = [
        {"x": instants.round(4).tolist(), "y": inside(table, instants), "mode": "lines", "name": name,
         "line": {"shape": "hv"}}
        for name, table in (("measured", run.measured), ("twin", run.predicted))
    ]  # fmt: skip
    return _figure("Requests inside", traces, "seconds", "requests")


def inside(table: Table, instants: "np.ndarray[Any, Any]") -> list[int]:
    """Requests that had come and not left at each instant."""
    came = np.sort(np.array(table["arrival_s"], dtype=float))
    left = np.sort([t for t in table["finish_s"] if t is not None])
    counts = np.searchsorted(came, instants, "right") - np.searchsorted(left, instants, "right")
    return [int(n) for n in counts]


def _ttft(table: Table) -> list[float | None]:
    pairs = zip(table["first_token_s"], table["arrival_s"], strict=True)
    return [None if first is None else first - due for first, due in pairs]


def _figure(title: str, traces: list[dict[str, Any]], x: str, y: str) -> dict[str, Any]:
    layout = {
        "title": {"text": title, "font": {"size": 15}},
        "margin": {"t": 40, "r": 10, "l": 60, "b": 45},
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.1, "x": 0.5},
    }
    return {"data": traces, "layout": layout}


def _table(rows: Sequence[Row]) -> str:
    cells = "".join(
        f"<tr><td>{escape(row.comparison.metric)}</td><td>{escape(row.comparison.regime)}</td>"
        f"<td>{row.comparison.predicted:.4g}</td><td>{row.comparison.measured:.4g}</td>"
        f"<td>{100 * row.comparison.error:+.1f} %</td>"
        f"<td>{'' if row.spread is None else f'{100 * row.spread:.1f} %'}</td><td>{row.comparison.requests}</td></tr>"
        for row in rows
    )
    heads = ("figure", "regime", "twin", "measured", "error", "spread of runs", "requests")
    return "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + f"</tr>{cells}</table>"


def _misses(found: Misses) -> str:
    if not found.rows:
        return "".join(f"<p>{escape(text)}</p>" for text in found.differs)
    heads = list(found.rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[head])}</td>" for head in heads) + "</tr>"
        for row in found.rows
    )
    told = "".join(f"<li>{escape(text)}</li>" for text in found.differs)
    return (
        "<h3>Requests predicted worst</h3><table><tr>"
        + "".join(f"<th>{escape(head)}</th>" for head in heads)
        + f"</tr>{body}</table>"
        + (f"<ul>{told}</ul>" if told else "")
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
