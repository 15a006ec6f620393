"""A retry storm and its cure, a slow replica under two routers, half of the fleet taken back: one table each.

    python benchmarks/cluster_faults.py [--only storm|slow|spot]

Llama-3.1-8B on H100, replicas of 8 slots, unmodified vLLM; a replica does about 10 requests/s of 100 + 100 tokens.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from twin.clock import PS
from twin.report.json_summary import summarize
from twin.simulation import Result, load_scenario, simulate

NOTHING = dict.fromkeys(("image", "process", "weights", "compile", "graphs", "warm_up"), 0)


def simulated(
    cluster: dict[str, Any], rate: Any, until: float, output: int = 100, **keys: Any
) -> Result:
    stream = {
        "arrivals": {"process": "poisson", "rate": rate},
        "prompt_tokens": {"fixed": 100},
        "output_tokens": {"fixed": output},
        "duration": until,
        **keys,
    }
    return simulate(
        load_scenario(
            {
                "name": "faults",
                "model": "meta-llama/Llama-3.1-8B",
                "hardware": {"gpu": "H100"},
                "engine": {
                    "max_num_seqs": 8,
                    "max_num_batched_tokens": 512,
                    "max_model_len": 2048,
                    "num_gpu_blocks_override": 400,
                },
                "policy": "vllm-fcfs",
                "traffic": [stream],
                "cluster": cluster,
                "objectives": {"ONLINE": {"ttft_p99": 1.0}},
                "run": {"until": until},
            }
        )
    )


def at_once(result: Result, since: float, until: float) -> float:
    """Share of the requests of a while that were answered at the first try."""
    found = [r for r in result.records if since * PS <= r.arrival_ps < until * PS]
    return sum(r.outcome == "completed" and r.attempts == 1 for r in found) / len(found)


def storm() -> Iterator[str]:
    """Twenty seconds of overload at 60 s; clients leave after 4 s without a whole reply."""
    eager = {"attempts": 50, "backoff": 0.2, "multiplier": 1, "outcomes": ["timed_out", "refused"]}
    limit = {"admission": {"max_inflight": 16, "max_queue": 16}}
    ways: dict[str, dict[str, Any]] = {
        "every 0.2 s, no limit": {"retries": eager},
        "back-off doubling to 60 s, no limit": {"retries": eager | {"multiplier": 2}},
        "nobody asks again": {},
        "every 0.2 s, limit": {"retries": eager} | limit,
        "doubling, and the limit": {"retries": eager | {"multiplier": 2}} | limit,
    }
    yield "| | 0-60 s | 60-120 s | 120-180 s | 180-240 s | completed | attempts |\n|---|---|---|---|---|---|---|"
    rate = {"steps": [[0, 8], [60, 40], [80, 8]]}
    for name, cluster in ways.items():
        result = simulated(cluster, rate, 240, output=60, timeouts={"total": 4.0})
        told = summarize(result)
        shares = " | ".join(f"{at_once(result, m, m + 60):.0%}" for m in (0, 60, 120, 180))
        yield f"| {name} | {shares} | {told['totals']['completed']:,} | {told['attempts']:,} |"


def slow() -> Iterator[str]:
    """One of four replicas takes three times as long from 60 s to 180 s, at 20 requests/s."""
    yield "| router | TTFT p50 s | TTFT p99 s | E2E p99 s | within 1 s | to the slow one |\n|---|---|---|---|---|---|"
    fault = {"kind": "slow", "at": 60, "until": 180, "factor": 3, "pods": [0]}
    for router in ("round_robin", "least_connections", "power_of_two", "queue_aware"):
        result = simulated({"replicas": 4, "router": router, "faults": [fault]}, 20, 240)
        tier = summarize(result)["tiers"]["ONLINE"]
        during = [r for r in result.records if 60 * PS <= r.arrival_ps < 180 * PS]
        share = sum(r.replica == 0 for r in during) / len(during)
        yield (
            f"| {router} | {tier['ttft_s']['p50']:.3f} | {tier['ttft_s']['p99']:.2f} | {tier['e2e_s']['p99']:.2f} | "
            f"{tier['attainment']:.1%} | {share:.0%} |"
        )


def spot() -> Iterator[str]:
    """Four of eight replicas are taken back at 60 s, at 55 requests/s; a new one needs a node (60 s) and 60 s more."""
    yield "| | within 1 s | TTFT p99 s | lost with their pod | refused | attempts each | completed |"
    yield "|---|---|---|---|---|---|---|"
    fault = {"kind": "spot_reclaim", "at": 60, "notice": 30, "pods": [0, 1, 2, 3]}
    base = {
        "replicas": 8,
        "nodes": {"gpus": 1, "initial": 8, "max": 12, "provision": 60},
        "cold_start": {"phases": NOTHING | {"process": 60}},
        "faults": [fault],
    }
    drain = {"pod": {"shutdown_timeout": 30}}
    retries = {"retries": {"attempts": 4, "backoff": 0.5}}
    warm = {"warm_pool": {"standby": 2}, "nodes": base["nodes"] | {"initial": 10}}
    ways: dict[str, dict[str, Any]] = {
        "as it is (--shutdown-timeout 0)": {},
        "drained within the notice": drain,
        "retries": retries,
        "drained, warm pool of 2": drain | warm,
        "drained, 14 inside each, 20 waiting": drain
        | {"admission": {"max_inflight_per_replica": 14, "max_queue": 20}},
    }
    for name, way in ways.items():
        told = summarize(simulated(base | way, 55, 200))
        tier, totals, gateway = told["tiers"]["ONLINE"], told["totals"], told["gateway"]
        lost = gateway["aborted"].get("spot_reclaim", 0)
        yield (
            f"| {name} | {tier['attainment']:.1%} | {tier['ttft_s']['p99']:.1f} | {lost} | {totals['refused']:,} | "
            f"{told['attempts'] / totals['offered']:.3f} | {totals['completed']:,} |"
        )


TABLES: dict[str, Callable[[], Iterator[str]]] = {"storm": storm, "slow": slow, "spot": spot}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=sorted(TABLES))
    arguments = parser.parse_args()
    for name, rows in TABLES.items():
        if arguments.only in (None, name):
            print(f"\n{rows.__doc__}\n")
            for row in rows():
                print(row, flush=True)


if __name__ == "__main__":
    main()
