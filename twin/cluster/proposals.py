"""How many replicas does one metric ask for? The arithmetic of Kubernetes' replica calculator (1.37).

Ratios are 64-bit floats of integers, in the order in which the controller divides, so that a proposal at the edge of
the tolerance comes out as there. Terms as in Kubernetes: a pod is *ready* here if its sample counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from twin.cluster.specs import (
    MAX_REPLICAS,
    Controller,
    Failed,
    MetricSpec,
    Pod,
    PodSamples,
    Proposal,
    Reading,
    Sample,
    Scale,
    Total,
)


@dataclass(frozen=True)
class Tolerance:
    """How far a ratio may be from 1 without anything being done."""

    up: float
    down: float

    def holds(self, ratio: float) -> bool:
        """Whether the ratio is near enough to 1; both ends count."""
        return 1.0 - self.down <= ratio <= 1.0 + self.up


class _MetricError(Exception):
    """The metric gives no proposal."""


def propose(
    metric: MetricSpec,
    reading: Reading,
    pods: Sequence[Pod],
    scale: Scale,
    tolerance: Tolerance,
    controller: Controller,
    now_ps: int,
) -> Proposal:
    """What the metric asks for. Its failure is a proposal without replicas."""
    try:
        if isinstance(reading, Failed):
            raise _MetricError(reading.why)
        if isinstance(reading, Total):
            return _of_total(metric, reading, pods, scale, tolerance)
        return _of_pods(metric, reading, pods, scale, tolerance, controller, now_ps)
    except _MetricError as error:
        return Proposal(metric.name, None, error=str(error))


# --- one number for all pods --------------------------------------------------------------


def _of_total(
    metric: MetricSpec, reading: Total, pods: Sequence[Pod], scale: Scale, tolerance: Tolerance
) -> Proposal:
    if not reading.values:
        raise _MetricError("no metrics returned")
    total = sum(reading.values)
    if metric.target == "Value":
        return Proposal(metric.name, _by_value(metric, total, pods, scale, tolerance), total)
    existing = scale.status_replicas
    # What a surge or a slow deletion adds to the pods that exist comes back as the answer (kubernetes#138505).
    replicas = existing
    if not existing or not tolerance.holds(total / (float(metric.value) * float(existing))):
        replicas = _ceil(total / metric.value)
    average = math.ceil(total / existing) if existing else None
    return Proposal(metric.name, replicas, average, average)


def _by_value(
    metric: MetricSpec, total: int, pods: Sequence[Pod], scale: Scale, tolerance: Tolerance
) -> int:
    ratio = total / metric.value
    if scale.replicas == 0:
        return _ceil(ratio)
    if tolerance.holds(ratio):
        return scale.replicas
    if not pods:
        raise _MetricError("no pods returned by selector")
    return _ceil(ratio * sum(pod.counts_as_ready for pod in pods))


# --- a number for each pod ----------------------------------------------------------------


@dataclass
class PodGroups:
    """Names of pods by what their samples are good for."""

    ready: list[str]
    unready: list[str]
    missing: list[str]
    ignored: list[str]


def group_pods(
    pods: Sequence[Pod],
    samples: Mapping[str, Sample],
    is_cpu: bool,
    controller: Controller,
    now_ps: int,
) -> PodGroups:
    """Sort pods into ready, unready, missing (no sample) and ignored ones.

    For every metric but CPU a running pod that has a sample is ready, whatever its Ready condition says.
    """
    groups = PodGroups([], [], [], [])
    for pod in pods:
        if pod.is_deleted or pod.phase == "Failed":
            groups.ignored.append(pod.name)
        elif pod.phase == "Pending":
            groups.unready.append(pod.name)
        elif pod.name not in samples:
            groups.missing.append(pod.name)
        elif is_cpu and _is_warming_up(pod, samples[pod.name], controller, now_ps):
            groups.unready.append(pod.name)
        else:
            groups.ready.append(pod.name)
    return groups


def _is_warming_up(pod: Pod, sample: Sample, controller: Controller, now_ps: int) -> bool:
    """Whether the CPU that it uses may be that of its start."""
    if pod.ready is None or pod.start_ps is None:
        return True
    changed_ps = pod.start_ps if pod.ready_changed_ps is None else pod.ready_changed_ps
    if pod.start_ps + controller.cpu_initialization_period_ps > now_ps:
        return not pod.ready or sample.at_ps < changed_ps + sample.window_ps
    never_ready = pod.start_ps + controller.initial_readiness_delay_ps > changed_ps
    return not pod.ready and never_ready


def _of_pods(
    metric: MetricSpec,
    reading: PodSamples,
    pods: Sequence[Pod],
    scale: Scale,
    tolerance: Tolerance,
    controller: Controller,
    now_ps: int,
) -> Proposal:
    if not pods:
        raise _MetricError("no pods returned by selector")
    is_cpu = metric.kind in ("Resource", "ContainerResource") and metric.name == "cpu"
    groups = group_pods(pods, reading.by_pod, is_cpu, controller, now_ps)
    values = {name: reading.by_pod[name].value for name in groups.ready}
    if not values:
        if set(reading.by_pod) - {pod.name for pod in pods}:
            raise _MetricError("no metrics returned matched known pods")
        raise _MetricError("did not receive metrics for targeted pods (pods might be unready)")
    if metric.target == "Utilization":
        requests = _requests(pods, metric)
        utilization = _percent(values, requests)
        replicas = _with_gaps(
            values,
            groups,
            scale.replicas,
            tolerance,
            lambda found: _percent(found, requests) / metric.value,
            lambda name: requests[name] * max(100, metric.value) // 100,
        )
        return Proposal(metric.name, replicas, utilization, sum(values.values()) // len(values))
    average = sum(values.values()) // len(values)
    replicas = _with_gaps(
        values,
        groups,
        scale.replicas,
        tolerance,
        lambda found: (sum(found.values()) // len(found)) / metric.value,
        lambda name: metric.value,
    )
    return Proposal(metric.name, replicas, average, average)


def _requests(pods: Sequence[Pod], metric: MetricSpec) -> dict[str, int]:
    requests: dict[str, int] = {}
    for pod in pods:
        if pod.request is None:
            raise _MetricError(f"missing request for {metric.name} in pod {pod.name}")
        requests[pod.name] = pod.request
    return requests


def _percent(values: Mapping[str, int], requests: Mapping[str, int]) -> int:
    requested = sum(requests[name] for name in values)
    if not requested:
        raise _MetricError("no metrics returned matched known pods")
    return sum(values.values()) * 100 // requested


def _with_gaps(
    values: Mapping[str, int],
    groups: PodGroups,
    current: int,
    tolerance: Tolerance,
    ratio_of: Callable[[Mapping[str, int]], float],
    at_target: Callable[[str], int],
) -> int:
    """Replicas for the samples that count, with cautious values for the pods that have none.

    A missing pod counts as at its target on the way down and as idle on the way up; one that is not ready as idle on
    the way up. If that turns the direction, nothing is done.
    """
    ratio = ratio_of(values)
    up_unready = bool(groups.unready) and ratio > 1.0
    if not up_unready and not groups.missing:
        return current if tolerance.holds(ratio) else _ceil(ratio * len(groups.ready))
    filled = dict(values)
    if ratio < 1.0:
        filled |= {name: at_target(name) for name in groups.missing}
    elif ratio > 1.0:
        filled |= dict.fromkeys(groups.missing, 0)
    if up_unready:
        filled |= dict.fromkeys(groups.unready, 0)
    careful = ratio_of(filled)
    turned = (ratio < 1.0 < careful) or (careful < 1.0 < ratio)
    if tolerance.holds(careful) or turned:
        return current
    replicas = _ceil(careful * len(filled))
    backwards = replicas > current if careful < 1.0 else replicas < current
    return current if backwards else replicas


def _ceil(replicas: float) -> int:
    return MAX_REPLICAS if replicas >= MAX_REPLICAS else math.ceil(replicas)
