"""How fast a long trace is checked and simulated, and in how much memory.

    python benchmarks/trace_10m.py --rows 10000000 --kind azure
    python benchmarks/trace_10m.py --rows 10000000 --kind chat
    python benchmarks/trace_10m.py --rows 10000000 --kind azure --run 100000 1000000

A trace is generated (azure: instants and lengths; chat: conversations of five turns that share a system prompt, with
sessions, tiers, request ids and all content), checked in a process of its own and, with --run, its first rows are
simulated without records, each number of them in a process of its own: memory should not grow with it.
Printed for each: seconds of wall and of CPU time, requests per second and the peak of resident memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from twin.clock import PS
from twin.workload.formats import azure, own
from twin.workload.formats.rows import TraceRow

RATE = 16.0
"""Requests per second of the generated trace."""
TURNS, SLOTS = 5, 997
SYSTEM = 400
"""Tokens of the common system prompt."""

MEASURE = """
import sys, time
start = time.perf_counter()
from twin.cli import main
sys.argv = ["twin", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    status = end.code or 0
wall = time.perf_counter() - start
# Unlike ru_maxrss, this peak does not include that of the program from which this one was forked.
with open("/proc/self/status") as file:
    peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
print(f"{status} {wall} {time.process_time()} {peak}", file=sys.stderr)
"""


def alone(rows: int) -> Iterator[TraceRow]:
    """Requests without any content, lengths near those of published conversations."""
    rng, at_ps = Random(1), 0
    for line in range(1, rows + 1):
        yield TraceRow(line, at_ps, *(1 + int(rng.lognormvariate(m, 1)) for m in (6.5, 5)))
        at_ps += round(rng.expovariate(RATE) * PS)


def chat(rows: int) -> Iterator[TraceRow]:
    """Conversations, SLOTS of them at a time, one turn after another."""
    rng, at_ps, content = Random(1), 0, 1
    talks: list[tuple[int, tuple[tuple[int, int], ...]]] = [(0, ((0, SYSTEM),))] * SLOTS
    for line in range(1, rows + 1):
        slot = line % SLOTS
        turn, said = talks[slot]
        user, reply = 1 + int(rng.lognormvariate(4.5, 1)), 1 + int(rng.lognormvariate(5, 1))
        prompt = (*said, (content, user))
        yield TraceRow(
            line,
            at_ps,
            sum(tokens for _, tokens in prompt),
            reply,
            prompt,
            content + 1,
            tier="BATCH" if slot % 5 == 0 else "ONLINE",
            session=f"{slot}-{line // SLOTS // TURNS}",
            id=str(line),
        )
        over = turn + 1 == TURNS
        talks[slot] = (0, ((0, SYSTEM),)) if over else (turn + 1, (*prompt, (content + 1, reply)))
        content += 2
        at_ps += round(rng.expovariate(RATE) * PS)


def measure(rows: int, *arguments: str) -> dict[str, float]:
    """Runs `twin` with these arguments in a process of its own."""
    command = [sys.executable, "-c", MEASURE, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    status, wall, cpu, peak = done.stderr.splitlines()[-1].split()
    if int(status):
        sys.exit(f"twin {' '.join(arguments)} ended with status {status}:\n{done.stdout}")
    return {
        "wall_s": float(wall),
        "cpu_s": float(cpu),
        "rows_per_s": rows / float(wall),
        "peak_mb": int(peak) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--kind", choices=["azure", "chat"], default="azure")
    parser.add_argument(
        "--run", type=int, nargs="*", default=[], metavar="N", help="simulate the first N rows"
    )
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / ("trace.csv" if options.kind == "azure" else "trace.jsonl"))
        start = time.perf_counter()
        if options.kind == "azure":
            azure.write(path, alone(options.rows))
        else:
            own.write_own_jsonl(path, chat(options.rows))
        wall = time.perf_counter() - start
        found = {"write": {"wall_s": wall, "rows_per_s": options.rows / wall}}
        megabytes = os.path.getsize(path) / 1e6
        found["check"] = measure(options.rows, "trace", "check", path, "--json")
        example = str(Path(__file__).parents[1] / "examples" / "chat-8b.yaml")
        for rows in options.run:
            keys = f"traffic=[{{trace: '{path}', requests: {rows}}}]"
            found[f"run {rows}"] = measure(
                rows, "run", example, "--set", keys, "--set", "policy=vllm-fcfs", "--set", "objectives={}",
                "--set", f"cluster.replicas={options.replicas}", "--no-records", "--json",
            )  # fmt: skip
    if options.json:
        print(json.dumps({"rows": options.rows, "kind": options.kind, "mb": megabytes} | found))
        return
    print(f"{options.rows:,} rows of {options.kind}, {megabytes:,.0f} MB")
    for name, figures in found.items():
        more = ""
        if "peak_mb" in figures:
            more = f", {figures['cpu_s']:.1f} s of CPU, peak {figures['peak_mb']:,.0f} MB"
        print(f"{name:12} {figures['wall_s']:7.1f} s  {figures['rows_per_s']:10,.0f} rows/s{more}")


if __name__ == "__main__":
    main()
