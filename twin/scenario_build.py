"""From the keys of a scenario file to plain objects, and the rules that join one key to another.

Each function takes a part of the checked document and `origin`, which knows where things were written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from twin import scenario_schema as schema
from twin.engine.config import EngineConfig
from twin.errors import InputError
from twin.metrics.objectives import parse_objective
from twin.scenario_faults import Origin, unknown
from twin.scheduling import PRESETS, Policy, PolicyConfig, TierConfig, policy_config
from twin.scheduling.orders import ORDERS
from twin.step_time.catalogue import GpuSpec, ModelSpec
from twin.step_time.memory import (
    KV_DTYPE_BYTES,
    MemoryPlan,
    check_one_request_fits,
    kv_blocks,
)
from twin.step_time.profiles import Profile
from twin.step_time.roofline import SOURCE as ROOFLINE
from twin.step_time.trust import foreign_to
from twin.workload.streams import Stream
from twin.workload.trace import TraceStream

STOCK_POLICIES = {"vllm-fcfs": "fcfs", "vllm-priority": "priority"}
"""Modes without a policy of ours -> vLLM's `--scheduling-policy`."""

PRIORITY_TIERS = ("ONLINE", "BATCH", "OFFLINE")
"""Tiers under vllm-priority, whose priority number is their position here."""

GIB = 2**30
MOST_BLOCKS = 50_000_000
"""KV blocks of all replicas together; each takes about 130 bytes of the twin's own memory."""


def policy_of(written: Any, max_model_len: int, origin: Origin) -> tuple[str, PolicyConfig | None]:
    """(name, configuration) of what `policy:` says; no configuration for the stock modes of vLLM."""
    if isinstance(written, str):
        if written in STOCK_POLICIES:
            return written, None
        known = [*PRESETS, *STOCK_POLICIES]
        if written not in PRESETS:
            origin.fail(("policy",), unknown(written, known))
        name = written
    elif isinstance(written, dict):
        name = "custom"
    else:
        origin.fail(
            ("policy",), f"must be a name or a mapping with tiers or a preset, got {written!r}"
        )
    try:
        config = policy_config(written)
        Policy(config, max_model_len, lambda rid: 1)  # an order that does not exist shows here
    except ValueError as error:
        origin.fail(("policy",), str(error).removeprefix("policy: "))
    except (TypeError, OverflowError) as error:
        origin.fail(("policy",), f"a value has the wrong type or size: {error}")
    return name, config


def tiers_taken(name: str, policy: PolicyConfig | None) -> tuple[str, ...] | None:
    """The tiers a request may have; None = any."""
    if policy is not None:
        names = tuple(tier.name for tier in policy.tiers)
        return None if names == ("*",) else names
    return PRIORITY_TIERS if name == "vllm-priority" else None


def model_len_of(engine: schema.Engine, model: ModelSpec, origin: Origin) -> int:
    """engine.max_model_len, the model's own limit if not written."""
    if engine.max_model_len is None:
        return model.max_position
    if engine.max_model_len > model.max_position:
        origin.fail(
            ("engine", "max_model_len"),
            f"must be <= {model.max_position}, the longest context of {model.name}, got {engine.max_model_len}",
        )
    return engine.max_model_len


def engine_of(
    document: schema.Document,
    model: ModelSpec,
    gpu: GpuSpec,
    max_model_len: int,
    policy_name: str,
    origin: Origin,
) -> tuple[EngineConfig, MemoryPlan]:
    """The engine's limits with vLLM's own defaults and checks, and how its memory is shared out."""
    engine, hardware = document.engine, document.hardware
    if engine.version not in schema.ENGINE_VERSIONS:
        known = ", ".join(schema.ENGINE_VERSIONS)
        origin.fail(
            ("engine", "version"), f"{engine.version!r} is not modelled; choose one of {known}"
        )
    if engine.kv_cache_dtype not in ("auto", *KV_DTYPE_BYTES):
        problem = unknown(engine.kv_cache_dtype, ["auto", *KV_DTYPE_BYTES])
        origin.fail(("engine", "kv_cache_dtype"), problem)
    default_tokens, default_seqs = _defaults(gpu)
    max_num_seqs = engine.max_num_seqs or default_seqs
    max_num_batched_tokens = engine.max_num_batched_tokens
    if max_num_batched_tokens is None:
        least = 1 if engine.enable_chunked_prefill else max_model_len
        max_num_batched_tokens = min(max(default_tokens, least), max_num_seqs * max_model_len)
    _check_limits(engine, max_num_seqs, max_num_batched_tokens, max_model_len, origin)
    with _sized(origin):
        memory = kv_blocks(
            model,
            gpu,
            hardware.tensor_parallel_size,
            hardware.dtype,
            engine.kv_cache_dtype,
            engine.gpu_memory_utilization,
            max_num_batched_tokens,
            max_num_seqs,
            engine.block_size,
            engine.enforce_eager,
        )
    blocks = engine.num_gpu_blocks_override or memory.num_gpu_blocks
    check_most_blocks(blocks, document.cluster.replicas, origin)
    with origin.placed("engine", "max_model_len"):
        check_one_request_fits(blocks, engine.block_size, max_model_len)
    config = EngineConfig(
        version=engine.version,
        max_num_seqs=max_num_seqs,
        max_num_active_seqs=engine.max_num_active_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_scheduled_tokens=engine.max_num_scheduled_tokens,
        max_model_len=max_model_len,
        block_size=engine.block_size,
        num_gpu_blocks=blocks,
        enable_prefix_caching=engine.enable_prefix_caching,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=engine.long_prefill_token_threshold_adaptive,
        scheduler_reserve_full_isl=engine.scheduler_reserve_full_isl,
        watermark=float(engine.watermark),
        async_scheduling=engine.async_scheduling,
        scheduling_policy=STOCK_POLICIES.get(policy_name, "fcfs"),
    )
    return config, memory


