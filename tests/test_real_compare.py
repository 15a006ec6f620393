"""The twin held beside what was measured, here by a twin whose steps take another time.

What users of such tools have asked, and where it is tested:

- inference-sim/inference-sim#1216, direction of the priority number: test_real_replay,
  test_priorities_are_those_of_the_simulator and test_tiers_and_deadlines_go_along; that it is printed:
  test_real_lateness
- inference-sim/inference-sim#1273, warm server, cold twin: here, "a server that had served before"
- inference-sim/inference-sim#1277, lengths before times: test_real_lengths; test_real_replay,
  test_lengths_are_forced_and_a_mismatch_is_told; here, "which requests, and which runs"
- inference-sim/inference-sim#1188, tail errors by regime: here,
  test_errors_are_told_at_every_percentile_and_by_regime
- llm-d/llm-d-inference-sim#266, TTFT with the queue: here, test_a_time_to_first_token_has_the_queue_in_it
- casys-kaist/LLMServingSim#40, fidelity under overload: here, test_fidelity_under_overload, with a twin of other steps
  as the server; on a live one benchmarks/live_regimes.py, whose times say nothing on a busy machine
- vllm-project/guidellm#444, failures in latencies: test_real_replay, test_failures_are_not_mixed_into_latencies; here,
  test_what_did_not_complete_counts_on_neither_side
- kubernetes-sigs/inference-perf#559, thinking tokens: test_real_replay, test_thinking_tokens_are_tokens
- vllm-project/vllm#13412, longer outputs and shorter TTFT: here,
  test_longer_replies_spread_the_prefills_of_a_closed_loop
- llm-d/llm-d-benchmark#261, a client that is the bottleneck: test_real_lateness, test_real_late_client
- kvcache-ai/Mooncake#1266, hash ids to prompts: test_real_replay, test_an_id_is_always_the_same_tokens; hit rates,
  where vLLM runs, test_real_live, test_a_trace_of_hashes_meets_the_prefix_cache_as_in_the_twin
"""

import json
import math
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("pyarrow", reason="pyarrow is not installed in this environment")

from real.cli import app
from real.cli_compare import names_of
from real.compare import METRICS, Run, groups_of, mismatch_of, regime_of, rows_of
from real.compare_misses import misses_of
from real.compare_notes import notes
from real.compare_page import page, scatter, timeline
from real.compare_twin import predict
from real.measured import Measured, write_measured
from twin.clock import PS
from twin.errors import InputError
from twin.report.openmetrics import write_openmetrics
from twin.scenario import load_scenario
from twin.simulation import simulate
from twin.validation import compare_requests, figures, table_of

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


# --- which requests, and which runs ---------------------------------------------------------------


def rewrite(folder, **columns):
    """Change columns of requests.parquet: name -> function of (row, value)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "requests.parquet"
    table = pq.read_table(path)
    changed = table.to_pydict()
    for name, change in columns.items():
        changed[name] = [change(row, value) for row, value in enumerate(changed[name])]
    pq.write_table(pa.table(changed, schema=table.schema), path)
    return folder


def set_facts(folder, **changes):
    path = folder / "replay.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def errors_of(*runs):
    return {row.comparison.metric: row.comparison.error for row in rows_of(runs)}


CLOSED = {"process": "closed", "users": 4}
SESSIONS = {
    "arrivals": {"process": "closed", "users": 3},
    "sessions": {"turns": {"uniform": [2, 5]}, "think_time": 0.2},
    "requests": 40,
}


def ended_early(folder, document, keep):
    """A server with the twin's steps that ends each reply when it has a share of its tokens, by index."""
    played = []

    def cut(request):
        played.append((request.prompt_tokens, request.output_tokens))
        request.output_tokens = max(1, round(keep(request.index) * request.output_tokens))

    folder.mkdir()
    result = simulate(load_scenario(document), on_offer=cut)
    measured = [
        Measured(record, record.arrival_ps, None, planned, 200, "")
        for record, planned in zip(result.records, played, strict=True)
    ]
    facts = {"scenario": document, "server": {"cache_at_start": "cold"}, "client": {}}
    write_measured(folder, measured, facts)
    return folder


