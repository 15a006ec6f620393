"""Kubernetes' own schemas of its objects, each read once."""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from referencing import Registry

VERSION = "1.37"
"""Of Kubernetes, whose schemas are asked."""


@cache
def validator_of(api_version: str, kind: str) -> "Validator | None":
    """What says whether an object is as Kubernetes wants it, unknown fields refused; None without a schema."""
    from jsonschema.validators import Draft202012Validator
    from referencing import Resource

    group, slash, version = api_version.partition("/")
    # As the files are named: rbac.authorization.k8s.io/v1 -> rbac-v1
    name = f"{group.partition('.')[0]}-{version}" if slash else group
    file = f"{kind.lower()}-{name}.json"
    if not re.fullmatch(r"[a-z0-9-]+\.json", file):
        return None
    try:
        schema = _contents(file)
    except FileNotFoundError:
        return None
    registry = Resource.from_contents(schema) @ _definitions()
    return Draft202012Validator(schema, registry=registry)


@cache
def _definitions() -> "Registry[Any]":
    """What the schemas of all kinds refer to."""
    from referencing import Registry, Resource

    empty: Registry[Any] = Registry()
    return Resource.from_contents(_contents("_definitions.json")) @ empty


def _contents(file: str) -> Any:
    """A file of the version's strict schemas. Raises FileNotFoundError."""
    from kubernetes_validate import utils

    (version, *_) = (v for v in utils.all_versions() if utils.major_minor(v) == VERSION)
    return utils.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{file}", VERSION)
