"""Models under a memory budget, and their files in the page cache."""

import json
import subprocess
import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.cli_models import bytes_of
from real.model_server import Models, Offer, front, memory_of, serve_front
from real.models import ModelCache, prefetch, prefetch_in_background, server_cache, weight_bytes
from real.server import Server, Stopped
from twin.errors import InputError
from twin.scenario import load_scenario

SIZES = {"a": 4, "b": 3, "c": 3, "d": 6, "huge": 11}


class Machine:
    """Ten units of memory in which models are loaded."""

    def __init__(self, sleeps=False):
        self.loaded, self.asleep, self.log = {}, set(), []
        self.can_sleep = sleeps
        self.cache = ModelCache(
            10, SIZES.__getitem__, self.load, self.unload, self.sleep, self.wake
        )

    def load(self, name):
        self.log.append(f"load {name}")
        self.loaded[name] = SIZES[name]
        assert sum(self.loaded.values()) <= 10
        return name

    def unload(self, model):
        self.log.append(f"unload {model}")
        self.loaded.pop(model, None)
        self.asleep.discard(model)

    def sleep(self, model):
        if self.can_sleep:
            self.asleep.add(model)
            del self.loaded[model]
        return self.can_sleep

    def wake(self, model):
        self.log.append(f"wake {model}")
        self.asleep.remove(model)
        self.loaded[model] = SIZES[model]
        assert sum(self.loaded.values()) <= 10


def test_the_least_recently_used_makes_room():
    machine = Machine()
    for name in "abcab":
        machine.cache.get_or_load(name)
    assert machine.log == ["load a", "load b", "load c"]
    assert machine.cache.names == ["c", "a", "b"]
    machine.cache.get_or_load("d")  # 6: c and a go, b stays
    assert machine.log[3:] == ["unload c", "unload a", "load d"]
    assert machine.cache.used_bytes == 9


def test_a_model_larger_than_the_budget_evicts_nobody():
    machine = Machine()
    machine.cache.get_or_load("a")
    with pytest.raises(ValueError, match=r"huge takes 11 bytes, the budget is 10; raise"):
        machine.cache.get_or_load("huge")
    assert machine.cache.names == ["a"]


def test_a_failed_load_is_not_kept():
    def load(name):
        raise OSError("no such file")

    cache = ModelCache(10, SIZES.__getitem__, load, print)
    with pytest.raises(OSError, match="no such file"):
        cache.get_or_load("a")
    assert (cache.names, cache.used_bytes) == ([], 0)


def test_sleeping_models_wake_up_instead_of_loading():
    machine = Machine(sleeps=True)
    for name in "adabd":
        machine.cache.get_or_load(name)
    assert machine.log == ["load a", "load d", "load b", "wake d"]
    assert machine.cache.asleep == ["a"]
    machine.cache.close()
    assert (machine.loaded, machine.asleep) == ({}, set())


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans())), st.booleans())
def test_the_budget_holds_and_nothing_is_lost(steps, sleeps):
    machine = Machine(sleeps)
    for name, evicts in steps:
        if evicts:
            held = name in machine.cache.names
            assert machine.cache.evict(name) == held
        else:
            assert machine.cache.get_or_load(name) == name
            assert machine.cache.names[-1] == name
        assert set(machine.cache.names) == set(machine.loaded)
        assert set(machine.cache.asleep) == machine.asleep
        assert machine.cache.used_bytes == sum(machine.loaded.values()) <= 10


def test_weights_are_read_and_nothing_else(tmp_path):
    for name, size in (("b.safetensors", 3 << 20), ("a.safetensors", 5), ("config.json", 9)):
        (tmp_path / name).write_bytes(b"x" * size)
    read = [(path.name, size) for path, size in prefetch(tmp_path)]
    assert read == [("a.safetensors", 5), ("b.safetensors", 3 << 20)]
    assert weight_bytes(tmp_path) == (3 << 20) + 5
    said = []
    prefetch_in_background(tmp_path, said.append).join(10)
    prefetch_in_background(tmp_path / "nowhere", said.append).join(10)
    assert said[0] == "weights read ahead: 3,145,733 bytes"
    assert said[1].startswith("weights were not read ahead")


class Running(Server):
    """A server that was started by somebody else."""

    is_alive = True

    def check_alive(self):
        if not self.is_alive:
            raise Stopped("vllm serve ended with status 1: out of memory")


class Answers(BaseHTTPRequestHandler):
    """Says what it was told to, as vLLM's /sleep and /wake_up do."""

    def do_POST(self):
        self.server.asked.append(self.path)
        self.answer(200 if self.path.startswith("/twin/") else self.server.status)

    def do_GET(self):
        self.answer(200)

    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass


@pytest.fixture
def vllm():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked, server.status = [], 200
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(("status", "sleeps"), [(200, True), (404, False), (500, False)])
def test_a_server_sleeps_where_vllm_can_and_is_stopped_where_not(vllm, status, sleeps):
    started = []

    def start(name):
        server = Running(["vllm", name], "127.0.0.1", vllm.server_port, None)
        server.stop = lambda: started.remove(name)
        started.append(name)
        return server

    cache = server_cache(10, {"a": 6, "b": 6}, start)
    vllm.status = status
    first = cache.get_or_load("a")
    cache.get_or_load("b")
    assert (cache.names, cache.asleep) == (["b"], ["a"] if sleeps else [])
    assert started == (["a", "b"] if sleeps else ["b"])
    vllm.status = 200
    again = cache.get_or_load("a")
    assert (again is first) == sleeps
    assert ("/wake_up" in vllm.asked) == sleeps
    # It answers what it has accepted before it goes, and takes requests again when it is awake.
    assert vllm.asked.index("/twin/drain") < vllm.asked.index("/sleep?level=1")
    assert vllm.asked[-1] == ("/twin/ready" if sleeps else "/sleep?level=1")
    cache.close()
    assert not started