SIZING = ("model", "hardware", "engine")
"""Sections that decide what fits on a GPU."""


@contextmanager
def _sized(origin: Origin) -> Iterator[None]:
    """Errors from inside are said of section hardware, with every option on the command line that has a part in it."""
    try:
        yield
    except InputError as error:
        place = origin.place(("hardware",))
        options = [text for key, text in origin.overrides.items() if key[:1] and key[0] in SIZING]
        place = " with ".join([place, *(text for text in options if text not in place)])
        raise InputError(f"{place}: {error}") from None


def check_most_blocks(blocks: int, replicas: int, origin: Origin) -> None:
    """Refuse more KV blocks than the twin's own memory holds."""
    if blocks * replicas > MOST_BLOCKS:
        origin.fail(
            ("engine", "num_gpu_blocks_override"),
            f"{blocks} KV blocks on each of {replicas} replicas are more than the {MOST_BLOCKS} that fit "
            "in memory here; use fewer replicas, fewer blocks or a larger engine.block_size",
        )


def _defaults(gpu: GpuSpec) -> tuple[int, int]:
    """Defaults of vLLM 0.32, (max_num_batched_tokens, max_num_seqs) for an API server on this GPU."""
    if gpu.memory_bytes >= 160 * GIB:
        return 16384, 1024
    if gpu.memory_bytes >= 70 * GIB and "a100" not in gpu.name.lower():
        return 8192, 1024
    return 2048, 256


BLOCK_MULTIPLE = 16
"""vLLM 0.32's FlashAttention takes multiples of it; FlashInfer 16, 32 and 64."""


def _check_limits(
    engine: schema.Engine,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    origin: Origin,
) -> None:
    """The rules by which vLLM refuses to start, and one by which a request would wait for ever."""

    def refuse(key: str, value: int, relation: str, other: str, bound: int, fix: str) -> NoReturn:
        origin.fail(("engine", key), f"must be {relation} {other} ({bound}), got {value}; {fix}")

    if engine.block_size % BLOCK_MULTIPLE:
        below = engine.block_size // BLOCK_MULTIPLE * BLOCK_MULTIPLE
        origin.fail(
            ("engine", "block_size"),
            f"must be a multiple of {BLOCK_MULTIPLE}, as vLLM's attention kernels on GPUs take it, got "
            f"{engine.block_size}; choose {max(below, BLOCK_MULTIPLE)}",
        )
    if max_num_batched_tokens < max_num_seqs:
        refuse(
            "max_num_batched_tokens", max_num_batched_tokens, ">=", "max_num_seqs", max_num_seqs,
            "every running request takes a token a step: raise it or lower max_num_seqs",
        )  # fmt: skip
    active = engine.max_num_active_seqs
    if active is not None and active > max_num_seqs:
        refuse(
            "max_num_active_seqs", active, "<=", "max_num_seqs", max_num_seqs,
            "it limits what runs within the slots: lower it or raise max_num_seqs",
        )  # fmt: skip
    threshold = engine.long_prefill_token_threshold
    if threshold > max_model_len:
        refuse(
            "long_prefill_token_threshold", threshold, "<=", "max_model_len", max_model_len,
            "no prompt is longer: lower it, or 0 for no threshold",
        )  # fmt: skip
    if engine.long_prefill_token_threshold_adaptive and not threshold:
        origin.fail(
            ("engine", "long_prefill_token_threshold_adaptive"),
            "does nothing while long_prefill_token_threshold is 0; set a threshold or leave it out",
        )
    scheduled = engine.max_num_scheduled_tokens
    if scheduled is not None and scheduled > max_num_batched_tokens:
        refuse(
            "max_num_scheduled_tokens", scheduled, "<=", "max_num_batched_tokens", max_num_batched_tokens,
            "the model runner takes no more: lower it",
        )  # fmt: skip
    if not engine.enable_chunked_prefill:
        key = "max_num_batched_tokens" if scheduled is None else "max_num_scheduled_tokens"
        tokens = max_num_batched_tokens if scheduled is None else scheduled
        if tokens < max_model_len:
            refuse(
                key, tokens, ">=", "max_model_len", max_model_len,
                "without chunked prefill a longer prompt would wait for ever: raise it, lower max_model_len or set "
                "enable_chunked_prefill: true",
            )  # fmt: skip


