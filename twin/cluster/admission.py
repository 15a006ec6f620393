"""Who may go on to the replicas, who waits at the gateway, and who is turned away: limits, buckets and a queue by tier.

Nothing here knows the clock or a replica; `Admission` is handed the time with each call.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from twin.clock import PS
from twin.workload.request import Request


@dataclass(frozen=True)
class Limits:
    """Of all requests, or of those of one tier; None = no limit."""

    max_inflight: int | None = None
    """Requests sent on that have not ended."""
    max_queue: int | None = None
    """Requests that wait at the gateway; further ones are turned away."""
    rate: float | None = None
    """Requests a second that a token bucket lets in, whether they then wait or not."""
    burst: int = 1
    """Requests that a full bucket lets in at once."""
    retry_after_ps: int | None = None
    """Header Retry-After of a refusal; None = that of all requests, or none."""


@dataclass(frozen=True)
class AdmissionSpec:
    """What a gateway lets through."""

    limits: Limits = Limits()
    per_replica: int | None = None
    """Requests in flight for each replica that takes requests; None = no such limit."""
    max_tokens: int | None = None
    """Prompt and declared output tokens of all requests in flight together; one that is larger goes alone."""
    max_wait_ps: int | None = None
    """After so long at the gateway a request is turned away; None = it waits on."""
    order: tuple[str, ...] = ()
    """Tiers from the first to the last to go on from the queue; others come after them, by arrival."""
    tiers: Mapping[str, Limits] = field(default_factory=dict)

    @property
    def retry_after_ps(self) -> int | None:
        """Header Retry-After of a refusal, where its tier has none of its own; None = there is none."""
        return self.limits.retry_after_ps

    def retry_after(self, tier: str) -> int | None:
        """Header Retry-After, in picoseconds, of a refusal of that tier; None = there is none."""
        own = self.tiers.get(tier)
        if own is not None and own.retry_after_ps is not None:
            return own.retry_after_ps
        return self.retry_after_ps


REFUSALS = ("rate_limit", "queue_full", "shed", "queue_timeout")
"""Reasons with which the gateway turns a request away (429, and 503 after a wait)."""


class Bucket:
    """Lets `rate` requests a second in, and `burst` at once after a rest. It is full at the beginning."""

    def __init__(self, rate: float, burst: int) -> None:
        self._cost_ps = max(1, round(PS / rate))
        self._full_ps = burst * self._cost_ps
        self._credit_ps = self._full_ps
        self._at_ps = 0

    def has_token(self, now_ps: int) -> bool:
        """Whether a request gets in now."""
        self._credit_ps = min(self._full_ps, self._credit_ps + now_ps - self._at_ps)
        self._at_ps = now_ps
        return self._credit_ps >= self._cost_ps

    def take(self) -> None:
        """The token of a request that gets in is gone."""
        self._credit_ps -= self._cost_ps


class Admission:
    """Counts what is in flight and keeps what waits, first by the order of tiers, then by arrival."""

    def __init__(self, spec: AdmissionSpec) -> None:
        self._spec = spec
        self._ranks = {tier: rank for rank, tier in enumerate(spec.order)}
        named = {"": spec.limits, **spec.tiers}
        self._buckets = {
            tier: Bucket(limits.rate, limits.burst)
            for tier, limits in named.items()
            if limits.rate is not None
        }
        self._sent: dict[int, Request] = {}
        self._inflight: dict[str, int] = {}
        self._tokens = 0
        self._queues: dict[str, deque[tuple[int, Request]]] = {}  # by tier: (number, request)
        self._number = 0
        self.num_waiting = 0
        """Requests in the queue."""

    @property
    def num_inflight(self) -> int:
        """Requests sent on that have not ended."""
        return len(self._sent)

    def lets_in(self, request: Request, now_ps: int) -> bool:
        """Whether the buckets take it, that of its tier and that of all; if not, it costs no token."""
        buckets = [self._buckets[tier] for tier in (request.tier, "") if tier in self._buckets]
        if not all(bucket.has_token(now_ps) for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.take()
        return True

    def _has_room(self, request: Request, replicas: int) -> bool:
        """Whether it may be sent on, there being so many replicas, as far as the limits of all go."""
        spec, sent = self._spec, len(self._sent)
        if spec.limits.max_inflight is not None and sent >= spec.limits.max_inflight:
            return False
        if spec.per_replica is not None and sent >= spec.per_replica * replicas:
            return False
        fits = spec.max_tokens is None or self._tokens + tokens_of(request) <= spec.max_tokens
        return fits or not sent

    def _is_full(self, tier: str) -> bool:
        """Whether the tier's own limit stops it."""
        own = self._spec.tiers.get(tier)
        if own is None or own.max_inflight is None:
            return False
        return self._inflight.get(tier, 0) >= own.max_inflight

    def send(self, request: Request) -> None:
        """It is in flight from now on."""
        self._sent[request.index] = request
        self._inflight[request.tier] = self._inflight.get(request.tier, 0) + 1
        self._tokens += tokens_of(request)

    def ended(self, index: int) -> bool:
        """It has ended; whether it was in flight."""
        request = self._sent.pop(index, None)
        if request is None:
            return False
        self._inflight[request.tier] -= 1
        self._tokens -= tokens_of(request)
        return True

    # --- the queue ------------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        """It waits from now on."""
        self._queues.setdefault(request.tier, deque()).append((self._number, request))
        self._number += 1
        self.num_waiting += 1

    def next(self, replicas: int) -> Request | None:
        """Take the first in the queue that may be sent on. A tier at its own limit holds up no other."""
        heads = [
            (self._rank(tier), queue[0], tier)
            for tier, queue in self._queues.items()
            if queue and not self._is_full(tier)
        ]
        if not heads:
            return None
        _, (_, request), tier = min(heads)
        if not self._has_room(request, replicas):
            return None
        self._queues[tier].popleft()
        self.num_waiting -= 1
        return request

    def overflow(self, tier: str) -> Request | None:
        """After one of this tier has come to wait: take whom there is no place for, the newest of the last tier."""
        own = self._spec.tiers.get(tier)
        if own is not None and own.max_queue is not None:
            if len(self._queues.get(tier, ())) > own.max_queue:
                return self._take_last(tier)
        limit = self._spec.limits.max_queue
        if limit is None or self.num_waiting <= limit:
            return None
        last = max(
            (self._rank(tier), queue[-1][0], tier) for tier, queue in self._queues.items() if queue
        )
        return self._take_last(last[2])

    def _take_last(self, tier: str) -> Request:
        self.num_waiting -= 1
        return self._queues[tier].pop()[1]

    def is_waiting(self, request: Request) -> bool:
        """Whether it is in the queue; asked of the newest of its tier, that is quick."""
        queue = self._queues.get(request.tier, deque())
        return any(waiting is request for _, waiting in reversed(queue))

    def leave(self, request: Request) -> bool:
        """It leaves the queue; whether it was there."""
        queue = self._queues.get(request.tier, deque())
        for place, (_, waiting) in enumerate(queue):
            if waiting is request:
                del queue[place]
                self.num_waiting -= 1
                return True
        return False

    def leave_all(self) -> list[Request]:
        """Everybody leaves, in the order in which they came."""
        found = sorted(entry for queue in self._queues.values() for entry in queue)
        self._queues.clear()
        self.num_waiting = 0
        return [request for _, request in found]

    def _rank(self, tier: str) -> int:
        return self._ranks.get(tier, len(self._ranks))


def tokens_of(request: Request) -> int:
    """What a gateway can tell of the KV cache that a request may take: its prompt and the output it declares."""
    return request.prompt_tokens + (request.max_tokens or 0)
