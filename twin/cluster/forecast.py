"""What will be asked for soon? Forecasters of a rate: functions of what was observed, and of nothing else.

A forecaster is called with the rates of past intervals (oldest first, per second), the intervals of a season and how
many intervals to look ahead. It answers with a rate for each of these, or with none while it cannot tell. All are made
by the functions in FORECASTERS, so that what one learns stays in one run.
"""

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Forecaster = Callable[[Sequence[float], int, int], Sequence[float]]
"""(rates of past intervals, intervals of a season, steps ahead) -> the rates of the next `steps` intervals, or ()."""

NEAR_PEAK = 0.8
"""Share of a season's highest rate from which before_peak calls an interval part of the peak."""

LARGEST_RATE = 1e9
"""Requests a second that a forecaster may expect at most, as `per_replica` at most is."""

SEASONS_FITTED = 3
"""Seasons that Holt-Winters looks back on."""


def last_value(history: Sequence[float], season: int, steps: int) -> Sequence[float]:
    """It stays as it is: what everything else has to beat."""
    return [history[-1]] * steps if history else ()


def seasonal_naive(history: Sequence[float], season: int, steps: int) -> Sequence[float]:
    """As it was at this time of the last season."""
    if len(history) < season:
        return ()
    last = history[-season:]
    return [last[step % season] for step in range(steps)]


def before_peak(history: Sequence[float], season: int, steps: int) -> Sequence[float]:
    """The last season's peak from `steps` intervals before it until its end; else as it is.

    The rule "so many minutes before the 9 o'clock peak", with a peak that is found in the last season: the intervals
    within NEAR_PEAK of its highest.
    """
    if len(history) < season:
        return ()
    last = history[-season:]
    highest = max(last)
    is_near = any(last[step % season] >= NEAR_PEAK * highest for step in range(steps))
    return [max(highest, history[-1]) if is_near else history[-1]] * steps


class HoltWinters:
    """Exponential smoothing with an additive season, by statsmodels; its parameters are fitted once a season."""

    def __init__(self) -> None:
        self._parameters: dict[str, Any] = {}
        self._fitted_at = 0

    def __call__(self, history: Sequence[float], season: int, steps: int) -> Sequence[float]:
        if len(history) < 2 * season:
            return ()
        from statsmodels.tsa.holtwinters import ExponentialSmoothing

        recent = list(history[-SEASONS_FITTED * season :])
        model = ExponentialSmoothing(
            recent, seasonal="add", seasonal_periods=season, initialization_method="heuristic"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an optimum at the border is one
            if not self._parameters or len(history) >= self._fitted_at + season:
                self._fitted_at = len(history)
                found = model.fit().params
                self._parameters = {
                    name: float(found[name]) for name in ("smoothing_level", "smoothing_seasonal")
                }
            forecast = model.fit(optimized=False, **self._parameters).forecast(steps)
        return [max(0.0, float(rate)) for rate in forecast]


FORECASTERS: dict[str, Callable[[], Forecaster]] = {
    "last_value": lambda: last_value,
    "seasonal_naive": lambda: seasonal_naive,
    "before_peak": lambda: before_peak,
    "holt_winters": HoltWinters,
}
"""Name -> what makes such a forecaster."""


def make_forecaster(name: str) -> Forecaster:
    """The forecaster called `name`, or the user's own at the dotted path `name`. Raises ValueError if there is none."""
    if name == "holt_winters" and find_spec("statsmodels") is None:
        raise ValueError("holt_winters needs statsmodels: pip install 'vllm-twin[forecast]'")
    if name in FORECASTERS:
        return FORECASTERS[name]()
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"{name!r} is not one of {', '.join(FORECASTERS)} and no dotted path of a function"
        )
    try:
        found = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a user's module may do
        reason = error if isinstance(error, ImportError | AttributeError) else repr(error)
        raise ValueError(f"{name!r} cannot be imported: {reason}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def ahead(
    forecaster: Forecaster, history: Sequence[float], season: int, steps: int
) -> float | str | None:
    """The highest rate it expects within the next `steps` intervals; None = it cannot tell yet; a text = its failure.

    A failure is told and never replaced: a forecaster that breaks must not pass for one that says "as it is".
    """
    try:
        found = [float(rate) for rate in forecaster(tuple(history), season, steps)]
    except (Exception, SystemExit) as error:  # whatever a user's function may do
        return f"{type(error).__name__}: {error}"
    if not found:
        return None
    if len(found) != steps:
        return f"it answered {len(found)} rates where {steps} were asked for"
    wrong = [rate for rate in found if not 0 <= rate <= LARGEST_RATE]
    if wrong:
        return f"it answered {wrong[0]:g}, which is no rate from 0 to {LARGEST_RATE:g} requests/s"
    return max(found)
