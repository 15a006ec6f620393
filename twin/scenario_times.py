"""From times as a scenario file writes them to what draws them."""

from math import log
from statistics import NormalDist
from typing import Any

from twin import scenario_distributions as times
from twin import scenario_pods as form
from twin.clock import to_ps
from twin.cluster.cold_start import PhaseTime, TriangularTime
from twin.workload.sessions import Always, ExponentialTime, LognormalTime, UniformTime

_Z95 = NormalDist().inv_cdf(0.95)


def phase_time(time: Any) -> PhaseTime:
    """A number of seconds, or a distribution of them."""
    match time:
        case form.TriangularTime(triangular=[low, mode, high]):
            return TriangularTime(to_ps(low), to_ps(mode), to_ps(high))
        case times.ExponentialTime():
            return ExponentialTime(to_ps(time.exponential))
        case times.UniformTime(uniform=[low, high]):
            return UniformTime(to_ps(low), to_ps(high))
        case times.LognormalTime(lognormal=shape):
            mu = log(shape.median)
            return LognormalTime(mu, (log(shape.p95) - mu) / _Z95)
    return Always(to_ps(time))
