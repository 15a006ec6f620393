"""How good is a forecaster? Its errors on the traffic of a scenario, and what it costs at the same level of service.

Each forecast is made from what was observed before it. Errors are told, and rank nobody: a forecaster that is wrong on
the safe side may be the better one. What ranks is the GPU time at which a run meets the same attainment.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from twin.clock import to_seconds
from twin.cluster.forecast import FORECASTERS, Forecaster, ahead, make_forecaster
from twin.cluster.prediction import PredictionSpec, replicas_for
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.report.tables import to_text
from twin.report.texts import plural
from twin.scenario import Scenario, load_scenario
from twin.simulation import simulate
from twin.workload.streams import Traffic, open_streams

FACTORS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3)
"""Shares of prediction.per_replica that are tried until the attainment is met: the smaller, the more replicas."""


@dataclass(frozen=True)
class Score:
    """One forecaster on one history. Rates are per second."""

    name: str
    forecasts: int
    """That were compared with what came: at the instants at which all forecasters could tell that ever can."""
    unknown: int
    """Intervals at which it could not tell."""
    error: str | None
    """How it failed, the first time; a forecaster that fails is never chosen."""
    mean_error: float | None
    """Mean of |forecast - highest rate within the horizon|."""
    bias: float | None
    """Mean of forecast - that rate."""
    too_low: float | None
    """Share of forecasts below it."""
    replicas: float | None
    """Mean replicas that it asks for."""


def rates_of(scenario: Scenario, interval_ps: int, end_ps: int, seed: int) -> list[float]:
    """Requests a second by interval as the traffic of the scenario asks for them with that seed, first turns only."""
    traffic = Traffic(open_streams(scenario.traffic, seed))
    counts = [0] * (end_ps // interval_ps)
    while True:
        arrival = traffic.next()
        if arrival is None or arrival.due_ps >= len(counts) * interval_ps:
            return [count / to_seconds(interval_ps) for count in counts]
        counts[arrival.due_ps // interval_ps] += 1
        traffic.pop()


@dataclass(frozen=True)
class Foretold:
    """What one forecaster said at every instant at which it could be compared with what came."""

    errors: Mapping[int, float]
    """Interval -> forecast - highest rate within the horizon."""
    replicas: Mapping[int, int]
    """Interval -> replicas that it asks for."""
    unknown: int
    failure: str | None


def foretell(
    forecaster: Forecaster,
    history: Sequence[float],
    rates: Sequence[float],
    season: int,
    steps: int,
    per_replica: float,
) -> Foretold:
    """Forecasts at every interval of `rates`, from `history` and the rates before it, beside what came."""
    known = [*history, *rates]
    errors: dict[int, float] = {}
    asked: dict[int, int] = {}
    unknown, failure = 0, None
    for at in range(len(history), len(known) - steps + 1):
        found = ahead(forecaster, known[:at], season, steps)
        if isinstance(found, str):
            failure = failure or found
        elif found is None:
            unknown += 1
        else:
            errors[at] = found - max(known[at : at + steps])
            asked[at] = replicas_for(found, per_replica)
    return Foretold(errors, asked, unknown, failure)


def score(name: str, told: Foretold, instants: Collection[int]) -> Score:
    """The score over those instants, at all of which it could tell; none of a forecaster that failed or never could."""
    if told.failure is not None or not told.errors or not instants:
        return Score(name, 0, told.unknown, told.failure, None, None, None, None)
    number = len(instants)
    errors = [told.errors[at] for at in instants]
    return Score(
        name,
        number,
        told.unknown,
        None,
        sum(map(abs, errors)) / number,
        sum(errors) / number,
        sum(error < 0 for error in errors) / number,
        sum(told.replicas[at] for at in instants) / number,
    )


def backtest(scenario: Scenario, others: Sequence[str] = ()) -> list[Score]:
    """The scores of all forecasters on the scenario's traffic until run.until, by `cluster.prediction`.

    All are scored over the same instants: those at which each of them that ever can tell could. `others` are dotted
    paths. Raises InputError where the scenario has no prediction or no end, where its traffic ends before the first
    horizon does, and for a path of `others` at which there is no forecaster.
    """
    spec = _prediction(scenario)
    rates = own_rates(scenario)
    if len(rates) < spec.steps:
        raise InputError(
            f"cluster.prediction.horizon: is {spec.steps} intervals, and until run.until there are {len(rates)}, so "
            "that no forecast can be compared with what came; shorten the horizon, or raise run.until"
        )
    names = dict.fromkeys([*FORECASTERS, spec.forecaster, *others])
    told: dict[str, Foretold] = {}
    for name in names:
        try:
            forecaster = make_forecaster(name)
        except ValueError as error:
            if name in others:
                raise InputError(f"--also {name}: {error}") from None
            told[name] = Foretold({}, {}, 0, str(error))
            continue
        told[name] = foretell(
            forecaster, spec.history, rates, spec.season, spec.steps, spec.per_replica
        )
    able = [set(one.errors) for one in told.values() if one.errors and one.failure is None]
    instants = sorted(set.intersection(*able)) if able else []
    return [score(name, one, instants) for name, one in told.items()]


def own_rates(scenario: Scenario) -> list[float]:
    """Requests a second by interval of `cluster.prediction` until run.until. Raises InputError without these."""
    end_ps = scenario.run.until_ps
    if end_ps is None:
        raise InputError("run.until: is missing; a backtest needs an end")
    return rates_of(scenario, _prediction(scenario).interval_ps, end_ps, scenario.run.seed)


@dataclass(frozen=True)
class Matched:
    """One forecaster at the attainment that is asked for, or as near as it comes."""

    name: str
    per_replica: float | None
    """Requests a second that a replica is taken to serve; None without a forecast."""
    least: int | None
    """minReplicas of the HPA, where there is no forecast."""
    attainment: float
    gpu_hours: float
    is_met: bool


def matched(
    document: Mapping[str, Any],
    names: Sequence[str],
    attainment: float,
    tell: Callable[[str], None] | None = None,
) -> list[Matched]:
    """Every forecaster with as few replicas as meet the attainment, the cheapest first; those that never do come last.

    Without a forecast the minimum of the HPA is raised until it is met. Each is run again with the same seed.
    """
    scenario = load_scenario(document)
    spec = _prediction(scenario)
    fleet = scenario.cluster.fleet
    hpa = None if fleet is None else fleet.scaler.hpa
    if hpa is None:
        raise InputError("cluster.hpa: is missing; without it there is nothing to compare with")
    found = []
    for name in ("no prediction", *names):
        tries: Iterator[tuple[float | None, int | None, list[str]]]
        if name == "no prediction":
            bounds = range(hpa.min_replicas, hpa.max_replicas + 1)
            tries = (
                (None, n, ["cluster.prediction=null", f"cluster.hpa.minReplicas={n}"])
                for n in bounds
            )
        else:
            values = (factor * spec.per_replica for factor in FACTORS)
            base = f"cluster.prediction.forecaster={name}"
            tries = ((v, None, [base, f"cluster.prediction.per_replica={v}"]) for v in values)
        best: Matched | None = None
        for per_replica, least, changes in tries:
            summary = summarize(simulate(load_scenario(document, changes)))
            told = Matched(
                name, per_replica, least, _attainment(summary), summary["cost"]["gpu_hours"],
                _attainment(summary) >= attainment,
            )  # fmt: skip
            if best is None or told.attainment > best.attainment:
                best = told
            if told.is_met:
                break
        assert best is not None
        found.append(best)
        if tell is not None:
            tell(name)
    return sorted(found, key=lambda m: (not m.is_met, m.gpu_hours))


def _attainment(summary: Mapping[str, Any]) -> float:
    tiers = summary["tiers"].values()
    measured = sum(tier["measured"] for tier in tiers)
    return sum(tier["good"] for tier in tiers) / measured if measured else 0.0


def _prediction(scenario: Scenario) -> PredictionSpec:
    fleet = scenario.cluster.fleet
    spec = None if fleet is None else fleet.scaler.prediction
    if spec is None:
        raise InputError("cluster.prediction: is missing; it says what is forecast, and how far")
    return spec


# --- as tables ----------------------------------------------------------------------------


def render_scores(scores: Sequence[Score], color: bool = False) -> str:
    """The scores as a table for a terminal."""
    table = Table(
        box=None, pad_edge=False, title="Forecasts beside what came", title_justify="left"
    )
    table.add_column("forecaster", no_wrap=True)
    for name in ("mean error /s", "bias /s", "too low", "replicas", "could not tell"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for row in scores:
        if row.error is not None:
            table.add_row(row.name, *["-"] * 4, str(row.unknown), f"failed: {row.error}")
            continue
        known = (row.mean_error, row.bias)
        table.add_row(
            row.name,
            *("-" if value is None else f"{value:.3g}" for value in known),
            "-" if row.too_low is None else f"{row.too_low:.0%}",
            "-" if row.replicas is None else f"{row.replicas:.2f}",
            str(row.unknown),
            "" if row.forecasts else "never could tell: what came before is shorter than it needs",
        )
    number = max((row.forecasts for row in scores), default=0)
    about = f"Means over the {plural(number, 'instant')} at which all could tell that ever can."
    return to_text([table, about], color)


def render_matched(rows: Sequence[Matched], attainment: float, color: bool = False) -> str:
    """Forecasters at the same attainment as a table for a terminal, the cheapest first."""
    title = f"GPU-hours at {attainment:.3%} of requests within their objectives"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("forecaster", no_wrap=True)
    for name in ("GPU-hours", "attainment", "per replica /s", "min replicas"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.gpu_hours:.2f}",
            f"{row.attainment:.3%}" + ("" if row.is_met else " (not met)"),
            "-" if row.per_replica is None else f"{row.per_replica:.3g}",
            "-" if row.least is None else str(row.least),
        )
    return to_text([table], color)


def as_data(scores: Sequence[Score], rows: Sequence[Matched]) -> dict[str, Any]:
    """Both tables as plain data."""
    return {
        "backtest": [vars(row) for row in scores],
        "matched": [vars(row) for row in rows],
    }
