"""A pod's container on the simulation's clock: it is pulled, starts or wakes, serves, is killed and starts again."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from twin.clock import PS
from twin.cluster.cold_start import PHASES, Starter
from twin.cluster.fleet_log import FleetLog
from twin.cluster.fleet_pod import FleetPod, PodEngine
from twin.cluster.probes import BACKOFF_RESET_PS, Probes, backoff_ps, fate
from twin.cluster.timer import Timer
from twin.engine.replica import Replica


class Owner(Protocol):
    """The fleet as its containers see it."""

    def is_over(self) -> bool:
        """Whether no request is inside and none will come."""

    def serves(self, pod: FleetPod) -> None:
        """Its server answers."""

    def is_ready(self, pod: FleetPod) -> None:
        """It has become Ready."""

    def lost_ready(self, pod: FleetPod) -> None:
        """It is not Ready any more."""

    def killed(self, pod: FleetPod) -> None:
        """Its container has ended."""


class Containers:
    """Starts and ends the containers of all pods.

    `make_replica(index)` builds the engine in one; `by_replica` are all there ever were, by that index.
    """

    def __init__(
        self,
        owner: Owner,
        timer: Timer,
        log: FleetLog,
        starter: Starter,
        probes: Probes,
        make_replica: Callable[[int], Replica],
    ) -> None:
        self._owner = owner
        self._timer = timer
        self._at = timer.at
        self._log = log
        self._starter = starter
        self._probes = probes
        self._make_replica = make_replica
        self.by_replica: list[PodEngine] = []

    def start(self, pod: FleetPod, is_restart: bool = False, image_ps: int | None = None) -> None:
        """A container begins, after its image has come; `image_ps` says how long that takes where it is known."""
        phases = self._starter.draw(is_restart)
        if image_ps is not None:
            phases["image"] = min(image_ps, phases["image"])
        pod.phases.append(phases)
        image_ps = phases["image"]
        pod.attempt += 1
        self._at(image_ps, partial(self._run, pod, pod.attempt))
        if image_ps:
            self._log.event(
                self._timer.now_ps, pod.number, "image", f"pulled in {image_ps / PS:.0f} s"
            )

    def find_ready(self, pod: FleetPod) -> None:
        """The pod was there before the run began."""
        now_ps = self._timer.now_ps
        pod.phases.append(dict.fromkeys(PHASES, 0))
        pod.running_ps = pod.first_running_ps = now_ps
        self._serve(pod, pod.attempt)
        pod.ready_since_ps = pod.first_ready_ps = pod.ready_changed_ps = now_ps
        self._log.event(now_ps, pod.number, "ready", "")

    def wake(self, pod: FleetPod, wake_ps: int) -> None:
        """A container that slept wakes up; its startup probe is long done."""
        now_ps = self._timer.now_ps
        pod.phases.append({"wake": wake_ps})
        pod.attempt += 1
        pod.running_ps = pod.first_running_ps = now_ps
        found = fate(Probes(readiness=self._probes.readiness), wake_ps)
        assert found.ready_ps is not None
        self._at(wake_ps, partial(self._serve, pod, pod.attempt))
        self._at(found.ready_ps, partial(self._become_ready, pod, pod.attempt))

    def _run(self, pod: FleetPod, attempt: int) -> None:
        if pod.is_deleted or pod.attempt != attempt:
            return
        now_ps = self._timer.now_ps
        pod.running_ps = now_ps
        if pod.first_running_ps is None:
            pod.first_running_ps = now_ps
        serving_ps = sum(ps for name, ps in pod.phases[-1].items() if name != "image")
        found = fate(self._probes, serving_ps)
        if found.killed_ps is None:
            self._at(serving_ps, partial(self._serve, pod, attempt))
        if found.ready_ps is not None:
            self._at(found.ready_ps, partial(self._become_ready, pod, attempt))
        if found.killed_ps is not None:
            why = (
                f"{found.killed_by} probe: it needs {serving_ps / PS:.0f} s to serve and is given "
                f"{found.killed_ps / PS:.0f} s"
            )
            self._at(found.killed_ps, partial(self.crash, pod, attempt, why))

    def _serve(self, pod: FleetPod, attempt: int) -> None:
        if pod.is_deleted or pod.attempt != attempt:
            return
        index = len(self.by_replica)
        self.by_replica.append(pod.serve(index, self._make_replica(index), self._timer.now_ps))
        self._owner.serves(pod)

    def _become_ready(self, pod: FleetPod, attempt: int) -> None:
        if pod.is_deleted or pod.attempt != attempt or pod.is_ready:
            return
        now_ps = self._timer.now_ps
        pod.ready_since_ps = now_ps
        pod.ready_changed_ps = now_ps
        if pod.first_ready_ps is None:
            pod.first_ready_ps = now_ps
        self._log.event(now_ps, pod.number, "ready", "")
        self._owner.is_ready(pod)

    def end_engine(self, pod: FleetPod, reason: str) -> None:
        """Its engine is gone, if there is one, and what is inside is aborted."""
        if pod.replica is not None:
            pod.replica.settle()
            pod.replica.kill(reason)
            pod.engines[-1].keep(self._timer.now_ps)

    def crash(self, pod: FleetPod, attempt: int, why: str, reason: str = "pod_crash") -> None:
        """The kubelet kills the container of that start and starts it again after its back-off."""
        if pod.is_deleted or pod.attempt != attempt:
            return
        now_ps = self._timer.now_ps
        assert pod.running_ps is not None
        if now_ps - pod.running_ps >= BACKOFF_RESET_PS:
            pod.restarts_in_row = 0
        wait_ps = backoff_ps(pod.restarts_in_row)
        pod.kills_ps.append(now_ps)
        pod.restarts_in_row += 1
        self._log.event(
            now_ps, pod.number, "killed", f"{why}; starts again after {wait_ps / PS:g} s"
        )
        self.end_engine(pod, reason)
        was_ready = pod.is_ready
        pod.end_ready(now_ps)
        if was_ready:
            self._owner.lost_ready(pod)
        pod.running_ps = None
        pod.attempt += 1
        if not self._owner.is_over():  # else it would go on for ever
            self._at(wait_ps, partial(self._restart, pod, pod.attempt))
        self._owner.killed(pod)

    def _restart(self, pod: FleetPod, attempt: int) -> None:
        if not pod.is_deleted and pod.attempt == attempt:
            self.start(pod, is_restart=True)
