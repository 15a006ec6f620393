"""A scenario's replicas as a Deployment: command, resources, probes, placement, drain."""

from collections.abc import Mapping
from typing import Any

from real.command import QUANTISED, Serving, serve_command
from real.manifests_setup import FINGERPRINT, METRICS_FOLDER, MODELS, PORT, Setup
from real.manifests_text import document
from real.tiny import NAME
from twin.clock import PS
from twin.cluster.manifests import PRODUCTS
from twin.cluster.probes import Probe

USER = 10001
"""User and group of all containers; our image has such a user."""

GPU = "nvidia.com/gpu"


def deployment(setup: Setup) -> dict[str, Any]:
    """The Deployment of the serving replicas. Without `replicas` where an autoscaler sets them."""
    spec: dict[str, Any] = {} if setup.is_scaled else {"replicas": setup.scenario.cluster.replicas}
    spec |= {
        "selector": {"matchLabels": dict(setup.labels("engine"))},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _update(setup)},
        "minReadySeconds": 5,
        "progressDeadlineSeconds": startup_s(setup) + 600,
        "template": {
            "metadata": {
                "labels": dict(setup.labels("engine")) | dict(setup.served),
                "annotations": {FINGERPRINT: setup.scenario.policy_fingerprint},
            },
            "spec": pod_spec(setup),
        },
    }
    return document(
        "apps/v1",
        "Deployment",
        setup.name,
        labels=dict(setup.labels("engine")),
        annotations={FINGERPRINT: setup.scenario.policy_fingerprint},
        spec=spec,
    )


def _update(setup: Setup) -> dict[str, Any]:
    """The first rolling update of the scenario; else a surge only where one replica alone serves.

    Surge pods need GPUs that may not be there, and leak into the count of an HPA on a total (kubernetes#138505).
    """
    updates = setup.scenario.document["cluster"]["rolling_updates"]
    if updates:
        pair = updates[0]["max_surge"], updates[0]["max_unavailable"]
        surge, unavailable = (int(text) if text.isdigit() else text for text in pair)
    else:
        fleet = setup.scenario.cluster.fleet
        hpa = None if fleet is None else fleet.scaler.hpa
        least = setup.scenario.cluster.replicas if hpa is None else hpa.min_replicas
        surge, unavailable = (0, 1) if least > 1 else (1, 0)
    return {"maxSurge": surge, "maxUnavailable": unavailable}


def pod_spec(setup: Setup) -> dict[str, Any]:
    """The pod of a serving replica."""
    spec: dict[str, Any] = {
        "serviceAccountName": setup.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": setup.numbers.grace_s,
        "securityContext": pod_security(writes=True),
    }
    if not setup.tiny:
        spec |= {
            "priorityClassName": priority_class_of(setup),
            "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": affinity(setup),
        }
    if setup.tiny:
        spec["initContainers"] = [_tiny_model(setup)]
    spec["containers"] = [engine_container(setup)]
    spec["volumes"] = volumes(setup)
    return spec


def pod_security(writes: bool = False) -> dict[str, Any]:
    """What the Pod Security Standard `restricted` asks of a pod; with a group for volumes that it writes on."""
    group = {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"} if writes else {}
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        **group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(read_only: bool = False) -> dict[str, Any]:
    """What it asks of a container. vLLM writes caches beside its code, a proxy writes nothing."""
    found: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    return found | {"readOnlyRootFilesystem": True} if read_only else found


def priority_class_of(setup: Setup) -> str:
    """The scenario's, or one of the service's own."""
    named = setup.scenario.document["cluster"]["pod"]["priority_class"]
    return str(named or f"{setup.name}-serving")


def affinity(setup: Setup) -> dict[str, Any]:
    """Nodes with the scenario's GPU; replicas on different nodes where there are several."""
    pod = setup.scenario.document["cluster"]["pod"]
    gpu = setup.scenario.hardware.gpu.name
    products = pod["gpu_products"] or [PRODUCTS.get(gpu, f"NVIDIA-{gpu}")]
    wanted = {"key": f"{GPU}.product", "operator": "In", "values": list(products)}
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [wanted]}]
            }
        },
        **apart(setup, "engine"),
    }


