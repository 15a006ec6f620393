"""`twin-real check` reports what is there and what is not."""

import ast
import subprocess
import sys
from pathlib import Path

from real.vllm_names import VLLM_NAMES, missing_names

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


def test_every_attribute_the_plug_in_asks_for_is_on_the_list():
    for node in ast.parse((ROOT / "real/scheduler.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SCHEDULER_NAMES":
            wanted = ast.literal_eval(node.value)
            break
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler."
    assert {scheduler + name for name in wanted} <= set(VLLM_NAMES)


def test_check_without_vllm_says_so():
    blocked = "import sys; sys.modules['vllm'] = None; from real.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", blocked, "check"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert run.stderr.startswith("vLLM cannot be imported here")
    assert "Traceback" not in run.stderr
