"""Mixed load on a live server with clients that leave and time-outs: does anything grow, does anything vanish?

    python -m benchmarks.soak [--minutes 20] [--rate 25]

Starts `twin-real serve --tiny` on examples/real-demo.yaml. Every half minute the server is left to become idle, and its
tables must be empty, its blocks free, and submitted = left by tier. Prints the memory of the engine's process; exit
status 1 if anything is wrong.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

from real.calls import Call
from real.client import play
from real.demo import fetch_metrics, samples
from real.preflight import free_port

ROOT = Path(__file__).parents[1]
ROUND_S = 30.0


def calls(rng: random.Random, rate: float):
    due = 0.0
    while (due := due + rng.expovariate(rate)) < ROUND_S:
        tier = rng.choices(["ONLINE", "BATCH", "OFFLINE", "NONE"], [0.5, 0.25, 0.2, 0.05])[0]
        extra = {}
        if rng.random() < 0.15:
            extra["ttft_s"] = rng.choice([0.02, 0.1, 0.5, 2.0])
        if rng.random() < 0.15:
            extra["total_s"] = rng.choice([0.05, 0.3, 1.0, 5.0])
        leaves = rng.expovariate(3.0) + 0.01 if rng.random() < 0.15 else None
        prompt = "".join(rng.choices("abcdefgh", k=rng.choice([5, 40, 150, 600])))
        yield Call(due, prompt, rng.choice([1, 8, 30, 80]), tier, extra, rng.random() < 0.5, leaves)


def total(found, name, **labels):
    return sum(v for own, v in found.get(name, ()) if labels.items() <= own.items())


def idle(url: str):
    """The metrics once nothing is inside."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = samples(fetch_metrics(url))
        if not total(found, "vllm:num_requests_running") + total(
            found, "vllm:num_requests_waiting"
        ):
            if not total(found, "twin:scheduler_requests"):
                return found
        time.sleep(0.2)
    raise SystemExit(
        f"the server does not become idle: {total(found, 'twin:scheduler_requests')} left"
    )


def check(found) -> list[str]:
    wrong = []
    for tier in ("ONLINE", "BATCH", "OFFLINE"):
        submitted = total(found, "twin:requests_submitted_total", tier=tier)
        left = total(found, "twin:requests_total", tier=tier)
        inside = sum(
            total(found, f"twin:num_requests_{state}", tier=tier)
            for state in ("held", "ready", "running")
        )
        if submitted != left + inside or inside:
            wrong.append(f"{tier}: {submitted:.0f} submitted, {left:.0f} left, {inside:.0f} inside")
    if total(found, "twin:kv_blocks_used"):
        wrong.append(f"{total(found, 'twin:kv_blocks_used'):.0f} blocks still used")
    if total(found, "twin:policy_errors_total"):
        wrong.append("the policy failed")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=25.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    port, rng = free_port(), random.Random(args.seed)
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "real",
        "serve",
        "examples/real-demo.yaml",
        "--tiny",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if "ready:" in line:
            break
    else:
        return 1
    api = psutil.Process(server.pid).children()[0]
    [core] = [
        child
        for child in api.children()
        if "EngineCore" in child.name() + " ".join(child.cmdline())
    ]
    memory, failed, begun = [], False, time.monotonic()
    try:
        while time.monotonic() < begun + 60 * args.minutes:
            replies = asyncio.run(play(url, "tiny", list(calls(rng, args.rate))))
            found = idle(url)
            wrong = check(found)
            odd = [r for r in replies if r.error not in ("", "left") or r.status not in (0, 200)]
            wrong += [f"{len(odd)} replies went wrong, the first: {odd[0].error}"] if odd else []
            memory.append(core.memory_info().rss / 2**20)
            print(
                f"{time.monotonic() - begun:6.0f} s  {len(replies)} sent, "
                f"{sum(r.error == 'left' for r in replies)} left, "
                f"{sum(r.finish_reason == 'abort' for r in replies)} timed out; "
                f"{total(found, 'twin:requests_submitted_total'):.0f} in all, "
                f"{total(found, 'vllm:num_preemptions_total'):.0f} preemptions; engine {memory[-1]:.0f} MiB"
                + "".join(f"\n        WRONG: {what}" for what in wrong),
                flush=True,
            )
            failed |= bool(wrong)
    finally:
        server.terminate()
        status = server.wait(60)
    print(
        f"engine's memory: {memory[0]:.0f} MiB after the first round, {memory[-1]:.0f} MiB at the end; status {status}"
    )
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
