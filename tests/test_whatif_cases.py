"""Worked cases of what-if: an input and the right behaviour, each from a discussion of users of such tools."""

import json

import pytest
from typer.testing import CliRunner

from tests.runs import document, run, stream
from twin.cli import app
from twin.scenario import load_scenario
from twin.whatif.axes import Axis, parse_axis
from twin.whatif.figures import figures_of, is_saturated
from twin.whatif.load_curve import load_curve
from twin.whatif.page import curves_of, latency_of, render_page
from twin.whatif.runs import Backend
from twin.whatif.sweep import Point, Row, plan, points_of, sweep, table_of
from twin.whatif.sweep_tables import sweep_as_data

SOURCE = document(
    traffic=[stream(100, 60, requests=150)],
    engine={"max_num_seqs": 16},
    objectives={"ONLINE": {"ttft_p99": 0.5}},
)


class Memory:
    """A journal in memory."""

    def __init__(self):
        self.kept = {}

    def rows(self):
        return dict(self.kept)

    def add(self, row: Row):
        self.kept[row.number] = row


@pytest.fixture(scope="module")
def swept():
    """Rates from far below capacity to fifty times of it."""
    made = plan(
        load_scenario(SOURCE),
        [parse_axis("traffic.0.arrivals.rate=5,10,15,18,24,40,80,200,1000")],
        2,
    )
    journal = Memory()
    sweep(made, journal, Backend(1))
    return made, journal.rows()


def test_how_fast_is_fast_enough(tmp_path):
    """inference-sim#58: before a sweep of 20 rates x 3 seeds, its speed and how long it will take; runs in parallel.

    That the rates run in parallel processes is shown by test_whatif_sweep, that a page answers in seconds by
    test_dashboard_browser.
    """
    path = tmp_path / "one.yaml"
    path.write_text(json.dumps(document(traffic=[stream(requests=20)])), encoding="utf-8")
    options = ["--vary", "traffic.0.arrivals.rate=1:20:1", "--seeds", "3", "--jobs", "1"]
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines()[0].startswith("60 runs to make, ")
    assert "simulated seconds a second" in done.stderr
    assert "left" in done.stderr


def test_say_when_the_system_is_saturated(swept):
    """inference-sim#1364: a flag that never goes off again as load rises, and the last sustainable rate."""
    made, rows = swept
    points = points_of(made, rows)
    ((_, curve),) = curves_of(made, points, latency_of(made, points))
    flags = [load.saturated for load in curve.loads]
    assert flags == sorted(flags)
    assert not flags[0]
    assert flags[-1]
    # Completions are flat where the flag is on: at most a quarter above the last sustainable rate.
    sustainable = curve.sustainable
    assert sustainable.throughput == pytest.approx(sustainable.load, rel=0.25)
    assert max(load.throughput for load in curve.loads) < 3 * sustainable.throughput
    assert "depend on how long the run was" in curve.text()
    assert [point.is_saturated for point in points] == flags
    told = curve.to_dict()["loads"]
    assert [load["depends_on_run_length"] for load in told] == flags
    assert "saturated" in render_page(made, rows)
    assert table_of(made, rows)["saturated"][-1] is True


def test_a_flag_does_not_go_off_again():
    """A run at a high load may look steady because it is short; the curve knows better."""

    def point(growth):
        return Point(
            (1,),
            ({"growth": growth, "requests_per_s": 5.0, "in_system_mean": 3.0, "x": 1.0},),
            None,
        )

    curve = load_curve(
        "rate", [(1, point(0)), (2, point(0.4)), (3, point(0.0)), (4, point(0.9))], "x", 1
    )
    assert [load.saturated for load in curve.loads] == [False, True, True, True]
    assert curve.sustainable.load == 1


def test_points_beyond_a_saturated_one_are_saturated_in_every_table():
    """Of the same other values only: eight slots bear what four do not."""
    made = plan(
        load_scenario(SOURCE),
        [parse_axis("traffic.0.arrivals.rate=30,10,20"), parse_axis("engine.max_num_seqs=4,8")],
        1,
    )
    growth = {(10, 4): 0.0, (20, 4): 0.4, (30, 4): 0.0, (10, 8): 0.0, (20, 8): 0.0, (30, 8): 0.01}
    rows = {
        number: Row(number, {"growth": growth[values], "requests_per_s": 5.0}, None)
        for number, values in enumerate(made.points)
    }
    states = {point.values: point.is_saturated for point in points_of(made, rows)}
    assert {values for values, state in states.items() if state} == {(20, 4), (30, 4)}
    told = sweep_as_data(made, rows)["points"]
    assert [of["saturated"] for of in told] == [states[values] for values in made.points]


def test_find_the_knee_before_tuning_the_autoscaler(swept):
    """llm-d-autoscaling#1249: knee, peak and saturation are marked and become a target."""
    made, rows = swept
    points = points_of(made, rows)
    ((_, curve),) = curves_of(made, points, "ONLINE.ttft_p99")
    assert curve.knee is not None
    assert not curve.knee.saturated
    after = next(load for load in curve.loads if load.load > curve.knee.load)
    before = curve.loads[0]
    assert curve.knee.latency_s < 3 * before.latency_s + 0.1
    assert after.latency_s > 1.5 * curve.knee.latency_s
    most = max(load.throughput for load in curve.loads)
    below = [load.throughput for load in curve.loads if load.load < curve.peak.load]
    assert curve.peak.throughput >= 0.99 * most > max(below, default=0.0)
    assert curve.saturation.load > curve.sustainable.load
    assert curve.target == pytest.approx(curve.knee.inside)
    assert "target for an autoscaler" in curve.text()


@pytest.mark.parametrize("rate", [5, 10])
def test_steady_runs_are_not_called_saturated(rate):
    for seed in range(1, 5):
        figures = figures_of(run(SOURCE, f"traffic.0.arrivals.rate={rate}", f"run.seed={seed}"))
        assert not is_saturated(figures), figures["growth"]


def test_requests_that_fail_count_as_not_served():
    figures = figures_of(run(SOURCE, "traffic.0.arrivals.rate=60", "traffic.0.timeouts.ttft=0.1"))
    assert is_saturated(figures)


def test_a_load_is_a_key_of_the_traffic():
    from twin.whatif.axes import is_load

    assert is_load(Axis("traffic.0.arrivals.rate", (1, 2)))
    assert is_load(Axis("traffic.1.speedup", (1, 2)))
    assert not is_load(Axis("engine.max_num_seqs", (1, 2)))
