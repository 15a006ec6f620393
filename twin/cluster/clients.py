"""What do clients do whose request fails? They ask again, after a while, or give up.

Every further try is a request of its own to the gateway and the engine, under a number that no other has; the run sees
one request that ends once, with its number of attempts.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from twin.cluster.admission import REFUSALS, AdmissionSpec
from twin.cluster.gateway import Gateway
from twin.cluster.leaving import Disconnects, Leaving
from twin.cluster.timer import ARRIVAL, Timer
from twin.compiled import remade
from twin.metrics.records import RequestRecord
from twin.workload.request import Request

CLIENT_DISCONNECT = "client_disconnect"
"""Reason of a request whose client left by itself."""

FIRST_RETRY = 1 << 40
"""Numbers of further tries begin here; those of requests are smaller."""


@dataclass(frozen=True)
class Retries:
    """How clients try again."""

    attempts: int
    """In all, the first included."""
    backoff_ps: int
    """Before the second attempt."""
    multiplier: float
    """Of the back-off, from one attempt to the next."""
    max_backoff_ps: int
    jitter: float
    """Share of the back-off that is drawn uniformly: from (1 - jitter) of it to all of it."""
    outcomes: frozenset[str]
    """After which they try again."""
    heeds_retry_after: bool
    """Whether they wait at least as long as the gateway's Retry-After says."""
    give_up_ps: int | None
    """From the first arrival on; no attempt begins later. None = only the number of attempts counts."""
    seed: int

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


@dataclass(frozen=True)
class ClientsSpec:
    """What the clients of a scenario do by themselves."""

    retries: Retries | None = None
    """None = they do not ask again."""
    of_stream: Mapping[int, Retries] = field(default_factory=dict)
    """Of streams that have their own."""
    leaving: Mapping[int, Disconnects] = field(default_factory=dict)
    """Of streams whose clients leave."""
    may_be_cut: bool = False
    """Whether connections break (partitions)."""
    seed: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


class Clients:
    """Stands between the traffic and the gateway.

    `on_end` is told of requests whose clients leave while they wait to try again. Time-outs are those of each attempt,
    from its own arrival.
    """

    def __init__(
        self,
        spec: ClientsSpec,
        admission: AdmissionSpec | None,
        gateway: Gateway,
        timer: Timer,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        self._retries = spec.retries
        self._of_stream = spec.of_stream
        self._may_be_cut = spec.may_be_cut
        self._leaving = Leaving(spec.leaving, spec.seed) if spec.leaving else None
        self._admission = admission or AdmissionSpec()
        self._gateway = gateway
        self._timer = timer
        self._on_end = on_end
        self._chances: dict[int | None, Random] = {
            i: Random(f"{own.seed}/retries/{i}") for i, own in spec.of_stream.items()
        }
        if spec.retries is not None:
            self._chances[None] = Random(f"{spec.retries.seed}/retries")
        self._is_plain = not self._chances and self._leaving is None
        self._tries: dict[int, tuple[Request, int]] = {}  # number -> (the request, attempts so far)
        self._failed: dict[int, RequestRecord] = {}  # by request, while its client waits
        self._present: dict[int, Request] = {}  # request that may be left -> its present attempt
        self._left: set[int] = set()
        self._number = FIRST_RETRY
        self.followed: Counter[tuple[str, str]] = Counter()
        """(outcome, reason) -> attempts that ended so and were followed by another."""

    def ask(self, request: Request) -> None:
        """A client asks for the first time."""
        if self._may_be_cut:
            request.may_leave = True
        if self._is_plain:
            self._gateway.submit(request)
            return
        self._tries[request.index] = (request, 1)
        if self._leaving is not None:
            delay_ps = self._leaving.delay_ps(request, self._timer.now_ps)
            if delay_ps is not None:
                request.may_leave = True
                self._present[request.index] = request
                self._timer.at(delay_ps, partial(self._leave, request))
        self._gateway.submit(request)

    def _leave(self, request: Request) -> None:
        """The client closes its connection, if it still has one."""
        failed = self._failed.pop(request.index, None)
        if failed is not None:
            failed.outcome, failed.reason = "aborted", CLIENT_DISCONNECT
            failed.finish_ps = self._timer.now_ps
            self._present.pop(request.index, None)
            self._on_end(failed)
            return
        attempt = self._present.get(request.index)
        if attempt is not None:
            self._left.add(request.index)
            self._gateway.leave(attempt, CLIENT_DISCONNECT)

    def ended(self, record: RequestRecord) -> RequestRecord | None:
        """An attempt has ended: what is kept of the request, or None if its client tries again."""
        if self._is_plain:
            return record
        tried = self._tries.pop(record.index, None)
        if tried is None:
            return record
        request, attempts = tried
        _belongs_to(record, request, attempts)
        if self._tries_again(record, request, attempts):
            return None
        self._present.pop(request.index, None)
        self._left.discard(request.index)
        return record

    def original(self, number: int) -> int:
        """The index of the request that an attempt belongs to."""
        tried = self._tries.get(number)
        return number if tried is None else tried[0].index

    def finish_run(self) -> list[RequestRecord]:
        """The run is over: requests whose clients were about to try again are unfinished."""
        waiting = list(self._failed.values())
        for record in waiting:
            record.outcome, record.reason, record.finish_ps = "unfinished", "end_of_run", None
        self._failed.clear()
        return waiting

    def _tries_again(self, record: RequestRecord, request: Request, attempts: int) -> bool:
        own = request.stream if request.stream in self._of_stream else None
        retries = self._retries if own is None else self._of_stream[own]
        if retries is None or request.index in self._left:
            return False
        now_ps = self._timer.now_ps
        is_over = attempts >= retries.attempts or record.reason == "end_of_run"
        if is_over or record.outcome not in retries.outcomes:
            return False
        backoff = min(
            retries.backoff_ps * retries.multiplier ** (attempts - 1), retries.max_backoff_ps
        )
        wait_ps = round(backoff * (1 - retries.jitter * self._chances[own].random()))
        if retries.heeds_retry_after and record.reason in REFUSALS:
            wait_ps = max(wait_ps, self._admission.retry_after(request.tier) or 0)
        since_ps = now_ps if record.finish_ps is None else record.finish_ps
        # An engine notices late that a client has left; and what came at this instant is not undone.
        due_ps = max(since_ps + wait_ps, now_ps + 1)
        if retries.give_up_ps is not None and due_ps > request.arrival_ps + retries.give_up_ps:
            return False
        self._failed[request.index] = record
        self._timer.at(due_ps - now_ps, partial(self._again, request, attempts + 1), ARRIVAL)
        return True

    def _again(self, request: Request, attempt: int) -> None:
        failed = self._failed.pop(request.index, None)
        if failed is None:
            return  # its client has left
        self.followed[failed.outcome, failed.reason] += 1
        number = self._number
        self._number += 1
        self._tries[number] = (request, attempt)
        again = dataclasses.replace(request, index=number, arrival_ps=self._timer.now_ps)
        if request.index in self._present:
            self._present[request.index] = again
        self._gateway.submit(again)


def _belongs_to(record: RequestRecord, request: Request, attempts: int) -> None:
    """The record of an attempt becomes that of its request."""
    if record.estimated_wait_ps is not None:
        record.estimated_wait_ps += record.arrival_ps - request.arrival_ps
    record.index, record.arrival_ps, record.attempts = request.index, request.arrival_ps, attempts
