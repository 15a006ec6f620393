"""Do objects of a folder stand in each other's way? Twins, far namespaces, budgets that let nobody go, claims."""

from collections.abc import Iterator

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Cluster, Manifest, at, containers, entries, selects, texts
from twin.scenario_yaml import KeyPath

SELECTORS: tuple[tuple[str, KeyPath], ...] = (
    ("Service", ("spec", "selector")),
    ("PodDisruptionBudget", ("spec", "selector")),
    ("NetworkPolicy", ("spec", "podSelector")),
)
"""Kinds that select pods of their own namespace only, and where."""


def check(cluster: Cluster) -> Iterator[Finding]:
    """All findings about objects beside others."""
    yield from twins(cluster)
    yield from far_away(cluster)
    yield from budgets(cluster)
    for manifest in cluster.manifests:
        yield from claims(manifest, cluster)


def _namespace(manifest: Manifest) -> str | None:
    found = manifest.get("metadata", "namespace")
    return found if isinstance(found, str) else None


def twins(cluster: Cluster) -> Iterator[Finding]:
    """Objects that are there twice: the later one overwrites the other, and kustomize refuses both."""
    seen: dict[tuple[str, str, str | None, str], Manifest] = {}
    for manifest in cluster.manifests:
        name = manifest.get("metadata", "name")
        if not manifest.document.get("kind") or not isinstance(name, str):
            continue
        group = str(manifest.get("apiVersion")).rpartition("/")[0]
        first = seen.setdefault((group, manifest.kind, _namespace(manifest), name), manifest)
        if first is not manifest:
            yield manifest.fault(
                "duplicate",
                ("metadata", "name"),
                f"is at {first.place('metadata', 'name')} already: one of them overwrites the other",
                "keep one, or give it a name of its own",
            )


def far_away(cluster: Cluster) -> Iterator[Finding]:
    """Selectors whose pods are all in another namespace, as both say."""
    makers = [m for m in cluster.manifests if m.pod_path is not None]
    for kind, path in SELECTORS:
        for manifest in cluster.of_kind(kind):
            selector, own = manifest.get(*path), _namespace(manifest)
            if own is None or not selector:
                continue
            taken = [m for m in makers if selects(selector, m.pod_labels, plain=kind == "Service")]
            others = {str(_namespace(m)) for m in taken}
            if taken and own not in others and "None" not in others:
                yield manifest.fault(
                    "namespace",
                    ("metadata", "namespace"),
                    f"is in {own}, the pods that it selects are in {', '.join(sorted(others))}: it finds none",
                    "the namespace of the pods",
                )


def budgets(cluster: Cluster) -> Iterator[Finding]:
    """PodDisruptionBudgets that allow no disruption at all: nodes can never be drained."""
    for manifest in cluster.of_kind("PodDisruptionBudget"):
        least, most = manifest.get("spec", "minAvailable"), manifest.get("spec", "maxUnavailable")
        for maker in cluster.of_kind("Deployment", "StatefulSet"):
            if not selects(manifest.get("spec", "selector"), maker.pod_labels):
                continue
            scalers = cluster.scalers_of(maker)
            count = 1 if maker.get("spec", "replicas") is None else maker.get("spec", "replicas")
            for scaler in scalers:
                count = scaler.get("spec", "maxReplicas") or scaler.get("spec", "maxReplicaCount")
            is_most = isinstance(least, int) and isinstance(count, int) and least >= count > 0
            if is_most or least == "100%" or str(most) in ("0", "0%"):
                key = "minAvailable" if least is not None else "maxUnavailable"
                yield manifest.fault(
                    "disruption-budget",
                    ("spec", key),
                    f"{key}: {least if least is not None else most} lets no pod of {maker.name} go: its nodes can "
                    "never be drained",
                    "maxUnavailable: 1",
                )


def claims(manifest: Manifest, cluster: Cluster) -> Iterator[Finding]:
    """Volumes that several pods share, and whether they can be."""
    path = manifest.pod_path
    if path is None or manifest.kind not in ("Deployment", "ReplicaSet", "Pod", "Job"):
        return
    several = manifest.get("spec", "replicas") not in (None, 0, 1) or bool(
        cluster.scalers_of(manifest)
    )
    there = {m.name: m for m in cluster.of_kind("PersistentVolumeClaim")}
    used = _claimed(cluster) if there else set()
    for i, volume in enumerate(entries(manifest.get(*path, "volumes"))):
        name = at(volume, "persistentVolumeClaim", "claimName")
        where = (*path, "volumes", i)
        if not isinstance(name, str):
            continue
        if name not in there:
            spare = [n for n in there if n not in used]
            if spare:
                yield manifest.fault(
                    "claim",
                    where,
                    f"PersistentVolumeClaim {name} is not among these files, {spare[0]} is and no pod uses it",
                    f"claimName: {spare[0]}",
                )
                continue
            what = (
                "ReadOnlyMany or ReadWriteMany, as replicas are on several nodes"
                if several
                else "readable where the pod runs"
            )
            yield manifest.finding(
                "needs",
                "claim",
                where,
                f"PersistentVolumeClaim {name}, whose access mode nothing here states: {what}",
            )
            continue
        modes = texts(there[name].get("spec", "accessModes"))
        if several and not {"ReadOnlyMany", "ReadWriteMany"} & set(modes):
            yield there[name].fault(
                "claim",
                ("spec", "accessModes"),
                f"{', '.join(map(str, modes)) or 'no access mode'}: replicas of {manifest.name} on other nodes "
                f"stay Pending",
                "ReadOnlyMany or ReadWriteMany",
            )


def _claimed(cluster: Cluster) -> set[str]:
    """Names of the claims that pods mount."""
    return {
        str(at(volume, "persistentVolumeClaim", "claimName"))
        for manifest in cluster.manifests
        for path in {path[:-2] for path, _ in containers(manifest)}
        for volume in entries(manifest.get(*path, "volumes"))
    }
