"""What the policies of several replicas did, as one: counts added, means weighted, maxima kept."""

from collections.abc import Sequence
from typing import Any

COUNTS = (
    "submitted", "held", "ready", "running", "undone_starts", "promotions", "planned_preemptions",
    "reactive_preemptions", "lost_tokens", "cap_stops", "estimates",
)  # fmt: skip
COUNTS_BY_NAME = ("ended", "releases")
MAXIMA = ("batch_size_max", "queue_wait_max_s")


def merge_policy_stats(replicas: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By tier, from `Policy.stats()` of every replica; empty without replicas that have a policy.

    Left out is what means nothing over a whole run or twice: pressure, and the mean queue wait of the policy, which the
    tier's `queue_s` gives per request.
    """
    if not replicas:
        return {}
    tiers = replicas[0]["tiers"]
    return {tier: _merge([replica["tiers"][tier] for replica in replicas]) for tier in tiers}


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {name: sum(part[name] for part in parts) for name in COUNTS}
    merged |= {name: max(part[name] for part in parts) for name in MAXIMA}
    for name in COUNTS_BY_NAME:
        keys = sorted({key for part in parts for key in part[name]})
        merged[name] = {key: sum(part[name].get(key, 0) for part in parts) for key in keys}
    batches = [sum(part["releases"].values()) for part in parts]
    jobs = [n * (part["batch_size_mean"] or 0.0) for n, part in zip(batches, parts, strict=True)]
    estimates = [part["estimates"] for part in parts]
    for name, weights in (
        ("batch_size_mean", batches),
        ("batch_tokens_mean", batches),
        ("batching_wait_mean_s", jobs),
        ("estimate_bias_tokens", estimates),
        ("estimate_mae_tokens", estimates),
    ):
        merged[name] = _weighted([part[name] for part in parts], weights)
    return merged


def _weighted(means: list[float | None], weights: Sequence[float]) -> float | None:
    pairs = [(m, w) for m, w in zip(means, weights, strict=True) if m is not None and w > 0]
    if len(pairs) == 1:
        return pairs[0][0]
    total = sum(w for _, w in pairs)
    return sum(m * w for m, w in pairs) / total if pairs else None
