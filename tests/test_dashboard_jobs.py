"""Jobs behind the pages: computed once, cancelled cleanly, never mixed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import dashboard.jobs
from dashboard.jobs import Jobs
from dashboard.limits import Limits
from dashboard.results import archive
from dashboard.state import DEFAULT
from dashboard.work import validate
from tests.runs import azure_csv, document, run, stream
from twin.errors import InputError
from twin.report.json_summary import summarize

ROOT = Path(__file__).parents[1]
SMALL = document(traffic=[stream(requests=30)], policy="tiered")
LONG = document(
    traffic=[stream(100, 200, arrivals={"process": "poisson", "rate": 15}, requests=150_000)],
    run={"engine_mode": "stepped"},
)


@pytest.fixture(scope="module")
def jobs():
    made = Jobs(Limits(), workers=2)
    yield made
    made.close()


def finished(jobs, job, session="one", within=120):
    end = time.monotonic() + within
    while not job.is_over:
        jobs.look(job.key, session)
        assert time.monotonic() < end, (job.state, job.text)
        time.sleep(0.02)
    return job


def ask(jobs, source, session="one", kind="run", **more):
    return jobs.ask(kind, {"document": source, "uploads": {}, **more}, session)


def running(jobs, job):
    end = time.monotonic() + 120
    while not job.done:
        assert time.monotonic() < end, job.state
        assert not job.is_over, job.error
        jobs.look(job.key, "one")
        time.sleep(0.02)


def test_a_run_is_the_run_of_the_twin(jobs):
    job = finished(jobs, ask(jobs, SMALL))
    assert job.state == "done", job.error
    alone = summarize(run(SMALL, observe=True))
    for name in ("tiers", "totals", "engine", "gpu_time", "verdict"):
        assert job.result["summary"][name] == json.loads(json.dumps(alone[name]))
    assert set(job.result["distributions"]) == {"ttft", "tpot", "e2e"}
    assert "queue" in job.result["timelines"]


def test_two_who_ask_the_same_share_one_and_others_see_nothing(jobs):
    """streamlit#8009: the same scenario is computed once, different ones are not mixed."""
    before = jobs.computed
    source = SMALL | {"run": {"seed": 77}}
    first, second = ask(jobs, source, "one"), ask(jobs, source, "two")
    other = ask(jobs, SMALL | {"run": {"seed": 78}}, "two")
    assert first is second
    assert first is not other
    finished(jobs, first), finished(jobs, other, "two")
    assert jobs.computed == before + 2
    assert first.result["summary"]["seed"] == 77
    assert other.result["summary"]["seed"] == 78
    assert finished(jobs, ask(jobs, source, "three")) is first
    assert jobs.computed == before + 2


def test_cancelled_at_once_and_the_worker_goes_on(jobs):
    job = ask(jobs, LONG)
    running(jobs, job)
    jobs.cancel(job.key, "one")
    assert job.state == "cancelled"
    assert job.result is None
    after = finished(jobs, ask(jobs, SMALL | {"run": {"seed": 5}}))
    assert after.state == "done"
    again = ask(jobs, LONG)
    assert again is not job
    jobs.cancel(again.key, "one")
    assert again.state == "cancelled"


def test_one_of_two_who_watch_cannot_end_it(jobs):
    source = LONG | {"run": {"engine_mode": "stepped", "seed": 2}}
    job = ask(jobs, source, "one")
    ask(jobs, source, "two")
    running(jobs, job)
    jobs.cancel(job.key, "one")
    assert job.state == "running"
    jobs.cancel(job.key, "two")
    assert job.state == "cancelled"


def test_a_page_that_was_left_frees_the_worker(jobs, monkeypatch):
    """streamlit#1326, with the messages below."""
    job = ask(jobs, LONG | {"run": {"engine_mode": "stepped", "seed": 3}})
    running(jobs, job)
    monkeypatch.setattr(dashboard.jobs, "LEFT_S", 0.5)
    end = time.monotonic() + 30
    while not job.is_over:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert job.state == "cancelled"


def test_limits_end_what_takes_too_long_or_too_much():
    small = Jobs(Limits(run_s=1.0, waiting=1), workers=1)
    try:
        job = ask(small, LONG)
        end = time.monotonic() + 120
        while not job.is_over and time.monotonic() < end:
            small.look(job.key, "one")
            time.sleep(0.05)
        assert job.state == "failed"
        assert "too long for a page" in job.error
        states = [ask(small, SMALL | {"run": {"seed": 100 + k}}).state for k in range(4)]
        assert "failed" in states
    finally:
        small.close()


def test_memory_is_limited():
    script = "from dashboard.guard import limit_memory; limit_memory(1 << 30); bytearray(2 << 30)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "MemoryError" in done.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SMALL | {"policy": "tired"}, "did you mean"),
        (SMALL | {"engine": {"max_num_seq": 3}}, "max_num_seqs"),
        (SMALL | {"traffic": []}, "traffic"),
        ({}, "model"),
        (SMALL | {"policy": {"tiers": [{"name": "A", "order": "os.system"}]}}, "no built-in order"),
        (SMALL | {"traffic": [{"trace": "/etc/passwd"}]}, "no trace uploaded"),
    ],
)
def test_mistakes_come_back_as_one_message(jobs, source, message):
    job = finished(jobs, ask(jobs, source))
    assert job.state == "failed"
    assert message in job.error
    assert "Traceback" not in job.error


