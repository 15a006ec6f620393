"""Where the server is, and what is fetched from there."""

import http.server
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("aiohttp", reason="aiohttp is not installed in this environment")

from real.address import FetchError, base_of, fetch
from real.cli import app
from real.headers import Hidden, headers_of
from real.live_steps import trials
from real.server_metrics import read
from real.sweep import Limits, sweep, unseen
from real.told import first_model
from twin.errors import InputError

ROOT = Path(__file__).parents[1]
KEY = "sk-SECRET-4711"
SMALL = [
    "examples/compare-demo.yaml", "--set", "traffic.0.requests=3", "--set", "traffic.0.arrivals.rate=50",
]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "/v1", "/", "/v1/", "/models/one", "/models/one/v1"])
def test_one_rule_for_all_addresses(prefix):
    below = prefix.rstrip("/").removesuffix("/v1")
    assert base_of(f"http://h:8000{prefix}") == f"http://h:8000{below}"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost", "must be like http://127.0.0.1:8000"),
        ("ftp://h", "must be like"),
        ("http://h:99999", "a port of 1 to 65535"),
        ("http://h:x", "a port of 1 to 65535"),
        ("http://", "must be like"),
        ("http://a..b", "must be like"),
        ("http://h/a b", "must be like"),
        ("http://h\n", "must be like"),
        ("http://[bad", "must be like"),
        (f"http://bob:{KEY}@h", "--header"),
        (f"http://{KEY}@[bad", "--header"),
        (f"http://h/?key={KEY}", "VLLM_API_KEY or --header"),
    ],
)
def test_addresses_that_are_none_are_refused_without_their_secrets(url, words):
    with pytest.raises(InputError, match="--url") as caught:
        base_of(url)
    assert words in str(caught.value)
    assert KEY not in str(caught.value)


