"""How long do this server's steps take? Requests that make steps of many kinds, and the profile that fits them.

    step = a + b * tokens + c * decodes + d * context + e * pairs

the form of docs/design.md, with everything that is not attention in the table over tokens. Fitted by relative least
squares with no negative term, on the mean of the steps of equal content, then scaled so that the time of all steps
together is the measured one: what disturbs a machine belongs to its time.
"""

import json
import random
import statistics
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from real.client import Call

TERMS = ("base", "tokens", "decodes", "context", "pairs")


@dataclass(frozen=True)
class Fit:
    """Seconds per step and per unit of each term."""

    seconds: dict[str, float]
    """By name of TERMS."""
    mape: float
    """Mean absolute relative error over the steps it was fitted to."""
    scaled_by: float
    """Factor on all terms that makes the time of all steps the measured one."""
    steps: int
    frontend_s: float
    """Median time to first token that the scheduler does not see: HTTP, tokenizer, queues between processes."""


def text_of(tokens: int, rng: random.Random) -> str:
    """A prompt of so many tokens for the tiny model, where a token is a byte; no two begin alike."""
    return "".join(rng.choices(string.ascii_letters, k=tokens))


def sweep(max_num_seqs: int, max_model_len: int, rng: random.Random) -> Iterator[Call]:
    """Requests in groups that start together, by number of requests and length of prompts, a while between groups."""
    due = 0.0
    for count in (1, 2, 3, 4, 8, 16, 32):
        for prompt in (8, 64, 256, 512, 768):
            if count <= max_num_seqs and prompt + 40 < max_model_len:
                for _ in range(count):
                    yield Call(due, text_of(prompt, rng), 30, stream=False)
                due += 0.4 + count * (prompt * 1e-4 + 0.02)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Steps, and times to first token as the scheduler saw them, of a recording."""
    steps, firsts = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "step":
            steps.append(row)
        else:
            firsts.append(row["ttft_s"])
    return steps, firsts


def fit_steps(rows: Sequence[dict[str, Any]], frontend_s: float) -> Fit:
    """The fit. Raises ValueError with fewer than 50 kinds of steps."""
    kinds: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for row in rows:
        kinds[row["tokens"], row["decodes"], row["context"], row["pairs"]].append(row["duration_s"])
    if len(kinds) < 50:
        raise ValueError(f"only {len(kinds)} kinds of steps; at least 50 are needed")
    features = np.array([(1.0, *kind) for kind in kinds])
    seconds = np.array([statistics.fmean(durations) for durations in kinds.values()])
    weights = np.sqrt([len(durations) for durations in kinds.values()]) / seconds
    found = _not_negative(features * weights[:, None], seconds * weights)
    often = np.array([len(durations) for durations in kinds.values()])
    scale = float((seconds @ often) / (features @ found @ often))
    predicted = features @ found * scale
    return Fit(
        dict(zip(TERMS, (found * scale).tolist(), strict=True)),
        float(np.mean(np.abs(predicted / seconds - 1))),
        scale,
        len(rows),
        frontend_s,
    )


def _not_negative(
    features: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Least squares; the most negative term is left out until none is negative."""
    used = list(range(features.shape[1]))
    while True:
        scale = np.abs(features[:, used]).max(axis=0)
        found, *_ = np.linalg.lstsq(features[:, used] / scale, wanted, rcond=None)
        found = found / scale
        if (found >= 0).all():
            result = np.zeros(features.shape[1])
            result[used] = found
            return result
        del used[int(np.argmin(found * scale))]


def profile_of(
    fit: Fit, model: str, gpu: str, engine: str, max_tokens: int, max_seqs: int
) -> dict[str, Any]:
    """The fit as a step-time profile of the twin (the data of its JSON file)."""
    ps = {name: value * 1e12 for name, value in fit.seconds.items()}

    def line(base: float, slope: float, last: int) -> list[list[float]]:
        return [[0, base], [last, base + slope * last]]

    return {
        "provenance": {
            "model": model,
            "gpu": gpu,
            "tensor_parallel_size": 1,
            "dtype": "float32",
            "kv_cache_dtype": "float32",
            "engine": engine,
            "source": f"{fit.steps} steps of a live server",
            "licence": "own measurement",
            "date": "2026-01-01",
            "script": "real/calibrate.py",
            "fit_error": {"mape": fit.mape},
            "notes": ["Everything but attention is in the table over tokens."],
        },
        "max_context": 131072,
        "capture_sizes": [],
        "dense_ps": line(max(ps["base"], 1.0), ps["tokens"], max_tokens),
        "comm_ps": [],
        "sample_ps": [[0, 0], [max_seqs, 0]],
        "prefill_pair_ps": ps["pairs"],
        "decode_base_ps": line(0.0, ps["decodes"], max_seqs),
        "decode_context_ps": [[0, ps["context"]], [max_seqs, ps["context"]]],
        "host_sync_ps": [[0, 0], [max_seqs, 0]],
        "host_async_ps": [[0, 0], [max_seqs, 0]],
        "gap_ps": 0,
    }


def median_gap(seen: Iterable[float], scheduled: Iterable[float]) -> float:
    """Median of what clients saw minus median of what the scheduler saw."""
    return max(0.0, statistics.median(seen) - statistics.median(scheduled))
