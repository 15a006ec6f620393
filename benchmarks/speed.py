"""How fast the twin is: beside SimPy alone, beside AISimulate, in memory, and until it begins.

    python -m benchmarks.speed [--parts speed peer] [--only w1 azure] [--rounds 5] [--write]

Every workload runs under both policies in turn with the floor, SimPy with as many events that do nothing; times are
CPU times, the best of the rounds. `--write` puts the tables into docs/performance.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks import speed_peer
from benchmarks.speed_measure import ROOT, measure
from benchmarks.speed_page import machine, write_section
from benchmarks.speed_startup import AIM_S, start_up
from benchmarks.speed_workloads import POLICIES, WORKLOADS, Workload, missing

PARTS = ("speed", "parts", "peer", "start-up")
PROFILED = ("w1", "azure", "w3", "w3-short", "mooncake")
SAMPLES = 2000
EXAMPLE = ROOT / "examples" / "chat-8b.yaml"


def say(text: str) -> None:
    """Progress: a whole run takes minutes."""
    print(text, file=sys.stderr, flush=True)


def speed_table(cache: str, workloads: dict[str, Workload], rounds: int) -> str:
    """A row for each workload."""
    lines = [
        "| Workload | Requests | Floor, 1000/s | Aim | "
        + " | ".join(f"{p}, 1000/s | share | wall, s | peak, MB" for p in POLICIES)
        + " |",
        "| --- | --- | --- | --- |" + " --- | --- | --- | --- |" * len(POLICIES),
    ]
    for name, workload in workloads.items():
        why = missing(workload)
        if why is not None:
            say(f"{name}: skipped, {why}")
            lines.append(f"| {workload.title} | skipped: {why} |" + " |" * (2 + 4 * len(POLICIES)))
            continue
        found = measure(cache, "time", workload.document, policies=POLICIES, rounds=rounds)
        requests = found["policies"][POLICIES[0]]["requests"]
        aim = "" if workload.aim is None else f"{workload.aim:g}"
        cells = [workload.title, f"{requests:,}", f"{found['floor'] / 1000:.0f}", aim]
        for policy in POLICIES:
            best = found["policies"][policy]
            rate = best["requests"] / best["cpu_s"]
            peak = measure(cache, "once", workload.document | {"policy": policy})["peak_mb"]
            cells += [f"{rate / 1000:.1f}", f"{rate / found['floor']:.3f}", f"{best['wall_s']:.2f}"]
            cells.append("?" if peak is None else f"{peak:.0f}")
            say(
                f"{name} {policy}: {rate:,.0f} requests/s, {rate / found['floor']:.3f} of the floor"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parts_table(cache: str, workloads: dict[str, Workload], samples: int) -> str:
    """Where the CPU time of a run goes, in percent, under the first policy and as pure Python."""
    shares: dict[str, dict[str, float]] = {}
    for name in PROFILED:
        if name not in workloads:
            continue
        why = missing(workloads[name])
        if why is not None:
            say(f"{name}: skipped, {why}")
        else:
            document = workloads[name].document | {"policy": POLICIES[0]}
            found = measure(cache, "parts", document, samples=samples)
            shares[workloads[name].title] = found["parts"]
            say(f"{name}: parts from {found['samples']} samples")
    sums: dict[str, float] = {}
    for parts in shares.values():
        for part, share in parts.items():
            sums[part] = sums.get(part, 0) + share
    order = sorted(sums, key=lambda part: -sums[part])
    lines = [f"| Workload | {' | '.join(order)} |", "| --- |" + " --- |" * len(order)]
    for title, parts in shares.items():
        cells = " | ".join(f"{100 * parts.get(part, 0):.0f} %" for part in order)
        lines.append(f"| {title} | {cells} |")
    return "\n".join(lines) if shares else "No workload was profiled."


def peer_text(cache: str, rounds: int) -> str:
    """The comparison with AISimulate, or why there is none."""
    races: list[speed_peer.Race] = []
    failed = ""
    try:
        version = speed_peer.install()
        for requests, replicas in speed_peer.SIZES:
            races += speed_peer.race(cache, requests, replicas, rounds)
            say(f"AISimulate, {requests:,} x {replicas}: done")
    except speed_peer.Absent as error:
        if not races:
            return f"AISimulate could not be measured here: {error}"
        failed = f"\n\nThe rest could not be measured here: {error}"
    return f"AISimulate {version}, {rounds} rounds:\n\n{speed_peer.table(races)}{failed}"


def start_text(cache: str) -> str:
    """Seconds until the simulation begins."""
    found = start_up(cache, EXAMPLE)
    return (
        f"`twin run {EXAMPLE.relative_to(ROOT)}` begins to simulate {found['wall_s']:.2f} s after it is typed "
        f"(median of ten; least {found['least_wall_s']:.2f} s; CPU time {found['cpu_s']:.2f} s). Aim: under {AIM_S} s."
    )


def sections(cache: str, options: Any) -> Iterator[tuple[str, str]]:
    """Names and texts of the parts asked for, in the order of the page."""
    workloads = {name: WORKLOADS[name] for name in options.only or WORKLOADS}
    doers = {
        "speed": lambda: speed_table(cache, workloads, options.rounds),
        "parts": lambda: parts_table(cache, workloads, SAMPLES),
        "peer": lambda: peer_text(cache, options.peer_rounds),
        "start-up": lambda: start_text(cache),
    }
    for name, doer in doers.items():
        if name in options.parts:
            where = machine(may_be_compiled=name != "parts")
            yield name, f"{where}; `make bench`.\n\n{doer()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="these workloads; default all")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts")
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--write", action="store_true", help="put tables into docs/performance.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        for name, text in sections(cache, options):
            print(f"\n## {name}\n\n{text}", flush=True)
            if options.write:
                write_section(name, text)


if __name__ == "__main__":
    main()
