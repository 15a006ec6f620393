"""A real server: `twin-real serve --tiny`, driven over HTTP, and ended in every way a server can end."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

import aiohttp
import psutil

from real.calibrate import Calibration, profile
from real.calls import Call
from real.cli_serve import tiny_document
from real.client import play
from real.demo import fetch_metrics, samples
from real.preflight import free_port
from real.prompts import Prompts
from real.replay import Manner, replay
from real.tiny import VOCABULARY, write_tiny_model
from twin.report.metric_names import SERVER, TWIN, VLLM
from twin.scenario import load_scenario
from twin.simulation import simulate
from twin.step_time.fit import StepFit
from twin.step_time.profiles import Provenance
from twin.workload.streams import Traffic, open_streams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[1]
SCENARIO = "examples/real-demo.yaml"
HOLD_S = 5.0
HOLD = [f"policy.tiers.BATCH.max_wait={HOLD_S}", "policy.tiers.BATCH.batch_size=6"]
LATE_S = 10.0
"""How much later than due something may be seen on a busy machine; tests in virtual time are exact."""
SLOTS = 2
"""max_num_seqs of the server that refuses bad hints."""
QUEUED = 60
"""Requests the API server takes at once."""


def share_a_core(pid):
    """Lets vLLM's engine core run where its worker is pinned.

    It waits for it in a loop that yields, and on two cores can keep the API server and the client here from running
    for seconds.
    """
    below = psutil.Process(pid).children(recursive=True)
    places = [one.cpu_affinity() for one in below if "VLLM::Worker" in one.name()]
    threads = [thread.id for one in below if "EngineCore" in one.name() for thread in one.threads()]
    for thread in threads if places else ():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, places[0])


class Live:
    """`twin-real serve` in a process of its own."""

    def __init__(self, folder, *options, changes=()):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{self.port}.log"
        command = [
            sys.executable,
            "-m",
            "real",
            "serve",
            SCENARIO,
            "--tiny",
            "--log",
            "--port",
            str(self.port),
        ]
        for change in changes:
            command += ["--set", change]
        env = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *options], cwd=ROOT, stderr=log, env=env)

    def text(self):
        return self.log.read_text(errors="replace")

    def wait(self):
        until = time.monotonic() + 220
        while "twin-real: ready" not in self.text():
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < until, self.text()[-3000:]
            time.sleep(0.2)
        share_a_core(self.process.pid)
        return self

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)

    def play(self, *calls):
        return asyncio.run(play(self.url, "tiny", calls))

    def meanwhile(self, calls, act, cut=False):
        """What the coroutine function `act` gave, begun when all of `calls` were in the engine; the replies to these,
        and how many of them were still going on when `act` was done. With `cut` the clients then hang up instead.
        """

        async def story():
            going = [asyncio.create_task(play(self.url, "tiny", [call])) for call in calls]
            while await asyncio.to_thread(self.in_engine) < len(calls):
                assert not all(one.done() for one in going)
                await asyncio.sleep(0.05)
            found = await act()
            left = [one for one in going if not one.done()]
            if cut:
                for one in left:
                    one.cancel()
                await asyncio.wait(going)
                return found, [], len(left)
            return found, [reply for [reply] in await asyncio.gather(*going)], len(left)

        return asyncio.run(story())

    def post(self, **request):
        [reply] = self.play(Call(0.0, "x", 2, stream=False, body=request))
        return reply

    def ask(self, requests):
        """(status, text) of each (path, body, headers), all at once."""

        async def one(client, path, body, headers=None):
            body = {"model": "tiny", **body}
            async with client.post(path, json=body, headers=headers) as answer:
                return answer.status, await answer.text()

        async def story():
            async with aiohttp.ClientSession(self.url) as client:
                return await asyncio.gather(*(one(client, *request) for request in requests))

        return asyncio.run(story())

    def metrics(self):
        return samples(fetch_metrics(self.url))

    def in_engine(self):
        """How many requests the engine has, as the API server sees it."""
        return json.loads(self.get("/twin/status")[1])["in_engine"]

    def get(self, path):
        from http.client import HTTPConnection

        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()


def value(metrics, name, **labels):
    return sum(v for found, v in metrics.get(name, ()) if labels.items() <= found.items())


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two servers, started together: one that takes defaults for bad hints, one that refuses them."""
    folder = tmp_path_factory.mktemp("live")
    first = Live(folder, "--", "--max-num-queued-reqs", str(QUEUED), changes=HOLD)
    slots = [f"engine.max_num_seqs={SLOTS}"]
    second = Live(folder, "--reject-bad-hints", "--drain", "60", changes=slots)
    try:
        yield first.wait(), second.wait()
    finally:
        for server in (first, second):
            server.stop()


