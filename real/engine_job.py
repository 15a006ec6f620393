"""The in-process engine of a scenario, timed in an interpreter that has vLLM."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real.command import Serving, dtype_of
from real.preflight import child_environment
from real.sweep import Ask, Limits
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
) -> Iterator[dict[str, Any]]:
    """Rows of real.engine_steps. Raises InputError where the engine does not start or ends early."""
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
    run = subprocess.run(
        command,
        env=child_environment({**environment, **variables}),
        capture_output=True,
        text=True,
        errors="replace",
        cwd=os.getcwd(),
    )
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        raise InputError(
            f"the engine of {serving.python} ended with status {run.returncode}: "
            f"{lines[-1] if lines else 'it said nothing'}"
        )
    for line in out.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
