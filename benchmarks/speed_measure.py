"""Measures one scenario in a process of its own: CPU time beside the floor, peak memory, where the time goes.

    python -m benchmarks.speed_measure < job.json

Prints one JSON object. `measure` starts it with a job such as {"what": "once", "document": {...}}; what may be measured
is listed in `main`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import simpy

ROOT = Path(__file__).parents[1]
FLOOR_REQUESTS = 20_000
STATUS = Path("/proc/self/status")

PARTS = {
    "twin/scheduling": "policy",
    "twin/engine/runs": "prefix cache",
    "twin/engine/blocks": "prefix cache",
    "twin/engine/fast_replica": "boundaries",
    "twin/engine/replica": "boundaries",
    "twin/engine/jump": "boundaries",
    "twin/engine": "planning",
    "twin/step_time": "planning",
    "twin/engine/meter": "metrics",
    "twin/engine/life": "records",
    "twin/metrics/record": "records",
    "twin/metrics/token_times": "records",
    "twin/metrics": "metrics",
    "twin/workload": "traffic",
    "twin/cluster": "arrivals",
    "twin/simulation": "arrivals",
    "twin/agenda": "SimPy",
    "simpy": "SimPy",
}
"""Where a module counts; the longest beginning of its path decides. Others count where they are called from."""


def floor(requests: int = FLOOR_REQUESTS) -> float:
    """Requests per second of CPU time of SimPy alone: four events a request that do nothing."""
    env = simpy.Environment()

    def idle(events: int) -> Any:
        for _ in range(events):
            yield env.timeout(1)

    env.process(idle(requests))
    env.process(idle(3 * requests))
    begun = time.process_time()
    env.run()
    return requests / (time.process_time() - begun)


def memory_mb(field: str = "VmHWM") -> float | None:
    """Peak of resident memory, or with VmRSS what is resident now; None where there is no /proc."""
    if not STATUS.exists():
        return None
    # Unlike what getrusage tells, this peak is not that of the program from which this one was forked.
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def run_once(scenario: Any, progress: Any = None) -> dict[str, float]:
    """The whole run, with the figures of every tier."""
    from twin.clock import PS
    from twin.metrics.summary import summarize_tally
    from twin.simulation import simulate

    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(scenario, progress)
    tally = result.tally()
    span_ps = result.simulated_ps - scenario.run.warmup_ps
    tiers = summarize_tally(tally, scenario.objectives, span_ps, scenario.tiers)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "requests": tally.requests,
        "completed": sum(tier.counts.completed for tier in tiers.values()),
        "cpu_s": cpu,
        "wall_s": wall,
        "simulated_s": result.simulated_ps / PS,
        "events": result.events,
        "steps": sum(engine.steps for engine in result.engines),
        "preemptions": sum(engine.preemptions for engine in result.engines),
    }


def _time(job: dict[str, Any]) -> dict[str, Any]:
    """Rounds of floor and every policy in turn; the best of each."""
    from twin.scenario import load_scenario

    scenarios = {p: load_scenario(job["document"], [f"policy={p}"]) for p in job["policies"]}
    best: dict[str, dict[str, float]] = {}
    floors = [floor()]
    for _ in range(job["rounds"]):
        for policy, scenario in scenarios.items():
            found = run_once(scenario)
            floors.append(floor())
            before = best.setdefault(policy, found)
            found["wall_s"] = min(found["wall_s"], before["wall_s"])
            found["cpu_s"] = min(found["cpu_s"], before["cpu_s"])
            best[policy] = found
    return {"floor": max(floors), "policies": best}


def _once(job: dict[str, Any]) -> dict[str, Any]:
    """One run; the peak of the whole process."""
    from twin.scenario import load_scenario

    found = run_once(load_scenario(job["document"]))
    return found | {"peak_mb": memory_mb()}


def _watch(job: dict[str, Any]) -> dict[str, Any]:
    """One run that is cut at run.until; the memory resident after a tenth of that time, and at the end."""
    from twin.scenario import load_scenario

    scenario = load_scenario(job["document"])
    resident: list[float | None] = []

    def look(ended: int, expected: int | None, now_ps: int) -> None:
        if not resident and now_ps >= scenario.run.until_ps / 10:
            resident.append(memory_mb("VmRSS"))

    found: dict[str, Any] = run_once(scenario, look)
    return found | {"tenth_mb": resident[0], "end_mb": memory_mb("VmRSS"), "peak_mb": memory_mb()}


def part_of(frame: FrameType | None) -> str:
    """The part of the twin that a stack is in: of its innermost frame that belongs to one."""
    while frame is not None:
        path = Path(frame.f_code.co_filename).with_suffix("").as_posix()
        for top in ("/twin/", "/simpy/"):
            _, found, inside = path.rpartition(top)
            if found:
                name = top[1:] + inside
                known = [part for part in PARTS if name.startswith(part)]
                if known:
                    return PARTS[max(known, key=len)]
        frame = frame.f_back
    return "other"


def _parts(job: dict[str, Any]) -> dict[str, Any]:
    """Share of CPU time by part, from so many samples at least: one a millisecond, or a tick of the kernel."""
    from twin.scenario import load_scenario

    scenario = load_scenario(job["document"])
    run_once(scenario)
    seen: Counter[str] = Counter()
    signal.signal(signal.SIGPROF, lambda number, frame: seen.update([part_of(frame)]))
    signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
    while seen.total() < job["samples"]:
        run_once(scenario)
    signal.setitimer(signal.ITIMER_PROF, 0)
    total = seen.total()
    return {"samples": total, "parts": {part: n / total for part, n in seen.most_common()}}


def environment(cache: str, tree: Path | None = None) -> dict[str, str]:
    """For a process that runs `tree` with its byte code kept in the folder `cache`, as an installed one has it.

    Without a `tree`, the twin is the one that `make fast` has compiled, if the environment variable TWIN_COMPILED
    names its folder, and else this tree's.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(filter(None, (os.environ.get("TWIN_COMPILED"), str(ROOT))))
    found = {"PYTHONPATH": str(tree or path), "PYTHONPYCACHEPREFIX": cache}
    # Else the folder in which it is started would come first.
    return env | found | ({} if tree else {"PYTHONSAFEPATH": "1"})


def measure(cache: str, what: str, document: dict[str, Any], **job: Any) -> dict[str, Any]:
    """The result of a job, from a fresh process. Exits with its complaint if it fails."""
    command = [sys.executable, "-m", "benchmarks.speed_measure"]
    text = json.dumps({"what": what, "document": document} | job)
    # Compiled code has no frames to be seen in.
    env = environment(cache, ROOT if what == "parts" else None)
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    job = json.load(sys.stdin)
    doers = {"time": _time, "once": _once, "parts": _parts, "watch": _watch}
    print(json.dumps(doers[job["what"]](job)))


if __name__ == "__main__":
    main()
