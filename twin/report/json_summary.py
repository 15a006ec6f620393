"""The summary of a run as one JSON object: what `twin run --json` prints and the tables are made from.

docs/metrics.md defines the figures. Apart from wall_s and requests_per_wall_s, the same scenario and
seed give the same bytes.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from twin.capacity import Means, limits_of
from twin.clock import to_seconds
from twin.compiled import is_compiled
from twin.metrics.engine_time import time_shares
from twin.metrics.estimated_wait import errors_of
from twin.metrics.histogram import BOUND
from twin.metrics.policy_statistics import merge_policy_stats
from twin.metrics.preemptions import preemptions_of
from twin.metrics.records import LATENCIES
from twin.metrics.summary import TierSummary, summarize_tally, total_counts
from twin.metrics.tally import Refusal, Tally
from twin.report.outside import outside
from twin.report.scaling import cost_of, fleet_of, goals_out_of_reach
from twin.report.stress import gateway_of, stress_warnings
from twin.report.traffic import timeout_warning, traffic
from twin.report.verdict import verdict
from twin.simulation import Result
from twin.workload.trace import TraceStream

EXACT, WITHIN = "exact", f"within {100 * BOUND:g} %"


def summarize(result: Result) -> dict[str, Any]:
    """Everything a run says, as plain data. Times are seconds."""
    scenario = result.scenario
    tally = result.tally()
    span_ps = result.simulated_ps - scenario.run.warmup_ps
    tiers = summarize_tally(tally, scenario.objectives, span_ps, scenario.tiers)
    totals = total_counts(tiers.values())
    wall = result.wall_s
    preempted = preemptions_of(tally)
    times = [(engine.time, engine.busy_ps) for engine in result.engines]
    shares = time_shares(times, result.alive_ps)
    limits = {
        "max_num_seqs": scenario.engine.active_limit,
        "max_num_batched_tokens": scenario.engine.token_budget,
        "kv_blocks": scenario.engine.num_gpu_blocks - 1,
        "block_size": scenario.engine.block_size,
    }
    used = _used_share(result, tally, totals.completed, totals.offered)
    missed = [
        f"{name} {objective}"
        for name, tier in tiers.items()
        for objective, found in tier.objectives.items()
        if found.met is False
    ]
    warnings = [
        *result.warnings,
        timeout_warning(totals.timed_out, totals.offered),
        preempted.warning(),
        *goals_out_of_reach(result),
        *stress_warnings(result),
    ]
    return {
        "scenario": scenario.name,
        "model": scenario.model.name,
        "gpu": scenario.hardware.gpu.name,
        "tensor_parallel_size": scenario.hardware.tensor_parallel_size,
        "replicas": scenario.cluster.replicas,
        "router": scenario.cluster.routing.router,
        "engine_version": scenario.engine.version,
        "policy": scenario.policy_name,
        "policy_fingerprint": scenario.policy_fingerprint,
        "oracle": scenario.policy is not None and scenario.policy.estimator == "oracle",
        "batching_wait_s": _batching_waits(result),
        "traffic": traffic(result, tally.streams),
        "client_timeouts": list(_client_timeouts(result)),
        "trace_prefixes": list(_trace_prefixes(result)),
        "seed": scenario.run.seed,
        "warmup_s": to_seconds(scenario.run.warmup_ps),
        "percentiles": EXACT if tally.is_exact else WITHIN,
        "interrupted": result.interrupted,
        "verdict": verdict(
            shares.limits, limits, used, missed, outside(result, tally, bool(missed))
        ),
        "used_share": used,
        "bound": dict(shares.limits),
        "simulated_s": to_seconds(result.simulated_ps),
        "totals": totals.to_dict(),
        "attempts": totals.attempts,
        "refused": [
            _refusal(refusal, result.places.get(refusal.index)) for refusal in tally.refused
        ],
        "tiers": {name: _tier(tier) for name, tier in tiers.items()},
        "objectives": {
            name: {objective: found.to_dict() for objective, found in tier.objectives.items()}
            for name, tier in tiers.items()
            if tier.objectives
        },
        "gateway": gateway_of(result, tally),
        "fleet": fleet_of(result),
        "cost": _cost(result, tally, tiers.values()),
        "throughput": _throughput(tally, span_ps),
        "engine": _engine(result),
        "limits": limits,
        "gpu_time": dict(shares.uses),
        "preemptions": preempted.to_dict(),
        "estimated_wait": {
            name: dataclasses.asdict(errors_of(tally.tiers[name].waits)) for name in tiers
        },
        "kv_by_length": None if result.series is None else result.series.kv_by_length(),
        "policy_stats": merge_policy_stats(result.policies),
        "step_time": _step_time(result),
        "trust": result.trust().to_dict(),
        "warnings": list(dict.fromkeys(filter(None, warnings))),
        "in_system_mean": _in_system_mean(result),
        "events": result.events,
        "compiled": is_compiled(),
        "wall_s": wall,
        "requests_per_wall_s": totals.offered / wall if wall > 0 else None,
    }


def to_json(summary: dict[str, Any]) -> str:
    """The summary as text that ends in a newline. Raises ValueError for NaN, which JSON does not have."""
    return json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def objectives_missed(summary: dict[str, Any]) -> bool:
    """Whether any objective was judged and not met."""
    tiers = summary["objectives"].values()
    return any(found["met"] is False for tier in tiers for found in tier.values())


def _tier(tier: TierSummary) -> dict[str, Any]:
    return {
        **tier.counts.to_dict(),
        "attempts": tier.counts.attempts,
        "measured": tier.measured,
        "good": tier.good,
        **{f"{name}_s": tier.latency[name].to_dict() for name in LATENCIES},
        "samples": {name: tier.latency[name].count for name in LATENCIES},
        "goodput_rps": tier.goodput_rps,
        "attainment": tier.attainment,
    }


def _used_share(result: Result, tally: Tally, completed: int, offered: int) -> float | None:
    """Requests completed per second of a replica, over the most that one takes of the same mean lengths (`limits_of`).

    None where nothing was measured.
    """
    tiers, alive_ps = tally.tiers.values(), sum(result.alive_ps)
    measured = sum(tier.completed for tier in tiers)
    output = sum(tier.output_tokens for tier in tiers)
    if not measured or not output or not alive_ps:
        return None
    prompt = sum(tier.prompt_tokens for tier in tiers) / measured
    hits = sum(engine.prefix_hit_tokens for engine in result.engines) / offered
    means = Means(prompt, min(hits, prompt), output / measured)
    most = limits_of(result.scenario, means)[0].rate
    return completed / to_seconds(alive_ps) / most if most else None


def _cost(result: Result, tally: Tally, tiers: Iterable[TierSummary]) -> dict[str, Any]:
    tokens = sum(tier.output_tokens for tier in tally.tiers.values())
    return cost_of(result, tokens, sum(tier.good for tier in tiers))


def _throughput(tally: Tally, span_ps: int) -> dict[str, float | None]:
    """What was delivered per second: measured requests that completed, and their tokens."""
    span_s = to_seconds(span_ps)
    tiers = tally.tiers.values()
    sums = {
        "requests": sum(tier.completed for tier in tiers),
        "prompt_tokens": sum(tier.prompt_tokens for tier in tiers),
        "output_tokens": sum(tier.output_tokens for tier in tiers),
    }
    return {f"{name}_per_s": n / span_s if span_s > 0 else None for name, n in sums.items()}


def _engine(result: Result) -> dict[str, Any]:
    counts = (
        "steps", "preemptions", "recomputed_tokens", "prefix_hit_tokens", "prefix_query_tokens",
        "scheduled_tokens", "padded_tokens", "prompt_tokens", "generation_tokens",
    )  # fmt: skip
    engines = result.engines
    busy_ps = sum(engine.busy_ps for engine in engines)
    capacity_ps = sum(result.alive_ps)
    return {name: sum(getattr(engine, name) for engine in engines) for name in counts} | {
        "kv_usage_mean": sum(e.kv_usage_mean * e.busy_ps for e in engines) / busy_ps
        if busy_ps
        else 0.0,
        "kv_waste_mean": sum(e.kv_waste_mean * e.busy_ps for e in engines) / busy_ps
        if busy_ps
        else 0.0,
        "busy_share": busy_ps / capacity_ps if capacity_ps else 0.0,
    }


def _in_system_mean(result: Result) -> float | None:
    """Requests inside at once, on average over the whole run."""
    return result.inflight_request_ps / result.simulated_ps if result.simulated_ps else None


def _refusal(refusal: Refusal, place: str | None) -> dict[str, Any]:
    return {
        "index": refusal.index,
        "place": place,
        "tier": refusal.tier,
        "prompt_tokens": refusal.prompt_tokens,
        "reason": refusal.reason,
    }


def _batching_waits(result: Result) -> dict[str, float]:
    """Tier -> the longest a request of it is held for a batch; tiers that hold nothing are left out."""
    policy = result.scenario.policy
    if policy is None:
        return {}
    return {t.name: float(t.max_wait) for t in policy.tiers if t.holds and t.max_wait is not None}


def _trace_prefixes(result: Result) -> Iterator[dict[str, Any]]:
    """Traces that say nothing of prefixes, so that hits are none, or as many as the scenario assumes."""
    for number, stream in enumerate(result.scenario.traffic):
        if isinstance(stream, TraceStream) and not stream.tells_prefixes:
            share = stream.assumed_prefix_share
            yield {"stream": number, "assumed_share": None if share is None else float(share)}


def _client_timeouts(result: Result) -> Iterator[dict[str, Any]]:
    for number, stream in enumerate(result.scenario.traffic):
        ttft_ps, total_ps = stream.clients.ttft_timeout_ps, stream.clients.total_timeout_ps
        if ttft_ps is not None or total_ps is not None:
            yield {
                "stream": number,
                "ttft_s": None if ttft_ps is None else to_seconds(ttft_ps),
                "total_s": None if total_ps is None else to_seconds(total_ps),
            }


def _step_time(result: Result) -> dict[str, Any]:
    """Where the step times come from, and how well they fit what was measured."""
    origin = result.scenario.hardware.profile.provenance
    return {
        "engine": origin.engine,
        "source": origin.source,
        "date": origin.date,
        "fit_error": dict(origin.fit_error),
    }
