"""Results of other load generators become records of the simulator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from real.measured import read_measured
from real.results import read_results
from twin.clock import PS
from twin.errors import InputError

ROOT = Path(__file__).parents[1]

VLLM = {
    "duration": 3.0, "completed": 2, "input_lens": [10, 20, 30], "output_lens": [3, 2, 0],
    "ttfts": [0.5, 0.25, 0.0], "itls": [[0.1, 0.2], [0.125], []], "start_times": [100.0, 99.0, 101.0],
    "queue_times": [0.0, 0.5, 0.0], "latencies": [0.8, 0.375, 2.0], "errors": ["", "", "HTTP 500"],
}  # fmt: skip

GUIDELLM = {
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {
                        "request_id": "a",
                        "info": {
                            "timings": {
                                "targeted_start": 10.0, "request_start": 10.5, "first_token_iteration": 11.0,
                                "last_token_iteration": 11.4, "request_end": 11.5, "resolve_end": 11.6,
                            }
                        },
                        "input_metrics": {"text_tokens": 7},
                        "output_metrics": {"text_tokens": 5},
                    }
                ],
                "errored": [
                    {
                        "request_id": "b",
                        "info": {
                            "timings": {"resolve_start": 12.0, "request_start": None, "resolve_end": 15.0},
                            "error": "no route",
                        },
                        "input_metrics": {"text_tokens": 7},
                        "output_metrics": {"text_tokens": None},
                    }
                ],
                "incomplete": [],
            }
        }
    ]
}  # fmt: skip


def aiperf_row(start_ns, error=None, **metrics):
    about = {
        "session_num": 0, "conversation_id": "c1", "credit_issued_ns": start_ns - 2_000_000,
        "request_start_ns": start_ns, "request_end_ns": start_ns + 1_000_000_000, "was_cancelled": False,
    }  # fmt: skip
    units = {name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()}
    return {"metadata": about, "metrics": units, "error": error}


AIPERF = [
    aiperf_row(
        5_000_000_000,
        time_to_first_token=(200.0, "ms"),
        inter_token_latency=(0.1, "s"),
        input_sequence_length=(40, "tokens"),
        output_sequence_length=(4, "tokens"),
    ),
    aiperf_row(6_000_000_000, error={"code": 503, "type": "x", "message": "overloaded"}),
]


def written(path, content):
    lines = content if isinstance(content, list) else [content]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_vllm_bench_serve(tmp_path):
    tool, found = read_results(written(tmp_path / "r.json", VLLM))
    assert tool == "vllm bench serve"
    # In order of when they were due; the second of the file was, half a second before it was sent.
    first, second, failed = found
    assert (first.record.arrival_ps, first.sent_ps) == (0, PS // 2)
    assert first.record.first_token_ps == PS * 3 // 4
    assert first.sent_ttft_s == 0.25
    assert (first.record.prompt_tokens, first.record.output_tokens) == (20, 2)
    assert second.record.arrival_ps == PS * 3 // 2
    assert list(second.record.itl_ps) == [PS // 10, PS // 5]
    assert second.record.finish_ps - second.record.first_token_ps == PS * 3 // 10
    assert (failed.record.outcome, failed.record.first_token_ps, failed.error) == (
        "aborted",
        None,
        "HTTP 500",
    )
    assert failed.record.finish_ps - failed.record.arrival_ps == 2 * PS


def test_guidellm(tmp_path):
    tool, (done, failed) = read_results(written(tmp_path / "r.json", GUIDELLM))
    assert tool == "guidellm"
    assert (done.record.arrival_ps, done.sent_ps) == (0, PS // 2)
    assert done.record.first_token_ps == PS
    assert list(done.record.itl_ps) == pytest.approx([PS // 10] * 4, abs=2)
    assert done.record.finish_ps == pytest.approx(1.4 * PS, abs=8)
    assert (failed.record.outcome, failed.error) == ("aborted", "no route")
    assert failed.record.finish_ps - failed.record.arrival_ps == 3 * PS


@pytest.mark.parametrize("rows", [AIPERF, AIPERF[:1]])
def test_aiperf(tmp_path, rows):
    tool, found = read_results(written(tmp_path / "profile_export.jsonl", rows))
    assert (tool, len(found)) == ("aiperf", len(rows))
    done = found[0]
    assert done.record.session == "c1"
    assert done.lateness_s == 0.002
    assert done.record.first_token_ps == PS * 202 // 1000
    assert list(done.record.itl_ps) == [PS // 10] * 3
    if len(rows) > 1:
        assert (found[1].record.outcome, found[1].error) == ("aborted", "overloaded")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": 1}, "is no result of vllm bench serve, guidellm"),
        ({k: v for k, v in VLLM.items() if k != "itls"}, "without itls; run it with --save-detailed"),
        (VLLM | {"ttfts": [0.1]}, "looks like a result of vllm bench serve, but has another form"),
        ({"benchmarks": []}, "there is no request in this result of guidellm"),
        ({"benchmarks": [{"args": 1}]}, "another form: KeyError 'requests'"),
        ([*AIPERF, {"metadata": {}}], "another form: KeyError"),
    ],
)  # fmt: skip
def test_what_is_no_result(tmp_path, content, words):
    with pytest.raises(InputError) as refused:
        read_results(written(tmp_path / "r", content))
    assert words in str(refused.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_results(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="neither JSON nor JSON lines"):
        read_results(tmp_path / "text")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not text in UTF-8"):
        read_results(tmp_path / "binary")


def test_the_command(tmp_path):
    source = written(tmp_path / "r.json", VLLM)
    command = [sys.executable, "-m", "real", "results", str(source), "--out"]
    run = subprocess.run([*command, str(tmp_path / "o")], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{tmp_path / 'o'}: 3 requests of vllm bench serve, 2 completed\n"
    columns, facts = read_measured(tmp_path / "o")
    assert facts["tool"] == "vllm bench serve"
    assert columns["outcome"] == ["completed", "completed", "aborted"]
    assert len((tmp_path / "o" / "trace.jsonl").read_text().splitlines()) == 2
    again = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2
    assert "not empty" in again.stderr
