#!/usr/bin/env python3
"""Capacity ahead of demand: an HPA alone, with a warm pool, with a forecast, with a limit at the gateway, with all.

Two loads for Llama-3.1-70B on 4 H100 a replica, which needs about 250 s to start. The day: chat with long replies, a
rate that has its peak at 9 o'clock, replicas of 8 slots; from 6 o'clock to noon unless --hours says more. The thirds:
every eighth request of the load of benchmarks/autoscaling.py (the Azure conversation trace 2023 at one, two and four
copies) on replicas of 8 slots. The HPA is that of the article which this compares with: 2 to 10 replicas, 5 waiting
requests each, two more a minute after 30 s, one fewer every two minutes after 300 s. Figures are means over seeds with
95 % intervals (Student).

    TWIN_DATA=FOLDER python -m benchmarks.cluster_ahead [--load day|thirds] [--seeds 3]
"""

import argparse
import os
import tempfile
from pathlib import Path
from statistics import mean, stdev

from benchmarks.autoscaling import ARTICLE, THIRD_S, WAITING, pods_metric, tiled
from twin.clock import to_ps
from twin.report.forecast import rates_of
from twin.report.json_summary import summarize
from twin.simulation import load_scenario, simulate

T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> Student's t for 95 % on both sides."""

HPA = {"minReplicas": 2, "maxReplicas": 10, "metrics": [pods_metric(WAITING, "5")], "behavior": ARTICLE}  # fmt: skip
HOUR = 3600
DAY_S = 24 * HOUR
DAY_RATES = [[0, 0.12], [2.5 * HOUR, 0.3], [2.95 * HOUR, 0.4], [3 * HOUR, 0.95], [4 * HOUR, 0.95], [5 * HOUR, 0.55],
             [11 * HOUR, 0.55], [15 * HOUR, 0.2], [18 * HOUR, 0.12], [24 * HOUR, 0.12]]  # fmt: skip
"""Requests a second from 6 o'clock on, linear in between: a step up at 9 o'clock, within three minutes."""


class Day:
    """Synthetic chat from 6 o'clock on; the season before it is a whole day."""

    slots, per_replica, until, season, interval = 8, 0.11, 6 * HOUR, DAY_S, 300

    def __init__(self, folder):
        pass

    def traffic(self, seed):
        return {
            "arrivals": {"process": "poisson", "rate": {"points": DAY_RATES}},
            "prompt_tokens": {"lognormal": {"median": 800, "p95": 3000}},
            "output_tokens": {"lognormal": {"median": 2000, "p95": 5000, "max": 10_000}},
            "duration": DAY_S,
            "timeouts": {"ttft": 60.0},
        }


class Thirds:
    """Every eighth request of the trace, other ones for each seed."""

    slots, per_replica, until, season, interval = 8, 0.65, 3 * THIRD_S, 3 * THIRD_S, 60

    def __init__(self, folder):
        source = Path(os.environ.get("TWIN_DATA", ""), "traces", "azure2023_conv.csv")
        if not source.is_file():
            raise SystemExit(
                f"no trace {source.name}: set TWIN_DATA to the folder that has it under traces/"
            )
        self.lines = tiled(source, folder).read_text().splitlines()
        self.folder = folder

    def traffic(self, seed):
        path = self.folder / f"thinned-{seed % 8}.csv"
        path.write_text("\n".join([self.lines[0], *self.lines[1 + seed % 8 :: 8]]) + "\n")
        return {"trace": str(path), "timeouts": {"ttft": 60.0}}


LOADS = {"day": Day, "thirds": Thirds}


def scenario(load, seed, cluster):
    return {
        "name": "ahead",
        "model": "meta-llama/Llama-3.1-70B",
        "hardware": {"gpu": "H100", "tensor_parallel_size": 4},
        "engine": {"max_num_seqs": load.slots, "max_num_batched_tokens": 8192, "max_model_len": 16384},
        "policy": "vllm-fcfs",
        "traffic": [load.traffic(seed)],
        "cluster": {"replicas": 2, "hpa": HPA, "price_per_gpu_hour": 2.5, **cluster},
        "objectives": {"ONLINE": {"ttft_p99": 2.0, "tpot_p99": 0.1}},
        "run": {"until": load.until, "seed": seed},
    }  # fmt: skip


def ways(load, seed):
    """Name -> keys of the cluster. The forecast knows the day before, which is that of another seed."""
    before = load_scenario(scenario(load, seed + 1001, {}))
    interval_ps, end_ps = to_ps(load.interval), to_ps(load.season)
    history = rates_of(before, interval_ps, end_ps, seed + 1001)
    warm = {name: {"warm_pool": {"standby": n}} for name, n in (("one", 1), ("two", 2))}
    forecast = {
        "prediction": {
            "forecaster": "seasonal_naive",
            "per_replica": load.per_replica,
            "interval": load.interval,
            "horizon": 600,
            "season": load.season,
            "history": history,
        }
    }
    limit = {"admission": {"max_inflight_per_replica": load.slots + 6, "max_queue": 20}}
    return {
        "HPA alone": {},
        "+ warm pool of 1": warm["one"],
        "+ warm pool of 2": warm["two"],
        "+ forecast": forecast,
        "+ limit": limit,
        "all (pool of 1)": {**warm["one"], **forecast, **limit},
    }


def figures(result):
    """What a run comes to."""
    told = summarize(result)
    tier, totals, cost = told["tiers"]["ONLINE"], told["totals"], told["cost"]
    return {
        "TTFT p99 s": tier["ttft_s"]["p99"],
        "within both": 100 * tier["attainment"],
        "good/s": tier["goodput_rps"],
        "refused": totals["refused"],
        "left": totals["timed_out"],
        "GPU-hours": cost["gpu_hours"],
        "cost": cost["total"],
    }


def with_interval(values):
    """The mean and half of its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:,.4g}"
    half = T95[len(values) - 1] * stdev(values) / len(values) ** 0.5
    digits = 1 if half >= 0.5 else 2
    return f"{mean(values):,.{digits}f} ± {half:,.{digits}f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load", choices=sorted(LOADS), action="append")
    parser.add_argument("--seeds", type=int, default=3, help="1 to 10")
    parser.add_argument("--hours", type=float, default=6, help="of the day, from 6 o'clock on")
    arguments = parser.parse_args()
    Day.until = arguments.hours * HOUR
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.load or LOADS:
            load = LOADS[name](Path(folder))
            found = {}
            for seed in range(1, arguments.seeds + 1):
                for way, cluster in ways(load, seed).items():
                    row = figures(simulate(load_scenario(scenario(load, seed, cluster))))
                    found.setdefault(way, []).append(row)
            columns = next(iter(found.values()))[0]
            print(f"\n{name}: {arguments.seeds} seeds\n\n| | {' | '.join(columns)} |")
            print("|---" * (len(columns) + 1) + "|")
            for way, rows in found.items():
                cells = (with_interval([row[column] for row in rows]) for column in columns)
                print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
