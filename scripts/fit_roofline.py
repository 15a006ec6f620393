#!/usr/bin/env python3
"""Find the efficiency factors of twin/step_time/roofline.py from the shipped profiles, and say how far they carry.

    python scripts/fit_roofline.py

Prints the factors fitted to all GPUs and, for each GPU, the median relative error of those fitted without it.
"""

import json
from importlib import resources

import numpy as np
from scipy.optimize import least_squares

from twin.step_time.catalogue import GPUS, MODELS
from twin.step_time.profiles import Profile
from twin.step_time.roofline import MEASURED, Efficiency, Parts
from twin.step_time.shipped import find, subjects

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DECODES = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (64, 4096), (128, 1024), (256, 512))
PROMPTS = (512, 1024, 2048, 4096, 8192)


def shipped() -> list[Profile]:
    found = []
    folder = resources.files("twin.step_time") / "data"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.removesuffix(".json") not in GPUS:
            continue
        packed = json.loads(file.read_text(encoding="utf-8"))
        for subject in subjects(packed):
            if (
                subject.dtype == subject.kv_cache_dtype == "bfloat16"
                and not MODELS[subject.model].experts
            ):
                found.append(find(packed, subject, file.name))
    return found


def at(points, x):
    counts, values = zip(*points, strict=True)
    return float(np.interp(x, counts, values)) / 1e12


def parts_of(profile: Profile, efficiency: Efficiency) -> Parts:
    p = profile.provenance
    return Parts(
        MODELS[p.model], GPUS[p.gpu], p.tensor_parallel_size, p.dtype, p.kv_cache_dtype, efficiency
    )


def errors(profile: Profile, efficiency: Efficiency) -> dict[str, list[float]]:
    """Logarithms of roofline over table, by kind of step: dense and communication; prompts; decodes."""
    parts = parts_of(profile, efficiency)
    found = {"dense": [], "prefill": [], "decode": []}

    def whole(tokens):
        table = at(profile.dense_ps, tokens)
        table += at(profile.comm_ps, tokens) if profile.comm_ps else 0.0
        return table, parts.dense_s(tokens) + parts.comm_s(tokens)

    for m in TOKENS:
        table, told = whole(m)
        found["dense"].append(np.log(told / table))
    for n in PROMPTS:
        table, told = whole(n)
        pairs = n * (n + 1) / 2
        table += (pairs * profile.prefill_pair_ps + profile.prefill_base_ps) / 1e12
        found["prefill"].append(np.log((told + pairs * parts.pair_s) / table))
    for n, context in DECODES:
        table, told = whole(n)
        table += at(profile.decode_base_ps, n) + at(profile.decode_context_ps, n) * n * context
        found["decode"].append(np.log((told + n * context * parts.context_s) / table))
    return found


def fit(profiles: list[Profile]) -> Efficiency:
    start = np.log([getattr(MEASURED, name) for name in Efficiency.__dataclass_fields__])

    def residuals(x):
        efficiency = Efficiency(*np.exp(x))
        return [e for p in profiles for kind in errors(p, efficiency).values() for e in kind]

    return Efficiency(*np.exp(least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x))


def medians(profiles: list[Profile], efficiency: Efficiency) -> dict[str, float]:
    each = [errors(p, efficiency) for p in profiles]
    return {
        kind: round(float(np.median([abs(np.expm1(e)) for found in each for e in found[kind]])), 3)
        for kind in ("dense", "prefill", "decode")
    }


def main() -> None:
    profiles = shipped()
    everything = fit(profiles)
    print(f"all {len(profiles)} profiles: {everything}")
    print(f"median error on them: {medians(profiles, everything)}")
    left_out = {"dense": [], "prefill": [], "decode": []}
    for gpu in dict.fromkeys(p.provenance.gpu for p in profiles):
        others = [p for p in profiles if p.provenance.gpu != gpu]
        own = [p for p in profiles if p.provenance.gpu == gpu]
        found = medians(own, fit(others))
        print(f"{gpu}, fitted without it: {found}")
        for kind, value in found.items():
            left_out[kind].append(value)
    print(f"median of those: { {kind: float(np.median(v)) for kind, v in left_out.items()} }")


if __name__ == "__main__":
    main()
