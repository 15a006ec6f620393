"""Requests per second of a live server, stock and with the policy, taken in turn.

    python -m benchmarks.paired_throughput [--pairs 12] [--requests 300]

Both servers are up, one idle while the other works, so that what disturbs the machine meets both. Prints the ratio of
each pair, their mean and its 95 % interval. The policy is `priority`: no hold, so that nobody waits for a batch.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from real.calibrate import text_of
from real.cli_serve import tiny_scenario
from real.client import Call, play
from real.command import Serving, serve_command
from real.server import Server, free_port, say_to_stderr
from real.tiny import NAME, write_tiny_model
from twin.scenario import load_scenario

CONCURRENT = 50


def calls(requests: int, rng: random.Random) -> list[Call]:
    tiers = ["ONLINE", "BATCH", "OFFLINE"]
    return [Call(0.0, text_of(64, rng), 32, tiers[i % 3], stream=False) for i in range(requests)]


async def work(url: str, requests: int, seed: int) -> float:
    """Seconds for all requests, CONCURRENT at a time."""
    rng = random.Random(seed)
    left = calls(requests, rng)
    parts = [left[i::CONCURRENT] for i in range(CONCURRENT)]
    begun = time.perf_counter()

    async def one(part: list[Call]) -> None:
        for call in part:
            [reply] = await play(url, NAME, [call])
            assert len(reply.token_s) == call.max_tokens, reply.error

    await asyncio.gather(*(one(part) for part in parts))
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--policy", default="priority")
    args = parser.parse_args()
    changes = ["engine.max_num_seqs=32", "engine.num_gpu_blocks_override=1000"]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_tiny_model(folder)
        servers = {}
        for policy in ("vllm-fcfs", args.policy):
            loaded = tiny_scenario(
                load_scenario("examples/real-demo.yaml", [*changes, f"policy={policy}"])
            )
            port = free_port()
            command = serve_command(
                loaded, Serving(sys.executable, folder, NAME, port=port, dummy=True)
            )
            server = Server(command, "127.0.0.1", port, None)
            server.start({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"})
            stack.callback(server.stop)
            server.wait_until_up(say_to_stderr)
            servers[policy] = server
        ratios = []
        for pair in range(-1, args.pairs):  # the first one warms up
            order = list(servers) if pair % 2 else list(servers)[::-1]
            seconds = {p: asyncio.run(work(servers[p].url, args.requests, pair)) for p in order}
            rates = {p: args.requests / s for p, s in seconds.items()}
            ratio = rates[args.policy] / rates["vllm-fcfs"]
            print(
                f"{rates['vllm-fcfs']:8.1f} stock {rates[args.policy]:8.1f} {args.policy}  "
                f"ratio {ratio:.3f}",
                flush=True,
            )
            if pair >= 0:
                ratios.append(ratio)
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(ratios, k=len(ratios))) for _ in range(10_000))
    print(
        f"requests/s with the policy / stock: {statistics.fmean(ratios):.3f}, "
        f"95 % interval (bootstrap) {means[250]:.3f} to {means[-251]:.3f}"
    )


if __name__ == "__main__":
    main()
