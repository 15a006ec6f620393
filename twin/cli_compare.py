"""`twin compare`: is B better than A, in words, and never on noise."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_jobs import JOBS_HELP, RAY_HELP, backend, needs_packages
from twin.errors import InputError
from twin.terminal import INTERRUPTED, MISSED, complain, errors, progress_bar, wants_color, write


def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="A [B ...]",
            help="Scenario files, each held against the first; or folders of measured runs (requests.parquet).",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="With one scenario: a variant with this change. Changes joined by ' ; ' make one variant. "
            "May be repeated.",
        ),
    ] = None,
    common: Annotated[
        list[str] | None,
        typer.Option(
            "--all", metavar="KEY=VALUE", help="Change a value in every scenario. May be repeated."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=2, help="Seeds of each scenario; default: 20.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The first of them.", show_default=False)] = None,
    figures: Annotated[
        list[str] | None,
        typer.Option(
            "--figure",
            metavar="NAME",
            help="Judge this figure too, e.g. BATCH.e2e_p99 or cost. May be repeated.",
        ),
    ] = None,
    objectives: Annotated[
        Path | None,
        typer.Option(
            metavar="SCENARIO", help="For measured runs: take the objectives from this scenario."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help=JOBS_HELP, show_default=False)] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help=RAY_HELP, show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit with 1 if a variant misses an objective of the first, or of its own.",
        ),
    ] = False,
) -> None:
    """Hold configurations, or measured runs, against each other and say which to adopt."""
    with errors():
        needs_packages("twin compare", "scipy", "joblib")
        from twin.whatif.compare import objectives_judged, objectives_missed
        from twin.whatif.runs import Interrupted
        from twin.whatif.tables import render_comparison

        folders = [path for path in paths if path.is_dir()]
        try:
            if folders:
                given = {
                    "--set": overrides,
                    "--all": common,
                    "--seeds": seeds,
                    "--seed": seed,
                    "--ray": ray,
                }
                for option, value in given.items():
                    if value is not None:
                        raise InputError(
                            f"{option}: measured runs are compared as they are; leave it out"
                        )
                found = _measured(paths, folders, figures or (), objectives)
            else:
                if objectives is not None:
                    raise InputError(
                        "--objectives: scenarios have their own; it is for measured runs"
                    )
                found = _simulated(
                    paths,
                    overrides,
                    common or [],
                    seeds,
                    seed,
                    figures or (),
                    backend(jobs, ray),
                    check,
                )
        except Interrupted:
            complain(
                "interrupted: a comparison of a part of the seeds would not be paired, so there is none"
            )
            raise typer.Exit(INTERRUPTED) from None
        missed = objectives_missed(found)
        if as_json:
            write(
                json.dumps(
                    found | {"missed": missed}, indent=2, ensure_ascii=False, allow_nan=False
                )
                + "\n"
            )
        else:
            write(render_comparison(found, color=wants_color()))
        if check and not objectives_judged(found):
            raise InputError(
                "--check: no objective had anything to judge; give the first scenario objectives, or measured runs "
                "--objectives, of tiers that requests have"
            )
        if check and missed:
            complain(f"missed: {'; '.join(missed)}")
            raise typer.Exit(MISSED)


def _simulated(
    paths: list[Path],
    overrides: list[str] | None,
    common: list[str],
    seeds: int | None,
    seed: int | None,
    figures: Any,
    where: Any,
    check: bool,
) -> dict[str, Any]:
    from twin.scenario import load_scenario
    from twin.whatif.asked import check_changes
    from twin.whatif.compare import SEEDS, Variant, compare

    if len(paths) > 1 and overrides:
        raise InputError(
            "--set: with several scenarios it is not clear which one it changes; --all changes every one of them"
        )
    variants = [Variant(str(path), load_scenario(path, common, seed)) for path in paths]
    for text in overrides or ():
        changes = [part.strip() for part in text.split(" ; ")]
        check_changes(changes)
        changed = load_scenario(paths[0], [*common, *changes], seed)
        if changed.run.seed != variants[0].scenario.run.seed:
            raise InputError(
                f"--set {text}: seeds are what --seeds and --seed give, the same for all"
            )
        variants.append(Variant(", ".join(changes), changed))
    if check and not any(variant.scenario.objectives for variant in variants):
        raise InputError(
            "--check: no scenario has objectives; write e.g. objectives: {ONLINE: {ttft_p99: 1.0}}"
        )
    with progress_bar() as update:
        progress = None
        if update is not None:
            bar = update
            progress = lambda made, total: bar(made, total, f"{made} of {total} runs")  # noqa: E731
        return compare(variants, seeds or SEEDS, where, progress, figures)


def _measured(
    paths: list[Path], folders: list[Path], figures: Any, objectives: Path | None
) -> dict[str, Any]:
    from twin.scenario import load_scenario
    from twin.whatif.measured import compare_measured
    from twin.whatif.measured_runs import read_measured

    needs_packages("twin compare of measured runs", "pyarrow")
    if len(folders) < len(paths):
        other = next(path for path in paths if path not in folders)
        raise InputError(
            f"{other}: is no folder, {folders[0]} is one: a measured run is compared with measured runs. "
            "twin run --out DIR makes such a folder of a scenario"
        )
    if len(paths) < 2:
        raise InputError(f"{paths[0]}: a comparison needs two measured runs; name another folder")
    limits = {} if objectives is None else load_scenario(objectives).objectives
    if objectives is not None and not any(limits.values()):
        raise InputError(
            f"--objectives {objectives}: this scenario has no objectives; name another"
        )
    return compare_measured([(str(path), read_measured(path)) for path in paths], limits, figures)
