"""All rules over all objects of a folder."""

from collections.abc import Iterator, Sequence

from real.manifest_lint import (
    arguments,
    lifetime,
    memory,
    names,
    neighbours,
    pods,
    queries,
    scaling,
    scenario,
    schema,
    servers,
    together,
    walls,
)
from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Cluster, Manifest

ORDER = ("fault", "needs", "advice")


def lint(manifests: Sequence[Manifest]) -> list[Finding]:
    """What is wrong, needed and worth knowing: faults first, else in the order of files and lines."""
    found: list[Finding] = []
    sound, mistyped = [], set()
    for manifest in manifests:
        if not manifest.document.get("kind"):
            sound.append(manifest)
            continue
        typed, wrong = schema.well_typed(manifest)
        found += wrong
        if wrong:
            mistyped.add((manifest.file, f"{typed.kind} {typed.name}"))
        else:
            found += [*schema.check(typed), *names.check(typed), *pods.check(typed)]
        if isinstance(typed.document.get("kind"), str):
            sound.append(typed)
    for finding in _together(Cluster(sound)):
        # Of an object with a value left out for its type, the rest is not what its author wrote.
        if (finding.place.rpartition(":")[0] or finding.place, finding.subject) not in mistyped:
            found.append(finding)
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda f: (ORDER.index(f.kind), _position(f.place)))


def _together(cluster: Cluster) -> Iterator[Finding]:
    """Of the rules about servers and about what objects are to each other."""
    for server in cluster.servers:
        yield from arguments.check(server)
        yield from servers.check(server)
        yield from memory.check(server)
        yield from lifetime.check(server, cluster)
    yield from servers.strangers(cluster)
    for module in (together, neighbours, walls, scaling, queries, scenario):
        yield from module.check(cluster)


def _position(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdigit() else (place, 0)
