"""How long do a live server's steps take, seen from outside? A sweep whose steps its clients can tell apart.

Requests that decode together get a token each step, so that the time between tokens, over several of them, is that of
steps of known content. While they decode, a prompt is sent that asks for one token: one of their steps then computes
it, and what this stretch takes beyond the steps without it is that step. No restart, no plug-in; prompts are never
repeated, so that nothing is found in the prefix cache.
"""

import asyncio
import random
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from real.calibrate import Timed, calibrate, noise_of
from real.calls import Call, Reply
from real.client import Client
from real.prompts import Prompts
from real.sweep import BATCHES, CHUNKS, CONTEXTS, Limits
from twin.errors import InputError
from twin.step_time.fit import Step

DECODES = 24
"""Steps of a batch before a prompt is added, and after each added one."""
ADDED = 3
"""Prompts added to a batch, one after the other."""
FEWEST = 8
"""Steps of a stretch without a prompt, whose mean is taken: where a client sees several tokens at once, only a stretch
as a whole tells how long its steps were."""
ODD = 2.0
"""A stretch whose steps took so many times as long as those of the others of the batch, or as short, is left out."""


@dataclass(frozen=True)
class Trial:
    """A batch that decodes, and the prompts that are added to it."""

    batch: int
    context: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Live:
    """What was measured."""

    steps: list[Timed]
    noise: float
    """Mean relative difference of what single clients saw of a step from the median of all."""
    frontend_s: float
    late_p99_s: float
    """Of the requests of the batches, from when they should have been sent."""
    longest: int
    """Longest context, in tokens."""
    seconds: float


FEWEST_STEPS, ENOUGH = 50, 100
"""Steps without which nothing is fitted; steps before which batches are played again while there is time."""


def trials(limits: Limits, load: float, seed: int = 0) -> Iterator[Trial]:
    """Batches of all sizes up to a share of the slots and of the KV cache, with contexts and chunks of all sizes."""
    rng = random.Random(seed)
    most = max(1, int(limits.max_num_seqs * load))
    chunks = [
        c
        for c in CHUNKS
        if c + most <= limits.max_num_batched_tokens and c < limits.max_model_len - 2
    ]
    if not chunks:
        raise InputError(
            f"calibration: no prompt fits into a step beside {most} requests that decode; "
            f"engine.max_num_batched_tokens ({limits.max_num_batched_tokens:,}) must be at least {CHUNKS[0] + most} "
            f"and engine.max_model_len ({limits.max_model_len:,}) more than {CHUNKS[0] + 2}, or --load smaller"
        )
    room = limits.kv_tokens * load
    shapes = [
        (batch, context)
        for batch in [*(b for b in BATCHES if b < most), most]
        for context in CONTEXTS
        if context + DECODES * (ADDED + 2) < limits.max_model_len
        and batch * (context + DECODES * (ADDED + 2)) + max(chunks) < room
    ]
    if not shapes:
        least = CONTEXTS[0] + DECODES * (ADDED + 2)
        raise InputError(
            f"calibration: nothing can be measured within engine.max_model_len {limits.max_model_len:,}, which must be "
            f"above {least:,} tokens, and --load {load:g} of {limits.kv_tokens:,} tokens of KV cache ({room:,.0f}), "
            f"which must be above {least + max(chunks):,}"
        )
    rng.shuffle(shapes)
    for number, (batch, context) in enumerate(shapes):
        yield Trial(
            batch, context, tuple(chunks[(number + 2 * i) % len(chunks)] for i in range(ADDED))
        )


