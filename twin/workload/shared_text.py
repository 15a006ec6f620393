"""Prompts that begin alike: texts that many of them share, or the beginning of an earlier prompt."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from twin.workload.quantiles import Points, inverse_cdf
from twin.workload.source import Chance, Maker, Prompt

LOOKS = 64
"""Earlier prompts looked at in search of one that is long enough."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Texts that many prompts begin with."""

    groups: int
    """How many different texts there are."""
    tokens: int
    """Length of each."""
    skew: float
    """Text k of 1..groups is drawn with weight k ** -skew; 0 = all equally often."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompts that repeat the beginning of an earlier one, as those of people who go on with what they had."""

    share: Points
    """(probability, share of the prompt that is repeated), shares from 0 to 1."""
    memory: int
    """Which one is repeated: any of so many last prompts of the stream, equally likely, that is long enough."""


def opening(
    system_tokens: int, shared: Prefixes | None, make: Maker, chance: Chance
) -> Callable[[], tuple[Prompt, int]] | None:
    """A function that gives the beginning of the next prompt and its tokens; None if nothing is shared.

    It is the system prompt, the same in all, and one of the shared texts.
    """
    system: Prompt = ()
    if system_tokens:
        system = ((make.content(), system_tokens),)
    if shared is None:
        return (lambda: (system, system_tokens)) if system else None
    texts = [(*system, (make.content(), shared.tokens)) for _ in range(shared.groups)]
    bounds = list(accumulate((rank + 1) ** -shared.skew for rank in range(shared.groups)))
    tokens = system_tokens + shared.tokens
    random, last = chance("prefixes").random, shared.groups - 1

    def draw() -> tuple[Prompt, int]:
        return texts[min(bisect_right(bounds, random() * bounds[-1]), last)], tokens

    return draw


class Repeated:
    """Makes prompts out of the beginnings of earlier ones."""

    def __init__(self, spec: Reuse, chance: Chance) -> None:
        self._share = inverse_cdf(spec.share)
        self._random = chance("reuse").random
        self._past: list[tuple[int, Prompt]] = []
        """(tokens, prompt), the youngest at any place: a full memory is written over in turn."""
        self._memory = spec.memory
        self._number = 0

    def prompt(self, tokens: int, content: int) -> Prompt:
        """A prompt of so many tokens; what is not repeated gets the id `content`."""
        wanted = int(self._share(self._random()) * tokens)
        earlier: Prompt = ()
        if wanted and self._past:
            length, earlier = self._find(wanted)
            wanted = min(wanted, length)
            earlier = _beginning(earlier, wanted)
        else:
            wanted = 0
        prompt = (*earlier, (content, tokens - wanted)) if wanted < tokens else earlier
        if len(self._past) < self._memory:
            self._past.append((tokens, prompt))
        else:
            self._past[self._number % self._memory] = (tokens, prompt)
        self._number += 1
        return prompt

    def _find(self, wanted: int) -> tuple[int, Prompt]:
        """An earlier prompt of at least so many tokens, or the longest of LOOKS."""
        past = self._past
        longest: tuple[int, Prompt] = (0, ())
        for _ in range(LOOKS):
            found = past[int(self._random() * len(past))]
            if found[0] >= wanted:
                return found
            if found[0] > longest[0]:
                longest = found
        return longest


def _beginning(prompt: Prompt, tokens: int) -> Prompt:
    """The first so many tokens of a prompt."""
    kept = []
    for content, length in prompt:
        kept.append((content, min(length, tokens)))
        tokens -= length
        if tokens <= 0:
            break
    return tuple(kept)
