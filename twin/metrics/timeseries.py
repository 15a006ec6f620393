"""Metrics over time: every engine's gauges and counters, read at a fixed period.

Between two events of the simulation nothing changes, so a sample is taken when the next event is not before its
instant: no event is added and the run is the same with and without. A sample does not see what happens at its very
instant, so that arrivals on the beat of the samples do not look like a queue.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twin.clock import PS, to_seconds
from twin.metrics.gauges import LENGTH_GROUPS, Gauges
from twin.metrics.objectives import is_good, limits_of
from twin.metrics.records import RequestRecord

FIRST_PERIOD_PS = PS // 100
"""The period a run begins with that does not name one."""

FORESIGHT = 50
"""Instants after which the length of the run is guessed."""

FEWEST_INSTANTS, MOST_INSTANTS = 100, 500
MOST_GAUGES = 500_000
"""Gauges of all engines together that are kept at most, within the two numbers of instants (multiples of 10) above."""


@dataclass(frozen=True)
class TimeSeries:
    """What was read, in the order of time."""

    period_ps: int
    times_ps: Sequence[int]
    """Multiples of the period from 0 on, and the end of the run."""
    gauges: Sequence[tuple[Gauges, ...]]
    """By instant and replica."""
    good: Sequence[Mapping[tuple[int, str], int]]
    """By instant: (replica, tier) -> good requests up to then."""
    tiers: tuple[str, ...]
    gateway: Sequence[int] | None = None
    """By instant: requests that wait at the gateway; None where none can."""

    def padded(self, missing: Gauges) -> "TimeSeries":
        """The same with as many engines at each instant: those that came later are `missing` before."""
        number = max(1, max(map(len, self.gauges), default=0))
        gauges = [(*found, *(missing,) * (number - len(found))) for found in self.gauges]
        return replace(self, gauges=gauges)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each instant and replica. Rates are means since the row before, None in the first one."""
        for i, (at_ps, gauges) in enumerate(zip(self.times_ps, self.gauges, strict=True)):
            since_ps = at_ps - self.times_ps[i - 1] if i else 0
            for replica, now in enumerate(gauges):
                before = self.gauges[i - 1][replica] if since_ps else None
                yield self._row(i, at_ps, since_ps, replica, now, before)

    def _row(
        self, i: int, at_ps: int, since_ps: int, replica: int, now: Gauges, before: Gauges | None
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"time_s": to_seconds(at_ps), "replica": replica}
        if self.gateway is not None:
            row["gateway_waiting"] = self.gateway[i]
        for tier in self.tiers:
            waiting = now.waiting.get(tier, 0)
            # A policy whose one tier takes every request holds them as one.
            held = now.held.get(tier, 0) if set(now.held) != {"*"} else None
            row[f"held.{tier}"] = held
            row[f"ready.{tier}"] = waiting - (held or 0)
            row[f"running.{tier}"] = now.running.get(tier, 0)
            good = self.good[i].get((replica, tier), 0)
            good -= self.good[i - 1].get((replica, tier), 0) if i else 0
            row[f"good_per_s.{tier}"] = good * PS / since_ps if since_ps else None
        row |= {name: getattr(now, name) for name in ("kv_used", "kv_wasted", "kv_cached")}
        row["pressure"] = now.pressure
        for name, rate in RATES.items():
            change = None if before is None else getattr(now, name) - getattr(before, name)
            row[rate] = None if change is None else change * PS / since_ps
        row["busy"] = None if before is None else (now.busy_ps - before.busy_ps) / since_ps
        return row | {name: getattr(now, name) for name in COUNTERS}

    def kv_by_length(self) -> dict[str, dict[str, float | None]]:
        """Length group -> means over all instants and engines at which something of it ran.

        `requests`: running at once, over all instants; `held_tokens`: token slots of a request; `empty_tokens`: those
        of them without a computed token; `waste`: their share.
        """
        result: dict[str, dict[str, float | None]] = {}
        readings = sum(len(gauges) for gauges in self.gauges)
        for number, group in enumerate(LENGTH_GROUPS):
            requests = held = empty = 0
            for gauges in self.gauges:
                for one in gauges:
                    running, slots, unused = one.kv_by_length[number]
                    requests, held, empty = requests + running, held + slots, empty + unused
            result[group] = {
                "requests": requests / readings if readings else None,
                "held_tokens": held / requests if requests else None,
                "empty_tokens": empty / requests if requests else None,
                "waste": empty / held if held else None,
            }
        return result


