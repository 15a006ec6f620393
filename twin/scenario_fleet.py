"""From `cluster:` of a scenario file to the plain objects of a fleet, with what is probably not meant.

Each function takes a part of the checked document and `origin`, which knows where things were written.
"""

from collections.abc import Iterator

from twin import scenario_pods as form
from twin.clock import PS, to_ps, to_seconds
from twin.cluster.advice import advice
from twin.cluster.cold_start import (
    NODE_S,
    PHASES,
    ColdStart,
    default_start,
    mean_s,
    spread,
)
from twin.cluster.faults import ClusterFault
from twin.cluster.fleet_spec import FleetSpec, Obstacle, PodTemplate, ScalerSpec, Update
from twin.cluster.metrics_path import is_exported
from twin.cluster.nodes import Nodes
from twin.cluster.probes import Probe, Probes
from twin.cluster.reserves import WarmPoolSpec
from twin.cluster.zero import never_wakes
from twin.scenario_breakage import ClusterFault as FaultForm
from twin.scenario_cluster import Cluster
from twin.scenario_faults import Origin
from twin.scenario_scaler import most_of, path_of, scaler_of
from twin.scenario_scaling import Ratio
from twin.scenario_times import phase_time
from twin.step_time.catalogue import ModelSpec

ALWAYS_THERE = ("system-cluster-critical", "system-node-critical")
"""PriorityClasses that every cluster has; other names with this prefix cannot be made."""

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def fleet_of(
    cluster: Cluster,
    model: ModelSpec,
    tensor_parallel_size: int,
    weight_bytes: int,
    eager: bool,
    seed: int,
    is_cut: bool,
    origin: Origin,
) -> FleetSpec | None:
    """The fleet that `cluster:` asks for; None where the replicas are simply there from the beginning to the end.

    `weight_bytes` are those of the whole model; `is_cut` is whether run.until is set. Raises InputError for what
    cannot be.
    """
    scaler = scaler_of(cluster, origin)
    if _is_plain(cluster) and cluster.replicas:
        return None
    _check_idle(cluster, scaler, origin)
    if not cluster.replicas and not scaler.names:
        origin.fail(
            ("cluster", "replicas"),
            "must be >= 1, got 0; without an autoscaler there would never be one",
        )
    cold_start = cluster.cold_start or form.ColdStart()
    template = _template(cluster, tensor_parallel_size, origin)
    if cluster.nodes is not None and template.gpus > cluster.nodes.gpus:
        origin.fail(
            ("cluster", "nodes", "gpus"),
            f"a pod asks for {template.gpus} GPUs (hardware.tensor_parallel_size {tensor_parallel_size}), a node has "
            f"{cluster.nodes.gpus}; use larger nodes or pod.pods_per_replica",
        )
    return FleetSpec(
        replicas=cluster.replicas,
        most_replicas=max(cluster.replicas, most_of(scaler)),
        template=template,
        cold_start=_cold_start(cold_start, model, weight_bytes, eager),
        starts_cold=cold_start.initial == "cold",
        probes=Probes(
            _probe(cluster.probes.startup),
            _probe(cluster.probes.liveness),
            _readiness(cluster.probes.readiness),
        ),
        nodes=_nodes(cluster.nodes),
        scaler=scaler,
        path=path_of(cluster, scaler, origin),
        labels={"model_name": model.name, "engine": "0"},
        obstacle=_obstacle(cluster),
        updates=[_update(update) for update in cluster.rolling_updates],
        faults=[
            _fault(fault, i, cluster, is_cut, origin) for i, fault in enumerate(cluster.faults)
        ],
        warm_pool=_warm_pool(cluster, origin),
        holds_requests=cluster.holds_requests,
        start_minute=_minute(cluster.start),
        seed=seed,
    )


def _is_plain(cluster: Cluster) -> bool:
    """Whether nothing is said of pods and scaling."""
    plain = Cluster(
        replicas=cluster.replicas,
        router=cluster.router,
        routing=cluster.routing,
        admission=cluster.admission,
        retries=cluster.retries,
        price_per_gpu_hour=cluster.price_per_gpu_hour,
    )
    return plain == cluster


def _check_idle(cluster: Cluster, scaler: ScalerSpec, origin: Origin) -> None:
    """Refuse sections that would change nothing, because what they adjust is not there."""
    empty = Cluster()
    for key, is_used, who in (
        ("controller", scaler.hpa or scaler.keda, "hpa or keda"),
        ("metrics", scaler.names and scaler.alone is None, "an autoscaler"),
        ("start", scaler.keda or scaler.schedules, "keda or schedules"),
    ):
        if getattr(cluster, key) != getattr(empty, key) and not is_used:
            origin.fail(("cluster", key), f"changes nothing without {who}; remove it")
    if cluster.apa is not None:
        for key in ("stable_window", "panic_window", "panic_threshold"):
            if getattr(cluster.apa, key) != Ratio.model_fields[key].default:
                origin.fail(("cluster", "apa", key), "only kpa has windows; remove it")
    if cluster.kpa is not None:
        if cluster.kpa.tolerance != Ratio.model_fields["tolerance"].default:
            origin.fail(("cluster", "kpa", "tolerance"), "only apa has a tolerance; remove it")


