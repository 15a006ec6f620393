"""The catalogue, and reading a model's own config.json."""

import dataclasses

import pytest

from twin.errors import InputError
from twin.scenario import read_model
from twin.step_time.catalogue import (
    GPUS,
    MODELS,
    check_tensor_parallel,
    find_gpu,
    find_model,
    parse_model,
)
from twin.step_time.memory import weight_bytes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "head_dim": 128,
    "sliding_window": None,
    "use_sliding_window": False,
}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_parameter_counts_are_the_published_ones(name, params):
    assert find_model(name).params == params


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA, "meta-llama/Llama-3.1-8B"), (QWEN3, "Qwen/Qwen3-8B")]
)
def test_a_config_gives_the_catalogue_entry(config, name):
    assert parse_model(config, "folder") == dataclasses.replace(MODELS[name], name="folder")


def test_tied_embeddings_and_biases_are_counted():
    plain = parse_model(LLAMA, "a")
    assert (
        plain.params - parse_model(LLAMA | {"tie_word_embeddings": True}, "a").params
        == 128256 * 4096
    )
    assert parse_model(LLAMA | {"attention_bias": True}, "a").params - plain.params == 32 * 48 * 128
    qwen2 = {k: v for k, v in LLAMA.items() if k != "attention_bias"} | {
        "architectures": ["Qwen2ForCausalLM"]
    }
    assert parse_model(qwen2, "a").qkv_bias


def test_heads_without_their_own_key_value_heads():
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert parse_model(config, "a").kv_heads == 32


def test_gpus_have_plausible_facts():
    for gpu in GPUS.values():
        assert 20e9 < gpu.memory_bytes < 300e9
        assert 0.2e12 < gpu.bandwidth < 10e12
        assert gpu.fp8_flops is None or gpu.fp8_flops >= 1.9 * gpu.bf16_flops


@pytest.mark.parametrize(
    ("find", "value", "parts"),
    [
        (
            find_model,
            "Llama-3.1-8b",
            ["did you mean 'meta-llama/Llama-3.1-8B'", "Qwen/Qwen3-32B", "config.json"],
        ),
        (find_model, "gpt-5", ["model", "'gpt-5'", "Known"]),
        (find_model, "", ["model", "Known"]),
        (find_gpu, "h100", ["hardware.gpu", "did you mean 'H100'", "A100"]),
        (find_gpu, "TPU", ["hardware.gpu", "'TPU'", "Known"]),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all(find, value, parts):
    with pytest.raises(InputError) as error:
        find(value)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_experts": 128}, ["num_experts", "mixture of experts", "LlamaForCausalLM"]),
        ({"num_local_experts": 8}, ["mixture of experts"]),
        ({"kv_lora_rank": 512}, ["latent attention"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "sliding_attention"],
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            ["layer_types", "linear_attention"],
        ),
        ({"sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"sliding_window": 4096, "use_sliding_window": True}, ["sliding_window"]),
        ({"hybrid_override_pattern": "M-M*"}, ["hybrid"]),
        ({"mamba_d_state": 16}, ["state-space"]),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ["quantization_config", "hardware.dtype"],
        ),
        ({"text_config": {}, "vision_config": {"x": 1}}, ["vision_config", "encoder"]),
        (
            {"architectures": ["GptOssForCausalLM"]},
            ["architectures", "GptOssForCausalLM", "LlamaForCausalLM"],
        ),
        ({"architectures": None}, ["architectures", "None"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "4096"}, ["hidden_size", "'4096'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0", "at least 1"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads (5)", "(32)"]),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": None},
            ["num_key_value_heads is missing"],
        ),
        ({"hidden_size": 4097}, ["head_dim"]),
        ({"layer_types": 5}, ["layer_types", "5"]),
        ({"layer_types": ["full_attention"] * 3}, ["layer_types names 3 layers", "is 32"]),
        ({"first_k_dense_replace": 3}, ["first_k_dense_replace", "with and without experts"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers", "several tokens"]),
        ({"position_embedding_type": "alibi"}, ["position_embedding_type is 'alibi'"]),
        ({"alibi": True}, ["alibi"]),
    ],
)
def test_what_is_not_modelled_or_wrong_is_refused_by_name(changes, parts):
    with pytest.raises(InputError) as error:
        parse_model(LLAMA | changes, "folder")
    assert str(error.value).startswith("model: folder/config.json: ")
    assert all(part in str(error.value) for part in parts)


MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            MIXTRAL | {"num_experts_per_tok": 99},
            r"num_experts_per_tok \(99\) must be at most num_local_experts \(8\)",
        ),
        (
            QWEN_MOE | {"num_experts_per_tok": 9},
            r"num_experts_per_tok \(9\) must be at most num_experts \(8\)",
        ),
        (QWEN_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ],
)
def test_mixtures_that_cannot_be_or_are_not_modelled(config, part):
    assert parse_model(MIXTRAL, "f").experts == parse_model(QWEN_MOE, "f").experts == 8
    with pytest.raises(InputError, match=part):
        parse_model(config, "f")


def test_quantised_checkpoints_are_told_what_to_do():
    with pytest.raises(
        InputError, match=r"not modelled\. Give the folder of the unquantised model"
    ):
        parse_model(LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "f")


def test_the_vocabulary_is_padded_as_vllm_pads_it():
    odd = parse_model(LLAMA | {"vocab_size": 32001}, "f")
    assert odd.padded_vocab == 32064
    check_tensor_parallel(odd, 2)
    more = weight_bytes(odd, 2, "bfloat16")
    assert more == weight_bytes(dataclasses.replace(odd, vocab=32064), 2, "bfloat16")
    with pytest.raises(InputError, match="32064 vocabulary rows"):
        check_tensor_parallel(dataclasses.replace(odd, heads=33, kv_heads=11, intermediate=33), 11)


def test_another_gpu_is_no_spelling_of_one_that_is_known():
    with pytest.raises(InputError) as error:
        find_gpu("V100")
    assert "did you mean" not in str(error.value)


def test_a_folder_that_is_not_there_is_said():
    with pytest.raises(InputError, match=r"model: there is no folder .*nope"):
        read_model("./nope")


def test_windows_that_are_off_are_fine():
    assert parse_model(QWEN3 | {"sliding_window": 4096}, "a").layers == 36
    assert (
        parse_model(
            QWEN3 | {"layer_types": ["full_attention"] * 36, "sliding_window": 9}, "a"
        ).layers
        == 36
    )


@pytest.mark.parametrize("value", [None, [], "text"])
def test_a_config_that_is_no_mapping_is_refused(value):
    with pytest.raises(InputError, match=r"config\.json"):
        parse_model(value, "folder")


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_tensor_parallel_sizes_that_fit(tp):
    check_tensor_parallel(MODELS["meta-llama/Llama-3.1-8B"], tp)


@pytest.mark.parametrize("tp", [0, -1, 3, 5, 64])
def test_tensor_parallel_sizes_that_do_not(tp):
    with pytest.raises(InputError, match=f"hardware.tensor_parallel_size: {tp} "):
        check_tensor_parallel(MODELS["meta-llama/Llama-3.1-8B"], tp)
