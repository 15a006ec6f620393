"""From the shell to the first simulated event: seconds until `twin run` begins to simulate.

Until then Python starts, the twin is imported, the scenario checked and the step-time profile read.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.speed_measure import ROOT, environment

AIM_S = 0.6
PROBE = """
import os, sys, time
import twin.simulation

def begin(*arguments, **options):
    print(time.monotonic(), time.process_time())
    sys.stdout.flush()
    os._exit(0)

twin.simulation.simulate = begin
from twin.__main__ import main
main()
"""
"""Runs `twin`, but tells the time and ends where it would simulate."""


def start_up(cache: str, scenario: Path, times: int = 10) -> dict[str, float]:
    """Medians of wall and CPU seconds, with byte code there."""
    command = [sys.executable, "-c", PROBE, "run", str(scenario)]
    walls, cpus = [], []
    for attempt in range(times + 1):
        begun = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment(cache)
        )
        if done.returncode or not done.stdout:
            sys.exit(f"twin run {scenario} does not begin:\n{done.stderr}")
        at, cpu = map(float, done.stdout.split())
        if attempt:  # the first one compiles
            walls.append(at - begun)
            cpus.append(cpu)
    return {
        "wall_s": statistics.median(walls),
        "least_wall_s": min(walls),
        "cpu_s": statistics.median(cpus),
    }
