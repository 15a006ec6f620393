"""What do measured steps say about the terms of a step? A fit of the one formula of `twin.step_time.model`.

    seconds = dense(tokens) + decode(decodes) + sampled * s + context * d + pairs * e

`dense` and `decode` are piecewise linear and never fall, but for `dense` of few tokens where that is asked for; no term
is negative. So a fit with two knots is a line, and one with more follows a GPU, whose dense work is flat while
memory-bound and rises after, or a CPU, whose work for each token falls where another kernel takes over.
Relative least squares: a step of 10 ms counts as much as one of 500 ms.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from twin.errors import InputError
from twin.step_time.profiles import Profile, Provenance

Floats = npt.NDArray[np.float64]

KINDS = ("decode", "context", "mixed")
"""What a step holds: decodes alone, chunks of prompts alone, or both."""


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step. The counts are those of `StepTime.step_ps`."""

    tokens: int
    """Scheduled tokens (padded ones, if the engine pads)."""
    decodes: int
    """Requests with exactly one new token at or after the end of their prompt."""
    context: int
    """Sum over those of (computed tokens + 1)."""
    pairs: float
    """Sum over prompt chunks of n*c + n*(n+1)/2, n new tokens on c computed ones."""
    seconds: float
    seqs: int = 0
    """Scheduled requests; 0 = not recorded."""
    sampled: int = 0
    """Requests that get a token; 0 = not recorded, or part of the other terms."""
    name: str = ""
    """Where it was recorded, for messages."""

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.tokens == self.decodes:
            return "decode"
        return "mixed" if self.decodes else "context"


@dataclass(frozen=True)
class StepFit:
    """The terms, in seconds."""

    dense: tuple[tuple[int, float], ...]
    """(tokens, seconds) at the knots; linear in between."""
    decode: tuple[tuple[int, float], ...]
    """(decodes, seconds) at the knots, 0 for none."""
    sampled_s: float
    """Per sampled request."""
    context_s: float
    """Per token of context."""
    pair_s: float
    """Per (query, key) pair."""
    mape: Mapping[str, float]
    """Mean absolute relative error over the steps it was fitted to, by kind."""
    scaled_by: float
    """Factor on all terms that makes the time of all steps the measured one; 1 if not asked for."""
    steps: int
    """Measured steps it was fitted to."""

    def seconds(self, step: Step) -> float:
        """What a step should take."""
        return (
            _at(step.tokens, self.dense)
            + _at(step.decodes, self.decode)
            + step.sampled * self.sampled_s
            + step.context * self.context_s
            + step.pairs * self.pair_s
        )


