"""How are Kubernetes objects written so that people like to read them? Block style, a comment on top."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

WIDTH = 110


class _Dumper(yaml.SafeDumper):
    """Block style with list items indented, texts of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else '"' if _is_mistaken(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _is_mistaken(value: str) -> bool:
    """Whether some reader of YAML would take the text for something else: a number, a boolean, a time."""
    word = r"y|n|yes|no|on|off|true|false|null|~"
    return bool(re.fullmatch(rf"(?i:{word})|[-+.\d][\d_.:eExXa-fA-F+-]*", value))


_Dumper.add_representer(str, _text)


def written(documents: Sequence[Mapping[str, Any]], comment: str = "") -> str:
    """The documents as one YAML text, the comment before them."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + "---\n".join(_dump(document) for document in documents)


def _dump(document: Any) -> str:
    return yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=WIDTH,
        default_flow_style=False,
    )


def compact(value: Any) -> str:
    """JSON without spaces: the bytes of a policy."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def budget(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """A PodDisruptionBudget: one of the pods with these labels at a time, and any that does not work."""
    return document(
        "policy/v1",
        "PodDisruptionBudget",
        name,
        labels=dict(labels),
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": dict(labels)},
        },
    )


def config_hash(config_map: Mapping[str, Any]) -> str:
    """Twelve digits that another content of a ConfigMap changes."""
    return hashlib.sha256(compact(config_map["data"]).encode()).hexdigest()[:12]


def object_name(name: str) -> str:
    """A name that Kubernetes takes, like the one given: lower case, digits and hyphens, at most 40 characters.

    Where letters are cut off or have no like, six digits of a hash keep it apart from other names.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"llm-{plain}".rstrip("-")
    if len(plain) <= 40 and (name.isascii() and re.search("[a-z0-9]", name.lower())):
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain[:33].rstrip('-')}-{mark}"


def document(version: str, kind: str, name: str, **parts: Any) -> dict[str, Any]:
    """An object with the keys in the order people write them; `labels`, `annotations` go to metadata."""
    metadata: dict[str, Any] = {"name": name}
    for key in ("labels", "annotations"):
        if parts.get(key):
            metadata[key] = parts[key]
        parts.pop(key, None)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}
