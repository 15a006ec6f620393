"""Incidents of real clusters: the model gives what surprised people, and the advice names the way out."""

import pytest

from twin.clock import PS
from twin.cluster.advice import advice
from twin.cluster.autoscaler import reconcile
from twin.cluster.ratio_scalers import RatioSpec, RatioState, apa
from twin.cluster.specs import (
    Behavior,
    Controller,
    Failed,
    HpaSpec,
    MetricSpec,
    Pod,
    PodSamples,
    Sample,
    Scale,
    ScalingLog,
    ScalingPolicy,
    ScalingRules,
    Total,
)

SYNC_PS = 15 * PS
EMPTY = ScalingLog(())
FAST = Controller(downscale_stabilization_ps=0)


def external(target, value, name="vllm:num_requests_waiting"):
    return MetricSpec("External", name, target, 1000 * value)


def pods(ready, starting=0):
    return [Pod(f"pod-{i}") for i in range(ready)] + [
        Pod(f"pod-{ready + i}", ready=False) for i in range(starting)
    ]


def decide(spec, total, ready, replicas, log=EMPTY, now_ps=0, flags=FAST):
    found = pods(ready, max(0, replicas - ready))
    reading = [Total((round(1000 * total),))]
    return reconcile(spec, log, reading, found, Scale(replicas, replicas), now_ps, flags)


def levels(values):
    """Pods and their samples of a metric in whole units; None = no sample."""
    names = [f"pod-{i}" for i in range(len(values))]
    by_pod = {n: Sample(1000 * v, 0) for n, v in zip(names, values, strict=True) if v is not None}
    return [Pod(name) for name in names], PodSamples(by_pod)


def test_s01_a_value_target_shrinks_a_target_without_ready_pods():
    by_value = HpaSpec(1, 20, (external("Value", 250),))
    assert decide(by_value, 2500, 0, 4).desired == 1
    # A window only delays it.
    log, replicas = ScalingLog(), 4
    for look in range(25):
        decision = decide(by_value, 2500, 0, replicas, log, look * SYNC_PS, Controller())
        log, replicas = decision.log, decision.desired
        assert replicas == (4 if look * 15 <= 300 else 1)
    # Right: as many as the queue asks for, whoever is ready; the older rules allow twice as many at once.
    average = HpaSpec(1, 20, (external("AverageValue", 250),))
    found = decide(average, 2500, 0, 4)
    assert (found.proposed, found.desired) == (10, 8)
    assert "none while no pod is ready" in "".join(advice(by_value, FAST))
    assert not list(advice(average, FAST))


def overshoot(target, queue_of, start_up_s):
    """spec.replicas at each look while pods that were ordered become ready after `start_up_s`."""
    at_once = ScalingRules((ScalingPolicy("Pods", 1000, SYNC_PS),), stabilization_ps=0)
    spec = HpaSpec(1, 1000, (external(target, 250),), Behavior(up=at_once))
    log, replicas, ready_at = ScalingLog(), 1, [0]
    queue, seen = 0.0, []
    for look in range(1, 41):
        second = 15 * look
        ready = sum(at <= second for at in ready_at)
        queue = queue_of(second, queue, sum(at <= second - 15 for at in ready_at))
        decision = decide(spec, queue, ready, replicas, log, second * PS, Controller())
        log, replicas = decision.log, decision.desired
        ready_at += [second + start_up_s] * (replicas - len(ready_at))
        seen.append(replicas)
    return seen


def test_s02_overshoot_needs_the_batch_to_become_ready():
    """While one pod is ready both targets give 6, 11, 17, 22; then Value runs to the limit (1000)."""

    def rising(second, queue, ready):
        return max(0, queue + 15 * (100 - 10 * ready))

    peaks = {}
    for target in ("Value", "AverageValue"):
        seen = overshoot(target, rising, 60)
        assert seen[:4] == [6, 11, 17, 22]
        peaks[target] = seen
    # At 75 s the queue is 27 x 250 on the point; a single request more makes it 28.
    assert max(peaks["AverageValue"]) == 27
    more = overshoot("AverageValue", lambda *now: rising(*now) + (now[0] == 15), 60)
    assert max(more) == 28
    assert peaks["Value"].index(1000) * 15 + 15 == 135
    # Far from what was claimed: 5, 59, 988 and 21,692 new pods.
    assert "multiplied by the ready pods" in "".join(
        advice(HpaSpec(1, 1000, (external("Value", 250),)), FAST)
    )


def test_s04_surge_pods_leak_into_the_spec():
    spec = HpaSpec(1, 20, (external("AverageValue", 10),))
    found = reconcile(spec, ScalingLog(()), [Total((100_000,))], pods(11), Scale(10, 11), 0)
    assert found.desired == 11
    without = reconcile(spec, ScalingLog(()), [Total((100_000,))], pods(10), Scale(10, 10), 0)
    assert without.desired == 10
    assert "maxSurge 0" in "".join(advice(spec, FAST, has_surge=True))


def test_s06_two_replicas_never_become_one():
    metric = MetricSpec("Resource", "cpu", "Utilization", 100)
    spec = HpaSpec(1, 10, (metric,))
    for percent, wanted in ((60, 2), (51, 2), (50, 1)):
        found = [Pod(f"pod-{i}", start_ps=0, request=1000) for i in range(2)]
        now_ps = 1000 * PS
        reading = PodSamples({pod.name: Sample(10 * percent, now_ps) for pod in found})
        decision = reconcile(spec, ScalingLog(()), [reading], found, Scale(2, 2), now_ps, FAST)
        assert decision.desired == wanted
        told = "".join(advice(spec, FAST, idle={"cpu": percent}))
        assert ("2 replicas never become 1" in told) == (wanted == 2)


