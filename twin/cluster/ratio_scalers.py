"""AIBrix' two pod autoscalers, for comparison with the HPA: APA and KPA.

Rules as in vllm-project/aibrix (pkg/controller/podautoscaler/algorithm): both multiply the replicas that are *asked
for* by a ratio that only running pods enter, so that a slow start is counted again at every look.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twin.clock import PS


@dataclass(frozen=True)
class RatioSpec:
    """A PodAutoscaler of AIBrix."""

    min_replicas: int
    max_replicas: int
    target: float
    """Of the metric, per pod."""
    up_tolerance: float = 0.1
    down_tolerance: float = 0.1
    max_up_rate: float = 2.0
    """At most so many times the replicas at once."""
    max_down_rate: float = 2.0
    """At least the replicas divided by so many at once."""
    up_cooldown_ps: int = 0
    down_cooldown_ps: int = 300 * PS
    stable_window_ps: int = 180 * PS
    panic_window_ps: int = 60 * PS
    panic_threshold: float = 2.0
    """Panic while the ratio of the panic window's mean to the stable one's is above it."""
    guard_pending: bool = False
    """Do not grow while pods are not ready: the guard that AIBrix added later (aibrix#2671)."""


@dataclass(frozen=True)
class RatioState:
    """What the autoscaler remembers."""

    last_change_ps: int | None = None
    panic_since_ps: int | None = None
    """None = no panic."""


@dataclass(frozen=True)
class RatioDecision:
    """What one look came to."""

    current: int
    desired: int
    reason: str
    state: RatioState


def apa(
    spec: RatioSpec,
    state: RatioState,
    values: Sequence[float],
    replicas: int,
    ready: int,
    now_ps: int,
) -> RatioDecision:
    """Application-specific Pod Autoscaling: `values` are those of the pods that answered."""
    if not values:
        return RatioDecision(replicas, replicas, "no pod answered", state)
    ratio = sum(values) / len(values) / spec.target
    desired, why = replicas, f"ratio {ratio:.3g} within tolerance"
    if ratio > 1 + spec.up_tolerance:
        desired = min(math.ceil(replicas * ratio), math.ceil(replicas * spec.max_up_rate))
        why = f"ratio {ratio:.3g} asks for {desired}"
    elif ratio < 1 - spec.down_tolerance:
        desired = max(math.ceil(replicas * ratio), math.floor(replicas / spec.max_down_rate))
        why = f"ratio {ratio:.3g} asks for {desired}"
    return _settle(spec, state, replicas, desired, why, now_ps, ready)


def kpa(
    spec: RatioSpec,
    state: RatioState,
    stable: float | None,
    panic: float | None,
    replicas: int,
    ready: int,
    now_ps: int,
) -> RatioDecision:
    """Knative's rule: `stable` and `panic` are the means over their windows of the metric summed over the pods."""
    if stable is None or panic is None:
        return RatioDecision(replicas, replicas, "no value in the window", state)
    since_ps = state.panic_since_ps
    if stable > 0 and panic / stable > spec.panic_threshold:
        since_ps = now_ps
    elif since_ps is not None and now_ps - since_ps >= spec.stable_window_ps:
        since_ps = None
    state = RatioState(state.last_change_ps, since_ps)
    value = stable if since_ps is None else max(panic, stable)
    lowest = math.floor(replicas / spec.max_down_rate)
    highest = max(1, math.ceil(replicas * spec.max_up_rate))
    desired = min(max(math.ceil(value / spec.target), lowest), highest)
    why = f"{'panic' if since_ps is not None else 'stable'} value {value:.3g} asks for {desired}"
    if since_ps is not None and desired < replicas:
        return RatioDecision(replicas, replicas, f"{why}; no shrinking in panic", state)
    return _settle(spec, state, replicas, desired, why, now_ps, ready)


def _settle(
    spec: RatioSpec,
    state: RatioState,
    replicas: int,
    desired: int,
    why: str,
    now_ps: int,
    ready: int,
) -> RatioDecision:
    """Bounds, the guard and the cooldowns."""
    if desired > replicas and spec.guard_pending and ready < replicas:
        return RatioDecision(
            replicas, replicas, f"{why}; {replicas - ready} pods are pending", state
        )
    bounded = min(max(desired, spec.min_replicas), spec.max_replicas)
    if bounded != desired:
        why += f"; the bounds make it {bounded}"
    if bounded == replicas:
        return RatioDecision(replicas, replicas, why, state)
    cooldown_ps = spec.up_cooldown_ps if bounded > replicas else spec.down_cooldown_ps
    last_ps = state.last_change_ps
    if last_ps is not None and now_ps - last_ps < cooldown_ps:
        return RatioDecision(replicas, replicas, f"{why}; cooling down", state)
    return RatioDecision(replicas, bounded, why, RatioState(now_ps, state.panic_since_ps))
