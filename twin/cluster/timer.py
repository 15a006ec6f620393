"""When does the cluster act? After the arrivals and the replicas of the same instant."""

from collections.abc import Callable

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

from twin.agenda import Entry, put

AFTER_REPLICAS = EventPriority(NORMAL + 1_000_000)
"""At one instant the cluster acts after the arrivals and the replicas."""

LAST = EventPriority(NORMAL + 1_000_001)
"""Autoscalers look after what happens at their instant, scrapes included."""

ARRIVAL = URGENT
"""Requests come before whatever else happens at their instant."""


class Timer:
    """Calls back at instants of the simulation's clock."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env

    @property
    def now_ps(self) -> int:
        """SimPy calls its time a float; all our delays are ints."""
        return self._env._now  # type: ignore[return-value]

    def at(
        self,
        delay_ps: int,
        act: Callable[[], None],
        priority: EventPriority = AFTER_REPLICAS,
    ) -> None:
        """Call `act` so many picoseconds from now."""
        put(self._env, Entry(lambda _: act()), priority, delay_ps)
