"""Would the API server take it? Schemas of Kubernetes, enumerations that they leave open, and operators' own kinds."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Manifest, dotted, entries
from real.manifest_lint.schemas import VERSION, validator_of
from twin.cluster.manifest_types import WrongType, check_types
from twin.scenario_yaml import KeyPath

MOST = 20
"""Findings about one object."""

ENUMS = {
    r"spec\.metrics\.\d+\.type": ("Resource", "ContainerResource", "Pods", "Object", "External"),
    r".*\.target\.type": ("Utilization", "AverageValue", "Value"),
    r".*\.scale(Up|Down)\.selectPolicy": ("Max", "Min", "Disabled"),
    r".*\.scale(Up|Down)\.policies\.\d+\.type": ("Pods", "Percent"),
    r".*\.imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    r".*\.restartPolicy": ("Always", "OnFailure", "Never"),
    r".*\.httpGet\.scheme": ("HTTP", "HTTPS"),
    r".*\.tolerations\.\d+\.operator": ("Exists", "Equal", "Lt", "Gt"),
    r".*\.tolerations\.\d+\.effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    r".*\.matchExpressions\.\d+\.operator": ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
    r".*\.whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    r".*\.emptyDir\.medium": ("", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"),
    r".*\.ports\.\d+\.protocol": ("TCP", "UDP", "SCTP"),
    r".*\.seccompProfile\.type": ("RuntimeDefault", "Localhost", "Unconfined"),
    r".*\.fsGroupChangePolicy": ("OnRootMismatch", "Always"),
    r".*\.accessModes\.\d+": ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"),
    r"spec\.strategy\.type": ("RollingUpdate", "Recreate"),
    r"spec\.unhealthyPodEvictionPolicy": ("IfHealthyBudget", "AlwaysAllow"),
    r"spec\.policyTypes\.\d+": ("Ingress", "Egress"),
    r"preemptionPolicy": ("PreemptLowerPriority", "Never"),
}
"""Path of a value -> what the API server takes there."""

SERVICE_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")

GROUPS = (
    "apps", "autoscaling", "batch", "extensions", "policy", "admissionregistration.k8s.io", "apiextensions.k8s.io",
    "apiregistration.k8s.io", "authentication.k8s.io", "authorization.k8s.io", "certificates.k8s.io",
    "coordination.k8s.io", "discovery.k8s.io", "events.k8s.io", "flowcontrol.apiserver.k8s.io",
    "internal.apiserver.k8s.io", "networking.k8s.io", "node.k8s.io", "rbac.authorization.k8s.io",
    "resource.k8s.io", "scheduling.k8s.io", "storage.k8s.io", "storagemigration.k8s.io",
)  # fmt: skip
"""API groups of Kubernetes itself, now or once; others ending in .k8s.io belong to operators."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "ScaledObject": (
        "scaleTargetRef", "pollingInterval", "initialCooldownPeriod", "cooldownPeriod", "idleReplicaCount",
        "minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers",
    ),
    "PodMonitor": (
        "selector", "namespaceSelector", "podMetricsEndpoints", "jobLabel", "podTargetLabels", "sampleLimit",
        "targetLimit", "labelLimit", "attachMetadata", "scrapeProtocols", "scrapeClass", "selectorMechanism",
    ),
    "ServiceMonitor": (
        "selector", "namespaceSelector", "endpoints", "jobLabel", "targetLabels", "podTargetLabels", "sampleLimit",
        "targetLimit", "labelLimit", "attachMetadata", "scrapeProtocols", "scrapeClass", "selectorMechanism",
    ),
    "PrometheusRule": ("groups",),
}  # fmt: skip
"""Kinds of operators -> keys of their spec."""

TRIGGER = ("type", "name", "metadata", "metricType", "useCachedMetrics", "authenticationRef")

BOUNDS = {
    r".*\.stabilizationWindowSeconds": (0, 3600),
    r".*\.scale(Up|Down)\.policies\.\d+\.periodSeconds": (1, 1800),
    r".*\.scale(Up|Down)\.policies\.\d+\.value": (1, 2**31 - 1),
}
"""Path of a number -> the least and the most that the API server takes."""


def _by_key(patterns: Iterable[str]) -> Mapping[str, list[str]]:
    """Last key of a path -> the patterns that end in it, so that no path is held against all."""
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        key = [part for part in pattern.split(r"\.") if part != r"\d+"][-1]
        found.setdefault(key, []).append(pattern)
    return found


_ENUMS_OF, _BOUNDS_OF = _by_key(ENUMS), _by_key(BOUNDS)


