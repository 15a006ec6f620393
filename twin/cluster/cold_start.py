"""How long does a new replica take until it serves? Phases, each a distribution with published defaults.

Pending (a GPU node, the image), then the container: process, weights, compile, CUDA graphs, warm-up. The defaults are
the middle of published figures by storage class and model size (docs/autoscaling.md names them); their spread, a
triangle from 0.8 to 1.5 of the middle, is an assumption.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import log, sqrt
from random import Random

from twin.clock import PS, to_ps
from twin.step_time.catalogue import ModelSpec
from twin.workload.sessions import Always, Time

BANDWIDTH = {"gp3": 0.34e9, "gp3-streamer": 1.1e9, "io2-streamer": 2.1e9, "nvme": 3e9}
"""Storage class -> bytes of weights per second with vLLM's default loader or a streaming one."""

NODE_S = 240.0
IMAGE_S = 300.0
PROCESS_S = 16.0
TRACE_S = (5.0, 15.0)
COMPILE_S = (15.0, 70.0)
CACHED_COMPILE_S = 5.0
GRAPHS_S = (12.0, 60.0)
WARM_UP_S = 25.0
"""Seconds; pairs are for 8B and 70B parameters, sizes between on a logarithmic scale. Warm-up is what no log line
shows between the engine's "ready" and the first answer."""

SMALL, LARGE = 8e9, 70e9
"""Parameters that the pairs are for."""

LOW, HIGH = 0.8, 1.5
"""Ends of the default triangle, in terms of its middle."""


@dataclass(frozen=True, slots=True)
class TriangularTime:
    """Between two times with one that is most likely."""

    low_ps: int
    mode_ps: int
    high_ps: int

    def drawn(self, rng: Random) -> Callable[[], int]:
        """A function that gives the next time in picoseconds."""
        width = self.high_ps - self.low_ps
        if not width:
            return lambda: self.low_ps
        share = (self.mode_ps - self.low_ps) / width

        def draw() -> int:
            u = rng.random()
            if u < share:
                return self.low_ps + round(width * sqrt(u * share))
            return self.high_ps - round(width * sqrt((1 - u) * (1 - share)))

        return draw


PhaseTime = Time | TriangularTime
"""How long a phase takes."""

NOTHING = Always(0)


@dataclass(frozen=True)
class ColdStart:
    """The phases of a container's start, in their order, after its pod has a node."""

    image: PhaseTime = NOTHING
    """Pulling it; once a pod."""
    process: PhaseTime = NOTHING
    """Container and Python up to the engine's configuration."""
    weights: PhaseTime = NOTHING
    compile: PhaseTime = NOTHING
    """Tracing and compilation."""
    graphs: PhaseTime = NOTHING
    """Capturing CUDA graphs."""
    warm_up: PhaseTime = NOTHING
    """The rest until the server answers."""


PHASES = tuple(field.name for field in fields(ColdStart))


def spread(seconds: float) -> PhaseTime:
    """The default triangle around so many seconds."""
    if not seconds:
        return NOTHING
    return TriangularTime(to_ps(LOW * seconds), to_ps(seconds), to_ps(HIGH * seconds))


def default_start(
    model: ModelSpec, weight_bytes: int, storage: str, image: str, compiled: str, eager: bool
) -> ColdStart:
    """The published phases of a model of which `weight_bytes` are read in all.

    `storage` is a key of BANDWIDTH; `image` cached or pull; `compiled` cold or cached; `eager` = neither compilation
    nor graphs.
    """
    trace, build, graphs = (_by_size(model.params, pair) for pair in (TRACE_S, COMPILE_S, GRAPHS_S))
    if compiled == "cached":
        build = CACHED_COMPILE_S
    return ColdStart(
        image=spread(IMAGE_S if image == "pull" else 0.0),
        process=spread(PROCESS_S),
        weights=spread(weight_bytes / BANDWIDTH[storage]),
        compile=spread(0.0 if eager else trace + build),
        graphs=spread(0.0 if eager else graphs),
        warm_up=spread(WARM_UP_S),
    )


def _by_size(params: int, pair: tuple[float, float]) -> float:
    share = (log(params) - log(SMALL)) / (log(LARGE) - log(SMALL))
    return pair[0] + min(max(share, 0.0), 1.0) * (pair[1] - pair[0])


class Starter:
    """Draws the phases of one start after the other, each phase from a stream of its own."""

    def __init__(self, start: ColdStart, seed: int | str) -> None:
        self._draws = {
            name: getattr(start, name).drawn(Random(f"{seed}/cold_start/{name}")) for name in PHASES
        }

    def draw(self, is_restart: bool) -> dict[str, int]:
        """Phase -> picoseconds; a container that starts again on its node has its image."""
        drawn = {name: draw() for name, draw in self._draws.items()}
        return drawn | {"image": 0} if is_restart else drawn


def mean_s(time: PhaseTime) -> float:
    """Mean seconds of a phase, from 1,001 evenly spaced quantiles of a stream of its own."""
    if isinstance(time, Always):
        return time.ps / PS
    if isinstance(time, TriangularTime):
        return (time.low_ps + time.mode_ps + time.high_ps) / 3 / PS
    draw = time.drawn(Random("mean"))
    return sum(draw() for _ in range(1001)) / 1001 / PS
