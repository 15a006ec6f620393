"""What one replica can take at most, roughly: the time that the tokens of saturated traffic cost it."""

from typing import NamedTuple

from twin.clock import to_seconds
from twin.step_time.model import StepTime


class TokenCost(NamedTuple):
    """Seconds of one replica's time."""

    prompt_token_s: float
    output_token_s: float


def token_cost(
    step_time: StepTime,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    kv_tokens: int,
    prompt_tokens: float,
    output_tokens: float,
) -> TokenCost:
    """What a prompt token and an output token cost a replica that is as full as it can be.

    `kv_tokens` is what its KV cache holds; `prompt_tokens` and `output_tokens` are means per request. As many requests
    run as there are slots or as fit half-way through their replies, each step decodes all of them, and prompts are
    computed in steps of their own. Both are simplified; the rate that follows lies within about 10 % of what a
    simulated replica serves when its queue never empties (tests/test_capacity.py). Prefix hits are not counted.
    """
    size = prompt_tokens + output_tokens / 2
    running = max(1, min(max_num_seqs, max_num_batched_tokens, int(kv_tokens / size)))
    decode_ps = step_time.step_ps(running, running, running, 0, running, round(running * size))
    pairs = round(max_num_batched_tokens * prompt_tokens / 2)
    prefill_ps = step_time.step_ps(max_num_batched_tokens, 1, 1, pairs, 0, 0)
    return TokenCost(
        to_seconds(prefill_ps) / max_num_batched_tokens, to_seconds(decode_ps) / running
    )
