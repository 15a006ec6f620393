"""`twin validate`: replay measured runs through the twin, and say how far off it is."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_files import check_writable
from twin.terminal import errors, progress_bar, wants_color, write

SETS = ("llmservingsim", "lmbench", "aiconfigurator", "steps", "memory")
"""What may be chosen with --only."""

ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
"""Columns of the table of attention kernels."""


def validate(
    data: Annotated[
        Path,
        typer.Option(
            envvar="TWIN_DATA",
            metavar="DIR",
            help="Folder of published measurements (ground_truth/, profiles/, ground_truth_calibrate.csv).",
            show_default=False,
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SET", help=f"Only this set; may be repeated: {', '.join(SETS)}."),
    ] = None,
    largest: Annotated[
        int | None,
        typer.Option(min=1, help="Leave out runs of more requests than this.", show_default=False),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split", help="Say which data each number of the twin was set by, and stop."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page docs/fidelity.md is made by."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the table that gives `twin run` its errors, as JSON."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with predicted over measured."),
    ] = None,
) -> None:
    """Replay measured runs through the twin, each with its own configuration: errors, worst first."""
    with errors():
        from twin.report import fidelity
        from twin.step_time.trust import regimes_data
        from twin.validation import regimes_of
        from twin.validation_sets import TRAINED

        chosen = _chosen(only)
        if chosen != ["memory"]:
            _check_folder(data)
        if split:
            steps = list(_steps(data)) if "steps" in chosen else []
            found = fidelity.split_of(TRAINED, steps)
            write(json.dumps(found, indent=2) + "\n" if as_json else fidelity.render_split(found))
            return
        check_writable({"--report": report, "--table": table, "--plot": plot})
        with tempfile.TemporaryDirectory() as folder:
            outcomes = list(_replayed(data, chosen, largest, Path(folder)))
        steps = list(_steps(data)) if "steps" in chosen else []
        rows = _table(data) if {"lmbench", "aiconfigurator"} & set(chosen) else []
        found = fidelity.summarize(
            outcomes,
            steps,
            fidelity.memory_rows() if "memory" in chosen else [],
            _left_out(rows),
            TRAINED,
        )
        if report is not None:
            report.write_text(fidelity.page(found), encoding="utf-8")
        if table is not None:
            text = json.dumps(regimes_data(regimes_of(outcomes)), indent=1, ensure_ascii=False)
            table.write_text(text + "\n", encoding="utf-8")
        if plot is not None:
            fidelity.write_plot(plot, outcomes)
        if as_json:
            write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        else:
            write(fidelity.render(found, color=wants_color()))


def _chosen(only: list[str] | None) -> list[str]:
    from twin.errors import InputError

    for name in only or ():
        if name not in SETS:
            raise InputError(f"--only {name}: not known; choose one of {', '.join(SETS)}")
    return only or list(SETS)


def _check_folder(data: Path) -> None:
    from twin.errors import InputError

    if not data.is_dir():
        raise InputError(
            f"--data {data}: there is no such folder; give the one that has ground_truth/, profiles/ and "
            "ground_truth_calibrate.csv, here or in the environment variable TWIN_DATA"
        )


def _table(data: Path) -> list[dict[str, str]]:
    from twin.validation_sets import FIGURES, WORDS, is_silicon
    from twin.workload.formats.measured import check_numbers, read_table

    path = data / "ground_truth_calibrate.csv"
    rows = read_table(path, (*WORDS, *FIGURES))
    check_numbers(path, [(n, row) for n, row in enumerate(rows, 2) if is_silicon(row)], FIGURES)
    return rows


def _numbers(path: Path, words: tuple[str, ...], figures: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a table in which every figure is a number."""
    from twin.workload.formats.measured import check_numbers, read_table

    rows = read_table(path, (*words, *figures))
    check_numbers(path, list(enumerate(rows, 2)), figures)
    return rows


def _left_out(rows: list[dict[str, str]]) -> list[tuple[str, str, int]]:
    from twin.validation_sets import not_scored

    return not_scored(rows)


