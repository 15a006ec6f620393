"""From `cluster:` of a scenario file to the plain objects of a fleet, with what is probably not meant.

Each function takes a part of the checked document and `origin`, which knows where things were written.
"""

import json
from collections.abc import Iterator, Mapping
from math import log
from statistics import NormalDist
from typing import Any

from twin import scenario_cluster as form
from twin import scenario_distributions as times
from twin.clock import PS, to_ps, to_seconds
from twin.cluster.advice import advice
from twin.cluster.cold_start import (
    NODE_S,
    PHASES,
    ColdStart,
    PhaseTime,
    TriangularTime,
    default_start,
    mean_s,
    spread,
)
from twin.cluster.faults import ClusterFault
from twin.cluster.fleet_spec import FleetSpec, Obstacle, PodTemplate, ScalerSpec, Update
from twin.cluster.keda import KedaSpec, QueryTrigger
from twin.cluster.metrics_path import MetricsFault, Path, is_exported
from twin.cluster.nodes import Nodes
from twin.cluster.objects import read_hpa, read_scaled_object
from twin.cluster.probes import Probe, Probes
from twin.cluster.promql import Query, QueryError, parse_query
from twin.cluster.ratio_scalers import RatioSpec
from twin.cluster.saturation import SaturationSpec
from twin.cluster.specs import Controller, HpaSpec, MetricSpec
from twin.cluster.zero import never_wakes
from twin.scenario_faults import Origin
from twin.step_time.catalogue import ModelSpec
from twin.workload.sessions import Always, ExponentialTime, LognormalTime, UniformTime

ALWAYS_THERE = ("system-cluster-critical", "system-node-critical")
"""PriorityClasses that every cluster has; other names with this prefix cannot be made."""

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_Z95 = NormalDist().inv_cdf(0.95)


def fleet_of(
    cluster: form.Cluster,
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
    scaler = _scaler(cluster, origin)
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
        most_replicas=max(cluster.replicas, _most(scaler)),
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
        path=_path(cluster, scaler, origin),
        labels={"model_name": model.name, "engine": "0"},
        obstacle=_obstacle(cluster),
        updates=[_update(update) for update in cluster.rolling_updates],
        faults=[
            _fault(fault, i, cluster, is_cut, origin) for i, fault in enumerate(cluster.faults)
        ],
        holds_requests=cluster.holds_requests,
        start_minute=_minute(cluster.start),
        seed=seed,
    )


def _is_plain(cluster: form.Cluster) -> bool:
    """Whether nothing is said of pods and scaling."""
    plain = form.Cluster(
        replicas=cluster.replicas,
        router=cluster.router,
        routing=cluster.routing,
        admission=cluster.admission,
        retries=cluster.retries,
        price_per_gpu_hour=cluster.price_per_gpu_hour,
    )
    return plain == cluster


def _check_idle(cluster: form.Cluster, scaler: ScalerSpec, origin: Origin) -> None:
    """Refuse sections that would change nothing, because what they adjust is not there."""
    empty = form.Cluster()
    for key, is_used, who in (
        ("controller", scaler.hpa or scaler.keda, "hpa or keda"),
        ("metrics", scaler.names, "an autoscaler"),
        ("start", scaler.keda, "keda"),
    ):
        if getattr(cluster, key) != getattr(empty, key) and not is_used:
            origin.fail(("cluster", key), f"changes nothing without {who}; remove it")
    if cluster.apa is not None:
        for key in ("stable_window", "panic_window", "panic_threshold"):
            if getattr(cluster.apa, key) != form.Ratio.model_fields[key].default:
                origin.fail(("cluster", "apa", key), "only kpa has windows; remove it")
    if cluster.kpa is not None:
        if cluster.kpa.tolerance != form.Ratio.model_fields["tolerance"].default:
            origin.fail(("cluster", "kpa", "tolerance"), "only apa has a tolerance; remove it")


# --- who scales ---------------------------------------------------------------------------


