"""When does a client ask again whose request failed? As in the simulator (twin.cluster.clients), but as late as a real
server says.
"""

from random import Random

from twin.clock import PS
from twin.cluster.clients import CLIENT_DISCONNECT, ClientsSpec
from twin.metrics.records import RequestRecord


class Retrying:
    """Draws the waiting times; streams with retries of their own have a chance of their own."""

    def __init__(self, spec: ClientsSpec) -> None:
        self._spec = spec
        self._chances: dict[int | None, Random] = {
            stream: Random(f"{own.seed}/retries/{stream}") for stream, own in spec.of_stream.items()
        }
        if spec.retries is not None:
            self._chances[None] = Random(f"{spec.retries.seed}/retries")

    def wait_ps(
        self, record: RequestRecord, retry_after_s: float | None, attempts: int
    ) -> int | None:
        """How long after the end of an attempt, the `attempts`-th, the client tries again; None if it does not."""
        own = record.stream if record.stream in self._spec.of_stream else None
        retries = self._spec.retries if own is None else self._spec.of_stream[own]
        if retries is None or record.finish_ps is None or record.reason == CLIENT_DISCONNECT:
            return None
        if attempts >= retries.attempts or record.outcome not in retries.outcomes:
            return None
        backoff = min(
            retries.backoff_ps * retries.multiplier ** (attempts - 1), retries.max_backoff_ps
        )
        wait_ps = round(backoff * (1 - retries.jitter * self._chances[own].random()))
        if retries.heeds_retry_after and retry_after_s is not None:
            wait_ps = max(wait_ps, round(retry_after_s * PS))
        give_up_ps = retries.give_up_ps
        if give_up_ps is not None and record.finish_ps + wait_ps > record.arrival_ps + give_up_ps:
            return None
        return wait_ps
