"""A scenario as Kubernetes objects: what was chosen in simulation, to be read and applied.

`render` composes the parts, `read_scenario` reads the scenario back. What is rendered is the scenario's own
configuration: the policy to the byte, vLLM's arguments, the numbers of the autoscaler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from real import manifests_proxy as gateway
from real.manifest_names import image_parts, label_problem, name_problem
from real.manifests_numbers import MARGIN, TIDY_S, node_s
from real.manifests_pod import deployment, priority_class_of
from real.manifests_rules import prometheus_rule
from real.manifests_scaling import adapter_values, pod_monitor, proxy_monitor, scaler
from real.manifests_setup import FINGERPRINT, PORT, Setup
from real.manifests_text import document, written
from real.manifests_warm import warm_pool
from twin.errors import InputError
from twin.scenario import Scenario, load_scenario
from twin.scenario_faults import check as check_document
from twin.scenario_fleet import ALWAYS_THERE
from twin.scenario_schema import Document
from twin.scenario_yaml import parse

SCENARIO_KEY = "scenario.yaml"
"""In the ConfigMap."""

SHARED = ("default", "kube-system", "kube-public", "kube-node-lease")
"""Namespaces that every cluster has: not ours to make, to restrict or to delete."""

GOES_TOO = (
    "kubectl delete -k deletes the namespace too, with all that is in it: claims, other services."
)
"""Comment of the Namespace."""


@dataclass(frozen=True)
class Rendered:
    """The files of an overlay, and what must be known of them."""

    files: Mapping[str, str]
    """Name -> text."""
    objects: Sequence[Mapping[str, Any]]
    """What the kustomization applies."""
    notes: Sequence[str]
    """What was derived, what is needed, what has no like in Kubernetes."""


def render(setup: Setup, has_proxy: bool = True) -> Rendered:
    """The overlay of a scenario. Raises InputError for what cannot be rendered, with the way out."""
    _check(setup)
    parts: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "serviceaccount.yaml": (
            "No permissions: neither vLLM nor the proxy speaks to the API server.",
            [service_account(setup)],
        ),
        "scenario.yaml": ("The scenario that everything here comes from.", [config_map(setup)]),
        "deployment.yaml": (_why(setup), [deployment(setup)]),
        "service.yaml": ("", services(setup, has_proxy)),
        "pdb.yaml": ("One replica at a time may be taken away by drains and upgrades.", [pdb(setup)]),
        "networkpolicy.yaml": ("", network_policies(setup, has_proxy)),
        "podmonitor.yaml": (
            "For the Prometheus operator; the relabelling puts the colon back that some versions lose.",
            [pod_monitor(setup), *([proxy_monitor(setup)] if has_proxy else [])],
        ),
        "rules.yaml": ("", [prometheus_rule(setup)]),
    }  # fmt: skip
    if setup.namespace not in SHARED:
        parts = {"namespace.yaml": (GOES_TOO, [namespace(setup)])} | parts
    if not setup.tiny and priority_class_of(setup) not in ALWAYS_THERE:
        parts["priorityclass.yaml"] = ("", [priority_class(setup)])
    scaled = scaler(setup)
    if scaled:
        kind = "hpa.yaml" if scaled[0]["kind"] == "HorizontalPodAutoscaler" else "scaledobject.yaml"
        parts[kind] = ("", scaled)
    if has_proxy:
        parts["proxy.yaml"] = ("Clients come here.", gateway.proxy(setup))
    warm = warm_pool(setup)
    if warm:
        parts["warm-pool.yaml"] = ("", warm)
    files = {name: written(objects, comment) for name, (comment, objects) in parts.items()}
    values = adapter_values(setup)
    if values is not None:
        comment = "Values of the Helm chart prometheus-adapter: what the HPA asks for. Not part of the kustomization."
        files["prometheus-adapter-values.yaml"] = written([values], comment)
    files["kustomization.yaml"] = written([kustomization(setup, list(parts))])
    objects = [item for _, found in parts.values() for item in found]
    notes = [*_derived(setup), *_needs(setup, values is not None), *_left_out(setup, has_proxy)]
    return Rendered(files, objects, notes)


def _check(setup: Setup) -> None:
    _check_names(setup)
    scenario = setup.scenario
    fleet = scenario.cluster.fleet
    if fleet is not None and fleet.template.pods_per_replica > 1:
        raise InputError(
            "cluster.pod.pods_per_replica: a replica of several pods is a LeaderWorkerSet with Ray in it, which is not "
            "rendered; choose a node that holds the whole replica"
        )
    if fleet is not None and fleet.obstacle is not None:
        raise InputError(f"cluster.pod: no pod would ever start: {fleet.obstacle.why}")
    if not setup.tiny and scenario.document["model"].startswith(("/", ".", "~")):
        raise InputError(
            f"model: {scenario.document['model']} is a folder of this machine; put its files on the volume "
            f"{setup.models_claim} and name the model as clients do, or use --tiny"
        )


def _check_names(setup: Setup) -> None:
    for option, problem in (
        ("namespace", label_problem(setup.namespace)),
        ("monitoring", label_problem(setup.monitoring_namespace)),
        ("models-claim", name_problem(setup.models_claim)),
    ):
        if problem is not None:
            raise InputError(f"--{option}: {problem}")
    parts = image_parts(setup.image)
    if parts is None:
        raise InputError(
            f"--image {setup.image}: is no name of an image; write [HOST[:PORT]/]NAME:TAG or NAME@sha256:64 digits"
        )
    if not parts[1] and not parts[2]:
        raise InputError(
            f"--image {setup.image}: name a tag, so that it is the same image tomorrow"
        )


# --- small objects ------------------------------------------------------------------------


def namespace(setup: Setup) -> dict[str, Any]:
    """With the Pod Security Standard that everything here keeps."""
    level = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    return document("v1", "Namespace", setup.namespace, labels=level)


def service_account(setup: Setup) -> dict[str, Any]:
    """Without a token."""
    found = document("v1", "ServiceAccount", setup.name, labels=dict(setup.labels("engine")))
    return found | {"automountServiceAccountToken": False}


def config_map(setup: Setup) -> dict[str, Any]:
    """The scenario as it was read, overrides included, without what is as by default."""
    checked = check_document(setup.scenario.to_dict())
    assert isinstance(checked, Document)
    short = checked.model_dump(mode="json", exclude_defaults=True)
    short["engine"] = {"version": checked.engine.version} | short.get("engine", {})
    text = yaml.safe_dump(short, sort_keys=False, allow_unicode=True, width=100)
    return document(
        "v1",
        "ConfigMap",
        f"{setup.name}-scenario",
        labels=dict(setup.labels("engine")),
        annotations={FINGERPRINT: setup.scenario.policy_fingerprint},
        data={SCENARIO_KEY: text},
    )


def priority_class(setup: Setup) -> dict[str, Any]:
    """Above everything without a class; takes the place of placeholders and batch jobs."""
    found = document("scheduling.k8s.io/v1", "PriorityClass", priority_class_of(setup))
    return found | {
        "value": 100000,
        "globalDefault": False,
        "preemptionPolicy": "PreemptLowerPriority",
        "description": "Serving replicas: they preempt placeholders and batch jobs when GPUs are short.",
    }


def services(setup: Setup, has_proxy: bool) -> list[dict[str, Any]]:
    """What names the replicas: one address each for the proxy; without one, a Service for clients."""
    labels = dict(setup.labels("engine"))
    port = {"name": "http", "port": PORT, "targetPort": "http"}
    served = dict(setup.served)
    headless = document(
        "v1",
        "Service",
        f"{setup.name}-pods",
        labels=labels,
        spec={"clusterIP": "None", "selector": served, "ports": [port]},
    )
    if has_proxy:
        return [headless]
    spec = {"selector": served, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
    return [headless, document("v1", "Service", setup.name, labels=labels, spec=spec)]


def pdb(setup: Setup) -> dict[str, Any]:
    """Of the replicas."""
    labels = dict(setup.labels("engine"))
    return document(
        "policy/v1",
        "PodDisruptionBudget",
        setup.name,
        labels=labels,
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels},
        },
    )


def network_policies(setup: Setup, has_proxy: bool) -> list[dict[str, Any]]:
    """Who may speak to whom: clients to the proxy, the proxy and Prometheus to the replicas, nobody else."""
    engine, front = dict(setup.labels("engine")), dict(setup.labels("proxy"))
    served = dict(setup.served)
    monitoring = {"kubernetes.io/metadata.name": setup.monitoring_namespace}
    scrapers = {"namespaceSelector": {"matchLabels": monitoring}}
    callers = {"podSelector": {"matchLabels": front}} if has_proxy else {"namespaceSelector": {}}
    dns = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
        "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
    }  # fmt: skip
    found = [
        document(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            setup.name,
            labels=engine,
            spec={
                "podSelector": {"matchLabels": served},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [
                    {"from": [callers, scrapers], "ports": [{"protocol": "TCP", "port": "http"}]}
                ],
                "egress": [dns],
            },
        )
    ]
    if has_proxy:
        to_engines = {
            "to": [{"podSelector": {"matchLabels": served}}],
            "ports": [{"protocol": "TCP", "port": PORT}],
        }
        found.append(
            document(
                "networking.k8s.io/v1",
                "NetworkPolicy",
                f"{setup.name}-proxy",
                labels=front,
                spec={
                    "podSelector": {"matchLabels": front},
                    "policyTypes": ["Ingress", "Egress"],
                    "ingress": [
                        {
                            "from": [{"namespaceSelector": {}}],
                            "ports": [{"protocol": "TCP", "port": "http"}],
                        },
                        {"from": [scrapers], "ports": [{"protocol": "TCP", "port": "stats"}]},
                    ],
                    "egress": [to_engines, dns],
                },
            )
        )
    return found


def kustomization(setup: Setup, files: Sequence[str]) -> dict[str, Any]:
    """The files of the overlay, and the one place to name the image."""
    parts = image_parts(setup.image)
    assert parts is not None  # as `_check` has seen
    name, tag, digest = parts
    pinned = {"digest": digest} if digest else {"newTag": tag}
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": setup.namespace,
        "resources": list(files),
        "images": [{"name": name, **pinned}],
    }


# --- what is said of them -----------------------------------------------------------------


def _why(setup: Setup) -> str:
    """Where the numbers of the Deployment come from."""
    numbers, scenario = setup.numbers, setup.scenario
    lines = [
        f"{scenario.name}: {scenario.model.name}, "
        + (
            "the built-in tiny model in its place, on CPUs"
            if setup.tiny
            else f"{scenario.hardware.dtype} on {setup.gpus} x {scenario.hardware.gpu.name}"
        ),
        f"startupProbe: a start takes {numbers.start_s:.0f} s at p99 as predicted; {MARGIN:g} times that is allowed, "
        f"{numbers.startup_s} s",
        f"grace period {numbers.grace_s} s: preStop {numbers.pre_stop_s} s until no proxy sends requests here, "
        f"{numbers.shutdown_timeout_s} s for those inside (the longest took {numbers.longest_s:.1f} s in the "
        f"simulation), {TIDY_S} s to end",
    ]
    if not setup.tiny:
        weights = numbers.weights_bytes / 2**30
        lines.append(
            f"memory: {weights:.1f} GiB of weights pass through RAM while they are loaded; the rest is processes and "
            f"/dev/shm ({numbers.shm_bytes / 2**30:.0f} GiB)"
        )
    return "\n".join(lines)


def _derived(setup: Setup) -> list[str]:
    """Values that the scenario leaves open and the twin did not simulate with."""
    fleet, numbers = setup.scenario.cluster.fleet, setup.numbers
    told = []
    if setup.name != setup.scenario.name:
        told.append(
            f"derived: the objects are named {setup.name}, as Kubernetes does not take {setup.scenario.name!r}"
        )
    if fleet is None or fleet.probes.startup is None:
        told.append(
            f"derived: startup probe of {numbers.startup_s} s; cluster.probes.startup: {{periodSeconds: 10, "
            f"failureThreshold: {numbers.startup_failures}}} simulates it"
        )
    for key, is_said, seconds in (
        ("pre_stop", fleet and fleet.template.pre_stop_ps, numbers.pre_stop_s),
        ("shutdown_timeout", fleet and fleet.template.shutdown_timeout_ps, numbers.shutdown_timeout_s),
    ):  # fmt: skip
        if not is_said:
            told.append(f"derived: cluster.pod.{key}: {seconds} simulates it")
    if numbers.shutdown_timeout_s < numbers.longest_s:
        told.append(
            f"warning: cluster.pod.shutdown_timeout: {numbers.shutdown_timeout_s} s cuts the longest requests "
            f"short, which took {numbers.longest_s:.0f} s in the simulation"
        )
    return told


def _needs(setup: Setup, has_adapter: bool) -> list[str]:
    told = [f"needs: image {setup.image}, built with k8s/Containerfile"]
    if not setup.tiny:
        told.append(
            f"needs: PersistentVolumeClaim {setup.models_claim} with the folder {setup.scenario.model.name}, "
            "ReadOnlyMany or on every node"
        )
    cold = setup.scenario.document["cluster"]["cold_start"] or {}
    if cold.get("compile_cache") == "cached":
        told.append(
            f"needs: PersistentVolumeClaim {setup.name}-compile-cache, ReadWriteMany (compile_cache: cached)"
        )
    told.append("needs: the Prometheus operator for podmonitor.yaml and rules.yaml")
    if has_adapter:
        told.append("needs: prometheus-adapter with the rules of prometheus-adapter-values.yaml")
    fleet = setup.scenario.cluster.fleet
    if fleet is not None and fleet.scaler.keda is not None:
        told.append(f"needs: KEDA, and Prometheus at {setup.prometheus}")
    if setup.has_standby:
        told.append(
            f"needs: somebody who wakes {setup.name}-standby when replicas are short (docs/deploy.md): no "
            f"autoscaler does"
        )
    waits = node_s(fleet)
    if waits > 600:
        told.append(f"needs: patience: a new replica may wait {waits:.0f} s for node and image")
    return told


def _left_out(setup: Setup, has_proxy: bool) -> list[str]:
    told = [f"left out: {text}" for text in gateway.left_out(setup)] if has_proxy else []
    fleet = setup.scenario.cluster.fleet
    if fleet is not None and fleet.warm_pool is not None and setup.tiny:
        told.append("left out: cluster.warm_pool, as the tiny model has no GPUs to keep")
    return told


# --- back ---------------------------------------------------------------------------------


def read_scenario(objects: Sequence[Mapping[str, Any]]) -> Scenario:
    """The scenario in the ConfigMap among the objects. Raises InputError if there is not just one."""
    texts = [
        item["data"][SCENARIO_KEY]
        for item in objects
        if item.get("kind") == "ConfigMap" and SCENARIO_KEY in (item.get("data") or {})
    ]
    if len(texts) != 1:
        raise InputError(f"found {len(texts)} ConfigMaps with the key {SCENARIO_KEY}, not one")
    content, _ = parse(texts[0], f"ConfigMap, {SCENARIO_KEY}")
    return load_scenario(content)
