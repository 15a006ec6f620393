"""Which models and GPUs are known, and what is a model's shape? Facts only; nothing here is measured by us.

This module reads no file: `parse_model` takes the already parsed config.json of a model folder.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from twin.errors import InputError

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this (0.32, VocabParallelEmbedding)."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder with grouped-query attention and a gated MLP, or a mixture of such MLPs."""

    name: str
    layers: int
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; fewer than `heads` with grouped-query attention."""
    head_dim: int
    intermediate: int
    """Width of the MLP; of each expert in a mixture of experts."""
    vocab: int
    max_position: int
    """Longest context the model was trained for, in tokens."""
    tie_embeddings: bool = False
    """The output layer shares the embedding's weights."""
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    qkv_bias: bool = False
    """The q, k and v projections add a bias."""
    experts: int = 0
    """Experts a layer; 0 = one MLP that every token passes."""
    experts_per_token: int = 0
    """Experts that each token passes."""

    @property
    def attention_matrix_params(self) -> int:
        """Parameters of one layer's qkv and output projections."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (q + 2 * kv) + q * self.hidden

    @property
    def mlp_matrix_params(self) -> int:
        """Parameters of one MLP, or of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_matrix_params(self) -> int:
        """Parameters of one layer's matrix products, all experts and their router included."""
        mlps = self.mlp_matrix_params * max(1, self.experts)
        return self.attention_matrix_params + mlps + self.experts * self.hidden

    @property
    def vector_params(self) -> int:
        """Parameters of norms and biases, all layers together."""
        layer = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.qkv_bias:
            layer += (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * layer + self.hidden

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding and, unless tied, of the output layer."""
        return self.vocab * self.hidden * (1 if self.tie_embeddings else 2)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding as vLLM stores it: a multiple of VOCAB_MULTIPLE."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def params(self) -> int:
        """All parameters."""
        return self.embedding_params + self.layers * self.layer_matrix_params + self.vector_params


@dataclass(frozen=True)
class GpuSpec:
    """One GPU as its driver and data sheet give it."""

    name: str
    memory_bytes: int
    """What CUDA reports as total memory, which is what vLLM multiplies by gpu_memory_utilization."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    bf16_flops: float
    """Dense 16-bit tensor FLOP/s."""
    fp8_flops: float | None
    """Dense FP8 tensor FLOP/s; None = the GPU has no FP8 units."""
    link_bandwidth: float = 25e9
    """Bytes per second that a GPU sends to the others of its replica, in one direction."""


def _llama31(name: str, layers: int, hidden: int, heads: int, intermediate: int) -> ModelSpec:
    return ModelSpec(name, layers, hidden, heads, 8, 128, intermediate, 128256, 131072)


def _qwen3(name: str, layers: int, hidden: int, heads: int, intermediate: int) -> ModelSpec:
    return ModelSpec(name, layers, hidden, heads, 8, 128, intermediate, 151936, 40960, qk_norm=True)


MODELS: dict[str, ModelSpec] = {
    model.name: model
    for model in (
        _llama31("meta-llama/Llama-3.1-8B", 32, 4096, 32, 14336),
        _llama31("meta-llama/Llama-3.1-70B", 80, 8192, 64, 28672),
        _qwen3("Qwen/Qwen3-8B", 36, 4096, 32, 12288),
        _qwen3("Qwen/Qwen3-14B", 40, 5120, 40, 17408),
        _qwen3("Qwen/Qwen3-32B", 64, 5120, 64, 25600),
        ModelSpec(
            "Qwen/Qwen3-30B-A3B",
            48,
            2048,
            32,
            4,
            128,
            768,
            151936,
            40960,
            qk_norm=True,
            experts=128,
            experts_per_token=8,
        ),
    )
}
"""Shapes from the models' published config.json."""

GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("A100", 85_000_000_000, 2.039e12, 312e12, None, 300e9),  # SXM, 80 GB
        GpuSpec("H100", 85_000_000_000, 3.35e12, 989e12, 1979e12, 450e9),  # SXM, 80 GB
        GpuSpec("H200", 150_000_000_000, 4.8e12, 989e12, 1979e12, 450e9),  # SXM, 141 GB
        GpuSpec("B200", 191_500_000_000, 8.0e12, 2250e12, 4500e12, 900e9),
        GpuSpec("L40S", 47_700_000_000, 0.864e12, 362e12, 733e12, 32e9),
        GpuSpec("L4", 23_700_000_000, 0.3e12, 121e12, 242e12, 32e9),
        GpuSpec("RTX4090", 25_250_627_584, 1.008e12, 165e12, 330e12, 32e9),
        GpuSpec("RTXPRO6000", 102_000_000_000, 1.597e12, 504e12, 1007e12, 64e9),  # Server Edition
    )
}
"""Bandwidth and FLOP/s (dense, without sparsity) from NVIDIA's data sheets; memory as CUDA reports it, rounded down.
Links: NVLink where there is one, else PCIe."""


