"""`twin-real compare`: the twin beside measured runs."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from real.cli_serve import Overrides, ScenarioFile, tiny_document
from real.tiny import write_tiny_model
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.terminal import complain, errors, write

SHOWN = 40
"""Figures in the table on a terminal."""


def compare(
    scenario: ScenarioFile,
    measured: Annotated[
        list[Path],
        typer.Argument(
            metavar="MEASURED...",
            help="Folders that `twin-real replay --out` wrote; runs of the same traffic are taken together.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    step_time: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Step-time profile of the server, as `twin-real calibrate` writes it.",
        ),
    ] = None,
    frontend: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="What a request spends outside the scheduler.",
            show_default="as calibrated, beside FILE",
        ),
    ] = None,
    planned: Annotated[
        bool | None,
        typer.Option(
            "--planned/--recorded",
            help="Give the twin the scenario's traffic, or the requests as they were measured.",
            show_default="planned for closed loops and conversations",
        ),
    ] = None,
    warm: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="What the server had served before: the twin plays it first, so that its prefix "
            "cache holds the same.",
        ),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="The server was `twin-real serve --tiny` of this scenario."),
    ] = False,
    regime: Annotated[
        str | None, typer.Option(help="Name of the regime.", show_default="idle, knee or saturated")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, help="Errors up to this, or twice the spread of the runs, are marked ok."
        ),
    ] = 0.1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write compare.html and compare.json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Hold the twin beside what was measured: each figure with its error, by regime, worst first, and why."""
    with errors(), ExitStack() as stack:
        from real.compare import Run, misses_of, predict, rows_of

        changes = list(overrides or [])
        base: dict[str, Any] | None = None
        if tiny:
            if step_time is None:
                raise InputError("--tiny needs --step-time: there is no built-in profile of it")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twin-tiny-")))
            write_tiny_model(folder)
            base = tiny_document(load_scenario(scenario, changes), folder, str(step_time))
            changes = []
        elif step_time is not None:
            changes.append(f"hardware.step_time={step_time}")
        if frontend is None:
            frontend = _frontend(step_time)
        if out is not None:
            _make(out)
        runs: list[Run] = []
        for folder in measured:
            run = predict(scenario, changes, folder, frontend, planned, warm, base)
            if regime is not None:
                run = Run(**{**vars(run), "regime": regime})
            runs.append(run)
        rows = rows_of(runs)
        misses = {run.name: misses_of(run) for run in runs}
        notes = _notes(runs, warm is not None, frontend)
        content = {
            "notes": notes,
            "figures": [
                {**row.comparison.to_dict(), "spread": row.spread, "runs": row.runs} for row in rows
            ],
            "misses": {name: vars(found) for name, found in misses.items()},
            "runs": {run.name: {"regime": run.regime, "twin": run.facts["twin"]} for run in runs},
        }
        if as_json:
            write(json.dumps(content, indent=1) + "\n")
        else:
            for note in notes:
                write(note + "\n")
            write(_text(rows, misses, tolerance))
        if out is not None:
            from real.compare_page import page

            (out / "compare.html").write_text(page(runs, rows, misses, notes), encoding="utf-8")
            (out / "compare.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")  # fmt: skip
            complain(f"{out / 'compare.html'}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}") from None


def _frontend(step_time: Path | None) -> float:
    """As written beside the profile; 0 where nothing is."""
    beside = None if step_time is None else step_time.with_suffix(".calibration.json")
    if beside is None or not beside.exists():
        return 0.0
    try:
        return float(json.loads(beside.read_text(encoding="utf-8"))["frontend_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{beside}: holds no frontend_s: {error}; say it with --frontend"
        ) from None


def _notes(runs: Any, is_warmed: bool, frontend_s: float) -> list[str]:
    from real.compare import MOST_MISMATCH, mismatch_of

    notes = []
    for run in runs:
        mismatch = mismatch_of(run)
        if mismatch is not None and mismatch > MOST_MISMATCH:
            notes.append(
                f"{run.name}: {100 * mismatch:.1f} % of the requests had other lengths than planned; the twin is told "
                "those they had"
            )
    for run in runs:
        start = run.facts.get("server", {}).get("cache_at_start", "unknown")
        twin = "warmed" if is_warmed else "cold"
        if start != twin and not (start == "warm" and is_warmed):
            notes.append(
                f"{run.name}: the server's prefix cache was {start} at the start, the twin's {twin}"
                + ("; give the twin what it had served with --warm" if start == "warm" else "")
            )
        late = run.facts.get("client", {}).get("lateness")
        if late and late["p99_s"] > 0.005 and not run.facts.get("max_in_flight"):
            notes.append(
                f"{run.name}: 1 % of the requests were sent more than {1e3 * late['p99_s']:.1f} ms after their time"
            )
    if frontend_s:
        notes.append(
            f"{1e3 * frontend_s:.2f} ms outside the scheduler are added to the twin's latencies"
        )
    return notes


def _text(rows: Any, misses: Any, tolerance: float) -> str:
    from twin.report.tables import table, to_text

    made = table("Figure", "regime", "twin", "measured", "error", "spread", "")
    for row in rows[:SHOWN]:
        one = row.comparison
        made.add_row(
            one.metric,
            one.regime,
            f"{one.predicted:.4g}",
            f"{one.measured:.4g}",
            f"{100 * one.error:+.1f} %",
            "-" if row.spread is None else f"{100 * row.spread:.1f} %",
            "ok" if row.is_within(tolerance) else "",
        )
    parts = [to_text([made])]
    for name, found in misses.items():
        if not found.rows:
            parts.append(f"{name}: {'; '.join(found.differs)}\n")
            continue
        worst = table(f"{name}: worst", "tier", "TTFT", "twin", "prompt", "hit", "twin", "inside")
        for row in found.rows[:5]:
            worst.add_row(
                str(row["request"]),
                row["tier"],
                f"{row['ttft_measured_s']:.3f}",
                f"{row['ttft_predicted_s']:.3f}",
                str(row["prompt_tokens"]),
                str(row["hit_measured"]),
                str(row["hit_predicted"]),
                str(row["inside"]),
            )
        parts.append(to_text([worst]) + "".join(f"  {text}\n" for text in found.differs))
    return "\n".join(parts)
