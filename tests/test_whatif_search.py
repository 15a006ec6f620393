"""Searches: what they answer is what a plain look at every configuration answers."""

import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.runs import document, run, stream
from twin.cli import app
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.scenario import load_scenario, traffic_presets
from twin.whatif.axes import parse_axis, parse_vary
from twin.whatif.figures import figures_of, measure
from twin.whatif.optimize import make_search, optimize
from twin.whatif.runs import Backend, Interrupted
from twin.whatif.headroom import headroom
from twin.whatif.search import NotMet, fewest_gpus
from twin.whatif.traffic_scale import scaled
from twin.whatif.trial import Tried, dominates, front_of, is_hopeless, try_all
from twin.whatif.waits import explore_waits

BUSY = document(
    traffic=[stream(100, 60, arrivals={"process": "poisson", "rate": 40}, requests=60)],
    objectives={"ONLINE": {"ttft_p99": 0.3}},
)
VARY = [parse_axis("engine.max_num_seqs=2,4,8"), parse_axis("cluster.replicas=1:4:1")]


@pytest.fixture(scope="module")
def every():
    """(slots, replicas) -> figures, of all twelve configurations under seed 1."""
    return {
        (slots, replicas): figures_of(
            run(BUSY, f"engine.max_num_seqs={slots}", f"cluster.replicas={replicas}")
        )
        for slots in VARY[0].values
        for replicas in VARY[1].values
    }


@pytest.fixture(scope="module")
def search():
    return make_search(load_scenario(BUSY), VARY, ["gpus", "ONLINE.ttft_p99"], seeds=1, trials=12)


def test_a_whole_space_gives_its_whole_front(every, search, tmp_path):
    told = []
    found = optimize(
        search, f"sqlite:///{tmp_path / 'study.db'}", told=lambda *values: told.append(values)
    )
    assert found["tried"] == 12
    assert told[-1][0] == 12
    good = {key: of for key, of in every.items() if of["ONLINE.ttft_p99"] <= 0.3}
    front = {
        key
        for key, of in good.items()
        if not any(
            other["gpus"] <= of["gpus"] + 1e-9
            and other["ONLINE.ttft_p99"] <= of["ONLINE.ttft_p99"]
            and (
                other["gpus"] < of["gpus"] - 1e-9
                or other["ONLINE.ttft_p99"] < of["ONLINE.ttft_p99"]
            )
            for other in good.values()
        )
    }
    assert {tuple(entry["point"]) for entry in found["front"]} == front
    fewest = min(replicas for _, replicas in good)
    assert found["chosen"]["point"][1] == fewest
    assert "ONLINE TTFT p99 binds" in found["text"]
    # The study is there: nothing is run again.
    again = optimize(search, f"sqlite:///{tmp_path / 'study.db'}")
    assert again["front"] == found["front"]
    other = make_search(load_scenario(BUSY), VARY[:1], ["ONLINE.ttft_p99"], seeds=1)
    with pytest.raises(InputError, match="holds another search"):
        optimize(other, f"sqlite:///{tmp_path / 'study.db'}")


def test_the_same_search_for_any_number_of_processors(search):
    few = make_search(search.scenario, search.axes, ["gpus"], seeds=2, trials=10)
    assert optimize(few) == optimize(few, backend=Backend(2))


def test_nothing_that_keeps_the_objectives_is_told(every):
    hard = load_scenario(BUSY, ["objectives.ONLINE.ttft_p99=0.001"])
    found = optimize(make_search(hard, VARY[:1], seeds=1))
    assert found["chosen"] is None
    assert found["front"] == []
    assert "Nothing tried meets every objective" in found["text"]
    assert "ONLINE TTFT p99" in found["text"]


def entry(key, gpus, ttft, limit=0.3):
    import math

    figures = {"gpus": gpus, "ONLINE.ttft_p99": ttft}
    return Tried(key, (key,), figures, (math.log(ttft / limit),), 1, False, None)


def test_hopeless_trials_are_given_up_and_others_are_not(search):
    front = [entry("a", 2, 0.2)]
    assert is_hopeless(entry("far over the limit", 1, 0.6), search, front)
    assert not is_hopeless(entry("a little over", 1, 0.31), search, front)
    assert is_hopeless(entry("worse in everything", 4, 0.29), search, front)
    assert not is_hopeless(entry("cheaper", 1, 0.29), search, front)
    assert not is_hopeless(entry("far over, and nothing is good yet", 1, 9.0), search, [])
    goals = search.goals
    assert dominates([1, 1], [1, 2], goals)
    assert not dominates([1, 1], [1, 1], goals)
    assert front_of([entry("a", 2, 0.2), entry("b", 2, 0.25), entry("c", 1, 0.4)], search) == [
        entry("a", 2, 0.2)
    ]


