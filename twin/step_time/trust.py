"""How wrong may a run be? The errors of the nearest set-up that was measured, and how near it is.

The table of measured set-ups comes from `twin validate` (twin/step_time/data/fidelity.json). Nothing is interpolated: a
run gets the errors of one measured regime, or is "not validated".
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twin.errors import InputError
from twin.step_time.catalogue import MODELS, ModelSpec, catalogue_name
from twin.step_time.profiles import Provenance
from twin.step_time.shipped import stored_dtype, stored_kv_dtype

FAR = 1.0
"""A regime at a distance of more than this says nothing: not validated. One whole difference is the most."""

LOADS = ("light", "queued")
"""light: requests spend less than QUEUED of their time in the system before they start; queued: more."""

QUEUED = 0.1


@dataclass(frozen=True)
class Subject:
    """What is run, as far as errors depend on it."""

    model: str
    params: int
    gpu: str
    tensor_parallel_size: int
    dtype: str
    kv_cache_dtype: str
    """As profiles keep it: bfloat16 or fp8."""
    max_num_batched_tokens: int
    policy: str
    """Name of the policy of the scheduler."""
    origin: str
    """Where the step times come from: op tables, layer tables, fit, roofline."""
    load: str
    """One of LOADS."""


@dataclass(frozen=True)
class Regime:
    """Measured runs of one set-up under one kind of load, and how far the twin was off."""

    subject: Subject
    name: str
    runs: int
    errors: Mapping[str, float]
    """Metric (`ttft_mean`, `tpot_p50`, ...) -> median over the runs of the relative error's size."""
    largest: Mapping[str, float]
    """The same, the largest."""


@dataclass(frozen=True)
class Trust:
    """What is known of the errors of a run."""

    nearest: Regime | None
    """None if nothing was ever measured with step times of this origin."""
    distance: float
    """0 = the same set-up; infinite without a regime."""
    differs: tuple[str, ...] = ()
    """In what the run differs from the nearest regime, in words."""
    foreign: tuple[str, ...] = ()
    """In what the step times are of something else than the run, in words; nothing is known of such a run."""
    calibration: Mapping[str, float] = field(default_factory=dict)
    """Errors of step times that were fitted to the user's own server, by kind of step; empty for others."""

    @property
    def validated(self) -> bool:
        """Whether the nearest regime is near enough to say something."""
        return self.nearest is not None and self.distance <= FAR and not self.foreign

    def error(self, latency: str) -> float | None:
        """The median error of a latency (`ttft`, `tpot`, `e2e`) in similar runs; the larger one where two statistics
        have one.

        None where it is not validated, or was not measured.
        """
        if self.nearest is None or not self.validated:
            return None
        found = [
            error
            for metric, error in self.nearest.errors.items()
            if metric.split("_")[0] == latency
        ]
        return max(found, default=None)

    def to_dict(self) -> dict[str, Any]:
        """As plain data; `errors` and `largest` are empty where it is not validated."""
        near = self.nearest
        told = near is not None and self.validated
        return {
            "validated": self.validated,
            "nearest": None if near is None else near.name,
            "runs": 0 if near is None else near.runs,
            "distance": None if near is None else round(self.distance, 2),
            "limit": FAR,
            "differs": list(self.differs),
            "foreign": list(self.foreign),
            "errors": dict(near.errors) if near is not None and told else {},
            "largest": dict(near.largest) if near is not None and told else {},
            "calibration": dict(self.calibration),
        }


