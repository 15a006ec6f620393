"""`twin sweep`: every combination of values of any keys, under several seeds, kept as it goes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_jobs import JOBS_HELP, RAY_HELP, backend, needs_packages
from twin.errors import InputError
from twin.terminal import INTERRUPTED, complain, errors, progress_bar, wants_color, write


def sweep(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML).", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder of the results; a sweep that was broken off there is gone on with.",
            show_default=False,
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="Values of a key: a,b,c or start:stop:step or start:stop:*factor. May be repeated.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value of the scenario. May be repeated."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds of each configuration.")] = 3,
    seed: Annotated[int | None, typer.Option(help="The first of them.", show_default=False)] = None,
    figure: Annotated[
        str, typer.Option(metavar="NAME", help="The figure of heat map and tornado.")
    ] = "all.goodput",
    jobs: Annotated[int | None, typer.Option(min=1, help=JOBS_HELP, show_default=False)] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help=RAY_HELP, show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Run every combination of values under several seeds; into one Parquet file and a page with plots."""
    with errors():
        needs_packages("twin sweep", "joblib", "pyarrow", "plotly")
        from twin.scenario import load_scenario
        from twin.whatif import store
        from twin.whatif.asked import check_figures, may_change_tiers
        from twin.whatif.axes import parse_axis
        from twin.whatif.figures import measure
        from twin.whatif.page import render_page
        from twin.whatif.runs import NO_MEMORY, Interrupted
        from twin.whatif.sweep import plan
        from twin.whatif.sweep import sweep as run_sweep
        from twin.whatif.sweep_tables import render_sweep, sweep_as_data

        judged_by = measure(figure)
        loaded = load_scenario(scenario, overrides or (), seed)
        if not loaded.run.records:
            complain("warning: run.records is false: whether a run is saturated is not told")
        axes = [parse_axis(text) for text in vary or ()]
        check_figures([figure], [loaded], may_change_tiers(axes))
        basis = store.basis_of(loaded, axes)
        made = plan(loaded, axes, seeds, basis)
        interrupted, problem = False, ""
        with store.FileJournal(out, made) as journal:
            before = len(journal.rows())
            if before:
                complain(f"{before} of {made.size} runs are there from before")
            try:
                with progress_bar() as update:
                    run_sweep(
                        made, journal, backend(jobs, ray), _teller(made.size - before, update)
                    )
            except (Interrupted, KeyboardInterrupt):
                interrupted = True
            except InputError as error:
                problem = str(error)
            rows = journal.rows()
            try:
                if rows:
                    store.write_table(out, made, rows)
                    store.write_page(out, store.PAGE, render_page(made, rows, judged_by))
            except InputError:
                if not problem:
                    raise
        if as_json:
            data = sweep_as_data(made, rows)
            write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        elif rows:
            write(render_sweep(made, rows, judged_by, color=wants_color()))
            write(f"{out / store.TABLE} has every run, {out / store.PAGE} the plots\n")
        lasting = sum(row.error != NO_MEMORY for row in rows.values())
        kept = f"{lasting} of {made.size} runs are kept; the same command goes on"
        if problem:
            raise InputError(f"{problem}; {kept}")
        if interrupted:
            complain(f"interrupted: {kept}")
            raise typer.Exit(INTERRUPTED)
        store.check_basis(basis, loaded, axes)
        if rows and all(row.figures is None for row in rows.values()):
            raise InputError(
                f"no configuration could run; the first: {next(iter(rows.values())).error}"
            )


def _teller(left: int, update: Any) -> Any:
    """Says after the first run how long all will take, and moves the bar."""
    told: list[bool] = []

    def tell(done: int, total: int, remaining_s: float | None, speed: float) -> None:
        left_text = "" if remaining_s is None else f", {_span(remaining_s)} left"
        if not told and left > 1 and speed > 0:
            told.append(True)
            complain(f"{left} runs to make, {speed:,.0f} simulated seconds a second{left_text}")
        if update is not None:
            update(done, total, f"{done} of {total} runs{left_text}")

    return tell


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
