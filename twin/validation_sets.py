"""Which measured runs is the twin held against, with which configuration, and which numbers were allowed to know them?

Each set turns the rows of one published source into `MeasuredRun`s. Nothing is tuned on a run that is tested; `TRAINED`
says which data each number of the twin comes from.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, str]

SILICON = "NVIDIA aiconfigurator silicon_sample"
LMBENCH = "llm-d-benchmark LMBench"
LLAMA_70B, LLAMA_8B = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B"

TRAINED = (
    ("step times: op tables", "aiconfigurator-core 0.12.0, kernel tables only; no measured run of a server"),
    ("step times: layer tables", "LLMServingSim profiler tables of the same GPU; no measured run of a server"),
    ("step times: fit of Qwen3-32B", "fpm_qwen3_32b, every third run of 15 consecutive steps (twin validate --split)"),
    ("host: 8 us a request, 1 ms a step", "vLLM's scheduler on a CPU core, and H100 with vLLM 0.23; no run below"),
    ("host: 8 or 16 us a request that async cannot hide", "TPOT of 59 rows, Llama-3.1-70B FP8 on B200; none is tested"),
    ("memory: runtime and CUDA graphs", "vLLM's block counts for Llama-3.1-70B on 4 H100 and Llama-3.1-8B on RTX 4090"),
    ("roofline: efficiency factors", "the shipped op-table profiles, bfloat16, dense models"),
)  # fmt: skip
"""(number of the twin, data it was set by)."""


WORDS = ("source", "model", "gpu", "dtype", "quality", "engine", "workload", "replicas")
FIGURES = ("tp", "concurrency", "prompt_tokens", "output_tokens", "ttft_mean_ms", "tpot_mean_ms")
"""Columns of ground_truth_calibrate.csv; the figures must be numbers where a row is scored."""

TIMES = ("launch_time", "prompt_tokens", "generation_tokens", "ttft_s", "generation_time_s")
"""Figures of each LMBench row."""

STAMPS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
"""Figures of each request of LLMServingSim."""


@dataclass(frozen=True)
class MeasuredRun:
    """One run of a real server."""

    group: str
    """Runs that are judged together: source, GPU, replicas, workload."""
    name: str
    scenario: Mapping[str, Any]
    """The same run as a scenario; `traffic` is left out if there are `arrivals`."""
    measured: Mapping[str, float]
    """Metric -> seconds, as `twin.validation.figures` names them."""
    arrivals: Sequence[tuple[float, int, int]] = ()
    """(seconds, prompt tokens, output tokens) of each request."""
    prefix_share: float | None = None
    """Share of every prompt that is assumed to be common text; such a run says what would be, and is no evidence."""
    stated: str = ""
    """What the source does not say and is assumed."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """Metric -> largest relative error aimed at, for the run by itself."""
    loads: float = 0.0
    """Rate or concurrency, to order the runs of a group by."""


def llmservingsim(requests: Iterable[Mapping[str, Any]], trace: str, step_time: str) -> MeasuredRun:
    """ShareGPT, 300 requests, on one RTX PRO 6000: configuration as its meta.json has it, clock of the engine."""
    ttft, tpot, e2e = [], [], []
    for row in requests:
        ttft.append(row["first_token_ts"] - row["queued_ts"])
        e2e.append(row["last_token_ts"] - row["queued_ts"])
        tpot.append((row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1))
    number = len(ttft)
    return MeasuredRun(
        group="RTX PRO 6000, Llama-3.1-8B, ShareGPT at 10/s" + (", its own tables" if step_time else ""),
        name="llmservingsim RTXPRO6000 8B" + (", own layer tables" if step_time else ", shipped op tables"),
        scenario={
            "model": LLAMA_8B,
            "hardware": {"gpu": "RTXPRO6000", **({"step_time": step_time} if step_time else {})},
            "engine": {
                "max_num_seqs": 128, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.9,
            },
            "policy": "vllm-fcfs",
            "traffic": [{"trace": trace}],
        },
        measured={
            "ttft_mean": sum(ttft) / number, "ttft_p50": _median(ttft),
            "tpot_mean": sum(tpot) / number, "tpot_p50": _median(tpot),
            "e2e_mean": sum(e2e) / number, "e2e_p50": _median(e2e),
        },
        stated="vLLM 0.19 default: async scheduling, prefix caching",
        targets={"tpot_mean": 0.03, "e2e_mean": 0.05, "ttft_mean": 0.10} if step_time else {},
        loads=10.0,
    )  # fmt: skip


def lmbench(
    rows: Iterable[Row], replicas: int, shares: Sequence[float | None] = (None,)
) -> list[MeasuredRun]:
    """LMBench on Llama-3.1-70B, 2 A100 a replica, one run a file; each under every assumed share of common text."""
    by_file: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_file[row["file"]].append(row)
    found = []
    for file, requests in by_file.items():
        kind = "short input" if "short_input" in file else "ShareGPT"
        rate = float(file.rsplit("_", 1)[1].removeprefix("qps"))
        requests.sort(key=lambda row: float(row["launch_time"]))
        start = float(requests[0]["launch_time"])
        tpot = [
            float(row["generation_time_s"]) / (_count(row["generation_tokens"]) - 1)
            for row in requests
            if _count(row["generation_tokens"]) > 1
        ]
        ttft = [float(row["ttft_s"]) for row in requests]
        e2e = [float(row["ttft_s"]) + float(row["generation_time_s"]) for row in requests]
        for share in shares:
            assumed = "" if share is None else f", {share:.0%} common prefix assumed"
            found.append(
                MeasuredRun(
                    group=f"A100 TP2, {replicas} replica(s), Llama-3.1-70B, LMBench {kind}{assumed}",
                    name=f"LMBench {kind} {rate:g}/s, {replicas} replica(s){assumed}",
                    scenario={
                        "model": LLAMA_70B,
                        "hardware": {"gpu": "A100", "tensor_parallel_size": 2},
                        "engine": {
                            "max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 4096,
                            "gpu_memory_utilization": 0.9, "async_scheduling": False,
                        },
                        "policy": "vllm-fcfs",
                        "cluster": {"replicas": replicas, "router": "random"},
                    },
                    measured={
                        "ttft_mean": sum(ttft) / len(ttft), "ttft_p50": _median(ttft),
                        "tpot_mean": sum(tpot) / len(tpot), "tpot_p50": _median(tpot),
                        "e2e_mean": sum(e2e) / len(e2e), "e2e_p50": _median(e2e),
                    },
                    arrivals=[
                        (float(row["launch_time"]) - start, _count(row["prompt_tokens"]),
                         max(1, _count(row["generation_tokens"])))
                        for row in requests
                    ],
                    prefix_share=share,
                    stated="vLLM 0.8.5 defaults for A100: synchronous scheduling, budget 2048, 256 requests; "
                    "max_model_len 4096; a Kubernetes Service as a random router",
                    loads=rate,
                )
            )  # fmt: skip
    return sorted(found, key=lambda run: (run.group, run.loads))


def aiconfigurator(rows: Iterable[Row]) -> list[MeasuredRun]:
    """Llama-3.1-70B FP8 on H100, closed loops: 45 rows. Settings behind them: FP8 KV cache, async scheduling, no prefix
    cache, budget 8192, as many slots as users, 10 requests a user, lengths even between 0.8 L and L.
    """
    found = []
    for row in rows:
        if not is_silicon(row):
            continue
        users, tp = _count(row["concurrency"]), _count(row["tp"])
        prompt, output = _count(row["prompt_tokens"]), _count(row["output_tokens"])
        found.append(
            MeasuredRun(
                group="H100, Llama-3.1-70B FP8, closed loops",
                name=f"70B FP8 H100 TP{tp}, {prompt}/{output}, {users} users",
                scenario={
                    "model": LLAMA_70B,
                    "hardware": {"gpu": "H100", "tensor_parallel_size": tp, "dtype": "fp8"},
                    "engine": {
                        "max_num_seqs": users, "max_num_batched_tokens": 8192,
                        "max_model_len": prompt + output + 256, "kv_cache_dtype": "fp8",
                        "enable_prefix_caching": False, "gpu_memory_utilization": 0.9,
                    },
                    "policy": "vllm-fcfs",
                    "traffic": [
                        {
                            "arrivals": {"process": "closed", "users": users},
                            "prompt_tokens": {"uniform": [int(0.8 * prompt), prompt]},
                            "output_tokens": {"uniform": [int(0.8 * output), output]},
                            "requests": 10 * users,
                        }
                    ],
                },
                measured={
                    "ttft_mean": float(row["ttft_mean_ms"]) / 1e3,
                    "tpot_mean": float(row["tpot_mean_ms"]) / 1e3,
                },
                stated="the source does not say whether its figures are means or medians",
                loads=users,
            )
        )  # fmt: skip
    return sorted(found, key=lambda run: run.name)


def is_silicon(row: Row) -> bool:
    """Whether a row of ground_truth_calibrate.csv is one of those that `aiconfigurator` takes."""
    return (
        row["source"].startswith(SILICON)
        and (row["model"], row["gpu"], row["dtype"]) == (LLAMA_70B, "h100_sxm", "fp8")
        and row["quality"].startswith(("A", "B"))
        and row["engine"] == "vllm"
    )


def not_scored(rows: Iterable[Row]) -> list[tuple[str, str, int]]:
    """(set-up, why it is not scored, rows) of open-loop rows with an engine or router of another kind, and of overload
    whose requests were cut off.
    """
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if not row["source"].startswith(LMBENCH):
            continue
        name = f"{row['gpu']} TP{row['tp']}, {row['replicas']} replica(s), {row['engine']}, {row['workload']}"
        if row["quality"].startswith("C"):
            counts[name, "overloaded, most requests never completed"] += 1
        elif row["engine"] != "vllm":
            counts[name, "another router or cache than vLLM's own"] += 1
    return [(name, why, number) for (name, why), number in sorted(counts.items())]


def _count(text: str) -> int:
    return int(float(text))


def _median(values: Sequence[float]) -> float:
    ordered, n = sorted(values), len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
