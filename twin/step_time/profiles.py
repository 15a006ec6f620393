"""Where do step times come from? A profile: measured or derived tables of one model on one GPU, with provenance.

This module reads no file: the caller hands over the parsed JSON and the names of the packaged profiles.
Numbers are picoseconds, as ints or decimals; `Profile.compile` interpolates and rounds each entry once.
"""

import difflib
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from itertools import pairwise
from typing import Any

from twin.errors import InputError
from twin.step_time.model import StepTime

Number = int | float
Points = tuple[tuple[int, Number], ...]
"""(count, picoseconds) with rising counts; linear in between, constant below the first."""

MOST_PS = 86_400 * 10**12
"""No part of a step takes longer than a day, and no token, pair or launch does."""

MAX_FALL = 0.9
"""Noise of measured times: more tokens may take this share of what fewer took, and no less."""

FEW_TOKENS, MAX_FALL_OF_FEW = 8, 0.5
"""With so few rows other kernels run, on CPUs above all, and more tokens may take this share."""

MAX_ROUNDING = Fraction(1, 1000)
"""Largest relative change of the time per context token that rounding to whole picoseconds may cause."""


@dataclass(frozen=True)
class Provenance:
    """What a profile describes and where its numbers come from."""

    model: str
    """Catalogue name or Hugging Face name of the model."""
    gpu: str
    """Catalogue name of the GPU."""
    tensor_parallel_size: int
    """GPUs per replica that the times are for."""
    dtype: str
    """Type of the weights: bfloat16, fp8, ..."""
    kv_cache_dtype: str
    """Type of keys and values in the cache."""
    engine: str
    """Engine and version whose kernels were measured."""
    source: str
    """Data the numbers were derived from."""
    licence: str
    """Licence of that data."""
    date: str
    """Day of generation, YYYY-MM-DD."""
    script: str
    """What generated the profile."""
    fit_error: Mapping[str, float]
    """Named relative errors of the tables and fits against the source; may be empty."""
    notes: tuple[str, ...]
    """Modelling choices and what is left out, one sentence each; may be empty."""


@dataclass(frozen=True)
class Profile:
    """Step times of one model on one GPU type at one tensor-parallel size, over their measured range."""

    provenance: Provenance
    max_context: int
    """Longest context, in tokens, that the attention terms were measured at."""
    capture_sizes: tuple[int, ...]
    """Token counts that may be captured as CUDA graphs, rising; empty = nothing is padded."""
    dense_ps: Points
    """GPU time that depends on the number of tokens alone."""
    comm_ps: Points
    """All-reduce time by tokens; empty where one GPU holds the model."""
    sample_ps: Points
    """Output layer and sampling, by sampled requests; 0 for none."""
    prefill_pair_ps: Number
    """Attention per (query, key) pair of prefill chunks."""
    decode_base_ps: Points
    """Attention of decodes at no context, by decodes."""
    decode_context_ps: Points
    """Attention of decodes per token of their summed context, by decodes."""
    host_sync_ps: Points
    """CPU time per step by scheduled requests, in sync mode: it adds to the GPU's."""
    host_async_ps: Points
    """The same in async mode: it runs beside the GPU."""
    gap_ps: Number
    """Time per step that async scheduling cannot hide."""
    prefill_base_ps: Number = 0
    """Attention of a step with any prefill chunk, whatever its pairs."""
    mixed_context_ps: Points = ()
    """What decodes take more per token of their summed context beside a prefill chunk, by decodes; empty = nothing.
    Kernels that compute both in one launch split long contexts less well."""
    gap_seq_ps: Number = 0
    """What async scheduling cannot hide of each scheduled request's work in a step."""

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens in a step that the tables cover."""
        return min(points[-1][0] for points in (self.dense_ps, self.comm_ps) if points)

    @property
    def max_num_seqs(self) -> int:
        """Largest number of requests in a step that the tables cover."""
        by_request = (
            self.sample_ps,
            self.decode_base_ps,
            self.decode_context_ps,
            self.host_sync_ps,
            self.host_async_ps,
            *([self.mixed_context_ps] if self.mixed_context_ps else []),
        )
        return min(points[-1][0] for points in by_request)

    def to_dict(self) -> dict[str, Any]:
        """The JSON mapping that `parse_profile` reads back to an equal profile."""
        result: dict[str, Any] = _lists(asdict(self))
        return result

    def compile(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        async_scheduling: bool,
        eager: bool = False,
    ) -> StepTime:
        """Tables of whole picoseconds up to the engine's limits.

        `eager` means that no CUDA graph is captured, so nothing is padded. Raises InputError where a limit exceeds the
        measured range, and where rounding changes the time per context token by more than 0.1 %.
        """
        where = self.subject()
        self._check_range("max_num_batched_tokens", max_num_batched_tokens, self.max_tokens)
        self._check_range("max_num_seqs", max_num_seqs, self.max_num_seqs)
        sizes = (
            []
            if eager
            else captured_sizes(self.capture_sizes, max_num_seqs, max_num_batched_tokens)
        )
        padded = [
            sizes[bisect_left(sizes, n)] if sizes and n <= sizes[-1] else n
            for n in range(max_num_batched_tokens + 1)
        ]
        padded[0] = 0
        dense = _table(self.dense_ps, max_num_batched_tokens)
        comm = _table(self.comm_ps, max_num_batched_tokens) if self.comm_ps else None
        pair = Fraction(str(self.prefill_pair_ps))
        host = self.host_async_ps if async_scheduling else self.host_sync_ps
        return StepTime(
            tokens_ps=[dense[n] + (comm[n] if comm else 0) for n in padded],
            sample_ps=[0, *_table(self.sample_ps, max_num_seqs)[1:]],
            decode_base_ps=[0, *_table(self.decode_base_ps, max_num_seqs)[1:]],
            decode_context_ps=[
                0,
                *_table(self.decode_context_ps, max_num_seqs, f"{where}: decode_context_ps")[1:],
            ],
            pair_num=pair.numerator,
            pair_den=pair.denominator,
            host_ps=_table(host, max_num_seqs),
            gap_ps=round(Fraction(str(self.gap_ps))) if async_scheduling else 0,
            async_scheduling=async_scheduling,
            padded=padded,
            prefill_base_ps=round(Fraction(str(self.prefill_base_ps))),
            mixed_context_ps=[0, *_table(self.mixed_context_ps, max_num_seqs)[1:]]
            if self.mixed_context_ps
            else (),
            gap_seq_ps=round(Fraction(str(self.gap_seq_ps))) if async_scheduling else 0,
        )

    def subject(self) -> str:
        """What the profile is of, in words."""
        p = self.provenance
        return describe(p.model, p.gpu, p.tensor_parallel_size, p.dtype)

    def _check_range(self, field: str, value: int, bound: int) -> None:
        if not 1 <= value <= bound:
            raise InputError(
                f"engine.{field}: {value} is outside the step-time profile of {self.subject()}, which covers 1 to "
                f"{bound}. Choose {field} in that range, or give hardware.step_time a profile that reaches further."
            )


def _lists(value: Any) -> Any:
    """`value` with each tuple inside turned into a list, as JSON has it."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, tuple) else value


