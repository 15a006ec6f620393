"""The command `twin` as a person or a script meets it: output, files, exit status."""

import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from twin import cli
from twin.metrics.records import LATENCIES, OUTCOMES
from twin.report.json_summary import summarize
from twin.report.records_file import COLUMNS
from twin.report.tables import WIDTH
from twin.simulation import load_scenario, simulate

ROOT = Path(__file__).parents[1]
SCENARIO = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: {gpu: H100, tensor_parallel_size: 1, dtype: bfloat16}
engine: {max_num_seqs: 16, max_num_batched_tokens: 2048, max_model_len: 2048}
policy: tiered
traffic:
  - arrivals: {process: poisson, rate: 20}
    prompt_tokens: {uniform: [10, 200]}
    output_tokens: {uniform: [1, 20]}
    requests: 60
    tiers: {ONLINE: 0.7, BATCH: 0.2, OFFLINE: 0.1}
cluster: {replicas: 2, router: least_connections}
objectives: {ONLINE: {ttft_p99: 1.0}}
run: {seed: 1}
"""
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,100,10
2023-11-16 18:15:50.9951690,5000,10
2023-11-16 18:15:51.2225670,200,10
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


@pytest.fixture
def twin(monkeypatch, capsys):
    """Runs the command in this process; gives (exit status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["twin", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return call


def spawn(*arguments, **options):
    command = [sys.executable, "-m", "twin", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def test_json_has_every_name_of_the_contract(twin, scenario):
    status, out, err = twin("run", scenario, "--json")
    summary = json.loads(out)
    assert (status, err) == (0, "")
    counts = ["offered", *OUTCOMES]
    assert list(summary["totals"]) == counts
    assert summary["totals"]["offered"] == summary["attempts"] == 60
    assert list(summary["tiers"]) == ["ONLINE", "BATCH", "OFFLINE"]
    for tier in summary["tiers"].values():
        assert tier["offered"] == sum(tier[outcome] for outcome in OUTCOMES)
        for latency in LATENCIES:
            assert list(tier[f"{latency}_s"]) == ["p50", "p90", "p95", "p99", "mean"]
        assert {"goodput_rps", "attainment"} <= set(tier)
    assert {
        "steps", "preemptions", "recomputed_tokens", "prefix_hit_tokens", "prefix_query_tokens",
        "kv_usage_mean", "kv_waste_mean",
    } <= set(summary["engine"])  # fmt: skip
    for name in ("engine_version", "policy_fingerprint", "simulated_s", "wall_s"):
        assert summary[name]
    assert summary["requests_per_wall_s"] == pytest.approx(60 / summary["wall_s"])
    assert summary["interrupted"] is False


def test_engine_figures_are_of_all_replicas(scenario):
    result = simulate(load_scenario(scenario))
    engine = summarize(result)["engine"]
    both = result.engines
    assert len(both) == 2
    assert engine["steps"] == sum(one.steps for one in both)
    busy = sum(one.busy_ps for one in both)
    weighted = sum(one.kv_usage_mean * one.busy_ps for one in both) / busy
    assert engine["kv_usage_mean"] == pytest.approx(weighted)
    assert engine["busy_share"] == busy / (2 * result.simulated_ps)


def test_requests_inside_at_once_follow_from_their_times_in_the_system(scenario):
    result = simulate(load_scenario(scenario, ["run.until=1.5"]))
    end_ps = result.simulated_ps
    inside = [(r.finish_ps or end_ps) - r.arrival_ps for r in result.records]
    assert any(r.outcome == "unfinished" for r in result.records)
    assert summarize(result)["in_system_mean"] == sum(inside) / end_ps


def test_the_same_seed_gives_the_same_json_but_for_the_wall_time(twin, scenario):
    def run(*arguments):
        summary = json.loads(twin("run", scenario, "--json", *arguments)[1])
        del summary["wall_s"], summary["requests_per_wall_s"]
        return summary

    first = run()
    assert run() == first
    other = run("--seed", 2)
    assert other["seed"] == 2
    assert other != first
    assert run("--set", "run.seed=2") == other


def test_tables_fit_80_columns_and_say_what_ran(twin, scenario):
    status, out, err = twin("run", scenario)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "small: meta-llama/Llama-3.1-8B on H100, 2 replicas, vLLM 0.32.0" in out
    assert "ttft_p99" in out
    assert "ONLINE 10 ms, BATCH 50 ms, OFFLINE 200 ms" in " ".join(out.split())


def test_stock_modes_have_no_batching_wait_and_no_policy_table(twin, scenario):
    status, out, _ = twin("run", scenario, "--set", "policy=vllm-priority")
    assert status == 0
    assert "policy vllm-priority (vllm-priority)" in out
    assert "held for a batch" not in out
    assert "batches" not in out


def test_a_warning_goes_to_stderr_beside_json_and_into_the_tables(twin, scenario):
    arguments = ("run", scenario, "--set", "policy=vllm-fcfs")
    _, out, err = twin(*arguments, "--json")
    [warning] = json.loads(out)["warnings"]
    assert "tiers have no effect" in warning
    assert err == f"warning: {warning}\n"
    _, out, err = twin(*arguments)
    assert err == ""
    assert " ".join(out.split()).count(warning) == 1


@pytest.mark.parametrize(
    ("limit", "arguments", "expected"),
    [("1.0", ["--check"], 0), ("0.000001", ["--check"], 1), ("0.000001", [], 0)],
)
def test_check_tells_by_its_status_whether_objectives_were_met(
    twin, scenario, limit, arguments, expected
):
    change = f"objectives.ONLINE.ttft_p99={limit}"
    status, out, _ = twin("run", scenario, "--json", "--set", change, *arguments)
    assert status == expected
    found = json.loads(out)["objectives"]["ONLINE"]["ttft_p99"]
    assert found["met"] is (limit == "1.0")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_records_hold_every_request_to_the_picosecond(twin, scenario, tmp_path, suffix):
    path = tmp_path / f"records.{suffix}"
    status, out, _ = twin("run", scenario, "--json", "--records", path)
    assert status == 0
    with path.open(encoding="utf-8", newline="") as file:
        rows = (
            list(csv.DictReader(file)) if suffix == "csv" else [json.loads(line) for line in file]
        )
    assert [int(row["index"]) for row in rows] == list(range(60))
    assert tuple(rows[0]) == COLUMNS
    ttft = [
        float(r["first_token_s"]) - float(r["arrival_s"]) for r in rows if r["tier"] == "ONLINE"
    ]
    tier = json.loads(out)["tiers"]["ONLINE"]
    assert sum(ttft) / len(ttft) == pytest.approx(tier["ttft_s"]["mean"], rel=1e-9)


def test_a_request_is_explained_from_arrival_to_end(twin, scenario):
    status, out, _ = twin("run", scenario, "--explain-request", 7, "--explain-request", 8)
    assert status == 0
    life = out.split("Request 7:")[1].split("Request 8:")[0]
    assert "completed" in life.splitlines()[0]
    order = [
        life.index(w) for w in ("* arrived", "held", "ready", "started", "* first token", "gone")
    ]
    assert order == sorted(order)
    at = [float(line.split()[0]) for line in life.splitlines()[1:] if line.strip()]
    assert at == sorted(at)


def test_an_explanation_beside_json_goes_to_stderr(twin, scenario):
    stock = ("--set", "policy=vllm-priority")
    status, out, err = twin("run", scenario, "--json", "--explain-request", 0, *stock)
    assert status == 0
    assert json.loads(out)["totals"]["offered"] == 60
    assert "* first token" in err
    assert "No decision is known" in err


def test_an_index_that_cannot_be_is_refused_before_the_run(twin, scenario, monkeypatch):
    def no_run(*arguments, **options):
        raise AssertionError("it runs")

    monkeypatch.setattr("twin.simulation.simulate", no_run)
    open_end = ["--set", "traffic.0.requests=null", "--set", "traffic.0.duration=1"]
    for index, changes, words in (
        (60, [], "the traffic has at most 60 requests, numbered from 0"),
        (-1, open_end, "numbers begin at 0"),
    ):
        status, _, err = twin("run", scenario, "--explain-request", index, *changes)
        assert (status, words in err) == (2, True)
    with pytest.raises(AssertionError, match="it runs"):
        twin("run", scenario, "--explain-request", 59)


def test_an_index_that_the_run_did_not_have_is_refused(twin, scenario):
    changes = ["--set", "traffic.0.requests=null", "--set", "traffic.0.duration=1"]
    status, _, err = twin("run", scenario, "--explain-request", 1000, *changes)
    assert (status, "--explain-request 1000: the run had " in err) == (2, True)


def test_a_request_that_was_not_there_cannot_be_explained(twin, scenario):
    status, _, err = twin("run", scenario, "--explain-request", 60)
    assert status == 2
    assert "60 requests, numbered from 0" in err


def test_requests_that_cannot_run_are_listed_or_with_strict_stop_the_run(twin, scenario, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    arguments = ("run", scenario, "--set", f"traffic=[{{trace: '{trace}', tier: ONLINE}}]")
    status, out, _ = twin(*arguments)
    assert status == 0
    assert "1 request refused:" in out
    assert "line 3" in out
    assert "too_long" in out
    status, out, err = twin(*arguments, "--strict")
    assert (status, out) == (2, "")
    assert "5000" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "missing.yaml"], "missing.yaml"),
        (["run", "{scenario}", "--set", "policy=best"], "best"),
        (["run", "{scenario}", "--set", "engine.max_num_seq=4"], "max_num_seqs"),
        (["run", "{scenario}", "--set", "cluster.replicas=0"], "replicas"),
        (["run", "{scenario}", "--set", "nonsense"], "nonsense"),
        (["run", "{scenario}", "--seed", "-1"], "seed"),
        (["run", "{scenario}", "--seed", "x"], "--seed"),
        (["run", "{scenario}", "--records", "r.txt"], ".csv or .jsonl"),
        (["run", "{scenario}", "--records", "no/such/folder/r.csv"], "no/such/folder"),
        (["run", "{scenario}", "--unknown"], "--unknown"),
        (["run"], "SCENARIO"),
        (["fly"], "fly"),
    ],
)
def test_bad_input_is_one_message_and_status_2(twin, scenario, arguments, hint):
    status, out, err = twin(*(a.format(scenario=scenario) for a in arguments))
    assert (status, out) == (2, "")
    assert hint in err
    assert "Traceback" not in err


