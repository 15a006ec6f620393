"""Every vector read off Kubernetes' own unit tests of the autoscaling controller."""

import json
from collections import Counter
from pathlib import Path

import pytest

from twin.clock import PS, to_ps
from twin.cluster import limits
from twin.cluster.autoscaler import Combined, combine, reconcile
from twin.cluster.proposals import Tolerance, group_pods, propose
from twin.cluster.specs import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    Behavior,
    Controller,
    Failed,
    HpaSpec,
    MetricSpec,
    Pod,
    PodSamples,
    Proposal,
    Sample,
    Scale,
    ScalingLog,
    ScalingPolicy,
    ScalingRules,
    Total,
)

FILE = Path(__file__).parent / "hpa_vectors.json"
VECTORS = json.loads(FILE.read_text(encoding="utf-8"))["vectors"]
NOW_PS = 10**6 * PS
LONG_AGO_PS = 0


def of_kind(*kinds):
    found = [v for v in VECTORS if v["kind"] in kinds]
    return pytest.mark.parametrize("vector", found, ids=lambda v: f"{v['id']} {v['kind']}")


def ago(seconds):
    return NOW_PS - to_ps(seconds)


def stamped(pairs):
    return tuple((n, ago(age)) for n, age in pairs)


def tolerance(given):
    return Tolerance(given["tolerance"]["up"], given["tolerance"]["down"])


def controller(given):
    return Controller(
        cpu_initialization_period_ps=to_ps(given.get("cpu_initialization_period_s", 120)),
        initial_readiness_delay_ps=to_ps(given.get("initial_readiness_delay_s", 10)),
    )


def pods(given):
    requests = given.get("requests_milli_per_container")
    containers = len(given["usage_milli"][0]) if given.get("usage_milli") else 1
    found = []
    for i, pod in enumerate(given["pods"]):
        start_ps = ago(pod["start_age_s"]) if "start_age_s" in pod else LONG_AGO_PS
        found.append(
            Pod(
                f"pod-{i}",
                pod.get("phase", "Running"),
                pod.get("ready", True),
                start_ps,
                None,
                pod.get("deleted", False),
                requests[i] * containers if requests else None,
            )
        )
    return found


def samples(values, window_s=0, foreign=0):
    """By pod; a list of a pod's containers is summed. Those beyond the pods belong to nobody here."""
    sums = [sum(value) if isinstance(value, list) else value for value in values]
    named = {f"pod-{i}": Sample(value, NOW_PS, to_ps(window_s)) for i, value in enumerate(sums)}
    named |= {f"foreign-{i}": Sample(1000, NOW_PS) for i in range(foreign)}
    return PodSamples(named)


def check(proposal, expected):
    if "error" in expected:
        assert proposal.replicas is None
        assert "no metrics" in proposal.error
        assert "matched" in proposal.error
        return
    assert proposal.replicas == expected["desired"]
    if "utilization_pct" in expected:
        assert proposal.current == expected["utilization_pct"]
    if "average_milli" in expected:
        assert proposal.average == expected["average_milli"]


@of_kind("resource_utilization")
def test_utilization(vector):
    given = vector["input"]
    metric = MetricSpec("Resource", "cpu", "Utilization", given["target_utilization_pct"])
    reading = samples(
        given["usage_milli"], given["metric_window_s"], given.get("foreign_samples", 0)
    )
    scale = Scale(given["current_replicas"], given["current_replicas"])
    args = (pods(given), scale, tolerance(given), controller(given), NOW_PS)
    check(propose(metric, reading, *args), vector["expected"])


@of_kind("pods_average_value")
def test_pods(vector):
    given = vector["input"]
    metric = MetricSpec("Pods", "qps", "AverageValue", given["target_milli"])
    scale = Scale(given["current_replicas"], given["current_replicas"])
    args = (pods(given), scale, tolerance(given), controller(given), NOW_PS)
    check(propose(metric, samples(given["samples_milli"]), *args), vector["expected"])


@of_kind("object_value", "external_value", "object_average_value", "external_average_value")
def test_totals(vector):
    given, kind = vector["input"], vector["kind"]
    target = "AverageValue" if "average" in kind else "Value"
    metric = MetricSpec(
        "Object" if "object" in kind else "External", "qps", target, given["target_milli"]
    )
    scale = Scale(given["current_replicas"], given["current_replicas"])
    args = (pods(given), scale, tolerance(given), controller(given), NOW_PS)
    check(propose(metric, Total((given["total_milli"],)), *args), vector["expected"])


@of_kind("group_pods")
def test_group_pods(vector):
    given = vector["input"]
    age = given["pod"].get("start_age_s")
    changed = given["pod"].get("ready_transition_age_s")
    pod = Pod(
        "pod",
        given["pod"]["phase"],
        given["pod"].get("ready"),
        None if age is None else ago(age),
        None if changed is None else ago(changed),
        given["pod"].get("deleted", False),
    )
    metric = given["metric"]
    found = {}
    if metric is not None:
        # An empty sample of Go has the zero time, long before everything else.
        at_ps = ago(metric["age"]) if "age" in metric else LONG_AGO_PS
        found["pod"] = Sample(1, at_ps, to_ps(metric.get("window", 0)))
    groups = group_pods([pod], found, given["is_cpu"], controller(given), NOW_PS)
    assert getattr(groups, vector["expected"]["class"]) == ["pod"]


