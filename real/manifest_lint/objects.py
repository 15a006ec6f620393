"""Manifests as objects that know their lines, and the vLLM servers among them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from real.manifest_lint.finding import Finding, Kind
from twin.cluster.manifests import guess_model, products_of
from twin.cluster.vllm_command import arguments_of, name_in
from twin.cluster.vllm_values import readable_int
from twin.errors import InputError
from twin.scenario import Scenario, load_scenario
from twin.scenario_yaml import KeyPath, dotted, parse
from twin.step_time.catalogue import GPUS, MODELS, GpuSpec, ModelSpec

POD_PATHS: Mapping[str, KeyPath] = {
    "Deployment": ("spec", "template", "spec"),
    "StatefulSet": ("spec", "template", "spec"),
    "DaemonSet": ("spec", "template", "spec"),
    "ReplicaSet": ("spec", "template", "spec"),
    "Job": ("spec", "template", "spec"),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
    "Pod": ("spec",),
}
"""Kind -> where its pod stands."""

GPU = "nvidia.com/gpu"

SCENARIO_KEY = "scenario.yaml"
"""Of the ConfigMap that holds a rendered scenario."""


def at(value: Any, *path: str | int) -> Any:
    """What stands under a path; None where there is nothing."""
    for step in path:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one: what is of another type a schema has told."""
    return value if isinstance(value, Mapping) else {}


def entries(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def texts(value: Any) -> list[str]:
    """The plain values of a list, as texts."""
    return (
        [str(item) for item in value if not isinstance(item, dict | list)]
        if isinstance(value, list)
        else []
    )


@dataclass(frozen=True)
class Manifest:
    """One object of a file."""

    document: Mapping[str, Any]
    file: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """As written."""
        return str(self.document.get("kind"))

    @property
    def name(self) -> str:
        """Of its metadata."""
        return str(at(self.document, "metadata", "name") or "unnamed")

    @property
    def pod_path(self) -> KeyPath | None:
        """Where its pod stands; None if it makes none."""
        path = POD_PATHS.get(self.kind)
        return path if path is not None and isinstance(self.get(*path), Mapping) else None

    @property
    def pod_labels(self) -> Mapping[str, Any]:
        """Of the pods it makes."""
        path = self.pod_path
        found = None if path is None else self.get(*path[:-1], "metadata", "labels")
        return found if isinstance(found, Mapping) else {}

    def get(self, *path: str | int) -> Any:
        """What stands under a path."""
        return at(self.document, *path)

    def place(self, *path: str | int) -> str:
        """file:line of what stands under a path, or of the nearest part of the way there that is written."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return self.file

    def finding(self, kind: Kind, rule: str, path: KeyPath, message: str, fix: str = "") -> Finding:
        """What a rule has found under a path."""
        return Finding(kind, rule, self.place(*path), f"{self.kind} {self.name}", message, fix)

    def fault(self, rule: str, path: KeyPath, message: str, fix: str = "") -> Finding:
        """A finding of that kind."""
        return self.finding("fault", rule, path, message, fix)


@dataclass(frozen=True)
class Server:
    """A container that runs vLLM, in the object that makes its pods."""

    manifest: Manifest
    path: KeyPath
    """Of the container."""

    @property
    def container(self) -> Mapping[str, Any]:
        """As written."""
        return dict(self.manifest.get(*self.path))

    @property
    def pod(self) -> Mapping[str, Any]:
        """The pod's spec."""
        return dict(self.manifest.get(*self.path[:-2]))

    @cached_property
    def arguments(self) -> Mapping[str, str]:
        """Of `vllm serve`; flags have the value true."""
        return dict(arguments_of(self.container))

    def argument_path(self, name: str) -> KeyPath:
        """Where an argument stands."""
        for key in ("args", "command"):
            for i, text in enumerate(texts(self.container.get(key))):
                if name in map(name_in, text.split()):
                    return (*self.path, key, i)
        return (*self.path, "args")

    def number(self, name: str, default: float) -> float:
        """Of an argument, 32k and the like included; the default where it is not written, no number or below 0."""
        text = self.arguments.get(name, "")
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
        try:
            found = readable_int(text)
        except ValueError:
            return default
        return found if found >= 0 else default

    @property
    def port(self) -> int:
        """Of the API, and of /metrics."""
        return int(self.number("port", 8000))

    @property
    def gpus(self) -> int:
        """That the container asks for."""
        for kind in ("limits", "requests"):
            asked = at(self.container, "resources", kind, GPU)
            if asked is not None and str(asked).isdigit():
                return int(asked)
        return 0

    @property
    def model(self) -> ModelSpec | None:
        """Of the catalogue; None if it is like none of them."""
        return MODELS.get(guess_model(self.arguments.get("model", "")))

    @property
    def products(self) -> list[str]:
        """Values of the label nvidia.com/gpu.product that its pod asks for."""
        try:
            return texts(products_of(self.pod))
        except (AttributeError, TypeError):  # of another shape, as the schema has told
            return []

    @property
    def gpu(self) -> GpuSpec | None:
        """The largest of those that the pod's nodes may have; None if nothing names one."""
        products = self.products
        known = [
            spec
            for name, spec in GPUS.items()
            if any(re.search(rf"\b{name}\b", p.replace("-", " ")) for p in products)
        ]
        return max(known, key=lambda spec: spec.memory_bytes) if known else None

    def sub(self, *path: str | int) -> KeyPath:
        """A path inside the container."""
        return (*self.path, *path)


class Cluster:
    """All objects of a folder."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = manifests
        self.servers = [server for manifest in manifests for server in _servers(manifest)]

    @cached_property
    def scenario(self) -> Scenario | InputError | None:
        """The scenario in the folder's ConfigMap, or why it cannot be loaded; None if there is none."""
        for manifest in self.of_kind("ConfigMap"):
            text = manifest.get("data", SCENARIO_KEY)
            if isinstance(text, str):
                try:
                    return load_scenario(mapping(parse(text, SCENARIO_KEY)[0]))
                except InputError as error:
                    return error
        return None

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """In their order."""
        (first, *others) = kinds
        if not others:
            return self._by_kind.get(first, [])
        return [m for m in self.manifests if m.kind in kinds]

    @cached_property
    def _by_kind(self) -> Mapping[str, list[Manifest]]:
        found: dict[str, list[Manifest]] = {}
        for manifest in self.manifests:
            found.setdefault(manifest.kind, []).append(manifest)
        return found

    def selecting(self, kind: str, labels: Mapping[str, Any], *path: str) -> list[Manifest]:
        """Objects of a kind whose selector under the path takes pods with these labels."""
        return [
            m for m in self.of_kind(kind) if selects(m.get(*path), labels, plain=kind == "Service")
        ]

    def scalers_of(self, manifest: Manifest) -> list[Manifest]:
        """HPAs and ScaledObjects whose target it is."""
        found = self.of_kind("HorizontalPodAutoscaler", "ScaledObject")
        return [s for s in found if s.get("spec", "scaleTargetRef", "name") == manifest.name]


def selects(selector: Any, labels: Mapping[str, Any], plain: bool = False) -> bool:
    """Whether a label selector (`plain`: of a Service) takes a pod with these labels."""
    if not isinstance(selector, Mapping):
        return False
    if plain:
        return bool(selector) and all(labels.get(k) == v for k, v in selector.items())
    wanted = mapping(at(selector, "matchLabels"))
    if any(labels.get(k) != v for k, v in wanted.items()):
        return False
    for expression in entries(at(selector, "matchExpressions")):
        value, values = labels.get(str(expression.get("key"))), texts(expression.get("values"))
        holds = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }.get(str(expression.get("operator")), False)
        if not holds:
            return False
    return True


