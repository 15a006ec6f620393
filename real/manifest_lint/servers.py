"""Will this vLLM server start? Arguments, variables, memory, placement, image, privileges."""

import math
import re
from collections.abc import Iterator
from typing import Any

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import GPU, Cluster, Server, at, containers, entries, mapping, texts
from twin.cluster.manifests import PRODUCTS
from twin.cluster.quantity import exact
from twin.cluster.vllm_arguments import VARIABLES, VERSIONS, argument_problem
from twin.errors import InputError
from twin.step_time.catalogue import GpuSpec, ModelSpec
from twin.step_time.memory import kv_blocks, weight_bytes

WIDE_DTYPES = {"float32": "float32", "half": "float16", "float16": "float16"}
"""--dtype -> type of the weights; else bfloat16."""

NOT_KNOWN = ("awq", "gptq", "bitsandbytes", "gguf", "int4", "w4a16", "nvfp4", "mxfp4")
"""Quantisations by which no weights are counted here."""


def check(server: Server) -> Iterator[Finding]:
    """All findings about one server."""
    yield from arguments(server)
    yield from variables(server)
    yield from memory(server)
    yield from shared_memory(server)
    yield from placement(server)
    yield from image(server)
    yield from security(server)


# --- arguments ----------------------------------------------------------------------------


def version_of(server: Server) -> str | None:
    """vLLM's version out of the image's tag, as three numbers; None if it says none.

    Only images named vllm, vllm-openai and the like are tagged with it; others (llm-d, LMCache, ours) count their own.
    """
    image = str(server.container.get("image", "")).partition("@")[0]
    *owners, name = image.split("/")
    if not name.startswith("vllm") or name.startswith("vllm-twin") or "lmcache" in owners:
        return None
    found = re.search(r"(?:^|[^\d.])v?(\d+\.\d+\.\d+)", _tag(server))
    return found[1] if found else None


def _tag(server: Server) -> str:
    name = str(server.container.get("image", "")).rpartition("/")[2]
    return name.partition(":")[2]


def arguments(server: Server) -> Iterator[Finding]:
    """Arguments that vLLM does not have, and dashes that are none."""
    manifest, version = server.manifest, version_of(server)
    for name in server.arguments:
        problem = argument_problem(name, version)
        if problem is not None:
            fix = (
                "drop it: requests are not logged by default"
                if name == "disable-log-requests"
                else ""
            )
            yield manifest.fault("unknown-argument", server.argument_path(name), problem, fix)
    for key in ("command", "args"):
        for i, word in enumerate(texts(server.container.get(key))):
            if re.match(r"\s*[\u2012-\u2015]", str(word)):
                yield manifest.fault(
                    "dash",
                    server.sub(key, i),
                    f"{str(word)[:30]!r} begins with a typographic dash, which is no argument",
                    "write two hyphens (--)",
                )
    if server.arguments.get("scheduling-policy", "fcfs") not in ("fcfs", "priority", "true"):
        yield manifest.fault(
            "unknown-argument",
            server.argument_path("scheduling-policy"),
            f"--scheduling-policy is fcfs or priority, not {server.arguments['scheduling-policy']}",
        )


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


# --- memory -------------------------------------------------------------------------------


def dtype_of(server: Server) -> str | None:
    """Type of the weights; None if it is not one whose bytes are known."""
    words = (
        f"{server.arguments.get('quantization', '')} {server.arguments.get('model', '')}".lower()
    )
    if any(name in words for name in NOT_KNOWN):
        return None
    if "fp8" in words:
        return "fp8"
    return WIDE_DTYPES.get(server.arguments.get("dtype", "auto"), "bfloat16")


def memory(server: Server) -> Iterator[Finding]:
    """Models that do not fit, GPUs that are not those of the arguments, RAM that /dev/shm takes."""
    manifest = server.manifest
    tp = int(server.number("tensor-parallel-size", 1)) or 1
    split = (
        int(server.number("pipeline-parallel-size", 1) * server.number("data-parallel-size", 1))
        or 1
    )
    if server.gpus and server.gpus != tp * split:
        yield manifest.fault(
            "gpu-count",
            server.argument_path("tensor-parallel-size"),
            f"the container asks for {server.gpus} GPUs, the arguments use {tp * split}",
        )
    model, gpu, dtype = server.model, server.gpu, dtype_of(server)
    if model is not None and gpu is not None and dtype is not None and split == 1:
        problem = _does_not_fit(server, model, gpu, tp, dtype)
        if problem is not None:
            fits = [
                f"--tensor-parallel-size={n} ({kind})"
                for kind in dict.fromkeys((dtype, "fp8"))
                for n in (2, 4, 8, 16)
                if n > tp and _does_not_fit(server, model, gpu, n, kind) is None
            ]
            first = {text.split("(")[1]: text for text in reversed(fits)}
            fix = "use " + " or ".join(reversed(first.values())) if first else "use larger GPUs"
            yield manifest.fault(
                "memory", server.argument_path("tensor-parallel-size"), problem, fix
            )


def _does_not_fit(
    server: Server, model: ModelSpec, gpu: GpuSpec, tp: int, dtype: str
) -> str | None:
    utilization = server.number("gpu-memory-utilization", 0.92)
    try:
        plan = kv_blocks(
            model,
            gpu,
            tp,
            dtype,
            "auto",
            utilization,
            int(server.number("max-num-batched-tokens", 8192)),
            int(server.number("max-num-seqs", 256)),
            int(server.number("block-size", 16)),
            "enforce-eager" in server.arguments,
        )
    except InputError:
        weights = weight_bytes(model, tp, dtype) / 1e9
        budget = gpu.memory_bytes * utilization / 1e9
        return (
            f"{model.name} does not fit: {weights:.1f} GB of {dtype} weights on each of {tp} GPU(s), {gpu.name} gives "
            f"{budget:.1f} GB ({utilization:g} of {gpu.memory_bytes / 1e9:.0f}) for them, the KV cache and the rest"
        )
    longest = int(server.number("max-model-len", 0))
    room = (plan.num_gpu_blocks - 1) * plan.block_size
    if longest > room:
        return f"one request of --max-model-len={longest} needs more KV cache than there is: room for {room} tokens"
    return None


def shared_memory(server: Server) -> Iterator[Finding]:
    """/dev/shm: there, and within the memory limit."""
    if not server.gpus:
        return
    manifest, pod = server.manifest, server.pod
    mounted = {
        str(m.get("mountPath")): m.get("name")
        for m in entries(server.container.get("volumeMounts"))
    }
    if "/dev/shm" not in mounted:
        yield manifest.fault(
            "shm",
            server.sub("volumeMounts"),
            "no volume at /dev/shm: the container has 64 MiB there, which NCCL and vLLM's workers outgrow",
            "mount an emptyDir with medium: Memory and a sizeLimit that the memory limit includes",
        )
        return
    for i, volume in enumerate(entries(pod.get("volumes"))):
        if volume.get("name") != mounted["/dev/shm"]:
            continue
        size, limit = (
            at(volume, "emptyDir", "sizeLimit"),
            at(server.container, "resources", "limits", "memory"),
        )
        if size is not None and limit is not None and _bytes(size) >= _bytes(limit):
            yield manifest.fault(
                "shm",
                (*server.path[:-2], "volumes", i),
                f"/dev/shm may take {size}, which counts against the memory limit of {limit}",
                "raise the limit or lower sizeLimit",
            )


def _bytes(written: Any) -> float:
    try:
        return float(exact(written))
    except ValueError:
        return math.inf


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
    if not _tag(server) or _tag(server) == "latest":
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
