"""The pods of a deployment on the simulation's clock: they come, start, serve, drain and go, as an autoscaler asks.

The fleet owns the pods and tells the router which of them are Ready. A pod has a replica of the engine from the moment
its server answers until it is gone. Control loops (scrapes, the autoscaler) end when nothing is left to happen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from simpy.events import EventPriority

from twin.clock import PS
from twin.cluster.cold_start import PHASES, Starter
from twin.cluster.cost import total
from twin.cluster.deployment import Rollout, plan, rollout
from twin.cluster.faults import schedule
from twin.cluster.fleet_log import FleetHistory, FleetLog
from twin.cluster.fleet_pod import FleetPod, PodEngine
from twin.cluster.fleet_spec import FleetSpec, ScalerSpec
from twin.cluster.gateway import Gateway, Refusing
from twin.cluster.nodes import NodePool
from twin.cluster.probes import BACKOFF_RESET_PS, backoff_ps, fate
from twin.cluster.scalers import (
    HpaScaler,
    KedaScaler,
    RatioScaler,
    SaturationScaler,
    Scaler,
    View,
)
from twin.cluster.scraper import Scraper
from twin.cluster.specs import Pod, Scale
from twin.cluster.timer import AFTER_REPLICAS, LAST, Timer
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
        self._make_replica = make_replica
        self._is_over = is_over
        self._starter = Starter(spec.cold_start, spec.seed)
        self._nodes = None if spec.nodes is None else NodePool(spec.nodes)
        self._scraper = Scraper(spec)
        self._scaler = make_scaler(spec.scaler)
        self._wanted = spec.replicas
        self._revision = 0
        self._limits = Rollout(0, 0)
        self.pods: list[FleetPod] = []
        """Every pod there ever was, by number."""
        self._live: list[FleetPod] = []  # not gone
        self._by_replica: list[PodEngine] = []
        self._has_begun = False  # pods that are made before were there already
        self._gateway = gateway
        self.log = FleetLog()
        self._node_draws: Callable[[], int] | None = None
        if spec.nodes is not None:
            self._node_draws = self._scraper.stream("node", spec.nodes.provision)
        self._begin()

    def _begin(self) -> None:
        spec = self._spec
        self._settle()
        self._has_begun = True
        self._retarget()
        self._note()
        for update in spec.updates:
            self._at(update.at_ps, partial(self._update, update.max_surge, update.max_unavailable))
        schedule(spec.faults, self, self._timer)
        if self._scraper.is_needed:
            self._every(
                spec.path.scrape_interval_ps, self._scraper.offset_ps, self._scrape, AFTER_REPLICAS
            )
        if self._scaler is not None:
            for loop, period_ps in self._scaler.loops.items():
                self._every(period_ps, period_ps, partial(self._look, loop), LAST)

    # --- requests -------------------------------------------------------------------------

    def ended(self, record: RequestRecord) -> None:
        """A request has ended: its pod's exporter has seen it, and a pod that waited for it may go."""
        if record.replica is None:
            return
        pod = self._by_replica[record.replica].pod
        self._scraper.observe(pod, record)
        if pod.stops_ps is not None and not pod.num_inflight and pod.gone_ps is None:
            # Records of a kill come while the replica is being closed; the event finds it done.
            self._at(0, partial(self._finish_stop, pod))

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

    def _place(self) -> None:
        """Give nodes to pods that wait for one, in the order of their creation."""
        if self._spec.obstacle is not None:
            return
        template = self._spec.template
        waiting = [pod for pod in self._live if pod.placed_ps is None and not pod.is_deleted]
        left = 0
        for pod in waiting:
            nodes: tuple[int, ...] | None = ()
            if self._nodes is not None:
                nodes = self._nodes.take(template.gpus, template.pods_per_replica)
            if nodes is None:
                left += 1
                self._tell_pending(pod)
                continue
            pod.placed_ps, pod.nodes = self._now_ps, nodes
            if self._has_begun or self._spec.starts_cold:
                self._start(pod, is_restart=False)
            else:
                self._find_ready(pod)
        if left and self._nodes is not None:
            for _ in range(self._nodes.missing(left * template.pods_per_replica, template.gpus)):
                self._nodes.ordered += 1
                assert self._node_draws is not None
                self._at(self._node_draws(), self._node_comes)

    def _tell_pending(self, pod: FleetPod) -> None:
        """Said once of a pod: no node has room for it."""
        if pod.is_pending_told or self._nodes is None:
            return
        pod.is_pending_told = True
        template = self._spec.template
        present = sum(not p.is_deleted for p in self._live)
        wanted = present * template.gpus * template.pods_per_replica
        why = f"Insufficient nvidia.com/gpu: {wanted} wanted, {self._nodes.num_gpus} there"
        self.log.event(self._now_ps, pod.number, "pending", why)

    def _node_comes(self) -> None:
        assert self._nodes is not None
        self._nodes.ordered -= 1
        number = self._nodes.add()
        self.log.event(self._now_ps, None, "node", f"node {number} is there")
        self._place()
        self._note()

    def _start(self, pod: FleetPod, is_restart: bool) -> None:
        """A container begins, after its image has come."""
        phases = self._starter.draw(is_restart)
        pod.phases.append(phases)
        image_ps = phases["image"]
        pod.attempt += 1
        self._at(image_ps, partial(self._run_container, pod, pod.attempt))
        if image_ps:
            self.log.event(self._now_ps, pod.number, "image", f"pulled in {image_ps / PS:.0f} s")

    def _find_ready(self, pod: FleetPod) -> None:
        """The pod was there before the run began."""
        now_ps = self._now_ps
        pod.phases.append(dict.fromkeys(PHASES, 0))
        pod.running_ps = pod.first_running_ps = now_ps
        self._serve(pod, pod.attempt)
        pod.ready_since_ps = pod.first_ready_ps = pod.ready_changed_ps = now_ps
        self.log.event(now_ps, pod.number, "ready", "")

    def _run_container(self, pod: FleetPod, attempt: int) -> None:
        if pod.is_deleted or pod.attempt != attempt:
            return
        now_ps = self._now_ps
        pod.running_ps = now_ps
        if pod.first_running_ps is None:
            pod.first_running_ps = now_ps
        serving_ps = sum(ps for name, ps in pod.phases[-1].items() if name != "image")
        found = fate(self._spec.probes, serving_ps)
        if found.killed_ps is None:
            self._at(serving_ps, partial(self._serve, pod, attempt))
        if found.ready_ps is not None:
            self._at(found.ready_ps, partial(self._become_ready, pod, attempt))
        if found.killed_ps is not None:
            why = (
                f"{found.killed_by} probe: it needs {serving_ps / PS:.0f} s to serve and is given "
                f"{found.killed_ps / PS:.0f} s"
            )
            self._at(found.killed_ps, partial(self._crash, pod, attempt, why))

    def _end_engine(self, pod: FleetPod, reason: str) -> None:
        """Its engine is gone, if there is one, and what is inside is aborted."""
        if pod.replica is not None:
            pod.replica.settle()
            pod.replica.kill(reason)
            pod.engines[-1].keep(self._now_ps)

    def _crash(self, pod: FleetPod, attempt: int, why: str, reason: str = "pod_crash") -> None:
        """The kubelet kills the container and starts it again after its back-off."""
        if pod.is_deleted or pod.attempt != attempt:
            return
        now_ps = self._now_ps
        assert pod.running_ps is not None
        if now_ps - pod.running_ps >= BACKOFF_RESET_PS:
            pod.restarts_in_row = 0
        wait_ps = backoff_ps(pod.restarts_in_row)
        pod.kills_ps.append(now_ps)
        pod.restarts_in_row += 1
        self.log.event(
            now_ps, pod.number, "killed", f"{why}; starts again after {wait_ps / PS:g} s"
        )
        self._end_engine(pod, reason)
        self._lose_ready(pod)
        pod.running_ps = None
        pod.attempt += 1
        if not self._is_over():  # else it would go on for ever
            self._at(wait_ps, partial(self._restart, pod, pod.attempt))
        self._note()

    def _restart(self, pod: FleetPod, attempt: int) -> None:
        if not pod.is_deleted and pod.attempt == attempt:
            self._start(pod, is_restart=True)

    def _serve(self, pod: FleetPod, attempt: int) -> None:
        """Its server answers."""
        if pod.is_deleted or pod.attempt != attempt:
            return
        index = len(self._by_replica)
        self._by_replica.append(pod.serve(index, self._make_replica(index), self._now_ps))
        self._set_speed(pod)
        if pod.is_ready:  # it was called Ready before
            self._retarget()

    def _become_ready(self, pod: FleetPod, attempt: int) -> None:
        if pod.is_deleted or pod.attempt != attempt or pod.is_ready:
            return
        pod.ready_since_ps = self._now_ps
        pod.ready_changed_ps = self._now_ps
        if pod.first_ready_ps is None:
            pod.first_ready_ps = self._now_ps
        self.log.event(self._now_ps, pod.number, "ready", "")
        self._retarget()
        self._settle()
        self._gateway.release()

    def _lose_ready(self, pod: FleetPod) -> None:
        if pod.ready_since_ps is not None:
            pod.end_ready(self._now_ps)
            self._retarget()

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
        """The pod gets its deletion timestamp."""
        now_ps, template = self._now_ps, self._spec.template
        was_ready = pod.is_ready
        if pod.replica is not None:
            pod.busy_at_delete_ps = sum(e.gauges(now_ps).busy_ps for e in pod.engines)
        pod.deleted_ps = now_ps
        pod.end_ready(now_ps)
        self.log.event(now_ps, pod.number, "deleted", f"{pod.num_inflight} requests inside")
        if pod.replica is None:
            self._go(pod)
            self._retarget()
            return
        if was_ready and template.endpoint_lag_ps:
            pod.lags = True
            self._at(template.endpoint_lag_ps, partial(self._end_lag, pod))
        self._retarget()
        stop_ps = min(template.pre_stop_ps, self._grace_ps(pod))
        self._at(stop_ps, partial(self._stop, pod))
        self._note()

    def _grace_ps(self, pod: FleetPod) -> int:
        return self._spec.template.grace_ps if pod.grace_ps is None else pod.grace_ps

    def _end_lag(self, pod: FleetPod) -> None:
        pod.lags = False
        self._retarget()

    def _stop(self, pod: FleetPod) -> None:
        """SIGTERM: the server takes no more requests and gives those inside its time-out."""
        now_ps, template = self._now_ps, self._spec.template
        assert pod.deleted_ps is not None
        pod.stops_ps = now_ps
        self._retarget()
        rest_ps = min(template.shutdown_timeout_ps, pod.deleted_ps + self._grace_ps(pod) - now_ps)
        if pod.num_inflight and rest_ps > 0:
            self._at(rest_ps, partial(self._finish_stop, pod))
        else:
            self._finish_stop(pod)

    def _finish_stop(self, pod: FleetPod) -> None:
        """Whatever is still inside is aborted, and the pod goes."""
        if pod.gone_ps is not None:
            return
        lost = pod.num_inflight
        pod.gone_ps = self._now_ps  # before the records come back
        self._end_engine(pod, pod.abort_reason)
        self._go(pod, lost)

    def _go(self, pod: FleetPod, lost: int = 0) -> None:
        now_ps = self._now_ps
        pod.gone_ps = now_ps
        self._live.remove(pod)
        self._scraper.forget(pod, now_ps)
        if self._nodes is not None and pod.nodes:
            self._nodes.give(pod.nodes, self._spec.template.gpus)
            self._watch_empty(pod.nodes)
        self.log.event(now_ps, pod.number, "gone", f"{lost} requests aborted" if lost else "")
        self._at(0, self._settle)

    def _watch_empty(self, nodes: Sequence[int]) -> None:
        assert self._nodes is not None
        limit_ps = self._nodes.spec.remove_after_ps
        if limit_ps is None:
            return
        for number in set(nodes):
            if self._nodes.is_empty(number):
                self._nodes.emptied[number] = self._now_ps
                self._at(limit_ps, partial(self._remove_node, number, self._now_ps))

    def _remove_node(self, number: int, since_ps: int) -> None:
        assert self._nodes is not None
        pool = self._nodes
        still = pool.is_empty(number) and pool.emptied.get(number) == since_ps
        if still and len(pool.free) > pool.spec.initial:
            pool.remove(number)
            self.log.event(self._now_ps, None, "node", f"node {number} is gone")

    # --- faults -----------------------------------------------------------------------------

    @property
    def live(self) -> Sequence[FleetPod]:
        """Pods that are not gone, by number."""
        return self._live

    def crash(self, pod: FleetPod, why: str, reason: str) -> None:
        """Its container ends now and is started again."""
        if pod.running_ps is not None:
            self._crash(pod, pod.attempt, why, reason)

    def freeze(self, pod: FleetPod) -> None:
        """Its engine stops, and its server goes on answering probes."""
        if pod.replica is not None:
            self.log.event(self._now_ps, pod.number, "fault", "its GPU is lost; /health is 200")
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

    def evict(self, pod: FleetPod, reason: str, grace_ps: int | None) -> None:
        """It is deleted, and given so long; None = what its template says."""
        pod.abort_reason, pod.grace_ps = reason, grace_ps
        self._delete(pod)
        self._settle()

    def cordon(self, node: int, is_lost: bool) -> None:
        """The node takes no more pods; if lost, it is gone with the last of them."""
        if self._nodes is not None and node in self._nodes.free:
            self._nodes.cordoned.add(node)
            if is_lost:
                self._nodes.lost.add(node)
            self.log.event(self._now_ps, None, "node", f"node {node} takes no more pods")

    def uncordon(self, node: int) -> None:
        """The node takes pods again."""
        if self._nodes is not None:
            self._nodes.cordoned.discard(node)
            self._place()
            self._note()

    # --- control --------------------------------------------------------------------------

    def _update(self, max_surge: int | float, max_unavailable: int | float) -> None:
        self._revision += 1
        self._limits = rollout(self._wanted, max_surge, max_unavailable)
        self.log.event(self._now_ps, None, "update", f"revision {self._revision}")
        self._settle()

    def _scrape(self) -> None:
        self._scraper.scrape(self._live, self._now_ps)

    def _look(self, loop: str) -> None:
        assert self._scaler is not None
        now_ps = self._now_ps
        pods = [self._seen(pod) for pod in self._live]
        ready = sum(pod.is_ready for pod in self._live)
        minute = (self._spec.start_minute + now_ps // (60 * PS)) % (7 * 24 * 60)
        view = View(
            now_ps,
            minute,
            pods,
            Scale(self._wanted, sum(not pod.is_deleted for pod in self._live)),
            ready,
            partial(self._scraper.ask, now_ps=now_ps),
        )
        look = replace(self._scaler.look(loop, view), ready=ready)
        self.log.look(look)
        if look.desired != self._wanted:
            self._wanted = look.desired
            self._settle()

    def _seen(self, pod: FleetPod) -> Pod:
        """The pod as the API server shows it; its Ready condition is unknown until its container runs."""
        running = pod.first_running_ps is not None
        return Pod(
            pod.name,
            "Running" if running else "Pending",
            pod.is_ready if running else None,
            pod.placed_ps,
            pod.ready_changed_ps,
            pod.is_deleted,
        )

    def _note(self) -> None:
        ready = sum(pod.is_ready for pod in self._live)
        present = sum(not pod.is_deleted for pod in self._live)
        draining = len(self._live) - present
        self.log.counts(self._now_ps, self._wanted, present, ready, draining)

    # --- what others see ------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """Engines that run now."""
        return [e.replica for e in self._by_replica if e.replica is not None]

    def gauges(self, now_ps: int) -> tuple[Gauges, ...]:
        """Of every engine there was, by index; those that are gone as they were last."""
        return tuple(engine.gauges(now_ps) for engine in self._by_replica)

    @property
    def engines(self) -> tuple[EngineStats, ...]:
        """Counters of every engine there was, by index."""
        return tuple(engine.stats for engine in self._by_replica)

    def policies(self) -> tuple[dict[str, Any], ...]:
        """Statistics of every engine's policy; empty in the stock modes."""
        found = (engine.policy_stats for engine in self._by_replica)
        return tuple(policy for policy in found if policy is not None)

    def alive_ps(self, end_ps: int) -> tuple[int, ...]:
        """How long every engine was there."""
        return tuple(engine.alive_ps(end_ps) for engine in self._by_replica)

    def history(self, end_ps: int) -> FleetHistory:
        """What became of the pods until the run's end."""
        template = self._spec.template
        gpus = template.gpus * template.pods_per_replica
        lives = tuple(pod.life(gpus, end_ps) for pod in self.pods)
        spent = total(life.gpu_time for life in lives)
        return FleetHistory(self.log, lives, spent, gpus, template.pods_per_replica)

    def finish_run(self, end_ps: int) -> None:
        """The run is over: whatever is inside is recorded as unfinished."""
        for engine in self._by_replica:
            if engine.replica is not None:
                engine.replica.finish_run(end_ps)

    # --- time -----------------------------------------------------------------------------

    def _every(
        self, period_ps: int, delay_ps: int, act: Callable[[], None], priority: EventPriority
    ) -> None:
        def again() -> None:
            act()
            if not self._is_over():
                self._at(period_ps, again, priority)

        self._at(delay_ps, again, priority)

    @property
    def _now_ps(self) -> int:
        return self._timer.now_ps


def _index(pod: FleetPod) -> int:
    """Of its engine, or a negative number of its own."""
    return -1 - pod.number if pod.replica_index is None else pod.replica_index


def make_scaler(spec: ScalerSpec) -> Scaler | None:
    """The autoscaler that the spec names; None if there is none."""
    if spec.hpa is not None:
        return HpaScaler(spec.hpa, spec.controller, spec.rivals)
    if spec.keda is not None:
        return KedaScaler(spec.keda, spec.controller)
    if spec.ratio is not None:
        return RatioScaler(spec.ratio_rule, spec.ratio, spec.period_ps)
    if spec.saturation is not None:
        return SaturationScaler(spec.saturation, spec.period_ps)
    return None
