"""Models under a memory budget, and their files in the page cache."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.models import ModelCache, prefetch, prefetch_in_background, server_cache, weight_bytes
from real.server import Server, Stopped

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


class Answers(BaseHTTPRequestHandler):
    """Says what it was told to, as vLLM's /sleep and /wake_up do."""

    def do_POST(self):
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

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
        server = Server(["vllm", name], "127.0.0.1", vllm.server_port, None)
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
    cache.close()
    assert not started


def test_a_server_that_does_not_wake_up(vllm):
    vllm.status = 500
    with pytest.raises(Stopped, match="does not wake up: 500"):
        Server(["vllm"], "127.0.0.1", vllm.server_port, None).wake_up()
