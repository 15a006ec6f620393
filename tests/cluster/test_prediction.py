"""Forecasts see the past only, break honestly, and never give less than the autoscaler alone."""

import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.cluster.test_fleet import changes, fleet, hpa, rates, start
from tests.runs import azure_csv, document, run
from twin.cli import app
from twin.clock import PS
from twin.cluster.forecast import FORECASTERS, ahead, make_forecaster
from twin.cluster.prediction import realised, replicas_for
from twin.errors import InputError
from twin.report.forecast import backtest, foretell, matched, render_scores, score
from twin.report.html import render_html
from twin.report.json_summary import summarize
from twin.report.tables import render
from twin.scenario import load_scenario

QUICK = {"readiness": {"periodSeconds": 1}}
WAVE = {"sine": {"mean": 5, "amplitude": 0.8, "period": 600}}


def foreseen(forecaster="seasonal_naive", traffic=None, **keys):
    """Up to 9 requests a second in waves of ten minutes; a replica serves about 5, and needs a minute to start."""
    prediction = {
        "forecaster": forecaster, "per_replica": 4, "interval": 20, "horizon": 80, "season": 600,
        "history": wave(), **keys,
    }  # fmt: skip
    cluster = {
        "hpa": hpa(most=5),
        "cold_start": start(60),
        "probes": QUICK,
        "prediction": prediction,
    }
    chat = traffic or rates(duration=1500) | {"arrivals": {"process": "poisson", "rate": WAVE}}
    objectives = {"ONLINE": {"ttft_p99": 1.0}}
    engine = {"max_num_seqs": 4}
    return fleet(cluster, chat, objectives=objectives, engine=engine, run={"until": 1500})


def wave():
    """Rates of the two periods before, by 20 s."""
    return [5 * (1 + 0.8 * math.cos(2 * math.pi * (i + 0.5) / 30)) for i in range(60)]


# --- forecasters --------------------------------------------------------------------------


def broken(history, season, steps):
    raise RuntimeError("no model")


def cheap(history, season, steps):
    """Nothing is ever asked for."""
    return [0.0] * steps


def too_short(history, season, steps):
    return [1.0]


def test_what_each_says():
    day = [1.0, 2.0, 9.0, 10.0, 3.0, 1.0]
    assert make_forecaster("last_value")(day, 6, 2) == [1.0, 1.0]
    assert make_forecaster("seasonal_naive")(day, 6, 8) == [*day, 1.0, 2.0]
    assert make_forecaster("seasonal_naive")([*day, 4.0], 6, 2) == [2.0, 9.0]
    peak = make_forecaster("before_peak")
    assert peak(day, 6, 2) == [1.0, 1.0]  # the peak is farther off
    assert peak(day, 6, 3) == [10.0, 10.0, 10.0]
    assert peak([*day, 1.5, 2.5, 9.5, 11.0], 6, 1) == [11.0]
    assert peak([*day, 1.5, 2.5, 9.5, 9.0], 6, 2) == [9.0, 9.0]  # it is over
    for name in ("seasonal_naive", "before_peak", "holt_winters"):
        assert len(make_forecaster(name)([1.0] * 5, 6, 2)) == 0


def test_holt_winters_follows_season_and_level():
    pytest.importorskip("statsmodels", reason="the extra forecast is not installed")
    season = [5.0, 6.0, 9.0, 14.0, 9.0, 6.0]
    forecaster = make_forecaster("holt_winters")
    found = forecaster(season * 4, 6, 6)
    assert found == pytest.approx(season, abs=0.3)
    grown = [rate + 10 for rate in season]
    assert forecaster(season * 3 + grown * 3, 6, 6) == pytest.approx(grown, abs=2)


@pytest.mark.parametrize("name", [n for n in FORECASTERS if n != "holt_winters"])
@given(
    history=st.lists(st.floats(0, 1e6), max_size=60),
    season=st.integers(1, 20),
    steps=st.integers(1, 30),
)
def test_the_contract_of_forecasters(name, history, season, steps):
    forecaster = make_forecaster(name)
    found = ahead(forecaster, history, season, steps)
    assert found is None or 0 <= found <= max(history)
    assert found == ahead(forecaster, history, season, steps)


@pytest.mark.parametrize(
    ("rate", "replicas"), [(0, 0), (1, 1), (8, 1), (8.0000000001, 1), (8.1, 2), (80, 10)]
)
def test_replicas_are_rounded_up(rate, replicas):
    assert replicas_for(rate, 8) == replicas


