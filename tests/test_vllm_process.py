"""What vLLM's engine process loads: the shared scheduler and the plug-in, nothing else of ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from real.vllm_names import missing_names

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[1]
OURS = "simpy pandas pyarrow plotly streamlit optuna joblib ray aiohttp hypothesis pytest dashboard"
ALLOWED = {
    "twin.scheduling": set(),
    "real.middleware": {"real.middleware", "real.hints"},
    "real.scheduler": {
        "real.scheduler", "real.waiting", "real.hints", "real.exporter", "real.vllm_names",
        "twin.metrics", "twin.metrics.gauges", "twin.report", "twin.report.metric_names",
    },
}  # fmt: skip
"""Module of vLLM's processes -> what of ours it may load beside twin.scheduling."""

SCRIPT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2].split()))
__import__(sys.argv[1])
print(*(name for name in sys.modules if name.partition(".")[0] in ("twin", "real")))
"""


@pytest.mark.parametrize("module", ALLOWED)
def test_loads_with_what_vllm_installs(module):
    # vLLM itself needs some of them.
    needed = {"aiohttp"} if module == "real.scheduler" else set()
    more = "" if module == "real.scheduler" else " numpy scipy typer rich vllm"
    blocked = " ".join(name for name in (OURS + more).split() if name not in needed)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, blocked], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.splitlines()[-1].split()) - {"twin", "real"}
    scheduling = {name for name in loaded if name.startswith("twin.scheduling")}
    assert loaded - scheduling == ALLOWED[module]


def test_the_installed_vllm_has_every_name_the_plug_in_relies_on():
    assert missing_names() == []