def test_records_that_cannot_be_written_are_bad_input(twin, scenario, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    status, _, err = twin("run", scenario, "--records", tmp_path / "r.csv")
    assert status == 2
    assert "No space left on device" in err


def test_presets_are_listed_with_their_numbers(twin):
    status, out, _ = twin("presets")
    assert status == 0
    assert max(map(len, out.splitlines())) <= WIDTH
    [online] = [line.split() for line in out.split("tiered ")[1].splitlines() if "ONLINE" in line][
        :1
    ]
    assert online[:6] == ["ONLINE", "fcfs", "8", "4,096", "10", "ms"]
    status, out, _ = twin("presets", "--json")
    assert list(json.loads(out)) == ["fcfs", "priority", "tiered", "tiered_length", "slo", "fair"]


def test_version_and_help(twin):
    assert twin("--version")[0] == 0
    status, out, _ = twin("run", "--help")
    assert status == 0
    assert "--set" in out


# --- processes of their own: signals, pipes, terminals ------------------------------------

ENDLESS = ["--set", "traffic.0.requests=5000000", "--set", "traffic.0.arrivals.rate=50"]


def interrupted(*arguments):
    """Runs the command until its progress bar shows an ended request, then Ctrl-C."""
    ours, theirs = pty.openpty()
    process = spawn(*arguments, stderr=theirs)
    os.close(theirs)
    shown = ""
    while not re.search(r"[1-9][0-9,]* of 5,000,000", shown):
        shown += os.read(ours, 10_000).decode()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert "Traceback" not in shown
    return process.returncode, out


def test_ctrl_c_prints_what_there_is_and_exits_with_130(scenario):
    status, out = interrupted("run", scenario, "--json", *ENDLESS)
    assert status == 130
    summary = json.loads(out)
    assert summary["interrupted"] is True
    totals = summary["totals"]
    assert totals["offered"] == sum(totals[outcome] for outcome in OUTCOMES)
    assert totals["completed"] > 0


def test_ctrl_c_marks_the_tables(scenario):
    status, out = interrupted("run", scenario, *ENDLESS)
    assert status == 130
    assert out.startswith("INTERRUPTED")


def test_ctrl_c_before_the_run_is_130_without_a_traceback(twin, scenario, monkeypatch):
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("twin.simulation.load_scenario", press)
    status, out, err = twin("run", scenario)
    assert (status, out, err) == (130, "", "interrupted\n")


def test_a_reader_that_leaves_early_causes_no_traceback(scenario):
    reading, writing = os.pipe()
    os.close(reading)
    process = spawn("run", scenario, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_closed_stdout_is_a_message(scenario, options):
    command = [sys.executable, "-m", "twin", "run", str(scenario), *options]
    shell = ["sh", "-c", '"$@" >&-', "sh", *command]
    run = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr == "error: the result cannot be written: stdout is closed\n"


def test_a_closed_stderr_changes_no_status():
    shell = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-m", "twin", "run", "no.yaml"]
    assert subprocess.run(shell, cwd=ROOT, timeout=60).returncode == 2


def test_an_order_that_fails_in_the_run_is_a_message(twin, scenario, monkeypatch):
    monkeypatch.syspath_prepend(scenario.parent)
    (scenario.parent / "failing_order.py").write_text("def f(job, view): return 1 / 0\n")
    override = "policy={tiers: [{name: '*', order: failing_order.f}]}"
    status, out, err = twin("run", scenario, "--set", override)
    assert (status, out) == (2, "")
    assert err.startswith("error: policy: order 'failing_order.f' failed on Job(")
    assert "ZeroDivisionError" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_a_message(scenario):
    with open("/dev/full", "w") as full:
        process = spawn("run", scenario, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "error: the result cannot be written: No space left on device\n"


def test_the_progress_bar_stays_off_stdout(scenario):
    ours, theirs = pty.openpty()
    process = spawn("run", scenario, "--json", stderr=theirs)
    out, _ = process.communicate(timeout=60)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert process.returncode == 0
    assert json.loads(out)["totals"]["offered"] == 60
    assert "requests" in shown


def test_an_ascii_terminal_gets_question_marks_rather_than_a_traceback(scenario):
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = spawn("run", scenario, env=environment)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "ONLINE" in out
