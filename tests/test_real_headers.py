"""A server that wants to know who asks: the key and headers of a user's own."""

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

from real.headers import headers_of
from real.null_server import answer
from real.server_metrics import read
from real.told import first_model
from twin.errors import InputError

KEY = "sesame-4711"


@contextmanager
def locked_server(key=KEY):
    """(url, headers of each request) of a server that answers to its key only."""
    seen = []
    ready, stop = threading.Event(), None
    place = []

    async def guarded(request):
        seen.append(request.headers)
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        if request.path == "/metrics":
            return web.Response(text="vllm:num_requests_running 3.0\n")
        return await answer(request)

    async def serve():
        nonlocal stop
        stop = asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", guarded)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        place.extend([site._server.sockets[0].getsockname()[1], asyncio.get_running_loop()])
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{place[0]}", seen
    finally:
        place[1].call_soon_threadsafe(stop.set)
        thread.join(10)


def replay(url, tmp_path, *options, key=None, monkeypatch=None):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    command = [
        sys.executable, "-m", "real", "replay", "examples/compare-demo.yaml", "--url", url, "--set",
        "traffic.0.requests=5", "--set", "traffic.0.arrivals.rate=100", "--out", str(tmp_path / "out"),
        "--force", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", ["environment", "option"])
def test_a_key_opens_the_server_and_is_written_nowhere(tmp_path, monkeypatch, way):
    options = [] if way == "environment" else ["--header", f"Authorization: Bearer {KEY}"]
    options += ["--header", "X-Tenant: red"]
    with locked_server() as (url, seen):
        done = replay(
            url,
            tmp_path,
            *options,
            key=KEY if way == "environment" else "another",
            monkeypatch=monkeypatch,
        )
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert facts["model"] == "tiny"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["totals"]["completed"] == 5
    assert seen
    assert all(headers["X-Tenant"] == "red" for headers in seen)
    assert KEY not in done.stdout + done.stderr
    for path in (tmp_path / "out").iterdir():
        assert KEY.encode() not in path.read_bytes(), path


def test_without_the_key_one_is_told_what_to_do(tmp_path, monkeypatch):
    with locked_server() as (url, _):
        done = replay(url, tmp_path, monkeypatch=monkeypatch)
    assert done.returncode == 2
    assert "401" in done.stderr
    assert "VLLM_API_KEY in the environment, or with --header" in done.stderr


def test_models_and_metrics_are_read_with_it():
    headers = headers_of([f"Authorization: Bearer {KEY}"], {})
    with locked_server() as (url, _):
        assert first_model(url, headers) == "tiny"
        assert read(url, headers=headers).values["running"] == 3
        assert read(url) is None
        with pytest.raises(InputError, match="401"):
            first_model(url, {})


def test_headers_of():
    assert headers_of(None, {}) == {}
    assert headers_of(["a:b", "X-Y:  z: w "], {}) == {"a": "b", "X-Y": "z: w"}
    assert headers_of([], {"VLLM_API_KEY": " k "}) == {"Authorization": "Bearer k"}
    assert headers_of(["authorization: mine"], {"VLLM_API_KEY": "k"}) == {"authorization": "mine"}


@pytest.mark.parametrize(
    "given", [KEY, ": x", "a b: c", "Host: x", "Content-Length: 3", f"Key: {KEY}\nEvil: 1", f"Key: {KEY}é"]
)  # fmt: skip
def test_headers_that_cannot_be_sent_are_refused_without_their_value(given):
    with pytest.raises(InputError, match="--header") as caught:
        headers_of([given], {})
    assert KEY not in str(caught.value)
