"""How many tokens a request will produce, guessed before it runs.

A policy may use the declared limit and what it learned from finished requests; the truth only by name (`oracle`).
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable

from twin.scheduling.config import PolicyConfig
from twin.scheduling.job import Job


class Quantile:
    """A quantile of the last `window` numbers; the lower of the two nearest where it falls between."""

    def __init__(self, quantile: float, window: int) -> None:
        self._quantile = quantile
        self._recent: deque[int] = deque()
        self._window = window
        self._sorted: list[int] = []

    def add(self, value: int) -> None:
        """Remember `value` and forget the oldest beyond the window."""
        if len(self._recent) == self._window:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(value)
        insort(self._sorted, value)

    def value(self) -> int | None:
        """The quantile, None before the first number."""
        if not self._sorted:
            return None
        return self._sorted[int(self._quantile * (len(self._sorted) - 1))]


class Estimator:
    """Expected output tokens of a job of a tier, at least 1; learns from finished jobs only."""

    def __init__(
        self,
        config: PolicyConfig,
        max_model_len: int,
        truth: Callable[[Hashable], int] | None = None,
    ) -> None:
        if config.estimator == "oracle" and truth is None:
            raise ValueError(
                "estimator oracle knows the true output lengths and so exists in simulation only; "
                "use quantile or declared"
            )
        self._kind = config.estimator
        self._initial = config.initial
        self._max_model_len = max_model_len
        self._truth = truth
        self._learned = [Quantile(config.quantile, config.window) for _ in config.tiers]

    def expect(self, job: Job, tier: int) -> int:
        """Expected output tokens of `job` of tier number `tier`.

        vLLM fills in max_model_len - prompt where a client declared nothing, before the scheduler sees the request,
        so a max_tokens that large says nothing.
        """
        room = self._max_model_len - job.prompt_tokens
        if self._kind == "oracle":
            assert self._truth is not None
            expected = self._truth(job.rid)
        elif self._kind == "declared" and job.max_tokens < room:
            expected = job.max_tokens
        else:
            learned = self._learned[tier].value()
            expected = self._initial if learned is None else learned
        most = min(job.max_tokens, room)
        return max(1, min(expected, most))

    def learn(self, tier: int, output_tokens: int) -> None:
        """A job of tier number `tier` has finished after `output_tokens`."""
        self._learned[tier].add(output_tokens)