def _scaler(cluster: form.Cluster, origin: Origin) -> ScalerSpec:
    named = [
        name
        for name in ("hpa", "keda", "apa", "kpa", "saturation")
        if getattr(cluster, name) is not None
    ]
    if len(named) > 1:
        origin.fail(
            ("cluster", named[1]),
            f"{' and '.join(named)} would both set the replicas of one deployment; keep one (two HPAs on the same pods "
            "are written as hpa_rivals)",
        )
    if cluster.hpa_rivals and cluster.hpa is None:
        origin.fail(("cluster", "hpa_rivals"), "without hpa there is nobody to be a rival of")
    flags = cluster.controller
    controller = Controller(
        to_ps(flags.sync_period), flags.tolerance, to_ps(flags.downscale_stabilization)
    )
    ratio_rule = "kpa" if cluster.kpa is not None else "apa"
    ratio = cluster.kpa or cluster.apa
    saturation = cluster.saturation
    period = (ratio and ratio.period) or (saturation and saturation.period) or 15.0
    if ratio is not None:
        _check_bounds(ratio.min_replicas, ratio.max_replicas, ratio_rule, origin)
    if saturation is not None:
        _check_bounds(saturation.min_replicas, saturation.max_replicas, "saturation", origin)
    return ScalerSpec(
        hpa=_hpa(cluster.hpa, origin),
        rivals=tuple(cluster.hpa_rivals),
        keda=_keda(cluster.keda, origin),
        ratio=None if ratio is None else _ratio(ratio),
        ratio_rule=ratio_rule,
        saturation=None if saturation is None else _saturation(saturation),
        period_ps=to_ps(period),
        controller=controller,
    )


def _check_bounds(least: int, most: int, key: str, origin: Origin) -> None:
    if least > most:
        origin.fail(
            ("cluster", key, "min_replicas"), f"must be <= max_replicas ({most}), got {least}"
        )


def _hpa(written: Any, origin: Origin) -> HpaSpec | None:
    if written is None:
        return None
    if not isinstance(written, Mapping):
        origin.fail(("cluster", "hpa"), f"must be the spec of an HPA, got {written!r}")
    try:
        spec = read_hpa(written)
    except (ValueError, TypeError, AttributeError) as error:
        origin.fail(("cluster", "hpa"), str(error))
    for metric in spec.metrics:
        if metric.kind in ("Resource", "ContainerResource"):
            origin.fail(
                ("cluster", "hpa", "metrics"),
                f"{metric.name} of a container is not modelled (a GPU server's CPU says nothing of its load); scale "
                "on a metric of vLLM",
            )
    return spec


def _keda(written: Any, origin: Origin) -> KedaSpec | None:
    if written is None:
        return None
    if not isinstance(written, Mapping):
        origin.fail(("cluster", "keda"), f"must be the spec of a ScaledObject, got {written!r}")
    try:
        return read_scaled_object(written)
    except (ValueError, TypeError, AttributeError) as error:
        origin.fail(("cluster", "keda"), str(error))


def _ratio(ratio: form.Ratio) -> RatioSpec:
    return RatioSpec(
        ratio.min_replicas,
        ratio.max_replicas,
        ratio.target,
        ratio.tolerance,
        ratio.tolerance,
        ratio.max_rate,
        ratio.max_rate,
        to_ps(ratio.up_cooldown),
        to_ps(ratio.down_cooldown),
        to_ps(ratio.stable_window),
        to_ps(ratio.panic_window),
        ratio.panic_threshold,
        ratio.guard_pending,
    )


def _saturation(written: form.Saturation) -> SaturationSpec:
    return SaturationSpec(
        written.min_replicas,
        written.max_replicas,
        written.kv_threshold,
        written.queue_threshold,
        written.spare_kv,
        written.spare_queue,
    )


def _most(scaler: ScalerSpec) -> int:
    if scaler.hpa is not None:
        return scaler.hpa.max_replicas
    if scaler.keda is not None:
        fallback = scaler.keda.fallback
        return max(scaler.keda.max_replicas, fallback.replicas if fallback else 0)
    if scaler.ratio is not None:
        return scaler.ratio.max_replicas
    return scaler.saturation.max_replicas if scaler.saturation is not None else 0


# --- metrics ------------------------------------------------------------------------------


def _path(cluster: form.Cluster, scaler: ScalerSpec, origin: Origin) -> Path:
    written = cluster.metrics
    place = ("cluster", "metrics", "queries")
    if scaler.hpa is not None:
        _check_selectors(cluster, scaler.hpa, origin)
    asked = _asked(cluster, scaler)
    for name in written.queries:
        if name not in asked:
            origin.fail((*place, name), f"no autoscaler asks for it; asked for: {_list(asked)}")
    queries: dict[str, Query] = {}
    for name, default in asked.items():
        text = written.queries.get(name, default)
        if text is not None:
            with origin.placed(*place, name, named=True):
                queries[name] = _query(text)
    faults = []
    for i, fault in enumerate(written.faults):
        if fault.metric is not None and fault.metric not in asked:
            origin.fail(
                ("cluster", "metrics", "faults", i, "metric"),
                f"no autoscaler asks for {fault.metric!r}; asked for: {_list(asked)}",
            )
        span = to_ps(fault.start), to_ps(fault.until)
        faults.append(MetricsFault(fault.kind, *span, tuple(fault.pods), fault.metric))
    return Path(
        to_ps(written.scrape_interval), to_ps(written.rule_interval), queries, tuple(faults)
    )


