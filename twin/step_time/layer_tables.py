"""Step times from per-layer tables of one model on one GPU, as LLMServingSim's profiler writes them.

`dense.csv` has microseconds by layer and tokens, `per_sequence.csv` by sequences, `attention.csv` by what a step holds:
a prompt chunk on cached tokens beside decodes of equal context.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from twin.errors import InputError
from twin.step_time.catalogue import ModelSpec
from twin.step_time.memory import CAPTURE_SIZES
from twin.step_time.op_tables import GAP_PER_SEQ_PS, HOST_PER_SEQ_PS, STEP_OVERHEAD_PS
from twin.step_time.profiles import Profile, Provenance

US = 10**6
"""Picoseconds in a microsecond, the tables' unit."""

PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""Kernels of one layer -> how often each runs in it."""

ONCE = ("embedding", "final_layernorm")

Row = Mapping[str, str]
FEW_LONG = ("sr<=5%", "sr<=15%", "sr<=40%")
"""Shares of long requests in a step that are usual."""
MAX_SEQS = 256
SHORT = 2048
"""Cached tokens before a chunk up to which its time counts fully in the fit."""


def layer_profile(
    dense: Iterable[Row],
    per_sequence: Iterable[Row],
    attention: Iterable[Row],
    skew: Iterable[Row],
    contexts: Sequence[float],
    model: ModelSpec,
    gpu: str,
    engine: str,
    source: str,
) -> Profile:
    """The profile of these tables. No factor is fitted to a whole step; attention is fitted to the linear terms.

    Decodes of uneven context take longer than even ones of the same sum. `skew_fit.csv` says how much: alpha of the way
    from the time at the mean to the time at the longest. `contexts` are typical ones of the traffic (prompt and half of
    the reply); the longest of n is taken to be their quantile n / (n + 1).

    Raises InputError for a table that lacks a column or a layer's kernel.
    """
    try:
        by_layer = _by(dense, "layer", "tokens")
        by_sequence = _by(per_sequence, "layer", "sequences")
        launches = [
            (
                int(row["prefill_chunk"]), int(row["kv_prefill"]), int(row["n_decode"]),
                int(row["kv_decode"]), float(row["time_us"]),
            )
            for row in attention
        ]  # fmt: skip
    except (KeyError, ValueError) as error:
        raise InputError(f"{source}: no per-layer tables: {error}") from None
    counts = sorted(by_layer["layernorm"])
    layer = np.zeros(len(counts))
    for name, times in PER_LAYER.items():
        if name in by_layer:
            layer += times * np.array([by_layer[name][n] for n in counts])
        elif name != "qk_norm":
            raise InputError(f"{source}: the dense table has no layer {name!r}")
    once = sum(np.array([by_layer[name][n] for n in counts]) for name in ONCE)

    def rest(tokens: int) -> float:
        """Microseconds of a layer without attention."""
        return float(np.interp(tokens, counts, layer))

    # One launch computes the prompt's and the decodes' attention. Relative squares of a whole layer's time.
    prompts = [(n, c, us) for n, c, decodes, _, us in launches if n and not decodes]
    features = [(1.0, n * c + n * (n + 1) / 2) for n, c, _ in prompts]
    weights = np.array([(1 if c <= SHORT else 0.1) / (us + rest(n)) for n, c, us in prompts])
    terms, *_ = np.linalg.lstsq(
        np.array(features) * weights[:, None],
        np.array([us for *_, us in prompts]) * weights,
        rcond=None,
    )
    launch, pair = float(terms[0]), float(terms[1])
    prompt_error = [
        abs(launch + pair * x[1] - us) * w
        for x, (_, c, us), w in zip(features, prompts, weights, strict=True)
        if c <= SHORT
    ]
    alpha = _alpha(skew, source)
    mean = float(np.mean(contexts))

    def longest(number: int) -> float:
        """The longest of so many contexts over their mean."""
        return float(np.quantile(contexts, number / (number + 1))) / mean if number > 1 else 1.0

    base, slope = [], []
    decode_error: list[float] = []
    alone: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for n, _, decodes, context, us in launches:
        if not n and decodes <= MAX_SEQS:
            alone[decodes].append((decodes * (context + 1), us))
    for decodes, rows in sorted(alone.items()):
        x, y = np.array([t for t, _ in rows], dtype=np.float64), np.array([us for _, us in rows])
        w = 1 / (y + rest(decodes))
        (c0, d), *_ = np.linalg.lstsq(np.stack([w, x * w], axis=1), y * w, rcond=None)
        if c0 < 0:
            c0, d = 0.0, float((x * y * w * w).sum() / (x * x * w * w).sum())
        base.append((decodes, float(c0)))
        slope.append((decodes, float(d) * (1 + alpha(decodes) * (longest(decodes) - 1))))
        decode_error += (np.abs(c0 + d * x - y) * w).tolist()

    mixed = _beside_prompts(launches, launch, pair, dict(base), dict(slope), rest)

    def ps(points: Sequence[tuple[int, float]], scale: int) -> tuple[tuple[int, int], ...]:
        return tuple((n, round(us * scale * US)) for n, us in points)

    per_step = [(n, float(us)) for n, us in zip(counts, model.layers * layer + once, strict=True)]
    sampled = sorted(by_sequence["lm_head"])
    last = base[-1][0]
    return Profile(
        provenance=Provenance(
            model=model.name,
            gpu=gpu,
            tensor_parallel_size=1,
            dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            engine=engine,
            source=source,
            licence="MIT",
            date="2026-11-30",
            script="twin validate",
            fit_error={
                "prefill_attention_vs_tables_mean": round(float(np.mean(prompt_error)), 4),
                "decode_attention_vs_tables_mean": round(float(np.mean(decode_error)), 4),
            },
            notes=(
                "Decodes of uneven context: the tables' correction (alpha, steps without a prompt) for the spread of "
                "the traffic's contexts.",
                "Host work that nothing hides, 1 ms a step and 8 us a request, as in the shipped profiles.",
            ),
        ),
        max_context=16384,
        capture_sizes=CAPTURE_SIZES,
        dense_ps=ps(per_step, 1),
        comm_ps=(),
        sample_ps=ps([(n, by_sequence["lm_head"][n] + by_sequence["sampler"][n]) for n in sampled], 1),
        prefill_pair_ps=round(pair * model.layers * US, 4),
        decode_base_ps=ps(base, model.layers),
        decode_context_ps=ps(slope, model.layers),
        host_sync_ps=((0, STEP_OVERHEAD_PS), (last, STEP_OVERHEAD_PS + last * HOST_PER_SEQ_PS)),
        host_async_ps=((0, 0), (last, last * HOST_PER_SEQ_PS)),
        gap_ps=STEP_OVERHEAD_PS,
        prefill_base_ps=round(max(launch, 0.0) * model.layers * US),
        mixed_context_ps=ps(mixed, model.layers),
        gap_seq_ps=GAP_PER_SEQ_PS[1],
    )  # fmt: skip


def _beside_prompts(
    launches: Sequence[tuple[int, int, int, int, float]],
    launch: float,
    pair: float,
    base: Mapping[int, float],
    slope: Mapping[int, float],
    rest: Callable[[int], float],
) -> list[tuple[int, float]]:
    """What a token of context takes more beside a prompt, by decodes: microseconds of a layer, at least 0."""
    found: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for chunk, cached, decodes, context, us in launches:
        if chunk and decodes in base and cached <= SHORT and context <= SHORT:
            total = decodes * (context + 1)
            told = launch + pair * (chunk * cached + chunk * (chunk + 1) / 2)
            told += base[decodes] + slope[decodes] * total
            weight = 1 / (us + rest(chunk + decodes))
            found[decodes].append((total, us - told, weight))
    points = []
    for decodes, rows in sorted(found.items()):
        x, y, w = (np.array(column) for column in zip(*rows, strict=True))
        points.append((decodes, max(0.0, float((x * y * w * w).sum() / (x * x * w * w).sum()))))
    return points


def _alpha(rows: Iterable[Row], source: str) -> Callable[[int], float]:
    """Decodes -> share of the way to the longest context's time, in steps that hold decodes alone."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    try:
        for row in rows:
            if row["pc"] == "0" and row["skew_rate_label"] in FEW_LONG:
                most = int(row["n_label"].removeprefix("n<="))
                found[most].append((float(row["alpha"]), float(row["n_samples"])))
    except (KeyError, ValueError) as error:
        raise InputError(f"{source}: no table of skew: {error}") from None
    means = {
        most: max(0.0, sum(a * n for a, n in pairs) / sum(n for _, n in pairs))
        for most, pairs in sorted(found.items())
    }

    def alpha(decodes: int) -> float:
        return next((a for most, a in means.items() if decodes <= most), 0.0)

    return alpha


def _by(rows: Iterable[Row], name: str, count: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row[name]][int(row[count])] = float(row["time_us"])
    return found
