"""Is the client the bottleneck? And the commands, as a user calls them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed in this environment")

import real.lateness
import real.live_steps
from real import cli_calibrate
from real.lateness import client_facts, highest_rate, lateness_of, warnings_of
from real.measured import Measured
from real.replay import Replayed
from twin.clock import PS
from twin.errors import InputError
from twin.metrics.records import RequestRecord
from twin.scenario import load_scenario

ROOT = Path(__file__).parents[1]
SCENARIO = "examples/compare-demo.yaml"


def sent(due_s, late_s, attempts=1):
    record = RequestRecord(
        0, "ONLINE", "default", None, 0, 0, round(due_s * PS), None, None, None, 1, 1, "completed", "length",
        attempts=attempts,
    )  # fmt: skip
    return Measured(record, round((due_s + late_s) * PS))


def test_lateness_is_from_due_to_sent():
    measured = [sent(i / 100, 0.001) for i in range(100)]
    measured += [sent(1 + i / 200, 0.001 if i else 0.05) for i in range(200)]
    measured += [sent(2.5, 9.0, attempts=2), Measured(measured[0].record, None)]
    late = lateness_of(measured)
    assert late.requests == 300
    assert (late.p50_s, late.max_s) == pytest.approx((0.001, 0.05))
    # In the second second one was late, so only the first one counts.
    assert late.busiest_on_time == 100
    assert lateness_of([]) is None


def test_a_client_that_cannot_keep_up_says_so():
    on_time = Replayed([sent(0, 0.001)] * 100, 10.0, 1.0, False)
    assert warnings_of(on_time, None) == []
    assert client_facts(on_time)["cpu_share"] == pytest.approx(0.1)
    late = Replayed([sent(0, 0.1)] * 100, 10.0, 9.0, False)
    first, second = warnings_of(late, None)
    assert "more than 100.0 ms after they were due (it, or its connection" in first
    assert "90 % of a processor" in second


def test_the_highest_rate_is_found_against_a_server_of_its_own(monkeypatch):
    monkeypatch.setattr(real.lateness, "RATES", (20, 30))
    monkeypatch.setattr(real.lateness, "TRIAL_S", 0.5)
    monkeypatch.setattr(real.lateness, "LIMIT_S", 5.0)
    rate, share = highest_rate(10, 3, True, 1000)
    assert rate == 30
    assert 0 < share < 1.5
    monkeypatch.setattr(real.lateness, "LIMIT_S", -1.0)
    assert highest_rate(10, 3, True, 1000) == (0.0, 0.0)


def test_times_of_a_late_client_are_not_fitted(monkeypatch):
    async def measured(*arguments):
        return real.live_steps.Live([], 0.0, 0.0, 0.2, 100, 1.0)

    monkeypatch.setattr(real.live_steps, "measure", measured)
    loaded = load_scenario(ROOT / SCENARIO)
    serving = cli_calibrate.Serving("python", "m", "m")
    with pytest.raises(
        InputError, match=r"sent more than 200.0 ms after their time \(--late allows"
    ):
        cli_calibrate._live(loaded, serving, "http://here", "m", 1.0, 0.5, 0.005, {})


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def null_server():
    command = [sys.executable, "-m", "real.null_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.terminate()


def run(*options, **more):
    command = [sys.executable, "-m", "real", "replay", SCENARIO, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **more)


def test_replay_writes_what_a_run_writes(tmp_path, null_server):
    folder = tmp_path / "o"
    options = [
        "--url",
        null_server,
        "--model",
        "m",
        "--out",
        str(folder),
        "--tiny",
        "--until",
        "1.5",
    ]
    done = run(*options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == (
        "priorities (smaller is more urgent, as in vLLM): ONLINE 0, BATCH 1, OFFLINE 2"
    )
    assert "ONLINE TTFT" in done.stdout
    assert "of a processor; sent" in done.stdout
    assert {path.name for path in folder.iterdir()} == {
        "requests.parquet", "trace.jsonl", "replay.json", "summary.json", "timeseries.parquet", "report.html",
    }  # fmt: skip
    facts = json.loads((folder / "replay.json").read_text())
    assert facts["server"]["cache_at_start"] == "unknown"
    assert facts["length_mismatch"] == 0.0
    assert facts["client"]["lateness"]["requests"] > 5
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["totals"]["completed"] == summary["totals"]["offered"]
    assert "not simulated" in (folder / "report.html").read_text()
    assert run(*options).returncode == 2  # the folder is not empty


def test_replay_ends_on_ctrl_c_and_keeps_what_it_has(tmp_path, null_server):
    command = [
        sys.executable,
        "-m",
        "real",
        "replay",
        SCENARIO,
        "--url",
        null_server,
        "--model",
        "m",
    ]
    with subprocess.Popen(
        [*command, "--tiny", "--out", str(tmp_path / "o")], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stderr.readline()
        time.sleep(3.0)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["interrupted"]
    assert 0 < summary["totals"]["offered"] < 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "localhost"], "--url localhost: must be like http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:9"], "no list of models at /v1/models"),
        (["--url", "http://h", "--timeout", "inf"], "--timeout inf: must be a finite number"),
        (["--url", "http://h", "--endpoint", "x"], "--endpoint x: must be completions or chat"),
    ],
)
def test_replay_refuses_what_makes_no_sense(options, words):
    done = run(*options)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_server_without_metrics_is_no_trouble():
    from real.server_metrics import read, series_of

    assert read("http://127.0.0.1:9", timeout_s=0.5) is None
    assert len(series_of([], 2.0).times_ps) == 2
