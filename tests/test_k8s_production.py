"""What whoever signs a rendering for production looks for: as people write it, and no surprise once it runs."""

import json
import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from real.command import Serving, serve_command
from real.manifest_lint.check import lint
from real.manifest_lint.objects import Manifest, at, containers
from real.manifest_lint.tools import manifests_of
from real.manifest_names import label_pair
from real.manifests import render
from real.manifests_numbers import MARGIN, cold_start_of, numbers_of, start_quantile_s
from real.manifests_predict import Prediction
from real.manifests_proxy import MOST_CONNECTIONS
from real.manifests_setup import CONFIG_HASH, Setup
from real.manifests_text import config_hash
from real.manifests_warm import DOOR_CONNECTIONS
from tests.k8s import NAMES, ROOT, SCENARIOS, of_kind, rendered, setup_of
from twin.cluster.manifests import arguments_of
from twin.cluster.objects import read_hpa, read_scaled_object
from twin.cluster.quantity import exact
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.scenario_yaml import parse_documents
from twin.step_time.memory import weight_bytes

BUFFER = 16 * 2**10
"""Of HAProxy (tune.bufsize); a connection has two."""


def setup_with(name, *overrides):
    """A scenario of k8s/scenarios with overrides, not simulated."""
    loaded = load_scenario(SCENARIOS / f"{name}.yaml", list(overrides))
    return Setup(loaded, numbers_of(loaded, 30.0), Prediction(30.0, {"ONLINE": 1.0}))


def server_of(setup):
    deployment = of_kind(render(setup).objects, "Deployment", setup.name)
    return deployment["spec"]["template"]["spec"]["containers"][0]


# --- Prometheus ---------------------------------------------------------------------------------


def test_what_an_operator_selects_by_is_on_what_it_reads_and_selects_no_pods():
    labels = {"release": "kube-prometheus-stack", "team/owner": "a"}
    plain, labelled = (render(replace(setup_of("chat-8b"), monitor_labels=x)) for x in ({}, labels))
    monitored = ("PodMonitor", "PrometheusRule")
    for before, after in zip(plain.objects, labelled.objects, strict=True):
        if before["kind"] in monitored:
            assert after["metadata"]["labels"] == before["metadata"]["labels"] | labels
            assert after["spec"] == before["spec"]
        else:
            assert after == before
    assert sum(o["kind"] in monitored for o in plain.objects) == 3
    (said,) = [n for n in plain.notes if "Prometheus operator" in n]
    assert "--monitor-label KEY=VALUE" in said
    (said,) = [n for n in labelled.notes if "Prometheus operator" in n]
    assert said.endswith("selecting release=kube-prometheus-stack, team/owner=a")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("release=kube-prometheus-stack", ("release", "kube-prometheus-stack")),
        ("example.com/team=a.b_c", ("example.com/team", "a.b_c")),
        ("release=", ("release", "")),
        ("release", None),
        ("=x", None),
        ("-a=x", None),
        ("a=x y", None),
        ("a=x=y", None),
        ("Ex_ample/a=x", None),
        (f"{64 * 'a'}=x", None),
        (f"a={64 * 'x'}", None),
        ("a=\u00e4", None),
    ],
)
def test_labels_that_kubernetes_takes(text, pair):
    assert label_pair(text) == pair


@given(st.text(max_size=70))
def test_a_label_is_taken_apart_whole_or_not_at_all(text):
    pair = label_pair(text)
    assert pair is None or "=".join(pair) == text


@pytest.mark.parametrize(
    ("url", "values"),
    [
        ("http://prometheus.m.svc:9090", {"url": "http://prometheus.m.svc", "port": 9090}),
        ("https://p.example", {"url": "https://p.example", "port": 0}),
        ("http://p:80/prom", {"url": "http://p", "port": 80, "path": "/prom"}),
        ("prometheus:9090", None),
        ("http://", None),
        ("http://p:port", None),
    ],
)
def test_the_adapter_finds_the_prometheus_that_was_named(url, values):
    setup = replace(setup_of("chat-8b"), prometheus=url)
    if values is None:
        for name in ("chat-8b", "docs-70b"):
            with pytest.raises(InputError, match="--prometheus"):
                render(replace(setup_of(name), prometheus=url))
        return
    text = render(setup).files["prometheus-adapter-values.yaml"]
    assert yaml.safe_load(text)["prometheus"] == values


# --- weights ------------------------------------------------------------------------------------


