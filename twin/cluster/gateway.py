"""Where requests wait or are turned away while pods come and go: routed to those that are Ready, held or refused."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Protocol

from twin.cluster.admission import Admission, AdmissionSpec
from twin.cluster.router import Load, Router, Routing
from twin.cluster.routers import ROUTERS
from twin.cluster.signals import Own, Poll, Source
from twin.cluster.timer import Timer
from twin.metrics.records import RequestRecord
from twin.workload.request import Request


class Receiver(Source, Protocol):
    """Something that requests are sent to."""

    def submit(self, request: Request) -> None:
        """A request reaches it now."""

    def settle(self) -> None:
        """Whatever happens there now has happened: what is submitted at this instant comes after it."""


class Refusing:
    """Stands where requests go although nobody answers: each is refused at once, and it always looks idle."""

    num_inflight = num_waiting = 0
    kv_usage = 0.0

    def __init__(self, gateway: "Gateway", index: int) -> None:
        """`index` is that of its replica, or negative where there is none."""
        self._gateway = gateway
        self.index = index

    def submit(self, request: Request) -> None:
        self._gateway.refuse(request, "connection_refused")

    def settle(self) -> None:
        """Nothing happens there."""

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
        self.num_asked = 0
        """Attempts that have come."""

    @property
    def num_held(self) -> int:
        """Requests that no receiver has taken."""
        return self._admission.num_waiting

    @property
    def next_poll_ps(self) -> float:
        """When `catch_up` is due next."""
        return self._poll.next_ps if self._is_polled else inf

    def catch_up(self, until_ps: int) -> None:
        """The next event comes at `until_ps`: read the replicas as of the last poll before it."""
        self._poll.catch_up(until_ps, self._receivers)
        self._loads = self._poll.loads(self._receivers)

    def retarget(self, receivers: Sequence[Receiver]) -> None:
        """Requests go to these from now on."""
        self._receivers = receivers
        self._loads = self._poll.loads(receivers) if self._is_polled else receivers

    def submit(self, request: Request) -> None:
        """A request comes now, before whatever else happens at this instant."""
        self.num_asked += 1
        if not self._receivers and not self._holds:
            self.refuse(request, "no_ready_pod")
        elif not self._is_limited and self._receivers:
            self._receivers[self._choose(request)].submit(request)
        elif not self._admission.lets_in(request, self._timer.now_ps):
            self.refuse(request, "rate_limit")
        else:
            self._admission.wait(request)
            self._send_on()
            dropped = self._admission.overflow(request.tier)
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
            self._receivers[self._choose(request)].submit(request)

    def _choose(self, request: Request) -> int:
        if len(self._routers) == 1:
            return self._routers[0](request, self._loads)
        router = self._pick_router.randrange(len(self._routers))
        own = self._own[router]
        loads = self._loads
        if not self._is_polled:
            loads = [Own(load, own.get(load.index, 0)) for load in loads]
        chosen = self._routers[router](request, loads)
        replica = self._receivers[chosen].index
        own[replica] = own.get(replica, 0) + 1
        self._sent_by[request.index] = router
        return chosen

    def ended(self, record: RequestRecord) -> None:
        """A request has ended."""
        router = self._sent_by.pop(record.index, None)
        if router is not None and record.replica is not None:
            self._own[router][record.replica] -= 1
        if self._admission.ended(record.index) and self._admission.num_waiting:
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

    def refuse(self, request: Request, reason: str) -> None:
        """Turn a request away (503)."""
        self._on_record(unserved(request, self._timer.now_ps, "refused", reason))

    def finish_run(self) -> None:
        """The run is over: what waits is unfinished."""
        for request in self._admission.leave_all():
            self._on_record(unserved(request, None, "unfinished", "end_of_run"))

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
