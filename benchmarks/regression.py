"""Is this working tree slower than an earlier commit?

    python -m benchmarks.regression [--base HEAD~1] [--limit 0.15] [--pairs 9]

The base is checked out into a temporary folder. Three workloads run in pairs, one process in each tree, the order
changing from pair to pair, and the times of a pair are divided by each other. A time is wall time less that spent
waiting for a processor, where the kernel tells it, else CPU time: other work on the machine hardly changes it. Exit
status 1 if the median of a workload's ratios is above 1 + limit, 2 if the base cannot be had or a tree cannot run a
workload.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from benchmarks.speed_measure import ROOT, environment
from benchmarks.speed_workloads import at_once, poisson

CONFIDENCE = 0.95
MOST_PAIRS = 25
"""Where the limit lies inside the interval, more pairs are measured, up to so many."""

WORKLOADS: dict[str, dict[str, Any]] = {
    "W1": poisson(4_000),
    "W3": at_once(6_000),
    "W3 short of KV": at_once(3_000, num_gpu_blocks_override=4000),
}

RUN = """
import json, sys, time
from pathlib import Path
import twin
from twin.metrics.summary import summarize_tiers
from twin.simulation import load_scenario, simulate

STATUS = Path("/proc/self/schedstat")

def spent():
    if not STATUS.exists():
        return time.process_time()
    return time.perf_counter() - int(STATUS.read_text().split()[1]) / 1e9

def run(scenario):
    begun = spent()
    result = simulate(scenario)
    summarize_tiers(result.records, objectives=scenario.objectives, warmup_ps=scenario.run.warmup_ps,
                    end_ps=result.simulated_ps, order=scenario.tiers)
    return spent() - begun

scenario = load_scenario(json.load(sys.stdin))
print(json.dumps([str(Path(twin.__file__).parent.parent), min(run(scenario) for _ in range(2))]))
"""
"""Uses only what every commit has had; compiling and importing are not measured, the first of two runs warms up."""


class CannotCompareError(Exception):
    """The base is not there, or a tree cannot run the workload."""


@dataclass(frozen=True)
class Comparison:
    """Ratios of time, this tree's over the base's, pair by pair."""

    workload: str
    ratios: Sequence[float]

    @property
    def median(self) -> float:
        """1.2 = this tree takes a fifth longer."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the median, by order statistics: it covers the true one with at least CONFIDENCE.

        With fewer than six pairs no interval does, and the extremes are given.
        """
        ordered, n = sorted(self.ratios), len(self.ratios)
        below, outside = 0.0, 0
        for k in range(n // 2):
            below += comb(n, k) / 2**n
            if 2 * below > 1 - CONFIDENCE:
                break
            outside = k
        return ordered[outside], ordered[n - 1 - outside]

    def is_slower(self, limit: float) -> bool:
        """Whether the median is beyond the limit."""
        return self.median > 1 + limit

    def is_open(self, limit: float) -> bool:
        """Whether more pairs may still turn the answer."""
        low, high = self.interval
        return low <= 1 + limit <= high and len(self.ratios) < MOST_PAIRS


@contextmanager
def checked_out(base: str) -> Iterator[Path]:
    """The tree of a commit in a folder that is removed afterwards. Raises CannotCompareError."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "base")
        git = ["git", "-C", str(ROOT), "worktree"]
        add = [*git, "add", "--detach", "--quiet", str(tree), base]
        done = subprocess.run(add, capture_output=True, text=True)
        if done.returncode:
            raise CannotCompareError(f"BASE={base}: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True)


def time_s(tree: Path, document: dict[str, Any], cache: str) -> float:
    """Seconds of a run in `tree`, the better of two. Raises CannotCompareError."""
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command,
        input=json.dumps(document),
        capture_output=True,
        text=True,
        cwd=tree,
        env=environment(cache, tree),
    )
    if done.returncode:
        raise CannotCompareError(f"{tree} cannot run it: {done.stderr.strip().splitlines()[-1]}")
    used, spent = json.loads(done.stdout)
    if Path(used).resolve() != tree.resolve():
        raise CannotCompareError(f"the twin of {used} ran in place of that of {tree}")
    return float(spent)


def compare(
    workload: str,
    document: dict[str, Any],
    trees: tuple[Path, Path],
    cache: str,
    pairs: int,
    limit: float,
) -> Comparison:
    """Pairs of runs of (this tree, the base), until the answer is clear."""
    ours, base = trees
    ratios: list[float] = []
    while len(ratios) < pairs or Comparison(workload, ratios).is_open(limit):
        order = (ours, base) if len(ratios) % 2 else (base, ours)
        spent = {tree: time_s(tree, document, cache) for tree in order}
        ratios.append(spent[ours] / spent[base])
    return Comparison(workload, ratios)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="HEAD~1", help="a commit; default HEAD~1")
    parser.add_argument("--tree", type=Path, default=ROOT, help="compare this tree; default ours")
    parser.add_argument("--limit", type=float, default=0.15, help="0.15 = 15 %% slower fails")
    parser.add_argument("--pairs", type=int, default=9, help="of runs of each workload, at least")
    options = parser.parse_args(arguments)
    slower = False
    try:
        with checked_out(options.base) as base, tempfile.TemporaryDirectory() as cache:
            for name, document in WORKLOADS.items():
                found = compare(
                    name,
                    document | {"policy": "tiered"},
                    (options.tree.resolve(), base),
                    cache,
                    options.pairs,
                    options.limit,
                )
                low, high = found.interval
                is_slower = found.is_slower(options.limit)
                slower |= is_slower
                print(
                    f"{name:15} x {found.median:.3f} of the time at {options.base} "
                    f"({low:.3f} to {high:.3f}, {len(found.ratios)} pairs)"
                    + (f"  SLOWER by more than {options.limit:.0%}" if is_slower else ""),
                    flush=True,
                )
    except CannotCompareError as error:
        print(f"bench-regression: {error}", file=sys.stderr)
        return 2
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