def fit_steps(
    steps: Sequence[Step],
    token_knots: Sequence[int],
    decode_knots: Sequence[int] = (),
    *,
    may_fall_to: int = 0,
    balance_kinds: bool = False,
    match_total: bool = False,
) -> StepFit:
    """The fit.

    Args:
        steps: Measured ones. Steps of equal content are averaged first and count by their number.
        token_knots: Rising token counts at which `dense` may bend; two make it a line.
        decode_knots: The same for `decode`; () = a line from 0 through the largest number of decodes.
        may_fall_to: Up to so many tokens `dense` may fall, too: other kernels run on few rows, and two rows can take
            longer than three.
        balance_kinds: Each of KINDS counts equally, however many steps it has; else each step counts equally.
        match_total: Scale all terms so that the time of all steps together is the measured one: what disturbs a
            machine now and then belongs to its time.

    Raises ValueError with fewer than two knots or knots that do not rise, and InputError with fewer steps of different
    content than terms, and where scipy (extra `profiles`) is not installed.
    """
    if not decode_knots:
        decode_knots = (0, max((step.decodes for step in steps), default=1) or 1)
    elif decode_knots[0] != 0:
        decode_knots = (0, *decode_knots)
    for name, knots in (("token_knots", token_knots), ("decode_knots", decode_knots)):
        if len(knots) < 2 or any(b <= a for a, b in pairwise(knots)):
            raise ValueError(f"{name} ({list(knots)}) must be at least two rising counts")
    kinds = _equal_contents(steps)
    few = max(1, sum(n <= may_fall_to for n in token_knots))
    matrix = _features(list(kinds), token_knots, decode_knots, few)
    if len(kinds) < matrix.shape[1]:
        raise InputError(
            f"calibration: {len(kinds)} steps of different content do not determine {matrix.shape[1]} terms; measure "
            "more batch sizes, contexts and chunks"
        )
    often = np.array([len(times) for times in kinds.values()], dtype=np.float64)
    seconds = np.array([math.fsum(times) / len(times) for times in kinds.values()])
    weights = np.sqrt(often) / seconds
    if balance_kinds:
        totals: dict[str, float] = defaultdict(float)
        for step, n in zip(kinds, often, strict=True):
            totals[step.kind] += n
        weights = weights / np.sqrt([totals[step.kind] for step in kinds])
    terms = _not_negative(matrix * weights[:, None], seconds * weights)
    scale = float((seconds @ often) / (matrix @ terms @ often)) if match_total else 1.0
    terms = terms * scale
    rises = np.cumsum(terms[few - 1 : len(token_knots)])
    dense = [*terms[: few - 1].tolist(), *rises.tolist()]
    decode = [0.0, *np.cumsum(terms[len(token_knots) : -3]).tolist()]
    fit = StepFit(
        dense=tuple(zip(token_knots, dense, strict=True)),
        decode=tuple(zip(decode_knots, decode, strict=True)),
        sampled_s=float(terms[-3]),
        context_s=float(terms[-2]),
        pair_s=float(terms[-1]),
        mape={},
        scaled_by=scale,
        steps=len(steps),
    )
    return StepFit(**{**vars(fit), "mape": mape(fit, steps)})


def mape(fit: StepFit, steps: Iterable[Step]) -> dict[str, float]:
    """Mean absolute relative error of the fit by kind of step, over the kinds there are."""
    errors: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        errors[step.kind].append(abs(fit.seconds(step) / step.seconds - 1))
    return {kind: math.fsum(errors[kind]) / len(errors[kind]) for kind in KINDS if errors[kind]}


def misbooked(fit: StepFit, steps: Sequence[Step]) -> list[Step]:
    """Pairs of consecutive steps of which the first was booked with the time of both.

    Recognised where the first took more than 1.5 times what the fit says, the second less than half of it, and both
    together lie within 15 % of it. They say nothing of a step's time and may be left out of a fit, by name.
    """
    found: list[Step] = []
    for first, second in pairwise(steps):
        said = fit.seconds(first), fit.seconds(second)
        together = (first.seconds + second.seconds) / sum(said)
        if (
            first.seconds > 1.5 * said[0]
            and second.seconds < 0.5 * said[1]
            and abs(together - 1) < 0.15
        ):
            found += [first, second]
    return found


