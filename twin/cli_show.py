"""`twin schema` and `twin explain`: what a scenario may say, and what one comes to before it is run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from twin.terminal import errors, wants_color, write


def schema(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON schema, for editors that check YAML.")
    ] = False,
) -> None:
    """List the keys of a scenario file, with type, default and meaning."""
    with errors():
        from twin.report.schema import json_schema, render_schema

        if as_json:
            write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
        else:
            write(render_schema(color=wants_color()))


def explain(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML).", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the scenario. May be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a scenario comes to: memory, steps and their parts, which limit is met first."""
    with errors():
        from twin.report import explain as report
        from twin.scenario import load_scenario

        found = report.explain(load_scenario(scenario, overrides or ()))
        if as_json:
            write(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            write(report.render_explain(found, color=wants_color()))
