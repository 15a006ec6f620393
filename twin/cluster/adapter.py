"""The rules of prometheus-adapter: which query stands behind a metric of the custom or external metrics API?"""

import re
from collections.abc import Mapping, Sequence
from typing import Any


def adapter_queries(documents: Sequence[Any]) -> dict[str, str]:
    """Metric -> query, from values of the adapter's Helm chart or its own configuration among the documents.

    Templates are filled in as for the pods of one service: no further labels, one value a pod.
    """
    found: dict[str, str] = {}
    for document in documents:
        if not isinstance(document, Mapping) or document.get("kind"):
            continue
        rules = document.get("rules")
        sections = list(rules.values()) if isinstance(rules, Mapping) else [rules]
        sections.append(document.get("externalRules"))
        for section in sections:
            for rule in section if isinstance(section, list) else ():
                if isinstance(rule, Mapping):
                    found |= _named(rule)
    return found


def _named(rule: Mapping[str, Any]) -> dict[str, str]:
    """{metric: query} of one rule; empty where it is renamed by a pattern or has no query."""
    series = re.match(r"[\w:]+", str(rule.get("seriesQuery") or ""))
    query = rule.get("metricsQuery")
    names = rule.get("name")
    name = names.get("as") if isinstance(names, Mapping) else None
    if series is None or not isinstance(query, str) or "$" in str(name or ""):
        return {}
    text = query.replace("<<.Series>>", series[0])
    text = re.sub(r",?\s*<<\.LabelMatchers>>", "", text).replace("{}", "")
    grouped = re.fullmatch(r"sum\s*(?:by)?\s*\(\s*<<\.GroupBy>>\s*\)\s*\((.*)\)", text, re.DOTALL)
    backward = re.fullmatch(r"sum\s*\((.*)\)\s*by\s*\(\s*<<\.GroupBy>>\s*\)", text, re.DOTALL)
    inner = grouped or backward
    text = (inner[1] if inner else text).strip()
    return {str(name or series[0]): text} if "<<" not in text else {}
