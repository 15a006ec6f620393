"""Would the API server take the pods? Volumes that are mounted and not there, requests that their limits forbid."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Manifest, at, containers, entries, mapping
from twin.cluster.quantity import exact
from twin.scenario_yaml import KeyPath


def check(manifest: Manifest) -> Iterator[Finding]:
    """All findings about the containers of an object."""
    templates = entries(manifest.get("spec", "volumeClaimTemplates"))
    claimed = {str(at(template, "metadata", "name")) for template in templates}
    for path, container in containers(manifest):
        volumes = entries(manifest.get(*path[:-2], "volumes"))
        there = claimed | {str(volume.get("name")) for volume in volumes}
        yield from _mounts(manifest, path, container, there)
        yield from _resources(manifest, path, mapping(container.get("resources")))


def _mounts(
    manifest: Manifest, path: KeyPath, container: Mapping[str, Any], there: set[str]
) -> Iterator[Finding]:
    for key in ("volumeMounts", "volumeDevices"):
        mounts = container.get(key)
        for i, mount in enumerate(mounts if isinstance(mounts, list) else ()):
            name = at(mount, "name")
            if name is not None and str(name) not in there:
                yield manifest.fault(
                    "volume",
                    (*path, key, i),
                    f"mounts {name}, which is no volume of the pod: the API server refuses it",
                    f"volumes of the pod: {', '.join(sorted(there)) or 'none'}",
                )


def _resources(
    manifest: Manifest, path: KeyPath, resources: Mapping[str, Any]
) -> Iterator[Finding]:
    limits, requests = mapping(resources.get("limits")), mapping(resources.get("requests"))
    for name, written in requests.items():
        asked, limit = _quantity(written), _quantity(limits.get(name))
        where = (*path, "resources", "requests", name)
        is_device = "/" in str(name)  # an extended resource, which cannot be shared
        if asked is None:
            continue
        if is_device and asked != limit:
            shown = limits.get(name, "none")
            yield manifest.fault(
                "resources",
                where,
                f"requests {written} of {name} with the limit {shown}: the API server refuses what is not alike",
                f"the same number in limits, or {name} in limits only",
            )
        elif limit is not None and asked > limit:
            yield manifest.fault(
                "resources",
                where,
                f"requests {written} of {name}, above the limit {limits[name]}: the API server refuses it",
                "requests no higher than limits",
            )


def _quantity(written: Any) -> Fraction | None:
    """The number a quantity stands for; None for what is none, as a schema tells."""
    try:
        return None if written is None else exact(written)
    except ValueError:
        return None