def test_s07_foreign_pods_hold_the_count():
    spec = HpaSpec(1, 20, (MetricSpec("Pods", "queue", "AverageValue", 10_000),))

    def proposal(values, replicas):
        found, reading = levels(values)
        scale = Scale(replicas, replicas)
        return reconcile(spec, ScalingLog(()), [reading], found, scale, 0, FAST).desired

    assert proposal([0] * 10 + [None] * 10, 10) == 10
    # For contrast, silent pods of one's own: 10 -> 7 -> 4 -> 1.
    seen, replicas = [], 10
    for _ in range(3):
        replicas = proposal([0] * 3 + [None] * (replicas - 3), replicas)
        seen.append(replicas)
    assert seen == [7, 4, 1]
    labels = {"app": "inference"}
    others = [{"app": "inference", "priority": "batch"}] * 10 + [{"app": "other"}]
    assert "10 pods that are not its own" in "".join(
        advice(spec, FAST, selector=labels, pod_labels=others)
    )


def test_s08_a_failed_metric_forbids_shrinking_only():
    spec = HpaSpec(
        1,
        20,
        (
            MetricSpec("Pods", "queue", "AverageValue", 5000),
            external("Value", 3, "latency"),
        ),
        Behavior(),
    )
    log = ScalingLog((), shown=(4000, 2000))
    few, reading = levels([1, 2, 1, 1, 2, 1])
    down = reconcile(spec, log, [reading, Failed("no such metric")], few, Scale(6, 6), 0)
    assert down.proposals[0].replicas == 2
    assert down.desired == 6
    assert down.log.shown == (4000, 2000)
    (active,) = [c for c in down.conditions if c.kind == "ScalingActive"]
    assert (active.status, active.reason) == (False, "FailedGetExternalMetric")
    assert "latency" in down.reason
    many, reading = levels([7, 8, 7, 8, 7, 8])
    up = reconcile(spec, log, [reading, Failed("no such metric")], many, Scale(6, 6), SYNC_PS)
    assert up.desired == 9
    assert "latency" in up.error


def test_s11_a_ratio_of_what_was_asked_for_runs_away():
    """aibrix#2670: two ready pods at twice the target order 4, 8, 16 pods; the HPA orders 4 and waits."""
    spec = RatioSpec(1, 100, 1.0, up_cooldown_ps=0)
    seen, replicas = [], 2
    for look in range(3):
        replicas = apa(spec, RatioState(), [2.0, 2.0], replicas, 2, look * SYNC_PS).desired
        seen.append(replicas)
    assert seen == [4, 8, 16]
    guarded = RatioSpec(1, 100, 1.0, guard_pending=True)
    seen, replicas = [], 2
    for look in range(3):
        replicas = apa(guarded, RatioState(), [2.0, 2.0], replicas, 2, look * SYNC_PS).desired
        seen.append(replicas)
    assert seen == [4, 4, 4]
    hpa = HpaSpec(1, 100, (MetricSpec("Pods", "queue", "AverageValue", 1000),), Behavior())
    log, replicas, seen = ScalingLog(()), 2, []
    for look in range(3):
        found, reading = levels([2] * 2 + [None] * (replicas - 2))
        scale = Scale(replicas, replicas)
        decision = reconcile(hpa, log, [reading], found, scale, look * SYNC_PS)
        log, replicas = decision.log, decision.desired
        seen.append(replicas)
    assert seen == [4, 4, 4]


def test_s12_a_silent_pod_does_not_block_the_decision():
    found, reading = levels([9, 9, 9, 9, None])
    spec = HpaSpec(1, 20, (MetricSpec("Pods", "queue", "AverageValue", 5000),), Behavior())
    assert reconcile(spec, ScalingLog(()), [reading], found, Scale(5, 5), 0).desired == 8


def test_s19_the_tutorial_multiplies_the_backlog():
    """production-stack's hpa-10.yaml: a total of 4 as Object/Value with target 1."""
    metric = MetricSpec("Object", "vllm:num_requests_waiting", "Value", 1000)
    spec = HpaSpec(1, 64, (metric,), Behavior())
    generous = HpaSpec(1, 64, (metric,))
    seen = []
    for replicas, ready in ((1, 1), (4, 4), (16, 16)):
        scale = Scale(replicas, replicas)
        found = reconcile(spec, ScalingLog(()), [Total((4000,))], pods(ready), scale, 0)
        seen.append(found.proposed)
    assert seen == [4, 16, 64]
    assert "use AverageValue 1" in "".join(advice(generous, FAST))
    average = HpaSpec(1, 64, (MetricSpec("Object", metric.name, "AverageValue", 1000),))
    assert (
        reconcile(average, ScalingLog(()), [Total((4000,))], pods(4), Scale(4, 4), 0).desired == 4
    )


@pytest.mark.parametrize("ready", [0, 1, 3])
def test_scaling_to_a_rival_is_refused(ready):
    """Two autoscalers on the same pods: neither scales (AmbiguousSelector)."""
    spec = HpaSpec(1, 20, (external("AverageValue", 1),))
    found = reconcile(
        spec, ScalingLog(()), [Total((9000,))], pods(ready), Scale(3, 3), 0, rivals=["a", "b"]
    )
    assert found.desired == 3
    assert "AmbiguousSelector" in {c.reason for c in found.conditions}