def find_model(name: str) -> ModelSpec:
    """The catalogue's model of that name. Raises InputError naming the nearest one and all that are known."""
    if name in MODELS:
        return MODELS[name]
    raise _unknown(
        "model",
        name,
        MODELS,
        "Choose one of these, or give a folder that has the model's config.json.",
    )


def catalogue_name(model: ModelSpec) -> str:
    """The catalogue's name of a model of exactly this shape; its own name where there is none."""
    for name, known in MODELS.items():
        if replace(model, name=name) == known:
            return name
    return model.name


def find_gpu(name: str) -> GpuSpec:
    """The catalogue's GPU of that name. Raises InputError naming the nearest one and all that are known."""
    if name in GPUS:
        return GPUS[name]
    raise _unknown(
        "hardware.gpu",
        name,
        GPUS,
        "Choose one of these, or write the figures of another: hardware.gpu: {name: ..., memory_bytes: ..., "
        "bandwidth: ..., bf16_flops: ...}.",
    )


def _unknown(field: str, value: str, known: Iterable[str], fix: str) -> InputError:
    names = sorted(known)
    by_lower = {name.lower(): name for name in names} | {
        name.rsplit("/", 1)[-1].lower(): name for name in names
    }
    near = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
    # V100 and H100 are a letter apart, and two products.
    alike = near and (field != "hardware.gpu" or near[0][0] == str(value)[:1].lower())
    hint = f" (did you mean {by_lower[near[0]]!r}?)" if alike else ""
    return InputError(f"{field}: unknown value {value!r}{hint}. Known: {', '.join(names)}. {fix}")


def check_tensor_parallel(model: ModelSpec, tensor_parallel_size: int) -> None:
    """Raise InputError unless every GPU gets a whole number of heads and of MLP columns.

    As in vLLM, key/value heads are copied where there are fewer of them than GPUs.
    """
    tp = tensor_parallel_size
    field = f"hardware.tensor_parallel_size: {tp}"
    if tp < 1:
        raise InputError(f"{field} must be at least 1.")
    for what, count in (
        ("attention heads", model.heads),
        ("MLP columns", model.intermediate),
        (f"vocabulary rows (padded to a multiple of {VOCAB_MULTIPLE})", model.padded_vocab),
    ):
        if count % tp:
            raise InputError(
                f"{field} does not divide the {count} {what} of {model.name}. Choose a divisor."
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise InputError(
            f"{field} neither divides nor is a multiple of the {model.kv_heads} key/value heads of {model.name}. "
            "Choose one that is."
        )


_MIXTURES = {"Qwen3MoeForCausalLM": "num_experts", "MixtralForCausalLM": "num_local_experts"}
"""Architectures whose every layer is a mixture of experts -> what their config calls the number of them."""

_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    *_MIXTURES,
)

_NOT_MODELLED = {
    "kv_lora_rank": "multi-head latent attention",
    "first_k_dense_replace": "layers with and without experts",
    "num_nextn_predict_layers": "layers that predict several tokens",
    "alibi": "attention biases by distance",
    "n_routed_experts": "shared and routed experts",
    "shared_expert_intermediate_size": "shared and routed experts",
    "mlp_only_layers": "layers with and without experts",
    "hybrid_override_pattern": "hybrid layers",
    "layers_block_type": "hybrid layers",
    "attn_layer_period": "hybrid layers",
    "full_attention_interval": "hybrid layers",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "text_config": "an encoder beside the language model",
    "vision_config": "an encoder beside the language model",
    "audio_config": "an encoder beside the language model",
    "is_encoder_decoder": "an encoder-decoder",
    "quantization_config": "weights stored quantised",
}


