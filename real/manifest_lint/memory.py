"""Is there memory enough for a server: on its GPUs, in RAM, in /dev/shm?"""

import math
import re
from collections.abc import Iterator
from typing import Any

from real.manifest_lint.arguments import refused
from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Server, at, entries
from real.manifests_numbers import PROCESS_BYTES, SHM_BYTES
from twin.cluster.quantity import exact
from twin.errors import InputError
from twin.step_time.catalogue import GpuSpec, ModelSpec
from twin.step_time.memory import KV_DTYPE_BYTES, kv_blocks, weight_bytes

WIDE_DTYPES = {"float32": "float32", "half": "float16", "float16": "float16"}
"""--dtype -> type of the weights; else bfloat16."""

NOT_KNOWN = ("awq", "gptq", "bitsandbytes", "gguf", "int4", "w4a16", "nvfp4", "mxfp4")
"""Quantisations by which no weights are counted here."""


OTHERWISE = {
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
    "cpu-offload-gb",
    "kv-offloading-size",
}
"""Arguments by which the KV cache or the weights have other places than are counted here."""

STREAMED = (
    "dummy",
    "runai_streamer",
    "runai_streamer_sharded",
    "tensorizer",
    "ipc_cache",
    "instanttensor",
)
"""Ways of loading by which no file passes through RAM as a whole."""


def stored_dtype(server: Server) -> str | None:
    """Type of the weights as their files hold them, which are read at each start; None if it is not known.

    --quantization=fp8 and the like make 8-bit weights of 16-bit files, unless a name says that the files are so.
    """
    made = server.arguments.get("quantization", "")
    name = server.arguments.get("model", "").lower()
    if re.match("fp8|int8|experts_int8", made) and not re.search("fp8|int8|w8a8", name):
        return "bfloat16"
    return dtype_of(server)


def check(server: Server) -> Iterator[Finding]:
    """All findings about the memory of one server."""
    yield from gpus(server)
    yield from ram(server)
    yield from shared_memory(server)


def dtype_of(server: Server) -> str | None:
    """Type of the weights; None if it is not one whose bytes are known."""
    words = (
        f"{server.arguments.get('quantization', '')} {server.arguments.get('model', '')}".lower()
    )
    if any(name in words for name in NOT_KNOWN):
        return None
    if "fp8" in words:
        return "fp8"
    if "int8" in words or "w8a8" in words:
        return "int8"
    return WIDE_DTYPES.get(server.arguments.get("dtype", "auto"), "bfloat16")


def gpus(server: Server) -> Iterator[Finding]:
    """Models that do not fit, and GPUs that are not those of the arguments."""
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
    if model is None or gpu is None or dtype is None or refused(server):
        return
    if split == 1 and model.heads % tp == 0:
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
    utilization = server.number("device-memory-utilization", utilization)
    kv_dtype = server.arguments.get("kv-cache-dtype", "auto")
    if kv_dtype not in ("auto", *KV_DTYPE_BYTES) or OTHERWISE & set(server.arguments):
        return None
    try:
        plan = kv_blocks(
            model,
            gpu,
            tp,
            dtype,
            kv_dtype,
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


def ram(server: Server) -> Iterator[Finding]:
    """Memory limits below the weights, whose pages count against them while they are loaded."""
    model, dtype = server.model, stored_dtype(server)
    limit = at(server.container, "resources", "limits", "memory")
    if model is None or dtype is None or limit is None or refused(server):
        return
    weights = weight_bytes(model, 1, dtype)
    if server.arguments.get("load-format", "auto") in STREAMED or _bytes(limit) >= weights:
        return
    needed = weights + PROCESS_BYTES + max(1, server.gpus) * SHM_BYTES
    yield server.manifest.fault(
        "memory",
        server.sub("resources", "limits", "memory"),
        f"the limit {limit} is below the {weights / 2**30:.1f} GiB of {dtype} weights of {model.name}, which pass "
        "through RAM while they are loaded and count against it: a start that is slow or killed",
        f"at least {math.ceil(needed / 2**30)}Gi",
    )


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
