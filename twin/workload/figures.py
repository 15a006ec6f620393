"""What traffic looks like in a few figures, to lay a fit beside its trace."""

from collections import Counter
from collections.abc import Iterable
from math import sqrt
from typing import Any

from twin.clock import to_seconds
from twin.workload.check import lengths
from twin.workload.request import Request

QUANTILES = ("p50", "p90", "p99")
"""Quantiles of lengths by which a fit is judged."""


def figures(requests: Iterable[Request]) -> dict[str, Any]:
    """Rate (per second), CV of the gaps, and mean and QUANTILES of prompt and output tokens of at least 3 requests."""
    prompts: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    gaps = square = count = 0
    last_ps = None
    for request in requests:
        prompts[request.prompt_tokens] += 1
        outputs[request.output_tokens] += 1
        if last_ps is not None:
            gap = request.arrival_ps - last_ps
            gaps += gap
            square += gap * gap
            count += 1
        last_ps = request.arrival_ps
    kept = ("mean", *QUANTILES)
    return {
        "rate": count / to_seconds(gaps),
        "cv": sqrt(count * square - gaps * gaps) / gaps,
        "prompt_tokens": {name: lengths(prompts)[name] for name in kept},
        "output_tokens": {name: lengths(outputs)[name] for name in kept},
    }
