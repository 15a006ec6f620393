"""What a scenario from a browser or a link may hold: no file of this machine, no code, nothing without measure.

On the command line a scenario is as good as its author and may name any file, or a function as an order. Here its
author is whoever reaches the page.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dashboard.limits import Limits
from twin.errors import InputError
from twin.scenario import Scenario
from twin.scenario_faults import Origin, check
from twin.scenario_schema import Document
from twin.scenario_yaml import KeyPath, parse, plain_copy
from twin.scheduling.orders import ORDERS
from twin.step_time.catalogue import MODELS

FILES = ("trace", "lengths_from")
"""Keys of a stream that name a file; here the name of an upload."""

SECTIONS = ("traffic", "hpa", "keda", "history")
"""Keys that hold data, or on the command line the name of a file with it."""

DEEPEST = 30
"""Sections within sections; a scenario has a dozen."""


class Refused(InputError):
    """A scenario that may be right, but not from a stranger."""


def read_untrusted(
    text: str, uploads: Mapping[str, str], limits: Limits, place: str = "scenario"
) -> dict[str, Any]:
    """The document in a YAML text, looked at as by `look`. Raises InputError for any other text."""
    if len(text.encode("utf-8", "replace")) > limits.yaml_bytes:
        raise Refused(
            f"the scenario has more than {limits.yaml_bytes:,} bytes; a scenario is a small file"
        )
    document, lines = parse(text, place)
    if not isinstance(document, dict):
        raise InputError(
            f"{place}: no mapping; a scenario has keys such as model: and traffic: at its left edge"
        )
    look(document, uploads, Origin(place, Path(), lines, {}))
    return document


def look(document: Mapping[str, Any], uploads: Mapping[str, str], origin: Origin) -> None:
    """Raises InputError, one line a fault, for a document that is refused, or that cannot be a scenario."""
    check_shape(document, origin)
    found = check(admit(document, uploads, origin))
    if not isinstance(found, Document):
        raise InputError("\n".join(origin.tell(*fault) for fault in found[:5]))


def check_shape(value: Any, origin: Origin) -> None:
    """Raises Refused for data nested without measure, and for text that cannot be shown."""
    below: list[tuple[KeyPath, Any]] = [((), value)]
    while below:
        path, here = below.pop()
        if len(path) > DEEPEST:
            raise Refused(origin.tell(path[:3], f"is nested more than {DEEPEST} deep"))
        if isinstance(here, Mapping):
            for key, item in here.items():
                _check_text(key, path, origin)
                below.append(((*path, key), item))
        elif isinstance(here, list):
            below += [((*path, i), item) for i, item in enumerate(here)]
        elif isinstance(here, str):
            _check_text(here, path, origin)


def _check_text(text: str, path: KeyPath, origin: Origin) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(origin.tell(path, f"{ascii(text)[:60]} is no text in Unicode")) from None


def admit(
    document: Mapping[str, Any], uploads: Mapping[str, str], origin: Origin | None = None
) -> dict[str, Any]:
    """The document with the names of uploads replaced by their paths.

    Raises Refused for a file that was not uploaded in this session, for an order that is not built in, for a model
    or a step-time profile by path, with the place as `origin` knows it.
    """
    where = origin or Origin("scenario", Path(), {}, {})

    def refuse(path: KeyPath, why: str) -> Refused:
        return Refused(where.tell(path, why))

    copy: dict[str, Any] = plain_copy(document)
    for path, value in _walk(copy):
        key = path[-1]
        if key in SECTIONS and isinstance(value, str):
            raise refuse(
                path, f"{value!r} would be a file of the server; write its content here instead"
            )
        if key == "order" and not (isinstance(value, str) and value in ORDERS):
            raise refuse(
                path, f"{value!r} is no built-in order; the page takes {', '.join(ORDERS)}, no code"
            )
        if key == "step_time" and value is not None and value != "roofline":
            raise refuse(
                path,
                f"{value!r} would be a file of the server; leave it out for the built-in profile",
            )
    if "model" in copy and copy["model"] not in list(MODELS):
        raise refuse(("model",), f"{copy['model']!r} is not in the catalogue: {', '.join(MODELS)}")
    traffic = copy.get("traffic")
    for i, stream in enumerate(traffic if isinstance(traffic, list) else ()):
        for key in FILES:
            name = stream.get(key) if isinstance(stream, dict) else None
            if name is None:
                continue
            if not isinstance(name, str) or name not in uploads:
                known = (
                    f"uploaded are {', '.join(uploads)}" if uploads else "nothing is uploaded yet"
                )
                raise refuse(
                    ("traffic", i, key),
                    f"{name!r} is no trace uploaded in this session ({known}); the page Upload takes it",
                )
            stream[key] = uploads[name]
    return copy


def _walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value with a key in nested mappings and lists, and its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, str(key)), item
            yield from _walk(item, (*path, str(key)))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _walk(item, (*path, i))


def check_size(scenario: Scenario, uploads: Mapping[str, str], limits: Limits) -> None:
    """Raises Refused for a loaded scenario that is too large for a page, or has read a file that it may not."""
    # A model of the catalogue is looked for as a folder first.
    allowed = {*uploads.values(), *map(str, map(Path, MODELS))}
    strange = [file for file in scenario.files if str(file) not in allowed]
    if strange:
        raise Refused("the scenario names a file of the server; the page takes uploads only")
    known = [stream.requests for stream in scenario.traffic if stream.requests is not None]
    if sum(known) > limits.requests:
        raise Refused(
            f"traffic has {sum(known):,} requests; the page runs at most {limits.requests:,}, twin run any number"
        )
    fleet = scenario.cluster.fleet
    replicas = scenario.cluster.replicas if fleet is None else fleet.most_replicas
    if replicas > limits.replicas:
        raise Refused(f"cluster: {replicas} replicas; the page runs at most {limits.replicas}")
    blocks = replicas * scenario.engine.num_gpu_blocks
    if blocks > limits.kv_blocks:
        raise Refused(
            f"engine: {blocks:,} KV blocks in all replicas; the page runs at most {limits.kv_blocks:,}"
        )


def with_names(text: str, uploads: Mapping[str, str]) -> str:
    """A message without the paths of this machine."""
    for name, path in uploads.items():
        text = text.replace(path, name)
    return text


def named(document: Mapping[str, Any], uploads: Mapping[str, str]) -> dict[str, Any]:
    """The document with the paths of uploads replaced by their names: what is shown, exported and linked."""
    names = {path: name for name, path in uploads.items()}
    copy: dict[str, Any] = plain_copy(document)
    traffic = copy.get("traffic")
    for stream in traffic if isinstance(traffic, list) else ():
        for key in FILES:
            if isinstance(stream, dict) and stream.get(key) in names:
                stream[key] = names[stream[key]]
    return copy