def _servers(manifest: Manifest) -> Iterator[Server]:
    path = manifest.pod_path
    if path is None:
        return
    for i, container in enumerate(entries(manifest.get(*path, "containers"))):
        if isinstance(container, Mapping) and is_server(container):
            yield Server(manifest, (*path, "containers", i))


def is_server(container: Mapping[str, Any]) -> bool:
    """Whether a container runs a vLLM server: by its command, or by its image where it has none."""
    words = [*texts(container.get("command")), *texts(container.get("args"))]
    text = " ".join(map(str, words))
    if re.search(r"\bvllm\b\s+serve\b|\bvllm\.entrypoints\b|\btwin-real\b\s+serve\b", text):
        return True
    image = str(container.get("image", ""))
    return (
        not container.get("command") and "vllm-openai" in image and not re.search("router", image)
    )


def containers(manifest: Manifest) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """(path, container) of all containers of an object's pods, those of Ray clusters included."""
    own = manifest.pod_path
    paths = [own] if own is not None else []
    for top in (("spec", "rayClusterSpec"), ("spec",)):
        if manifest.kind in ("RayJob", "RayCluster", "RayService"):
            paths.append((*top, "headGroupSpec", "template", "spec"))
            paths.append((*top, "submitterPodTemplate", "spec"))
            groups = entries(manifest.get(*top, "workerGroupSpecs"))
            paths += [(*top, "workerGroupSpecs", i, "template", "spec") for i in range(len(groups))]
    for path in paths:
        for key in ("initContainers", "containers"):
            for i, container in enumerate(entries(manifest.get(*path, key))):
                yield (*path, key, i), container


__all__ = ["Cluster", "Manifest", "Server", "at", "containers", "dotted", "is_server", "selects"]
