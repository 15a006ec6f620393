"""One configuration under rising load: where latency takes off, where throughput peaks, from where the queue grows."""

from collections.abc import Sequence
from dataclasses import dataclass

from twin.report.texts import duration
from twin.whatif.sweep import Point

PLATEAU = 0.01
"""Throughputs within this share of the most are the same."""

FEWEST = 4
"""Loads that a knee can be read off."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a curve; means over the seeds."""

    load: float
    """The value of the key that was varied."""
    throughput: float
    """Completed requests per second."""
    latency_s: float | None
    saturated: bool
    """Whether more came than could be taken, at this load or at a lower one."""
    inside: float
    """Requests running or waiting at once, of all replicas."""


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """What a curve says. Loads are values of the key that was varied."""

    key: str
    latency: str
    """Name of the figure that is called latency."""
    loads: tuple[Load, ...]
    """Rising."""
    knee: Load | None
    """The last load before latency takes off; None with fewer than four loads."""
    peak: Load | None
    """The lowest load at which as many requests per second were completed as at any, to 1 %."""
    sustainable: Load | None
    """The last load without saturation; None if the lowest is saturated."""
    saturation: Load | None
    """The first saturated load; None if there is none."""
    replicas: float

    def text(self) -> str:
        """The curve in a sentence or three."""
        told = []
        if self.saturation is None:
            told.append(f"No load up to {self.key} {self.loads[-1].load:g} saturates it.")
        elif self.sustainable is None:
            told.append(f"Even the lowest load, {self.key} {self.loads[0].load:g}, saturates it.")
        else:
            told.append(
                f"The last sustainable load is {self.key} {self.sustainable.load:g}; from {self.saturation.load:g} on "
                "the queue grows without end, and latencies depend on how long the run was."
            )
        if self.knee is not None and self.knee.latency_s is not None:
            told.append(
                f"Latency takes off after {self.knee.load:g} (knee: {self.latency} {duration(self.knee.latency_s)})."
            )
        if self.peak is not None:
            told.append(
                f"Throughput peaks at {self.peak.load:g} with {self.peak.throughput:.3g} requests/s."
            )
        target = self.target
        if target is not None:
            told.append(
                f"A target for an autoscaler: {target:.3g} requests running or waiting for each replica, what was "
                "inside at the knee."
            )
        return " ".join(told)

    @property
    def target(self) -> float | None:
        """Requests inside one replica at the knee: what an autoscaler may aim at."""
        if self.knee is None or self.knee.saturated:
            return None
        return self.knee.inside / self.replicas

    def to_dict(self) -> dict[str, object]:
        """For JSON and pages."""

        def load(found: Load | None) -> float | None:
            return None if found is None else found.load

        return {
            "key": self.key,
            "latency": self.latency,
            "knee": load(self.knee),
            "peak": load(self.peak),
            "sustainable": load(self.sustainable),
            "saturation": load(self.saturation),
            "suggested_target": self.target,
            "text": self.text(),
            "loads": [
                {
                    "load": of.load,
                    "throughput": of.throughput,
                    "latency_s": of.latency_s,
                    "saturated": of.saturated,
                    "depends_on_run_length": of.saturated,
                }
                for of in self.loads
            ],
        }


def load_curve(
    axis_key: str, points: Sequence[tuple[float, Point]], latency: str, replicas: float
) -> LoadCurve:
    """The curve of points (load, point). `latency` is the name of a figure.

    Once saturated, always saturated: what a higher load does to a queue that grows already is not read off its run.
    """
    loads: list[Load] = []
    saturated = False
    for load, point in sorted(points, key=lambda pair: pair[0]):
        if not point.rows:
            continue
        saturated = saturated or point.is_saturated
        throughput, inside = point.mean("requests_per_s"), point.mean("in_system_mean")
        loads.append(Load(load, throughput or 0.0, point.mean(latency), saturated, inside or 0.0))
    steady = [found for found in loads if not found.saturated]
    return LoadCurve(
        key=axis_key,
        latency=latency,
        loads=tuple(loads),
        knee=_knee(loads),
        peak=_peak(loads),
        sustainable=steady[-1] if steady else None,
        saturation=next((found for found in loads if found.saturated), None),
        replicas=replicas,
    )


def _peak(loads: Sequence[Load]) -> Load | None:
    """The lowest load whose throughput is within 1 % of the most: on a plateau the highest point is noise."""
    most = max((found.throughput for found in loads), default=0.0)
    return next((found for found in loads if found.throughput >= (1 - PLATEAU) * most), None)


def _knee(loads: Sequence[Load]) -> Load | None:
    """The load that lies farthest below the straight line from the first latency to the last (Kneedle).

    V. Satopaa et al., Finding a "Kneedle" in a Haystack, ICDCS workshops 2011, for a convex rising curve. Only
    the first saturated load is taken in, because what is beyond it depends on how long the run was.
    """
    known = [found for found in loads if found.latency_s is not None]
    beyond = next((i for i, found in enumerate(known) if found.saturated), len(known))
    known = known[: beyond + 1]
    if len(known) < FEWEST:
        return None
    x0, x1 = known[0].load, known[-1].load
    y0, y1 = known[0].latency_s or 0.0, known[-1].latency_s or 0.0
    if x1 <= x0 or y1 <= y0:
        return None

    def below(found: Load) -> float:
        return (found.load - x0) / (x1 - x0) - ((found.latency_s or 0.0) - y0) / (y1 - y0)

    return max(known, key=below)
