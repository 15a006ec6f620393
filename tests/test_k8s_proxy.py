"""The rendered proxy under a real HAProxy: three stand-ins for replicas, found by DNS as in a cluster."""

import contextlib
import json
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from real.manifests_numbers import numbers_of
from real.manifests_predict import Prediction
from real.manifests_proxy import config, left_out
from real.manifests_setup import PORT, PROXY_PORT, STATS_PORT, Setup
from tests.k8s import SCENARIOS
from tests.tools import free_port, haproxy
from twin.scenario import load_scenario

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Replica:
    """A stand-in for vLLM: a completion lasts until it is let go, /health says 200."""

    def __init__(self, address, port):
        self.address, self.served, self.running = address, 0, {}
        self._lock = threading.Lock()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer(200, {"status": "ok"})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(200, {"replica": replica.address, "name": replica.work(request)})

            def answer(self, status, content):
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *ignored):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *ignored):
                """The proxy hangs up on connections it keeps; so be it."""

        self._server = Server((address, port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def work(self, request):
        event = threading.Event()
        with self._lock:
            self.running[request["name"]] = event
        event.wait(request.get("seconds", 0))
        with self._lock:
            del self.running[request["name"]]
            self.served += 1
        return request["name"]

    def let_go(self, name=None):
        """End one completion, or all."""
        with self._lock:
            for key, event in self.running.items():
                if name in (None, key):
                    event.set()

    def stop_listening(self):
        self._server.shutdown()
        self._server.server_close()


class Dns:
    """Answers every question for A with the addresses of the moment, as a headless Service."""

    def __init__(self):
        self.addresses = list(ADDRESSES)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                query, client = self._socket.recvfrom(4096)
            except OSError:
                return
            end = query.index(b"\0", 12) + 5
            (kind,) = struct.unpack(">H", query[end - 4 : end - 2])
            found = list(self.addresses) if kind == 1 else []
            head = query[:2] + struct.pack(">HHHHH", 0x8580, 1, len(found), 0, 0)
            records = b"".join(
                b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(a) for a in found
            )
            self._socket.sendto(head + query[12:end] + records, client)

    def close(self):
        self._socket.close()


class Stage:
    """Proxy, DNS and replicas."""

    def __init__(self, folder, **cluster):
        document = load_scenario(SCENARIOS / "chat-8b.yaml").to_dict()
        plain = {
            "hpa": None,
            "metrics": {},
            "replicas": 3,
            "routing": {},
            "retries": None,
            "admission": None,
        }
        document["cluster"] |= plain | cluster
        if (cluster.get("admission") or {}).get("retry_after"):
            document["cluster"]["retries"] = {"attempts": 2}
        loaded = load_scenario(document)
        self.setup = Setup(loaded, numbers_of(loaded, 0.0), Prediction())
        self.dns, inner, self.port, self.stats = Dns(), free_port(), free_port(), free_port()
        self.replicas = [Replica(address, inner) for address in ADDRESSES]
        text = config(self.setup)
        for old, new in (
            ("    parse-resolv-conf\n", f"    nameserver cluster 127.0.0.1:{self.dns.port}\n"),
            (f"bind :{PROXY_PORT}", f"bind 127.0.0.1:{self.port}"),
            (f"bind :{STATS_PORT}", f"bind 127.0.0.1:{self.stats}"),
            (f".svc.cluster.local:{PORT} ", f".svc.cluster.local:{inner} "),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = folder / "haproxy.cfg"
        path.write_text(text)
        binary, env = haproxy()
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [binary, "-f", str(path)], env=env, stdout=log, stderr=subprocess.STDOUT
            )
        self.pool = ThreadPoolExecutor(64)
        until = time.monotonic() + 20
        while self.up() < len(ADDRESSES):
            assert self.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.1)

    def up(self):
        with contextlib.suppress(OSError):
            _, _, text = self.request("GET", "/metrics", port=self.stats)
            lines = [
                line
                for line in text.splitlines()
                if line.startswith("haproxy_server_check_status{")
            ]
            return sum('state="L7OK"' in line and line.endswith(" 1") for line in lines)
        return 0

    def request(self, method, path, body=None, headers=None, port=None):
        connection = HTTPConnection("127.0.0.1", port or self.port, timeout=30)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers or {})
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, named, answer.read().decode()
        finally:
            connection.close()

    def complete(self, name, seconds=0.0, tier=None):
        headers = {} if tier is None else {"X-Tier": tier}
        return self.request("POST", "/v1/completions", {"name": name, "seconds": seconds}, headers)

    def send(self, name, seconds=20.0, tier=None):
        """A completion on its way; it has reached a replica or the queue when this returns."""
        before = self.running() + self.queued()
        future = self.pool.submit(self.complete, name, seconds, tier)
        until = time.monotonic() + 10
        while self.running() + self.queued() <= before and not future.done():
            assert time.monotonic() < until
            time.sleep(0.01)
        return future

    def running(self):
        return sum(len(replica.running) for replica in self.replicas)

    def queued(self):
        _, _, text = self.request("GET", "/metrics", port=self.stats)
        lines = [
            line for line in text.splitlines() if line.startswith("haproxy_backend_current_queue{")
        ]
        return sum(int(line.split()[-1]) for line in lines if 'proxy="engines"' in line)

    def close(self):
        self.process.kill()
        self.process.wait()
        for replica in self.replicas:
            replica.let_go()
            with contextlib.suppress(OSError):
                replica.stop_listening()
        self.dns.close()
        self.pool.shutdown(wait=False)


