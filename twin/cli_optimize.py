"""`twin optimize`, `twin fewest-gpus` and `twin headroom`: searches whose answer is a configuration or a factor."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_jobs import JOBS_HELP, RAY_HELP, backend, needs_packages
from twin.terminal import INTERRUPTED, MISSED, complain, errors, progress_bar, wants_color, write

Scenario = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the scenario. May be repeated."
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, help=JOBS_HELP, show_default=False)]
Ray = Annotated[str | None, typer.Option(metavar="ADDRESS", help=RAY_HELP, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Seed = Annotated[int | None, typer.Option(help="The first of them.", show_default=False)]


def optimize(
    scenario: Scenario,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder of the results; a search that was broken off there is gone on with.",
            show_default=False,
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="What a key may be: a,b,c, start:stop:step, start:stop or start:stop:log. May be repeated.",
        ),
    ] = None,
    goals: Annotated[
        list[str] | None,
        typer.Option(
            "--goal",
            metavar="NAME",
            help="A figure to make better, the most important first; default: gpus and all.goodput where GPUs are "
            "varied, else all.goodput and the first objective. May be repeated.",
        ),
    ] = None,
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(min=1, help="Configurations that are run at most.")] = 100,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1, metavar="SECONDS", help="Begin nothing new after this.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds of each configuration.")] = 2,
    seed: Seed = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Database of the search, shared by all who name it (postgresql://...); default: SQLite in DIR.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Search many keys at once: the Pareto front, the point to take, and the objective that binds it.

    Exit status 1 if nothing keeps every objective.
    """
    with errors():
        needs_packages("twin optimize", "optuna", "joblib", "pyarrow", "plotly")
        from twin.scenario import load_scenario
        from twin.whatif import store
        from twin.whatif.axes import parse_vary
        from twin.whatif.optimize import make_search
        from twin.whatif.optimize import optimize as search_for
        from twin.whatif.pareto import render_front, render_front_page
        from twin.whatif.runs import Interrupted

        loaded = load_scenario(scenario, overrides or (), seed)
        axes = [parse_vary(text) for text in vary or ()]
        basis = store.basis_of(loaded, axes)
        search = make_search(loaded, axes, goals or (), seeds, trials, timeout, basis=basis)
        store.make_folder(out)
        url = storage or f"sqlite:///{out / 'study.db'}"
        with progress_bar() as update:
            told = None
            if update is not None:
                bar = update
                told = lambda n, of, best: bar(n, of, f"{n} of {of} tried; {best}")  # noqa: E731
            try:
                found = search_for(search, url, backend(jobs, ray), told)
            except Interrupted:
                complain("interrupted: no configuration has been tried to its end yet")
                raise typer.Exit(INTERRUPTED) from None
        store.write_page(out, "pareto.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
        store.write_page(out, "pareto.html", render_front_page(search, found))
        store.write_trials(out, search, found)
        if found["chosen"] is not None:
            store.write_page(out, "chosen.yaml", _chosen_yaml(loaded, found["chosen"]["key"]))
        if as_json:
            write(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            write(render_front(search, found, color=wants_color()))
            more = f", {out / 'chosen.yaml'} the scenario to take" if found["chosen"] else ""
            write(f"{out / 'pareto.html'} shows the front{more}\n")
        if found["interrupted"]:
            complain("interrupted: this is of what was tried; the same command goes on")
            raise typer.Exit(INTERRUPTED)
        store.check_basis(basis, loaded, axes)
        if found["chosen"] is None:
            raise typer.Exit(MISSED)


def _chosen_yaml(loaded: Any, key: str) -> str:
    """The scenario with the changes of a point, as a file."""
    from twin.scenario import load_scenario
    from twin.whatif.documents import to_yaml

    return to_yaml(load_scenario(loaded.to_dict(), key.split(" ; ")).to_dict())


def fewest_gpus(
    scenario: Scenario,
    overrides: Overrides = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="Try these values too, e.g. policy=tiered,priority. May be repeated.",
        ),
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=100_000, help="Replicas at most.")] = 256,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds of each configuration.")] = 3,
    seed: Seed = None,
    jobs: Jobs = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """The fewest GPUs that meet the objectives for this traffic. Exit status 1 if no number does."""
    with errors():
        needs_packages("twin fewest-gpus", "joblib")
        from twin.interrupt import stop_on_ctrl_c
        from twin.scenario import load_scenario
        from twin.whatif.axes import parse_axis
        from twin.whatif.runs import Interrupted
        from twin.whatif.search import NotMet
        from twin.whatif.search import fewest_gpus as search

        loaded = load_scenario(scenario, overrides or (), seed)
        axes = [parse_axis(text) for text in vary or ()]
        try:
            with stop_on_ctrl_c(at_once=True) as pressed:
                found = search(loaded, axes, seeds, most, backend(jobs, ray), _teller(pressed))
        except Interrupted:
            raise KeyboardInterrupt from None
        except NotMet as error:
            complain(f"{error}")
            raise typer.Exit(MISSED) from None
        _answer(found, as_json)


def headroom(
    scenario: Scenario,
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds of each factor.")] = 5,
    seed: Seed = None,
    jobs: Jobs = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """How much more of the same traffic there may be until an objective breaks.

    Exit status 1 if one breaks however little there is.
    """
    with errors():
        needs_packages("twin headroom", "joblib")
        from twin.interrupt import stop_on_ctrl_c
        from twin.scenario import load_scenario
        from twin.whatif.headroom import headroom as search
        from twin.whatif.runs import Interrupted

        loaded = load_scenario(scenario, overrides or (), seed)
        try:
            with stop_on_ctrl_c(at_once=True) as pressed:
                found = search(loaded, seeds, backend(jobs, ray), _teller(pressed))
        except Interrupted:
            raise KeyboardInterrupt from None
        _answer(found, as_json)
        if found["factor"] is None:
            raise typer.Exit(MISSED)


def _teller(pressed: list[bool]) -> Any:
    """Says what each configuration came to, and ends the search if Ctrl-C was pressed and got lost."""

    def tell(text: str) -> None:
        complain(text)
        if pressed:
            raise KeyboardInterrupt

    return tell


def _answer(found: dict[str, Any], as_json: bool) -> None:
    from twin.report.tables import paragraph, to_text

    if as_json:
        write(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        write(to_text([paragraph(found["text"], "bold")], wants_color()))
