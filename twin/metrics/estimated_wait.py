"""How long will a new request wait? What an engine can say at its arrival, without looking ahead, and how well it did.

    wait = max(hold, queue) + lag
    queue = (tokens ahead + its own) / rate    if somebody who could run waits, or there is no room; else 0

`hold` is the longest the policy holds the tier for a batch, `lag` the time until the earliest step that a request
arriving now could be in. Tokens ahead are those of the prompts of requests that have not started and whose tier comes
no later; `rate` is that of the latest first starts of the tier and the later ones while somebody waited: what the
tiers before it leave to it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from twin.clock import PS, quotient
from twin.compiled import remade
from twin.metrics.percentiles import Samples
from twin.metrics.record_table import RecordTable
from twin.metrics.records import RequestRecord
from twin.metrics.tally import Waits

WINDOW = 64
"""Starts that a rate is taken from."""

ENOUGH = 8
"""Starts from which on a rate is trusted, and remembered after the queue has emptied."""


class _Starts:
    """The latest starts of requests since the queue was last empty."""

    __slots__ = ("_starts", "_tokens")

    def __init__(self) -> None:
        self._starts: deque[tuple[int, int]] = deque()  # (instant, tokens)
        self._tokens = 0  # of all but the first

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, now_ps: int, tokens: int) -> None:
        if self._starts:
            self._tokens += tokens
        self._starts.append((now_ps, tokens))
        if len(self._starts) > WINDOW:
            self._starts.popleft()
            self._tokens -= self._starts[0][1]

    def clear(self) -> None:
        """Nobody has started."""
        self._starts.clear()
        self._tokens = 0

    def rate(self, now_ps: int) -> tuple[int, int]:
        """(tokens, picoseconds they took)."""
        return (self._tokens, now_ps - self._starts[0][0]) if self._starts else (0, 0)


class WaitEstimate:
    """What one engine knows about waiting. Tokens of a request are those of its prompt."""

    def __init__(self, ranks: dict[str, int], holds_ps: dict[str, int]) -> None:
        self._ranks = ranks
        self._last = max(ranks.values(), default=0)
        self._holds_ps = holds_ps
        self._waiting = [0] * (self._last + 1)  # tokens by rank
        self._starts = [_Starts() for _ in self._waiting]  # by rank, those of later ones included
        self._known = [(0, 0)] * (self._last + 1)  # rate by rank, of the queue before this one

    def wait(self, tier: str, tokens: int) -> None:
        """A new request of `tier` waits from now on."""
        self._waiting[self._rank(tier)] += tokens

    def leave(self, tier: str, tokens: int) -> None:
        """A waiting request has gone, or `start` follows."""
        self._waiting[self._rank(tier)] -= tokens

    def start(self, tier: str, tokens: int, now_ps: int) -> None:
        """A new request was admitted by the plan made at `now_ps`."""
        for rank in range(self._rank(tier) + 1):
            self._starts[rank].add(now_ps, tokens)

    def planned(self, somebody_waits: bool, now_ps: int) -> None:
        """A plan was made, and whether it left somebody waiting who could run.

        Once the queue is empty, starts come as requests arrive and say nothing about what the engine can do.
        """
        if not somebody_waits and self._starts[0]:
            for rank, starts in enumerate(self._starts):
                if len(starts) >= ENOUGH:
                    self._known[rank] = starts.rate(now_ps)
                starts.clear()

    def estimate(
        self, tier: str, tokens: int, is_full: bool, is_queueing: bool, lag_ps: int, now_ps: int
    ) -> int:
        """Picoseconds from now to the start of the first step of a new request of `tier`.

        `is_full`: it does not fit beside what runs. `is_queueing`: the last plan left somebody waiting who could run.
        """
        rank = self._rank(tier)
        ahead = 0
        for earlier in range(rank + 1):
            ahead += self._waiting[earlier]
        queue_ps = 0
        if is_full or (ahead and is_queueing):
            starts = self._starts[rank]
            started, span_ps = starts.rate(now_ps)
            if len(starts) < ENOUGH and self._known[rank][0]:
                started, span_ps = self._known[rank]
            if started:
                queue_ps = (ahead + tokens) * span_ps // started
        return max(self._holds_ps.get(tier, 0), queue_ps) + lag_ps

    def _rank(self, tier: str) -> int:
        return self._ranks.get(tier, self._last)


@dataclass(frozen=True, slots=True)
class WaitErrors:
    """Estimated minus actual queue time of one group of requests, in seconds. None without a sample."""

    samples: int
    mean_abs_s: float | None
    bias_s: float | None
    """Mean error: above 0, requests were told to wait longer than they did."""
    p10_s: float | None
    p50_s: float | None
    p90_s: float | None
    """Percentiles of the error."""
    wait_mean_s: float | None
    """Mean of what was to be estimated."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


def wait_errors(records: Iterable[RequestRecord]) -> WaitErrors:
    """How far the estimates made at arrival were off, over the requests that were started."""
    waits = Waits(Samples())
    block = RecordTable(records).columns()
    waits.add(block, block.everybody)
    return errors_of(waits)


def errors_of(waits: Waits) -> WaitErrors:
    """The figures of what was counted."""
    n = waits.samples
    if not n:
        return WaitErrors(0, None, None, None, None, None, None)
    return WaitErrors(
        samples=n,
        mean_abs_s=quotient(waits.abs_ps, n * PS),
        bias_s=quotient(waits.error_ps, n * PS),
        p10_s=waits.errors.percentile(10),
        p50_s=waits.errors.percentile(50),
        p90_s=waits.errors.percentile(90),
        wait_mean_s=quotient(waits.wait_ps, n * PS),
    )
