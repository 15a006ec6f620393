"""Time the steps of vLLM's own engine, in this process, on workloads given beforehand.

    python -m real.engine_steps JOB.json OUT.jsonl

For an interpreter that has vLLM and little else; `real.calibrate` writes the job and reads the rows. A job has
`engine` (arguments of vLLM's EngineArgs), `workloads` (lists of real.sweep.Ask as data), `repeats` and `vocabulary`.
Requests are added before the step they name, so that every repeat has the same steps. A row is one step: its content
(real.record.content_of), `seconds` from the call of the scheduler to the end of its update, `host_s`, the part of it
that the scheduler and its update took, and which one of which repeat it was.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

MOST_STEPS = 5000
"""Of one workload; one that needs more is not for measuring single steps."""


class Timed:
    """A scheduler whose calls are timed. Stands in for it in the engine core."""

    def __init__(self, scheduler: Any) -> None:
        from real.record import content_of

        self._content_of = content_of
        self._scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update
        self.row: dict[str, Any] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the step."""
        begun = time.perf_counter()
        planned = self._schedule(*args, **kwargs)
        self._begun, self._host_s = begun, time.perf_counter() - begun
        self.row = None
        if planned.num_scheduled_tokens:
            self.row = self._content_of(self._scheduler.requests, planned)
        return planned

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Take in its results."""
        begun = time.perf_counter()
        result = self._update(*args, **kwargs)
        now = time.perf_counter()
        if self.row is not None:
            self.row |= {"seconds": now - self._begun, "host_s": self._host_s + now - begun}
        return result


def prompts_of(asks: list[dict[str, Any]], name: str, vocabulary: int) -> list[list[int]]:
    """Token ids of a workload's prompts, none with the beginning of another unless it is to be so."""
    found: list[list[int]] = []
    for i, ask in enumerate(asks):
        rng = random.Random(f"{name}/{i}")
        first = found[ask["repeats"]][: ask["cached"]] if ask["repeats"] is not None else []
        rest = ask["prompt_tokens"] - len(first)
        found.append([*first, *rng.choices(range(1, vocabulary), k=rest)])
    return found


def run(engine: Any, timed: Timed, asks: list[dict[str, Any]], name: str, vocabulary: int) -> Any:
    """Play one workload; its rows in order."""
    from vllm import SamplingParams

    prompts = prompts_of(asks, name, vocabulary)
    waiting = sorted(range(len(asks)), key=lambda i: asks[i]["step"])
    for number in range(MOST_STEPS):
        while waiting and asks[waiting[0]]["step"] <= number:
            i = waiting.pop(0)
            params = SamplingParams(
                max_tokens=asks[i]["output_tokens"], ignore_eos=True, detokenize=False, temperature=0.0
            )  # fmt: skip
            engine.add_request(f"{name}/{i}", {"prompt_token_ids": prompts[i]}, params)
        if not engine.has_unfinished_requests():
            if not waiting:
                return
            number_of_next = asks[waiting[0]]["step"]
            for i in waiting:
                asks[i]["step"] -= number_of_next - number - 1
            continue
        engine.step()
        if timed.row is not None and "seconds" in timed.row:
            yield timed.row
            timed.row = None
    raise SystemExit(f"workload {name} takes more than {MOST_STEPS} steps")


def main(job_path: str, out_path: str) -> None:
    """Run the job."""
    from vllm import EngineArgs, LLMEngine

    from real.sweep import PLAYED, WARM_UP

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    engine = LLMEngine.from_engine_args(EngineArgs(**job["engine"]))
    core = engine.engine_core.engine_core
    timed = Timed(core.scheduler)
    with open(out_path, "w", encoding="utf-8") as out:
        # First a few that are not counted: caches fill, memory is touched for the first time.
        for repeat in range(-1, job["repeats"]):
            workloads = list(job["workloads"].items())
            # In another order each time: a machine that becomes slower meanwhile does so for all of them.
            random.Random(repeat).shuffle(workloads)
            for name, asks in workloads[: WARM_UP if repeat < 0 else None]:
                copies = [dict(ask) for ask in asks]
                rows = run(engine, timed, copies, name, job["vocabulary"])
                for number, row in enumerate(rows):
                    if repeat >= 0:
                        row |= {"workload": name, "number": number, "repeat": repeat}
                        out.write(json.dumps(row) + "\n")
                core.scheduler.reset_prefix_cache()
                out.flush()
                print(PLAYED, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
