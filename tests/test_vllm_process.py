"""What vLLM's engine process loads: the shared scheduler and the plug-in, nothing else of ours."""

import os
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
    "real.middleware": {
        "real.middleware", "real.hints", "real.exchange", "real.replies", "real.request_hints",
    },
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


def test_the_wheel_works_beside_vllm_without_what_it_depends_on(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, tracked.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    script = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split())); "
        "import real.scheduler, real.middleware; "
        "print(real.scheduler.__file__, real.scheduler.make_scheduler, real.middleware.TwinMiddleware)"
    )
    blocked = " ".join(name for name in OURS.split() if name != "aiohttp")
    run = subprocess.run(
        [sys.executable, "-c", script, blocked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith(str(target))