@pytest.fixture
def server(both):
    return both[0]


@pytest.fixture
def strict(both):
    return both[1]


def settle(server, seconds=15.0):
    """The metrics once nothing is waiting or running, and the engine, which tells twice a second, tells no more."""
    until, last = time.monotonic() + seconds, None
    while True:
        found = server.metrics()
        name = "vllm:num_requests"
        busy = value(found, f"{name}_running") + value(found, f"{name}_waiting")
        busy += value(found, "twin:scheduler_requests") + server.in_engine()
        told = {name: found[name] for name in found if name.startswith("twin:")}
        if not busy and told == last:
            return found
        assert time.monotonic() < until, found
        last = told
        time.sleep(0.6)


# --- start ----------------------------------------------------------------------------------------


def test_ready_comes_after_the_warm_up_and_tells_the_policy(server):
    text = server.text()
    order = [
        text.index(f"twin-real: {what}")
        for what in ("starting", "up after", "warm-up: prompt of 128", "ready")
    ]
    assert order == sorted(order)
    expected = load_scenario(ROOT / SCENARIO, HOLD).policy_fingerprint
    assert f"scheduling policy {expected}" in text
    status, answer = server.get("/twin/status")
    assert status == 200
    assert json.loads(answer)["policy_fingerprint"] == expected
    assert server.get("/health")[0] == 200
    [(labels, one)] = server.metrics()["twin:policy_info"]
    assert (labels["policy_fingerprint"], labels["engine_version"], one) == (expected, "0.32.0", 1)


# --- requests -------------------------------------------------------------------------------------


def test_every_carrier_of_a_tier(server):
    before = settle(server)
    asyncio.run(_carriers(server.url))
    after = settle(server)
    name = "twin:requests_submitted_total"
    counts = {
        t: value(after, name, tier=t) - value(before, name, tier=t)
        for t in ("ONLINE", "BATCH", "OFFLINE")
    }
    assert counts == {"ONLINE": 1, "BATCH": 2, "OFFLINE": 3}


