"""llm-d's saturation rule (workload-variant-autoscaler), for comparison with the HPA: one replica up or down at a time.

A replica is saturated by its KV cache or its queue. The rule looks at the spare room of those that are not, and waits
while pods that were ordered are not ready. One variant only: the cheapest is also the dearest.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SaturationSpec:
    """Thresholds of the rule, with its published defaults."""

    min_replicas: int
    max_replicas: int
    kv_threshold: float = 0.80
    """KV use from which a replica is saturated."""
    queue_threshold: float = 5.0
    """Waiting requests from which a replica is saturated."""
    spare_kv: float = 0.1
    """Mean spare KV use below which a replica is added."""
    spare_queue: float = 3.0
    """Mean spare queue below which a replica is added."""
    least_unsaturated: int = 2
    """A replica goes only if so many are not saturated."""


@dataclass(frozen=True)
class Load:
    """One replica's highest values of the last minute."""

    kv: float
    """Share of KV blocks in use."""
    waiting: float
    """Requests."""


def saturation(
    spec: SaturationSpec, loads: Sequence[Load], replicas: int, ready: int
) -> tuple[int, str]:
    """(replicas wanted, why): `loads` are those of the replicas that answered, `replicas` were asked for."""
    if not loads:
        return replicas, "no replica answered"
    free = [
        load
        for load in loads
        if load.kv < spec.kv_threshold and load.waiting < spec.queue_threshold
    ]
    pending = replicas - ready
    kv = _mean([spec.kv_threshold - load.kv for load in free])
    queue = _mean([spec.queue_threshold - load.waiting for load in free])
    seen = f"{len(free)} of {len(loads)} not saturated, spare KV {kv:.2g}, spare queue {queue:.2g}"
    if kv < spec.spare_kv or queue < spec.spare_queue:
        if pending > 0:
            return replicas, f"{seen}: up, but {pending} pods are pending"
        return min(replicas + 1, spec.max_replicas), f"{seen}: up"
    if len(free) >= spec.least_unsaturated and pending <= 0 and replicas > spec.min_replicas:
        rest = len(free) - 1
        kv_after = spec.kv_threshold - sum(load.kv for load in free) / rest
        queue_after = spec.queue_threshold - sum(load.waiting for load in free) / rest
        if kv_after >= spec.spare_kv and queue_after >= spec.spare_queue:
            return replicas - 1, f"{seen}: the load fits one replica less"
    return max(replicas, spec.min_replicas), f"{seen}: enough"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