def test_early_stopping_saves_runs(search):
    several = make_search(
        search.scenario, search.axes, ["gpus", "ONLINE.ttft_p99"], seeds=3, trials=20
    )
    front = try_all(several, [(32, 2)], Backend(1), [])
    made = try_all(several, [(2, 1), (32, 2)], Backend(1), front)
    assert [(of.seeds, of.stopped) for of in made] == [(1, True), (3, False)]


def test_fewest_gpus_is_what_counting_up_finds(every):
    told = []
    scenario = load_scenario(BUSY)
    found = fewest_gpus(scenario, seeds=1, told=told.append)
    fewest = next(n for n in range(1, 5) if every[8, n]["ONLINE.ttft_p99"] <= 0.3)
    assert found["best"]["replicas"] == fewest > 1
    assert told[0].startswith("1 replica: ONLINE TTFT p99")
    assert f"{fewest} GPUs" in found["text"]
    assert "One replica fewer breaks ONLINE TTFT p99" in found["text"]
    several = fewest_gpus(scenario, [parse_axis("engine.max_num_seqs=8,32")], seeds=1)
    by_slots = {row["values"]["engine.max_num_seqs"]: row["gpus"] for row in several["rows"]}
    assert by_slots[8] == fewest
    assert several["best"]["gpus"] == min(by_slots.values())


def test_fewest_gpus_says_what_it_cannot_answer():
    scenario = load_scenario(BUSY)
    with pytest.raises(InputError, match="no number of replicas up to 2"):
        fewest_gpus(load_scenario(BUSY, ["objectives.ONLINE.ttft_p99=0.001"]), seeds=1, most=2)
    with pytest.raises(InputError, match="no objectives"):
        fewest_gpus(load_scenario(BUSY, ["objectives={}"]))
    with pytest.raises(InputError, match="is what is searched for"):
        fewest_gpus(scenario, [parse_axis("cluster.replicas=1,2")])


def test_headroom_is_the_factor_at_which_an_objective_breaks():
    scenario = load_scenario(BUSY, ["cluster.replicas=3"])
    found = headroom(scenario, seeds=1)
    good, bad = found["factor"], found["breaks_at"]
    assert good < bad <= good * 1.0101

    def ttft(factor):
        more = scaled(scenario.to_dict(), factor, lambda name: None)
        return summarize(run(more))["tiers"]["ONLINE"]["ttft_s"]["p99"]

    assert ttft(good) <= 0.3 < ttft(bad)
    assert "% more than now" in found["text"]
    now = headroom(load_scenario(BUSY), seeds=1)
    assert now["factor"] < 1
    assert now["text"].startswith("No headroom")
    never = headroom(load_scenario(BUSY, ["objectives.ONLINE.ttft_p99=1e-6"]), seeds=1)
    assert "load is not the cause" in never["text"]


def test_traffic_of_every_kind_is_scaled():
    arrivals = {
        "poisson": ({"process": "poisson", "rate": 2}, {"rate": 6.0}),
        "sine": (
            {"process": "poisson", "rate": {"sine": {"mean": 2, "amplitude": 0.5}}},
            {"rate": {"sine": {"mean": 6.0, "amplitude": 0.5, "period": 86400.0, "peak": 0.0}}},
        ),
        "steps": (
            {"process": "gamma", "cv": 2, "rate": {"steps": [[0, 1], [5, 4]]}},
            {"rate": {"steps": [[0, 3.0], [5, 12.0]], "repeat": None}},
        ),
        "bursts": (
            {"process": "bursts", "rate": 1, "burst_rate": 4, "burst": 2, "pause": 9},
            {"rate": 3.0, "burst_rate": 12.0},
        ),
        "batch": ({"process": "batch", "at": [1], "size": 5}, {"size": 15}),
        "closed": ({"process": "closed", "users": 3}, {"users": 9}),
    }
    for written, wanted in arrivals.values():
        scenario = load_scenario(document(traffic=[stream(arrivals=written, requests=20)]))
        made = scaled(scenario.to_dict(), 3.0, lambda name: None)
        (found,) = made["traffic"]
        assert {key: found["arrivals"][key] for key in wanted} == wanted
        assert found["requests"] == 60
        load_scenario(made)
    preset = document(
        traffic=[{"preset": "azure-2023-conv", "requests": 5}],
        engine={"max_model_len": 16384, "num_gpu_blocks_override": 2000},
    )
    made = scaled(load_scenario(preset).to_dict(), 2.0, lambda name: traffic_presets()[name].rate)
    assert made["traffic"][0]["rate"] == 2 * traffic_presets()["azure-2023-conv"].rate
    with pytest.raises(InputError, match="give rate"):
        scaled(load_scenario(preset).to_dict(), 2.0, lambda name: None)


