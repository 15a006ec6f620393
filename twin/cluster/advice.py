"""What is wrong with an autoscaler before it runs: each finding says what will happen and what to do instead.

The faults are those of real incidents; see docs/autoscaling.md.
"""

from collections.abc import Iterator, Mapping, Sequence

from twin.clock import PS, to_seconds
from twin.cluster.autoscaler import tolerance_of
from twin.cluster.limits import scaled, up_limit
from twin.cluster.objects import MAX_PERIOD_S, MAX_WINDOW_S
from twin.cluster.quantity import quantity
from twin.cluster.specs import (
    Behavior,
    Controller,
    HpaSpec,
    MetricSpec,
    ScalingLog,
    ScalingPolicy,
    ScalingRules,
)

GROWS_WITH_LOAD = ("waiting", "running", "queue", "inflight", "requests", "concurrency")
"""Words in the names of metrics that count requests."""

LATENCY_WORDS = ("latency", "ttft", "time_to_first_token", "seconds", "p99", "p95", "duration")


def advice(
    spec: HpaSpec,
    controller: Controller,
    start_up_s: float | None = None,
    idle: Mapping[str, int] | None = None,
    selector: Mapping[str, str] | None = None,
    pod_labels: Sequence[Mapping[str, str]] = (),
    has_surge: bool = False,
) -> Iterator[str]:
    """Findings, one sentence each.

    `start_up_s` is how long a pod needs to be ready; `idle` what metrics show without load, thousandths; `selector`
    the target's, and `pod_labels` those of all other pods of its namespace; `has_surge`: a rolling update makes more
    pods than replicas.
    """
    for metric in spec.metrics:
        if metric.target == "Value" and metric.is_total and _is_count(metric):
            shown = quantity(metric.value)
            yield (
                f"{metric.name}: a total must not be a Value target: the ratio to {shown} is multiplied by the ready "
                "pods, so that the same total asks for more with every pod, and for none while no pod is ready; "
                f"use AverageValue {shown}"
            )
        if metric.kind == "Pods" and _is_latency(metric):
            yield (
                f"{metric.name}: a latency per pod is averaged over pods and multiplied: twice the target doubles the "
                "replicas whatever a replica can do, an idle pod has none, and it lags the queue; scale on requests "
                "waiting and keep the latency as an alert"
            )
        if metric.is_total and metric.target == "AverageValue" and has_surge:
            yield (
                f"{metric.name}: within the tolerance the answer is the number of pods that exist, those of a rolling "
                "update's surge included, which then stay (kubernetes#138505); use maxSurge 0, or no update under load"
            )
        yield from _floor(metric, spec, (idle or {}).get(metric.name))
    yield from _speed(spec, start_up_s)
    if spec.behavior is not None and spec.behavior.up.stabilization_ps:
        window = to_seconds(spec.behavior.up.stabilization_ps)
        yield f"behavior.scaleUp waits {window:g} s before it grows at all; 0 lets a burst be answered at once"
    if selector:
        foreign = sum(all(labels.get(k) == v for k, v in selector.items()) for labels in pod_labels)
        if foreign:
            yield (
                f"the target's selector also matches {foreign} pods that are not its own; those without a sample count "
                "as at the target, which forbids scaling down; give the target's pods a label of their own"
            )
    tolerance = tolerance_of(spec, controller)
    if tolerance.down >= 1:
        yield f"a scaleDown tolerance of {tolerance.down:g} means that nothing is ever scaled down"


def _is_count(metric: MetricSpec) -> bool:
    return any(word in metric.name for word in GROWS_WITH_LOAD) and not _is_latency(metric)


def _is_latency(metric: MetricSpec) -> bool:
    return any(word in metric.name for word in LATENCY_WORDS)


def _floor(metric: MetricSpec, spec: HpaSpec, idle: int | None) -> Iterator[str]:
    """Replicas are rounded up, so that an idle level can hold more of them than the minimum."""
    least = spec.min_replicas
    if idle is None or metric.target == "Value" or not 1 <= least < spec.max_replicas:
        return
    highest = metric.value * least / (least + 1)
    if idle > highest:
        shown = str(idle) if metric.target == "Utilization" else quantity(idle)
        yield (
            f"{metric.name}: at an idle level of {shown} a pod, {least + 1} replicas never become {least}: "
            f"ceil({least + 1} x {idle / metric.value:.3g}) = {least + 1}; the level must be at most target x "
            f"{least}/{least + 1}"
        )


def _speed(spec: HpaSpec, start_up_s: float | None) -> Iterator[str]:
    """How long the orders for the whole range take."""
    behavior = spec.behavior
    if behavior is None or spec.max_replicas <= max(1, spec.min_replicas):
        return
    seconds = _orders_s(max(1, spec.min_replicas), spec.max_replicas, behavior.up)
    if seconds is None:
        yield "behavior.scaleUp never grows: selectPolicy is Disabled"
    elif seconds > 60:
        start = (
            "" if start_up_s is None else f", and each pod needs {start_up_s:.0f} s more to start"
        )
        yield (
            f"behavior.scaleUp lets {max(1, spec.min_replicas)} replicas become {spec.max_replicas} in {seconds:.0f} s "
            f"at the earliest{start}; leaving scaleUp out allows 4 pods or 100 % per 15 s"
        )


def _orders_s(least: int, most: int, rules: ScalingRules) -> float | None:
    """Seconds until the last order from `least` to `most`, one look a second; None = never."""
    behavior = Behavior(up=rules)
    if rules.select == "Disabled":
        return None
    log, replicas, second = ScalingLog(()), least, 0
    while second <= 7200:
        now_ps = second * 10**12
        allowed = min(most, max(replicas, up_limit(replicas, rules, log, now_ps)))
        up, down = scaled(log, replicas, allowed, behavior, now_ps)
        log, replicas = ScalingLog((), up, down), allowed
        if replicas >= most:
            return float(second)
        second += 1
    return None


def calmer(spec: HpaSpec, controller: Controller, start_up_s: float) -> Behavior:
    """A behavior under which orders wait for the effect of earlier ones, for a metric that lags by a start.

    Growing: at most twofold within the time of a start. Shrinking: by what was needed least during two starts, and at
    most by a tenth (or a pod) within one.
    """
    start_ps = round(max(15.0, min(start_up_s, MAX_PERIOD_S)) * PS)
    window = controller.downscale_stabilization_ps
    if spec.behavior is not None and spec.behavior.down.stabilization_ps is not None:
        window = spec.behavior.down.stabilization_ps
    window = min(max(window, 2 * start_ps), MAX_WINDOW_S * PS)
    up = ScalingRules((ScalingPolicy("Percent", 100, start_ps),), "Max", 0)
    down = (ScalingPolicy("Percent", 10, start_ps), ScalingPolicy("Pods", 1, start_ps))
    return Behavior(up, ScalingRules(down, "Max", window))
