"""How long do an engine's steps take? Measured on purpose, fitted, and written as a step-time profile of the twin.

Steps come from the in-process engine (real.engine_steps), from a recording of a live server (real.record) or from what
clients of a live server see (real.live_steps). The form of the fit and the fit itself are the twin's
(twin.step_time.fit); docs/measure.md says which errors to expect of it.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from twin.errors import InputError
from twin.step_time.fit import Step, StepFit, fit_steps, mape, profile_of
from twin.step_time.profiles import FEW_TOKENS, MAX_FALL_OF_FEW, Profile, Provenance

KNOTS = (1, 16, 64, 256, 1024, 4096, 16384)
"""Token counts at which the dense work of a step may bend, as far as the measured ones reach."""

FINE_KNOTS = (*range(1, FEW_TOKENS), *(m << k for k in range(2, 15) for m in (2, 3)))
"""The same where steps of all sizes were measured, of one and of several prompts: 1 to 7, then powers of two and
halfway between them."""

NEAR = 1.2
"""Measured counts up to this factor off a knot speak for it."""


@dataclass(frozen=True)
class Timed:
    """A step with the part of it that the scheduler took."""

    step: Step
    """All of it."""
    host_s: float
    """0 where it is not known."""


@dataclass(frozen=True)
class Calibration:
    """What was fitted to what."""

    fit: StepFit
    """Of the steps without the scheduler's part."""
    host: tuple[float, float]
    """Seconds of the scheduler and its update: of a step, and of each request in it; (0, 0) where it is in the fit."""
    steps: int
    """Different steps that were fitted."""
    noise: float
    """Of a single measurement of a step against the median of its repeats (`noise_of`); 0 without repeats."""
    mape: Mapping[str, float]
    """Mean absolute relative error over all steps and by kind, the scheduler's part included."""
    frontend_s: float
    """Time to first token outside the scheduler: HTTP, tokenizer, queues between processes; 0 where it is not known."""
    largest: Mapping[str, int]
    """What was measured at most: tokens and requests of a step, tokens of one context."""

    def seconds(self, step: Step) -> float:
        """What a step should take."""
        return self.fit.seconds(step) + self.host[0] + self.host[1] * step.seqs

    def to_dict(self) -> dict[str, Any]:
        """As data, for the file beside the profile."""
        return {
            "steps": self.steps,
            "noise": self.noise,
            "mape": dict(self.mape),
            "frontend_s": self.frontend_s,
            "largest": dict(self.largest),
            "host_s": {"step": self.host[0], "request": self.host[1]},
            "scaled_by": self.fit.scaled_by,
            "terms_s": {
                "dense": [list(point) for point in self.fit.dense],
                "decode": [list(point) for point in self.fit.decode],
                "sampled": self.fit.sampled_s,
                "context_token": self.fit.context_s,
                "pair": self.fit.pair_s,
            },
        }


def steps_of(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Timed], float]:
    """(steps, noise) of rows of real.engine_steps: the median of the repeats of each step.

    Raises InputError where repeats of a step do not have the same content, so that they say nothing of one another.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["workload"], row["number"]].append(row)
    steps, noise = [], []
    for (workload, number), found in groups.items():
        contents = {(r["tokens"], r["decodes"], r["context"], r["pairs"]) for r in found}
        if len(contents) > 1:
            raise InputError(
                f"calibration: step {number} of workload {workload} has another content in each repeat; something else "
                "uses this engine"
            )
        middle = statistics.median(r["seconds"] for r in found)
        noise += [abs(r["seconds"] / middle - 1) for r in found] if len(found) > 1 else []
        host_s = statistics.median(r.get("host_s", 0.0) for r in found)
        steps.append(Timed(step_of(found[0], middle, f"{workload} {number}"), host_s))
    return steps, noise_of(noise)


def noise_of(differences: Sequence[float]) -> float:
    """Mean of relative differences without the largest 2 %: a stall of seconds says nothing of the other steps."""
    kept = sorted(differences)[: math.ceil(0.98 * len(differences))]
    return statistics.fmean(kept) if kept else 0.0


def step_of(row: Mapping[str, Any], seconds: float, name: str = "") -> Step:
    """A row's content as a step."""
    return Step(
        row["tokens"], row["decodes"], row["context"], row["pairs"], seconds, row.get("seqs", 0),
        row.get("sampled", 0), name,
    )  # fmt: skip


def calibrate(
    steps: Sequence[Timed],
    *,
    noise: float = 0.0,
    frontend_s: float = 0.0,
    longest_context: int = 0,
    match_total: bool = False,
    fine: bool = False,
) -> Calibration:
    """Fit. With `match_total` the time of all steps together comes out exactly, disturbances included.

    With `fine` dense work bends at FINE_KNOTS as far as steps speak for them, else at KNOTS: where each step has one
    prompt at most, a table that fine and a term of its square can stand for one another.

    Raises InputError with too few steps of different content.
    """
    most = max((timed.step.tokens for timed in steps), default=0)
    if len(steps) < 50:
        raise InputError(f"calibration: {len(steps)} steps; at least 50 are needed")
    host = _host(steps)
    rest = [replace(t.step, seconds=max(t.step.seconds - _line(host, t.step), 1e-9)) for t in steps]
    decodes = max(t.step.decodes for t in steps)
    decode_knots = [n for n in (0, 4, 16, 64) if n < decodes / 1.5]
    knots = _knots([t.step for t in steps]) if fine else [n for n in KNOTS if n < most / 1.5] or [1]

    def fitted(may_fall_to: int) -> StepFit:
        return fit_steps(
            rest,
            [*knots, most],
            [*decode_knots, decodes],
            may_fall_to=may_fall_to,
            match_total=match_total,
        )

    fit = fitted(FEW_TOKENS if fine else 0)
    if any(after < MAX_FALL_OF_FEW * before for (_, before), (_, after) in pairwise(fit.dense)):
        fit = fitted(0)  # such a fall is noise, which no profile may have
    found = Calibration(fit, host, len(steps), noise, {}, frontend_s, {})
    errors = error_of(found, [t.step for t in steps])
    largest = {
        "tokens": most,
        "requests": max(t.step.seqs or t.step.decodes for t in steps),
        "context": longest_context,
    }
    return replace(found, mape=errors, largest=largest)


