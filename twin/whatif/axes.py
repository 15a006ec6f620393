"""What is varied: `--vary engine.max_num_seqs=32,64,128`, `--vary traffic.0.arrivals.rate=8:48:8`, as values.

A list has its values between commas, each as YAML reads it, or is a YAML list. `start:stop:step` counts from start to
stop, both included; `start:stop:*factor` multiplies. For a search, `start:stop` without a step is a range of real
numbers, `start:stop:log` one on a logarithmic scale.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import product
from typing import Any

import yaml

from twin.errors import InputError
from twin.scenario_yaml import parse

LOAD_KEYS = ("rate", "speedup", "users")
"""Last steps of the keys that say how much traffic comes."""

MOST_VALUES = 10_000
"""Values of one key, and points of a whole grid."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One key and the values it takes."""

    key: str
    """As `--set` takes it."""
    values: tuple[Any, ...]
    """In the order in which they were written."""

    @property
    def is_numeric(self) -> bool:
        """Whether the values lie on a scale."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def label(self) -> str:
        """The last part of the key, with the one before it where that alone says little."""
        return label_of(self.key)


@dataclass(frozen=True, slots=True)
class Range:
    """One key and the real numbers it may be; for searches."""

    key: str
    low: float
    high: float
    is_log: bool
    is_whole: bool
    """Both ends were written as whole numbers, so that only those are tried."""

    @property
    def label(self) -> str:
        """As of an axis."""
        return label_of(self.key)


def label_of(key: str) -> str:
    """`engine.max_num_seqs` -> `max_num_seqs`, `policy.tiers.0.max_wait` -> `tiers.0.max_wait`."""
    steps = key.split(".")
    if len(steps) >= 3 and steps[-2].isdecimal() and steps[-3] != "traffic":
        return ".".join(steps[-3:])
    return steps[-1]


def text_of(value: Any) -> str:
    """A value as YAML reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_text(key)}: {text_of(item)}" for key, item in value.items()) + "}"
        )
    return _text(value)


def _text(value: Any) -> str:
    """Text in quotes where YAML would read it as something else, alone or between others."""
    text = str(value)
    if not isinstance(value, str) or (
        re.fullmatch(r"[\w/][\w./+ -]*", text) and parse(text, "a value")[0] == text
    ):
        return text
    return str(yaml.safe_dump(text, default_style='"', width=math.inf)).strip()


def override(key: str, value: Any) -> str:
    """The change as `--set` takes it."""
    return f"{key}={text_of(value)}"


def parse_axis(text: str) -> Axis:
    """An axis of a grid. Raises InputError for a form that is none, for no or too many values, and for one twice."""
    found = parse_vary(text)
    if isinstance(found, Range):
        raise InputError(
            f"--vary {text}: a grid needs a step: {found.key}={found.low:g}:{found.high:g}:STEP, or *FACTOR"
        )
    return found


def parse_vary(text: str) -> Axis | Range:
    """An axis or a range. Raises InputError for anything else."""
    place = f"--vary {text}"
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not equals or not all(key.split(".")) or not written:
        raise InputError(f"{place}: write it as key.key=VALUES, e.g. engine.max_num_seqs=32,64,128")
    if written.startswith("["):
        values, _ = parse(written, place)
        if not isinstance(values, list):
            raise InputError(f"{place}: is no list")
        return _axis(key, values, place)
    parts = written.split(":")
    if len(parts) in (2, 3) and "," not in written and _is_number(parts[0]):
        return _span(key, parts, place)
    items = [part.strip() for part in written.split(",")]
    if "" in items:
        raise InputError(
            f"{place}: a value is empty; leave out the comma, or write null for the default"
        )
    return _axis(key, [parse(item, place)[0] for item in items], place)


def _axis(key: str, values: Sequence[Any], place: str) -> Axis:
    if not values:
        raise InputError(f"{place}: has no values")
    texts = [text_of(value) for value in values]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise InputError(f"{place}: has {twice} twice; keep one")
    return Axis(key, tuple(values))


def _is_number(text: str) -> bool:
    try:
        return Decimal(text.strip()).is_finite()
    except InvalidOperation:
        return False


def _span(key: str, parts: Sequence[str], place: str) -> Axis | Range:
    if not _is_number(parts[1]):
        raise InputError(f"{place}: {parts[1]!r} is no number; write start:stop:step")
    low, high = (Decimal(part.strip()) for part in parts[:2])
    if high <= low:
        raise InputError(f"{place}: must rise, got {low} to {high}")
    is_whole = not any(set(part) & set(".eE") for part in parts[:2])
    step = parts[2].strip() if len(parts) == 3 else None
    if step is None or step == "log":
        if step and low <= 0:
            raise InputError(f"{place}: a logarithmic range must begin above 0, got {low}")
        return Range(key, float(low), float(high), step == "log", is_whole)
    is_factor = step.startswith("*")
    if not _is_number(step.lstrip("*")):
        raise InputError(
            f"{place}: {step!r} is no step; write a number, *FACTOR, or log for a search"
        )
    size = Decimal(step.lstrip("*"))
    if size <= (1 if is_factor else 0) or (is_factor and low <= 0):
        need = "a factor above 1 and a start above 0" if is_factor else "a step above 0"
        raise InputError(f"{place}: needs {need}, got {step} from {low}")
    values: list[Any] = []
    value = low
    while value <= high * (1 + Decimal("1e-12")):
        values.append(_plain(value, is_whole and not is_factor and "." not in step, is_whole))
        value = value * size if is_factor else value + size
        if len(values) > MOST_VALUES:
            raise InputError(f"{place}: has more than {MOST_VALUES:,} values; use a larger step")
    return _axis(key, list(dict.fromkeys(values)), place)


def _plain(value: Decimal, is_whole: bool, rounds: bool) -> int | float:
    if is_whole or (rounds and value == value.to_integral_value()):
        return int(value)
    return round(value) if rounds else float(value)


def grid(axes: Sequence[Axis]) -> list[tuple[Any, ...]]:
    """Every combination of values, the last axis changing fastest. Raises InputError where there are too many."""
    size = math.prod(len(axis.values) for axis in axes)
    if size > MOST_VALUES:
        raise InputError(
            f"{size:,} combinations are more than {MOST_VALUES:,}; leave values out, or let twin optimize search"
        )
    return list(product(*(axis.values for axis in axes)))


def check_keys(axes: Sequence[Axis | Range]) -> None:
    """Raises InputError for a key that is varied twice."""
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"--vary {key}: is given twice; write all of its values in one")


def overrides_of(axes: Sequence[Axis | Range], point: Sequence[Any]) -> tuple[str, ...]:
    """The changes that make the scenario of one point."""
    return tuple(_overrides(axes, point))


def _overrides(axes: Sequence[Axis | Range], point: Sequence[Any]) -> Iterator[str]:
    for axis, value in zip(axes, point, strict=True):
        yield override(axis.key, value)


def is_load(axis: Axis) -> bool:
    """Whether the key says how much traffic comes."""
    return (
        axis.is_numeric and axis.key.split(".")[-1] in LOAD_KEYS and axis.key.startswith("traffic.")
    )
