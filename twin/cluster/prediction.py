"""Predictive scaling: from the rate of requests that the gateway has seen to replicas that are there in time.

A forecast looks `horizon` ahead, which should be as long as a start. Its highest rate over what one replica takes is
the number of replicas: a floor under the autoscaler, a metric of its own, or the only thing that decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twin.clock import PS, to_seconds
from twin.cluster.forecast import ahead, make_forecaster


@dataclass(frozen=True)
class PredictionSpec:
    """What is forecast and what it drives."""

    forecaster: str
    """Name in twin.cluster.forecast.FORECASTERS, or a dotted path."""
    per_replica: float
    """Requests a second that one replica takes."""
    interval_ps: int = 60 * PS
    """Over which requests are counted; a forecast is made after each."""
    horizon_ps: int = 600 * PS
    """How far a forecast looks ahead, rounded up to intervals."""
    season_ps: int = 86_400 * PS
    history: Sequence[float] = ()
    """Rates of the intervals before the run, oldest first, per second."""
    metric: str | None = None
    """Name of the external metric that it becomes; None = it is a floor, or decides alone."""

    @property
    def steps(self) -> int:
        """Intervals that a forecast looks ahead."""
        return -(-self.horizon_ps // self.interval_ps)

    @property
    def season(self) -> int:
        """Intervals of a season."""
        return max(1, round(self.season_ps / self.interval_ps))


@dataclass(frozen=True)
class Forecast:
    """One forecast."""

    at_ps: int
    observed: float | None
    """Rate of the interval that has just ended, per second; None at the start of the run."""
    rate: float | None
    """Highest rate expected within the horizon; None = it cannot tell."""
    replicas: int | None
    """That it takes."""
    error: str | None = None
    """How the forecaster failed."""


class Predictor:
    """Counts what comes and forecasts. It is told of each interval when that is over, and of nothing later."""

    def __init__(self, spec: PredictionSpec) -> None:
        self.spec = spec
        self._forecaster = make_forecaster(spec.forecaster)
        self._rates = list(spec.history)
        self._counted = 0
        self.log: list[Forecast] = []
        """All forecasts, oldest first."""

    def begin(self) -> None:
        """A forecast from what was before the run."""
        self._foresee(0, None)

    def observe(self, now_ps: int, requests: int) -> None:
        """An interval is over; `requests` have come since the beginning of the run."""
        rate = (requests - self._counted) / to_seconds(self.spec.interval_ps)
        self._counted = requests
        self._rates.append(rate)
        self._foresee(now_ps, rate)

    def _foresee(self, now_ps: int, observed: float | None) -> None:
        spec = self.spec
        found = ahead(self._forecaster, self._rates, spec.season, spec.steps)
        if isinstance(found, str):
            self.log.append(Forecast(now_ps, observed, None, None, found))
        elif found is None:
            self.log.append(Forecast(now_ps, observed, None, None))
        else:
            self.log.append(
                Forecast(now_ps, observed, found, replicas_for(found, spec.per_replica))
            )

    @property
    def last(self) -> Forecast:
        """The newest."""
        return self.log[-1]


def replicas_for(rate: float, per_replica: float) -> int:
    """How many replicas take so many requests a second. A billionth too many needs no further one."""
    return math.ceil(rate / per_replica - 1e-9)


def realised(log: Sequence[Forecast], steps: int) -> list[tuple[Forecast, float]]:
    """Forecasts whose horizon is over, each with the highest rate that was then observed within it."""
    rates = [forecast.observed for forecast in log]
    found = []
    for i, forecast in enumerate(log):
        later = [rate for rate in rates[i + 1 : i + 1 + steps] if rate is not None]
        if forecast.rate is not None and len(later) == steps:
            found.append((forecast, max(later)))
    return found
