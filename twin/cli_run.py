"""`twin run`: simulate a scenario, say how it went, and leave the result in files."""

import os
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_files import keep_apart
from twin.errors import InputError
from twin.terminal import (
    INTERRUPTED,
    MISSED,
    Update,
    complain,
    errors,
    progress_bar,
    wants_color,
    write,
)

START = "2026-01-01T00:00:00Z"
"""When a simulated history begins that is not told otherwise; the same for every run, so that files are comparable."""


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
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write summary.json, requests.parquet, timeseries.parquet, events.jsonl and report.html "
            "into this folder.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --out write into a folder that is not empty.")
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every request to a .csv or .jsonl file."),
    ] = None,
    no_records: Annotated[
        bool,
        typer.Option(
            "--no-records",
            help="Keep no record of single requests, for runs of any length: as run.records=false.",
        ),
    ] = False,
    openmetrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the simulated history under vLLM's metric names, with timestamps, for Prometheus.",
        ),
    ] = None,
    openmetrics_start: Annotated[
        str, typer.Option(metavar="TIME", help="When that history begins (ISO 8601).")
    ] = START,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise", help="Run again with single changes and say which three helped most."
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs of --advise at once; default: one a processor.", show_default=False
        ),
    ] = None,
    explain: Annotated[
        list[int] | None,
        typer.Option(
            "--explain-request",
            metavar="INDEX",
            help="Say after the run what was decided about this request, the first being 0. Uses the stepped "
            "engine, which is slower. May be repeated.",
        ),
    ] = None,
) -> None:
    """Simulate a scenario and say how it went."""
    with errors():
        # Only this command needs them, and they take longer to load than the rest takes to run.
        from twin.report.decisions import render_decisions
        from twin.report.folder import check_folder, files_in, write_folder
        from twin.report.json_summary import objectives_missed, summarize, to_json
        from twin.report.openmetrics import history_of, write_openmetrics
        from twin.report.records_file import check_path, write_records
        from twin.report.tables import render, render_advice
        from twin.simulation import load_scenario, simulate

        if records is not None:
            check_path(records)
        start_s = _instant(openmetrics_start)
        if openmetrics is not None:
            _check_parent(openmetrics)
        changes = [*(overrides or ()), *(["run.records=false"] if no_records else [])]
        loaded = load_scenario(scenario, changes, seed)
        if not loaded.run.records:
            _check_no_records(records, explain)
        _check_indices(explain or (), _most_requests(loaded), "the traffic has at most")
        written = None if out is None else files_in(out)
        keep_apart(
            {"--records": records, "--openmetrics": openmetrics, "--out": written}, loaded.files
        )
        if out is not None:
            check_folder(out, force)
        observe = out is not None or openmetrics is not None
        history = None
        if openmetrics is not None and not loaded.run.records:
            history = history_of(loaded)
        on_block = None if history is None else history.add
        with progress_bar() as update:
            progress = None if update is None else partial(_tell, update)
            result = simulate(loaded, progress, strict, explain or (), observe, on_block=on_block)
        _check_indices(explain or (), result.tally().requests, "the run had")
        summary = summarize(result)
        lives = [render_decisions(result, index) for index in explain or ()]
        if records is not None:
            write_records(records, result.records)
        if openmetrics is not None:
            write_openmetrics(openmetrics, result, start_s, history)
        if out is not None:
            write_folder(out, result, summary)
        if not as_json:
            write("\n".join([render(summary, color=wants_color()), *lives]))
        interrupted, advice = result.interrupted, None
        if advise and not interrupted:
            advice = _advise(loaded, summary, jobs or os.cpu_count() or 1)
            interrupted = advice["interrupted"]
            summary["advice"] = advice
            if out is not None:
                write_folder(out, result, summary, ("summary.json", "report.html"))
            if not as_json:
                write("\n" + render_advice(advice, color=wants_color()))
        if as_json:
            for warning in summary["warnings"]:
                complain(f"warning: {warning}")
            for life in lives:
                complain(life)
            write(to_json(summary))
        if advice is not None and advice["interrupted"]:
            from twin.report.advice import LOST_WORKER

            ran = len(advice["runs"])
            if advice["ended_by"] == LOST_WORKER:
                raise InputError(
                    f"--advise: a worker process was ended from outside, as systems do that run out of memory; fewer "
                    f"--jobs need less. {ran} single changes were run before, and are told"
                )
            complain(f"interrupted: {ran} single changes were run, and are told")
        if interrupted:
            raise typer.Exit(INTERRUPTED)
        if check and objectives_missed(summary):
            raise typer.Exit(MISSED)


def _advise(loaded: Any, summary: dict[str, Any], jobs: int) -> dict[str, Any]:
    from twin.report.advice import advise

    with progress_bar() as update:
        if update is None:
            return advise(loaded, summary, jobs)
        return advise(
            loaded,
            summary,
            jobs,
            lambda done, total: update(done, total, f"{done} of {total} single changes run"),
        )


def _check_no_records(records: Path | None, explain: list[int] | None) -> None:
    for option, value in (("--records", records), ("--explain-request", explain)):
        if value:
            raise InputError(
                f"{option}: no record of single requests is kept (run.records is false); leave out {option}, or keep "
                "records"
            )


def _most_requests(loaded: Any) -> int | None:
    """As many requests as come at most; None if only the run tells."""
    most = [stream.requests for stream in loaded.traffic]
    return None if None in most else sum(most)


def _check_indices(indices: Iterable[int], most: int | None, words: str) -> None:
    for index in indices:
        if index < 0 or (most is not None and index >= most):
            had = (
                "numbers begin at 0"
                if most is None
                else f"{words} {most:,} requests, numbered from 0"
            )
            raise InputError(f"--explain-request {index}: {had}")


def _instant(text: str) -> float:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise InputError(
            f"--openmetrics-start {text}: must be an instant with a time zone, e.g. {START}"
        )
    return at.timestamp()


def _check_parent(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"--openmetrics {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InputError(f"--openmetrics {path}: there is no folder {path.parent}; make it first")


def _tell(update: Update, ended: int, expected: int | None, now_ps: int) -> None:
    of = "" if expected is None else f" of {expected:,}"
    update(ended, expected, f"{ended:,}{of} requests, {now_ps / 1e12:,.1f} s simulated")
