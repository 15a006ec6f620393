"""Does a pod live long enough to start, and long enough to end? Probes, the port they ask, drain."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from real.manifest_lint.finding import Finding
from real.manifest_lint.memory import stored_dtype
from real.manifest_lint.objects import Cluster, Server, at, entries
from real.manifests_numbers import cold_start_of, start_quantile_s
from twin.cluster.cold_start import default_start
from twin.cluster.manifests import sleep_of
from twin.cluster.vllm_values import value_problem
from twin.scenario import Scenario
from twin.step_time.memory import weight_bytes

EARLY_S = 30
"""A readiness probe that waits so long without a startup probe delays warm starts for nothing."""


def check(server: Server, cluster: Cluster) -> Iterator[Finding]:
    """All findings about the life of one server's pods."""
    yield from probes(server, cluster)
    yield from metrics_port(server)
    yield from drain(server)


def start_s(server: Server, cluster: Cluster) -> tuple[float, str]:
    """(seconds of a start at p99, where they come from): of the scenario in the folder, or published figures."""
    scenario = cluster.scenario
    if isinstance(scenario, Scenario):
        return start_quantile_s(cold_start_of(scenario), 0.99, scenario.run.seed), "the scenario's"
    if server.model is None:
        return 120.0, "usual"
    weights = weight_bytes(server.model, 1, stored_dtype(server) or "fp8")
    start = default_start(
        server.model, weights, "nvme", "cached", "cold", "enforce-eager" in server.arguments
    )
    return start_quantile_s(start, 0.99, 1), f"published for {server.model.name} from an NVMe disk"


def _patience(probe: Mapping[str, Any]) -> float:
    """Seconds after which a probe gives up on a container that never answers."""
    failures = int(probe.get("failureThreshold", 3))
    return float(probe.get("initialDelaySeconds", 0)) + (failures - 1) * float(
        probe.get("periodSeconds", 10)
    )


def probes(server: Server, cluster: Cluster) -> Iterator[Finding]:
    """Probes that kill starts, delay warm ones, or are not there."""
    manifest, container = server.manifest, server.container
    startup, liveness, readiness = (
        container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")
    )
    needed, source = start_s(server, cluster)
    for kind, probe in (("startup", startup), ("liveness", None if startup else liveness)):
        if probe and _patience(probe) < needed:
            cure = (
                "raise failureThreshold"
                if kind == "startup"
                else "add a startupProbe; liveness waits for it"
            )
            budget = math.ceil(1.5 * needed / 10)
            yield manifest.fault(
                "probe-kills",
                server.sub(f"{kind}Probe"),
                f"the {kind}Probe kills a container after {_patience(probe):.0f} s, a start takes {needed:.0f} s "
                f"at p99 ({source}): it begins again and again",
                f"{cure}: failureThreshold x periodSeconds of {budget} x 10 s",
            )
    if readiness and not startup and float(readiness.get("initialDelaySeconds", 0)) >= EARLY_S:
        delay = readiness["initialDelaySeconds"]
        yield manifest.fault(
            "probe-delay",
            server.sub("readinessProbe", "initialDelaySeconds"),
            f"initialDelaySeconds {delay} keeps every pod out of service for {delay} s, however fast it starts",
            "a startupProbe without a delay instead, and /v1/models, which answers when the model is there (/health is "
            "200 while a GPU is dead)",
        )
    if not readiness:
        yield manifest.fault(
            "probe-missing",
            server.sub("readinessProbe"),
            "without a readinessProbe a pod gets requests while it loads, and they fail",
            "httpGet /v1/models",
        )
    names = {p.get("name"): p.get("containerPort") for p in entries(container.get("ports"))}
    for kind, probe in (("startup", startup), ("liveness", liveness), ("readiness", readiness)):
        port = at(probe, "httpGet", "port")
        if port is None:
            continue
        number = names.get(port) if isinstance(port, str) else port
        if number != server.port:
            yield manifest.fault(
                "probe-port",
                server.sub(f"{kind}Probe", "httpGet", "port"),
                f"port {port} is not that of vLLM's API ({server.port}), so that the probe never succeeds",
            )


def metrics_port(server: Server) -> Iterator[Finding]:
    """Metrics where vLLM has none."""
    manifest = server.manifest
    declared = {
        p.get("name"): p.get("containerPort") for p in entries(server.container.get("ports"))
    }
    path = (*server.path[:-3], "metadata", "annotations", "prometheus.io/port")
    annotated = at(manifest.get(*path[:-1]), path[-1])
    for number, where in (
        (declared.get("metrics"), server.sub("ports")),
        (annotated, path),
    ):
        if number is not None and str(number) != str(server.port):
            yield manifest.finding(
                "needs",
                "metrics-port",
                where,
                f"metrics on port {number}: vLLM serves /metrics on the port of its API ({server.port}), and "
                f"nothing here listens on {number}",
                f"scrape {server.port}, or put the exporter that is meant into the pod",
            )


def drain(server: Server) -> Iterator[Finding]:
    """What becomes of requests when a pod goes."""
    manifest, pod = server.manifest, server.pod
    hook = at(server.container, "lifecycle", "preStop")
    sleep = sleep_of(hook) if isinstance(hook, Mapping) else 0.0
    patience = server.number("shutdown-timeout", 0.0)
    grace = float(pod.get("terminationGracePeriodSeconds", 30))
    missing = []
    if hook is None:
        missing.append("no preStop: requests still come while it stops")
    written = server.arguments.get("shutdown-timeout", "0")
    if not patience and value_problem("shutdown-timeout", written) is None:
        missing.append("no --shutdown-timeout: vLLM aborts what runs at SIGTERM")
    if missing:
        yield manifest.fault(
            "drain",
            server.sub("lifecycle"),
            "; ".join(missing),
            "preStop sleep of 15 s, --shutdown-timeout as long as the longest request, "
            "terminationGracePeriodSeconds above both together",
        )
    elif (sleep or 0.0) + patience > grace:
        yield manifest.fault(
            "drain",
            (*server.path[:-2], "terminationGracePeriodSeconds"),
            f"preStop ({sleep or 0:g} s) and --shutdown-timeout ({patience:g} s) need more than "
            f"terminationGracePeriodSeconds ({grace:g}): what runs then is killed",
            f"at least {(sleep or 0) + patience + 10:g}",
        )