async def _carriers(url):
    ways = [
        ({"vllm_xargs": {"tier": "OFFLINE"}}, {}),
        ({}, {"X-Tier": "OFFLINE"}),
        ({}, {"X-Vllm-Priority": "2"}),
        ({"priority": 1}, {}),
        ({"vllm_xargs": {"tier": "BATCH"}, "priority": 2}, {}),
        ({}, {}),
    ]
    async with aiohttp.ClientSession(url) as client:

        async def one(body, headers):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 2, **body}
            async with client.post("/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()

        await asyncio.gather(*(one(*way) for way in ways))


def test_a_batch_waits_as_long_as_its_hold_and_no_longer(server):
    [alone] = server.play(Call(0.0, "x", 2, "BATCH"))
    assert HOLD_S <= alone.e2e_s < HOLD_S + LATE_S
    together = server.play(*(Call(0.0, f"{i}", 2, "BATCH") for i in range(6)))
    assert max(r.e2e_s for r in together) < HOLD_S - 0.1


def test_a_total_time_out_is_answered_with_its_reason(server):
    [reply] = server.play(Call(0.0, "total", 2000, "ONLINE", {"total_s": 1.2}))
    assert (reply.status, reply.finish_reason, reply.stop_reason) == (200, "abort", "timeout:total")
    assert 1.2 <= reply.end_s < 1.2 + LATE_S
    assert 0 < len(reply.token_s) < 2000
    assert value(settle(server), "twin:timeouts_total", reason="total") >= 1


def test_a_ttft_time_out_is_answered_with_its_reason(strict):
    """Replies to two that wait for a slot while others have all of them for seconds."""
    before = settle(strict)
    full = [Call(0.0, f"{i}" * 20, 2000, "ONLINE", stream=False) for i in range(SLOTS)]
    late = [Call(0.0, "late", 5, "ONLINE", {"ttft_s": 0.3}, stream=stream) for stream in (0, 1)]
    for _ in range(3):
        replies, _, left = strict.meanwhile(full, lambda: play(strict.url, "tiny", late), cut=True)
        if left == SLOTS:
            break
    assert left == SLOTS, "no reply before a slot was free"
    for reply in replies:
        found = (reply.status, reply.finish_reason, reply.stop_reason)
        assert found == (200, "abort", "timeout:ttft")
        assert 0.3 <= reply.e2e_s < 0.3 + LATE_S
        assert not reply.token_s
    after = settle(strict)
    for name, labels in (
        ("twin:timeouts_total", {"reason": "ttft"}),
        ("vllm:request_success_total", {"finished_reason": "abort"}),
    ):
        assert value(after, name, **labels) - value(before, name, **labels) >= 2


AT_ONCE = {"vllm_xargs": {"ttft_s": 1e-6}}
TALK = [{"role": "user", "content": "x"}]


def test_time_outs_in_the_form_of_each_api(server):
    """A deadline that has passed when the request arrives: no token, and every choice says why."""
    streamed = {"stream": True, **AT_ONCE}
    asked = [
        ("/v1/completions", {"prompt": ["a", "b", "c"], **streamed}),
        ("/v1/chat/completions", {"messages": TALK, "n": 3, **streamed}),
        ("/v1/responses", {"input": "x", **AT_ONCE}),
        ("/v1/responses", {"input": "x", **streamed}),
        ("/v1/messages", {"messages": TALK, "max_tokens": 5, **AT_ONCE}),
        ("/v1/messages", {"messages": TALK, "max_tokens": 5, **streamed}),
    ]
    replies = server.ask(asked)
    assert [status for status, _ in replies] == [200] * 6
    prompts, chat, response, response_events, message, message_events = (r for _, r in replies)
    for text, kind in ((prompts, "text_completion"), (chat, "chat.completion.chunk")):
        ends = [p for p in events(text) if any(c["finish_reason"] for c in p["choices"])]
        found = [(p["choices"][0]["index"], p["choices"][0]["stop_reason"]) for p in ends]
        assert sorted(found) == [(i, "timeout:ttft") for i in range(3)]
        assert {(p["object"], p["model"]) for p in ends} == {(kind, "tiny")}
        assert {p["id"].partition("-")[0] for p in ends} == {
            {"t": "cmpl", "c": "chatcmpl"}[kind[0]]
        }
    response = json.loads(response)
    why = {"reason": "timeout:ttft"}
    assert (response["status"], response["incomplete_details"]) == ("incomplete", why)
    last = events(response_events)[-1]
    assert (last["type"], last["response"]["incomplete_details"]) == ("response.incomplete", why)
    assert json.loads(message)["stop_reason"] == "timeout:ttft"
    deltas = [e["delta"] for e in events(message_events) if e["type"] == "message_delta"]
    assert [delta["stop_reason"] for delta in deltas] == ["timeout:ttft"]


def test_routes_that_hand_no_hints_on(server):
    """Those of headers anywhere, and those of a body in beam search, whose steps share one deadline."""
    before = settle(server)
    offline = {"X-Tier": "OFFLINE"}
    beams = {"prompt": "x", "use_beam_search": True, "n": 2, "ignore_eos": True}
    limit = {"vllm_xargs": {"tier": "OFFLINE", "total_s": 0.3}}
    replies = server.ask(
        [
            ("/invocations", {"prompt": "x", "max_tokens": 2}, offline),
            ("/v1/chat/completions/batch", {"messages": [TALK, TALK], "max_tokens": 2}, offline),
            ("/v1/completions", {"max_tokens": 3, **beams}, offline),
            ("/v1/completions", {"max_tokens": 1000, **beams, **limit}),
        ]
    )  # fmt: skip
    assert [status for status, _ in replies] == [200] * 4
    cut = json.loads(replies[-1][1])["choices"]
    assert {(c["finish_reason"], c["stop_reason"]) for c in cut} == {("abort", "timeout:total")}
    after = settle(server)
    name = "twin:requests_submitted_total"
    assert value(after, name, tier="ONLINE") == value(before, name, tier="ONLINE")
    assert value(after, name, tier="OFFLINE") - value(before, name, tier="OFFLINE") > 1 + 2 + 5


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_higher_tiers_overtake_and_everybody_gets_all(server):
    low = [Call(0.0, f"{i}" * 200, 300, "OFFLINE", stream=False) for i in range(24)]
    high = [Call(0.02 * i, f"h{i}" * 20, 20, "ONLINE") for i in range(10)]
    before = settle(server)
    overtaking, rest, overtaken = server.meanwhile(low, lambda: play(server.url, "tiny", high))
    replies = [*rest, *overtaking]
    assert all(
        (r.status, r.finish_reason, len(r.token_s)) == (200, "length", r.call.max_tokens)
        for r in replies
    )
    assert overtaken >= 8
    found = settle(server)
    name = "twin:preemptions_total"
    victims = {
        t: value(found, name, tier=t) - value(before, name, tier=t)
        for t in ("ONLINE", "BATCH", "OFFLINE")
    }
    assert victims["OFFLINE"] > 0
    assert victims["ONLINE"] == victims["BATCH"] == 0


def test_structured_output_and_chat_work(server):
    reply = server.post(structured_outputs={"regex": "[ab]{6}"}, max_tokens=20, ignore_eos=False)
    assert (reply.status, reply.finish_reason) == (200, "stop")
    assert len(reply.token_s) <= 8


# --- faults ---------------------------------------------------------------------------------------


def test_clients_that_leave_free_their_blocks(server):
    before = settle(server)
    assert value(before, "vllm:kv_cache_usage_perc") == 0
    leaving = [Call(0.0, f"{i}" * 100, 1500, "ONLINE") for i in range(12)]
    _, _, left = server.meanwhile(leaving, lambda: asyncio.sleep(0.2), cut=True)
    assert left == 12
    found = settle(server)
    assert value(found, "vllm:kv_cache_usage_perc") == 0
    assert value(found, "twin:kv_blocks_used") == 0
    name = "twin:requests_total"
    aborted, completed = (
        value(found, name, outcome=how) - value(before, name, outcome=how)
        for how in ("aborted", "completed")
    )
    # On a busy machine the engine may be ahead of what the clients have seen.
    assert aborted + completed == 12
    assert aborted >= 4


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"prompt": "x" * 3000}, 400),
        ({"vllm_xargs": "tier"}, 400),
        ({"vllm_xargs": {"tier": {"a": 1}, "tenant": None}}, 200),
        ({"vllm_xargs": {"tier": "\ud800", "tenant": "\ud800", "ttft_s": True}}, 200),
        ({"priority": 10**40}, 400),
        (
            {"vllm_xargs": {"tier": ["BATCH", 3], "ttft_s": "soon", "total_s": -5, "tenant": []}},
            200,
        ),
        ({"vllm_xargs": {"tier": "x" * 100_000, "ttft_s": 1e308, "tenant": 1.5}}, 200),
        ({"vllm_xargs": {"kv_transfer_params": "garbage"}}, 500),  # a key of vLLM's own
        ({"priority": -(2**40)}, 200),
    ],
)
def test_nonsense_never_hurts_the_engine(server, request_, status):
    assert server.post(**request_).status == status
    assert server.get("/health")[0] == 200


