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
from twin.scenario_yaml import parse, plain_copy
from twin.scheduling.orders import ORDERS
from twin.step_time.catalogue import MODELS

FILES = ("trace", "lengths_from")
"""Keys of a stream that name a file; here the name of an upload."""

NEVER_FILES = ("history",)
"""Keys that name a file on the command line and nothing here."""

SECTIONS = ("traffic", "hpa", "keda")
"""Keys that hold a section, or on the command line the name of a file with one."""


def read_untrusted(text: str, limits: Limits) -> dict[str, Any]:
    """The document in a YAML text. Raises InputError for one that is too long, or no scenario at all."""
    if len(text.encode("utf-8", "replace")) > limits.yaml_bytes:
        raise InputError(
            f"the scenario has more than {limits.yaml_bytes:,} bytes; a scenario is a small file"
        )
    document, _ = parse(text, "scenario")
    if not isinstance(document, dict):
        raise InputError(
            "scenario: no mapping; a scenario has keys such as model: and traffic: at its left edge"
        )
    return document


def admit(
    document: Mapping[str, Any], uploads: Mapping[str, str], limits: Limits
) -> dict[str, Any]:
    """The document with the names of uploads replaced by their paths.

    Raises InputError for a file that was not uploaded in this session, for an order that is not built in, for a model
    or a step-time profile by path, and for more than the limits allow.
    """
    copy: dict[str, Any] = plain_copy(document)
    for path, key, value in _walk(copy):
        place = ".".join((*path, key))
        if key in SECTIONS and isinstance(value, str):
            raise InputError(
                f"{place}: {value!r} would be a file of the server; write its content here"
            )
        if key in NEVER_FILES and value is not None:
            raise InputError(
                f"{place}: {value!r} would be a file of the server; the page takes none"
            )
        if key == "order" and not (isinstance(value, str) and value in ORDERS):
            raise InputError(
                f"{place}: {value!r} is no built-in order; the page takes {', '.join(ORDERS)} and no code"
            )
        if key == "step_time" and value is not None and value != "roofline":
            raise InputError(
                f"{place}: {value!r} would be a file of the server; leave it out for the built-in profile"
            )
    if "model" in copy and copy["model"] not in list(MODELS):
        raise InputError(f"model: {copy['model']!r} is not in the catalogue: {', '.join(MODELS)}")
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
                raise InputError(
                    f"traffic.{i}.{key}: {name!r} is no trace uploaded in this session ({known}); the page Upload "
                    "takes it"
                )
            stream[key] = uploads[name]
    return copy


def _walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Every (path, key, value) of nested mappings and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield path, str(key), item
            yield from _walk(item, (*path, str(key)))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _walk(item, (*path, str(i)))


def check_size(scenario: Scenario, uploads: Mapping[str, str], limits: Limits) -> None:
    """Raises InputError for a loaded scenario that is too large for a page, or has read a file that it may not."""
    # A model of the catalogue is looked for as a folder first.
    allowed = {*uploads.values(), *map(str, map(Path, MODELS))}
    strange = [file for file in scenario.files if str(file) not in allowed]
    if strange:
        raise InputError("the scenario names a file of the server; the page takes uploads only")
    known = [stream.requests for stream in scenario.traffic if stream.requests is not None]
    if sum(known) > limits.requests:
        raise InputError(
            f"traffic has {sum(known):,} requests; the page runs at most {limits.requests:,}, twin run any number"
        )
    fleet = scenario.cluster.fleet
    replicas = scenario.cluster.replicas if fleet is None else fleet.most_replicas
    if replicas > limits.replicas:
        raise InputError(f"cluster: {replicas} replicas; the page runs at most {limits.replicas}")
    blocks = replicas * scenario.engine.num_gpu_blocks
    if blocks > limits.kv_blocks:
        raise InputError(
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
