"""What must be known of a rendering? Where its numbers come from, what is needed beside it, what is left out."""

from real import manifests_proxy as gateway
from real.command import QUANTISED
from real.manifests_numbers import MARGIN, TIDY_S, node_s
from real.manifests_pod import startup_s, weights_folder
from real.manifests_setup import Setup


def why(setup: Setup) -> str:
    """Where the numbers of the Deployment come from."""
    numbers, scenario = setup.numbers, setup.scenario
    fleet = scenario.cluster.fleet
    is_derived = fleet is None or fleet.probes.startup is None
    lines = [
        f"{scenario.name}: {scenario.model.name}, "
        + (
            "the built-in tiny model in its place, on CPUs"
            if setup.tiny
            else f"{scenario.hardware.dtype} on {setup.gpus} x {scenario.hardware.gpu.name}"
        ),
        f"startupProbe: a start takes {numbers.start_s:.0f} s at p99 as predicted; allowed are {startup_s(setup)} s, "
        + (f"{MARGIN:g} times that" if is_derived else "as the scenario has it"),
        f"grace period {numbers.grace_s} s: preStop {numbers.pre_stop_s} s until no proxy sends requests here, "
        f"{numbers.shutdown_timeout_s} s for those inside (the longest took {numbers.longest_s:.1f} s in the "
        f"simulation), {TIDY_S} s to end",
    ]
    if not setup.tiny:
        weights = numbers.weights_bytes / 2**30
        lines.append(
            f"memory: {weights:.1f} GiB of weights ({scenario.hardware.dtype}, as they are stored) pass through RAM "
            f"while they are loaded; the rest is processes and /dev/shm ({numbers.shm_bytes / 2**30:.0f} GiB)"
        )
    return "\n".join(lines)


def derived(setup: Setup) -> list[str]:
    """Values that the scenario leaves open and the twin did not simulate with."""
    fleet, numbers = setup.scenario.cluster.fleet, setup.numbers
    told = []
    if setup.name != setup.scenario.name:
        told.append(
            f"derived: the objects are named {setup.name}, as Kubernetes does not take {setup.scenario.name!r}"
        )
    if fleet is None or fleet.probes.startup is None:
        told.append(
            f"derived: startup probe of {numbers.startup_s} s; cluster.probes.startup: {{periodSeconds: 10, "
            f"failureThreshold: {numbers.startup_failures}}} simulates it"
        )
    for key, is_said, seconds in (
        ("pre_stop", fleet and fleet.template.pre_stop_ps, numbers.pre_stop_s),
        ("shutdown_timeout", fleet and fleet.template.shutdown_timeout_ps, numbers.shutdown_timeout_s),
    ):  # fmt: skip
        if not is_said:
            told.append(f"derived: cluster.pod.{key}: {seconds} simulates it")
    if numbers.shutdown_timeout_s < numbers.longest_s:
        told.append(
            f"warning: cluster.pod.shutdown_timeout: {numbers.shutdown_timeout_s} s cuts the longest requests "
            f"short, which took {numbers.longest_s:.0f} s in the simulation"
        )
    return told


def needs(setup: Setup, has_adapter: bool) -> list[str]:
    """What the cluster must have beside these objects."""
    told = [f"needs: image {setup.image}, built with k8s/Containerfile"]
    if not setup.tiny:
        dtype = setup.scenario.hardware.dtype
        stored = f"weights stored in {dtype.upper()}, " if dtype in QUANTISED else ""
        told.append(
            f"needs: PersistentVolumeClaim {setup.models_claim} with the folder {weights_folder(setup)}, "
            f"{stored}ReadOnlyMany or on every node"
        )
    cold = setup.scenario.document["cluster"]["cold_start"] or {}
    if cold.get("compile_cache") == "cached":
        told.append(
            f"needs: PersistentVolumeClaim {setup.name}-compile-cache, ReadWriteMany (compile_cache: cached)"
        )
    selected = ", ".join(f"{k}={v}" for k, v in setup.monitor_labels.items())
    told.append(
        "needs: the Prometheus operator for podmonitor.yaml and rules.yaml, selecting "
        + (selected or "objects without a label of its own (else --monitor-label KEY=VALUE)")
    )
    if has_adapter:
        told.append("needs: prometheus-adapter with the rules of prometheus-adapter-values.yaml")
    fleet = setup.scenario.cluster.fleet
    if fleet is not None and fleet.scaler.keda is not None:
        told.append(f"needs: KEDA, and Prometheus at {setup.prometheus}")
    if setup.has_standby:
        told.append(
            f"needs: somebody who wakes {setup.name}-standby when replicas are short (docs/deploy.md): no "
            f"autoscaler does"
        )
    waits = node_s(fleet)
    if waits > 600:
        told.append(f"needs: patience: a new replica may wait {waits:.0f} s for node and image")
    return told


def left_out(setup: Setup, has_proxy: bool) -> list[str]:
    """What of the scenario has no like in Kubernetes."""
    told = [f"left out: {text}" for text in gateway.left_out(setup)] if has_proxy else []
    fleet = setup.scenario.cluster.fleet
    if fleet is not None and fleet.warm_pool is not None and setup.tiny:
        told.append("left out: cluster.warm_pool, as the tiny model has no GPUs to keep")
    return told
