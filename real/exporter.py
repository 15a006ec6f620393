"""What the scheduler tells Prometheus by tier, on the server's own /metrics.

vLLM's scheduler runs in a process of its own, whose metrics reach the server's /metrics through files: the environment
variable PROMETHEUS_MULTIPROC_DIR must name an empty folder when vLLM starts, as `twin-real serve` sees to. Names,
labels and buckets are those of twin.report.metric_names, which the simulator writes, too.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client

from twin.metrics.gauges import CAUSES, LENGTH_GROUPS, TIMEOUTS, length_group, tier_counts
from twin.report.metric_names import SERVER, TWIN, Metric
from twin.scheduling import PolicyConfig

PERIOD_S = 0.5
"""Gauges are written this often at most, and when the last request has left."""

OUTCOMES = {"finished": "completed", "client": "aborted", "error": "aborted"}
"""Why a request left -> outcome; time-outs beside them."""

_METRICS = {metric.name: metric for metric in (*TWIN, *SERVER)}
_CLASSES = {
    "counter": prometheus_client.Counter,
    "histogram": prometheus_client.Histogram,
}


def is_visible() -> bool:
    """Whether metrics of this process reach the server's /metrics."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


class Exporter:
    """The metrics of one scheduler, in a registry of their own."""

    def __init__(
        self,
        config: PolicyConfig,
        fingerprint: str,
        name: str,
        version: str,
        model: str,
        engine: str,
    ) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._base = {"model_name": model, "engine": engine}
        self._tiers = [tier.name for tier in config.tiers]
        self._families: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._last: dict[tuple[str, ...], float] = {}
        self._next_write = 0.0
        info = {"policy": name, "policy_fingerprint": fingerprint, "engine_version": version}
        self._child("twin:policy_info", *info.values()).set(1)
        self._show_all_series()

    def _show_all_series(self) -> None:
        """Series that exist from the start, so that a rate over the first event is not missing."""
        for tier in self._tiers:
            for metric in ("held", "ready", "running"):
                self._child(f"twin:num_requests_{metric}", tier).set(0)
            for outcome in ("completed", "timed_out", "aborted"):
                self._child("twin:requests", tier, outcome)
            for reason in TIMEOUTS:
                self._child("twin:timeouts", tier, reason)
            for cause in CAUSES:
                self._child("twin:preemptions", tier, cause)
            for name in ("released_batches", "released_requests", "released_tokens"):
                self._child(f"twin:{name}", tier)
            self._child("twin:batching_wait_seconds", tier)
            self._child("twin:requests_submitted", tier)
            for name in (
                "time_to_first_token_seconds",
                "request_queue_time_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
            ):
                self._child(f"twin:{name}", tier)
        self._child("twin:policy_errors")

    # --- what happens to a request --------------------------------------------------------

    def first_token(self, tier: str, ttft_s: float) -> None:
        """Its first token is known."""
        self._child("twin:time_to_first_token_seconds", tier).observe(ttft_s)

    def gone(self, tier: str, reason: str) -> None:
        """It has left: finished, client, error or timeout:ttft, timeout:total."""
        outcome = "timed_out" if reason.startswith("timeout:") else OUTCOMES[reason]
        self._child("twin:requests", tier, outcome).inc()

    def completed(self, tier: str, queue_s: float, e2e_s: float, tpot_s: float | None) -> None:
        """Its durations; a reply of one token has no time per output token."""
        self._child("twin:request_queue_time_seconds", tier).observe(queue_s)
        self._child("twin:e2e_request_latency_seconds", tier).observe(e2e_s)
        if tpot_s is not None:
            self._child("twin:request_time_per_output_token_seconds", tier).observe(tpot_s)

    def bad_hint(self, field: str) -> None:
        """A field of vllm_xargs made no sense."""
        self._child("twin:bad_hints", field).inc()

    def policy_failed(self) -> None:
        """The policy raised; arrival order rules from now on."""
        self._child("twin:policy_errors").inc()

    # --- the state now --------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Whether it is time to write the gauges."""
        return now >= self._next_write

    def write(self, now: float, stats: Mapping[str, Any], state: Callable[[], "State"]) -> None:
        """Write the gauges and what the policy counts; `stats` is the policy's own, empty after it has failed."""
        self._next_write = now + PERIOD_S
        for tier, counts in stats.get("tiers", {}).items():
            self._write_tier(tier, counts)
        if "pressure" in stats:
            self._child("twin:policy_pressure").set(stats["pressure"])
        found = state()
        self._child("twin:kv_blocks_used").set(found.used_blocks)
        self._child("twin:kv_cache_wasted_perc").set(found.wasted)
        self._child("twin:scheduler_requests").set(found.tracked)
        for group, (requests, held, empty) in zip(LENGTH_GROUPS, found.by_length, strict=True):
            self._child("twin:num_requests_running_by_length", group).set(requests)
            self._child("twin:kv_tokens_held_by_length", group).set(held)
            self._child("twin:kv_tokens_empty_by_length", group).set(empty)

    def _write_tier(self, tier: str, did: Mapping[str, Any]) -> None:
        for name in ("held", "ready", "running"):
            self._child(f"twin:num_requests_{name}", tier).set(did[name])
        counts = tier_counts(did)
        self._count_to(counts.submitted, "twin:requests_submitted", tier)
        self._count_to(counts.batches, "twin:released_batches", tier)
        self._count_to(counts.requests, "twin:released_requests", tier)
        self._count_to(counts.tokens, "twin:released_tokens", tier)
        self._count_to(counts.held_s, "twin:batching_wait_seconds", tier)
        for cause, number in zip(CAUSES, counts.preempted, strict=True):
            self._count_to(number, "twin:preemptions", tier, cause)
        for reason, number in zip(TIMEOUTS, counts.timed_out, strict=True):
            self._count_to(number, "twin:timeouts", tier, reason)

    def _count_to(self, total: float, name: str, *labels: str) -> None:
        """Bring a counter to the total that the policy has."""
        before = self._last.get((name, *labels), 0.0)
        if total > before:
            self._child(name, *labels).inc(total - before)
            self._last[(name, *labels)] = total

    def _child(self, name: str, *labels: str) -> Any:
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            metric = _METRICS[name]
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = self._make(metric)
            own = dict(zip(metric.labels, labels, strict=True))
            child = self._children[key] = family.labels(**self._base, **own)
        return child

    def _make(self, metric: Metric) -> Any:
        labels = ("model_name", "engine", *metric.labels)
        if metric.kind == "gauge":
            return prometheus_client.Gauge(
                metric.name,
                metric.help,
                labels,
                registry=self._registry,
                multiprocess_mode="mostrecent",
            )
        more = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        return _CLASSES[metric.kind](
            metric.name, metric.help, labels, registry=self._registry, **more
        )


class State:
    """What is read off the engine for the gauges."""

    __slots__ = ("by_length", "tracked", "used_blocks", "wasted")

    def __init__(self, usable_blocks: int, free_blocks: int, tracked: int) -> None:
        self.used_blocks = usable_blocks - free_blocks
        self.tracked = tracked
        self.by_length = [[0, 0, 0] for _ in LENGTH_GROUPS]
        """Of running requests: number, token slots in their blocks, those without a computed token."""
        self.wasted = 0.0
        """Share of all token slots that are held and empty."""

    def add(
        self, prompt_tokens: int, held_tokens: int, computed_tokens: int, all_tokens: int
    ) -> None:
        """One running request; `all_tokens` is how many the whole cache holds."""
        empty = max(0, held_tokens - computed_tokens)
        group = self.by_length[length_group(prompt_tokens)]
        group[0] += 1
        group[1] += held_tokens
        group[2] += empty
        self.wasted += empty / all_tokens
