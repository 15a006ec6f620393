"""Micro-benchmarks of a model's operations become a step-time profile of the twin."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from real.preflight import child_environment
from twin.errors import InputError
from twin.scenario import Scenario
from twin.step_time.catalogue import ModelSpec
from twin.step_time.profiles import Points, Profile, Provenance

PS = 10**12
LAYER = ("qkv", "o", "gate_up", "down")


def job_of(scenario: Scenario, device: str, budget_s: float) -> dict[str, Any]:
    """What real.profile is asked for. Raises InputError for a mixture of experts, whose products depend on the text."""
    engine, hardware = scenario.engine, scenario.hardware
    if scenario.model.experts:
        raise InputError(
            f"model: {scenario.model.name} is a mixture of experts, whose operations are not measured one by one; "
            "measure whole steps with twin-real calibrate"
        )
    shape = {
        name: value for name, value in asdict(scenario.model).items() if isinstance(value, int)
    }
    return {
        "device": device,
        "dtype": "bfloat16" if hardware.dtype == "fp8" else hardware.dtype,
        "shape": {**shape, "tp": hardware.tensor_parallel_size},
        "max_tokens": engine.max_num_batched_tokens,
        "max_seqs": engine.max_num_seqs,
        "max_context": engine.max_model_len,
        "budget_s": budget_s,
    }


def run_job(job: Mapping[str, Any], python: str, folder: Path) -> dict[str, Any]:
    """What real.profile measured with that interpreter. Raises InputError where it fails."""
    asked, out = folder / "job.json", folder / "tables.json"
    asked.write_text(json.dumps(job), encoding="utf-8")
    command = [python, "-m", "real.profile", str(asked), str(out)]
    run = subprocess.run(command, env=child_environment({}), capture_output=True, text=True)
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        raise InputError(
            f"--python {python}: the measurement failed: {lines[-1] if lines else 'it said nothing'}"
        )
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def profile_of(
    found: Mapping[str, Any], job: Mapping[str, Any], model: ModelSpec, gpu: str, kv_dtype: str
) -> tuple[Profile, dict[str, float]]:
    """(profile, relative errors of the attention terms against what was measured).

    Raises InputError where a table that a step needs is empty.
    """
    layers, errors = model.layers, {}
    missing = [name for name in (*LAYER, "lm_head") if not found["products"].get(name)]
    missing += [name for name in ("prefill", "decode", "between") if not found[name]]
    if missing:
        raise InputError(
            f"profile: there was no time or memory to measure {', '.join(missing)}; give it more --minutes"
        )
    tokens = sorted({int(n) for n, _ in found["products"]["qkv"]})
    each = [_curve(found["products"][name]) for name in LAYER] + [_curve(found["between"])]
    dense = [(n, layers * float(sum(np.interp(n, x, y) for x, y in each))) for n in tokens]
    comm = [(n, 2 * layers * s) for n, s in found["all_reduce"]]
    pair_s, errors["prefill_attention"] = _prefill(found["prefill"])
    base, slope, errors["decode_attention"] = _decode(found["decode"], job["max_seqs"])
    notes = [
        "Sums of single operations, timed one by one: what a fused kernel or a captured graph saves is not in them.",
        "The attention of torch, on contexts that lie in one piece; vLLM's reads pages.",
        "No host work: the steps of an engine take longer by what its CPU adds.",
    ]
    if found["skipped"]:
        notes.append(f"Not measured: {'; '.join(found['skipped'][:5])}.")
    seqs = job["max_seqs"]
    made = Profile(
        provenance=Provenance(
            model=model.name,
            gpu=gpu,
            tensor_parallel_size=job["shape"]["tp"],
            dtype=job["dtype"],
            kv_cache_dtype=kv_dtype,
            engine=f"torch {found['torch']}",
            source=f"micro-benchmarks on {found['device']}",
            licence="own measurement",
            date=datetime.now(UTC).date().isoformat(),
            script="twin-real profile",
            fit_error={name: round(value, 4) for name, value in errors.items()},
            notes=tuple(notes),
        ),
        max_context=max(n + c for n, c, _ in found["prefill"]),
        capture_sizes=(),
        dense_ps=_points(_rising(dense)),
        comm_ps=_points(_rising(comm)),
        sample_ps=_points(
            [(0, 0.0), *_rising([(int(n), s) for n, s in found["products"]["lm_head"]])]
        ),
        prefill_pair_ps=round(layers * pair_s * PS, 3),
        decode_base_ps=_points([(0, 0.0), *[(b, layers * s) for b, s in base]]),
        decode_context_ps=tuple((b, max(500, round(layers * s * PS))) for b, s in slope),
        host_sync_ps=((0, 0), (seqs, 0)),
        host_async_ps=((0, 0), (seqs, 0)),
        gap_ps=0,
    )
    return made, errors


def bandwidths(found: Mapping[str, Any]) -> dict[str, float]:
    """Bytes per second of the largest copy, by kind; a copy within a device reads and writes."""
    best: dict[str, tuple[int, float]] = {}
    for kind, size, seconds in found["copy"]:
        if size >= best.get(kind, (0, 0.0))[0]:
            best[kind] = (size, (2 if kind == "device" else 1) * size / seconds)
    return {kind: rate for kind, (_, rate) in best.items()}


def _curve(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [n for n, _ in points], [s for _, s in points]


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Never falling: a larger step that was measured to be faster takes as long as the smaller one."""
    made: list[tuple[int, float]] = []
    for n, s in points:
        made.append((int(n), max(s, made[-1][1]) if made else s))
    return made


