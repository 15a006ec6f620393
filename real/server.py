"""Run `vllm serve` for a scenario: start, warm up, ready, watch, drain.

Ready means that warm-up requests were answered. A signal drains: new requests get 503, those accepted are answered,
then vLLM is stopped. Whatever ends the server otherwise ends this with status 1 and the reason.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

from real.middleware import TOKEN_VARIABLE
from real.preflight import child_environment
from real.server_log import Log, ended

WARM_UP_PROMPTS = (1, 16, 128)
"""Tokens of the prompts that warm the server up, as far as max_model_len allows."""
WARM_UP_ATTEMPTS = 5
WARM_UP_WAIT_S = 1.0
HEALTH_PERIOD_S = 2.0
HEALTH_FAILURES = 3
"""Health checks in a row that fail before the server is given up."""
NOTICE_PERIOD_S = 60.0
"""How often a server that is long in starting is said to be."""
START_LIMIT_S = 3600.0
"""How long a server may take until it listens."""
STOP_PATIENCE_S = 30.0
"""How long vLLM may take to end after a signal."""
ENDING = ("SIGTERM", "SIGINT", "SIGHUP")
"""Signals that end a server."""

# Run in front of vLLM: it is told when its parent has gone, however that went. Linux only.
_LAUNCH = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if hasattr(ctypes.CDLL(None), "prctl"):
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""

Say = Callable[[str], object]


class Stopped(Exception):
    """The server ended, or must be given up; the text says why."""


def api_key_of(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """A key that the server of this command takes; None where it asks for none."""
    for i, word in enumerate(command):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") == "--api-key":
            return value if is_joined else next(iter(command[i + 1 : i + 2]), None)
    return environment.get("VLLM_API_KEY") or None


class Server:
    """One `vllm serve` process and what it says of itself."""

    def __init__(self, command: Sequence[str], host: str, port: int, echo: Say | None) -> None:
        self._host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
        self._port = port
        self._command = list(command)
        self._echo = echo
        self._token = secrets.token_hex(16)
        self._api_key: str | None = None
        self._metrics_folder = ""  # made when it starts
        self._log = Log()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._was_ready = False

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
        self._api_key = api_key_of(self._command, environment)
        started = threading.Event()
        failed: list[OSError] = []

        def live() -> None:
            # Linux tells the child of the end of the thread that started it: this one lives as long as it.
            try:
                process = self._process = self._launch(environment)
            except OSError as error:
                failed.append(error)
                return
            finally:
                started.set()
            self._read(process)

        self._reader = threading.Thread(target=live, daemon=True)
        self._reader.start()
        started.wait()
        if failed:
            raise failed[0]

    def _launch(self, environment: dict[str, str]) -> "subprocess.Popen[str]":
        # A session of its own: Ctrl-C in a terminal is for us, to drain first.
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), *self._command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        line = "\n"
        for line in process.stdout:
            self._log.add(line)
            if self._echo is not None:
                with suppress(
                    OSError
                ):  # nobody reads it any more; the server must not wait for that
                    self._echo(line)
        if self._echo is not None and not line.endswith("\n"):
            with suppress(OSError):
                self._echo("\n")
        process.wait()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def check_alive(self) -> None:
        """Raise Stopped if the process has ended, or cannot listen."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            if self._reader is not None:
                self._reader.join(timeout=2)
            self._check_port()
            raise Stopped(f"vllm serve {ended(status)}: {self.reason()}")
        self._check_port()

    def _check_port(self) -> None:
        """Somebody else may have come to listen between our look at the port and vLLM's turn, much later."""
        line = None if self._was_ready else self._log.find("address already in use")
        if line is not None and (str(self._port) in line or self._listens()):
            raise self._port_is_taken()

    def _port_is_taken(self) -> Stopped:
        return Stopped(
            f"--port {self._port}: another program listens on {self._host}:{self._port}; "
            "choose another port, or stop who has it"
        )

    def reason(self) -> str:
        """The line of the log that says best what went wrong."""
        return self._log.reason(self._was_ready)

    def last_line(self) -> str:
        """Of the log."""
        return self._log.last()

    def ask(
        self, method: str, path: str, body: Any = None, timeout: float = 5.0, ours: bool = True
    ) -> tuple[int, Any]:
        """(HTTP status, content) of one request; (0, reason) if there is no answer."""
        connection = HTTPConnection(self._host, self._port, timeout=timeout)
        headers = {"X-Twin-Control": self._token} if ours else {}
        if ours and self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
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

    def wait_until_up(self, say: Say, limit_s: float = START_LIMIT_S) -> None:
        """Wait until it answers. Raises Stopped if it ends instead, another one answers, or it takes too long."""
        started = time.monotonic()
        next_notice = started + NOTICE_PERIOD_S
        while not self._is_up():
            self.check_alive()
            now = time.monotonic()
            if now >= started + limit_s:
                raise Stopped(
                    f"vllm serve does not listen on {self._host}:{self._port} after {limit_s:g} s; "
                    f"its last line: {self._log.last()}"
                )
            if now >= next_notice:
                say(f"starting for {now - started:.0f} s; vLLM's last line: {self._log.last()}")
                next_notice += NOTICE_PERIOD_S
            time.sleep(0.2)
        say(f"up after {time.monotonic() - started:.1f} s")

    def _is_up(self) -> bool:
        """Whether the server that we started answers. Raises Stopped if another one does."""
        status, content = self.ask("GET", "/twin/status", timeout=2)
        if status == 0:
            return False
        if not isinstance(content, dict) or not content.get("is_yours"):
            raise self._port_is_taken()
        return self.ask("GET", "/health", timeout=2)[0] == 200

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
                key = "; name the key with --api-key or VLLM_API_KEY" if status == 401 else ""
                raise Stopped(f"warm-up failed {WARM_UP_ATTEMPTS} times: {content}{key}")

    def announce_ready(self) -> dict[str, Any]:
        """Let `/health` say so; returns the status."""
        status, content = self.ask("POST", "/twin/ready")
        if status != 200:
            raise Stopped(f"the server does not take its readiness: {status}, {content}")
        self._was_ready = True
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
        """Refuse new requests and wait until those accepted are answered; how many were not.

        A server that does not answer in time is asked again: silence is no sign that nothing is left.
        """
        until = time.monotonic() + timeout_s
        refuses, left, told = False, 1, -1
        while self._listens():
            self.check_alive()
            refuses = refuses or self.ask("POST", "/twin/drain")[0] == 200
            status, content = self.ask("GET", "/twin/status")
            if status == 200:
                left = content.get("in_flight", 0) or content.get("in_engine", 0)
            if left == 0 and refuses:
                return 0
            if time.monotonic() >= until or hurry.is_set():
                return left
            if left != told:
                say(f"draining: {left} requests left")
                told = left
            time.sleep(0.1)
        return 0

    def _listens(self) -> bool:
        """Whether anybody could have got a request in."""
        try:
            socket.create_connection((self._host, self._port), timeout=5).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True

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

    def stop(self, patience_s: float = STOP_PATIENCE_S) -> bool:
        """End the process and all it started; whether it had to be killed for that."""
        was_killed = False
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(patience_s)
                except subprocess.TimeoutExpired:
                    was_killed = True
            _kill_session(self._process.pid)
            self._process.wait()
            if self._reader is not None:
                self._reader.join(timeout=2)
        if self._metrics_folder:
            shutil.rmtree(self._metrics_folder, ignore_errors=True)
        return was_killed


