"""AISimulate beside the twin: the same traffic in the same minutes on the same machine.

It is installed from the package index into `.venv-peers`, an environment of its own; where that cannot be done, the
table says so. It is given Poisson arrivals of 512 prompt and 128 output tokens for Llama-3.1-8B, as workload W1.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed_measure import ROOT, measure
from benchmarks.speed_workloads import POLICIES, poisson

HOME = ROOT / ".venv-peers"
PYTHON = HOME / "bin" / "python"
SIZES = ((10_000, 1), (10_000, 4), (100_000, 4))
"""(requests, replicas)."""
GPUS = ("a100_sxm", "h100_sxm")
"""It is measured on the GPU of its published figures and on the twin's: a faster GPU means more, smaller steps."""
INSTALL_S = 1800
ATTEMPTS = 3
"""On a busy machine it sometimes gives up waiting for a process of its own."""


class Absent(Exception):
    """The peer cannot be had here; the message says why."""


@dataclass(frozen=True)
class Race:
    """Wall seconds without start-up, round by round."""

    requests: int
    replicas: int
    gpu: str
    peer_s: list[float]
    ours_s: dict[str, list[float]]
    """By policy."""

    def ratios(self, policy: str) -> list[float]:
        """How many times as fast as the peer we were, in each round."""
        return [a / b for a, b in zip(self.peer_s, self.ours_s[policy], strict=True)]


def install() -> str:
    """Make the environment unless it is there; the peer's version. Raises Absent."""
    asked = [PYTHON, "-c", "import importlib.metadata as m; print(m.version('aisimulate'))"]
    try:
        if not PYTHON.exists():
            subprocess.run([sys.executable, "-m", "venv", HOME], check=True, capture_output=True)
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode:
            pip = [PYTHON, "-m", "pip", "install", "--only-binary", ":all:", "aisimulate"]
            subprocess.run(pip, check=True, capture_output=True, text=True, timeout=INSTALL_S)
            done = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise Absent(str(said).strip().splitlines()[-1]) from error
    return done.stdout.strip()


def _config(requests: int, replicas: int, gpu: str) -> dict[str, Any]:
    parallelism = {"replicas": replicas, "tensor": 1}
    return {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": 512, "output_tokens": 128},
            "load": {"type": "poisson", "requests_per_second": 6 * replicas},
            "stop": {"requests": requests},
        },
        "engine": {
            "model": "meta-llama/Meta-Llama-3.1-8B",
            "hardware": gpu,
            "backend": "vllm",
            "workers": {"aggregated": {"parallelism": parallelism}},
        },
    }


def run_peer(requests: int, replicas: int, gpu: str, attempts: int = ATTEMPTS) -> float:
    """The wall time in seconds that it prints itself. Raises Absent if it fails every time."""
    try:
        return _attempt(requests, replicas, gpu)
    except Absent:
        if attempts == 1:
            raise
    return run_peer(requests, replicas, gpu, attempts - 1)


def _attempt(requests: int, replicas: int, gpu: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "config.json"), Path(folder, "out")
        config.write_text(json.dumps(_config(requests, replicas, gpu)))
        command = [HOME / "bin" / "aisimulate", "predict", "-c", config, "--output-dir", out]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise Absent((done.stderr.strip() or "it failed").splitlines()[-1])
        found = json.loads((out / "prediction.json").read_text())
    if found["completed_requests"] != requests:
        raise Absent(f"it completed {found['completed_requests']} of {requests} requests")
    return float(found["wall_time_ms"]) / 1000


def race(cache: str, requests: int, replicas: int, rounds: int) -> list[Race]:
    """Both in turn, each run in a fresh process. Raises Absent."""
    peer_s: dict[str, list[float]] = {gpu: [] for gpu in GPUS}
    ours_s: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    document = poisson(requests, replicas)
    for _ in range(rounds):
        for policy in POLICIES:
            found = measure(cache, "time", document, policies=[policy], rounds=1)
            ours_s[policy].append(found["policies"][policy]["wall_s"])
        for gpu in GPUS:
            peer_s[gpu].append(run_peer(requests, replicas, gpu))
    return [Race(requests, replicas, gpu, peer_s[gpu], ours_s) for gpu in GPUS]


def table(races: list[Race]) -> str:
    """Medians of wall seconds, and of the ratios with their extremes."""
    lines = [
        "| Requests x replicas | Policy | twin, s | AISimulate's GPU | AISimulate, s "
        "| times as fast, median (least to most) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in races:
        for policy in POLICIES:
            ratios = r.ratios(policy)
            lines.append(
                f"| {r.requests:,} x {r.replicas} | {policy} | {statistics.median(r.ours_s[policy]):.2f} | {r.gpu} "
                f"| {statistics.median(r.peer_s):.2f} | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) |"
            )
    return "\n".join(lines)
