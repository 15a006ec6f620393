"""The documents that are deployed, read and written."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from twin.clock import PS
from twin.cluster.cron import parse_cron
from twin.cluster.keda import CronTrigger, Fallback, KedaSpec, QueryTrigger
from twin.cluster.objects import read_hpa, read_scaled_object, write_hpa, write_scaled_object
from twin.cluster.quantity import milli, quantity
from twin.cluster.specs import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    TARGETS,
    Behavior,
    HpaSpec,
    MetricSpec,
    ScalingPolicy,
    ScalingRules,
)

ARTICLE = """
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: online, namespace: ai-inference}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: online}
  minReplicas: 2
  maxReplicas: 10
  metrics:
  - {type: Pods, pods: {metric: {name: queue}, target: {type: AverageValue, averageValue: "5"}}}
  - {type: Pods, pods: {metric: {name: p99_ms}, target: {type: AverageValue, averageValue: "3k"}}}
  behavior:
    scaleUp: {stabilizationWindowSeconds: 30, policies: [{type: Pods, value: 2, periodSeconds: 60}]}
"""


def test_the_document_of_the_article():
    spec = read_hpa(yaml.safe_load(ARTICLE))
    assert (spec.min_replicas, spec.max_replicas) == (2, 10)
    assert [metric.value for metric in spec.metrics] == [5000, 3_000_000]
    up = ScalingRules((ScalingPolicy("Pods", 2, 60 * PS),), "Max", 30 * PS)
    assert spec.behavior == Behavior(up, DEFAULT_DOWN)


def test_what_kubernetes_fills_in():
    spec = read_hpa({"maxReplicas": 3})
    assert spec == HpaSpec(1, 3, (MetricSpec("Resource", "cpu", "Utilization", 80),))
    assert read_hpa({"maxReplicas": 3, "behavior": {}}).behavior == Behavior(
        DEFAULT_UP, DEFAULT_DOWN
    )


names = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
policies = st.builds(
    ScalingPolicy,
    st.sampled_from(["Pods", "Percent"]),
    st.integers(1, 500),
    st.integers(1, 1800).map(lambda s: s * PS),
)
rules = st.builds(
    ScalingRules,
    st.lists(policies, min_size=1, max_size=3).map(tuple),
    st.sampled_from(["Max", "Min", "Disabled"]),
    st.integers(0, 3600).map(lambda s: s * PS),
    st.none() | st.integers(0, 1000).map(lambda n: n / 1000),
)
selectors = st.dictionaries(names, names, max_size=2).map(lambda d: tuple(sorted(d.items())))


@st.composite
def metrics(draw):
    kind = draw(st.sampled_from(sorted(TARGETS)))
    target = draw(st.sampled_from(TARGETS[kind]))
    of_resource = kind in ("Resource", "ContainerResource")
    return MetricSpec(
        kind,
        draw(st.sampled_from(["cpu", "memory"])) if of_resource else draw(names),
        target,
        draw(st.integers(1, 10**6)),
        draw(names) if kind == "ContainerResource" else None,
        f"Service/{draw(names)}" if kind == "Object" else None,
        () if of_resource else draw(selectors),
    )


hpas = st.builds(
    lambda least, more, found, behavior: HpaSpec(least, least + more, tuple(found), behavior),
    st.integers(1, 5),
    st.integers(0, 50),
    st.lists(metrics(), min_size=1, max_size=4),
    st.none() | st.builds(Behavior, rules, rules),
)


@given(hpas)
def test_an_hpa_written_and_read_is_the_same(spec):
    document = write_hpa(spec, "online", "online", "ai")
    assert read_hpa(yaml.safe_load(yaml.safe_dump(document))) == spec


def test_what_is_written_is_valid():
    spec = read_hpa(yaml.safe_load(ARTICLE))
    kubernetes_validate.validate(write_hpa(spec, "online", "online"), "1.37", strict=True)


triggers = st.lists(
    st.builds(
        QueryTrigger,
        names,
        st.just("sum(vllm:num_requests_waiting)"),
        st.integers(1, 10**6),
        st.integers(0, 10**4),
        st.sampled_from(["AverageValue", "Value"]),
        st.booleans(),
    )
    | st.builds(
        CronTrigger,
        names,
        st.just(parse_cron("50 8 * * 1-5")),
        st.just(parse_cron("0 18 * * mon-fri")),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda trigger: trigger.name,
)
kedas = st.builds(
    lambda found, least, more, idle, poll, cool, fallback, behavior: KedaSpec(
        tuple(found),
        least,
        least + more,
        0 if idle and least else None,
        poll * PS,
        cool * PS,
        fallback,
        behavior,
    ),
    triggers,
    st.integers(0, 4),
    st.integers(1, 20),
    st.booleans(),
    st.integers(1, 60),
    st.integers(0, 900),
    st.none() | st.builds(Fallback, st.integers(0, 5), st.integers(0, 5)),
    st.none() | st.builds(Behavior, rules, rules),
)


@given(kedas)
def test_a_scaled_object_written_and_read_is_the_same(spec):
    document = write_scaled_object(spec, "online", "online", "http://prometheus:9090")
    assert read_scaled_object(yaml.safe_load(yaml.safe_dump(document))) == spec


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"apiVersion": "autoscaling/v1"}, "apiVersion: must be autoscaling/v2"),
        ({"kind": "Deployment"}, "kind: must be HorizontalPodAutoscaler"),
    ],
)
def test_other_documents(change, told):
    with pytest.raises(ValueError, match=told):
        read_hpa(yaml.safe_load(ARTICLE) | change)


def pods_metric(target):
    return [{"type": "Pods", "pods": {"metric": {"name": "a"}, "target": target}}]


def scale_up(**rules):
    return {"scaleUp": rules}


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"maxReplicas": 0}, "maxReplicas: must be a whole number from 1"),
        ({"maxReplicas": True}, "maxReplicas: must be a whole number"),
        ({"minReplicas": 4}, "minReplicas must be >= 0 and <= maxReplicas"),
        ({"minReplicas": 0}, "minReplicas 0 needs an Object or External metric"),
        ({"replicas": 3}, "spec.replicas: not known"),
        ({"behavior": scale_up(stabilizationWindowSeconds=4000)}, "0 to 3600"),
        ({"behavior": scale_up(selectPolicy="Mean")}, "must be Max, Min or Disabled"),
        ({"behavior": scale_up(policies=[])}, "must have an entry"),
        (
            {"behavior": scale_up(policies=[{"type": "Pods", "value": 1, "periodSeconds": 1801}])},
            "1 to 1800",
        ),
        (
            {"metrics": pods_metric({"type": "AvgValue"})},
            "metrics.0.pods.target.type: must be one of AverageValue, got 'AvgValue'",
        ),
        (
            {"metrics": pods_metric({"type": "AverageValue", "averageValue": "5 req"})},
            "averageValue: '5 req' is no quantity",
        ),
        ({"metrics": pods_metric({"type": "AverageValue"})}, "averageValue: is missing"),
        ({"metrics": [{"type": "Pod"}]}, "metrics.0.type: must be one of"),
    ],
)
def test_what_the_api_server_refuses(spec, told):
    with pytest.raises(ValueError, match=told):
        read_hpa({"maxReplicas": 3} | spec)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"triggers": [{"type": "cpu", "metadata": {}}]}, "'cpu' is not modelled"),
        ({"triggers": [{"type": "prometheus", "metadata": {"threshold": "5"}}]}, "query: is missing"),
        ({"triggers": []}, "triggers must not be empty"),
        ({"advanced": {"scalingModifiers": {}}, "triggers": []}, "scalingModifiers: not known or not modelled"),
    ],
)  # fmt: skip
def test_what_keda_or_the_twin_refuses(spec, told):
    with pytest.raises(ValueError, match=told):
        read_scaled_object(spec)


@pytest.mark.parametrize(
    ("written", "thousandths"),
    [("5", 5000), (5, 5000), ("500m", 500), ("1.5", 1500), ("2k", 2_000_000), ("1Ki", 1_024_000), ("1e3", 1_000_000),
     (0.1, 100), ("1u", 1), ("1n", 1), (".5", 500), ("0", 0)],
)  # fmt: skip
def test_quantities(written, thousandths):
    assert milli(written) == thousandths


@given(st.integers(0, 10**15))
def test_a_quantity_written_and_read_is_the_same(thousandths):
    assert milli(quantity(thousandths)) == thousandths


@pytest.mark.parametrize("text", ["", "5x", "1 000", "0x10", "1e999", "nan", "5%"])
def test_no_quantities(text):
    with pytest.raises(ValueError, match="no quantity"):
        milli(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0 8 * *", "five fields"),
        ("0 8 1 * *", "days of the month"),
        ("61 8 * * *", "not within 0 to 59"),
        ("x 8 * * *", "no number"),
    ],
)
def test_no_crons(text, told):
    with pytest.raises(ValueError, match=told):
        parse_cron(text)


def test_crons():
    monday_8_50 = 8 * 60 + 50
    cron = parse_cron("50 8 * * 1-5")
    assert cron.until_next(monday_8_50 - 1) == 1
    assert cron.until_next(monday_8_50) == 24 * 60
    assert len(parse_cron("*/15 9-10 * * sun").minutes) == 8
    assert parse_cron("0 0 * * 0").minutes == parse_cron("0 0 * * 7").minutes == (6 * 24 * 60,)


def test_the_manifest_of_the_article(twin_data):
    path = Path(twin_data).parent / "cases" / "article-manifest.yaml"
    if not path.is_file():
        pytest.skip("the article's manifest is not beside the third-party data")
    _, hpa = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    spec = read_hpa(hpa)
    assert [m.name for m in spec.metrics] == [
        "vllm_request_queue_length",
        "vllm_request_latency_p99_ms",
    ]
