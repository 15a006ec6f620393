"""Profiles built from op tables: from made-up kernels, and from the package where it is installed."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twin.errors import InputError
from twin.scenario import shipped_profiles
from twin.step_time import op_tables
from twin.step_time.catalogue import config_of, find_gpu, find_model, parse_model
from twin.step_time.layer_tables import layer_profile
from twin.step_time.op_tables import Kernels, build
from twin.step_time.shipped import Subject, find

ROOT = Path(__file__).parents[1]
MODEL, H100 = find_model("meta-llama/Llama-3.1-8B"), find_gpu("H100")
KERNELS = Kernels(
    dense=lambda tokens: 5.0 + 0.02 * max(tokens - 128, 0),
    comm=lambda tokens: 0.5 + 0.001 * tokens,
    sample=lambda requests: 0.4,
    prefill_attention=lambda batch, new, cached: 0.8 + batch * 1e-6 * (new * cached + new * (new + 1) / 2),
    decode_attention=lambda batch, context: 0.3 + 4e-5 * batch * context,
)  # fmt: skip
"""Milliseconds that follow the formula exactly."""


def built(kernels=KERNELS, tp=2, dtype="bfloat16"):
    return build(kernels, MODEL, H100, tp, dtype, "bfloat16", 400_000, "2026-01-01")


def test_a_profile_gives_the_times_it_was_made_of():
    step = built().compile(
        max_num_batched_tokens=8192, max_num_seqs=256, async_scheduling=True, eager=True
    )
    for decodes, chunk in ((1, 0), (64, 0), (0, 512), (200, 3000)):
        tokens, context, pairs = decodes + chunk, 1000 * decodes, chunk * (chunk + 1) // 2
        told = step.step_ps(tokens, decodes + 1, 1, pairs, decodes, context)
        told -= step.gap_ps + step.gap_seq_ps * (decodes + 1)
        ms = KERNELS.dense(tokens) + KERNELS.comm(tokens) + KERNELS.sample(1)
        ms += KERNELS.prefill_attention(1, chunk, 0) if chunk else 0
        ms += KERNELS.decode_attention(decodes, 1000) if decodes else 0
        assert told / 1e9 == pytest.approx(ms, rel=0.006)


def test_errors_against_the_tables_are_told():
    errors = built().provenance.fit_error
    assert all(value < 0.01 for value in errors.values())
    bent = replace(
        KERNELS, decode_attention=lambda b, c: 0.3 + 4e-5 * b * c * (1.5 if c > 2000 else 1)
    )
    assert built(bent).provenance.fit_error["decode_attention_vs_tables_max"] > 0.05  # fmt: skip


def test_16_bit_noise_is_averaged_and_fp8_teeth_are_cut():
    values = np.array([4.0, 5.0, 4.6, 4.8, 7.0, 6.0])
    pooled, lower = op_tables._pooled(values), op_tables._envelope(values)
    assert (np.diff(pooled) >= 0).all()
    assert (np.diff(lower) >= 0).all()
    assert pooled[1] == pytest.approx(pooled[2])
    assert 4.6 < pooled[1] < 5.0
    assert lower.tolist() == [4.0, 4.6, 4.6, 4.8, 6.0, 6.0]
    teeth = replace(KERNELS, dense=lambda m: 5.0 + 0.02 * m + (3.0 if 256 < m < 500 else 0.0))
    assert dict(built(teeth, dtype="fp8").dense_ps)[1] == pytest.approx(5.02e9, rel=1e-3)
    step = built(teeth, dtype="fp8").compile(
        max_num_batched_tokens=1024, max_num_seqs=64, async_scheduling=False, eager=True
    )
    assert step.tokens_ps[300] < step.tokens_ps[512]


def test_thinning_keeps_within_the_tolerance():
    counts = list(range(1, 400))
    ms = np.array([3 + 0.01 * n + (n > 200) * 2 for n in counts])
    thin = op_tables._thin(counts, ms)
    assert len(thin) < 12
    x, y = zip(*thin, strict=True)
    assert np.abs(np.interp(counts, x, y) / (ms * 1e9) - 1).max() <= op_tables.TOLERANCE + 1e-6


def test_no_slope_is_less_than_memory_gives():
    flat = replace(KERNELS, decode_attention=lambda batch, context: 0.4)
    bytes_per_token = 131072 / 2
    slopes = [ps for _, ps in built(flat).decode_context_ps]
    assert min(slopes) == pytest.approx(1e12 * bytes_per_token / H100.bandwidth, rel=1e-4)


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-70B", "Qwen/Qwen3-14B", "Qwen/Qwen3-30B-A3B"]
)
def test_a_config_of_a_model_reads_back(name):
    model = find_model(name)
    assert parse_model(config_of(model), name) == model


def test_gpus_and_types_without_tables_are_refused():
    for arguments, message in (
        (("x", "L4", 1, "bfloat16", "auto", False), "no op tables for L4"),
        (("x", "H100", 1, "int8", "auto", False), "no op tables for int8"),
    ):
        if importlib.util.find_spec("aiconfigurator_core") is None:
            message = "the op tables are not installed"
        with pytest.raises(InputError, match=message):
            op_tables.open_kernels(*arguments)


# With the package


tables = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None,
    reason="the extra `profiles` (aiconfigurator-core) is not installed",
)


@tables
def test_the_command_builds_the_shipped_profile(tmp_path):
    path = tmp_path / "p.json"
    (packed,) = shipped_profiles("H100")
    date = packed["provenance"]["date"]
    command = [
        sys.executable,
        "-m",
        "twin",
        "profile",
        "build",
        "--model",
        MODEL.name,
        "--gpu",
        "H100",
    ]
    run = subprocess.run(
        [*command, "--date", date, "--output", str(path)], cwd=ROOT, capture_output=True, text=True
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "prefill attention vs tables mean" in run.stdout
    shipped = find(packed, Subject(MODEL.name, 1, "bfloat16", "bfloat16"), "f")
    own = json.loads(path.read_text(encoding="utf-8"))
    assert own == json.loads(json.dumps(shipped.to_dict()))


@tables
def test_measured_runs_inside_the_package_are_never_read(tmp_path):
    """The silicon file lies beside the tables; an audit hook sees every file that is opened."""
    script = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from twin.step_time.op_tables import open_kernels
open_kernels("meta-llama/Llama-3.1-8B", "A100", 1, "bfloat16", "bfloat16", False).dense(64)
assert any("a100_sxm" in name for name in opened), opened[-5:]
assert not any("silicon_sample" in name for name in opened)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


# Per-layer tables


def test_layer_tables_give_the_times_of_their_kernels():
    counts, layers = (1, 64, 256), MODEL.layers
    kernels = (
        "layernorm",
        "qkv_proj",
        "rotary_emb",
        "o_proj",
        "gate_up_proj",
        "act_fn",
        "down_proj",
    )
    dense = [
        {"layer": name, "tokens": str(n), "time_us": "2.0"}
        for name in (*kernels, "embedding", "final_layernorm")
        for n in counts
    ]  # fmt: skip
    sequences = [
        {"layer": name, "sequences": str(n), "time_us": "3.0"} for name in ("lm_head", "sampler") for n in (1, 256)
    ]  # fmt: skip

    def row(chunk, cached, decodes, context):
        pairs, total = chunk * cached + chunk * (chunk + 1) / 2, decodes * (context + 1)
        us = (10 + 1e-3 * pairs if chunk else 0) + (1 + 2e-3 * total if decodes else 0)
        us += 5e-4 * total if chunk and decodes else 0
        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        values = map(str, (chunk, cached, decodes, context))
        return dict(zip(names, values, strict=True)) | {"time_us": str(us)}

    attention = [
        row(chunk, cached, decodes, context)
        for chunk in (0, 64, 128) for cached in (0, 512)
        for decodes in (0, 1, 64) for context in (128, 1024)
        if chunk or decodes
    ]  # fmt: skip
    skew = [{"pc": "0", "skew_rate_label": "sr<=15%", "n_label": "n<=64"}]
    skew[0] |= {"alpha": "0.1", "n_samples": "4"}
    of = (MODEL, "X", "vLLM", "layer tables")
    even = layer_profile(dense, sequences, attention, skew, [500.0] * 9, *of)
    uneven = layer_profile(dense, sequences, attention, skew, [100.0] * 9 + [4100.0], *of)
    step = even.compile(
        max_num_batched_tokens=256, max_num_seqs=64, async_scheduling=False, eager=True
    )
    host = step.host_ps[64]
    decode_us = layers * (16 + 1 + 2e-3 * 64 * 501) + 4 + 6
    assert (step.step_ps(64, 64, 64, 0, 64, 64 * 501) - host) / 1e6 == pytest.approx(
        decode_us, rel=0.01
    )
    mixed_us = layers * (16 + 1 + 2.5e-3 * 64 * 501 + 10 + 1e-3 * 128 * 129 / 2) + 4 + 6
    told = step.step_ps(192, 64, 64, 128 * 129 // 2, 64, 64 * 501)
    assert (told - host) / 1e6 == pytest.approx(mixed_us, rel=0.02)
    slopes = [dict(profile.decode_context_ps)[64] for profile in (even, uneven)]
    assert slopes[1] == pytest.approx(slopes[0] * (1 + 0.1 * (4100 / 500 - 1)), rel=0.15)
    short = [row for row in dense if row["layer"] != "qkv_proj"]
    with pytest.raises(InputError, match="no layer 'qkv_proj'"):
        layer_profile(short, sequences, attention, skew, [1.0], *of)
