"""How many KV blocks fit on a GPU? vLLM's own sum, with each term estimated and named.

vLLM measures what weights, activations and libraries take when it starts and gives the rest of
`memory * gpu_memory_utilization` to the KV cache. Here each term is a formula or a named allowance.
"""

from dataclasses import dataclass
from typing import TypeVar

from twin.errors import InputError
from twin.step_time.catalogue import GpuSpec, ModelSpec, check_tensor_parallel
from twin.step_time.profiles import captured_sizes

Number = TypeVar("Number", int, float)

DTYPE_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.0 + 20 / 128,
}
"""Bits per weight of the layers' matrices; embeddings, output layer and norms stay at 16 bit at least. int8 has one
scale a column, which is not worth counting; int4 a 16-bit scale and a 4-bit zero point for each group of 128."""

WEIGHT_ONLY = ("int8", "int4")
"""Types in which weights are only stored: they are multiplied as 16-bit values."""

KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes per key or value element. "auto" is the model's own type: 16 bit under quantised weights."""

CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Token counts vLLM captures as CUDA graphs by default."""

RUNTIME_BYTES = 550_000_000
"""Allowance for what libraries take outside PyTorch (kernels, cuBLAS and attention workspaces)."""

COMM_BYTES = 100_000_000
"""Allowance for all-reduce buffers, if several GPUs hold the model."""

GRAPH_BYTES = 8 * 2**20
"""Allowance per captured CUDA-graph size.

