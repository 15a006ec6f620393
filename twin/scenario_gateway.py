"""From the keys of `cluster:` that say how requests reach replicas to plain objects.

Each function takes a part of the checked document and `origin`, which knows where things were written.
"""

from collections.abc import Sequence

from twin import scenario_cluster as form
from twin.clock import to_ps
from twin.cluster.admission import AdmissionSpec, Limits
from twin.cluster.clients import ClientsSpec, Retries
from twin.cluster.leaving import Disconnects
from twin.cluster.outliers import Ejection
from twin.cluster.router import Routing
from twin.cluster.routers import BY_INFLIGHT, BY_STATE, GUARDED, ROUTERS
from twin.scenario_clients import Retries as RetriesForm
from twin.scenario_faults import Origin, unknown
from twin.scenario_times import phase_time
from twin.scenario_traffic import Stream as StreamForm
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
    return Routing(
        name,
        written.routers,
        to_ps(written.poll_interval),
        written.guard,
        None if written.stale_after is None else to_ps(written.stale_after),
        written.when_stale or "avoid",
        _ejection(written.ejection),
        seed,
    )


def _ejection(written: form.Ejection | None) -> Ejection | None:
    if written is None:
        return None
    return Ejection(
        written.consecutive_5xx,
        to_ps(written.interval),
        to_ps(written.base_ejection_time),
        to_ps(written.max_ejection_time),
        written.max_ejection_percent,
        written.healthy_panic_threshold,
    )


def admission_of(
    cluster: form.Cluster,
    tiers: Sequence[str],
    traffic: Sequence[Stream],
    streams: Sequence[StreamForm],
    origin: Origin,
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
    heeds = [r for r in (cluster.retries, *(s.retries for s in streams)) if r is not None]
    limited: list[tuple[tuple[str, ...], form.Limits]] = [((), written)]
    limited += [(("tiers", tier), limits) for tier, limits in written.tiers.items()]
    for path, limits in limited:
        if limits.retry_after is not None and not any(r.heeds_retry_after for r in heeds):
            origin.fail(
                (*place, *path, "retry_after"), "changes nothing: no client heeds it (retries)"
            )
    return AdmissionSpec(
        _limits(written),
        written.max_inflight_per_replica,
        written.max_inflight_tokens,
        None if written.max_wait is None else to_ps(written.max_wait),
        tuple(written.order),
        {tier: _limits(limits) for tier, limits in written.tiers.items()},
    )


def _limits(written: form.Limits) -> Limits:
    retry_after = None if written.retry_after is None else to_ps(written.retry_after)
    return Limits(written.max_inflight, written.max_queue, written.rate, written.burst, retry_after)


def clients_of(cluster: form.Cluster, traffic: Sequence[StreamForm], seed: int) -> ClientsSpec:
    """What clients do whose request fails, and which of them leave by themselves."""
    leaving = {}
    for i, stream in enumerate(traffic):
        written = stream.disconnects
        if written is not None:
            leaving[i] = Disconnects(
                written.share,
                None if written.after is None else phase_time(written.after),
                None if written.at is None else to_ps(written.at),
            )
    return ClientsSpec(
        None if cluster.retries is None else _retries(cluster.retries, seed),
        {i: _retries(s.retries, seed) for i, s in enumerate(traffic) if s.retries is not None},
        leaving,
        any(fault.kind == "partition" for fault in cluster.faults),
        seed,
    )


def _retries(written: RetriesForm, seed: int) -> Retries:
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
