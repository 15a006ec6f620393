"""What does the twin expect of the service that is rendered? The figures that alerts compare it with."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from twin.clock import PS
from twin.cluster.promql import bucket_quantile
from twin.report.metric_names import TTFT_BUCKETS
from twin.scenario import Scenario
from twin.simulation import simulate


@dataclass(frozen=True)
class Prediction:
    """Of one simulated run; nothing is known of a run without records."""

    longest_s: float = 0.0
    """The longest completed request, waiting included."""
    ttft_p99_s: Mapping[str, float] = field(default_factory=dict)
    """Tier (`all` without a policy of ours) -> as Prometheus' histogram_quantile gives it from the buckets of
    twin:time_to_first_token_seconds."""


def predict(scenario: Scenario) -> Prediction:
    """Simulate the scenario. Raises InputError as `twin run` does."""
    result = simulate(scenario)
    longest_ps = 0
    counts: dict[str, list[int]] = {}
    for record in result.records:
        if record.outcome == "completed" and record.finish_ps is not None:
            longest_ps = max(longest_ps, record.finish_ps - record.arrival_ps)
        if record.first_token_ps is not None and record.arrival_ps >= scenario.run.warmup_ps:
            tier = record.tier if scenario.policy is not None else "all"
            of_tier = counts.setdefault(tier, [0] * (len(TTFT_BUCKETS) + 1))
            ttft_s = (record.first_token_ps - record.arrival_ps) / PS
            of_tier[bisect_left(TTFT_BUCKETS, ttft_s)] += 1
    tiers = [tier for tier in scenario.tiers if tier in counts]
    tiers += sorted(tier for tier in counts if tier not in tiers)
    return Prediction(longest_ps / PS, {tier: _p99(counts[tier]) for tier in tiers})


def _p99(counts: list[int]) -> float:
    total, cumulative = 0, []
    for count in counts:
        total += count
        cumulative.append(float(total))
    return bucket_quantile(0.99, TTFT_BUCKETS, cumulative)