@pytest.mark.parametrize(
    "traffic",
    [
        {"arrivals": CLOSED, "requests": 40},
        SESSIONS,
        {"arrivals": CLOSED, "requests": 40, "tiers": {"ONLINE": 0.5, "BATCH": 0.5}},
    ],
    ids=["closed loop", "conversations", "tiers"],
)  # fmt: skip
def test_where_requests_wait_for_another_the_twin_has_the_lengths_that_came(tmp_path, traffic):
    document = scenario(**traffic)
    folder = ended_early(tmp_path / "m", document, lambda index: 0.5)
    run = predict(written(tmp_path, document), [], folder)
    assert mismatch_of(run).replies > 0.9
    for column in ("prompt_tokens", "output_tokens", "tier"):
        assert run.predicted[column] == run.measured[column]
    assert all(abs(error) < 1e-6 for error in errors_of(run).values())
    assert "the twin is told those they had" in notes([run], False, 0.0)[0]


def test_prompts_of_another_length_reach_the_twin_too(tmp_path):
    """A chat template adds to each prompt; some server may have cut one."""
    document = scenario(arrivals=CLOSED, requests=20)
    folder = rewrite(
        measure(tmp_path / "m", document),
        prompt_tokens=lambda row, n: n + 500 if row % 2 else n - 20,
    )
    run = predict(written(tmp_path, document), [], folder)
    assert run.predicted["prompt_tokens"] == run.measured["prompt_tokens"]
    assert mismatch_of(run) == (1.0, 1.0, 0.0)
    assert errors_of(run)["ttft_mean"] > 0.2


def test_an_interrupted_closed_loop_is_cut_where_it_was(tmp_path):
    document = scenario(arrivals=CLOSED, requests=60)
    folder = measure(tmp_path / "m", document | {"run": {"until": 2.0}})
    set_facts(folder, scenario=document)
    run = predict(written(tmp_path, document), [], folder)
    assert "unfinished" in run.measured["outcome"]
    assert len(run.predicted["outcome"]) == len(run.measured["outcome"]) < 60
    assert abs(errors_of(run)["requests_per_s"]) < 0.01


@pytest.mark.parametrize("arrivals", [DOCUMENT["traffic"][0]["arrivals"], CLOSED])
@pytest.mark.parametrize("reason", ["timed_out", "aborted"])
def test_what_did_not_complete_counts_on_neither_side(tmp_path, arrivals, reason):
    document = scenario(arrivals=arrivals, requests=12)
    folder = rewrite(
        measure(tmp_path / "m", document),
        outcome=lambda row, outcome: outcome if row % 2 else reason,
    )
    run = predict(written(tmp_path, document), [], folder)
    assert all(abs(error) < 1e-6 for error in errors_of(run).values())
    assert {row.comparison.requests for row in rows_of([run])} == {6}
    assert (
        "m: 6 of 12 requests did not complete at the server; they are load for the twin, too, and count in no figure"
        in notes([run], False, 0.0)
    )


def test_who_broke_off_comes_back_as_early_as_at_the_server(tmp_path):
    """Every other reply of a closed loop breaks off after a sixth of the tokens that it was planned to have."""
    document = scenario(arrivals=CLOSED, requests=40, output_tokens={"fixed": 60})
    folder = rewrite(
        ended_early(tmp_path / "m", document, lambda index: 1 / 6 if index % 2 else 1.0),
        outcome=lambda row, was: "aborted" if row % 2 else was,
    )
    run = predict(written(tmp_path, document), [], folder)
    assert len(run.predicted["index"]) == 40
    assert abs(errors_of(run)["requests_per_s"]) < 0.02
    assert abs(errors_of(run)["e2e_mean"]) < 0.02


def test_what_got_no_token_is_said_to_be_missing(tmp_path):
    document = scenario(requests=12)
    folder = measure(tmp_path / "m", document)
    rewrite(folder, outcome=lambda row, was: was if row else "refused",
            output_tokens=lambda row, n: n if row else 0)  # fmt: skip
    trace = (folder / "trace.jsonl").read_text().splitlines()
    (folder / "trace.jsonl").write_text("\n".join(trace[1:]) + "\n")
    run = predict(written(tmp_path, document), [], folder)
    assert len(run.predicted["index"]) == 11
    missing = "m: 1 request got no token and cannot be given to the twin"
    assert any(missing in note for note in notes([run], False, 0.0))
    (folder / "trace.jsonl").write_text("\n".join(trace[2:]) + "\n")
    with pytest.raises(InputError, match=r"has 10 requests, requests.parquet beside it 11"):
        predict(written(tmp_path, document), [], folder)


