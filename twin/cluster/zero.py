"""Can an autoscaler raise a deployment that has come down to no replica? Then no pod has a metric any more."""

from twin.cluster.fleet_spec import FleetSpec
from twin.cluster.keda import CronTrigger, KedaSpec, QueryTrigger
from twin.cluster.metrics_path import Path, Store, total_reading, trigger_answer
from twin.cluster.promql import Vector
from twin.cluster.specs import Failed, HpaSpec, Total

_CURE = "keep one replica, or scale to zero on a KEDA trigger of type cron"


def never_wakes(fleet: FleetSpec) -> str | None:
    """Why nothing can raise the fleet from 0 replicas; None if something can, or if it never comes to 0."""
    scaler = fleet.scaler
    empty = fleet.replicas == 0
    if scaler.hpa is not None:
        if empty:
            return "an HPA is off while spec.replicas is 0; begin with one replica"
        if scaler.hpa.min_replicas == 0 and not _hpa_sees_something(scaler.hpa, fleet.path):
            return f"the metrics of the HPA are those of pods, and at 0 there are none; {_CURE}"
    elif scaler.keda is not None:
        keda = scaler.keda
        bottom = keda.min_replicas if keda.idle_replicas is None else keda.idle_replicas
        if bottom == 0 and not _keda_wakes(keda, fleet.path):
            return f"the queries of its triggers are over metrics of pods, and at 0 there are none; {_CURE}"
    elif scaler.ratio is not None:
        # kpa takes no pods for a load of 0 and goes to its least; apa does nothing without an answer.
        is_stuck = scaler.ratio.min_replicas == 0 or (empty and scaler.ratio_rule == "apa")
        if is_stuck:
            return f"{scaler.ratio_rule} reads metrics of pods, and at 0 there are none; {_CURE}"
    elif scaler.saturation is not None and empty:
        return f"the saturation rule reads metrics of pods, and at 0 there are none; begin with one: {_CURE}"
    return None


def _hpa_sees_something(spec: HpaSpec, path: Path) -> bool:
    for metric in spec.metrics:
        answer = total_reading(_without_pods(path, metric.name), metric.kind == "External")
        if metric.is_total and isinstance(answer, Total) and sum(answer.values) > 0:
            return True
    return False


def _keda_wakes(spec: KedaSpec, path: Path) -> bool:
    for trigger in spec.triggers:
        if isinstance(trigger, CronTrigger):
            return True
        assert isinstance(trigger, QueryTrigger)
        value = trigger_answer(_without_pods(path, trigger.name), trigger.ignore_null_values)
        if value is None and not trigger.ignore_null_values:
            value = Failed("the query returned nothing")
        if isinstance(value, Failed):
            if spec.fallback is not None and spec.fallback.replicas:
                return True
        elif value is not None and value > trigger.activation_threshold:
            return True
    return False


def _without_pods(path: Path, name: str) -> Vector | Failed:
    """What the query of that metric gives while there is no pod."""
    return Path(queries=path.queries).ask(Store({}, 0), name, 0)
