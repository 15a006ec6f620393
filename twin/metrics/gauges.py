"""What can be read off one engine at an instant: the raw material of time series."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

LENGTH_GROUPS = {"short": 0, "medium": 256, "long": 1024, "ultra": 4096}
"""Group -> the fewest prompt tokens of a request in it."""

_BOUNDS = tuple(LENGTH_GROUPS.values())[1:]


def length_group(prompt_tokens: int) -> int:
    """Position in LENGTH_GROUPS of a request."""
    return bisect_right(_BOUNDS, prompt_tokens)


class TierCounts(NamedTuple):
    """What a policy counted for one tier."""

    submitted: int
    batches: int
    """Batches that the hold released."""
    requests: int
    """Requests in them."""
    tokens: int
    """Prompt and expected output tokens in them."""
    held_s: float
    """Sum of the time that these requests were held."""
    preempted: tuple[int, int]
    """Preemptions by cause: policy, out_of_kv."""
    timed_out: tuple[int, int]
    """Requests aborted by reason: ttft, total."""


CAUSES = ("policy", "out_of_kv")
TIMEOUTS = ("ttft", "total")


def tier_counts(did: Mapping[str, Any]) -> TierCounts:
    """From the statistics of one tier (`Policy.stats`), which have means where these are sums."""
    batches = sum(did["releases"].values())
    requests = round(batches * (did["batch_size_mean"] or 0.0))
    timeouts = [
        sum(n for why, n in did["ended"].items() if why.startswith(f"timeout:{which} "))
        for which in TIMEOUTS
    ]
    return TierCounts(
        did["submitted"],
        batches,
        requests,
        round(batches * (did["batch_tokens_mean"] or 0.0)),
        requests * (did["batching_wait_mean_s"] or 0.0),
        (did["planned_preemptions"], did["reactive_preemptions"]),
        (timeouts[0], timeouts[1]),
    )


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of one engine, and its counters up to the same instant."""

    waiting: Mapping[str, int]
    """Tier -> requests that wait, held ones included."""
    held: Mapping[str, int]
    """Tier of the policy -> requests it holds for a batch."""
    counts: Mapping[str, TierCounts]
    """Tier of the policy -> what it counted."""
    pressure: float | None
    """How much the first tier of the policy queues, 0 to 1; None without a policy of ours."""
    running: Mapping[str, int]
    """Tier -> requests that run."""
    kv_used: float
    """Share of KV blocks in use."""
    kv_wasted: float
    """Share of KV token slots that are held but hold no computed token: last pages."""
    kv_cached: float
    """Share of KV blocks that are free but findable by the prefix cache."""
    kv_by_length: tuple[tuple[int, int, int], ...]
    """By length group of the running requests: (requests, token slots held, token slots empty); a block that several
    requests share counts for each."""
    steps: int
    busy_ps: int
    prefill_tokens: int
    """Tokens computed that were not decodes."""
    decode_tokens: int
    """Tokens computed by requests with one new token at or after the end of their prompt."""
    padded_tokens: int
    """Tokens computed only to reach a captured CUDA-graph size."""
    prompt_tokens: int
    """Prompt tokens of requests that have a first token, as vLLM counts them."""
    generation_tokens: int
    """Tokens generated, as vLLM counts them."""
    preemptions: int
    recomputed_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


NOT_YET = Gauges(
    waiting={},
    held={},
    counts={},
    pressure=None,
    running={},
    kv_used=0.0,
    kv_wasted=0.0,
    kv_cached=0.0,
    kv_by_length=((0, 0, 0),) * len(LENGTH_GROUPS),
    steps=0,
    busy_ps=0,
    prefill_tokens=0,
    decode_tokens=0,
    padded_tokens=0,
    prompt_tokens=0,
    generation_tokens=0,
    preemptions=0,
    recomputed_tokens=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)
"""Of an engine that is not there yet."""
