"""`twin trace from-prometheus`: streams from what a real Prometheus scraped, and what is said when there are none."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.runs import document
from twin.cli import app
from twin.clock import to_seconds
from twin.scenario import load_scenario
from twin.workload import prometheus as pure
from twin.workload.streams import Traffic, open_streams

START = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
HOURS = 6
SCRAPE_S = 30
BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""vLLM's buckets for max_model_len 8192."""

RATES = [[0, 0.5], [3600, 2], [7200, 1], [10_800, 0], [14_400, 3]]


def twin(*arguments):
    return CliRunner().invoke(app, ["trace", "from-prometheus", *map(str, arguments)])


def lines(text):
    """What a terminal wraps, unwrapped."""
    return " ".join(text.split())


# --- a server with a past -----------------------------------------------------------------


def true_requests():
    """(seconds after START, prompt tokens, output tokens) of six hours on two servers."""
    shape = {"preset": "azure-2023-conv", "requests": 1}
    known = load_scenario(
        document(engine={"max_model_len": 8192, "num_gpu_blocks_override": 9999}, traffic=[shape])
    )
    lengths = known.traffic[0].lengths
    stream = {
        "arrivals": {"process": "poisson", "rate": {"steps": RATES}},
        "prompt_tokens": {"quantiles": [list(point) for point in lengths.prompt.points]},
        "output_tokens": {"quantiles": [list(point) for point in lengths.output.points]},
        "duration": HOURS * 3600,
    }
    traffic = Traffic(open_streams(load_scenario(document(traffic=[stream])).traffic, 7))
    while traffic.next_ps() is not None:
        request = traffic.pop().request
        yield to_seconds(request.arrival_ps), request.prompt_tokens, request.output_tokens


def open_metrics(requests, model, colon=":", engines=2):
    """What a scraper saw of these requests, every SCRAPE_S seconds, as text to backfill from."""
    steps = HOURS * 3600 // SCRAPE_S + 1
    text = []
    for metric, column in (("request_prompt_tokens", 1), ("request_generation_tokens", 2)):
        name = f"vllm{colon}{metric}"
        text.append(f"# TYPE {name} histogram")
        for engine in range(engines):
            mine = requests[engine::engines]
            for bound in (*BOUNDS, float("inf")):
                le = "+Inf" if bound == float("inf") else f"{bound:.1f}"
                counts = in_steps(mine, lambda r, bound=bound, c=column: r[c] <= bound, steps)
                text += samples(
                    f"{name}_bucket", f'engine="{engine}",model_name="{model}",le="{le}"', counts
                )
            for suffix, weigh in (("count", lambda r: 1), ("sum", lambda r, c=column: r[c])):
                text += samples(f"{name}_{suffix}", f'engine="{engine}",model_name="{model}"',
                                in_steps(mine, weigh, steps))  # fmt: skip
    name = f"vllm{colon}request_success"
    text.append(f"# TYPE {name} counter")
    for engine in range(engines):
        mine = requests[engine::engines]
        for reason in ("stop", "length"):
            kept = [r for i, r in enumerate(mine) if (i % 10 == 0) == (reason == "length")]
            labels = f'engine="{engine}",model_name="{model}",finished_reason="{reason}"'
            text += samples(f"{name}_total", labels, in_steps(kept, lambda r: 1, steps))
    return text


