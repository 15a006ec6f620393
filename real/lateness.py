"""Was the client itself the bottleneck? How late it sent, how busy it was, and up to which rate it keeps its times."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from real.measured import Measured
from real.preflight import child_environment
from real.prompts import Prompts
from real.replay import Manner, Replayed, replay
from twin.clock import PS
from twin.workload.request import Request
from twin.workload.source import Arrival, Ended

LIMIT_S = 0.005
"""How late requests may be sent."""
RATES = tuple(round(25 * 1.5**i) for i in range(13))
"""Requests per second that are tried: 25 to 3,244."""
TRIAL_S = 2.0
BUSY = 0.8
"""Share of a processor from which on a client cannot be trusted to be on time."""


@dataclass(frozen=True)
class Lateness:
    """Seconds from due to sent."""

    requests: int
    """Sent once, of which it is known."""
    p50_s: float
    p99_s: float
    max_s: float
    busiest_on_time: int
    """Most requests due in one second of the run that were all sent within LIMIT_S."""

    def to_dict(self) -> dict[str, Any]:
        """As data."""
        return asdict(self)


def lateness_of(measured: Sequence[Measured]) -> Lateness | None:
    """None where no request was sent, or nobody knows when."""
    late = [(one.record.arrival_ps, one.lateness_s) for one in measured]
    known = [(due_ps // PS, seconds) for due_ps, seconds in late if seconds is not None]
    if not known:
        return None
    seconds = np.array([value for _, value in known])
    per_second = Counter(second for second, _ in known)
    missed = {second for second, value in known if value > LIMIT_S}
    on_time = [count for second, count in per_second.items() if second not in missed]
    p50, p99 = np.percentile(seconds, [50, 99])
    return Lateness(
        len(known), float(p50), float(p99), float(seconds.max()), max(on_time, default=0)
    )


def client_facts(replayed: Replayed) -> dict[str, Any]:
    """What is said of the client in replay.json."""
    late = lateness_of(replayed.measured)
    return {
        "cpu_share": replayed.cpu_share,
        "lateness": None if late is None else late.to_dict(),
        "sent_on_time_limit_s": LIMIT_S,
    }


def warnings_of(replayed: Replayed, max_in_flight: int | None) -> list[str]:
    """What makes the client's times doubtful."""
    told, late = [], lateness_of(replayed.measured)
    if late is not None and late.p99_s > LIMIT_S:
        cause = (
            f"it had at most {max_in_flight} open at once"
            if max_in_flight
            else "it, or its connection, was the bottleneck"
        )
        told.append(
            f"the client sent 1 % of the requests more than {1e3 * late.p99_s:.1f} ms after they were due ({cause}); "
            "latencies from the due time include that"
        )
    if replayed.cpu_share > BUSY:
        told.append(
            f"the client used {100 * replayed.cpu_share:.0f} % of a processor; spread the load over several clients"
        )
    return told


class _Evenly:
    """Traffic of equal requests at a constant rate."""

    def __init__(self, rate: float, prompt_tokens: int, output_tokens: int) -> None:
        self._gap_ps, self._number = round(PS / rate), 0
        self._left = max(20, round(rate * TRIAL_S))
        self._prompt, self._output = prompt_tokens, output_tokens

    def next_ps(self) -> int | None:
        return self._number * self._gap_ps if self._number < self._left else None

    def pop(self) -> Arrival:
        number, self._number = self._number, self._number + 1
        due_ps = number * self._gap_ps
        request = Request(number, due_ps, (), self._prompt, self._output, None, number)
        return Arrival(due_ps, 0, number, 0, request, None)

    def on_finish(self, record: Ended) -> bool:
        return False


def highest_rate(
    prompt_tokens: int, output_tokens: int, stream: bool, vocabulary: int
) -> tuple[float, float]:
    """(requests per second up to which 99 % are sent within LIMIT_S, share of a processor at that rate).

    Measured against a server in a process of its own that answers at once, with requests of these lengths; 0 if even
    the lowest rate is too much. What else runs on the machine counts.
    """
    found = (0.0, 0.0)
    command = [sys.executable, "-m", "real.null_server"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=child_environment({})
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            for rate in RATES:
                done = asyncio.run(
                    replay(
                        url,
                        "null",
                        _Evenly(rate, prompt_tokens, output_tokens),  # type: ignore[arg-type]
                        Prompts(vocabulary),
                        Manner(stream=stream, hints=False),
                    )
                )
                late = lateness_of(done.measured)
                complete = all(one.record.outcome == "completed" for one in done.measured)
                if late is None or late.p99_s > LIMIT_S or not complete:
                    break
                found = (float(rate), done.cpu_share)
        finally:
            server.terminate()
    return found
