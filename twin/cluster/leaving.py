"""When do clients leave by themselves? Not for a time-out, but because somebody closes the window or kills the load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from twin.cluster.cold_start import PhaseTime
from twin.workload.request import Request


@dataclass(frozen=True)
class Disconnects:
    """The clients of one stream that leave; one of `after` and `at_ps` is set."""

    share: float = 1.0
    after: PhaseTime | None = None
    """From a request's arrival until its client leaves."""
    at_ps: int | None = None
    """All clients that are inside at that instant leave."""


class Leaving:
    """Draws for each request when its client leaves; each stream has its chance of its own."""

    def __init__(self, streams: Mapping[int, Disconnects], seed: int) -> None:
        self._streams = streams
        self._chances = {i: Random(f"{seed}/disconnects/{i}") for i in streams}
        self._after: dict[int, Callable[[], int]] = {
            i: spec.after.drawn(self._chances[i])
            for i, spec in streams.items()
            if spec.after is not None
        }

    def delay_ps(self, request: Request, now_ps: int) -> int | None:
        """From now until the client of a request that has just come leaves; None = it stays."""
        spec = self._streams.get(request.stream)
        if spec is None:
            return None
        leaves = self._chances[request.stream].random() < spec.share
        delay_ps = spec.at_ps - now_ps if spec.at_ps is not None else self._after[request.stream]()
        return delay_ps if leaves and delay_ps >= 0 else None
