"""How long would a step take by arithmetic alone? Bytes over bandwidth and FLOPs over FLOP/s, for any model and GPU.

For combinations without measured tables. Five efficiency factors, one set for all GPUs, turn data-sheet figures into
times; scripts/fit_roofline.py finds them from the shipped op-table profiles and prints how far a GPU that was left out
is missed. Whatever is computed from a roofline alone is marked "not validated".
"""

from collections.abc import Callable
from dataclasses import dataclass

from twin.errors import InputError
from twin.step_time.catalogue import GpuSpec, ModelSpec, check_tensor_parallel
from twin.step_time.memory import (
    CAPTURE_SIZES,
    DTYPE_BITS,
    WEIGHT_ONLY,
    kv_bytes_per_token,
)
from twin.step_time.op_tables import GAP_PER_SEQ_PS, HOST_PER_SEQ_PS, STEP_OVERHEAD_PS
from twin.step_time.profiles import Profile, Provenance

PS = 10**12

SOURCE = "roofline"
"""How the source of such a profile begins."""


@dataclass(frozen=True)
class Efficiency:
    """What share of the data sheet is reached, and what each launch costs."""

    flops: float
    """Of FLOP/s, in matrix products."""
    bandwidth: float
    """Of memory bandwidth, reading weights."""
    attention_flops: float
    """Of 16-bit FLOP/s, in the attention of prompts."""
    cache_bandwidth: float
    """Of memory bandwidth, reading the KV cache."""
    link: float
    """Of the links' bandwidth, in all-reduces."""
    layer_s: float
    """A layer's launches and element-wise kernels."""
    reduce_s: float
    """An all-reduce of nothing."""


MEASURED = Efficiency(0.81, 0.82, 0.71, 0.70, 0.37, 35e-6, 5.4e-6)
"""Fitted by scripts/fit_roofline.py to the dense bfloat16 profiles of all GPUs that come with the twin."""

LEFT_OUT_ERROR = {"dense": 0.15, "prefill": 0.10, "decode": 0.11}
"""Median relative error on the profiles of a GPU that was left out of the fit."""

TOKENS = (
    *(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768),
    *(1024, 1536, 2048, 4096, 8192, 16384, 32768, 65536),
)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_CONTEXT = 1 << 20
"""The formulas do not end at any context."""  # fmt: skip


def roofline(
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel_size: int,
    dtype: str,
    kv_cache_dtype: str,
    efficiency: Efficiency = MEASURED,
) -> Profile:
    """The profile. Weights in INT8 and INT4 are read as stored and multiplied as 16-bit values (weight-only).

    Raises InputError for an unknown type and a number of GPUs that does not divide the model.
    """
    check_tensor_parallel(model, tensor_parallel_size)
    if dtype not in DTYPE_BITS:
        raise InputError(
            f"hardware.dtype: unknown value {dtype!r}. Choose one of {', '.join(DTYPE_BITS)}."
        )
    if dtype == "float32":
        raise InputError(
            "hardware.dtype: float32 has no roofline, since 32-bit products do not run at the 16-bit rate that the "
            "data sheets here give. Choose bfloat16, or give hardware.step_time a profile file."
        )
    parts = Parts(model, gpu, tensor_parallel_size, dtype, kv_cache_dtype, efficiency)

    def points(counts: tuple[int, ...], seconds: Callable[[int], float]) -> tuple[tuple[int, int], ...]:  # fmt: skip
        return tuple((n, max(1, round(seconds(n) * PS))) for n in counts)

    notes = [
        "Arithmetic with data-sheet figures and efficiency factors that were measured on other models and GPUs: "
        "not validated.",
    ]
    if dtype in WEIGHT_ONLY or (dtype == "fp8" and gpu.fp8_flops is None):
        notes.append(f"Weights are stored as {dtype} and multiplied as 16-bit values.")
    if model.experts:
        notes.append("Tokens choose experts evenly and independently.")
    per_token = round(parts.context_s * PS)
    return Profile(
        provenance=Provenance(
            model=model.name,
            gpu=gpu.name,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            kv_cache_dtype="fp8" if kv_cache_dtype.startswith("fp8") else "bfloat16",
            engine="none",
            source=f"{SOURCE}: data-sheet figures times measured efficiency factors",
            licence="own",
            date="2026-11-30",
            script="twin.step_time.roofline",
            fit_error={f"{name}_left_out_gpu": value for name, value in LEFT_OUT_ERROR.items()},
            notes=tuple(notes),
        ),
        max_context=MAX_CONTEXT,
        capture_sizes=CAPTURE_SIZES,
        dense_ps=points(TOKENS, parts.dense_s),
        comm_ps=() if tensor_parallel_size == 1 else points(TOKENS, parts.comm_s),
        sample_ps=points(REQUESTS, parts.sample_s),
        prefill_pair_ps=round(parts.pair_s * PS, 4),
        decode_base_ps=((1, 0), (REQUESTS[-1], 0)),
        decode_context_ps=((1, per_token), (REQUESTS[-1], per_token)),
        host_sync_ps=(
            (0, STEP_OVERHEAD_PS),
            (REQUESTS[-1], STEP_OVERHEAD_PS + REQUESTS[-1] * HOST_PER_SEQ_PS),
        ),
        host_async_ps=((0, 0), (REQUESTS[-1], REQUESTS[-1] * HOST_PER_SEQ_PS)),
        gap_ps=STEP_OVERHEAD_PS,
        gap_seq_ps=GAP_PER_SEQ_PS[min(2, tensor_parallel_size)],
    )


