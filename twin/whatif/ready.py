"""Questions that everybody asks, ready to run: weights of fewer bits, prefix cache, GPUs together or apart, budget.

Each question is a table of variants of one small scenario; every row is a run, with what is known of its error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twin.errors import InputError
from twin.report.texts import plural
from twin.scenario import load_scenario
from twin.simulation import Result, simulate
from twin.step_time.memory import WEIGHT_ONLY, usable_tokens
from twin.validation import figures, table_of

SEED = 1


@dataclass(frozen=True)
class Setup:
    """What a question is asked of."""

    model: str
    gpu: str
    tensor_parallel_size: int
    prompt_tokens: int
    output_tokens: int
    users: int
    """Closed loop; each has one request at a time."""
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True)
class Row:
    """One variant."""

    name: str
    weights_gb: float
    """Of one GPU."""
    kv_tokens: int
    """Of all requests of a replica."""
    concurrency: int
    """Requests of this length that fit into the KV cache at their end, at most as many as there are slots."""
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    kv_used: float
    """Share of the KV cache in use while busy."""
    prompt_share: float
    """Share of the GPU's time that prompts take, on an idle server."""
    validated: str
    """Median errors of TTFT and TPOT in similar measured runs, and how many, or that there are none."""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dict(vars(self))


def quantisation(setup: Setup, dtypes: Sequence[str]) -> list[Row]:
    """The same load under weights (and KV cache) of several types, `fp8+kv` being FP8 for both.

    Types without op tables are computed by roofline; so that ratios compare like with like, the first type is then
    there by roofline, too. Raises InputError for an unknown type and for weights that do not fit.
    """
    rows = []
    for name in dict.fromkeys(dtypes):
        dtype, _, kv = name.partition("+")
        if kv not in ("", "kv"):
            raise InputError(
                f"--dtype {name}: write a type of weights, or fp8+kv for the KV cache as well"
            )
        rows.append(
            _row(name, setup, _hardware(setup, dtype), {"kv_cache_dtype": "fp8"} if kv else {})
        )
    if any(row.note for row in rows[1:]) and not rows[0].note:
        first = dtypes[0].partition("+")[0]
        hardware = _hardware(setup, first) | {"step_time": "roofline"}
        rows.insert(1, _row(f"{dtypes[0]} by roofline", setup, hardware, {}))
    return rows  # fmt: skip


def token_budget(setup: Setup, budgets: Sequence[int]) -> list[Row]:
    """The same load under several max_num_batched_tokens: larger steps for prompts, fewer KV blocks."""
    hardware = _hardware(setup, "bfloat16")
    if max(budgets) > 16384:  # beyond the op tables
        hardware["step_time"] = "roofline"
    return [
        _row(f"budget {budget:,}", setup, hardware, {"max_num_batched_tokens": budget})
        for budget in budgets
    ]


