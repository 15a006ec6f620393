"""Does Kubernetes take the names? Of objects, namespaces, claims and images."""

from collections.abc import Callable, Iterator

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Manifest, at, containers, entries
from real.manifest_names import image_parts, label_problem, name_problem, service_problem
from twin.scenario_yaml import KeyPath

ANY = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
"""Kinds whose names may hold other letters, such as system:node."""


def check(manifest: Manifest) -> Iterator[Finding]:
    """Names that the API server refuses, and images that no node can pull."""
    rule: Callable[[str], str | None] = {
        "Namespace": label_problem,
        "Service": service_problem,
    }.get(manifest.kind, name_problem)
    asked: list[tuple[KeyPath, Callable[[str], str | None]]] = [
        (("metadata", "namespace"), label_problem)
    ]
    if manifest.kind not in ANY:
        asked.append((("metadata", "name"), rule))
    path = manifest.pod_path
    if path is not None:
        for i, volume in enumerate(entries(manifest.get(*path, "volumes"))):
            if at(volume, "persistentVolumeClaim", "claimName") is not None:
                where = (*path, "volumes", i, "persistentVolumeClaim", "claimName")
                asked.append((where, name_problem))
    for where, problem_of in asked:
        text = manifest.get(*where)
        problem = problem_of(text) if isinstance(text, str) else None
        if problem is not None:
            yield manifest.fault("name", where, f"{where[-1]}: {problem}")
    for where, container in containers(manifest):
        image = container.get("image")
        if isinstance(image, str) and image_parts(image) is None:
            yield manifest.fault(
                "name",
                (*where, "image"),
                f"image {image!r} is no name of an image",
                "write [HOST[:PORT]/]NAME:TAG or NAME@sha256:64 digits",
            )