def captured_sizes(
    sizes: Iterable[int], max_num_seqs: int, max_num_batched_tokens: int
) -> list[int]:
    """The sizes, rising, that vLLM captures as CUDA graphs under these limits.

    vLLM's rule (0.32, VllmConfig): the standard sizes up to twice max_num_seqs, plus max_num_seqs and
    max_num_batched_tokens themselves if they are not above the largest.
    """
    standard = sorted(sizes)
    if not standard:
        return []
    largest = min(2 * max_num_seqs, standard[-1])
    own = {n for n in (max_num_seqs, max_num_batched_tokens) if n <= largest}
    return sorted(
        n for n in own | {s for s in standard if s <= largest} if n <= max_num_batched_tokens
    )


def _table(points: Points, limit: int, checked: str = "") -> list[int]:
    """Whole picoseconds for each count from 0 to `limit`, linear between `points` and constant below the first.

    `checked` names a field whose rounding must stay within MAX_ROUNDING (else InputError). The caller has checked
    that `limit` does not exceed the last point.
    """
    exact = [(x, Fraction(str(y))) for x, y in points]
    scale = math.lcm(*(y.denominator for _, y in exact))
    whole = [(x, int(y * scale)) for x, y in exact]  # scaled, so that the loop is plain integers
    first, last = whole[0], whole[-1]
    result = []
    for (x0, y0), (x1, y1) in pairwise([(0, first[1]), *whole, (last[0] + 1, last[1])]):
        for x in range(x0, min(x1, limit + 1)):
            numerator = y0 * (x1 - x) + y1 * (x - x0)
            denominator = (x1 - x0) * scale
            value = (2 * numerator + denominator) // (2 * denominator)  # nearest, halves up
            if checked and abs(value * denominator - numerator) > MAX_ROUNDING * numerator:
                raise InputError(
                    f"{checked}: {numerator / denominator:g} ps at {x} decodes changes by more than 0.1 % when rounded "
                    f"to whole picoseconds. Give at least 500 ps."
                )
            result.append(value)
    return result


def describe(model: str, gpu: str, tensor_parallel_size: int, dtype: str) -> str:
    """One profile's subject in words."""
    return f"{model} on {gpu}, TP {tensor_parallel_size}, {dtype}"


