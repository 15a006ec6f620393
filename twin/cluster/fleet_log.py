"""What happened to a fleet: every look of its autoscaler, every event of a pod, and how many there were when."""

from dataclasses import dataclass, field

from twin.cluster.cost import GpuTime
from twin.cluster.prediction import Forecast
from twin.cluster.reserves import WarmHistory
from twin.cluster.scalers import Look


@dataclass(frozen=True)
class PodEvent:
    """Something that happened to a pod, to a node or to the deployment."""

    at_ps: int
    pod: int | None
    kind: str
    """One of KINDS."""
    text: str


@dataclass(frozen=True)
class Strike:
    """What one of the faults of a scenario came to when its time had come."""

    fault: int
    """Its place in the list."""
    pods: tuple[int, ...]
    """Numbers of the pods that it struck; may be none."""
    requests: int | None
    """Inside of them at that instant; None where it takes no request away (stale)."""


KINDS = (
    "rejected", "created", "pending", "node", "image", "killed", "ready", "update", "fault", "deleted", "gone",
    "reserve",
)  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """How many replicas there are from an instant on."""

    at_ps: int
    wanted: int
    """`spec.replicas`."""
    present: int
    """Not deleted."""
    ready: int
    draining: int
    """Deleted and not gone."""


@dataclass
class FleetLog:
    """Grows while the run goes on."""

    looks: list[Look] = field(default_factory=list)
    events: list[PodEvent] = field(default_factory=list)
    steps: list[Counts] = field(default_factory=list)
    """Changes of the counts, at most one an instant."""
    strikes: list[Strike] = field(default_factory=list)
    """Faults whose time has come."""

    def look(self, look: Look) -> None:
        """The autoscaler has looked."""
        self.looks.append(look)

    def event(self, at_ps: int, pod: int | None, kind: str, text: str) -> None:
        """Something has happened."""
        self.events.append(PodEvent(at_ps, pod, kind, text))

    def rejected(self, at_ps: int, wanted: int, why: str) -> None:
        """Pods could not be made; said once."""
        if not any(event.kind == "rejected" for event in self.events):
            self.event(at_ps, None, "rejected", why)
        self.counts(at_ps, wanted, 0, 0, 0)

    def counts(self, at_ps: int, wanted: int, present: int, ready: int, draining: int) -> None:
        """How many there are now."""
        now = Counts(at_ps, wanted, present, ready, draining)
        if self.steps and self.steps[-1].at_ps == at_ps:
            self.steps[-1] = now
        elif not self.steps or _figures(self.steps[-1]) != _figures(now):
            self.steps.append(now)


def _figures(counts: Counts) -> tuple[int, int, int, int]:
    return counts.wanted, counts.present, counts.ready, counts.draining


@dataclass(frozen=True)
class PodLife:
    """A pod as the result tells it. Instants are picoseconds, None where not reached."""

    number: int
    replica: int | None
    """Index of its engine in records; None if it never served."""
    created_ps: int
    placed_ps: int | None
    serving_ps: int | None
    ready_ps: int | None
    """When it was Ready first."""
    deleted_ps: int | None
    gone_ps: int | None
    restarts: int
    requests: int
    """Completed."""
    gpu_time: GpuTime
    is_woken: bool = False
    """It was a sleeper of the warm pool."""


@dataclass(frozen=True)
class FleetHistory:
    """What became of a fleet in a run."""

    log: FleetLog
    pods: tuple[PodLife, ...]
    gpu_time: GpuTime
    gpus_per_replica: int
    pods_per_replica: int
    warm_pool: WarmHistory | None = None
    """None = nothing was kept ready."""
    forecasts: tuple[Forecast, ...] = ()