def test_requests_that_only_the_server_completed_are_told(tmp_path):
    document = scenario(requests=12)
    folder = measure(tmp_path / "m", document)
    source = written(tmp_path, document)
    run = predict(source, ["engine.max_model_len=600"], folder)
    lost = sum(outcome == "refused" for outcome in run.predicted["outcome"])
    assert 0 < lost < 12
    assert f"m: {lost} requests that the server completed did not complete in the twin" in notes(
        [run], False, 0.0
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": {**DOCUMENT["engine"], "max_num_seqs": 1}}, "scenario.engine.max_num_seqs 8, 1"),
        ({"policy": "vllm-priority"}, "scenario.policy vllm-fcfs, vllm-priority"),
        ({"cluster": {"replicas": 2}}, "scenario.cluster.replicas None, 2"),
    ],
)  # fmt: skip
def test_only_runs_of_one_set_up_are_taken_together(tmp_path, change, words):
    """Two servers whose figures differ by a factor are no spread that would excuse an error."""
    document = scenario(requests=12)
    source = written(tmp_path, document)
    folders = [
        measure(tmp_path / "a", document),
        measure(tmp_path / "b", {**document, **change}),
        measure(tmp_path / "c", document, 1.02),
    ]
    runs = [predict(source, [], folder) for folder in folders]
    rows = rows_of(runs)
    assert {row.comparison.regime for row in rows} == {"idle (8/s) [a, c]", "idle (8/s) [b]"}
    assert {row.runs for row in rows if "[a, c]" in row.comparison.regime} == {2}
    assert all(row.spread is None for row in rows if "[b]" in row.comparison.regime)
    assert any(
        note.startswith("a and b had the same traffic, and are not taken together:") and words in note
        for note in notes(runs, False, 0.0)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "together"),
    [
        ({"url": "http://other:8000"}, False),
        ({"max_in_flight": 4}, False),
        ({"exact_lengths": False}, False),
        ({"wall_s": 9.0, "length_mismatch": 0.5}, True),
        ({"scenario": {**scenario(requests=12), "run": {"seed": 7}, "name": "b"}}, True),
    ],
)  # fmt: skip
def test_how_a_run_was_played_is_part_of_its_set_up(tmp_path, facts, together):
    document = scenario(requests=12)
    source = written(tmp_path, document)
    a, b = (set_facts(measure(tmp_path / name, document), url="http://one:8000") for name in "ab")
    runs = [predict(source, [], a), predict(source, [], set_facts(b, **facts))]
    assert len(groups_of(runs)) == (1 if together else 2)


def test_a_run_that_was_cut_short_is_not_the_same(tmp_path):
    document = scenario(requests=12)
    source = written(tmp_path, document)
    whole, part = measure(tmp_path / "a", document), measure(tmp_path / "b", document, drop=4)
    assert len(groups_of([predict(source, [], whole), predict(source, [], part)])) == 2
    stopped = rewrite(
        measure(tmp_path / "c", document),
        outcome=lambda row, was: was if row < 10 else "unfinished",
    )
    assert len(groups_of([predict(source, [], whole), predict(source, [], stopped)])) == 2


def test_what_another_tool_measured_stands_alone(tmp_path):
    document = scenario(requests=12)
    source = written(tmp_path, document)
    runs = []
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        folder = measure(tmp_path / parent / "0", document)
        (folder / "replay.json").write_text(json.dumps({"tool": "aiperf", "file": "f"}))
        runs.append(predict(source, [], folder))
    assert len(groups_of(runs)) == 2


# --- a server that had served before --------------------------------------------------------------


def test_warming_leaves_the_measured_folder_and_the_regime_alone(tmp_path):
    busy = scenario(arrivals={"process": "poisson", "rate": 60})
    folder = measure(tmp_path / "m", busy)
    source = written(tmp_path, busy)
    before = sorted(path.name for path in folder.iterdir())
    cold, warmed = predict(source, [], folder), predict(source, [], folder, warm=folder / "trace.jsonl")  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == before
    assert cold.regime == warmed.regime == "saturated"
    # The same prompts a second time: all found, and nothing of the first time is counted.
    assert warmed.facts["twin"]["prefix_query_tokens"] == cold.facts["twin"]["prefix_query_tokens"]
    assert warmed.facts["twin"]["prefix_hit_tokens"] > cold.facts["twin"]["prefix_hit_tokens"]


