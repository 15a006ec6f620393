"""Which replicas does a router leave out because they fail? Envoy's outlier detection by consecutive errors.

A replica that answers `consecutive_5xx` attempts in a row with an error (a refused or broken connection, an aborted
reply) is ejected for `base_ejection_time` times the number of its recent ejections. That is looked at every `interval`,
as in Envoy, where also each interval in which it was not ejected takes one off that number. A client that leaves by
itself says nothing of a replica; nor does one on a dead GPU ever get an answer to count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twin.clock import PS


@dataclass(frozen=True)
class Ejection:
    """Settings, with Envoy's names and defaults."""

    consecutive_5xx: int = 5
    interval_ps: int = 10 * PS
    base_ejection_time_ps: int = 30 * PS
    max_ejection_time_ps: int = 300 * PS
    max_ejection_percent: int = 10
    """Of the replicas; one may always be ejected."""
    healthy_panic_threshold: int = 50
    """Percent: where fewer are left, requests go to all of them."""


@dataclass
class _Host:
    failures: int = 0
    """In a row."""
    times: int = 0
    """Ejections that count."""
    until_ps: int = 0
    """End of the last one."""


class Outliers:
    """What one gateway knows of the replicas' failures, by index."""

    def __init__(self, spec: Ejection) -> None:
        self._spec = spec
        self._hosts: dict[int, _Host] = {}
        self.ejections: list[tuple[int, int, int]] = []
        """(instant, replica, until) of each."""

    def succeeded(self, replica: int) -> None:
        """It has answered."""
        host = self._hosts.get(replica)
        if host is not None:
            host.failures = 0

    def failed(self, replica: int, present: Sequence[int], now_ps: int) -> None:
        """It has not; `present` are the replicas there are."""
        spec = self._spec
        host = self._hosts.setdefault(replica, _Host())
        host.failures += 1
        if host.failures < spec.consecutive_5xx or host.until_ps > now_ps:
            return
        ejected = sum(self.is_ejected(index, now_ps) for index in present)
        if ejected and 100 * (ejected + 1) > spec.max_ejection_percent * len(present):
            return
        healthy = (now_ps - host.until_ps) // spec.interval_ps if host.times else 0
        host.times = max(0, host.times - healthy) + 1
        lasts_ps = min(host.times * spec.base_ejection_time_ps, spec.max_ejection_time_ps)
        host.until_ps = -(-(now_ps + lasts_ps) // spec.interval_ps) * spec.interval_ps
        host.failures = 0
        self.ejections.append((now_ps, replica, host.until_ps))

    def is_ejected(self, replica: int, now_ps: int) -> bool:
        """Whether it gets nothing now."""
        host = self._hosts.get(replica)
        return host is not None and host.until_ps > now_ps

    def healthy(self, replicas: Sequence[int], now_ps: int) -> list[int]:
        """Positions of the replicas that may get a request; all of them in a panic."""
        left = [i for i, index in enumerate(replicas) if not self.is_ejected(index, now_ps)]
        if 100 * len(left) < self._spec.healthy_panic_threshold * len(replicas) or not left:
            return list(range(len(replicas)))
        return left
