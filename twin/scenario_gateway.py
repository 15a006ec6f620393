"""From the keys of `cluster:` that say how requests reach replicas to plain objects.

Each function takes a part of the checked document and `origin`, which knows where things were written.
"""

from twin import scenario_cluster as form
from twin.clock import to_ps
from twin.cluster.router import Routing
from twin.cluster.routers import BY_INFLIGHT, BY_STATE, GUARDED, ROUTERS
from twin.scenario_faults import Origin, unknown


def routing_of(cluster: form.Cluster, seed: int, origin: Origin) -> Routing:
    """How requests are spread over the replicas. Raises InputError for keys that would change nothing."""
    name, written, empty = cluster.router, cluster.routing, form.Routing()
    if name not in ROUTERS:
        origin.fail(("cluster", "router"), unknown(name, ROUTERS))
    for key, who in (
        ("guard", GUARDED),
        ("poll_interval", BY_STATE),
        ("routers", ("round_robin", *BY_INFLIGHT)),
    ):
        if getattr(written, key) != getattr(empty, key) and name not in who:
            origin.fail(
                ("cluster", "routing", key),
                f"changes nothing for router {name}, only for {', '.join(who)}; remove it",
            )
    return Routing(name, written.routers, to_ps(written.poll_interval), written.guard, seed)