def in_steps(requests, weigh, steps):
    """Cumulated weights at each scrape."""
    added = Counter()
    for request in requests:
        added[int(-(-request[0] // SCRAPE_S))] += weigh(request)
    return list(accumulate(added[i] for i in range(steps)))


def samples(name, labels, values):
    return [f"{name}{{{labels}}} {v} {START + i * SCRAPE_S}" for i, v in enumerate(values)]


class Target(BaseHTTPRequestHandler):
    """A vLLM server whose colons the exporter has replaced: 20 more requests at each scrape."""

    scrapes = 0

    def do_GET(self):
        Target.scrapes += 1
        n = 20 * Target.scrapes
        text = f'vllm_request_success_total{{model_name="live",finished_reason="stop"}} {n}\n'
        for metric, bound in (("prompt", 100), ("generation", 50)):
            name = f"vllm_request_{metric}_tokens"
            text += f'{name}_bucket{{model_name="live",le="{bound}.0"}} {n // 2}\n'
            text += f'{name}_bucket{{model_name="live",le="{2 * bound}.0"}} {n}\n'
            text += f'{name}_bucket{{model_name="live",le="+Inf"}} {n}\n'
            text += f'{name}_sum{{model_name="live"}} {n * bound}\n{name}_count{{model_name="live"}} {n}\n'
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def requests():
    return list(true_requests())


@pytest.fixture(scope="module")
def server(tmp_path_factory, requests):
    """Address of a Prometheus with six hours of January 2026 in it, which also scrapes `Target`."""
    binary = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    promtool = binary and shutil.which("promtool", path=str(Path(binary).parent))
    if promtool is None:
        why = "no Prometheus: install the package prometheus, or name its binary in the variable PROMETHEUS"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    folder = tmp_path_factory.mktemp("prometheus")
    past = folder / "past.txt"
    later = [(t, 30, 4) for t in range(0, 3600, 40)]
    text = [*open_metrics(requests, "llama"), "# EOF"]
    past.write_text("\n".join(text) + "\n")
    backfill = [promtool, "tsdb", "create-blocks-from", "openmetrics", past, folder / "data"]
    subprocess.run(backfill, check=True, capture_output=True)
    other = [line.replace("vllm:", "vllm_") for line in open_metrics(later, "other", engines=1)]
    moved = [shifted(line, 86_400) for line in other]
    past.write_text("\n".join([*moved, "# EOF"]) + "\n")
    subprocess.run(backfill, check=True, capture_output=True)
    both = [shifted(line, 10 * 86_400) for model in ("a", "b") for line in counters(later, model)]
    past.write_text("\n".join(["# TYPE vllm:request_success counter", *both, "# EOF"]) + "\n")
    subprocess.run(backfill, check=True, capture_output=True)
    with serving(Target) as target:
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {
                    "job_name": "vllm",
                    "static_configs": [{"targets": [target.removeprefix("http://")]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        log = (folder / "log").open("wb")
        process = subprocess.Popen(
            [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             "--storage.tsdb.retention.time=100y", f"--web.listen-address={address}"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_until_ready(f"http://{address}", process, folder / "log")
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)
            log.close()


def counters(requests, model):
    return [
        line
        for line in open_metrics(requests, model, engines=1)
        if line.startswith("vllm:request_success")
    ]


def shifted(line, seconds):
    if line.startswith("#"):
        return line
    head, _, stamp = line.rpartition(" ")
    return f"{head} {int(stamp) + seconds}"


def wait_until_ready(url, process, log):
    for _ in range(200):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(log.read_text())


END = "2026-01-01T06:00:00Z"


@pytest.fixture(scope="module")
def made(server, tmp_path_factory):
    """(file, stream) of the six hours."""
    path = tmp_path_factory.mktemp("made") / "live.yaml"
    answer = twin(server, "--end", END, "--step", "10m", "--out", path)
    assert answer.exit_code == 0, answer.output
    [stream] = yaml.safe_load(path.read_text())["traffic"]
    return path, stream


def test_rates_are_those_of_the_requests(made, requests):
    path, stream = made
    assert (
        f"# {len(requests):,} requests in 21,600 s to 2026-01-01T06:00:00+00:00" in path.read_text()
    )
    steps = stream["arrivals"]["rate"]["steps"]
    counts = Counter(int(-(-(-(-t // SCRAPE_S) * SCRAPE_S) // 600)) - 1 for t, *_ in requests)
    assert [t for t, _ in steps] == list(range(0, 21_600, 600))
    for t, rate in steps:
        assert rate * 600 == pytest.approx(counts[t // 600], rel=1e-4)
    assert steps[18][1] == 0
    assert stream["arrivals"]["rate"]["repeat"] == stream["duration"] == 21_600


def test_lengths_are_those_of_the_requests(made, requests):
    for key, column in (("prompt_tokens", 1), ("output_tokens", 2)):
        points = made[1][key]["quantiles"]
        true = sorted(r[column] for r in requests)
        assert pure.mean_of(points) == pytest.approx(sum(true) / len(true), rel=0.01)
        for bound in BOUNDS:
            share = sum(value <= bound for value in true) / len(true)
            here = [p for p, value in points if value == bound + 0.5]
            assert not here or any(abs(p - share) < 1e-4 for p in here)
        assert points[0][0] == 0
        assert points[-1][0] == 1


def test_a_scenario_runs_with_the_file(made):
    options = [f"traffic={made[0]}", "traffic.0.requests=30"]
    loaded = load_scenario(
        document(engine={"num_gpu_blocks_override": 9999, "max_model_len": 8192}), options
    )
    traffic = Traffic(open_streams(loaded.traffic, 1))
    assert sum(1 for _ in iter(traffic.next_ps, None) if traffic.pop()) == 30


def test_a_replaced_colon_is_taken(server):
    answer = twin(
        server,
        "--end",
        "2026-01-02T01:00:00Z",
        "--window",
        "1h",
        "--step",
        "30m",
        "--tier",
        "BATCH",
    )
    assert answer.exit_code == 0, answer.output
    [stream] = yaml.safe_load(answer.stdout)["traffic"]
    assert stream["tier"] == "BATCH"
    assert [rate for _, rate in stream["arrivals"]["rate"]["steps"]] == pytest.approx(
        [1 / 40] * 2, rel=0.05
    )
    # 30 tokens lie between the bounds 20 and 50, 4 between 2 and 5.
    assert (
        stream["prompt_tokens"]["quantiles"][0][1],
        stream["prompt_tokens"]["quantiles"][-1][1],
    ) == (20.5, 50.5)
    assert pure.mean_of(stream["output_tokens"]["quantiles"]) == pytest.approx(4, rel=0.02)


def test_what_is_scraped_now(server):
    for _ in range(100):
        answer = twin(server, "--window", "15s", "--step", "15s", "--cv", "2")
        if answer.exit_code == 0:
            break
        time.sleep(0.2)
    assert answer.exit_code == 0, answer.output
    [stream] = yaml.safe_load(answer.stdout)["traffic"]
    assert (stream["arrivals"]["process"], stream["arrivals"]["cv"]) == ("gamma", 2)
    assert stream["arrivals"]["rate"]["steps"][0][1] > 1
    assert pure.mean_of(stream["prompt_tokens"]["quantiles"]) == pytest.approx(100, rel=0.02)
    assert pure.mean_of(stream["output_tokens"]["quantiles"]) == pytest.approx(50, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--end", "2025-12-01T00:00:00Z"], "no series .* in the 21,600 s before .* and none of vLLM at all"),
        (["--end", "2026-01-01T03:50:00Z", "--window", "30m"], "no request ended in the 1,800 s before"),
        (["--end", "2026-01-11T01:00:00Z"], "requests of several models: a, b; choose one with --match model_name=a"),
        (["--end", END, "--match", "model_name=qwen"], "with model_name=qwen; there are some of model llama"),
        (["--end", END, "--step", "15s"], "has no two samples within any step of 15 s; make --step longer"),
        (["--end", "2026-01-11T01:00:00Z", "--match", "model_name=b"], "prompt_tokens: no samples in the window"),
    ],
)  # fmt: skip
def test_what_a_server_does_not_have(server, options, message):
    refused(twin(server, *options), message)


def refused(answer, message):
    assert answer.exit_code == 2, answer.output
    assert answer.stdout == ""
    told = lines(answer.stderr)
    assert re.search(message, told), told
    assert "Traceback" not in told


# --- servers that are none ----------------------------------------------------------------


def answering(status, body, delay=0.0):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            time.sleep(delay)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *arguments):
            pass

    return Handler


BAD_QUERY = {"status": "error", "errorType": "bad_data", "error": "query must not be empty"}


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>Grafana</html>", "/api/v1/query: the answer is not that of a Prometheus: '<html>Grafana</html>'"),
        (200, b"[1, 2]", "the answer is not that of a Prometheus"),
        (200, {"status": "success", "data": {"resultType": "scalar"}}, "not as Prometheus gives it"),
        (404, b"404 page not found", "404 Not Found; is it a Prometheus"),
        (401, b"no", "401 Unauthorized"),
        (422, BAD_QUERY, "bad_data: query must not be empty"),
        (200, BAD_QUERY, "bad_data: query must not be empty"),
        (200, b"\xff\xfe", "the answer is not that of a Prometheus"),
    ],
)  # fmt: skip
def test_an_address_that_is_no_prometheus(status, body, message):
    with serving(answering(status, body)) as url:
        refused(twin(url), message)


def test_a_server_that_does_not_answer():
    refused(twin(f"http://127.0.0.1:{free_port()}"), "cannot be reached: .*refused")
    with serving(answering(200, b"", delay=1.0)) as url:
        refused(twin(url, "--timeout", "0.2"), "no answer within 0.2 s; raise --timeout")


def test_headers_and_passwords_are_sent_and_not_shown():
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.headers["Authorization"], self.headers["X-Scope-OrgID"]))
            self.send_response(401)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with serving(Handler) as url:
        plain = twin(
            url, "--header", "Authorization: Bearer abc", "--header", "X-Scope-OrgID: team"
        )
        hidden = twin(url.replace("http://", "http://me:p%40ss@"))
    assert seen == [("Bearer abc", "team"), ("Basic bWU6cEBzcw==", None)]
    assert "abc" not in plain.stderr
    assert "p%40ss" not in hidden.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["ftp://x"], "'ftp://x' is no address; write http://HOST:PORT"),
        (["localhost:9090"], "is no address"),
        (["http://x", "--window", "6"], "--window 6: write a length of time"),
        (["http://x", "--window", "0s"], "must be above 0"),
        (["http://x", "--step", "5s"], "--step 5s: must be at least 15s"),
        (["http://x", "--step", "7h"], "--step 7h: must be at most --window"),
        (["http://x", "--window", "30d", "--step", "1m"], "makes 43,200 steps"),
        (["http://x", "--end", "yesterday"], "--end yesterday: write 2026"),
        (["http://x", "--end", "nan"], "--end nan: write 2026"),
        (["http://x", "--end", "2026-01-01T00:00:00"], "has no time zone"),
        (["http://x", "--match", "model"], "--match model: write LABEL=VALUE"),
        (["http://x", "--match", "a-b=c"], "'a-b' is no name of a label"),
        (["http://x", "--header", "Token"], "--header Token: write NAME:VALUE"),
    ],
)
def test_options_that_are_wrong(options, message):
    refused(twin(*options), message)


# --- from answers to a stream -------------------------------------------------------------


def buckets(counts, bounds=("10", "20", "+Inf")):
    return [
        {"metric": {"le": le}, "value": [0, str(n)]} for le, n in zip(bounds, counts, strict=True)
    ]


def sum_of(tokens):
    return [{"metric": {}, "value": [0, str(tokens)]}]


def test_the_mean_decides_where_lengths_lie_in_their_buckets():
    for tokens in (850, 900, 1200):
        found = pure.histogram("x", buckets([50, 100, 100]), sum_of(tokens))
        points = pure.quantiles(found)
        assert pure.mean_of(points) == pytest.approx(tokens / 100, rel=1e-3)
        assert [p for p, value in points if value == 10.5] == [0.5]
        assert points[-1] == [1.0, 20.5]


def test_lengths_beyond_the_last_bucket_are_told():
    found = pure.histogram("x", buckets([50, 90, 100]), sum_of(1500))
    seen = pure.Observed(0.0, 60, (100.0, None), found, found)
    assert pure.quantiles(found)[-1] == [1.0, 50.5]
    told = pure.doubts(seen)
    assert told[0] == "no samples for 1 of 2 steps; they are taken as without requests"
    assert told[1].startswith("10.0 % of the prompt lengths lie beyond the last bucket (20 tokens)")


def test_a_mean_that_no_length_allows_is_told():
    found = pure.histogram("x", buckets([0, 100, 100]), sum_of(300))
    assert (
        "allow no mean prompt length of 3 tokens"
        in pure.doubts(pure.Observed(0.0, 60, (1.0,), found, found))[0]
    )


@pytest.mark.parametrize(
    ("counts", "tokens", "message"),
    [
        ([50, "NaN", 100], 900, "increase for le=20 is NaN"),
        ([0, 0, 0], 0, "no request in the window"),
        ([50, 80, 100], "NaN", "no request in the window"),
    ],
)
def test_histograms_that_make_no_stream(counts, tokens, message):
    with pytest.raises(pure.UnusableError, match=message):
        pure.histogram("x", buckets(counts), sum_of(tokens))


def test_steps_without_a_sample_and_not_a_number_are_missing():
    series = [{"metric": {}, "values": [[60, "5"], [120, "NaN"], [240, "7.5"]]}]
    assert pure.step_counts(series, 0.0, 60, 5) == (5.0, None, None, 7.5, None)


def test_labels_are_quoted():
    assert pure.selector("x", {"a": 'q"\\\n'}) == '{__name__=~"vllm[:_]x",a="q\\"\\\\\\n"}'
