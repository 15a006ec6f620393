"""`cluster:` in a scenario file: what is taken, what is refused and where, what is probably not meant."""

import pickle

import pytest
import yaml

from tests.cluster.test_fleet import SCALED, fleet, hpa, start
from tests.runs import document, run
from twin.clock import PS
from twin.cluster.objects import write_hpa, write_scaled_object
from twin.cluster.promql import parse_query
from twin.errors import InputError
from twin.scenario import load_scenario

TRIGGER = {"type": "prometheus", "metadata": {"query": "sum(vllm:num_requests_waiting)", "threshold": "5"}}  # fmt: skip


def refused(cluster, *overrides):
    with pytest.raises(InputError) as error:
        load_scenario(fleet(cluster), overrides)
    return str(error.value)


def test_nothing_said_of_pods_means_fixed_replicas():
    assert load_scenario(document(cluster={"replicas": 3})).cluster.fleet is None
    assert load_scenario(document(cluster={"price_per_gpu_hour": 2})).cluster.fleet is None
    assert load_scenario(document(cluster={"cold_start": {}})).cluster.fleet is not None


@pytest.mark.parametrize(
    "cluster",
    [SCALED, {"keda": {"triggers": [TRIGGER]}}, {"kpa": {"max_replicas": 3, "target": 5}}],
)
def test_a_scenario_with_a_fleet_is_plain_data(cluster):
    scenario = load_scenario(fleet(cluster))
    again = load_scenario(scenario.to_dict())
    assert again.cluster == scenario.cluster
    assert pickle.loads(pickle.dumps(scenario)).cluster == scenario.cluster


def test_objects_in_files(tmp_path):
    """The very files that are applied; other objects in them are passed over."""
    spec = load_scenario(fleet(SCALED)).cluster.fleet.scaler.hpa
    keda = load_scenario(fleet({"keda": {"triggers": [TRIGGER]}})).cluster.fleet.scaler.keda
    (tmp_path / "hpa.yaml").write_text(
        yaml.safe_dump_all([{"kind": "Service"}, write_hpa(spec, "chat", "chat")])
    )
    (tmp_path / "keda.yaml").write_text(
        yaml.safe_dump(write_scaled_object(keda, "chat", "chat", "http://prometheus"))
    )
    (tmp_path / "none.yaml").write_text("kind: Service\n")
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(fleet({"hpa": "hpa.yaml"})))
    assert load_scenario(scenario).cluster.fleet.scaler.hpa == spec
    scenario.write_text(yaml.safe_dump(fleet({"keda": "keda.yaml"})))
    assert load_scenario(scenario).cluster.fleet.scaler.keda == keda
    for name, told in (
        ("none.yaml", "holds 0 objects of kind Horiz"),
        ("gone.yaml", "cannot be read"),
    ):
        scenario.write_text(yaml.safe_dump(fleet({"hpa": name})))
        with pytest.raises(InputError, match=told):
            load_scenario(scenario)
    scenario.write_text(yaml.safe_dump(fleet({"hpa": "hpa.yaml"})))
    changed = load_scenario(scenario, ["cluster.hpa.maxReplicas=9"])
    assert changed.cluster.fleet.scaler.hpa.max_replicas == 9


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"hpa": hpa() | {"maxReplica": 3}}, "cluster.hpa: spec.maxReplica: not known"),
        ({"hpa": 5}, "must be the spec of an HPA, got 5"),
        ({"hpa": {"maxReplicas": 3}}, "cpu of a container is not modelled"),
        ({"hpa": hpa(least=5, most=4)}, "minReplicas must be >= 0 and <= maxReplicas"),
        ({"keda": {"triggers": [{"type": "kafka", "metadata": {}}]}}, "'kafka' is not modelled"),
        ({"keda": {"triggers": [TRIGGER | {"metadata": {"query": "topk(3, x)", "threshold": "1"}}]}}, "topk"),
        ({"hpa": hpa(), "keda": {"triggers": [TRIGGER]}}, "hpa and keda would both set"),
        ({"hpa_rivals": ["a"]}, "without hpa there is nobody"),
        ({"controller": {"tolerance": 0.2}}, "changes nothing without hpa or keda"),
        ({"metrics": {"scrape_interval": 5}}, "changes nothing without an autoscaler"),
        ({"start": "Tue 08:00"}, "changes nothing without keda"),
        ({"keda": {"triggers": [TRIGGER]}, "start": "Tue 25:00"}, "must be a day and a time of day"),
        ({"apa": {"max_replicas": 3, "target": 1, "stable_window": 9}}, "only kpa has windows"),
        ({"kpa": {"max_replicas": 3, "target": 1, "tolerance": 0.5}}, "only apa has a tolerance"),
        ({"kpa": {"max_replicas": 3, "min_replicas": 4, "target": 1}}, "must be <= max_replicas"),
        ({"hpa": hpa(), "metrics": {"queries": {"other": "x"}}}, "no autoscaler asks for it"),
        ({"hpa": hpa(), "metrics": {"queries": {"vllm:num_requests_waiting": "sum("}}}, "ends too early|expected"),
        ({"hpa": hpa(), "metrics": {"faults": [{"kind": "nan", "start": 5, "until": 5}]}}, "later than start"),
        ({"hpa": hpa(), "metrics": {"faults": [{"kind": "api", "start": 5, "until": 9, "metric": "x"}]}}, "for 'x'"),
        ({"hpa": hpa(), "metrics": {"faults": [{"kind": "api", "start": 5, "until": 9, "pods": [1]}]}}, "only scrape"),
        ({"replicas": 0}, "must be >= 1, got 0"),
        ({"pod": {"pods_per_replica": 3}}, "cannot share"),
        ({"nodes": {"initial": 4, "max": 2}}, "max must be >= initial"),
        ({"cold_start": start(-1)}, "must be >= 0"),
        ({"cold_start": {"phases": {"weights": {"triangular": [3, 2, 1]}}}}, "must ascend"),
        ({"rolling_updates": [{"at": 5, "max_surge": "25 %"}]}, "max_surge"),
        ({"rolling_updates": [{"at": 5, "max_surge": True}]}, "must be text"),
        ({"rolling_updates": [{"at": 5, "max_surge": "0", "max_unavailable": "0"}]}, "the API server refuses it"),
        ({"rolling_updates": [{"at": 5, "max_surge": 0, "max_unavailable": "00%"}]}, "the API server refuses it"),
        ({"keda": {"triggers": [TRIGGER]}, "start": "Mon 24:00"}, "must be a day and a time of day such as Mon 08:50"),
        ({"hpa": hpa(), "controller": {"sync_period": 1e-9}}, "sync_period: must be >= 0.1"),
        ({"kpa": {"max_replicas": 3, "target": 5, "period": 0.09}}, "kpa.period: must be >= 0.1"),
        ({"apa": {"max_replicas": 3, "target": 5, "period": 1e-9}}, "apa.period: must be >= 0.1"),
        ({"saturation": {"max_replicas": 3, "period": 1e-9}}, "saturation.period: must be >= 0.1"),
        ({"hpa": hpa(), "metrics": {"scrape_interval": 1e-9}}, "scrape_interval: must be >= 0.1"),
        ({"hpa": hpa(), "metrics": {"rule_interval": 1e-9}}, "rule_interval: must be 0, or >= 0.1"),
        ({"keda": {"pollingInterval": 0.01, "triggers": [TRIGGER]}}, "pollingInterval: must be a whole number from 1"),
        ({"probes": {"readiness": {"failureThreshold": 5}}}, "unknown key"),
    ],
)  # fmt: skip
def test_what_is_refused(cluster, told):
    found = refused(cluster)
    assert found.startswith("scenario: cluster"), found
    assert any(part in found for part in told.split("|")), found