def well_typed(manifest: Manifest) -> tuple[Manifest, list[Finding]]:
    """(the object without its values of a wrong type, a finding for each of these). Other rules rely on types."""
    document, found = copy.deepcopy(dict(manifest.document)), []
    while isinstance(document.get("kind"), str):
        try:
            check_types(document, manifest.file)
            break
        except WrongType as error:
            waits = "other rules look at this object once it is of the right type"
            found.append(manifest.fault("schema", error.path, error.problem, waits))
            parent: Any = document
            for step in error.path[:-1]:
                parent = parent[step]
            if isinstance(parent, list):
                parent[int(error.path[-1])] = {} if "mapping" in error.problem else ""
            else:
                del parent[error.path[-1]]
    return (replace(manifest, document=document), found) if found else (manifest, found)


def check(manifest: Manifest) -> Iterator[Finding]:
    """What the API server would refuse, and what a schema of an operator does not know."""
    for key in ("apiVersion", "kind"):
        if not isinstance(manifest.document.get(key), str):
            yield manifest.fault("schema", (key,), f"{key}: is missing or no text")
            return
    yield from _by_schema(manifest)
    for path, value in _leaves(manifest.document, ()):
        key = next((step for step in reversed(path) if isinstance(step, str)), "")
        for pattern in _ENUMS_OF.get(key, ()):
            text, allowed = dotted(path), ENUMS[pattern]
            if re.fullmatch(pattern, text) and value not in allowed:
                yield manifest.fault(
                    "schema", path, f"{text}: must be one of {', '.join(allowed)}, got {value!r}"
                )
        for pattern in _BOUNDS_OF.get(key, ()):
            text, (least, most) = dotted(path), BOUNDS[pattern]
            if (
                re.fullmatch(pattern, text)
                and isinstance(value, int)
                and not least <= value <= most
            ):
                yield manifest.fault(
                    "schema", path, f"{text}: must be from {least} to {most}, got {value}"
                )
    if manifest.kind == "Service":
        kind = manifest.get("spec", "type") or "ClusterIP"
        if kind not in SERVICE_TYPES:
            yield manifest.fault(
                "schema",
                ("spec", "type"),
                f"spec.type: must be one of {', '.join(SERVICE_TYPES)}, got {kind!r}",
            )
    least, most = manifest.get("spec", "minReplicas"), manifest.get("spec", "maxReplicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield manifest.fault(
            "schema",
            ("spec", "maxReplicas"),
            f"maxReplicas: must be >= minReplicas ({least}), got {most}",
        )
    yield from _own_kinds(manifest)


def _by_schema(manifest: Manifest) -> Iterator[Finding]:
    """Every problem: what is found is taken out of a copy, and the rest looked at again."""
    validator = validator_of(str(manifest.get("apiVersion")), manifest.kind)
    if validator is None:
        if not _is_foreign(manifest):
            version = manifest.document["apiVersion"]
            yield manifest.fault(
                "schema", ("kind",), f"Kubernetes {VERSION} has no {manifest.kind} in {version}"
            )
        return
    document = copy.deepcopy(dict(manifest.document))
    for _ in range(MOST):
        error: Any = next(validator.iter_errors(document), None)
        if error is None:
            return
        path = tuple(error.absolute_path)
        extra = re.findall(r"'([^']+)' (?:was|were) unexpected", error.message)
        if error.validator == "additionalProperties":
            known = set((error.schema or {}).get("properties", {}))
            extra = [key for key in error.instance if key not in known]
            yield from (_unknown(manifest, (*path, key), sorted(known)) for key in extra)
            for key in extra:
                del error.instance[key]
            continue
        text = f"{dotted(path)}: {error.message}" if path else error.message
        yield manifest.fault("schema", path, text.replace("'", ""))
        parent: Any = document
        for step in path[:-1]:
            parent = parent[step]
        if error.validator == "required" or not path or not isinstance(parent, dict):
            return
        del parent[path[-1]]


def _unknown(manifest: Manifest, path: KeyPath, known: list[str]) -> Finding:
    from difflib import get_close_matches

    near = get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return manifest.fault("schema", path, f"{dotted(path)}: unknown field", hint)


def _is_foreign(manifest: Manifest) -> bool:
    """Whether the kind belongs to an operator, not to Kubernetes itself."""
    group, has_group, _ = str(manifest.document.get("apiVersion")).partition("/")
    return bool(has_group) and group not in GROUPS


def _own_kinds(manifest: Manifest) -> Iterator[Finding]:
    spec = manifest.get("spec")
    known = NAMES.get(manifest.kind)
    if known is None or not isinstance(spec, Mapping):
        return
    for key in spec:
        if key not in known:
            yield _unknown(manifest, ("spec", key), list(known))
    for i, trigger in enumerate(entries(spec.get("triggers"))):
        for key in trigger if isinstance(trigger, Mapping) else ():
            if key not in TRIGGER:
                yield _unknown(manifest, ("spec", "triggers", i, key), list(TRIGGER))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, i))
    else:
        yield path, value