@contextmanager
def on_ending_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Let `handle` have the signals that end a program, those apart that it was started to ignore (nohup)."""
    before = {}
    for name in ENDING:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_server(
    server: Server,
    extra: dict[str, str],
    model: str,
    max_model_len: int,
    drain_s: float,
    say: Say,
    on_ready: Callable[[], None] | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> None:
    """Start the server and stay until a signal drains it. Raises Stopped if it ends by itself or loses a request.

    `on_ready`, if given, runs once the server is ready; the server is drained and stopped when it returns. A signal
    that comes before that raises Stopped when the server has drained.
    """
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    with on_ending_signals(on_signal):
        try:
            server.start(extra)
            say("starting vllm serve")
            _until(stop, server, lambda: server.wait_until_up(say, start_limit_s))
            _until(stop, server, lambda: server.warm_up(model, max_model_len, say))
            is_done = on_ready is None
            if not stop.is_set():
                status = server.announce_ready()
                say(f"ready: {server.url}, policy {status['policy_fingerprint'] or 'of vLLM'}")
                if on_ready is None:
                    server.watch(stop)
                else:
                    is_done = _until(stop, server, on_ready)
            say("stopping: new requests are refused")
            if left := server.drain(drain_s, say, hurry):
                why = "before a second signal" if hurry.is_set() else f"in {drain_s:g} s"
                raise Stopped(f"{left} accepted requests were not answered {why}")
            if server.stop(STOP_PATIENCE_S) and not hurry.is_set():
                raise Stopped(
                    f"vLLM did not end within {STOP_PATIENCE_S:g} s and was killed; its last line: "
                    f"{server.last_line()}"
                )
            if not is_done:
                raise Stopped("stopped by a signal before all was done")
        finally:
            server.stop(1.0 if hurry.is_set() else STOP_PATIENCE_S)
    say("stopped")


def _until(stop: threading.Event, server: Server, step: Callable[[], None]) -> bool:
    """Do a step in the background, so that a signal need not wait for it; whether it was done.

    Raises what the step raises, and Stopped if the server ends meanwhile.
    """
    failed: list[BaseException] = []

    def work() -> None:
        try:
            step()
        except BaseException as error:
            failed.append(error)

    if stop.is_set():
        return False
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    while worker.is_alive() and not stop.is_set():
        worker.join(0.1)
        server.check_alive()
    if stop.is_set():
        return False
    if failed:
        raise failed[0]
    return True


def _kill_session(leader: int) -> None:
    """Kill what is left of a session that we started: workers that outlive the API server."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def say_to_stderr(message: str) -> None:
    """One line of status."""
    with suppress(OSError):  # a terminal that was closed ends no drain
        sys.stderr.write(f"twin-real: {message}\n")
        sys.stderr.flush()