def _query(text: str) -> Query:
    try:
        return parse_query(text)
    except QueryError as error:
        raise ValueError(str(error)) from None


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "nothing"


def _asked(cluster: form.Cluster, scaler: ScalerSpec) -> dict[str, str | None]:
    """Metric that the autoscaler asks for -> the query it has by itself, None where somebody must write one."""
    if scaler.hpa is not None:
        return {m.name: _own_query(m) for m in scaler.hpa.metrics}
    if scaler.keda is not None:
        queries = (t for t in scaler.keda.triggers if isinstance(t, QueryTrigger))
        return {trigger.name: trigger.query for trigger in queries}
    ratio = cluster.kpa or cluster.apa
    if ratio is not None:
        return {scaler.ratio_rule: ratio.query}
    if scaler.saturation is not None:
        return {
            "saturation_kv": "max_over_time(vllm:kv_cache_usage_perc[1m])",
            "saturation_waiting": "max_over_time(vllm:num_requests_waiting[1m])",
        }
    return {}


def _own_query(metric: MetricSpec) -> str | None:
    """As prometheus-adapter asks: the labels of the metric's selector become matchers of the series."""
    name = metric.name
    known = name if is_exported(name) else name.replace("vllm_", "vllm:", 1)
    if not is_exported(known):
        return None
    matchers = ",".join(f"{label}={json.dumps(value)}" for label, value in metric.selector)
    series = f"{known}{{{matchers}}}" if matchers else known
    return f"sum({series})" if metric.is_total else series


def _check_selectors(cluster: form.Cluster, hpa: HpaSpec, origin: Origin) -> None:
    """Refuse selectors that cannot become part of the metric's query."""
    seen: dict[str, tuple[tuple[str, str], ...]] = {}
    for i, metric in enumerate(hpa.metrics):
        place = ("cluster", "hpa", "metrics", i)
        if metric.selector and metric.name in cluster.metrics.queries:
            origin.fail(
                place,
                f"selector: cluster.metrics.queries has a query of its own for {metric.name}; write the labels into it "
                "and leave the selector out",
            )
        if seen.setdefault(metric.name, metric.selector) != metric.selector:
            origin.fail(
                place,
                f"selector: {metric.name} is there twice with different selectors; give one of them another name and "
                "a query under cluster.metrics.queries",
            )


# --- pods ---------------------------------------------------------------------------------


def _template(cluster: form.Cluster, tensor_parallel_size: int, origin: Origin) -> PodTemplate:
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
            name: getattr(published, name) if time is None else _time(time)
            for name, time in chosen.items()
        }
    )


def _time(time: Any) -> PhaseTime:
    match time:
        case form.TriangularTime(triangular=[low, mode, high]):
            return TriangularTime(to_ps(low), to_ps(mode), to_ps(high))
        case times.ExponentialTime():
            return ExponentialTime(to_ps(time.exponential))
        case times.UniformTime(uniform=[low, high]):
            return UniformTime(to_ps(low), to_ps(high))
        case times.LognormalTime(lognormal=shape):
            mu = log(shape.median)
            return LognormalTime(mu, (log(shape.p95) - mu) / _Z95)
    return Always(to_ps(time))


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
        spread(NODE_S) if nodes.provision is None else _time(nodes.provision),
        None if nodes.remove_after is None else to_ps(nodes.remove_after),
    )


def _obstacle(cluster: form.Cluster) -> Obstacle | None:
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


def _fault(
    fault: form.ClusterFault, index: int, cluster: form.Cluster, is_cut: bool, origin: Origin
) -> ClusterFault:
    place = ("cluster", "faults", index)
    if fault.kind == "node_drain" and cluster.nodes is None:
        origin.fail((*place, "node"), "there are no nodes to drain; write cluster.nodes")
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


def fleet_warnings(fleet: FleetSpec, cluster: form.Cluster) -> Iterator[str]:
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
    for name in asked:
        if name not in queries:
            yield (
                f"no rule defines the metric {name}, so that it can never be read; write a query for it under "
                "cluster.metrics.queries, e.g. over vllm:num_requests_waiting"
            )
    for name, query in queries.items():
        for gone in sorted(n for n in query.names if not is_exported(n)):
            yield f"the query of {name} finds nothing: vLLM has no metric {gone}, or the twin does not serve it"
    if cluster.pod.pods_per_replica > 1:
        yield "step times are those of GPUs in one node, although a replica is spread over several pods"


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
