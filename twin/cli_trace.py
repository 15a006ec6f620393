"""The commands `twin trace ...`: what is in a trace of requests, and from one format to another."""

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_files import keep_apart
from twin.errors import InputError
from twin.terminal import (
    BAD_INPUT,
    INTERRUPTED,
    Update,
    complain,
    errors,
    progress_bar,
    wants_color,
    write,
)

app = typer.Typer(name="trace", no_args_is_help=True)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Trace, plain or gzip.", show_default=False)
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Format of the file, if its beginning does not tell: azure, burstgpt, mooncake, sharegpt, alibaba, "
        "twin-csv, twin-jsonl or twin-parquet.",
    ),
]
Window = Annotated[
    str | None,
    typer.Option(metavar="FROM:TO", help="Only requests of these seconds of the file."),
]
First = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Only the first N requests (of the window).")
]


@app.callback()
def trace() -> None:
    """Look at traces of requests and convert them."""


@app.command()
def check(
    file: File,
    format_name: FormatName = None,
    window: Window = None,
    first: First = None,
    scenario: Annotated[
        Path | None,
        typer.Option(
            metavar="SCENARIO",
            help="Say how much of one replica of this scenario the requests need.",
        ),
    ] = None,
    listed: Annotated[
        int, typer.Option("--lines", min=0, metavar="N", help="Malformed lines to name one by one.")
    ] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Say what is in a trace and what is wrong with it, line by line; status 2 if a line is malformed."""
    with errors():
        import json

        from twin.report.trace_check import render_check
        from twin.workload.check import check_trace

        selected = _selection(window, first)
        with progress_bar() as update:
            progress = None if update is None else partial(_tell, update)
            found, load = check_trace(str(file), format_name, selected, listed, progress)
        if scenario is not None and found["requests"]:
            _weigh(found, load, scenario)
        if as_json:
            write(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            write(render_check(found, wants_color()))
        if found["interrupted"]:
            raise typer.Exit(INTERRUPTED)
        if found["malformed"]["total"]:
            raise typer.Exit(BAD_INPUT)


def _tell(update: Update, done: int, total: int) -> None:
    update(done, total, f"{done:,} of {total:,} lines")


def _weigh(found: dict[str, Any], load: Any, path: Path) -> None:
    """Add what one replica of the scenario can take, and a warning if nothing will queue."""
    from twin.capacity import busiest, replica_cost, too_little
    from twin.scenario import load_scenario

    scenario = load_scenario(path)
    prompt, output = found["prompt_tokens"]["mean"], found["output_tokens"]["mean"]
    cost = replica_cost(scenario, prompt, output)
    share, part = busiest(load, cost)
    width_s = found["time"]["busiest"]["window_s"]
    found["capacity"] = {
        "scenario": scenario.name,
        "replica_rate": 1 / (cost.prompt_token_s * prompt + cost.output_token_s * output),
        "window_s": width_s,
        "busiest_share": share,
        "busiest_from_s": part.from_s,
    }
    if share < 1:
        found["warnings"].append(too_little(share, width_s))


@app.command()
def formats(
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the formats: how they are recognised and what they can hold."""
    with errors():
        import json

        from twin.report.trace_check import formats_as_data, render_formats

        if as_json:
            write(json.dumps(formats_as_data(), indent=2) + "\n")
        else:
            write(render_formats(wants_color()))


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="Trace to read, plain or gzip.", show_default=False),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="File to write: .csv, .jsonl or .parquet mean our own formats; .gz packs.",
            show_default=False,
        ),
    ],
    format_name: FormatName = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format to write, if the name of OUT does not tell."),
    ] = None,
    window: Window = None,
    first: First = None,
    speedup: Annotated[
        str, typer.Option(metavar="X", help="Divide instants by X: 2 doubles the rate.")
    ] = "1",
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Drop what the format to write cannot hold.")
    ] = False,
    skip_malformed: Annotated[
        bool, typer.Option("--skip-malformed", help="Leave malformed lines out, and count them.")
    ] = False,
) -> None:
    """Write a trace in another format, all of it or a part; what would be lost is refused."""
    with errors():
        from twin.workload.convert import convert as converted

        keep_apart({"OUT": target}, [source])
        done = converted(
            str(source),
            str(target),
            format_name,
            to,
            _selection(window, first),
            _speedup(speedup),
            lossy,
            skip_malformed,
        )
        _tell_losses(done.lost)
        if done.skipped:
            complain(f"skipped: {done.skipped:,} malformed lines")
        write(f"{target}: {done.requests:,} requests, {done.source} to {done.target}\n")


@app.command()
def export(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML).", show_default=False)
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="File to write: .csv, .jsonl or .parquet mean our own formats; .gz packs.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the scenario."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Replaces run.seed.", show_default=False)] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format to write, if the name of OUT does not tell."),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Drop what the format to write cannot hold.")
    ] = False,
) -> None:
    """Run a scenario and write the requests that came as a trace, later turns at the instants they had in the run."""
    with errors():
        from twin.simulation import load_scenario, simulate
        from twin.workload.convert import export as exported
        from twin.workload.export import as_rows
        from twin.workload.formats.choose import format_for
        from twin.workload.request import Request

        loaded = load_scenario(scenario, overrides or (), seed)
        keep_apart({"OUT": target}, loaded.files)
        made = format_for(str(target), to)
        requests: list[Request] = []
        if simulate(loaded, on_offer=requests.append).interrupted:
            raise typer.Exit(INTERRUPTED)
        rows = as_rows(requests, loaded.traffic)
        done = exported(str(scenario), str(target), made, rows, lossy)
        _tell_losses(done.lost)
        write(f"{target}: {done.requests:,} requests, {made.name}\n")


def _tell_losses(lost: Mapping[str, int]) -> None:
    from twin.workload.formats.rows import HELD

    for what, requests in lost.items():
        complain(f"dropped: {HELD.get(what, what)} ({requests:,} requests)")


def _selection(window: str | None, first: int | None) -> Any:
    from twin.workload.check import Selection

    if window is None:
        return Selection(None, first)
    start, colon, end = window.partition(":")
    bounds = [_ps(text, window) for text in (start or "0", end)] if colon and end else []
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise InputError(f"--window {window}: write FROM:TO in seconds, FROM before TO")
    return Selection((bounds[0], bounds[1]), first)


def _ps(text: str, window: str) -> int:
    from twin.clock import to_ps

    try:
        return to_ps(text)
    except ValueError:
        raise InputError(f"--window {window}: {text!r} is no number of seconds") from None


def _speedup(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise InputError(f"--speedup {text}: must be a number above 0")
    return value