def apart(setup: Setup, component: str) -> dict[str, Any]:
    """Pods of a component on different nodes, where there are several."""
    term = {
        "labelSelector": {"matchLabels": dict(setup.labels(component))},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 50, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def engine_container(setup: Setup) -> dict[str, Any]:
    """The container with vLLM."""
    numbers = setup.numbers
    return {
        "name": "vllm",
        "image": setup.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["vllm", "serve"],
        "args": arguments(setup),
        "env": environment(setup),
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": resources(setup),
        "securityContext": container_security(),
        **probes(setup),
        "lifecycle": {"preStop": {"sleep": {"seconds": numbers.pre_stop_s}}},
        "volumeMounts": mounts(setup),
    }


def arguments(setup: Setup) -> list[str]:
    """Those of `vllm serve`, the model first, each with its value in one entry."""
    scenario = setup.scenario
    model = f"{MODELS}/{NAME}" if setup.tiny else f"{MODELS}/{weights_folder(setup)}"
    serving = Serving(
        python="python3",
        model=model,
        name=NAME if setup.tiny else scenario.model.name,
        host="0.0.0.0",
        port=PORT,
        dummy=setup.tiny,
        is_quantised=True,
        shutdown_timeout=setup.numbers.shutdown_timeout_s,
    )
    words = serve_command(scenario, serving)
    words = words[words.index("serve") + 1 :]
    found: list[str] = []
    for word in words:
        is_value = found and found[-1].startswith("--") and not word.startswith("--")
        if is_value and "=" not in found[-1]:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def weights_folder(setup: Setup) -> str:
    """The folder of the weights below those that are mounted.

    Quantised weights are stored so: made of 16-bit ones at each start, twice as much would be read as is predicted.
    """
    scenario = setup.scenario
    folder = scenario.model.name.strip("/.").removeprefix("models/") or "model"
    dtype = scenario.hardware.dtype
    return f"{folder}-{dtype.upper()}" if dtype in QUANTISED else folder


def environment(setup: Setup) -> list[dict[str, Any]]:
    """Variables of the engine's container."""
    found = {
        "PROMETHEUS_MULTIPROC_DIR": METRICS_FOLDER,
        "VLLM_CACHE_ROOT": "/var/cache/vllm",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if setup.tiny:
        found["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return [{"name": name, "value": value} for name, value in found.items()]


def resources(setup: Setup) -> dict[str, Any]:
    """GPUs and memory alike in requests and limits; no limit on CPU, which would slow every step down."""
    memory = f"{-(-setup.numbers.memory_bytes // 2**30)}Gi"
    gpus = {GPU: setup.gpus} if setup.gpus else {}
    cpu = str(2 + 2 * setup.gpus)
    return {
        "requests": {"cpu": cpu, "memory": memory, **gpus},
        "limits": {"memory": memory, **gpus},
    }


def probes(setup: Setup) -> dict[str, Any]:
    """Startup from the predicted start; liveness and readiness as the scenario has them.

    Liveness asks /health, which needs no engine step; the others ask for the model, so that what is Ready serves it.
    """
    fleet = setup.scenario.cluster.fleet
    written = None if fleet is None else fleet.probes
    liveness = (written.liveness if written else None) or Probe(0, 10 * PS, 3)
    readiness = (written.readiness if written else None) or Probe(0, 5 * PS, 3)
    return {
        "startupProbe": _probe("/v1/models", startup_probe(setup), 5),
        "livenessProbe": _probe("/health", liveness, 5),
        "readinessProbe": _probe("/v1/models", readiness, 5),
    }


def startup_probe(setup: Setup) -> Probe:
    """The scenario's, or one that allows the predicted start with margin."""
    fleet = setup.scenario.cluster.fleet
    written = None if fleet is None else fleet.probes.startup
    return written or Probe(0, 10 * PS, setup.numbers.startup_failures)


def startup_s(setup: Setup) -> int:
    """Seconds that it allows."""
    probe = startup_probe(setup)
    return (probe.initial_delay_ps + (probe.failure_threshold - 1) * probe.period_ps) // PS


def _probe(path: str, probe: Probe, timeout_s: int) -> dict[str, Any]:
    found: dict[str, Any] = {"httpGet": {"path": path, "port": "http"}}
    if probe.initial_delay_ps:
        found["initialDelaySeconds"] = probe.initial_delay_ps // PS
    found |= {"periodSeconds": probe.period_ps // PS, "timeoutSeconds": timeout_s}
    found["failureThreshold"] = probe.failure_threshold
    if probe.success_threshold != 1:
        found["successThreshold"] = probe.success_threshold
    return found


def volumes(setup: Setup) -> list[dict[str, Any]]:
    """Weights, /dev/shm, and the cache of what vLLM compiles."""
    shm = {"medium": "Memory", "sizeLimit": f"{setup.numbers.shm_bytes // 2**30}Gi"}
    if setup.tiny:
        weights: dict[str, Any] = {"emptyDir": {"sizeLimit": "64Mi"}}
    else:
        claim = {"claimName": setup.models_claim, "readOnly": True}
        weights = {"persistentVolumeClaim": claim}
    cold = setup.scenario.document["cluster"]["cold_start"] or {}
    cache: Mapping[str, Any] = {"emptyDir": {"sizeLimit": "10Gi"}}
    if cold.get("compile_cache") == "cached":
        cache = {"persistentVolumeClaim": {"claimName": f"{setup.name}-compile-cache"}}
    return [
        {"name": "models", **weights},
        {"name": "shm", "emptyDir": shm},
        {"name": "cache", **cache},
    ]


def mounts(setup: Setup) -> list[dict[str, Any]]:
    """Where they are mounted."""
    models: dict[str, Any] = {"name": "models", "mountPath": MODELS, "readOnly": True}
    return [
        models,
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": "/var/cache/vllm"},
    ]


def _tiny_model(setup: Setup) -> dict[str, Any]:
    """Writes the built-in model before vLLM starts."""
    script = (
        "from pathlib import Path; from real.tiny import write_tiny_model; "
        f"f = Path('{MODELS}/{NAME}'); f.mkdir(exist_ok=True); write_tiny_model(f)"
    )
    return {
        "name": "tiny-model",
        "image": setup.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", script],
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "256Mi"},
        },
        "securityContext": container_security(),
        "volumeMounts": [{"name": "models", "mountPath": MODELS}],
    }