@contextmanager
def server(answers):
    """(url, [(path, headers)]) of a server with an answer, (status, headers, body), for each path."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, dict(self.headers)))
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            found = answers.get(self.path, (404, {}, b"no"))
            if isinstance(found, bytes):
                self.wfile.write(found)
                self.close_connection = True
                return
            status, headers, body = found
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}", seen
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


STREAM = (
    b"".join(
        b"data: %s\n\n"
        % json.dumps(
            {
                "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 1},
            }
        ).encode()
        for _ in range(1)
    )
    + b"data: [DONE]\n\n"
)
GOOD = (200, {"Content-Type": "text/event-stream"}, STREAM)
MODELS = (200, {}, b'{"data":[{"id":"m"}]}')


def replayed(url, *options):
    return CliRunner().invoke(app, ["replay", *SMALL, "--url", url, *options])


@pytest.mark.parametrize("end", ["", "/", "/v1"])
@pytest.mark.parametrize("options", [[], ["--model", "m"]])
def test_models_metrics_and_requests_are_below_one_address(end, options):
    answers = {"/one/v1/models": MODELS, "/one/v1/completions": GOOD}
    with server(answers) as (url, seen):
        done = replayed(f"{url}/one{end}", *options)
    assert done.exit_code == 0, done.output
    paths = {path for path, _ in seen}
    assert paths == {"/one/metrics", "/one/v1/completions"} | (
        set() if options else {"/one/v1/models"}
    )


def test_a_redirect_is_told_and_not_followed():
    with server({"/v1/models": MODELS}) as (other, heard):
        away = (302, {"Location": f"{other}/v1/models?x={KEY}"}, b"")
        with server({"/v1/models": away, "/metrics": away}) as (url, _):
            with pytest.raises(InputError, match="a redirect to") as caught:
                first_model(url, {"Authorization": f"Bearer {KEY}"})
            assert read(url, headers={"X-Api-Key": KEY}) is None
    assert heard == []
    assert other in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "models",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"data"',
        (200, {}, b"<html>"),
        (200, {}, b"[" * 100_000),
        (200, {}, b'{"data":[{"id":null}]}'),
        (200, {}, b'{"data":[]}'),
        (200, {}, b"\xff\xfe"),
    ],
)
def test_odd_lists_of_models_are_one_line(models):
    with server({"/v1/models": models}) as (url, _), pytest.raises(InputError, match="no list of"):
        first_model(url, {})


@pytest.mark.parametrize(
    "metrics",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nvllm:num_requests_running 1\n",
        (200, {}, b"vllm:num_requests_running NaN\nvllm:num_preemptions_total NaN\n"),
        (200, {}, b"vllm:num_requests_running 1\nvllm:num_preemptions_total NaN\n"),
    ],
)
def test_odd_metrics_lose_no_run(metrics, tmp_path):
    with server({"/metrics": metrics, "/v1/completions": GOOD}) as (url, _):
        done = replayed(url, "--model", "m", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["totals"]["completed"] == 3


def test_a_page_that_drips_ends_in_time():
    import time

    class Endless:
        length = None

        def read1(self, size):
            time.sleep(0.05)
            return b"x"

    from real.address import _read

    with pytest.raises(FetchError, match="did not end in time"):
        _read(Endless(), time.monotonic() + 0.2)
    with server({"/x": (500, {}, b"")}) as (url, _), pytest.raises(FetchError) as caught:
        fetch(f"{url}/x", {}, 5.0)
    assert caught.value.status == 500


def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server({"/v1/models": MODELS}) as (url, _):
        assert first_model(url, {}) == "m"


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_that_the_server_repeats_is_in_no_file_and_no_message(tmp_path):
    """A refusal with the key in it, as JSON and as text."""
    import pyarrow.parquet as pq

    refusal = json.dumps({"error": f"Incorrect API key provided: {KEY}"}).encode()
    answers = {"/v1/models": MODELS, "/v1/completions": (401, {}, refusal)}
    options = ["--header", f"Authorization: Bearer {KEY}", "--out", str(tmp_path)]
    with server(answers) as (url, seen):
        done = replayed(url, *options)
        made = CliRunner().invoke(
            app, ["calibrate", SMALL[0], "--tiny", "--url", url, "--out", str(tmp_path / "steps.json"),
                  "--header", f"Authorization: Bearer {KEY}"]
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert any(headers.get("Authorization") == f"Bearer {KEY}" for _, headers in seen)
    columns = pq.read_table(tmp_path / "requests.parquet").to_pydict()
    assert columns["error"] == ['{"error": "Incorrect API key provided: [hidden]"}'] * 3
    for path in tmp_path.iterdir():
        if path.suffix == ".parquet":
            assert KEY not in str(pq.read_table(path).to_pydict()), path
            assert KEY not in str(pq.read_metadata(path).metadata), path
        else:
            assert KEY not in path.read_text(), path
    assert KEY not in done.output
    assert made.exit_code == 2
    assert "[hidden]" in made.output
    assert KEY not in made.output


def test_what_is_hidden():
    headers = {"Authorization": f"Bearer {KEY}", "X-Tenant": "red", "X-Api-Key": "abc"}
    hide = Hidden(headers).hide
    assert hide(f"{KEY} and Bearer {KEY}, abc, red") == "[hidden] and [hidden], [hidden], red"
    # Ym9iOnB3U0VDUkVU is bob:pwSECRET.
    assert (
        Hidden({"Authorization": "Basic Ym9iOnB3U0VDUkVU"}).hide("bob pwSECRET") == "bob [hidden]"
    )
    assert Hidden({"X-Key": 'a"b'}).hide(json.dumps('a"b')) == '"[hidden]"'
    assert Hidden({}).hide("text") == "text"


def test_a_key_that_cannot_be_sent_is_refused_without_its_value():
    with pytest.raises(InputError, match="VLLM_API_KEY: must be printable") as caught:
        headers_of([], {"VLLM_API_KEY": f"{KEY}\nx"})
    assert KEY not in str(caught.value)


# --- the commands ---------------------------------------------------------------------------------


def test_requests_that_were_tried_again_are_in_the_report(tmp_path):
    options = ["--model", "m", "--out", str(tmp_path)]
    change = "cluster.retries={attempts: 3, outcomes: [refused], backoff: 0.01}"
    with server({"/v1/completions": (503, {}, b"busy")}) as (url, seen):
        done = replayed(url, *options, "--set", change)
    assert done.exit_code == 0, done.output
    assert sum(path == "/v1/completions" for path, _ in seen) == 9
    assert "after http 503 6" in (tmp_path / "report.html").read_text()
    assert "3 of 3 requests that failed were told: busy" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "engine.max_model_len=64", "--url", "http://127.0.0.1:9"], "engine.max_model_len 64"),
        (["--url", "foo"], "--url foo: must be like"),
        (["--url", "http://127.0.0.1:99999"], "a port of 1 to 65535"),
    ],
)  # fmt: skip
def test_calibrate_says_what_cannot_be_measured(options, words, tmp_path):
    out = str(tmp_path / "steps.json")
    done = CliRunner().invoke(
        app, ["calibrate", SMALL[0], "--tiny", "--model", "m", "--out", out, *options]
    )
    assert done.exit_code == 2, done.output
    assert words in done.output.replace("\n", " ")


def test_calibrate_finds_a_folder_that_cannot_be_written_at_once(tmp_path):
    (tmp_path / "steps.json").mkdir()
    done = CliRunner().invoke(
        app, ["calibrate", SMALL[0], "--tiny", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "steps.json")]
    )  # fmt: skip
    assert done.exit_code == 2
    assert "cannot be written: Is a directory" in done.output.replace("\n", " ")


def test_a_server_that_stalls_ends_a_calibration_in_time():
    import asyncio
    import time

    from real.live_steps import measure

    async def go():
        async def stall(reader, writer):
            await asyncio.sleep(60)

        made = await asyncio.start_server(stall, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
        limits = Limits(8, 2048, 4096, 100_000, 16)
        begun = time.monotonic()
        with pytest.raises(InputError, match=r"gave no whole reply in 0\.5 s"):
            await measure(url, "m", limits, 1000, 0.5, 0.5)
        return time.monotonic() - begun

    assert asyncio.run(go()) < 3


@pytest.mark.parametrize("longest", [24, 40, 64, 80, 100, 128])
@pytest.mark.parametrize("kind", ["mix", "chat"])
def test_unseen_workloads_fit_wherever_the_sweep_does(longest, kind):
    limits = Limits(8, 512, longest, 20_000, 16)
    for ask in unseen(limits, kind):
        assert ask.prompt_tokens >= 1
        assert ask.output_tokens >= 1
        assert ask.prompt_tokens + ask.output_tokens <= longest
    if longest >= 100:
        assert sweep(limits)


def test_no_batch_that_fits_is_said():
    with pytest.raises(InputError, match="which must be above 136 tokens"):
        list(trials(Limits(8, 2048, 64, 100_000, 16), 0.5))
    with pytest.raises(InputError, match=r"--load 0\.05 of 3,000 tokens of KV cache \(150\)"):
        list(trials(Limits(8, 2048, 4096, 3_000, 16), 0.05))


def test_help_does_not_promise_a_test_from_outside():
    command = [sys.executable, "-m", "real", "calibrate", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "With --url it has no such test" in " ".join(done.stdout.replace("│", "").split())
