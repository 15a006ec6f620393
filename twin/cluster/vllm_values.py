"""Which values do vLLM's arguments take? Read off its parser and its configuration classes.

A test compares the lists with the installed vLLM. Arguments whose values grow with every version (backends of kernels,
methods of speculation) are not among them.
"""

import json
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from twin.cluster.vllm_arguments import VERSIONS

_FLAGS = """
    aggregate-engine-logging allow-credentials allow-deprecated-quantization async-scheduling
    cohere-is-reasoning-model cudagraph-metrics data-parallel-external-lb data-parallel-hybrid-lb
    data-parallel-multi-port-external-lb dcp-q-replicate disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-stats
    disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log
    enable-auto-tool-choice enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator
    enable-dbo enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel
    enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage
    enable-hc-sp enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests
    enable-logging-iteration-details enable-lora enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds
    enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs enable-per-request-metrics
    enable-prefix-caching enable-prompt-embeds enable-prompt-tokens-details enable-request-id-headers
    enable-return-routed-experts enable-scale-out enable-server-load-tracking enable-shm-tensor-arena
    enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint enable-tower-connector-lora
    enable-trace-replay enforce-eager exclude-tools-when-tool-choice-none fail-on-environ-validation
    fully-sharded-loras grpc headless interleave-mm-strings jit-monitor-verbose kv-cache-metrics
    kv-sharing-fast-prefill language-model-only log-error-stack long-prefill-token-threshold-adaptive
    mm-device-do-normalize mm-encoder-only numa-bind ray-workers-use-nsight return-sampling-mask
    return-tokens-as-token-ids scheduler-reserve-full-isl skip-mm-profiling skip-tokenizer-init
    sleep-mode-offload-cudagraph specialize-active-lora swa-bounded-replay tokens-only trust-remote-code
    trust-request-chat-template trust-request-mm-kwargs use-fp64-gumbel use-replayssm use-tqdm-on-load
"""

FLAGS = frozenset(_FLAGS.split())
"""Arguments without a value."""

_WHOLE = """
    api-server-count block-size cp-kv-cache-interleave-size cpu-distributed-timeout-seconds data-parallel-rank
    data-parallel-rpc-port data-parallel-size data-parallel-size-local data-parallel-start-rank
    data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold
    dcp-kv-cache-interleave-size decode-context-parallel-size distributed-timeout-seconds
    dp-supervisor-probe-failure-threshold dp-sync-interval elastic-ep-max-dp-size grpc-port
    h11-max-header-count h11-max-incomplete-event-size long-prefill-token-threshold mamba-block-size
    mamba-cache-philox-rounds master-port max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs
    max-lora-cls-labels max-loras max-num-active-seqs max-num-queued-reqs max-num-seqs
    max-parallel-loading-workers mm-shm-cache-max-object-size-mb nnodes node-rank num-gpu-blocks-override
    offload-group-size offload-num-in-group offload-prefetch-step pipeline-parallel-size port
    prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval prefix-match-unit
    renderer-num-workers replayssm-buffer-len safetensors-prefetch-num-threads seed shutdown-timeout
    spec-tokens sse-keep-alive-interval ssl-cert-reqs stream-interval tensor-parallel-size ubatch-size
"""

WHOLE = frozenset(_WHOLE.split())
"""Arguments whose value is a whole number."""

_READABLE = """
    kv-cache-memory-bytes max-model-len max-num-batched-tokens max-num-queued-tokens max-num-scheduled-tokens
    safetensors-prefetch-block-size
"""

READABLE = frozenset(_READABLE.split())
"""The same, also as 32k (thousands) or 32K (times 1,024)."""

_NUMBERS = """
    cpu-offload-gb device-memory-utilization dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
    gpu-memory-utilization kv-cache-metrics-sample kv-offloading-size mm-encoder-fp8-scale-save-margin
    mm-ipc-gpu-memory-gb mm-processor-cache-gb video-pruning-rate watermark
"""

NUMBERS = frozenset(_NUMBERS.split())
"""Arguments whose value is a number."""

_JSON = """
    allowed-headers allowed-methods allowed-origins attention-config aux-output-config compilation-config
    custom-histogram-buckets default-chat-template-kwargs default-mm-loras diffusion-config ec-manager-config
    ec-transfer-config engram-config eplb-config fault-tolerance-config ir-op-priority kernel-config
    kv-events-config kv-transfer-config limit-mm-per-prompt logging-config media-io-kwargs mm-processor-kwargs
    model-class-overrides override-generation-config pooler-config profiler-config quantization-config
    reasoning-config speculative-config structured-outputs-config watermark-config weight-transfer-config
"""

