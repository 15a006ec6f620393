"""Requests per second of a live server, stock and with the policy, in short blocks taken in turn.

    python -m benchmarks.paired_throughput [--pairs 30] [--requests 120]
    python -m benchmarks.paired_throughput --urls STOCK POLICY --out FILE.jsonl    measures servers that run
    python -m benchmarks.paired_throughput --report FILE.jsonl                     all pairs of a file together

Both servers are up, one idle while the other works; a pair is a block on each with the same requests, which of them
comes first alternates, so that what disturbs the machine for longer than a block meets both. Prints the
Hodges-Lehmann estimate of the ratio of the two rates and the 95 % interval of the signed-rank test, which a few
disturbed pairs do not move, and the same of the CPU time that the processes of a server take for a request. The
policy is `priority`: no hold, so that nobody waits for a batch.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from real.calibrate import text_of
from real.cli_serve import tiny_scenario
from real.command import Serving, serve_command
from real.server import Server, free_port, say_to_stderr
from real.tiny import NAME, write_tiny_model
from twin.scenario import load_scenario

CONCURRENT = 32
TIERS = ("ONLINE", "BATCH", "OFFLINE")


def bodies(requests: int, rng: random.Random) -> list[bytes]:
    """The requests of a block, encoded beforehand."""
    return [
        json.dumps(
            {
                "model": NAME, "prompt": text_of(64, rng), "max_tokens": 32, "ignore_eos": True,
                "temperature": 0.0, "vllm_xargs": {"tier": TIERS[i % 3]},
            }
        ).encode()
        for i in range(requests)
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
                    assert content["usage"]["completion_tokens"] == 32

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(CONCURRENT)))
        return time.perf_counter() - begun


def processes(url: str) -> list[psutil.Process]:
    """The server that listens there and what it started."""
    port = int(url.rsplit(":", 1)[1])
    [root] = [
        psutil.Process(c.pid)
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
    ]
    return [root, *root.children(recursive=True)]


def cpu_s(found: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in found)


def measure(urls: list[str], pairs: int, requests: int, seed: int):
    """Rows of (rate stock, rate policy, CPU seconds a request of both), after two pairs that warm up."""
    trees = [processes(url) for url in urls]
    for pair in range(-2, pairs):
        work = bodies(requests, random.Random(f"{seed}/{pair}"))
        row: dict = {"seed": seed, "pair": pair, "rate": [0.0, 0.0], "cpu_s": [0.0, 0.0]}
        for side in (0, 1) if pair % 2 else (1, 0):
            before = cpu_s(trees[side])
            seconds = asyncio.run(block(urls[side], work))
            row["rate"][side] = requests / seconds
            row["cpu_s"][side] = (cpu_s(trees[side]) - before) / requests
            time.sleep(1.1)  # workers spin a second after the last step
        if pair >= 0:
            yield row


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
    lines = [
        f"{len(rows)} pairs, median {np.median([r['rate'][0] for r in rows]):.0f} requests/s stock"
    ]
    for name, key in (("requests/s", "rate"), ("CPU time a request", "cpu_s")):
        middle, low, high = interval([row[key][1] / row[key][0] for row in rows])
        lines.append(f"{name}, policy / stock: {middle:.4f}, 95 % interval {low:.4f} to {high:.4f}")
    return "\n".join(lines)


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
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--policy", default="priority")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--urls", nargs=2, metavar=("STOCK", "POLICY"))
    parser.add_argument("--serve", action="store_true", help="start both, print where, and wait")
    parser.add_argument("--out", type=Path, help="append each pair as a line")
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
        for row in measure(urls, args.pairs, args.requests, args.seed):
            rows.append(row)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        print(report(rows))


if __name__ == "__main__":
    main()
