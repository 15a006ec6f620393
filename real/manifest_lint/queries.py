"""Do the queries of autoscalers and rules find what vLLM exports, and give what their reader takes?"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Cluster, Manifest, at, entries
from twin.cluster.vllm_arguments import GONE, METRICS, family_of
from twin.report.metric_names import SERVER, TWIN
from twin.scenario_yaml import KeyPath

OURS = {m.name for m in (*TWIN, *SERVER)}

LABELS = {"model": "model_name"}
"""Labels that people look for -> vLLM's."""

_NAME = re.compile(r"(?<![\w:\"'=])(?:vllm|twin):[a-zA-Z0-9_:]+")


def series_in(query: str) -> list[str]:
    """Series of vLLM and of ours that a query selects, in their order."""
    return list(dict.fromkeys(_NAME.findall(query)))


def names(manifest: Manifest, path: KeyPath, query: str) -> Iterator[Finding]:
    """Series that no server exports, and labels that they do not have."""
    for series in series_in(query):
        if series.startswith("twin:"):
            known = any(
                series.removesuffix(s) in OURS for s in ("", "_total", "_bucket", "_count", "_sum")
            )
            if not known:
                yield manifest.fault("metric-name", path, f"the plug-in has no metric {series}")
        elif family_of(series) is None:
            yield manifest.fault(
                "metric-name", path, f"vLLM has no metric {series}", _instead(series)
            )
    for label, right in LABELS.items():
        if series_in(query) and re.search(rf"[{{,]\s*{label}\s*(=|!)", query):
            yield manifest.fault(
                "metric-label",
                path,
                f"vLLM's series have no label {label}: the query finds nothing",
                f"use {right}",
            )


def _instead(series: str) -> str:
    from difflib import get_close_matches

    base = re.sub(r"_(total|bucket|count|sum)$", "", series)
    if base in GONE:
        return f"use {GONE[base]}" if GONE[base] else "it is gone without a successor"
    near = get_close_matches(base, sorted(METRICS), n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""


def check(cluster: Cluster) -> Iterator[Finding]:
    """Queries of ScaledObjects, rules and adapters."""
    for manifest, path, query in queries_of(cluster):
        yield from names(manifest, path, query)
    for manifest in cluster.of_kind("ScaledObject"):
        for i, trigger in enumerate(entries(manifest.get("spec", "triggers"))):
            query = at(trigger, "metadata", "query")
            if trigger.get("type") == "prometheus" and query and not gives_one(str(query)):
                yield manifest.fault(
                    "aggregate",
                    ("spec", "triggers", i, "metadata", "query"),
                    "gives an element for each pod, and KEDA takes one: it fails as soon as there are two",
                    "sum(...) or avg(...)",
                )
    for manifest, path, rule in adapter_rules(cluster):
        query = str(rule.get("metricsQuery") or "")
        if query and "<<.GroupBy>>" not in query:
            yield manifest.fault(
                "aggregate",
                (*path, "metricsQuery"),
                "is not aggregated by <<.GroupBy>>: several series of a pod (labels such as priority or engine) "
                "are several answers",
                "sum by (<<.GroupBy>>) (<<.Series>>{<<.LabelMatchers>>})",
            )


def gives_one(query: str) -> bool:
    """Whether a query gives one element however many pods there are: its outermost operation aggregates all away."""
    text = query.strip()
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    if re.match(r"(vector|scalar|absent)\s*\(", text) or re.fullmatch(r"[\d.eE+-]+", text):
        return True
    inner = re.match(
        r"(?:clamp\w*|round|ceil|floor|abs|histogram_quantile)\s*\((?:\s*[\d.]+\s*,)?(.*)\)\s*$",
        text,
        re.S,
    )
    if inner:
        body = re.sub(r"\bby\s*\(\s*le\s*\)", "", inner[1])
        return gives_one(body)
    parts = _split(text)
    if len(parts) > 1:
        return all(gives_one(part) for part in parts)
    found = re.match(
        r"(sum|avg|max|min|count|quantile|stddev|group)\b\s*(?:(by|without)\s*\(([^)]*)\))?\s*\(",
        text,
    )
    if not found:
        return False
    tail = re.search(r"\)\s*(by|without)\s*\(([^)]*)\)\s*$", text)
    kind, labels = (
        (found[2], found[3]) if found[2] else ((tail[1], tail[2]) if tail else (None, ""))
    )
    if kind == "without":
        return False
    return not (
        set(re.findall(r"\w+", labels or "")) - {"le", "namespace", "model_name", "job", "service"}
    )


def _split(text: str) -> list[str]:
    """The operands of operators outside of any parentheses and braces."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        letter = text[i]
        if letter in "\"'":
            i = text.find(letter, i + 1) if letter in text[i + 1 :] else len(text)
        elif letter in "({[":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        elif depth == 0:
            found = re.match(
                r"[+*/]|(?<=[\s)])-|(?<=[\s)])(?:or|and|unless)(?=[\s(])", text[i:]
            ) or (
                re.match(r"-|or\b|and\b|unless\b", text[i:])
                if i and text[i - 1] in " )\n"
                else None
            )
            if found:
                parts.append(text[start:i])
                i += len(found[0]) - 1
                start = i + 1
        i += 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def queries_of(cluster: Cluster) -> Iterator[tuple[Manifest, KeyPath, str]]:
    """(object, path, PromQL) of ScaledObjects and rules; templates of adapters are not among them."""
    for manifest in cluster.of_kind("ScaledObject"):
        for i, trigger in enumerate(entries(manifest.get("spec", "triggers"))):
            query = at(trigger, "metadata", "query")
            if trigger.get("type") == "prometheus" and query:
                yield manifest, ("spec", "triggers", i, "metadata", "query"), str(query)
    for manifest in cluster.of_kind("PrometheusRule"):
        for i, group in enumerate(entries(manifest.get("spec", "groups"))):
            for j, rule in enumerate(entries(group.get("rules"))):
                if rule.get("expr") is not None:
                    yield manifest, ("spec", "groups", i, "rules", j, "expr"), str(rule["expr"])
    for manifest, path, rule in adapter_rules(cluster):
        series = str(rule.get("seriesQuery") or "")
        if series:
            yield manifest, (*path, "seriesQuery"), series


def adapter_rules(cluster: Cluster) -> Iterator[tuple[Manifest, KeyPath, Mapping[str, Any]]]:
    """(object, path, rule) of prometheus-adapter: values of its Helm chart, or the configuration in a ConfigMap."""
    for manifest in cluster.manifests:
        sections: list[tuple[KeyPath, Any]] = []
        if not manifest.document.get("kind"):
            for key in ("custom", "external"):
                sections.append((("rules", key), manifest.get("rules", key)))
            for key in ("rules", "externalRules"):
                sections.append(((key,), manifest.get(key)))
        for path, rules in sections:
            for i, rule in enumerate(rules if isinstance(rules, list) else []):
                if isinstance(rule, Mapping) and "seriesQuery" in rule:
                    yield manifest, (*path, i), rule
