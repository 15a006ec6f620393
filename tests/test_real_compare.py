"""The twin held beside what was measured, here by a twin whose steps take another time."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed in this environment")

from real.compare import METRICS, Run, mismatch_of, regime_of, rows_of
from real.compare_misses import misses_of
from real.compare_page import page, scatter, timeline
from real.compare_twin import predict
from real.measured import Measured, write_measured
from twin.clock import PS
from twin.scenario import load_scenario
from twin.simulation import simulate

ROOT = Path(__file__).parents[1]
DOCUMENT = {
    "name": "small",
    "model": "meta-llama/Llama-3.1-8B",
    "hardware": {"gpu": "H100"},
    "engine": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "async_scheduling": False,
    },
    "policy": "vllm-fcfs",
    "traffic": [
        {
            "arrivals": {"process": "poisson", "rate": 8},
            "prompt_tokens": {"uniform": [50, 900]},
            "output_tokens": {"uniform": [20, 60]},
            "requests": 60,
        }
    ],
}


def scenario(**stream):
    document = json.loads(json.dumps(DOCUMENT))
    document["traffic"][0] |= stream
    return document


def slowed(document, factor):
    """What a server would show whose steps take `factor` times as long."""
    loaded = load_scenario(document)
    return replace(loaded, step_time=loaded.step_time.slowed(factor))


def measure(folder, document, factor=1.0, start="cold", early=0.0, drop=0):
    """Write what a replay against such a server would."""
    loaded = slowed(document, factor)
    asked = []
    result = simulate(loaded, on_offer=asked.append)
    folder.mkdir()
    measured = []
    for record, request in zip(result.records, asked, strict=True):
        planned = (record.prompt_tokens, round(record.output_tokens * (1 + early)))
        measured.append(
            Measured(record, record.arrival_ps, record.output_tokens, planned, 200, "", request)
        )
    facts = {"scenario": document, "server": {"cache_at_start": start}, "client": {}}
    write_measured(folder, measured[drop:], facts)
    return folder


def written(folder, document):
    path = folder / "scenario.yaml"
    path.write_text(json.dumps(document))
    return path


def test_the_same_server_is_predicted_exactly(tmp_path):
    document = scenario()
    run = predict(written(tmp_path, document), [], measure(tmp_path / "m", document))
    rows = rows_of([run])
    assert {row.comparison.metric for row in rows} == set(METRICS)
    assert all(row.comparison.error == pytest.approx(0, abs=1e-9) for row in rows)
    assert all(row.is_within(0.0) or abs(row.comparison.error) < 1e-9 for row in rows)
    assert mismatch_of(run) == (0.0, 0.0, 0.0)
    assert run.facts["twin"]["steps"] > 100


def test_errors_are_told_at_every_percentile_and_by_regime(tmp_path):
    """Light and heavy load, a server that is 20 % slower than the twin: no blended score hides the tail."""
    light, heavy = scenario(), scenario(arrivals={"process": "poisson", "rate": 60})
    runs = [
        predict(written(tmp_path, document), [], measure(tmp_path / name, document, 1.2))
        for name, document in (("light", light), ("heavy", heavy))
    ]
    assert [run.regime for run in runs] == ["idle", "saturated"]
    rows = rows_of(runs)
    found = {(row.comparison.regime, row.comparison.metric): row.comparison.error for row in rows}
    for regime in ("idle (8/s)", "saturated (60/s)"):
        for metric in ("ttft", "tpot", "e2e"):
            for stat in ("p50", "p90", "p95", "p99"):
                assert (regime, f"{metric}_{stat}") in found
        assert (regime, "requests_per_s") in found
        assert found[regime, "tpot_mean"] == pytest.approx(1 / 1.2 - 1, abs=0.12)
    # Under overload the queue grows by what each step is too slow; at light load nothing waits.
    assert abs(found["saturated (60/s)", "ttft_p90"]) > 0.15
    errors = [abs(row.comparison.error) for row in rows]
    assert errors == sorted(errors, reverse=True)


def test_repeated_runs_tell_their_spread(tmp_path):
    document = scenario()
    source = written(tmp_path, document)
    runs = [
        predict(source, [], measure(tmp_path / str(i), document, factor))
        for i, factor in enumerate((1.0, 1.1))
    ]
    [row] = rows_of(runs, ["tpot_mean"])
    assert row.runs == 2
    assert row.spread == pytest.approx(0.1 / 1.05, abs=0.03)
    assert row.comparison.requests == 120
    assert row.is_within(0.0)
    [alone] = rows_of(runs[1:], ["tpot_mean"])
    assert alone.spread is None
    assert not alone.is_within(0.01)


def test_what_lies_outside_the_scheduler_is_added(tmp_path):
    document = scenario()
    folder = measure(tmp_path / "m", document)
    source = written(tmp_path, document)
    plain, later = predict(source, [], folder), predict(source, [], folder, frontend_s=0.5)
    for a, b in zip(
        plain.predicted["first_token_s"], later.predicted["first_token_s"], strict=True
    ):
        assert b - a == pytest.approx(0.5)
    assert plain.predicted["arrival_s"] == later.predicted["arrival_s"]


def test_a_closed_loop_is_given_as_planned(tmp_path):
    document = scenario(arrivals={"process": "closed", "users": 4}, requests=40)
    folder = measure(tmp_path / "m", document, 1.5)
    source = written(tmp_path, document)
    run = predict(source, [], folder)
    error = {r.comparison.metric: r.comparison.error for r in rows_of([run])}
    # Given the measured arrivals, the twin could not be faster than the server was.
    assert error["requests_per_s"] == pytest.approx(0.5, abs=0.1)
    recorded = {
        r.comparison.metric: r.comparison.error
        for r in rows_of([predict(source, [], folder, planned=False)])
    }
    assert recorded["requests_per_s"] < 0.1
    slower = predict(source, [], folder, frontend_s=0.2)
    with_think = {r.comparison.metric: r.comparison.error for r in rows_of([slower])}
    assert with_think["requests_per_s"] < error["requests_per_s"] - 0.1


def test_a_warm_server_is_compared_with_a_warmed_twin(tmp_path):
    shared = scenario(
        prompt_tokens={"fixed": 600}, prefixes={"groups": 1, "tokens": 2400}, requests=20
    )
    first = measure(tmp_path / "first", shared)
    # The server that had served the same prompt before: the first of the run hits, too.
    twice = predict(written(tmp_path, shared), [], first, warm=first / "trace.jsonl")
    once = predict(written(tmp_path, shared), [], first)
    assert once.predicted["prefix_hit_tokens"][0] == 0
    assert twice.predicted["prefix_hit_tokens"][0] >= 2400
    assert len(twice.predicted["index"]) == len(once.predicted["index"]) == 20
    assert twice.predicted["arrival_s"] == pytest.approx(once.predicted["arrival_s"])
    labels = {row.comparison.regime for row in rows_of([once])}
    assert any(label.endswith(", prefix hit") for label in labels)
    assert any(label.endswith(", no hit") for label in labels)


def test_misses_come_with_what_they_have_in_common(tmp_path):
    document = scenario()
    run = predict(written(tmp_path, document), [], measure(tmp_path / "m", document))
    long = sorted(range(60), key=lambda i: -run.measured["prompt_tokens"][i])[:6]
    late = list(run.measured["first_token_s"])
    for i in long:
        late[i] += 3.0
    wrong = Run(**{**vars(run), "measured": {**run.measured, "first_token_s": late}})
    found = misses_of(wrong)
    assert {row["request"] for row in found.rows[:6]} == {run.measured["index"][i] for i in long}
    assert found.rows[0]["ttft_measured_s"] - found.rows[0]["ttft_predicted_s"] == pytest.approx(
        3, abs=0.1
    )
    assert found.differs[0].startswith("prompt tokens: ")
    fewer = Run(**{**vars(run), "measured": {k: v[:-1] for k, v in run.measured.items()}})
    assert "not serve the same number" in misses_of(fewer).differs[0]


def test_regimes():
    assert [regime_of(waited) for waited in (0.0, 0.2, 0.95)] == ["idle", "knee", "saturated"]


def test_the_page_holds_all_of_it(tmp_path):
    document = scenario()
    run = predict(written(tmp_path, document), [], measure(tmp_path / "m", document, 1.1))
    rows = rows_of([run])
    html = page([run], rows, {run.name: misses_of(run)}, ["a <note>"])
    assert "a &lt;note&gt;" in html
    assert html.count("<div id=") == 2
    points = scatter(run)["data"][0]
    assert len(points["x"]) == len(points["y"]) == 60
    lines = timeline(run)["data"]
    assert [line["name"] for line in lines] == ["measured", "twin"]
    assert max(lines[0]["y"]) > 0
    assert lines[0]["y"][-1] == 0


def test_the_command(tmp_path):
    document = scenario()
    source = written(tmp_path, document)
    folder = measure(tmp_path / "m", document, 1.1, start="warm", early=0.5)
    command = [sys.executable, "-m", "real", "compare", str(source), str(folder)]
    run = subprocess.run(
        [*command, "--out", str(tmp_path / "o")], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()[:2]
    assert first.startswith("m: 100.0 % of the completed requests had other lengths than planned")
    assert "the server's prefix cache was warm at the start, the twin's cold" in second
    assert "requests_per_s" in run.stdout
    content = json.loads((tmp_path / "o" / "compare.json").read_text())
    assert content["runs"]["m"]["regime"] == "idle"
    assert (tmp_path / "o" / "compare.html").stat().st_size > 1_000_000
    run = subprocess.run([*command[:-1], str(tmp_path / "no")], cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 2
    assert "cannot be read" in run.stderr
    run = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(run.stdout)["figures"][0]["runs"] == 1


# --- what users of such tools ask -----------------------------------------------------------------


def test_longer_replies_spread_the_prefills_of_a_closed_loop():
    """32 clients, 3,100 tokens in: with one token out all prefills come together, with 512 they do not."""

    def run(output):
        document = scenario(
            arrivals={"process": "closed", "users": 32},
            prompt_tokens={"fixed": 3100},
            output_tokens={"fixed": output},
            requests=128,
        )
        document["engine"] |= {"max_num_seqs": 32, "max_num_batched_tokens": 8192}
        result = simulate(load_scenario(document), observe=True)
        ttft = sorted((r.first_token_ps - r.arrival_ps) / PS for r in result.records)
        [engine] = result.engines
        prefill = engine.scheduled_tokens - engine.decode_tokens
        return ttft[64], prefill / engine.steps

    (short_s, together), (long_s, apart) = run(1), run(512)
    assert long_s < short_s / 2
    # The explanation: prompt tokens of an average step.
    assert together > 10 * apart


def test_a_time_to_first_token_has_the_queue_in_it():
    """Five slots, a hundred clients: what the twin exports is what a client's stopwatch shows."""
    document = scenario(
        arrivals={"process": "closed", "users": 100}, output_tokens={"fixed": 50}, requests=300
    )
    document["engine"] |= {"max_num_seqs": 5}
    records = list(simulate(load_scenario(document)).records)
    for record in records:
        queue = record.first_scheduled_ps - record.arrival_ps
        prefill = record.first_token_ps - record.first_scheduled_ps
        assert record.first_token_ps - record.arrival_ps == queue + prefill
    waits = sorted((r.first_scheduled_ps - r.arrival_ps) / PS for r in records)
    firsts = sorted((r.first_token_ps - r.arrival_ps) / PS for r in records)
    assert waits[150] > 0.8 * firsts[150] > 0.5