def test_weights_are_stored_as_starts_and_memory_are_predicted():
    """FP8 made of 16-bit files at each start would read 141 GB where 73 were predicted."""
    setup = setup_of("docs-70b")
    model, numbers = setup.scenario.model, setup.numbers
    stored, wide = (weight_bytes(model, 1, dtype) for dtype in ("fp8", "bfloat16"))
    assert (round(stored / 1e9), round(wide / 1e9)) == (73, 141)
    assert numbers.weights_bytes == stored
    container = server_of(setup)
    arguments = dict(arguments_of(container))
    assert arguments["model"] == "/models/meta-llama/Llama-3.1-70B-FP8"
    assert arguments["served-model-name"] == "meta-llama/Llama-3.1-70B"
    assert "quantization" not in arguments
    limit = float(exact(container["resources"]["limits"]["memory"]))
    assert stored + numbers.shm_bytes < limit < wide
    # The budget is over the start that reads those bytes.
    probe = container["startupProbe"]
    allowed = (probe["failureThreshold"] - 1) * probe["periodSeconds"]
    assert allowed >= MARGIN * start_quantile_s(cold_start_of(setup.scenario), 0.99, 1)
    (said,) = [n for n in rendered("docs-70b").notes if "model-weights" in n]
    assert "the folder meta-llama/Llama-3.1-70B-FP8, weights stored in FP8, ReadOnlyMany" in said


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_of_other_types_are_rendered_too(dtype):
    stored = (f"hardware.dtype={dtype}", "hardware.step_time=roofline")
    arguments = dict(arguments_of(server_of(setup_with("chat-8b", *stored))))
    assert arguments["model"] == f"/models/meta-llama/Llama-3.1-8B-{dtype.upper()}"
    assert (arguments["dtype"], arguments.get("quantization")) == ("bfloat16", None)


def test_a_server_of_ones_own_makes_fp8_of_its_folder_as_before():
    loaded = load_scenario(SCENARIOS / "docs-70b.yaml")
    assert "--quantization fp8" in " ".join(serve_command(loaded, Serving("python", "m", "m")))
    int4 = setup_with("chat-8b", "hardware.dtype=int4", "hardware.step_time=roofline").scenario
    with pytest.raises(InputError, match=r"hardware\.dtype: int4"):
        serve_command(int4, Serving("python", "m", "m"))


# --- proxies ------------------------------------------------------------------------------------


def configurations():
    """(name, haproxy.cfg, the container that reads it, its pods' annotations) of all scenarios."""
    for name in NAMES:
        objects = rendered(name).objects
        for found in (o for o in objects if o["kind"] == "ConfigMap"):
            text = found["data"].get("haproxy.cfg")
            if text is None:
                continue
            maker = of_kind(objects, "Deployment", found["metadata"]["name"])
            template = maker["spec"]["template"]
            (reader,) = [
                c for c in template["spec"]["containers"] if c["image"].startswith("haproxy")
            ]
            yield found, text, reader, template["metadata"]["annotations"]


def test_a_proxy_has_threads_and_connections_for_its_memory():
    """By itself HAProxy starts a thread for each CPU of the node, and sizes itself by its files."""
    found = list(configurations())
    assert len(found) == 4  # three gateways, and the door of a sleeper
    for _, text, container, _ in found:
        section = text.partition("defaults")[0]
        (threads,) = re.findall(r"^ +nbthread (\d+)$", section, re.MULTILINE)
        (connections,) = re.findall(r"^ +maxconn (\d+)$", section, re.MULTILINE)
        assert 1 <= int(threads) <= 2
        assert int(connections) in (MOST_CONNECTIONS, DOOR_CONNECTIONS)
        limit = exact(container["resources"]["limits"]["memory"])
        assert int(connections) * 2 * BUFFER < 0.6 * limit


def test_another_configuration_makes_other_pods():
    for config_map, _, _, annotations in configurations():
        assert annotations == {CONFIG_HASH: config_hash(config_map)}

    def hash_of(*overrides):
        proxy = of_kind(
            render(setup_with("chat-8b", *overrides)).objects, "Deployment", "chat-8b-proxy"
        )
        return proxy["spec"]["template"]["metadata"]["annotations"][CONFIG_HASH]

    assert hash_of() == hash_of()
    assert hash_of("cluster.admission.retry_after=7") != hash_of()
    assert hash_of("cluster.hpa.minReplicas=3") == hash_of()


def test_several_proxies_keep_apart_and_one_does_not_care():
    for routers in (1, 2):
        setup = setup_with("chat-8b", f"cluster.routing.routers={routers}")
        proxy = of_kind(render(setup).objects, "Deployment", "chat-8b-proxy")
        pod = proxy["spec"]["template"]
        term = at(
            pod, "spec", "affinity", "podAntiAffinity",
            "preferredDuringSchedulingIgnoredDuringExecution", 0, "podAffinityTerm",
        )  # fmt: skip
        assert (term is not None) == (routers == 2)
        if term:
            assert term["labelSelector"]["matchLabels"] == pod["metadata"]["labels"]


# --- as people write ----------------------------------------------------------------------------


