"""The scenario file as data: which keys there are, of what type, within which bounds.

These models mirror the file and nothing else; `twin.scenario` turns them into the plain objects that the rest uses.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from twin.scenario_cluster import Cluster
from twin.scenario_distributions import Count, Instant, Name, Seconds, Section
from twin.scenario_traffic import AnyStream

ENGINE_VERSIONS = ("0.32.0", "0.33.0")
"""Versions of vLLM whose rules the engine follows."""


class Gpu(Section):
    """A GPU that is not in the catalogue, by its data sheet."""

    name: Name
    memory_bytes: Annotated[int, Field(ge=2**30, le=2**42)]
    """Total memory as CUDA reports it."""
    bandwidth: Annotated[float, Field(ge=1e9, le=1e15)]
    """Of memory, in bytes per second."""
    bf16_flops: Annotated[float, Field(ge=1e10, le=1e18)]
    """Dense 16-bit tensor FLOP/s."""
    fp8_flops: Annotated[float, Field(ge=1e10, le=1e18)] | None = None
    """Dense FP8 tensor FLOP/s; None = it has no FP8 units."""
    link_bandwidth: Annotated[float, Field(ge=1e8, le=1e14)] = 32e9
    """To the other GPUs of its replica, in bytes per second and direction."""


def _kind_of_gpu(value: Any) -> str:
    return "[figures]" if isinstance(value, dict | Gpu) else "[name]"


class Hardware(Section):
    """What one replica runs on."""

    gpu: Annotated[
        Annotated[Name, Tag("[name]")] | Annotated[Gpu, Tag("[figures]")],
        Discriminator(_kind_of_gpu),
    ]
    """Name in the catalogue, or the figures of another GPU."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of one replica."""
    dtype: Name = "bfloat16"
    """Type of the weights: float32, bfloat16, float16, fp8, int8 or int4 (the last two weight-only)."""
    step_time: Name | None = None
    """File with a step-time profile, or `roofline` for times computed from data sheets; None = the built-in profile of
    model, GPU, tensor_parallel_size, dtype and engine.kv_cache_dtype."""


class Engine(Section):
    """Arguments of `vllm serve`, in vLLM's names. A default of None is vLLM's own default for the GPU or model."""

    version: Name = ENGINE_VERSIONS[0]
    max_num_seqs: Count | None = None
    max_num_active_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_scheduled_tokens: Count | None = None
    max_model_len: Count | None = None
    block_size: Annotated[int, Field(ge=1, le=4096)] = 16
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    num_gpu_blocks_override: Annotated[int, Field(ge=2, le=10**9)] | None = None
    kv_cache_dtype: Name = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=10**9)] = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    async_scheduling: bool = True
    enforce_eager: bool = False


class Run(Section):
    """What part of virtual time is simulated and measured. Seconds."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    until: Seconds | None = None
    """The run is cut here, requests inside are `unfinished`; None = until the last one has ended."""
    warmup: Instant = 0.0
    """Arrivals before it are left out of the statistics."""
    sample_period: Annotated[float, Field(ge=1e-3, le=10**9)] | None = None
    """Metrics over time (`--out`, `--openmetrics`) are read this often; None = a few hundred times in a run."""
    engine_mode: Literal["fast", "stepped"] = "fast"
    """fast visits only the steps at which something happens, stepped visits all: the same result, as a check."""
    records: bool = True
    """Keep the record of every request; false = count and drop them, so that memory does not grow with the number of
    requests and percentiles are within 0.5 % instead of exact."""


class Document(Section):
    """A whole scenario file."""

    name: Name | None = None
    """None = the name of the file."""
    model: Name
    """Name in the catalogue, or a folder with a config.json."""
    hardware: Hardware
    engine: Engine = Engine()
    policy: Any
    """A preset, vllm-fcfs, vllm-priority, or a mapping; its keys are the policy's own business."""
    traffic: Annotated[list[AnyStream], Field(min_length=1)]
    cluster: Cluster = Cluster()
    objectives: dict[Name, dict[Name, Seconds]] = Field(default={})
    """Tier -> <metric>_<statistic> -> limit in seconds."""
    run: Run = Run()
