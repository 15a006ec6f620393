"""The answer of a search: its front as a chart, a page, a table for a terminal."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import RenderableType

from twin.report.html import chart, page, section, table_html
from twin.report.tables import paragraph, table, to_text
from twin.report.texts import plural
from twin.whatif.charts import Figure, figure_of, unit_text
from twin.whatif.figures import Measure
from twin.whatif.optimize import Search
from twin.whatif.verdict import value_text


def front_figure(search: Search, found: Mapping[str, Any]) -> Figure:
    """Everything tried by the first two goals (one goal: by the first constraint, or in the order tried)."""
    x, y = axes_of(search)
    chosen = found["chosen"]
    front = {entry["key"] for entry in found["front"]}
    fell = {entry["key"] for entry in found["confirmed"] if not entry["is_good"]}
    ran = [entry for entry in found["trials"] if entry["figures"]]
    groups: list[tuple[str, list[Mapping[str, Any]], str, str]] = [
        ("breaks an objective", [e for e in ran if not e["is_good"]], "var(--wasted)", "x"),
        (
            "keeps all objectives",
            [e for e in ran if e["is_good"] and e["key"] not in front | fell],
            "var(--tier0)",
            "circle",
        ),
        (
            "kept them in the search, not under fresh seeds",
            [e for e in ran if e["key"] in fell],
            "var(--wasted)",
            "diamond-open",
        ),
        ("front", [e for e in ran if e["key"] in front - fell], "var(--good)", "diamond"),
    ]
    traces = [
        _marks(name, entries, x, y, color, symbol)
        for name, entries, color, symbol in groups
        if entries
    ]
    if chosen is not None:
        # Where its mark is: `chosen` has the figures of other seeds.
        same = [entry for entry in ran if entry["key"] == chosen["key"]]
        mark = _marks("to take", same, x, y, "var(--tier1)", "star")
        mark["marker"]["size"] = 16
        traces.append(mark)
    xs, ys = x.label + unit_text(x), y.label + unit_text(y)
    figure = figure_of(f"{y.label} against {x.label}", traces, xs, ys)
    for axis, m in (("xaxis", x), ("yaxis", y)):
        values = [v for entry in ran if (v := entry["figures"].get(m.name)) is not None]
        if values and min(values) > 0 and max(values) > WIDE * min(values):
            figure["layout"][axis]["type"] = "log"
            figure["layout"][axis].pop("rangemode", None)
    return figure


WIDE = 30
"""So many times the least value on an axis need a logarithmic scale, or a hopeless trial hides the others."""


def axes_of(search: Search) -> tuple[Measure, Measure]:
    """The two figures of the chart."""
    first = search.goals[0]
    others = [*search.goals[1:], *search.constraints]
    return first, next((m for m in others if m.name != first.name), first)


def _marks(
    name: str, entries: Sequence[Mapping[str, Any]], x: Measure, y: Measure, color: str, symbol: str
) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [entry["figures"].get(x.name) for entry in entries],
        "y": [entry["figures"].get(y.name) for entry in entries],
        "text": [entry["key"].replace(" ; ", "<br>") for entry in entries],
        "customdata": [entry["key"] for entry in entries],
        "hovertemplate": "%{text}<br>%{x}, %{y}<extra></extra>",
        "marker": {"color": color, "symbol": symbol, "size": 9},
    }


def render_front_page(search: Search, found: Mapping[str, Any]) -> str:
    """The page of a search."""
    name = search.scenario.name
    figure = front_figure(search, found)
    body = [
        f'<header><h1>{escape(name)}: what to take</h1><p class="facts">{escape(state_of(found))}</p>'
        f'<p class="verdict" id="verdict">{escape(found["text"])}</p></header>',
        section(
            figure["title"],
            "<p>Each mark is a configuration, the mean over its seeds. A diamond is on the front: no other that keeps "
            "all objectives is better in every goal. The star is the one to take. An open diamond kept its "
            "objectives in the search, but not when it was run again under other seeds.</p>"
            + chart("front", figure),
        ),
        section("The front, run again under other seeds", _page_table(search, found)),
    ]
    return page(f"{name}: what to take", "\n".join(body), {"front": figure})


def _shown(search: Search) -> list[Measure]:
    return list({m.name: m for m in (*search.goals, *search.constraints)}.values())


def _unserved(search: Search, entry: Mapping[str, Any]) -> set[str]:
    """The objectives without a value because requests came and none was served."""
    over = zip(search.constraints, entry["excess"], strict=False)
    return {m.name for m, by in over if by > 0 and entry["figures"].get(m.name) is None}


def _page_table(search: Search, found: Mapping[str, Any]) -> str:
    measures = _shown(search)
    rows = []
    for entry in found["confirmed"]:
        taken = found["chosen"] is not None and entry["key"] == found["chosen"]["key"]
        cells = [escape(entry["key"].replace(" ; ", ", "))]
        for m in measures:
            value = entry["figures"].get(m.name)
            text = escape(value_text(value, m.unit))
            if m.name in _unserved(search, entry):
                text = '<span class="missed">none served</span>'
            if m.limit is not None and value is not None:
                text = f'<span class="{"met" if value <= m.limit else "missed"}">{text}</span>'
            cells.append(text)
        rows.append(
            [*cells, "take" if taken else "" if entry["is_good"] else "breaks an objective"]
        )
    return table_html(["Configuration", *(m.label for m in measures), ""], rows)


def state_of(found: Mapping[str, Any]) -> str:
    """How much was tried, in a sentence."""
    text = f"{plural(found['tried'], 'configuration')} tried"
    if found["stopped_early"]:
        text += f", {found['stopped_early']} given up after a part of their seeds"
    if found["refused"]:
        text += f", {found['refused']} could not run"
    return text + (". Interrupted." if found["interrupted"] else ".")


def render_front(search: Search, found: Mapping[str, Any], color: bool = False) -> str:
    """The front in a terminal, and what to take."""
    parts: list[RenderableType] = [paragraph(state_of(found))]
    measures = _shown(search)[:3]
    made = table("Front", *(m.label for m in measures), "")
    lines = [line for entry in found["confirmed"] for line in entry["key"].split(" ; ")]
    # A key that is broken in the middle cannot be copied.
    made.columns[0].max_width = 40
    made.columns[0].min_width = min(40, max(map(len, lines), default=5))
    made.columns[-1].min_width, made.columns[-1].justify = 5, "left"
    for entry in found["confirmed"]:
        taken = found["chosen"] is not None and entry["key"] == found["chosen"]["key"]
        gone = _unserved(search, entry)
        cells = [
            "none served" if m.name in gone else value_text(entry["figures"].get(m.name), m.unit)
            for m in measures
        ]
        word = "take" if taken else "" if entry["is_good"] else "broke"
        made.add_row(entry["key"].replace(" ; ", "\n"), *cells, word)
    if found["confirmed"]:
        parts.append(made)
    parts.append(paragraph(found["text"], "bold"))
    return to_text(parts, color)
