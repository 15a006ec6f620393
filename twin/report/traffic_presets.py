"""The traffic presets for people and for programs: each fit beside its trace."""

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from twin.report.tables import table, to_text
from twin.report.texts import count
from twin.workload.presets import Preset

SHOWN = ("p50", "p90", "p99")


def traffic_presets_as_data(presets: Mapping[str, Preset]) -> dict[str, Any]:
    """Name -> where it comes from, its streams as a scenario could spell them out, and the fit."""
    return {
        name: {
            "title": preset.title,
            "source": preset.source,
            "licence": preset.licence,
            "requests_fitted_on": preset.rows,
            "notes": list(preset.notes),
            "traffic": list(preset.streams),
            "trace": dict(preset.trace),
            "fit": dict(preset.fit),
        }
        for name, preset in presets.items()
    }


def render_traffic_presets(presets: Mapping[str, Preset], color: bool = False) -> str:
    """All traffic presets as text: figures, then sources and notes."""
    made = table(
        "Traffic", "rate/s", "CV", "prompt\np50", "p90", "p99", "output\np50", "p90", "p99"
    )
    made.columns[0].max_width, made.columns[0].min_width = None, max(map(len, presets))
    for preset in presets.values():
        made.add_row(Text(preset.name, "bold", no_wrap=True), *_figures(preset.trace))
        made.add_row("  preset", *_figures(preset.fit))
    blocks: list[list[RenderableType]] = [
        [made],
        [
            Text(
                "First the trace, below it the preset. CV is that of the gaps between requests, 1 for Poisson. Where "
                "there is no rate, the scenario must give one. Of a mix the largest client is shown, beside the rate "
                "of all; --json has the others."
            )
        ],
    ]
    blocks += [_about(preset) for preset in presets.values()]
    return "\n".join(to_text(block, color) for block in blocks)


def _about(preset: Preset) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text.assemble(
            (preset.name, "bold"), f": {preset.title}; fitted on {count(preset.rows)} requests."
        ),
        Text(f"  Source: {preset.source}. Licence of the source: {preset.licence}."),
    ]
    return lines + [Text(f"  {note}") for note in preset.notes]


def _figures(figures: Mapping[str, Any]) -> list[str]:
    of_one = figures["clients"][0] if "clients" in figures else figures
    lengths = [_number(of_one[key][q]) for key in ("prompt_tokens", "output_tokens") for q in SHOWN]
    return [_number(figures["rate"]), _number(of_one["cv"]), *lengths]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1000:.3g}k"
    return count(value) if value >= 100 or value == int(value) else f"{value:.3g}"
