"""Many workloads, what happened in them, and whether all that should happen did."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.parity.lockstep import Difference, run_policy, run_stock
from tests.parity.vllm_host import VERSION
from tests.parity.workload import policy_workload, stock_workload
from twin.scheduling import PRESETS

STOCK = "stock vLLM"

_ALWAYS = (
    "reactive preemptions",
    "aborted while ready",
    "aborted while running",
    "undone starts",
    "cap stops",
    "tied arrivals",
)
_RANKED = (*_ALWAYS, "planned preemptions", "promotions")
EXPECTED: dict[str, tuple[str, ...]] = {
    STOCK: ("reactive preemptions", "hit tokens", "tied arrivals"),
    "fcfs": _ALWAYS,
    "fair": _ALWAYS,
    "priority": _RANKED,
    "slo": _RANKED,
    "tiered": (
        *_RANKED,
        "release by size",
        "release by tokens",
        "release by time",
        "aborted while held",
    ),
    "tiered_length": (
        *_RANKED,
        "release by size",
        "release by mix",
        "release by single",
        "aborted while held",
    ),
}
"""What each kind of workload must have met at least once for a campaign to count. `mix` and `single` are the timed
releases of length groups."""


@dataclass
class Outcome:
    """Workloads of one kind."""

    kind: str
    workloads: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Add up two outcomes of the same kind."""
        self.workloads += other.workloads
        self.counts += other.counts
        self.differences += other.differences

    def missing(self) -> list[str]:
        """Events that should have happened and did not."""
        return [event for event in EXPECTED[self.kind] if not self.counts[event]]


def kinds() -> list[str]:
    """Stock vLLM and every preset."""
    return [STOCK, *PRESETS]


def run(kind: str, seeds: range, tick: Callable[[], None] = lambda: None) -> Outcome:
    """Run the workloads of `kind` with these seeds; differences are collected, not raised."""
    outcome = Outcome(kind)
    for seed in seeds:
        try:
            if kind == STOCK:
                outcome.counts += run_stock(stock_workload(seed, VERSION))
            else:
                outcome.counts += run_policy(policy_workload(seed, kind, VERSION))
        except Difference as difference:
            outcome.differences.append(str(difference))
        outcome.workloads += 1
        tick()
    return outcome
