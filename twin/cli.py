"""The command `twin`: what a person types, and what comes back.

Exit status: 0 done, 1 an objective was missed (`--check`) or cannot be met (searches), 2 bad input, 130 interrupted.
Results go to stdout, progress and complaints to stderr.
"""

import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from io import TextIOWrapper
from typing import Annotated

import typer

from twin.cli_compare import compare
from twin.cli_forecast import forecast
from twin.cli_import import import_
from twin.cli_optimize import fewest_gpus, headroom, optimize
from twin.cli_profile import app as profile_app
from twin.cli_prometheus import from_prometheus
from twin.cli_ready import app as ready_app
from twin.cli_run import run
from twin.cli_show import explain, schema
from twin.cli_sweep import sweep
from twin.cli_trace import app as trace_app
from twin.cli_validate import validate
from twin.compiled import is_compiled
from twin.terminal import INTERRUPTED, complain, errors, wants_color, write

app = typer.Typer(
    name="twin", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command()(run)
app.command()(compare)
app.command()(sweep)
app.command()(optimize)
app.command("fewest-gpus")(fewest_gpus)
app.command()(headroom)
app.command()(forecast)
app.command()(explain)
app.command()(schema)
app.command()(validate)
app.command("import")(import_)
trace_app.command("from-prometheus")(from_prometheus)
app.add_typer(trace_app)
app.add_typer(profile_app)
app.add_typer(ready_app)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        how = "compiled" if is_compiled() else "pure Python"
        write(f"{installed_version('vllm-twin')} ({how})\n")
    except PackageNotFoundError:
        write("vllm-twin runs from its sources, not installed\n")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """A digital twin of LLM serving with vLLM: what if, in seconds, without a GPU."""


@app.command()
def presets(
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="List traffic instead, each fit beside its trace.")
    ] = False,
) -> None:
    """List the policies that a scenario can name, with their numbers; or the traffic."""
    with errors():
        import json

        from twin.report.presets import presets_as_data, render_presets
        from twin.report.traffic_presets import render_traffic_presets, traffic_presets_as_data
        from twin.scenario import traffic_presets

        color = wants_color()
        if traffic:
            known = traffic_presets()
            data, text = traffic_presets_as_data(known), render_traffic_presets(known, color)
        else:
            data, text = presets_as_data(), render_presets(color)
        write(json.dumps(data, indent=2) + "\n" if as_json else text)


def main() -> None:
    """Entry point of `twin` and `python -m twin`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows "?" instead of ending a run with a traceback.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="twin")
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(INTERRUPTED)
