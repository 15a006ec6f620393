"""How long did requests wait at the gateway, and for what? A meter of the queue there."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatewayWaits:
    """The queue at the gateway over a run. Times are picoseconds."""

    limited_ps: int = 0
    """Time in which somebody waited although there was a replica: limits held them."""
    without_pod_ps: int = 0
    """Time in which somebody waited because there was no replica that takes requests."""
    request_ps: int = 0
    """Waits of all requests together."""
    most: int = 0
    """Requests that waited at once."""
    unfinished: int = 0
    """Requests that waited when the run was over."""


class WaitMeter:
    """Told of every change of the queue; several at one instant count as the last of them."""

    def __init__(self) -> None:
        self._since_ps = self._number = 0
        self._has_pod = False
        self._limited_ps = self._without_pod_ps = self._request_ps = 0
        self._most = 0

    def change(self, now_ps: int, number: int, has_pod: bool) -> None:
        """From now on so many wait; `has_pod` says whether a replica takes requests."""
        passed_ps = now_ps - self._since_ps
        if passed_ps:
            self._most = max(self._most, self._number)
            self._request_ps += self._number * passed_ps
            if self._number and self._has_pod:
                self._limited_ps += passed_ps
            elif self._number:
                self._without_pod_ps += passed_ps
        self._since_ps, self._number, self._has_pod = now_ps, number, has_pod

    def finish(self, end_ps: int) -> GatewayWaits:
        """The run is over."""
        unfinished = self._number
        self.change(max(end_ps, self._since_ps), self._number, self._has_pod)
        return GatewayWaits(
            self._limited_ps, self._without_pod_ps, self._request_ps, self._most, unfinished
        )
