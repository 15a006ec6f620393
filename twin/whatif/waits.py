"""What waiting for a batch buys: the same traffic with each tier's wait from 0 upwards, throughput beside latency."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twin.errors import InputError
from twin.scenario import Scenario, load_scenario
from twin.scheduling import TierConfig, policy_config
from twin.whatif.axes import text_of
from twin.whatif.figures import Figures, mean_figures
from twin.whatif.runs import Backend, Task, run_all
from twin.whatif.statistics import Difference, interval, paired
from twin.whatif.verdict import ALPHA, change_text

WAITS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.2)
"""Seconds, up to the longest that the presets use."""

SEEDS = 5
"""Replications of each wait."""

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
    seeds: int = SEEDS,
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Each tier's wait varied alone, the others as they are, under the same seeds; a verdict in words, never on noise.

    Of a tier `verdict` is gain (a wait delivers more tokens per second, by more than chance), nothing (none delivers
    1 % more, even at the upper end of its interval) or open; `best` is the wait to take, None where it is open. All
    intervals hold together, as those of a comparison do. Raises InputError for fewer than two waits or seeds, where a
    wait cannot be, or nothing runs.
    """
    names = list(
        tiers or (tier.name for tier in (scenario.policy.tiers if scenario.policy else ()))
    )
    if not names:
        wait_overrides(scenario, "", 0.0)
    ordered = sorted(set(waits))
    if len(ordered) < 2 or seeds < 2:
        raise InputError(
            f"at least two waits and two seeds are needed, got {len(ordered)} and {seeds}: from one run nobody can "
            "tell chance from difference"
        )
    points = [(tier, wait) for tier in names for wait in ordered]
    document, first = scenario.to_dict(), scenario.run.seed
    tasks = []
    for i, (tier, wait) in enumerate(points):
        changes = tuple(wait_overrides(scenario, tier, wait))
        load_scenario(document, changes)
        tasks += [Task(i * seeds + k, document, changes, first + k) for k in range(seeds)]
    rows: list[Figures | None] = [None] * len(tasks)
    for made, run in enumerate(run_all(tasks, backend or Backend(1)), 1):
        if run.figures is None:
            raise InputError(run.error or "a run could not be made")
        rows[run.number] = run.figures
        if progress is not None:
            progress(made, len(tasks))
    level = 1 - ALPHA / (2 * len(names) * (len(ordered) - 1))
    found: dict[str, Any] = {}
    for tier in names:
        mine = [
            (wait, [row for row in rows[i * seeds : (i + 1) * seeds] if row is not None])
            for i, (name, wait) in enumerate(points)
            if name == tier
        ]
        found[tier] = _judged(tier, mine, level)
    return {
        "seeds": [first + k for k in range(seeds)],
        "tiers": found,
        "text": " ".join(of["text"] for of in found.values()),
    }


def _shown(figures: Figures, tier: str) -> dict[str, float | None]:
    return {
        "throughput": figures.get("output_tokens_per_s"),
        "requests_per_s": figures.get("requests_per_s"),
        "goodput": figures.get(f"{tier}.goodput"),
        "all_goodput": figures.get("all.goodput"),
        **{stat: figures.get(f"{tier}.ttft_{stat}") for stat in ("p50", "p99")},
        "e2e_p50": figures.get(f"{tier}.e2e_p50"),
    }


def _judged(
    tier: str, waits: Sequence[tuple[float, Sequence[Figures]]], level: float
) -> dict[str, Any]:
    """The waits of one tier held against the shortest."""
    points: list[dict[str, Any]] = []
    changes: dict[float, Difference] = {}
    for wait, rows in waits:
        point: dict[str, Any] = {"wait_s": wait, **_shown(mean_figures(rows), tier)}
        before, after = (
            [row.get("output_tokens_per_s") for row in side] for side in (waits[0][1], rows)
        )
        change = paired(before, after, level)
        if change is not None and points:
            changes[wait] = change
            point["change"] = change_text(change, "")
        points.append(point)
    return {"points": points, **_verdict(tier, points, changes, _moved(tier, waits, level))}


def _moved(tier: str, waits: Sequence[tuple[float, Sequence[Figures]]], level: float) -> str:
    """By how much the longest wait moves the TTFT p50, in ms, with its interval."""
    both = zip(
        *([row.get(f"{tier}.ttft_p50") for row in waits[i][1]] for i in (0, -1)), strict=True
    )
    gaps = [1000 * (b - a) for a, b in both if a is not None and b is not None]
    if not gaps:
        return "leaves nothing to judge of its TTFT p50"
    low, high = interval(gaps, level)
    mean = sum(gaps) / len(gaps)
    return f"moves its TTFT p50 by {mean:+.1f} ms [{low:+.1f}, {high:+.1f}]"


def _verdict(
    tier: str, points: Sequence[Mapping[str, Any]], changes: Mapping[float, Difference], moved: str
) -> dict[str, Any]:
    if not changes:
        text = f"{tier}: too little was delivered to tell what a wait buys."
        return {"verdict": "open", "best": None, "gain": None, "text": text}
    gains = {w: d for w, d in changes.items() if d.low > 0 and not d.is_equal}
    if gains:
        most = max(d.change for d in gains.values())
        best = min(wait for wait, d in gains.items() if d.change >= most - WORTH)
        p50 = next(point["p50"] for point in points if point["wait_s"] == best)
        cost = "" if p50 is None else f", with a TTFT p50 of {1000 * p50:.1f} ms"
        more = change_text(changes[best], "")
        text = f"{tier}: a wait of {1000 * best:g} ms delivers {more} tokens per second{cost}."
        return {"verdict": "gain", "best": best, "gain": changes[best].change, "text": text}
    longest = f"one of {1000 * max(changes):g} ms {moved}"
    widest = max(changes, key=lambda wait: changes[wait].high)
    room = changes[widest]
    bound = WORTH if room.is_relative else WORTH * abs(room.before)
    if room.high <= bound:
        text = f"{tier}: waiting buys nothing here: no wait delivers 1 % more tokens per second, and {longest}."
        return {"verdict": "nothing", "best": points[0]["wait_s"], "gain": 0.0, "text": text}
    text = (
        f"{tier}: no wait is shown to deliver more tokens per second, but one of {1000 * widest:g} ms may "
        f"({change_text(room, '')}); more seeds would tell. {longest[0].upper()}{longest[1:]}."
    )
    return {"verdict": "open", "best": None, "gain": None, "text": text}
