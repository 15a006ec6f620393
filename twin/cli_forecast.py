"""`twin forecast`: how good forecasters are on the traffic of a scenario, and which is cheapest at the same service."""

import json
from pathlib import Path
from typing import Annotated

import typer

from twin.cli_files import check_writable
from twin.terminal import complain, errors, wants_color, write


def forecast(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML) with cluster.prediction.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the scenario. May be repeated."),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="PATH", help="A forecaster of your own, a dotted path. May be repeated."),
    ] = None,
    attainment: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Also run the scenario with each of them, with as few replicas as reach this "
                     "share of requests within their objectives, and rank them by GPU-hours.", show_default=False),
    ] = None,
    write_history: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the rates of this traffic, one interval a line, as "
                     "cluster.prediction.history takes them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:  # fmt: skip
    """Score forecasters on the traffic of a scenario; each sees only what came before."""
    with errors():
        from twin.report import forecast as report
        from twin.scenario import load_scenario

        check_writable({"--write-history": write_history})
        loaded = load_scenario(scenario, overrides or ())
        scores = report.backtest(loaded, also or ())
        if write_history is not None:
            lines = (f"{rate!r}\n" for rate in report.own_rates(loaded))
            write_history.write_text("".join(lines), encoding="utf-8")
        rows = []
        if attainment is not None:
            sound = [row.name for row in scores if row.error is None and row.forecasts]
            rows = report.matched(
                loaded.to_dict(), sound, attainment, lambda name: complain(f"done: {name}")
            )
        if as_json:
            write(json.dumps(report.as_data(scores, rows), indent=2) + "\n")
            return
        write(report.render_scores(scores, wants_color()))
        if attainment is not None:
            write("\n" + report.render_matched(rows, attainment, wants_color()))