def split_or_copy(setup: Setup, gpus: int, rate: float) -> list[dict[str, Any]]:
    """So many GPUs as one replica over all, as as many replicas as GPUs, and between: the same open-loop traffic.

    A split under which the weights do not fit is named with the reason. Raises InputError for fewer than 2 GPUs.
    """
    if gpus < 2 or gpus & (gpus - 1):
        raise InputError(f"--gpus {gpus}: must be a power of 2 of at least 2")
    found: list[dict[str, Any]] = []
    tp = gpus
    while tp >= 1:
        document = _document(setup, {"gpu": setup.gpu, "tensor_parallel_size": tp}, {})
        document["cluster"] = {"replicas": gpus // tp, "router": "least_connections"}
        document["traffic"][0]["arrivals"] = {"process": "poisson", "rate": rate}
        document["traffic"][0]["requests"] = max(200, round(30 * rate))
        name = f"{gpus // tp} x TP{tp}"
        try:
            result = simulate(load_scenario(document))
        except InputError as error:
            found.append({"split": name, "impossible": str(error).splitlines()[0]})
        else:
            told = figures(table_of(result))
            found.append(
                {
                    "split": name,
                    "ttft_p50_s": told["ttft_p50"],
                    "ttft_p99_s": told["ttft_p99"],
                    "tpot_mean_s": told["tpot_mean"],
                    "e2e_mean_s": told["e2e_mean"],
                    "kv_tokens": gpus // tp * _kv_tokens(result),
                    "validated": _trust(result, "ttft", "tpot", "e2e"),
                }
            )
        tp //= 2
    return found


def prefix_cache(
    cases: Iterable[tuple[str, str, int]], turns: int, prompt_tokens: int, shared_tokens: int
) -> list[dict[str, Any]]:
    """Conversations whose prompts all begin with the same text, with the cache and without, on an idle server.

    `cases` are (model, GPU, TP). TTFT is that of the turns after the first. Hits are whole blocks, so a shared text of
    2,500 tokens saves 2,496. A case whose weights do not fit is named with the reason.
    """
    found: list[dict[str, Any]] = []
    for model, gpu, tp in cases:
        row: dict[str, Any] = {"model": model, "gpu": f"{tp} x {gpu}"}
        try:
            for key, cached in (("without_s", False), ("with_s", True)):
                lengths = (turns, prompt_tokens, shared_tokens)
                result = simulate(load_scenario(_conversation(model, gpu, tp, cached, *lengths)))
                table = table_of(result)
                later = (table["first_token_s"] - table["arrival_s"])[1:]
                row[key] = float(later.mean())
                hits = sum(engine.prefix_hit_tokens for engine in result.engines)
        except InputError as error:
            found.append(row | {"impossible": str(error).splitlines()[0]})
            continue
        per_token = result.scenario.hardware.memory.kv_bytes_per_token
        found.append(
            row
            | {
                "hit_tokens": hits,
                "saved_bytes": hits * per_token,
                "validated": _trust(result, "ttft"),
            }
        )
    return found


def _conversation(
    model: str, gpu: str, tp: int, cached: bool, turns: int, prompt_tokens: int, shared_tokens: int
) -> dict[str, Any]:
    return {
        "name": "prefix",
        "model": model,
        "hardware": {"gpu": gpu, "tensor_parallel_size": tp},
        "engine": {"max_model_len": prompt_tokens + 64, "enable_prefix_caching": cached},
        "policy": "vllm-fcfs",
        "traffic": [
            {
                "arrivals": {"process": "constant", "rate": 0.05},
                "prompt_tokens": {"fixed": prompt_tokens - shared_tokens},
                "output_tokens": {"fixed": 32},
                "sessions": {"turns": 1, "system_prompt_tokens": shared_tokens},
                "requests": turns,
            }
        ],
        "run": {"seed": SEED},
    }


def explain(rows: Sequence[Row]) -> str:
    """What decides between the rows, in words."""
    best = max(rows[1:], key=lambda row: row.output_tokens_per_s)
    first = next(
        (row for row in rows if best.note and row.note and row is not best), rows[0]
    )  # like with like
    gain = best.output_tokens_per_s / first.output_tokens_per_s
    text = f"{best.name} gives {gain:.2f} times the throughput of {first.name}. "
    if first.prompt_share > 0.5:
        text += (
            f"Prompts take {first.prompt_share:.0%} of a request's time on the GPU, and prefill is compute-bound: "
            "weights of fewer bits are read faster but not multiplied faster, unless the GPU computes in that type. "
        )
    else:
        text += (
            f"Replies take {1 - first.prompt_share:.0%} of a request's time on the GPU, and decoding is bound by what "
            "is read: weights, and with many requests the KV cache, which weights of fewer bits do not make smaller. "
        )
    if first.kv_used < 0.6 and best.kv_tokens > first.kv_tokens:
        text += (
            f"The freed memory is {best.kv_tokens - first.kv_tokens:,} more tokens of KV cache, unused here: "
            f"{first.name} has {first.kv_used:.0%} of its own in use."
        )
    return text


def _hardware(setup: Setup, dtype: str) -> dict[str, Any]:
    return {"gpu": setup.gpu, "tensor_parallel_size": setup.tensor_parallel_size, "dtype": dtype}


def _document(
    setup: Setup, hardware: Mapping[str, Any], engine: Mapping[str, Any]
) -> dict[str, Any]:
    budget = setup.max_num_batched_tokens
    return {
        "name": "what-if",
        "model": setup.model,
        "hardware": dict(hardware),
        "engine": {
            "max_num_seqs": max(setup.users, 1),
            "max_model_len": setup.prompt_tokens + setup.output_tokens + 16,
            **({} if budget is None else {"max_num_batched_tokens": budget}),
            **engine,
        },
        "policy": "vllm-fcfs",
        "traffic": [
            {
                "arrivals": {"process": "closed", "users": setup.users},
                "prompt_tokens": {"fixed": setup.prompt_tokens},
                "output_tokens": {"fixed": setup.output_tokens},
                "requests": 6 * setup.users,
            }
        ],
        "run": {"seed": SEED},
    }


def _row(name: str, setup: Setup, hardware: Mapping[str, Any], engine: Mapping[str, Any]) -> Row:
    document, note = _document(setup, hardware, engine), ""
    try:
        scenario = load_scenario(document)
    except InputError as error:
        if "no built-in step-time profile" not in str(error):
            raise
        document["hardware"]["step_time"] = "roofline"
        scenario = load_scenario(document)
    if document["hardware"].get("step_time") == "roofline":
        note = "weight-only, roofline" if hardware["dtype"] in WEIGHT_ONLY else "roofline"
    result = simulate(scenario)
    told = figures(table_of(result))
    memory, times = scenario.hardware.memory, scenario.step_time
    n = min(setup.prompt_tokens, scenario.engine.token_budget)
    prompt_ps = times.step_ps(n, 1, 1, n * (n + 1) // 2, 0, 0) * setup.prompt_tokens / n
    context = setup.prompt_tokens + setup.output_tokens // 2
    users = setup.users
    decode_ps = times.step_ps(users, users, users, 0, users, users * context) / users
    reply_ps = decode_ps * setup.output_tokens
    kv_tokens = _kv_tokens(result)
    busy = sum(engine.busy_ps for engine in result.engines)
    used = sum(engine.kv_usage_mean * engine.busy_ps for engine in result.engines) / busy
    return Row(
        name=name,
        weights_gb=memory.weights_bytes / 1e9,
        kv_tokens=kv_tokens,
        concurrency=kv_tokens // (setup.prompt_tokens + setup.output_tokens),
        ttft_s=told["ttft_mean"],
        tpot_s=told.get("tpot_mean", 0.0),
        output_tokens_per_s=told["output_tokens_per_s"],
        kv_used=used,
        prompt_share=prompt_ps / (prompt_ps + reply_ps),
        validated=_trust(result, "ttft", "tpot"),
        note=note,
    )


def _kv_tokens(result: Result) -> int:
    engine = result.scenario.engine
    return usable_tokens(engine.num_gpu_blocks, engine.block_size)


def _trust(result: Result, *latencies: str) -> str:
    """The median errors of these latencies in how many similar runs (`TTFT 4% in 29 runs`), or "not validated".

    A latency that was not measured there is left out.
    """
    trust = result.trust()
    found = {name: trust.error(name) for name in latencies}
    told = [f"{name.upper()} {error:.0%}" for name, error in found.items() if error is not None]
    if trust.nearest is None or not told:
        return "not validated"
    return f"{', '.join(told)} in {plural(trust.nearest.runs, 'run')}"
