"""Do the objects of a folder fit each other? Names that nothing defines, selectors that find nothing, gaps."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import (
    Cluster,
    Manifest,
    Server,
    containers,
    entries,
    mapping,
    selects,
)
from twin.scenario_fleet import ALWAYS_THERE
from twin.scenario_yaml import KeyPath

FRONTS = (
    "Ingress", "Gateway", "HTTPRoute", "InferencePool", "InferenceModel", "VirtualService", "IngressRoute",
)  # fmt: skip
"""Kinds that stand before a Service and may limit what they let in."""


def check(cluster: Cluster) -> Iterator[Finding]:
    """All findings across objects."""
    for manifest in cluster.manifests:
        yield from priority_class(manifest, cluster)
    yield from reserved_names(cluster)
    yield from selectors(cluster)
    for server in cluster.servers:
        if server.manifest.kind in ("Deployment", "StatefulSet"):
            yield from around(server, cluster)
    yield from secrets(cluster)


def reserved_names(cluster: Cluster) -> Iterator[Finding]:
    """PriorityClasses that cannot be made."""
    for manifest in cluster.of_kind("PriorityClass"):
        if manifest.name.startswith("system-"):
            yield manifest.fault(
                "priority-class",
                ("metadata", "name"),
                "names that begin with system- are reserved and cannot be made",
                "use a name of your own",
            )


def priority_class(manifest: Manifest, cluster: Cluster) -> Iterator[Finding]:
    """A class that is not there: then no pod is made at all."""
    path = manifest.pod_path
    name = None if path is None else manifest.get(*path, "priorityClassName")
    known = {m.name for m in cluster.of_kind("PriorityClass")} | set(ALWAYS_THERE)
    if path is None or name is None or name in known:
        return
    where = (*path, "priorityClassName")
    if str(name).startswith("system-"):
        yield manifest.fault(
            "priority-class",
            where,
            f"PriorityClass {name} does not exist and cannot be made: names that begin with system- are reserved; "
            f"no pod will ever be made",
            "define one of your own, e.g. llm-online, and say its preemptionPolicy",
        )
    else:
        yield manifest.finding(
            "needs", "priority-class", where, f"PriorityClass {name}, without which no pod is made"
        )


def selectors(cluster: Cluster) -> Iterator[Finding]:
    """Selectors that find no pod, ports that no container has, targets that are not there."""
    makers = [m for m in cluster.manifests if m.pod_path is not None]
    if not makers:
        return
    checks: tuple[tuple[str, KeyPath], ...] = (
        ("Service", ("spec", "selector")),
        ("PodDisruptionBudget", ("spec", "selector")),
        ("PodMonitor", ("spec", "selector")),
        ("NetworkPolicy", ("spec", "podSelector")),
    )
    for kind, path in checks:
        for manifest in cluster.of_kind(kind):
            selector = manifest.get(*path)
            empty = not mapping(selector) or (
                kind != "Service" and not any(mapping(selector).values())
            )
            if empty:
                continue
            taken = [m for m in makers if selects(selector, m.pod_labels, plain=kind == "Service")]
            if not taken:
                yield manifest.fault(
                    "selector", path, "selects no pod of these files", "use the labels of the pods"
                )
            else:
                yield from _ports(manifest, taken)
    for manifest in cluster.of_kind("ServiceMonitor"):
        selector = manifest.get("spec", "selector")
        found = [
            s
            for s in cluster.of_kind("Service")
            if selects(selector, mapping(s.get("metadata", "labels")))
        ]
        if selector and not found and cluster.of_kind("Service"):
            yield manifest.fault(
                "selector", ("spec", "selector"), "selects no Service of these files"
            )
        names = {str(p.get("name")) for s in found for p in entries(s.get("spec", "ports"))}
        for i, endpoint in enumerate(entries(manifest.get("spec", "endpoints"))):
            port = endpoint.get("port")
            if found and port is not None and str(port) not in names:
                where = ("spec", "endpoints", i, "port")
                yield manifest.fault(
                    "port", where, f"no Service that it selects has a port named {port}"
                )
    for manifest in makers:
        if manifest.kind in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"):
            if not selects(manifest.get("spec", "selector"), manifest.pod_labels):
                yield manifest.fault(
                    "selector",
                    ("spec", "selector"),
                    "does not select the pods of its own template: the API server refuses it",
                )


def _ports(manifest: Manifest, taken: list[Manifest]) -> Iterator[Finding]:
    """Names of ports that no selected container has."""
    if manifest.kind == "Service":
        asked = [
            (("spec", "ports", i, "targetPort"), p.get("targetPort"))
            for i, p in enumerate(entries(manifest.get("spec", "ports")))
        ]
    elif manifest.kind == "PodMonitor":
        asked = [
            (("spec", "podMetricsEndpoints", i, "port"), p.get("port"))
            for i, p in enumerate(entries(manifest.get("spec", "podMetricsEndpoints")))
        ]
    else:
        return
    names = {
        str(p.get("name")) for m in taken for _, c in containers(m) for p in entries(c.get("ports"))
    }
    for path, port in asked:
        if isinstance(port, str) and not port.isdigit() and port not in names:
            yield manifest.fault(
                "port", path, f"no container that it selects has a port named {port}"
            )


def around(server: Server, cluster: Cluster) -> Iterator[Finding]:
    """What a server needs beside it: a budget, a Service, a limit, a scrape."""
    manifest = server.manifest
    labels, scalers = manifest.pod_labels, cluster.scalers_of(manifest)
    replicas = manifest.get("spec", "replicas")
    several = bool(scalers) or (isinstance(replicas, int) and replicas > 1)
    if scalers and replicas is not None:
        yield manifest.fault(
            "replicas",
            ("spec", "replicas"),
            f"replicas: {replicas} beside {scalers[0].kind} {scalers[0].name}: every apply sets the count back",
            "leave it out",
        )
    kinds = [s for s in scalers if s.kind == "HorizontalPodAutoscaler"]
    if len(scalers) > 1:
        named = " and ".join(f"{s.kind} {s.name}" for s in scalers)
        yield scalers[1].fault(
            "two-scalers",
            ("spec", "scaleTargetRef"),
            f"{named} scale the same pods: "
            + (
                "none of them will (AmbiguousSelector)"
                if len(kinds) > 1
                else "they undo each other"
            ),
            "keep one",
        )
    if several and not cluster.selecting("PodDisruptionBudget", labels, "spec", "selector"):
        yield manifest.fault(
            "disruption-budget",
            ("spec",),
            "no PodDisruptionBudget: a node upgrade may take all replicas at once",
            "policy/v1 with maxUnavailable: 1",
        )
    pooled = any(
        selects(pool.get("spec", "selector"), labels, plain="matchLabels" not in selector)
        for pool in cluster.of_kind("InferencePool")
        for selector in [mapping(pool.get("spec", "selector"))]
    )
    if not pooled and not cluster.selecting("Service", labels, "spec", "selector"):
        yield manifest.fault(
            "service",
            ("spec", "template", "metadata", "labels"),
            "no Service selects its pods, so that no client or router finds them",
            "a Service, and before several replicas a router or proxy with least connections",
        )
    if scalers and not _has_limit(server, cluster):
        yield manifest.fault(
            "admission-limit",
            server.sub("args"),
            "no admission limit: while new replicas start, the queue grows without end and clients leave",
            "--max-num-queued-reqs=N, or a proxy that answers 429 or 503 with Retry-After",
        )
    yield from _scrape(server, cluster)


def _has_limit(server: Server, cluster: Cluster) -> bool:
    if {"max-num-queued-reqs", "max-num-queued-tokens"} & set(server.arguments):
        return True
    if cluster.of_kind(*FRONTS):
        return True
    return any(
        re.search("haproxy|envoy|nginx|router|gateway|traefik", str(c.get("image")))
        for m in cluster.manifests
        for _, c in containers(m)
    )


def _scrape(server: Server, cluster: Cluster) -> Iterator[Finding]:
    """Annotations that nobody need read."""
    manifest = server.manifest
    path = (*server.path[:-3], "metadata", "annotations")
    annotations = manifest.get(*path)
    monitored = cluster.of_kind("ServiceMonitor") or cluster.selecting(
        "PodMonitor", manifest.pod_labels, "spec", "selector"
    )
    has_annotation = isinstance(annotations, Mapping) and any(
        str(key).startswith("prometheus.io/") for key in annotations
    )
    if has_annotation and not monitored:
        yield manifest.fault(
            "scrape",
            path,
            "prometheus.io/* annotations alone are read only by a Prometheus that is configured to read them",
            "a PodMonitor or ServiceMonitor",
        )


def secrets(cluster: Cluster) -> Iterator[Finding]:
    """Secrets with their content."""
    for manifest in cluster.of_kind("Secret"):
        filled: list[Any] = [k for k in ("data", "stringData") if manifest.get(k)]
        if filled:
            yield manifest.fault(
                "secret",
                (filled[0],),
                "holds a secret in the open",
                "create it beside the manifests, or seal it",
            )
