"""How much more traffic the objectives bear, how far chance moves the answer, and what holds under other seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twin.errors import InputError
from twin.report.texts import plural
from twin.scenario import Scenario, traffic_presets
from twin.whatif.figures import Measure
from twin.whatif.runs import Backend, Task, run_all
from twin.whatif.search import FRESH_SEEDS, Look, Told, broken_of, look, objectives_of
from twin.whatif.statistics import interval
from twin.whatif.traffic_scale import scaled

SEEDS = 5
LARGEST_FACTOR = 1024.0
PRECISION = 0.01
"""Of the factor of traffic, as a share."""
BY_SEED = 0.02
"""The same of the factor of one seed."""
LEVEL = 0.95
"""Of the interval over seeds."""
STEP_DOWN = 0.9
"""What breaks under fresh seeds is tried again with so much of the traffic."""
STEPS = 12


@dataclass
class Looks:
    """What the traffic times a factor came to, run when it is asked for."""

    document: Mapping[str, Any]
    measures: Sequence[Measure]
    seeds: Sequence[int]
    backend: Backend
    told: Told | None
    known: dict[float, Look] = field(default_factory=dict)
    """By factor, under `seeds`."""

    def scaled(self, factor: float) -> dict[str, Any]:
        """The document with so many times the traffic."""
        presets = traffic_presets()
        return scaled(self.document, factor, lambda name: presets[name].rate)

    def at(self, factor: float, seeds: Sequence[int] | None = None, words: str = "") -> Look:
        """Look at one factor. Raises InputError where it cannot run."""
        under = self.seeds if seeds is None else seeds
        tried = look(self.scaled(factor), (), under, self.measures, self.backend)
        if tried.error is not None:
            raise InputError(f"with {factor:.3g} times the traffic: {tried.error}")
        if seeds is None:
            self.known[factor] = tried
        if self.told is not None:
            state = "meets all" if tried.is_good else "; ".join(tried.broken)
            self.told(f"{factor:.4g} times{words}: {state}")
        return tried


def headroom(
    scenario: Scenario,
    seeds: int = SEEDS,
    backend: Backend | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """How many times the present traffic the objectives bear, to 1 %; below 1 where they are missed already.

    It is taken that what breaks an objective breaks it under more traffic, too. `factor` is where the means over the
    seeds break one; `by_seed` has where each seed alone does, `low` and `high` are a 95 % interval of their mean, and
    `safe_factor` is the most that was found to hold under fresh seeds, from `low` downwards. Raises InputError without
    objectives.
    """
    first = scenario.run.seed
    looks = Looks(
        scenario.to_dict(),
        objectives_of(scenario),
        [first + k for k in range(seeds)],
        backend or Backend(1),
        told,
    )
    good, bad = _crossing(looks)
    data = _data(good, bad, looks)
    if good is None or bad is None:
        return data
    by_seed = _by_seed(looks) if seeds > 1 else []
    low = high = None
    if by_seed:
        low, high = (math.exp(end) for end in interval([math.log(f) for f in by_seed], LEVEL))
    fresh = [first + seeds + k for k in range(FRESH_SEEDS)]
    safe = _safe(looks, min(low or good, good), fresh)
    text = data["text"] + _spread_text(by_seed, low, high) + _safe_text(safe, good, len(fresh))
    return data | {
        "by_seed": by_seed,
        "low": low,
        "high": high,
        "safe_factor": safe,
        "fresh_seeds": fresh,
        "text": text,
    }


def _crossing(looks: Looks) -> tuple[float | None, float | None]:
    """(the largest factor that is good, the least that is not), 1 % apart; None where there is none."""
    now = looks.at(1.0)
    factor, step = 1.0, 2.0 if now.is_good else 0.5
    # Twice as much, or half, until it turns.
    while True:
        before, factor = factor, factor * step
        if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
            return (before, None) if now.is_good else (None, before)
        if looks.at(factor).is_good != now.is_good:
            break
    good, bad = (before, factor) if now.is_good else (factor, before)
    while bad / good > 1 + PRECISION:
        middle = math.sqrt(bad * good)
        if looks.at(middle).is_good:
            good = middle
        else:
            bad = middle
    return good, bad


def _by_seed(looks: Looks) -> list[float]:
    """Where each seed alone breaks an objective, to 2 %: the largest factor below its first break."""
    ends = []
    for k in range(len(looks.seeds)):
        broke = min((f for f, of in looks.known.items() if not of.by_seed[k]), default=math.inf)
        kept = max((f for f, of in looks.known.items() if of.by_seed[k] and f < broke), default=0.0)
        ends.append([kept, broke])
    while True:
        middles = {k: _middle(*pair) for k, pair in enumerate(ends)}
        asked = {k: factor for k, factor in middles.items() if factor is not None}
        if not asked:
            return [kept or broke for kept, broke in ends]
        tasks = [Task(k, looks.scaled(factor), (), looks.seeds[k]) for k, factor in asked.items()]
        for run in run_all(tasks, looks.backend):
            factor = asked[run.number]
            if run.figures is None:
                raise InputError(f"with {factor:.3g} times the traffic: {run.error}")
            is_broken = bool(broken_of(looks.measures, [run.figures]))
            ends[run.number][is_broken] = factor


def _middle(kept: float, broke: float) -> float | None:
    """Where to look next between the two; None where they are close, or no end is in sight."""
    if kept == 0.0:
        return broke / 2 if broke / 2 >= 1 / LARGEST_FACTOR else None
    if math.isinf(broke):
        return 2 * kept if 2 * kept <= LARGEST_FACTOR else None
    return math.sqrt(kept * broke) if broke / kept > 1 + BY_SEED else None


def _safe(looks: Looks, start: float, fresh: Sequence[int]) -> float | None:
    """The first factor from `start` downwards that holds under fresh seeds; None if none of a dozen does."""
    factor = start
    for _ in range(STEPS):
        if looks.at(factor, fresh, " under fresh seeds").is_good:
            return factor
        factor *= STEP_DOWN
    return None


def _data(good: float | None, bad: float | None, looks: Looks) -> dict[str, Any]:
    now, known = looks.known[1.0], looks.known
    rate = None if good is None else known[good].figures.get("requests_per_s")
    at = f" ({rate:.3g} requests/s)" if rate is not None else ""
    broken = [] if bad is None else list(known[bad].broken)
    if bad is None:
        text = f"More than {good:.0f} times the traffic breaks no objective."
    elif good is None:
        text = f"Even a {1 / bad:.0f}th of the traffic breaks {'; '.join(broken)}: load is not the cause."
    elif now.is_good:
        text = (
            f"{_times(good, bad)} times the traffic{at} is borne, {100 * (good - 1):.0f} % more than now; at "
            f"{_times(bad, good)} times {'; '.join(broken)}."
        )
    else:
        text = (
            f"No headroom: {'; '.join(now.broken)} now. The objectives hold up to {_times(good, bad)} times the "
            f"traffic{at}."
        )
    return {
        "factor": good,
        "breaks_at": bad,
        "broken": broken,
        "requests_per_s": rate,
        "now_meets": now.is_good,
        "text": text,
        "seeds": len(looks.seeds),
    }


def _times(factor: float, other: float) -> str:
    """A factor with as many digits as tell it from the other."""
    digits = next(d for d in (2, 3, 4, 9) if f"{factor:.{d}f}" != f"{other:.{d}f}" or d == 9)
    return f"{factor:.{digits}f}"


def _spread_text(by_seed: Sequence[float], low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return " One seed does not tell how far chance moves this; more --seeds do."
    return (
        f" That is of the means of {plural(len(by_seed), 'seed')}; each alone bears {min(by_seed):.2f} to "
        f"{max(by_seed):.2f} times, and their mean lies within [{low:.2f}, {high:.2f}] with 95 %."
    )


def _safe_text(safe: float | None, good: float, fresh: int) -> str:
    if safe is None:
        return f" Under {fresh} fresh seeds even {good * STEP_DOWN ** (STEPS - 1):.2g} times breaks an objective."
    return f" {safe:.2f} times holds under {fresh} fresh seeds, too."
