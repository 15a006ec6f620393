"""Step times summed from published tables of kernel times: those of NVIDIA aiconfigurator (extra `profiles`).

The package measures matrix products, attention and all-reduces one by one and knows which of them a model's layers
need. A profile holds our own numbers: kernel times summed over a step, made monotone in tokens, thinned out, and
attention fitted to the contract's linear terms. The package's measured runs (its silicon file) are never read.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twin.errors import InputError
from twin.step_time.catalogue import GpuSpec, ModelSpec
from twin.step_time.memory import CAPTURE_SIZES, kv_bytes_per_token
from twin.step_time.profiles import Profile, Provenance

MS = 10**9
"""Picoseconds in a millisecond, the tables' unit."""

PACKAGE = "aiconfigurator-core 0.12.0"

SYSTEMS = {
    "A100": ("a100_sxm", "0.14.0"),
    "H100": ("h100_sxm", "0.24.0"),
    "H200": ("h200_sxm", "0.24.0"),
    "B200": ("b200_sxm", "0.24.0"),
    "L40S": ("l40s", "0.24.0"),
    "RTXPRO6000": ("rtx_pro_6000_server", "0.24.0"),
}
"""The catalogue's GPU -> how the tables call it, and the version of vLLM whose kernels were measured there."""

MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
}
"""Catalogue names that the package spells otherwise."""

MAX_TOKENS = 16384
MAX_NUM_SEQS = 1024
MAX_CONTEXT = 32768
"""Longest context in the fits of attention."""

TOKENS = (
    1,
    2,
    4,
    *range(8, 1025, 8),
    *range(1056, 2049, 32),
    *range(2112, 4097, 64),
    *range(4352, MAX_TOKENS + 1, 256),
)
"""Token counts at which the tables are asked; thinned out afterwards."""  # fmt: skip

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = {
    128: 0.3,
    256: 0.6,
    512: 1.0,
    1024: 5.0,
    2048: 1.0,
    4096: 0.7,
    8192: 0.5,
    16384: 0.4,
    32768: 0.3,
}
"""Context of each decode -> how much it counts in a fit: as much as it is common in what people serve."""  # fmt: skip
CONTEXT_OF_ALL = 512
"""Contexts up to this are fitted for every batch size, longer ones only as far as the KV cache holds them."""

PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CACHED = (0, 512, 2048, 8192, 16384)

TOLERANCE = 0.005
"""Largest relative change that thinning out a table may cause."""

HOST_PER_SEQ_PS = 8_000_000
"""Scheduler and update on one CPU core: 8 us per scheduled request and step, measured on vLLM."""

STEP_OVERHEAD_PS = 10**9
"""1 ms a step on H100 with vLLM 0.23 beyond the kernels: input preparation, launches, copying the sampled tokens."""

GAP_PER_SEQ_PS = {1: 8_000_000, 2: 16_000_000}
"""GPUs of a replica (2 = several) -> what async scheduling cannot hide of each scheduled request: 8 us on one GPU, 16
us where a process each drives several. Fitted to the growth of TPOT with concurrency in published closed loops of
Llama-3.1-70B FP8 on B200 (60 rows of aiconfigurator's silicon sample, twin validate scores none of them)."""