async def measure(
    url: str,
    model: str,
    limits: Limits,
    vocabulary: int,
    seconds: float,
    load: float,
    headers: Mapping[str, str] | None = None,
) -> Live:
    """Play trials until the time is over, which ends one that is being played, or all are done and steps enough seen.

    Raises InputError where the server refuses or falls short.
    """
    planned = list(trials(limits, load))
    begun = time.monotonic()
    steps: list[Timed] = []
    noise: list[float] = []
    late: list[float] = []
    lone: list[tuple[int, float]] = []
    longest = number = 0
    is_up = False
    async with Client(url, model, timeout_s=seconds, headers=headers) as client:
        client.start()
        player = _Player(client, Prompts(vocabulary, seed=time.time_ns()))
        try:
            async with asyncio.timeout(seconds):
                await player.alone(64)
                is_up = True
                for trial in cycle(planned):
                    if number >= len(planned) and len(plausible(steps)) >= ENOUGH:
                        break
                    for _ in range(2 if number % 8 == 0 else 0):
                        tokens = CHUNKS[number // 8 % 3]
                        lone.append((tokens, await player.alone(tokens)))
                    number += 1
                    replies, added, lateness = await player.play(trial)
                    late += lateness
                    found, spread = steps_seen(trial, replies, added)
                    steps += found
                    noise += spread
                    longest = max(longest, trial.context + DECODES * (ADDED + 2), *trial.chunks)
        except TimeoutError:
            pass  # what was seen until now is judged below
    if not is_up:
        raise InputError(f"calibration: the server gave no whole reply in {seconds:g} s")
    steps = plausible(steps)
    if len(steps) < FEWEST_STEPS:
        raise InputError(
            f"calibration: only {len(steps)} of the {FEWEST_STEPS} steps that are needed could be told apart in "
            f"{seconds:g} s, in {number} batches ({len(planned)} different ones fit, played again and again); give it "
            "more --minutes or --load, or a server with less other traffic"
        )
    return Live(
        steps,
        noise_of(noise),
        _frontend(steps, lone),
        float(np.percentile(late, 99)),
        longest,
        time.monotonic() - begun,
    )


class _Player:
    def __init__(self, client: Client, prompts: Prompts) -> None:
        self._client, self._prompts, self._number = client, prompts, 0

    def _call(self, tokens: int, output: int) -> Call:
        self._number += 1
        ids = self._prompts.tokens((), tokens, {}, self._number)
        return Call(self._client.now_s, ids, output)

    async def alone(self, tokens: int) -> float:
        """Time to first token of a prompt alone on the server."""
        reply = _checked(await self._client.ask(self._call(tokens, 2)))
        return reply.token_s[0] - reply.sent_s

    async def play(self, trial: Trial) -> tuple[list[Reply], list[Reply], list[float]]:
        """(replies of the batch, of the added prompts, lateness)."""
        output = DECODES * (ADDED + 2)
        calls = [self._call(trial.context, output) for _ in range(trial.batch)]
        due_s, begun = self._client.now_s, time.monotonic()
        tasks = [asyncio.create_task(self._client.ask(call)) for call in calls]
        try:
            return await self._added(trial, tasks, due_s, begun)
        finally:
            for task in tasks:
                task.cancel()

    async def _added(
        self, trial: Trial, tasks: list[asyncio.Task[Reply]], due_s: float, begun: float
    ) -> tuple[list[Reply], list[Reply], list[float]]:
        added: list[Reply] = []
        # How far the batch is is told at its end only; the time of the prompts says how fast the server is.
        await asyncio.sleep(0.05)
        for chunk in trial.chunks:
            if all(task.done() for task in tasks):
                break
            added.append(_checked(await self._client.ask(self._call(chunk, 1))))
            await asyncio.sleep(min(0.3, 0.2 * (time.monotonic() - begun)))
        replies = [_checked(reply) for reply in await asyncio.gather(*tasks)]
        return replies, added, [max(0.0, reply.sent_s - due_s) for reply in replies]


def _checked(reply: Reply) -> Reply:
    if reply.fault.startswith("no end"):
        raise TimeoutError
    if reply.status != 200 or reply.error or not reply.token_s:
        raise InputError(
            f"calibration: the server answered {reply.status or 'nothing'}: {reply.error[:200] or 'no token'}"
        )
    return reply


def steps_seen(
    trial: Trial, replies: Sequence[Reply], added: Sequence[Reply]
) -> tuple[list[Timed], list[float]]:
    """The steps in which the whole batch decoded, alone (the mean of a stretch of them) or with one added prompt.

    Also the relative differences of what single requests of the batch saw from the median of all. What lies before the
    last first token of the batch and after the first end of a request is left out.
    """
    first = max(reply.token_s[0] for reply in replies)
    last = min(reply.token_s[-1] for reply in replies)
    taken = [
        (reply.sent_s, reply.token_s[0], chunk)
        for reply, chunk in zip(added, trial.chunks, strict=False)
    ]
    steps: list[Timed] = []
    spread: list[float] = []
    stretches: list[tuple[float, float]] = []  # (context, seconds of a step)
    for start_s, end_s in _free(first, last, [(a, b) for a, b, _ in taken]):
        seen = [_between(reply.token_s, start_s, end_s) for reply in replies]
        if min(b - a for a, b in seen) < FEWEST:
            continue
        each = [
            (reply.token_s[b] - reply.token_s[a]) / (b - a)
            for reply, (a, b) in zip(replies, seen, strict=True)
        ]
        middle = statistics.median(each)
        context = sum(trial.context + (a + b + 1) / 2 for a, b in seen)
        stretches.append((context, middle))
        spread += [abs(one / middle - 1) for one in each if middle > 0]
    if not stretches:
        return [], []
    gap = statistics.median(seconds for _, seconds in stretches)
    for context, seconds in stretches:
        # A client that stalls sees the tokens of a stretch bunched behind those of the one before.
        if gap / ODD < seconds < gap * ODD:
            steps.append(_step(trial, context, 0, seconds))
    for sent_s, token_s, chunk in taken:
        each, contexts = [], 0
        for reply in replies:
            before = bisect_left(reply.token_s, sent_s) - 1
            after = bisect_left(reply.token_s, token_s) + 1
            if before < 0 or after >= len(reply.token_s) or not first <= reply.token_s[before]:
                break
            span = reply.token_s[after] - reply.token_s[before]
            each.append(span - (after - before - 1) * gap)
            contexts += trial.context + after
        if len(each) == len(replies) and (seconds := statistics.median(each)) > 0.8 * gap:
            steps.append(_step(trial, contexts, chunk, seconds))
    return steps, spread


def plausible(steps: Sequence[Timed]) -> list[Timed]:
    """Without steps so short that their tokens can only have been read together: a fifth of the median decode step."""
    alone = [t.step.seconds for t in steps if t.step.kind == "decode"]
    if not alone:
        return list(steps)
    least = statistics.median(alone) / 5
    return [t for t in steps if t.step.seconds >= least]


def _step(trial: Trial, context: float, chunk: int, seconds: float) -> Timed:
    batch, seqs = trial.batch, trial.batch + bool(chunk)
    pairs = chunk * (chunk + 1) / 2
    name = f"{batch} x {trial.context} + {chunk}"
    return Timed(Step(batch + chunk, batch, round(context), pairs, seconds, seqs, seqs, name), 0.0)


def _free(
    first: float, last: float, taken: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """The parts of [first, last] outside of the intervals."""
    start = first
    for begin, end in sorted(taken):
        if begin > start:
            yield start, min(begin, last)
        start = max(start, end)
    if last > start:
        yield start, last


def _between(times: Sequence[float], start: float, end: float) -> tuple[int, int]:
    """(first index at or after start, last index at or before end), the first one left out: it may be of the step
    that ends there.
    """
    return bisect_left(times, start) + 1, bisect_right(times, end) - 1


def _frontend(steps: Sequence[Timed], lone: Sequence[tuple[int, float]]) -> float:
    """What a lone request takes to its first token beyond the step that computes it, by a fit of the steps alone."""
    found = calibrate(steps)
    beyond = [
        seconds - found.seconds(Step(n, 0, 0, n * (n + 1) / 2, 0.0, 1, 1)) for n, seconds in lone
    ]
    return max(0.0, statistics.median(beyond)) if beyond else 0.0