JSON = frozenset(_JSON.split())
"""Arguments whose value is JSON."""

_MAY_BE_NONE = """
    cpu-distributed-timeout-seconds custom-histogram-buckets default-mm-loras diffusion-config
    distributed-timeout-seconds ec-transfer-config engram-config grpc-port kv-cache-memory-bytes
    kv-events-config kv-offloading-size kv-transfer-config mamba-block-size max-cpu-loras max-log-len
    max-lora-cls-labels max-num-active-seqs max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens
    max-parallel-loading-workers mm-processor-kwargs num-gpu-blocks-override pooler-config
    prefix-cache-retention-interval prefix-match-unit quantization-config reasoning-config speculative-config
    video-pruning-rate watermark-config weight-transfer-config
    dcp-comm-backend mm-encoder-attn-dtype quantization safetensors-load-strategy
"""

MAY_BE_NONE = frozenset(_MAY_BE_NONE.split())
"""Those that also take None or nothing."""

_CHOICES = {
    "anthropic-disabled-thinking-effort": "auto high low max medium none xhigh",
    "chat-template-content-format": "auto openai string",
    "convert": "auto classify embed none",
    "dcp-comm-backend": "a2a ag_rs",
    "dtype": "auto bfloat16 float float16 float32 half",
    "expert-placement-strategy": "linear round_robin",
    "fingerprint-mode": "custom full hash none",
    "jit-monitor-mode": "error warn",
    "kv-cache-dtype": (
        "auto bfloat16 float16 fp8 fp8_ds_mla fp8_e4m3 fp8_e5m2 fp8_inc fp8_per_token_head "
        "int4_per_token_head int8_per_token_head nvfp4 nvfp4_4over6 nvfp4_ds_mla turboquant_3bit_nc "
        "turboquant_4bit_nc turboquant_k3v4_nc turboquant_k8v4 ultraquant_4bit"
    ),
    "kv-offloading-backend": "lmcache native",
    "logprobs-mode": "processed_logits processed_logprobs raw_logits raw_logprobs",
    "lora-dtype": "auto bfloat16 float16",
    "mamba-cache-dtype": "auto bfloat16 float16 float32",
    "mamba-cache-mode": "align none",
    "mamba-ssm-cache-dtype": "auto bfloat16 float16 float32",
    "mm-encoder-attn-dtype": "fp8",
    "mm-encoder-tp-mode": "data weights",
    "mm-hasher-algorithm": "blake3 sha256 sha512",
    "mm-processor-cache-type": "lru shm",
    "mm-processor-device": "auto cpu",
    "mm-tensor-ipc": "direct_rpc torch_shm",
    "offload-backend": "auto prefetch uva",
    "per-request-spec-decode-metrics": "detailed none summary",
    "performance-mode": "balanced interactivity throughput",
    "prefix-caching-hash-algo": "sha256 sha256_cbor xxhash xxhash_cbor",
    "runner": "auto draft generate pooling",
    "safetensors-load-strategy": "eager lazy prefetch torchao",
    "scheduling-policy": "fcfs priority",
    "tool-strict-level": "auto function parameter",
    "uvicorn-log-level": "critical debug error info trace warning",
    "video-pruning-method": "evs vidcom2",
}  # fmt: skip

CHOICES: Mapping[str, tuple[str, ...]] = {
    name: tuple(words.split()) for name, words in _CHOICES.items()
} | {
    "quantization": (
        "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8", "experts_int8",
        "fbgemm_fp8", "fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "fp_quant", "gpt_oss_mxfp4", "gptq",
        "gptq_marlin", "humming", "inc", "int8_per_channel_weight_only", "modelopt", "modelopt_fp4", "modelopt_mixed",
        "modelopt_mxfp8", "moe_wna16", "mxfp4", "mxfp8", "nvfp4_per_token", "online", "quark", "torchao",
    ),
    "load-format": (
        "auto", "dummy", "fastsafetensors", "hf", "instanttensor", "ipc_cache", "mistral", "modelexpress", "npcache",
        "pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state", "tensorizer",
    ),
}  # fmt: skip
"""Arguments with a list of values -> the values in 0.32."""

SETTLED = ("dtype", "scheduling-policy", "uvicorn-log-level")
"""Those that are judged whatever the version: types, policies and levels, not methods that each version adds to."""

