"""`twin-real compare`: the twin beside measured runs."""

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from real.cli_serve import Overrides, ScenarioFile, tiny_document
from real.tiny import write_tiny_model
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.terminal import complain, errors, write


def compare(
    scenario: ScenarioFile,
    measured: Annotated[
        list[Path],
        typer.Argument(
            metavar="MEASURED...",
            help="Folders that `twin-real replay --out` wrote; runs of one set-up are taken together.",
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
    force: Annotated[
        bool, typer.Option("--force", help="Let --out write into a folder that is not empty.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Hold the twin beside what was measured: each figure with its error, by regime, worst first, and why."""
    with errors(), ExitStack() as stack:
        from real.compare import Run, rows_of
        from real.compare_misses import misses_of
        from real.compare_notes import notes
        from real.compare_twin import predict

        for option, number in (("--frontend", frontend), ("--tolerance", tolerance)):
            if number is not None and not math.isfinite(number):
                raise InputError(f"{option} {number}: must be a finite number")
        if step_time is not None and not step_time.name:
            raise InputError("--step-time: is empty; name a profile")
        names = names_of(measured)
        if out is not None:
            _check_out(out, force, [scenario, step_time, warm])
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
        runs: list[Run] = []
        for folder, name in zip(measured, names, strict=True):
            run = predict(scenario, changes, folder, frontend, planned, warm, base, name)
            if regime is not None:
                run = Run(**{**vars(run), "regime": regime})
            runs.append(run)
        rows = rows_of(runs)
        misses = {run.name: misses_of(run) for run in runs}
        told = notes(runs, warm is not None, frontend)
        content = {
            "notes": told,
            "figures": [
                {**row.comparison.to_dict(), "spread": row.spread, "runs": row.runs} for row in rows
            ],
            "misses": {name: vars(found) for name, found in misses.items()},
            "runs": {run.name: {"regime": run.regime, "twin": run.facts["twin"]} for run in runs},
        }
        if as_json:
            write(_json(content))
        else:
            for note in told:
                write(note + "\n")
            write(_text(rows, misses, tolerance))
        if out is not None:
            from real.compare_page import page

            _write(out / PAGE, page(runs, rows, misses, told))
            _write(out / CONTENT, _json(content))
            complain(f"{out / PAGE}")


PAGE, CONTENT = "compare.html", "compare.json"


def names_of(folders: Sequence[Path]) -> list[str]:
    """As many last parts of each path as it takes to tell them apart. Raises InputError for a run given twice."""
    whole = [path.resolve() for path in folders]
    whole = [path.parent if path.is_file() else path for path in whole]
    for path, folder in zip(folders, whole, strict=True):
        if whole.count(folder) > 1:
            raise InputError(f"{path}: is given twice; a run is no repetition of itself")
    names: list[str] = []
    for path in whole:
        others = [other for other in whole if other != path]
        depth = 1
        while any(other.parts[-depth:] == path.parts[-depth:] for other in others):
            depth += 1
        names.append("/".join(path.parts[-depth:]))
    return names


def _check_out(out: Path, force: bool, inputs: Sequence[Path | None]) -> None:
    from twin.cli_files import check_writable, keep_apart
    from twin.report.folder import check_folder

    files = [out / PAGE, out / CONTENT]
    keep_apart({"--out": files}, [path for path in inputs if path is not None])
    check_folder(out, force)
    for path in files:
        check_writable({"--out": path})


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None


def _json(content: Any) -> str:
    """JSON has no infinity: an error where nothing was measured is null."""
    return json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _frontend(step_time: Path | None) -> float:
    """As written beside the profile; 0 where nothing is."""
    beside = None if step_time is None else step_time.with_suffix(".calibration.json")
    if beside is None or not beside.exists():
        return 0.0
    try:
        found = float(json.loads(beside.read_text(encoding="utf-8"))["frontend_s"])
        if not 0 <= found < math.inf:
            raise ValueError(f"{found:g} is no time")
        return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{beside}: holds no frontend_s: {error}; say it with --frontend"
        ) from None


def _text(rows: Any, misses: Any, tolerance: float) -> str:
    from twin.report.tables import table, to_text

    made = table("Figure", "regime", "twin", "measured", "error", "spread", "")
    made.columns[0].max_width = None
    for row in rows:
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