@of_kind("clamp_no_behavior")
def test_clamp(vector):
    given = vector["input"]
    found = limits.clamp(given["current"], given["desired"], given["min"], given["max"])
    assert found == (vector["expected"]["desired"], vector["expected"]["condition"])


@of_kind("stabilize_no_behavior")
def test_stabilize(vector):
    given, expected = vector["input"], vector["expected"]
    known = stamped(given["recommendations"])
    desired, log = limits.stabilize(known, given["desired"], to_ps(given["window_s"]), NOW_PS)
    assert (desired, len(log)) == (expected["desired"], expected["log_length"])


@of_kind("stabilize_behavior")
def test_stabilize_both(vector):
    given, expected = vector["input"], vector["expected"]
    windows = to_ps(given["up_window_s"]), to_ps(given["down_window_s"])
    known = stamped(given["recommendations"])
    desired, log = limits.stabilize_both(
        known, given["current"], given["desired"], *windows, NOW_PS
    )
    assert desired == expected["desired"]
    if "log_values" in expected:
        assert [replicas for replicas, _ in log] == expected["log_values"]


def rules(written, default):
    if written is None:
        return default
    policies = tuple(
        ScalingPolicy(p["type"], p["value"], to_ps(p["period"])) for p in written["policies"]
    )
    return ScalingRules(policies, written["select"], to_ps(written.get("stabilization", 0)))


@of_kind("rate_limit")
def test_rate_limit(vector):
    given, expected = vector["input"], vector["expected"]
    behavior = Behavior(
        rules(given["scale_up_rules"], DEFAULT_UP), rules(given["scale_down_rules"], DEFAULT_DOWN)
    )
    log = ScalingLog((), stamped(given["scale_up_events"]), stamped(given["scale_down_events"]))
    bounds = given["min"], given["max"]
    found = limits.limit_rate(given["current"], given["desired"], *bounds, behavior, log, NOW_PS)
    assert found == (expected["desired"], expected["condition"])


@of_kind("limit")
def test_limit(vector):
    given = vector["input"]
    limit = {"up": limits.up_limit, "down": limits.down_limit}[given["direction"]]
    found = limit(given["current"], rules(given["rules"], None), ScalingLog(), NOW_PS)
    assert found == vector["expected"]["limit"]


@of_kind("store_event")
def test_store_event(vector):
    given, expected = vector["input"], vector["expected"]
    before = stamped(given["previous"])
    assert limits.change_within(before, 60 * PS, NOW_PS) == expected["change_last_60s_before"]
    log = limits.store_event(before, given["delta"], rules(given["rules"], None), NOW_PS)
    assert [change for change, _ in log] == expected["log"]


@of_kind("reconcile")
def test_reconcile(vector):
    """Each proposal is that of an External metric with as many tasks, one a replica."""
    given, expected = vector["input"], vector["expected"]
    proposals = given["metric_proposals"]
    metric = MetricSpec("External", "tasks", "AverageValue", 1000)
    behavior = given["behavior"]
    if behavior is not None:
        behavior = Behavior(
            rules(behavior["up"], DEFAULT_UP), rules(behavior["down"], DEFAULT_DOWN)
        )
    spec = HpaSpec(given["min"], given["max"], (metric,) * max(1, len(proposals)), behavior)
    readings = [Failed("none") if n is None else Total((n * 1000,)) for n in proposals]
    known = given["recommendations"]
    log = ScalingLog(None if known is None else stamped(known))
    current = given["spec_replicas"]
    decision = reconcile(
        spec, log, readings or [Failed("not read")], [], Scale(current, current), NOW_PS
    )
    assert decision.desired == expected["desired"]
    reasons = {condition.reason for condition in decision.conditions}
    wanted = expected.get("condition")
    if wanted == "metric error":
        assert decision.error
        assert "FailedGetExternalMetric" in reasons
    elif wanted == "ScaleDownStabilized":
        assert decision.stabilized == decision.current
        assert wanted in reasons
    elif wanted is not None:
        assert wanted in reasons


@of_kind("sequence")
def test_to_and_from_zero(vector):
    given, expected = vector["input"], vector["expected"]
    metric = MetricSpec("External", "tasks", "AverageValue", given["target"] * 1000)
    spec = HpaSpec(given["min"], given["max"], (metric,))
    flags = Controller(downscale_stabilization_ps=to_ps(given["downscale_window_s"]))
    replicas, log, now_ps = given["start_replicas"], ScalingLog(), NOW_PS
    for total, wanted, zero in zip(
        given["totals"], expected["replicas"], expected["scaled_to_zero_condition"], strict=True
    ):
        for _ in range(4):
            now_ps += flags.sync_period_ps
            pods = [Pod(f"pod-{i}") for i in range(replicas)]
            decision = reconcile(
                spec, log, [Total((total * 1000,))], pods, Scale(replicas, replicas), now_ps, flags
            )
            replicas, log = decision.desired, decision.log
        assert replicas == wanted
        assert str(log.scaled_to_zero) == zero


def test_there_are_all_of_them():
    kinds = Counter(vector["kind"] for vector in VECTORS)
    assert sum(kinds.values()) == 89
    assert len(kinds) == 15


def test_the_first_of_equal_metrics_is_named():
    metrics = [MetricSpec("External", name, "AverageValue", 1000) for name in "ab"]
    found = combine(metrics, [Proposal("a", 3), Proposal("b", 3)], 2)
    assert found == Combined(3, "a", None)
