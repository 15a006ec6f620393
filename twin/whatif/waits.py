"""What waiting for a batch buys: the same traffic with each tier's wait from 0 upwards, throughput beside latency."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twin.errors import InputError
from twin.scenario import Scenario, load_scenario
from twin.scheduling import TierConfig, policy_config
from twin.whatif.axes import text_of
from twin.whatif.figures import Figures, mean_figures
from twin.whatif.runs import Backend, Task, run_all

WAITS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.2)
"""Seconds, up to the longest that the presets use."""

WORTH = 0.01
"""Less throughput than this share is no gain."""

UNHELD_SIZE = 32
"""Jobs that a hold releases together at most, of a tier that holds nothing yet."""

Progress = Callable[[int, int], None]


def wait_overrides(scenario: Scenario, tier: str, wait_s: float) -> list[str]:
    """The changes that give `tier` this longest wait; 0 lets every job of it go at once.

    Raises InputError for a policy without tiers of its own, and for a tier that it does not have.
    """
    if scenario.policy is None:
        raise InputError(
            f"policy {scenario.policy_name} holds nothing for a batch; take tiered, or another preset of the shared "
            "scheduler"
        )
    names = [known.name for known in scenario.policy.tiers]
    if tier not in names:
        raise InputError(f"tier {tier}: policy {scenario.policy_name} has {', '.join(names)}")
    config = policy_config(scenario.document["policy"]).to_dict()
    for entry in config["tiers"]:
        if entry["name"] == tier:
            _set_wait(entry, wait_s)
    return [f"policy={text_of({'tiers': config['tiers'], 'default_tier': config['default_tier']})}"]


def _set_wait(entry: dict[str, Any], wait_s: float) -> None:
    plain = TierConfig(name="plain")
    if wait_s == 0:
        entry |= {
            "batch_size": plain.batch_size, "batch_tokens": None, "max_wait": None, "groups": [],
            "adaptive": plain.adaptive,
        }  # fmt: skip
        return
    if entry["batch_size"] == 1 and entry["batch_tokens"] is None and not entry["groups"]:
        entry["batch_size"] = UNHELD_SIZE
    entry["max_wait"] = wait_s
    if entry["promote_after"] is not None:
        entry["promote_after"] = max(entry["promote_after"], wait_s)


def explore_waits(
    scenario: Scenario,
    tiers: Sequence[str] = (),
    waits: Sequence[float] = WAITS,
    seeds: int = 1,
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Each tier's wait varied alone, the others as they are. Raises InputError where a wait cannot be, or nothing runs.

    `best` of a tier is the shortest wait whose throughput is within 1 % of the best of all its waits.
    """
    names = list(
        tiers or (tier.name for tier in (scenario.policy.tiers if scenario.policy else ()))
    )
    if not names:
        wait_overrides(scenario, "", 0.0)
    points = [(tier, wait) for tier in names for wait in waits]
    document, first = scenario.to_dict(), scenario.run.seed
    tasks = []
    for i, (tier, wait) in enumerate(points):
        changes = tuple(wait_overrides(scenario, tier, wait))
        load_scenario(document, changes)
        tasks += [Task(i * seeds + k, document, changes, first + k) for k in range(seeds)]
    rows: list[list[Figures]] = [[] for _ in points]
    for made, run in enumerate(run_all(tasks, backend or Backend(1)), 1):
        if run.figures is None:
            raise InputError(run.error or "a run could not be made")
        rows[run.number // seeds].append(run.figures)
        if progress is not None:
            progress(made, len(tasks))
    found: dict[str, Any] = {}
    for tier in names:
        mine = [
            {"wait_s": wait, **_shown(mean_figures(rows[i]), tier)}
            for i, (name, wait) in enumerate(points)
            if name == tier
        ]
        found[tier] = {"points": mine, **_best(mine, tier)}
    return {"seeds": seeds, "tiers": found, "text": " ".join(of["text"] for of in found.values())}


def _shown(figures: Figures, tier: str) -> dict[str, float | None]:
    return {
        "throughput": figures.get("output_tokens_per_s"),
        "requests_per_s": figures.get("requests_per_s"),
        "goodput": figures.get(f"{tier}.goodput"),
        "all_goodput": figures.get("all.goodput"),
        **{stat: figures.get(f"{tier}.ttft_{stat}") for stat in ("p50", "p99")},
        "e2e_p50": figures.get(f"{tier}.e2e_p50"),
    }


def _best(points: Sequence[Mapping[str, Any]], tier: str) -> dict[str, Any]:
    known = [point for point in points if point["throughput"] is not None]
    if not known:
        return {"best": None, "gain": None, "text": f"{tier}: nothing was delivered."}
    most = max(point["throughput"] for point in known)
    best = min(
        (point for point in known if point["throughput"] >= (1 - WORTH) * most),
        key=lambda point: point["wait_s"],
    )
    shortest = min(known, key=lambda point: point["wait_s"])
    gain = best["throughput"] / shortest["throughput"] - 1 if shortest["throughput"] else None
    if best is shortest:
        longest = max(known, key=lambda point: point["wait_s"])
        cost = (longest["p50"] or 0.0) - (shortest["p50"] or 0.0)
        text = (
            f"{tier}: waiting buys nothing here: no wait delivers 1 % more tokens per second, and one of "
            f"{1000 * longest['wait_s']:g} ms moves its TTFT p50 by {1000 * cost:+.1f} ms."
        )
    else:
        text = (
            f"{tier}: a wait of {1000 * best['wait_s']:g} ms delivers {100 * (gain or 0.0):+.1f} % tokens per second, "
            f"with a TTFT p50 of {1000 * (best['p50'] or 0.0):.1f} ms."
        )
    return {"best": best["wait_s"], "gain": gain, "text": text}
