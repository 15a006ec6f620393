"""When does the cluster act? After the arrivals and the replicas of the same instant."""

from collections.abc import Callable

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

from twin.agenda import Agenda, Entry

AFTER_REPLICAS = EventPriority(NORMAL + 1_000_000)
"""At one instant the cluster acts after the arrivals and the replicas."""

LAST = EventPriority(NORMAL + 1_000_001)
"""Autoscalers look after what happens at their instant, scrapes included."""

ARRIVAL = URGENT
"""Requests come before whatever else happens at their instant."""


class Timer:
    """Calls back at instants of the simulation's clock."""

    def __init__(self, env: simpy.Environment) -> None:
        self._agenda = Agenda(env)

    @property
    def now_ps(self) -> int:
        """Picoseconds from the start of the run."""
        return self._agenda.now_ps

    def at(
        self,
        delay_ps: int,
        act: Callable[[], None],
        priority: EventPriority = AFTER_REPLICAS,
    ) -> None:
        """Call `act` so many picoseconds from now."""
        self._agenda.put(Entry(lambda _: act()), priority, delay_ps)
