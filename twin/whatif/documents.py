"""Scenarios as YAML text again: what a search chose, what a browser exports."""

from collections.abc import Mapping
from typing import Any

import yaml

from twin.scenario_yaml import plain_copy


def to_yaml(document: Mapping[str, Any]) -> str:
    """The document as a file, keys without a value left out; `load_scenario` reads the same scenario from it."""
    text: str = yaml.safe_dump(
        trimmed(plain_copy(document)), sort_keys=False, allow_unicode=True, width=110
    )
    return text


def trimmed(value: Any) -> Any:
    """Nested data without null and empty sections, which stand for defaults."""
    if isinstance(value, dict):
        return {k: trimmed(v) for k, v in value.items() if v is not None and v != {}}
    if isinstance(value, list):
        return [trimmed(item) for item in value]
    return value
