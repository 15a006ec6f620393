"""From the manifests of a vLLM deployment to a scenario: what is said is taken over, the rest is named.

Nothing is invented in silence: every value that the manifests do not hold is listed as assumed, every part that the
twin has no use for as left out, every argument that vLLM does not know as such.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twin.cluster.adapter import adapter_queries
from twin.cluster.manifest_types import check_types
from twin.cluster.metrics_path import is_exported
from twin.cluster.vllm_arguments import argument_problem
from twin.cluster.vllm_command import arguments_of
from twin.errors import InputError
from twin.step_time.catalogue import GPUS, MODELS

ENGINE_ARGUMENTS = {
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "block-size": "block_size",
    "kv-cache-dtype": "kv_cache_dtype",
    "num-gpu-blocks-override": "num_gpu_blocks_override",
    "enable-prefix-caching": "enable_prefix_caching",
    "enable-chunked-prefill": "enable_chunked_prefill",
    "enforce-eager": "enforce_eager",
    "async-scheduling": "async_scheduling",
    "long-prefill-token-threshold": "long_prefill_token_threshold",
}
"""Arguments of `vllm serve` that are keys of a scenario's engine."""

HARMLESS = ("host", "port", "served-model-name", "api-key", "trust-remote-code", "load-format", "download-dir",
            "tokenizer", "seed", "enable-log-requests", "disable-log-stats", "chat-template", "uvicorn-log-level",
            "revision", "generation-config", "enable-auto-tool-choice", "tool-call-parser")  # fmt: skip
"""Arguments that change no time."""

PRODUCTS = {"H100": "NVIDIA-H100-80GB-HBM3", "A100": "NVIDIA-A100-SXM4-80GB", "H200": "NVIDIA-H200",
            "L40S": "NVIDIA-L40S", "L4": "NVIDIA-L4", "B200": "NVIDIA-B200"}  # fmt: skip
"""GPU -> value of the label nvidia.com/gpu.product that its nodes carry."""


@dataclass
class Imported:
    """A scenario as data, and what must be known of it."""

    document: dict[str, Any]
    assumed: list[str] = field(default_factory=list)
    """Not in the manifests."""
    faults: list[str] = field(default_factory=list)
    """In the manifests, and wrong."""
    left_out: list[str] = field(default_factory=list)
    """In the manifests, and of no use to the twin."""


def import_manifests(
    documents: Sequence[Any], name: str | None = None, places: Sequence[str] = ()
) -> Imported:
    """The scenario of the one Deployment of vLLM among the documents, or of the one called `name`.

    `places` are the files of the documents, for messages. Raises InputError if there is none or several, and for a
    value that is of another type than Kubernetes takes.
    """
    objects = []
    for i, document in enumerate(documents):
        place = places[i] if places else f"document {i + 1}"
        for found_object in _flat(document, place):
            if isinstance(found_object, Mapping) and found_object.get("kind"):
                written = _without_nulls(found_object)
                check_types(written, place)
                objects.append(written)
    deployment = _the_deployment(objects, name)
    called = _named(deployment)
    found = Imported({"name": called})
    template = _at(deployment, "spec", "template")
    pod = _at(template, "spec")
    container = next(c for c in pod["containers"] if runs_vllm(c))
    arguments = dict(arguments_of(container))
    _model_and_engine(arguments, found)
    _hardware(pod, container, arguments, found)
    cluster: dict[str, Any] = {"replicas": _at(deployment, "spec").get("replicas", 1)}
    found.document["cluster"] = cluster
    _pod(pod, container, arguments, cluster, found)
    _probes(container, cluster, found)
    _scaler(objects, deployment, cluster, found, adapter_queries(documents))
    classes = [_named(o) for o in objects if o["kind"] == "PriorityClass"]
    if classes:
        cluster["priority_classes"] = classes
    _assume(cluster, found)
    used = ("Deployment", "HorizontalPodAutoscaler", "ScaledObject", "PriorityClass")
    for item in objects:
        if item["kind"] not in used or (item["kind"] == "Deployment" and item is not deployment):
            found.left_out.append(f"{item['kind']} {_named(item)}")
    return found


# --- finding things -----------------------------------------------------------------------


def _flat(document: Any, place: str) -> Iterator[Any]:
    if isinstance(document, Mapping) and document.get("kind") == "List":
        items = document.get("items") or []
        if not isinstance(items, list):
            raise InputError(f"{place}: List: items: must be a list, got {items!r}")
        yield from items
    else:
        yield document