_AT_LEAST_1 = """
    block-size data-parallel-rpc-port data-parallel-size decode-context-parallel-size dp-sync-interval
    elastic-ep-max-dp-size mamba-block-size max-loras max-lora-cls-labels max-num-active-seqs max-num-batched-tokens
    max-num-scheduled-tokens max-num-seqs max-parallel-loading-workers nnodes offload-num-in-group
    pipeline-parallel-size prefill-context-parallel-size prefill-schedule-interval prefix-match-unit
    replayssm-buffer-len safetensors-prefetch-block-size safetensors-prefetch-num-threads stream-interval
    tensor-parallel-size
"""

_AT_LEAST_0 = """
    cpu-offload-gb data-parallel-rank data-parallel-size-local dbo-decode-token-threshold dbo-prefill-token-threshold
    long-prefill-token-threshold max-num-queued-reqs max-num-queued-tokens mm-ipc-gpu-memory-gb mm-processor-cache-gb
    mm-shm-cache-max-object-size-mb node-rank offload-group-size offload-prefetch-step prefix-cache-retention-interval
    shutdown-timeout ubatch-size video-pruning-rate watermark
"""

LEAST: Mapping[str, float] = {
    **dict.fromkeys(_AT_LEAST_1.split(), 1),
    **dict.fromkeys(_AT_LEAST_0.split(), 0),
    "max-logprobs": -1,
    "max-model-len": -1,
    "port": 1,
}
"""Argument -> the least value."""

ABOVE_0 = (
    "device-memory-utilization", "gpu-memory-utilization", "kv-cache-metrics-sample",
    "mm-encoder-fp8-scale-save-margin",
)  # fmt: skip
"""Arguments whose value is above 0."""

MOST: Mapping[str, float] = {
    "device-memory-utilization": 1,
    "gpu-memory-utilization": 1,
    "kv-cache-metrics-sample": 1,
    "data-parallel-rpc-port": 65535,
    "port": 65535,
}
"""Argument -> the most."""

BELOW_1 = ("video-pruning-rate", "watermark")
"""Arguments whose value is below 1."""

MEANT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What people write for --dtype -> what it is called."""


def value_problem(argument: str, value: str | None, version: str | None = None) -> str | None:
    """Why `vllm serve` does not start with a value of an argument; None = it does, or nobody here knows.

    `value` is None where there is none. `version` is vLLM's; None where it is not known.
    """
    name = argument.removeprefix("no-")
    if name in FLAGS:
        return None if value is None else f"takes no value, got {value!r}"
    known = (name in names for names in (WHOLE, READABLE, NUMBERS, JSON, CHOICES))
    if name != argument or not any(known):
        return None
    if value is None:
        return "needs a value"
    if value in ("", "None") and name in MAY_BE_NONE:
        return None
    if name in CHOICES:
        return _not_among(name, value, version)
    if name in JSON:
        return None if _is_json(value) else f"must be JSON, got {value!r}"
    return _no_number(name, value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _not_among(name: str, value: str, version: str | None) -> str | None:
    choices = CHOICES[name]
    if value in choices or (version not in (None, VERSIONS[0]) and name not in SETTLED):
        return None
    meant = MEANT.get(value) if name == "dtype" else None
    near = [meant] if meant else get_close_matches(value, choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"must be one of {', '.join(choices)}, got {value!r}{hint}"


def _no_number(name: str, value: str) -> str | None:
    if name == "max-model-len" and value.strip().lower() == "auto":
        return None
    reader: Callable[[str], float] = float
    wanted = "a number"
    if name in WHOLE:
        reader, wanted = int, "a whole number"
    elif name in READABLE:
        reader, wanted = readable_int, "a whole number, or one like 32k or 32K"
    try:
        number = reader(value)
    except ValueError:
        return f"must be {wanted}, got {value!r}"
    least, most = LEAST.get(name), MOST.get(name)
    bounds = []
    if least is not None:
        bounds.append((number >= least, f">= {least:g}"))
    if name in ABOVE_0:
        bounds.append((number > 0, "> 0"))
    if most is not None:
        bounds.append((number <= most, f"<= {most:g}"))
    if name in BELOW_1:
        bounds.append((number < 1, "< 1"))
    if all(holds for holds, _ in bounds):
        return None
    return f"must be {' and '.join(text for _, text in bounds)}, got {value}"


def readable_int(text: str) -> int:
    """The number that vLLM reads in 32k (thousands), 32K (times 1,024). Raises ValueError."""
    text = text.strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])", text, re.IGNORECASE | re.ASCII)
    if found is None:
        return int(text)
    number, unit = found.groups()
    power = "kmgt".index(unit.lower()) + 1
    return int(float(number) * 1000.0**power) if unit.islower() else int(number) << 10 * power
