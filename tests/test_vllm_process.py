"""What vLLM's engine process loads: the shared scheduler and the plug-in, nothing else of ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from real.vllm_names import missing_names

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[1]
BLOCKED = "simpy optuna joblib streamlit plotly pandas pyarrow ray hypothesis pytest dashboard"

SCRIPT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2].split()))
__import__(sys.argv[1])
ours = {name for name in sys.modules if name.partition(".")[0] in ("twin", "real")}
allowed = ("twin.scheduling", "real.scheduler", "real.middleware")
print(sorted(name for name in ours - {"twin", "real"} if not name.startswith(allowed)))
"""


@pytest.mark.parametrize("module", ["twin.scheduling", "real.scheduler"])
def test_loads_with_what_vllm_installs(module):
    command = [sys.executable, "-c", SCRIPT, module, BLOCKED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_installed_vllm_has_every_name_the_plug_in_relies_on():
    assert missing_names() == []
