"""All rules over all objects of a folder."""

from collections.abc import Sequence

from real.manifest_lint import (
    lifetime,
    names,
    pods,
    queries,
    scaling,
    scenario,
    schema,
    servers,
    together,
)
from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Cluster, Manifest

ORDER = ("fault", "needs", "advice")


def lint(manifests: Sequence[Manifest]) -> list[Finding]:
    """What is wrong, needed and worth knowing: faults first, else in the order of files and lines."""
    objects = [m for m in manifests if m.document.get("kind")]
    found = [finding for manifest in objects for finding in schema.check(manifest)]
    found += [
        finding
        for manifest in objects
        for finding in (*names.check(manifest), *pods.check(manifest))
    ]
    # Rules rely on types that a schema has checked.
    if not any(f.rule == "schema" and "must be" in f.message for f in found):
        cluster = Cluster(manifests)
        for server in cluster.servers:
            found += servers.check(server)
            found += lifetime.check(server, cluster)
        found += servers.strangers(cluster)
        for module in (together, scaling, queries, scenario):
            found += module.check(cluster)
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda f: (ORDER.index(f.kind), _position(f.place)))


def _position(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdigit() else (place, 0)
