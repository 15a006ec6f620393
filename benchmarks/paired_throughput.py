"""Requests per second of two live servers, stock and with the policy, in short blocks taken in turn.

    python -m benchmarks.paired_throughput [--quads 12]
    python -m benchmarks.paired_throughput --serve                           starts both, prints where, and waits
    python -m benchmarks.paired_throughput --urls STOCK POLICY --out FILE    measures them, adds the blocks to a file
    python -m benchmarks.paired_throughput --report FILE                     all blocks of a file together

Four blocks in the order stock, policy, policy, stock (or the other way round) of the same requests give one ratio, so
that a machine that becomes slower or faster meets both alike. The server whose turn it is not is stopped (SIGSTOP):
vLLM's workers spin for a second after their last step. Prints the Hodges-Lehmann estimate of the ratio of the two rates
and its 95 % interval by the signed-rank test, which a few disturbed blocks do not move. The policy is `priority`: no
hold, so that nobody waits for a batch.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from real.cli_serve import tiny_scenario
from real.command import Serving, serve_command
from real.preflight import free_port
from real.server import Server, say_to_stderr
from real.tiny import NAME, text_of, write_tiny_model
from twin.scenario import load_scenario

CONCURRENT = 32
TIERS = ("ONLINE", "BATCH", "OFFLINE")


def bodies(requests: int, rng: random.Random) -> list[bytes]:
    """The requests of a block, encoded beforehand; the longest replies first, so that all end about together."""
    lengths = sorted((rng.randint(8, 40) for _ in range(requests)), reverse=True)
    return [
        json.dumps(
            {
                "model": NAME, "prompt": text_of(64, rng), "max_tokens": tokens, "ignore_eos": True,
                "temperature": 0.0, "vllm_xargs": {"tier": TIERS[i % 3]},
            }
        ).encode()
        for i, tokens in enumerate(lengths)
    ]  # fmt: skip


async def block(url: str, work: list[bytes]) -> float:
    """Seconds for all requests, CONCURRENT at a time."""
    left = iter(work)
    async with aiohttp.ClientSession(
        base_url=url,
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Content-Type": "application/json"},
    ) as client:

        async def one() -> None:
            for body in left:
                async with client.post("/v1/completions", data=body) as answer:
                    content = await answer.json()
                    assert answer.status == 200, content

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(CONCURRENT)))
        return time.perf_counter() - begun


def group_of(url: str) -> int:
    """The process group of the server that listens there."""
    port = int(url.rsplit(":", 1)[1])
    [pid] = [
        c.pid
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
    ]
    return os.getpgid(pid)


def measure(urls: list[str], quads: int, requests: int, seed: str) -> Iterator[dict]:
    """Rows of the seconds of both servers in four blocks, after a round that warms up."""
    groups = [group_of(url) for url in urls]
    try:
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        for quad in range(-1, quads):
            seconds: list[list[float]] = [[], []]
            order = (0, 1, 1, 0) if quad % 2 else (1, 0, 0, 1)
            for place, side in enumerate(order):
                # The second pair has other requests, so that no prompt is in a prefix cache.
                work = bodies(requests, random.Random(f"{seed}/{quad}/{place // 2}"))
                os.killpg(groups[side], signal.SIGCONT)
                seconds[side].append(asyncio.run(block(urls[side], work)))
                os.killpg(groups[side], signal.SIGSTOP)
            if quad >= 0:
                yield {"seed": seed, "quad": quad, "requests": requests, "seconds": seconds}
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(estimate, lower, upper): Hodges-Lehmann of the logarithms, 95 % by the signed-rank test."""
    logs = np.log(np.array(ratios))
    n = len(logs)
    i, j = np.triu_indices(n)
    walsh = np.sort((logs[i] + logs[j]) / 2)
    spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    cut = max(0, int(n * (n + 1) / 4 - 1.96 * spread))
    found = np.exp([np.median(walsh), walsh[cut], walsh[-1 - cut]])
    return float(found[0]), float(found[1]), float(found[2])


def report(rows: list[dict]) -> str:
    rates = [2 * row["requests"] / sum(row["seconds"][0]) for row in rows]
    ratios = [sum(row["seconds"][0]) / sum(row["seconds"][1]) for row in rows]
    middle, low, high = interval(ratios)
    return (
        f"{len(rows)} times four blocks, {np.median(rates):.1f} requests/s stock (median)\n"
        f"requests/s, policy / stock: {middle:.4f}, 95 % interval {low:.4f} to {high:.4f}; single ratios from "
        f"{min(ratios):.3f} to {max(ratios):.3f}, middle half {np.percentile(ratios, 25):.3f} to "
        f"{np.percentile(ratios, 75):.3f}"
    )


def start(policy: str, folder: Path, stack: ExitStack) -> str:
    changes = ["engine.max_num_seqs=32", "engine.num_gpu_blocks_override=1000", f"policy={policy}"]
    loaded = tiny_scenario(load_scenario("examples/real-demo.yaml", changes))
    port = free_port()
    command = serve_command(loaded, Serving(sys.executable, folder, NAME, port=port, dummy=True))
    server = Server(command, "127.0.0.1", port, None)
    server.start({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"})
    stack.callback(server.stop)
    server.wait_until_up(say_to_stderr)
    return server.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quads", type=int, default=12)
    parser.add_argument("--requests", type=int, default=120, help="of a block")
    parser.add_argument("--policy", default="priority")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--urls", nargs=2, metavar=("STOCK", "POLICY"))
    parser.add_argument("--serve", action="store_true", help="start both, print where, and wait")
    parser.add_argument("--out", type=Path, help="append the blocks as lines")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    if args.report:
        print(report([json.loads(line) for line in args.report.read_text().splitlines()]))
        return
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        urls = args.urls
        if not urls:
            write_tiny_model(Path(name))
            urls = [start(policy, Path(name), stack) for policy in ("vllm-fcfs", args.policy)]
        if args.serve:
            print(*urls, flush=True)
            sys.stdin.read()
            return
        rows = []
        for row in measure(urls, args.quads, args.requests, args.seed):
            rows.append(row)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        print(report(rows))


if __name__ == "__main__":
    main()