def parse_profile(mapping: Any, source_name: str) -> Profile:
    """The profile in a parsed JSON document; `source_name` (the file) begins each error message.

    Raises InputError for unknown or missing keys and for values that no step time can have.
    """
    top = _mapping(mapping, source_name, {f.name for f in fields(Profile)})
    where = f"{source_name}: provenance"
    p = _mapping(top["provenance"], where, {f.name for f in fields(Provenance)})
    texts = {
        f.name: _text(p[f.name], f"{where}.{f.name}") for f in fields(Provenance) if f.type is str
    }
    if not isinstance(p["fit_error"], Mapping):
        raise _bad(f"{where}.fit_error", p["fit_error"], "a mapping from a name to a number")
    provenance = Provenance(
        **texts,
        tensor_parallel_size=_count(
            p["tensor_parallel_size"], f"{where}.tensor_parallel_size", least=1
        ),
        fit_error={
            str(k): float(_number(v, f"{where}.fit_error.{k}")) for k, v in p["fit_error"].items()
        },
        notes=tuple(
            _text(v, f"{where}.notes[{i}]")
            for i, v in enumerate(_list(p["notes"], f"{where}.notes"))
        ),
    )

    def points(name: str, *, positive: bool = False) -> Points:
        return _points(top[name], f"{source_name}: {name}", positive=positive)

    sizes = _list(top["capture_sizes"], f"{source_name}: capture_sizes")
    counts = [_count(v, f"{source_name}: capture_sizes[{i}]", 1) for i, v in enumerate(sizes)]
    if counts != sorted(set(counts)):
        raise _bad(f"{source_name}: capture_sizes", counts, "rising token counts")
    dense = points("dense_ps", positive=True)
    for (fewer, before), (more, after) in pairwise(dense):
        least = MAX_FALL_OF_FEW if more <= FEW_TOKENS else MAX_FALL
        if after < least * before:
            raise InputError(
                f"{source_name}: dense_ps: {more} tokens take {after:g} ps, {fewer} took {before:g}; more tokens "
                f"must take at least {least:g} times as long. Correct the entry."
            )
    comm = top["comm_ps"]
    return Profile(
        provenance=provenance,
        max_context=_count(top["max_context"], f"{source_name}: max_context", least=1),
        capture_sizes=tuple(counts),
        dense_ps=dense,
        comm_ps=() if comm == [] else points("comm_ps"),
        sample_ps=points("sample_ps"),
        prefill_pair_ps=_number(top["prefill_pair_ps"], f"{source_name}: prefill_pair_ps"),
        decode_base_ps=points("decode_base_ps"),
        decode_context_ps=points("decode_context_ps"),
        host_sync_ps=points("host_sync_ps"),
        host_async_ps=points("host_async_ps"),
        gap_ps=_number(top["gap_ps"], f"{source_name}: gap_ps"),
        prefill_base_ps=_number(top["prefill_base_ps"], f"{source_name}: prefill_base_ps"),
        mixed_context_ps=() if top["mixed_context_ps"] == [] else points("mixed_context_ps"),
        gap_seq_ps=_number(top["gap_seq_ps"], f"{source_name}: gap_seq_ps"),
    )


def _bad(where: str, value: Any, wanted: str) -> InputError:
    return InputError(f"{where}: {value!r} is not allowed here; it must be {wanted}.")


def _mapping(value: Any, where: str, keys: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _bad(where, value, "a mapping with the keys " + ", ".join(sorted(keys)))
    for key in value:
        if key not in keys:
            near = difflib.get_close_matches(str(key), sorted(keys), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"{where}: unknown key {key!r}{hint} Known keys: {', '.join(sorted(keys))}."
            )
    if missing := sorted(keys - set(value)):
        raise InputError(f"{where}: missing key {', '.join(map(repr, missing))}. Add it.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(where, value, "a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(where, value, "a non-empty text")
    return value


def _count(value: Any, where: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(where, value, f"a whole number of at least {least}")
    return value


def _number(value: Any, where: str) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_PS:
        raise _bad(where, value, f"a number from 0 to {MOST_PS:,} (a day)")
    return value


def _points(value: Any, where: str, *, positive: bool) -> Points:
    result: list[tuple[int, Number]] = []
    for i, pair in enumerate(_list(value, where)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise _bad(f"{where}[{i}]", pair, "a pair [count, picoseconds]")
        count = _count(pair[0], f"{where}[{i}][0]", least=0)
        if result and count <= result[-1][0]:
            raise _bad(
                f"{where}[{i}][0]", count, f"more than the count before it ({result[-1][0]})"
            )
        time = _number(pair[1], f"{where}[{i}][1]")
        if positive and round(Fraction(str(time))) < 1:
            raise _bad(f"{where}[{i}][1]", time, "at least 1 ps, since every step takes time")
        result.append((count, time))
    if not result or result[0][0] > 1:
        raise _bad(where, value, "a list of [count, picoseconds] that starts at count 0 or 1")
    if result[-1][0] < 1:
        raise _bad(where, value, "a list of [count, picoseconds] that reaches at least count 1")
    return tuple(result)
