"""What users of other tools stumbled over with traces; each test names the thread it comes from."""

import json

import pytest

from tests.runs import azure_csv, document, run
from tests.test_cli_trace import twin  # noqa: F401  a fixture
from twin.clock import PS
from twin.report.json_summary import summarize
from twin.report.tables import render
from twin.workload.check import Selection, check_trace
from twin.workload.formats import own
from twin.workload.formats.choose import format_of, read_trace
from twin.workload.formats.rows import TraceRow

ROOMY = {"max_model_len": 20_000, "num_gpu_blocks_override": 20_000}


def hits(result):
    engine = summarize(result)["engine"]
    return engine["prefix_hit_tokens"], engine["prefix_query_tokens"]


def test_prefix_structure_survives_a_round_trip(twin, tmp_path):  # noqa: F811
    """inference-sim/inference-sim#829: an exported workload lost its prefix groups, and replay quietly had no hits."""
    groups = {
        "arrivals": {"process": "constant", "rate": 1},
        "prompt_tokens": {"fixed": 100},
        "output_tokens": {"fixed": 5},
        "prefixes": {"groups": 7, "tokens": 16_384},
        "requests": 60,
    }
    scenario = tmp_path / "groups.yaml"
    scenario.write_text(json.dumps(document(engine=ROOMY, traffic=[groups])))
    before = hits(run(json.loads(scenario.read_text())))
    assert before[0] >= 53 * 16_384
    for name in ("t.jsonl", "t.csv.gz", "t.parquet"):
        assert twin("trace", "export", scenario, tmp_path / name)[0] == 0
        trace = {"trace": str(tmp_path / name)}
        assert hits(run(document(engine=ROOMY, traffic=[trace]))) == before
    status, _, err = twin("trace", "export", scenario, tmp_path / "t.txt", "--to", "azure")
    assert status == 2
    assert "request 0: format azure cannot hold which prompts share a prefix" in err
    status, _, err = twin(
        "trace", "export", scenario, tmp_path / "t.txt", "--to", "azure", "--lossy"
    )
    assert (status, err.splitlines()[0]) == (
        0,
        "dropped: which prompts share a prefix (60 requests)",
    )


def test_conversations_survive_too(twin, tmp_path):  # noqa: F811
    """The same of growing histories, whose later turns contain replies and come when they came in the run."""
    talks = {
        "arrivals": {"process": "poisson", "rate": 0.5},
        "prompt_tokens": {"uniform": [20, 200]},
        "output_tokens": {"uniform": [20, 200]},
        "sessions": {"turns": 4, "system_prompt_tokens": 500, "think_time": 2},
        "requests": 60,
    }
    scenario = tmp_path / "talks.yaml"
    scenario.write_text(json.dumps(document(engine=ROOMY, traffic=[talks])))
    once = run(json.loads(scenario.read_text()))
    assert twin("trace", "export", scenario, tmp_path / "t.jsonl")[0] == 0
    again = run(document(engine=ROOMY, traffic=[{"trace": str(tmp_path / "t.jsonl")}]))
    assert hits(once) == hits(again)
    assert [r.finish_ps for r in once.records] == [r.finish_ps for r in again.records]


