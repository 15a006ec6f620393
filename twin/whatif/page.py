"""A sweep, or a search, as one page that opens offline; and the texts that its tables and a terminal share."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from twin.report.html import chart, page, section, table_html
from twin.report.texts import count, plural
from twin.whatif.axes import Axis, is_load, text_of
from twin.whatif.charts import heat_map, throughput_latency, tornado
from twin.whatif.figures import Measure, measure
from twin.whatif.load_curve import LoadCurve, load_curve
from twin.whatif.sweep import Plan, Point, Row, points_of
from twin.whatif.verdict import value_text

SHOWN = 200
"""Rows of the table in a page; the Parquet file has all."""


def latency_of(plan: Plan, points: Sequence[Point]) -> str:
    """The figure that is called latency: the first objective that is one, else TTFT p99 of the first tier."""
    for tier, limits in plan.scenario.objectives.items():
        for name in limits:
            return f"{tier}.{name}"
    known = (name for point in points for row in point.rows for name in row)
    return next((name for name in known if name.endswith(".ttft_p99")), "ONLINE.ttft_p99")


def columns_of(plan: Plan, latency: str) -> list[Measure]:
    """The figures in the tables of a sweep."""
    names = [
        f"{tier}.{name}" for tier, limits in plan.scenario.objectives.items() for name in limits
    ]
    names += [latency, "requests_per_s", "all.goodput", "all.attainment", "gpu_hours"]
    limits = plan.scenario.objectives
    found = {}
    for name in dict.fromkeys(names):
        tier, _, rest = name.rpartition(".")
        found[name] = measure(name, limits.get(tier, {}).get(rest))
    return list(found.values())


def curves_of(plan: Plan, points: Sequence[Point], latency: str) -> list[tuple[str, LoadCurve]]:
    """A curve for each combination of the other keys, where one of the keys is a load and has four values or more."""
    load = next((axis for axis in plan.axes if is_load(axis) and len(axis.values) >= 4), None)
    if load is None:
        return []
    index = plan.axes.index(load)
    groups: dict[str, list[tuple[float, Point]]] = {}
    for point in points:
        others = ", ".join(
            f"{axis.label} {text_of(value)}"
            for i, (axis, value) in enumerate(zip(plan.axes, point.values, strict=True))
            if i != index
        )
        groups.setdefault(others, []).append((float(point.values[index]), point))
    found = []
    for name, members in groups.items():
        rows = [row for _, point in members for row in point.rows]
        gpus = [row["gpus"] for row in rows if row.get("gpus")]
        mean = sum(g for g in gpus if g is not None) / len(gpus) if gpus else 1.0
        each = next((row["gpus_per_replica"] for row in rows if row.get("gpus_per_replica")), 1.0)
        found.append((name, load_curve(load.label, members, latency, mean / (each or 1.0))))
    return found


def render_page(plan: Plan, rows: Mapping[int, Row], figure: Measure | None = None) -> str:
    """The page of a sweep, or of the part of it that was run. The same rows give the same page."""
    points = points_of(plan, rows)
    latency = latency_of(plan, points)
    best = figure or measure("all.goodput")
    load = next((axis for axis in plan.axes if is_load(axis)), None)
    figures: dict[str, Any] = {"curve": throughput_latency(plan, points, load, latency)}
    for name, made in (
        ("heat", heat_map(plan, points, best)),
        ("tornado", tornado(plan, points, best)),
    ):
        if made is not None:
            figures[name] = made
    name = plan.scenario.name
    told = [f'<p class="verdict" id="verdict">{escape(state_of(plan, rows))}</p>']
    for group, curve in curves_of(plan, points, latency):
        told.append(f"<p>{escape(f'{group}: ' if group else '')}{escape(curve.text())}</p>")
    captions = {
        "curve": "Down and to the right is better: more requests a second in less time. A cross is saturated: its "
        "latency depends on how long the run was.",
        "heat": "Each cell is the mean over the seeds and the keys that are not shown.",
        "tornado": "Each bar runs from the worst to the best value of its key, averaged over the others: the longest "
        "bar is the key that matters most.",
    }
    body = [
        f'<header><h1>{escape(name)}: sweep</h1><p class="facts">{escape(axes_text(plan))}</p>{"".join(told)}</header>',
        *(
            section(
                figures[key]["title"], f"<p>{escape(captions[key])}</p>{chart(key, figures[key])}"
            )
            for key in figures
        ),
        section("Configurations", _table(plan, points, latency)),
    ]
    return page(f"{name}: sweep", "\n".join(body), figures)


def state_of(plan: Plan, rows: Mapping[int, Row]) -> str:
    """How much of a sweep was run, and what was refused."""
    refused = sum(row.error is not None for row in rows.values())
    text = f"{count(len(rows))} of {plural(plan.size, 'run')}: " + (
        f"{plural(len(plan.points), 'configuration')}, {plural(len(plan.seeds), 'seed')} each."
    )
    return text + (f" {plural(refused, 'run')} could not be made." if refused else "")


def axes_text(plan: Plan) -> str:
    """The keys and their values."""
    return "; ".join(f"{axis.key} {values_text(axis)}" for axis in plan.axes)


def values_text(axis: Axis) -> str:
    """The values of a key, the middle ones left out where there are many."""
    texts = [text_of(value) for value in axis.values]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:3], "...", texts[-1]])


def _table(plan: Plan, points: Sequence[Point], latency: str) -> str:
    measures = columns_of(plan, latency)
    head = [*(axis.label for axis in plan.axes), *(m.label for m in measures), ""]
    rows = []
    for point in points[:SHOWN]:
        cells = [escape(text_of(value)) for value in point.values]
        for m in measures:
            value = point.mean(m.name)
            if point.is_lost(m.name):
                cells.append('<span class="missed">none served</span>')
                continue
            text = escape(value_text(value, m.unit))
            if m.limit is not None and value is not None:
                text = f'<span class="{"met" if value <= m.limit else "missed"}">{text}</span>'
            cells.append(text)
        word = (
            "refused: " + point.error if point.error else "saturated" if point.is_saturated else ""
        )
        rows.append([*cells, escape(word)])
    more = len(points) - SHOWN
    rest = f"<p class=soft>and {count(more)} more in the Parquet file</p>" if more > 0 else ""
    return table_html(head, rows, len(plan.axes)) + rest
