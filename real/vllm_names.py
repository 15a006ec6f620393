"""Which vLLM is known, which of its names does the plug-in rely on, and does the installed one still have them?"""

import inspect
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

VERSIONS = ("0.32.0", "0.33.0")
"""Versions of vLLM whose scheduler was compared with the twin's, step by step."""

_QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_REQUEST = "vllm.v1.request:Request."

SCHEDULER_NAMES = (
    "requests",
    "waiting",
    "kv_holding_waiting",
    "running",
    "num_waiting_for_streaming_input",
    "pause_state",
    "max_num_active_reqs",
    "max_model_len",
    "block_size",
    "scheduler_config",
    "kv_cache_config.num_blocks",
    "kv_cache_manager.block_pool.get_num_free_blocks",
    "_preempt_request",
)
"""Of a scheduler object, beside its public methods."""

VLLM_NAMES: tuple[str, ...] = (
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    _SCHEDULER + "schedule",
    _SCHEDULER + "update_from_output",
    _SCHEDULER + "finish_requests",
    *(_SCHEDULER + name.partition(".")[0] for name in SCHEDULER_NAMES),
    "vllm.v1.core.sched.interface:PauseState.UNPAUSED",
    "vllm.v1.core.sched.request_queue:FCFSRequestQueue.pop_request",
    _QUEUE + "add_request",
    _QUEUE + "pop_request",
    _QUEUE + "peek_request",
    _QUEUE + "prepend_request",
    _QUEUE + "prepend_requests",
    _QUEUE + "remove_request",
    _QUEUE + "remove_requests",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.coordinator",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.req_to_blocks",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock.ref_cnt",
    _REQUEST + "request_id",
    _REQUEST + "arrival_time",
    _REQUEST + "num_prompt_tokens",
    _REQUEST + "num_computed_tokens",
    _REQUEST + "num_tokens",
    _REQUEST + "num_output_tokens",
    _REQUEST + "max_tokens",
    _REQUEST + "sampling_params",
    _REQUEST + "client_index",
    _REQUEST + "status",
    _REQUEST + "priority",
    _REQUEST + "is_finished",
    _REQUEST + "structured_output_request",
    "vllm.v1.structured_output.request:StructuredOutputRequest.grammar",
    "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    "vllm.v1.request:RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    "vllm.v1.request:RequestStatus.FINISHED_ABORTED",
    "vllm.v1.engine:EngineCoreOutput.finish_reason",
    "vllm.v1.engine:EngineCoreOutput.stop_reason",
    "vllm.v1.engine:EngineCoreOutputs.outputs",
    "vllm.v1.engine:FinishReason.ABORT",
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    "vllm.v1.engine.async_llm:AsyncLLM.output_processor",
    "vllm.v1.engine.output_processor:OutputProcessor.get_num_unfinished_requests",
    "vllm.sampling_params:SamplingParams.extra_args",
)
"""`module:attribute.attribute`. Most are not part of a public interface and may change with any release."""


def check_version() -> None:
    """Raise RuntimeError under a vLLM that the twin's rules were not compared with."""
    found = import_module("vllm").__version__
    if found.partition("+")[0] not in VERSIONS:
        raise RuntimeError(
            f"vLLM {found} is not known here: vllm.__version__ is none of "
            f"{', '.join(VERSIONS)}; install one of these"
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise RuntimeError naming what this scheduler object of vLLM lacks."""
    missing = [name for name in SCHEDULER_NAMES if not _has(scheduler, name)]
    if missing:
        raise RuntimeError(
            f"vLLM {import_module('vllm').__version__} is not known here: "
            f"its scheduler has no attribute {', '.join(missing)}"
        )


def _has(found: Any, path: str) -> bool:
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


def tell_names() -> int:
    """Say how many of the names the installed vLLM has, and which it lacks: exit status 0 if none, else 1."""
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        sys.stderr.write(f"vLLM cannot be imported here: {error}\n")
        return 1
    missing = missing_names()
    found = len(VLLM_NAMES) - len(missing)
    sys.stdout.write(f"vLLM {vllm.__version__}: {found} of {len(VLLM_NAMES)} names found\n")
    sys.stderr.writelines(f"missing: {name}\n" for name in missing)
    return 1 if missing else 0


def missing_names(names: Iterable[str] = VLLM_NAMES) -> list[str]:
    """Those of `names` that the importable modules do not have.

    An attribute counts if its class has it, or if a method of the class, or of one of its bases,
    assigns it to `self`. No object is made.
    """
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: object = import_module(module)
    except ImportError:
        return False
    for attribute in path.split("."):
        if hasattr(found, attribute):
            found = getattr(found, attribute)
        else:
            return inspect.isclass(found) and _is_set_on_self(found, attribute)
    return True


def _is_set_on_self(owner: type, attribute: str) -> bool:
    assigned = re.compile(rf"\bself\.{attribute}\b\s*(:|=[^=])")
    for base in owner.__mro__:
        if attribute in inspect.get_annotations(base):
            return True
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # a class that is not written in Python
            continue
        if assigned.search(source):
            return True
    return False
