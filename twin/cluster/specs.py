"""What a HorizontalPodAutoscaler is told and what it sees: plain data in Kubernetes' terms.

Quantities are integers in thousandths, as Kubernetes' controller counts them; instants and spans are picoseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from twin.clock import PS

MAX_REPLICAS = 2**31 - 1
"""Replica counts are 32-bit."""


@dataclass(frozen=True)
class MetricSpec:
    """One entry of `spec.metrics`."""

    kind: str
    """Resource, ContainerResource, Pods, Object or External."""
    name: str
    """Of the metric, or of the resource (cpu, memory)."""
    target: str
    """Utilization (percent of the request), AverageValue (per pod) or Value (of the whole)."""
    value: int
    """Thousandths; whole percent for Utilization."""
    container: str | None = None
    """Of a ContainerResource."""
    described_object: str | None = None
    """Kind/name an Object metric belongs to."""
    selector: tuple[tuple[str, str], ...] = ()
    """Labels that the series of a Pods, Object or External metric must have."""

    def __post_init__(self) -> None:
        known = TARGETS.get(self.kind)
        if known is None:
            raise ValueError(f"kind must be one of {', '.join(TARGETS)}, got {self.kind!r}")
        if self.target not in known:
            raise ValueError(
                f"target of a {self.kind} metric must be one of {', '.join(known)}, got {self.target!r}"
            )
        if self.value <= 0:
            raise ValueError(f"the target of metric {self.name} must be > 0, got {self.value}")

    @property
    def is_total(self) -> bool:
        """Whether it is one number for all pods, which can be read while there are none."""
        return self.kind in ("Object", "External")


TARGETS = {
    "Resource": ("Utilization", "AverageValue"),
    "ContainerResource": ("Utilization", "AverageValue"),
    "Pods": ("AverageValue",),
    "Object": ("Value", "AverageValue"),
    "External": ("Value", "AverageValue"),
}
"""Kind of metric -> the targets it may have."""


@dataclass(frozen=True)
class ScalingPolicy:
    """How far one direction may go within a period."""

    kind: str
    """Pods or Percent."""
    value: int
    period_ps: int


@dataclass(frozen=True)
class ScalingRules:
    """`behavior.scaleUp` or `behavior.scaleDown`."""

    policies: tuple[ScalingPolicy, ...]
    select: str = "Max"
    """Max = the policy that allows most, Min = the one that allows least, Disabled = this direction is closed."""
    stabilization_ps: int | None = None
    """None = the controller's own window."""
    tolerance: float | None = None
    """None = the controller's own."""


DEFAULT_UP = ScalingRules(
    (ScalingPolicy("Percent", 100, 15 * PS), ScalingPolicy("Pods", 4, 15 * PS)), "Max", 0
)
DEFAULT_DOWN = ScalingRules((ScalingPolicy("Percent", 100, 15 * PS),), "Max", None)
"""What Kubernetes fills in for a direction that a `behavior` leaves out."""


@dataclass(frozen=True)
class Behavior:
    """`spec.behavior` with both directions filled in."""

    up: ScalingRules = DEFAULT_UP
    down: ScalingRules = DEFAULT_DOWN


