"""`twin-real check` reports what is there and what is not."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def test_a_version_without_rules_is_refused_before_anything_is_fetched(tmp_path):
    command = [sys.executable, "-m", "scripts.vllm_overlay", "0.31.0", str(tmp_path / "vllm")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "vLLM 0.31.0 is not known here: the rules are those of 0.32.0, 0.33.0\n"
    assert not (tmp_path / "vllm").exists()
