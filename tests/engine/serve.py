"""A replica and its clients on one clock, watched after every event."""

from collections.abc import Callable, Iterable
from typing import Any

import simpy
from simpy.core import EmptySchedule
from simpy.events import URGENT

from tests.parity.workload import Workload
from twin.clock import to_ps
from twin.engine.config import EngineConfig
from twin.engine.replica import Replica
from twin.metrics.records import RequestRecord
from twin.scheduling import PolicyConfig, policy_config
from twin.step_time.model import StepTime
from twin.workload.request import Request


class Service:
    """Submits `requests` to one replica when they are due; `run` lets time pass until nothing more happens."""

    def __init__(
        self,
        requests: Iterable[Request],
        config: EngineConfig,
        step_time: StepTime,
        policy: str | PolicyConfig | None = None,
        priorities: dict[str, int] | None = None,
    ) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.records: list[RequestRecord] = []
        """In the order in which requests ended."""
        self.events = 0
        self.replica = Replica(
            self.env,
            config,
            step_time,
            policy_config(policy) if isinstance(policy, str) else policy,
            self.records.append,
            priorities=priorities,
        )
        for request in requests:
            event = self.env.event()
            event._ok, event._value = True, None
            event.callbacks.append(lambda _, request=request: self.replica.submit(request))
            self.env.schedule(event, priority=URGENT, delay=request.arrival_ps)

    def run(
        self,
        until_ps: int | None = None,
        watch: Callable[["Service", int], Any] = lambda service, since_ps: None,
    ) -> "Service":
        """Let events happen until none is left or the next lies beyond `until_ps`.

        `watch(service, since_ps)` is called before each event, when `env.now` is still the instant of the one before,
        with the instant of the coming one.
        """
        while until_ps is None or self.env.peek() <= until_ps:
            watch(self, self.env.peek())
            try:
                self.env.step()
            except EmptySchedule:
                break
            self.events += 1
        return self

    def record(self, index: int) -> RequestRecord:
        """The record of request `index`."""
        (record,) = [record for record in self.records if record.index == index]
        return record


def requests_of(workload: Workload) -> list[Request]:
    """The traffic of a workload of the parity harness. Clients that disconnect do so by a total time-out."""
    return [
        Request(
            index=ask.seq,
            arrival_ps=to_ps(ask.arrival),
            prompt=ask.prompt,
            prompt_tokens=ask.prompt_tokens,
            output_tokens=ask.output_tokens or workload.config.max_model_len,
            max_tokens=ask.max_tokens,
            reply=ask.reply,
            tier=ask.tier,
            tenant=ask.tenant,
            ttft_timeout_ps=_ps(ask.ttft_timeout),
            total_timeout_ps=_ps(
                ask.total_timeout if ask.leaves is None else ask.leaves - ask.arrival
            ),
        )
        for ask in workload.asks
    ]


def _ps(seconds: float | None) -> int | None:
    return None if seconds is None else to_ps(seconds)
