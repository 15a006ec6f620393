"""The same traffic on a live server, stock and under a policy, and what the twin says of both.

    python -m benchmarks.live_tiers [--policy tiered] [--runs 3] [--out FILE.json]

24 OFFLINE requests come first, then ONLINE ones while slots and KV blocks are short. OFFLINE replies are not streamed:
on a machine of few cores a client that reads thousands of small pieces takes them from the server. Needs vLLM and the simulator's
dependencies in one environment; takes about four minutes. The twin's step times are fitted to steps of the same
server, its TTFT gets the measured time that a request spends outside the scheduler.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from real.calibrate import Fit, fit_steps, median_gap, profile_of, read_rows, sweep, text_of
from real.client import Call, play
from real.command import Serving, serve_command
from real.server import Server, free_port, say_to_stderr
from real.tiny import NAME, write_tiny_model
from twin.scenario import load_scenario
from twin.simulation import simulate

ENGINE = {
    "version": "0.32.0", "max_num_seqs": 8, "max_num_batched_tokens": 2048, "max_model_len": 2048,
    "block_size": 32, "num_gpu_blocks_override": 66, "async_scheduling": False, "enforce_eager": True,
}  # fmt: skip


def traffic(seed: int) -> list[Call]:
    rng = random.Random(seed)
    calls = [
        Call(0.0, text_of(rng.randint(150, 350), rng), 300, "OFFLINE", stream=False)
        for _ in range(24)
    ]
    due = 0.4
    for _ in range(100):
        due += rng.expovariate(10.0)
        calls.append(Call(due, text_of(rng.randint(40, 90), rng), 24, "ONLINE"))
    return calls


def scenario(folder: Path, policy: str, calls: list[Call], profile: Path):
    trace = folder / "traffic.jsonl"
    with trace.open("w") as file:
        for call in calls:
            row = {
                "arrival_s": round(call.due_s, 9), "prompt_tokens": len(call.prompt), "prompt": [],
                "output_tokens": call.max_tokens, "max_tokens": call.max_tokens, "tier": call.tier or "ONLINE",
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
    document = {
        "name": "live-tiers",
        "model": str(folder / "model"),
        "hardware": {"gpu": "H100", "dtype": "float32", "step_time": str(profile)},
        "engine": ENGINE,
        "policy": policy,
        "traffic": [{"trace": str(trace)}],
        "run": {"seed": 1},
    }
    return load_scenario(document)


@contextmanager
def serving(loaded, folder: Path, record: Path | None = None):
    port = free_port()
    command = serve_command(
        loaded, Serving(sys.executable, folder / "model", NAME, port=port, dummy=True)
    )
    if record is not None:
        place = command.index("--additional-config") + 1
        settings = json.loads(command[place])
        settings["twin"]["record"] = str(record)
        command[place] = json.dumps(settings)
        if "--scheduler-cls" in command:
            del command[command.index("--scheduler-cls") :][:2]
        command += ["--scheduler-cls", "real.record.make_recording_scheduler"]
    server = Server(command, "127.0.0.1", port, None)
    server.start({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"})
    try:
        server.wait_until_up(say_to_stderr)
        server.warm_up(NAME, 2048, say_to_stderr)
        yield server
    finally:
        server.stop()


def figures(tiers, ttfts, ends):
    """Statistics of one run, from (tier, TTFT, end) of each request."""
    online = [t for tier, t in zip(tiers, ttfts, strict=True) if tier == "ONLINE"]
    last = {
        tier: float(np.median([e for t, e in zip(tiers, ends, strict=True) if t == tier]))
        for tier in ("ONLINE", "OFFLINE")
    }
    return {
        "online_ttft_p50": float(np.percentile(online, 50)),
        "online_ttft_p99": float(np.percentile(online, 99)),
        "order_of_finish": sorted(last, key=lambda tier: last[tier]),
        "median_end": last,
    }


def live(server: Server, seed: int):
    replies = asyncio.run(play(server.url, NAME, traffic(seed)))
    for reply in replies:
        assert (reply.status, reply.finish_reason) == (200, "length"), reply.error
        assert len(reply.token_s) == reply.call.max_tokens
    return figures(
        [r.call.tier for r in replies], [r.ttft_s for r in replies], [r.end_s for r in replies]
    )


def predicted(loaded, frontend_s: float):
    result = simulate(loaded, observe=False)
    records = list(result.records)
    assert all(r.outcome == "completed" for r in records)
    return figures(
        [r.tier for r in records],
        [(r.first_token_ps - r.arrival_ps) / 1e12 + frontend_s for r in records],
        [r.finish_ps / 1e12 for r in records],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="tiered")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_tiny_model(folder / "model")
        guess = folder / "guess.json"
        flat = dict.fromkeys(("tokens", "decodes", "context", "pairs"), 1e-6)
        guess.write_text(
            json.dumps(
                profile_of(Fit({"base": 1e-3, **flat}, 0, 0, 1, 0), "tiny", "cpu", "none", 2048, 64)
            )
        )
        out: dict = {"runs": {}, "twin": {}}
        record, policies = folder / "steps.jsonl", ["vllm-fcfs", args.policy]
        for policy in policies:
            loaded = scenario(folder, policy, traffic(0), guess)
            stock = policy == policies[0]
            with serving(loaded, folder, record) as server:
                if stock:
                    calls = list(sweep(8, 2048, random.Random(7)))
                    say_to_stderr(f"calibrating with {len(calls)} requests")
                    replies = asyncio.run(play(server.url, NAME, calls))
                    lone = [Call(i * 0.15, text_of(64, random.Random(i)), 2) for i in range(30)]
                    seen = asyncio.run(play(server.url, NAME, lone))
                    assert all(r.status == 200 for r in replies)
                    steps, firsts = read_rows(record)
                    frontend_s = median_gap([r.ttft_s for r in seen], firsts[-len(lone) :])
                    fit = fit_steps(steps, frontend_s)
                    out["fit"] = vars(fit)
                    say_to_stderr(str(fit))
                out["runs"][policy] = []
                for seed in range(args.runs):
                    before = len(read_rows(record)[0])
                    found = live(server, seed)
                    steps = read_rows(record)[0][before:]
                    found["longest_step_s"] = max(row["duration_s"] for row in steps)
                    out["runs"][policy].append(found)
        profile = folder / "profile.json"
        profile.write_text(json.dumps(profile_of(fit, "tiny", "cpu", "0.32.0", 2048, 64)))
        for policy in policies:
            out["twin"][policy] = [
                predicted(scenario(folder, policy, traffic(seed), profile), fit.frontend_s)
                for seed in range(args.runs)
            ]
    stock, ours = (
        np.array([[r["online_ttft_p99"] for r in out[k][p]] for k in ("runs", "twin")])
        for p in policies
    )
    (live_ratio, twin_ratio) = stock / ours
    out["ratio"] = {
        "live": live_ratio.tolist(), "twin": twin_ratio.tolist(),
        "error": float(np.mean(twin_ratio) / np.mean(live_ratio) - 1),
        "spread": float((live_ratio.max() - live_ratio.min()) / live_ratio.mean()),
    }  # fmt: skip
    print(json.dumps(out, indent=1))
    if args.out:
        args.out.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
