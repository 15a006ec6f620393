"""KEDA on top of its HPA: activation, cooldown, fallback, schedules."""

import pytest

from twin.clock import PS
from twin.cluster.autoscaler import reconcile
from twin.cluster.cron import parse_cron
from twin.cluster.keda import (
    CronTrigger,
    Fallback,
    KedaSpec,
    KedaState,
    QueryTrigger,
    poll,
    readings,
)
from twin.cluster.specs import Controller, Failed, Pod, Scale, ScalingLog, Total

QUEUE = QueryTrigger("queue", "sum(vllm:num_requests_waiting)", 5000)
OUTAGE = Failed("no answer")


def life(spec, queue, replicas, seconds, flags=Controller()):  # noqa: B008
    """[(second, replicas)] of each change, with KEDA and its HPA at work and pods that are ready at once."""
    state, log, changes = KedaState(), ScalingLog(), []
    looks = {s * spec.polling_interval_ps // PS for s in range(seconds)}
    for second in range(seconds):
        before, now_ps = replicas, second * PS
        answer = queue(second)
        if second in looks:
            found = poll(spec, state, [answer], replicas, 0, now_ps)
            state, replicas = found.state, found.desired
        if second % 15 == 0:
            pods = [Pod(f"p{i}") for i in range(replicas)]
            given, state = readings(spec, state, [answer], replicas, replicas, 0)
            decision = reconcile(
                spec.hpa, log, given, pods, Scale(replicas, replicas), now_ps, flags
            )
            log, replicas = decision.log, decision.desired
        if replicas != before:
            changes.append((second, replicas))
    return changes


def test_cooldown_rules_the_last_step_only():
    """kedacore/keda#7770: N -> 1 is the HPA's business; cooldown takes what is there to 0, possibly from N."""
    stops = 600
    patient = KedaSpec((QUEUE,), 0, 10, cooldown_ps=900 * PS)
    changes = life(patient, lambda s: 25_000 if s < stops else 0, 5, 3000)
    # The HPA's window holds 5 for 300 s after the load has gone, then 1; KEDA's cooldown then takes the last one.
    assert [replicas for _, replicas in changes] == [1, 0]
    assert changes[0][0] - stops == pytest.approx(300, abs=30)
    assert changes[1][0] - stops == pytest.approx(900, abs=60)
    # A cooldown shorter than the window goes straight from 5 to 0.
    hasty = KedaSpec((QUEUE,), 0, 10, cooldown_ps=60 * PS)
    changes = life(hasty, lambda s: 25_000 if s < stops else 0, 5, 3000)
    assert [replicas for _, replicas in changes] == [0]
    assert changes[0][0] - stops == pytest.approx(60, abs=60)


@pytest.mark.parametrize("cooldown", [1, 60, 1000])
def test_with_a_minimum_the_cooldown_changes_nothing(cooldown):
    spec = KedaSpec((QUEUE,), 1, 10, cooldown_ps=cooldown * PS)
    changes = life(spec, lambda s: 25_000 if s < 600 else 0, 5, 3000)
    assert changes == life(KedaSpec((QUEUE,), 1, 10), lambda s: 25_000 if s < 600 else 0, 5, 3000)
    assert [replicas for _, replicas in changes] == [1]


def test_activation_wakes_a_target():
    spec = KedaSpec((QueryTrigger("queue", "q", 5000, activation_threshold=2000),), 0, 10)
    for waiting, wanted in ((0, 0), (2000, 0), (2001, 1)):
        found = poll(spec, KedaState(), [waiting], 0, 0, 10 * PS)
        assert (found.desired, found.is_active) == (wanted, wanted == 1)
    # The HPA cannot do it: at zero it is off.
    given, _ = readings(spec, KedaState(), [9000], 0, 0, 0)
    off = reconcile(spec.hpa, ScalingLog(), given, [], Scale(0, 0), 0)
    assert off.desired == 0
    assert "ScalingDisabled" in {c.reason for c in off.conditions}


def test_idle_replicas():
    spec = KedaSpec((QUEUE,), 3, 10, idle_replicas=1, cooldown_ps=60 * PS)
    assert poll(spec, KedaState(0), [0], 3, 0, 60 * PS).desired == 3
    assert poll(spec, KedaState(0), [0], 3, 0, 61 * PS).desired == 1
    assert poll(spec, KedaState(0), [1], 1, 0, 61 * PS).desired == 3


def test_an_empty_answer_is_zero_unless_told_otherwise():
    """A query that matches nothing scales down to the minimum: ignoreNullValues is true by default."""
    strict = QueryTrigger("queue", "q", 5000, ignore_null_values=False)
    for trigger, reading in ((QUEUE, Total((0,))), (strict, Failed("the query returned nothing"))):
        given, _ = readings(KedaSpec((trigger,)), KedaState(), [None], 4, 4, 0)
        assert given == [reading]


def test_fallback_comes_after_the_threshold():
    spec = KedaSpec((QUEUE,), 1, 10, fallback=Fallback(3, 6))
    state, seen = KedaState(), []
    for answer in (OUTAGE, OUTAGE, OUTAGE, OUTAGE, 1000, OUTAGE):
        given, state = readings(spec, state, [answer], 2, 2, 0)
        seen.append(given[0])
    assert seen == [OUTAGE] * 3 + [Total((30_000,)), Total((1000,)), OUTAGE]


@pytest.mark.parametrize(
    ("behavior", "replicas", "wanted"),
    [("static", 9, 6), ("currentReplicas", 9, 9), ("currentReplicasIfHigher", 9, 9),
     ("currentReplicasIfHigher", 2, 6), ("currentReplicasIfLower", 9, 6), ("currentReplicasIfLower", 2, 2)],
)  # fmt: skip
def test_fallback_behaviours(behavior, replicas, wanted):
    spec = KedaSpec((QUEUE,), 1, 10, fallback=Fallback(0, 6, behavior))
    given, _ = readings(spec, KedaState(), [OUTAGE], replicas, replicas, 0)
    assert given == [Total((5000 * wanted,))]
    pods = [Pod(f"p{i}") for i in range(replicas)]
    scale = Scale(replicas, replicas)
    assert reconcile(spec.hpa, ScalingLog(()), given, pods, scale, 0).proposed == wanted


def test_a_value_fallback_is_divided_by_the_ready_pods():
    """As the metric is multiplied by them: 6 replicas wanted with 3 ready is twice the target."""
    spec = KedaSpec((QueryTrigger("q", "q", 5000, target="Value"),), 1, 10, fallback=Fallback(0, 6))
    given, _ = readings(spec, KedaState(), [OUTAGE], 4, 3, 0)
    assert given == [Total((10_000,))]
    pods = [Pod(f"p{i}", ready=i < 3) for i in range(4)]
    assert reconcile(spec.hpa, ScalingLog(()), given, pods, Scale(4, 4), 0).proposed == 6


def test_a_schedule_is_a_floor():
    """Ten minutes before nine there are 4 replicas, whatever the queue says; more if it says so."""
    cron = CronTrigger("morning", parse_cron("50 8 * * 1-5"), parse_cron("0 18 * * 1-5"), 4)
    spec = KedaSpec((cron, QUEUE), 1, 10)
    nine = 9 * 60
    for minute, queue, wanted in (
        (nine - 11, 0, 1),
        (nine - 10, 0, 4),
        (nine, 40_000, 8),
        (18 * 60 - 1, 0, 4),
        (18 * 60, 0, 1),
        (5 * 24 * 60 + nine, 0, 1),  # Saturday
    ):
        given, _ = readings(spec, KedaState(), [None, queue], 1, 1, minute)
        pods = [Pod("p")]
        found = reconcile(spec.hpa, ScalingLog(()), given, pods, Scale(1, 1), 0)
        assert found.proposed == wanted, minute


def test_the_reason_tells_whether_a_cooldown_was_waited_for():
    spec = KedaSpec((QUEUE,), 0, 4, cooldown_ps=60 * PS)
    told = [poll(spec, state, [0], 2, 0, 61 * PS) for state in (KedaState(), KedaState(0))]
    assert [found.desired for found in told] == [0, 0]
    assert told[0].reason == "no trigger was ever active, so that no cooldown is waited for"
    assert told[1].reason == "no trigger active for the cooldown"
