"""vLLM's real scheduler without model, worker, engine or network."""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.parity.workload import Ask
from twin.engine.config import EngineConfig

VERSION = vllm.__version__.partition("+")[0]
"""Of the vLLM that is compared with; the twin follows its rules."""

logging.disable(logging.WARNING)  # vLLM warns about every odd size, and all of ours are odd
init_none_hash(sha256)
END_TOKEN = 7
SPAN = 1 << 12
"""Token ids of one content."""

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 4096,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _model_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="tiny-llama-"))
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return str(folder)


_FOLDER = _model_folder()
_MODEL_CONFIGS: dict[int, ModelConfig] = {}


def _model_config(max_model_len: int) -> ModelConfig:
    if max_model_len not in _MODEL_CONFIGS:
        _MODEL_CONFIGS[max_model_len] = ModelConfig(
            model=_FOLDER,
            tokenizer=_FOLDER,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_model_len,
        )
    return _MODEL_CONFIGS[max_model_len]


def make_scheduler(
    config: EngineConfig,
    factory: Callable[..., Any] | None = None,
    additional_config: dict[str, Any] | None = None,
) -> Any:
    """vLLM's scheduler for `config`; `factory` as `--scheduler-cls` would name it."""
    vllm_config = VllmConfig(
        model_config=_model_config(config.max_model_len),
        scheduler_config=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_scheduled_tokens=config.max_num_scheduled_tokens,
            max_num_active_seqs=config.max_num_active_seqs,
            max_model_len=config.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=config.long_prefill_token_threshold_adaptive,
            scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            watermark=config.watermark,
            policy=config.scheduling_policy,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(
            block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        additional_config=additional_config or {},
    )
    # The CPU platform turns these off or rounds them; the scheduler itself knows no platform.
    vllm_config.scheduler_config.async_scheduling = config.async_scheduling
    vllm_config.scheduler_config.enable_chunked_prefill = config.enable_chunked_prefill
    vllm_config.scheduler_config.max_num_batched_tokens = config.max_num_batched_tokens
    vllm_config.cache_config.enable_prefix_caching = config.enable_prefix_caching
    vllm_config.cache_config.block_size = config.block_size
    vllm_config.cache_config.num_gpu_blocks = config.num_gpu_blocks
    spec = FullAttentionSpec(
        block_size=config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    stock = AsyncScheduler if config.async_scheduling else Scheduler
    return (factory or stock)(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=config.block_size,
        hash_block_size=config.block_size,
        log_stats=False,
    )


class VllmHost:
    """vLLM's scheduler behind the calls of the lockstep driver."""

    def __init__(self, scheduler: Any, config: EngineConfig) -> None:
        self.scheduler = scheduler
        self._hasher = get_request_block_hasher(config.block_size, sha256)
        self._asks: dict[str, Ask] = {}

    def has_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def add(self, ask: Ask, extra_args: dict[str, Any] | None = None) -> None:
        tokens = [content * SPAN + i for content, count in ask.prompt for i in range(count)]
        self._asks[ask.rid] = ask
        self.scheduler.add_request(
            Request(
                ask.rid,
                tokens,
                SamplingParams(
                    max_tokens=ask.max_tokens,
                    ignore_eos=True,
                    stop_token_ids=[END_TOKEN],
                    extra_args=extra_args,
                ),
                None,
                arrival_time=ask.arrival,
                priority=ask.priority,
                block_hasher=self._hasher,
            )
        )

    def abort(self, ask: Ask) -> None:
        self.scheduler.finish_requests(ask.rid, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        out = self.scheduler.schedule()
        sampled = {
            rid: not self.scheduler.requests[rid].is_prefill_chunk
            for rid in out.num_scheduled_tokens
        }
        if not out.num_scheduled_tokens:
            self.scheduler.update_from_output(out, ModelRunnerOutput([], {}, []))
        return out, sampled

    def update(self, planned: Any) -> list[tuple[str, int, str | None]]:
        """(id, tokens delivered, finish reason) per request that got something, in schedule order."""
        out, sampled = planned
        rids = list(out.num_scheduled_tokens)
        tokens = []
        for rid in rids:
            request = self.scheduler.requests.get(rid)
            if not sampled[rid] or request is None:
                tokens.append([0] if sampled[rid] else [])
                continue
            ask, index = self._asks[rid], request.num_output_tokens
            is_last = ask.output_tokens is not None and index + 1 == ask.output_tokens
            tokens.append([END_TOKEN if is_last else ask.reply * SPAN + index])
        result = self.scheduler.update_from_output(
            out, ModelRunnerOutput(rids, {rid: i for i, rid in enumerate(rids)}, tokens)
        )
        got = {
            o.request_id: (
                len(o.new_token_ids),
                None if o.finish_reason is None else str(o.finish_reason),
            )
            for outs in result.values()
            for o in outs.outputs
        }
        return [
            (rid, *got[rid])
            for rid in rids
            if rid in got and (got[rid][0] or got[rid][1] != "abort")
        ]

    def state(self) -> dict[str, Any]:
        """Everything that must be equal after each call."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        held = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        running = {r.request_id for r in scheduler.running}
        return {
            "running": [r.request_id for r in scheduler.running],
            "waiting": sorted(set(scheduler.requests) - running),
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "requests": {
                rid: (
                    request.num_computed_tokens,
                    request.num_tokens,
                    request.num_output_placeholders,
                    request.num_in_flight_tokens,
                    request.num_stale_output_tokens,
                    request.num_preemptions,
                    [block.block_id for block in held.get(rid, ())],
                )
                for rid, request in scheduler.requests.items()
            },
        }