def test_first_hours_of_a_trace_are_nearly_idle(tmp_path):
    """HPMLL/BurstGPT#11: with the first 400 bins of three minutes every autoscaler tied at the minimum."""
    head = [TraceRow(0, i * 10**15 // 34, 600, 200) for i in range(2400)]
    middle = [TraceRow(0, 72_000 * PS + i * 10**14 // 317, 600, 200) for i in range(30_000)]
    path = str(tmp_path / "trace.jsonl")
    own.JSONL.write(path, [*head, *middle])
    found, _ = check_trace(path)
    assert any(
        text.startswith("the beginning is nearly idle: 0.034 ") for text in found["warnings"]
    )
    rates = [part["rate"] for part in found["time"]["profile"]]
    assert min(rates) < 0.05
    assert max(rates) > 1
    busy, _ = check_trace(path, selection=Selection((72_000 * PS, 80_000 * PS)))
    assert busy["warnings"] == []
    head = {"trace": path, "window": [0, 72_000], "requests": 200}
    told = render(summarize(run(document(traffic=[head]))))
    assert "policies and numbers of replicas will look alike" in " ".join(told.split())


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "mooncake",
            "sharegpt",
            "blocks have 16 tokens in format sharegpt; is the format another?",
        ),
        ("alibaba", "mooncake", "33 blocks of 512 tokens do not fit a prompt of 521 tokens"),
    ],
)
def test_seconds_or_milliseconds_512_or_16(tmp_path, right, wrong, told):
    """vllm-project/vllm#39795: each tool has its own default, and a factor of 1000 is easy to miss."""
    if right == "mooncake":
        row = {"timestamp": 300, "input_length": 6758, "output_length": 9, "hash_ids": [*range(14)]}
    else:
        row = {"timestamp": 0.3, "input_length": 521, "output_length": 9, "hash_ids": [*range(33)]}
        row["chat_id"] = 1
    path = tmp_path / "t.jsonl"
    rows = [row | {"timestamp": round(i * row["timestamp"], 1)} for i in range(1000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = check_trace(str(path))
    assert found["format"] == right
    assert not any("format" in text for text in found["warnings"])
    assert found["time"]["mean_rate"] == pytest.approx(1 / 0.3, rel=0.01)
    assert found["prefixes"]["attainable_share"] > 0.9
    other, _ = check_trace(str(path), wrong)
    said = [*other["warnings"], *(fault["problem"] for fault in other["malformed"]["listed"])]
    assert any(told in text for text in said)


def test_another_unit_shows_in_the_rate(tmp_path):
    """vllm-project/vllm#39795: milliseconds read as seconds, seconds read as milliseconds."""
    path = tmp_path / "t.jsonl"
    for step, name in ((2_000_000, "alibaba"), (0.05, "mooncake")):
        rows = [
            {"chat_id": i, "timestamp": i * step, "input_length": 9, "output_length": 9}
            for i in range(50)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        warnings = check_trace(str(path), name)[0]["warnings"]
        assert any(f"is the unit of the stamps that of format {name}?" in text for text in warnings)


def test_a_trace_without_prefix_information(tmp_path):
    """Azure/AzurePublicDataset#53: results from such traces cannot reflect caching."""
    path = azure_csv(tmp_path, [(f"2023-11-16 18:15:{i:02d}", 1000, 9) for i in range(40)])
    assert check_trace(path)[0]["prefixes"]["known"] == "no"
    plain = summarize(run(document(traffic=[{"trace": path}])))
    assert plain["engine"]["prefix_hit_tokens"] == 0
    assert "unknown in the trace of stream 0" in " ".join(render(plain).split())
    assumed = summarize(run(document(traffic=[{"trace": path, "assumed_prefix_share": 0.5}])))
    assert assumed["engine"]["prefix_hit_tokens"] == 39 * 496
    assert "50.0 % of stream 0 assumed shared" in " ".join(render(assumed).split())


def test_duplicate_ids(tmp_path):
    """ai-dynamo/aiperf#1262: public sets contain true duplicates; loaders crash or lose rows."""
    rows = [
        TraceRow(0, 0, 100, 5, ((1, 64),), session="s", id="a"),
        TraceRow(0, PS, 100, 5, ((1, 64),), session="s", id="a"),
        TraceRow(0, 2 * PS, 100, 5, ((2, 64),), session="s", id="b"),
    ]
    path = tmp_path / "t.jsonl"
    own.JSONL.write(str(path), rows)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{broken", lines[2], ""]))
    found, _ = check_trace(str(path))
    assert (found["requests"], found["repeated_ids"], found["sessions"]["restarts"]) == (3, 1, 1)
    assert [fault["line"] for fault in found["malformed"]["listed"]] == [3]
    path.write_text("\n".join(lines))
    assert len(list(read_trace(str(path), format_of(str(path)).format))) == 3
    result = run(document(traffic=[{"trace": str(path)}]))
    assert [record.prefix_hit_tokens for record in result.records] == [0, 64, 0]
    assert summarize(result)["totals"]["completed"] == 3
