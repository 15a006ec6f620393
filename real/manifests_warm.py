"""Warm capacity as Kubernetes objects: placeholders that hold GPUs, and sleeping servers beside the serving ones.

A placeholder is preempted by any replica that finds no node. A sleeper is a server that has started and gone to sleep:
its API and the endpoints that wake it are on loopback, and a proxy in the pod lets /v1/ through. Only who may `exec`
into the pod can wake it; then its readiness probe succeeds and the Service sends requests there.
"""

from typing import Any

from real.manifests_pod import (
    GPU,
    affinity,
    container_security,
    engine_container,
    pod_security,
    pod_spec,
    startup_s,
)
from real.manifests_proxy import IMAGE
from real.manifests_setup import CONFIG_HASH, PORT, Setup
from real.manifests_text import budget, config_hash, document

INNER_PORT = 8001
"""Of a sleeper's API, on loopback."""

DOOR_CONNECTIONS = 500
"""Of the proxy in a sleeper's pod: two buffers of 16 KiB each, 16 MiB of its 64."""


def warm_pool(setup: Setup) -> list[dict[str, Any]]:
    """The objects of the scenario's warm pool; none without one."""
    fleet = setup.scenario.cluster.fleet
    pool = None if fleet is None else fleet.warm_pool
    if pool is None or setup.tiny:
        return []
    found = []
    if pool.placeholders:
        found += [
            _placeholder_class(setup),
            _placeholders(setup, pool.placeholders),
            _silence(setup),
        ]
    if pool.standby:
        found += [_doorman(setup), _standby(setup, pool.standby)]
    if pool.standby > 1:
        found.append(budget(f"{setup.name}-standby", setup.labels("standby")))
    return found


# --- placeholders -------------------------------------------------------------------------


def _placeholder_class(setup: Setup) -> dict[str, Any]:
    """Below everything, so that everything preempts it."""
    found = document("scheduling.k8s.io/v1", "PriorityClass", f"{setup.name}-placeholder")
    return found | {
        "value": -10,
        "globalDefault": False,
        "preemptionPolicy": "Never",
        "description": "Placeholders: they keep a node with the image on it and give way to any other pod.",
    }


def _placeholders(setup: Setup, replicas: int) -> dict[str, Any]:
    """Pods that do nothing on the GPUs of one replica each."""
    labels = dict(setup.labels("placeholder"))
    gpus = {GPU: setup.gpus}
    container = {
        "name": "placeholder",
        "image": setup.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {
            "requests": {"cpu": "10m", "memory": "64Mi", **gpus},
            "limits": {"memory": "64Mi", **gpus},
        },
        "securityContext": container_security(read_only=True),
    }
    spec = {
        "serviceAccountName": setup.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": pod_security(),
        "priorityClassName": f"{setup.name}-placeholder",
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": affinity(setup)["nodeAffinity"]},
        "containers": [container],
    }
    return document(
        "apps/v1",
        "Deployment",
        f"{setup.name}-placeholder",
        labels=labels,
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    )


def _silence(setup: Setup) -> dict[str, Any]:
    """Placeholders speak to nobody."""
    labels = dict(setup.labels("placeholder"))
    return document(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        f"{setup.name}-placeholder",
        labels=labels,
        spec={"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress", "Egress"]},
    )


# --- sleepers -----------------------------------------------------------------------------

_IMPORT = "from urllib.request import Request, urlopen"
_GET = "from urllib.request import urlopen; "

FALL_ASLEEP = f"""\
import time
{_IMPORT}
url = 'http://127.0.0.1:{INNER_PORT}'
while True:
    try:
        urlopen(url + '/health', timeout=2)
        break
    except OSError:
        time.sleep(1)
urlopen(Request(url + '/sleep?level=1', method='POST'), timeout=300)
print('asleep', flush=True)
while True:
    time.sleep(3600)
"""
"""Of a container beside the server: sends it to sleep once it has started."""

IS_AWAKE = (
    f"import json, sys; {_GET}"
    f"sys.exit(json.load(urlopen('http://127.0.0.1:{INNER_PORT}/is_sleeping', timeout=4))['is_sleeping'])"
)
"""Status 0 when the server may get requests."""

