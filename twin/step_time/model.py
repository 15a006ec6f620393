"""How long does one engine step take? One formula over whole picoseconds, whatever its numbers come from.

    gpu  = dense(pad(num_tokens)) + comm(pad(num_tokens)) + sample(num_sampled)
         + prefill attention(pairs) + decode attention(num_decodes, sum_context, any pairs)
    step = host(num_seqs) + gpu                (sync)
         | max(host(num_seqs), gpu) + gap(num_seqs)      (async)

Everything is a Python int, so sums do not depend on their order: k equal decode steps are an exact arithmetic series.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from twin.compiled import remade


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step durations of one replica, ready to look up.

    Built by `Profile.compile`; each sequence has one entry per count from 0 to the engine's limit. A count beyond the
    limit raises IndexError: the engine may not schedule it.
    """

    tokens_ps: Sequence[int]
    """dense + comm by scheduled tokens, padding folded in. [max_num_batched_tokens + 1]"""
    sample_ps: Sequence[int]
    """By requests that get a token sampled; 0 for none. [max_num_seqs + 1]"""
    decode_base_ps: Sequence[int]
    """Decode attention at no context, by decodes; 0 for none. [max_num_seqs + 1]"""
    decode_context_ps: Sequence[int]
    """Decode attention per token of context, by decodes; 0 for none. [max_num_seqs + 1]"""
    pair_num: int
    """Prefill attention takes pairs * pair_num // pair_den + prefill_base_ps picoseconds, 0 without pairs."""
    pair_den: int
    host_ps: Sequence[int]
    """CPU work by scheduled requests. [max_num_seqs + 1]"""
    gap_ps: int
    """What async scheduling cannot hide; 0 in sync mode."""
    async_scheduling: bool
    padded: Sequence[int]
    """Tokens the GPU computes, by scheduled tokens. [max_num_batched_tokens + 1]"""
    prefill_base_ps: int = 0
    """Prefill attention of a step with any pairs, whatever their number."""
    mixed_context_ps: Sequence[int] = ()
    """What decode attention takes more per token of context in a step that has pairs, by decodes; () = nothing.
    [max_num_seqs + 1]"""
    gap_seq_ps: int = 0
    """What async scheduling cannot hide of each scheduled request's work; 0 in sync mode."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    def step_ps(
        self,
        num_tokens: int,
        num_seqs: int,
        num_sampled: int,
        pairs: int,
        num_decodes: int,
        sum_context: int,
    ) -> int:
        """Duration of one step in picoseconds, > 0.

        Args:
            num_tokens: Scheduled tokens, all requests together.
            num_seqs: Scheduled requests.
            num_sampled: Requests that get a token (their prompt is computed after this step).
            pairs: Sum over prefill chunks of n*c + n*(n+1)/2, n new tokens on c computed ones.
            num_decodes: Requests with exactly one new token at or after the end of their prompt.
            sum_context: Sum over those of (computed tokens + 1).
        """
        gpu = (
            self.tokens_ps[num_tokens]
            + self.sample_ps[num_sampled]
            + self.decode_base_ps[num_decodes]
            + self.decode_context_ps[num_decodes] * sum_context
        )
        if pairs:
            gpu += pairs * self.pair_num // self.pair_den + self.prefill_base_ps
            if self.mixed_context_ps:
                gpu += self.mixed_context_ps[num_decodes] * sum_context
        host = self.host_ps[num_seqs]
        if self.async_scheduling:
            return (gpu if gpu > host else host) + self.gap_ps + self.gap_seq_ps * num_seqs
        return host + gpu

    def slowed(self, factor: float) -> "StepTime":
        """The same engine when everything takes `factor` times as long, each entry rounded once."""
        num, den = factor.as_integer_ratio()

        def table(entries: Sequence[int]) -> list[int]:
            return [round(ps * factor) for ps in entries]

        return replace(
            self,
            tokens_ps=table(self.tokens_ps),
            sample_ps=table(self.sample_ps),
            decode_base_ps=table(self.decode_base_ps),
            decode_context_ps=table(self.decode_context_ps),
            pair_num=self.pair_num * num,
            pair_den=self.pair_den * den,
            host_ps=table(self.host_ps),
            gap_ps=round(self.gap_ps * factor),
            prefill_base_ps=round(self.prefill_base_ps * factor),
            mixed_context_ps=table(self.mixed_context_ps),
            gap_seq_ps=round(self.gap_seq_ps * factor),
        )

    def padded_tokens(self, num_tokens: int) -> int:
        """Tokens the GPU computes for `num_tokens` scheduled ones: the next captured CUDA-graph size, if any."""
        return self.padded[num_tokens]

    def decode_runs(
        self,
        num_tokens: int,
        num_seqs: int,
        num_sampled: int,
        num_decodes: int,
        sum_context: int,
        steps: int,
    ) -> tuple[int, int, int, int]:
        """Durations of `steps` consecutive decode-only steps of the same requests, as two arithmetic runs.

        The arguments are those of the first step; each later one has num_decodes more tokens of context. Returns
        (number of equal steps, what each of them takes, what the first of the others takes, growth from one of these
        to the next) in picoseconds: where async scheduling is bound by the host until the GPU work has grown past it,
        the first ones are equal. There may be none of either kind.
        """
        growth = self.decode_context_ps[num_decodes] * num_decodes
        gpu = (
            self.tokens_ps[num_tokens]
            + self.sample_ps[num_sampled]
            + self.decode_base_ps[num_decodes]
            + self.decode_context_ps[num_decodes] * sum_context
        )
        host = self.host_ps[num_seqs]
        if not self.async_scheduling:
            return 0, 0, host + gpu, growth
        # Step j takes gpu + j * growth there; `bound` is the first j at which that exceeds the host's time.
        if gpu > host:
            bound = 0
        elif growth:
            bound = min(steps, (host - gpu) // growth + 1)
        else:
            bound = steps
        gap = self.gap_ps + self.gap_seq_ps * num_seqs
        return bound, host + gap, gpu + bound * growth + gap, growth

    def decode_series(
        self,
        num_tokens: int,
        num_seqs: int,
        num_sampled: int,
        num_decodes: int,
        sum_context: int,
        steps: int,
    ) -> int:
        """Total picoseconds of the steps of `decode_runs`: exactly the sum of as many `step_ps` calls."""
        equal, each, first, growth = self.decode_runs(
            num_tokens, num_seqs, num_sampled, num_decodes, sum_context, steps
        )
        rest = steps - equal
        return equal * each + rest * first + growth * (rest * (rest - 1) // 2)


class _Same(Sequence[int]):
    """The same value at every index, without end."""

    def __init__(self, value: int) -> None:
        self._value = value

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self if isinstance(index, slice) else self._value

    def __len__(self) -> int:
        raise TypeError("an endless sequence has no length")


def constant_step(ps: int) -> StepTime:
    """A step time of `ps` picoseconds for every step of any size, without padding: for tests and queueing theory.

    Raises ValueError unless ps > 0.
    """
    if ps <= 0:
        raise ValueError(f"ps ({ps}) must be greater than 0")
    nothing = _Same(0)
    return StepTime(
        tokens_ps=_Same(ps),
        sample_ps=nothing,
        decode_base_ps=nothing,
        decode_context_ps=nothing,
        pair_num=0,
        pair_den=1,
        host_ps=nothing,
        gap_ps=0,
        async_scheduling=False,
        padded=range(2**62),
    )