@pytest.fixture
def stage(tmp_path):
    made = []

    def make(**cluster):
        made.append(Stage(tmp_path, **cluster))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_request_goes_where_fewest_are(stage):
    there = stage()
    futures = [there.send(f"r{i}") for i in range(9)]
    assert [len(replica.running) for replica in there.replicas] == [3, 3, 3]
    first = there.replicas[1]
    first.let_go()
    while first.running:
        time.sleep(0.01)
    futures += [there.send(f"s{i}") for i in range(3)]
    assert [len(replica.running) for replica in there.replicas] == [3, 3, 3]
    assert set(first.running) == {"s0", "s1", "s2"}
    for replica in there.replicas:
        replica.let_go()
    assert {future.result()[0] for future in futures} == {200}


def test_only_the_api_is_let_through(stage):
    there = stage()
    for path in ("/metrics", "/sleep", "/wake_up", "/twin/drain", "/collective_rpc", "/docs"):
        assert there.request("GET", path)[0] == 404, path
    assert there.request("GET", "/health")[0] == 200
    assert there.request("GET", "/v1/models")[0] == 200
    assert there.request("GET", "/healthz", port=there.stats)[0] == 200


def test_a_full_queue_is_answered_429_and_a_wait_that_is_too_long_503(stage):
    there = stage(
        admission={"max_inflight_per_replica": 2, "max_queue": 2, "max_wait": 2, "retry_after": 7}
    )
    running = [there.send(f"r{i}") for i in range(6)]
    waiting = [there.send(f"w{i}") for i in range(2)]
    assert [len(replica.running) for replica in there.replicas] == [2, 2, 2]
    status, headers, body = there.complete("late")
    assert (status, headers["retry-after"]) == (429, "7")
    assert json.loads(body)["error"]["code"] == 429
    for future in waiting:
        status, headers, body = future.result()
        assert (status, headers["retry-after"]) == (503, "7")
        assert json.loads(body)["error"]["code"] == 503
    for replica in there.replicas:
        replica.let_go()
    assert {future.result()[0] for future in running} == {200}


def test_without_any_replica_clients_are_told_when_to_ask_again(stage):
    there = stage()
    there.dns.addresses = []
    until = time.monotonic() + 15
    while there.request("GET", "/v1/models")[0] != 503:
        assert time.monotonic() < until
        time.sleep(0.2)
    status, headers, _ = there.complete("x")
    assert (status, headers["retry-after"]) == (503, "5")