WAKE = f"{_IMPORT}; urlopen(Request('http://127.0.0.1:{INNER_PORT}/wake_up', method='POST'), timeout=120)"
"""What is run in the server's container to wake it."""


def _doorman(setup: Setup) -> dict[str, Any]:
    """Lets requests and scrapes through, and nothing else."""
    text = f"""\
global
    log stdout format raw local0 info
    nbthread 1
    maxconn {DOOR_CONNECTIONS}

defaults
    mode http
    log global
    timeout connect 5s
    timeout client {setup.numbers.shutdown_timeout_s + 10}s
    timeout server {setup.numbers.shutdown_timeout_s + 10}s

frontend outside
    bind :{PORT}
    http-request return status 404 unless {{ path_beg /v1/ }} or {{ path /health /metrics }}
    default_backend server

backend server
    server vllm 127.0.0.1:{INNER_PORT}
"""
    return document(
        "v1",
        "ConfigMap",
        f"{setup.name}-standby",
        labels=dict(setup.labels("standby")),
        data={"haproxy.cfg": text},
    )


def _standby(setup: Setup, replicas: int) -> dict[str, Any]:
    """Servers that sleep until somebody wakes them."""
    labels = dict(setup.labels("standby"))
    spec = pod_spec(setup)
    vllm = _sleeper(setup)
    spec["containers"] = [vllm, _valet(setup), _door()]
    spec["volumes"] = [
        *spec["volumes"],
        {"name": "door", "configMap": {"name": f"{setup.name}-standby"}},
    ]
    return document(
        "apps/v1",
        "Deployment",
        f"{setup.name}-standby",
        labels=labels,
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "Recreate"},
            "progressDeadlineSeconds": startup_s(setup) + 600,
            "template": {
                "metadata": {
                    "labels": labels | dict(setup.served),
                    "annotations": {CONFIG_HASH: config_hash(_doorman(setup))},
                },
                "spec": spec,
            },
        },
    )


def _sleeper(setup: Setup) -> dict[str, Any]:
    """The engine's container, on loopback, with sleep mode; Ready while it is awake."""
    found = engine_container(setup)
    args = [
        {"--host=0.0.0.0": "--host=127.0.0.1", f"--port={PORT}": f"--port={INNER_PORT}"}.get(a, a)
        for a in found["args"]
    ]
    found["args"] = [*args, "--enable-sleep-mode"]
    found["env"] = [*found["env"], {"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]
    del found["ports"]
    health = _python(f"{_GET}urlopen('http://127.0.0.1:{INNER_PORT}/health', timeout=4)")
    found["startupProbe"] |= {"exec": health}
    found["livenessProbe"] |= {"exec": health}
    found["readinessProbe"] |= {"exec": _python(IS_AWAKE)}
    for kind in ("startup", "liveness", "readiness"):
        probe = found[f"{kind}Probe"]
        del probe["httpGet"]
        probe["timeoutSeconds"] = 10
    # Level 1 parks the weights in RAM, beside what a server needs anyway.
    weights = setup.numbers.weights_bytes
    memory = f"{-(-(setup.numbers.memory_bytes + weights) // 2**30)}Gi"
    for kind in ("requests", "limits"):
        found["resources"][kind]["memory"] = memory
    return found


def _python(script: str) -> dict[str, Any]:
    return {"command": ["python3", "-c", script]}


def _valet(setup: Setup) -> dict[str, Any]:
    """Sends the server to sleep."""
    return {
        "name": "valet",
        "image": setup.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", FALL_ASLEEP],
        "resources": {
            "requests": {"cpu": "10m", "memory": "64Mi"},
            "limits": {"memory": "64Mi"},
        },
        "securityContext": container_security(read_only=True),
    }


def _door() -> dict[str, Any]:
    """The way in."""
    return {
        "name": "door",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "ports": [{"name": "http", "containerPort": PORT}],
        "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10},
        "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 5},
        "resources": {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"memory": "64Mi"},
        },
        "securityContext": container_security(read_only=True),
        "volumeMounts": [{"name": "door", "mountPath": "/usr/local/etc/haproxy", "readOnly": True}],
    }
