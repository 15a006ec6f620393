"""One pod of a fleet: what it has been through, and the engine in it while it serves."""

from dataclasses import dataclass, field
from typing import Any

from twin.cluster.cost import GpuTime
from twin.cluster.deployment import Member
from twin.cluster.fleet_log import PodLife
from twin.cluster.metrics_path import Observations
from twin.engine.replica import EngineStats, Replica
from twin.metrics.gauges import Gauges


@dataclass
class PodEngine:
    """One engine of a pod, from the moment its server answers until it is gone; each start has its own."""

    pod: "FleetPod"
    index: int
    """In the records."""
    serving_ps: int
    replica: Replica | None
    gone_ps: int | None = None
    _kept_stats: EngineStats | None = None
    _kept_gauges: Gauges | None = None
    _kept_policy: dict[str, Any] | None = None

    def keep(self, now_ps: int) -> None:
        """The engine is gone; its figures stay."""
        assert self.replica is not None
        self._kept_gauges = self.replica.gauges(now_ps)
        self._kept_stats = self.replica.stats
        self._kept_policy = self.policy_stats
        self.gone_ps = now_ps
        self.replica = None

    def gauges(self, now_ps: int) -> Gauges:
        """Now, or as they were last."""
        if self.replica is not None:
            return self.replica.gauges(now_ps)
        assert self._kept_gauges is not None
        return self._kept_gauges

    @property
    def stats(self) -> EngineStats:
        """Counters."""
        if self.replica is not None:
            return self.replica.stats
        assert self._kept_stats is not None
        return self._kept_stats

    @property
    def policy_stats(self) -> dict[str, Any] | None:
        """Statistics of its policy; None in the stock modes."""
        if self.replica is None:
            return self._kept_policy
        return None if self.replica.policy is None else self.replica.policy.stats()

    def alive_ps(self, end_ps: int) -> int:
        """How long it was there."""
        return (end_ps if self.gone_ps is None else self.gone_ps) - self.serving_ps