def test_bad_hints_are_refused_where_that_is_asked_for(strict):
    reply = strict.post(vllm_xargs={"tier": "NONE"})
    assert reply.status == 400
    assert "must be ONLINE, BATCH, OFFLINE, got 'NONE'" in reply.error
    assert strict.post(vllm_xargs={"tier": "BATCH"}).status == 200


def test_more_requests_than_the_queue_takes_are_turned_away(server):
    before = settle(server)
    replies = server.play(*(Call(0.0, f"{i}", 8, "ONLINE", stream=False) for i in range(500)))
    statuses = [r.status for r in replies]
    assert statuses.count(200) + statuses.count(503) == 500
    assert statuses.count(200) >= QUEUED
    assert statuses.count(503) > 0
    found = settle(server)
    name = "vllm:admission_rejections_total"
    assert value(found, name) - value(before, name) == statuses.count(503)


# --- replay ---------------------------------------------------------------------------------------


def test_a_trace_of_hashes_meets_the_prefix_cache_as_in_the_twin(server, tmp_path):
    rng, rows = random.Random(3), []
    for i in range(24):
        group = rng.randrange(4)
        rows.append(
            {"timestamp": 300 * i, "input_length": 512 + rng.randint(1, 400), "output_length": 4,
             "hash_ids": [group, 100 + i]}
        )  # fmt: skip
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tiny_model(tmp_path)
    line = StepFit(((1, 1e-3), (2048, 9e-3)), ((0, 0.0), (8, 1e-4)), 0.0, 1e-6, 1e-6, {}, 1.0, 1)
    about = Provenance(
        "tiny", "cpu", 1, "float32", "auto", "vLLM", "guess", "own", "2026-01-01", "x", {}, ()
    )
    fit = Calibration(line, (0.0, 0.0), 1, 0.0, {"all": 0.0}, 0.0, {})
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps(profile(fit, about, 2048, 8, 2048).to_dict()))
    loaded = load_scenario(ROOT / SCENARIO, [f"traffic=[{{trace: {trace}}}]"])
    twin = load_scenario(tiny_document(loaded, tmp_path, str(steps)))
    before = settle(server)

    async def go():
        traffic = Traffic(open_streams(twin.traffic, 1))
        # A seed of its own: nothing that was sent before is found again.
        return await replay(server.url, "tiny", traffic, Prompts(VOCABULARY, 77), Manner())

    done = asyncio.run(go())
    assert [one.record.outcome for one in done.measured] == ["completed"] * 24
    assert [one.record.prompt_tokens for one in done.measured] == [r["input_length"] for r in rows]
    after = settle(server)
    hits, queries = (
        value(after, name) - value(before, name)
        for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    )
    records = list(simulate(twin).records)
    told = sum(r.prefix_hit_tokens for r in records) / sum(r.prefix_query_tokens for r in records)
    assert hits / queries == pytest.approx(told, abs=0.02)
    assert 0.2 < told < 0.9
    # The server tells each request's share, too.
    assert sum(one.record.prefix_hit_tokens for one in done.measured) == hits


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_are_those_that_are_documented(server):
    found = settle(server)
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", fetch_metrics(server.url), re.MULTILINE))
    documented = {metric.exposed: metric for metric in (*TWIN, *SERVER)}
    for name, kind in types.items():
        if not name.startswith("twin:"):
            continue
        metric = documented[name]
        assert kind == metric.kind
        suffix = "_bucket" if kind == "histogram" else ""
        for labels, _ in found[name + suffix]:
            assert set(labels) - {"le"} == {"model_name", "engine", *metric.labels}
        if kind == "histogram":
            bounds = {float(labels["le"]) for labels, _ in found[name + suffix]}
            assert bounds == {*metric.buckets, float("inf")}
    assert {metric.exposed for metric in SERVER} <= set(types)
    assert {metric.exposed for metric in VLLM} <= set(types)
    seconds = value(found, "twin:batching_wait_seconds_total", tier="BATCH")
    jobs = value(found, "twin:released_requests_total", tier="BATCH")
    assert 0 < seconds / jobs < HOLD_S + LATE_S


