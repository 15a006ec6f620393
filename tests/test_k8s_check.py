"""`twin-real manifests --check`: the article's faults are named, good manifests pass, each rule sees its fault."""

import copy
import functools
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from real.cli_manifests import findings
from real.manifest_lint.check import lint
from real.manifest_lint.objects import Cluster, Manifest
from real.manifest_lint.queries import gives_one
from real.manifest_lint.tools import check_queries, manifests_of
from tests.k8s import NAMES, ROOT, broken, hpa, kubectl, pod, rendered, setup_of, vllm
from tests.tools import prometheus
from twin.scenario_yaml import parse_documents

FOREIGN = ROOT / "tests" / "manifests"


@pytest.fixture(scope="module")
def article(twin_data):
    path = twin_data.parent / "cases" / "article-manifest.yaml"
    if not path.is_file():
        pytest.skip("the article's manifest is not beside the third-party data")
    return findings(path)[0]


# --- the commonly copied manifest -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rule", "line", "words"),
    [
        ("fault", "priority-class", 12, "names that begin with system- are reserved"),  # 1
        ("fault", "unknown-argument", 32, "--scheduler-policy and would not start; it has --scheduling-policy"),  # 2
        ("fault", "unknown-argument", 32, "--disable-log-requests"),  # 3
        ("fault", "unknown-variable", 33, "VLLM_SCHEDULER_WAIT_MS_ONLINE"),  # 4
        ("fault", "unknown-variable", 33, "VLLM_SCHEDULER_WAIT_MS_BATCH"),
        ("fault", "memory", 32, "141.1 GB of bfloat16 weights on each of 1 GPU(s)"),  # 5
        ("fault", "memory", 32, "--tensor-parallel-size=4 (bfloat16) or --tensor-parallel-size=2 (fp8)"),
        ("fault", "memory", 30, "the limit 64Gi is below the 131.4 GiB of bfloat16 weights"),
        ("fault", "probe-kills", 34, "livenessProbe kills a container after 120 s"),  # 6
        ("fault", "probe-delay", 35, "initialDelaySeconds 90"),  # 7
        ("needs", "metrics-port", 27, "metrics on port 8080"),  # 8
        ("fault", "scrape", 10, "prometheus.io/*"),  # 9
        ("fault", "metric-name", 47, "vllm_request_queue_length; probably vllm:num_requests_waiting"),  # 10
        ("fault", "metric-name", 48, "vllm_request_latency_p99_ms"),
        ("fault", "unit", 48, "milliseconds"),  # 11
        ("fault", "latency-target", 48, "averaged over pods and multiplied"),  # 12
        ("needs", "metrics-api", 47, "FailedGetPodsMetric"),  # 13
        ("fault", "slow-up", 50, "2 replicas become 10 in 180 s"),  # 15
        ("fault", "slow-up", 50, "waits 30 s before it grows"),
        ("advice", "slow-down", 51, "19 min to become 2: 5 min of window"),  # 16
        ("fault", "replicas", 5, "replicas: 3 beside"),  # 17
        ("fault", "disruption-budget", 4, "no PodDisruptionBudget"),  # 18
        ("fault", "drain", 25, "no preStop"),  # 19
        ("fault", "shm", 36, "no volume at /dev/shm"),  # 20
        ("fault", "gpu-product", 13, "it is NVIDIA-A100-SXM4-80GB"),  # 21
        ("fault", "gpu-product", 13, "it is NVIDIA-H100-80GB-HBM3"),
        ("fault", "gpu-taint", 11, "no toleration"),  # 22
        ("fault", "anti-affinity", 14, "every pod with priority"),
        ("fault", "service", 9, "no Service selects its pods"),  # 23
        ("fault", "admission-limit", 32, "no admission limit"),
        ("fault", "image-tag", 26, "vLLM 0.6.0 is older"),  # 25
        ("fault", "security-context", 25, "no securityContext"),
        ("needs", "claim", 37, "whose access mode nothing here states"),
    ],
)  # fmt: skip
def test_every_fault_of_the_article_is_named_with_its_line(article, kind, rule, line, words):
    """14 and 24 are in its text, not in its manifest; 25's dashes became hyphens there."""
    told = [str(f) for f in article if (f.kind, f.rule) == (kind, rule)]
    assert [text for text in told if words in text and f":{line}: " in text], told