def test_a_server_that_does_not_wake_up(vllm):
    vllm.status = 500
    with pytest.raises(Stopped, match="does not wake up: 500"):
        Server(["vllm"], "127.0.0.1", vllm.server_port, None).wake_up()


def test_a_server_that_died_is_started_again_and_is_given_up_without_a_fuss(vllm):
    stopped, said = [], []

    def start(name):
        server = Running(["vllm"], "127.0.0.1", vllm.server_port, None)
        server.stop = lambda: stopped.append(server)
        return server

    cache = server_cache(10, {"a": 6, "b": 6}, start, say=said.append)
    first = cache.get_or_load("a")
    first.is_alive = False
    second = cache.get_or_load("a")
    assert (second is not first, stopped) == (True, [first])
    second.is_alive = False
    assert cache.evict("a")
    assert (cache.names, stopped) == ([], [first, second])
    assert said == ["vllm serve ended with status 1: out of memory"]


# --- the front ------------------------------------------------------------------------------------


@pytest.fixture
def offered(vllm):
    """Two scenarios of which one fits, behind a front."""
    scenario = load_scenario("examples/real-demo.yaml")
    offers = {name: Offer(name, scenario, None, 6) for name in ("a", "b")}
    offers["huge"] = Offer("huge", scenario, None, 11)

    def start(offer):
        if vllm.status == 500:
            raise Stopped("vllm serve ended with status 1: no GPU")
        server = Running([offer.name], "127.0.0.1", vllm.server_port, None)
        server.stop = lambda: None
        return server

    models = Models(offers, 10, start, 1.0, lambda message: None)
    listening = front(models, "127.0.0.1", 0)
    stop = threading.Event()
    thread = threading.Thread(target=serve_front, args=(listening, stop))
    thread.start()
    vllm.status = 404  # no sleep mode
    yield models, listening.server_port
    stop.set()
    thread.join(10)


def ask(port, method, path, body=None):
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()), answer.headers.get("Location")


def test_a_request_is_sent_to_the_server_of_its_model(offered, vllm):
    models, port = offered
    there = f"http://127.0.0.1:{vllm.server_port}"
    status, _, place = ask(port, "POST", "/v1/chat/completions", {"model": "a"})
    assert (status, place) == (307, f"{there}/v1/chat/completions")
    assert ask(port, "POST", "/v1/completions", {"model": "b"})[0] == 307
    assert models.loads == 2
    _, told, _ = ask(port, "GET", "/models")
    assert [(m["name"], m["state"]) for m in told["models"]] == [
        ("a", "out"), ("b", "held"), ("huge", "out")
    ]  # fmt: skip
    assert (told["used_bytes"], told["budget_bytes"]) == (6, 10)
    assert ask(port, "POST", "/models/a/load")[:2] == (200, {"url": there})
    assert ask(port, "POST", "/models/a/evict")[:2] == (200, {"evicted": True})
    assert ask(port, "POST", "/models/a/evict")[:2] == (200, {"evicted": False})
    assert models.cache.names == []
    names = [m["id"] for m in ask(port, "GET", "/v1/models")[1]["data"]]
    assert names == ["a", "b", "huge"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {"model": "c"}, 404, "'c' is not offered; offered are a, b, huge"),
        ("/v1/completions", ["a"], 400, 'the name of a model as "model"'),
        ("/v1/completions", {"model": "huge"}, 400, "takes 11 bytes, the budget is 10"),
        ("/models/c/evict", None, 404, "offered are a, b, huge"),
        ("/elsewhere", None, 404, "no such path: /elsewhere"),
    ],
)
def test_what_the_front_refuses(offered, path, body, status, words):
    found = ask(offered[1], "POST", path, body)
    assert found[0] == status
    assert words in found[1]["error"]["message"]


def test_a_server_that_does_not_start_is_told(offered, vllm):
    vllm.status = 500
    status, told, _ = ask(offered[1], "POST", "/v1/completions", {"model": "a"})
    assert (status, told["error"]["message"]) == (503, "vllm serve ended with status 1: no GPU")
    assert offered[0].cache.loading is None


def test_memory_is_what_vllm_reserves_or_the_blocks_that_are_asked_for():
    scenario = load_scenario("examples/chat-8b.yaml")
    plan = scenario.hardware.memory
    assert memory_of(scenario) == plan.budget_bytes
    few = load_scenario("examples/chat-8b.yaml", ["engine.num_gpu_blocks_override=1000"])
    assert memory_of(few) == plan.budget_bytes - plan.kv_bytes + 1000 * plan.block_bytes


@pytest.mark.parametrize(
    ("text", "found"), [("5", 5), ("1.5 GiB", 3 << 29), ("80GB", 80 * 10**9), ("2kib", 2048)]
)
def test_sizes(text, found):
    assert bytes_of(text) == found


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5 GX", "nan"])
def test_no_sizes(text):
    with pytest.raises(InputError, match="must be a number of bytes above 0"):
        bytes_of(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budget", "80GB", "--load", "x"], "--load x: offered are real-demo"),
        (["--budget", "much"], "--budget much: must be a number of bytes"),
        (["--budget", "80GB", "examples/real-demo.yaml"], "a scenario real-demo is there already"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(options, words):
    command = [sys.executable, "-m", "real", "models", "examples/real-demo.yaml", "--tiny"]
    run = subprocess.run([*command, *options], capture_output=True, text=True)
    assert run.returncode == 2
    assert words in run.stderr