def _points(points: Sequence[tuple[int, float]]) -> Points:
    return tuple((int(n), max(0, round(s * PS))) for n, s in points)


def _prefill(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(seconds of a pair, mean relative error): through the origin, by relative least squares."""
    pairs = np.array([n * c + n * (n + 1) / 2 for n, c, _ in points])
    seconds = np.array([s for _, _, s in points])
    ratio = pairs / seconds
    each = float(ratio.sum() / (ratio**2).sum())
    return each, float(np.mean(np.abs(each * ratio - 1)))


def _decode(
    points: Sequence[Sequence[float]], max_seqs: int
) -> tuple[list[tuple[int, float]], list[tuple[int, float]], float]:
    """(seconds without context by decodes, seconds per token of summed context by decodes, mean relative error)."""
    base, slope, errors = [], [], []
    for batch in sorted({int(b) for b, _, _ in points}):
        own = [(batch * c, s) for b, c, s in points if b == batch]
        if len(own) < 2:
            continue
        context, seconds = (np.array(column) for column in zip(*own, strict=True))
        features = np.stack([np.ones(len(own)), context], axis=1) / seconds[:, None]
        b, d = np.linalg.lstsq(features, np.ones(len(own)), rcond=None)[0]
        if d <= 0:
            b, d = float(seconds.min()), 0.0
        if b < 0:
            b, d = 0.0, float(1 / np.mean(context / seconds))
        errors += [abs((b + d * x) / y - 1) for x, y in own]
        base.append((batch, float(b)))
        slope.append((batch, float(d)))
    if not base:
        raise InputError(
            "profile: decode attention was measured at one context only; give it more --minutes"
        )
    rising = _rising(base)
    if rising[-1][0] < max_seqs:
        (x0, y0), (x1, y1) = [(0, 0.0), *rising][-2:]
        rising.append((max_seqs, y1 + (y1 - y0) * (max_seqs - x1) / (x1 - x0)))
        slope.append((max_seqs, slope[-1][1]))
    if slope[0][0] > 1:
        slope.insert(0, (1, slope[0][1]))
    assert all(a < b for (a, _), (b, _) in pairwise(slope))
    return rising, slope, float(np.mean(errors))