def test_nothing_else_is_found_in_it(article):
    """Each finding is one of the list above, but for the wall that nobody asked for."""
    rules = {f.rule for f in article}
    assert len(article) == 35
    assert rules - {"network-policy"} == {
        "priority-class", "unknown-argument", "unknown-variable", "memory", "probe-kills", "probe-delay",
        "metrics-port", "scrape", "metric-name", "unit", "latency-target", "metrics-api", "slow-up", "slow-down",
        "replicas", "disruption-budget", "drain", "shm", "gpu-product", "gpu-taint", "anti-affinity", "service",
        "admission-limit", "image-tag", "security-context", "claim",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "chart", "repaired"])
def test_good_manifests_of_others_raise_no_alarm(name):
    found, _ = findings(FOREIGN / f"{name}.yaml")
    assert not [str(f) for f in found if f.kind == "fault"]
    if name == "repaired":
        assert not found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_rendered_is_clean(name, tmp_path):
    for file, text in rendered(name).files.items():
        (tmp_path / file).write_text(text)
    env = os.environ | {"KUBECTL": kubectl(), "PROMETHEUS": prometheus()[0]}
    run = subprocess.run(
        [sys.executable, "-m", "real", "manifests", "--check", str(tmp_path)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert not run.stderr  # nothing was left unchecked
    lines = run.stdout.splitlines()
    assert lines[-1].startswith("0 faults")
    assert all(": needs: " in line and "model-weights" in line for line in lines[:-1])


# --- every rule -----------------------------------------------------------------------------------


def test_what_is_broken_below_is_whole_before():
    rules, _ = broken(lambda k, o: None)
    assert not rules


def _argument(word):
    return lambda k, o: vllm(k)["args"].append(word)


def _variable(name, value):
    return lambda k, o: vllm(k)["env"].append({"name": name, "value": value})


def _without(*kinds):
    def change(by_kind, objects):
        objects[:] = [
            o
            for o in objects
            if (o["kind"], o["metadata"]["name"]) not in kinds and o["kind"] not in kinds
        ]

    return change


RULES = {
    "unknown field": ("schema", lambda k, o: vllm(k).update(imagePullpolicy="Always")),
    "wrong type": ("schema", lambda k, o: hpa(k).update(maxReplicas="8")),
    "missing field": ("schema", lambda k, o: k["Deployment"]["spec"].pop("selector")),
    "enum": ("schema", lambda k, o: hpa(k)["metrics"][0]["pods"]["target"].update(type="AvgValue")),
    "window above the limit": (
        "schema", lambda k, o: hpa(k)["behavior"]["scaleDown"].update(stabilizationWindowSeconds=4000)
    ),
    "period above the limit": (
        "schema", lambda k, o: hpa(k)["behavior"]["scaleDown"]["policies"][0].update(periodSeconds=1801)
    ),
    "max below min": ("schema", lambda k, o: hpa(k).update(minReplicas=9)),
    "unknown API": ("schema", lambda k, o: k["PodDisruptionBudget"].update(apiVersion="policy/v1beta1")),
    "name of no namespace": ("name", lambda k, o: k["Deployment"]["metadata"].update(namespace="In_ference")),
    "name of no Service": ("name", lambda k, o: k["Service", "chat-8b"]["metadata"].update(name="8b")),
    "name of no claim": (
        "name", lambda k, o: pod(k)["volumes"][0]["persistentVolumeClaim"].update(claimName="Weights")
    ),
    "name of no image": ("name", lambda k, o: vllm(k).update(image="Reg/UPPER:1.0.0")),
    "mount of no volume": ("volume", lambda k, o: vllm(k)["volumeMounts"][0].update(name="weights")),
    "memory above its limit": ("resources", lambda k, o: vllm(k)["resources"]["requests"].update(memory="900Gi")),
    "GPUs above their limit": (
        "resources", lambda k, o: vllm(k)["resources"]["requests"].update({"nvidia.com/gpu": 2})
    ),
    "GPUs below their limit": (
        "resources", lambda k, o: vllm(k)["resources"]["limits"].update({"nvidia.com/gpu": 2})
    ),
    "GPUs without a limit": ("resources", lambda k, o: vllm(k)["resources"]["limits"].pop("nvidia.com/gpu")),
    "object that is there twice": ("duplicate", lambda k, o: o.append(copy.deepcopy(k["PodDisruptionBudget"]))),
    "Service in another namespace": (
        "namespace",
        lambda k, o: (
            [i["metadata"].update(namespace="a") for i in o],
            k["Service", "chat-8b-pods"]["metadata"].update(namespace="b")
        ),
    ),
    "budget of all": (
        "disruption-budget",
        lambda k, o: (
            k["PodDisruptionBudget", "chat-8b"]["spec"].pop("maxUnavailable"),
            k["PodDisruptionBudget", "chat-8b"]["spec"].update(minAvailable=8),
        ),
    ),
    "budget of none": (
        "disruption-budget", lambda k, o: k["PodDisruptionBudget", "chat-8b"]["spec"].update(maxUnavailable=0)
    ),
    "field of an operator": ("schema", lambda k, o: k["PodMonitor"]["spec"].update(selectors={})),
    "unknown argument": ("unknown-argument", _argument("--scheduler-policy=priority")),
    "argument of a later version": ("unknown-argument", _argument("--sleep-mode-backend=cumem")),
    "wrong policy": ("argument-value", _argument("--scheduling-policy=lifo")),
    "unknown variable": ("unknown-variable", _variable("VLLM_SCHEDULER_WAIT_MS_ONLINE", "10")),
    "dash": ("dash", _argument("\u2013\u2013max-num-seqs=32")),
    "endpoints of development": ("dev-mode", _variable("VLLM_SERVER_DEV_MODE", "1")),
    "token in the open": ("secret", _variable("HF_TOKEN", "abc")),
    "key in the open": ("secret", _argument("--api-key=abc")),
    "Secret with content": (
        "secret",
        lambda k, o: o.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}, "data": {"a": "Yg=="}}),
    ),
    "more GPUs than arguments": (
        "gpu-count", lambda k, o: vllm(k)["resources"]["limits"].update({"nvidia.com/gpu": 2})
    ),
    "context longer than the cache": ("memory", _argument("--max-model-len=900000")),
    "no shared memory": ("shm", lambda k, o: vllm(k)["volumeMounts"].pop(1)),
    "shared memory above the limit": (
        "shm", lambda k, o: pod(k)["volumes"][1]["emptyDir"].update(sizeLimit="100Gi")
    ),
    "startup budget below the start": ("probe-kills", lambda k, o: vllm(k)["startupProbe"].update(failureThreshold=5)),
    "no startup probe": ("probe-kills", lambda k, o: vllm(k).pop("startupProbe")),
    "no readiness probe": ("probe-missing", lambda k, o: vllm(k).pop("readinessProbe")),
    "probe on another port": ("probe-port", lambda k, o: vllm(k)["livenessProbe"]["httpGet"].update(port=8080)),
    "no preStop": ("drain", lambda k, o: vllm(k).pop("lifecycle")),
    "drain above the grace period": ("drain", lambda k, o: pod(k).update(terminationGracePeriodSeconds=60)),
    "GPU that no node has": (
        "gpu-product",
        lambda k, o: pod(k)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"][0]["matchExpressions"][0].update(values=["H100-SXM5-80GB"]),
    ),
    "no toleration": ("gpu-taint", lambda k, o: pod(k).pop("tolerations")),
    "anti-affinity to strangers": (
        "anti-affinity",
        lambda k, o: pod(k)["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0][
            "podAffinityTerm"].update(labelSelector={"matchLabels": {"priority": "online"}}),
    ),
    "image without a tag": ("image-tag", lambda k, o: vllm(k).update(image="vllm/vllm-openai")),
    "image of no version": ("image-tag", lambda k, o: vllm(k).update(image="vllm/vllm-openai:latest")),
    "no security context": (
        "security-context", lambda k, o: (vllm(k).pop("securityContext"), pod(k).pop("securityContext"))
    ),
    "reserved name": ("priority-class", lambda k, o: k["PriorityClass"]["metadata"].update(name="system-llm")),
    "reserved class": ("priority-class", lambda k, o: pod(k).update(priorityClassName="system-high-priority")),
    "budget for nobody": (
        "selector",
        lambda k, o: k["PodDisruptionBudget", "chat-8b"]["spec"].update(selector={"matchLabels": {"app": "x"}}),
    ),
    "template that is not selected": (
        "selector", lambda k, o: k["Deployment"]["spec"].update(selector={"matchLabels": {"app": "x"}})
    ),
    "port that no container has": (
        "port", lambda k, o: k["Service", "chat-8b-pods"]["spec"]["ports"][0].update(targetPort="web")
    ),
    "scrape of a port that is not there": (
        "port", lambda k, o: k["PodMonitor"]["spec"]["podMetricsEndpoints"][0].update(port="metrics")
    ),
    "replicas beside an HPA": ("replicas", lambda k, o: k["Deployment", "chat-8b"]["spec"].update(replicas=3)),
    "two HPAs": (
        "two-scalers",
        lambda k, o: o.append(k["HorizontalPodAutoscaler"] | {"metadata": {"name": "second"}}),
    ),
    "no budget": ("disruption-budget", _without(("PodDisruptionBudget", "chat-8b"))),
    "no Service": ("service", _without("Service")),
    "no limit": ("admission-limit", _without(("Deployment", "chat-8b-proxy"))),
    "annotations alone": (
        "scrape",
        lambda k, o: (
            k["Deployment"]["spec"]["template"]["metadata"]["annotations"].update({"prometheus.io/scrape": "true"}),
            _without("PodMonitor")(k, o),
        ),
    ),
    "scales a stranger": ("target", lambda k, o: hpa(k)["scaleTargetRef"].update(name="other")),
    "scales on CPU": (
        "metric",
        lambda k, o: hpa(k).update(metrics=[{"type": "Resource", "resource": {
            "name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}]),
    ),
    "metric of no vLLM": (
        "metric-name", lambda k, o: hpa(k)["metrics"][0]["pods"]["metric"].update(name="vllm_request_queue_length")
    ),
    "milliseconds": ("unit", lambda k, o: hpa(k)["metrics"][0]["pods"]["metric"].update(name="vllm_ttft_ms")),
    "latency per pod": (
        "latency-target", lambda k, o: hpa(k)["metrics"][0]["pods"]["metric"].update(name="llm_ttft_p99")
    ),
    "total as Value": (
        "value-target",
        lambda k, o: hpa(k).update(metrics=[{"type": "External", "external": {
            "metric": {"name": "queue"}, "target": {"type": "Value", "value": "1"}}}]),
    ),
    "slow up": (
        "slow-up",
        lambda k, o: hpa(k)["behavior"].update(
            scaleUp={"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}),
    ),
    "waits before it grows": (
        "slow-up", lambda k, o: hpa(k)["behavior"].update(scaleUp={"stabilizationWindowSeconds": 60})
    ),
    "metric that is gone": (
        "metric-name",
        lambda k, o: k["PrometheusRule"]["spec"]["groups"][0]["rules"][0].update(expr="vllm:gpu_cache_usage_perc"),
    ),
    "metric of no plug-in": (
        "metric-name",
        lambda k, o: k["PrometheusRule"]["spec"]["groups"][0]["rules"][0].update(expr="twin:queue_length"),
    ),
    "label that is not there": (
        "metric-label",
        lambda k, o: k["PrometheusRule"]["spec"]["groups"][0]["rules"][0].update(
            expr='vllm:num_requests_waiting{model="x"}'),
    ),
    "policy of another scenario": (
        "fingerprint", lambda k, o: k["Deployment"]["metadata"]["annotations"].update(
            {"vllm-twin/policy-fingerprint": "0123"})
    ),
    "policy changed by hand": (
        "fingerprint",
        lambda k, o: vllm(k).update(args=[a.replace('"batch_size": 8', '"batch_size": 9') for a in vllm(k)["args"]]),
    ),
    "GPU for a dashboard": (
        "gpu-for-nothing",
        lambda k, o: o.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "twin-dashboard"}, "spec": {
            "containers": [{"name": "d", "image": "x:1", "command": ["streamlit", "run"],
                            "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_each_rule_sees_its_fault(case):
    rule, change = RULES[case]
    after, found = broken(change)
    assert rule in after, [str(f) for f in found]


@pytest.mark.parametrize(
    ("version", "kind", "is_known"),
    [
        ("snapshot.storage.k8s.io/v1", "VolumeSnapshot", True),
        ("autoscaling.k8s.io/v1", "VerticalPodAutoscaler", True),
        ("inference.networking.k8s.io/v1", "InferencePool", True),
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", True),
        ("networking.k8s.io/v1beta1", "Ingress", False),
        ("policy/v1beta1", "PodDisruptionBudget", False),
        ("extensions/v1beta1", "Deployment", False),
        ("v2", "Service", False),
    ],
)
def test_only_groups_of_kubernetes_itself_must_be_in_its_schemas(version, kind, is_known):
    found = lint([Manifest({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}}, "f")])
    assert bool([f for f in found if "has no" in f.message]) == (not is_known)


@pytest.mark.parametrize(
    ("image", "is_old"),
    [
        ("vllm/vllm-openai:v0.5.0", True),
        ("mirror.example:5000/x/vllm-openai:v0.5.0", True),
        ("ghcr.io/llm-d/llm-d-cuda:v0.5.0", False),
        ("lmcache/vllm-openai:v0.3.9", False),
        ("reg/vllm-twin:0.3.0", False),
    ],
)
def test_only_images_of_vllm_are_tagged_with_its_version(image, is_old):
    rules, _ = broken(lambda k, o: vllm(k).update(image=image))
    assert ("image-tag" in rules) == is_old


@pytest.mark.parametrize("is_first", [True, False])
def test_an_inference_pool_finds_the_pods(is_first):
    def pooled(by_kind, objects):
        _without("Service")(by_kind, objects)
        labels = by_kind["Deployment", "chat-8b"]["spec"]["selector"]["matchLabels"]
        version = (
            "inference.networking.x-k8s.io/v1alpha2"
            if is_first
            else "inference.networking.k8s.io/v1"
        )
        selector = dict(labels) if is_first else {"matchLabels": dict(labels)}
        pool = {"apiVersion": version, "kind": "InferencePool", "metadata": {"name": "pool"}}
        objects.append(pool | {"spec": {"selector": selector}})

    rules, _ = broken(pooled)
    assert not rules


def test_a_wrong_type_hides_nothing_of_other_objects():
    def change(by_kind, objects):
        hpa(by_kind).update(minReplicas="2", maxReplicas="8")
        vllm(by_kind)["args"].append("--scheduler-policy=priority")
        _without("PodDisruptionBudget")(by_kind, objects)

    rules, found = broken(change)
    assert rules == {"schema", "unknown-argument", "disruption-budget"}
    wrong = [f for f in found if f.rule == "schema"]
    assert {f.message.split(":")[0] for f in wrong} == {"spec.minReplicas", "spec.maxReplicas"}
    assert {f.subject for f in wrong} == {"HorizontalPodAutoscaler chat-8b"}


def test_a_wrong_type_is_found_on_its_own_line(tmp_path):
    text = rendered("chat-8b").files["hpa.yaml"].replace("maxReplicas: 8", 'maxReplicas: "8"')
    (tmp_path / "hpa.yaml").write_text(text)
    line = text[: text.index("maxReplicas")].count("\n") + 1
    (finding,) = [f for f in findings(tmp_path / "hpa.yaml")[0] if f.rule == "schema"]
    assert finding.place == f"{tmp_path / 'hpa.yaml'}:{line}"
    assert finding.message == "spec.maxReplicas: must be a whole number, without quotes, got '8'"


def test_claims_that_only_one_node_can_mount():
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "model-weights"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "50Gi"}}},
    }
    rules, _ = broken(lambda k, o: o.append(claim))
    assert rules == {"claim"}
    claim["spec"]["accessModes"] = ["ReadOnlyMany"]
    rules, found = broken(lambda k, o: o.append(claim))
    assert not rules
    assert not [f for f in found if f.rule == "claim"]


def test_several_problems_of_one_object_are_all_told_with_their_lines():
    text = """apiVersion: apps/v1
kind: Deployment
metadata: {name: x}
spec:
  replica: 3
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec:
      containers:
      - name: x
        image: x:1
        imagepullPolicy: Always
        resources: {limit: {cpu: 1}}
"""
    found = lint(manifests_of(parse_documents(text, "x.yaml"), "x.yaml"))
    told = {f.place: f"{f.message}; {f.fix}" for f in found}
    assert told["x.yaml:5"] == "spec.replica: unknown field; did you mean replicas?"
    assert "did you mean imagePullPolicy?" in told["x.yaml:13"]
    assert "did you mean limits?" in told["x.yaml:14"]


@pytest.mark.parametrize(
    ("query", "one"),
    [
        ("sum(vllm:num_requests_waiting)", True),
        ("vllm:num_requests_waiting", False),
        ("sum by (pod) (vllm:num_requests_waiting)", False),
        ("sum(vllm:num_requests_waiting) by (pod)", False),
        ("sum(vllm:num_requests_waiting) by (namespace)", True),
        ("avg(vllm:kv_cache_usage_perc) * 100", True),
        ("sum(a) + sum by (pod) (b)", False),
        ("histogram_quantile(0.99, sum by (le) (rate(x_bucket[5m])))", True),
        ("histogram_quantile(0.99, sum by (le, pod) (rate(x_bucket[5m])))", False),
        ("histogram_quantile(0.99, rate(x_bucket[5m]))", False),
        ('max(a{b="x-y) or (z"}) or vector(0)', True),
        ("(sum(a))", True),
        ("sum without (pod) (a)", False),
    ],
)
def test_a_query_for_keda_gives_one_element(query, one):
    assert gives_one(query) is one
    trigger = {
        "type": "prometheus",
        "metadata": {"query": query, "threshold": "5", "serverAddress": "http://p"},
    }
    scaled = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "x"},
        "spec": {"scaleTargetRef": {"name": "x"}, "triggers": [trigger]},
    }
    rules = {f.rule for f in lint([Manifest(scaled, "x")])}
    assert ("aggregate" in rules) is not one


def test_an_adapter_rule_that_does_not_sum_the_series_of_a_pod_is_named():
    """A gauge with a label priority has three series a pod."""
    values = {
        "rules": {
            "custom": [{"seriesQuery": "vllm:num_requests_waiting", "metricsQuery": "<<.Series>>"}]
        }
    }
    found = lint([Manifest(values, "values.yaml"), Manifest(NAMESPACE, "n")])
    assert [f.rule for f in found] == ["aggregate"]


NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}}