def differences(one: Subject, other: Subject) -> dict[str, float]:
    """In what a run differs from a measured one, in words, and how much each counts.

    1 for another GPU, 1 for another kind of load, 1 for each factor of 2 in parameters, 0.5 for each in GPUs of a
    replica, 0.25 for each in max_num_batched_tokens; 0.5 for other weights, another type of KV cache or another policy.
    Lengths of requests, max_num_seqs and the number of replicas are not compared.
    """
    found = {
        f"GPU {one.gpu}, not {other.gpu}": (one.gpu != other.gpu) * 1.0,
        f"{one.load} load, not {other.load}": (one.load != other.load) * 1.0,
        f"{one.params / 1e9:.3g}, not {other.params / 1e9:.3g} billion parameters": _doublings(
            one.params, other.params
        ),
        f"TP {one.tensor_parallel_size}, not {other.tensor_parallel_size}": 0.5
        * _doublings(one.tensor_parallel_size, other.tensor_parallel_size),
        f"weights {one.dtype}, not {other.dtype}": (one.dtype != other.dtype) * 0.5,
        f"KV cache {one.kv_cache_dtype}, not {other.kv_cache_dtype}": 0.5
        * (one.kv_cache_dtype != other.kv_cache_dtype),
        f"policy {one.policy}, not {other.policy}": (one.policy != other.policy) * 0.5,
        f"max_num_batched_tokens {one.max_num_batched_tokens:,}, not {other.max_num_batched_tokens:,}": 0.25
        * _doublings(one.max_num_batched_tokens, other.max_num_batched_tokens),
    }
    return {what: size for what, size in found.items() if size}


def _doublings(one: int, other: int) -> float:
    return abs(math.log2(one / other))


def distance(one: Subject, other: Subject) -> float:
    """How unlike two set-ups are: their differences added up; infinite for step times of another origin."""
    return math.inf if one.origin != other.origin else sum(differences(one, other).values())


def nearest(subject: Subject, regimes: Iterable[Regime]) -> Trust:
    """The trust in a run of this subject; of regimes equally near the one with more runs, then by name."""
    best: tuple[float, int, str] | None = None
    found: Regime | None = None
    for regime in regimes:
        key = (distance(subject, regime.subject), -regime.runs, regime.name)
        if key[0] < math.inf and (best is None or key < best):
            best, found = key, regime
    if best is None or found is None:
        return Trust(None, math.inf)
    return Trust(found, best[0], tuple(differences(subject, found.subject)))


def foreign_to(
    origin: Provenance,
    model: ModelSpec,
    gpu: str,
    tensor_parallel_size: int,
    dtype: str,
    kv_cache_dtype: str,
) -> tuple[str, ...]:
    """In what step times are of something else than what runs, in words: `<key> <theirs>, not <ours>`.

    A model that is not in the catalogue is told from those that are by its shape alone.
    """
    named = catalogue_name(model)
    if named not in MODELS and origin.model not in MODELS:
        named = origin.model
    kv = "auto" if "auto" in (kv_cache_dtype, origin.kv_cache_dtype) else kv_cache_dtype
    pairs = (
        ("model", origin.model, named),
        ("hardware.gpu", origin.gpu, gpu),
        ("hardware.tensor_parallel_size", origin.tensor_parallel_size, tensor_parallel_size),
        ("hardware.dtype", stored_dtype(origin.dtype), stored_dtype(dtype)),
        (
            "engine.kv_cache_dtype",
            "auto" if kv == "auto" else stored_kv_dtype(origin.kv_cache_dtype),
            "auto" if kv == "auto" else stored_kv_dtype(kv),
        ),
    )
    return tuple(f"{key} {theirs}, not {ours}" for key, theirs, ours in pairs if theirs != ours)


def load_of(queue_s: float, e2e_s: float) -> str:
    """The kind of load, from mean times of requests before they start and in all."""
    return "queued" if e2e_s > 0 and queue_s > QUEUED * e2e_s else "light"


def origin_of(source: str) -> str:
    """The origin of a profile, by how its provenance names its source."""
    if source.startswith("roofline"):
        return "roofline"
    if "op tables" in source:
        return "op tables"
    return "layer tables" if "layer tables" in source else "fit"


def parse_regimes(data: Any, source_name: str) -> tuple[Regime, ...]:
    """The regimes in the parsed JSON of `regimes_data`. Raises InputError for anything else."""
    try:
        return tuple(
            Regime(
                Subject(**row["subject"]), row["name"], row["runs"], row["errors"], row["largest"]
            )
            for row in data["regimes"]
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{source_name}: no table of validated regimes: {error}") from None


def regimes_data(regimes: Iterable[Regime]) -> dict[str, Any]:
    """The regimes as plain data for a JSON file."""
    return {
        "regimes": [
            {
                "subject": vars(regime.subject),
                "name": regime.name,
                "runs": regime.runs,
                "errors": dict(regime.errors),
                "largest": dict(regime.largest),
            }
            for regime in regimes
        ]
    }
