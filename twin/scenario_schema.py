"""The scenario file as data: which keys there are, of what type, within which bounds.

These models mirror the file and nothing else; `twin.scenario` turns them into the plain objects that the rest uses.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

ENGINE_VERSIONS = ("0.32.0",)
"""Versions of vLLM whose rules the engine follows."""

Count = Annotated[int, Field(ge=1, le=10**9)]
Tokens = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=10**9)]
Instant = Annotated[float, Field(ge=0, le=10**9)]
Rate = Annotated[float, Field(ge=1e-6, le=1e6)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[dict[Name, Share], Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class Hardware(_Section):
    """What one replica runs on."""

    gpu: Name
    """Name in the catalogue."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of one replica."""
    dtype: Name = "bfloat16"
    """Type of weights and activations."""
    step_time: Name | None = None
    """File with a step-time profile; None = the built-in one of model, GPU, tensor_parallel_size and dtype."""


class Engine(_Section):
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


class Arrivals(_Section):
    """When requests (or conversations) come."""

    process: Literal["poisson", "constant"]
    rate: Rate
    """Per second."""


class FixedLength(_Section):
    """Always as many tokens."""

    fixed: Tokens


class UniformLength(_Section):
    """Between two numbers of tokens, both included."""

    uniform: Annotated[list[Tokens], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _ordered(self) -> "UniformLength":
        low, high = self.uniform
        if low > high:
            raise ValueError(
                f"the lower bound {low} is above the upper bound {high}; write [low, high]"
            )
        return self


def _kind_of_length(value: Any) -> str:
    written = (
        value if isinstance(value, Mapping) else vars(value) if isinstance(value, BaseModel) else {}
    )
    return "[uniform]" if "uniform" in written else "[fixed]"


Length = Annotated[
    Annotated[FixedLength, Tag("[fixed]")] | Annotated[UniformLength, Tag("[uniform]")],
    Discriminator(_kind_of_length),
]


class Timeouts(_Section):
    """When clients leave, in seconds after arrival; None = never."""

    ttft: Seconds | None = None
    """Without a first token."""
    total: Seconds | None = None
    """Without a complete reply."""


class Sessions(_Section):
    """Conversations of several turns."""

    turns: Annotated[int, Field(ge=1, le=10_000)]
    system_prompt_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Shared by all conversations of the stream."""
    think_time: Instant = 0.0
    """Seconds from the end of a reply to the next turn."""


class _Stream(_Section):
    tier: Name | None = None
    tiers: Shares | None = None
    tenant: Name | None = None
    tenants: Shares | None = None
    max_tokens: Tokens | None = None
    timeouts: Timeouts = Timeouts()
    requests: Count | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "_Stream":
        for one, many in (("tier", "tiers"), ("tenant", "tenants")):
            shares = getattr(self, many)
            if shares is None:
                continue
            if getattr(self, one) is not None:
                raise ValueError(f"has both {one} and {many}; write one of them")
            total = sum(shares.values())
            if abs(total - 1) > 1e-6:
                raise ValueError(f"the shares in {many} add up to {total:.6g}, must be 1")
        return self


class TraceStream(_Stream):
    """Requests of a file."""

    trace: Name
    """Path, relative to the scenario file."""
    speedup: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Instants of the file are divided by it."""


class SyntheticStream(_Stream):
    """Requests of distributions; `requests` or `duration` ends them."""

    arrivals: Arrivals
    prompt_tokens: Length
    output_tokens: Length
    duration: Seconds | None = None
    sessions: Sessions | None = None

    @model_validator(mode="after")
    def _ends(self) -> "SyntheticStream":
        if self.requests is None and self.duration is None:
            raise ValueError("would never end; give requests (how many) or duration (seconds)")
        return self


def _kind_of_stream(value: Any) -> str:
    written = (
        value if isinstance(value, Mapping) else vars(value) if isinstance(value, BaseModel) else {}
    )
    return "[trace]" if "trace" in written else "[synthetic]"


Stream = Annotated[
    Annotated[TraceStream, Tag("[trace]")] | Annotated[SyntheticStream, Tag("[synthetic]")],
    Discriminator(_kind_of_stream),
]


class Cluster(_Section):
    """Where requests go."""

    replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    router: Name = "least_connections"
    """Name in twin.cluster.router.ROUTERS."""


class Run(_Section):
    """What part of virtual time is simulated and measured. Seconds."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    until: Seconds | None = None
    """The run is cut here, requests inside are `unfinished`; None = until the last one has ended."""
    warmup: Instant = 0.0
    """Arrivals before it are left out of the statistics."""


class Document(_Section):
    """A whole scenario file."""

    name: Name | None = None
    """None = the name of the file."""
    model: Name
    """Name in the catalogue, or a folder with a config.json."""
    hardware: Hardware
    engine: Engine = Engine()
    policy: Any
    """A preset, vllm-fcfs, vllm-priority, or a mapping; its keys are the policy's own business."""
    traffic: Annotated[list[Stream], Field(min_length=1)]
    cluster: Cluster = Cluster()
    objectives: dict[Name, dict[Name, Seconds]] = {}
    """Tier -> <metric>_<statistic> -> limit in seconds."""
    run: Run = Run()