def _replayed(data: Path, chosen: list[str], largest: int | None, folder: Path) -> Iterator[Any]:
    """Each measured run beside the twin's."""
    from twin.scenario import load_scenario
    from twin.simulation import simulate
    from twin.validation import outcome_of

    runs = list(_runs(data, chosen, folder))
    if largest is not None:
        runs = [run for run in runs if _requests(run) <= largest]
    with progress_bar() as update:
        for number, run in enumerate(runs):
            if update is not None:
                update(number, len(runs), run.name)
            result = simulate(load_scenario(_scenario(run, folder / f"{number}.csv")))
            yield outcome_of(
                run.group, run.name, run.loads, run.measured, result, run.prefix_share is not None
            )


def _requests(run: Any) -> int:
    if run.arrivals:
        return len(run.arrivals)
    return int(run.scenario["traffic"][0].get("requests") or 0)


def _scenario(run: Any, trace: Path) -> dict[str, Any]:
    """The scenario of a run, its arrivals in a trace."""
    scenario = dict(run.scenario)
    if run.arrivals:
        lines = ["arrival_s,prompt_tokens,output_tokens"]
        lines += [f"{at:.6f},{prompt},{output}" for at, prompt, output in run.arrivals]
        trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
        stream: dict[str, Any] = {"trace": str(trace)}
        if run.prefix_share is not None:
            stream["assumed_prefix_share"] = run.prefix_share
        scenario["traffic"] = [stream]
    return scenario


def _runs(data: Path, chosen: list[str], folder: Path) -> Iterator[Any]:
    from twin import validation_sets as sets
    from twin.workload.formats.measured import check_numbers, read_objects

    if "llmservingsim" in chosen:
        truth = data / "ground_truth" / "llmservingsim" / "RTXPRO6000_Llama-3.1-8B"
        requests = read_objects(truth / "requests.jsonl")
        check_numbers(truth / "requests.jsonl", list(enumerate(requests, 1)), sets.STAMPS)
        trace = str(data / "traces" / "sharegpt300_llama31_hashed.jsonl")
        profile = folder / "layer_tables.json"
        profile.write_text(json.dumps(_layer_profile(data, requests).to_dict()), encoding="utf-8")
        yield sets.llmservingsim(requests, trace, str(profile))
        yield sets.llmservingsim(requests, trace, "")
    if "lmbench" in chosen:
        truth = data / "ground_truth" / "lmbench"
        one, two = (
            _numbers(truth / f"{name}.csv.gz", ("file",), sets.TIMES)
            for name in ("exp0_vllm_70b_a100tp2_1replica", "exp2_vllm_70b_a100tp2_2replicas")
        )
        yield from sets.lmbench(one, 1, (None, 0.1, 0.2))
        yield from sets.lmbench(two, 2)
    if "aiconfigurator" in chosen:
        yield from sets.aiconfigurator(_table(data))


def _layer_profile(data: Path, requests: list[dict[str, Any]]) -> Any:
    from twin.step_time.catalogue import find_model
    from twin.step_time.layer_tables import layer_profile

    tables = data / "profiles" / "llmservingsim" / "RTXPRO6000_meta-llama_Llama-3.1-8B"
    return layer_profile(
        _numbers(tables / "dense.csv", ("layer",), ("tokens", "time_us")),
        _numbers(tables / "per_sequence.csv", ("layer",), ("sequences", "time_us")),
        _numbers(tables / "attention.csv.gz", (), ATTENTION),
        _numbers(tables / "skew_fit.csv.gz", (), ("alpha", "n_samples")),
        [row["input_toks"] + row["output_toks"] / 2 for row in requests],
        find_model("meta-llama/Llama-3.1-8B"),
        "RTXPRO6000",
        "vLLM 0.19.0",
        "layer tables of LLMServingSim (casys-kaist/LLMServingSim, profiler)",
    )


def _steps(data: Path) -> Iterator[tuple[str, Any]]:
    """(name, fit on a third and errors on the rest) of the recorded forward passes."""
    from twin.step_time.recorded import held_out, steps_of
    from twin.workload.formats.measured import read_table

    for tp in (1, 2):
        path = data / "profiles" / "fpm_qwen3_32b" / f"tp{tp}_fpm_metrics_phase.csv.gz"
        yield f"Qwen3-32B, TP {tp}", held_out(steps_of(read_table(path), str(path)))