def _without_nulls(value: Any) -> Any:
    """A copy without the keys that are null, which for the API server are left out."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _the_deployment(objects: Sequence[Mapping[str, Any]], name: str | None) -> Mapping[str, Any]:
    found = [
        o
        for o in objects
        if o["kind"] == "Deployment"
        and any(map(runs_vllm, _at(o, "spec", "template", "spec").get("containers") or []))
    ]
    if name is not None:
        found = [o for o in found if _named(o) == name]
    if not found:
        which = "" if name is None else f" called {name}"
        kinds = ", ".join(sorted({o["kind"] for o in objects})) or "nothing"
        raise InputError(f"no Deployment{which} whose container runs vLLM; found {kinds}")
    if len(found) > 1:
        names = ", ".join(map(_named, found))
        raise InputError(f"several Deployments run vLLM: {names}; choose one with --name")
    return found[0]


def runs_vllm(container: Any) -> bool:
    """Whether the command or the image of a container is vLLM's."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    text = " ".join(map(str, words))
    return "vllm" in text or "vllm" in str(container.get("image", ""))


def _at(document: Any, *path: str) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
    return {} if document is None else document


def _named(item: Mapping[str, Any]) -> str:
    return str(_at(item, "metadata").get("name") or "unnamed")


# --- model, engine, hardware --------------------------------------------------------------


def _model_and_engine(arguments: Mapping[str, str], found: Imported) -> None:
    document = found.document
    written = arguments.get("model", "")
    document["model"] = guess_model(written)
    if document["model"] != written:
        found.assumed.append(
            f"model {document['model']} for {written or 'a model that is not named'}"
        )
    engine: dict[str, Any] = {}
    for key, value in arguments.items():
        negated = key.removeprefix("no-")
        if key in ENGINE_ARGUMENTS:
            engine[ENGINE_ARGUMENTS[key]] = _value(value)
        elif negated in ENGINE_ARGUMENTS and key != negated:
            engine[ENGINE_ARGUMENTS[negated]] = False
        elif (problem := argument_problem(key)) is not None:
            found.faults.append(problem)
        elif key in ("scheduler-cls", "quantization", "pipeline-parallel-size", "enable-lora",
                     "data-parallel-size", "speculative-config", "kv-transfer-config"):  # fmt: skip
            found.left_out.append(
                f"argument --{key}={value}: write what it means into the scenario"
            )
        elif key in HARMLESS:
            found.left_out.append(f"argument --{key}")
    if engine:
        document["engine"] = engine
    policy = arguments.get("scheduling-policy", "fcfs")
    document["policy"] = "vllm-priority" if policy == "priority" else "vllm-fcfs"


def guess_model(written: str) -> str:
    """The model of the catalogue that a name or a path means; the name itself if it is like none."""
    if written in MODELS:
        return written
    size = re.search(r"(\d+)\s*b\b", written.lower())
    family = next((f for f in ("llama", "qwen") if f in written.lower()), None)
    for name in MODELS:
        same_size = size is not None and f"-{size[1]}b" in name.lower()
        if same_size and (family is None or family in name.lower()):
            return name
    return written


def _number(arguments: Mapping[str, str], name: str, default: str, whole: bool = False) -> float:
    """The number behind an argument of vLLM. Raises InputError for what is none, or is not > 0 and whole."""
    text = arguments.get(name, default)
    if not re.fullmatch(r"[0-9]{1,9}" if whole else r"[0-9]{1,9}(\.[0-9]*)?", text) or (
        whole and not int(text)
    ):
        wanted = "a whole number >= 1" if whole else "a number of seconds >= 0"
        raise InputError(f"argument --{name}: must be {wanted}, got {text!r}")
    return float(text)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _hardware(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    arguments: Mapping[str, str],
    found: Imported,
) -> None:
    products = products_of(pod)
    known = [
        gpu for gpu in GPUS if any(re.search(rf"\b{gpu}\b", p.replace("-", " ")) for p in products)
    ]
    gpu = max(known, key=lambda name: GPUS[name].bandwidth) if known else "H100"
    if len(known) != 1:
        text = f"out of {', '.join(products)}" if known else "as no node affinity names one"
        found.assumed.append(f"GPU {gpu}, {text}")
    tp = int(_number(arguments, "tensor-parallel-size", "1", whole=True))
    hardware: dict[str, Any] = {"gpu": gpu, "tensor_parallel_size": tp}
    dtype = arguments.get("dtype", "auto")
    if dtype not in ("auto", "half"):
        hardware["dtype"] = dtype
    found.document["hardware"] = hardware
    asked = _at(container, "resources", "limits").get("nvidia.com/gpu")
    if asked is not None and int(asked) != tp:
        found.faults.append(f"the container asks for {asked} GPUs, --tensor-parallel-size is {tp}")


