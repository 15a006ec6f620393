"""What a changing set of replicas is told: plain objects that a scenario's `cluster:` becomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twin.clock import PS
from twin.cluster.cold_start import ColdStart
from twin.cluster.cron import Schedule
from twin.cluster.faults import ClusterFault
from twin.cluster.keda import KedaSpec
from twin.cluster.metrics_path import Path
from twin.cluster.nodes import Nodes
from twin.cluster.prediction import PredictionSpec
from twin.cluster.probes import Probes
from twin.cluster.ratio_scalers import RatioSpec
from twin.cluster.reserves import WarmPoolSpec
from twin.cluster.saturation import SaturationSpec
from twin.cluster.specs import Controller, HpaSpec


@dataclass(frozen=True)
class PodTemplate:
    """What all pods of the deployment have in common."""

    gpus: int = 1
    """Of each pod."""
    pods_per_replica: int = 1
    """A replica of several pods is one server over several nodes."""
    pre_stop_ps: int = 0
    """Sleep of the preStop hook, before the server is told to stop."""
    shutdown_timeout_ps: int = 0
    """vLLM's `--shutdown-timeout`: how long it goes on with what runs; 0 = it aborts."""
    grace_ps: int = 30 * PS
    """terminationGracePeriodSeconds, from the deletion to the kill."""
    endpoint_lag_ps: int = 0
    """How long after its deletion requests still come to a pod."""


@dataclass(frozen=True)
class Obstacle:
    """Why no pod of the deployment ever starts."""

    is_rejected: bool
    """Pods are refused by the API server; else they stay Pending."""
    why: str


@dataclass(frozen=True)
class Update:
    """A rolling update that begins at an instant."""

    at_ps: int
    max_surge: int | float = 0.25
    max_unavailable: int | float = 0.25


@dataclass(frozen=True)
class ScalerSpec:
    """Who decides about replicas; at most one of hpa, keda, ratio, saturation is set."""

    hpa: HpaSpec | None = None
    rivals: tuple[str, ...] = ()
    """Other HPAs whose target has the same pods."""
    keda: KedaSpec | None = None
    ratio: RatioSpec | None = None
    ratio_rule: str = "apa"
    saturation: SaturationSpec | None = None
    period_ps: int = 15 * PS
    """Of AIBrix' and llm-d's rules."""
    controller: Controller = field(default_factory=Controller)
    schedules: tuple[Schedule, ...] = ()
    """Floors under the replicas by time of the week."""
    prediction: PredictionSpec | None = None
    alone: tuple[int, int] | None = None
    """(least, most) replicas where schedules or a forecast decide and nobody else; None = one of the above does."""

    @property
    def names(self) -> list[str]:
        """Those that are set."""
        found = {
            "hpa": self.hpa,
            "keda": self.keda,
            self.ratio_rule: self.ratio,
            "saturation": self.saturation,
            "forecast" if self.prediction else "schedule": self.alone,
        }
        return [name for name, spec in found.items() if spec is not None]

    def scheduled(self, minute: int) -> int:
        """Replicas that the schedules want at least in that minute of the week."""
        active = (s.min_replicas for s in self.schedules if s.is_active(minute))
        return max(active, default=0)


@dataclass(frozen=True)
class FleetSpec:
    """Replicas that come and go."""

    replicas: int
    """At the start of the run."""
    most_replicas: int
    """What the autoscaler may ask for."""
    template: PodTemplate
    cold_start: ColdStart
    starts_cold: bool
    """Whether the first replicas start at 0 too; else they are Ready then."""
    probes: Probes
    nodes: Nodes | None
    """None = there is always room."""
    scaler: ScalerSpec
    path: Path
    labels: Mapping[str, str]
    """Of all series."""
    obstacle: Obstacle | None = None
    updates: Sequence[Update] = ()
    faults: Sequence[ClusterFault] = ()
    warm_pool: WarmPoolSpec | None = None
    """None = nothing is kept ready."""
    holds_requests: bool = False
    """Whether the gateway keeps requests while no pod is Ready; else it refuses them (503)."""
    start_minute: int = 0
    """Minute of the week at which the run begins, from Monday 00:00."""
    seed: int = 1
