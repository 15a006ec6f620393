"""Results of other load generators become records of the simulator."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from real.cli import app
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
    tool, [(found, unsent)] = read_results(written(tmp_path / "r.json", VLLM))
    assert unsent == 0
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
    tool, [((done, failed), _)] = read_results(written(tmp_path / "r.json", GUIDELLM))
    assert tool == "guidellm"
    assert (done.record.arrival_ps, done.sent_ps) == (0, PS // 2)
    assert done.record.first_token_ps == PS
    assert list(done.record.itl_ps) == pytest.approx([PS // 10] * 4, abs=2)
    assert done.record.finish_ps == pytest.approx(1.4 * PS, abs=8)
    assert (failed.record.outcome, failed.error) == ("aborted", "no route")
    assert failed.record.finish_ps - failed.record.arrival_ps == 3 * PS


@pytest.mark.parametrize("rows", [AIPERF, AIPERF[:1]])
def test_aiperf(tmp_path, rows):
    tool, [(found, _)] = read_results(written(tmp_path / "profile_export.jsonl", rows))
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
        (VLLM | {"ttfts": [0.1]}, "request 1: ttfts: there are 1 values, but 3 of input_lens; give"),
        ({"benchmarks": []}, "there is no request in this result of guidellm"),
        ({"benchmarks": [{"args": 1}]}, "another form: KeyError 'requests'"),
        ([*AIPERF, {"metadata": {}}], "another form: KeyError"),
    ],
)  # fmt: skip
def test_what_is_no_result(tmp_path, content, words):
    with pytest.raises(InputError) as refused:
        read_results(written(tmp_path / "r", content))
    assert words in str(refused.value)


def changed(content, place, value):
    """The content with another value at a place, keys and numbers between dots."""
    made = json.loads(json.dumps(content))
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    inner = made
    for key in path:
        inner = inner[key]
    inner[last] = value
    return made


TIMINGS = "benchmarks.0.requests.successful.0.info.timings"


@pytest.mark.parametrize(
    ("content", "place", "value", "words"),
    [
        (VLLM, "ttfts.0", math.inf, "request 0: ttfts: inf: must be a finite number"),
        (VLLM, "ttfts.0", math.nan, "request 0: ttfts: nan: must be a finite number"),
        (VLLM, "ttfts.1", -3.0, "request 1: ttfts: -3: must be 0 or more"),
        (VLLM, "start_times.0", math.inf, "request 0: start_times: inf: must be a finite number"),
        (VLLM, "start_times.0", -1e9, "request 1 ends 1e+09 s after the first one was due"),
        (VLLM, "output_lens.0", -3, "request 0: output_lens: -3: must be 0 or more"),
        (VLLM, "input_lens.2", -20, "request 2: input_lens: -20: must be 0 or more"),
        (VLLM, "input_lens.0", "20", "request 0: input_lens: '20': must be a finite number"),
        (VLLM, "input_lens.0", 20.5, "request 0: input_lens: 20.5: must be a whole number"),
        (VLLM, "input_lens.0", True, "request 0: input_lens: True: must be a finite number"),
        (VLLM | {"latencies": []}, "itls.0", [1e9, 1], "request 0: reply: 1e+09 s; at most 8,640,000 s can be"),
        (VLLM, "latencies.2", -1, "request 2: latencies: -1: must be 0 or more"),
        (VLLM, "queue_times.1", -1, "request 1: queue_times: -1: must be 0 or more"),
        (VLLM, "latencies.0", 0.05, "request 0: latencies: 0.05 s after the request was sent: must not be"),
        (VLLM, "latencies.0", 0.7, "sent: must not be before ttfts and all itls, 0.8 s after it"),
        (VLLM, "itls.1", [0.1, 0.01, 0.01], "request 1: itls: there are 3 gaps, but output_lens is 2: at most 1"),
        (VLLM, "itls.0", None, "request 0: itls: None: must be a list of seconds"),
        (VLLM, "itls.1", 5, "request 1: itls: 5: must be a list of seconds"),
        (VLLM, "itls.1", [None], "request 1: itls: None: must be a finite number"),
        (VLLM, "itls", [None], "request 1: itls: there are 1 values, but 3 of input_lens"),
        (VLLM, "itls", 5, "r: itls: 5: must be a list with a value for each request"),
        (VLLM, "input_lens", 5, "r: input_lens: 5: must be a list with a value for each request"),
        (VLLM, "output_lens", [3, 2, 0, 1], "request 3: output_lens: there are 4 values, but 3 of input_lens"),
        (VLLM, "start_times", [100.0], "request 1: start_times: there are 1 values, but 3 of input_lens"),
        (VLLM, "errors", ["", ""], "request 2: errors: there are 2 values, but 3 of input_lens"),
        (VLLM, "queue_times", [0.0], "request 1: queue_times: there are 1 values, but 3 of input_lens"),
        (VLLM, "latencies", [0.8], "request 1: latencies: there are 1 values, but 3 of input_lens"),
        (GUIDELLM, "benchmarks.0.requests", [1], "another form: AttributeError"),
        (GUIDELLM, "benchmarks.0", 5, "another form: TypeError"),
        (GUIDELLM, f"{TIMINGS}.request_end", math.inf, "successful request 0: request_end: inf"),
        (GUIDELLM, f"{TIMINGS}.request_end", 9.0, "from the start to the end: -1.5"),
        (GUIDELLM, f"{TIMINGS}.first_token_iteration", 1.0, "to the first token: -9.5"),
        (GUIDELLM, f"{TIMINGS}.last_token_iteration", 10.9, "from the first token to the last: -0.1"),
        (GUIDELLM, f"{TIMINGS}.request_end", 10.9, "request 0: request_end: 0.4 s after the request was sent: must"),
        (GUIDELLM, f"{TIMINGS}.request_end", 11.2, "must not be before last_token_iteration, 0.9 s after"),
        (AIPERF, "0.metrics", [1], "another form: AttributeError"),
        (AIPERF, "0.metadata", 5, "is no result of"),
        (AIPERF, "1.metadata", 5, "another form: TypeError"),
        (AIPERF, "0.metadata.request_end_ns", 1, "from request_start_ns to request_end_ns: -5"),
        (AIPERF, "0.metrics.output_sequence_length.value", math.inf, "output_sequence_length: inf"),
        (AIPERF, "0.metrics.output_sequence_length.value", 1e12, "output: 1e+12: must be a whole"),
        (AIPERF, "0.metrics.time_to_first_token.value", -1.0, "time_to_first_token: -1"),
        (AIPERF, "0.metadata.request_end_ns", 5_000_000_009, "line 1: request_end_ns: 9e-09 s after"),
        (AIPERF, "0.metadata.request_end_ns", 5_400_000_000, "must not be before the last token, 0.5 s"),
        (AIPERF, "0.metrics.request_latency", {"value": 9, "unit": "ns"}, "line 1: request_latency: 9e-09 s after"),
        (AIPERF, "0.metrics.time_to_first_token.unit", "parsec", "unit: 'parsec': must be one of ms, s, sec, us, ns"),
        (AIPERF, "0.metrics.inter_token_latency", {"value": 0.1}, "line 1: inter_token_latency: unit: None: must"),
        (AIPERF, "0.metrics.inter_token_latency.unit", [], "line 1: inter_token_latency: unit: []: must be one of"),
        (AIPERF, "0.metrics.input_sequence_length.unit", "ms", "unit: 'ms': must be one of tokens"),
    ],
)  # fmt: skip
def test_what_cannot_have_been_measured_is_refused(tmp_path, content, place, value, words):
    with pytest.raises(InputError) as refused:
        read_results(written(tmp_path / "r", changed(content, place, value)))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("content", "place", "value"),
    [
        (VLLM, "latencies.0", 0.7995),
        (GUIDELLM, f"{TIMINGS}.request_end", 11.3995),
        (AIPERF, "0.metadata.request_end_ns", 5_499_500_000),
    ],
)
def test_an_end_may_be_rounded(tmp_path, content, place, value):
    _, [run] = read_results(written(tmp_path / "r", changed(content, place, value)))
    assert any(one.record.outcome == "completed" for one in run.measured)


def test_a_piece_of_several_tokens_came_at_once(tmp_path):
    _, [run] = read_results(written(tmp_path / "r", changed(VLLM, "itls.0", [0.3])))
    assert list(run.measured[1].record.itl_ps) == [PS * 3 // 10, 0]


def test_what_came_before_a_failure_may_not_add_up(tmp_path):
    """vllm bench serve writes 0 tokens and latency 0 for a request that broke off."""
    content = changed(changed(VLLM, "itls.2", [0.1, 0.1]), "latencies.2", 0.0)
    _, [run] = read_results(written(tmp_path / "r", content))
    assert (run.measured[2].record.outcome, run.measured[2].error) == ("aborted", "HTTP 500")


@pytest.mark.parametrize(
    ("pieces", "gaps"),
    [([0.0, 0.1, 0.2], [0.1, 0.2]), ([0.0, 0.1, 0.2, 0.0], [0.1, 0.2])],
)
def test_the_pieces_of_a_chat_without_a_token(tmp_path, pieces, gaps):
    """The role has a piece of its own, and with some servers the reason to stop."""
    chat = changed(VLLM, "itls.0", pieces) | {"backend": "openai-chat"}
    _, [run] = read_results(written(tmp_path / "r", chat))
    assert list(run.measured[1].record.itl_ps) == [round(gap * PS) for gap in gaps]
    more = changed(chat, "itls.0", [0.0, *pieces, 0.0, 0.0])
    with pytest.raises(InputError, match="and 2 of pieces without a token"):
        read_results(written(tmp_path / "r", more))


def test_a_line_that_was_cut_short_is_named(tmp_path):
    path = written(tmp_path / "r", AIPERF)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InputError) as refused:
        read_results(path)
    assert str(refused.value) == f"{path}:2: not JSON"


def test_json_that_is_nested_too_deep(tmp_path):
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(InputError, match="nested too deep"):
        read_results(tmp_path / "deep")


def test_a_failure_may_be_told_in_any_form(tmp_path):
    _, [(found, _)] = read_results(written(tmp_path / "r", changed(AIPERF, "1.error", ["boom"])))
    assert (found[1].record.outcome, found[1].error) == ("aborted", '["boom"]')


NOTHING = {"info": {"timings": {"targeted_start": None}}, "input_metrics": None, "output_metrics": None}  # fmt: skip


def test_requests_cut_off_before_they_were_sent_cost_nobody_else(tmp_path):
    content = changed(GUIDELLM, "benchmarks.0.requests.incomplete", [NOTHING])
    _, [run] = read_results(written(tmp_path / "r", content))
    assert (len(run.measured), run.unsent) == (2, 1)
    with pytest.raises(InputError, match="successful request 0: timings: when it began"):
        read_results(
            written(
                tmp_path / "r", changed(GUIDELLM, "benchmarks.0.requests.successful", [NOTHING])
            )
        )


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


def test_each_run_of_a_sweep_and_each_file_has_its_folder(tmp_path):
    """Two loads in one folder would be one blended score."""
    none = {"requests": {"successful": [], "errored": [], "incomplete": [NOTHING]}}
    sweep = {"benchmarks": [*GUIDELLM["benchmarks"] * 2, none]}
    written(tmp_path / "sweep.json", sweep)
    written(tmp_path / "one.json", VLLM)
    (tmp_path / "two").mkdir()
    written(tmp_path / "two" / "one.json", VLLM)
    out = tmp_path / "o"
    files = ("sweep.json", "one.json", "two/one.json")
    found = CliRunner().invoke(
        app, ["results", *(str(tmp_path / name) for name in files), "--out", str(out)]
    )
    assert found.exit_code == 0, found.output
    assert sorted(path.name for path in out.iterdir()) == ["one", "one-2", "sweep-0", "sweep-1"]
    assert "sweep-2: no request of guidellm, 1 never sent and left out" in found.output
    for name in ("sweep-0", "sweep-1"):
        columns, facts = read_measured(out / name)
        assert len(columns["index"]) == 2
        assert facts["run"] == int(name[-1])
        assert {path.name for path in (out / name).iterdir()} == {
            "requests.parquet", "trace.jsonl", "replay.json",
        }  # fmt: skip


def test_a_file_where_a_folder_is_to_be(tmp_path):
    out = tmp_path / "o"
    out.mkdir()
    (out / "b").write_text("")
    files = [str(written(tmp_path / name, VLLM)) for name in ("a", "b")]
    found = CliRunner().invoke(app, ["results", *files, "--force", "--out", str(out)])
    assert found.exit_code == 2
    assert f"--out {out / 'b'}: File exists" in found.output
