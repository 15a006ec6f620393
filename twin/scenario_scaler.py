"""From the keys of `cluster:` that say who scales, and by what metrics, to plain objects.

Each function takes a part of the checked document and `origin`, which knows where things were written.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twin import scenario_scaling as scaling
from twin.clock import to_ps
from twin.cluster.cron import Schedule, parse_cron
from twin.cluster.fleet_spec import ScalerSpec
from twin.cluster.forecast import make_forecaster
from twin.cluster.keda import KedaSpec, QueryTrigger
from twin.cluster.metrics_path import MetricsFault, Path, is_exported
from twin.cluster.objects import read_hpa, read_scaled_object
from twin.cluster.prediction import PredictionSpec
from twin.cluster.promql import Query, QueryError, parse_query
from twin.cluster.ratio_scalers import RatioSpec
from twin.cluster.saturation import SaturationSpec
from twin.cluster.specs import Controller, HpaSpec, MetricSpec
from twin.scenario_cluster import Cluster
from twin.scenario_faults import Origin

SCALERS = ("hpa", "keda", "apa", "kpa", "saturation")
"""Keys of `cluster:` that set the replicas; at most one of them is written."""


def scaler_of(cluster: Cluster, origin: Origin) -> ScalerSpec:
    """Who decides about replicas, checked as the API server would."""
    named = [name for name in SCALERS if getattr(cluster, name) is not None]
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
    schedules, prediction = _schedules(cluster, origin), _prediction(cluster, named, origin)
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
        schedules=schedules,
        prediction=prediction,
        alone=None if named else _alone(cluster, schedules),
    )


def _schedules(cluster: Cluster, origin: Origin) -> tuple[Schedule, ...]:
    found = []
    for i, written in enumerate(cluster.schedules):
        place = ("cluster", "schedules", i)
        with origin.placed(*place, "start", named=True):
            start = parse_cron(written.start)
        with origin.placed(*place, "end", named=True):
            end = parse_cron(written.end)
        if start.minutes == end.minutes:
            origin.fail((*place, "end"), "must not be the same as start")
        found.append(Schedule(start, end, written.min_replicas))
    return tuple(found)


def _prediction(cluster: Cluster, named: list[str], origin: Origin) -> PredictionSpec | None:
    written, place = cluster.prediction, ("cluster", "prediction")
    if written is None:
        return None
    with origin.placed(*place, "forecaster", named=True):
        make_forecaster(written.forecaster)
    if written.drives == "alone" and named:
        origin.fail(
            (*place, "drives"),
            f"alone: {named[0]} also sets the replicas; keep one, or write floor",
        )
    if written.drives != "alone" and not named:
        origin.fail(
            (*place, "drives"), f"{written.drives}: there is no autoscaler; add one, or write alone"
        )
    if written.drives == "metric" and not {"hpa", "keda"}.intersection(named):
        origin.fail((*place, "drives"), f"metric: {named[0]} reads no external metric; write floor")
    return PredictionSpec(
        written.forecaster,
        written.per_replica,
        to_ps(written.interval),
        to_ps(written.horizon),
        to_ps(written.season),
        tuple(written.history),
        written.metric,
    )


def _alone(cluster: Cluster, schedules: Sequence[Schedule]) -> tuple[int, int] | None:
    """The bounds where schedules or a forecast decide alone; None where nothing decides."""
    most = max([cluster.replicas, *(s.min_replicas for s in schedules)])
    written = cluster.prediction
    if written is not None and written.drives == "alone":
        least = 1 if written.min_replicas is None else written.min_replicas
        return least, written.max_replicas or most
    return (cluster.replicas, most) if schedules else None


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


def _ratio(ratio: scaling.Ratio) -> RatioSpec:
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


def _saturation(written: scaling.Saturation) -> SaturationSpec:
    return SaturationSpec(
        written.min_replicas,
        written.max_replicas,
        written.kv_threshold,
        written.queue_threshold,
        written.spare_kv,
        written.spare_queue,
    )


def most_of(scaler: ScalerSpec) -> int:
    """Replicas that the scaler may ask for."""
    if scaler.hpa is not None:
        return scaler.hpa.max_replicas
    if scaler.keda is not None:
        fallback = scaler.keda.fallback
        return max(scaler.keda.max_replicas, fallback.replicas if fallback else 0)
    if scaler.ratio is not None:
        return scaler.ratio.max_replicas
    if scaler.alone is not None:
        return scaler.alone[1]
    return scaler.saturation.max_replicas if scaler.saturation is not None else 0


# --- metrics ------------------------------------------------------------------------------


def path_of(cluster: Cluster, scaler: ScalerSpec, origin: Origin) -> Path:
    """How metrics reach the scaler."""
    written = cluster.metrics
    place = ("cluster", "metrics", "queries")
    if scaler.hpa is not None:
        _check_selectors(cluster, scaler.hpa, origin)
    asked = _asked(cluster, scaler)
    foreseen = None if scaler.prediction is None else scaler.prediction.metric
    if foreseen is not None:
        _check_foreseen(foreseen, scaler, origin)
        del asked[foreseen]
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


def _check_foreseen(metric: str, scaler: ScalerSpec, origin: Origin) -> None:
    """Refuse a forecast that nobody reads, or that somebody reads as something else."""
    place = ("cluster", "prediction", "metric")
    if scaler.hpa is not None:
        if not any(m.name == metric and m.kind == "External" for m in scaler.hpa.metrics):
            origin.fail(place, f"the HPA has no metric of type External with the name {metric!r}")
    elif scaler.keda is not None:
        triggers = [t for t in scaler.keda.triggers if isinstance(t, QueryTrigger)]
        if not any(t.name == metric and t.query.strip() == metric for t in triggers):
            origin.fail(
                place, f"no trigger of KEDA has the name {metric!r} and that name as its query"
            )


def _query(text: str) -> Query:
    try:
        return parse_query(text)
    except QueryError as error:
        raise ValueError(str(error)) from None


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "nothing"


def _asked(cluster: Cluster, scaler: ScalerSpec) -> dict[str, str | None]:
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


def _check_selectors(cluster: Cluster, hpa: HpaSpec, origin: Origin) -> None:
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
