"""Simulated history for Prometheus: valid, right at every instant, and loaded by a real one."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.runs import document, run, stream
from tests.tools import free_port, prometheus
from twin.clock import PS
from twin.errors import InputError
from twin.metrics.record_table import RecordTable
from twin.report.json_summary import summarize
from twin.report.metric_names import TWIN, VLLM
from twin.report.openmetrics import MOST_INSTANTS, write_openmetrics

START = 1767225600
MIXED = {"ONLINE": 0.6, "BATCH": 0.4}


@pytest.fixture(scope="module")
def result():
    busy = stream(300, 60, arrivals={"process": "poisson", "rate": 40}, requests=300, tiers=MIXED)
    busy |= {"output_tokens": {"uniform": [1, 120]}, "timeouts": {"total": 2.5}}
    source = document(
        traffic=[busy],
        policy="tiered",
        cluster={"replicas": 2},
        objectives={"ONLINE": {"ttft_p99": 0.2}},
    )
    return run(source, observe=True)


@pytest.fixture(scope="module")
def history(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "history.om"
    write_openmetrics(path, result, START)
    return path


@pytest.fixture(scope="module")
def scrapes(history):
    """Instant -> families, for some instants, each parsed as the scrape it stands for.

    The parser takes repeated series of a histogram in one text for copies, so it cannot be given all at once.
    """
    lines = history.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines[-1] == "# EOF\n"
    stamps = sorted({float(line.rsplit(" ", 1)[1]) for line in lines[:-1] if line[0] != "#"})
    assert 50 < len(stamps) <= MOST_INSTANTS
    texts = {stamp: [] for stamp in (*stamps[:: len(stamps) // 8], stamps[-1])}
    for line in lines[:-1]:
        if line.startswith("#"):
            for text in texts.values():
                text.append(line)
        elif (stamp := float(line.rsplit(" ", 1)[1])) in texts:
            texts[stamp].append(line)
    return {
        stamp: {
            family.name: family
            for family in text_string_to_metric_families("".join(text) + "# EOF\n")
        }
        for stamp, text in texts.items()
    }


def value(families, name, **labels):
    """Sum of the samples called `name` that have these labels."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, (name, labels)
    return sum(found)


def test_an_instant_parses_and_has_every_metric(scrapes, result):
    for families in scrapes.values():
        assert list(families) == [metric.name for metric in (*VLLM, *TWIN)]
        assert {name: f.type for name, f in families.items()} == {
            m.name: m.kind for m in (*VLLM, *TWIN)
        }
    assert max(scrapes) == START + result.simulated_ps / PS


def test_the_last_instant_has_the_figures_of_the_summary(scrapes, result):
    summary, last = summarize(result), scrapes[max(scrapes)]
    engine = summary["engine"]
    for name, figure in (
        ("vllm:num_preemptions_total", engine["preemptions"]),
        ("vllm:prompt_tokens_total", engine["prompt_tokens"]),
        ("vllm:generation_tokens_total", engine["generation_tokens"]),
        ("vllm:prefix_cache_queries_total", engine["prefix_query_tokens"]),
        ("vllm:num_requests_running", 0),
        ("vllm:num_requests_waiting", 0),
        ("twin:engine_steps_total", engine["steps"]),
        ("twin:recomputed_tokens_total", engine["recomputed_tokens"]),
        ("twin:padded_tokens_total", engine["padded_tokens"]),
    ):
        assert value(last, name) == figure, name
    assert engine["preemptions"] > 0
    assert value(last, "twin:engine_busy_seconds_total") == pytest.approx(
        engine["busy_share"] * 2 * summary["simulated_s"]
    )
    for tier, did in summary["policy_stats"].items():
        batches = sum(did["releases"].values())
        assert value(last, "twin:released_batches_total", tier=tier) == batches
        mean = value(last, "twin:released_requests_total", tier=tier) / batches if batches else None
        assert mean == (did["batch_size_mean"] and pytest.approx(did["batch_size_mean"]))
    for tier, figures in summary["tiers"].items():
        for outcome in ("completed", "timed_out") if figures["timed_out"] else ("completed",):
            assert (
                value(last, "twin:requests_total", tier=tier, outcome=outcome)
                == figures[outcome]
                > 0
            )
        assert value(last, "twin:good_requests_total", tier=tier) == figures["good"]
        for latency, name in (
            ("ttft", "time_to_first_token_seconds"),
            ("e2e", "e2e_request_latency_seconds"),
        ):
            samples = figures["samples"][latency]
            assert value(last, f"twin:{name}_count", tier=tier) == samples
            total = value(last, f"twin:{name}_sum", tier=tier)
            assert total / samples == pytest.approx(figures[f"{latency}_s"]["mean"])
    completed = summary["totals"]["completed"]
    for name in ("e2e_request_latency_seconds", "request_num_preemptions", "request_prompt_tokens"):
        assert value(last, f"vllm:{name}_count") == completed
    reasons = [
        value(last, "vllm:request_success_total", finished_reason=r) for r in ("stop", "length")
    ]
    assert sum(reasons) == completed
    assert (
        value(last, "vllm:request_success_total", finished_reason="abort")
        == summary["totals"]["timed_out"]
    )
    # vLLM observes a TPOT of 0 for a reply of one token; ours is of those that have one.
    ones = sum(r.outcome == "completed" and r.output_tokens == 1 for r in result.records)
    tpot = "request_time_per_output_token_seconds_count"
    assert value(last, f"vllm:{tpot}") - value(last, f"twin:{tpot}") == ones > 0


