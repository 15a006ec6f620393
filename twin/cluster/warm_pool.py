"""Keeps sleepers and placeholders on the simulation's clock: makes them, wakes them, lets them give way."""

from functools import partial
from random import Random

from twin.cluster.cold_start import ColdStart, Starter
from twin.cluster.fleet_log import FleetLog
from twin.cluster.placement import Placement
from twin.cluster.reserves import Reserve, WarmHistory, WarmPoolSpec
from twin.cluster.timer import Timer


class WarmPool:
    """The reserves of one fleet. Each source of chance has a stream of its own."""

    def __init__(
        self,
        spec: WarmPoolSpec,
        cold_start: ColdStart,
        seed: int,
        timer: Timer,
        log: FleetLog,
        placement: Placement,
    ) -> None:
        self._spec = spec
        self._timer = timer
        self._log = log
        self._placement = placement
        self._starter = Starter(cold_start, f"{seed}/warm_pool")
        self._images = cold_start.image.drawn(Random(f"{seed}/warm_pool/placeholder"))
        self._luck = Random(f"{seed}/warm_pool/claim")
        self._first_wakes = spec.first_wake.drawn(Random(f"{seed}/warm_pool/first_wake"))
        self._later_wakes = spec.wake.drawn(Random(f"{seed}/warm_pool/wake"))
        self._all: list[Reserve] = []
        self._live: list[Reserve] = []
        self._wakes_ps: list[int] = []
        self._refills_ps: list[int] = []
        self._found_none = self._unlucky = self._returned = self._gave_way = 0

    def begin(self, is_cold: bool) -> None:
        """The run begins: reserves are asleep already, or begin to start now."""
        self.fill()
        self.place()
        if not is_cold:
            for reserve in self._live:
                if reserve.placed_ps is not None:
                    reserve.usable_ps = self._timer.now_ps

    # --- how many there are -----------------------------------------------------------------

    def fill(self) -> None:
        """Make as many as there should be."""
        for is_placeholder, wanted in (
            (False, self._spec.standby),
            (True, self._spec.placeholders),
        ):
            there = sum(r.is_placeholder == is_placeholder for r in self._live)
            for _ in range(wanted - there):
                number = sum(r.is_placeholder == is_placeholder for r in self._all)
                self._add(Reserve(number, is_placeholder, self._timer.now_ps))

    def _add(self, reserve: Reserve) -> None:
        self._all.append(reserve)
        self._live.append(reserve)

    def place(self) -> int:
        """Give nodes to those that wait for one, sleepers first; how many go on waiting."""
        for reserve in self._waiting(False):
            nodes = self._placement.take()
            if nodes is None and self.give_way() is not None:
                nodes = self._placement.take()
            if nodes is not None:
                reserve.placed_ps, reserve.nodes = self._timer.now_ps, nodes
                self._start(reserve)
        for reserve in self._waiting(True):
            nodes = self._placement.take()
            if nodes is not None:
                reserve.placed_ps, reserve.nodes = self._timer.now_ps, nodes
                reserve.usable_ps = self._timer.now_ps + self._images()
        return len(self._waiting(False)) + len(self._waiting(True))

    def _waiting(self, is_placeholder: bool) -> list[Reserve]:
        return [r for r in self._live if r.is_placeholder == is_placeholder and r.placed_ps is None]

    def _start(self, reserve: Reserve) -> None:
        takes_ps = sum(self._starter.draw(False).values())
        reserve.usable_ps = self._timer.now_ps + takes_ps
        self._timer.at(takes_ps, partial(self._sleeps, reserve))

    def _sleeps(self, reserve: Reserve) -> None:
        if reserve.gone_ps is None and reserve.usable_ps == self._timer.now_ps:
            self._tell(reserve, "sleeps")
            self._refills_ps.append(self._timer.now_ps - reserve.created_ps)

    def _leave(self, reserve: Reserve, why: str, keeps_nodes: bool = False) -> None:
        reserve.gone_ps = self._timer.now_ps
        self._live.remove(reserve)
        self._tell(reserve, why)
        if not keeps_nodes:
            self._placement.give(reserve.nodes)

    def _tell(self, reserve: Reserve, what: str) -> None:
        self._log.event(self._timer.now_ps, None, "reserve", f"{reserve.name} {what}")

    # --- what they are for ------------------------------------------------------------------

    def claim(self, pod: str) -> tuple[tuple[int, ...], int] | None:
        """(nodes, time to wake) of a sleeper that becomes the new replica `pod`; None = it starts cold.

        The one that has served before is taken first, then the oldest. The pool is filled up again at once, by a pod
        that goes through the whole cold start.
        """
        if not self._spec.standby:
            return None
        now_ps = self._timer.now_ps
        asleep = [
            r
            for r in self._live
            if not r.is_placeholder
            and r.usable_ps is not None
            and r.usable_ps <= now_ps
            and self._placement.takes_pods(r.nodes)
        ]
        is_lucky = self._luck.random() < self._spec.claim_probability
        if not asleep:
            self._found_none += 1
            return None
        if not is_lucky:
            self._unlucky += 1
            return None
        reserve = min(asleep, key=lambda r: (not r.has_served, r.number))
        self._leave(reserve, f"becomes {pod}", keeps_nodes=True)
        wake_ps = self._later_wakes() if reserve.has_served else self._first_wakes()
        self._wakes_ps.append(wake_ps)
        self.fill()
        return reserve.nodes, wake_ps

    def takes_back(self, nodes: tuple[int, ...]) -> bool:
        """Whether a replica that is not needed any more goes to sleep, with its nodes, instead of leaving them."""
        if not self._spec.returns or not self._placement.takes_pods(nodes):
            return False
        now_ps = self._timer.now_ps
        starting = [
            r
            for r in self._live
            if not r.is_placeholder and (r.usable_ps is None or r.usable_ps > now_ps)
        ]
        if not starting:
            return False
        last = max(starting, key=lambda r: (r.usable_ps is None, r.usable_ps or 0, r.number))
        self._leave(last, "is not needed any more")
        number = sum(not r.is_placeholder for r in self._all)
        self._add(Reserve(number, False, now_ps, now_ps, nodes, now_ps, has_served=True))
        self._returned += 1
        self._tell(self._all[-1], "is a replica that went to sleep")
        return True

    def give_way(self) -> int | None:
        """The oldest placeholder leaves its nodes to a pod; how long its image still takes. None = there is none."""
        placed = [
            r
            for r in self._live
            if r.is_placeholder and r.placed_ps is not None and self._placement.takes_pods(r.nodes)
        ]
        if not placed:
            return None
        reserve = min(placed, key=lambda r: (r.placed_ps, r.number))
        assert reserve.usable_ps is not None
        self._leave(reserve, "gives way")
        self._gave_way += 1
        self.fill()
        return max(0, reserve.usable_ps - self._timer.now_ps)

    def lose(self, node: int, why: str) -> None:
        """The node goes, or is drained: whatever is kept there goes with it, and is made again."""
        for reserve in [r for r in self._live if node in r.nodes]:
            self._leave(reserve, why)
        self.fill()

    def renew(self) -> None:
        """A new revision: sleepers of the old one are of no use."""
        for reserve in [r for r in self._live if not r.is_placeholder]:
            self._leave(reserve, "is of an old revision")
        self.fill()

    def history(self, end_ps: int) -> WarmHistory:
        """What they did until the end of the run."""
        held = {
            kind: sum(r.held_ps(end_ps) for r in self._all if r.is_placeholder == kind)
            for kind in (False, True)
        }
        woken = len(self._wakes_ps)
        return WarmHistory(
            woken + self._found_none + self._unlucky,
            woken,
            self._found_none,
            self._unlucky,
            tuple(self._wakes_ps),
            tuple(self._refills_ps),
            self._returned,
            self._gave_way,
            held[False],
            held[True],
        )
