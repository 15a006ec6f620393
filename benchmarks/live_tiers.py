"""The same traffic on a live server, stock and under a policy, and what the twin says of both.

    python -m benchmarks.live_tiers [--policy tiered] [--runs 4] [--out FILE.json] [--python VLLM_PYTHON]

24 OFFLINE requests come first, then ONLINE ones while slots and KV blocks are short. OFFLINE replies are not streamed:
on a machine of few cores a client that reads thousands of small pieces takes them from the server. The twin's step
times are fitted to steps of the same server, its TTFT gets the measured time that a request spends outside the
scheduler. Takes about five minutes; --python names an interpreter that has vLLM, if this one has not.
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

from real.calibrate import Calibration, calibrate, profile, read_recording, recorded_steps
from real.calls import Call
from real.client import play
from real.command import Serving, serve_command
from real.demo import fetch_metrics, samples
from real.preflight import free_port
from real.server import Server, say_to_stderr
from real.tiny import NAME, text_of, write_tiny_model
from twin.scenario import load_scenario
from twin.simulation import simulate
from twin.step_time.fit import StepFit
from twin.step_time.profiles import Provenance

ENGINE = {
    "version": "0.32.0", "max_num_seqs": 3, "max_num_batched_tokens": 1024, "max_model_len": 1024,
    "block_size": 32, "num_gpu_blocks_override": 41, "async_scheduling": False, "enforce_eager": True,
}  # fmt: skip


ABOUT = Provenance(
    "tiny", "cpu", 1, "float32", "float32", ENGINE["version"], "a live server", "own measurement", "2026-01-01",
    "benchmarks/live_tiers.py", {}, (),
)  # fmt: skip


def designed_calls(rng: random.Random):
    """Requests in groups that start together, by number of requests and length of prompts, a while between groups."""
    due = 0.0
    for count in (1, 2, 3):
        for prompt in (8, 64, 256, 512, 768):
            for _ in range(count):
                yield Call(due, text_of(prompt, rng), 30, stream=False)
            due += 0.4 + count * (prompt * 1e-4 + 0.02)


def traffic(seed: int) -> list[Call]:
    rng = random.Random(seed)
    calls = [
        Call(0.0, text_of(rng.randint(150, 350), rng), 150, "OFFLINE", stream=False)
        for _ in range(24)
    ]
    due = 0.4
    for _ in range(60):
        due += rng.expovariate(2.5)
        calls.append(Call(due, text_of(rng.randint(300, 500), rng), 60, "ONLINE"))
    return calls


def scenario(folder: Path, policy: str, calls: list[Call], steps: Path):
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
        "hardware": {"gpu": "H100", "dtype": "float32", "step_time": str(steps)},
        "engine": ENGINE,
        "policy": policy,
        "traffic": [{"trace": str(trace)}],
        "run": {"seed": 1},
    }
    return load_scenario(document)


@contextmanager
def serving(loaded, folder: Path, python: str, record: Path | None = None):
    port = free_port()
    command = serve_command(loaded, Serving(python, folder / "model", NAME, port=port, dummy=True))
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
        server.warm_up(NAME, ENGINE["max_model_len"], say_to_stderr)
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


def measure(server: Server, record: Path, runs: int):
    """Runs of the traffic, a calibration before each: the machine is not the same all the time."""
    designed, outside, found = [], [], []
    for run in range(runs):
        before = len(read_recording(record)[0])
        calls = list(designed_calls(random.Random(run)))
        assert all(r.status == 200 for r in asyncio.run(play(server.url, NAME, calls)))
        designed += read_recording(record)[0][before:]
        lone = [Call(i * 0.1, text_of(64, random.Random(i)), 2) for i in range(20)]
        seen = asyncio.run(play(server.url, NAME, lone))
        steps, firsts = read_recording(record)
        scheduled = float(np.median(firsts[-len(lone) :]))
        outside.append(max(0.0, float(np.median([r.ttft_s for r in seen])) - scheduled))
        found.append(live(server, 0))
        own = read_recording(record)[0][len(steps) :]
        found[-1]["longest_step_s"] = max(row["duration_s"] for row in own)
        metrics = samples(fetch_metrics(server.url))
        found[-1]["victims_so_far"] = {
            labels["tier"] + " " + labels["cause"]: value
            for labels, value in metrics.get("twin:preemptions_total", ())
            if value
        } or sum(value for _, value in metrics["vllm:num_preemptions_total"])
    fit = calibrate(
        recorded_steps(designed),
        frontend_s=float(np.median(outside)),
        longest_context=ENGINE["max_model_len"],
        match_total=True,
    )
    return found, fit


def write_profile(path: Path, fit: Calibration) -> None:
    made = profile(fit, ABOUT, ENGINE["max_num_batched_tokens"], 64, ENGINE["max_model_len"])
    path.write_text(json.dumps(made.to_dict()))


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
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_tiny_model(folder / "model")
        guess = folder / "guess.json"
        line = StepFit(
            ((1, 1e-3), (1024, 2e-3)), ((0, 0.0), (64, 1e-4)), 0.0, 1e-6, 1e-6, {}, 1.0, 1
        )
        write_profile(guess, Calibration(line, (0.0, 0.0), 1, 0.0, {"all": 0.0}, 0.0, {}))
        out: dict = {"runs": {}, "twin": {}, "fit": {}}
        policies = ["vllm-fcfs", args.policy]
        for policy in policies:
            record, loaded = folder / f"{policy}.jsonl", scenario(folder, policy, traffic(0), guess)
            with serving(loaded, folder, args.python, record) as server:
                found, fit = measure(server, record, args.runs)
            out["runs"][policy], out["fit"][policy] = found, fit.to_dict()
            say_to_stderr(json.dumps({policy: [found, fit.to_dict()]}))
            fitted = folder / f"{policy}.json"
            write_profile(fitted, fit)
            told = scenario(folder, policy, traffic(0), fitted)
            out["twin"][policy] = predicted(told, fit.frontend_s)
    stock, ours = (np.array([r["online_ttft_p99"] for r in out["runs"][p]]) for p in policies)
    twin = [out["twin"][p]["online_ttft_p99"] for p in policies]
    live_ratio = float(np.median(stock) / np.median(ours))
    out["stock_to_policy"] = {
        "live": live_ratio,
        "twin": twin[0] / twin[1],
        "error": twin[0] / twin[1] / live_ratio - 1,
        # Of the ratios of all pairs of runs, the middle half.
        "spread": float(
            np.subtract(*np.percentile(np.divide.outer(stock, ours), [75, 25])) / live_ratio
        ),
    }
    print(json.dumps(out, indent=1))
    if args.out:
        args.out.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
