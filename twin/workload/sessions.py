"""Conversations and agents: which requests follow one another, how long after, and with how many new tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from twin.clock import PS
from twin.workload.lengths import Length
from twin.workload.source import Chance


@dataclass(frozen=True, slots=True)
class Always:
    """The same time whenever asked."""

    ps: int

    def drawn(self, rng: Random) -> Callable[[], int]:
        """A function that gives the next time in picoseconds."""
        return lambda: self.ps


@dataclass(frozen=True, slots=True)
class ExponentialTime:
    """Exponential with this mean."""

    mean_ps: int

    def drawn(self, rng: Random) -> Callable[[], int]:
        """A function that gives the next time in picoseconds."""
        return lambda: round(rng.expovariate(1.0) * self.mean_ps)


@dataclass(frozen=True, slots=True)
class UniformTime:
    """Anything between two times, equally likely."""

    low_ps: int
    high_ps: int

    def drawn(self, rng: Random) -> Callable[[], int]:
        """A function that gives the next time in picoseconds."""
        width = self.high_ps - self.low_ps
        return lambda: self.low_ps + round(rng.random() * width)


@dataclass(frozen=True, slots=True)
class LognormalTime:
    """exp(mu + sigma z) seconds, z standard normal."""

    mu: float
    sigma: float

    def drawn(self, rng: Random) -> Callable[[], int]:
        """A function that gives the next time in picoseconds."""
        return lambda: round(rng.lognormvariate(self.mu, self.sigma) * PS)


Time = Always | ExponentialTime | UniformTime | LognormalTime


@dataclass(frozen=True, slots=True)
class Tools:
    """An agent between a user's words and the final answer: tool calls, each answered by a machine."""

    calls: Length
    """Tool calls of one turn; a turn with c calls is c + 1 requests."""
    time: Time
    """From the end of a reply that calls a tool to the request with its result."""
    result_tokens: Length
    """What a tool adds to the prompt."""
    output_tokens: Length
    """Replies that call a tool; the last reply of a turn has the length of the stream."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations: each request's prompt is all that was said before plus what is new."""

    turns: Length
    """Turns of the user in one conversation."""
    system_prompt_tokens: int
    """Tokens at the start of every prompt, the same in all conversations of the stream; 0 = none."""
    think: Time
    """From the end of a reply to the next turn of the user."""
    tools: Tools | None = None
    """None = the model answers the user at once."""


class Turn(NamedTuple):
    """One request of a conversation, as planned at its start."""

    wait_ps: int
    """After the end of the reply before it."""
    new_tokens: int
    """Added to the prompt after that reply."""
    output_tokens: int


def planner(
    sessions: Sessions, lengths: Callable[[], tuple[int, int]], chance: Chance
) -> Callable[[], list[Turn]]:
    """A function that gives the requests of the next conversation.

    All of a conversation is drawn at its start, so that no reply's time changes what is asked later.
    """
    turns = sessions.turns.drawn(chance("turns"))
    think = sessions.think.drawn(chance("think"))
    tools = sessions.tools
    if tools is None:

        def plan() -> list[Turn]:
            return [Turn(think() if turn else 0, *lengths()) for turn in range(turns())]

        return plan
    calls = tools.calls.drawn(chance("tools/calls"))
    time = tools.time.drawn(chance("tools/time"))
    result = tools.result_tokens.drawn(chance("tools/result"))
    call_tokens = tools.output_tokens.drawn(chance("tools/output"))

    def plan_with_tools() -> list[Turn]:
        planned = []
        for turn in range(turns()):
            wait_ps, (new, output) = think() if turn else 0, lengths()
            for _ in range(calls()):
                planned.append(Turn(wait_ps, new, call_tokens()))
                wait_ps, new = time(), result()
            planned.append(Turn(wait_ps, new, output))
        return planned

    return plan_with_tools
