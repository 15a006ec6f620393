"""`twin run --advise`: what helped most is what helped most when it was run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.runs import document, run, stream
from twin.cli import app
from twin.report.advice import LEAST_GAIN, advise, candidates, choose_yardstick
from twin.report.json_summary import summarize
from twin.report.tables import WIDTH, render_advice
from twin.scenario import load_scenario
from twin.scheduling import PRESETS

ROOT = Path(__file__).parents[1]
BUSY = document(
    traffic=[stream(100, 60, arrivals={"process": "poisson", "rate": 40}, requests=120)],
    objectives={"ONLINE": {"ttft_p99": 0.3}},
)


@pytest.fixture(scope="module")
def base():
    result = run(BUSY)
    return result.scenario, summarize(result)


@pytest.fixture(scope="module")
def advice(base):
    seen = []
    told = advise(*base, jobs=1, progress=lambda done, total: seen.append((done, total)))
    total = len(list(candidates(base[0])))
    assert seen == [(i, total) for i in range(1, total + 1)]
    return told


def test_every_figure_is_that_of_a_run(advice, base):
    for row in advice["runs"]:
        if row["not_run"] is None:
            again = summarize(run(BUSY, row["set"]))
            good = sum(tier["good"] for tier in again["tiers"].values())
            assert row["value"] == good / 120
    before = sum(tier["good"] for tier in base[1]["tiers"].values()) / 120
    assert advice["before"] == before < 1
    gains = sorted(
        (row["value"] - before for row in advice["runs"] if row["value"] is not None), reverse=True
    )
    shown = [
        next(r["value"] for r in advice["runs"] if r["set"] == row["set"]) - before
        for row in advice["best"]
    ]
    assert shown == gains[: len(shown)]
    assert len(shown) == 3 or gains[len(shown)] < LEAST_GAIN * before


def test_what_binds_is_what_helps(advice, base):
    """Eight slots are too few, and twice as many are the cure."""
    assert base[1]["verdict"].startswith("Slots bound the run")
    assert "engine.max_num_seqs=16" in [row["set"] for row in advice["best"][:2]]
    assert advice["best"][0]["before"] != advice["best"][0]["after"]


def test_impossible_changes_are_named_with_their_reason():
    source = document(
        traffic=[stream(100, 60, requests=20)], engine={"max_num_batched_tokens": 8}, objectives={}
    )
    result = run(source)
    rows = {row["set"]: row for row in advise(result.scenario, summarize(result), 1)["runs"]}
    refused = rows["engine.max_num_batched_tokens=4"]
    assert refused["value"] is None
    assert "max_num_batched_tokens" in refused["not_run"]


def test_candidates_differ_from_the_scenario_in_one_thing(base):
    scenario, _ = base
    found = list(candidates(scenario))
    assert len({change.override for change in found}) == len(found)
    assert {f"policy={name}" for name in PRESETS} <= {change.override for change in found}
    assert "policy=vllm-fcfs" not in {change.override for change in found}
    assert not any(change.override.startswith("cluster.router") for change in found)
    several = load_scenario(BUSY, ["cluster.replicas=2", "engine.enable_prefix_caching=false"])
    overrides = {change.override for change in candidates(several)}
    assert {
        "cluster.router=round_robin",
        "cluster.replicas=3",
        "engine.enable_prefix_caching=true",
    } <= overrides


@pytest.mark.parametrize(
    ("objectives", "name"),
    [
        ({"ONLINE": {"ttft_p99": 0.3}}, "requests that are good (attainment)"),
        (
            {"ONLINE": {"ttft_p99": 60.0, "e2e_p50": 30.0}},
            "the objective nearest to its limit (in this run ONLINE e2e_p50)",
        ),
        ({}, "TTFT p99 of the slowest tier"),
    ],
)
def test_the_yardstick_fits_the_run(objectives, name):
    summary = summarize(run(BUSY | {"objectives": objectives}))
    yardstick = choose_yardstick(summary)
    assert yardstick.name == name
    value = yardstick.read(summary)
    assert value > 0
    better = value * 1.5 if yardstick.more_is_better else value / 2
    assert yardstick.gain(value, better) == pytest.approx(0.5)
    assert yardstick.gain(value, None) == 0


def test_more_slots_are_tried_as_far_as_they_are_legal():
    """Twice as many would be refused: more than a step has tokens, or than the profile knows."""
    for changes, expected in (
        (["engine.max_num_seqs=400", "engine.max_num_batched_tokens=512"], 512),
        (["engine.max_num_seqs=800", "engine.max_num_batched_tokens=4096"], 1024),
        (["engine.max_num_seqs=8"], 16),
        (["engine.max_num_seqs=512"], None),
    ):
        found = candidates(load_scenario(document(), changes))
        tried = [c.override for c in found if c.override.startswith("engine.max_num_seqs=")]
        value = int(changes[0].partition("=")[2])
        more = [] if expected is None else [f"engine.max_num_seqs={expected}"]
        assert tried == [*more, f"engine.max_num_seqs={value // 2}"]
        for override in tried:
            load_scenario(document(), [*changes, override])


def test_ctrl_c_does_not_wait_for_the_runs_of_the_workers(tmp_path):
    path = tmp_path / "busy.yaml"
    path.write_text(yaml.safe_dump(BUSY), encoding="utf-8")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "twin", "run", path, "--advise", "--jobs", "2", "--out", out]
    long = ["--set", "traffic.0.requests=30000"]
    process = subprocess.Popen(
        [*command, *long], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for _ in range(600):
        if (out / "report.html").exists():
            break
        time.sleep(0.1)
    time.sleep(2.5)
    # To the parent alone, so that only it can end the workers.
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    text, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 8
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Interrupted:" in text


def test_nothing_that_helps_is_said_so():
    calm = document(
        traffic=[stream(50, 1, requests=3, arrivals={"process": "constant", "rate": 1})]
    )
    result = run(calm, "engine.async_scheduling=true")
    told = advise(result.scenario, summarize(result), 1)
    if not told["best"]:
        assert "none was better by 1%" in told["text"]
    assert max(map(len, render_advice(told).splitlines())) <= WIDTH


def test_the_command_tells_and_writes_it(tmp_path):
    path = tmp_path / "busy.yaml"
    path.write_text(yaml.safe_dump(BUSY), encoding="utf-8")
    out = tmp_path / "out"
    answer = CliRunner().invoke(
        app, ["run", str(path), "--advise", "--jobs", "2", "--out", str(out)]
    )
    assert answer.exit_code == 0, answer.output
    text = " ".join(answer.output.split())
    assert "single changes were run with the same seed" in text
    assert "max_num_seqs 16 (from 8)" in text
    told = json.loads((out / "summary.json").read_text())["advice"]
    assert told == advise(load_scenario(path), summarize(run(BUSY)), jobs=1)
    assert "max_num_seqs 16 (from 8)" in (out / "report.html").read_text()


def test_ctrl_c_while_it_advises_keeps_the_run_and_what_was_found(tmp_path):
    path = tmp_path / "busy.yaml"
    path.write_text(yaml.safe_dump(BUSY), encoding="utf-8")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "twin", "run", path, "--advise", "--jobs", "1", "--out", out]
    slow = ["--set", "traffic.0.requests=4000"]
    process = subprocess.Popen(
        [*command, *slow], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for _ in range(600):
        if (out / "report.html").exists():
            break
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Interrupted:" in text
    summary = json.loads((out / "summary.json").read_text())
    assert summary["advice"]["interrupted"] is True
    assert summary["interrupted"] is False
    assert summary["totals"]["completed"] == 4000


def workers_of(pid):
    """Process ids of what a process has started to run things in."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
@pytest.mark.parametrize("whom", ["worker", "parent"])
def test_a_process_that_is_killed_while_it_advises(tmp_path, whom):
    """A worker: what was run is told. The parent: nobody stays behind."""
    path = tmp_path / "busy.yaml"
    path.write_text(yaml.safe_dump(BUSY), encoding="utf-8")
    command = [sys.executable, "-m", "twin", "run", path, "--advise", "--jobs", "2", "--json"]
    process = subprocess.Popen(
        [*command, "--set", "traffic.0.requests=30000"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    workers = []
    end = time.monotonic() + 60
    while len(workers) < 2 and time.monotonic() < end:
        time.sleep(0.1)
        workers = workers_of(process.pid)
    time.sleep(1)
    os.kill(workers[0] if whom == "worker" else process.pid, signal.SIGKILL)
    text, errors = process.communicate(timeout=60)
    if whom == "worker":
        assert process.returncode == 2
        assert "Traceback" not in errors
        assert "a worker process was ended from outside" in errors
        assert json.loads(text)["advice"]["ended_by"].startswith("A worker process")
    end = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(is_alive, workers))