def test_promtool_reads_rules_and_queries(monkeypatch):
    monkeypatch.setenv("PROMETHEUS", prometheus()[0])

    def rules(expr):
        group = {"name": "g", "rules": [{"record": "a:b", "expr": expr}]}
        rule = {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "x"},
            "spec": {"groups": [group]},
        }
        return [f.message for f in check_queries(Cluster([Manifest(rule, "x")]))]

    assert rules("sum(a)") == []
    (told,) = rules("summ(a)")
    assert 'unknown function with name "summ"' in told


def test_an_overlay_that_kustomize_refuses_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECTL", kubectl())
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    (tmp_path / "ns.yaml").write_text(yaml.safe_dump(NAMESPACE))
    found, _ = findings(tmp_path)
    assert [(f.kind, f.rule) for f in found] == [("fault", "kustomize")]
    assert "missing.yaml" in found[0].message


@pytest.mark.parametrize("overlay", ["a100", "h100", "h200", "cpu-kind", "docs-70b"])
def test_the_shipped_overlays_are_clean(overlay, monkeypatch):
    monkeypatch.setenv("KUBECTL", kubectl())
    monkeypatch.setenv("PROMETHEUS", prometheus()[0])
    found, skipped = findings(ROOT / "k8s" / "overlays" / overlay)
    assert not skipped
    assert not [str(f) for f in found if f.kind != "needs"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: [", "not readable as YAML"), ("- 1\n", "holds no Kubernetes object"), ("\xff", None)],
)
def test_files_that_are_no_manifests(tmp_path, text, words):
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode("latin-1"))
    run = subprocess.run(
        [sys.executable, "-m", "real", "manifests", "--check", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert (words or "not text in UTF-8") in run.stderr
    assert "Traceback" not in run.stderr


def test_the_list_of_rules_in_the_docs_is_complete():
    text = (ROOT / "docs" / "deploy.md").read_text()
    named = {rule for rule, _ in RULES.values()} | {"metrics-port", "metrics-api", "slow-down", "kustomize", "promtool",
                                                    "claim", "aggregate", "network-policy", "probe-delay", "scaling",
                                                    "scenario"}  # fmt: skip
    assert not [rule for rule in sorted(named) if f"`{rule}`" not in text]


JUNK = [
    None,
    1,
    -1,
    2**70,
    1.5,
    float("nan"),
    True,
    "",
    "x",
    [],
    {},
    [None],
    ["a", 1],
    {"a": 1},
    [[]],
]


@functools.cache
def corpus():
    """Objects of every kind that rules look at."""
    found = [dict(o) for o in rendered("laptop").objects]
    for name in ("chart", "repaired"):
        found += yaml.safe_load_all((FOREIGN / f"{name}.yaml").read_text())
    return [each for each in found if each]


def _places(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield (*path, i)
            yield from _places(item, (*path, i))


@settings(max_examples=150)
@given(st.data())
def test_whatever_stands_in_a_manifest_is_a_finding_and_no_crash(data):
    documents = copy.deepcopy(
        data.draw(st.lists(st.sampled_from(corpus()), min_size=1, max_size=4))
    )
    where = data.draw(st.sampled_from(list(_places(documents[0]))))
    target = documents[0]
    for step in where[:-1]:
        target = target[step]
    target[where[-1]] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
    for finding in lint([Manifest(d, "file") for d in documents]):
        assert "\n" not in str(finding)


@pytest.mark.parametrize("same", [True, False])
def test_the_running_servers_policy_is_compared(same, tmp_path):
    for file, text in rendered("laptop").files.items():
        (tmp_path / file).write_text(text)
    fingerprint = setup_of("laptop").scenario.policy_fingerprint if same else "0123456789ab"
    body = json.dumps({"state": "ready", "policy_fingerprint": fingerprint}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/twin/status" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *ignored):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        words = ["--check", str(tmp_path), "--server", url]
        run = subprocess.run(
            [sys.executable, "-m", "real", "manifests", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert run.returncode == (0 if same else 1), run.stdout + run.stderr
    assert same or f"the server at {url} runs 0123456789ab" in run.stdout
    gone = subprocess.run(
        [sys.executable, "-m", "real", "manifests", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert gone.returncode == 2
    assert "no answer to /twin/status" in gone.stderr
