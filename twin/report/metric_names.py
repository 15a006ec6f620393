"""Every metric that is written for Prometheus: its name, kind and buckets.

Names that begin with `vllm:` are vLLM's own, with its labels and buckets, so that dashboards and rules made for a
server work on simulated history. Those that begin with `twin:` tell what vLLM does not: figures by tier, and what the
time and the KV pages were used for. docs/metrics.md defines all of them.
"""

from dataclasses import dataclass
from typing import Literal

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `most`, as vLLM's buckets of tokens."""
    numbers = (digit * 10**n for n in range(10) for digit in (1, 2, 5))
    return tuple(float(number) for number in numbers if number <= most)


Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. A counter's samples have `_total` behind its name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Beside model_name and engine, which all have."""
    buckets: tuple[float, ...] | None = None
    """Of a histogram; None = 1, 2, 5, 10, 20, ... up to max_model_len."""

    @property
    def exposed(self) -> str:
        """The name under which Prometheus knows it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


VLLM = (
    Metric("vllm:num_requests_running", "gauge", "Requests that run."),
    Metric("vllm:num_requests_waiting", "gauge", "Requests that wait."),
    Metric("vllm:num_requests_waiting_by_reason", "gauge", "Requests that wait.", ("reason",)),
    Metric("vllm:kv_cache_usage_perc", "gauge", "KV blocks in use; 1 is all."),
    Metric(
        "vllm:cache_config_info", "gauge", "How the KV cache is laid out.",
        ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
    ),
    Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    Metric("vllm:num_preemptions", "counter", "Preemptions."),
    Metric("vllm:prompt_tokens", "counter", "Prompt tokens of requests that have a first token."),
    Metric("vllm:generation_tokens", "counter", "Tokens generated."),
    Metric("vllm:request_success", "counter", "Requests that ended.", ("finished_reason",)),
    Metric("vllm:time_to_first_token_seconds", "histogram", "TTFT.", buckets=TTFT_BUCKETS),
    Metric("vllm:inter_token_latency_seconds", "histogram", "ITL.", buckets=TOKEN_GAP_BUCKETS),
    Metric(
        "vllm:request_time_per_output_token_seconds", "histogram", "TPOT; 0 for a reply of one token.",
        buckets=TOKEN_GAP_BUCKETS,
    ),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "E2E.", buckets=LATENCY_BUCKETS),
    Metric("vllm:request_queue_time_seconds", "histogram", "Queue time.", buckets=LATENCY_BUCKETS),
    Metric("vllm:request_prefill_time_seconds", "histogram", "Prefill time.", buckets=LATENCY_BUCKETS),
    Metric(
        "vllm:request_decode_time_seconds", "histogram", "First to last token.", buckets=LATENCY_BUCKETS
    ),
    Metric(
        "vllm:request_inference_time_seconds", "histogram", "Start to last token.", buckets=LATENCY_BUCKETS
    ),
    Metric("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request."),
    Metric("vllm:request_generation_tokens", "histogram", "Output tokens of a request."),
    Metric(
        "vllm:request_num_preemptions", "histogram", "Preemptions of a request.", buckets=PREEMPTION_BUCKETS
    ),
    Metric(
        "vllm:request_prefill_kv_computed_tokens", "histogram", "Prompt tokens that were not in the prefix cache."
    ),
)  # fmt: skip
"""vLLM's."""

TWIN = (
    Metric(
        "twin:model_info", "gauge", "What runs where.",
        ("gpu", "tensor_parallel_size", "dtype", "policy", "policy_fingerprint", "engine_version"),
    ),
    Metric("twin:gpu_memory_bytes", "gauge", "Memory of one GPU by what it is for.", ("use",)),
    Metric("twin:num_requests_held", "gauge", "Requests that the policy holds for a batch.", ("tier",)),
    Metric("twin:num_requests_ready", "gauge", "Other requests that wait.", ("tier",)),
    Metric("twin:num_requests_running", "gauge", "Requests that run.", ("tier",)),
    Metric("twin:policy_pressure", "gauge", "How much the first tier queues; 1 is full pressure."),
    Metric("twin:policy_info", "gauge", "Which policy rules.", ("policy", "policy_fingerprint", "engine_version")),
    Metric("twin:requests_submitted", "counter", "Requests handed to the policy.", ("tier",)),
    Metric("twin:released_tokens", "counter", "Prompt and expected output tokens of released batches.", ("tier",)),
    Metric("twin:batching_wait_seconds", "counter", "Time that released requests were held.", ("tier",)),
    Metric("twin:preemptions", "counter", "Preemptions by the victim's tier.", ("tier", "cause")),
    Metric("twin:timeouts", "counter", "Requests whose deadline passed.", ("tier", "reason")),
    Metric("twin:kv_blocks_used", "gauge", "KV blocks in use."),
    Metric("twin:num_requests_running_by_length", "gauge", "Requests that run.", ("length",)),
    Metric("twin:kv_tokens_held_by_length", "gauge", "Token slots in their KV blocks.", ("length",)),
    Metric("twin:kv_tokens_empty_by_length", "gauge", "Those of them without a computed token.", ("length",)),
    Metric("twin:released_batches", "counter", "Batches that a hold has released.", ("tier",)),
    Metric("twin:released_requests", "counter", "Requests in these batches.", ("tier",)),
    Metric("twin:kv_cache_wasted_perc", "gauge", "KV token slots held but empty; 1 is all slots."),
    Metric("twin:kv_cache_cached_perc", "gauge", "KV blocks free but findable by the prefix cache; 1 is all."),
    Metric("twin:engine_steps", "counter", "Steps of the engine."),
    Metric("twin:engine_busy_seconds", "counter", "Time of its steps."),
    Metric("twin:prefill_tokens", "counter", "Tokens computed that were not decodes."),
    Metric("twin:decode_tokens", "counter", "Tokens computed one a request at the end of its text."),
    Metric("twin:padded_tokens", "counter", "Tokens computed only to reach a captured size."),
    Metric("twin:recomputed_tokens", "counter", "Tokens computed again after a preemption."),
    Metric("twin:requests", "counter", "Requests that ended.", ("tier", "outcome")),
    Metric("twin:good_requests", "counter", "Requests that met every objective of their tier.", ("tier",)),
    Metric("twin:time_to_first_token_seconds", "histogram", "TTFT.", ("tier",), TTFT_BUCKETS),
    Metric("twin:request_queue_time_seconds", "histogram", "Queue time.", ("tier",), TTFT_BUCKETS),
    Metric(
        "twin:request_time_per_output_token_seconds", "histogram", "TPOT.", ("tier",), TOKEN_GAP_BUCKETS
    ),
    Metric("twin:e2e_request_latency_seconds", "histogram", "E2E.", ("tier",), LATENCY_BUCKETS),
)  # fmt: skip
"""Ours."""

SERVER = (
    Metric("twin:policy_errors", "counter", "Failures of the policy; after one, arrival order rules."),
    Metric("twin:bad_hints", "counter", "Fields of vllm_xargs that made no sense.", ("field",)),
    Metric("twin:scheduler_requests", "gauge", "Requests in the tables of the scheduler plug-in."),
)  # fmt: skip
"""Ours, of a real server only."""
