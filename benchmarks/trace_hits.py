"""How far the prefix hits of a finite cache fall below those of one that forgets nothing.

    python benchmarks/trace_hits.py conversation_trace.jsonl --replicas 1,4,8

Each number of replicas is simulated with each router: Llama-3.1-8B, one H100 a replica, unmodified vLLM, the trace as
published, its ticks spread where it has some. Printed are the shares of prompt tokens that were hits, beside what an
infinite cache would give.
"""

import argparse
import json

from twin.report.json_summary import summarize
from twin.simulation import load_scenario, simulate
from twin.workload.check import Selection, check_trace


def scenario(
    arguments: argparse.Namespace, replicas: int, router: str, tick_s: float | None
) -> dict[str, object]:
    stream = {
        "trace": arguments.trace,
        "requests": arguments.requests,
        "spread_ticks": tick_s,
        "speedup": arguments.speedup,
    }
    return {
        "name": "hits",
        "model": "meta-llama/Llama-3.1-8B",
        "hardware": {"gpu": "H100", "tensor_parallel_size": 1, "dtype": "bfloat16"},
        "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 131_072},
        "policy": "vllm-fcfs",
        "traffic": [stream],
        "cluster": {"replicas": replicas, "router": router},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace")
    parser.add_argument("--replicas", default="1,4,8")
    parser.add_argument("--routers", default="least_connections")
    parser.add_argument("--requests", type=int, help="only the first requests")
    parser.add_argument("--speedup", type=float, default=1.0, help="below 1 slows down")
    parser.add_argument("--json", action="store_true", help="print one JSON object a run")
    arguments = parser.parse_args()
    found, _ = check_trace(arguments.trace, None, Selection(None, arguments.requests))
    attainable = found["prefixes"]["attainable_share"]
    if not arguments.json:
        print(f"infinite cache: {attainable:.1%} of prompt tokens")
    for router in arguments.routers.split(","):
        for replicas in map(int, arguments.replicas.split(",")):
            document = scenario(arguments, replicas, router, found["time"]["tick_s"])
            summary = summarize(simulate(load_scenario(document)))
            engine = summary["engine"]
            figures = {
                "router": router,
                "replicas": replicas,
                "hit_share": engine["prefix_hit_tokens"] / engine["prefix_query_tokens"],
                "attainable_share": attainable,
                "ttft_p50_s": summary["tiers"]["ONLINE"]["ttft_s"]["p50"],
                "refused": summary["totals"]["refused"],
                "preemptions": engine["preemptions"],
                "busy_share": engine["busy_share"],
                "wall_s": summary["wall_s"],
            }
            if arguments.json:
                print(json.dumps(figures), flush=True)
            else:
                print(
                    f"{replicas} replicas, {router}: {figures['hit_share']:.1%}, busy "
                    f"{figures['busy_share']:.0%}, TTFT p50 {figures['ttft_p50_s']:.3g} s, refused "
                    f"{figures['refused']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