def test_the_other_kinds(jobs, tmp_path):
    variant = {"name": "more", "changes": ["engine.max_num_seqs=16"]}
    compared = finished(
        jobs, ask(jobs, SMALL, kind="compare", name="A", variants=[variant], seeds=2)
    )
    assert compared.state == "done", compared.error
    assert compared.result["comparison"]["variants"][0]["text"].startswith("more: ")
    assert compared.result["documents"]["more"]["engine"]["max_num_seqs"] == 16
    searched = finished(
        jobs, ask(jobs, SMALL, kind="search", vary=["engine.max_num_seqs=2,8", "policy=tiered,fcfs"],
                  goals=["ONLINE.ttft_p99"], seeds=1, trials=4),
    )  # fmt: skip
    assert searched.state == "done", searched.error
    assert len(searched.result["documents"]) == 4
    waited = finished(
        jobs, ask(jobs, SMALL, kind="waits", tiers=["ONLINE"], waits=[0.0, 0.1], seeds=2)
    )
    assert waited.state == "done", waited.error
    trace = azure_csv(tmp_path, [("2023-11-16 18:00:00", 10, 5), ("nonsense", 10, 5)])
    checked = finished(jobs, jobs.ask("check", {"uploads": {"mine.csv": trace}}, "one"))
    assert checked.state == "done", checked.error
    assert checked.result["found"]["malformed"]["total"] == 1
    assert os.path.dirname(trace) not in checked.result["text"]
    hostile = ask(
        jobs,
        SMALL,
        kind="search",
        vary=["policy=[{tiers: [{name: A, order: os.system}]}]"],
        goals=[],
        seeds=1,
        trials=2,
    )
    assert "no built-in order" in finished(jobs, hostile).error


def test_an_error_that_nobody_thought_of_is_called_one(jobs):
    """Not lack of memory; and the process goes on."""
    job = finished(jobs, jobs.ask("run", {"uploads": {}}, "one"))
    assert job.state == "failed"
    assert "an error of the dashboard (KeyError)" in job.error
    assert "memory" not in job.error
    assert finished(jobs, ask(jobs, SMALL | {"run": {"seed": 11}})).state == "done"


def test_a_process_that_was_ended_says_how():
    one = Jobs(Limits(), workers=1)
    try:
        job = ask(one, LONG)
        running(one, job)
        os.kill(one._workers[0]._process.pid, signal.SIGKILL)
        assert finished(one, job).state == "failed"
        assert "ended by signal 9" in job.error
        assert "4,096 MiB" in job.error
        assert finished(one, ask(one, SMALL | {"run": {"seed": 12}})).state == "done"
    finally:
        one.close()


def test_who_is_gone_does_not_hold_up_a_cancel(jobs, monkeypatch):
    """A page that is loaded anew is another session; the one before looks no more."""
    monkeypatch.setattr(dashboard.jobs, "AWAY_S", 0.3)
    source = LONG | {"run": {"engine_mode": "stepped", "seed": 4}}
    job = ask(jobs, source, "before")
    assert ask(jobs, source, "one") is job
    running(jobs, job)
    time.sleep(0.4)
    jobs.look(job.key, "one")
    jobs.cancel(job.key, "one")
    assert job.state == "cancelled"


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("arrival_s", ["a", "b"], "column arrival_s: must hold numbers"),
        ("finish_s", [[1.0], [2.0]], "column finish_s: must hold numbers"),
        ("output_tokens", [{"a": 1}, {"a": 2}], "column output_tokens: must hold numbers"),
        ("itl_s", ["a", None], "column itl_s: must hold lists of numbers, row 1"),
        ("itl_s", [["x"], ["y"]], "column itl_s: must hold lists of numbers, row 1"),
        ("tier", [["A"], ["B"]], "column tier: must hold text, row 1"),
        ("x", [1, 2], "no column arrival_s"),
        (None, None, "not readable as Parquet"),
    ],
)
def test_measurements_of_any_kind_are_answered(tmp_path, column, values, message):
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    usual = {"arrival_s": [0.0, 1.0], "first_token_s": [0.5, None], "finish_s": [2.0, 3.0], "output_tokens": [5, 6],
             "outcome": ["completed", "completed"], "tier": ["A", "A"], "itl_s": [[0.1], None]}  # fmt: skip
    pd.DataFrame(usual).to_parquet(good)
    if column is None:
        bad.write_bytes(b"PAR1" + b"x" * 50)
    elif column == "x":
        pd.DataFrame({"x": values}).to_parquet(bad)
    else:
        pd.DataFrame(usual | {column: values}).to_parquet(bad)
    paths = {"predicted.parquet": str(good), "measured.parquet": str(bad)}
    with pytest.raises(InputError, match=f"measured.parquet: {message}"):
        validate({"uploads": paths}, Limits(), lambda *_: None)
    found = validate(
        {"uploads": paths | {"measured.parquet": str(good)}}, Limits(), lambda *_: None
    )
    assert found["rows"]
    assert all(row["error"] == 0 for row in found["rows"])


def test_a_file_is_of_its_run(jobs):
    import io
    import zipfile

    job = finished(
        jobs,
        ask(
            jobs,
            DEFAULT | {"traffic": [{**DEFAULT["traffic"][0], "requests": 50}], "run": {"seed": 9}},
        ),
    )
    assert archive(job.result) == archive(job.result)
    with zipfile.ZipFile(io.BytesIO(archive(job.result))) as file:
        assert set(file.namelist()) == {
            "summary.json",
            "scenario.yaml",
            "tiers.csv",
            "timeseries.csv",
        }
        summary = json.loads(file.read("summary.json"))
        assert summary["seed"] == 9
        assert summary["scenario_document"]["traffic"][0]["requests"] == 50
        assert summary["version"]
        again = summarize(run(__import__("yaml").safe_load(file.read("scenario.yaml"))))
    assert again["tiers"] == summary["tiers"]
