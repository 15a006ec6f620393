"""What holds of the HPA whatever it is told."""

from hypothesis import given, settings
from hypothesis import strategies as st

from twin.clock import PS
from twin.cluster.autoscaler import reconcile
from twin.cluster.specs import (
    Behavior,
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

NOW_PS = 10_000 * PS
periods = st.integers(1, 120).map(lambda s: s * PS)
stamps = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 400)), max_size=6).map(
    lambda pairs: tuple((n, NOW_PS - age * PS) for n, age in pairs)
)
rules = st.builds(
    ScalingRules,
    st.lists(
        st.builds(
            ScalingPolicy, st.sampled_from(["Pods", "Percent"]), st.integers(1, 300), periods
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.sampled_from(["Max", "Min", "Disabled"]),
    st.none() | st.integers(0, 400).map(lambda s: s * PS),
    st.none() | st.floats(0, 0.5),
)
behaviors = st.none() | st.builds(Behavior, rules, rules)
logs = st.builds(ScalingLog, st.none() | stamps, stamps, stamps, st.booleans())
pod_states = st.tuples(
    st.sampled_from(["Running", "Running", "Running", "Pending", "Failed"]),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, 30_000),
)


@st.composite
def looks(draw):
    """(spec, log, readings, pods, scale) of any state a cluster may be in."""
    least = draw(st.integers(0, 6))
    most = draw(st.integers(max(1, least), 12))
    kinds = draw(
        st.lists(st.sampled_from(["Pods", "Value", "AverageValue"]), min_size=1, max_size=3)
    )
    if least == 0 and "Pods" in kinds:
        kinds.append("Value")
    metrics = tuple(
        MetricSpec("Pods", f"m{i}", "AverageValue", 5000)
        if kind == "Pods"
        else MetricSpec("External", f"m{i}", kind, 5000)
        for i, kind in enumerate(kinds)
    )
    states = draw(st.lists(pod_states, max_size=12))
    pods = [
        Pod(f"p{i}", phase, ready, 0, None, deleted)
        for i, (phase, ready, deleted, _) in enumerate(states)
    ]
    samples = {
        pod.name: Sample(value, NOW_PS)
        for pod, (*_, value) in zip(pods, states, strict=True)
        if value is not None
    }
    readings = [
        Failed("outage")
        if draw(st.integers(0, 5)) == 0
        else PodSamples(samples)
        if metric.kind == "Pods"
        else Total(tuple(draw(st.lists(st.integers(0, 100_000), max_size=2))))
        for metric in metrics
    ]
    replicas = draw(st.integers(0, 14))
    scale = Scale(replicas, draw(st.integers(0, 14)))
    return HpaSpec(least, most, metrics, draw(behaviors)), draw(logs), readings, pods, scale


@given(looks())
def test_a_decision_is_within_bounds_and_repeatable(look):
    spec, log, readings, _, scale = look
    found = reconcile(*look, NOW_PS)
    assert found == reconcile(*look, NOW_PS)
    if found.desired != scale.replicas:
        assert spec.min_replicas <= found.desired <= spec.max_replicas
    if found.error and found.proposed is None:
        assert found.desired == scale.replicas
        assert found.log.shown == log.shown
    if any(isinstance(reading, Failed) for reading in readings):
        inside = spec.min_replicas <= scale.replicas <= spec.max_replicas
        assert found.desired >= scale.replicas or not inside
    changes = len(found.log.up_events) + len(found.log.down_events)
    assert changes <= len(log.up_events) + len(log.down_events) + 1


@given(looks())
def test_never_past_current_the_wrong_way(look):
    """Whatever the log holds, a proposal above current does not shrink the target, nor one below grow it."""
    scale = look[-1]
    found = reconcile(*look, NOW_PS)
    if found.proposed is None or look[0].behavior is None:
        return
    if found.proposed > scale.replicas:
        assert found.desired >= min(scale.replicas, look[0].max_replicas)
    if found.proposed < scale.replicas:
        assert found.desired <= max(scale.replicas, look[0].min_replicas)


@settings(max_examples=500)
@given(looks(), st.integers(0, 50_000))
def test_more_load_never_means_fewer_replicas(look, more):
    """For totals and for Pods metrics of which every pod is ready and reports. (With unready or missing pods the
    controller itself is not monotone: the values it puts in for them jump where the ratio passes 1.)"""
    spec, log, readings, pods, _ = look
    if any(not pod.counts_as_ready or pod.is_deleted for pod in pods):
        pods = [Pod(pod.name) for pod in pods]
        readings = [
            PodSamples({pod.name: Sample(4000, NOW_PS) for pod in pods})
            if metric.kind == "Pods"
            else reading
            for metric, reading in zip(spec.metrics, readings, strict=True)
        ]
    scale = Scale(len(pods), len(pods))
    if any(isinstance(r, PodSamples) and len(r.by_pod) < len(pods) for r in readings):
        return
    louder = [
        PodSamples({n: Sample(s.value + more, NOW_PS) for n, s in r.by_pod.items()})
        if isinstance(r, PodSamples)
        else Total((*r.values, more))
        if isinstance(r, Total) and r.values
        else r
        for r in readings
    ]
    before = reconcile(spec, log, readings, pods, scale, NOW_PS)
    after = reconcile(spec, log, louder, pods, scale, NOW_PS)
    assert after.desired >= before.desired