NOTES = (
    "dense and sample never fall with tokens. 16-bit tables are noisy, so neighbours that fall are averaged (pool "
    "adjacent violators). FP8 tables interpolate utilisation between measured shapes, which makes products look slower "
    "for fewer tokens; a kernel that computes a larger tile can compute a smaller one in it, so the lower envelope is "
    "taken, min over m' >= m.",
    "attention: prompts by pairs, tokens (in dense) and a launch per step, decodes by context and a launch that "
    "depends on their number; a step that holds both pays for both, as the package adds them up. Contexts about 1024 "
    "tokens count most in the fit.",
    "comm: two all-reduces a layer and one after the embedding; nothing overlaps with them. Gathering logits is not "
    "included.",
    "sample: the output layer alone; sampling kernels are not included.",
    "host: 8 us per request and step (vLLM's scheduler and update on one core). Sync adds it and 1 ms a step to the "
    "kernels; async hides it behind them and keeps the 1 ms as gap (seen on H100 with vLLM 0.23), and 8 us a request "
    "(16 on several GPUs; fitted to the growth of TPOT with concurrency on B200).",
    "No other number is fitted to whole steps or to measured runs: each is the sum of these terms.",
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kernels:
    """Kernel times of one model on one GPU. Milliseconds."""

    dense: Callable[[int], float]
    """By tokens: everything but attention, all-reduce and output layer."""
    comm: Callable[[int], float]
    """By tokens."""
    sample: Callable[[int], float]
    """By sampled requests."""
    prefill_attention: Callable[[int, int, int], float]
    """By (prompts, new tokens of each, cached tokens of each), all layers together."""
    decode_attention: Callable[[int, int], float]
    """By (requests, context of each), all layers together."""


def open_kernels(
    name: str, gpu: str, tensor_parallel_size: int, dtype: str, kv_cache_dtype: str, moe: bool
) -> Kernels:
    """The tables of a model (a name the package knows, or a folder with config.json) on a GPU of SYSTEMS.

    Raises InputError where the package is not installed, and where it has no tables for the combination.
    """
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise InputError(
            "twin profile build: the op tables are not installed. Install the extra that brings them (about 600 MB): "
            "pip install 'vllm-twin[profiles]'"
        ) from None
    if gpu not in SYSTEMS:
        raise InputError(
            f"hardware.gpu: there are no op tables for {gpu}; there are for {', '.join(SYSTEMS)}. Choose one of these, "
            "or let the twin estimate by roofline (hardware.step_time: roofline)."
        )
    system, version = SYSTEMS[gpu]
    options: dict[str, Any] = {"kvcache_quant_mode": _kv_mode(kv_cache_dtype)}
    if dtype == "fp8":
        options["gemm_quant_mode"] = "fp8"
    elif dtype not in ("bfloat16", "float16"):
        raise InputError(
            f"hardware.dtype: there are no op tables for {dtype} weights; there are for bfloat16 and fp8. The twin "
            "estimates others by roofline."
        )
    if moe:
        options |= {"moe_tp_size": tensor_parallel_size, "moe_ep_size": 1}
        if dtype == "fp8":
            # Published FP8 mixtures of experts have scales per block of 128 x 128.
            options |= {"moe_quant_mode": "fp8_block", "gemm_quant_mode": "fp8_block"}
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = EngineHandle.compile(
                MODELS.get(name, name), system, "vllm", backend_version=version,
                tp_size=tensor_parallel_size, **options,
            )  # fmt: skip
            handle.predict_prefill_latency(1, 16, 0)
    except Exception as error:  # the package has a class of errors for each family of tables
        raise InputError(
            f"twin profile build: the op tables have nothing for {name} on {gpu}, TP {tensor_parallel_size}, {dtype}: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Choose another combination; the "
            "twin estimates those without tables by roofline."
        ) from None
    finally:
        logging.disable(before)
    return _kernels(handle)


def _kv_mode(kv_cache_dtype: str) -> str:
    return "fp8" if kv_cache_dtype.startswith("fp8") else "bfloat16"


def _kernels(handle: Any) -> Kernels:
    context, generation = (
        [row[0] for row in rows] for rows in handle.run_static_per_op(batch_size=1, isl=16, osl=2)
    )

    def of(names: Sequence[str], wanted: Callable[[str], bool]) -> list[int]:
        return [i for i, name in enumerate(names) if wanted(name)]

    def is_comm(name: str) -> bool:
        return "_ar" in name or "all_reduce" in name or "dispatch" in name

    def is_own(name: str) -> bool:
        return is_comm(name) or name.endswith(("_attention", "_logits_gemm", "_p2p"))

    prompt = {
        "dense": of(context, lambda name: not is_own(name)),
        "comm": of(context, is_comm),
        "attention": of(context, lambda name: name.endswith("_attention")),
    }
    decode = {
        "sample": of(generation, lambda name: name.endswith("_logits_gemm")),
        "attention": of(generation, lambda name: name.endswith("_attention")),
    }

    def prompt_ms(part: str, batch: int, new: int, cached: int) -> float:
        rows = handle.evaluate_context_ops(prompt[part], batch_size=batch, s=new, prefix=cached)
        return float(sum(row[1] for row in rows))

    def decode_ms(part: str, batch: int, length: int) -> float:
        rows = handle.evaluate_generation_ops(decode[part], batch_size=batch, s=length)
        return float(sum(row[1] for row in rows))

    return Kernels(
        dense=lambda tokens: prompt_ms("dense", 1, tokens, 0),
        comm=lambda tokens: prompt_ms("comm", 1, tokens, 0),
        sample=lambda requests: decode_ms("sample", requests, 1024),
        prefill_attention=lambda batch, new, cached: prompt_ms("attention", batch, new, cached),
        decode_attention=lambda batch, length: decode_ms("attention", batch, length),
    )


def build(
    kernels: Kernels,
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel_size: int,
    dtype: str,
    kv_cache_dtype: str,
    most_context: int,
    date: str,
) -> Profile:
    """The profile of these kernels; `provenance.fit_error` says how far it is from the tables it is made of.

    `most_context` is the number of tokens that the KV cache of these GPUs holds at most.
    """
    raw_dense = np.array([kernels.dense(m) for m in TOKENS])
    rising = _envelope if dtype == "fp8" else _pooled
    dense = rising(raw_dense)
    comm = _pooled(np.array([kernels.comm(m) for m in TOKENS]))
    requests = [m for m in TOKENS if m <= MAX_NUM_SEQS]
    sample = _pooled(np.array([kernels.sample(n) for n in requests]))

    def whole(tokens: int) -> float:
        """What a step of so many tokens takes without attention, the measure of errors."""
        return float(np.interp(tokens, TOKENS, dense + comm))

    # Attention of prompts: launch + per_token * tokens + per_pair * pairs. Errors count relative to the whole step, as
    # a user sees them.
    prompts = [
        (
            (1.0, b * n, b * (n * c + n * (n + 1) / 2)),
            kernels.prefill_attention(b, n, c),
            whole(b * n),
        )
        for n in PROMPTS
        for b, c in (*((1, c) for c in CACHED), (4, 0), (16, 0))
        if b * n <= MAX_TOKENS and n + c <= MAX_CONTEXT
    ]
    weights = [1 / (ms + rest) for _, ms, rest in prompts]
    launch, per_token, per_pair = _not_negative(
        [x for x, *_ in prompts], [ms for _, ms, _ in prompts], weights
    )
    prompt_errors = [
        (launch * x[0] + per_token * x[1] + per_pair * x[2] - ms) * w
        for (x, ms, _), w in zip(prompts, weights, strict=True)
    ]

    # Attention of decodes by batch size, less the term per token, which dense holds for all. No slope is less than what
    # memory gives.
    read_bytes = kv_bytes_per_token(model, dtype, kv_cache_dtype) / min(
        tensor_parallel_size, model.kv_heads
    )
    read_ms = 1e3 * read_bytes / gpu.bandwidth
    base: list[tuple[int, float]] = []
    slope: list[tuple[int, float]] = []
    decode_errors: list[float] = []
    for b in BATCHES:
        rows = [
            (b * c, kernels.decode_attention(b, c), common)
            for c, common in CONTEXTS.items()
            if c <= CONTEXT_OF_ALL or b * c <= most_context
        ]
        relative = [1 / (ms + whole(b)) for _, ms, _ in rows]
        c0, d = _line(
            [t for t, *_ in rows],
            [ms - per_token * b for _, ms, _ in rows],
            [w * common for w, (*_, common) in zip(relative, rows, strict=True)],
            least_slope=read_ms,
        )
        base.append((b, c0))
        slope.append((b, d))
        decode_errors += [
            (per_token * b + c0 + d * t - ms) * w
            for (t, ms, _), w in zip(rows, relative, strict=True)
        ]

    return Profile(
        provenance=Provenance(
            model=model.name,
            gpu=gpu.name,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            engine=f"vLLM {SYSTEMS[gpu.name][1]}",
            source=f"summed from the op tables of NVIDIA aiconfigurator ({PACKAGE})",
            licence="Apache-2.0",
            date=date,
            script="twin profile build",
            fit_error={
                **_sizes("prefill_attention_vs_tables", prompt_errors),
                **_sizes("decode_attention_vs_tables", decode_errors),
                **_sizes("dense_vs_tables", (dense / raw_dense - 1).tolist()),
            },
            notes=NOTES,
        ),
        max_context=MAX_CONTEXT,
        capture_sizes=CAPTURE_SIZES,
        dense_ps=_thin(TOKENS, dense + per_token * np.array(TOKENS)),
        comm_ps=() if tensor_parallel_size == 1 else _thin(TOKENS, comm),
        sample_ps=_thin(requests, sample),
        prefill_pair_ps=round(per_pair * MS, 4),
        decode_base_ps=tuple((b, _ps(ms)) for b, ms in base),
        decode_context_ps=tuple((b, _ps(ms)) for b, ms in slope),
        host_sync_ps=(
            (0, STEP_OVERHEAD_PS),
            (MAX_NUM_SEQS, STEP_OVERHEAD_PS + MAX_NUM_SEQS * HOST_PER_SEQ_PS),
        ),
        host_async_ps=((0, 0), (MAX_NUM_SEQS, MAX_NUM_SEQS * HOST_PER_SEQ_PS)),
        gap_ps=STEP_OVERHEAD_PS,
        prefill_base_ps=_ps(launch),
        gap_seq_ps=GAP_PER_SEQ_PS[min(2, tensor_parallel_size)],
    )


def _envelope(values: Floats) -> Floats:
    """The largest non-decreasing sequence that is nowhere above `values`."""
    return np.minimum.accumulate(values[::-1])[::-1]


def _not_negative(
    features: Sequence[Sequence[float]], wanted: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Weighted least squares without a negative coefficient: the most negative one is left out until none is."""
    w = np.array(weights)
    x, y = np.array(features, dtype=np.float64) * w[:, None], np.array(wanted) * w
    used = list(range(x.shape[1]))
    result = np.zeros(x.shape[1])
    while used:
        scale = np.abs(x[:, used]).max(axis=0)
        found, *_ = np.linalg.lstsq(x[:, used] / scale, y, rcond=None)
        if (found >= 0).all():
            result[used] = found / scale
            break
        del used[int(np.argmin(found))]
    return [float(value) for value in result]


def _pooled(values: Floats) -> Floats:
    """The non-decreasing sequence nearest to `values` in squared relative error (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # weighted sum, weight, length
    for value in values.tolist():
        weight = 1 / max(value, 1e-9) ** 2
        total, length = value * weight, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / weight:
            before = blocks.pop()
            total, weight, length = total + before[0], weight + before[1], length + before[2]
        blocks.append((total, weight, length))
    return np.array([total / weight for total, weight, n in blocks for _ in range(n)])


def _line(
    x: Sequence[float], y: Sequence[float], weights: Sequence[float], least_slope: float = 0.0
) -> tuple[float, float]:
    """(height at 0, slope) of the line nearest to y in weighted squares, with no negative height, of at least that
    slope.
    """
    xs, ys, w2 = np.array(x), np.array(y), np.square(weights)
    mean_x, mean_y = np.average(xs, weights=w2), np.average(ys, weights=w2)
    slope = float(np.sum(w2 * (xs - mean_x) * (ys - mean_y)) / np.sum(w2 * np.square(xs - mean_x)))
    slope = max(slope, least_slope)
    height = float(mean_y - slope * mean_x)
    if height < 0:
        height = 0.0
        slope = max(float(np.sum(w2 * xs * ys) / np.sum(w2 * np.square(xs))), least_slope)
    return height, slope


def _thin(counts: Sequence[int], ms: Floats) -> tuple[tuple[int, int], ...]:
    """As few of the points, in picoseconds, as keep linear interpolation within TOLERANCE at each of them."""
    kept = [0]
    while kept[-1] < len(counts) - 1:
        start = kept[-1]
        # The furthest point that a straight line reaches without missing one in between.
        end = start + 1
        while end < len(counts) - 1 and _is_straight(counts, ms, start, end + 1):
            end += 1
        kept.append(end)
    return tuple((counts[i], _ps(float(ms[i]))) for i in kept)


def _is_straight(counts: Sequence[int], ms: Floats, start: int, end: int) -> bool:
    inner = np.arange(start + 1, end)
    x = np.array(counts)[inner]
    line = ms[start] + (ms[end] - ms[start]) * (x - counts[start]) / (counts[end] - counts[start])
    return bool((np.abs(line - ms[inner]) <= TOLERANCE * ms[inner]).all())


def _ps(ms: float) -> int:
    """Whole picoseconds with six digits, which is more than the tables know."""
    return round(float(f"{ms * MS:.6g}"))


def _sizes(name: str, errors: Iterable[float]) -> dict[str, float]:
    """Mean and largest size of relative errors."""
    sizes = [abs(error) for error in errors]
    return {
        f"{name}_mean": round(sum(sizes) / len(sizes), 4),
        f"{name}_max": round(max(sizes), 4),
    }
