#!/usr/bin/env python3
"""Six ways to have enough replicas under a load that doubles twice: what each costs and what users get.

The Azure LLM inference trace 2023 (conversation) runs at three times its rate for 20 minutes (16 requests/s, for which
four replicas of a 70B model on 4 H100 suffice), then two copies of it at once, then four. Every copy is turned by its
share of the trace, so that bursts do not coincide. Prints one table and each scaler's decisions.

    TWIN_DATA=FOLDER python benchmarks/autoscaling.py [--only NAME] [--speed]
"""

import argparse
import csv
import os
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path

from twin.clock import PS
from twin.report.json_summary import summarize
from twin.report.scaling import decisions
from twin.simulation import load_scenario, simulate

THIRD_S = 1200
WAITING = "vllm:num_requests_waiting"
P99_MS = "1000 * histogram_quantile(0.99, rate(vllm:e2e_request_latency_seconds_bucket[5m]))"
BOUNDS = {"minReplicas": 4, "maxReplicas": 12}


def pods_metric(name, target):
    target = {"type": "AverageValue", "averageValue": target}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}


ARTICLE = {
    "scaleUp": {
        "stabilizationWindowSeconds": 30,
        "policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}],
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
    },
}
QUEUE_TRIGGER = {
    "type": "prometheus",
    "name": "queue",
    "metadata": {"query": f"sum({WAITING})", "threshold": "5"},
}
WAYS = {
    "fixed 4": {"replicas": 4, "cold_start": {}},
    "fixed 12": {"replicas": 12, "cold_start": {}},
    "HPA queue": {"replicas": 4, "hpa": {**BOUNDS, "metrics": [pods_metric(WAITING, "5")]}},
    "HPA p99": {
        "replicas": 4,
        "hpa": {**BOUNDS, "metrics": [pods_metric("p99_ms", "3000")], "behavior": ARTICLE},
        "metrics": {"queries": {"p99_ms": P99_MS}},
    },
    "KEDA": {
        "replicas": 4,
        "keda": {"minReplicaCount": 4, "maxReplicaCount": 12, "triggers": [QUEUE_TRIGGER]},
    },
    "KPA": {
        "replicas": 4,
        "kpa": {
            "min_replicas": 4,
            "max_replicas": 12,
            "target": 20,
            "query": "vllm:num_requests_running + vllm:num_requests_waiting",
        },
    },
}
WHY = {
    "fixed 4": "enough for the first third only",
    "fixed 12": "enough at any time, and paid for at any time",
    "HPA queue": "nobody waits where 12 suffice: it falls to 4 and pays a cold start of queue each time",
    "HPA p99": "a long reply takes more than 3 s at any load: it runs to the maximum and stays",
    "KEDA": "the sum over 5 a replica is the mean over 5: the same orders",
    "KPA": "counts what runs, so that it grows before anything waits and falls only when less runs",
}


def tiled(source, folder):
    """The trace in three thirds of one, two and four copies, as a file in Azure's form."""
    with source.open(newline="") as file:
        rows = [
            (
                datetime.fromisoformat(row["TIMESTAMP"][:26]),
                row["ContextTokens"],
                row["GeneratedTokens"],
            )
            for row in csv.DictReader(file)
        ]
    first = rows[0][0]
    length = (rows[-1][0] - first).total_seconds()
    speedup = length / THIRD_S
    found = []
    for third, copies in enumerate((1, 2, 4)):
        for copy in range(copies):
            for at, prompt, reply in rows:
                turned = (
                    (at - first).total_seconds() / speedup + copy * THIRD_S / copies
                ) % THIRD_S
                found.append((third * THIRD_S + turned, prompt, reply))
    found.sort(key=lambda row: row[0])
    path = folder / "tiled.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for second, prompt, reply in found:
            stamp = first + timedelta(seconds=second)
            writer.writerow([stamp.strftime("%Y-%m-%d %H:%M:%S.%f"), prompt, reply])
    return path


def scenario(trace, cluster, **run):
    return {
        "name": "autoscaling",
        "model": "meta-llama/Llama-3.1-70B",
        "hardware": {"gpu": "H100", "tensor_parallel_size": 4},
        "engine": {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 16384},
        "policy": "vllm-fcfs",
        "traffic": [{"trace": str(trace)}],
        "cluster": {"price_per_gpu_hour": 2.5, **cluster},
        "objectives": {"ONLINE": {"ttft_p99": 2.0, "tpot_p99": 0.1}},
        "run": {"until": 3 * THIRD_S, "records": True, **run},
    }


def compare(trace, only):
    head = f"{'':10}{'TTFT p99':>10}{'goodput':>9}{'unfinished':>12}{'GPU-h':>7}{'cost':>8}{'ready':>7}{'max':>5}"
    lines = []
    for name, cluster in WAYS.items():
        if only not in (None, name):
            continue
        started = time.perf_counter()
        result = simulate(load_scenario(scenario(trace, cluster)))
        told = summarize(result)
        tier, fleet, cost = told["tiers"]["ONLINE"], told["fleet"], told["cost"]
        ready = fleet["replicas"]["ready"]
        lines.append(
            f"{name:10}{tier['ttft_s']['p99']:8.2f} s{tier['goodput_rps']:7.1f}/s{told['totals']['unfinished']:12,}"
            f"{cost['gpu_hours']:7.1f}{cost['total']:8.0f}{ready['mean']:7.1f}{ready['max']:5}  {WHY[name]}"
        )
        print(f"-- {name}: {time.perf_counter() - started:.0f} s; shares {cost['gpu_seconds']}")
        for look in decisions(result.fleet.log.looks)[:30]:
            print(
                f"   {look.at_ps / PS:6.0f} s  {look.current:2} -> {look.desired:<2}  {look.reason}"
            )
    print("\n".join(["", head, *lines]))


def speed(trace):
    """Sixteen replicas with an HPA that looks and leaves them, and the same sixteen without."""
    hpa = {
        "minReplicas": 16,
        "maxReplicas": 17,
        "metrics": [pods_metric(WAITING, "5"), pods_metric("p99_ms", "3000")],
    }
    ways = {
        "fixed": {"replicas": 16},
        "with HPA": {
            "replicas": 16,
            "hpa": hpa | {"maxReplicas": 16},
            "metrics": {"queries": {"p99_ms": P99_MS}},
        },
    }
    best = {}
    for _ in range(3):
        for name, cluster in ways.items():
            loaded = load_scenario(scenario(trace, cluster, until=THIRD_S))
            started = time.process_time()
            simulate(loaded)
            best[name] = min(best.get(name, float("inf")), time.process_time() - started)
    print(
        {name: round(s, 2) for name, s in best.items()},
        f"ratio {best['with HPA'] / best['fixed']:.3f}",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(WAYS))
    parser.add_argument(
        "--speed", action="store_true", help="time 16 replicas with and without an HPA"
    )
    args = parser.parse_args()
    source = Path(os.environ.get("TWIN_DATA", ""), "traces", "azure2023_conv.csv")
    if not source.is_file():
        parser.error(
            f"no trace {source.name}: set TWIN_DATA to the folder that has it under traces/"
        )
    with tempfile.TemporaryDirectory() as folder:
        trace = tiled(source, Path(folder))
        if args.speed:
            speed(trace)
        else:
            compare(trace, args.only)


if __name__ == "__main__":
    main()
