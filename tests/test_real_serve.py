"""`twin-real serve` around vLLM, which is not needed here: command, what is refused, warm-up, readiness, the end."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from real.preflight import free_port
from real.server_log import Log, ended
from twin.scenario import load_scenario

ROOT = Path(__file__).parents[1]
SCENARIO = "examples/real-demo.yaml"

# Plays an interpreter that has vLLM: answers the probe, and serves what a server must.
FAKE = """\
    #!{python}
    import json, os, signal, sys, threading, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    if sys.argv[1] == "-c":
        found = {{"vllm": True, "version": "0.32.0+cpu", "metadata": "0.32.0", "plugin": True}}
        print(json.dumps(found | {changes!r}))
        sys.exit()
    mode = {mode!r}
    if mode == "dies":
        print("INFO starting", flush=True)
        print("ERROR Traceback: ValueError: No common block size for 16", flush=True)
        sys.exit(3)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    token, key = os.environ["TWIN_CONTROL_TOKEN"], os.environ.get("WANTED_KEY")
    if mode == "mute":
        print("INFO loading", flush=True)
        time.sleep(60)
    if mode == "late":
        print(f"ERROR binding ('127.0.0.1', {{port}}): address already in use", flush=True)
        time.sleep(60)
    if mode in ("stubborn", "endless"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state = {{"ready": False, "posts": 0, "draining": 0, "left": 0}}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args): pass
        def answer(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            if self.path == "/twin/status":
                state["left"] = max(0, state["left"] - (mode != "endless"))
                if state["draining"] and mode == "silent":
                    state["draining"] -= 1
                    self.answer(500, {{}})
                    return
                ours = {{"is_yours": True}} if self.headers["X-Twin-Control"] == token else {{}}
                where = "in_engine" if mode == "background" else "in_flight"
                told = {{"state": "x", "in_flight": 0, "in_engine": 0, where: state["left"]}}
                self.answer(200, told | ours)
            else:
                self.answer(503 if mode == "sick" and state["ready"] else 200, {{}})
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/twin/ready":
                state["ready"] = True
                print("told to be ready", flush=True)
                if mode == "crashes":
                    last = "RuntimeError: out of luck"
                    crash = lambda: (print(last, end="", flush=True), os._exit(9))
                    threading.Timer(0.5, crash).start()
                self.answer(200, {{"policy_fingerprint": "abc"}})
            elif self.path == "/twin/drain":
                state["left"], state["draining"] = 4, 3
                print("told to drain", flush=True)
                self.answer(200, {{}})
            elif key and self.headers["Authorization"] != f"Bearer {{key}}":
                self.answer(401, {{"error": "Unauthorized"}})
            else:
                state["posts"] += 1
                failing = mode == "cold" and state["posts"] <= 2 or mode == "broken"
                self.answer(500 if failing else 200, {{"posts": state["posts"]}})

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path):
    def make(mode="plain", **changes):
        path = tmp_path / f"python-{mode}"
        text = textwrap.dedent(FAKE).format(python=sys.executable, mode=mode, changes=changes)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return make


STARTED = []