vLLM does not report these three apart. Their sum was set so that the block counts vLLM measured for Llama-3.1-70B on
4 H100 and Llama-3.1-8B on an RTX 4090 come out; the split between them is an assumption.
"""

LOGIT_BYTES = 8
"""Per vocabulary entry and sampled request: 16-bit logits, their copy, and 32-bit ones."""


@dataclass(frozen=True)
class MemoryPlan:
    """How one GPU's memory is shared out; every number is per GPU unless its name says otherwise."""

    model: str
    gpu: str
    tensor_parallel_size: int
    memory_bytes: int
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    weights_bytes: int
    """Share of the weights."""
    activation_bytes: int
    """Peak of a step with max_num_batched_tokens tokens, or of sampling for max_num_seqs requests if that is more."""
    runtime_bytes: int
    """Libraries and communication buffers."""
    graph_bytes: int
    """CUDA graphs."""
    graph_count: int
    """Captured sizes."""
    kv_bytes_per_token: int
    """Keys and values of one token over all layers and GPUs."""
    block_bytes: int
    """One block on this GPU."""

    @property
    def budget_bytes(self) -> int:
        """What vLLM may use: memory * gpu_memory_utilization."""
        return int(self.memory_bytes * self.gpu_memory_utilization)

    @property
    def kv_bytes(self) -> int:
        """What is left for KV blocks; negative if the rest does not fit."""
        return (
            self.budget_bytes
            - self.weights_bytes
            - self.activation_bytes
            - self.runtime_bytes
            - self.graph_bytes
        )

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks that fit; one of them, the null block, never holds a request's tokens."""
        return max(0, self.kv_bytes // self.block_bytes)

    def explain(self) -> str:
        """The arithmetic, one term a line."""
        gb = 1e9
        rows = [
            (
                self.budget_bytes,
                f"{self.gpu} memory {self.memory_bytes / gb:.2f} GB * {self.gpu_memory_utilization:g}",
            ),
            (
                -self.weights_bytes,
                f"weights of {self.model} on each of {self.tensor_parallel_size} GPU(s)",
            ),
            (
                -self.activation_bytes,
                f"peak activations (max_num_batched_tokens {self.max_num_batched_tokens}, "
                f"max_num_seqs {self.max_num_seqs})",
            ),
            (-self.runtime_bytes, "libraries and communication buffers (allowance)"),
            (-self.graph_bytes, f"{self.graph_count} CUDA-graph sizes (allowance)"),
        ]
        lines = [f"{number / gb:9.2f} GB  {text}" for number, text in rows]
        if self.kv_bytes < 0:
            lines.append(f"{-self.kv_bytes / gb:9.2f} GB  too little, before any KV cache")
            return "\n".join(lines)
        lines.append(f"{self.kv_bytes / gb:9.2f} GB  left for the KV cache")
        lines.append(
            f"{self.num_gpu_blocks:9d} blocks of {self.block_size} tokens, {self.block_bytes} bytes each "
            f"({self.kv_bytes_per_token} bytes of KV per token over all GPUs); "
            f"{usable_tokens(self.num_gpu_blocks, self.block_size)} tokens usable"
        )
        return "\n".join(lines)


def kv_bytes_per_token(model: ModelSpec, dtype: str, kv_dtype: str) -> int:
    """Bytes of keys and values that one token takes over all layers: 2 * layers * kv_heads * head_dim * bytes."""
    return 2 * model.layers * model.kv_heads * model.head_dim * _kv_element_bytes(dtype, kv_dtype)


def weight_bytes(model: ModelSpec, tp: int, dtype: str) -> int:
    """Bytes of weights on each GPU: matrices and embeddings (padded) are split; norms, biases and routers
    copied.
    """
    bits = _lookup("hardware.dtype", dtype, DTYPE_BITS)
    other = _element_bytes(dtype)
    matrices = model.layers * (model.layer_matrix_params - model.experts * model.hidden)
    if tp > model.kv_heads:  # each GPU keeps a whole key/value head
        matrices += model.layers * 2 * (tp - model.kv_heads) * model.head_dim * model.hidden
    padding = model.embedding_params // model.vocab * (model.padded_vocab - model.vocab)
    split = round(matrices * bits / 8) + (model.embedding_params + padding) * other
    routers = model.layers * model.experts * model.hidden
    return -(-split // tp) + (model.vector_params + routers) * other


def activation_bytes(
    model: ModelSpec,
    tp: int,
    dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """Peak of activations on each GPU, in bytes.

    In a layer the MLP is largest: residual and normed input (whole on each GPU), gate and up outputs (split). Sampling
    happens after it, for at most max_num_seqs requests, so the larger of the two counts.
    """
    element = _element_bytes(dtype)
    width = model.intermediate * max(1, model.experts_per_token)
    per_token = (2 * model.hidden + 2 * width // tp) * element
    forward = max_num_batched_tokens * per_token
    sampling = min(max_num_seqs, max_num_batched_tokens) * model.vocab * LOGIT_BYTES
    return max(forward, sampling)


def kv_blocks(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    dtype: str,
    kv_dtype: str,
    gpu_memory_utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
    eager: bool = False,
) -> MemoryPlan:
    """How the memory of each of `tp` GPUs is shared out, and the KV blocks that fit; `eager` = no CUDA graphs.

    A measured block count (num_gpu_blocks_override) is always better than this estimate. Raises InputError, with the
    arithmetic, if fewer than two blocks are left, and for an unknown type or a `tp` that does not fit the model.
    """
    check_tensor_parallel(model, tp)
    per_token = kv_bytes_per_token(model, dtype, kv_dtype)
    heads_per_gpu = max(1, model.kv_heads // tp)
    graphs = (
        0 if eager else len(captured_sizes(CAPTURE_SIZES, max_num_seqs, max_num_batched_tokens))
    )
    plan = MemoryPlan(
        model=model.name,
        gpu=gpu.name,
        tensor_parallel_size=tp,
        memory_bytes=gpu.memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        weights_bytes=weight_bytes(model, tp, dtype),
        activation_bytes=activation_bytes(model, tp, dtype, max_num_batched_tokens, max_num_seqs),
        runtime_bytes=RUNTIME_BYTES + (COMM_BYTES if tp > 1 else 0),
        graph_bytes=graphs * GRAPH_BYTES,
        graph_count=graphs,
        kv_bytes_per_token=per_token,
        block_bytes=per_token // model.kv_heads * heads_per_gpu * block_size,
    )
    if plan.num_gpu_blocks < 2:
        raise InputError(
            f"hardware: {model.name} ({dtype}, TP {tp}) does not fit on {gpu.name}: "
            "fewer than two KV blocks are left.\n"
            f"{plan.explain()}\n"
            "Raise hardware.tensor_parallel_size or engine.gpu_memory_utilization, choose a GPU with more memory or a "
            "smaller dtype, or lower engine.max_num_batched_tokens."
        )
    return plan


def usable_tokens(num_gpu_blocks: int, block_size: int) -> int:
    """Tokens that all requests together can hold: one block, the null block, is never theirs."""
    return max(0, num_gpu_blocks - 1) * block_size


def check_one_request_fits(num_gpu_blocks: int, block_size: int, max_model_len: int) -> None:
    """The check vLLM makes at start-up: a single request of max_model_len tokens must fit. Raises InputError."""
    room = usable_tokens(num_gpu_blocks, block_size)
    if room < max_model_len:
        raise InputError(
            f"engine.max_model_len: {max_model_len} tokens need {-(-max_model_len // block_size)} KV blocks of "
            f"{block_size}, but only {max(0, num_gpu_blocks - 1)} of the {num_gpu_blocks} are usable (one is the null "
            f"block), room for {room} tokens. Lower max_model_len, or make room for more blocks."
        )


def _kv_element_bytes(dtype: str, kv_dtype: str) -> int:
    if kv_dtype == "auto":
        return _element_bytes(dtype)
    return _lookup("hardware.kv_cache_dtype", kv_dtype, KV_DTYPE_BYTES, also=("auto",))


def _element_bytes(dtype: str) -> int:
    """Bytes of an activation, an embedding or a norm's weight."""
    return max(round(_lookup("hardware.dtype", dtype, DTYPE_BITS) / 8), 2)


def _lookup(field: str, value: str, known: dict[str, Number], also: tuple[str, ...] = ()) -> Number:
    if value not in known:
        raise InputError(
            f"{field}: unknown value {value!r}. Choose one of {', '.join([*also, *known])}."
        )
    return known[value]
