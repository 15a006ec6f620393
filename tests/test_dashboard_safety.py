"""What a browser or a link may not do: read files, run code, ask for more than there is."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard.__main__ import is_loopback, why_not
from dashboard.guard import Guard
from dashboard.limits import Limits
from dashboard.links import decode, encode
from dashboard.safety import admit, check_size, named, read_untrusted, with_names
from dashboard.state import DEFAULT
from dashboard.work import load
from tests.dashboard_server import until_it_answers
from tests.runs import azure_csv, document, stream
from tests.tools import free_port
from twin.errors import InputError
from twin.scenario import load_scenario

LIMITS = Limits()
ROOT = Path(__file__).parents[1]


def changed(key, value):
    """The default scenario with one key, given as a path, replaced."""
    copy = json.loads(json.dumps(DEFAULT))
    here = copy
    *steps, last = key.split(".")
    for step in steps:
        here = here[int(step)] if step.isdigit() else here.setdefault(step, {})
    here[int(last) if last.isdigit() else last] = value
    return copy


HOSTILE = [
    ("model", "/etc", "not in the catalogue"),
    ("model", ".", "not in the catalogue"),
    ("hardware.step_time", "/etc/passwd", "would be a file"),
    ("traffic", "/etc/passwd", "would be a file"),
    ("traffic.0", {"trace": "/etc/passwd"}, "no trace uploaded"),
    ("traffic.0", {"trace": "../../x.csv"}, "no trace uploaded"),
    ("traffic.0.lengths_from", "/proc/self/environ", "no trace uploaded"),
    ("traffic.0", {"trace": ["/etc/passwd"]}, "no trace uploaded"),
    ("cluster.hpa", "/etc/passwd", "would be a file"),
    ("cluster.keda", "hpa.yaml", "would be a file"),
    ("cluster.predictive", {"history": "/etc/passwd"}, "would be a file"),
    ("policy", {"tiers": [{"name": "A", "order": "os.system"}]}, "no built-in order"),
    (
        "policy",
        {"preset": "tiered", "tiers": [{"name": "A", "order": "subprocess.run"}]},
        "no built-in order",
    ),
    ("policy", {"tiers": [{"name": "A", "order": {"x": 1}}]}, "no built-in order"),
]


@pytest.mark.parametrize(("key", "value", "message"), HOSTILE)
def test_files_and_code_are_refused_before_anything_is_loaded(key, value, message, monkeypatch):
    monkeypatch.setattr("dashboard.work.load_scenario", lambda *_: pytest.fail("it was loaded"))
    hostile = changed(key, value)
    with pytest.raises(InputError, match=message):
        load({"document": hostile, "uploads": {}}, LIMITS)
    with pytest.raises(InputError, match=message):
        load({"document": decode(encode(hostile), LIMITS), "uploads": {}}, LIMITS)


def test_changes_of_a_comparison_are_looked_at_too():
    for change in (
        "policy.tiers=[{name: A, order: os.system}]",
        "traffic.0.trace=/etc/passwd",
        "cluster.hpa=/etc/passwd",
    ):
        with pytest.raises(InputError):
            load({"document": DEFAULT, "uploads": {}}, LIMITS, [change])


def test_every_key_that_names_a_file_is_known():
    """A new one shows here, so that it is thought of in dashboard/safety.py."""
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "twin").glob("scenario*.py")
    )
    resolved = set(re.findall(r"origin\.resolve\(([^)]*)\)", source))
    assert resolved == {
        'name, "traffic"', 'name, "cluster", key', 'prediction["history"], *place', 'document.model, "model"',
        'document.hardware.step_time, "hardware", "step_time"', 'stream[key], "traffic", i, key', 'name, "model"',
        'hardware.step_time, "hardware", "step_time"', 'stream.lengths_from, *here, "lengths_from"',
        'stream.trace, *here, "trace"',
    }  # fmt: skip


def test_uploads_go_by_name_and_no_path_comes_back(tmp_path):
    trace = azure_csv(tmp_path, [("2023-11-16 18:00:00", 10, 5), ("2023-11-16 18:00:01", 10, 5)])
    source = document(traffic=[{"trace": "mine.csv"}])
    uploads = {"mine.csv": trace}
    scenario = load({"document": source, "uploads": uploads}, LIMITS)
    assert str(scenario.traffic[0].path) == trace
    assert named(scenario.to_dict(), uploads)["traffic"][0]["trace"] == "mine.csv"
    assert with_names(f"{trace}: line 3", uploads) == "mine.csv: line 3"
    with pytest.raises(InputError, match="no trace uploaded"):
        admit(source, {})
    with pytest.raises(InputError, match="file of the server"):
        check_size(scenario, {}, LIMITS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (document(traffic=[stream(requests=300_000)]), "at most 200,000"),
        (document(cluster={"replicas": 100}), "at most 64"),
        (document(engine={"num_gpu_blocks_override": 6_000_000}), "KV blocks"),
    ],
)
def test_sizes_are_limited(source, message):
    with pytest.raises(InputError, match=message):
        check_size(load_scenario(source), {}, LIMITS)


def test_yaml_is_limited():
    assert read_untrusted(json.dumps(DEFAULT), {}, LIMITS) == DEFAULT
    for text, message in (
        ("x" * 300_000, "more than 200,000 bytes"),
        ("- a\n- b", "no mapping"),
        ("a: !!python/object/apply:os.system [ls]", "tag"),
        ("a: [", "not readable as YAML"),
        ("a: &a [1,1,1,1,1,1,1,1]\nb: &b [" + "*a," * 9 + "]\nc: &c [" + "*b," * 9 + "]\nd: &d [" + "*c," * 9
         + "]\ne: &e [" + "*d," * 9 + "]\nf: [" + "*e," * 9 + "]", "values"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            read_untrusted(text, {}, LIMITS)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(), st.integers() | st.text() | st.none() | st.lists(st.floats(allow_nan=False))
    )
)
def test_links_restore_what_they_were_made_of(data):
    text = encode(data)
    assert re.fullmatch(r"[A-Za-z0-9_-]*", text)
    assert decode(text, LIMITS) == data


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_other_links_are_refused(text):
    with pytest.raises(InputError, match="link"):
        decode(text, LIMITS)


def test_a_link_that_unpacks_to_much_more_is_refused():
    bomb = base64.urlsafe_b64encode(zlib.compress(b'{"a":"' + b"x" * 50_000_000 + b'"}')).decode()
    with pytest.raises(InputError, match="more than 200,000 bytes"):
        decode(bomb, LIMITS)
    with pytest.raises(InputError):
        decode(base64.urlsafe_b64encode(zlib.compress(b"[1]")).decode(), LIMITS)


FORBIDDEN = (
    "/proc/self/environ",
    "/proc/self/status",
    "/proc/1/cmdline",
    "/sys/kernel/osrelease",
    "/dev/stdin",
    "/dev/zero",
    "/dev/fd/0",
    "/etc/passwd",
    "/usr/share/dict/words",
    "/usr/bin/env",
    "README.md",
    "examples/chat-8b.yaml",
    "pyproject.toml",
    "../work",
)


def test_a_worker_opens_nothing_else(tmp_path):
    """Even if a scenario got so far: the process itself refuses."""
    secret, upload = tmp_path / "secret.csv", tmp_path / "upload.csv"
    link = tmp_path / "link.csv"
    for path in (secret, upload):
        path.write_text("x")
    link.symlink_to(secret)
    script = """