@pytest.fixture(autouse=True)
def nothing_left():
    """A test that fails leaves no server behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=30)


def serve(*options, scenario=SCENARIO, wait=True, **env):
    command = [sys.executable, "-m", "real", "serve", str(scenario), *options]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    if not wait:
        STARTED.append(process)
        return process
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def refused(*options, **more):
    status, out, err = serve(*options, **more)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err


# --- the command ----------------------------------------------------------------------------------


def options_of(out):
    words = [word for word in shlex.split(out) if not re.match(r"[A-Z_]+=", word)]
    return words[: words.index("serve")], words[words.index("serve") + 1 :]


def test_the_command_has_what_the_scenario_says():
    status, out, _ = serve("--print", "--port", "8123", "--", "--max-num-queued-reqs", "50")
    assert status == 0
    program, options = options_of(out)
    assert program == [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    scenario = load_scenario(ROOT / SCENARIO)
    given = dict(zip(options[1::2], options[2::2], strict=False))
    assert options[0] == scenario.model.name
    settings = json.loads(options[options.index("--additional-config") + 1])["twin"]
    assert settings["policy"] == scenario.policy.to_dict()
    for name, value in {
        "--max-num-seqs": 8, "--max-num-batched-tokens": 2048, "--max-model-len": 2048, "--block-size": 16,
        "--num-gpu-blocks-override": 257, "--dtype": "bfloat16", "--port": 8123,
        "--scheduler-cls": "real.scheduler.make_scheduler",
    }.items():  # fmt: skip
        assert options[options.index(name) + 1] == str(value)
    assert "--async-scheduling" in options
    assert options[-2:] == ["--max-num-queued-reqs", "50"]
    assert given


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("engine.enable_prefix_caching=false", "--no-enable-prefix-caching"),
        ("engine.async_scheduling=false", "--no-async-scheduling"),
        ("engine.enforce_eager=true", "--enforce-eager"),
        ("engine.scheduler_reserve_full_isl=false", "--no-scheduler-reserve-full-isl"),
        ("engine.watermark=0.05", "--watermark 0.05"),
        ("engine.max_num_active_seqs=4", "--max-num-active-seqs 4"),
        ("engine.max_num_scheduled_tokens=1000", "--max-num-scheduled-tokens 1000"),
        ("engine.long_prefill_token_threshold=256", "--long-prefill-token-threshold 256"),
        ("engine.gpu_memory_utilization=0.8", "--gpu-memory-utilization 0.8"),
        ("engine.kv_cache_dtype=fp8", "--kv-cache-dtype fp8"),
        ("hardware.dtype=float16", "--dtype float16"),
        ("policy=vllm-priority", "--scheduling-policy priority"),
        ("policy=vllm-fcfs", "--scheduling-policy fcfs"),
    ],
)
def test_every_key_of_the_engine_reaches_vllm(change, expected, tmp_path):
    from real.command import Serving, serve_command
    from tests.runs import flat_profile

    steps = f"hardware.step_time={flat_profile(tmp_path, 10**9)}"
    scenario = load_scenario(ROOT / SCENARIO, [change, steps])
    command = " ".join(serve_command(scenario, Serving("python", "m", "m")))
    assert f" {expected}" in command
    assert ("--scheduler-cls" in command) == (not change.startswith("policy"))


def test_every_key_of_engine_is_an_argument_or_known_not_to_be():
    from twin.scenario_schema import Engine

    source = (ROOT / "real/command.py").read_text(encoding="utf-8")
    named = {name.replace("_", "-") for name in Engine.model_fields} - {"version"}
    assert not [name for name in named if f'"{name}"' not in source]


def test_the_tiny_model_keeps_the_tokens_of_the_cache():
    _, out, _ = serve("--print", "--tiny", "--set", "policy=fcfs")
    _, options = options_of(out)
    assert options[options.index("--block-size") + 1] == "32"
    assert options[options.index("--num-gpu-blocks-override") + 1] == "129"
    assert options[options.index("--load-format") + 1] == "dummy"


def test_the_printed_command_runs_as_it_is():
    """Its environment is there, and a folder that is not is not named."""
    _, out, err = serve("--print", "--tiny")
    assert out.startswith('PROMETHEUS_MULTIPROC_DIR="$(mktemp -d)" PYTHONPATH=')
    assert " VLLM_CPU_KVCACHE_SPACE=1 " in out
    assert options_of(out)[1][0] == "FOLDER"
    assert err == "FOLDER: --tiny makes its model when it serves, in a folder that goes with it\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--port", "8162"], "-- --port: twin-real serve sets --port itself; use --port"),
        (["--port=8162"], "use --port"),
        (["--host", "::"], "use --host"),
        (["--served_model_name", "x"], "use --name"),
        (["--max-num-seqs", "4"], "use --set engine.max_num_seqs="),
        (["--enable-prefix-caching"], "use --set engine.enable_prefix_caching="),
        (["--additional-config.twin.policy", "fcfs"], "use --header, --reject-bad-hints and"),
        (["--scheduling-policy", "priority"], "use --set policy="),
        (["-tp", "2"], "use --set hardware.tensor_parallel_size="),
        (["--api-server-count", "2"], "one API server drains, several cannot"),
        (["--por", "8162"], "use --port"),
        (["--data-parallel-size=2"], "it brings an API server for each rank"),
        (["-asc=2"], "one API server drains, several cannot"),
        (["--ssl-keyfile", "x"], "leave TLS to"),
        (["--uds", "x"], "listens on --host and --port"),
    ],
)
def test_arguments_of_vllm_that_contradict_its_own(more, message):
    assert message in refused("--print", "--", *more)


def test_other_arguments_of_vllm_go_through():
    more = ["--max-num-queued-reqs", "5", "--middleware", "own.Middleware", "--api-key", "a", "b"]
    status, out, _ = serve("--print", "--", *more)
    assert (status, options_of(out)[1][-len(more) :]) == (0, more)


# --- what is refused ------------------------------------------------------------------------------


def test_without_vllm(fake):
    assert "vLLM is not installed for" in refused("--tiny", "--python", fake(vllm=False))


def test_without_the_plug_in(fake):
    assert "real.scheduler is not importable" in refused("--tiny", "--python", fake(plugin=False))


def test_without_metadata(fake):
    assert "vllm_dist_info.py" in refused("--tiny", "--python", fake(metadata=None))


def test_another_version_than_the_scenario_s(fake):
    error = refused("--tiny", "--python", fake(version="0.33.0"))
    assert "the scenario says 0.32.0" in error
    assert "has vLLM 0.33.0" in error


def test_no_such_interpreter():
    assert "cannot be run: No such file" in refused("--tiny", "--python", "/no/such/python")


def test_a_port_in_use(fake):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        error = refused("--tiny", "--python", fake(), "--port", port)
    assert f"--port {port}: cannot listen on 127.0.0.1:{port}: Address already in use" in error


def test_a_folder_without_a_model(fake, tmp_path):
    assert "has no config.json" in refused("--python", fake(), "--model", str(tmp_path))
    error = refused("--python", fake(), "--model", str(tmp_path / "nowhere"))
    assert "there is no folder" in error


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (["X-Class=colour"], "'colour' is none of tier, tenant, ttft_s, total_s"),
        (["x-漢=tier"], "'x-漢' cannot be the name of a header"),
        (["=tier"], "'' cannot be the name of a header"),
        (["x y=tier"], "'x y' cannot be the name of a header"),
        (["x-a"], "--header x-a: must be NAME=FIELD"),
        (["x-a=tier", "x-A=tenant"], "header x-A is there twice"),
    ],
)
def test_headers_that_mean_nothing(headers, message):
    options = [word for header in headers for word in ("--header", header)]
    assert message in refused("--print", *options)


@pytest.mark.parametrize("option", [["--reject-bad-hints"], ["--header", "x-a=tier"]])
def test_hints_where_no_policy_reads_them(option):
    error = refused("--print", "--set", "policy=vllm-fcfs", *option)
    assert f"{option[0]}: policy vllm-fcfs reads no hints" in error


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("true", "does not answer as a Python interpreter does"),
        ("false", "fails with status 1: it said nothing"),
        ("echo", "does not answer as a Python interpreter does"),
    ],
)
def test_programs_that_are_no_interpreters(program, message):
    found = shutil.which(program)
    assert f"--python {found}: {message}" in refused("--tiny", "--python", found)


# --- the life of a server -------------------------------------------------------------------------


def lines_until(process, text):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("mode", ["plain", "cold"])
def test_warm_up_ready_drain(fake, mode):
    process = serve(
        "--tiny", "--log", "--python", fake(mode), "--port", str(free_port()), wait=False
    )
    lines = lines_until(process, "twin-real: ready")
    if not any(
        "told to be ready" in line for line in lines
    ):  # what the server says comes by another way
        lines += lines_until(process, "told to be ready")
    text = "".join(lines)
    assert text.index("answered") < text.index("told to be ready")
    assert text.count("failed: 500") == (2 if mode == "cold" else 0)
    assert text.count("warm-up: prompt of") == 3
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=30)[1]
    assert "told to drain" in rest
    assert "draining: 3 requests left" in rest
    assert process.returncode == 0


def test_requests_that_are_not_answered_in_time_are_told(fake):
    process = serve(
        "--tiny", "--drain", "0", "--python", fake(), "--port", str(free_port()), wait=False
    )
    lines_until(process, "twin-real: ready")
    process.terminate()
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert rest.splitlines()[-1] == "error: 3 accepted requests were not answered in 0 s"


@pytest.mark.parametrize("mode", ["silent", "background"])
def test_a_drain_waits_for_what_it_cannot_see(fake, mode):
    """A server that does not say what is left, and requests that are left without a connection."""
    process = serve("--tiny", "--python", fake(mode), "--port", str(free_port()), wait=False)
    lines_until(process, "twin-real: ready")
    process.terminate()
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert "draining: 1 requests left" in rest


def test_a_server_that_has_to_be_killed_may_have_lost_something(fake):
    patience = "import real.server as s; s.STOP_PATIENCE_S = 1.0; "
    command = [sys.executable, "-c", patience + "from real.cli import main; main()"]
    options = [
        "serve",
        SCENARIO,
        "--tiny",
        "--python",
        fake("stubborn"),
        "--port",
        str(free_port()),
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, *options], cwd=ROOT, stderr=pipe, text=True)
    STARTED.append(process)
    lines_until(process, "twin-real: ready")
    process.terminate()
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert "error: vLLM did not end within 1 s and was killed" in rest


def test_a_second_signal_does_not_wait(fake):
    process = serve("--tiny", "--python", fake("endless"), "--port", str(free_port()), wait=False)
    lines_until(process, "twin-real: ready")
    process.terminate()
    lines_until(process, "draining: 4 requests left")
    process.terminate()
    begun = time.monotonic()
    rest = process.communicate(timeout=30)[1]
    assert time.monotonic() - begun < 15
    assert process.returncode == 1
    assert "accepted requests were not answered before a second signal" in rest


@pytest.mark.parametrize("way", [["--", "--api-key", "k", "other"], ["--", "--api-key=k"], []])
def test_the_warm_up_has_the_key(fake, way):
    env = {"WANTED_KEY": "k", **({} if way else {"VLLM_API_KEY": "k"})}
    options = ["--tiny", "--python", fake(), "--port", str(free_port()), *way]
    process = serve(*options, wait=False, **env)
    lines_until(process, "twin-real: ready")


def test_a_key_that_nobody_named(fake):
    options = ["--tiny", "--python", fake(), "--port", str(free_port())]
    status, _, err = serve(*options, WANTED_KEY="k")
    assert status == 1
    assert err.splitlines()[-1].endswith("; name the key with --api-key or VLLM_API_KEY")


def test_a_port_that_is_taken_after_the_check(fake):
    """By vLLM's own word, and by another server that answers there."""
    port = str(free_port())
    status, _, err = serve("--tiny", "--python", fake("late"), "--port", port)
    assert status == 1
    assert f"error: --port {port}: another program listens on 127.0.0.1:{port}" in err

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    process = serve("--tiny", "--python", fake("mute"), "--port", port, wait=False)
    lines_until(process, "twin-real: starting")
    with ThreadingHTTPServer(("127.0.0.1", int(port)), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        err = process.communicate(timeout=20)[1]
        other.shutdown()
    assert process.returncode == 1
    assert f"error: --port {port}: another program listens on 127.0.0.1:{port}" in err


def test_a_server_that_never_listens(fake):
    options = ["--tiny", "--start-limit", "1", "--python", fake("mute"), "--port", str(free_port())]
    status, _, err = serve(*options)
    assert status == 1
    last = err.splitlines()[-1]
    assert "does not listen on 127.0.0.1:" in last
    assert last.endswith("after 1 s; its last line: INFO loading")


def children_of(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [
        int(pid) for path in path.parents[1].glob("*/children") for pid in path.read_text().split()
    ]
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc, as on Linux")
@pytest.mark.parametrize("name", ["SIGHUP", "SIGKILL", "SIGINT"])
def test_nothing_is_left_whatever_ends_it(fake, tmp_path, name):
    options = ["--tiny", "--python", fake(), "--port", str(free_port())]
    # Under nohup these tests ignore it, and so would the server.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = serve(*options, wait=False, TMPDIR=str(tmp_path))
    signal.signal(signal.SIGHUP, before)
    lines_until(process, "twin-real: ready")
    [child] = children_of(process)
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=30)
    until = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.05)
    if name != "SIGKILL":
        assert process.returncode == 0
        assert not list(tmp_path.glob("twin-*"))


