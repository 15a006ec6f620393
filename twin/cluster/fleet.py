"""The pods of a deployment on the simulation's clock: they come, start, serve, drain and go, as an autoscaler asks.

The fleet owns the pods and tells the router which of them are Ready. A pod has a replica of the engine from the moment
its server answers until it is gone. Control loops (scrapes, the autoscaler) end when nothing is left to happen.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from twin.cluster.cold_start import Starter
from twin.cluster.containers import Containers
from twin.cluster.control import Control
from twin.cluster.cost import GpuTime, total
from twin.cluster.departures import Departures
from twin.cluster.deployment import Rollout, plan, rollout
from twin.cluster.faults import schedule
from twin.cluster.fleet_log import FleetHistory, FleetLog
from twin.cluster.fleet_pod import FleetPod
from twin.cluster.fleet_spec import FleetSpec
from twin.cluster.gateway import Gateway, Refusing
from twin.cluster.placement import Placement
from twin.cluster.timer import Timer
from twin.cluster.warm_pool import WarmPool
from twin.engine.replica import EngineStats, Replica
from twin.metrics.gauges import Gauges
from twin.metrics.records import RequestRecord


class Fleet:
    """Replicas that come and go.

    `make_replica(index)` builds the engine of a pod; `gateway` is told which pods get requests; `is_over` says whether
    no request is inside and none will come, so that control loops may end.
    """

    def __init__(
        self,
        timer: Timer,
        spec: FleetSpec,
        gateway: Gateway,
        make_replica: Callable[[int], Replica],
        is_over: Callable[[], bool],
    ) -> None:
        self._timer = timer
        self._at = timer.at
        self._spec = spec
        self.is_over = is_over
        self._gateway = gateway
        self.log = FleetLog()
        self.pods: list[FleetPod] = []
        """Every pod there ever was, by number."""
        self._live: list[FleetPod] = []  # not gone
        self._wanted = spec.replicas
        self._revision = 0
        self._limits = Rollout(0, 0)
        self._has_begun = False  # pods that are made before were there already
        self._control = Control(self, timer, spec, self.log)
        starter = Starter(spec.cold_start, spec.seed)
        self._containers = Containers(self, timer, self.log, starter, spec.probes, make_replica)
        self._departures = Departures(
            timer, spec.template, self.log, self._containers, self._retarget, self._on_gone
        )
        provision = None
        if spec.nodes is not None:
            provision = self._control.scraper.stream("node", spec.nodes.provision)
        template = spec.template
        self._placement = Placement(
            timer, spec.nodes, template.gpus, template.pods_per_replica, provision, self.log,
            self._on_node,
        )  # fmt: skip
        self._warm_pool: WarmPool | None = None
        self._begin()

    def _begin(self) -> None:
        spec = self._spec
        self._settle()
        if spec.warm_pool is not None and spec.obstacle is None:
            self._warm_pool = WarmPool(
                spec.warm_pool, spec.cold_start, spec.seed, self._timer, self.log, self._placement
            )
            self._warm_pool.begin(spec.starts_cold)
            self._place()
        self._has_begun = True
        self._retarget()
        self._note()
        for update in spec.updates:
            self._at(update.at_ps, partial(self._update, update.max_surge, update.max_unavailable))
        schedule(spec.faults, self, self._timer, self.log)
        self._control.begin()

    # --- requests -------------------------------------------------------------------------

    def ended(self, record: RequestRecord) -> None:
        """A request has ended: its pod's exporter has seen it, and a pod that waited for it may go."""
        if record.replica is None:
            return
        pod = self._containers.by_replica[record.replica].pod
        self._control.scraper.observe(pod, record)
        self._departures.ended(pod)

    # --- pods -----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Make and delete pods until there are as many as wanted, and start what has room."""
        obstacle = self._spec.obstacle
        if obstacle is not None and obstacle.is_rejected:
            self.log.rejected(self._now_ps, self._wanted, obstacle.why)
            return
        members = [pod.member(self._revision) for pod in self._live if not pod.is_deleted]
        create, delete = plan(members, self._wanted, self._limits)
        for number in delete:
            self._delete(self.pods[number])
        for _ in range(create):
            self._create()
        self._place()
        self._note()

    def _create(self) -> None:
        now_ps = self._now_ps
        pod = FleetPod(len(self.pods), self._revision, now_ps)
        self.pods.append(pod)
        self._live.append(pod)
        self.log.event(now_ps, pod.number, "created", "")
        obstacle = self._spec.obstacle
        if obstacle is not None:
            self.log.event(now_ps, pod.number, "pending", obstacle.why)
        sleeper = None if self._warm_pool is None else self._warm_pool.claim(pod.name)
        if sleeper is not None:
            pod.placed_ps, pod.is_woken = now_ps, True
            pod.nodes, wake_ps = sleeper
            self._containers.wake(pod, wake_ps)

    def _place(self) -> None:
        """Give nodes to pods that wait for one, in the order of their creation, then to the warm pool."""
        if self._spec.obstacle is not None:
            return
        waiting = [pod for pod in self._live if pod.placed_ps is None and not pod.is_deleted]
        left = 0
        for pod in waiting:
            nodes, image_ps = self._placement.take(), None
            if nodes is None and self._warm_pool is not None:
                image_ps = self._warm_pool.give_way()
                nodes = self._placement.take()
            if nodes is None:
                left += 1
                self._tell_pending(pod)
                continue
            pod.placed_ps, pod.nodes = self._now_ps, nodes
            if self._has_begun or self._spec.starts_cold:
                self._containers.start(pod, image_ps=image_ps)
            else:
                self._containers.find_ready(pod)
        if self._warm_pool is not None:
            left += self._warm_pool.place()
        self._placement.order(left)

    def _tell_pending(self, pod: FleetPod) -> None:
        """Said once of a pod: no node has room for it."""
        why = self._placement.shortage(sum(not p.is_deleted for p in self._live))
        if pod.is_pending_told or why is None:
            return
        pod.is_pending_told = True
        self.log.event(self._now_ps, pod.number, "pending", why)

    def _on_node(self) -> None:
        self._place()
        self._note()

    def serves(self, pod: FleetPod) -> None:
        """Its server answers."""
        self._set_speed(pod)
        if pod.is_ready:  # it was called Ready before
            self._retarget()

    def is_ready(self, pod: FleetPod) -> None:
        """It has become Ready."""
        self._retarget()
        self._settle()
        self._gateway.release()

    def lost_ready(self, pod: FleetPod) -> None:
        """It is not Ready any more."""
        self._retarget()

    def killed(self, pod: FleetPod) -> None:
        """Its container has ended."""
        self._note()

    def _retarget(self) -> None:
        """Requests go to the Ready pods, in the order of their creation; to deleted ones while the endpoints lag."""
        chosen = [pod for pod in self._live if pod.is_ready or pod.lags]
        self._gateway.retarget(
            [
                pod.replica
                if pod.replica is not None and pod.stops_ps is None and not pod.is_cut_off
                else Refusing(self._gateway, _index(pod))
                for pod in chosen
            ]
        )

    def _delete(self, pod: FleetPod) -> None:
        self._departures.delete(pod)
        self._note()

    def _on_gone(self, pod: FleetPod, lost: int) -> None:
        """A pod is gone; its nodes are free, unless it goes to sleep there."""
        now_ps = self._now_ps
        self._live.remove(pod)
        self._control.scraper.forget(pod, now_ps)
        sleeps = (
            self._warm_pool is not None
            and pod.served_to_the_end
            and pod.is_unwanted
            and pod.revision == self._revision
            and self._warm_pool.takes_back(pod.nodes)
        )
        if not sleeps:
            self._placement.give(pod.nodes)
        self.log.event(now_ps, pod.number, "gone", f"{lost} requests aborted" if lost else "")
        self._at(0, self._settle)

    # --- faults -----------------------------------------------------------------------------

    @property
    def live(self) -> Sequence[FleetPod]:
        """Pods that are not gone, by number."""
        return self._live

    def crash(self, pod: FleetPod, why: str, reason: str) -> None:
        """Its container ends now and is started again."""
        if pod.running_ps is not None:
            self._containers.crash(pod, pod.attempt, why, reason)

    def freeze(self, pod: FleetPod) -> None:
        """Its engine stops, and its server goes on answering probes."""
        if pod.replica is not None:
            self.log.event(self._now_ps, pod.number, "fault", "its GPU is lost; /health is 200")
            pod.is_frozen = True
            pod.replica.settle()
            pod.replica.freeze()

    def slow(self, pod: FleetPod, factor: float, is_over: bool) -> None:
        """Everything there takes `factor` times as long as up to now, or that is over."""
        if is_over:
            pod.slow_by.remove(factor)
        else:
            pod.slow_by.append(factor)
        total = math.prod(pod.slow_by)
        self.log.event(self._now_ps, pod.number, "fault", f"steps take {total:g} times as long")
        self._set_speed(pod)

    def _set_speed(self, pod: FleetPod) -> None:
        if pod.replica is not None:
            pod.replica.slow(math.prod(pod.slow_by))

    def cut_off(self, pod: FleetPod, is_cut_off: bool) -> None:
        """The router loses its connections there and makes no new ones, or may again."""
        pod.is_cut_off = is_cut_off
        reaches = "cannot reach it" if is_cut_off else "reaches it again"
        self.log.event(self._now_ps, pod.number, "fault", f"the router {reaches}")
        self._retarget()
        if is_cut_off and pod.replica is not None:
            pod.replica.settle()
            pod.replica.disconnect("partition")
        if not is_cut_off:
            self._gateway.release()

    def stand_still(self, pod: FleetPod, is_standing: bool) -> None:
        """What routers read of it does not change any more, or does again."""
        state = "stand still" if is_standing else "are read again"
        self.log.event(self._now_ps, pod.number, "fault", f"its metrics {state}")
        if pod.replica_index is not None:
            self._gateway.stand_still(pod.replica_index, is_standing)

    def evict(self, pod: FleetPod, reason: str, grace_ps: int | None) -> None:
        """It is deleted, and given so long; None = what its template says."""
        pod.abort_reason, pod.grace_ps = reason, grace_ps
        self._delete(pod)
        self._settle()

    def cordon(self, node: int, is_lost: bool) -> None:
        """The node takes no more pods; if lost, it is gone with the last of them."""
        self._placement.cordon(node, is_lost)
        if self._warm_pool is not None:
            self._warm_pool.lose(node, "goes with its node" if is_lost else "is drained")
            self._place()

    def uncordon(self, node: int) -> None:
        """The node takes pods again."""
        self._placement.uncordon(node)
        self._place()
        self._note()

    # --- control --------------------------------------------------------------------------

    def _update(self, max_surge: int | float, max_unavailable: int | float) -> None:
        self._revision += 1
        self._limits = rollout(self._wanted, max_surge, max_unavailable)
        self.log.event(self._now_ps, None, "update", f"revision {self._revision}")
        if self._warm_pool is not None:
            self._warm_pool.renew()
        self._settle()

    @property
    def wanted(self) -> int:
        """`spec.replicas`."""
        return self._wanted

    @property
    def num_asked(self) -> int:
        """Requests that have come to the gateway."""
        return self._gateway.num_asked

    def scale_to(self, replicas: int) -> None:
        """So many are wanted from now on."""
        self._wanted = replicas
        self._settle()

    def _note(self) -> None:
        ready = sum(pod.is_ready for pod in self._live)
        present = sum(not pod.is_deleted for pod in self._live)
        draining = len(self._live) - present
        self.log.counts(self._now_ps, self._wanted, present, ready, draining)

    # --- what others see ------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """Engines that run now."""
        return [e.replica for e in self._containers.by_replica if e.replica is not None]

    def gauges(self, now_ps: int) -> tuple[Gauges, ...]:
        """Of every engine there was, by index; those that are gone as they were last."""
        return tuple(engine.gauges(now_ps) for engine in self._containers.by_replica)

    @property
    def engines(self) -> tuple[EngineStats, ...]:
        """Counters of every engine there was, by index."""
        return tuple(engine.stats for engine in self._containers.by_replica)

    def policies(self) -> tuple[dict[str, Any], ...]:
        """Statistics of every engine's policy; empty in the stock modes."""
        found = (engine.policy_stats for engine in self._containers.by_replica)
        return tuple(policy for policy in found if policy is not None)

    def alive_ps(self, end_ps: int) -> tuple[int, ...]:
        """How long every engine was there."""
        return tuple(engine.alive_ps(end_ps) for engine in self._containers.by_replica)

    def history(self, end_ps: int) -> FleetHistory:
        """What became of the pods until the run's end."""
        template = self._spec.template
        gpus = template.gpus * template.pods_per_replica
        lives = tuple(pod.life(gpus, end_ps) for pod in self.pods)
        spent = total(life.gpu_time for life in lives)
        warm = None if self._warm_pool is None else self._warm_pool.history(end_ps)
        if warm is not None:
            kept = GpuTime(reserve_ps=gpus * (warm.standby_ps + warm.placeholder_ps))
            spent = total((spent, kept))
        forecasts = self._control.forecasts
        return FleetHistory(
            self.log, lives, spent, gpus, template.pods_per_replica, warm, forecasts
        )

    def finish_run(self, end_ps: int) -> None:
        """The run is over: whatever is inside is recorded as unfinished."""
        for engine in self._containers.by_replica:
            if engine.replica is not None:
                engine.replica.finish_run(end_ps)

    @property
    def _now_ps(self) -> int:
        return self._timer.now_ps


def _index(pod: FleetPod) -> int:
    """Of its engine, or a negative number of its own."""
    return -1 - pod.number if pod.replica_index is None else pod.replica_index
