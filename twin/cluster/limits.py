"""From a proposal to a replica count: stabilisation windows, rate limits, bounds.

Kubernetes' rules of 1.37. The log is plain data that is handed in and out; entries too old to count are overwritten
one at a time, as the controller does.
"""

import math
from collections.abc import Sequence

from twin.cluster.specs import MAX_REPLICAS, Behavior, Controller, ScalingLog, ScalingRules

Stamped = tuple[tuple[int, int], ...]
"""(number, instant) pairs."""


# --- without behavior ---------------------------------------------------------------------


def stabilize(
    recommendations: Stamped, desired: int, window_ps: int, now_ps: int
) -> tuple[int, Stamped]:
    """(highest proposal of the window, the log with this one): shrinking waits, growing does not."""
    highest, old = desired, None
    for i, (replicas, at_ps) in enumerate(recommendations):
        if at_ps < now_ps - window_ps:
            old = i
        else:
            highest = max(highest, replicas)
    return highest, _put(recommendations, old, (desired, now_ps))


def clamp(current: int, desired: int, least: int, most: int) -> tuple[int, str]:
    """(replicas, reason) within the bounds and at most max(2 * current, 4)."""
    fastest = max(2 * current, 4)
    if desired < least:
        return least, "TooFewReplicas"
    if desired > min(most, fastest):
        return (fastest, "ScaleUpLimit") if most > fastest else (most, "TooManyReplicas")
    return desired, "DesiredWithinRange"


# --- with behavior ------------------------------------------------------------------------


def stabilize_both(
    recommendations: Stamped, current: int, desired: int, up_ps: int, down_ps: int, now_ps: int
) -> tuple[int, Stamped]:
    """(current, moved as little as the proposals of each window allow; the log with this one)."""
    lowest = highest = desired
    old = None
    for i, (replicas, at_ps) in enumerate(recommendations):
        age_ps = now_ps - at_ps
        if age_ps < up_ps:
            lowest = min(lowest, replicas)
        if age_ps < down_ps:
            highest = max(highest, replicas)
        if age_ps > up_ps and age_ps > down_ps:
            old = i
    stabilized = min(max(current, lowest), highest)
    return stabilized, _put(recommendations, old, (desired, now_ps))


def limit_rate(
    current: int,
    desired: int,
    least: int,
    most: int,
    behavior: Behavior,
    log: ScalingLog,
    now_ps: int,
) -> tuple[int, str]:
    """(replicas, reason) within the bounds and what the policies of the direction allow."""
    if desired > current:
        limit = max(current, up_limit(current, behavior.up, log, now_ps))
        bound, reason = (limit, "ScaleUpLimit") if most > limit else (most, "TooManyReplicas")
        if desired > bound:
            return bound, reason
    elif desired < current:
        limit = min(current, down_limit(current, behavior.down, log, now_ps))
        bound, reason = (limit, "ScaleDownLimit") if least < limit else (least, "TooFewReplicas")
        if desired < bound:
            return bound, reason
    return desired, "DesiredWithinRange"


def up_limit(current: int, rules: ScalingRules, log: ScalingLog, now_ps: int) -> int:
    """The most replicas that the policies allow now; may be below `current` after recent events."""
    if rules.select == "Disabled":
        return current
    limits = []
    for policy in rules.policies:
        start = _at_start_of_period(current, log, policy.period_ps, now_ps)
        if policy.kind == "Pods":
            limits.append(start + policy.value)
        else:
            limits.append(math.ceil(start * (1 + policy.value / 100)))
    return min((min if rules.select == "Min" else max)(limits), MAX_REPLICAS)


def down_limit(current: int, rules: ScalingRules, log: ScalingLog, now_ps: int) -> int:
    """The fewest replicas that the policies allow now; may be above `current` after recent events."""
    if rules.select == "Disabled":
        return current
    limits = []
    for policy in rules.policies:
        start = _at_start_of_period(current, log, policy.period_ps, now_ps)
        if policy.kind == "Pods":
            limits.append(start - policy.value)
        else:
            limits.append(int(start * (1 - policy.value / 100)))
    return (max if rules.select == "Min" else min)(limits)


def _at_start_of_period(current: int, log: ScalingLog, period_ps: int, now_ps: int) -> int:
    added = change_within(log.up_events, period_ps, now_ps)
    removed = change_within(log.down_events, period_ps, now_ps)
    return current - added + removed


def change_within(events: Stamped, period_ps: int, now_ps: int) -> int:
    """Replicas that the events of the last `period_ps` changed."""
    return sum(change for change, at_ps in events if now_ps - at_ps < period_ps)


def store_event(events: Stamped, change: int, rules: ScalingRules | None, now_ps: int) -> Stamped:
    """The events with one more, in the place of the last that no policy looks at any more; none without `rules`."""
    if rules is None:
        return events
    longest_ps = max((policy.period_ps for policy in rules.policies), default=0)
    old = [i for i, (_, at_ps) in enumerate(events) if now_ps - at_ps > longest_ps]
    return _put(events, old[-1] if old else None, (change, now_ps))


def scaled(
    log: ScalingLog, current: int, desired: int, behavior: Behavior | None, now_ps: int
) -> tuple[Stamped, Stamped]:
    """(up events, down events) after the target went from `current` to `desired`."""
    up, down = log.up_events, log.down_events
    if behavior is not None and desired > current:
        up = store_event(up, desired - current, behavior.up, now_ps)
    elif behavior is not None and desired < current:
        down = store_event(down, current - desired, behavior.down, now_ps)
    return up, down


def windows(behavior: Behavior, controller: Controller) -> tuple[int, int]:
    """(up, down) stabilisation windows in picoseconds."""
    up, down = behavior.up.stabilization_ps, behavior.down.stabilization_ps
    return up or 0, controller.downscale_stabilization_ps if down is None else down


def _put(values: Sequence[tuple[int, int]], at: int | None, value: tuple[int, int]) -> Stamped:
    if at is None:
        return (*values, value)
    return (*values[:at], value, *values[at + 1 :])
