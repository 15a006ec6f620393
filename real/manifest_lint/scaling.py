"""Will the autoscaler see what it asks for, and act on it in time?"""

import re
from collections.abc import Iterator

from real.manifest_lint.finding import Finding
from real.manifest_lint.lifetime import start_s
from real.manifest_lint.objects import Cluster, Manifest, at, entries
from real.manifest_lint.queries import adapter_rules, series_in
from twin.clock import PS
from twin.cluster.advice import advice
from twin.cluster.limits import down_limit, scaled
from twin.cluster.manifests import suggested_query
from twin.cluster.objects import read_hpa, read_scaled_object
from twin.cluster.specs import Behavior, Controller, HpaSpec, MetricSpec, ScalingLog
from twin.cluster.vllm_arguments import family_of
from twin.scenario_yaml import KeyPath

FAULTS = (
    "a total must not be a Value target",
    "a latency per pod is averaged",
    "behavior.scaleUp lets",
    "behavior.scaleUp waits",
    "behavior.scaleUp never grows",
    "a scaleDown tolerance of",
)
"""What the twin says of an autoscaler that is a fault; the rest is advice."""

SLOW_S = 600
"""A way down that takes longer is told."""


def check(cluster: Cluster) -> Iterator[Finding]:
    """All findings about HPAs and ScaledObjects."""
    made = {m.name for m in cluster.manifests if m.pod_path is not None}
    for manifest in cluster.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        path = ("spec", "scaleTargetRef", "name")
        target = manifest.get(*path)
        if made and target not in made:
            yield manifest.fault("target", path, f"scales {target}, which is not among these files")
        server = next((s for s in cluster.servers if s.manifest.name == target), None)
        start = None if server is None else start_s(server, cluster)[0]
        try:
            if manifest.kind == "HorizontalPodAutoscaler":
                spec = read_hpa(
                    {"kind": manifest.kind, "apiVersion": "autoscaling/v2"}
                    | dict(manifest.document)
                )
                yield from metrics(manifest, spec, cluster, is_server=server is not None)
            else:
                spec = read_scaled_object(manifest.document).hpa
        except (ValueError, TypeError, AttributeError) as error:
            if "not modelled" not in str(error) and "not known or" not in str(error):
                yield manifest.fault("schema", ("spec",), str(error))
            continue
        yield from behavior(manifest, spec, start)
        yield from lost(manifest)


def lost(manifest: Manifest) -> Iterator[Finding]:
    """Fallbacks of ScaledObjects that never come, as lost series count as no load."""
    if not manifest.get("spec", "fallback"):
        return
    for i, trigger in enumerate(entries(manifest.get("spec", "triggers"))):
        ignores = at(trigger, "metadata", "ignoreNullValues")
        if trigger.get("type") == "prometheus" and str(ignores).lower() != "false":
            yield manifest.finding(
                "advice",
                "null-values",
                ("spec", "triggers", i, "metadata"),
                "a query that finds nothing counts as 0 (ignoreNullValues is true by default): when metrics are lost, "
                "the minimum is scaled to, and not what fallback says",
                'ignoreNullValues: "false"',
            )


def metrics(
    manifest: Manifest, spec: HpaSpec, cluster: Cluster, is_server: bool
) -> Iterator[Finding]:
    """Metrics that nothing serves, that vLLM does not have, or that mislead."""
    rules = [rule for _, _, rule in adapter_rules(cluster)]
    served = {str(at(rule, "name", "as")) for rule in rules}
    served |= {str(rule.get("seriesQuery")).partition("{")[0] for rule in rules}
    for i, metric in enumerate(spec.metrics):
        path: KeyPath = ("spec", "metrics", i)
        if metric.kind in ("Resource", "ContainerResource"):
            if is_server:
                yield manifest.fault(
                    "metric",
                    path,
                    f"{metric.name} of a GPU server says nothing of its load",
                    "scale on vllm:num_requests_waiting or vllm:num_requests_running",
                )
            continue
        yield from _metric(manifest, path, metric, served)
        if metric.name not in served:
            yield manifest.finding(
                "needs",
                "metrics-api",
                path,
                f"a rule of prometheus-adapter for {metric.name}: without one the HPA reports FailedGet"
                f"{metric.kind}Metric and never scales",
                f"e.g. {suggested_query(metric.name)}; or KEDA",
            )


