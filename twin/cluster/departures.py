"""How a pod goes: deletion, preStop, SIGTERM, what may still end, the kill."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from twin.cluster.containers import Containers
from twin.cluster.fleet_log import FleetLog
from twin.cluster.fleet_pod import FleetPod
from twin.cluster.fleet_spec import PodTemplate
from twin.cluster.timer import Timer


class Departures:
    """Lets pods of a template go. `on_change` is called when requests may not be sent where they were, `on_gone` when
    a pod is gone for good.
    """

    def __init__(
        self,
        timer: Timer,
        template: PodTemplate,
        log: FleetLog,
        containers: Containers,
        on_change: Callable[[], None],
        on_gone: "OnGone",
    ) -> None:
        self._timer = timer
        self._at = timer.at
        self._template = template
        self._log = log
        self._containers = containers
        self._on_change = on_change
        self._on_gone = on_gone

    def delete(self, pod: FleetPod) -> None:
        """The pod gets its deletion timestamp."""
        now_ps, template = self._timer.now_ps, self._template
        was_ready = pod.is_ready
        if pod.replica is not None:
            pod.busy_at_delete_ps = sum(e.gauges(now_ps).busy_ps for e in pod.engines)
        pod.deleted_ps = now_ps
        pod.end_ready(now_ps)
        self._log.event(now_ps, pod.number, "deleted", f"{pod.num_inflight} requests inside")
        if pod.replica is None:
            self._go(pod)
            self._on_change()
            return
        if was_ready and template.endpoint_lag_ps:
            pod.lags = True
            self._at(template.endpoint_lag_ps, partial(self._end_lag, pod))
        self._on_change()
        stop_ps = min(template.pre_stop_ps, self._grace_ps(pod))
        self._at(stop_ps, partial(self._stop, pod))

    def _grace_ps(self, pod: FleetPod) -> int:
        return self._template.grace_ps if pod.grace_ps is None else pod.grace_ps

    def _end_lag(self, pod: FleetPod) -> None:
        pod.lags = False
        self._on_change()

    def _stop(self, pod: FleetPod) -> None:
        """SIGTERM: the server takes no more requests and gives those inside its time-out."""
        now_ps, template = self._timer.now_ps, self._template
        assert pod.deleted_ps is not None
        pod.stops_ps = now_ps
        self._on_change()
        rest_ps = min(template.shutdown_timeout_ps, pod.deleted_ps + self._grace_ps(pod) - now_ps)
        if pod.num_inflight and rest_ps > 0:
            self._at(rest_ps, partial(self._finish_stop, pod))
        else:
            self._finish_stop(pod)

    def ended(self, pod: FleetPod) -> None:
        """A request of the pod has ended: it may go now, if it waited for that one."""
        if pod.stops_ps is not None and not pod.num_inflight and pod.gone_ps is None:
            # Records of a kill come while the replica is being closed; the event finds it done.
            self._at(0, partial(self._finish_stop, pod))

    def _finish_stop(self, pod: FleetPod) -> None:
        """Whatever is still inside is aborted, and the pod goes."""
        if pod.gone_ps is not None:
            return
        lost = pod.num_inflight
        pod.gone_ps = self._timer.now_ps  # before the records come back
        self._containers.end_engine(pod, pod.abort_reason)
        self._go(pod, lost)

    def _go(self, pod: FleetPod, lost: int = 0) -> None:
        pod.gone_ps = self._timer.now_ps
        self._on_gone(pod, lost)


class OnGone(Protocol):
    """Told of a pod that is gone, and of how many requests were aborted with it."""

    def __call__(self, pod: FleetPod, lost: int) -> None:
        """The pod is gone."""
