"""A sweep in a terminal, and as JSON."""

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from twin.report.tables import paragraph, table, to_text
from twin.report.texts import count
from twin.whatif.axes import text_of
from twin.whatif.figures import Measure
from twin.whatif.page import columns_of, curves_of, latency_of, state_of
from twin.whatif.sweep import Plan, Point, Row, points_of
from twin.whatif.verdict import value_text

SHOWN = 20
"""Configurations in a terminal; the best by the figure asked for."""


def sweep_as_data(plan: Plan, rows: Mapping[int, Row]) -> dict[str, Any]:
    """For JSON: the points with the means of their figures, and what the load curves say."""
    points = points_of(plan, rows)
    latency = latency_of(plan, points)
    return {
        "runs": len(rows),
        "of": plan.size,
        "axes": [{"key": axis.key, "values": list(axis.values)} for axis in plan.axes],
        "seeds": list(plan.seeds),
        "curves": [
            {"configuration": group, **curve.to_dict()}
            for group, curve in curves_of(plan, points, latency)
        ],
        "points": [
            {
                "values": dict(zip((axis.key for axis in plan.axes), point.values, strict=True)),
                "saturated": point.is_saturated,
                "error": point.error,
                "figures": {
                    name: point.mean(name) for name in (point.rows[0] if point.rows else {})
                },
            }
            for point in points
        ],
    }


def render_sweep(plan: Plan, rows: Mapping[int, Row], best: Measure, color: bool = False) -> str:
    """The configurations, the best by `best` first where there are many, and the load curves."""
    points = points_of(plan, rows)
    latency = latency_of(plan, points)
    parts: list[RenderableType] = [paragraph(state_of(plan, rows), "bold")]
    measures = [m for m in columns_of(plan, latency) if m.name != best.name][
        : max(2, 5 - len(plan.axes))
    ]
    shown = points
    if len(points) > SHOWN:
        sign = -1 if best.more_is_better else 1
        known = [point for point in points if point.mean(best.name) is not None]
        shown = sorted(known, key=lambda point: sign * (point.mean(best.name) or 0.0))[:SHOWN]
    made = table(*(axis.label for axis in plan.axes), best.label, *(m.label for m in measures), "")
    made.columns[-1].justify = "left"
    for i in range(len(plan.axes)):
        made.columns[i].no_wrap, made.columns[i].max_width = True, 24
    for point in shown:
        made.add_row(*_cells(point, [best, *measures]))
    parts.append(made)
    if len(points) > len(shown):
        parts.append(paragraph(f"The best {len(shown)} of {count(len(points))} by {best.label}."))
    errors = list(dict.fromkeys(point.error for point in points if point.error))
    parts += [paragraph(f"Refused: {error}", "yellow") for error in errors[:3]]
    for group, curve in curves_of(plan, points, latency):
        parts.append(paragraph((f"{group}: " if group else "") + curve.text()))
    return to_text(parts, color)


def _cells(point: Point, measures: list[Measure]) -> list[Any]:
    cells: list[Any] = [text_of(value) for value in point.values]
    for m in measures:
        value = point.mean(m.name)
        if point.is_lost(m.name):
            cells.append(Text("none served", "bold red"))
            continue
        text = Text(value_text(value, m.unit))
        if m.limit is not None and value is not None and value > m.limit:
            text.stylize("bold red")
        cells.append(text)
    word = "refused" if point.error else "saturated" if point.is_saturated else ""
    return [*cells, word]
