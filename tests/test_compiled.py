"""Compiled or not, the twin gives the same bytes; and it can be compiled wherever there is a compiler."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts.train import documents
from twin.compiled import is_compiled
from twin.scenario import load_scenario
from twin.simulation import simulate

ROOT = Path(__file__).parents[1]

RUNS = """
import copy, hashlib, json, pickle, sys
from dataclasses import asdict
from tests.engine.whole import KINDS, left_of
from twin.compiled import is_compiled
from twin.report.json_summary import summarize
from twin.simulation import load_scenario, simulate

def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()

found = {"compiled": is_compiled()}
for seed in range(int(sys.argv[1])):
    kind = KINDS[seed % len(KINDS)]
    found[f"{kind} {seed}"] = digest(left_of(seed, kind))
for name, document in json.load(sys.stdin).items():
    scenario = load_scenario(document)
    result = simulate(scenario, observe=True, watch=(3,))
    # As they go to other processes and come back.
    assert pickle.loads(pickle.dumps(scenario)) == copy.deepcopy(scenario) == scenario
    assert pickle.loads(pickle.dumps(result)).records == result.records
    records = [asdict(record) | {"itl_ps": list(record.itl_ps)} for record in result.records]
    told = {k: v for k, v in summarize(result).items() if k not in ("wall_s", "requests_per_wall_s", "compiled")}
    found[name] = digest([records, told, result.series, result.log, result.decisions])
print(json.dumps(found))
"""
WORKLOADS = 80

CHAT = {
    "arrivals": {"process": "gamma", "rate": 4, "cv": 2.0},
    "sessions": {"turns": {"uniform": [1, 6]}, "think_time": {"exponential": 2}, "system_prompt_tokens": 300},
    "prompt_tokens": {"lognormal": {"median": 200, "sigma": 1.0}},
    "output_tokens": {"lognormal": {"median": 100, "sigma": 0.8}},
    "tiers": {"ONLINE": 0.6, "BATCH": 0.3, "OFFLINE": 0.1},
    "requests": 300,
}  # fmt: skip


def scenario(policy: str, **parts: object) -> dict[str, object]:
    """Conversations that find parts of their prompts cached, on engines that are short of KV blocks."""
    return {
        "name": "compiled",
        "model": "meta-llama/Llama-3.1-8B",
        "hardware": {"gpu": "H100", "tensor_parallel_size": 1, "dtype": "bfloat16"},
        "engine": {
            "max_num_seqs": 16,
            "max_model_len": 8192,
            "num_gpu_blocks_override": 800,
        },
        "policy": policy,
        "traffic": [CHAT],
        "cluster": {"replicas": 2, "router": "least_connections"},
        "run": {"seed": 7},
    } | parts


SCENARIOS = {
    "tiered": scenario("tiered"),
    "slo": scenario("slo", traffic=[CHAT | {"timeouts": {"ttft": 3, "total": 30}}]),
    "stock": scenario("vllm-fcfs"),
    # Picoseconds beyond what a float can tell apart.
    "late": scenario("fcfs", traffic=[CHAT | {"arrivals": {"process": "poisson", "rate": 0.01}}]),
}


def why_not() -> str | None:
    """Why nothing can be compiled here, None if it can."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no headers of Python"
    if importlib.util.find_spec("mypyc") is None:
        return "no mypyc"
    return None


def runs(tree: Path) -> dict[str, object]:
    """What the twin of a tree gives."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(WORKLOADS)],
        input=json.dumps(SCENARIOS),
        capture_output=True,
        text=True,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
    )
    assert not done.returncode, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree whose hot modules are compiled."""
    reason = why_not()
    if reason is not None:
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    tree = tmp_path_factory.mktemp("compiled")
    for name in ("twin", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        capture_output=True,
        text=True,
        # Not optimised, which is most of the time that compiling takes.
        env=os.environ | {"TWIN_PURE_PYTHON": "0", "TWIN_OPTIMIZE": "0"},
    )
    assert not done.returncode, done.stdout + done.stderr
    return tree


@pytest.mark.timeout(600)
def test_compiled_and_pure_give_the_same_bytes(compiled):
    pure, fast = runs(ROOT), runs(compiled)
    assert (pure.pop("compiled"), fast.pop("compiled")) == (is_compiled(), True)
    assert fast == pure
    assert len(pure) == WORKLOADS + len(SCENARIOS)


def test_what_is_compiled_is_asked_of_python():
    assert is_compiled() is not importlib.util.find_spec("twin.clock").origin.endswith(".py")


def test_frozen_values_that_are_compiled_say_how_they_are_copied():
    found = []
    for name in re.findall(r'"(twin/[a-z_/]+\.py)"', (ROOT / "setup.py").read_text("utf-8")):
        for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                "frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                found.append((name, node.name, "__reduce__" in methods))
    assert len(found) > 15
    assert not [one for one in found if not one[2]]


@pytest.mark.parametrize("wish", ["", "1"])
def test_without_mypyc_the_sources_are_installed_as_they_are(tmp_path, wish):
    """Also where it is there but is not wanted."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "twin", tmp_path / "twin")
    if not wish:
        (tmp_path / "mypyc.py").write_text("raise ImportError('not here')\n")
    code = "import runpy, sys; sys.argv = ['setup.py', '-q', 'build_ext', '--inplace']; runpy.run_path('setup.py')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"TWIN_PURE_PYTHON": wish, "PYTHONPATH": str(tmp_path)},
    )
    assert not done.returncode, done.stderr
    assert not list(tmp_path.rglob("*.so"))
    assert ("there is no mypyc" in done.stderr) is not bool(wish)


def test_what_it_is_trained_on_runs(tmp_path):
    traces = 0
    for document in documents(tmp_path, 40):
        scenario = load_scenario(document, ["policy=tiered"])
        if "trace" in document["traffic"][0]:
            assert [record.outcome for record in simulate(scenario).records] == ["completed"] * 40
            traces += 1
    assert traces == 3
