"""Are the values of a manifest of the type that the API server takes? Checked for every value that the import reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twin.errors import InputError

Check = Callable[[Any], bool]
Shape = Mapping[str, Any] | list[Any] | tuple[str, Check]
"""Keys -> their shapes, a list of one shape, or what a value must be and whether one is. {} = any mapping."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_gpus(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, str) and value.isascii() and value.isdigit())


TEXT = ("text (numbers, true and false in quotes)", lambda value: isinstance(value, str))
WHOLE = ("a whole number, without quotes", _is_whole)
GPUS = ("a whole number of GPUs", _is_gpus)

_PROBE = {
    "initialDelaySeconds": WHOLE, "periodSeconds": WHOLE, "failureThreshold": WHOLE, "successThreshold": WHOLE,
    "timeoutSeconds": WHOLE, "httpGet": {},
}  # fmt: skip
_RESOURCES = {"nvidia.com/gpu": GPUS}
_CONTAINER = {
    "image": TEXT,
    "command": [TEXT],
    "args": [TEXT],
    "env": [{"name": TEXT}],
    "ports": [{"name": TEXT, "containerPort": WHOLE}],
    "resources": {"requests": _RESOURCES, "limits": _RESOURCES},
    "lifecycle": {"preStop": {"sleep": {"seconds": WHOLE}, "exec": {"command": [TEXT]}}},
    "startupProbe": _PROBE,
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
}
_TERM = {"matchExpressions": [{"key": TEXT, "operator": TEXT, "values": [TEXT]}]}
_POD = {
    "priorityClassName": TEXT,
    "terminationGracePeriodSeconds": WHOLE,
    "nodeSelector": {"nvidia.com/gpu.product": TEXT},
    "tolerations": [{"key": TEXT, "operator": TEXT}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}
        },
        "podAffinity": {},
        "podAntiAffinity": {},
    },
    "volumes": [{"name": TEXT}],
    "containers": [_CONTAINER],
}
_METRIC = {"metric": {"name": TEXT}}
_SPECS: Mapping[str, Shape] = {
    "Deployment": {"replicas": WHOLE, "template": {"spec": _POD}},
    "HorizontalPodAutoscaler": {
        "scaleTargetRef": {"name": TEXT},
        "minReplicas": WHOLE,
        "maxReplicas": WHOLE,
        "metrics": [{"type": TEXT, "pods": _METRIC, "object": _METRIC, "external": _METRIC}],
    },
    "ScaledObject": {
        "scaleTargetRef": {"name": TEXT},
        "minReplicaCount": WHOLE,
        "maxReplicaCount": WHOLE,
    },
}


class WrongType(InputError):
    """A value of another type than the API server takes."""

    def __init__(self, place: str, path: tuple[str | int, ...], problem: str) -> None:
        self.path = path
        """Of the value in the manifest."""
        self.problem = f"{'.'.join(map(str, path))}: {problem}"
        """With the path, without the place."""
        super().__init__(f"{place}: {self.problem}")


def check_types(manifest: Mapping[str, Any], place: str) -> None:
    """Raises WrongType for the first value that is of another type than the API server takes; `place` is the file."""
    shape = {"kind": TEXT, "metadata": {"name": TEXT}}
    _check(manifest, shape, place, ())
    kind = manifest["kind"]
    name = (manifest.get("metadata") or {}).get("name") or "unnamed"
    _check(manifest, {"spec": _SPECS.get(kind, {})}, f"{place}: {kind} {name}", ())


def _check(value: Any, shape: Shape, place: str, path: tuple[str | int, ...]) -> None:
    if isinstance(shape, tuple):
        wanted, is_right = shape
        if not is_right(value):
            _fail(value, wanted, place, path)
    elif isinstance(shape, list):
        if not isinstance(value, Sequence) or isinstance(value, str):
            _fail(value, "a list", place, path)
        for i, entry in enumerate(value):
            _check(entry, shape[0], place, (*path, i))
    else:
        if not isinstance(value, Mapping):
            _fail(value, "a mapping of keys", place, path)
        for key, below in shape.items():
            if key in value:
                _check(value[key], below, place, (*path, key))


def _fail(value: Any, wanted: str, place: str, path: tuple[str | int, ...]) -> None:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise WrongType(place, path, f"must be {wanted}, got {shown}")
