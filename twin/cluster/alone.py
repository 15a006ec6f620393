"""How long does one request need on a replica that does nothing else? No number of replicas makes it faster."""

from twin.engine.config import EngineConfig
from twin.step_time.model import StepTime


def alone_ttft_ps(step_time: StepTime, engine: EngineConfig, prompt_tokens: int) -> int:
    """Picoseconds from the arrival of such a prompt at an idle replica to its first token."""
    computed, total_ps = 0, 0
    is_capped = (
        engine.long_prefill_token_threshold and not engine.long_prefill_token_threshold_adaptive
    )
    limit = engine.long_prefill_token_threshold if is_capped else engine.token_budget
    while computed < prompt_tokens:
        tokens = min(prompt_tokens - computed, engine.token_budget, limit)
        pairs = tokens * computed + tokens * (tokens + 1) // 2
        is_last = computed + tokens == prompt_tokens
        total_ps += step_time.step_ps(tokens, 1, int(is_last), pairs, 0, 0)
        computed += tokens
    return total_ps


def longest_within(step_time: StepTime, engine: EngineConfig, limit_ps: int) -> int:
    """The longest prompt whose first token comes within `limit_ps` on an idle replica; 0 if none does."""
    low, high = 0, engine.max_model_len - 1
    while low < high:
        middle = (low + high + 1) // 2
        if alone_ttft_ps(step_time, engine, middle) <= limit_ps:
            low = middle
        else:
            high = middle - 1
    return low