def test_what_went_in_came_out(server):
    found = settle(server)
    for tier in ("ONLINE", "BATCH", "OFFLINE"):
        gone = value(found, "twin:requests_total", tier=tier)
        assert value(found, "twin:requests_submitted_total", tier=tier) == gone > 0
        for state in ("held", "ready", "running"):
            assert value(found, f"twin:num_requests_{state}", tier=tier) == 0
    assert value(found, "twin:policy_errors_total") == 0


# --- the end --------------------------------------------------------------------------------------


def test_a_signal_drains(strict):
    """What was accepted on any route is answered; a client that sends half a request holds nothing up."""
    calls = [Call(0.0, f"{i}" * 50, 100, "ONLINE", stream=i % 2 == 0) for i in range(12)]
    late = [Call(0.2 + 0.05 * i, "late", 5) for i in range(10)]
    other = {"prompt": "x", "max_tokens": 800, "ignore_eos": True}
    name = "twin:requests_submitted_total"
    before = value(settle(strict), name)

    async def story():
        half = await asyncio.open_connection("127.0.0.1", strict.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        half[1].write(head.encode())
        playing = asyncio.create_task(play(strict.url, "tiny", calls))
        others = asyncio.create_task(asyncio.to_thread(strict.ask, [("/invocations", other)] * 2))
        while value(await asyncio.to_thread(strict.metrics), name) < before + len(calls) + 2:
            assert not (playing.done() and others.done())
            await asyncio.sleep(0.1)
        strict.process.send_signal(signal.SIGTERM)
        refused = await play(strict.url, "tiny", late)
        status = await asyncio.to_thread(strict.process.wait, 60)
        return await playing, refused, await others, status, half

    replies, refused, others, status, _ = asyncio.run(story())
    assert all((r.status, len(r.token_s)) == (200, 100) for r in replies)
    assert {r.status for r in refused} <= {503, 0}
    ends = [json.loads(text)["usage"]["completion_tokens"] for _, text in others]
    assert ends == [800] * 2
    assert status == 0
    assert "draining" in strict.text()


def test_a_killed_engine_ends_the_server_with_the_reason(server):
    [api] = psutil.Process(server.process.pid).children()
    [core] = [
        child
        for child in api.children()
        if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
    ]
    workers = core.children(recursive=True)
    core.kill()
    assert server.process.wait(40) == 1
    [told] = re.findall(r"^error: .*", server.text(), re.MULTILINE)
    assert "died unexpectedly" in told or "the engine's process is gone" in told
    assert server.get("/health")[0] in (0, 503)
    assert not psutil.pid_exists(api.pid)
    assert psutil.wait_procs(workers, timeout=20)[1] == []


# --- several models -------------------------------------------------------------------------------


def test_two_models_share_a_budget_that_holds_one(tmp_path):
    """`twin-real models`: the second one asked for makes the first one go, after its last reply."""
    other = tmp_path / "other.yaml"
    other.write_text((ROOT / SCENARIO).read_text().replace("name: real-demo", "name: other"))
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "real", "models", SCENARIO, str(other), "--tiny"]
    command += ["--budget", "1200MB", "--port", str(port), "--load", "real-demo"]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stderr=file)
    try:
        until = time.monotonic() + 150
        while "real-demo: ready at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert pids
        long = Call(0.0, "x" * 100, 1500, stream=False, body={"model": "real-demo"})
        short = Call(0.5, "y", 3, stream=False, body={"model": "other"})
        first, second = asyncio.run(play(url, "", [long, short], timeout_s=200))
        assert (first.status, len(first.token_s)) == (200, 1500), (first.error, log.read_text())
        assert (second.status, len(second.token_s)) == (200, 3), (second.error, log.read_text())
        assert not any(psutil.pid_exists(pid) for pid in pids)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