def _metric(
    manifest: Manifest, path: KeyPath, metric: MetricSpec, served: set[str]
) -> Iterator[Finding]:
    name = metric.name
    known = name in served or family_of(name) or family_of(re.sub("^vllm_", "vllm:", name))
    if not known and re.match("vllm[_:]", name):
        yield manifest.fault(
            "metric-name",
            path,
            f"vLLM has no metric {name}",
            f"probably {series_in(suggested_query(name))[0]}",
        )
    in_ms = re.search(r"_(ms|millis|milliseconds)\b", name)
    if in_ms and name not in served:
        yield manifest.fault(
            "unit",
            path,
            f"{name} is in milliseconds; vLLM's durations are in seconds",
            "a target in seconds",
        )
    if any(label == "model" for label, _ in metric.selector):
        yield manifest.fault(
            "metric-label", path, "vLLM's series have no label model", "use model_name"
        )
    by_priority = [label for label, _ in metric.selector if label == "priority"]
    if by_priority:
        yield manifest.fault(
            "aggregate",
            path,
            "a selector on priority takes one of several series of a pod",
            "sum them in the adapter",
        )


def behavior(manifest: Manifest, spec: HpaSpec, start: float | None) -> Iterator[Finding]:
    """What the twin says of the targets, and how long the way up and down takes."""
    prefix: KeyPath = ("spec",)
    if manifest.kind == "ScaledObject":
        prefix = ("spec", "advanced", "horizontalPodAutoscalerConfig")
    for text in advice(spec, Controller(), start):
        path: KeyPath = prefix
        if text.startswith("behavior."):
            path = (*prefix, "behavior", "scaleUp")
        for i, metric in enumerate(spec.metrics):
            if text.startswith(f"{metric.name}:"):
                path = (
                    ("spec", "metrics", i)
                    if manifest.kind != "ScaledObject"
                    else ("spec", "triggers", i)
                )
        message, _, fix = text.rpartition("; ")
        kind = "fault" if any(words in text for words in FAULTS) else "advice"
        if not message:
            message, fix = fix, ""
        yield manifest.finding(
            "fault" if kind == "fault" else "advice", _rule(text), path, message, fix
        )
    seconds = _way_down_s(spec)
    if seconds is not None and seconds > SLOW_S and spec.behavior is not None:
        least, most = max(1, spec.min_replicas), spec.max_replicas
        window = spec.behavior.down.stabilization_ps or 300 * PS
        yield manifest.finding(
            "advice",
            "slow-down",
            (*prefix, "behavior", "scaleDown"),
            f"{most} replicas need {(seconds + window / PS) / 60:.0f} min to become {least}: "
            f"{window / PS / 60:.0f} min of window and {seconds / 60:.0f} min of steps, paid at up to {most} replicas",
            "compare the cost of others in the twin: twin run ... --set cluster.hpa.behavior.scaleDown...",
        )


def _rule(text: str) -> str:
    if any(word in text for word in ("latency per pod",)):
        return "latency-target"
    if "Value target" in text:
        return "value-target"
    return "slow-up" if text.startswith("behavior.scaleUp") else "scaling"


def _way_down_s(spec: HpaSpec) -> float | None:
    """Seconds of steps from the most to the fewest replicas, one look a second; None = without behavior, or never."""
    if spec.behavior is None or spec.behavior.down.select == "Disabled":
        return None
    rules, least = spec.behavior.down, max(1, spec.min_replicas)
    both = Behavior(down=rules)
    log, replicas = ScalingLog(()), spec.max_replicas
    for second in range(0, 24 * 3600):
        now_ps = second * PS
        allowed = max(least, min(replicas, down_limit(replicas, rules, log, now_ps)))
        up, down = scaled(log, replicas, allowed, both, now_ps)
        log, replicas = ScalingLog((), up, down), allowed
        if replicas <= least:
            return float(second)
    return None
