"""Limits of one engine, in vLLM's names."""

from dataclasses import dataclass
from typing import Any

from twin.compiled import remade


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What `vllm serve` was started with, as far as scheduling depends on it. Tokens and blocks are counts."""

    max_num_seqs: int
    """Requests that may run at once (slots of the model runner)."""
    max_num_batched_tokens: int
    """Tokens computed in one step at most."""
    max_model_len: int
    """Prompt plus output tokens of one request at most."""
    num_gpu_blocks: int
    """KV blocks in the pool, the null block included, which is never usable."""
    block_size: int = 16
    """Tokens a KV block holds."""
    version: str = "0.32.0"
    """Version of vLLM whose rules apply."""
    max_num_active_seqs: int | None = None
    """Requests admitted to run; None = max_num_seqs."""
    max_num_scheduled_tokens: int | None = None
    """Tokens the scheduler hands out in one step; None = max_num_batched_tokens."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    """False: a prompt that does not fit in what is left of the step's tokens waits."""
    long_prefill_token_threshold: int = 0
    """Tokens of one request in one step at most while others are there; 0 = no such limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Never below max_num_batched_tokens / requests."""
    scheduler_reserve_full_isl: bool = True
    """Admit only what fits as a whole, not just its first chunk."""
    watermark: float = 0.0
    """Share of all blocks to keep free when admitting beside others."""
    async_scheduling: bool = True
    """Plan step k+1 while step k runs."""
    scheduling_policy: str = "fcfs"
    """vLLM's own order without a policy of ours: fcfs or priority."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def goes_on_after_self_preemption(self) -> bool:
        """Whether requests behind one that gave way to itself are still looked at; under fcfs there are none."""
        return self.version != "0.32.0"

    @property
    def active_limit(self) -> int:
        """Requests that may run at once."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def token_budget(self) -> int:
        """Tokens a step may compute."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return min(self.max_num_scheduled_tokens, self.max_num_batched_tokens)

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free when admitting beside others."""
        return int(self.watermark * self.num_gpu_blocks)
