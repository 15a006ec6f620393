#!/usr/bin/env python3
"""Derive a step-time profile from published tables of kernel times.

The tables are those of NVIDIA aiconfigurator (Apache-2.0), one CSV a kernel family and GPU: matrix products by m, n, k;
attention of prompts by batch and length; attention of decodes by batch and context. A profile holds our own numbers:
kernel times summed over a model's layers, made monotone in tokens, and attention fitted to the contract's linear terms.

    python scripts/build_profile.py --tables FOLDER --date 2026-01-31 --output twin/step_time/data

The same tables and arguments give the same bytes.
"""

import argparse
import csv
import gzip
import json
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path

import yaml

from twin.step_time.catalogue import ModelSpec, check_tensor_parallel, find_model
from twin.step_time.memory import CAPTURE_SIZES
from twin.step_time.profiles import profile_file_name

MS = 10**9
"""Picoseconds in a millisecond, the tables' unit."""

SYSTEMS = {"A100": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm"}
"""How the tables call the catalogue's GPUs."""

MAX_TOKENS = 16384
MAX_NUM_SEQS = 1024
ELEMENT = 2
"""Bytes of a bfloat16 value."""

LEAST_PROMPT = 16
"""Prompts shorter than this are decodes in all but name and are left out of the fit."""

LEAST_CONTEXT = 128
"""Shortest context in the decode fit: below it the kernel is bound by its launch, not by reading the cache."""

HOST_PER_SEQ_PS = 8_000_000
"""Scheduler and update on one CPU core: 8 us per scheduled request and step, measured on vLLM."""

STEP_OVERHEAD_PS = 10**9
"""1 ms a step on H100 with vLLM 0.23 beyond the kernels: input preparation, launches, copying the sampled tokens."""

Row = dict[str, str]


class Tables:
    """The op tables of one GPU for bfloat16. Times in milliseconds, as published."""

    def __init__(self, folder: Path, system: str) -> None:
        self._folder, self._system = folder, system
        self.version = ""
        self.spec = yaml.safe_load((folder / f"{system}.yaml").read_text())["gpu"]
        self.gemm: dict[tuple[int, int, int], float] = {}  # (m, n, k) -> ms
        for row in self._rows("gemm_vllm_*_gemm_perf"):
            if row["gemm_dtype"] == "bfloat16":
                key = (int(row["m"]), int(row["n"]), int(row["k"]))
                self.gemm[key] = min(float(row["latency"]), self.gemm.get(key, float("inf")))
        self.widths = sorted({n for _, n, _ in self.gemm})
        self.tokens = sorted({m for m, _, _ in self.gemm if m <= MAX_TOKENS})

    def _rows(self, pattern: str) -> Iterator[Row]:
        found = sorted(self._folder.glob(f"{self._system}_{pattern}.csv.gz"))
        if len(found) != 1:
            sys.exit(
                f"{self._folder}: expected one file {self._system}_{pattern}.csv.gz, found {len(found)}"
            )
        if match := re.search(r"vllm_(\d+(?:\.\d+)+)_", found[0].name):
            self.version = match[1]
        with gzip.open(found[0], "rt", newline="") as file:
            yield from csv.DictReader(file)

    def attention(self, kind: str, model: ModelSpec) -> Iterator[tuple[int, int, float]]:
        """(batch, length, ms) of full attention with this model's heads: `kind` context by prompt length, generation
        by computed tokens before the new one.
        """
        length = {"context": "isl", "generation": "step"}[kind]
        for row in self._rows(f"attention_vllm_*_{kind}_attention_perf"):
            if (
                int(row["num_heads"]) == model.heads
                and int(row["num_key_value_heads"]) == model.kv_heads
                and int(row["head_dim"]) == model.head_dim
                and row["kv_cache_dtype"] == "bfloat16"
                and int(row["window_size"]) == 0
            ):
                yield int(row["batch_size"]), int(row[length]), float(row["latency"])

    def all_reduce(self, gpus: int) -> list[tuple[int, float]]:
        """(values, ms) of vLLM's own all-reduce among so many GPUs inside a CUDA graph, by values per GPU.

        The tables' message sizes are taken for 16-bit values: read as bytes they would be half as fast as NVLink is.
        """
        rows = self._rows("comm_vllm_*_custom_allreduce_perf")
        return sorted(
            (int(row["message_size"]), float(row["latency"]))
            for row in rows
            if int(row["num_gpus"]) == gpus and row["backend"] == "vllm_graph"
        )

    def product(self, m: int, n: int, k: int) -> float:
        """Milliseconds of an [m, k] x [k, n] product, linear in n and k between the measured ones.

        Beyond the largest measured n (the output layer) time grows in proportion to n: such a product reads its
        weights once, at the memory's speed.
        """
        widest = self.widths[-1]
        if n > widest:
            return self.product(m, widest, k) * n / widest
        (n0, n1, fn), (k0, k1, fk) = self._bracket(n), self._bracket(k)
        low = self.gemm[m, n0, k0] * (1 - fn) + self.gemm[m, n1, k0] * fn
        high = self.gemm[m, n0, k1] * (1 - fn) + self.gemm[m, n1, k1] * fn
        return low * (1 - fk) + high * fk

    def _bracket(self, width: int) -> tuple[int, int, float]:
        i = bisect_left(self.widths, width)
        if self.widths[i] == width:
            return width, width, 0.0
        low, high = self.widths[i - 1], self.widths[i]
        return low, high, (width - low) / (high - low)

    def elementwise(self, moved_bytes: int) -> float:
        """Milliseconds of a kernel that only moves data: the tables' share of the bandwidth and their fixed latency."""
        rate: float = self.spec["mem_bw"] * self.spec["mem_bw_empirical_scaling_factor"]
        constant: float = self.spec["mem_empirical_constant_latency"]
        return 1e3 * (moved_bytes / rate + constant)


def layer_ms(tables: Tables, model: ModelSpec, m: int) -> float:
    """Milliseconds of one layer without attention, for m tokens."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    products = (
        (q + 2 * kv, model.hidden),  # qkv
        (model.hidden, q),  # o
        (2 * model.intermediate, model.hidden),  # gate and up
        (model.hidden, model.intermediate),  # down
    )
    moved = (  # values read and written per token
        4 * model.hidden,  # norm with the residual added
        4 * model.hidden,  # the second one
        2 * (q + kv),  # rotary embedding of queries and keys
        2 * 2 * kv,  # keys and values into the cache
        3 * model.intermediate,  # SiLU of the gate times up
    )
    return fsum(tables.product(m, n, k) for n, k in products) + fsum(
        tables.elementwise(values * ELEMENT * m) for values in moved
    )


def monotone(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in squared relative error (pool adjacent violators).

    Measured times are saw-toothed in tokens (tiles, kernel choice). An upper envelope would lie above the tables
    nearly everywhere, so neighbours that fall are averaged instead.
    """
    blocks: list[tuple[float, float, int]] = []  # weighted sum, weight, length
    for value in values:
        weight = 1 / value**2
        total, length = value * weight, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / weight:
            before = blocks.pop()
            total, weight, length = total + before[0], weight + before[1], length + before[2]
        blocks.append((total, weight, length))
    return [total / weight for total, weight, length in blocks for _ in range(length)]


def interpolate(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    """Linear between the points, constant outside."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    i = bisect_left(xs, x)
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def least_squares(rows: Iterable[tuple[Sequence[float], float, float]]) -> list[float]:
    """Coefficients c that minimise sum((weight * (c . x - y))^2) over rows (x, y, weight): normal equations."""
    scaled = [([v * w for v in x], y * w) for x, y, w in rows]
    size = len(scaled[0][0])
    a = [
        [fsum(x[i] * x[j] for x, _ in scaled) for j in range(size)]
        + [fsum(x[i] * y for x, y in scaled)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = a[i][i]
        a[i] = [v / pivot for v in a[i]]
        for j in range(size):
            if j != i:
                factor = a[j][i]
                a[j] = [v - factor * u for v, u in zip(a[j], a[i], strict=True)]
    return [row[size] for row in a]


def error_summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and largest size of relative errors."""
    sizes = [abs(v) for v in values]
    return {f"{name}_mean": round(fsum(sizes) / len(sizes), 4), f"{name}_max": round(max(sizes), 4)}


def build(tables: Tables, whole: ModelSpec, gpu: str, tp: int, date: str) -> dict[str, object]:
    """The profile's JSON mapping, in the tables' precision, times in picoseconds."""
    model = shard(whole, tp)
    layers = model.layers
    raw_layer = [layer_ms(tables, model, m) for m in tables.tokens]

    def layer_at(m: int) -> float:
        return interpolate(m, tables.tokens, raw_layer)

    # Attention of prompts, per layer: launch + per_token * tokens + per_pair * pairs. Errors count relative to the
    # whole layer, since that is what a user sees.
    prompts = [
        ((1.0, b * n, b * n * (n + 1) / 2), ms, 1 / (ms + layer_at(b * n)))
        for b, n, ms in tables.attention("context", model)
        if n >= LEAST_PROMPT and b * n <= MAX_TOKENS
    ]
    launch, per_token, per_pair = least_squares(prompts)
    prompt_errors = [(launch + per_token * x[1] + per_pair * x[2] - ms) * w for x, ms, w in prompts]

    # Attention of decodes, per layer and batch size: what exceeds launch and per-token work, which every step pays.
    contexts: dict[int, list[tuple[float, float, float]]] = {}
    for b, step, ms in tables.attention("generation", model):
        if step + 1 >= LEAST_CONTEXT and b <= MAX_NUM_SEQS:
            weight = 1 / (ms + layer_at(b))
            contexts.setdefault(b, []).append((b * (step + 1), ms - launch - per_token * b, weight))
    longest = max(total // b for b, rows in contexts.items() for total, _, _ in rows)
    base: list[list[float]] = []
    slope: list[list[float]] = []
    decode_errors: list[float] = []
    for b, rows in sorted(contexts.items()):
        if len(rows) >= 3:
            c, d = least_squares([((1.0, total), ms, w) for total, ms, w in rows])
            if c < 0:
                c, d = 0.0, least_squares([((total,), ms, w) for total, ms, w in rows])[0]
        else:  # too few contexts for a slope of its own: the cache is read at the same speed
            d = slope[-1][1]
            (c,) = least_squares([((1.0,), ms - d * total, w) for total, ms, w in rows])
        base.append([b, c])
        slope.append([b, d])
        decode_errors += [(c + d * total - ms) * w for total, ms, w in rows]

    raw_dense = [
        layers * (layer + launch + per_token * m)
        + tables.elementwise(2 * model.hidden * ELEMENT * m)  # embedding
        for m, layer in zip(tables.tokens, raw_layer, strict=True)
    ]
    dense = monotone(raw_dense)
    dense_errors = [(a - b) / b for a, b in zip(dense, raw_dense, strict=True)]
    rows_sampled = [m for m in tables.tokens if m <= MAX_NUM_SEQS]
    sample = monotone([tables.product(m, model.vocab, model.hidden) for m in rows_sampled])

    def ps(points: Iterable[Sequence[float]], scale: int = 1) -> list[list[int]]:
        return [[int(x), round(y * scale * MS)] for x, y in points]

    return {
        "provenance": {
            "model": model.name,
            "gpu": gpu,
            "tensor_parallel_size": tp,
            "dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "engine": f"vLLM {tables.version}",
            "source": "derived from the op tables of NVIDIA aiconfigurator (ai-dynamo/aiconfigurator)",
            "licence": "Apache-2.0",
            "date": date,
            "script": "scripts/build_profile.py",
            "fit_error": {
                **error_summary("dense_monotone_vs_table", dense_errors),
                **error_summary("prefill_attention_vs_table_of_layer", prompt_errors),
                **error_summary("decode_attention_vs_table_of_layer", decode_errors),
            },
            "notes": NOTES if tp == 1 else [*NOTES[:-1], *TP_NOTES],
        },
        "max_context": longest,
        "capture_sizes": list(CAPTURE_SIZES),
        "dense_ps": ps(zip(tables.tokens, dense, strict=True)),
        "comm_ps": [] if tp == 1 else ps(comm(tables, model, tp)),
        "sample_ps": ps(zip(rows_sampled, sample, strict=True)),
        "prefill_pair_ps": round(per_pair * layers * MS, 3),
        "decode_base_ps": ps(base, layers),
        "decode_context_ps": ps(slope, layers),
        "host_sync_ps": [
            [0, STEP_OVERHEAD_PS],
            [MAX_NUM_SEQS, STEP_OVERHEAD_PS + MAX_NUM_SEQS * HOST_PER_SEQ_PS],
        ],
        "host_async_ps": [[0, 0], [MAX_NUM_SEQS, MAX_NUM_SEQS * HOST_PER_SEQ_PS]],
        "gap_ps": STEP_OVERHEAD_PS,
    }


def shard(model: ModelSpec, tp: int) -> ModelSpec:
    """What each of `tp` GPUs holds of the model: the residual stream is whole, everything else is split."""
    return replace(
        model,
        heads=model.heads // tp,
        kv_heads=model.kv_heads // tp,
        intermediate=model.intermediate // tp,
        vocab=model.vocab // tp,
    )


def comm(tables: Tables, model: ModelSpec, tp: int) -> list[tuple[int, float]]:
    """(tokens, ms) of a step's all-reduces: two a layer and one after the embedding, each of a token's residual."""
    sizes, times = zip(*tables.all_reduce(tp), strict=True)
    number = 2 * model.layers + 1
    return [(m, number * interpolate(m * model.hidden, sizes, times)) for m in tables.tokens]


TP_NOTES = [
    "comm: two all-reduces a layer and one after the embedding by vLLM's own kernel in a CUDA graph; message sizes of "
    "the table are taken for 16-bit values. Nothing overlaps with them.",
    "Gathering the logits of the GPUs is not included.",
    "Not included: launch-bound slowness of eager mode, speculative decoding, LoRA.",
]

NOTES = [
    "dense: per layer qkv, o, gate+up and down products (linear in n and k between measured shapes), two norms with "
    "residual, rotary embedding, cache write and SiLU by bandwidth and constant latency, and once the embedding.",
    "dense also holds what every attention launch costs, whatever it attends to: a constant and a term per token, "
    "fitted to the prompt tables; the decode terms are what exceeds it, so a mixed step pays one launch per layer.",
    "dense and sample are the monotone sequences nearest to the saw-toothed tables in squared relative error.",
    "sample: the output layer alone, scaled in proportion to the vocabulary from the widest measured product; "
    "sampling kernels are not included.",
    "decode attention beyond 256 requests uses the time per context token of 256.",
    "host: 8 us per request and step (vLLM's scheduler and update on one core). Sync adds it and 1 ms a step to the "
    "kernels; async hides it behind them and keeps the 1 ms as gap (seen on H100 with vLLM 0.23).",
    "CUDA-graph sizes: vLLM's default list; which of them are captured depends on max_num_seqs and "
    "max_num_batched_tokens.",
    "No factor is fitted to whole steps: each is the sum of these terms.",
    "Not included: launch-bound slowness of eager mode, speculative decoding, LoRA, several GPUs.",
]


def main() -> None:
    """Write one profile."""
    data = os.environ.get("TWIN_DATA")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables",
        type=Path,
        default=Path(data, "profiles", "aic") if data else None,
        required=not data,
        help="folder of the op tables; default: profiles/aic in the folder TWIN_DATA names",
    )
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="a catalogue name")
    parser.add_argument("--gpu", default="H100", choices=sorted(SYSTEMS))
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument(
        "--date", required=True, help="day of generation, YYYY-MM-DD, written into the profile"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder that the profile is written into"
    )
    args = parser.parse_args()
    model = find_model(args.model)
    check_tensor_parallel(model, args.tp)
    profile = build(Tables(args.tables, SYSTEMS[args.gpu]), model, args.gpu, args.tp, args.date)
    path = args.output / profile_file_name(model.name, args.gpu, args.tp, "bfloat16")
    # One line for each innermost list of numbers.
    text = re.sub(
        r"\[[\s\d,]+\]",
        lambda found: json.dumps(json.loads(found[0])),
        json.dumps(profile, indent=1),
    )
    path.write_text(text + "\n")
    print(path)


if __name__ == "__main__":
    main()