def test_a_broken_forecaster_never_wins():
    """ai-dynamo/dynamo#14513: three to choose from, one raises on every call."""
    path = f"{__name__}.broken"
    scores = {row.name: row for row in backtest(load_scenario(foreseen()), [path])}
    failed = scores[path]
    assert failed.error == "RuntimeError: no model"
    assert failed.mean_error is failed.bias is failed.too_low is failed.replicas is None
    assert scores["last_value"].mean_error > scores["seasonal_naive"].mean_error > 0
    # In a run it is told, and the autoscaler goes on alone.
    result = run(foreseen(path))
    told = summarize(result)["fleet"]["forecast"]
    assert told["failed"] == told["forecasts"] > 0
    assert told["error"] == "RuntimeError: no model"
    assert "failed: RuntimeError: no model" in render(summarize(result))
    source = foreseen(path)
    del source["cluster"]["prediction"]
    assert list(run(source).records) == list(result.records)
    assert ahead(too_short, [1.0], 1, 3).startswith("it answered 1 rates")


def test_scores_are_of_what_came_after():
    """By hand: a season of 3, two steps ahead, from the fourth interval on."""
    seasonal = make_forecaster("seasonal_naive")
    told = foretell(seasonal, [1, 2, 3], [2, 2, 6, 1], 3, 2, 2.0)
    found = score("x", told, list(told.errors))
    # Forecasts at 3, 4 and 5: max(1,2), max(2,3), max(3,2); what came: max(2,2), max(2,6), max(6,1).
    assert (found.forecasts, found.mean_error, found.bias) == (3, (0 + 3 + 3) / 3, -2.0)
    assert found.too_low == pytest.approx(2 / 3)
    assert found.replicas == pytest.approx((1 + 2 + 2) / 3)


def test_means_are_over_the_same_instants():
    source = foreseen(season=400, interval=20, horizon=80, history=[])
    scores = {row.name: row for row in backtest(load_scenario(source))}
    assert scores["seasonal_naive"].unknown == 20
    assert scores["last_value"].unknown == 1  # nothing was before the first
    numbers = {row.forecasts for row in scores.values() if row.error is None and row.forecasts}
    assert len(numbers) == 1
    # One that can never tell takes no instant from the others, and says why it has none.
    source = foreseen(season=40_000, history=[])
    scores = {row.name: row for row in backtest(load_scenario(source))}
    assert scores["seasonal_naive"].forecasts == 0 < scores["last_value"].forecasts
    assert "never could tell" in " ".join(render_scores(list(scores.values())).split())


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(InputError, match=r"horizon: is 100 intervals, and until run\.until there"):
        backtest(load_scenario(foreseen(horizon=2000)))
    with pytest.raises(InputError, match=r"--also nomod\.f: 'nomod\.f' cannot be imported"):
        backtest(load_scenario(foreseen()), ["nomod.f"])


# --- in a run -----------------------------------------------------------------------------


def test_a_forecast_is_there_before_the_wave():
    source = foreseen()
    with_it = run(source)
    del source["cluster"]["prediction"]
    alone = run(source)
    attained = [summarize(r)["tiers"]["ONLINE"]["attainment"] for r in (alone, with_it)]
    assert attained[1] > attained[0] + 0.1
    assert "below spec.minReplicas" in next(
        look.reason for look in with_it.fleet.log.looks if look.desired > look.current
    )
    compared = realised(with_it.fleet.forecasts, 4)
    assert len(compared) == 1500 // 20 - 4
    for forecast, came in compared[:5]:
        at = forecast.at_ps // (20 * PS)
        counted = [
            sum(
                20 * PS * (at + i) < r.arrival_ps <= 20 * PS * (at + i + 1) for r in with_it.records
            )
            / 20
            for i in range(4)
        ]
        assert came == pytest.approx(max(counted))


@pytest.mark.parametrize("forecaster", ["seasonal_naive", "last_value", f"{__name__}.cheap"])
def test_never_less_than_the_autoscaler_alone(forecaster):
    """Every look asks for at least what the HPA's own metrics ask for."""
    result = run(foreseen(forecaster))
    seen = [look for look in result.fleet.log.looks if look.stabilized is not None]
    assert seen
    assert all(look.desired >= min(look.stabilized, 5) or look.limit for look in seen)
    if forecaster.endswith("cheap"):
        source = foreseen(forecaster)
        del source["cluster"]["prediction"]
        assert list(run(source).records) == list(result.records)


def test_alone_it_may_give_less():
    source = foreseen(f"{__name__}.cheap", drives="alone", max_replicas=5)
    del source["cluster"]["hpa"]
    result = run(source)
    assert {look.desired for look in result.fleet.log.looks} == {1}
    assert summarize(result)["fleet"]["scaler"] == ["forecast"]


def test_as_a_metric_of_the_autoscaler():
    """The external metric drives the same replicas as the floor, by the HPA's own arithmetic."""
    source = foreseen(drives="metric", metric="soon")
    soon = {"metric": {"name": "soon"}, "target": {"type": "AverageValue", "averageValue": "4"}}
    source["cluster"]["hpa"]["metrics"].append({"type": "External", "external": soon})
    result = run(source)
    ups = [look for look in result.fleet.log.looks if look.desired > look.current]
    assert "soon" in {look.metric for look in ups}
    for look in (look for look in ups if look.metric == "soon"):
        # Shown is the mean of the replicas there are, cut to thousandths.
        total = look.values["soon"] * look.current
        assert look.proposals["soon"] in {math.ceil(total / 4), math.ceil((total + 0.01) / 4)}
    trigger = {
        "type": "prometheus",
        "name": "soon",
        "metadata": {"query": "soon", "threshold": "4"},
    }
    del source["cluster"]["hpa"]
    source["cluster"]["keda"] = {"minReplicaCount": 1, "maxReplicaCount": 5, "triggers": [trigger]}
    by_keda = changes(run(source))
    assert max(replicas for _, replicas in by_keda) == 3


