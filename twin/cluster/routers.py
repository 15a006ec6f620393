"""All routers by name."""

from collections.abc import Callable
from random import Random

from twin.cluster.affinity import PrefixAffinity, SessionAffinity
from twin.cluster.router import (
    PowerOfTwo,
    RoundRobin,
    Router,
    Uniform,
    least_connections,
    least_kv,
    queue_aware,
)

ROUTERS: dict[str, Callable[[Random, float | None], Router]] = {
    "round_robin": lambda rng, guard: RoundRobin(),
    "random": lambda rng, guard: Uniform(rng),
    "least_connections": lambda rng, guard: least_connections,
    "power_of_two": lambda rng, guard: PowerOfTwo(rng),
    "least_kv": lambda rng, guard: least_kv,
    "queue_aware": lambda rng, guard: queue_aware,
    "session_affinity": lambda rng, guard: SessionAffinity(guard),
    "prefix_affinity": lambda rng, guard: PrefixAffinity(guard),
}
"""Name -> what makes such a router, given its chance and the load guard of affinity."""

GUARDED = ("session_affinity", "prefix_affinity")
"""Routers that the load guard concerns."""

BY_STATE = ("least_connections", "power_of_two", "least_kv", "queue_aware", *GUARDED)
"""Routers that look at the state of replicas, the affine ones with their guard or where they have nothing to go by."""

BY_INFLIGHT = ("least_connections", "power_of_two", *GUARDED)
"""Routers that look at requests in flight first."""
