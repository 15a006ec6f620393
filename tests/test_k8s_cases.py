"""Reported incidents of others with Kubernetes and Prometheus: what they were about must not happen here.

kserve/kserve#5062 (probes against the time to load) and prometheus/prometheus#4264 (no traffic gives NaN) are in
test_k8s_manifests.py and test_k8s_prometheus.py, with the numbers; here is what is left of them.
"""

import copy
import math
import re

import pytest

from real.manifest_lint.check import lint
from real.manifest_lint.objects import GPU, Manifest, at, containers, is_server
from real.manifest_lint.tools import manifests_of
from real.manifests_numbers import MARGIN
from tests.k8s import NAMES, ROOT, of_kind, rendered, setup_of
from twin.clock import PS
from twin.cluster.autoscaler import reconcile
from twin.cluster.metrics_path import pods_reading
from twin.cluster.objects import read_hpa
from twin.cluster.probes import Probe, Probes, fate
from twin.cluster.specs import Pod, PodSamples, Sample, Scale, ScalingLog
from twin.scenario_yaml import parse_documents


def shipped():
    for path in sorted((ROOT / "k8s").rglob("*.yaml")):
        if path.parent.name == "scenarios" or (
            "overlays" in path.parts and path.parts[-2] in ("a100", "h100", "h200")
        ):
            continue
        yield from manifests_of(parse_documents(path.read_text(), str(path)), str(path))


@pytest.mark.parametrize("name", NAMES)
def test_no_start_that_the_twin_draws_is_killed(name):
    """kserve/kserve#5062: the manifest's probes, as the twin's own kubelet, over the p99 of its starts."""
    numbers = setup_of(name).numbers
    deployment = of_kind(rendered(name).objects, "Deployment", name)
    container = deployment["spec"]["template"]["spec"]["containers"][0]

    def probe(kind):
        written = container[f"{kind}Probe"]
        delay = written.get("initialDelaySeconds", 0)
        return Probe(delay * PS, written["periodSeconds"] * PS, written["failureThreshold"])

    probes = Probes(probe("startup"), probe("liveness"), probe("readiness"))
    for factor in (0.1, 1.0, MARGIN):
        serving_ps = round(factor * numbers.start_s * PS)
        found = fate(probes, serving_ps)
        assert found.killed_ps is None
        # Ready within a period of the startup probe and one of readiness, and not before the model serves.
        assert 0 <= found.ready_ps - serving_ps <= 16 * PS
    assert fate(probes, probes.startup.patience_ps + PS).killed_by == "startup"


def test_only_servers_ask_for_gpus():
    """llm-d/llm-d-deployer#338: the simulator's pods stayed Pending for a GPU that it does not use."""
    asking, others = [], []
    for manifest in shipped():
        for path, container in containers(manifest):
            asks = any(at(container, "resources", kind, GPU) for kind in ("requests", "limits"))
            (asking if asks else others).append((manifest, path, container))
    assert {c["name"] for _, _, c in others} >= {"ray-head", "ray-worker", "haproxy"}
    for manifest, _, container in asking:
        assert is_server(container) or manifest.name.endswith("-placeholder"), manifest.name
    cpu = [m for m, _, _ in asking if "cpu-kind" in m.file]
    assert not cpu


def test_a_sweep_that_asks_for_a_gpu_is_named():
    """llm-d/llm-d-deployer#338."""
    path = ROOT / "k8s" / "jobs" / "sweep.yaml"
    found = manifests_of(parse_documents(path.read_text(), "sweep.yaml"), "sweep.yaml")
    assert not [f for f in lint(found) if f.kind == "fault"]
    job = copy.deepcopy(dict(next(m for m in found if m.kind == "RayJob").document))
    worker = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][
        0
    ]
    worker["resources"]["limits"][GPU] = 1
    rules = [f.rule for f in lint([Manifest(job, "sweep.yaml")])]
    assert rules == ["gpu-for-nothing"]


def test_an_idle_autoscaler_moves_nothing():
    """prometheus/prometheus#4264: without requests the gauges are 0, and a query over nothing is no number."""
    scenario = setup_of("chat-8b").scenario
    hpa = of_kind(rendered("chat-8b").objects, "HorizontalPodAutoscaler")
    assert read_hpa(hpa) == scenario.cluster.fleet.scaler.hpa
    spec, log = scenario.cluster.fleet.scaler.hpa, ScalingLog(((5, 0),))
    pods = [Pod(f"p{i}") for i in range(2)]
    for minute in range(10):
        now_ps = minute * 60 * PS
        idle = PodSamples({pod.name: Sample(0, now_ps) for pod in pods})
        nothing = pods_reading({}, now_ps)  # the query gives no series, or is NaN
        not_a_number = pods_reading({pod.name: math.nan for pod in pods}, now_ps)
        for reading in (idle, nothing, not_a_number):
            decision = reconcile(spec, log, [reading], pods, Scale(2, 2), now_ps)
            assert decision.desired == spec.min_replicas == 2
    for manifest in shipped():
        if manifest.kind != "ScaledObject":
            continue
        for trigger in manifest.get("spec", "triggers"):
            query = trigger["metadata"].get("query", "")
            # Gauges, which are 0 and not NaN when idle: no ratio, no quantile.
            assert not re.search(r"/|histogram_quantile|rate\(", query)
