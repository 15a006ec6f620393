"""How preemptions are spread over requests: thinly, as in a healthy engine, or again and again over a few."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from twin.metrics.records import RequestRecord
from twin.metrics.summary import tally_of
from twin.metrics.tally import Tally

TOO_MANY = 20
"""Preemptions of one request beyond which something is wrong with the configuration."""


@dataclass(frozen=True, slots=True)
class Preemptions:
    """Of the requests of a run."""

    requests: int
    """Requests that reached an engine."""
    histogram: dict[int, int]
    """Times preempted -> requests, from 1 on."""
    worst: int | None
    """Index of the request that was preempted most often, the first of them; None if none was."""
    too_many: int
    """Requests preempted more than TOO_MANY times."""

    @property
    def preempted(self) -> int:
        """Requests that were preempted at least once."""
        return sum(self.histogram.values())

    @property
    def most(self) -> int:
        """Preemptions of the worst one."""
        return max(self.histogram, default=0)

    def to_dict(self) -> dict[str, Any]:
        """For the JSON summary."""
        return {
            "requests": self.requests,
            "preempted": self.preempted,
            "histogram": {str(times): n for times, n in self.histogram.items()},
            "most": self.most,
            "worst": self.worst,
        }

    def warning(self) -> str | None:
        """What to say if some request was preempted too often."""
        if not self.too_many:
            return None
        who = "request was" if self.too_many == 1 else "requests were"
        return (
            f"{self.too_many} {who} preempted more than {TOO_MANY} times, request {self.worst} {self.most} times: "
            "each time all its tokens are computed again. Fewer slots (max_num_seqs), more KV blocks or a tier that is "
            "not preemptible prevent it"
        )


def count_preemptions(records: Iterable[RequestRecord]) -> Preemptions:
    """How often each request of a run was preempted."""
    return preemptions_of(tally_of(records, {}, warmup_ps=0))


def preemptions_of(tally: Tally) -> Preemptions:
    """How often each request that was counted was preempted."""
    times = tally.preempted
    return Preemptions(
        requests=times.total(),
        histogram={count: times[count] for count in sorted(times) if count},
        worst=tally.worst,
        too_many=sum(n for count, n in times.items() if count > TOO_MANY),
    )
