"""Names of metrics: the same in the code, in what is written and in the documentation."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.cluster.test_faults import broken
from tests.runs import document, run, stream
from twin.metrics.engine_time import LIMITS, USES
from twin.metrics.estimated_wait import WaitErrors
from twin.metrics.events import KINDS
from twin.metrics.gauges import LENGTH_GROUPS
from twin.report.json_summary import summarize
from twin.report.metric_names import TWIN, VLLM
from twin.report.openmetrics import write_openmetrics
from twin.report.records_file import COLUMNS

DOCS = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`]+)`", DOCS))
EXPOSED = {name for name in QUOTED if re.fullmatch(r"(vllm|twin):\w+", name)}


def section(title: str) -> str:
    return DOCS.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def observed():
    mixed = {"ONLINE": 0.5, "BATCH": 0.5}
    busy = stream(300, 60, arrivals={"process": "poisson", "rate": 40}, requests=150, tiers=mixed)
    changes = (
        "traffic.0.timeouts.total=1.5", "policy=priority", "traffic.0.prompt_tokens={uniform: [20, 2100]}",
        "policy.tiers.BATCH.promote_after=0.3",
    )  # fmt: skip
    source = document(traffic=[busy], engine={"max_num_seqs": 6}, policy="priority")
    return run(source, *changes, observe=True)


@pytest.fixture(scope="module")
def observed_cluster():
    """One with a gateway that has a limit, and with a pod that crashes."""
    limit = {"max_inflight": 3, "max_queue": 2}
    return run(broken({"kind": "crash", "at": 5}, admission=limit), observe=True)


def test_the_table_of_prometheus_has_every_metric_that_is_written():
    written = {metric.exposed for metric in (*VLLM, *TWIN)}
    listed = set(re.findall(r"`((?:vllm|twin):\w+)`", section("In Prometheus")))
    assert listed == written


def test_nothing_else_of_ours_is_promised():
    assert {name for name in EXPOSED if name.startswith("twin:")} == {m.exposed for m in TWIN}


def test_every_metric_is_written_once_with_its_labels(observed, tmp_path):
    path = tmp_path / "history.om"
    write_openmetrics(path, observed, 0.0)
    text = path.read_text(encoding="utf-8")
    types = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert types == [(metric.name, metric.kind) for metric in (*VLLM, *TWIN)]
    for metric in (*VLLM, *TWIN):
        suffix = "_count" if metric.kind == "histogram" else ""
        [first] = re.findall(rf"^{metric.exposed}{suffix}{{(.*?)}} ", text, re.MULTILINE)[:1]
        labels = re.findall(r'(\w+)="', first)
        assert labels == ["model_name", "engine", *metric.labels], metric.name
        # The documentation names the labels in the same row.
        table = [line for line in section("In Prometheus").splitlines() if line.startswith("|")]
        [row] = [line for line in table if f"`{metric.exposed}`" in line]
        assert set(metric.labels) <= set(re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])), metric.name


def test_columns_of_the_time_series_are_documented(observed, observed_cluster):
    table = section("Metrics over time")
    names = {
        re.sub(r"\.\w+$", ".<TIER>", name)
        for result in (observed, observed_cluster)
        for name in next(iter(result.series.rows()))
    }
    listed = set(
        re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))
    )
    assert listed == names


def test_fields_of_events_are_documented(observed, observed_cluster):
    table = section("Events")
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {"kind", *KINDS}
    log = [*observed.log, *observed_cluster.log]
    assert {event.kind for event in log} == set(KINDS)
    for event in log:
        [row] = [line for line in table.splitlines() if line.startswith(f"| `{event.kind}`")]
        for name in event.details:
            assert f"`{name}`" in row, (event.kind, name)
    for name in json.loads(json.dumps(log[0].to_dict())):
        assert f"`{name}`" in table


def test_figures_of_the_summary_are_documented(observed):
    summary = summarize(observed)
    for names, title in (
        (summary["engine"], "Engine"),
        (["throughput", *summary["throughput"]], "Throughput"),
        (USES, "What the time was for"),
        ([*LIMITS, "idle"], "What bound the run"),
        (["requests", "preempted", "histogram", "most", "worst"], "Preemptions by request"),
        ([field.name for field in dataclasses.fields(WaitErrors)], "Estimated wait"),
        ([*LENGTH_GROUPS, *summary["kv_by_length"]["short"]], "KV pages by length"),
        (["gpu_time"], "What the time was for"),
        (["bound", "verdict", "used_share", "limits"], "What bound the run"),
        (["kv_by_length.<GROUP>"], "KV pages by length"),
        (["estimated_wait.<TIER>"], "Estimated wait"),
    ):
        missing = [name for name in names if f"`{name}`" not in section(title)]
        assert not missing, title
    assert {"stall_s", "estimated_wait_s"} <= set(COLUMNS)
    assert {"`stall_s`", "`estimated_wait_s`"} <= set(re.findall("`[^`]*`", section("Durations")))
