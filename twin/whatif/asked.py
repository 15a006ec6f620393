"""What a user asks for by name: figures of tiers that there are, keys whose variation can change anything."""

import re
from collections.abc import Iterable, Sequence

from twin.errors import InputError
from twin.metrics.objectives import Objectives
from twin.scenario import Scenario
from twin.whatif.axes import Axis, Range
from twin.whatif.figures import ALL, measure
from twin.workload.trace import TraceStream


def tiers_of(scenario: Scenario) -> tuple[str, ...] | None:
    """The tiers that its requests may have, by its streams; None where the rows of a trace may name any."""
    found = [tier for stream in scenario.traffic for tier in stream.clients.tiers]
    for stream in scenario.traffic:
        if isinstance(stream, TraceStream) and "tier" in stream.own:
            if stream.tiers_taken is None:
                return None
            found += stream.tiers_taken
    return tuple(dict.fromkeys(found))


def check_figures(
    names: Iterable[str], scenarios: Sequence[Scenario], any_tier: bool = False
) -> None:
    """Raises InputError for a figure that does not exist, or is of a tier or an objective that no scenario has.

    With `any_tier` tiers are not looked at, because the traffic itself is varied.
    """
    by_scenario = [tiers_of(scenario) for scenario in scenarios]
    known = (
        None
        if any_tier or None in by_scenario
        else {t for tiers in by_scenario for t in tiers or ()}
    )
    for name in names:
        measure(name)
        tier, dot, rest = name.removeprefix("met.").rpartition(".")
        if not dot or tier == ALL:
            continue
        if known is not None and tier not in known:
            raise InputError(
                f"{name}: no stream has tier {tier}; there are {', '.join(sorted(known))}"
            )
        if name.startswith("met.") and not any(
            rest in scenario.objectives.get(tier, {}) for scenario in scenarios
        ):
            raise InputError(f"{name}: the scenario has no objective {rest} of {tier}")


def may_change_tiers(axes: Iterable[Axis | Range]) -> bool:
    """Whether a value of some key may bring requests of tiers that the scenario has none of."""
    for axis in axes:
        if re.fullmatch(
            r"traffic(\.\d+)?(\.(tiers?|trace|preset)(\..*)?)?|policy\.default_tier", axis.key
        ):
            return True
        values = axis.values if isinstance(axis, Axis) else ()
        if axis.key == "policy" and not all(isinstance(value, str) for value in values):
            return True
    return False


def within_reach(objectives: Objectives, scenario: Scenario) -> dict[str, dict[str, float]]:
    """Those of the objectives whose tier some request of the scenario can have."""
    known = tiers_of(scenario)
    return {
        tier: dict(limits) for tier, limits in objectives.items() if known is None or tier in known
    }


IDLE = {
    "name": "is a name and changes no figure",
    "run.seed": "seeds are what --seeds and --seed give, the same for all",
    "run.records": "says what is kept of a run, not what happens in it",
    "run.engine_mode": "gives the same figures in every mode",
    "run.sample_period": "says how often charts are drawn, and changes no figure",
}
"""Keys whose values are not worth comparing, and why."""


def check_varied(keys: Iterable[str]) -> None:
    """Raises InputError for a key of which every value gives the same figures."""
    for key in keys:
        if key in IDLE:
            raise InputError(f"--vary {key}: {IDLE[key]}; vary another key")


def check_changes(changes: Iterable[str]) -> None:
    """Raises InputError for a variant that differs in nothing that changes a figure, or in its seed."""
    keys = [change.partition("=")[0].strip() for change in changes]
    for key in keys:
        if key == "run.seed" or all(key in IDLE for key in keys):
            raise InputError(f"--set {key}: {IDLE[key]}; change another key")
