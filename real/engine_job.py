"""The in-process engine of a scenario, timed in an interpreter that has vLLM."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real.command import Serving, dtype_of
from real.preflight import child_environment
from real.sweep import PLAYED, WARM_UP, Ask, Limits
from twin.errors import InputError
from twin.scenario import Scenario


def limits_of(scenario: Scenario) -> Limits:
    """What the scenario's engine takes."""
    engine = scenario.engine
    return Limits(
        engine.active_limit,
        engine.token_budget,
        engine.max_model_len,
        (engine.num_gpu_blocks - 1) * engine.block_size,
        engine.block_size,
    )


def engine_arguments(scenario: Scenario, serving: Serving) -> dict[str, Any]:
    """Of vLLM's EngineArgs: as the server's, with vLLM's own scheduler and synchronous steps."""
    engine, document = scenario.engine, scenario.document["engine"]
    return {
        "model": str(serving.model),
        "load_format": "dummy" if serving.dummy else "auto",
        "dtype": dtype_of(scenario),
        "tensor_parallel_size": scenario.hardware.tensor_parallel_size,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "block_size": engine.block_size,
        "gpu_memory_utilization": document["gpu_memory_utilization"],
        "num_gpu_blocks_override": document["num_gpu_blocks_override"],
        "kv_cache_dtype": document["kv_cache_dtype"],
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "enforce_eager": document["enforce_eager"],
        "disable_log_stats": True,
        "seed": 0,
    }


def time_steps(
    scenario: Scenario,
    serving: Serving,
    workloads: Mapping[str, Sequence[Ask]],
    repeats: int,
    vocabulary: int,
    folder: Path,
    environment: Mapping[str, str],
    told: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of real.engine_steps. Raises InputError where the engine does not start or ends early.

    `told` is called with how many workloads were played, and how many there are in all.
    """
    job, out = folder / "job.json", folder / "steps.jsonl"
    content = {
        "engine": engine_arguments(scenario, serving),
        "workloads": {name: [asdict(ask) for ask in asks] for name, asks in workloads.items()},
        "repeats": repeats,
        "vocabulary": vocabulary,
    }
    job.write_text(json.dumps(content), encoding="utf-8")
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [serving.python, "-m", "real.engine_steps", str(job), str(out)]
    total, done = min(WARM_UP, len(workloads)) + repeats * len(workloads), 0
    with (
        (folder / "engine.log").open("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command,
            env=child_environment({**environment, **variables}),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            cwd=os.getcwd(),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line == PLAYED:
                    done += 1
                    if told is not None:
                        told(done, total)
            process.wait()
        except BaseException:
            process.kill()
            raise
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if process.returncode:
        raise InputError(
            f"the engine of {serving.python} with the model {serving.model} ended with status {process.returncode}: "
            f"{lines[-1] if lines else 'it said nothing'}"
        )
    for line in out.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
