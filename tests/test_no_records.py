"""Runs that keep no records: the same figures, in memory that does not grow, and what cannot be had is said."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.runs import azure_csv, document, run, stream
from tests.test_out import ODD
from twin import simulation
from twin.cli import app
from twin.clock import PS
from twin.errors import InputError
from twin.metrics.histogram import BOUND
from twin.report import openmetrics
from twin.report.folder import write_folder
from twin.report.json_summary import EXACT, WITHIN, summarize
from twin.report.openmetrics import MOST_INSTANTS, history_of, write_openmetrics
from twin.report.tables import WIDTH, render
from twin.scenario import load_scenario
from twin.simulation import simulate

WITHOUT = "run.records=false"
MIXED = {"ONLINE": 0.5, "BATCH": 0.3, "OFFLINE": 0.2}
LIMITS = {
    "ONLINE": {"ttft_p99": 0.05, "itl_p99": 0.02},
    "BATCH": {"e2e_mean": 0.5, "tpot_p90": 0.01},
}


def busy(**sections):
    """Two replicas short of slots and KV blocks, clients that leave, conversations, three tiers."""
    traffic = [
        stream(
            300, requests=60, arrivals={"process": "poisson", "rate": 60}, tiers=MIXED,
            output_tokens={"uniform": [1, 150]}, timeouts={"ttft": 1.5, "total": 4.0},
        ),
        stream(30, 40, requests=30, sessions={"turns": 3, "system_prompt_tokens": 64, "think_time": 0.2}),
    ]  # fmt: skip
    base = {"traffic": traffic, "engine": {"num_gpu_blocks_override": 130}, "objectives": LIMITS}
    return document(**base | {"cluster": {"replicas": 2}} | sections)


def compare(with_records, without, place=""):
    """Equal but for percentiles, which are near."""
    if isinstance(with_records, dict):
        assert list(with_records) == list(without), place
        for key, value in with_records.items():
            if key not in ("wall_s", "requests_per_wall_s", "percentiles", "met", "value_s"):
                compare(value, without[key], f"{place}.{key}")
    elif re.search(r"\.p\d\d$", place) and with_records is not None:
        assert abs(with_records - without) <= BOUND * with_records, place
    elif not re.search(r"estimated_wait.*\.p\d\d_s$", place):
        assert with_records == without, place


@st.composite
def scenarios(draw):
    """Overrides that change what happens to requests."""
    chosen = [
        f"policy={draw(st.sampled_from(['vllm-fcfs', 'tiered', 'fair']))}",
        f"cluster.replicas={draw(st.integers(1, 3))}",
        f"engine.num_gpu_blocks_override={draw(st.sampled_from([130, 400]))}",
        f"engine.async_scheduling={draw(st.sampled_from(['true', 'false']))}",
        f"traffic.0.arrivals.rate={draw(st.sampled_from([10, 60]))}",
        f"run.seed={draw(st.integers(1, 99))}",
        f"run.warmup={draw(st.sampled_from([0, 0.5]))}",
    ]
    return chosen + draw(st.sampled_from([[], ["run.until=1.5"]]))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=scenarios(), block=st.sampled_from([1, 7, 4096]))
def test_a_run_says_the_same_with_records_and_without(overrides, block, monkeypatch):
    monkeypatch.setattr(simulation, "BLOCK", block)
    monkeypatch.setattr(simulation, "EVENTS_PER_LOOK", 16)
    kept, dropped = run(busy(), *overrides), run(busy(), *overrides, WITHOUT)
    one, other = summarize(kept), summarize(dropped)
    assert (one["percentiles"], other["percentiles"]) == (EXACT, WITHIN)
    compare(one, other)
    assert kept.policies == dropped.policies
    assert kept.engines == dropped.engines


def test_the_bound_that_is_told_is_the_bound():
    assert WITHIN == f"within {100 * BOUND:g} %" == "within 0.5 %"


def test_refused_requests_are_named_but_not_all_remembered(tmp_path):
    rows = [
        (f"2023-11-16 18:15:{46 + i // 10}.{i % 10}", 5000 if i % 4 else 100, 5) for i in range(80)
    ]
    source = document(traffic=[{"trace": azure_csv(tmp_path, rows)}])
    kept, dropped = run(source), run(source, WITHOUT)
    compare(summarize(kept), summarize(dropped))
    assert len(kept.places) == 60
    assert len(dropped.places) == len(summarize(dropped)["refused"]) == 20


def test_records_that_were_not_kept_cannot_be_asked_for():
    result = run(busy(), WITHOUT)
    with pytest.raises(InputError, match=r"run\.records is false"):
        _ = result.records


def test_blocks_are_handed_on_before_they_are_dropped_and_engines_told(monkeypatch):
    monkeypatch.setattr(simulation, "BLOCK", 10)
    monkeypatch.setattr(simulation, "EVENTS_PER_LOOK", 4)
    told, seen = [], []
    for cls in (simulation.Replica, simulation.FastReplica):
        forget = cls.forget_past
        monkeypatch.setattr(
            cls, "forget_past", lambda self, forget=forget: (told.append(len(seen)), forget(self))
        )
    scenario = load_scenario(busy(), [WITHOUT])
    simulate(scenario, on_block=lambda block: seen.append(block["index"].tolist()))
    assert sorted(index for block in seen for index in block) == list(range(90))
    assert len(seen) > 5
    assert told == [n for n in range(1, len(seen) + 1) for _ in range(2)]


# --- files ----------------------------------------------------------------------------------


@pytest.fixture
def twin():
    """Runs a command; gives (exit status, stdout, stderr)."""

    def call(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        return result.exit_code, result.stdout, result.stderr

    return call


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(busy()), encoding="utf-8")
    return path


def test_out_has_what_can_be_had(scenario, tmp_path, twin):
    out = tmp_path / "out"
    assert twin("run", scenario, "--out", out, "--json")[0] == 0
    before = {path.name for path in out.iterdir()}
    status, text, _ = twin("run", scenario, "--no-records", "--out", out, "--force")
    assert status == 0
    assert "Percentiles are within 0.5 %" in " ".join(text.split())
    after = {path.name for path in out.iterdir()}
    assert before - after == {"requests.parquet", "events.jsonl"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["percentiles"] == WITHIN
    page = (out / "report.html").read_text()
    assert "Percentiles are within 0.5 %." in page
    assert "records were not kept" in page
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page)[1])
    for latency in ("ttft", "tpot", "e2e"):
        for trace in figures[latency]["data"]:
            assert list(trace["x"]) == sorted(trace["x"])
            p50 = trace["x"][trace["y"].index(50)]
            told = summary["tiers"][trace["name"]][f"{latency}_s"]["p50"]
            assert p50 == pytest.approx(told, rel=1e-5)


@pytest.mark.parametrize(("traffic", "overrides"), ODD.values(), ids=ODD)
def test_odd_runs_have_every_file_that_can_be_had(traffic, overrides, tmp_path):
    loaded = load_scenario(document(traffic=[traffic]), [*overrides, WITHOUT])
    history = history_of(loaded)
    odd = simulate(loaded, observe=True, on_block=history.add)
    summary = summarize(odd)
    compare(summarize(run(document(traffic=[traffic]), *overrides, observe=True)), summary)
    write_folder(tmp_path, odd, summary)
    write_openmetrics(tmp_path / "history.om", odd, 0.0, history)
    assert samples(tmp_path / "history.om")
    assert summary["verdict"] in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert max(map(len, render(summary).splitlines())) <= WIDTH


@pytest.mark.parametrize("option", ["--records=r.csv", "--explain-request=3"])
def test_what_needs_records_is_refused(scenario, option, twin):
    status, _, err = twin("run", scenario, "--set", WITHOUT, option)
    assert status == 2
    assert f"{option.partition('=')[0]}: no record of single requests is kept" in err


def samples(path):
    """Series and stamp -> value."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            series, value, stamp = line.rsplit(" ", 2)
            found[series, float(stamp)] = float(value)
    return found