@pytest.mark.parametrize("arrivals", [DOCUMENT["traffic"][0]["arrivals"], CLOSED])
def test_a_scenario_that_is_cut_is_cut_so_much_later(tmp_path, arrivals):
    document = scenario(arrivals=arrivals, requests=12) | {"run": {"until": 3.0}}
    folder = measure(tmp_path / "m", document)
    run = predict(written(tmp_path, document), [], folder, warm=folder / "trace.jsonl")
    assert run.predicted["outcome"] == ["completed"] * 12


def test_any_trace_can_have_been_served(tmp_path):
    document = scenario(requests=12)
    folder = measure(tmp_path / "m", document)
    source = written(tmp_path, document)
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    run = predict(source, [], folder, warm=azure)
    assert len(run.predicted["index"]) == 12
    assert run.predicted["prefix_hit_tokens"] == [0] * 12
    assert all(abs(error) < 1e-6 for error in errors_of(run).values())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "none.jsonl"),
        ("empty.jsonl", "", "the file is empty"),
        ("odd.jsonl", "{oops\n", "odd.jsonl line 1"),
    ],
)
def test_what_cannot_have_been_served_is_refused(tmp_path, name, content, words):
    document = scenario(requests=12)
    folder = measure(tmp_path / "m", document)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as refused:
        predict(written(tmp_path, document), [], folder, warm=tmp_path / name)
    assert words in str(refused.value)


@pytest.mark.parametrize("traffic", [{"arrivals": CLOSED, "requests": 12}, SESSIONS])
def test_closed_loops_and_conversations_are_warmed_too(tmp_path, traffic):
    document = scenario(**traffic)
    folder = ended_early(tmp_path / "m", document, lambda index: 0.5)
    served = measure(tmp_path / "served", document) / "trace.jsonl"
    source = written(tmp_path, document)
    cold, warmed = predict(source, [], folder), predict(source, [], folder, warm=served)
    for run in (cold, warmed):
        assert run.predicted["output_tokens"] == run.measured["output_tokens"]
    firsts = [row for row, at in enumerate(warmed.measured["arrival_s"]) if at == 0]
    assert all(warmed.predicted["prefix_hit_tokens"][row] > 0 for row in firsts)
    assert all(cold.predicted["prefix_hit_tokens"][row] == 0 for row in firsts)
    assert errors_of(cold)["e2e_mean"] == pytest.approx(0, abs=1e-6)
    assert errors_of(warmed)["e2e_mean"] < -0.001
    assert [warmed.predicted["arrival_s"][row] for row in firsts] == [0] * len(firsts)
    assert warmed.facts["twin"]["prefix_query_tokens"] == cold.facts["twin"]["prefix_query_tokens"]
    # What has nothing in common with it warms nothing.
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    other = predict(source, [], folder, warm=azure)
    assert other.predicted["prefix_hit_tokens"] == cold.predicted["prefix_hit_tokens"]
    assert all(abs(error) < 1e-6 for error in errors_of(other).values())


# --- the command, and what it refuses -------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture
def small(tmp_path):
    """(scenario file, measured folder)"""
    document = scenario(requests=12)
    return written(tmp_path, document), measure(tmp_path / "m", document, 1.1)


def test_folders_of_one_name_are_told_apart(tmp_path):
    document = scenario(requests=12)
    source = written(tmp_path, document)
    folders = []
    for parent, factor in (("a", 1.0), ("b", 1.5)):
        (tmp_path / parent).mkdir()
        folders.append(measure(tmp_path / parent / "m", document, factor))
    content = json.loads(invoke(source, *folders, "--json").stdout)
    assert list(content["runs"]) == list(content["misses"]) == ["a/m", "b/m"]
    first, second = (content["misses"][name]["rows"][0] for name in ("a/m", "b/m"))
    assert second["ttft_measured_s"] > first["ttft_measured_s"]
    assert names_of([Path("/r/a/m"), Path("/r/b/m"), Path("/r/c")]) == ["a/m", "b/m", "c"]
    twice = invoke(source, folders[0], folders[0])
    assert twice.exit_code == 2
    assert "is given twice" in twice.output


def test_every_figure_is_printed(tmp_path):
    documents = [scenario(requests=12, arrivals={"process": "poisson", "rate": r}) for r in (8, 30, 60)]  # fmt: skip
    folders = [measure(tmp_path / f"r{i}", document) for i, document in enumerate(documents)]
    source = written(tmp_path, documents[0])
    number = len(json.loads(invoke(source, *folders, "--json").stdout)["figures"])
    assert number == 3 * len(METRICS)
    printed = invoke(source, *folders).stdout
    assert sum("/s)" in line for line in printed.splitlines()) == number


