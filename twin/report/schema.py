"""The keys of a scenario file: a JSON schema for editors, and a list for people.

The bounds come from the models that check a scenario, the words from the docstrings under their fields.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from twin.report.tables import WIDTH, to_text
from twin.scenario_build import STOCK_POLICIES
from twin.scenario_schema import Document
from twin.scheduling import PRESETS, PolicyConfig, TierConfig

NO_BOUND = 1e6
"""Bounds from here on only keep mistakes out; the list does not name them."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema of a scenario, for an editor that completes and checks YAML."""
    schema = Document.model_json_schema()
    for name, model in _models().items():
        place = schema if model is Document else schema["$defs"].get(name)
        if place is not None:
            for key, text in _docstrings(model).items():
                if key in place["properties"]:
                    place["properties"][key]["description"] = text
    schema["$defs"] |= {"Policy": _policy(), "Tier": _tier()}
    schema["properties"]["policy"] |= {
        "anyOf": [{"enum": [*PRESETS, *STOCK_POLICIES]}, {"$ref": "#/$defs/Policy"}]
    }
    cleaned: Schema = _without_titles(schema)
    return {"$schema": DIALECT, "title": "vllm-twin scenario", **cleaned}


def render_schema(color: bool = False) -> str:
    """Every key with its type, default and meaning, at most 80 columns wide."""
    schema = json_schema()
    text = Text()
    told = set()
    for path, found in _keys(schema, schema):
        kind, words = _kind(found, schema), _words(found, schema)
        if (path, kind) in told:  # a key that several kinds of streams have
            continue
        told.add((path, kind))
        text.append(path, "bold")
        text.append(f"  {kind}\n", "dim")
        if words:
            text.append(
                textwrap.fill(words, WIDTH, initial_indent="    ", subsequent_indent="    ") + "\n"
            )
    return to_text([text], color)


# --- from classes to words ----------------------------------------------------------------------


def _models() -> dict[str, type]:
    """Name -> class of the models that the document is made of."""
    found: dict[str, type] = {}

    def add(model: type) -> None:
        if model.__name__ in found:
            return
        found[model.__name__] = model
        for field in model.model_fields.values():  # type: ignore[attr-defined]
            for inner in _classes(field.annotation):
                add(inner)

    add(Document)
    return found


def _classes(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation) and hasattr(annotation, "model_fields"):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _classes(part)


def _docstrings(owner: type) -> dict[str, str]:
    """Field -> the text under it, as one line."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        if not base.__module__.startswith("twin."):
            continue
        [node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for statement, follower in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(follower, ast.Expr)
                and isinstance(follower.value, ast.Constant)
            ):
                found[statement.target.id] = " ".join(str(follower.value.value).split())
    return found


def _tier() -> Schema:
    return _dataclass_schema(TierConfig, {"name", "order", "adaptive", "victims"}, ["name"])


def _policy() -> Schema:
    schema = _dataclass_schema(PolicyConfig, {"estimator", "default_tier"}, [])
    tiers = {"type": "array", "items": {"$ref": "#/$defs/Tier"}, "minItems": 1}
    changes = {"type": "object", "additionalProperties": {"type": "object"}}
    schema["properties"]["tiers"] |= {"anyOf": [tiers, changes]}
    schema["properties"]["weights"] |= {
        "type": "object", "additionalProperties": {"type": "integer"},
    }  # fmt: skip
    schema["properties"]["preset"] = {
        "enum": list(PRESETS),
        "description": "The preset that the other keys change; tiers then maps names to what differs.",
    }
    return schema


def _dataclass_schema(owner: type, texts: set[str], required: list[str]) -> Schema:
    """The keys of a policy's dataclass. Its own checks are the last word; types here help an editor."""
    words = _docstrings(owner)
    properties: Schema = {}
    for field in dataclasses.fields(owner):
        told: Schema = {"description": words[field.name]} if field.name in words else {}
        kind = str(field.type)
        if field.name in texts:
            told["type"] = ["string", "null"] if "None" in kind else "string"
        elif ("tuple" not in kind and "int" in kind) or "float" in kind or "bool" in kind:
            base = "boolean" if "bool" in kind else "integer" if "int" in kind else "number"
            told["type"] = [base, "null"] if "None" in kind else base
        if field.default is not dataclasses.MISSING and field.default != ():
            told["default"] = field.default
        properties[field.name] = told
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return schema | ({"required": required} if required else {})


def _without_titles(value: Any) -> Any:
    """Pydantic titles every field with its own name, which says nothing."""
    if isinstance(value, Mapping):
        return {
            key: _without_titles(item)
            for key, item in value.items()
            if key != "title" or not isinstance(item, str)
        }
    return [_without_titles(item) for item in value] if isinstance(value, list) else value


# --- from the schema to a list ------------------------------------------------------------------


def _keys(schema: Schema, root: Schema, prefix: str = "") -> Iterator[tuple[str, Schema]]:
    for name, found in schema.get("properties", {}).items():
        yield f"{prefix}{name}", found
        for form in _forms(found, root):
            inner = form.get("items", form) if form.get("type") == "array" else form
            mark = "[]." if inner is not form else "."
            for each in _forms(inner, root) or [inner]:
                yield from _keys(each, root, f"{prefix}{name}{mark}")


def _words(found: Schema, root: Schema) -> str:
    own = found.get("description")
    if own is None and "$ref" in found:
        own = _forms(found, root)[0].get("description")
    return " ".join(str(own or "").split())


def _forms(found: Schema, root: Schema) -> list[Schema]:
    """The schemas that a value may follow, references resolved."""
    if "$ref" in found:
        return [root["$defs"][found["$ref"].rsplit("/", 1)[1]]]
    several = found.get("anyOf") or found.get("oneOf")
    if several:
        return [form for each in several for form in (_forms(each, root) or [each])]
    return [found] if "properties" in found or found.get("type") == "array" else []


def _kind(found: Schema, root: Schema) -> str:
    """Type, bounds and default in a few words."""
    several = found.get("anyOf") or found.get("oneOf")
    if "$ref" in found:
        told = "section"
    elif several:
        told = " or ".join(dict.fromkeys(_kind(form, root) for form in several))
    elif "enum" in found:
        told = "|".join(map(str, found["enum"]))
    else:
        kind = found.get("type", "any")
        told = " or ".join(kind) if isinstance(kind, list) else str(kind)
        for sign, key in (
            (">=", "minimum"),
            (">", "exclusiveMinimum"),
            ("<=", "maximum"),
            ("<", "exclusiveMaximum"),
        ):
            if key in found and abs(found[key]) < NO_BOUND:
                told += f" {sign} {found[key]:g}"
    default = found.get("default", ())
    if default is None or isinstance(default, bool):
        told += f", default {json.dumps(default)}"
    elif default != () and not isinstance(default, Mapping):
        told += f", default {default}"
    return told
