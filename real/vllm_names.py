"""Which of vLLM's names does the plug-in rely on, and does the installed vLLM still have them?"""

import inspect
import re
from collections.abc import Iterable
from importlib import import_module

_QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_REQUEST = "vllm.v1.request:Request."

VLLM_NAMES: tuple[str, ...] = (
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    _SCHEDULER + "schedule",
    _SCHEDULER + "update_from_output",
    _SCHEDULER + "finish_requests",
    _SCHEDULER + "_preempt_request",
    _SCHEDULER + "requests",
    _SCHEDULER + "waiting",
    _SCHEDULER + "running",
    _SCHEDULER + "max_num_active_reqs",
    _SCHEDULER + "max_num_running_reqs",
    _SCHEDULER + "max_model_len",
    _SCHEDULER + "block_size",
    _SCHEDULER + "kv_cache_manager",
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
    "vllm.v1.request:RequestStatus.FINISHED_ABORTED",
    "vllm.v1.engine:EngineCoreOutput.finish_reason",
    "vllm.v1.engine:EngineCoreOutput.stop_reason",
    "vllm.v1.engine:EngineCoreOutputs.outputs",
    "vllm.v1.engine:FinishReason.ABORT",
)
"""`module:attribute.attribute`. Most are not part of a public interface and may change with any release."""


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
