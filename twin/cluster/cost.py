"""What did the GPUs cost, and what for? GPU time by phase, and prices per token and per good request."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from twin.clock import PS


@dataclass(frozen=True)
class GpuTime:
    """GPU-picoseconds, of one replica or of many.

    A GPU is paid for from the moment its pod has a node until the pod is gone.
    """

    serving_ps: int = 0
    """Ready, and a step runs."""
    idle_ps: int = 0
    """Ready, and nothing to do."""
    starting_ps: int = 0
    """Placed on a node but not ready: image, weights, compilation, and every start that was killed."""
    draining_ps: int = 0
    """Told to go, and not gone."""
    reserve_ps: int = 0
    """Held by sleepers and placeholders, which serve nobody."""

    @property
    def total_ps(self) -> int:
        """All of it."""
        phases = self.serving_ps + self.idle_ps + self.starting_ps + self.draining_ps
        return phases + self.reserve_ps

    def shares(self) -> dict[str, float]:
        """Phase -> share of the total; empty if there was none."""
        total = self.total_ps
        return {name: ps / total for name, ps in self.phases().items()} if total else {}

    def phases(self) -> dict[str, int]:
        """Phase -> GPU-picoseconds; reserve only where there is some."""
        reserve = {"reserve": self.reserve_ps} if self.reserve_ps else {}
        return {
            "serving": self.serving_ps,
            "idle": self.idle_ps,
            "starting": self.starting_ps,
            "draining": self.draining_ps,
        } | reserve


def total(times: Iterable[GpuTime]) -> GpuTime:
    """All of them together."""
    found = list(times)
    return GpuTime(*(sum(getattr(time, f.name) for time in found) for f in fields(GpuTime)))


@dataclass(frozen=True)
class Cost:
    """What a run cost, in the currency of the price."""

    gpu_hours: float
    price_per_gpu_hour: float | None
    money: float | None
    per_million_tokens: float | None
    """Per million output tokens delivered; None without a price or a token."""
    per_good_request: float | None


def cost(time: GpuTime, price: float | None, output_tokens: int, good: int) -> Cost:
    """The cost of so much GPU time, spread over what came of it."""
    hours = time.total_ps / PS / 3600
    if price is None:
        return Cost(hours, None, None, None, None)
    money = hours * price
    return Cost(
        hours,
        price,
        money,
        money / output_tokens * 1e6 if output_tokens else None,
        money / good if good else None,
    )