def test_a_run_may_be_named_by_its_table(small):
    source, folder = small
    assert (
        invoke(source, folder / "requests.parquet", "--json").stdout
        == invoke(source, folder, "--json").stdout
    )


def test_nothing_measured_is_null_in_json(small, tmp_path):
    source, folder = small
    rewrite(folder, first_token_s=lambda row, s: 0.0, arrival_s=lambda row, s: 0.0)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = invoke(source, folder, "--json", "--out", tmp_path / "o")
    assert found.exit_code == 0, found.output
    for text in (found.stdout, (tmp_path / "o" / "compare.json").read_text()):
        figures = json.loads(text, parse_constant=refuse)["figures"]
        assert {row["error"] for row in figures if row["metric"] == "ttft_mean"} == {None}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"outcome": lambda row, was: "aborted"}, "none of its 12 requests completed"),
        ({"arrival_s": lambda row, s: math.nan}, "arrival_s of row 0: nan: must be a finite number"),
        ({"arrival_s": lambda row, s: None}, "arrival_s: must be there for every request"),
        ({"finish_s": lambda row, s: math.inf}, "finish_s of row 0: inf: must be a finite number"),
        ({"output_tokens": lambda row, n: -1}, "output_tokens of row 0: -1: must be a whole number"),
    ],
)  # fmt: skip
def test_tables_that_hold_no_measurement(small, columns, words):
    source, folder = small
    found = invoke(source, rewrite(folder, **columns))
    assert found.exit_code == 2
    assert words in found.output


@pytest.mark.parametrize("column", ["index", "tier", "outcome", "arrival_s", "output_tokens"])
def test_a_missing_column_is_named(small, column):
    import pyarrow.parquet as pq

    source, folder = small
    path = folder / "requests.parquet"
    pq.write_table(pq.read_table(path).drop([column]), path)
    found = invoke(source, folder)
    assert found.exit_code == 2
    assert f"has no column {column}" in found.output


@pytest.mark.parametrize(
    "column", ["planned_prompt_tokens", "planned_output_tokens", "itl_s", "prefix_hit_tokens"]
)
def test_without_other_columns_there_is_less_to_say(small, column):
    import pyarrow.parquet as pq

    source, folder = small
    path = folder / "requests.parquet"
    pq.write_table(pq.read_table(path).drop([column]), path)
    found = invoke(source, folder)
    assert found.exit_code == 0, found.output
    assert "ttft_p90" in found.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "must be one JSON object"),
        ({"scenario": None}, "scenario: None: must be an object"),
        ({"scenario": {"traffic": 5}}, "scenario.traffic: 5: must be a list"),
        ({"scenario": {"run": []}}, "scenario.run: []: must be an object"),
        ({"scenario": {"run": {"seed": "x"}}}, "scenario.run.seed: 'x': must be a whole number"),
        ({"scenario": {"traffic": [{"arrivals": "x"}]}}, "scenario.traffic.0.arrivals: must be an"),
        ({"server": None}, "server: None: must be an object"),
        ({"client": {"lateness": {}}}, "client.lateness: {}: must have a number p99_s"),
    ],
)
def test_odd_facts_are_one_message(small, content, words):
    source, folder = small
    (folder / "replay.json").write_text(json.dumps(content))
    found = invoke(source, folder)
    assert found.exit_code == 2
    assert words in found.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--frontend", "1e400"], "--frontend inf: must be a finite number"),
        (["--frontend", "nan"], "greater than or equal to 0"),
        (["--tolerance", "inf"], "--tolerance inf: must be a finite number"),
        (["--tolerance", "nan"], "greater than or equal to 0"),
        (["--step-time", ""], "--step-time: is empty"),
    ],
)
def test_options_that_are_no_number_or_name(small, options, words):
    source, folder = small
    found = invoke(source, folder, *options)
    assert found.exit_code == 2
    assert words in found.output


@pytest.mark.parametrize("seconds", ["Infinity", "NaN", "-1", "null", '"x"'])
def test_a_calibration_without_a_time_is_refused(small, tmp_path, seconds):
    source, folder = small
    (tmp_path / "steps.calibration.json").write_text(f'{{"frontend_s": {seconds}}}')
    found = invoke(source, folder, "--step-time", tmp_path / "steps.json")
    assert found.exit_code == 2
    assert "holds no frontend_s" in found.output


