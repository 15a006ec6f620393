"""`twin trace ...` as a person uses it: what is printed, what is written, and the exit status."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.runs import azure_csv, document, stream
from twin.cli import app
from twin.workload import check
from twin.workload.formats import own
from twin.workload.formats.rows import TraceRow

EXAMPLE = Path(__file__).parents[1] / "examples" / "chat-8b.yaml"
ROWS = [(f"2023-11-16 18:15:{i:02d}", 100 + i, 5) for i in range(20)]


@pytest.fixture
def twin():
    """Runs a command; gives (exit status, stdout, stderr)."""

    def call(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        return result.exit_code, result.stdout, result.stderr

    return call


@pytest.fixture
def trace(tmp_path):
    return azure_csv(tmp_path, ROWS)


def test_a_good_trace_is_0_and_a_malformed_one_2(twin, trace, tmp_path):
    status, out, err = twin("trace", "check", trace)
    assert (status, err) == (0, "")
    assert "Azure LLM inference trace (format azure, by its header): 20 requests" in out
    bad = azure_csv(tmp_path, [*ROWS, ("2023-11-16 18:15:59", 0, 1)], "bad.csv")
    status, out, err = twin("trace", "check", bad)
    assert (status, err) == (2, "")
    assert "line 22: ContextTokens: '0' must be a whole number" in out


def test_json_is_one_object_and_nothing_else(twin, trace):
    status, out, err = twin("trace", "check", trace, "--json", "--first", 5, "--window", "2:9")
    found = json.loads(out)
    assert (status, err, found["requests"]) == (0, "", 5)
    assert found["time"]["first_s"] == 2.0


def test_a_scenario_says_how_much_of_a_replica_is_asked_for(twin, trace):
    status, out, _ = twin("trace", "check", trace, "--scenario", EXAMPLE, "--json")
    found = json.loads(out)
    assert status == 0
    assert 0 < found["capacity"]["busiest_share"] < 0.1
    assert found["capacity"]["replica_rate"] > 20
    assert "policies and numbers of replicas will look alike" in found["warnings"][-1]
    assert "Capacity" in twin("trace", "check", trace, "--scenario", EXAMPLE)[1]


def test_conversion_says_what_it_did(twin, trace, tmp_path):
    target = tmp_path / "t.jsonl"
    status, out, err = twin("trace", "convert", trace, target, "--speedup", "2.5")
    assert (status, err) == (0, "")
    assert out == f"{target}: 20 requests, azure to twin-jsonl\n"
    assert '"arrival_s": 7.6' in target.read_text()


def test_losses_are_refused_or_told(twin, tmp_path):
    source, target = str(tmp_path / "in.csv"), tmp_path / "out.csv"
    own.CSV.write(source, [TraceRow(1, 0, 9, 9, ((1, 9),)), TraceRow(2, 5, 9, 9, tier="A")])
    status, out, err = twin("trace", "convert", source, target, "--to", "azure")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {source} line 2: format azure cannot hold which prompts share a")
    assert not target.exists()
    status, out, err = twin("trace", "convert", source, target, "--to", "azure", "--lossy")
    assert status == 0
    assert (
        err == "dropped: which prompts share a prefix (1 requests)\ndropped: tiers (1 requests)\n"
    )


def test_malformed_lines_can_be_left_out(twin, tmp_path):
    bad = azure_csv(tmp_path, [*ROWS, ("2023-11-16 18:15:59", 0, 1)], "bad.csv")
    target = tmp_path / "t.parquet"
    assert twin("trace", "convert", bad, target)[0] == 2
    status, _, err = twin("trace", "convert", bad, target, "--skip-malformed")
    assert (status, err) == (0, "skipped: 1 malformed lines\n")


def test_formats_are_listed(twin):
    status, out, _ = twin("trace", "formats")
    assert status == 0
    assert "mooncake: Mooncake trace (milliseconds, blocks of 512 tokens)" in out
    assert json.loads(twin("trace", "formats", "--json")[1])["mooncake"]["block_tokens"] == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--window", "5"), "--window 5: write FROM:TO in seconds"),
        (("--window", "5:"), "--window 5:: write FROM:TO"),
        (("--window", "9:5"), "--window 9:5: write FROM:TO in seconds, FROM before TO"),
        (("--window", "a:b"), "--window a:b: 'a' is no number of seconds"),
        (("--format", "zip"), "format 'zip' is not known; known: azure"),
        (("--scenario", "none.yaml"), "none.yaml: cannot be read"),
    ],
)
def test_options_that_cannot_be(twin, trace, options, message):
    status, out, err = twin("trace", "check", trace, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize("speedup", ["0", "-1", "fast", "1/0"])
def test_speeds_that_cannot_be(twin, trace, tmp_path, speedup):
    status, _, err = twin("trace", "convert", trace, tmp_path / "t.csv", "--speedup", speedup)
    assert status == 2
    assert err == f"error: --speedup {speedup}: must be a number above 0\n"


def test_progress_is_told_of_every_line_and_stays_off_stdout(trace, monkeypatch):
    told = []
    monkeypatch.setattr(check, "LINES_PER_LOOK", 8)
    check.check_trace(trace, progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 20), (8, 20), (16, 20)]


def test_a_terminal_sees_how_far_a_check_is(trace):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "twin", "trace", "check", trace, "--json"]
    done = subprocess.run(command, cwd=EXAMPLE.parents[1], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert json.loads(done.stdout)["requests"] == 20
    assert "0 of 20 lines" in shown


TALK = {"sessions": {"turns": 3, "think_time": 1.0}}
DOCUMENTS = {"prefixes": {"groups": 3, "tokens": 1024}}


@pytest.mark.parametrize(("keys", "contained"), [(DOCUMENTS, 0), ({}, 0), (TALK, 1)])
def test_only_replies_that_a_prompt_contains_are_written_and_missed(
    twin, tmp_path, keys, contained
):
    one = stream(512, 20, arrivals={"process": "constant", "rate": 10}, requests=12, **keys)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(document(traffic=[one])), encoding="utf-8")
    path = tmp_path / "t.jsonl"
    assert twin("trace", "export", tmp_path / "s.yaml", path)[0] == 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    asked = {content for row in rows for content, _ in row["prompt"]}
    replies = {row["reply"] for row in rows if row.get("reply") is not None}
    assert replies <= asked
    assert bool(replies) == bool(contained)
    # A trace written by somebody else may give every reply an id.
    for number, row in enumerate(rows):
        row.setdefault("reply", 10_000 + number)
        for key in ("session", "tier", "tenant"):
            row.pop(key, None)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lossless = ["trace", "convert", path, tmp_path / "m.jsonl", "--to", "mooncake"]
    status, _, err = twin(*lossless)
    if contained:
        assert (status, "cannot hold which prompts contain an earlier reply" in err) == (2, True)
    else:
        assert status == 0, err
        again = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert len({row["hash_ids"][0] for row in again}) == (3 if keys else 12)
        assert twin(*lossless, "--lossy")[0] == 0
        assert "contain an earlier reply" not in err + twin(*lossless, "--lossy")[2]