RATES = {
    "prefill_tokens": "prefill_tokens_per_s",
    "decode_tokens": "decode_tokens_per_s",
    "preemptions": "preemptions_per_s",
}
"""Counter -> the name of its change per second."""

COUNTERS = (
    "steps", "padded_tokens", "prompt_tokens", "generation_tokens", "preemptions", "recomputed_tokens",
    "prefix_query_tokens", "prefix_hit_tokens",
)  # fmt: skip
"""Counters of the engine, from the start of the run."""


class Sampler:
    """Reads all engines of a run each period.

    Without a `period_ps` it starts with FIRST_PERIOD_PS and, when there are too many instants, leaves some out and goes
    on with a period of 2 or 5 times as much, so that a run of any length ends with a few hundred at a round period.
    After the first few it does so in advance, by `share_done`: how far the run is at an instant (0 = nobody knows).
    """

    def __init__(
        self,
        read: Callable[[int], tuple[Gauges, ...]],
        num_replicas: int,
        tiers: Sequence[str],
        objectives: Mapping[str, Mapping[str, float]],
        warmup_ps: int,
        period_ps: int | None,
        share_done: Callable[[int], float] = lambda now_ps: 0.0,
        read_gateway: Callable[[], int] | None = None,
    ) -> None:
        self._read = read
        self._read_gateway = read_gateway
        self._tiers = tuple(tiers)
        self._limits = {tier: limits_of(named) for tier, named in objectives.items()}
        self._warmup_ps = warmup_ps
        self._period_ps = FIRST_PERIOD_PS if period_ps is None else period_ps
        self._factor = 2
        self._share_done = share_done
        most = min(MOST_INSTANTS, max(FEWEST_INSTANTS, MOST_GAUGES // num_replicas // 10 * 10))
        self._most = most if period_ps is None else None
        self._times_ps: list[int] = []
        self._gauges: list[tuple[Gauges, ...]] = []
        self._good: list[dict[tuple[int, str], int]] = []
        self._gateway: list[int] = []
        self._good_now: dict[tuple[int, str], int] = {}
        self.next_ps = 0
        """The instant of the next sample."""

    def record(self, record: RequestRecord) -> None:
        """A request has ended."""
        if record.replica is not None and record.arrival_ps >= self._warmup_ps:
            if is_good(record, self._limits.get(record.tier, ())):
                key = (record.replica, record.tier)
                self._good_now[key] = self._good_now.get(key, 0) + 1

    def catch_up(self, next_event_ps: float) -> None:
        """Take the samples that are due by the time of the next event, before it happens."""
        while self.next_ps <= next_event_ps:
            self._take(self.next_ps)
            self.next_ps += self._period_ps
            if self._most is not None:
                self._keep_few(self._most)

    def _take(self, at_ps: int) -> None:
        self._times_ps.append(at_ps)
        self._gauges.append(self._read(at_ps))
        self._good.append(dict(self._good_now))
        if self._read_gateway is not None:
            self._gateway.append(self._read_gateway())

    def _keep_few(self, most: int) -> None:
        instants = len(self._times_ps)
        if instants == most:
            self._thin_out()
        elif instants == FORESIGHT:
            done = self._share_done(self.next_ps)
            whole_ps = self.next_ps / done if done else 0.0
            while whole_ps >= most * self._period_ps:
                self._thin_out()

    def _thin_out(self) -> None:
        """Keep the instants that a longer period has in common with the present one."""
        step, self._factor = self._factor, 7 - self._factor
        self._period_ps *= step
        self._times_ps = self._times_ps[::step]
        self._gauges = self._gauges[::step]
        self._good = self._good[::step]
        self._gateway = self._gateway[::step]
        self.next_ps = self._times_ps[-1] + self._period_ps

    def finish(self, end_ps: int) -> TimeSeries:
        """The series, closed by a sample at the end of the run."""
        self.catch_up(end_ps)
        # A timer that found nothing to do may have come after the last request had left.
        kept = bisect_left(self._times_ps, end_ps)
        for values in (self._times_ps, self._gauges, self._good, self._gateway):
            del values[kept:]
        self._take(end_ps)
        gateway = None if self._read_gateway is None else self._gateway
        return TimeSeries(
            self._period_ps, self._times_ps, self._gauges, self._good, self._seen(), gateway
        )

    def _seen(self) -> tuple[str, ...]:
        """The tiers, those included that only rows of a trace have."""
        found = dict.fromkeys((*self._tiers, *(tier for _, tier in self._good_now)))
        for gauges in self._gauges:
            for now in gauges:
                found |= dict.fromkeys((*now.waiting, *now.running))
        return tuple(found)
