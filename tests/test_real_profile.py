"""Micro-benchmarks of a model's operations, and the profile that is made of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from real.profile import CHUNKS, products
from real.profile_tables import bandwidths, job_of, profile_of, run_job
from real.tiny import CONFIG, write_tiny_model
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.step_time.catalogue import find_model, parse_model
from twin.step_time.profiles import parse_profile

ROOT = Path(__file__).parents[1]
MODEL = parse_model(CONFIG, "tiny")
TORCH = os.environ.get("VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
JOB = {
    "device": "cpu", "dtype": "float32", "max_tokens": 64, "max_seqs": 8, "max_context": 600, "budget_s": 60.0,
    "shape": {"tp": 1, "hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 4, "head_dim": 64, "vocab": 264},
}  # fmt: skip


def tables():
    """As a machine would give them on which everything is linear."""
    tokens = (1, 8, 64)
    return {
        "device": "a GPU", "torch": "2", "wall_s": 1.0, "skipped": [], "all_reduce": [[n, 1e-5] for n in tokens],
        "copy": [["device", 1 << 20, 1e-6], ["device", 1 << 30, 1e-3], ["host", 1 << 30, 0.02]],
        "products": {
            **{name: [[n, 1e-5 + n * 1e-6] for n in tokens] for name in ("qkv", "o", "gate_up", "down")},
            "lm_head": [[1, 2e-5], [8, 1e-5]],
        },
        "between": [[n, 5e-6] for n in tokens],
        "prefill": [[n, c, 1e-9 * (n * c + n * (n + 1) / 2)] for n, c in CHUNKS[:4]],
        "decode": [[b, c, b * 1e-6 + b * c * 1e-8] for b in (1, 2, 8) for c in (128, 512)],
    }  # fmt: skip


def test_a_profile_is_the_sum_of_its_operations():
    made, wrong = profile_of(tables(), JOB, MODEL, "H100", "float32")
    made = parse_profile(json.loads(json.dumps(made.to_dict())), "p")
    assert wrong == pytest.approx({"prefill_attention": 0, "decode_attention": 0}, abs=1e-9)
    steps = made.compile(
        max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=True, eager=True
    )
    layers, n, context = 4, 8, 8 * 300
    dense = layers * (4 * (1e-5 + n * 1e-6) + 5e-6) + 2 * layers * 1e-5
    attention = layers * (8 * 1e-6 + context * 1e-8)
    found = steps.step_ps(n, 8, 8, 0, 8, context) / 1e12
    assert found == pytest.approx(dense + attention + 2e-5, rel=1e-6)
    prefill = steps.step_ps(n, 1, 0, 1000, 0, 0) / 1e12
    assert prefill == pytest.approx(dense + layers * 1000 * 1e-9, rel=1e-6)
    # A larger batch that was measured to be faster takes as long as the smaller one.
    assert made.sample_ps[-1] == (8, 20_000_000)
    assert bandwidths(tables()) == pytest.approx(
        {"device": 2 * (1 << 30) / 1e-3, "host": (1 << 30) / 0.02}
    )


@pytest.mark.parametrize("missing", ["prefill", "decode", "between", "lm_head"])
def test_what_a_step_needs_must_have_been_measured(missing):
    found = tables()
    if missing in found:
        found[missing] = []
    else:
        found["products"][missing] = []
    with pytest.raises(InputError, match=f"no time or memory to measure {missing}"):
        profile_of(found, JOB, MODEL, "H100", "float32")


def test_decodes_at_one_context_do_not_tell_a_slope():
    with pytest.raises(InputError, match="one context only"):
        profile_of(tables() | {"decode": [[1, 128, 1e-5]]}, JOB, MODEL, "H100", "float32")


def test_products_are_those_of_a_device():
    job = job_of(load_scenario(ROOT / "examples/chat-8b.yaml"), "cuda", 60.0)
    shape = job["shape"]
    assert shape["hidden"] == find_model("meta-llama/Llama-3.1-8B").hidden
    assert (job["dtype"], shape["tp"]) == ("bfloat16", 1)
    assert products(shape) == {
        "qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096),
        "lm_head": (4096, 128256),
    }  # fmt: skip
    assert products(shape | {"tp": 4})["qkv"] == (4096, 1536)
    assert products(shape | {"tp": 4})["down"] == (3584, 4096)


@pytest.mark.skipif(not Path(TORCH).exists(), reason="no interpreter with torch: set VLLM_PYTHON")
def test_on_this_machine(tmp_path):
    """Two processes share the model, so that the all-reduce is measured, too."""
    job = JOB | {"shape": JOB["shape"] | {"tp": 2}, "max_tokens": 32}
    found = run_job(job, TORCH, tmp_path)
    assert found["skipped"] == []
    assert found["device"] == "cpu"
    assert all(seconds > 0 for points in found["products"].values() for *_, seconds in points)
    assert [n for n, _ in found["all_reduce"]] == [n for n, _ in found["products"]["qkv"]]
    made, _ = profile_of(found, job, MODEL, "cpu", "float32")
    assert made.comm_ps
    assert made.max_tokens == 32
    steps = made.compile(max_num_batched_tokens=32, max_num_seqs=8, async_scheduling=False)
    assert steps.step_ps(32, 8, 8, 0, 8, 800) > steps.step_ps(8, 8, 8, 0, 8, 800) > 0


def test_the_command_names_what_is_wrong(tmp_path):
    write_tiny_model(tmp_path)
    command = [sys.executable, "-m", "real", "profile", "examples/chat-8b.yaml", "--out"]
    for options, words in (
        (["x.txt"], "must be a .json file"),
        ([str(tmp_path / "p.json"), "--device", "tpu"], "--device tpu: must be cuda or cpu"),
        ([str(tmp_path / "p.json"), "--python", "/bin/false"], "the measurement failed"),
    ):
        run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 2
        assert words in run.stderr
