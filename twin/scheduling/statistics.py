"""Counts of what a policy did, by tier."""

from typing import Any

from twin.scheduling.entry import HELD, READY, RUNNING


class TierStatistics:
    """What happened to the jobs of one tier. Times are seconds."""

    def __init__(self) -> None:
        self.submitted = 0
        self.present = {HELD: 0, READY: 0, RUNNING: 0}
        """Jobs by state now."""
        self.ended: dict[tuple[str, str], int] = {}
        """Jobs gone, by reason and the state they were in."""
        self.releases: dict[str, int] = {}
        """Batches released, by what released them."""
        self.batch_jobs = 0
        self.batch_tokens = 0
        self.largest_batch = 0
        self.held_s = 0.0
        self.starts = 0
        self.waited_s = 0.0
        """Sum over first starts of the time since arrival."""
        self.longest_wait_s = 0.0
        self.undone_starts = 0
        self.promotions = 0
        self.planned_preemptions = 0
        self.reactive_preemptions = 0
        self.lost_tokens = 0
        """Computed tokens thrown away by planned preemptions."""
        self.cap_stops = 0
        """Jobs that a cap of the tier kept from running when it was their turn."""
        self.estimates = 0
        self.estimate_error_tokens = 0
        """Sum of expected minus actual output of finished jobs."""
        self.estimate_abs_error_tokens = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data with means beside the counts."""
        batches = sum(self.releases.values())
        return {
            "submitted": self.submitted,
            **self.present,
            "ended": dict(sorted((f"{why} {state}", n) for (why, state), n in self.ended.items())),
            "releases": dict(sorted(self.releases.items())),
            "batch_size_mean": _ratio(self.batch_jobs, batches),
            "batch_size_max": self.largest_batch,
            "batch_tokens_mean": _ratio(self.batch_tokens, batches),
            "batching_wait_mean_s": _ratio(self.held_s, self.batch_jobs),
            "queue_wait_mean_s": _ratio(self.waited_s, self.starts),
            "queue_wait_max_s": self.longest_wait_s,
            "undone_starts": self.undone_starts,
            "promotions": self.promotions,
            "planned_preemptions": self.planned_preemptions,
            "reactive_preemptions": self.reactive_preemptions,
            "lost_tokens": self.lost_tokens,
            "cap_stops": self.cap_stops,
            "estimates": self.estimates,
            "estimate_bias_tokens": _ratio(self.estimate_error_tokens, self.estimates),
            "estimate_mae_tokens": _ratio(self.estimate_abs_error_tokens, self.estimates),
        }


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None
