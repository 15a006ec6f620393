"""What do clients do whose request fails? They ask again, after a while, or give up.

Every further try is a request of its own to the gateway and the engine, under a number that no other has; the run sees
one request that ends once, with its number of attempts.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from twin.cluster.admission import REFUSALS
from twin.cluster.timer import ARRIVAL, Timer
from twin.metrics.records import RequestRecord
from twin.workload.request import Request

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


class Clients:
    """Stands between the traffic and the gateway. `submit` is the gateway's.

    Time-outs are those of each attempt, from its own arrival.
    """

    def __init__(
        self,
        retries: Retries | None,
        retry_after_ps: int | None,
        submit: Callable[[Request], None],
        timer: Timer,
    ) -> None:
        self._retries = retries
        self._retry_after_ps = retry_after_ps
        self._submit = submit
        self._timer = timer
        self._rng = Random("" if retries is None else f"{retries.seed}/retries")
        self._tries: dict[int, tuple[Request, int]] = {}  # number -> (the request, attempts so far)
        self._failed: dict[int, RequestRecord] = {}  # by request, while its client waits
        self._number = FIRST_RETRY

    def ask(self, request: Request) -> None:
        """A client asks for the first time."""
        if self._retries is not None:
            self._tries[request.index] = (request, 1)
        self._submit(request)

    def ended(self, record: RequestRecord) -> RequestRecord | None:
        """An attempt has ended: what is kept of the request, or None if its client tries again."""
        tried = self._tries.pop(record.index, None)
        if tried is None or self._retries is None:
            return record
        request, attempts = tried
        _belongs_to(record, request, attempts)
        if not self._tries_again(record, request, attempts):
            return record
        return None

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
        retries, now_ps = self._retries, self._timer.now_ps
        assert retries is not None
        is_over = attempts >= retries.attempts or record.reason == "end_of_run"
        if is_over or record.outcome not in retries.outcomes:
            return False
        backoff = min(
            retries.backoff_ps * retries.multiplier ** (attempts - 1), retries.max_backoff_ps
        )
        wait_ps = round(backoff * (1 - retries.jitter * self._rng.random()))
        if retries.heeds_retry_after and self._retry_after_ps and record.reason in REFUSALS:
            wait_ps = max(wait_ps, self._retry_after_ps)
        since_ps = now_ps if record.finish_ps is None else record.finish_ps
        # An engine notices late that a client has left; and what came at this instant is not undone.
        due_ps = max(since_ps + wait_ps, now_ps + 1)
        if retries.give_up_ps is not None and due_ps > request.arrival_ps + retries.give_up_ps:
            return False
        self._failed[request.index] = record
        self._timer.at(due_ps - now_ps, lambda: self._again(request, attempts + 1), ARRIVAL)
        return True

    def _again(self, request: Request, attempt: int) -> None:
        del self._failed[request.index]
        number = self._number
        self._number += 1
        self._tries[number] = (request, attempt)
        self._submit(dataclasses.replace(request, index=number, arrival_ps=self._timer.now_ps))


def _belongs_to(record: RequestRecord, request: Request, attempts: int) -> None:
    """The record of an attempt becomes that of its request."""
    if record.estimated_wait_ps is not None:
        record.estimated_wait_ps += record.arrival_ps - request.arrival_ps
    record.index, record.arrival_ps, record.attempts = request.index, request.arrival_ps, attempts
