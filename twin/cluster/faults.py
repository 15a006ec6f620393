"""What breaks in a cluster, and when: crashes, dead or slow GPUs, partitions, nodes that go away."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from twin.cluster.fleet_log import FleetLog, Strike
from twin.cluster.fleet_pod import FleetPod
from twin.cluster.timer import Timer

KINDS = ("crash", "gpu_loss", "slow", "partition", "stale", "spot_reclaim", "node_drain")


@dataclass(frozen=True)
class ClusterFault:
    """One thing that breaks."""

    kind: str
    """One of KINDS; docs/cluster.md tells what each does."""
    at_ps: int
    until_ps: int | None = None
    """When it is over; None = never, or at once where nothing lasts."""
    pods: tuple[int, ...] = ()
    """Numbers of the pods it strikes; empty = all that are there."""
    node: int = 0
    """Of node_drain."""
    factor: float = 1.0
    """Of slow: how many times as long everything takes."""
    notice_ps: int = 0
    """Of spot_reclaim: from the notice to the end of the machine."""


class Breakable(Protocol):
    """The fleet as faults see it."""

    @property
    def live(self) -> Sequence[FleetPod]:
        """Pods that are not gone, by number."""

    def crash(self, pod: FleetPod, why: str, reason: str) -> None:
        """Its container ends now and is started again."""

    def freeze(self, pod: FleetPod) -> None:
        """Its engine stops, and its server goes on answering probes."""

    def slow(self, pod: FleetPod, factor: float, is_over: bool) -> None:
        """Everything there takes `factor` times as long as up to now, or that is over."""

    def cut_off(self, pod: FleetPod, is_cut_off: bool) -> None:
        """The router loses its connections there and makes no new ones, or may again."""

    def stand_still(self, pod: FleetPod, is_standing: bool) -> None:
        """What routers read of it does not change any more, or does again."""

    def evict(self, pod: FleetPod, reason: str, grace_ps: int | None) -> None:
        """It is deleted, and given so long; None = what its template says."""

    def cordon(self, node: int, is_lost: bool) -> None:
        """The node takes no more pods; if lost, it is gone with the last of them."""

    def uncordon(self, node: int) -> None:
        """The node takes pods again."""


def schedule(faults: Sequence[ClusterFault], fleet: Breakable, timer: Timer, log: FleetLog) -> None:
    """Let them happen, and keep what each came to."""
    for number, fault in enumerate(faults):
        timer.at(fault.at_ps, partial(_strike, number, fault, fleet, timer, log))


def _strike(
    number: int, fault: ClusterFault, fleet: Breakable, timer: Timer, log: FleetLog
) -> None:
    struck = [pod for pod in fleet.live if _is_struck(fault, pod)]
    requests = None if fault.kind == "stale" else sum(map(_inside, struck))
    log.strikes.append(Strike(number, tuple(pod.number for pod in struck), requests))
    if fault.kind == "node_drain":
        _drain(fault, struck, fleet, timer)
        return
    for pod in struck:
        if pod.is_deleted:  # by what this fault did to others
            continue
        lasts_ps = None if fault.until_ps is None else fault.until_ps - fault.at_ps
        match fault.kind:
            case "crash":
                fleet.crash(pod, "it crashed", "pod_crash")
            case "gpu_loss":
                fleet.freeze(pod)
                if lasts_ps is not None:
                    timer.at(lasts_ps, partial(_replace, fleet, pod, pod.replica_index))
            case "slow":
                fleet.slow(pod, fault.factor, False)
                if lasts_ps is not None:
                    timer.at(lasts_ps, partial(fleet.slow, pod, fault.factor, True))
            case "partition":
                fleet.cut_off(pod, True)
                if lasts_ps is not None:
                    timer.at(lasts_ps, partial(fleet.cut_off, pod, False))
            case "stale":
                fleet.stand_still(pod, True)
                if lasts_ps is not None:
                    timer.at(lasts_ps, partial(fleet.stand_still, pod, False))
            case "spot_reclaim":
                for node in set(pod.nodes):
                    fleet.cordon(node, is_lost=True)
                fleet.evict(pod, "spot_reclaim", fault.notice_ps)


def _is_struck(fault: ClusterFault, pod: FleetPod) -> bool:
    """Whether there is something of the pod that the fault can break."""
    if pod.is_deleted or (fault.pods and pod.number not in fault.pods):
        return False
    match fault.kind:
        case "crash":
            return pod.running_ps is not None
        case "gpu_loss":
            return pod.replica is not None
        case "stale":
            return pod.replica_index is not None
        case "node_drain":
            return fault.node in pod.nodes
    return True


def _inside(pod: FleetPod) -> int:
    """Requests that are there, after whatever ends at this instant."""
    if pod.replica is None:
        return 0
    pod.replica.settle()
    return pod.replica.num_inflight


def _replace(fleet: Breakable, pod: FleetPod, engine: int | None) -> None:
    """Somebody has noticed that the engine does nothing, if it is still there."""
    if pod.replica_index == engine and pod.replica is not None:
        fleet.crash(pod, "its GPU was lost", "gpu_lost")


def _drain(fault: ClusterFault, struck: Sequence[FleetPod], fleet: Breakable, timer: Timer) -> None:
    fleet.cordon(fault.node, is_lost=False)
    for pod in struck:
        if not pod.is_deleted:
            fleet.evict(pod, "node_drain", None)
    if fault.until_ps is not None:
        timer.at(fault.until_ps - fault.at_ps, partial(fleet.uncordon, fault.node))