def test_the_queue_is_left_in_the_order_of_tiers(stage):
    there = stage(
        admission={"max_inflight_per_replica": 1, "order": ["ONLINE", "BATCH", "OFFLINE"]}
    )
    running = [there.send(f"r{i}") for i in range(3)]
    order = [("o", "OFFLINE"), ("b", "BATCH"), ("i", "ONLINE"), ("default", None)]
    waiting = {name: there.send(name, 20, tier) for name, tier in order}
    assert there.queued() == 4
    seen = []
    only = there.replicas[0]
    for _ in range(4):
        before = set(only.running)
        only.let_go()
        until = time.monotonic() + 5
        while not set(only.running) - before:
            assert time.monotonic() < until
            time.sleep(0.01)
        seen += list(only.running)
    # A request without a header is of the default tier, ONLINE; it came after the one that says so.
    assert seen == ["i", "default", "b", "o"]
    for replica in there.replicas:
        replica.let_go()
    assert {f.result()[0] for f in (*running, *waiting.values())} == {200}


def test_a_rate_lets_in_what_it_says_and_no_less_under_overload(stage):
    """20 a second in bursts of 20; forty at once, and again a window later."""
    there = stage(admission={"rate": 20, "burst": 20})
    for _ in range(2):
        futures = [there.pool.submit(there.complete, f"r{i}") for i in range(40)]
        answers = [future.result() for future in futures]
        assert sum(status == 200 for status, _, _ in answers) == 20
        refused = [headers for status, headers, _ in answers if status == 429]
        assert len(refused) == 20
        assert {headers["retry-after"] for headers in refused} == {"5"}
        time.sleep(2.1)  # HAProxy's window slides: a part of the last second counts in this one


def test_the_rate_of_a_tier_is_its_own(stage):
    there = stage(admission={"tiers": {"OFFLINE": {"rate": 2, "burst": 4}}})
    offline = [there.complete(f"o{i}", tier="OFFLINE")[0] for i in range(8)]
    online = [there.complete(f"i{i}")[0] for i in range(8)]
    assert offline.count(200) == 4
    assert offline.count(429) == 4
    assert set(online) == {200}


def test_a_conversation_stays_with_its_replica(stage):
    there = stage(router="session_affinity")
    for session in ("a", "b", "c", "d"):
        headers = {"X-Session-Id": session}
        found = set()
        for i in range(5):
            body = {"name": f"{session}{i}"}
            _, _, answer = there.request("POST", "/v1/completions", body, headers)
            found.add(json.loads(answer)["replica"])
            time.sleep(0.1)  # one that has just ended still counts as load for a moment
        assert len(found) == 1


def test_a_replica_is_drained_without_a_lost_request(stage):
    """Off the Service, so many seconds of preStop, then no new connections, then what runs to its end."""
    there = stage()
    leaving = there.replicas[2]
    long = [there.send(f"long{i}", 12) for i in range(3)]
    statuses, stop = [], threading.Event()

    def client(number):
        count = 0
        while not stop.is_set():
            statuses.append(there.complete(f"c{number}-{count}", 0.05)[0])
            count += 1

    clients = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(4)]
    for each in clients:
        each.start()
    time.sleep(0.5)
    there.dns.addresses = [a for a in ADDRESSES if a != leaving.address]
    time.sleep(min(there.setup.numbers.pre_stop_s, 8))
    at_sigterm = leaving.served
    leaving.stop_listening()
    time.sleep(1.5)
    stop.set()
    for each in clients:
        each.join()
    assert leaving.served == at_sigterm  # nobody came after preStop
    assert set(leaving.running) < {"long0", "long1", "long2"}
    assert len(leaving.running) == 1
    assert [future.result()[0] for future in long] == [200, 200, 200]
    assert len(statuses) > 100
    assert set(statuses) == {200}


def test_what_a_proxy_cannot_do_is_named():
    document = load_scenario(SCENARIOS / "chat-8b.yaml").to_dict()
    document["cluster"]["admission"] = {
        "max_inflight": 100,
        "max_inflight_tokens": 10**6,
        "tiers": {"BATCH": {"max_inflight": 5, "rate": 1}, "OFFLINE": {"rate": 1}},
        "rate": 5,
    }  # fmt: skip
    document["cluster"]["retries"] = None
    document["cluster"]["holds_requests"] = True
    loaded = load_scenario(document)
    told = left_out(Setup(loaded, numbers_of(loaded, 0.0), Prediction()))
    for words in (
        "max_inflight:",
        "max_inflight_tokens",
        "tiers.BATCH.max_inflight",
        "holds_requests",
    ):
        assert [text for text in told if words in text], words