def test_more_replicas_than_memory_holds():
    assert "more than the 50000000" in refused(
        {"hpa": hpa(most=9000)}, "engine.num_gpu_blocks_override=9000"
    )


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"hpa": hpa(metric="vllm_request_queue_length")}, "no rule defines the metric vllm_request_queue_length"),
        (
            {"hpa": hpa(), "metrics": {"queries": {"vllm:num_requests_waiting": "vllm:gpu_cache_usage_perc"}}},
            "vLLM has no metric vllm:gpu_cache_usage_perc",
        ),
        ({"hpa": hpa(scaleUp={"policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}]})}, "at the earliest"),
        ({"probes": {"liveness": {"periodSeconds": 10}}, "cold_start": start(90)}, "crash in a loop"),
        ({"pod": {"shutdown_timeout": 60}}, "the grace period ends after 30 s"),
        ({"probes": {"readiness": None}}, "Ready before its server answers"),
        ({"probes": {}}, "Ready before its server answers"),
    ],
)  # fmt: skip
def test_what_is_probably_not_meant(cluster, told):
    assert told in "\n".join(load_scenario(fleet(cluster)).warnings)


def test_names_of_vllm_need_no_query():
    for name in ("vllm:num_requests_waiting", "vllm_num_requests_waiting"):
        path = load_scenario(fleet({"hpa": hpa(metric=name)})).cluster.fleet.path
        assert path.queries[name] == parse_query("vllm:num_requests_waiting")
    total = load_scenario(fleet({"hpa": hpa(kind="External")})).cluster.fleet.path
    assert total.queries["vllm:num_requests_waiting"].text == "sum(vllm:num_requests_waiting)"


def test_times_and_shares():
    cluster = {
        "replicas": 4,
        "keda": {"triggers": [TRIGGER]},
        "start": "Wed 08:50",
        "rolling_updates": [{"at": 7.5, "max_surge": "30%", "max_unavailable": "2"}],
    }
    spec = load_scenario(fleet(cluster)).cluster.fleet
    assert spec.start_minute == 2 * 24 * 60 + 8 * 60 + 50
    (update,) = spec.updates
    assert (update.at_ps, update.max_surge, update.max_unavailable) == (7.5 * PS, 0.3, 2)


@pytest.mark.parametrize("zone", ["Mars/X", "", 5, "../etc/passwd", "Europe"])
def test_a_time_zone_that_is_none(zone):
    cron = CRON | {"metadata": CRON["metadata"] | {"timezone": zone}}
    found = refused({"keda": {"triggers": [cron]}})
    assert "triggers.0.metadata.timezone: must be a name of the IANA database" in found
    assert repr(zone) in found


CRON = {
    "type": "cron",
    "metadata": {
        "timezone": "UTC",
        "start": "0 8 * * *",
        "end": "0 9 * * *",
        "desiredReplicas": "2",
    },
}
CONSTANT = {
    "type": "prometheus",
    "metadata": {"query": "sum(vllm:num_requests_waiting) or vector(9)", "threshold": "5"},
}
BLIND = TRIGGER | {"metadata": TRIGGER["metadata"] | {"ignoreNullValues": "false"}}
FALLBACK = {"failureThreshold": 1, "replicas": 2}


@pytest.mark.parametrize(
    ("cluster", "wakes"),
    [
        ({"replicas": 0, "hpa": hpa()}, False),
        ({"replicas": 0, "hpa": hpa(least=0, kind="External")}, False),
        ({"hpa": hpa()}, True),
        ({"hpa": hpa(least=0, kind="External")}, False),
        ({"keda": {"triggers": [TRIGGER]}}, False),
        ({"keda": {"minReplicaCount": 1, "triggers": [TRIGGER]}}, True),
        ({"replicas": 0, "keda": {"minReplicaCount": 1, "triggers": [TRIGGER]}}, True),
        ({"keda": {"minReplicaCount": 1, "idleReplicaCount": 0, "triggers": [TRIGGER]}}, False),
        ({"keda": {"triggers": [TRIGGER, CRON]}}, True),
        ({"keda": {"triggers": [CONSTANT]}}, True),
        ({"keda": {"triggers": [BLIND]}}, False),
        ({"keda": {"triggers": [BLIND], "fallback": FALLBACK}}, True),
        ({"replicas": 0, "kpa": {"max_replicas": 3, "target": 5}}, True),
        ({"replicas": 0, "apa": {"max_replicas": 3, "target": 5}}, False),
        ({"kpa": {"min_replicas": 0, "max_replicas": 3, "target": 5}}, False),
        ({"replicas": 0, "saturation": {"max_replicas": 3}}, False),
    ],
)
def test_what_can_never_wake_from_zero(cluster, wakes):
    """The warning, and where it begins at 0 the run: replicas come exactly where there is none."""
    scenario = load_scenario(fleet(cluster))
    told = any("nothing can raise it from 0" in text for text in scenario.warnings)
    assert told != wakes
    if cluster.get("replicas") == 0:
        result = run(fleet(cluster), "run.until=100")
        assert (len(result.fleet.pods) > 0) == wakes


def test_probes_are_those_that_are_written():
    for cluster, period_ps in (
        ({"cold_start": {}}, 5 * PS),
        ({"probes": {"readiness": {}}}, 10 * PS),
        ({"probes": {"startup": {}}}, None),
    ):
        readiness = load_scenario(fleet(cluster)).cluster.fleet.probes.readiness
        assert (readiness and readiness.period_ps) == period_ps


def test_whole_numbers_and_days_in_any_case():
    cluster = {
        "keda": {"triggers": [TRIGGER]},
        "start": "sUN 23:59",
        "rolling_updates": [{"at": 1, "max_surge": 1, "max_unavailable": 0}],
    }
    scenario = load_scenario(fleet(cluster))
    spec = scenario.cluster.fleet
    assert spec.start_minute == 7 * 24 * 60 - 1
    assert (spec.updates[0].max_surge, spec.updates[0].max_unavailable) == (1, 0)
    assert load_scenario(scenario.to_dict()).cluster == scenario.cluster


def with_selector(labels, kind="Pods"):
    document = hpa(kind=kind)
    section = next(v for v in document["metrics"][0].values() if isinstance(v, dict))
    section["metric"] = section["metric"] | {"selector": {"matchLabels": labels}}
    return document


def test_a_selector_of_a_metric_chooses_its_series():
    """A label that the series have with another value finds nothing, and the HPA stands still."""
    wanted = {}
    for kind in ("Pods", "External"):
        for engine in ("0", "7"):
            cluster = SCALED | {"hpa": with_selector({"engine": engine}, kind)}
            log = run(fleet(cluster), "run.until=120").fleet.log
            wanted[kind, engine] = [bool(look.error) for look in log.looks]
    assert wanted["Pods", "7"]
    assert all(wanted["Pods", "7"])
    assert all(wanted["External", "7"])
    assert not all(wanted["Pods", "0"])
    assert not all(wanted["External", "0"])


def test_selectors_that_are_refused():
    document = with_selector({"engine": "0"})
    query = {"queries": {"vllm:num_requests_waiting": "vllm:num_requests_running"}}
    assert "write the labels into it" in refused({"hpa": document, "metrics": query})
    twice = document | {"metrics": [*document["metrics"], *hpa()["metrics"]]}
    assert "twice with different selectors" in refused({"hpa": twice})