def products_of(pod: Mapping[str, Any]) -> list[str]:
    """Values of the label nvidia.com/gpu.product that the pod asks for."""
    required = _at(
        pod, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"
    )
    found: list[str] = []
    for term in required.get("nodeSelectorTerms") or []:
        for expression in term.get("matchExpressions") or []:
            if (
                expression.get("key") == "nvidia.com/gpu.product"
                and expression.get("operator") == "In"
            ):
                found += expression.get("values") or []
    chosen = _at(pod, "nodeSelector").get("nvidia.com/gpu.product")
    return [*found, chosen] if chosen else found


# --- pods ---------------------------------------------------------------------------------


def _pod(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    arguments: Mapping[str, str],
    cluster: dict[str, Any],
    found: Imported,
) -> None:
    keys: dict[str, Any] = {}
    if pod.get("priorityClassName"):
        keys["priority_class"] = pod["priorityClassName"]
    products = products_of(pod)
    if products:
        keys["gpu_products"] = products
    tolerated = [str(t.get("key")) for t in pod.get("tolerations") or []]
    keys["tolerates_gpu_taint"] = "nvidia.com/gpu" in tolerated or any(
        t.get("operator") == "Exists" and not t.get("key") for t in pod.get("tolerations") or []
    )
    if "terminationGracePeriodSeconds" in pod:
        keys["termination_grace_period"] = float(pod["terminationGracePeriodSeconds"])
    if "shutdown-timeout" in arguments:
        keys["shutdown_timeout"] = _number(arguments, "shutdown-timeout", "0")
    hook = _at(container, "lifecycle", "preStop")
    if hook:
        seconds = sleep_of(hook)
        if seconds is None:
            found.left_out.append("the preStop hook, which is no sleep")
        else:
            keys["pre_stop"] = seconds
    cluster["pod"] = keys
    for env in container.get("env") or []:
        name = str(env.get("name"))
        if name.startswith("VLLM_SCHEDULER_"):
            found.faults.append(f"vLLM knows no environment variable {name}")
        else:
            found.left_out.append(f"environment variable {name}")
    for kind in ("requests", "limits"):
        others = [k for k in _at(container, "resources", kind) if k != "nvidia.com/gpu"]
        if others:
            found.left_out.append(f"resources.{kind} of {', '.join(map(str, others))}")
    for key in ("podAntiAffinity", "podAffinity"):
        if _at(pod, "affinity", key):
            found.left_out.append(f"affinity.{key}")
    if pod.get("volumes"):
        found.left_out.append(f"volumes {', '.join(str(v.get('name')) for v in pod['volumes'])}")
    for port in container.get("ports") or []:
        if str(port.get("name")) == "metrics" and port.get("containerPort", 8000) != 8000:
            found.faults.append(
                f"port {port['containerPort']} for metrics: vLLM serves /metrics on the port of its API"
            )


def sleep_of(hook: Mapping[str, Any]) -> float | None:
    """Seconds that a preStop hook sleeps; None if it does something else."""
    seconds = _at(hook, "sleep").get("seconds")
    if seconds is not None:
        return float(seconds)
    words = " ".join(map(str, _at(hook, "exec").get("command") or []))
    found = re.search(r"\bsleep\s+(\d+(?:\.\d+)?)\b", words)
    return float(found[1]) if found else None


_PROBE_KEYS = ("initialDelaySeconds", "periodSeconds", "failureThreshold")


def _probes(container: Mapping[str, Any], cluster: dict[str, Any], found: Imported) -> None:
    probes: dict[str, Any] = {"readiness": None}
    for kind in ("startup", "liveness", "readiness"):
        written = container.get(f"{kind}Probe")
        if not written:
            continue
        taken = ("initialDelaySeconds", "periodSeconds", "successThreshold")
        keys = taken if kind == "readiness" else _PROBE_KEYS
        probes[kind] = {key: written[key] for key in keys if key in written}
        rest = [key for key in written if key not in (*keys, "httpGet", "timeoutSeconds")]
        if rest:
            found.left_out.append(f"{kind}Probe: {', '.join(map(str, rest))}")
        if "httpGet" not in written:
            found.left_out.append(f"{kind}Probe: taken for one of the server's own address")
    cluster["probes"] = probes


# --- scaling ------------------------------------------------------------------------------