def test_interrupted_searches_tell_what_they_have(search, monkeypatch):
    calls = []

    def once(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise Interrupted
        return try_all(*arguments)

    monkeypatch.setattr("twin.whatif.optimize.try_all", once)
    found = optimize(search)
    assert found["interrupted"]
    assert 1 <= found["tried"] <= 8


@pytest.mark.parametrize(
    ("vary", "goals", "message"),
    [
        ([], [], "--vary is missing"),
        (["engine.max_num_seqs=1:8"], ["tft"], "no figure"),
        (["engine.max_seqs=1,2"], [], "none of its values can run"),
        (["engine.max_num_seqs=1,2", "engine.max_num_seqs=3:9"], [], "twice"),
    ],
)
def test_searches_that_make_no_sense(vary, goals, message):
    with pytest.raises(InputError, match=message):
        make_search(load_scenario(BUSY), [parse_vary(text) for text in vary], goals)


def test_real_ranges_and_the_present_configuration(search):
    axes = [
        parse_vary("engine.gpu_memory_utilization=0.5:0.9"),
        parse_vary("engine.max_num_seqs=4:64:log"),
    ]
    made = make_search(
        load_scenario(
            BUSY, ["engine.num_gpu_blocks_override=null", "engine.gpu_memory_utilization=0.8"]
        ),
        axes,
        ["ONLINE.ttft_p99"],
        seeds=1,
        trials=8,
    )
    found = optimize(made)
    assert found["trials"][0]["point"] == [0.8, 8]  # tried first
    for of in found["trials"]:
        share, slots = of["point"]
        assert 0.5 <= share <= 0.9
        assert isinstance(slots, int) and 4 <= slots <= 64  # noqa: PT018


def test_the_commands(tmp_path):
    path = tmp_path / "busy.yaml"
    path.write_text(json.dumps(BUSY), encoding="utf-8")

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    out = tmp_path / "out"
    options = (
        "--vary",
        "engine.max_num_seqs=4,32",
        "--vary",
        "cluster.replicas=1,2",
        "--seeds",
        1,
        "--jobs",
        1,
    )
    told = invoke("optimize", path, "--out", out, *options)
    assert told.exit_code == 0, told.stderr
    assert "Take engine.max_num_seqs=" in told.stdout
    chosen = load_scenario(out / "chosen.yaml")
    assert summarize(run(chosen.to_dict()))["objectives"]["ONLINE"]["ttft_p99"]["met"]
    assert pq.read_table(out / "trials.parquet").num_rows == 4
    assert 'id="chart-front"' in (out / "pareto.html").read_text()
    data = json.loads(invoke("fewest-gpus", path, "--seeds", 1, "--jobs", 1, "--json").stdout)
    assert data["best"]["gpus"] >= 1
    assert invoke("headroom", path, "--seeds", 1, "--jobs", 1).stdout.startswith("No headroom")
    for arguments, message in (
        (("optimize", path, "--out", path, *options), "--out"),
        (("optimize", path, "--out", out, *options, "--storage", "nonsense"), "--storage nonsense"),
        (("optimize", path, "--out", out, *options, "--goal", "cost"), "holds another search"),
        (("headroom", tmp_path / "none.yaml"), "cannot be read"),
    ):
        told = invoke(*arguments)
        assert told.exit_code == 2, told.output
        assert message in told.stderr
        assert "Traceback" not in told.stderr


# --- batching waits -----------------------------------------------------------------------


def test_below_saturation_waiting_buys_nothing():
    source = document(
        policy="tiered",
        traffic=[
            stream(
                arrivals={"process": "poisson", "rate": 5},
                requests=60,
                tiers={"ONLINE": 0.5, "BATCH": 0.5},
            )
        ],
        engine={"max_num_seqs": 64},
    )
    scenario = load_scenario(source)
    found = explore_waits(scenario, ["ONLINE", "BATCH"], (0.2, 0.0, 0.05), seeds=3)
    for tier in ("ONLINE", "BATCH"):
        of = found["tiers"][tier]
        assert of["verdict"] != "gain"
        assert of["best"] in (0.0, None)
        assert "a wait of" not in of["text"]
        p50 = [point["p50"] for point in of["points"]]
        assert p50[0] < p50[1] < p50[2]
        assert p50[2] - p50[0] == pytest.approx(0.2, rel=0.3)
    # The other tier keeps its own wait.
    usual = [
        figures_of(run(source | {"run": {"seed": k}}))["BATCH.ttft_p50"] for k in found["seeds"]
    ]
    assert found["tiers"]["BATCH"]["points"][1]["p50"] == pytest.approx(sum(usual) / 3)
    with pytest.raises(InputError, match="holds nothing"):
        explore_waits(load_scenario(BUSY))
    with pytest.raises(InputError, match="has ONLINE, BATCH, OFFLINE"):
        explore_waits(scenario, ["NIGHT"])
    assert measure("ONLINE.goodput").unit == "requests/s"
