"""The control loops of a fleet: scrapes, forecasts and the looks of its autoscaler, each on its own period.

They end when nothing is left to happen.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from simpy.events import EventPriority

from twin.clock import PS
from twin.cluster.fleet_log import FleetLog
from twin.cluster.fleet_pod import FleetPod
from twin.cluster.fleet_spec import FleetSpec, ScalerSpec
from twin.cluster.prediction import Forecast, Predictor
from twin.cluster.promql import Vector
from twin.cluster.scalers import (
    FloorScaler,
    HpaScaler,
    KedaScaler,
    RatioScaler,
    SaturationScaler,
    Scaler,
    View,
)
from twin.cluster.scraper import Scraper
from twin.cluster.specs import Failed, Pod, Scale
from twin.cluster.timer import AFTER_REPLICAS, LAST, Timer

WEEK_MINUTES = 7 * 24 * 60


class Scalable(Protocol):
    """The fleet as its control loops see it."""

    @property
    def live(self) -> Sequence[FleetPod]:
        """Pods that are not gone, by number."""

    @property
    def wanted(self) -> int:
        """`spec.replicas`."""

    @property
    def num_asked(self) -> int:
        """Requests that have come to the gateway."""

    def is_over(self) -> bool:
        """Whether no request is inside and none will come."""

    def scale_to(self, replicas: int) -> None:
        """So many are wanted from now on."""


class Control:
    """Looks at a fleet and says how many replicas it should have."""

    def __init__(self, fleet: Scalable, timer: Timer, spec: FleetSpec, log: FleetLog) -> None:
        self._fleet = fleet
        self._timer = timer
        self._spec = spec
        self._log = log
        self.scraper = Scraper(spec)
        self._scaler = make_scaler(spec.scaler)
        prediction = spec.scaler.prediction
        self._predictor = None if prediction is None else Predictor(prediction)

    def begin(self) -> None:
        """The loops begin."""
        if self.scraper.is_needed:
            period_ps = self._spec.path.scrape_interval_ps
            self._every(period_ps, self.scraper.offset_ps, self._scrape, AFTER_REPLICAS)
        if self._predictor is not None:
            self._predictor.begin()
            period_ps = self._predictor.spec.interval_ps
            self._every(period_ps, period_ps, self._foresee, AFTER_REPLICAS)
        if self._scaler is not None:
            for loop, period_ps in self._scaler.loops.items():
                self._every(period_ps, period_ps, partial(self._look, loop), LAST)

    @property
    def forecasts(self) -> tuple[Forecast, ...]:
        """All that were made."""
        return () if self._predictor is None else tuple(self._predictor.log)

    def _scrape(self) -> None:
        self.scraper.scrape(self._fleet.live, self._timer.now_ps)

    def _foresee(self) -> None:
        assert self._predictor is not None
        self._predictor.observe(self._timer.now_ps, self._fleet.num_asked)

    def _look(self, loop: str) -> None:
        assert self._scaler is not None
        now_ps, live, wanted = self._timer.now_ps, self._fleet.live, self._fleet.wanted
        ready = sum(pod.is_ready for pod in live)
        minute = (self._spec.start_minute + now_ps // (60 * PS)) % WEEK_MINUTES
        view = View(
            now_ps,
            minute,
            [_seen(pod) for pod in live],
            Scale(wanted, sum(not pod.is_deleted for pod in live)),
            ready,
            self._ask,
            *self._floor(minute),
        )
        look = replace(self._scaler.look(loop, view), ready=ready)
        self._log.look(look)
        if look.desired != wanted:
            self._fleet.scale_to(look.desired)

    def _floor(self, minute: int) -> tuple[int, str, str]:
        """(replicas wanted at least, by whom, why there is no forecast) in that minute of the week."""
        scheduled = self._spec.scaler.scheduled(minute)
        who = "the schedule" if scheduled else ""
        predictor = self._predictor
        if predictor is None or predictor.spec.metric is not None:
            return scheduled, who, ""
        last = predictor.last
        if last.rate is None or last.replicas is None:
            return scheduled, who, last.error or "it cannot tell yet"
        if last.replicas <= scheduled:
            return scheduled, who, ""
        return last.replicas, f"the forecast of {last.rate:.3g}/s", ""

    def _ask(self, metric: str) -> Vector | Failed:
        """What the metrics path answers; the forecast is an external metric without pods."""
        predictor = self._predictor
        if predictor is None or predictor.spec.metric != metric:
            return self.scraper.ask(metric, self._timer.now_ps)
        last = predictor.last
        if last.rate is None:
            return Failed(f"no forecast: {last.error or 'it cannot tell yet'}")
        return {None: last.rate}

    def _every(
        self, period_ps: int, delay_ps: int, act: Callable[[], None], priority: EventPriority
    ) -> None:
        def again() -> None:
            act()
            if not self._fleet.is_over():
                self._timer.at(period_ps, again, priority)

        self._timer.at(delay_ps, again, priority)


def _seen(pod: FleetPod) -> Pod:
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
    if spec.alone is not None:
        return FloorScaler(*spec.alone, spec.controller.sync_period_ps, spec.names[0])
    return None