# --- pods ---------------------------------------------------------------------------------


def _template(cluster: Cluster, tensor_parallel_size: int, origin: Origin) -> PodTemplate:
    pod = cluster.pod
    if tensor_parallel_size % pod.pods_per_replica:
        origin.fail(
            ("cluster", "pod", "pods_per_replica"),
            f"{pod.pods_per_replica} pods cannot share hardware.tensor_parallel_size {tensor_parallel_size} evenly",
        )
    return PodTemplate(
        tensor_parallel_size // pod.pods_per_replica,
        pod.pods_per_replica,
        to_ps(pod.pre_stop),
        to_ps(pod.shutdown_timeout),
        to_ps(pod.termination_grace_period),
        to_ps(pod.endpoint_lag),
    )


def _cold_start(
    written: form.ColdStart, model: ModelSpec, weight_bytes: int, eager: bool
) -> ColdStart:
    published = default_start(
        model, weight_bytes, written.storage, written.image, written.compile_cache, eager
    )
    chosen = {name: getattr(written.phases, name) for name in PHASES}
    return ColdStart(
        **{
            name: getattr(published, name) if time is None else phase_time(time)
            for name, time in chosen.items()
        }
    )


def _probe(probe: form.Probe | None) -> Probe | None:
    if probe is None:
        return None
    return Probe(probe.initialDelaySeconds * PS, probe.periodSeconds * PS, probe.failureThreshold)


def _readiness(probe: form.ReadinessProbe | None) -> Probe | None:
    if probe is None:
        return None
    return Probe(
        probe.initialDelaySeconds * PS,
        probe.periodSeconds * PS,
        success_threshold=probe.successThreshold,
    )


def _nodes(nodes: form.Nodes | None) -> Nodes | None:
    if nodes is None:
        return None
    return Nodes(
        nodes.gpus,
        nodes.initial,
        nodes.initial if nodes.max is None else nodes.max,
        spread(NODE_S) if nodes.provision is None else phase_time(nodes.provision),
        None if nodes.remove_after is None else to_ps(nodes.remove_after),
    )


def _obstacle(cluster: Cluster) -> Obstacle | None:
    """What keeps every pod from starting, as the API server or the scheduler says it."""
    pod, nodes = cluster.pod, cluster.nodes
    known = (*ALWAYS_THERE, *cluster.priority_classes)
    name = pod.priority_class
    if name is not None and name not in known:
        why = f"no PriorityClass with name {name} was found"
        if name.startswith("system-"):
            why += "; names that begin with system- are reserved and cannot be made"
        return Obstacle(True, why)
    product = None if nodes is None else nodes.gpu_product
    if product is not None and pod.gpu_products is not None and product not in pod.gpu_products:
        wanted = ", ".join(pod.gpu_products)
        return Obstacle(
            False, f"no node matches the affinity: nodes are {product}, the pod takes {wanted}"
        )
    if nodes is not None and nodes.has_gpu_taint and not pod.tolerates_gpu_taint:
        return Obstacle(
            False, "the nodes have the taint nvidia.com/gpu, which the pod does not tolerate"
        )
    return None


def _warm_pool(cluster: Cluster, origin: Origin) -> WarmPoolSpec | None:
    written = cluster.warm_pool
    if written is None:
        return None
    if written.placeholders and cluster.nodes is None:
        origin.fail(
            ("cluster", "warm_pool", "placeholders"),
            "there are no nodes to keep: without cluster.nodes there is always room",
        )
    return WarmPoolSpec(
        written.standby,
        written.claim_probability,
        phase_time(written.first_wake),
        phase_time(written.wake),
        written.returns,
        written.placeholders,
    )


def _fault(
    fault: FaultForm, index: int, cluster: Cluster, is_cut: bool, origin: Origin
) -> ClusterFault:
    place = ("cluster", "faults", index)
    if fault.kind == "node_drain" and cluster.nodes is None:
        origin.fail((*place, "node"), "there are no nodes to drain; write cluster.nodes")
    if fault.node is not None and cluster.nodes is not None:
        nodes = cluster.nodes
        most = nodes.initial if nodes.max is None else nodes.max
        # Nodes that have gone are replaced by ones with numbers of their own.
        grows = nodes.remove_after is not None or any(
            f.kind == "spot_reclaim" for f in cluster.faults
        )
        if fault.node >= most and not grows:
            origin.fail(
                (*place, "node"),
                f"there are never more than {most} nodes, numbered from 0, got {fault.node}",
            )
    if fault.kind == "gpu_loss" and fault.until is None and not is_cut:
        origin.fail(
            (*place, "until"),
            "is missing: requests on a lost GPU never end, so that the run would not; set it, or run.until",
        )
    return ClusterFault(
        fault.kind,
        to_ps(fault.at),
        None if fault.until is None else to_ps(fault.until),
        tuple(fault.pods),
        fault.node or 0,
        fault.factor or 1.0,
        to_ps(120.0 if fault.notice is None else fault.notice),
    )


