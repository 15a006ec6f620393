"""Presets of traffic are like the traces they were fitted on, in the packaged figures and in what they make."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.runs import document, run
from tests.test_synthetic import hits, play
from tests.test_workload import taken, times
from twin.cli import app
from twin.clock import PS
from twin.errors import InputError
from twin.scenario import load_scenario, traffic_presets
from twin.scenario_streams import part_of
from twin.workload.figures import QUANTILES, figures
from twin.workload.formats.choose import format_of, read_trace
from twin.workload.request import Request

ROOT = Path(__file__).parents[1]
PRESETS = traffic_presets()
ONE = [name for name in PRESETS if "clients" not in PRESETS[name].trace]
MIXES = [name for name in PRESETS if "clients" in PRESETS[name].trace]
TRACES = {
    "azure-2023-conv": "azure2023_conv.csv",
    "azure-2023-code": "azure2023_code.csv",
    "mooncake-conversation": "mooncake_conversation.jsonl.gz",
    "mooncake-synthetic": "mooncake_synthetic.jsonl.gz",
    "sharegpt-llama31": "sharegpt300_llama31_hashed.jsonl",
    "sharegpt-qwen3": "sharegpt300_qwen3_hashed.jsonl",
}
LONG = {"max_model_len": 131_072, "num_gpu_blocks_override": 9000}


def loaded(**stream):
    return load_scenario(document(traffic=[stream], engine=LONG)).traffic[0]


def close(found, wanted, within=0.05):
    """Whether rate, CV and the quantiles of lengths agree, where the trace has them."""
    for key in ("rate", "cv", "attainable_hits"):
        if wanted.get(key) is not None:
            assert found[key] == pytest.approx(wanted[key], rel=within), key
    for key in ("prompt_tokens", "output_tokens"):
        for q in QUANTILES:
            assert found[key][q] == pytest.approx(wanted[key][q], rel=within), (key, q)


def test_there_are_presets_of_all_traces():
    assert set(ONE) == {*TRACES, "arxiv-summarization", "agentic-retail", "agentic-appworld"}
    assert set(MIXES) == {"servegen-large", "servegen-mid", "servegen-small", "servegen-reason"}
    for preset in PRESETS.values():
        assert preset.source
        assert preset.licence in ("CC-BY-4.0", "Apache-2.0", "MIT")
        assert sum(len(json.dumps(stream)) for stream in preset.streams) < 30_000


@pytest.mark.parametrize("name", ONE)
def test_the_packaged_figures_agree_within_5_percent(name):
    close(PRESETS[name].fit, PRESETS[name].trace)


@pytest.mark.parametrize("name", MIXES)
def test_the_packaged_figures_of_clients_agree_within_5_percent(name):
    trace, fit = PRESETS[name].trace, PRESETS[name].fit
    assert fit["rate"] == pytest.approx(trace["rate"], rel=0.05)
    assert len(trace["clients"]) == len(fit["clients"]) == 12
    for found, wanted in zip(fit["clients"], trace["clients"], strict=True):
        assert found["tenant"] == wanted["tenant"]
        close({"rate": None} | found, {"rate": None} | wanted)


@pytest.mark.parametrize("name", ONE)
def test_what_is_made_is_like_the_trace(name):
    """Another seed than that of the packaged figures, and fewer requests."""
    preset = PRESETS[name]
    rate = {} if preset.rate else {"rate": 0.5}
    rows = max(preset.rows, 20_000 // preset.rows * preset.rows)
    made = sorted(
        play([loaded(preset=name, requests=rows, **rate)], 0, seed=77), key=lambda r: r.arrival_ps
    )
    found = figures(made)
    heavy = name == "azure-2023-code"  # a sample of rare long gaps says little of their spread
    if preset.rate and not heavy:
        assert found["rate"] == pytest.approx(preset.trace["rate"], rel=0.05)
        assert found["cv"] == pytest.approx(preset.trace["cv"], rel=0.05)
    close(
        found | {"rate": None, "cv": None},
        preset.trace | {"rate": None, "cv": None, "attainable_hits": None},
        0.06,
    )
    if "attainable_hits" in preset.trace:
        assert hits(made[: preset.rows]) == pytest.approx(preset.trace["attainable_hits"], rel=0.06)


def test_the_gaps_of_azure_code_have_the_mean_and_the_spread_of_the_trace():
    preset = PRESETS["azure-2023-code"]
    arrivals = part_of(preset.streams[0]).arrivals
    assert arrivals.mean_rate == pytest.approx(preset.trace["rate"], rel=0.001)
    assert arrivals.gaps.cv == pytest.approx(preset.trace["cv"], rel=0.01)


# --- with the traces ----------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_the_packaged_figures_of_a_trace_are_its_own(name, twin_data):
    path = str(twin_data / "traces" / TRACES[name])
    rows = list(read_trace(path, format_of(path).format))
    found = figures(
        Request(0, r.at_ps, (), r.prompt_tokens, r.output_tokens, None, 0) for r in rows
    )
    close(found, PRESETS[name].trace | {"attainable_hits": None}, 1e-4)
    assert len(rows) == PRESETS[name].rows


def test_the_script_makes_the_packaged_files_byte_for_byte(twin_data, tmp_path):
    command = [sys.executable, "scripts/fit_traffic.py", "--output", str(tmp_path)]
    environment = os.environ | {"TWIN_DATA": str(twin_data), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    packaged = sorted((ROOT / "twin/workload/data").glob("*.json"))
    assert [p.name for p in packaged] == sorted(p.name for p in tmp_path.iterdir())
    for path in packaged:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


# --- in a scenario ------------------------------------------------------------------------


def test_a_rate_stretches_the_curve_and_steady_levels_it():
    plain = loaded(preset="azure-2023-conv", requests=9).arrivals.rate
    double = loaded(preset="azure-2023-conv", requests=9, rate=2 * plain.mean).arrivals.rate
    assert [p.start for p in double.written] == pytest.approx([2 * p.start for p in plain.written])
    assert [p.length_ps for p in double.written] == [p.length_ps for p in plain.written]
    level = loaded(preset="azure-2023-conv", requests=9, rate=11, steady=True).arrivals.rate
    assert level == pytest.approx(11)


def test_ticks_of_the_trace_can_be_left_out():
    ticked, free = (
        loaded(preset="mooncake-conversation", requests=9000, ticks=t) for t in (True, False)
    )
    assert all(t % (3 * PS) == 0 for t in times(taken([ticked])))
    gaps = [b - a for a, b in pairwise(times(taken([free])))]
    assert sum(gap == 0 for gap in gaps) == 0
    assert replace(free, arrivals=ticked.arrivals) == ticked


def test_what_the_stream_says_of_clients_holds():
    found = taken(
        [
            loaded(
                preset="azure-2023-conv",
                requests=50,
                tier="BATCH",
                max_tokens=9,
                timeouts={"ttft": 2},
            )
        ]
    )
    assert {(r.tier, r.max_tokens, r.ttft_timeout_ps) for r in found} == {("BATCH", 9, 2 * PS)}


def test_a_preset_runs_and_says_what_it_is():
    result = run(
        document(traffic=[{"preset": "agentic-retail", "rate": 2, "requests": 12}], engine=LONG)
    )
    assert len(result.records) == 12
    assert {r.outcome for r in result.records} == {"completed"}
    assert max(r.prefix_hit_tokens for r in result.records) > 5000


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (
            {"preset": "azure-conv"},
            "preset: 'azure-conv' is not known; did you mean 'azure-2023-conv'",
        ),
        (
            {"preset": "arxiv-summarization"},
            "rate: is missing; the trace behind arxiv-summarization has lengths but",
        ),
        ({"preset": "azure-2023-conv", "rate": 0}, "rate: must be >= 1e-06"),
        ({"preset": "azure-2023-conv", "requests": None}, "would never end; give requests"),
        (
            {"preset": "azure-2023-conv", "prompt_tokens": {"fixed": 4}},
            "prompt_tokens: unknown key here: a preset has",
        ),
        (
            {"preset": "azure-2023-conv", "speedup": 2},
            "speedup: unknown key here: only streams with a trace",
        ),
    ],
)
def test_what_cannot_be_is_refused(stream, message):
    with pytest.raises(InputError, match=message):
        loaded(**{"requests": 9} | stream)


def test_prompts_that_are_all_too_long_are_refused():
    stream = {"preset": "agentic-appworld", "rate": 1, "requests": 9}
    with pytest.raises(
        InputError,
        match=r"traffic\.0\.preset: no request of this stream can ever run: every prompt has",
    ):
        load_scenario(document(traffic=[stream]))


# --- on the terminal ----------------------------------------------------------------------


def test_the_table_fits_80_columns_and_names_every_source():
    answer = CliRunner().invoke(app, ["presets", "--traffic"])
    assert answer.exit_code == 0
    assert max(map(len, answer.stdout.splitlines())) <= 80
    text = " ".join(answer.stdout.split())
    for preset in PRESETS.values():
        assert preset.name in text
        assert preset.title in text
    rows = [
        line.split() for line in answer.stdout.splitlines() if line.startswith("azure-2023-conv ")
    ]
    assert rows[0] == [
        "azure-2023-conv",
        "5.53",
        "1.09",
        "1,020",
        "2,735",
        "4,142",
        "129",
        "424",
        "601",
    ]


def test_the_streams_of_a_preset_can_be_copied_into_a_scenario():
    data = json.loads(CliRunner().invoke(app, ["presets", "--traffic", "--json"]).stdout)
    for name, preset in data.items():
        for written in preset["traffic"]:
            copied = load_scenario(
                document(traffic=[written | {"requests": 5}], engine=LONG)
            ).traffic[0]
            assert copied.lengths, name
    [copied] = data["azure-2023-conv"]["traffic"]
    again = load_scenario(document(traffic=[copied | {"requests": 5}], engine=LONG)).traffic[0]
    assert again == loaded(preset="azure-2023-conv", requests=5)