import os, sys
from pathlib import Path
from dashboard.guard import Guard
guard = Guard()
guard.uploads = frozenset([sys.argv[1]])
sys.addaudithook(guard)
import decimal, json.tool
open(sys.argv[1]).read(), Path(sys.argv[1]).read_bytes(), os.urandom(3)
open("/dev/null").close()
for name in sys.argv[2:]:
    for opened in (open, Path.read_bytes, lambda path: os.open(path, os.O_RDONLY)):
        try:
            opened(Path(name))
        except PermissionError as error:
            assert "the page takes uploads only" in str(error), error
        else:
            print(name)
"""
    names = [str(upload), str(secret), str(link), f"{ROOT}/twin/../README.md", *FORBIDDEN]
    done = subprocess.run(
        [sys.executable, "-c", script, *names], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert f"refused to open {os.path.realpath(secret)}" in done.stderr
    assert Guard()("import", ("os",)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "--port must be 1 to 65535, got 99999"),
        (["--port", "0"], "--port must be 1 to 65535, got 0"),
        (["--address", "999.1.1.1"], "--address 999.1.1.1 --port 8501: cannot listen there"),
        (["--address", "x" * 300], "cannot listen there"),
    ],
)
def test_where_nobody_can_listen_is_told_in_a_sentence(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "dashboard", *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen there" in why_not("127.0.0.1", taken.getsockname()[1])
    assert not why_not("127.0.0.1", free_port())


def test_a_signal_ends_it_though_nobody_reads_its_log():
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "dashboard", "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        while b"http://" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()
        until_it_answers(process, port)
        process.terminate()
        process.wait(30)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("address", "is_safe"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("x", False),
    ],
)
def test_loopback(address, is_safe):
    assert is_loopback(address) == is_safe