def _update(update: form.RollingUpdate) -> Update:
    return Update(to_ps(update.at), _share(update.max_surge), _share(update.max_unavailable))


def _share(text: str) -> int | float:
    return int(text[:-1]) / 100 if text.endswith("%") else int(text)


def _minute(text: str) -> int:
    """The minute of the week of a checked `cluster.start`."""
    day, _, time = text.partition(" ")
    return (_DAYS.index(day) * 24 + int(time[:2])) * 60 + int(time[3:])


# --- what is probably not meant -----------------------------------------------------------


def fleet_warnings(fleet: FleetSpec, cluster: Cluster) -> Iterator[str]:
    """What is allowed but probably not meant, one sentence each."""
    if fleet.obstacle is not None:
        verb = "are refused" if fleet.obstacle.is_rejected else "stay Pending"
        yield f"all pods {verb}: {fleet.obstacle.why}"
    stuck = never_wakes(fleet)
    if stuck is not None:
        yield f"nothing can raise it from 0: {stuck}"
    start_up_s = sum(mean_s(getattr(fleet.cold_start, name)) for name in PHASES)
    yield from _probe_warnings(fleet, start_up_s)
    yield from _drain_warnings(fleet.template)
    scaler = fleet.scaler
    spec = scaler.hpa if scaler.hpa is not None else scaler.keda.hpa if scaler.keda else None
    if spec is not None:
        yield from advice(
            spec, scaler.controller, start_up_s, has_surge=any(u.max_surge for u in fleet.updates)
        )
    queries = fleet.path.queries or {}
    asked = [metric.name for metric in spec.metrics] if scaler.hpa and spec else []
    foreseen = None if scaler.prediction is None else scaler.prediction.metric
    for name in asked:
        if name not in queries and name != foreseen:
            yield (
                f"no rule defines the metric {name}, so that it can never be read; write a query for it under "
                "cluster.metrics.queries, e.g. over vllm:num_requests_waiting"
            )
    for name, query in queries.items():
        for gone in sorted(n for n in query.names if not is_exported(n)):
            yield f"the query of {name} finds nothing: vLLM has no metric {gone}, or the twin does not serve it"
    yield from _pool_warnings(fleet)
    if cluster.pod.pods_per_replica > 1:
        yield "step times are those of GPUs in one node, although a replica is spread over several pods"


def _pool_warnings(fleet: FleetSpec) -> Iterator[str]:
    pool, nodes, template = fleet.warm_pool, fleet.nodes, fleet.template
    if pool is None or not pool.standby:
        return
    if pool.claim_probability == 0:
        yield (
            "cluster.warm_pool.claim_probability is 0: no sleeper is ever claimed, so that the pool only costs; "
            "set it above 0, or remove standby"
        )
    if nodes is not None:
        each = nodes.gpus_per_node // template.gpus * nodes.most // template.pods_per_replica
        room = max(0, each - fleet.replicas)
        if room < pool.standby:
            yield (
                f"cluster.warm_pool.standby: the nodes hold {each} replicas at most, {fleet.replicas} of them serve "
                f"from the beginning, so that "
                f"{pool.standby - room} of {pool.standby} sleepers find no room; raise nodes.max"
            )


def _probe_warnings(fleet: FleetSpec, start_up_s: float) -> Iterator[str]:
    probes = fleet.probes
    image_s = mean_s(fleet.cold_start.image)
    container_s = start_up_s - image_s
    killer = probes.startup or probes.liveness
    if killer is not None and to_seconds(killer.patience_ps) < container_s:
        kind = "startup" if probes.startup else "liveness"
        yield (
            f"the {kind} probe kills a container after {to_seconds(killer.patience_ps):.0f} s, and a start takes about "
            f"{container_s:.0f} s: it will crash in a loop; a startupProbe with failureThreshold x periodSeconds well "
            "above the start cures it"
        )
    if probes.readiness is None:
        yield "without a readiness probe a pod is Ready before its server answers, and requests sent to it fail"


def _drain_warnings(template: PodTemplate) -> Iterator[str]:
    if not template.shutdown_timeout_ps:
        return
    needed = template.pre_stop_ps + template.shutdown_timeout_ps
    if needed > template.grace_ps:
        yield (
            f"preStop and --shutdown-timeout need {to_seconds(needed):g} s, but the grace period ends after "
            f"{to_seconds(template.grace_ps):g} s: what still runs then is lost"
        )