def test_what_the_api_server_writes_itself_is_not_written():
    behavior = of_kind(rendered("chat-8b").objects, "HorizontalPodAutoscaler")["spec"]["behavior"]
    assert behavior == {
        "scaleDown": {
            "stabilizationWindowSeconds": 300,
            "policies": [{"type": "Percent", "value": 50, "periodSeconds": 60}],
        }
    }
    scaled = of_kind(rendered("docs-70b").objects, "ScaledObject")["spec"]
    assert scaled["fallback"] == {"failureThreshold": 3, "replicas": 2}
    config = scaled["advanced"]["horizontalPodAutoscalerConfig"]
    assert list(config["behavior"]) == ["scaleDown"]
    assert "activationThreshold" not in scaled["triggers"][0]["metadata"]
    assert list(scaled)[-1] == "triggers"


@pytest.mark.parametrize(
    "behavior",
    [
        "{}",
        "{scaleUp: {stabilizationWindowSeconds: 0}}",
        "{scaleUp: {stabilizationWindowSeconds: 30}, scaleDown: {selectPolicy: Disabled}}",
        "{scaleUp: {policies: [{type: Pods, value: 4, periodSeconds: 15}]}}",
        "{scaleUp: {selectPolicy: Min}, scaleDown: {policies: [{type: Percent, value: 100, periodSeconds: 15}]}}",
        "{scaleDown: {stabilizationWindowSeconds: 300}}",
        "{scaleDown: {stabilizationWindowSeconds: 0}}",
        "{scaleDown: {tolerance: '0.05'}}",
    ],
)  # fmt: skip
def test_what_is_left_out_means_the_same(behavior):
    hpa = setup_with("chat-8b", f"cluster.hpa.behavior={behavior}")
    found = read_hpa(of_kind(render(hpa).objects, "HorizontalPodAutoscaler"))
    wanted = hpa.scenario.cluster.fleet.scaler.hpa
    assert found.metrics == wanted.metrics
    given, back = (spec.behavior for spec in (wanted, found))
    if back is None:  # all as the API server has it
        assert read_hpa_with({"scaleUp": {}, "scaleDown": {}}) == given
    else:
        assert back == given


def read_hpa_with(behavior):
    document = of_kind(rendered("chat-8b").objects, "HorizontalPodAutoscaler")
    return read_hpa(document | {"spec": document["spec"] | {"behavior": behavior}}).behavior


def test_a_scaled_object_reads_back():
    found = read_scaled_object(of_kind(rendered("docs-70b").objects, "ScaledObject"))
    wanted = setup_of("docs-70b").scenario.cluster.fleet.scaler.keda
    assert replace(found, triggers=wanted.triggers) == wanted
    (query, clock), (wanted_query, wanted_clock) = found.triggers, wanted.triggers
    assert clock == wanted_clock
    assert (
        replace(query, query=wanted_query.query) == wanted_query
    )  # which counts its own pods only


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_several_lines_are_blocks(name):
    """A script in one line with \\n in it nobody reads."""
    for file, text in rendered(name).files.items():
        assert "\\n" not in text, file


@pytest.mark.parametrize("name", NAMES)
def test_pods_own_volumes_only_where_they_write(name):
    for item in rendered(name).objects:
        spec = at(item, "spec", "template", "spec")
        if item["kind"] != "Deployment":
            continue
        writes = any(at(v, "emptyDir") is not None for v in spec.get("volumes", []))
        assert ("fsGroup" in spec["securityContext"]) == writes, item["metadata"]["name"]
    for budget in (o for o in rendered(name).objects if o["kind"] == "PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_every_pod_that_is_shipped_keeps_the_standard_restricted():
    """Its namespaces enforce it; of the sweep also the pod that KubeRay makes to submit it."""
    seen = set()
    for path in sorted((ROOT / "k8s").rglob("*.yaml")):
        if path.parent.name in ("scenarios", "a100", "h100", "h200"):
            continue  # scenarios, patches
        for manifest in manifests_of(parse_documents(path.read_text(), str(path)), str(path)):
            for where, container in containers(manifest):
                pod = manifest.get(*where[:-2])
                seen.add(container["name"])
                assert pod["securityContext"]["runAsNonRoot"] is True
                assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert pod["automountServiceAccountToken"] is False
            if path.parent.name == "jobs":
                assert manifest.get("metadata", "namespace") == "inference"
    assert seen >= {"vllm", "haproxy", "placeholder", "door", "valet", "tiny-model", "ray-head",
                    "ray-worker", "ray-job-submitter"}  # fmt: skip


# --- KEDA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "has_fallback", "is_told"),
    [("false", True, False), ("true", True, True), (None, True, True), (None, False, False)],
)
def test_fallbacks_that_never_come_are_told(written, has_fallback, is_told):
    scaled = json.loads(json.dumps(of_kind(rendered("docs-70b").objects, "ScaledObject")))
    details = scaled["spec"]["triggers"][0]["metadata"]
    details.pop("ignoreNullValues")
    if written is not None:
        details["ignoreNullValues"] = written
    if not has_fallback:
        del scaled["spec"]["fallback"]
    found = [f for f in lint([Manifest(scaled, "f")]) if f.rule == "null-values"]
    assert [f.kind for f in found] == (["advice"] if is_told else [])