@pytest.mark.parametrize("overrides", [(), ("run.sample_period=0.002",), ("run.until=1.7",)])
def test_history_for_prometheus_needs_no_records(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "BLOCK", 10)
    monkeypatch.setattr(simulation, "EVENTS_PER_LOOK", 8)
    kept = run(busy(), *overrides, observe=True)
    scenario = load_scenario(busy(), [*overrides, WITHOUT])
    history = history_of(scenario)
    dropped = simulate(scenario, observe=True, on_block=history.add)
    assert dropped.log == ()
    assert dropped.series == kept.series
    write_openmetrics(tmp_path / "dropped.om", dropped, 0.0, history)
    found = samples(tmp_path / "dropped.om")
    stamps = {stamp for _, stamp in found}
    assert 20 < len(stamps) <= MOST_INSTANTS
    assert max(stamps) == dropped.simulated_ps / PS
    # The same instants, this time from the records.
    places = [i for i, at_ps in enumerate(kept.series.times_ps) if at_ps / PS in stamps]
    monkeypatch.setattr(openmetrics._Exposition, "_choose", lambda self, instants: places)
    write_openmetrics(tmp_path / "kept.om", kept, 0.0)
    assert found == pytest.approx(samples(tmp_path / "kept.om"), rel=1e-12)
    name = 'vllm:inter_token_latency_seconds_count{model_name="meta-llama/Llama-3.1-8B",engine="0"}'
    counts = [found[name, stamp] for stamp in sorted(stamps)]
    assert counts == sorted(counts)
    assert len(set(counts)) > 10


# --- memory ---------------------------------------------------------------------------------

PEAK = """
import sys
from tests.runs import document, stream
from twin.simulation import load_scenario, simulate
from twin.report import openmetrics
from twin.report.folder import write_folder
from twin.report.json_summary import summarize
short = stream(8, 2, arrivals={"process": "poisson", "rate": 100}, requests=int(sys.argv[1]))
result = simulate(load_scenario(document(traffic=[short]), ["run.records=" + sys.argv[2]]))
assert summarize(result)["totals"]["completed"] == int(sys.argv[1])
# Unlike the peak that getrusage tells, this one is of this program alone, not of what it was forked from.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_mb(requests, records):
    command = [sys.executable, "-c", PEAK, str(requests), records]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_number_of_requests():
    few, many = peak_mb(6_000, "false"), peak_mb(40_000, "false")
    assert many < few + 2 < 150
    assert peak_mb(40_000, "true") > many + 4
