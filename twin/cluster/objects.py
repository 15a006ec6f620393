"""The autoscaling documents of a cluster <-> plain specs, both ways: `autoscaling/v2` and KEDA's ScaledObject.

What is read is the document that is deployed, key for key; what is written can be applied. Keys that the twin has no
use for (references to authentication, server addresses) are kept out of the specs; those that would change a decision
and are not modelled are refused by name. Raises ValueError, beginning with the path of the key.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from twin.clock import PS, to_seconds
from twin.cluster.cron import parse_cron
from twin.cluster.keda import CronTrigger, Fallback, KedaSpec, QueryTrigger, Trigger
from twin.cluster.quantity import exact, milli, quantity
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

HPA_VERSION, KEDA_VERSION = "autoscaling/v2", "keda.sh/v1alpha1"

MAX_WINDOW_S, MAX_PERIOD_S = 3600, 1800
"""What the API server takes at most in stabilizationWindowSeconds and periodSeconds."""

_SECTION = {
    "Resource": "resource",
    "ContainerResource": "containerResource",
    "Pods": "pods",
    "Object": "object",
    "External": "external",
}
"""Type of a metric -> the key its details stand under."""

_TARGET_KEY = {
    "Utilization": "averageUtilization",
    "AverageValue": "averageValue",
    "Value": "value",
}


# --- autoscaling/v2, reading --------------------------------------------------------------


def read_hpa(document: Mapping[str, Any]) -> HpaSpec:
    """The spec of an HPA: of the whole document, or of its `spec` alone.

    No metrics mean 80 % CPU, no minReplicas means 1, as the API server fills in.
    """
    if "kind" in document:
        _expect(document, "HorizontalPodAutoscaler", HPA_VERSION)
        document = _mapping(document.get("spec"), "spec")
    _only(document, "spec", ("scaleTargetRef", "minReplicas", "maxReplicas", "metrics", "behavior"))
    written = document.get("metrics") or [_CPU]
    metrics = [
        _metric(_mapping(entry, f"metrics.{i}"), f"metrics.{i}") for i, entry in enumerate(written)
    ]
    least = document.get("minReplicas")
    with_behavior = document.get("behavior")
    return HpaSpec(
        1 if least is None else _count(least, "minReplicas", 0),
        _count(document.get("maxReplicas"), "maxReplicas", 1),
        tuple(metrics),
        None if with_behavior is None else read_behavior(with_behavior, "behavior"),
    )


_CPU = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
}


def _metric(entry: Mapping[str, Any], path: str) -> MetricSpec:
    kind = entry.get("type")
    section = _SECTION.get(str(kind))
    if section is None:
        raise ValueError(f"{path}.type: must be one of {', '.join(_SECTION)}, got {kind!r}")
    _only(entry, path, ("type", section))
    path = f"{path}.{section}"
    details = _mapping(entry.get(section), path)
    target = _mapping(details.get("target"), f"{path}.target")
    known = TARGETS[str(kind)]
    if target.get("type") not in known:
        raise ValueError(
            f"{path}.target.type: must be one of {', '.join(known)}, got {target.get('type')!r}"
        )
    key = _TARGET_KEY[target["type"]]
    _only(target, f"{path}.target", ("type", key))
    value = target.get(key)
    if value is None:
        raise ValueError(f"{path}.target.{key}: is missing")
    if key == "averageUtilization":
        number = _count(value, f"{path}.target.{key}", 1)
    else:
        number = _quantity(value, f"{path}.target.{key}")
    selector: tuple[tuple[str, str], ...] = ()
    if "name" in details:  # of a resource
        _only(details, path, ("name", "target", "container"))
        name = details["name"]
    else:
        _only(details, path, ("metric", "target", "describedObject"))
        metric = _mapping(details.get("metric"), f"{path}.metric")
        _only(metric, f"{path}.metric", ("name", "selector"))
        name, selector = metric.get("name"), _selector(metric.get("selector"), f"{path}.metric")
    if not name:
        raise ValueError(f"{path}: the metric has no name")
    described = details.get("describedObject")
    return MetricSpec(
        str(kind),
        str(name),
        target["type"],
        number,
        details.get("container"),
        None if described is None else f"{described.get('kind')}/{described.get('name')}",
        selector,
    )


def _selector(written: Any, path: str) -> tuple[tuple[str, str], ...]:
    if not written:
        return ()
    selector = _mapping(written, f"{path}.selector")
    if selector.get("matchExpressions"):
        raise ValueError(f"{path}.selector.matchExpressions: not modelled; use matchLabels")
    labels = _mapping(selector.get("matchLabels", {}), f"{path}.selector.matchLabels")
    return tuple(sorted((str(key), str(value)) for key, value in labels.items()))


def read_behavior(document: Any, path: str = "behavior") -> Behavior:
    """`behavior` with what Kubernetes fills in, for each direction and key that is left out."""
    document = _mapping(document, path)
    _only(document, path, ("scaleUp", "scaleDown"))
    return Behavior(
        _rules(document.get("scaleUp"), DEFAULT_UP, f"{path}.scaleUp"),
        _rules(document.get("scaleDown"), DEFAULT_DOWN, f"{path}.scaleDown"),
    )


def _rules(written: Any, default: ScalingRules, path: str) -> ScalingRules:
    if written is None:
        return default
    rules = _mapping(written, path)
    _only(rules, path, ("stabilizationWindowSeconds", "selectPolicy", "policies", "tolerance"))
    window = rules.get("stabilizationWindowSeconds")
    select = rules.get("selectPolicy") or default.select
    if select not in ("Max", "Min", "Disabled"):
        raise ValueError(f"{path}.selectPolicy: must be Max, Min or Disabled, got {select!r}")
    tolerance = rules.get("tolerance")
    policies = rules.get("policies")
    if policies is not None and not policies:
        raise ValueError(f"{path}.policies: must have an entry, or be left out")
    return ScalingRules(
        default.policies
        if policies is None
        else tuple(_policy(p, f"{path}.policies.{i}") for i, p in enumerate(policies)),
        select,
        default.stabilization_ps
        if window is None
        else _count(window, f"{path}.stabilizationWindowSeconds", 0, MAX_WINDOW_S) * PS,
        None if tolerance is None else _tolerance(tolerance, f"{path}.tolerance"),
    )


def _policy(written: Any, path: str) -> ScalingPolicy:
    policy = _mapping(written, path)
    _only(policy, path, ("type", "value", "periodSeconds"))
    if policy.get("type") not in ("Pods", "Percent"):
        raise ValueError(f"{path}.type: must be Pods or Percent, got {policy.get('type')!r}")
    return ScalingPolicy(
        policy["type"],
        _count(policy.get("value"), f"{path}.value", 1),
        _count(policy.get("periodSeconds"), f"{path}.periodSeconds", 1, MAX_PERIOD_S) * PS,
    )


# --- autoscaling/v2, writing --------------------------------------------------------------


def write_hpa(
    spec: HpaSpec, name: str, target: str, namespace: str | None = None
) -> dict[str, Any]:
    """The document that is applied; `target` names the Deployment."""
    body: dict[str, Any] = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
        "minReplicas": spec.min_replicas,
        "maxReplicas": spec.max_replicas,
        "metrics": [_write_metric(metric) for metric in spec.metrics],
    }
    if spec.behavior is not None:
        body["behavior"] = write_behavior(spec.behavior)
    return _document(HPA_VERSION, "HorizontalPodAutoscaler", name, namespace, body)


def _write_metric(metric: MetricSpec) -> dict[str, Any]:
    key = _TARGET_KEY[metric.target]
    value: Any = metric.value if metric.target == "Utilization" else quantity(metric.value)
    details: dict[str, Any] = {"target": {"type": metric.target, key: value}}
    if metric.kind in ("Resource", "ContainerResource"):
        details = {"name": metric.name} | details
        if metric.container is not None:
            details["container"] = metric.container
    else:
        found: dict[str, Any] = {"name": metric.name}
        if metric.selector:
            found["selector"] = {"matchLabels": dict(metric.selector)}
        details = {"metric": found} | details
    if metric.described_object is not None:
        kind, _, name = metric.described_object.partition("/")
        details["describedObject"] = {"apiVersion": "v1", "kind": kind, "name": name}
    return {"type": metric.kind, _SECTION[metric.kind]: details}


def write_behavior(behavior: Behavior) -> dict[str, Any]:
    """`behavior` with every key written out."""
    return {"scaleUp": _write_rules(behavior.up), "scaleDown": _write_rules(behavior.down)}


def _write_rules(rules: ScalingRules) -> dict[str, Any]:
    written: dict[str, Any] = {
        "selectPolicy": rules.select,
        "policies": [
            {"type": p.kind, "value": p.value, "periodSeconds": _whole(p.period_ps)}
            for p in rules.policies
        ],
    }
    if rules.stabilization_ps is not None:
        written["stabilizationWindowSeconds"] = _whole(rules.stabilization_ps)
    if rules.tolerance is not None:
        written["tolerance"] = repr(rules.tolerance)
    return written


# --- KEDA ---------------------------------------------------------------------------------

_KEDA_KEYS = (
    "scaleTargetRef", "pollingInterval", "cooldownPeriod", "idleReplicaCount", "minReplicaCount",
    "maxReplicaCount", "fallback", "advanced", "triggers",
)  # fmt: skip


def read_scaled_object(document: Mapping[str, Any]) -> KedaSpec:
    """The spec of a ScaledObject: of the whole document, or of its `spec` alone."""
    if "kind" in document:
        _expect(document, "ScaledObject", KEDA_VERSION)
        document = _mapping(document.get("spec"), "spec")
    _only(document, "spec", _KEDA_KEYS)
    advanced = _mapping(document.get("advanced") or {}, "advanced")
    _only(advanced, "advanced", ("restoreToOriginalReplicaCount", "horizontalPodAutoscalerConfig"))
    hpa = _mapping(
        advanced.get("horizontalPodAutoscalerConfig") or {},
        "advanced.horizontalPodAutoscalerConfig",
    )
    _only(hpa, "advanced.horizontalPodAutoscalerConfig", ("name", "behavior"))
    behavior = hpa.get("behavior")
    idle = document.get("idleReplicaCount")
    triggers = document.get("triggers") or []
    return KedaSpec(
        tuple(_trigger(t, i) for i, t in enumerate(triggers)),
        _count(document.get("minReplicaCount", 0), "minReplicaCount", 0),
        _count(document.get("maxReplicaCount", 100), "maxReplicaCount", 1),
        None if idle is None else _count(idle, "idleReplicaCount", 0),
        _count(document.get("pollingInterval", 30), "pollingInterval", 1) * PS,
        _count(document.get("cooldownPeriod", 300), "cooldownPeriod", 0) * PS,
        _fallback(document.get("fallback")),
        None
        if behavior is None
        else read_behavior(behavior, "advanced.horizontalPodAutoscalerConfig.behavior"),
    )


FALLBACKS = ("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower")


def _fallback(written: Any) -> Fallback | None:
    if written is None:
        return None
    fallback = _mapping(written, "fallback")
    _only(fallback, "fallback", ("failureThreshold", "replicas", "behavior"))
    behavior = fallback.get("behavior") or "static"
    if behavior not in FALLBACKS:
        raise ValueError(
            f"fallback.behavior: must be one of {', '.join(FALLBACKS)}, got {behavior!r}"
        )
    return Fallback(
        _count(fallback.get("failureThreshold"), "fallback.failureThreshold", 0),
        _count(fallback.get("replicas"), "fallback.replicas", 0),
        behavior,
    )


def _trigger(written: Any, i: int) -> Trigger:
    path = f"triggers.{i}"
    trigger = _mapping(written, path)
    _only(
        trigger,
        path,
        ("type", "name", "metadata", "metricType", "useCachedMetrics", "authenticationRef"),
    )
    if trigger.get("useCachedMetrics"):
        raise ValueError(f"{path}.useCachedMetrics: not modelled; leave it out")
    details = _mapping(trigger.get("metadata"), f"{path}.metadata")
    name = str(trigger.get("name") or f"s{i}-{trigger.get('type')}")
    if trigger.get("type") == "cron":
        _only(details, f"{path}.metadata", ("timezone", "start", "end", "desiredReplicas"))
        _timezone(details.get("timezone"), f"{path}.metadata.timezone")
        return CronTrigger(
            name,
            parse_cron(str(details.get("start"))),
            parse_cron(str(details.get("end"))),
            _count(_digits(details.get("desiredReplicas")), f"{path}.metadata.desiredReplicas", 1),
        )
    if trigger.get("type") != "prometheus":
        raise ValueError(
            f"{path}.type: {trigger.get('type')!r} is not modelled; prometheus and cron are"
        )
    _only(
        details,
        f"{path}.metadata",
        ("serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues", "namespace",
         "metricName", "authModes", "unsafeSsl", "timeout"),
    )  # fmt: skip
    target = trigger.get("metricType") or "AverageValue"
    if target not in ("AverageValue", "Value"):
        raise ValueError(f"{path}.metricType: must be AverageValue or Value, got {target!r}")
    if not details.get("query"):
        raise ValueError(f"{path}.metadata.query: is missing")
    return QueryTrigger(
        name,
        str(details["query"]),
        _quantity(details.get("threshold"), f"{path}.metadata.threshold"),
        _quantity(details.get("activationThreshold", 0), f"{path}.metadata.activationThreshold"),
        target,
        str(details.get("ignoreNullValues", "true")).lower() == "true",
    )


def _timezone(name: Any, path: str) -> None:
    """A schedule is in the time of `cluster.start`; what is written must be a time zone, as KEDA demands."""
    if name is None:
        return
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise ValueError(
            f"{path}: must be a name of the IANA database such as Europe/Berlin or Etc/UTC, got {name!r}"
        ) from None


def write_scaled_object(
    spec: KedaSpec, name: str, target: str, server: str, namespace: str | None = None
) -> dict[str, Any]:
    """The document that is applied; `server` is the address of Prometheus, `target` names the Deployment."""
    body: dict[str, Any] = {
        "scaleTargetRef": {"name": target},
        "pollingInterval": _whole(spec.polling_interval_ps),
        "cooldownPeriod": _whole(spec.cooldown_ps),
        "minReplicaCount": spec.min_replicas,
        "maxReplicaCount": spec.max_replicas,
        "triggers": [_write_trigger(trigger, server) for trigger in spec.triggers],
    }
    if spec.idle_replicas is not None:
        body["idleReplicaCount"] = spec.idle_replicas
    if spec.fallback is not None:
        body["fallback"] = {
            "failureThreshold": spec.fallback.failure_threshold,
            "replicas": spec.fallback.replicas,
            "behavior": spec.fallback.behavior,
        }
    if spec.behavior is not None:
        config = {"behavior": write_behavior(spec.behavior)}
        body["advanced"] = {"horizontalPodAutoscalerConfig": config}
    return _document(KEDA_VERSION, "ScaledObject", name, namespace, body)


def _write_trigger(trigger: Trigger, server: str) -> dict[str, Any]:
    if isinstance(trigger, CronTrigger):
        details = {
            "timezone": "Etc/UTC",
            "start": trigger.start.text,
            "end": trigger.end.text,
            "desiredReplicas": str(trigger.desired_replicas),
        }
        return {"type": "cron", "name": trigger.name, "metadata": details}
    details = {
        "serverAddress": server,
        "query": trigger.query,
        "threshold": _decimal(trigger.threshold),
        "activationThreshold": _decimal(trigger.activation_threshold),
        "ignoreNullValues": str(trigger.ignore_null_values).lower(),
    }
    return {
        "type": "prometheus",
        "name": trigger.name,
        "metricType": trigger.target,
        "metadata": details,
    }


# --- both ---------------------------------------------------------------------------------


def _document(
    version: str, kind: str, name: str, namespace: str | None, spec: dict[str, Any]
) -> dict[str, Any]:
    metadata = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _expect(document: Mapping[str, Any], kind: str, version: str) -> None:
    if document.get("kind") != kind:
        raise ValueError(f"kind: must be {kind}, got {document.get('kind')!r}")
    if document.get("apiVersion") != version:
        raise ValueError(f"apiVersion: must be {version}, got {document.get('apiVersion')!r}")


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: must be a mapping, got {value!r}")
    return value


def _only(document: Mapping[str, Any], path: str, known: Sequence[str]) -> None:
    for key in document:
        if key not in known:
            raise ValueError(f"{path}.{key}: not known or not modelled; known: {', '.join(known)}")


def _count(value: Any, path: str, least: int, most: int = 2**31 - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{path}: must be a whole number from {least} to {most}, got {value!r}")
    return value


def _quantity(value: Any, path: str) -> int:
    try:
        found = milli(value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if found < 0:
        raise ValueError(f"{path}: must be >= 0, got {value!r}")
    return found


def _tolerance(value: Any, path: str) -> float:
    _quantity(value, path)
    return float(exact(value))


def _digits(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _decimal(thousandths: int) -> str:
    """As KEDA's triggers take it: a plain number."""
    whole, rest = divmod(thousandths, 1000)
    return f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)


def _whole(ps: int) -> int:
    return round(to_seconds(ps))