def test_between_the_ends_counters_and_buckets_count_what_had_happened(scrapes, result):
    for stamp in sorted(scrapes):
        families = scrapes[stamp]
        # A stamp of this century resolves a quarter of a microsecond; the instant itself is a sample's.
        at_ps = min(result.series.times_ps, key=lambda ps: abs(START + ps / PS - stamp))
        firsts = [
            r for r in result.records if r.first_token_ps is not None and r.first_token_ps <= at_ps
        ]
        for bound in ("0.1", "0.25", "1.0", "+Inf"):
            within = sum((r.first_token_ps - r.arrival_ps) / PS <= float(bound) for r in firsts)
            assert value(families, "vllm:time_to_first_token_seconds_bucket", le=bound) == within
        gaps = 0
        for r in firsts:
            token_ps = r.first_token_ps
            for gap_ps in r.itl_ps:
                token_ps += gap_ps
                gaps += token_ps <= at_ps
        assert value(families, "vllm:inter_token_latency_seconds_count") == gaps
        waiting = value(families, "vllm:num_requests_waiting")
        assert waiting == value(families, "vllm:num_requests_waiting_by_reason")
        by_tier = value(families, "twin:num_requests_held") + value(
            families, "twin:num_requests_ready"
        )
        assert waiting == by_tier


def test_labels_are_escaped(result, tmp_path):
    path = tmp_path / "odd.om"
    odd = 'a "b"\\c\nd'
    records = list(result.records)
    for record in records[:5]:
        record.tier = odd
    write_openmetrics(path, replace(result, kept=RecordTable(records)), 0.0)
    assert '"a \\"b\\"\\\\c\\nd"' in path.read_text(encoding="utf-8")


def test_a_folder_that_does_not_exist_is_bad_input(result, tmp_path):
    with pytest.raises(InputError, match="--openmetrics"):
        write_openmetrics(tmp_path / "no" / "history.om", result, 0.0)


@pytest.fixture(scope="module")
def server(history, tmp_path_factory):
    """Address of a Prometheus that serves the history."""
    binary, promtool = prometheus()
    folder = tmp_path_factory.mktemp("prometheus")
    backfill = [promtool, "tsdb", "create-blocks-from", "openmetrics", history, folder / "data"]
    subprocess.run(backfill, check=True, capture_output=True)
    config = folder / "prometheus.yml"
    config.write_text("", encoding="utf-8")
    url = f"http://127.0.0.1:{free_port()}"
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
               f"--web.listen-address={url.removeprefix('http://')}", "--storage.tsdb.retention.time=100y"]  # fmt: skip
    process = subprocess.Popen(
        [binary, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{url}/-/ready", timeout=1)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_a_real_prometheus_answers_about_the_run(server, result):
    def query(text):
        arguments = urllib.parse.urlencode(
            {"query": text, "time": START + result.simulated_ps / PS}
        )
        with urllib.request.urlopen(f"{server}/api/v1/query?{arguments}", timeout=10) as answer:
            [found] = json.load(answer)["data"]["result"]
        return float(found["value"][1])

    summary = summarize(result)
    seconds = int(summary["simulated_s"]) + 1
    assert query("sum(vllm:generation_tokens_total)") == summary["engine"]["generation_tokens"]
    assert query('sum(twin:requests_total{outcome="completed"})') == summary["totals"]["completed"]
    assert query(f"max_over_time(sum(vllm:num_requests_running)[{seconds}s:100ms])") == 16
    name, online = "twin:time_to_first_token_seconds", "{tier='ONLINE'}"
    mean = f"sum({name}_sum{online}) / sum({name}_count{online})"
    assert query(mean) == pytest.approx(summary["tiers"]["ONLINE"]["ttft_s"]["mean"])
    p90 = query(f"histogram_quantile(0.9, sum by (le) ({name}_bucket{online}))")
    exact = summary["tiers"]["ONLINE"]["ttft_s"]["p90"]
    assert exact / 3 < p90 < exact * 3  # it lies in the same bucket or the next
