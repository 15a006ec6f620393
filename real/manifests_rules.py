"""Recording and alerting rules of a service: SLO burn, queue growth, KV pressure, preemption storm, prediction drift.

Limits come from the scenario's objectives and the twin's prediction. Nothing fires on idle series: a ratio of nothing
is NaN, and no comparison with NaN is true.
"""

import math
from collections.abc import Iterator
from typing import Any

from real.manifests_setup import Setup
from real.manifests_text import document
from twin.report.metric_names import LATENCY_BUCKETS, TOKEN_GAP_BUCKETS, TTFT_BUCKETS, VLLM

HISTOGRAMS = {
    "ttft": ("twin:time_to_first_token_seconds", TTFT_BUCKETS),
    "queue": ("twin:request_queue_time_seconds", TTFT_BUCKETS),
    "tpot": ("twin:request_time_per_output_token_seconds", TOKEN_GAP_BUCKETS),
    "e2e": ("twin:e2e_request_latency_seconds", LATENCY_BUCKETS),
}
"""Metric of an objective -> histogram by tier, and its buckets. Others have no series of their own."""

BUDGETS = {"p50": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01}
"""Statistic of an objective -> share of requests that may miss it."""

WINDOWS = ("5m", "30m", "1h", "6h")

BURNS = (("critical", 14.4, "1h", "5m", "2m"), ("warning", 6.0, "6h", "30m", "15m"))
"""Severity, burn rate, long and short window, for: 2 % of a month's budget in an hour, 5 % in six hours."""

DRIFT = 0.5
"""Measured over predicted TTFT beyond 1 + this, or below 1 - this, is drift."""


def prometheus_rule(setup: Setup) -> dict[str, Any]:
    """The rules as an object of the Prometheus operator."""
    return document(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        setup.name,
        labels=setup.monitored("engine"),
        spec={"groups": groups(setup)},
    )


def groups(setup: Setup) -> list[dict[str, Any]]:
    """The rules as groups of Prometheus."""
    recording = [*_recorded(setup), *_predicted(setup)]
    whose = {"service": setup.name, "namespace": setup.namespace}
    alerting = [
        alert | {"labels": whose | alert["labels"]}
        for alert in (*_burning(setup), *_states(setup), *_drifting(setup))
    ]
    return [
        {"name": f"{setup.name}-recording", "interval": "30s", "rules": recording},
        {"name": f"{setup.name}-alerts", "rules": alerting},
    ]


def _mine(setup: Setup) -> str:
    return f'namespace="{setup.namespace}",pod=~"{setup.serving_pods}"'


def _recorded(setup: Setup) -> Iterator[dict[str, Any]]:
    mine, histograms = _mine(setup), _histograms(setup)
    is_ours = setup.scenario.policy is not None
    labels = None if is_ours else {"tier": ALL}
    for metric, (name, _) in histograms.items():
        rate = f"sum by (tier, le) (rate({name}_bucket{{{mine}}}[5m]))"
        expr = f"histogram_quantile(0.99, {rate})"
        yield _record(setup, f"tier:{metric}_seconds:p99_5m", expr, labels)
    if is_ours:
        waiting = f"twin:num_requests_held{{{mine}}} + twin:num_requests_ready{{{mine}}}"
        running, ended = f"twin:num_requests_running{{{mine}}}", f"twin:requests_total{{{mine}}}"
    else:
        waiting, running = (
            f"vllm:num_requests_{state}{{{mine}}}" for state in ("waiting", "running")
        )
        ended = f"vllm:request_success_total{{{mine}}}"
    yield _record(setup, "tier:requests_waiting:sum", f"sum by (tier) ({waiting})", labels)
    yield _record(setup, "tier:requests_running:sum", f"sum by (tier) ({running})", labels)
    yield _record(setup, "tier:requests_ended:rate5m", f"sum by (tier) (rate({ended}[5m]))", labels)
    for tier, metric, budget, bound in objectives(setup):
        name, _ = histograms[metric]
        own = f'{mine},tier="{tier}"' if is_ours else mine
        for window in WINDOWS:
            good = f'sum(rate({name}_bucket{{{own},le="{bound}"}}[{window}]))'
            every = f"sum(rate({name}_count{{{own}}}[{window}]))"
            yield _record(
                setup,
                f"tier:slo_burn:rate{window}",
                f"(1 - {good} / {every}) / {budget:g}",
                {"tier": tier, "objective": metric},
            )


def objectives(setup: Setup) -> Iterator[tuple[str, str, float, str]]:
    """(tier, metric, budget, bound) of the objectives that rules can judge.

    The bound is the bucket nearest to the limit, as Prometheus writes it. Without a policy of ours no series has a
    tier, and the objectives of the first tier are taken for all requests.
    """
    histograms = _histograms(setup)
    stated = list(setup.scenario.objectives.items())
    if setup.scenario.policy is None:
        stated = [(ALL, limits) for _, limits in stated[:1]]
    for tier, limits in stated:
        for objective, limit in limits.items():
            metric, _, statistic = objective.rpartition("_")
            if metric in histograms and statistic in BUDGETS:
                bounds = histograms[metric][1]
                nearest = min(bounds, key=lambda bound: abs(math.log(bound / limit)))
                yield tier, metric, BUDGETS[statistic], repr(float(nearest))