def test_a_signal_that_was_ignored_from_the_start_stays_so(fake):
    options = ["--tiny", "--python", fake(), "--port", str(free_port())]
    command = ["nohup", sys.executable, "-m", "real", "serve", SCENARIO, *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    STARTED.append(process)
    lines_until(process, "twin-real: ready")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None


def test_ctrl_c_while_the_command_is_being_loaded():
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "real", "serve", SCENARIO, "--print"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    STARTED.append(process)
    lines_until(process, "twin.errors")
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert rest.splitlines()[-1] == "interrupted"


def test_a_warm_up_that_keeps_failing(fake, monkeypatch):
    status, _, err = serve("--tiny", "--python", fake("broken"), "--port", str(free_port()))
    assert status == 1
    assert err.splitlines()[-1].startswith("error: warm-up failed 5 times: {'posts': 5}")
    assert "ready" not in err


def test_a_server_that_does_not_start(fake):
    status, _, err = serve("--tiny", "--python", fake("dies"), "--port", str(free_port()))
    assert status == 1
    last = err.splitlines()[-1]
    assert last == "error: vllm serve ended with status 3: ValueError: No common block size for 16"


@pytest.mark.parametrize("options", [[], ["--log"]])
def test_a_server_that_crashes(fake, options):
    """Its last line need not be whole."""
    port = str(free_port())
    status, _, err = serve("--tiny", *options, "--python", fake("crashes"), "--port", port)
    assert status == 1
    assert (
        err.splitlines()[-1] == "error: vllm serve ended with status 9: RuntimeError: out of luck"
    )


def test_a_server_that_is_sick(fake):
    status, _, err = serve("--tiny", "--python", fake("sick"), "--port", str(free_port()))
    assert status == 1
    assert "error: /health failed 3 times: 503" in err.splitlines()[-1]


def test_a_signal_while_starting(fake, tmp_path):
    process = serve("--tiny", "--python", fake("broken"), "--port", str(free_port()), wait=False)
    lines_until(process, "warm-up")
    begun = time.monotonic()
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert time.monotonic() - begun < 5


PLAYING = """
import sys, time
from real.server import Server, Stopped, run_server, say_to_stderr
program, port = sys.argv[1:]
server = Server([program, "serve", "--port", port], "127.0.0.1", int(port), None)
try:
    run_server(server, {}, "m", 2048, 60.0, say_to_stderr, lambda: time.sleep(60))
except Stopped as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("plain", "error: stopped by a signal before all was done"),
        ("crashes", "error: vllm serve ended with status 9: RuntimeError: out of luck"),
    ],
)
def test_what_plays_against_a_server_ends_with_a_signal_and_with_the_server(fake, mode, expected):
    command = [sys.executable, "-c", PLAYING, fake(mode), str(free_port())]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stderr=pipe, stdout=pipe, text=True)
    STARTED.append(process)
    lines_until(process, "twin-real: ready")
    begun = time.monotonic()
    if mode == "plain":
        process.terminate()
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert rest.splitlines()[-1] == expected
    assert ("draining: 3 requests left" in rest) == (mode == "plain")
    assert time.monotonic() - begun < 20


# --- why it ended ---------------------------------------------------------------------------------

CLIENT = "(APIServer pid=7) ERROR 11-30 01:02:03 [serving.py:9] vllm.exceptions.QueueOverflowError: The engine is busy"
DEAD = "(APIServer pid=7) ERROR 11-30 01:02:04 [async_llm.py:9] Engine core process EngineCore_0 died unexpectedly."
FATAL = [
    "(EngineCore pid=8) ERROR 11-30 01:02:03 [core.py:9] EngineCore encountered a fatal error.",
    "(EngineCore pid=8) ERROR 11-30 01:02:03 [core.py:9] Traceback (most recent call last):",
    "(EngineCore pid=8) ERROR 11-30 01:02:03 [core.py:9]   File x, line 3",
    "(EngineCore pid=8) ERROR 11-30 01:02:03 [core.py:9] torch.OutOfMemoryError: CUDA out of memory",
]
AFTER = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)"

GONE = [
    "(APIServer pid=7) ERROR 11-30 01:02:04 [async_llm.py:9] AsyncLLM output_handler failed.",
    "(APIServer pid=7) ERROR 11-30 01:02:04 [async_llm.py:9]     raise self._format_exception(outputs) from None",
    f"(APIServer pid=7) ERROR 11-30 01:02:04 [async_llm.py:9] {AFTER}",
    "INFO:     Application shutdown complete.",
]
LEFT_NO_WORD = "the engine's process is gone and left no word (EngineDeadError); was it killed, for want of memory?"


@pytest.mark.parametrize(
    ("lines", "was_ready", "expected"),
    [
        ([CLIENT, DEAD, AFTER], True, "Engine core process EngineCore_0 died unexpectedly."),
        ([CLIENT, *FATAL, CLIENT, AFTER], True, "torch.OutOfMemoryError: CUDA out of memory"),
        ([CLIENT, *GONE, "nanobind: leaked 3 types!", " - leaked type x"], True, LEFT_NO_WORD),
        (
            ["(EngineCore pid=8) RuntimeError: out of luck", *GONE],
            True,
            "RuntimeError: out of luck",
        ),
        ([CLIENT, "INFO last word"], True, "INFO last word"),
        (["INFO last word", "nanobind: leaked 3 types!"], True, "INFO last word"),
        ([CLIENT, "RuntimeError: out of luck", CLIENT], True, "RuntimeError: out of luck"),
        (["ValueError: first", "RuntimeError: then"], False, "ValueError: first"),
        (["ValueError: first", "RuntimeError: then"], True, "RuntimeError: then"),
        (["RuntimeError: Engine core initialization failed. See root cause above."], False, None),
        ([""], True, "it said nothing"),
    ],
)
def test_the_line_that_says_why(lines, was_ready, expected):
    log = Log()
    for line in lines:
        log.add(line + "\n")
    assert log.reason(was_ready) == (expected or lines[-1])


def test_an_old_error_is_not_the_reason(monkeypatch):
    log, now = Log(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log.add("RuntimeError: long ago")
    now[0] = 1000.0
    log.add("INFO last word")
    assert log.reason(was_ready=True) == "INFO last word"


def test_an_end_by_a_signal_is_named():
    assert [ended(3), ended(-9), ended(-200)] == [
        "ended with status 3", "was ended by SIGKILL", "was ended by signal 200",
    ]  # fmt: skip
