"""KV blocks: against what vLLM measured, and how the terms move."""

import json

import pytest

from tests.runs import document
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.step_time.catalogue import find_gpu, find_model
from twin.step_time.memory import (
    activation_bytes,
    check_one_request_fits,
    kv_blocks,
    kv_bytes_per_token,
    usable_tokens,
    weight_bytes,
)

LLAMA_8B = find_model("meta-llama/Llama-3.1-8B")
LLAMA_70B = find_model("meta-llama/Llama-3.1-70B")
QWEN_14B = find_model("Qwen/Qwen3-14B")


def plan(model=LLAMA_8B, gpu="H100", **changes):
    arguments = {
        "tp": 1, "dtype": "bfloat16", "kv_dtype": "auto", "gpu_memory_utilization": 0.9,
        "max_num_batched_tokens": 8192, "max_num_seqs": 256, "block_size": 16,
    }  # fmt: skip
    return kv_blocks(model, find_gpu(gpu), **arguments | changes)


@pytest.mark.parametrize(
    ("model", "gpu", "changes", "measured"),
    [
        (LLAMA_70B, "H100", {"tp": 4, "max_num_batched_tokens": 2048}, 30425),
        (LLAMA_70B, "H100", {"tp": 4, "max_num_batched_tokens": 8192}, 30251),
        (LLAMA_8B, "RTX4090", {"max_num_batched_tokens": 2048}, 2588),
        (QWEN_14B, "H100", {"gpu_memory_utilization": 0.92}, 288608 // 16),
    ],
)
def test_blocks_are_within_3_percent_of_those_vllm_measured(model, gpu, changes, measured):
    assert plan(model, gpu, **changes).num_gpu_blocks == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("model", "kv_dtype", "expected"),
    [
        (LLAMA_8B, "auto", 131072),
        (LLAMA_8B, "fp8", 65536),
        (LLAMA_70B, "bfloat16", 327680),
        (QWEN_14B, "auto", 163840),
    ],
)
def test_kv_bytes_per_token(model, kv_dtype, expected):
    assert kv_bytes_per_token(model, "bfloat16", kv_dtype) == expected


def test_kv_of_fp8_weights_stays_at_16_bit_unless_asked():
    assert kv_bytes_per_token(LLAMA_8B, "fp8", "auto") == 131072


def test_weights_are_split_except_norms():
    assert weight_bytes(LLAMA_8B, 1, "bfloat16") == 2 * LLAMA_8B.params
    vectors = LLAMA_70B.vector_params
    assert weight_bytes(LLAMA_70B, 4, "bfloat16") == 2 * (
        (LLAMA_70B.params - vectors) // 4 + vectors
    )


def test_fp8_halves_the_matrices_only():
    matrices = LLAMA_8B.layers * LLAMA_8B.layer_matrix_params
    assert weight_bytes(LLAMA_8B, 1, "fp8") == 2 * LLAMA_8B.params - matrices


def test_key_value_heads_are_copied_beyond_their_number():
    """8 key/value heads on 16 GPUs: each GPU holds one, so a block there is as large as on 8 GPUs."""
    assert plan(LLAMA_70B, tp=16).block_bytes == plan(LLAMA_70B, tp=8).block_bytes
    q_and_rest = LLAMA_70B.params - LLAMA_70B.vector_params
    extra = 8 * LLAMA_70B.layers * 2 * 128 * 8192
    assert weight_bytes(LLAMA_70B, 16, "bfloat16") == 2 * (
        (q_and_rest + extra) // 16 + LLAMA_70B.vector_params
    )


def test_a_larger_token_budget_leaves_fewer_blocks():
    blocks = [plan(max_num_batched_tokens=n).num_gpu_blocks for n in (8192, 20480, 50000)]
    assert blocks == sorted(blocks, reverse=True)
    assert len(set(blocks)) == 3


def test_the_larger_of_forward_and_sampling_counts():
    few, many = (activation_bytes(LLAMA_8B, 1, "bfloat16", 2048, n) for n in (1, 1024))
    assert few == 2048 * (2 * 4096 + 2 * 14336) * 2
    assert many == 1024 * 128256 * 8


def test_eager_needs_no_graphs():
    assert plan(eager=True).graph_bytes == 0
    assert plan(eager=True).num_gpu_blocks > plan().num_gpu_blocks


def test_explain_shows_terms_that_add_up():
    result = plan()
    total = (
        result.weights_bytes + result.activation_bytes + result.runtime_bytes + result.graph_bytes
    )
    assert result.budget_bytes - total == result.kv_bytes
    assert result.num_gpu_blocks == result.kv_bytes // result.block_bytes
    text = result.explain()
    for part in (
        "76.50 GB",
        "-16.06 GB",
        "weights",
        "activations",
        "CUDA-graph",
        "131072",
        str(result.num_gpu_blocks),
    ):
        assert part in text


@pytest.mark.parametrize(
    ("model", "gpu", "utilization"), [(LLAMA_70B, "H100", 0.9), (LLAMA_8B, "L4", 0.7)]
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(model, gpu, utilization):
    with pytest.raises(InputError) as error:
        plan(model, gpu, gpu_memory_utilization=utilization)
    for part in (
        model.name,
        gpu,
        "weights",
        "GB",
        "tensor_parallel_size",
        "gpu_memory_utilization",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"dtype": "int3"}, ["hardware.dtype", "'int3'", "bfloat16"]),
        ({"kv_dtype": "int3"}, ["kv_cache_dtype", "'int3'", "auto", "fp8"]),
        ({"tp": 3}, ["tensor_parallel_size", "3", "32 attention heads"]),
    ],
)
def test_unknown_types_and_splits_are_refused(changes, parts):
    with pytest.raises(InputError) as error:
        plan(**changes)
    assert all(part in str(error.value) for part in parts)


def test_the_null_block_is_not_usable():
    assert usable_tokens(65, 16) == 1024
    check_one_request_fits(65, 16, 1024)
    with pytest.raises(InputError) as error:
        check_one_request_fits(65, 16, 1025)
    for part in ("max_model_len", "1025", "64 of the 65", "1024 tokens"):
        assert part in str(error.value)


def test_what_does_not_fit_names_the_options_that_made_it_so(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps(document()))
    options = ["model=meta-llama/Llama-3.1-70B", "engine.max_num_batched_tokens=4096"]
    with pytest.raises(InputError) as error:
        load_scenario(path, options)
    first, *rest = str(error.value).splitlines()
    assert all(f"--set {option}" in first for option in options)
    assert "GB  too little, before any KV cache" in "\n".join(rest)
    assert not any("left for the KV cache" in line for line in rest)


def test_more_blocks_than_fit_are_warned_of():
    blocks = load_scenario(document(engine={"num_gpu_blocks_override": None})).engine.num_gpu_blocks
    for share, number in ((1.0, 0), (1.05, 0), (1.5, 1)):
        engine = {"num_gpu_blocks_override": int(share * blocks)}
        told = load_scenario(document(engine=engine)).warnings
        assert sum("vLLM would run out of memory" in warning for warning in told) == number


@pytest.mark.parametrize(("size", "fix"), [(7, 16), (40, 32)])
def test_a_block_that_no_kernel_takes_is_refused(size, fix):
    with pytest.raises(InputError, match=rf"multiple of 16.*got {size}; choose {fix}"):
        load_scenario(document(engine={"block_size": size}))
