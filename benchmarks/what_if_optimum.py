"""How near `twin optimize` comes to the best of a grid of 500 points, on the Azure trace and under fresh seeds.

    TWIN_DATA=... python -m benchmarks.what_if_optimum [--requests 800] [--trials 60] [--jobs 2]

The grid is run whole: every point under the two seeds of the search. Its ten best are run again under ten seeds that
neither has seen, beside what the search chose; the best mean of the ten is what the search is held against. Exit status
1 if the search is more than 1 % behind.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from twin.errors import InputError
from twin.scenario import load_scenario
from twin.whatif.axes import grid, overrides_of, parse_axis
from twin.whatif.optimize import make_search, optimize
from twin.whatif.runs import Backend, Task, run_all

VARY = (
    "policy=tiered,priority,slo,fair,vllm-fcfs",
    "engine.max_num_seqs=8,16,24,32,48,64,96,128,192,256",
    "engine.max_num_batched_tokens=512,768,1024,1536,2048,3072,4096,6144,8192,16384",
)
GOAL = "all.goodput"
FRESH = range(1001, 1011)


def scenario(requests: int, speedup: float):
    trace = Path(os.environ["TWIN_DATA"]) / "traces/azure2023_conv.csv"
    return load_scenario(
        "examples/azure-2023.yaml",
        [
            f"traffic.0.trace={trace}", f"traffic.0.requests={requests}", f"traffic.0.speedup={speedup}",
            "cluster.replicas=1", "objectives.ONLINE={ttft_p99: 0.5, tpot_p99: 0.03}",
            "objectives.BATCH={ttft_p99: 5, tpot_p99: 0.1}", "objectives.OFFLINE={e2e_p99: 120}",
        ],
    )  # fmt: skip


def means(loaded, axes, points, seeds, jobs) -> list[float]:
    """Mean goodput of each point; -1 for one that cannot run."""
    document = loaded.to_dict()
    tasks = [
        Task(i * len(seeds) + k, document, overrides_of(axes, point), seed)
        for i, point in enumerate(points)
        for k, seed in enumerate(seeds)
    ]
    sums = [0.0] * len(points)
    for run in run_all(tasks, Backend(jobs)):
        value = -1e9 if run.figures is None else run.figures[GOAL]
        sums[run.number // len(seeds)] += value
    return [max(-1.0, total / len(seeds)) for total in sums]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--speedup", type=float, default=5.0)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if "TWIN_DATA" not in os.environ:
        raise InputError("the environment variable TWIN_DATA names no folder with the Azure trace")
    loaded = scenario(options.requests, options.speedup)
    axes = [parse_axis(text) for text in VARY]
    points = grid(axes)

    start = time.perf_counter()
    # Goodput counts the objectives request by request; their p99 is no constraint of this search.
    free = load_scenario(loaded.to_dict(), [])
    search = make_search(free, axes, [GOAL], seeds=2, trials=options.trials)
    search = type(search)(
        search.scenario,
        search.axes,
        search.goals,
        (),
        search.seeds,
        search.trials,
        search.timeout_s,
    )
    found = optimize(search, None, Backend(options.jobs))
    searched_s = time.perf_counter() - start
    chosen = found["chosen"]
    print(f"searched {found['tried']} of {len(points)} in {searched_s:.0f} s: {chosen['key']}")

    start = time.perf_counter()
    every = means(loaded, axes, points, search.seeds, options.jobs)
    ranked = sorted(range(len(points)), key=lambda i: -every[i])[:10]
    print(f"grid of {len(points)} in {time.perf_counter() - start:.0f} s: best {points[ranked[0]]}")

    best = max(means(loaded, axes, [points[i] for i in ranked], list(FRESH), options.jobs))
    (mine,) = means(loaded, axes, [tuple(chosen["point"])], list(FRESH), options.jobs)
    behind = 1 - mine / best
    print(
        f"under {len(FRESH)} fresh seeds: goodput {mine:.4f}/s of the search, {best:.4f}/s of the best of the grid's "
        f"ten best, {100 * behind:+.2f} % behind"
    )
    print(
        f"present configuration: {means(loaded, axes[:1], [('tiered',)], list(FRESH), options.jobs)[0]:.4f}/s"
    )
    sys.exit(0 if behind <= 0.01 else 1)


if __name__ == "__main__":
    main()
