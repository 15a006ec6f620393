"""`twin-real check` reports what is there and what is not."""

import ast
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from real.calls import Call, Reply
from real.demo import bound, report, samples, since
from real.vllm_names import VLLM_NAMES, check_scheduler, check_version, missing_names

ROOT = Path(__file__).parents[1]


class Engine:
    limit: int

    def __init__(self):
        self.running = []
        self.count: int = 0

    def step(self):
        return self.running == [] and self.idle == 1


def test_names_that_are_there_and_names_that_are_not():
    here = f"{__name__}:"
    present = [here + "Engine.step", here + "Engine.running", here + "Engine.count"]
    present += [here + "Engine.limit", "json:JSONDecoder.decode", "signal:Signals.SIGINT"]
    absent = [here + "Engine.idle", here + "Nothing", here + "Engine.step.nothing"]
    absent += ["no_such_module:x", "signal:Signals.NOTHING", "json:JSONDecoder.nothing"]
    assert missing_names([*present, *absent]) == absent


def test_every_name_imported_from_vllm_is_on_the_list():
    listed = {name.partition(".")[0] for name in (n.partition(":")[2] for n in VLLM_NAMES)}
    for path in (ROOT / "real").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.v1"):
                assert {alias.name for alias in node.names} <= listed, path


class Scheduler:
    requests = waiting = kv_holding_waiting = running = ()


def test_an_unknown_scheduler_is_refused_by_version_and_attribute(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.1"))
    with pytest.raises(RuntimeError, match=r"0\.40\.1.*num_waiting_for_streaming_input.*_preempt"):
        check_scheduler(Scheduler())


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.34.0", "dev", "0.32.0rc1"])
def test_an_unknown_version_is_refused(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises(RuntimeError, match=f"vLLM {re.escape(version)}.*0.32.0, 0.33.0"):
        check_version()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.32.0+cpu"])
def test_a_known_version_is_taken(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    check_version()


def test_check_without_vllm_says_so():
    blocked = "import sys; sys.modules['vllm'] = None; from real.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", blocked, "check"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert run.stderr.startswith("vLLM cannot be imported here")
    assert "Traceback" not in run.stderr


def test_check_asks_another_interpreter():
    for python, status, error in (
        ("/no/such/python", 2, "error: --python /no/such/python: cannot be run: No such file"),
        (shutil.which("false"), 1, ""),
    ):
        command = [sys.executable, "-m", "real", "check", "--python", python]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (run.returncode, run.stdout) == (status, "")
        assert run.stderr.startswith(error)


# --- the table of the demo ------------------------------------------------------------------------

BUCKETS = {
    "time_to_first_token_seconds": (0.1, 0.25, 0.5, 1.0, 50.0),
    "request_queue_time_seconds": (0.3, 0.5, 1.0, 50.0),
    "e2e_request_latency_seconds": (0.3, 0.5, 0.8, 1.0, 50.0),
}
VALUES = dict(zip(BUCKETS, (0.28, 0.14, 0.29), strict=True))
COUNTED, WARM_UP = 40, 3


def exposition(policy, counted):
    """A server's /metrics after so many equal requests of each tier; those of its warm-up were slow."""
    registry = CollectorRegistry()
    prefix, labels = ("twin:", ["tier"]) if policy else ("vllm:", [])
    if policy:
        done = Counter("twin:requests", "h", ["tier", "outcome"], registry=registry)
    else:
        done = Counter("vllm:request_success", "h", ["finished_reason"], registry=registry)
    Counter("vllm:num_preemptions", "h", registry=registry).inc(counted)
    families = {
        name: Histogram(prefix + name, "h", labels, registry=registry, buckets=bounds)
        for name, bounds in BUCKETS.items()
    }
    for tier in ("ONLINE", "BATCH") if policy else ("all",):
        warm_up = 0 if tier == "BATCH" else WARM_UP
        done.labels(*((tier, "completed") if policy else ("length",))).inc(counted + warm_up)
        for name, family in families.items():
            child = family.labels(tier) if policy else family
            for value in [40.0] * warm_up + [VALUES[name]] * counted:
                child.observe(value)
    return samples(generate_latest(registry).decode())


@pytest.mark.parametrize("policy", [True, False])
def test_the_table_contradicts_neither_itself_nor_the_number_of_requests(policy):
    """TTFT just below E2E, in histograms with other buckets."""
    rows = report(since(exposition(policy, 0), exposition(policy, COUNTED)), REPLIES).splitlines()
    assert [row.split()[0] for row in rows[1:-1]] == (["ONLINE", "BATCH"] if policy else ["all"])
    for row in rows[1:-1]:
        cells = row.split()
        assert int(cells[1]) == COUNTED
        assert [float(cells[i]) for i in (2, 5, 8)] == [0.14, 0.28, 0.29]
        assert [cells[i : i + 2] for i in (3, 6, 9)] == [["<=", "0.3"]] * 3
    assert rows[-1].startswith("1 of 2 replies complete, 40 preemptions, last reply after 3.0 s")


REPLIES = [
    Reply(Call(0.0, "x", 2), token_s=[1.0, 2.0], end_s=3.0),
    Reply(Call(0.0, "x", 2), token_s=[1.0], end_s=2.0),
]


def test_the_bucket_of_a_quantile():
    assert bound([], 0.5) is None
    assert bound([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None
    assert bound([(math.inf, 100.0), (1.0, 50.0), (2.0, 99.0)], 0.5) == 1.0
    assert bound([(1.0, 50.0), (2.0, 98.0), (math.inf, 100.0)], 0.99) == math.inf


def test_a_version_without_rules_is_refused_before_anything_is_fetched(tmp_path):
    command = [sys.executable, "-m", "scripts.vllm_overlay", "0.31.0", str(tmp_path / "vllm")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "vLLM 0.31.0 is not known here: the rules are those of 0.32.0, 0.33.0\n"
    assert not (tmp_path / "vllm").exists()