ALL = "all"
"""Tier of the series of a server without our policy."""


def _histograms(setup: Setup) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Metric of an objective -> histogram and buckets; vLLM's own where no policy of ours runs."""
    if setup.scenario.policy is not None:
        return HISTOGRAMS
    vllm = {metric.name: metric.buckets or () for metric in VLLM if metric.kind == "histogram"}
    names = {key: name.replace("twin:", "vllm:") for key, (name, _) in HISTOGRAMS.items()}
    return {key: (name, vllm[name]) for key, name in names.items()}


def _record(
    setup: Setup, name: str, expr: str, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    return {"record": name, "expr": expr, "labels": {"service": setup.name, **(labels or {})}}


def _predicted(setup: Setup) -> Iterator[dict[str, Any]]:
    """What the twin expects, as series beside the measured ones."""
    for tier, seconds in setup.prediction.ttft_p99_s.items():
        expr = f"vector({seconds:.6g})"
        yield _record(setup, "tier:ttft_seconds:p99_predicted", expr, {"tier": tier})


def _burning(setup: Setup) -> Iterator[dict[str, Any]]:
    told = list(objectives(setup))
    if not told:
        return
    for severity, rate, long, short, hold in BURNS:
        mine = f'service="{setup.name}"'
        yield _alert(
            f"SloBurn{'Fast' if severity == 'critical' else 'Slow'}",
            f"tier:slo_burn:rate{long}{{{mine}}} > {rate:g} and tier:slo_burn:rate{short}{{{mine}}} > {rate:g}",
            hold,
            severity,
            "{{ $labels.tier }}: the budget of {{ $labels.objective }} burns {{ $value | humanize }} times too fast",
            f"Over {long} and {short}; at this rate the budget of a month is gone in "
            f"{'two days' if severity == 'critical' else 'five days'}.",
        )


def _states(setup: Setup) -> Iterator[dict[str, Any]]:
    mine = _mine(setup)
    waiting = f"sum(vllm:num_requests_waiting{{{mine}}})"
    slots = setup.scenario.engine.active_limit
    yield _alert(
        "QueueGrows",
        f"{waiting} > {slots} and deriv({waiting}[10m:30s]) > 0",
        "5m",
        "warning",
        "{{ $value }} requests wait and their number rises",
        f"More wait than one replica's {slots} slots; replicas are missing, or one of them is stuck.",
    )
    yield _alert(
        "KvPressure",
        f"max by (pod) (avg_over_time(vllm:kv_cache_usage_perc{{{mine}}}[5m])) > 0.9 "
        f"and on (pod) sum by (pod) (vllm:num_requests_waiting{{{mine}}}) > 0",
        "5m",
        "warning",
        "{{ $labels.pod }}: {{ $value | humanizePercentage }} of the KV cache is in use while requests wait",
        "KV blocks bind, not slots: more replicas, fewer slots or an FP8 KV cache help.",
    )
    preempted = f"sum by (pod) (rate(vllm:num_preemptions_total{{{mine}}}[5m]))"
    ended = f"sum by (pod) (rate(vllm:request_success_total{{{mine}}}[5m]))"
    yield _alert(
        "PreemptionStorm",
        f"{preempted} / {ended} > 0.2",
        "5m",
        "warning",
        "{{ $labels.pod }}: {{ $value | humanize }} preemptions for each request that ends",
        "Each preemption computes a prompt again; fewer slots (max_num_seqs) make it faster.",
    )
    if setup.scenario.policy is None:
        return
    yield _alert(
        "PolicyFailed",
        f"sum by (pod) (increase(twin:policy_errors_total{{{mine}}}[10m])) > 0",
        "",
        "critical",
        "{{ $labels.pod }}: the scheduling policy raised; arrival order rules until the pod restarts",
        "The traceback is in the log of the pod.",
    )


def _drifting(setup: Setup) -> Iterator[dict[str, Any]]:
    if not setup.prediction.ttft_p99_s:
        return
    mine = f'service="{setup.name}"'
    ratio = f"tier:ttft_seconds:p99_5m{{{mine}}} / on (tier, service) tier:ttft_seconds:p99_predicted{{{mine}}}"
    yield _alert(
        "PredictionDrift",
        f"({ratio} > {1 + DRIFT:g}) or ({ratio} < {1 - DRIFT:g})",
        "30m",
        "info",
        "{{ $labels.tier }}: TTFT p99 is {{ $value | humanize }} times what the twin predicted",
        "Traffic, hardware or version are no longer those of the scenario: calibrate it again.",
    )


def _alert(
    name: str, expr: str, hold: str, severity: str, summary: str, description: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        **({"for": hold} if hold else {}),
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }
