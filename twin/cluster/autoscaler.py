"""What does a HorizontalPodAutoscaler do now? One look of Kubernetes' controller (1.37) as a pure function.

`reconcile` is handed the spec, what it remembers, what the metrics API answers, the pods and the time, and gives back
a decision with its reason and what to remember. It reads no clock and keeps nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twin.cluster.limits import clamp, limit_rate, scaled, stabilize, stabilize_both, windows
from twin.cluster.proposals import Tolerance, propose
from twin.cluster.specs import (
    Condition,
    Controller,
    Decision,
    HpaSpec,
    MetricSpec,
    Pod,
    Proposal,
    Reading,
    Scale,
    ScalingLog,
)

__all__ = ["Combined", "combine", "reconcile", "tolerance_of"]

LIMITS = {
    "ScaleUpLimit": "the desired replica count is increasing faster than the maximum scale rate",
    "TooManyReplicas": "the desired replica count is more than the maximum replica count",
    "ScaleDownLimit": "the desired replica count is decreasing faster than the maximum scale rate",
    "TooFewReplicas": "the desired replica count is less than the minimum replica count",
    "DesiredWithinRange": "the desired count is within the acceptable range",
}
"""Reason of condition ScalingLimited -> what Kubernetes says with it."""

_FAILURES = {
    "Resource": "FailedGetResourceMetric",
    "ContainerResource": "FailedGetContainerResourceMetric",
    "Pods": "FailedGetPodsMetric",
    "Object": "FailedGetObjectMetric",
    "External": "FailedGetExternalMetric",
}


def tolerance_of(spec: HpaSpec, controller: Controller) -> Tolerance:
    """The autoscaler's own tolerances, or the controller's."""
    up = down = None
    if spec.behavior is not None:
        up, down = spec.behavior.up.tolerance, spec.behavior.down.tolerance
    default = controller.tolerance
    return Tolerance(default if up is None else up, default if down is None else down)


def reconcile(
    spec: HpaSpec,
    log: ScalingLog,
    metrics: Sequence[Reading],
    pods: Sequence[Pod],
    scale: Scale,
    now_ps: int,
    controller: Controller = Controller(),  # noqa: B008 (frozen)
    rivals: Sequence[str] = (),
) -> Decision:
    """One look of the controller: `metrics` are the answers to spec.metrics, in that order.

    `rivals` are other autoscalers whose target has these pods too; then nothing is scaled. Raises ValueError if the
    number of answers is not that of the metrics.
    """
    if len(metrics) != len(spec.metrics):
        raise ValueError(f"{len(spec.metrics)} metrics have {len(metrics)} answers")
    current = scale.replicas
    if log.recommendations is None:
        log = replace(log, recommendations=((current, now_ps),))
    able = Condition(
        "AbleToScale", True, "SucceededGetScale", "able to get the target's current scale"
    )
    if current == 0 and not _may_leave_zero(spec, log, controller):
        why = "scaling is disabled since the replica count of the target is zero"
        off = Condition("ScalingActive", False, "ScalingDisabled", why)
        return _unchanged(current, why, log, (able, off))
    if current > spec.max_replicas:
        why = "current number of replicas above spec.maxReplicas"
        return _rescaled(
            spec, log, current, spec.max_replicas, why, now_ps, Decision(0, 0, "", log)
        )
    if current and current < spec.min_replicas:
        why = "current number of replicas below spec.minReplicas"
        return _rescaled(
            spec, log, current, spec.min_replicas, why, now_ps, Decision(0, 0, "", log)
        )
    if rivals:
        why = f"the pods are controlled by several autoscalers: {', '.join(rivals)}"
        return _unchanged(
            current,
            why,
            log,
            (able, Condition("ScalingActive", False, "AmbiguousSelector", why)),
            why,
        )
    tolerance = tolerance_of(spec, controller)
    proposals = tuple(
        propose(metric, reading, pods, scale, tolerance, controller, now_ps)
        for metric, reading in zip(spec.metrics, metrics, strict=True)
    )
    found = combine(spec.metrics, proposals, current)
    if found.replicas is None:
        assert found.failure is not None
        why = f"nothing done: {found.failure.message}"
        stopped = _unchanged(current, why, log, (able, found.failure), found.failure.message)
        return replace(stopped, proposals=proposals)
    proposed = found.replicas
    if current == 0 and spec.min_replicas:
        proposed = max(proposed, spec.min_replicas)
    return _normalised(spec, log, current, proposed, found, proposals, now_ps, controller)


def _may_leave_zero(spec: HpaSpec, log: ScalingLog, controller: Controller) -> bool:
    readable = any(metric.is_total for metric in spec.metrics) or spec.min_replicas != 0
    return controller.scale_to_zero and log.scaled_to_zero and readable


@dataclass(frozen=True)
class Combined:
    """What all metrics together ask for."""

    replicas: int | None
    """The largest proposal; None = failures forbid any change."""
    metric: str | None
    failure: Condition | None
    """The first metric that failed."""


def combine(metrics: Sequence[MetricSpec], proposals: Sequence[Proposal], current: int) -> Combined:
    """The largest valid proposal. A failed metric forbids shrinking, and all failed ones forbid everything."""
    replicas, name, failures, failure = 0, None, 0, None
    for metric, proposal in zip(metrics, proposals, strict=True):
        if proposal.replicas is None:
            failures += 1
            if failure is None:
                message = (
                    f"metric {metric.name} of type {metric.kind} cannot be read: {proposal.error}"
                )
                failure = Condition("ScalingActive", False, _FAILURES[metric.kind], message)
        elif name is None or replicas == 0 or proposal.replicas > replicas:
            replicas, name = proposal.replicas, metric.name
    if failures == len(proposals) or (failures and replicas < current):
        return Combined(None, None, failure)
    return Combined(replicas, name, failure)


def _normalised(
    spec: HpaSpec,
    log: ScalingLog,
    current: int,
    proposed: int,
    found: Combined,
    proposals: tuple[Proposal, ...],
    now_ps: int,
    controller: Controller,
) -> Decision:
    known = log.recommendations or ()
    if spec.behavior is None:
        window_ps = controller.downscale_stabilization_ps
        stabilized, known = stabilize(known, proposed, window_ps, now_ps)
        desired, limit = clamp(current, stabilized, spec.min_replicas, spec.max_replicas)
    else:
        up_ps, down_ps = windows(spec.behavior, controller)
        stabilized, known = stabilize_both(known, current, proposed, up_ps, down_ps, now_ps)
        desired, limit = limit_rate(
            current, stabilized, spec.min_replicas, spec.max_replicas, spec.behavior, log, now_ps
        )
    log = replace(log, recommendations=known, shown=tuple(p.current for p in proposals))
    partly = Decision(
        current,
        desired,
        "",
        log,
        proposals,
        proposed,
        found.metric,
        stabilized,
        limit,
        tuple(_conditions(spec, current, proposed, stabilized, limit, found)),
        None if found.failure is None else found.failure.message,
    )
    why = _why(current, desired, proposed, stabilized, limit, found.metric)
    if desired == current:
        still_zero = log.scaled_to_zero and current == 0
        return replace(partly, reason=why, log=replace(log, scaled_to_zero=still_zero))
    return _rescaled(spec, log, current, desired, why, now_ps, partly)


def _conditions(
    spec: HpaSpec, current: int, proposed: int, stabilized: int, limit: str, found: Combined
) -> list[Condition]:
    if stabilized == proposed:
        able = ("ReadyForNewScale", "recommended size matches current size")
    elif spec.behavior is not None and proposed >= current:
        able = (
            "ScaleUpStabilized",
            "recent recommendations were lower than current one, applying the lowest recent recommendation",
        )
    else:
        able = (
            "ScaleDownStabilized",
            "recent recommendations were higher than current one, applying the highest recent recommendation",
        )
    active = f"a replica count was calculated from {found.metric}"
    return [
        Condition("AbleToScale", True, *able),
        Condition("ScalingActive", True, "ValidMetricFound", active),
        Condition("ScalingLimited", limit != "DesiredWithinRange", limit, LIMITS[limit]),
    ]


def _why(
    current: int, desired: int, proposed: int, stabilized: int, limit: str, metric: str | None
) -> str:
    if proposed > current:
        text = f"{metric} above target asks for {proposed}"
    elif proposed < current:
        text = f"all metrics below target ask for {proposed}"
    else:
        text = f"{metric} asks for {proposed}"
    if stabilized != proposed:
        text += f"; the stabilisation window makes it {stabilized}"
    if limit != "DesiredWithinRange":
        text += f"; {limit} makes it {desired}"
    return text


def _unchanged(
    current: int,
    why: str,
    log: ScalingLog,
    conditions: tuple[Condition, ...],
    error: str | None = None,
) -> Decision:
    """Nothing is written; the shown metrics stay as they were."""
    kept = replace(log, scaled_to_zero=log.scaled_to_zero and current == 0)
    return Decision(current, current, why, kept, conditions=conditions, error=error)


def _rescaled(
    spec: HpaSpec,
    log: ScalingLog,
    current: int,
    desired: int,
    why: str,
    now_ps: int,
    partly: Decision,
) -> Decision:
    up, down = scaled(log, current, desired, spec.behavior, now_ps)
    to_zero = desired == 0 < current and spec.min_replicas == 0
    to_zero = to_zero and any(metric.is_total for metric in spec.metrics)
    done = Condition("AbleToScale", True, "SucceededRescale", f"the target was scaled to {desired}")
    zero = Condition("ScaledToZero", to_zero, "ScaledToZero" if to_zero else "NotScaledToZero", why)
    others = tuple(c for c in partly.conditions if c.kind != "AbleToScale")
    return replace(
        partly,
        current=current,
        desired=desired,
        reason=why,
        log=replace(log, up_events=up, down_events=down, scaled_to_zero=to_zero),
        conditions=(done, *others, zero),
    )
