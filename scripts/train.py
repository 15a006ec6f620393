"""Runs what a twin that counts its branches is to be compiled for: workloads of the benchmarks, traces like theirs.

setup.py calls it, with TWIN_TRAIN=1, between its two passes. It needs no data and writes nothing.
"""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed_workloads import POLICIES, TIERS, WORKLOADS, scenario
from twin.compiled import is_compiled
from twin.metrics.summary import summarize_tally
from twin.scenario import load_scenario
from twin.simulation import simulate


def azure_like(path: Path, requests: int) -> None:
    """A trace of Azure's columns: lengths of conversations at 5.5 requests a second."""
    rng, at = random.Random(1), 0.0
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(requests):
        at += rng.expovariate(5.5)
        minute, second = divmod(at, 60)
        hour, minute = divmod(int(minute), 60)
        stamp = f"2023-11-16 {hour:02}:{minute:02}:{second:010.7f}"
        rows.append(f"{stamp},{_length(rng, 1000, 4000)},{_length(rng, 200, 1000)}")
    path.write_text("\n".join(rows) + "\n")


def mooncake_like(path: Path, requests: int) -> None:
    """A trace of hashed blocks: conversations whose turns begin with what was said before."""
    rng, talks, block, rows = random.Random(2), [[0]], 1, []
    for i in range(requests):
        talk = rng.choice(talks) if rng.random() < 0.6 else [0]
        added = list(range(block, block + rng.randint(4, 30)))
        block += len(added)
        talks.append(talk := [*talk[:200], *added])
        rows.append(
            {
                "timestamp": 3000 * i // 9,
                "input_length": 512 * len(talk) - rng.randint(0, 511),
                "output_length": _length(rng, 300, 1500),
                "hash_ids": talk,
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _length(rng: random.Random, mean: int, most: int) -> int:
    return max(1, min(most, int(rng.expovariate(1 / mean))))


def documents(folder: Path, requests: int) -> Iterator[dict[str, Any]]:
    """The scenarios, but for their policy; those of traces, which are written to `folder`, with so many requests."""
    for name, workload in WORKLOADS.items():
        if "trace" not in workload.document["traffic"][0] and name != "w1-100k":
            yield workload.document
    azure_like(folder / "azure.csv", requests)
    mooncake_like(folder / "mooncake.jsonl", requests)
    for name, speedup, replicas, limits in (
        ("azure.csv", 1, 2, {}),
        ("azure.csv", 12, 2, {}),
        ("mooncake.jsonl", 1, 4, {"max_model_len": 131072, "enable_prefix_caching": True}),
    ):
        traffic = {"trace": str(folder / name), "speedup": speedup, "tiers": TIERS}
        yield scenario(traffic, replicas, **limits)


def main() -> None:
    """Run them all, under each policy of the benchmarks."""
    if not is_compiled():
        raise SystemExit("error: the sources are what Python finds; there is nothing to train")
    with tempfile.TemporaryDirectory() as folder:
        for document in documents(Path(folder), 4000):
            for policy in POLICIES:
                run = load_scenario(document, [f"policy={policy}"])
                result = simulate(run)
                summarize_tally(result.tally(), run.objectives, result.simulated_ps, run.tiers)


if __name__ == "__main__":
    main()
