"""How long will a new request wait? What the twin can say at its arrival, without looking ahead.

    wait = max(hold, queue) + lag
    queue = (tokens ahead + its own) / rate    if somebody who could run waits, or there is no room; else 0

`hold` is the longest the policy holds the tier for a batch, `lag` the time until the earliest step that a request
arriving now could be in. Tokens ahead are those of waiting requests whose tier comes no later; `rate` is that of the
tokens of the latest starts while somebody waited, those of tiers that come before it left out.
"""

from collections import deque
from collections.abc import Mapping

WINDOW = 64
"""Starts that the rate is taken from."""

ENOUGH = 8
"""Starts from which a rate is remembered after the queue has emptied."""


class WaitEstimate:
    """What one engine knows about waiting. Tokens of a request are all it must compute before its next token."""

    def __init__(self, ranks: Mapping[str, int], holds_ps: Mapping[str, int]) -> None:
        self._ranks = ranks
        self._last = max(ranks.values(), default=0)
        self._holds_ps = holds_ps
        self._waiting = [0] * (self._last + 1)  # tokens by rank
        self._starts: deque[tuple[int, int, int]] = deque()  # (instant, rank, tokens)
        self._started = [0] * (self._last + 1)  # tokens of all but the first of them, by rank
        self._known: list[tuple[int, int]] = [(0, 0)] * (self._last + 1)  # (tokens, ps) by rank

    def wait(self, tier: str, tokens: int) -> None:
        """A request of `tier` with `tokens` to compute waits from now on."""
        self._waiting[self._rank(tier)] += tokens

    def leave(self, tier: str, tokens: int) -> None:
        """A waiting request has gone, or `start` follows."""
        self._waiting[self._rank(tier)] -= tokens

    def start(self, tier: str, tokens: int, now_ps: int) -> None:
        """A waiting request was admitted by the plan made at `now_ps`."""
        rank, starts = self._rank(tier), self._starts
        if starts:
            self._started[rank] += tokens
        starts.append((now_ps, rank, tokens))
        if len(starts) > WINDOW:
            starts.popleft()
            _, rank, tokens = starts[0]
            self._started[rank] -= tokens

    def planned(self, somebody_waits: bool) -> None:
        """A plan was made, and whether it left somebody waiting who could run.

        Once the queue is empty, starts come as requests arrive and say nothing about what the engine can do.
        """
        if not somebody_waits and self._starts:
            if len(self._starts) >= ENOUGH:
                last_ps = self._starts[-1][0]
                self._known = [self._rate(rank, last_ps) for rank in range(self._last + 1)]
            self._starts.clear()
            self._started = [0] * (self._last + 1)

    def estimate(
        self, tier: str, tokens: int, is_full: bool, is_queueing: bool, lag_ps: int, now_ps: int
    ) -> int:
        """Picoseconds from now to the start of the first step of a request of `tier` with `tokens` to compute.

        `is_full`: it does not fit beside what runs. `is_queueing`: the last plan left somebody waiting who could run.
        """
        rank = self._rank(tier)
        ahead = sum(self._waiting[: rank + 1])
        queue_ps = 0
        if is_full or (ahead and is_queueing):
            started, span_ps = self._rate(rank, now_ps)
            if len(self._starts) < ENOUGH or not started:
                started, span_ps = self._known[rank]
            if started:
                queue_ps = (ahead + tokens) * span_ps // started
        return max(self._holds_ps.get(tier, 0), queue_ps) + lag_ps

    def _rate(self, rank: int, now_ps: int) -> tuple[int, int]:
        """(tokens, picoseconds) of the starts after the first, of this rank and the later ones."""
        if not self._starts:
            return 0, 0
        return sum(self._started[rank:]), now_ps - self._starts[0][0]

    def _rank(self, tier: str) -> int:
        return self._ranks.get(tier, self._last)