@dataclass(frozen=True)
class HpaSpec:
    """`spec` of a HorizontalPodAutoscaler."""

    min_replicas: int
    max_replicas: int
    metrics: tuple[MetricSpec, ...]
    behavior: Behavior | None = None
    """None = the older rules: at most max(2 * current, 4) at once, no limit down."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                "minReplicas must be >= 0 and <= maxReplicas, and maxReplicas >= 1, "
                f"got {self.min_replicas} and {self.max_replicas}"
            )
        if not self.metrics:
            raise ValueError("metrics must not be empty")
        if self.min_replicas == 0 and not any(metric.is_total for metric in self.metrics):
            raise ValueError(
                "minReplicas 0 needs an Object or External metric: pods that are not there have no other"
            )


@dataclass(frozen=True)
class Controller:
    """Flags of kube-controller-manager that concern autoscaling, with its defaults."""

    sync_period_ps: int = 15 * PS
    tolerance: float = 0.1
    downscale_stabilization_ps: int = 300 * PS
    cpu_initialization_period_ps: int = 300 * PS
    initial_readiness_delay_ps: int = 30 * PS
    scale_to_zero: bool = True
    """Feature HPAScaleToZero: on by default since 1.37."""


@dataclass(frozen=True)
class Pod:
    """A pod that the target's selector matches, as the controller sees it."""

    name: str
    phase: str = "Running"
    """Pending, Running, Succeeded or Failed."""
    ready: bool | None = True
    """Its Ready condition; None = it has none yet."""
    start_ps: int | None = None
    """`status.startTime`; None = not set."""
    ready_changed_ps: int | None = None
    """When the Ready condition last changed; None = at its start."""
    is_deleted: bool = False
    """It has a deletion timestamp."""
    request: int | None = None
    """Thousandths of the resource that it requests."""

    @property
    def counts_as_ready(self) -> bool:
        """Whether a Value target multiplies by it."""
        return self.phase == "Running" and self.ready is True


@dataclass(frozen=True)
class Sample:
    """What was measured of one pod, in thousandths."""

    value: int
    at_ps: int
    window_ps: int = 0
    """Over which it is an average."""


@dataclass(frozen=True)
class PodSamples:
    """Answer to a Resource or Pods metric: pods that have no sample are not in it."""

    by_pod: Mapping[str, Sample]


@dataclass(frozen=True)
class Total:
    """Answer to an Object or External metric: the values of all series that matched."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """The metric could not be read."""

    why: str


Reading = PodSamples | Total | Failed
"""What the metrics API answered for one metric."""


@dataclass(frozen=True)
class Scale:
    """The scale subresource of the target."""

    replicas: int
    """`spec.replicas`: what was asked for."""
    status_replicas: int
    """`status.replicas`: pods that exist, those of a surge included."""


@dataclass(frozen=True)
class ScalingLog:
    """What the controller remembers of one autoscaler between two looks."""

    recommendations: tuple[tuple[int, int], ...] | None = None
    """(replicas, instant) of raw proposals; None = the controller has just started."""
    up_events: tuple[tuple[int, int], ...] = ()
    """(change > 0, instant) of what was scaled up."""
    down_events: tuple[tuple[int, int], ...] = ()
    """(change > 0, instant) of what was scaled down."""
    scaled_to_zero: bool = False
    """Condition ScaledToZero: this autoscaler, and no person, set the target to 0."""
    shown: tuple[int | None, ...] = ()
    """`status.currentMetrics`: by metric the value last shown, thousandths (percent for Utilization)."""


@dataclass(frozen=True)
class Proposal:
    """What one metric asks for."""

    metric: str
    replicas: int | None
    """None = the metric failed."""
    current: int | None = None
    """What `status.currentMetrics` shows: thousandths, or percent for Utilization."""
    average: int | None = None
    """Per pod, thousandths, where there is such a number."""
    error: str | None = None


@dataclass(frozen=True)
class Condition:
    """One entry of `status.conditions`."""

    kind: str
    """AbleToScale, ScalingActive, ScalingLimited or ScaledToZero."""
    status: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """What one look of the controller came to."""

    current: int
    desired: int
    reason: str
    """Why in one sentence: metric, clamp or limit."""
    log: ScalingLog
    """What to remember."""
    proposals: tuple[Proposal, ...] = ()
    proposed: int | None = None
    """The largest proposal; None = metrics were not read, or failed so that nothing may change."""
    metric: str | None = None
    """Whose proposal that is."""
    stabilized: int | None = None
    """The proposal after the stabilisation windows."""
    limit: str = ""
    """DesiredWithinRange, or which limit cut it: ScaleUpLimit, TooManyReplicas, ScaleDownLimit, TooFewReplicas."""
    conditions: tuple[Condition, ...] = field(default=())
    error: str | None = None
    """A metric that failed, whether it changed the outcome or not."""
