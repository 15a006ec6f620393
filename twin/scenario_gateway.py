"""From the keys of `cluster:` that say how requests reach replicas to plain objects.

Each function takes a part of the checked document and `origin`, which knows where things were written.
"""

from collections.abc import Sequence

from twin import scenario_cluster as form
from twin.clock import to_ps
from twin.cluster.admission import AdmissionSpec, Limits
from twin.cluster.clients import Retries
from twin.cluster.router import Routing
from twin.cluster.routers import BY_INFLIGHT, BY_STATE, GUARDED, ROUTERS
from twin.scenario_faults import Origin, unknown
from twin.workload.streams import Stream
from twin.workload.trace import TraceStream


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


def admission_of(
    cluster: form.Cluster, tiers: Sequence[str], traffic: Sequence[Stream], origin: Origin
) -> AdmissionSpec | None:
    """What the gateway lets through. Raises InputError for tiers that no request has and keys that change nothing."""
    written, place = cluster.admission, ("cluster", "admission")
    if written is None:
        return None
    has_others = any(isinstance(stream, TraceStream) and "tier" in stream.own for stream in traffic)
    for key, named in (("order", written.order), ("tiers", list(written.tiers))):
        for tier in named:
            if tier not in tiers and not has_others:
                origin.fail((*place, key), f"no stream has this tier: {unknown(tier, tiers)}")
    if len(set(written.order)) < len(written.order):
        origin.fail((*place, "order"), f"names a tier twice: {', '.join(written.order)}")
    waits = cluster.holds_requests or any(
        limit is not None
        for limit in (
            written.max_inflight,
            written.max_inflight_per_replica,
            written.max_inflight_tokens,
            *(limits.max_inflight for limits in written.tiers.values()),
        )
    )
    queues = [(("tiers", t, "max_queue"), limits.max_queue) for t, limits in written.tiers.items()]
    for path, value in (
        (("max_queue",), written.max_queue),
        (("max_wait",), written.max_wait),
        (("order",), written.order or None),
        *queues,
    ):
        if value is not None and not waits:
            origin.fail(
                (*place, *path),
                "changes nothing: nobody waits at the gateway without a max_inflight",
            )
    if written.retry_after is not None:
        if cluster.retries is None or not cluster.retries.heeds_retry_after:
            origin.fail((*place, "retry_after"), "changes nothing: no client heeds it (retries)")
    return AdmissionSpec(
        _limits(written),
        written.max_inflight_per_replica,
        written.max_inflight_tokens,
        None if written.max_wait is None else to_ps(written.max_wait),
        tuple(written.order),
        {tier: _limits(limits) for tier, limits in written.tiers.items()},
        None if written.retry_after is None else to_ps(written.retry_after),
    )


def _limits(written: form.Limits) -> Limits:
    return Limits(written.max_inflight, written.max_queue, written.rate, written.burst)


def retries_of(cluster: form.Cluster, seed: int) -> Retries | None:
    """What clients do whose request fails."""
    written = cluster.retries
    if written is None:
        return None
    return Retries(
        written.attempts,
        to_ps(written.backoff),
        written.multiplier,
        to_ps(written.max_backoff),
        written.jitter,
        frozenset(written.outcomes),
        written.heeds_retry_after,
        None if written.give_up_after is None else to_ps(written.give_up_after),
        seed,
    )
