"""What routing does to prefix hits, first tokens and balance as replicas are added, at the same load a replica.

    python benchmarks/cluster_routing.py
    python benchmarks/cluster_routing.py --trace mooncake_conversation.jsonl --requests 3000

Llama-3.1-8B on one H100 a replica, unmodified vLLM. Without a trace the traffic is conversations of six turns over a
shared system prompt. Hits are shares of prompt tokens; imbalance is the busy time of the busiest replica over the mean.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from twin.report.json_summary import summarize
from twin.simulation import load_scenario, simulate

ROUTERS: dict[str, dict[str, Any]] = {
    "round robin": {"router": "round_robin"},
    "least connections": {"router": "least_connections"},
    "session": {"router": "session_affinity", "routing": {"guard": None}},
    "session, guard 1.25": {"router": "session_affinity"},
    "prefix": {"router": "prefix_affinity", "routing": {"guard": None}},
    "prefix, guard 1.25": {"router": "prefix_affinity"},
}


def talk(replicas: int) -> dict[str, Any]:
    """Conversations: 0.55 begin a second for each replica, of which every prompt repeats what was said."""
    return {
        "arrivals": {"process": "poisson", "rate": 0.55 * replicas},
        "sessions": {
            "turns": 6,
            "system_prompt_tokens": 1500,
            "think_time": {"exponential": 20.0},
        },
        "prompt_tokens": {"lognormal": {"median": 700, "p95": 4000}},
        "output_tokens": {"lognormal": {"median": 150, "p95": 500}},
        "duration": 600,
    }


def scenario(stream: dict[str, Any], replicas: int, cluster: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "routing",
        "model": "meta-llama/Llama-3.1-8B",
        "hardware": {"gpu": "H100", "tensor_parallel_size": 1, "dtype": "bfloat16"},
        "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 131_072},
        "policy": "vllm-fcfs",
        "traffic": [stream],
        "cluster": {"replicas": replicas, **cluster},
        "run": {"until": 900} if "arrivals" in stream else {},
    }


def rows(arguments: argparse.Namespace) -> Iterator[tuple[str, int, float, float, float, float]]:
    for name, cluster in ROUTERS.items():
        for replicas in map(int, arguments.replicas.split(",")):
            stream = talk(replicas)
            if arguments.trace:
                stream = {
                    "trace": arguments.trace,
                    "requests": arguments.requests,
                    "speedup": arguments.load * replicas,
                }
            result = simulate(load_scenario(scenario(stream, replicas, cluster)))
            summary = summarize(result)
            engine, ttft = summary["engine"], summary["tiers"]["ONLINE"]["ttft_s"]
            busy = [stats.busy_ps for stats in result.engines]
            yield (
                name,
                replicas,
                engine["prefix_hit_tokens"] / engine["prefix_query_tokens"],
                ttft["p50"],
                ttft["p99"],
                max(busy) * len(busy) / sum(busy),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", help="a trace with content; else conversations are made")
    parser.add_argument("--requests", type=int, help="only the first ones of the trace")
    parser.add_argument("--load", type=float, default=0.15, help="speedup of the trace a replica")
    parser.add_argument("--replicas", default="1,2,4,8")
    arguments = parser.parse_args()
    print("| router | replicas | hits | TTFT p50 s | TTFT p99 s | imbalance |")
    print("|---|---|---|---|---|---|")
    for name, replicas, hits, p50, p99, imbalance in rows(arguments):
        print(
            f"| {name} | {replicas} | {hits:.1%} | {p50:.3f} | {p99:.2f} | {imbalance:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