def third(number: int, run: int) -> list[bool]:
    """Which of `number` consecutive rows are in the fitted third: every third run of `run` rows, the first included."""
    return [i // run % 3 == 0 for i in range(number)]


def profile_of(
    fit: StepFit,
    provenance: Provenance,
    *,
    max_context: int,
    max_num_seqs: int,
    capture_sizes: Sequence[int] = (),
) -> Profile:
    """The fit as a step-time profile of the twin.

    Whatever is not attention is in the table over tokens: host work cannot be told from the GPU's by the length of
    steps, so the host's own terms are 0, in both modes. `provenance.fit_error` gets the error of each kind. The profile
    covers token counts up to the last knot. `max_num_seqs` is the largest number of requests that was measured.
    """
    ps = 1e12
    by_request = ((0, 0), (max_num_seqs, 0))
    last = fit.decode[-1]
    slope = (last[1] - fit.decode[-2][1]) / (last[0] - fit.decode[-2][0])
    decode = [(n, _picoseconds(s)) for n, s in fit.decode if n <= max_num_seqs]
    if decode[-1][0] < max_num_seqs:
        decode.append((max_num_seqs, _picoseconds(last[1] + slope * (max_num_seqs - last[0]))))
    errors = {f"{kind}_steps": round(error, 4) for kind, error in fit.mape.items()}
    dense = [(n, max(1, _picoseconds(s))) for n, s in fit.dense]
    if dense[0][0] > 1:
        dense.insert(0, (1, dense[0][1]))
    return Profile(
        provenance=Provenance(
            **{**vars(provenance), "fit_error": {**provenance.fit_error, **errors}}
        ),
        max_context=max_context,
        capture_sizes=tuple(capture_sizes),
        dense_ps=tuple(dense),
        comm_ps=(),
        sample_ps=((0, 0), (max_num_seqs, _picoseconds(fit.sampled_s * max_num_seqs))),
        prefill_pair_ps=round(fit.pair_s * ps, 3),
        decode_base_ps=tuple(decode),
        decode_context_ps=((0, _picoseconds(fit.context_s)), (max_num_seqs, _picoseconds(fit.context_s))),
        host_sync_ps=by_request,
        host_async_ps=by_request,
        gap_ps=0,
    )  # fmt: skip


def _picoseconds(seconds: float) -> int:
    return round(seconds * 10**12)


def _equal_contents(steps: Iterable[Step]) -> dict[Step, list[float]]:
    """Seconds by content; the key is a step of that content."""
    first: dict[tuple[float, ...], Step] = {}
    times: dict[Step, list[float]] = {}
    for step in steps:
        content = (step.tokens, step.decodes, step.context, step.pairs, step.sampled)
        times.setdefault(first.setdefault(content, step), []).append(step.seconds)
    return times


def _features(
    steps: Sequence[Step], token_knots: Sequence[int], decode_knots: Sequence[int], few: int
) -> Floats:
    """[steps, terms]: dense at its first `few` knots and its rises after them, rises of decode, sampled, context,
    pairs.
    """

    def column(values: Iterable[float]) -> Floats:
        return np.array(list(values), dtype=np.float64)

    tokens = column(step.tokens for step in steps)
    columns = _shares(tokens, token_knots[:few])
    if few < len(token_knots):
        columns += _rises(tokens, token_knots[few - 1 :])
    columns += _rises(column(step.decodes for step in steps), decode_knots)
    columns += [
        column(step.sampled for step in steps),
        column(step.context for step in steps),
        column(step.pairs for step in steps),
    ]
    return np.stack(columns, axis=1)


def _shares(values: Floats, knots: Sequence[int]) -> list[Floats]:
    """What the level at each knot counts for at each value, linear in between; outside, the nearest knot counts."""
    found = [np.ones(len(values)) for _ in knots]
    for i, (a, b) in enumerate(pairwise(knots)):
        way = np.clip((values - a) / (b - a), 0, 1)
        found[i] = found[i] * (1 - way)
        found[i + 1] = found[i + 1] * way
    return found


def _rises(values: Floats, knots: Sequence[int]) -> list[Floats]:
    """How far each value is on the way from one knot to the next, 0 to 1; beyond the last one the last goes on."""
    found = [np.clip((values - a) / (b - a), 0, 1) for a, b in pairwise(knots)]
    a, b = knots[-2:]
    found[-1] = np.maximum(0, (values - a) / (b - a))
    return found


def _not_negative(matrix: Floats, wanted: Floats) -> Floats:
    """Least squares without a negative term."""
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise InputError(
            "calibration: fitting steps needs scipy; install it with pip install 'vllm-twin[profiles]'"
        ) from None
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    terms, _ = nnls(matrix / scale, wanted)
    return np.asarray(terms / scale)


def _at(x: int, points: Sequence[tuple[int, float]]) -> float:
    """Linear between the points, constant below the first, going on beyond the last."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + (y1 - y0) * (x - x1) / (x1 - x0)
