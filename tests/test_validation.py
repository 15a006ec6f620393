"""Predicted beside measured: figures, errors, and the runs that are replayed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.runs import document
from twin.cli import app
from twin.errors import InputError
from twin.report.fidelity import memory_rows, summarize
from twin.report.fidelity import page as page_of
from twin.scenario import load_scenario
from twin.simulation import simulate
from twin.step_time.recorded import steps_of
from twin.validation import (
    STATS,
    Comparison,
    compare_by,
    compare_requests,
    figures,
    knee,
    outcome_of,
    regimes_of,
    table_of,
    worst_first,
)
from twin.validation_sets import (
    FIGURES,
    STAMPS,
    TRAINED,
    WORDS,
    aiconfigurator,
    lmbench,
    not_scored,
)
from twin.workload.formats.measured import read_object, read_objects, read_table

ROOT = Path(__file__).parents[1]


def requests(slower: float = 1.0, tiers=("A", "B")) -> dict:
    """Four requests by hand; `slower` stretches everything after the arrival."""
    return {
        "arrival_s": [0.0, 1.0, 2.0, 3.0],
        "first_token_s": [0.0 + 0.1 * slower, 1.0 + 0.2 * slower, 2.0 + 0.3 * slower, None],
        "finish_s": [0.0 + 1.1 * slower, 1.0 + 1.2 * slower, 2.0 + 1.3 * slower, 3.5],
        "output_tokens": [11, 11, 11, 0],
        "outcome": ["completed", "completed", "completed", "aborted"],
        "itl_s": [[0.1 * slower] * 10] * 3 + [[]],
        "tier": [tiers[0], tiers[0], tiers[1], tiers[1]],
    }


def test_figures_of_a_table():
    told = figures(requests())
    assert told["ttft_mean"] == pytest.approx(0.2)
    assert told["ttft_p50"] == pytest.approx(0.2)
    assert told["ttft_p90"] == pytest.approx(0.28)
    assert told["tpot_mean"] == pytest.approx(0.1)
    assert told["itl_p99"] == pytest.approx(0.1)
    assert told["e2e_mean"] == pytest.approx(1.2)
    assert told["requests_per_s"] == pytest.approx(3 / 3.3)
    assert told["output_tokens_per_s"] == pytest.approx(33 / 3.3)


def test_a_table_without_a_column_has_no_figure_of_it():
    few = {name: requests()[name] for name in ("arrival_s", "first_token_s")}
    assert set(figures(few)) == {f"ttft_{stat}" for stat in STATS}


def test_errors_are_relative_and_the_worst_comes_first():
    rows = compare_requests(requests(1.2), requests(), "light")
    by_metric = {row.metric: row for row in rows}
    assert by_metric["ttft_p50"].error == pytest.approx(0.2)
    assert by_metric["ttft_p50"].requests == 3
    sizes = [abs(row.error) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    only = compare_requests(requests(1.2), requests(), "light", ["tpot_mean"])
    assert [row.metric for row in only] == ["tpot_mean"]


def test_groups_are_compared_by_themselves():
    rows = compare_by(requests(2.0), requests(), "tier", ["ttft_mean"])
    assert {row.regime: row.requests for row in rows} == {"tier=A": 2, "tier=B": 1}
    assert all(row.error == pytest.approx(1.0) for row in rows)
    assert compare_by(requests(tiers=("C", "D")), requests(), "tier") == []
    with pytest.raises(KeyError):
        compare_by(requests(), requests(), "tenant")


def test_nothing_measured_is_an_infinite_error():
    pairs = {"a": (1.0, 0.0), "b": (0.0, 0.0), "c": (1.0, 2.0)}
    rows = [Comparison(name, "r", *pair, 1) for name, pair in pairs.items()]
    assert [row.metric for row in worst_first(rows)] == ["a", "c", "b"]
    assert rows[0].error == math.inf


def test_a_run_has_the_figures_of_its_summary():
    result = simulate(load_scenario(document()))
    told = figures(table_of(result))
    columns = result.records.columns()
    for latency in ("ttft", "tpot", "e2e"):
        values = columns.durations(latency)
        assert told[f"{latency}_mean"] == pytest.approx(np.mean(values[values >= 0]) / 1e12)
        assert told[f"{latency}_p99"] == pytest.approx(
            np.percentile(values[values >= 0], 99) / 1e12
        )


def test_regimes_are_medians_over_runs_and_leave_out_what_was_assumed():
    result = simulate(load_scenario(document()))
    truth = figures(table_of(result))
    measured = [{"ttft_mean": truth["ttft_mean"] / factor} for factor in (1.1, 1.3, 2.0)]
    runs = [outcome_of("g", f"{i}", i, m, result) for i, m in enumerate(measured)]
    wild = outcome_of("g", "assumed", 9, {"ttft_mean": 1e-9}, result, assumed=True)
    (regime,) = regimes_of([*runs, wild])
    assert regime.runs == 3
    assert regime.errors["ttft_mean"] == pytest.approx(0.3)
    assert regime.largest["ttft_mean"] == pytest.approx(1.0)
    assert regime.subject.gpu == "H100"


def test_the_knee_is_the_highest_rate_below_twice_idle():
    points = [(2.0, 1.9), (0.5, 1.0), (1.0, 1.2), (3.0, 2.1), (4.0, 1.5)]
    assert knee(points) == 4.0
    assert knee(points[:4]) == 2.0


def test_memory_is_within_3_percent_of_vllm():
    rows = memory_rows()
    assert all(abs(row["error"]) <= 0.03 for row in rows)
    tested = [row for row in rows if not row["fitted"]]
    assert {(row["run"].split(",")[0], row["max_num_seqs"]) for row in tested} == {
        ("Qwen3-14B", 256),
        ("Qwen3-14B", 1024),
    }


def test_rows_that_set_a_number_of_the_twin_are_no_test():
    found = summarize([], [], memory_rows(), [], TRAINED)
    (whence,) = [data for number, data in TRAINED if number.startswith("memory")]
    assert "Llama-3.1-70B on 4 H100" in whence
    assert "Llama-3.1-8B on RTX 4090" in whence
    assert {row["what"].split(",")[1] for row in found["targets"]} == {" Qwen3-14B"}
    written = page_of(found)
    assert written.count("% | fitted |") == 3
    assert written.count("% | tested |") == 2


def test_rows_become_runs():
    row = {
        "source": "NVIDIA aiconfigurator silicon_sample", "model": "meta-llama/Llama-3.1-70B", "gpu": "h100_sxm",
        "dtype": "fp8", "quality": "B", "engine": "vllm", "concurrency": "16.0", "tp": "4", "prompt_tokens": "1024",
        "output_tokens": "1024", "ttft_mean_ms": "121.4", "tpot_mean_ms": "13.2",
    }  # fmt: skip
    (run,) = aiconfigurator([row, row | {"quality": "C suspicious"}, row | {"gpu": "b200_sxm"}])
    (users,) = run.scenario["traffic"]
    assert users["arrivals"] == {"process": "closed", "users": 16}
    assert users["requests"] == 160
    assert users["prompt_tokens"] == {"uniform": [819, 1024]}
    assert run.measured == pytest.approx({"ttft_mean": 0.1214, "tpot_mean": 0.0132})
    load_scenario(dict(run.scenario))


def test_files_of_requests_become_runs_by_rate():
    rows = [
        {
            "file": f"LMBench_sharegpt_output_{rate}", "prompt_tokens": "100", "generation_tokens": "5",
            "ttft_s": "0.5", "generation_time_s": "0.4", "launch_time": f"{1000 + at}", "finish_time": "0",
        }
        for rate in ("1.17", "0.5")
        for at in (1, 0)
    ]  # fmt: skip
    runs = lmbench(rows, 2, (None, 0.1))
    assert [run.loads for run in runs] == [0.5, 1.17, 0.5, 1.17]
    assert [run.prefix_share for run in runs] == [None, None, 0.1, 0.1]
    assert runs[0].arrivals == [(0.0, 100, 5), (1.0, 100, 5)]
    assert runs[0].measured["tpot_mean"] == pytest.approx(0.1)
    assert runs[0].measured["e2e_p50"] == pytest.approx(0.9)


def test_what_is_not_scored_is_listed_with_the_reason():
    row = {
        "source": "llm-d-benchmark LMBench (k8s)",
        "gpu": "A100",
        "tp": "2",
        "replicas": "1",
        "workload": "w",
    }
    other = row | {"engine": "llm-d", "quality": "A per-request (non-stock engine/router)"}
    cut = row | {"engine": "vllm", "quality": "C censored"}
    stock = row | {"engine": "vllm", "quality": "A per-request"}
    assert not_scored([other, other, cut, stock]) == [
        ("A100 TP2, 1 replica(s), llm-d, w", "another router or cache than vLLM's own", 2),
        ("A100 TP2, 1 replica(s), vllm, w", "overloaded, most requests never completed", 1),
    ]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_table, "a,b\n", "no rows"),
        (read_objects, '{"a": 1}\n[1]\n', "line 2: no JSON object"),
        (read_objects, "{\n", "line 1: no JSON"),
        (read_object, "[]", "no JSON object"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path, read, text, message):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read(path)
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none")


HEADER = ",".join((*WORDS, *FIGURES))
ROW = "NVIDIA aiconfigurator silicon_sample,meta-llama/Llama-3.1-70B,h100_sxm,fp8,B,vllm,w,1"


def refused(*arguments: str) -> str:
    """What the command says, on one line; it must end with status 2."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "1000"})
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("option", ["--report", "--table", "--plot"])
def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path, option):
    ask = ("validate", "--only", "memory", "--data", str(tmp_path), option)
    assert f"{option} {tmp_path}: is a folder" in refused(*ask, str(tmp_path))
    assert "there is no folder" in refused(*ask, str(tmp_path / "no" / "file"))


