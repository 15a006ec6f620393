"""A sweep of 200 configurations under 5 seeds: one core, two, broken off with kill -9 and gone on with, and on Ray.

    python -m benchmarks.what_if_sweep [--requests 150] [--no-ray]

Prints wall times and whether all four files are the same, byte for byte, and no run was made twice.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGURATIONS, SEEDS = 200, 5


def command(folder: Path, requests: int, *options: str) -> list[str]:
    """200 configurations: 10 rates, 5 numbers of slots, 4 policies."""
    return [
        sys.executable, "-m", "twin", "sweep", str(ROOT / "examples/chat-8b.yaml"), "--out", str(folder),
        "--set", f"traffic.0.requests={requests}", "--set", "cluster.replicas=1",
        "--vary", "traffic.0.arrivals.rate=2:20:2", "--vary", "engine.max_num_seqs=16:256:*2",
        "--vary", "policy=tiered,priority,slo,vllm-fcfs", "--seeds", str(SEEDS), *options,
    ]  # fmt: skip


def run(folder: Path, requests: int, *options: str) -> float:
    """Seconds that a whole sweep takes."""
    start = time.perf_counter()
    done = subprocess.run(
        command(folder, requests, *options), capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - start


def broken_off(folder: Path, requests: int, share: float) -> int:
    """Rows there are after a kill -9 in the middle."""
    journal = folder / "runs.jsonl"
    process = subprocess.Popen(
        command(folder, requests, "--jobs", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    while (
        not journal.exists() or journal.read_bytes().count(b"\n") < share * CONFIGURATIONS * SEEDS
    ):
        assert process.poll() is None, "the sweep ended before it was broken off"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return journal.read_bytes().count(b"\n")


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "sweep.parquet").read_bytes()).hexdigest()[:16]


def numbers(folder: Path) -> list[int]:
    """Numbers of the runs made, in the order in which they ended."""
    return [json.loads(line)["number"] for line in (folder / "runs.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--no-ray", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        one = run(root / "one", options.requests, "--jobs", "1")
        two = run(root / "two", options.requests, "--jobs", "2")
        print(
            f"{CONFIGURATIONS} configurations x {SEEDS} seeds: {one:.1f} s on one core, {two:.1f} s on two, "
            f"{one / two:.2f} times as fast"
        )
        there = broken_off(root / "killed", options.requests, 0.4)
        again = run(root / "killed", options.requests, "--jobs", "2")
        print(
            f"kill -9 after {there} of {CONFIGURATIONS * SEEDS} runs; the rest took {again:.1f} s"
        )
        folders = ["one", "two", "killed"]
        if not options.no_ray:
            on_ray = run(root / "ray", options.requests, "--jobs", "2", "--ray", "local")
            print(f"Ray with two workers on this machine: {on_ray:.1f} s, its start included")
            folders.append("ray")
        for folder in folders:
            assert sorted(numbers(root / folder)) == list(range(CONFIGURATIONS * SEEDS)), folder
        digests = {digest(root / folder) for folder in folders}
        print(
            f"no run made twice; sweep.parquet of {', '.join(folders)}: {', '.join(sorted(digests))}"
        )
        sys.exit(0 if len(digests) == 1 else 1)


if __name__ == "__main__":
    main()
