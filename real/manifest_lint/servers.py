"""Will this vLLM server start, and may it? Variables, placement, image, privileges."""

import re
from collections.abc import Iterator

from real.manifest_lint.arguments import tag_of, version_of
from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import GPU, Cluster, Server, at, containers, entries, mapping, texts
from twin.cluster.manifests import PRODUCTS
from twin.cluster.vllm_arguments import VARIABLES, VERSIONS


def check(server: Server) -> Iterator[Finding]:
    """All findings about one server."""
    yield from variables(server)
    yield from placement(server)
    yield from image(server)
    yield from security(server)


def variables(server: Server) -> Iterator[Finding]:
    """Variables that vLLM does not read, secrets in the open, endpoints of development."""
    manifest = server.manifest
    for i, env in enumerate(entries(server.container.get("env"))):
        name, value = str(env.get("name")), env.get("value")
        path = server.sub("env", i, "name")
        if name.startswith("VLLM_") and name not in VARIABLES:
            hint = (
                "a scheduler of one's own is named with --scheduler-cls"
                if name.startswith("VLLM_SCHEDULER")
                else "remove it; with --fail-on-environ-validation vLLM would not start"
            )
            yield manifest.fault(
                "unknown-variable", path, f"vLLM knows no environment variable {name}", hint
            )
        if name == "VLLM_SERVER_DEV_MODE" and str(value) not in ("0", "None", ""):
            if server.arguments.get("host") not in ("127.0.0.1", "localhost", "::1"):
                yield manifest.fault(
                    "dev-mode",
                    path,
                    "VLLM_SERVER_DEV_MODE puts /sleep, /wake_up, /reset_prefix_cache and /collective_rpc beside "
                    "the API, for everybody who reaches the port",
                    "listen on 127.0.0.1 and let a proxy in the pod pass /v1/ on",
                )
        if re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", name) and value:
            yield manifest.fault(
                "secret",
                path,
                f"{name} has its value in the manifest",
                "use valueFrom.secretKeyRef",
            )
    key = server.arguments.get("api-key")
    if key and not key.startswith("$("):
        yield manifest.fault(
            "secret",
            server.argument_path("api-key"),
            "--api-key has its value in the manifest",
            "set VLLM_API_KEY with valueFrom.secretKeyRef",
        )


# --- placement ----------------------------------------------------------------------------


def placement(server: Server) -> Iterator[Finding]:
    """GPU labels that no node has, taints that are not tolerated, anti-affinity that takes in strangers."""
    manifest, pod, top = server.manifest, server.pod, server.path[:-2]
    known = set(PRODUCTS.values())
    for product in server.products:
        if product in known or re.match(r"(NVIDIA|Tesla|Quadro|GeForce|AMD|GRID)-", product):
            continue
        meant = next((p for gpu, p in PRODUCTS.items() if re.match(rf"{gpu}\b", product)), None)
        yield manifest.fault(
            "gpu-product",
            (*top, "affinity" if at(pod, "affinity", "nodeAffinity") else "nodeSelector"),
            f"no node has the label nvidia.com/gpu.product={product}, so that the pod stays Pending",
            f"it is {meant}"
            if meant
            else "the label is the device's name with hyphens, e.g. NVIDIA-L4",
        )
    tolerations = entries(pod.get("tolerations"))
    tolerates = any(
        t.get("key") == GPU or (t.get("operator") == "Exists" and not t.get("key"))
        for t in tolerations
    )
    if server.gpus and not tolerates:
        yield manifest.fault(
            "gpu-taint",
            (*top, "tolerations"),
            "no toleration for the taint nvidia.com/gpu, which GPU nodes have: the pod stays Pending",
            "tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
        )
    apart = mapping(at(pod, "affinity", "podAntiAffinity"))
    for terms in apart.values():
        for term in entries(terms):
            selector = mapping(at(term.get("podAffinityTerm", term), "labelSelector"))
            keys = [*mapping(selector.get("matchLabels"))]
            keys += [str(e.get("key")) for e in entries(selector.get("matchExpressions"))]
            if keys and not any(
                re.search("app|name|instance|component|model|release", str(k)) for k in keys
            ):
                yield manifest.fault(
                    "anti-affinity",
                    (*top, "affinity", "podAntiAffinity"),
                    f"keeps away from every pod with {' and '.join(map(str, keys))}, of other applications too",
                    "add the label that names the application",
                )


def image(server: Server) -> Iterator[Finding]:
    """Images that change under one's feet, or are older than the arguments."""
    manifest, path = server.manifest, server.sub("image")
    name, version = str(server.container.get("image", "")), version_of(server)
    if "@sha256:" in name:
        return
    if not tag_of(server) or tag_of(server) == "latest":
        yield manifest.fault(
            "image-tag",
            path,
            f"image {name or 'that is not named'} is another one tomorrow",
            "name a version",
        )
    elif version is not None and _is_old(version):
        yield manifest.fault(
            "image-tag",
            path,
            f"vLLM {version} is older than everything here is checked against ({', '.join(VERSIONS)}); arguments, "
            f"metrics and scheduler are others there",
            f"use {VERSIONS[-1]}",
        )


def _is_old(version: str) -> bool:
    # Versions of images of one's own count from 0.1; vLLM's V1 engine came with 0.6.
    parts = tuple(map(int, version.split(".")))
    return (0, 2, 0) <= parts < (0, 10, 0)


def security(server: Server) -> Iterator[Finding]:
    """Nothing said about privileges."""
    own, pod = server.container.get("securityContext"), server.pod.get("securityContext")
    if not own and not pod:
        yield server.manifest.fault(
            "security-context",
            server.sub("securityContext"),
            "no securityContext: the container may gain privileges and runs as the image says, mostly root",
            "allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}, "
            "runAsNonRoot: true where the image allows it",
        )


def strangers(cluster: Cluster) -> Iterator[Finding]:
    """Containers that ask for a GPU without serving: simulators, dashboards, exporters."""
    serving = {(id(s.manifest), s.path) for s in cluster.servers}
    for manifest in cluster.manifests:
        for path, container in containers(manifest):
            limits = at(container, "resources", "limits") or at(container, "resources", "requests")
            text = " ".join(
                map(
                    str,
                    [
                        *texts(container.get("command")),
                        *texts(container.get("args")),
                        manifest.name,
                    ],
                )
            )
            if (id(manifest), path) in serving or not at(limits, GPU):
                continue
            if re.search(r"\btwin\b|dashboard|streamlit|exporter|simulat|sweep", text):
                yield manifest.fault(
                    "gpu-for-nothing",
                    (*path, "resources"),
                    "asks for a GPU, which neither the simulator nor a dashboard or exporter uses",
                    f"remove {GPU}",
                )
