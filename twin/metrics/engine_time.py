"""What an engine's time went into, and which limit kept requests waiting meanwhile.

A step's time is shared equally among the tokens that the GPU computes in it, those it computes only to reach a captured
size included. Shares are kept as token-picoseconds by the size of the step, in whole numbers, so that a sum does not
depend on whether equal steps are counted one by one or together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from twin.clock import quotient, times
from twin.compiled import remade

LIMITS = ("slots", "tokens", "kv", "policy", "compute")
"""What kept requests from going faster while a step ran: the first three kept a request out that could have run, or
took its blocks; `policy` held everything that waits; with `compute` nobody waited."""

QUEUEING: Final = frozenset(LIMITS[:3])
"""Limits under which somebody waits who could run."""

USES = ("useful", "recomputed", "padded", "wasted", "idle")
"""What an engine's time can be spent on; docs/metrics.md defines them."""

TokenTime = dict[int, int]
"""Tokens computed by a step (padding included) -> sum of tokens * picoseconds over such steps."""


def add(spent: TokenTime, size: int, tokens: int, duration_ps: int) -> None:
    """`tokens` of the `size` tokens of steps that took `duration_ps` in all."""
    spent[size] = spent.get(size, 0) + times(tokens, duration_ps)


def total_ps(spent: Mapping[int, int]) -> int:
    """The picoseconds that these tokens took, each step shared equally among its tokens."""
    return sum(token_ps // size for size, token_ps in spent.items())


@dataclass(slots=True)
class EngineTime:
    """Time of one engine by what it was for. All of it lies within the time its steps took, `held_ps` excepted."""

    limit_ps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    """By LIMITS, time of the steps planned under each."""
    held_ps: int = 0
    """Time without a step although requests were there: the policy held them all."""
    padded: TokenTime = field(default_factory=dict)
    recomputed: TokenTime = field(default_factory=dict)
    """Tokens that a preemption had thrown away before."""
    wasted: TokenTime = field(default_factory=dict)
    """Tokens of requests whose client left, and tokens computed after a request had ended."""

    def waste(self, work: Mapping[int, int], again: Mapping[int, int]) -> None:
        """All work for a request was in vain; `again` of it was counted as recomputed until now."""
        for size, token_ps in work.items():
            self.wasted[size] = self.wasted.get(size, 0) + token_ps
        for size, token_ps in again.items():
            self.recomputed[size] -= token_ps

    def uses_ps(self, busy_ps: int, total_time_ps: int) -> dict[str, int]:
        """Picoseconds by USES, which add up to `total_time_ps`; `busy_ps` of it was steps."""
        spent = {name: total_ps(getattr(self, name)) for name in ("recomputed", "padded", "wasted")}
        # A client that left has its whole share of the last step, of which the end of the run may have cut a part.
        spent["wasted"] = min(spent["wasted"], busy_ps - spent["recomputed"] - spent["padded"])
        useful = busy_ps - sum(spent.values())
        whole = {"useful": useful, **spent, "idle": total_time_ps - busy_ps}
        return {name: whole[name] for name in USES}


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Of several engines together, as shares of their whole time that add up to 1; empty for a run without time."""

    uses: Mapping[str, float]
    """By USES."""
    limits: Mapping[str, float]
    """By LIMITS, and `idle`: no request was there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)


def time_shares(
    engines: Sequence[tuple[EngineTime, int]], alive_ps: int | Sequence[int]
) -> TimeShares:
    """What engines, each with the picoseconds it was busy, did with the time they were there: of each, or of all."""
    spans = [alive_ps] * len(engines) if isinstance(alive_ps, int) else alive_ps
    whole_ps = sum(spans)
    if not whole_ps:
        return TimeShares({}, {})
    each = [
        time.uses_ps(busy_ps, span_ps)
        for (time, busy_ps), span_ps in zip(engines, spans, strict=True)
    ]
    limits = {name: sum(time.limit_ps[name] for time, _ in engines) for name in LIMITS}
    limits["policy"] += sum(time.held_ps for time, _ in engines)
    limits["idle"] = whole_ps - sum(limits.values())
    return TimeShares(
        uses={name: quotient(sum(uses[name] for uses in each), whole_ps) for name in USES},
        limits={name: quotient(ps, whole_ps) for name, ps in limits.items()},
    )
