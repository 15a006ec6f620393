"""Comparisons, sweeps and searches as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from twin.report.tables import paragraph, table, to_text
from twin.report.texts import limit, plural
from twin.whatif.statistics import Difference
from twin.whatif.verdict import change_text, value_text

STYLES = {"better": "green", "worse": "bold red", "equal": "dim", "open": "yellow", "none": "dim"}
NAMES = {"open": "noise", "none": "nothing to judge"}


def render_comparison(comparison: Mapping[str, Any], color: bool = False) -> str:
    """The comparison, one table a variant and the verdicts last, as text that ends in a newline."""
    base = comparison["baseline"]["name"]
    parts: list[RenderableType] = []
    for variant in comparison["variants"]:
        parts.append(Text(f"{variant['name']} against {base}", "bold"))
        made = table("Figure", "before", "after", "difference", "")
        widest = max((len(row["label"]) for row in variant["judged"]), default=6)
        made.columns[0].min_width = made.columns[0].max_width = min(24, widest)
        made.columns[-1].justify = "left"
        for row in variant["judged"]:
            made.add_row(*_cells(row))
        parts.append(made)
    many = len(comparison["seeds"]) if comparison["seeds"] else 0
    how = (
        f"{plural(many, 'seed')}, the same for all. In brackets, where the difference lies; all "
        f"{plural(comparison['judged'], 'bracket')} hold at once in 98 of 100 comparisons."
        if many
        else comparison["how"]
    )
    parts.append(paragraph(how))
    if any(variant["own_objectives"] for variant in comparison["variants"]):
        parts.append(
            paragraph(
                f"All are judged by the objectives of {comparison['objectives']['of']}, their goodput too; what has "
                "others of its own is held to those besides."
            )
        )
    if comparison["note"]:
        parts.append(paragraph(comparison["note"], "yellow"))
    parts += [paragraph(variant["text"], "bold") for variant in comparison["variants"]]
    return to_text(parts, color)


def _cells(row: Mapping[str, Any]) -> Sequence[Any]:
    word = row["verdict"]
    text = Text(NAMES.get(word, word), STYLES[word])
    if row["met"] is not None:
        kept = "met" if row["met"] else "MISSED"
        text.append(f"; {kept} (<= {limit(row['limit'])})", "green" if row["met"] else "bold red")
    before, after = (
        value_text(row[side], row["unit"]) + (f" ({lost} runs: none served)" if lost else "")
        for side, lost in (("before", row["lost_before"]), ("after", row["lost"]))
    )
    if "change" not in row:
        return row["label"], before, after, "-", text
    found = difference_of(row)
    same = found.change == found.low == found.high == 0
    change = "equal" if same else change_text(found, row["unit"])
    return row["label"], before, after, change, text


def difference_of(row: Mapping[str, Any]) -> Difference:
    """The difference that a row of a comparison tells."""
    return Difference(
        row["before"],
        row["after"],
        row["change"],
        row["low"],
        row["high"],
        row["relative"],
        row["pairs"],
    )
