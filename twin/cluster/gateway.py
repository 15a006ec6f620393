"""Where requests wait or are turned away while pods come and go: routed to those that are Ready, held or refused."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final, Protocol

from twin.clock import NEVER_PS
from twin.cluster.admission import Admission, AdmissionSpec
from twin.cluster.outliers import Outliers
from twin.cluster.router import Load, Router, Routing
from twin.cluster.routers import ROUTERS
from twin.cluster.signals import Frozen, Own, Poll, Source
from twin.cluster.timer import Timer
from twin.cluster.waiting import GatewayWaits, WaitMeter
from twin.metrics.records import RequestRecord
from twin.workload.request import Request

NO_FAULT: Final = ("client_disconnect",)
"""Reasons of aborted requests that say nothing of the replica."""


class Receiver(Source, Protocol):
    """Something that requests are sent to."""

    def submit(self, request: Request) -> None:
        """A request reaches it now."""

    def settle(self) -> None:
        """Whatever happens there now has happened: what is submitted at this instant comes after it."""

    def disconnect(self, reason: str, request: int | None = None) -> None:
        """The connections of all clients, or of that of one request, break now."""


class Refusing:
    """Stands where requests go although nobody answers: each is refused at once, and it always looks idle."""

    num_inflight = 0
    num_waiting = 0
    kv_usage = 0.0

    def __init__(self, gateway: "Gateway", index: int) -> None:
        """`index` is that of its replica, or negative where there is none."""
        self._gateway = gateway
        self.index = index

    def submit(self, request: Request) -> None:
        self._gateway.refuse_for(self.index, request)

    def settle(self) -> None:
        """Nothing happens there."""

    def disconnect(self, reason: str, request: int | None = None) -> None:
        """Nobody is connected."""

    def kv_used(self, now_ps: int) -> float:
        return 0.0


class Gateway:
    """Routes to the receivers of the moment what `admission` lets through.

    With `holds` it keeps requests while there is no receiver, else it refuses them. `on_record` is told of requests
    that no receiver took.
    """

    def __init__(
        self,
        routing: Routing,
        admission: AdmissionSpec | None,
        holds: bool,
        on_record: Callable[[RequestRecord], None],
        timer: Timer,
        may_leave: bool = False,
    ) -> None:
        chance = Random(f"{routing.seed}/routing")
        make = ROUTERS[routing.router]
        self._routers: list[Router] = [make(chance, routing.guard) for _ in range(routing.routers)]
        self._pick_router = Random(f"{routing.seed}/routers")
        self._poll = Poll(routing.poll_ps)
        self._is_polled = bool(routing.poll_ps)
        self._is_limited = admission is not None
        self._max_wait_ps = None if admission is None else admission.max_wait_ps
        self._admission = Admission(admission or AdmissionSpec())
        self._holds = holds
        self._on_record = on_record
        self._timer = timer
        self._receivers: Sequence[Receiver] = ()
        self._loads: Sequence[Load] = ()
        self._is_releasing = False
        # Of several routers: request -> which one sent it, and by router: replica -> its requests in flight.
        self._sent_by: dict[int, int] = {}
        self._own: list[dict[int, int]] = [{} for _ in self._routers]
        self._where: dict[int, Receiver] | None = {} if may_leave else None
        self._routing = routing
        self._frozen: dict[int, Frozen] = {}  # where the state is not polled
        self._outliers = None if routing.ejection is None else Outliers(routing.ejection)
        self._picks = routing.stale_after_ps is not None or self._outliers is not None
        self._meter = WaitMeter()
        self.sent_stale = 0
        """Attempts that were sent while the state of all replicas was stale."""
        self.num_asked = 0
        """Attempts that have come."""

    @property
    def num_held(self) -> int:
        """Requests that no receiver has taken."""
        return self._admission.num_waiting

    @property
    def next_poll_ps(self) -> int:
        """When `catch_up` is due next."""
        return self._poll.next_ps if self._is_polled else NEVER_PS

    def catch_up(self, until_ps: int) -> None:
        """The next event comes at `until_ps`: read the replicas as of the last poll before it."""
        self._poll.catch_up(until_ps, self._receivers)
        self._loads = self._poll.loads(self._receivers)

    def retarget(self, receivers: Sequence[Receiver]) -> None:
        """Requests go to these from now on."""
        self._receivers = receivers
        if self._admission.num_waiting:
            self._measure()
        if self._is_polled:
            self._loads = self._poll.loads(receivers)
        elif self._frozen:
            self._loads = [self._frozen.get(r.index, r) for r in receivers]
        else:
            self._loads = receivers

    def submit(self, request: Request) -> None:
        """A request comes now, before whatever else happens at this instant."""
        self.num_asked += 1
        if not self._receivers and not self._holds:
            self.refuse(request, "no_ready_pod")
        elif not self._is_limited and self._receivers:
            self._send(request)
        elif not self._admission.lets_in(request, self._timer.now_ps):
            self.refuse(request, "rate_limit")
        else:
            self._admission.wait(request)
            self._send_on()
            dropped = self._admission.overflow(request.tier)
            self._measure()
            if dropped is not request:
                self._set_limit(request)
            if dropped is not None:
                self.refuse(dropped, "queue_full" if dropped is request else "shed")

    def _send_on(self) -> None:
        """Whoever may go on from the queue does."""
        while self._receivers:
            request = self._admission.next(len(self._receivers))
            if request is None:
                return
            if self._is_limited:
                self._admission.send(request)
            self._send(request)

    def _send(self, request: Request) -> None:
        """To one of the receivers, of which there is at least one."""
        if self._picks:
            positions = self._usable()
            if positions is None:
                self.refuse(request, "stale_metrics")
                return
            loads = [self._loads[i] for i in positions]
            receiver = self._receivers[positions[self._choose(request, loads)]]
        else:
            receiver = self._receivers[self._choose(request, self._loads)]
        if self._where is not None:
            self._where[request.index] = receiver
        receiver.submit(request)

    def _usable(self) -> Sequence[int] | None:
        """Positions of the replicas that a router may choose from; None = a request is refused."""
        now_ps, loads = self._timer.now_ps, self._loads
        positions: Sequence[int] = range(len(loads))
        if self._outliers is not None:
            positions = self._outliers.healthy([load.index for load in loads], now_ps)
        limit_ps = self._routing.stale_after_ps
        if limit_ps is None:
            return positions
        fresh = [i for i in positions if now_ps - getattr(loads[i], "at_ps", now_ps) <= limit_ps]
        if fresh:
            return fresh
        if self._routing.when_stale == "refuse":
            return None
        self.sent_stale += 1
        return positions

    def _choose(self, request: Request, loads: Sequence[Load]) -> int:
        if len(self._routers) == 1:
            return self._routers[0](request, loads)
        router = self._pick_router.randrange(len(self._routers))
        own = self._own[router]
        if not self._is_polled:
            loads = [Own(load, own.get(load.index, 0)) for load in loads]
        chosen = self._routers[router](request, loads)
        replica = loads[chosen].index
        own[replica] = own.get(replica, 0) + 1
        self._sent_by[request.index] = router
        return chosen

    def ended(self, record: RequestRecord) -> None:
        """A request has ended."""
        if self._where is not None:
            self._where.pop(record.index, None)
        if self._outliers is not None and record.replica is not None:
            if record.outcome == "completed":
                self._outliers.succeeded(record.replica)
            elif record.outcome == "aborted" and record.reason not in NO_FAULT:
                self._fails(record.replica)
        if self._sent_by:
            router = self._sent_by.pop(record.index, None)
            if router is not None and record.replica is not None:
                self._own[router][record.replica] -= 1
        if self._is_limited and self._admission.ended(record.index):
            if self._admission.num_waiting:
                self._release_soon()

    def _release_soon(self) -> None:
        if not self._is_releasing:
            self._is_releasing = True
            self._timer.at(0, self.release)

    def release(self) -> None:
        """Send on what waits, as far as it may go, after whatever else happens at this instant."""
        self._is_releasing = False
        if self._admission.num_waiting and self._receivers:
            for receiver in self._receivers:
                receiver.settle()
            self._send_on()
            self._measure()

    def _fails(self, replica: int) -> None:
        assert self._outliers is not None
        present = [receiver.index for receiver in self._receivers]
        self._outliers.failed(replica, present, self._timer.now_ps)

    @property
    def ejections(self) -> Sequence[tuple[int, int, int]]:
        """(instant, replica, until) of each."""
        return () if self._outliers is None else tuple(self._outliers.ejections)

    def refuse_for(self, replica: int, request: Request) -> None:
        """The replica does not answer."""
        if self._outliers is not None:
            self._fails(replica)
        self.refuse(request, "connection_refused")

    def stand_still(self, replica: int, is_standing: bool) -> None:
        """What routers read of the replica does not change any more, or does again."""
        if is_standing:
            self._poll.standing.add(replica)
            self._frozen |= {
                r.index: Frozen(r, self._timer.now_ps)
                for r in self._receivers
                if r.index == replica
            }
        else:
            self._poll.standing.discard(replica)
            self._frozen.pop(replica, None)
        self.retarget(self._receivers)

    def leave(self, request: Request, reason: str) -> None:
        """The client of a request closes its connection, wherever the request is."""
        now_ps = self._timer.now_ps
        if self._admission.leave(request):
            self._measure()
            self._on_record(unserved(request, now_ps, "aborted", reason))
        elif self._where is not None and request.index in self._where:
            receiver = self._where[request.index]
            receiver.settle()
            if request.index in self._where:  # nothing has ended it just now
                receiver.disconnect(reason, request.index)

    def refuse(self, request: Request, reason: str) -> None:
        """Turn a request away (503)."""
        self._on_record(unserved(request, self._timer.now_ps, "refused", reason))

    def _measure(self) -> None:
        """The queue may have changed."""
        waiting = self._admission.num_waiting
        self._meter.change(self._timer.now_ps, waiting, bool(self._receivers))

    def finish_run(self, end_ps: int) -> GatewayWaits:
        """The run is over: what waits is unfinished."""
        waits = self._meter.finish(end_ps)
        for request in self._admission.leave_all():
            self._on_record(unserved(request, None, "unfinished", "end_of_run"))
        return waits

    def _set_limit(self, request: Request) -> None:
        """However long it waits here, its client may leave before, or the gateway lose its patience."""
        ends = [
            (timeout_ps, f"timeout:{kind}")
            for kind, timeout_ps in (
                ("ttft", request.ttft_timeout_ps),
                ("total", request.total_timeout_ps),
            )
            if timeout_ps is not None
        ]
        if self._max_wait_ps is not None:
            ends.append((self._max_wait_ps, "queue_timeout"))
        if ends and self._admission.is_waiting(request):
            timeout_ps, reason = min(ends)
            delay_ps = max(0, request.arrival_ps + timeout_ps - self._timer.now_ps)
            self._timer.at(delay_ps, partial(self._give_up, request, reason))

    def _give_up(self, request: Request, reason: str) -> None:
        """Its time here is over, if it is still here."""
        if self._admission.leave(request):
            self._measure()
            if reason == "queue_timeout":
                self.refuse(request, reason)
            else:
                self._on_record(unserved(request, self._timer.now_ps, "timed_out", reason))


def unserved(request: Request, finish_ps: int | None, outcome: str, reason: str) -> RequestRecord:
    """What is kept of a request that no replica took and whose client saw its end at `finish_ps` (None: never)."""
    return RequestRecord(
        index=request.index,
        tier=request.tier,
        tenant=request.tenant,
        session=request.session,
        stream=request.stream,
        replica=None,
        arrival_ps=request.arrival_ps,
        first_scheduled_ps=None,
        first_token_ps=None,
        finish_ps=finish_ps,
        prompt_tokens=request.prompt_tokens,
        output_tokens=0,
        outcome=outcome,
        reason=reason,
    )
