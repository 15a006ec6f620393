"""Which requests make steps of every kind? A designed sweep: batch x context x chunk.

A fit of what real traffic happens to contain extrapolates badly (docs/design.md); so does one whose batches all have
the same context. Each workload starts a batch of prompts of one length, lets it decode, and then adds prompts while it
does, so that it has steps of prompts alone, of decodes alone and of both.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

CONTEXTS = (16, 64, 192, 512, 1024, 2048, 4096, 8192)
CHUNKS = (16, 48, 128, 320, 768, 1536, 3072, 6144, 12288)
BETWEEN = (8, 24, 80, 192, 512)
"""More of them where steps are measured in-process, which takes less time than from outside."""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WARM_UP = 6
"""Workloads that an engine plays once before anything is counted."""
PLAYED = "twin-real: a workload has been played\n"
"""What an engine that is measured says after each."""
DECODES = 6
"""Steps of a batch alone before something is added to it."""


@dataclass(frozen=True)
class Ask:
    """One request of a workload."""

    step: int
    """The step before which it is added, counted from the start of the workload."""
    prompt_tokens: int
    output_tokens: int
    repeats: int | None = None
    """Its prompt begins with the first `cached` tokens of this request of the workload."""
    cached: int = 0


@dataclass(frozen=True)
class Limits:
    """What the engine takes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int
    """Tokens that all requests together may hold."""
    block_size: int


def sweep(limits: Limits, seed: int = 0) -> list[list[Ask]]:
    """The workloads, batches of all sizes and contexts that fit, in an order that mixes them.

    Raises ValueError where hardly anything fits.
    """
    least = min(BETWEEN)
    if limits.max_num_batched_tokens < least:
        raise ValueError(
            f"max_num_batched_tokens {limits.max_num_batched_tokens}: prompts of {least} tokens and more are measured; "
            f"set it to {least} at least, or measure the server itself with --url"
        )
    found = list(_workloads(limits))
    if len(found) < 8:
        raise ValueError(
            f"only {len(found)} workloads fit into max_num_seqs {limits.max_num_seqs}, max_num_batched_tokens "
            f"{limits.max_num_batched_tokens}, max_model_len {limits.max_model_len} and {limits.kv_tokens} tokens of "
            "KV, and at least 8 are needed; raise the first three, max_num_seqs to 4 at least, or measure the server "
            "itself with --url"
        )
    random.Random(seed).shuffle(found)
    return found


def _workloads(limits: Limits) -> Iterator[list[Ask]]:
    chunks = [c for c in sorted((*CHUNKS, *BETWEEN)) if c <= limits.max_num_batched_tokens]
    number = 0
    for batch in _up_to(BATCHES, limits.max_num_seqs - 1):
        for context in CONTEXTS:
            number += 1
            # Chunks of all sizes meet batches of all sizes, some on a cached beginning.
            added = [chunks[(number + i * 2) % len(chunks)] for i in range(3)]
            room = limits.kv_tokens - batch * _blocks(context + 4 * DECODES, limits)
            asks = [Ask(0, context, 4 * DECODES) for _ in range(batch)]
            for i, chunk in enumerate(added):
                cached = context // limits.block_size * limits.block_size if i else 0
                tokens = cached + chunk
                if tokens + 2 > limits.max_model_len:
                    cached, tokens = 0, chunk
                if tokens + 2 > limits.max_model_len or _blocks(tokens + 2, limits) > room:
                    continue
                room -= _blocks(tokens + 2, limits)
                repeats = 0 if cached else None
                asks.append(Ask(DECODES * (i + 1) + 1, tokens, 2, repeats, cached))
            fits = context + 4 * DECODES <= limits.max_model_len and room >= 0
            if fits and (batch == 1 or batch * context <= 8 * limits.max_num_batched_tokens):
                yield asks


def unseen(limits: Limits, kind: str, seed: int = 7) -> list[Ask]:
    """A workload that the sweep has nothing of, to test a fit on.

    mix: prompts and replies of all lengths, added at random; chat: short prompts and longer replies, in waves.
    """
    rng = random.Random(f"{seed}/{kind}")
    asks, step = [], 0
    longest = max(1, min(limits.max_model_len // 2, limits.kv_tokens // 4))
    most = min(limits.max_model_len, limits.kv_tokens)
    for i in range(30):
        if kind == "mix":
            step += rng.randint(0, 6)
            prompt = int(longest ** rng.uniform(0.3, 1.0))
            output = rng.randint(4, 40)
        else:
            step += 25 if i % 6 == 0 else rng.randint(0, 2)
            prompt = rng.randint(min(20, longest), min(200, longest))
            output = rng.randint(20, 60)
        asks.append(Ask(step, max(1, prompt), max(1, min(output, most - prompt))))
    return asks


def _up_to(values: tuple[int, ...], limit: int) -> list[int]:
    """Those up to a limit, and the limit itself."""
    below = [value for value in values if value < limit]
    return [*below, max(1, limit)]


def _blocks(tokens: int, limits: Limits) -> int:
    """Tokens of the blocks that hold so many."""
    return -(-tokens // limits.block_size) * limits.block_size
