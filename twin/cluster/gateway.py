"""Where requests wait or are turned away while pods come and go: routed to those that are Ready, held or refused."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from twin.cluster.router import Router
from twin.metrics.records import RequestRecord
from twin.workload.request import Request


class Receiver(Protocol):
    """Something that requests are sent to."""

    @property
    def num_inflight(self) -> int:
        """Requests sent there that have not ended."""

    def submit(self, request: Request) -> None:
        """A request reaches it now."""


class Refusing:
    """Stands where requests go although nobody answers: each is refused at once, and it always looks idle."""

    num_inflight = 0

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    def submit(self, request: Request) -> None:
        self._gateway.refuse(request, "connection_refused")


class Gateway:
    """Routes to the receivers of the moment.

    With `holds` it keeps requests while there is none, else it refuses them. `now_ps` tells the time, `at` calls back
    after a delay, `on_record` is told of requests that no receiver took.
    """

    def __init__(
        self,
        route: Router,
        holds: bool,
        on_record: Callable[[RequestRecord], None],
        now_ps: Callable[[], int],
        at: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._route = route
        self._holds = holds
        self._on_record = on_record
        self._now_ps = now_ps
        self._at = at
        self._receivers: Sequence[Receiver] = ()
        self._routed = 0
        self._held: deque[Request] = deque()

    @property
    def num_held(self) -> int:
        """Requests that no receiver has taken."""
        return len(self._held)

    def retarget(self, receivers: Sequence[Receiver]) -> None:
        """Requests go to these from now on."""
        self._receivers = receivers

    def submit(self, request: Request) -> None:
        """A request comes now."""
        if self._receivers:
            target = self._route(self._routed, self._receivers)
            self._routed += 1
            self._receivers[target].submit(request)
        elif self._holds:
            self._hold(request)
        else:
            self.refuse(request, "no_ready_pod")

    def release(self) -> None:
        """Send on what is held, if there is somebody."""
        while self._held and self._receivers:
            self.submit(self._held.popleft())

    def refuse(self, request: Request, reason: str) -> None:
        """Turn a request away (503)."""
        self._on_record(_lost(request, self._now_ps(), "refused", reason))

    def finish_run(self) -> None:
        """The run is over: what is held is unfinished."""
        while self._held:
            self._on_record(_lost(self._held.popleft(), None, "unfinished", "end_of_run"))

    def _hold(self, request: Request) -> None:
        self._held.append(request)
        patience = [
            (timeout_ps, f"timeout:{kind}")
            for kind, timeout_ps in (
                ("ttft", request.ttft_timeout_ps),
                ("total", request.total_timeout_ps),
            )
            if timeout_ps is not None
        ]
        if patience:
            timeout_ps, reason = min(patience)
            delay_ps = max(0, request.arrival_ps + timeout_ps - self._now_ps())
            self._at(delay_ps, partial(self._give_up, request, reason))

    def _give_up(self, request: Request, reason: str) -> None:
        """Its client leaves, if it is still here."""
        if request in self._held:
            self._held.remove(request)
            self._on_record(_lost(request, self._now_ps(), "timed_out", reason))


def _lost(request: Request, finish_ps: int | None, outcome: str, reason: str) -> RequestRecord:
    """What is kept of a request that no replica took."""
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
