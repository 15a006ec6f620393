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
from real.manifests_notes import derived, left_out, needs, why
from real.manifests_pod import deployment, priority_class_of
from real.manifests_rules import prometheus_rule
from real.manifests_scaling import adapter_values, address, scaler
from real.manifests_scrape import pod_monitor, proxy_monitor
from real.manifests_setup import FINGERPRINT, PORT, Setup
from real.manifests_text import budget, document, written
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
        "deployment.yaml": (why(setup), [deployment(setup)]),
        "service.yaml": ("", services(setup, has_proxy)),
        "pdb.yaml": (
            "One replica at a time may be taken away by drains and upgrades.",
            [budget(setup.name, setup.labels("engine"))],
        ),
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
    notes = [*derived(setup), *needs(setup, values is not None), *left_out(setup, has_proxy)]
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
    address(setup.prometheus)
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
