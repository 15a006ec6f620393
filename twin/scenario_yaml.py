"""YAML text -> plain values and the line of each, strictly; and `--set a.b.c=value` on top of it.

Read as YAML 1.2 does: only true and false are booleans, 1e-3 is a number, 1:30 and 2024-01-01 are text. Keys are
always text. A key written twice is an error.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

from twin.errors import InputError

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a document down to a value."""

MAX_NODES = 100_000
"""Values in one document at most; aliases of aliases can stand for more than memory holds."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 (the base class has it so)


_NUMBER = list("+-.0123456789")
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,40}", _NUMBER),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", _NUMBER),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", _NUMBER),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), _first
    )

_SCALARS: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": int,
    "tag:yaml.org,2002:float": lambda text: float(
        text.lower().replace(".inf", "inf").replace(".nan", "nan")
    ),
    "tag:yaml.org,2002:str": str,
}


def parse(text: str, place: str) -> tuple[Any, dict[KeyPath, int]]:
    """The values of one YAML document and the line (from 1) on which each is written.

    `place` names the text in messages. Raises InputError for text that is no YAML, for a doubled key, for a key that
    is no text or number, and for tags other than YAML's plain values.
    """
    lines: dict[KeyPath, int] = {}
    with _readable(place):
        node = yaml.compose(text, _Loader)
        return (None if node is None else _value(node, (), lines, place)), lines


def parse_all(text: str, place: str) -> list[Any]:
    """The values of every YAML document in the text, empty ones left out. Raises InputError as `parse` does."""
    return [document for document, _ in parse_documents(text, place)]


def parse_documents(text: str, place: str) -> list[tuple[Any, dict[KeyPath, int]]]:
    """(values, the line of each) of every YAML document in the text. Raises InputError as `parse` does."""
    found: list[tuple[Any, dict[KeyPath, int]]] = []
    with _readable(place):
        for node in list(yaml.compose_all(text, _Loader)):
            if node is not None:
                lines: dict[KeyPath, int] = {}
                found.append((_value(node, (), lines, place), lines))
    return found


@contextmanager
def _readable(place: str) -> Iterator[None]:
    """Errors of the YAML reader become InputError with the line."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}" if mark else ""
        raise InputError(
            f"{place}{where}: not readable as YAML: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"{place}: not readable as YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply") from None


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], place: str) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(lines) > MAX_NODES:
        raise InputError(
            f"{place} line {line}: more than {MAX_NODES} values, each alias counted as what it stands for; "
            "write fewer aliases, or several files"
        )
    is_plain = node.tag in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
    if not (isinstance(node, yaml.ScalarNode) or is_plain):
        raise _tagged(node, path, place)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(
                    f"{place} line {key_line}: a key must be text, not a list or mapping"
                )
            key = key_node.value
            if key in mapping:
                raise InputError(
                    f"{place} line {key_line}: {dotted((*path, key))}: written twice, first on line "
                    f"{lines[(*path, key)]}; keep one"
                )
            lines[(*path, key)] = key_line
            mapping[key] = _value(value_node, (*path, key), lines, place)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, i), lines, place) for i, item in enumerate(node.value)]
    read = _SCALARS.get(node.tag)
    if read is None:
        raise _tagged(node, path, place)
    return read(node.value)


def _tagged(node: yaml.Node, path: KeyPath, place: str) -> InputError:
    where = f"{place} line {node.start_mark.line + 1}: " + (f"{dotted(path)}: " if path else "")
    return InputError(f"{where}the tag {node.tag} is not taken here; write a plain value")


def dotted(path: KeyPath) -> str:
    """`traffic.0.arrivals.rate`, as messages and --set write it."""
    return ".".join(str(step) for step in path)


def apply_override(document: dict[str, Any], text: str) -> KeyPath:
    """Put `a.b.c=value` into the document (value read as YAML); returns the path.

    Sections in between that are not written yet appear; whether the keys are known is for others to check. Raises
    InputError for a form that is not key=value, a list position that does not exist, and a path that leads through a
    plain value.
    """
    place = f"--set {text}"
    name, equals, written = text.partition("=")
    steps = name.strip().split(".")
    if not equals or not all(steps):
        raise InputError(f"{place}: write it as key.key=value, e.g. engine.max_num_seqs=64")
    value, _ = parse(written, place)
    here: Any = document
    path: KeyPath = ()
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1
        if isinstance(here, list):
            position = _position(step, here, path, place)
            path = (*path, position)
            if last:
                here[position] = value
            here = here[position]
            continue
        path = (*path, step)
        if last:
            here[step] = value
            break
        if here.get(step) is None:
            here[step] = {}
        here = here[step]
        if not isinstance(here, dict | list):
            raise InputError(
                f"{place}: {dotted(path)} is {here!r}, so that nothing can be set under it; set it whole"
            )
    return path


def _position(step: str, values: list[Any], path: KeyPath, place: str) -> int:
    if not step.isdecimal() or int(step) >= len(values):
        bound = f"0 to {len(values) - 1}" if values else "none"
        raise InputError(
            f"{place}: {dotted(path)} is a list; {step!r} must be one of its positions, {bound}"
        )
    return int(step)


def plain_copy(value: Any) -> Any:
    """A copy of nested mappings and lists that shares nothing with the original and has dicts and lists only."""
    if isinstance(value, Mapping):
        return {key: plain_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item) for item in value]
    return value