@settings(max_examples=6, deadline=None)
@given(cut=st.integers(3, 20), seed=st.integers(0, 9))
def test_no_forecast_knows_the_future(tmp_path_factory, cut, seed):
    """What comes after an instant changes no forecast and no decision before it."""
    folder = tmp_path_factory.mktemp("future")

    def told(extra):
        rows = [("2023-11-16 18:00:00.0", 50, 5)]
        rows += [
            (f"2023-11-16 18:{m:02}:{s:02}.5", 50, 5)
            for m in range(20)
            for s in range(0, 60, 20 - m % 7)
        ]
        rows += [
            (f"2023-11-16 18:{m:02}:30.{i}", 50, 5) for m in range(cut, 20) for i in range(extra)
        ]
        source = foreseen(
            "before_peak", {"trace": azure_csv(folder, sorted(rows))}, interval=30, history=[]
        )
        found = run(source, f"run.seed={seed}", "run.until=1200").fleet
        return (
            [f for f in found.forecasts if f.at_ps <= cut * 60 * PS],
            [look for look in found.log.looks if look.at_ps <= cut * 60 * PS],
        )

    assert told(0) == told(9)


def test_it_is_told():
    result = run(foreseen(), observe=True)
    summary = summarize(result)
    found = summary["fleet"]["forecast"]
    assert found["compared"] == 71
    assert found["points"][0]["observed"] is None
    assert "forecasts by seasonal_naive, 80.0 s ahead: off by" in render(summary)
    assert "expected within the horizon" in render_html(result, summary)


# --- the command --------------------------------------------------------------------------


def test_last_value_and_no_prediction_at_the_same_service():
    """ai-dynamo/dynamo#14238: GPU-hours at the same attainment rank, not the error of the forecast."""
    source = foreseen()
    rows = matched(load_scenario(source).to_dict(), ["last_value", "seasonal_naive"], 0.9)
    assert {row.name for row in rows} == {"no prediction", "last_value", "seasonal_naive"}
    assert all(row.is_met == (row.attainment >= 0.9) for row in rows)
    met = [row.gpu_hours for row in rows if row.is_met]
    assert met == sorted(met)
    assert [row.is_met for row in rows] == sorted((row.is_met for row in rows), reverse=True)
    by_name = {row.name: row for row in rows}
    assert by_name["seasonal_naive"].is_met
    assert by_name["no prediction"].least is not None


def test_the_command(tmp_path):
    path, history = tmp_path / "s.yaml", tmp_path / "history.txt"
    path.write_text(yaml.safe_dump(foreseen()))
    out = CliRunner().invoke(
        app,
        ["forecast", str(path), "--also", f"{__name__}.broken", "--write-history", str(history)],
    )
    assert out.exit_code == 0, out.output
    assert "seasonal_naive" in out.stdout
    told = CliRunner().invoke(
        app, ["forecast", str(path), "--also", f"{__name__}.broken", "--json"]
    )
    errors = {row["name"]: row["error"] for row in json.loads(told.stdout)["backtest"]}
    assert errors[f"{__name__}.broken"] == "RuntimeError: no model"
    assert errors["seasonal_naive"] is None
    assert len(history.read_text().splitlines()) == 75
    again = load_scenario(path, [f"cluster.prediction.history={history}"])
    assert len(again.cluster.fleet.scaler.prediction.history) == 75
    history.write_text("1.5\nmany\n")
    with pytest.raises(
        InputError, match=r"history.txt line 2: must be a rate a second, got 'many'"
    ):
        load_scenario(path, [f"cluster.prediction.history={history}"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"forecaster": "arima"}, "'arima' is not one of last_value"),
        ({"forecaster": "nowhere.at_all"}, "cannot be imported"),
        ({"drives": "alone", "max_replicas": 3}, "hpa also sets the replicas"),
        ({"drives": "metric", "metric": "soon"}, "no metric of type External with the name 'soon'"),
        ({"drives": "metric"}, "metric needs its name"),
        ({"max_replicas": 3}, "only drives: alone needs it"),
        ({"interval": 100, "horizon": 50}, "must be >= interval"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(InputError, match=message):
        load_scenario(foreseen(**keys))


def test_without_an_autoscaler_there_is_no_floor():
    with pytest.raises(InputError, match="there is no autoscaler; add one, or write alone"):
        load_scenario(
            document(cluster={"prediction": {"forecaster": "last_value", "per_replica": 1}})
        )