@dataclass
class FleetPod:
    """A pod from its creation until it is gone. Instants are picoseconds, None where not reached."""

    number: int
    """In the order of creation."""
    revision: int
    created_ps: int
    placed_ps: int | None = None
    """When it got its node: from here on its GPUs are paid for."""
    nodes: tuple[int, ...] = ()
    first_running_ps: int | None = None
    running_ps: int | None = None
    """Start of the present container."""
    serving_ps: int | None = None
    """When its server began to answer."""
    ready_since_ps: int | None = None
    """None = not Ready."""
    ready_changed_ps: int | None = None
    first_ready_ps: int | None = None
    deleted_ps: int | None = None
    stops_ps: int | None = None
    """When its server was told to stop."""
    gone_ps: int | None = None
    lags: bool = False
    """Deleted, but requests still come."""
    kills_ps: list[int] = field(default_factory=list)
    """When its container was killed."""
    is_pending_told: bool = False
    """Whether its want of GPUs is in the log."""
    restarts_in_row: int = 0
    attempt: int = 0
    """Events of an earlier start find another number and do nothing."""
    phases: list[dict[str, int]] = field(default_factory=list)
    """By start: phase -> picoseconds."""
    engines: list[PodEngine] = field(default_factory=list)
    """Of each start that came to serve; the last one may be there."""
    observed: Observations = field(default_factory=Observations)
    first_tokens_seen: set[int] = field(default_factory=set)
    """Requests inside whose first token the exporter has observed."""
    completed: int = 0
    """By the present engine."""
    completed_before: int = 0
    ready_total_ps: int = 0
    """Until the last time it stopped being Ready."""
    busy_at_delete_ps: int | None = None
    slow_by: list[float] = field(default_factory=list)
    """How many times as long everything takes there, by each fault."""
    abort_reason: str = "pod_deleted"
    """Why requests inside are aborted when it goes."""
    grace_ps: int | None = None
    """From its deletion to the kill, where it is not the template's."""
    is_cut_off: bool = False
    """The router cannot reach it."""
    is_frozen: bool = False
    """Its present engine has lost its GPU."""
    is_woken: bool = False
    """It was a sleeper of the warm pool."""

    @property
    def served_to_the_end(self) -> bool:
        """Whether a server that worked was there until it went."""
        return (
            bool(self.engines) and self.engines[-1].gone_ps == self.gone_ps and not self.is_frozen
        )

    @property
    def is_unwanted(self) -> bool:
        """Whether it was deleted because fewer replicas are wanted, and not by a fault."""
        return self.abort_reason == "pod_deleted"

    @property
    def name(self) -> str:
        """As in the API."""
        return f"pod-{self.number}"

    @property
    def is_deleted(self) -> bool:
        """Whether it has a deletion timestamp."""
        return self.deleted_ps is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests are sent to it."""
        return self.ready_since_ps is not None

    @property
    def replica(self) -> Replica | None:
        """The engine that is there now."""
        return self.engines[-1].replica if self.engines else None

    @property
    def replica_index(self) -> int | None:
        """Of its last engine, in the records."""
        return self.engines[-1].index if self.engines else None

    def serve(self, index: int, replica: Replica, now_ps: int) -> PodEngine:
        """Its server answers, with counters from 0."""
        self.serving_ps = now_ps
        self.is_frozen = False
        self.completed_before, self.completed = self.completed_before + self.completed, 0
        self.observed = Observations()
        self.first_tokens_seen.clear()
        self.engines.append(PodEngine(self, index, now_ps, replica))
        return self.engines[-1]

    @property
    def num_inflight(self) -> int:
        """Requests inside."""
        return 0 if self.replica is None else self.replica.num_inflight

    def end_ready(self, now_ps: int) -> None:
        """It is not Ready any more, if it was."""
        if self.ready_since_ps is not None:
            self.ready_total_ps += now_ps - self.ready_since_ps
            self.ready_since_ps = None
            self.ready_changed_ps = now_ps

    def member(self, revision: int) -> Member:
        """As the Deployment's controller sees it."""
        return Member(
            self.number,
            self.revision == revision,
            self.placed_ps is not None,
            self.running_ps is not None,
            self.ready_since_ps,
            self.nodes[0] if self.nodes else None,
            len(self.kills_ps),
        )

    def gpu_time(self, gpus: int, end_ps: int) -> GpuTime:
        """What its GPUs were paid for until `end_ps`."""
        if self.placed_ps is None:
            return GpuTime()
        gone_ps = end_ps if self.gone_ps is None else min(self.gone_ps, end_ps)
        deleted_ps = gone_ps if self.deleted_ps is None else min(self.deleted_ps, gone_ps)
        ready_ps = self.ready_total_ps
        if self.ready_since_ps is not None:
            ready_ps += max(0, end_ps - self.ready_since_ps)
        busy_ps = sum(engine.stats.busy_ps for engine in self.engines)
        if self.engines:
            if self.busy_at_delete_ps is not None:
                busy_ps = min(busy_ps, self.busy_at_delete_ps)
        serving_ps = min(busy_ps, ready_ps)
        placed_ps = min(self.placed_ps, deleted_ps)
        return GpuTime(
            gpus * serving_ps,
            gpus * (ready_ps - serving_ps),
            gpus * (deleted_ps - placed_ps - ready_ps),
            gpus * (gone_ps - deleted_ps),
        )

    def life(self, gpus: int, end_ps: int) -> PodLife:
        """For the result of a run that ended at `end_ps`."""
        return PodLife(
            self.number,
            self.replica_index,
            self.created_ps,
            self.placed_ps,
            self.serving_ps,
            self.first_ready_ps,
            self.deleted_ps,
            self.gone_ps,
            sum(at_ps <= end_ps for at_ps in self.kills_ps),
            self.completed_before + self.completed,
            self.gpu_time(gpus, end_ps),
            self.is_woken,
        )
