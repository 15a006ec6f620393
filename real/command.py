"""Which `vllm serve` command serves a scenario?"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real.hints import CONFIG_KEY, HEADERS
from twin.errors import InputError
from twin.scenario import Scenario

SCHEDULER = "real.scheduler.make_scheduler"
MIDDLEWARE = "real.middleware.TwinMiddleware"
DRAIN_S = 3600
"""Seconds vLLM itself would go on after a signal; `twin-real serve` has drained before it sends one."""

QUANTISED = ("fp8", "int8", "int4")
"""Types of weights that files are stored in, beside those that vLLM makes of 16-bit weights itself."""

_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "fp8": "bfloat16"}


@dataclass(frozen=True)
class Serving:
    """What a scenario does not say: where the server listens, what it serves, how it treats bad hints."""

    python: str
    """Interpreter that has vLLM."""
    model: Path | str
    """Folder of the model, or its name where vLLM may fetch it."""
    name: str
    """What clients call the model."""
    host: str = "127.0.0.1"
    port: int = 8000
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)
    """Header -> field of vllm_xargs."""
    bad_hints: str = "default"
    """default: the scheduler takes the default for a hint that makes no sense; reject: the client gets a 400."""
    dummy: bool = False
    """Random weights: nothing is loaded."""
    is_quantised: bool = False
    """The files hold weights of the scenario's type already: vLLM reads in their configuration how."""
    shutdown_timeout: int = DRAIN_S
    """Seconds vLLM itself goes on with what runs after a signal."""
    more: Sequence[str] = ()
    """Further arguments, handed to vLLM as they are."""


def dtype_of(scenario: Scenario) -> str:
    """vLLM's --dtype. Raises InputError for a type that vLLM cannot make of loaded weights."""
    dtype = scenario.hardware.dtype
    if dtype not in _DTYPES:
        raise InputError(
            f"hardware.dtype: {dtype} is nothing vLLM makes of loaded weights; give a folder with "
            f"such weights, and one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[dtype]


def serve_command(scenario: Scenario, serving: Serving) -> list[str]:
    """The arguments, the program first. Raises InputError for a dtype that vLLM cannot make of loaded weights."""
    engine, document = scenario.engine, scenario.document["engine"]
    hardware = scenario.hardware
    is_quantised = serving.is_quantised and hardware.dtype in QUANTISED
    options: dict[str, Any] = {
        "served-model-name": serving.name,
        "host": serving.host,
        "port": serving.port,
        "load-format": "dummy" if serving.dummy else None,
        "dtype": "bfloat16" if is_quantised else dtype_of(scenario),
        "quantization": "fp8" if hardware.dtype == "fp8" and not is_quantised else None,
        "tensor-parallel-size": hardware.tensor_parallel_size,
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-active-seqs": engine.max_num_active_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "max-num-scheduled-tokens": engine.max_num_scheduled_tokens,
        "block-size": engine.block_size,
        "gpu-memory-utilization": document["gpu_memory_utilization"],
        "num-gpu-blocks-override": document["num_gpu_blocks_override"],
        "kv-cache-dtype": document["kv_cache_dtype"],
        "enable-prefix-caching": engine.enable_prefix_caching,
        "enable-chunked-prefill": engine.enable_chunked_prefill,
        "long-prefill-token-threshold": engine.long_prefill_token_threshold or None,
        "long-prefill-token-threshold-adaptive": engine.long_prefill_token_threshold_adaptive
        or None,
        "scheduler-reserve-full-isl": engine.scheduler_reserve_full_isl,
        "watermark": engine.watermark or None,
        "async-scheduling": engine.async_scheduling,
        "enforce-eager": document["enforce_eager"] or None,
        "enable-prompt-tokens-details": True,
        "shutdown-timeout": serving.shutdown_timeout,
        "middleware": MIDDLEWARE,
        "additional-config": json.dumps({CONFIG_KEY: _settings(scenario, serving)}),
    }
    if scenario.policy is None:
        options["scheduling-policy"] = engine.scheduling_policy
    else:
        options["scheduler-cls"] = SCHEDULER
    command = [serving.python, "-m", "vllm.entrypoints.cli.main", "serve", str(serving.model)]
    for name, value in options.items():
        if isinstance(value, bool):
            command.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            command += [f"--{name}", str(value)]
    return [*command, *serving.more]


_REFUSED = {
    "host": "--host",
    "port": "--port",
    "served-model-name": "--name",
    "model": "--model",
    "scheduling-policy": "--set policy=",
    "scheduler-cls": "--set policy=",
    "tensor-parallel-size": "--set hardware.tensor_parallel_size=",
    "dtype": "--set hardware.dtype=",
    "load-format": "--tiny",
    "additional-config": "--header, --reject-bad-hints and --set policy=",
    "shutdown-timeout": "--drain",
}
"""Argument of vLLM -> what to use instead; those of the engine are keys of the scenario."""
_IMPOSSIBLE = {
    "uds": "the server listens on --host and --port",
    "api-server-count": "one API server drains, several cannot",
    "data-parallel-size": "it brings an API server for each rank, and one drains, several cannot",
    "headless": "it would not listen",
    "grpc": "the plug-in stands in front of HTTP",
    "ssl-keyfile": "leave TLS to what stands before the server",
    "ssl-certfile": "leave TLS to what stands before the server",
    "config": "name what it holds after --",
}
"""Argument of vLLM -> why `twin-real serve` cannot do with it."""
_ALLOWED_TWICE = {"middleware"}
"""vLLM adds these to those that it has."""
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-asc": "api-server-count",
    "-q": "quantization",
}


def check_more(command: Sequence[str], more: Sequence[str]) -> None:
    """Raise InputError for arguments after `--` that contradict what `command`, which ends in them, says already."""
    names = [_name(word) for word in command[: len(command) - len(more)]]
    said = [*_IMPOSSIBLE, *_REFUSED, *(name for name in names if name is not None)]
    for word in more:
        name = _name(word)
        if name is None or name in _ALLOWED_TWICE:
            continue
        # vLLM takes the beginning of a name for the name.
        name = name if name in said else next((full for full in said if full.startswith(name)), "")
        if name in _IMPOSSIBLE:
            raise InputError(f"-- {word}: not with twin-real serve: {_IMPOSSIBLE[name]}")
        if name:
            instead = _REFUSED.get(name, f"--set engine.{name.replace('-', '_')}=")
            raise InputError(f"-- {word}: twin-real serve sets --{name} itself; use {instead}")


def _name(word: str) -> str | None:
    """The argument that a word names, without what is set below it or with it; None for a value."""
    word = word.partition("=")[0]
    if word in _SHORT:
        return _SHORT[word]
    if not word.startswith("--"):
        return None
    return word[2:].partition(".")[0].replace("_", "-").removeprefix("no-")


def _settings(scenario: Scenario, serving: Serving) -> dict[str, Any]:
    policy = None if scenario.policy is None else scenario.policy.to_dict()
    settings: dict[str, Any] = {
        "policy": policy,
        "policy_name": scenario.policy_name,
        "bad_hints": serving.bad_hints,
    }
    if dict(serving.headers) != HEADERS:
        settings["headers"] = dict(serving.headers)
    return settings