def check_objectives(document: schema.Document, traffic: Sequence[Stream], origin: Origin) -> None:
    """Every objective must name a tier that some request can have, and a statistic that exists."""
    tiers = tiers_of(traffic)
    own = [stream for stream in traffic if isinstance(stream, TraceStream) and "tier" in stream.own]
    anything = any(stream.tiers_taken is None for stream in own)
    tiers += [tier for stream in own for tier in stream.tiers_taken or ()]
    for tier, limits in document.objectives.items():
        if tier not in tiers and not anything:
            origin.fail(("objectives", tier), f"no stream has this tier: {unknown(tier, tiers)}")
        for name in limits:
            with origin.placed("objectives", tier, name, named=True):
                parse_objective(name)


BEYOND = 1.1
"""So many times the estimate of KV blocks are more than its error explains; it lies within 3 % of vLLM's counts."""


def warnings_of(
    document: schema.Document,
    policy_name: str,
    policy: PolicyConfig | None,
    traffic: Sequence[Stream],
    profile: Profile,
    model: ModelSpec,
    memory: MemoryPlan,
) -> Iterator[str]:
    """What is allowed but probably not meant, one sentence each."""
    tiers = tiers_of(traffic)
    blind = policy_name == "vllm-fcfs" or (policy is not None and len(policy.tiers) == 1)
    if blind and len(tiers) > 1:
        admission = document.cluster.admission
        at_gateway = admission is not None and (admission.order or admission.tiers)
        where = " by the engines (the gateway tells them apart)" if at_gateway else ""
        yield (
            f"tiers have no effect under policy {policy_name}: {', '.join(tiers)} are served alike{where}; "
            "priority, tiered or vllm-priority tell them apart"
        )
    if policy is not None:
        yield from _idle_keys(policy)
    hardware, override = document.hardware, document.engine.num_gpu_blocks_override
    if override is not None and override > BEYOND * memory.num_gpu_blocks:
        yield (
            f"engine.num_gpu_blocks_override {override:,}: about {memory.num_gpu_blocks:,} blocks fit on "
            f"{memory.gpu} by the estimate of twin explain; vLLM would run out of memory"
        )
    if hardware.step_time == ROOFLINE:
        yield "the step times are computed from data sheets (roofline): not validated"
    for unlike in foreign_to(
        profile.provenance,
        model,
        hardware.gpu if isinstance(hardware.gpu, str) else hardware.gpu.name,
        hardware.tensor_parallel_size,
        hardware.dtype,
        document.engine.kv_cache_dtype,
    ):
        measured, ours = unlike.split(", not ")
        yield f"the step times were measured with {measured}, the scenario says {ours}"


def _idle_keys(policy: PolicyConfig) -> Iterator[str]:
    """Keys of a policy that were given a value and change nothing, because what they adjust is not in use."""
    default, plain = PolicyConfig(tiers=(TierConfig(name="*"),)), TierConfig(name="*")
    custom = any(tier.order not in ORDERS for tier in policy.tiers)
    if policy.weights and not custom and all(tier.order != "fair" for tier in policy.tiers):
        yield "policy.weights changes nothing: no tier has order fair"
    if policy.estimator == "oracle":
        for key in ("quantile", "window", "initial"):
            if getattr(policy, key) != getattr(default, key):
                yield f"policy.{key} changes nothing: the estimator oracle learns nothing"
    for rank, tier in zip(policy.ranks, policy.tiers, strict=True):
        if tier.mix != plain.mix and not tier.groups:
            yield f"mix of tier {tier.name} changes nothing: it has no groups"
        if tier.ttft_target is not None and tier.order in ORDERS and tier.order != "edf":
            yield f"ttft_target of tier {tier.name} changes nothing: its order is {tier.order}, not edf"
        if tier.promote_after is not None and rank == 0:
            yield f"promote_after of tier {tier.name} changes nothing: nothing ranks above it"


def tiers_of(traffic: Sequence[Stream]) -> list[str]:
    """Tiers that requests have by the scenario; rows of a trace may have further ones."""
    return list(dict.fromkeys(tier for stream in traffic for tier in stream.clients.tiers))