def _knots(steps: Sequence[Step]) -> list[int]:
    """Of FINE_KNOTS those for which at least three steps speak, with four steps of different content for each.

    Few tokens are spoken for by no other count.
    """
    counts = sorted(step.tokens for step in steps)
    found = [n for n in FINE_KNOTS if n < counts[-1] / 1.5 and _speak_for(n, counts) >= 3]
    contents = len({(s.tokens, s.decodes, s.context, s.pairs) for s in steps})
    while len(found) > max(1, contents // 4):
        found = found[::2]
    return found or [1]


def _speak_for(knot: int, counts: Sequence[int]) -> int:
    if knot <= FEW_TOKENS:
        return counts.count(knot)
    return sum(knot / NEAR < count < knot * NEAR for count in counts)


def error_of(found: Calibration, steps: Sequence[Step]) -> dict[str, float]:
    """Mean absolute relative error over steps: `all`, and by kind."""
    whole = [replace(step, seconds=step.seconds - _line(found.host, step)) for step in steps]
    by_kind = mape(found.fit, [step for step in whole if step.seconds > 0])
    every = [abs(found.seconds(step) / step.seconds - 1) for step in steps]
    return {"all": statistics.fmean(every), **by_kind}


def total_error(found: Calibration, steps: Sequence[Step]) -> float:
    """Relative error of the time of all steps together."""
    return sum(found.seconds(s) for s in steps) / sum(s.seconds for s in steps) - 1


def _host(steps: Sequence[Timed]) -> tuple[float, float]:
    """Seconds of the scheduler by step and by request: a line without a negative term, by relative least squares."""
    known = [(t.step.seqs, t.host_s) for t in steps if t.host_s > 0 and t.step.seqs]
    if len(known) < 10:
        return 0.0, 0.0
    seqs, seconds = (np.array(column, dtype=float) for column in zip(*known, strict=True))
    features = np.stack([np.ones(len(seqs)), seqs], axis=1) / seconds[:, None]
    base, each = np.linalg.lstsq(features, np.ones(len(seqs)), rcond=None)[0]
    if base < 0 or each < 0:
        return (float(np.mean(seconds)), 0.0) if each < 0 else (0.0, float(np.mean(seconds / seqs)))
    return float(base), float(each)


def _line(host: tuple[float, float], step: Step) -> float:
    return host[0] + host[1] * step.seqs


def profile(
    found: Calibration,
    provenance: Provenance,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> Profile:
    """The calibration as a profile that covers an engine with these limits.

    Its tables go beyond what was measured on their last slope where the limits do, and a note says so.
    """
    notes = [
        f"Fitted to {found.steps} steps; noise of a single measurement {100 * found.noise:.1f} %.",
        "Measured up to " + ", ".join(f"{n:,} {name}" for name, n in found.largest.items()) + ".",
    ]
    if found.frontend_s:
        notes.append(
            f"A request spends {1e3 * found.frontend_s:.2f} ms outside the scheduler before its first token, which no "
            "step has."
        )
    fit = found.fit
    if fit.dense[-1][0] < max_num_batched_tokens:
        notes.append(f"Beyond {fit.dense[-1][0]:,} tokens the last slope goes on.")
        (x0, y0), (x1, y1) = fit.dense[-2:]
        last = y1 + (y1 - y0) * (max_num_batched_tokens - x1) / (x1 - x0)
        fit = replace(fit, dense=(*fit.dense, (max_num_batched_tokens, last)))
    errors = {"step_mape": round(found.mape["all"], 4), "noise": round(found.noise, 4)}
    about = replace(
        provenance,
        fit_error={**provenance.fit_error, **errors},
        notes=(*provenance.notes, *notes),
    )
    context = found.largest.get("context") or max_model_len
    made = profile_of(fit, about, max_context=context, max_num_seqs=max_num_seqs)
    base, each = (round(seconds * 10**12) for seconds in found.host)
    return replace(made, host_sync_ps=((0, base), (max_num_seqs, base + each * max_num_seqs)))


def read_recording(path: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Steps, and times to first token as the scheduler saw them, of a recording of a live server (real.record)."""
    steps, firsts = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "step":
            steps.append(row)
        elif row["kind"] == "first":  # others are of what was asked and decided
            firsts.append(row["ttft_s"])
    return steps, firsts


def recorded_steps(rows: Iterable[Mapping[str, Any]]) -> list[Timed]:
    """The steps of a recording; the scheduler's part is in their whole."""
    return [Timed(step_of(row, row["duration_s"], str(i)), 0.0) for i, row in enumerate(rows)]
