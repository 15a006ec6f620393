"""How wrong may a run be? The errors of the nearest set-up that was measured, and how near it is.

The table of measured set-ups comes from `twin validate` (twin/step_time/data/fidelity.json). Nothing is interpolated: a
run gets the errors of one measured regime, or is "not validated".
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twin.errors import InputError

FAR = 2.0
"""A regime at a distance of more than this says nothing: not validated."""

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
    calibration: Mapping[str, float] = field(default_factory=dict)
    """Errors of step times that were fitted to the user's own server, by kind of step; empty for others."""

    @property
    def validated(self) -> bool:
        """Whether the nearest regime is near enough to say something."""
        return self.nearest is not None and self.distance <= FAR

    def error(self, latency: str) -> float | None:
        """The error of a latency (`ttft`, `tpot`, `e2e`) in similar runs; the larger one where two statistics have one.

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
        """As plain data; without a regime only `validated`."""
        calibrated = {"calibration": dict(self.calibration)}
        if self.nearest is None:
            return {
                "validated": False,
                "nearest": None,
                "distance": None,
                "errors": {},
                **calibrated,
            }
        return {
            "validated": self.validated,
            "nearest": self.nearest.name,
            "distance": round(self.distance, 2),
            "errors": dict(self.nearest.errors) if self.validated else {},
            **calibrated,
        }


def distance(one: Subject, other: Subject) -> float:
    """How unlike two set-ups are: 1 for another GPU; 1 for each factor of 2 in parameters and 0.5 for each in GPUs of a
    replica; 0.5 for other weights; 1 for another kind of load; infinite for step times of another origin.
    """
    if one.origin != other.origin:
        return math.inf
    return (
        (one.gpu != other.gpu) * 1.0
        + abs(math.log2(one.params / other.params))
        + 0.5 * abs(math.log2(one.tensor_parallel_size / other.tensor_parallel_size))
        + (one.dtype != other.dtype) * 0.5
        + (one.load != other.load) * 1.0
    )


def nearest(subject: Subject, regimes: Iterable[Regime]) -> Trust:
    """The trust in a run of this subject; of regimes equally near the one with more runs, then by name."""
    best: tuple[float, int, str] | None = None
    found: Regime | None = None
    for regime in regimes:
        key = (distance(subject, regime.subject), -regime.runs, regime.name)
        if key[0] < math.inf and (best is None or key < best):
            best, found = key, regime
    return Trust(found, math.inf if best is None else best[0])


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
