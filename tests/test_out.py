"""`twin run --out`: a folder with the whole result, and what happens when that is not possible."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runs import document, run, stream
from twin.clock import PS
from twin.errors import InputError
from twin.report import parquet
from twin.report.folder import FILES, check_folder, write_folder
from twin.report.html import render_html
from twin.report.json_summary import summarize
from twin.report.openmetrics import write_openmetrics
from twin.report.parquet import write_requests
from twin.report.tables import WIDTH, render
from twin.workload.formats import own
from twin.workload.formats.rows import TraceRow

ROOT = Path(__file__).parents[1]
MIXED = {"ONLINE": 0.5, "BATCH": 0.3, "OFFLINE": 0.2}


@pytest.fixture(scope="module")
def result():
    busy = stream(300, 60, arrivals={"process": "poisson", "rate": 25}, requests=120, tiers=MIXED)
    busy |= {"output_tokens": {"uniform": [1, 120]}}
    source = document(
        name="</script><b>odd & named",
        traffic=[busy],
        engine={"num_gpu_blocks_override": 129},
        policy="tiered",
        objectives={"ONLINE": {"ttft_p99": 0.001, "e2e_p95": 30.0}},
        run={"seed": 1, "sample_period": 0.1},
    )
    return run(source, observe=True)


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "a" / "b"
    check_folder(folder, force=False)
    write_folder(folder, result, summarize(result))
    return folder


def twin(*arguments, **options):
    command = [sys.executable, "-m", "twin", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_the_files_are_these(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_summary_is_that_of_the_run(folder, result):
    assert json.loads((folder / "summary.json").read_text()) == summarize(result)


def test_requests_hold_every_record(folder, result):
    rows = pq.read_table(folder / "requests.parquet").to_pylist()
    assert len(rows) == len(result.records)
    for row, record in zip(rows, result.records, strict=True):
        for name in ("index", "tier", "session", "outcome", "output_tokens", "preemptions"):
            assert row[name] == getattr(record, name)
        for name in ("arrival", "first_token", "finish", "stall", "estimated_wait"):
            assert row[f"{name}_s"] == getattr(record, f"{name}_ps") / PS
        assert row["itl_s"] == [gap / PS for gap in record.itl_ps]


def test_the_series_holds_every_sample(folder, result):
    rows = pq.read_table(folder / "timeseries.parquet").to_pylist()
    assert rows == list(result.series.rows())
    schema = pq.read_schema(folder / "timeseries.parquet")
    assert str(schema.field("good_per_s.ONLINE").type) == "double"
    assert str(schema.field("running.ONLINE").type) == "int64"


def test_events_are_one_a_line(folder, result):
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [event.to_dict() for event in result.log]
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("preemption") == result.engines[0].preemptions > 0


class Page(HTMLParser):
    """What a browser would load, and the text that is not script or style."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.ids, self.text, self._silent, self.data = [], [], [], None, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.loads += [found[key] for key in ("src", "href", "data", "poster") if key in found]
        if "id" in found:
            self.ids.append(found["id"])
        if tag in ("script", "style"):
            self._silent = found.get("id", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._silent = None

    def handle_data(self, data):
        if self._silent == "figures":
            self.data += data
        elif self._silent is None:
            self.text.append(data)


def test_the_report_loads_nothing_and_is_the_same_for_the_same_run(folder, result):
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == []
    ours = text.split("<script>/**")[0]
    assert "url(" not in ours
    assert "@import" not in ours
    assert text == render_html(result, summarize(result))


def test_the_report_says_what_the_summary_says(folder, result):
    summary = summarize(result)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    words = " ".join(" ".join(page.text).split())
    assert summary["verdict"] in words
    assert "</script><b>odd & named" in words
    assert "0 of 2" not in words
    assert "1 of 2 objectives met" in words
    assert "missed" in words
    assert words.index("p50 p90 p95 p99 mean") > words.index("samples")
    figures = json.loads(page.data)
    assert [f"chart-{name}" in page.ids for name in figures] == [True] * len(figures)
    assert {"ttft", "tpot", "e2e", "queue", "running", "kv", "decode", "preempted"} <= set(figures)
    [line, *_] = figures["decode"]["data"]
    assert len(line["x"]) == len(result.series.times_ps)
    stacked = figures["kv"]["data"]
    for i in range(len(stacked[0]["y"])):
        assert 0 <= sum(area["y"][i] for area in stacked) <= 100 + 1e-3


def test_without_preemptions_the_report_has_no_chart_of_them():
    calm = run(document(), observe=True)
    page = Page(render_html(calm, summarize(calm)))
    assert not any("preempt" in place or "histogram" in place for place in page.ids)


ODD = {
    "nothing comes": (stream(requests=None, duration=1e-6), ()),
    "cut before anything": (stream(), ("run.until=0.0001",)),
    "all refused but one": (
        stream(requests=3) | {"prompt_tokens": {"uniform": [1, 2500]}},
        ("run.seed=5",),
    ),
    "one token each": (stream(10, 1), ()),
    "nothing is measured": (stream(), ("run.warmup=1e6",)),
    "many replicas": (stream(), ("cluster.replicas=50",)),
    "odd names": (stream(tier='<b>"x"</b>', tenant="'\\n"), ()),
}


@pytest.mark.parametrize(("traffic", "overrides"), ODD.values(), ids=ODD)
def test_odd_runs_have_every_file_too(traffic, overrides, tmp_path):
    odd = run(document(traffic=[traffic]), *overrides, observe=True)
    summary = summarize(odd)
    write_folder(tmp_path, odd, summary)
    write_openmetrics(tmp_path / "history.om", odd, 0.0)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert summary["verdict"] in page.text
    rows = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert len(rows) == len(odd.records)
    assert max(map(len, render(summary).splitlines())) <= WIDTH
    for shares in (summary["gpu_time"], summary["bound"]):
        assert not shares or sum(shares.values()) == pytest.approx(1)


def test_tiers_that_only_the_rows_of_a_trace_have_are_shown(tmp_path):
    """Stock vLLM takes any tier, and the scenario names none of them."""
    path = tmp_path / "trace.jsonl"
    tiers = ["GOLD", "SILVER"]
    rows = [TraceRow(0, i * PS // 50, 100, 20, tier=tiers[i % 2]) for i in range(40)]
    own.JSONL.write(str(path), rows)
    result = run(document(traffic=[{"trace": str(path)}]), observe=True)
    figures = json.loads(Page(render_html(result, summarize(result))).data)
    assert {trace["name"] for trace in figures["running"]["data"]} >= {"GOLD", "SILVER"}
    assert sum(row["running.GOLD"] for row in result.series.rows()) > 0


def test_many_requests_are_written_in_parts(result, tmp_path, monkeypatch):
    write_requests(tmp_path / "whole.parquet", result.records)
    monkeypatch.setattr(parquet, "ROWS", 7)
    write_requests(tmp_path / "parts.parquet", result.records)
    whole, parts = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("whole", "parts"))
    assert whole.equals(parts)
    assert pq.ParquetFile(tmp_path / "parts.parquet").num_row_groups > 2


def test_a_folder_that_is_not_empty_is_left_alone_unless_forced(folder, tmp_path):
    with pytest.raises(InputError, match="not empty; name another, or --force"):
        check_folder(folder, force=False)
    check_folder(folder, force=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match=f"--out {file}"):
        check_folder(file, force=True)


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("twin.report.folder.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"needs plotly and pyarrow; pip install 'vllm-twin\[report\]'"
    ):
        check_folder(tmp_path / "out", force=False)


def test_a_file_that_cannot_be_written_leaves_the_older_one(folder, result, monkeypatch):
    before = (folder / "report.html").read_bytes()

    def full(path, *_):
        path.write_text("half a page")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twin.report.folder.write_html", full)
    with pytest.raises(InputError, match=r"report\.html: No space left on device"):
        write_folder(folder, result, summarize(result))
    assert (folder / "report.html").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_command_writes_all_of_it(tmp_path):
    out, history = tmp_path / "out", tmp_path / "history.om"
    arguments = ["examples/chat-8b.yaml", "--set", "traffic.0.requests=60", "--out", out]
    done = twin("run", *arguments, "--openmetrics", history, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())
    assert history.read_text().endswith("# EOF\n")
    again = twin("run", *arguments)
    assert (again.returncode, again.stdout) == (2, "")
    assert "not empty" in again.stderr
    assert twin("run", *arguments, "--force").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--openmetrics", "no/such/folder/h.om"], "no/such/folder"),
        (["--openmetrics", "."], "is a folder"),
        (["--openmetrics", "h.om", "--openmetrics-start", "yesterday"], "with a time zone"),
        (["--openmetrics", "h.om", "--openmetrics-start", "2026-01-01"], "with a time zone"),
        (["--advise", "--jobs", "0"], "--jobs"),
    ],
)
def test_bad_options_are_refused_before_the_run(arguments, hint):
    done = twin("run", "examples/chat-8b.yaml", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert hint in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_after_ctrl_c_everything_so_far_can_be_read(tmp_path):
    ours, theirs = pty.openpty()
    endless = ["--set", "traffic.0.requests=5000000", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "twin", "run", "examples/chat-8b.yaml", *endless],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True,
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    while not re.search(r"[1-9][0-9,]* of 5,000,000", shown):
        shown += os.read(ours, 10_000).decode()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 130
    assert out.startswith("INTERRUPTED")
    folder = tmp_path / "out"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"] is True
    rows = pq.read_table(folder / "requests.parquet").to_pylist()
    assert len(rows) == summary["totals"]["offered"]
    assert (
        sum(row["outcome"] == "unfinished" for row in rows) == summary["totals"]["unfinished"] > 0
    )
    last = pq.read_table(folder / "timeseries.parquet").to_pylist()[-1]
    assert last["time_s"] == summary["simulated_s"]
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert "Interrupted: the figures cover the run up to there." in page.text