def test_a_profile_is_not_built_into_a_folder_nor_on_no_day(tmp_path):
    ask = ("profile", "build", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--output")
    assert f"--output {tmp_path}: is a folder" in refused(*ask, str(tmp_path))
    told = refused(*ask, str(tmp_path / "p.json"), "--date", "yesterday")
    assert "--date yesterday: must be a day" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: there is no column source, model"),
        (f"{HEADER}\n{ROW},4,16,1024,1024,nan,13.2\n", "line 2: ttft_mean_ms is 'nan'"),
        (f"{HEADER}\n{ROW},4,16,1024,1024,1.0,\n", "line 2: tpot_mean_ms is ''"),
        (f"{HEADER}\n{ROW},4\n", "line 2: fewer values"),
    ],
)
def test_measured_figures_that_are_none_are_refused_by_row_and_column(tmp_path, text, message):
    (tmp_path / "ground_truth_calibrate.csv").write_text(text)
    told = refused("validate", "--only", "aiconfigurator", "--data", str(tmp_path))
    assert f"{tmp_path / 'ground_truth_calibrate.csv'}, {message}" in told


def test_measured_requests_without_a_number_are_refused(tmp_path):
    folder = tmp_path / "ground_truth" / "llmservingsim" / "RTXPRO6000_Llama-3.1-8B"
    folder.mkdir(parents=True)
    good = dict.fromkeys(STAMPS, 2.0)
    rows = [good, good | {"last_token_ts": float("nan")}]
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    told = refused("validate", "--only", "llmservingsim", "--data", str(tmp_path))
    assert "requests.jsonl, line 2: last_token_ts is nan" in told


