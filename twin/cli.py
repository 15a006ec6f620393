"""The command `twin`: what a person types, and what comes back.

Exit status: 0 done, 1 an objective was missed (`--check`), 2 bad input, 130 interrupted. Results go to stdout, progress
and complaints to stderr.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_prometheus import from_prometheus
from twin.cli_trace import app as trace_app
from twin.terminal import INTERRUPTED, MISSED, complain, errors, wants_color, write

app = typer.Typer(
    name="twin", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
trace_app.command("from-prometheus")(from_prometheus)
app.add_typer(trace_app)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        write(f"{installed_version('vllm-twin')}\n")
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
def run(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML).", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the scenario, e.g. policy=vllm-fcfs or traffic.0.speedup=3. "
            "May be repeated.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Replaces run.seed.", show_default=False)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if an objective is missed.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at a request that can never run.")
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every request to a .csv or .jsonl file."),
    ] = None,
    explain: Annotated[
        list[int] | None,
        typer.Option(
            "--explain-request",
            metavar="INDEX",
            help="Say after the run what was decided about this request, the first being 0. "
            "May be repeated.",
        ),
    ] = None,
) -> None:
    """Simulate a scenario and say how it went."""
    with errors():
        # Only this command needs them, and they take longer to load than the rest takes to run.
        from twin.report.decisions import render_decisions
        from twin.report.json_summary import objectives_missed, summarize, to_json
        from twin.report.records_file import check_path, write_records
        from twin.report.tables import render
        from twin.simulation import load_scenario, simulate

        if records is not None:
            check_path(records)
        loaded = load_scenario(scenario, overrides or (), seed)
        with _progress() as progress:
            result = simulate(loaded, progress=progress, strict=strict, watch=explain or ())
        summary = summarize(result)
        lives = [render_decisions(result, index) for index in explain or ()]
        if records is not None:
            write_records(records, result.records)
        if as_json:
            for warning in summary["warnings"]:
                complain(f"warning: {warning}")
            for life in lives:
                complain(life)
            write(to_json(summary))
        else:
            write("\n".join([render(summary, color=wants_color()), *lives]))
        if result.interrupted:
            raise typer.Exit(INTERRUPTED)
        if check and objectives_missed(summary):
            raise typer.Exit(MISSED)


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
        sys.exit(INTERRUPTED)


@contextmanager
def _progress() -> Iterator[Any]:
    """What `simulate` reports progress to: a bar on stderr if that is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        BarColumn(),
        TextColumn("{task.fields[ended]} requests, {task.fields[at]} simulated"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, ended="0", at="0 s")

        def update(ended: int, expected: int | None, now_ps: int) -> None:
            of = "" if expected is None else f" of {expected:,}"
            at = f"{now_ps / 1e12:,.1f} s"
            bar.update(task, completed=ended, total=expected, ended=f"{ended:,}{of}", at=at)

        yield update