def test_where_nothing_can_be_written_is_found_before_the_work(small, tmp_path):
    source, folder = small
    blocked = tmp_path / "blocked"
    (blocked / "compare.html").mkdir(parents=True)
    full = tmp_path / "full"
    full.mkdir()
    (full / "compare.json").write_text("precious")
    (tmp_path / "file").write_text("")
    for options, words in (
        (["--out", blocked, "--force"], "is a folder"),
        (["--out", full], "the folder is not empty"),
        (["--out", tmp_path / "file"], "File exists"),
        (["--out", folder, "--force"], ""),
    ):
        found = invoke(source, folder, *options)
        assert found.exit_code == (2 if words else 0), found.output
        assert words in found.output
    assert (full / "compare.json").read_text() == "precious"


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


def test_a_time_to_first_token_has_the_queue_in_it(tmp_path):
    """Five slots, a hundred clients: the histogram that the twin exports is what a client's stopwatch shows."""
    document = scenario(
        arrivals={"process": "closed", "users": 100}, output_tokens={"fixed": 50}, requests=300
    )
    document["engine"] |= {"max_num_seqs": 5}
    result = simulate(load_scenario(document), observe=True)
    write_openmetrics(tmp_path / "history.om", result, 0.0)
    last: dict[str, float] = {}
    for line in (tmp_path / "history.om").read_text().splitlines():
        if not line.startswith("#"):
            series, value, _ = line.rsplit(" ", 2)
            last[series.partition("{")[0] + "".join(re.findall(r'le="([^"]+)"', series))] = float(
                value
            )
    stopwatch = [(r.first_token_ps - r.arrival_ps) / PS for r in result.records]
    name = "vllm:time_to_first_token_seconds"
    bounds = [
        key.removeprefix(f"{name}_bucket") for key in last if key.startswith(f"{name}_bucket")
    ]
    assert len(bounds) > 10
    for bound in bounds:
        assert last[f"{name}_bucket{bound}"] == sum(s <= float(bound) for s in stopwatch)
    assert last[f"{name}_sum"] == pytest.approx(sum(stopwatch))
    assert statistics.median(stopwatch) > 0.5
    # Queue and prefill are histograms of their own, and nearly all of it is the queue.
    queue, prefill = (
        last[f"vllm:request_{part}_time_seconds_sum"] for part in ("queue", "prefill")
    )
    assert queue + prefill == pytest.approx(sum(stopwatch))
    assert queue > 0.8 * sum(stopwatch)


def test_fidelity_under_overload():
    """At half a server's capacity and at twice it, where more than 300 wait: only the time of a step can be wrong.

    The server takes 10 % longer for each step than the twin believes.
    """

    def both(rate):
        document = scenario(
            arrivals={"process": "poisson", "rate": rate},
            prompt_tokens={"fixed": 100},
            output_tokens={"fixed": 50},
            requests=800,
        )
        server = simulate(slowed(document, 1.1))
        return simulate(load_scenario(document)), server

    closed = scenario(
        arrivals={"process": "closed", "users": 64}, prompt_tokens={"fixed": 100},
        output_tokens={"fixed": 50}, requests=200,
    )  # fmt: skip
    capacity = figures(table_of(simulate(slowed(closed, 1.1))))["requests_per_s"]
    error = {}
    for share in (0.5, 2.0):
        twin, server = both(round(share * capacity, 3))
        rows = compare_requests(table_of(twin), table_of(server), f"{share:g} of capacity")
        error[share] = {row.metric: row.error for row in rows}
        measured = {row.metric: row.measured for row in rows}
        assert (measured["queue_max"] > 300) == (share > 1)
        # Admission is the engine's own scheduler's: the order is the same however long a step takes.
        orders = [
            [r.index for r in sorted(run.records, key=lambda r: (r.first_scheduled_ps, r.index))]
            for run in (twin, server)
        ]
        assert orders[0] == orders[1]
    light, heavy = error[0.5], error[2.0]
    assert abs(light["requests_per_s"]) < 0.01
    assert heavy["requests_per_s"] == pytest.approx(0.1, abs=0.01)
    assert heavy["output_tokens_per_s"] == pytest.approx(0.1, abs=0.01)
    # The backlog is what comes less what is served, so that the error in its depth is larger than that of a step.
    assert -0.3 < heavy["queue_mean"] < -0.05
    assert heavy["queue_max"] < -0.05