def test_recorded_steps_without_a_time_are_refused():
    columns = ("ctx_requests", "ctx_tokens", "ctx_kv_tokens", "decode_requests")
    row = dict.fromkeys((*columns, "decode_kv_tokens", "counter_id"), "1") | {"latency_ms": "nan"}
    with pytest.raises(InputError, match="f, line 2: no recorded step: latency_ms is nan"):
        steps_of([row], "f")


def test_a_set_asks_only_for_what_it_needs(tmp_path):
    done = CliRunner().invoke(app, ["validate", "--only", "memory", "--data", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "fitted" in done.output
    assert "Not scored" not in done.output
    assert "give the one that has ground_truth/" in refused("validate", "--data", "/nope")


# The command, on published measurements


DATA = os.environ.get("TWIN_DATA")
published = pytest.mark.skipif(not DATA, reason="TWIN_DATA names no folder with measured runs")


def validate(*arguments: str) -> str:
    command = [sys.executable, "-m", "twin", "validate", "--data", str(DATA), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@published
def test_every_target_is_reached_or_told(tmp_path):
    pytest.importorskip("scipy")
    page = tmp_path / "page.md"
    found = json.loads(validate("--json", "--report", str(page)))
    assert len({row["run"] for row in found["rows"]}) == 2 + 3 * 6 + 24 + 20 + 45
    missed = {row["what"] for row in found["targets"] if not row["met"]}
    assert all("20% common prefix assumed" in what for what in missed)
    sizes = [abs(row["error"]) for row in found["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(number for _, why, number in found["not_scored"] if "another router" in why) == 40
    assert page.read_text(encoding="utf-8") == (ROOT / "docs/fidelity.md").read_text(
        encoding="utf-8"
    )


@published
def test_which_rows_trained_which_numbers_is_told():
    pytest.importorskip("scipy")
    text = validate("--split")
    assert "fitted to counter_id 1045-1059, " in text
    assert "counter_id 1104" in text
    assert "no measured run" in text


def test_a_set_that_does_not_exist_is_refused(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "twin", "validate", "--data", str(tmp_path), "--only", "x"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2
    assert "choose one of llmservingsim" in run.stderr
