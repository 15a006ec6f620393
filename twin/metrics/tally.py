"""What is counted of the requests of a run: all together where their records are kept, else block by block."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from twin.clock import to_ps
from twin.metrics.columns import NONE, Columns, Rows
from twin.metrics.histogram import LogHistogram
from twin.metrics.objectives import Objectives, metric_of
from twin.metrics.percentiles import Durations, Part, Samples, Spread, exact_sum
from twin.metrics.records import LATENCIES, OUTCOMES

REFUSED_NAMED = 20
"""Refused requests that are remembered one by one."""

Objective = tuple[str, str, int]
"""(name, latency, picoseconds)"""


@dataclass(frozen=True, slots=True, order=True)
class Refusal:
    """A request that was turned away."""

    index: int
    tier: str
    prompt_tokens: int
    reason: str


class Waits:
    """How far the queue times that requests were told at their arrival were off, over those that were started."""

    def __init__(self, spread: Spread) -> None:
        self.samples = self.abs_ps = self.error_ps = self.wait_ps = 0
        """Sums: of requests, |estimate - queue time|, estimate - queue time, queue time."""
        self.errors = spread

    def add(self, block: Columns, rows: Rows) -> None:
        """More requests."""
        estimate, wait = block["estimated_wait_ps"][rows], block.durations("queue")[rows]
        known = (estimate != NONE) & (wait != NONE)
        wait = wait[known]
        error = estimate[known] - wait
        self.samples += len(error)
        self.abs_ps += exact_sum(np.abs(error))
        self.error_ps += exact_sum(error)
        self.wait_ps += exact_sum(wait)
        part: Part = (error, None)
        self.errors.add([part])


class TierTally:
    """The requests of one tier: counts of all of them, the rest of those after the warm-up."""

    def __init__(
        self, limits: Mapping[str, float], warmup_ps: int, spread: Callable[[], Spread]
    ) -> None:
        self._objectives = [(name, metric_of(name), to_ps(x)) for name, x in limits.items()]
        self._warmup_ps = warmup_ps
        self.ended = dict.fromkeys(OUTCOMES, 0)
        self.attempts = 0
        self.measured = self.good = 0
        self.without = dict.fromkeys(limits, 0)
        """Objective -> requests that did not complete and lack the duration it judges."""
        self.completed = self.prompt_tokens = self.output_tokens = 0
        """Measured requests that completed, and their tokens."""
        self.latency = {name: spread() for name in LATENCIES}
        self.waits = Waits(spread())

    def add(self, block: Columns, rows: Rows) -> None:
        """More requests, all of this tier."""
        ended = np.bincount(block["outcome"][rows], minlength=len(OUTCOMES)).tolist()
        for outcome, number in zip(OUTCOMES, ended, strict=True):
            self.ended[outcome] += number
        self.attempts += int(block["attempts"][rows].sum())
        rows = rows[block["arrival_ps"][rows] >= self._warmup_ps]
        completed = block.completed[rows]
        met = completed
        for name, latency, limit_ps in self._objectives:
            durations = block.durations(latency)[rows]
            met = met & (durations <= limit_ps)
            self.without[name] += int(((durations == NONE) & ~completed).sum())
        self.measured += len(rows)
        self.good += int(met.sum())
        done = rows[completed]
        self.completed += len(done)
        self.prompt_tokens += int(block["prompt_tokens"][done].sum())
        self.output_tokens += int(block["output_tokens"][done].sum())
        for latency, spread in self.latency.items():
            spread.add(block.samples(latency, rows))
        self.waits.add(block, rows)


class Tally:
    """The requests of a run."""

    def __init__(self, objectives: Objectives, warmup_ps: int, is_exact: bool) -> None:
        """`is_exact`: percentiles are, for which the blocks are kept; else within histogram.BOUND."""
        self._objectives = objectives
        self._warmup_ps = warmup_ps
        self.is_exact = is_exact
        self._spread: Callable[[], Spread] = Samples if is_exact else LogHistogram
        self.tiers: dict[str, TierTally] = {}
        for tier in objectives:
            self._tier(tier)
        self.requests = 0
        self.streams: Counter[int] = Counter()
        """Stream of the traffic -> requests."""
        self.preempted: Counter[int] = Counter()
        """Times preempted -> requests that reached an engine."""
        self.worst: int | None = None
        """Index of the request that was preempted most often, the first of them; None if none was."""
        self.refused: list[Refusal] = []
        """The first ones."""
        self.last_finish_ps = 0
        self.ends: Counter[tuple[str, str]] = Counter()
        """(outcome, reason) -> requests."""

    def _tier(self, name: str) -> TierTally:
        if name not in self.tiers:
            limits = self._objectives.get(name, {})
            self.tiers[name] = TierTally(limits, self._warmup_ps, self._spread)
        return self.tiers[name]

    def add(self, block: Columns) -> None:
        """More requests."""
        if not len(block):
            return
        for tier, rows in block.of_tiers():
            self._tier(tier).add(block, rows)
        self.requests += len(block)
        self.streams.update(_counted(block["stream"]))
        self.last_finish_ps = max(self.last_finish_ps, int(block["finish_ps"].max()))
        self._add_preempted(block)
        pairs = block["outcome"] * len(block.reasons) + block["reason"]
        for pair, number in _counted(pairs).items():
            outcome, reason = divmod(pair, len(block.reasons))
            self.ends[OUTCOMES[outcome], block.reasons[reason]] += number
        for row in np.flatnonzero(block["outcome"] == OUTCOMES.index("refused")).tolist():
            self.refused.append(
                Refusal(
                    int(block["index"][row]),
                    block.tiers[int(block["tier"][row])],
                    int(block["prompt_tokens"][row]),
                    block.reasons[int(block["reason"][row])],
                )
            )
        del (kept := sorted(self.refused))[REFUSED_NAMED:]
        self.refused = kept

    def _add_preempted(self, block: Columns) -> None:
        served = block["replica"] != NONE
        times, index = block["preemptions"][served], block["index"][served]
        most_before = max(self.preempted, default=0)
        self.preempted.update(_counted(times))
        most = max(self.preempted, default=0)
        if most and most == times.max(initial=0):
            first = int(index[times == most].min())
            same = most == most_before and self.worst is not None
            self.worst = min(first, self.worst or 0) if same else first


def _counted(column: Durations) -> dict[int, int]:
    """How often each number (>= 0) occurs."""
    return {value: times for value, times in enumerate(np.bincount(column).tolist()) if times}
