"""Bursts shorter than a cold start: what an autoscaler, a higher minimum and limits at the gateway do about them.

    python benchmarks/cluster_burst.py

15, 2, 10, 15, 5 and 2 requests/s for 150 s each, 1,000 tokens in and 1,000 out; Llama-3.1-8B on one H100 a replica with
48 slots, 103 s from the order of a pod to its Ready, 1 to 4 replicas; clients leave after 30 s without a token.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from twin.report.json_summary import summarize
from twin.simulation import load_scenario, simulate

RATES = (15, 2, 10, 15, 5, 2)
NOTHING = dict.fromkeys(("image", "weights", "compile", "graphs", "warm_up"), 0)


def hpa(least: int) -> dict[str, Any]:
    target = {"type": "AverageValue", "averageValue": "5"}
    metric = {"metric": {"name": "vllm:num_requests_waiting"}, "target": target}
    return {
        "minReplicas": least,
        "maxReplicas": 4,
        "metrics": [{"type": "Pods", "pods": metric}],
    }


def limit(per_replica: int) -> dict[str, Any]:
    return {"admission": {"max_inflight_per_replica": per_replica, "max_queue": 20}}


RETRIES = {
    "retries": {"attempts": 4, "backoff": 5, "outcomes": ["refused", "aborted", "timed_out"]}
}
HPA = {"replicas": 1, "hpa": hpa(1)}
VARIANTS: dict[str, dict[str, Any]] = {
    "fixed 1": {"replicas": 1},
    "fixed 4": {"replicas": 4},
    "HPA 1-4": HPA,
    "HPA 2-4": {"replicas": 2, "hpa": hpa(2)},
    "HPA 1-4, 48 a replica": HPA | limit(48),
    "HPA 1-4, 60 a replica": HPA | limit(60),
    "HPA 1-4, retries": HPA | RETRIES,
    "HPA 1-4, retries, 60 a replica": HPA | RETRIES | limit(60),
}


def scenario(cluster: dict[str, Any]) -> dict[str, Any]:
    steps = [[150 * i, rate] for i, rate in enumerate(RATES)]
    stream = {
        "arrivals": {"process": "poisson", "rate": {"steps": steps}},
        "prompt_tokens": {"fixed": 1000},
        "output_tokens": {"fixed": 1000},
        "duration": 900,
        "timeouts": {"ttft": 30.0},
    }
    start = {"phases": NOTHING | {"process": 100}}
    return {
        "name": "burst",
        "model": "meta-llama/Llama-3.1-8B",
        "hardware": {"gpu": "H100", "tensor_parallel_size": 1, "dtype": "bfloat16"},
        "engine": {"max_num_seqs": 48, "max_num_batched_tokens": 8192, "max_model_len": 8192},
        "policy": "vllm-fcfs",
        "traffic": [stream],
        "cluster": {**cluster, "cold_start": start},
        "objectives": {"ONLINE": {"ttft_p99": 5.0}},
        "run": {"until": 900},
    }


def rows() -> Iterator[str]:
    for name, cluster in VARIANTS.items():
        result = simulate(load_scenario(scenario(cluster)))
        summary = summarize(result)
        totals, tier = summary["totals"], summary["tiers"]["ONLINE"]
        hours = summary["cost"]["gpu_hours"]
        ended = Counter(record.outcome for record in result.records)
        yield (
            f"| {name} | {tier['ttft_s']['p99']:.1f} | {tier['attainment']:.1%} | {ended['completed']:,} | "
            f"{ended['timed_out']:,} | {ended['refused']:,} | {totals['unfinished']:,} | "
            f"{summary['attempts'] / totals['offered']:.2f} | {hours:.2f} |"
        )


def main() -> None:
    print(
        "| | TTFT p99 s | within 5 s | completed | timed out | refused | unfinished | attempts each | GPU-hours |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()
