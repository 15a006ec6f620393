"""What kubectl and promtool say of a folder, where they are installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Cluster, Manifest
from real.manifest_lint.queries import queries_of

KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")

RANGES = {"<<.LabelMatchers>>": 'namespace="x"', "<<.GroupBy>>": "pod", "<<.Series>>": "up"}


def kubectl() -> str | None:
    """Path of kubectl: that of the variable KUBECTL, the one on PATH, or the one that pip put beside Python."""
    named = os.environ.get("KUBECTL")
    beside = str(Path(sys.executable).parent)
    return shutil.which(named or "kubectl") or shutil.which("kubectl", path=beside)


def promtool() -> str | None:
    """Path of promtool: beside the Prometheus of the variable PROMETHEUS, or the one on PATH."""
    named = os.environ.get("PROMETHEUS")
    beside = shutil.which("promtool", path=str(Path(named).parent)) if named else None
    return beside or shutil.which("promtool")


def kustomization_in(folder: Path) -> Path | None:
    """The file that makes the folder an overlay; None if it is none."""
    found = (folder / name for name in KUSTOMIZATIONS)
    return next((path for path in found if path.is_file()), None)


def build(folder: Path) -> tuple[str, str]:
    """(what `kubectl kustomize` makes of the folder, why it fails); one of them is empty. kubectl must be there."""
    run = subprocess.run([str(kubectl()), "kustomize", str(folder)], capture_output=True, text=True)
    reason = (run.stderr.strip() or "it fails without a word").splitlines()[-1]
    return (run.stdout, "") if run.returncode == 0 else ("", reason.removeprefix("error: "))


def check_queries(cluster: Cluster) -> Iterator[Finding]:
    """What promtool says of rules, and of the queries in ScaledObjects and adapters."""
    tool = promtool()
    if tool is None:
        return
    for manifest in cluster.of_kind("PrometheusRule"):
        groups = manifest.get("spec", "groups")
        problem = _complaint(tool, {"groups": groups})
        if problem:
            yield manifest.fault("promtool", ("spec", "groups"), problem)
    for manifest, path, query in queries_of(cluster):
        if manifest.kind == "PrometheusRule":
            continue
        rule = {"groups": [{"name": "query", "rules": [{"record": "query", "expr": query}]}]}
        problem = _complaint(tool, rule)
        if problem:
            yield manifest.fault("promtool", path, problem)
    yield from _adapters(tool, cluster)


def _adapters(tool: str, cluster: Cluster) -> Iterator[Finding]:
    """Templates of the adapter, filled in as for one pod."""
    from real.manifest_lint.queries import adapter_rules

    for manifest, path, rule in adapter_rules(cluster):
        query = str(rule.get("metricsQuery") or "")
        for template, value in RANGES.items():
            query = query.replace(template, value)
        if not query:
            continue
        problem = _complaint(
            tool, {"groups": [{"name": "q", "rules": [{"record": "q", "expr": query}]}]}
        )
        if problem:
            yield manifest.fault("promtool", (*path, "metricsQuery"), problem)


def _complaint(tool: str, rules: object) -> str:
    """What promtool does not like, as one line; empty if it likes all."""
    with tempfile.TemporaryDirectory(prefix="twin-rules-") as folder:
        file = Path(folder) / "rules.yaml"
        file.write_text(yaml.safe_dump(rules, sort_keys=False), encoding="utf-8")
        run = subprocess.run([tool, "check", "rules", str(file)], capture_output=True, text=True)
    if run.returncode == 0:
        return ""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    told = [line for line in lines if "FAILED" not in line] or lines
    return (told[0] if told else "promtool fails").replace(str(file), "rules")


def manifests_of(
    documents: Sequence[tuple[object, dict[tuple[str | int, ...], int]]], file: str
) -> list[Manifest]:
    """The documents of a file as objects; lists of objects are taken apart."""
    found = []
    for document, lines in documents:
        if not isinstance(document, dict):
            continue
        if document.get("kind") == "List" and isinstance(document.get("items"), list):
            for i, item in enumerate(document["items"]):
                own = {path[2:]: line for path, line in lines.items() if path[:2] == ("items", i)}
                found.append(Manifest(item, file, own))
        else:
            found.append(Manifest(document, file, lines))
    return found