@dataclass(frozen=True)
class Parts:
    """The terms of a step in seconds."""

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel_size: int
    dtype: str
    kv_cache_dtype: str
    efficiency: Efficiency

    def dense_s(self, tokens: int) -> float:
        """Matrix products of the layers and what is element-wise beside them."""
        model = self.model
        attention = self._product_s(tokens, model.attention_matrix_params, 1.0)
        if model.experts:
            share = model.experts_per_token / model.experts
            read = model.experts * (1 - (1 - share) ** tokens)
            mlp = self._product_s(tokens * model.experts_per_token, model.mlp_matrix_params, read)
        else:
            mlp = self._product_s(tokens, model.mlp_matrix_params, 1.0)
        return model.layers * (attention + mlp + self._moved_s(tokens) + self.efficiency.layer_s)

    def comm_s(self, tokens: int) -> float:
        """Two all-reduces a layer and one after the embedding, in rings."""
        tp = self.tensor_parallel_size
        if tp == 1:
            return 0.0
        sent = 2 * (tp - 1) / tp * tokens * self.model.hidden * 2
        once = self.efficiency.reduce_s + sent / (self.gpu.link_bandwidth * self.efficiency.link)
        return (2 * self.model.layers + 1) * once

    def sample_s(self, requests: int) -> float:
        """The output layer, at 16 bit."""
        params = self.model.padded_vocab * self.model.hidden / self.tensor_parallel_size
        read = 2 * params / (self.gpu.bandwidth * self.efficiency.bandwidth)
        return max(read, 2 * requests * params / (self.gpu.bf16_flops * self.efficiency.flops))

    @property
    def pair_s(self) -> float:
        """Prefill attention per (query, key) pair: two products of head_dim for each head and layer."""
        model = self.model
        flops = 4 * model.layers * model.heads * model.head_dim / self.tensor_parallel_size
        return flops / (self.gpu.bf16_flops * self.efficiency.attention_flops)

    @property
    def context_s(self) -> float:
        """Decode attention per token of context: its keys and values are read once."""
        shares = min(self.tensor_parallel_size, self.model.kv_heads)
        read = kv_bytes_per_token(self.model, self.dtype, self.kv_cache_dtype) / shares
        return read / (self.gpu.bandwidth * self.efficiency.cache_bandwidth)

    def _product_s(self, rows: float, params: int, matrices: float) -> float:
        """A product of `rows` rows in all with matrices of `params` entries each, of which `matrices` are read."""
        tp = self.tensor_parallel_size
        fp8 = self.gpu.fp8_flops if self.dtype == "fp8" else None
        flops = (fp8 or self.gpu.bf16_flops) * self.efficiency.flops
        stored = params * matrices * DTYPE_BITS[self.dtype] / 8 / tp
        return max(
            2 * rows * params / tp / flops,
            stored / (self.gpu.bandwidth * self.efficiency.bandwidth),
        )

    def _moved_s(self, tokens: int) -> float:
        """Norms, rotary embedding, cache writes and activation of a layer: bytes read and written."""
        model, tp = self.model, self.tensor_parallel_size
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        width = model.intermediate * max(1, model.experts_per_token)
        values = 8 * model.hidden + (2 * (q + kv) + 4 * kv + 3 * width) / tp
        return tokens * 2 * values / (self.gpu.bandwidth * self.efficiency.bandwidth)