def parse_model(config: Any, name: str) -> ModelSpec:
    """The shape in a Hugging Face config.json, already parsed; `name` (the folder) names the model in messages.

    Raises InputError for missing or impossible fields, and by name for what is not modelled: latent attention, experts
    that are shared or missing in some layers, sliding windows in use, hybrid and state-space layers, encoders,
    quantised checkpoints.
    """
    where = f"model: {name}/config.json"
    if not isinstance(config, Mapping):
        raise InputError(
            f"{where}: holds no mapping but {type(config).__name__}. Give a model's config.json."
        )
    for key, what in _NOT_MODELLED.items():
        if config.get(key):
            fix = (
                "Give the folder of the unquantised model and set hardware.dtype."
                if key == "quantization_config"
                else "Choose a decoder whose layers are all alike, with grouped-query attention."
            )
            raise InputError(f"{where}: {key} means {what}, which is not modelled. {fix}")
    if (kind := config.get("position_embedding_type")) not in (None, "rope", "rotary"):
        raise InputError(
            f"{where}: position_embedding_type is {kind!r}; only rotary embeddings are modelled. Choose a model with "
            "them."
        )
    _check_windows(config, where)
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or architectures[0] not in _ARCHITECTURES
    ):
        raise InputError(
            f"{where}: architectures is {architectures!r}. Modelled are the decoders "
            f"{', '.join(_ARCHITECTURES)}; choose a model with one of them."
        )
    architecture = architectures[0]
    for key in ("num_experts", "num_local_experts"):
        if config.get(key) and key != _MIXTURES.get(architecture):
            raise InputError(
                f"{where}: {key} means a mixture of experts, which is not modelled in {architecture}. Choose a model "
                f"with one of {', '.join(_MIXTURES)}."
            )

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            shown = "missing" if value is None else repr(value)
            raise InputError(f"{where}: {key} is {shown}; it must be a whole number of at least 1.")
        return value

    def flag(key: str, default: bool) -> bool:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{where}: {key} is {value!r}; it must be true or false.")
        return default if value is None else value

    if flag("mlp_bias", False):
        raise InputError(
            f"{where}: mlp_bias is true, which is not modelled. Choose a model without it."
        )
    hidden, heads = count("hidden_size"), count("num_attention_heads")
    kv_heads = count("num_key_value_heads", heads if architecture == "LlamaForCausalLM" else None)
    if heads % kv_heads:
        raise InputError(
            f"{where}: num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads}). Correct the file."
        )
    has_norms = architecture.startswith("Qwen3")
    if config.get("head_dim") is None and (hidden % heads or has_norms):
        raise InputError(
            f"{where}: head_dim is missing and does not follow from hidden_size. Add it."
        )
    layers = count("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds and len(kinds) != layers:
        raise InputError(
            f"{where}: layer_types names {len(kinds)} layers, num_hidden_layers is {layers}. Correct the file."
        )
    experts = experts_per_token = 0
    if architecture in _MIXTURES:
        key = _MIXTURES[architecture]
        experts, experts_per_token = count(key), count("num_experts_per_tok")
        if experts_per_token > experts:
            raise InputError(
                f"{where}: num_experts_per_tok ({experts_per_token}) must be at most {key} ({experts}). "
                "Correct the file."
            )
        if (step := count("decoder_sparse_step", 1)) != 1:
            raise InputError(
                f"{where}: decoder_sparse_step is {step}, which means layers with and without experts; only 1 is "
                "modelled. Choose a model with experts in every layer."
            )
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=count("head_dim", hidden // heads),
        intermediate=count(
            "moe_intermediate_size"
            if architecture == "Qwen3MoeForCausalLM"
            else "intermediate_size"
        ),
        vocab=count("vocab_size"),
        max_position=count("max_position_embeddings"),
        tie_embeddings=flag("tie_word_embeddings", False),
        qk_norm=has_norms,
        qkv_bias=flag("attention_bias", architecture == "Qwen2ForCausalLM"),
        experts=experts,
        experts_per_token=experts_per_token,
    )


def config_of(model: ModelSpec) -> dict[str, Any]:
    """A config.json that `parse_model` reads back to this shape, for tools that want one."""
    if model.experts:
        architecture = "Qwen3MoeForCausalLM" if model.qk_norm else "MixtralForCausalLM"
    elif model.qk_norm:
        architecture = "Qwen3ForCausalLM"
    else:
        architecture = "Qwen2ForCausalLM" if model.qkv_bias else "LlamaForCausalLM"
    kinds = {
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "MixtralForCausalLM": "mixtral",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen2ForCausalLM": "qwen2",
        "LlamaForCausalLM": "llama",
    }
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kinds[architecture],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": model.qkv_bias,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if model.experts:
        config[_MIXTURES[architecture]] = model.experts
        config["num_experts_per_tok"] = model.experts_per_token
        if architecture == "Qwen3MoeForCausalLM":
            config |= {"moe_intermediate_size": model.intermediate, "decoder_sparse_step": 1}
    return config


def _check_windows(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError if any layer attends to a window only."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise InputError(f"{where}: layer_types is {kinds!r}; it must be a list.")
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other:
        raise InputError(
            f"{where}: layer_types has {', '.join(other)}, which is not modelled. Choose a model with full attention."
        )
    window = config.get("sliding_window")
    if window and not kinds and config.get("use_sliding_window", True):
        raise InputError(
            f"{where}: sliding_window is {window}, and windows are not modelled. Choose a model with full attention, "
            "or set it to null if max_model_len stays within the window."
        )
