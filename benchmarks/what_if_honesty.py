"""How honest `twin compare` is: false alarms when a scenario meets itself, and how often it finds a true 5 %.

    python -m benchmarks.what_if_honesty [--comparisons 200 or 0] [--searches 100] [--jobs 2]

Alarms: the scenario is held against itself, both sides under seeds of their own (with the same seeds the two sides
would be equal to the byte), as many times as --comparisons says; an alarm is a comparison that calls any of its
figures better or worse. Finds: every step of the other side takes longer by a factor that makes the p99 of TTFT 5 %
longer, which is told over all runs together; a find is a comparison that calls ONLINE TTFT p99 worse.
Exit status 1 if more than 5 % of the first are alarms or fewer than 80 % of the second are finds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.runs import document, stream
from twin.scenario import load_scenario
from twin.whatif.compare import SEEDS, judge_all
from twin.whatif.figures import Figures, Measure, judged, measure
from twin.whatif.runs import Backend, Task, run_all

FACTOR = 1.036
"""Steps longer by 3.6 % make the p99 of TTFT about 5 % longer at this load."""

CHAT: dict[str, Any] = document(
    engine={
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "max_model_len": 4096,
        "num_gpu_blocks_override": 20_000,
    },
    policy="tiered",
    traffic=[
        stream(
            arrivals={"process": "poisson", "rate": 15},
            prompt_tokens={"uniform": [64, 2048]},
            output_tokens={"uniform": [16, 400]},
            requests=300,
            tiers={"ONLINE": 0.7, "BATCH": 0.3},
        )
    ],
    objectives={"ONLINE": {"ttft_p99": 1.0, "tpot_p99": 0.05}, "BATCH": {"e2e_p99": 60.0}},
)


ALARMS_REQUESTS, FINDS_REQUESTS = 300, 800
"""Of a run. The p99 of few requests is one of them, and what is found depends on how many there are."""


def with_requests(number: int) -> dict[str, Any]:
    """The scenario with so many requests."""
    return CHAT | {"traffic": [{**CHAT["traffic"][0], "requests": number}]}


class Honesty(NamedTuple):
    """What a series of comparisons came to."""

    comparisons: int
    hits: int
    """Alarms, or finds of ONLINE TTFT p99."""
    mean_hits: int
    """Finds of ONLINE TTFT mean, which the same slower steps make longer by about as much."""
    difference: float
    """Of ONLINE TTFT p99 over all runs together, as a share."""
    wall_s: float


def slower_profile(folder: Path, factor: float) -> str:
    """The built-in step-time profile with every time longer by `factor`, as a file."""
    profile = load_scenario(CHAT).hardware.profile.to_dict()
    for key, value in profile.items():
        if key.endswith("_ps"):
            profile[key] = (
                [[n, ps * factor] for n, ps in value] if isinstance(value, list) else value * factor
            )
    path = folder / "slower.json"
    path.write_text(json.dumps(profile), encoding="utf-8")
    return str(path)


def series(
    before: dict[str, Any],
    after: dict[str, Any],
    comparisons: int,
    seeds: int,
    jobs: int,
    same_seeds: bool,
    first: int,
) -> Iterator[tuple[list[Figures], list[Figures]]]:
    """The two sides of each comparison; no seed is used twice but by the two sides of one pair."""
    many = comparisons * seeds
    tasks = [Task(i, before, (), first + i) for i in range(many)]
    shift = 0 if same_seeds else many
    tasks += [Task(many + i, after, (), first + shift + i) for i in range(many)]
    rows: list[Figures] = [{}] * len(tasks)
    for run in run_all(tasks, Backend(jobs)):
        assert run.figures is not None, run.error
        rows[run.number] = run.figures
    for k in range(comparisons):
        part = slice(k * seeds, (k + 1) * seeds)
        yield rows[:many][part], rows[many:][part]


def measures() -> list[Measure]:
    """What `twin compare` judges of this scenario."""
    scenario = load_scenario(CHAT)
    return judged(scenario.objectives, scenario.tiers)


def alarms(comparisons: int, seeds: int, jobs: int, first: int = 1) -> Honesty:
    """A scenario against itself, with seeds of their own."""
    base = with_requests(ALARMS_REQUESTS)
    return _count(series(base, base, comparisons, seeds, jobs, False, first), None)


def finds(comparisons: int, seeds: int, jobs: int, folder: Path, first: int = 1_000_001) -> Honesty:
    """A scenario against itself on a slower machine, under the same seeds."""
    base = with_requests(FINDS_REQUESTS)
    slower = base | {"hardware": {**CHAT["hardware"], "step_time": slower_profile(folder, FACTOR)}}
    return _count(series(base, slower, comparisons, seeds, jobs, True, first), "ONLINE.ttft_p99")


def _count(sides: Iterator[tuple[list[Figures], list[Figures]]], wanted: str | None) -> Honesty:
    start, comparisons, hits, mean_hits, gaps = time.perf_counter(), 0, 0, 0, []
    judged_by = measures() if wanted is None else [*measures(), measure("ONLINE.ttft_mean")]
    for before, after in sides:
        (variant,) = judge_all(["A", "B"], [before, after], judged_by)["variants"]
        words = {row["figure"]: row["verdict"] for row in variant["judged"]}
        comparisons += 1
        if wanted is None:
            hits += any(word in ("better", "worse") for word in words.values())
        else:
            hits += words[wanted] == "worse"
            mean_hits += words["ONLINE.ttft_mean"] == "worse"
        gaps += [
            np.log(b["ONLINE.ttft_p99"] / a["ONLINE.ttft_p99"])
            for a, b in zip(before, after, strict=True)
        ]
    wall_s = time.perf_counter() - start
    return Honesty(comparisons, hits, mean_hits, float(np.expm1(np.mean(gaps))), wall_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    is_honest = True
    if options.comparisons:
        against_itself = alarms(options.comparisons, SEEDS, options.jobs)
        is_honest = against_itself.hits <= 0.05 * against_itself.comparisons
        print(
            f"a scenario against itself, {SEEDS} seeds a side: {against_itself.hits} alarms in "
            f"{against_itself.comparisons} comparisons of {len(measures())} figures ({against_itself.wall_s:.0f} s)"
        )
    with tempfile.TemporaryDirectory() as folder:
        searched = finds(options.searches, SEEDS, options.jobs, Path(folder))
    print(
        f"ONLINE TTFT p99 longer by {100 * searched.difference:.2f} % (over all {searched.comparisons * SEEDS} pairs): "
        f"found in {searched.hits} of {searched.comparisons} comparisons of {SEEDS} seeds, TTFT mean in "
        f"{searched.mean_hits} ({searched.wall_s:.0f} s)"
    )
    sys.exit(0 if is_honest and searched.hits >= 0.8 * searched.comparisons else 1)


if __name__ == "__main__":
    main()
