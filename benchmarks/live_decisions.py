"""Does the twin decide as a live server did, step by step?

    python -m benchmarks.live_decisions [--policies vllm-fcfs tiered] [--overload] [--python VLLM_PYTHON]

A tiny server that is short of slots and KV blocks records what its scheduler is asked and what it decides, under
conversations that repeat their prefixes, bursts that preempt, and clients that leave. The twin's engine and policy are
then asked the same at the same instants (real.decisions).
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.live_tiers import write_profile
from real.calibrate import Calibration
from real.cli_serve import tiny_document
from real.command import Serving, serve_command
from real.decisions import decide, read_rows
from real.preflight import free_port
from real.prompts import Prompts
from real.replay import Manner, replay
from real.server import Server, say_to_stderr
from real.tiny import NAME, VOCABULARY, write_tiny_model
from twin.scenario import load_scenario
from twin.step_time.fit import StepFit
from twin.workload.streams import Traffic, open_streams

DOCUMENT = {
    "name": "decisions",
    "model": "meta-llama/Llama-3.1-8B",
    "hardware": {"gpu": "H100"},
    "engine": {
        "version": "0.32.0", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024,
        "num_gpu_blocks_override": 105,
    },
    "traffic": [
        {
            "arrivals": {"process": "poisson", "rate": 6},
            "prompt_tokens": {"uniform": [40, 200]}, "output_tokens": {"uniform": [10, 40]},
            "sessions": {"turns": 3, "think_time": 0.3, "system_prompt_tokens": 96},
            "requests": 150, "tiers": {"ONLINE": 0.6, "BATCH": 0.4},
        },
        {
            "arrivals": {"process": "batch", "at": [2, 9, 16], "size": 10},
            "prompt_tokens": {"uniform": [100, 500]}, "output_tokens": {"uniform": [50, 150]}, "requests": 30,
            "tiers": {"OFFLINE": 1.0}, "timeouts": {"total": 6},
        },
    ],
}  # fmt: skip

OVERLOAD = [
    {
        "arrivals": {"process": "batch", "at": [0, 4], "size": 200},
        "prompt_tokens": {"uniform": [20, 200]}, "output_tokens": {"uniform": [5, 30]}, "requests": 400,
        "tiers": {"ONLINE": 0.4, "BATCH": 0.3, "OFFLINE": 0.3},
    }
]  # fmt: skip
"""More than 300 requests wait."""


def recorded(document, folder: Path, python: str) -> Path:
    """Play the traffic against a recording server; where the recording is."""
    loaded = load_scenario(document)
    record = folder / f"{loaded.policy_name}.rec"
    port = free_port()
    command = serve_command(loaded, Serving(python, folder / "model", NAME, port=port, dummy=True))
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
        traffic = Traffic(open_streams(loaded.traffic, loaded.run.seed))
        manner = Manner(server_aborts=loaded.policy is not None)
        done = asyncio.run(replay(server.url, NAME, traffic, Prompts(VOCABULARY), manner))
        ends = {}
        for one in done.measured:
            ends[one.record.reason] = ends.get(one.record.reason, 0) + 1
        say_to_stderr(f"{len(done.measured)} requests: {ends}")
    finally:
        server.stop()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["vllm-fcfs", "tiered"])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--overload", action="store_true", help="400 requests, most of which wait")
    parser.add_argument("--keep", type=Path, help="a folder for the recordings")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_tiny_model(folder / "model")
        line = StepFit(
            ((1, 1e-3), (1024, 2e-3)), ((0, 0.0), (64, 1e-4)), 0.0, 1e-6, 1e-6, {}, 1.0, 1
        )
        steps = folder / "steps.json"  # no step time is used: those of the recording are
        write_profile(steps, Calibration(line, (0.0, 0.0), 1, 0.0, {"all": 0.0}, 0.0, {}))
        for policy in args.policies:
            asked = DOCUMENT | {"policy": policy} | ({"traffic": OVERLOAD} if args.overload else {})
            document = tiny_document(load_scenario(asked), folder / "model", str(steps))
            record = recorded(document, folder, args.python)
            if args.keep:
                shutil.copy(record, args.keep)
                (args.keep / f"{policy}.json").write_text(json.dumps(document))
            found = decide(read_rows(record), load_scenario(document))
            print(f"{policy}: {found.text()}", flush=True)


if __name__ == "__main__":
    main()