def _scaler(
    objects: Sequence[Mapping[str, Any]],
    deployment: Mapping[str, Any],
    cluster: dict[str, Any],
    found: Imported,
    rules: Mapping[str, str],
) -> None:
    target = _named(deployment)
    for key, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        mine = [
            o
            for o in objects
            if o["kind"] == kind and _at(o, "spec", "scaleTargetRef").get("name") == target
        ]
        for item in objects:
            if item["kind"] == kind and item not in mine:
                found.left_out.append(f"{kind} {_named(item)}, which scales something else")
        if not mine:
            continue
        spec = {k: v for k, v in _at(mine[0], "spec").items() if k != "scaleTargetRef"}
        cluster[key] = spec
        if kind == "HorizontalPodAutoscaler" and len(mine) > 1:
            cluster["hpa_rivals"] = [_named(o) for o in mine[1:]]
            found.faults.append("several HPAs scale this Deployment: none of them will")
        if "replicas" in _at(deployment, "spec"):
            found.faults.append(
                f"replicas: {cluster['replicas']} beside an autoscaler: every apply sets the count back; leave it out"
            )
    for metric in _at(cluster, "hpa").get("metrics") or []:
        section = next((v for k, v in metric.items() if k != "type" and isinstance(v, Mapping)), {})
        name = str(_at(section, "metric").get("name") or "")
        if name in rules:
            if rules[name] != name:
                cluster.setdefault("metrics", {}).setdefault("queries", {})[name] = rules[name]
            continue
        if name and not is_exported(name) and not is_exported(name.replace("vllm_", "vllm:", 1)):
            found.faults.append(
                f"vLLM has no metric {name} and no rule here defines it; to try one: --set "
                f"'cluster.metrics.queries.{name}={suggested_query(name)}'"
            )


def place_of(path: str) -> str:
    """Where the manifests hold what stands under a dotted path of the scenario; the path itself if in none."""
    for key, argument in (
        *((f"engine.{key}", argument) for argument, key in ENGINE_ARGUMENTS.items()),
        ("hardware.tensor_parallel_size", "tensor-parallel-size"),
        ("hardware.dtype", "dtype"),
        ("model", "model"),
    ):
        if path == key:
            return f"argument --{argument}"
    for start, place in (
        ("cluster.hpa", "HorizontalPodAutoscaler: spec"),
        ("cluster.keda", "ScaledObject: spec"),
        ("cluster.replicas", "Deployment: spec.replicas"),
        *(
            (f"cluster.probes.{kind}", f"Deployment: containers: {kind}Probe")
            for kind in ("startup", "liveness", "readiness")
        ),
        ("cluster.pod.termination_grace_period", "Deployment: terminationGracePeriodSeconds"),
        ("cluster.pod.shutdown_timeout", "argument --shutdown-timeout"),
        ("cluster.pod.pre_stop", "Deployment: containers: lifecycle.preStop"),
    ):
        if path == start or path.startswith(f"{start}."):
            return place + path.removeprefix(start)
    return path


def suggested_query(name: str) -> str:
    """What somebody probably meant by the name of a metric."""
    if any(word in name for word in ("latency", "p99", "p95", "duration")):
        scale = "1000 * " if name.endswith("_ms") else ""
        quantile = "0.95" if "p95" in name else "0.99"
        return f"{scale}histogram_quantile({quantile}, rate(vllm:e2e_request_latency_seconds_bucket[5m]))"
    if "cache" in name or "kv" in name:
        return "vllm:kv_cache_usage_perc"
    return "vllm:num_requests_running" if "running" in name else "vllm:num_requests_waiting"


def _assume(cluster: dict[str, Any], found: Imported) -> None:
    """What a scenario needs and manifests do not say."""
    gpu = found.document["hardware"]["gpu"]
    most = max(
        cluster["replicas"],
        int(
            _at(cluster, "hpa").get("maxReplicas")
            or _at(cluster, "keda").get("maxReplicaCount")
            or 1
        ),
    )
    product = PRODUCTS.get(gpu, f"NVIDIA-{gpu}")
    cluster["nodes"] = {"gpus": 8, "initial": most, "gpu_product": product, "has_gpu_taint": True}
    found.assumed.append(
        f"{most} nodes with 8 GPUs each, the label nvidia.com/gpu.product={product} and the taint nvidia.com/gpu"
    )
    cluster["cold_start"] = {"initial": "cold", "storage": "nvme", "image": "cached"}
    found.assumed.append(
        "cold starts: image cached, weights from a local NVMe disk, nothing compiled before"
    )
    found.document["traffic"] = [
        {
            "arrivals": {"process": "poisson", "rate": 2},
            "prompt_tokens": {"lognormal": {"median": 500, "p95": 3000, "max": 6000}},
            "output_tokens": {"lognormal": {"median": 150, "p95": 600, "max": 1500}},
            "duration": 1800,
        }
    ]
    found.assumed.append("traffic: 2 requests/s for half an hour; put yours there")
