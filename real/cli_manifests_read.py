"""From a file or folder to the manifests in it: what cannot be read is a finding, and the rest is looked at."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Manifest
from real.manifest_lint.tools import (
    KUSTOMIZATIONS,
    build,
    kubectl,
    kustomization_in,
    manifests_of,
)
from twin.errors import InputError
from twin.scenario_yaml import parse_documents

SUFFIXES = (".yaml", ".yml", ".json")

TEMPLATE = (
    r"\{\{-?\s*(?:[.$(]|/\*|(?:if|else|end|range|with|include|template|define|block|tpl|toYaml|printf|default|"
    r"required|lookup|quote|not|and|or|eq)\b)"
)
"""What Helm fills in; quoted texts of rules have the like, hence only looked for in what is no YAML."""

HELM = "it is a template of Helm: check what `helm template` makes of its chart"


@dataclass
class Read:
    """What a folder holds."""

    manifests: list[Manifest] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    """Files that cannot be read, kustomizations that cannot be built."""
    skipped: list[str] = field(default_factory=list)
    """What was not looked at, and why."""


def read(source: Path) -> Read:
    """The objects of a file, or of a folder's files, as kustomize builds them where it is an overlay.

    Raises InputError where there is no object, or where nothing at all can be read.
    """
    result = Read()
    for path in _files(source):
        text = ""
        try:
            text = _text(path)
            result.manifests += _objects(path, text)
        except InputError as error:
            result.found.append(_unreadable(path, text, str(error)))
    overlay = kustomization_in(source) if source.is_dir() else None
    if overlay is not None:
        _build(source, overlay, result)
    kinds = ("Kustomization", "Component")
    result.manifests = [m for m in result.manifests if m.kind not in kinds]
    if not any(m.document.get("kind") for m in result.manifests):
        if result.found:
            raise InputError("\n".join(f"{f.place}: {f.message}; {f.fix}" for f in result.found))
        raise InputError(f"{source}: holds no Kubernetes object{_chart(source)}")
    return result


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    found = sorted(
        path
        for path in source.iterdir()
        if (path.suffix in SUFFIXES or path.name in KUSTOMIZATIONS) and path.is_file()
    )
    if not found:
        raise InputError(f"{source}: holds no .yaml, .yml or .json file{_chart(source)}")
    return found


def _chart(source: Path) -> str:
    """What to do with the folder of a chart, or that of its templates; empty for others."""
    charts = [folder for folder in (source, source.parent) if (folder / "Chart.yaml").is_file()]
    if not charts:
        return ""
    return f"; it is a chart of Helm: `helm template {charts[0]} > rendered.yaml`, and check that"


def _objects(path: Path, text: str) -> list[Manifest]:
    """The objects of a file. JSON that is no object of Kubernetes is left alone. Raises InputError for bad text."""
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except ValueError as error:
            line = getattr(error, "lineno", 1)
            raise InputError(f"{path} line {line}: not readable as JSON: {error}") from None
        if not isinstance(content, dict) or not {"apiVersion", "kind"} <= set(content):
            return []
        text = text.expandtabs(2)  # YAML, of which JSON is a part, takes no tabs between values
    return manifests_of(parse_documents(text, str(path)), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text in UTF-8; a manifest is a YAML file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _unreadable(path: Path, text: str, problem: str) -> Finding:
    """An error of the reader as a finding with the line that it names."""
    found = re.fullmatch(rf"{re.escape(str(path))}(?: line (\d+))?: (.*)", problem, re.DOTALL)
    line, problem = (int(found[1] or 1), found[2]) if found else (1, problem)
    line = max(1, min(line, len(text.splitlines())))  # what never ends is told behind the end
    message, _, fix = problem.rpartition("; ")
    if not message:
        message, fix = fix, "no other rule looks at this file until it is read"
    if re.search(TEMPLATE, text):
        fix = HELM
    return Finding("fault", "yaml", f"{path}:{line}", path.name, message, fix)


def _build(folder: Path, overlay: Path, result: Read) -> None:
    """What kustomize makes of an overlay takes the place of its files, where it is more than a list of them."""
    if kubectl() is None:
        result.skipped.append("the kustomization, as kubectl is not installed")
        return
    text, problem = build(folder)
    if problem:
        finding = Finding("fault", "kustomize", str(overlay), "Kustomization", problem)
        result.found.append(finding)
    elif _reaches_out(result.manifests):
        place = f"kubectl kustomize {folder}"
        values = [m for m in result.manifests if not m.document.get("kind")]
        result.manifests = [*manifests_of(parse_documents(text, place), place), *values]


def _reaches_out(manifests: list[Manifest]) -> bool:
    """Whether an overlay has patches, or bases elsewhere."""
    plain = {"apiVersion", "kind", "metadata", "namespace", "resources", "images", "labels"}
    for manifest in manifests:
        if manifest.kind == "Kustomization":
            resources = manifest.get("resources") or []
            if set(manifest.document) - plain or any("/" in str(name) for name in resources):
                return True
    return False
