"""Comparisons: a verdict where there is a difference, none on noise, and the same for measured runs."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.what_if_honesty import CHAT, slower_profile
from tests.runs import document, run, stream
from twin.cli import app
from twin.errors import InputError
from twin.report.folder import write_folder
from twin.report.json_summary import summarize
from twin.scenario import load_scenario
from twin.whatif.compare import SEEDS, Variant, compare, judge_all, measures_of, objectives_missed
from twin.whatif.figures import figures_of, measure
from twin.whatif.measured import compare_measured
from twin.whatif.measured_runs import read_measured
from twin.whatif.statistics import paired, unpaired
from twin.whatif.verdict import change_text, conclude, judge

BUSY = document(
    traffic=[stream(100, 60, arrivals={"process": "poisson", "rate": 40}, requests=80)],
    objectives={"ONLINE": {"ttft_p99": 0.3}},
)


# --- intervals ----------------------------------------------------------------------------

FACTORS = st.floats(0.1, 10)


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=20), FACTORS)
def test_a_constant_ratio_is_found_to_the_digit(values, factor):
    found = paired(values, [factor * value for value in values], 0.99)
    assert found.is_relative
    assert found.change == pytest.approx(factor - 1, abs=1e-9)
    assert found.high - found.low < 1e-6


@given(st.lists(st.tuples(FACTORS, FACTORS), min_size=2, max_size=20))
def test_the_two_sides_mirror_each_other(pairs):
    a, b = zip(*pairs, strict=True)
    there, back = paired(a, b, 0.95), paired(b, a, 0.95)
    assert there.is_found == back.is_found
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1)
    assert there.low <= there.change <= there.high


def test_values_of_zero_are_compared_by_difference():
    found = paired([0, 0, 1], [0, 2, 1], 0.95)
    assert not found.is_relative
    assert found.change == pytest.approx(2 / 3)
    assert paired([1.0, None], [2.0, 3.0], 0.95) is None
    assert unpaired([1.0], [2.0, 3.0], 0.95) is None


def test_intervals_hold_as_often_as_they_say():
    chance = random.Random(1)
    missed = 0
    for _ in range(400):
        a = [math.exp(chance.gauss(0, 0.3)) for _ in range(10)]
        b = [x * math.exp(chance.gauss(0.1, 0.2)) for x in a]
        found = paired(a, b, 0.9)
        missed += not found.low <= math.expm1(0.1) <= found.high
    assert 20 <= missed <= 62  # 40 expected, 3.6 standard deviations


# --- verdicts -----------------------------------------------------------------------------


def verdict(*differences):
    """Of (name, limit, values before, values after)."""
    measures = [measure(name, limit) for name, limit, _, _ in differences]
    by_name = {name: (a, b) for name, _, a, b in differences}
    sides = [
        [{name: by_name[name][side][k] for name in by_name} for k in range(10)] for side in (0, 1)
    ]
    found = judge(
        measures, lambda name, level: paired(*by_name[name], level), len(measures), *sides
    )
    return conclude("B", found)


def around(value, spread=0.01):
    chance = random.Random(str(value))
    return [value * (1 + spread * chance.gauss(0, 1)) for _ in range(10)]


TTFT, GOODPUT = "ONLINE.ttft_p99", "ONLINE.goodput"


@pytest.mark.parametrize(
    ("word", "differences"),
    [
        ("adopt", [(TTFT, 1.0, around(0.9), around(0.5)), (GOODPUT, None, around(8), around(10))]),
        ("adopt", [(TTFT, 1.0, around(1.9), around(0.5)), (GOODPUT, None, around(8), around(6))]),
        ("reject", [(TTFT, 1.0, around(0.5), around(1.4)), (GOODPUT, None, around(8), around(12))]),
        ("reject", [(TTFT, 1.0, around(0.5), around(0.6))]),
        ("trade-off", [(TTFT, 1.0, around(0.9), around(0.5)), (GOODPUT, None, around(8), around(6))]),
        ("no difference", [(TTFT, 1.0, around(0.5, 1e-3), around(0.5, 1e-3))]),
        ("undecided", [(TTFT, 1.0, around(0.5, 0.2), around(0.501, 0.2))]),
        # Goodput is better, and TTFT may be twice as long: nothing to adopt on.
        ("undecided", [(TTFT, 1.0, around(0.9, 0.5), around(0.91, 0.5)), (GOODPUT, None, around(8), around(9))]),
    ],
)  # fmt: skip
def test_the_word_follows_from_the_figures(word, differences):
    found = verdict(*differences)
    assert found.word == word
    assert f": {word}" in found.text


def test_a_verdict_reads_as_a_sentence():
    found = verdict(
        (TTFT, 1.0, around(1.0), around(0.62)),
        (GOODPUT, None, around(10), around(11.2)),
        ("gpu_hours", None, [3.0] * 10, [3.0] * 10),
    )
    assert found.text.startswith("B: ONLINE TTFT p99 -3")
    assert found.text.endswith("GPU-hours equal: adopt")
    assert "ONLINE goodput +1" in found.text


# --- honesty, in small --------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """Figures of a small scenario under 160 seeds, and the measures that are judged."""
    source = CHAT | {"traffic": [{**CHAT["traffic"][0], "requests": 20}]}
    scenario = load_scenario(source)
    rows = [figures_of(run(source, f"run.seed={seed}")) for seed in range(160)]
    return rows, measures_of([Variant("A", scenario)])


def test_a_scenario_against_itself_raises_no_alarm(small):
    """benchmarks/what_if_honesty.py does it 200 times, with the default number of seeds."""
    rows, measures = small
    alarms = 0
    for k in range(100):
        drawn = random.Random(k).sample(rows, 2 * SEEDS)
        (variant,) = judge_all(["A", "B"], [drawn[:SEEDS], drawn[SEEDS:]], measures)["variants"]
        alarms += any(row["verdict"] in ("better", "worse") for row in variant["judged"])
    assert alarms <= 5


def test_slower_steps_are_found_as_often_as_they_were(tmp_path):
    """Steps that take 8 % longer make the p99 of TTFT 9 % longer: found in most comparisons, the mean in all.

    The runs are short and drawn again from 40 seeds; benchmarks/what_if_honesty.py has runs and seeds of its own.
    """
    source = CHAT | {"traffic": [{**CHAT["traffic"][0], "requests": 60}]}
    slower = f"hardware.step_time={slower_profile(tmp_path, 1.08)}"
    sides = [
        [figures_of(run(source, f"run.seed={seed}", *changes)) for seed in range(40)]
        for changes in ((), (slower,))
    ]
    measures = [*measures_of([Variant("A", load_scenario(source))]), measure("ONLINE.ttft_mean")]
    found = dict.fromkeys(("ONLINE.ttft_p99", "ONLINE.ttft_mean"), 0)
    for k in range(50):
        seeds = random.Random(k).sample(range(40), SEEDS)
        pairs = [[side[seed] for seed in seeds] for side in sides]
        (variant,) = judge_all(["A", "B"], pairs, measures)["variants"]
        for row in variant["judged"]:
            if row["figure"] in found:
                found[row["figure"]] += row["verdict"] == "worse"
    assert found["ONLINE.ttft_p99"] >= 28
    assert found["ONLINE.ttft_mean"] == 50


def test_a_true_difference_is_found(small):
    rows, measures = small
    slower = [
        {name: v and v * 1.05 if "ttft" in name else v for name, v in row.items()}
        for row in rows[:20]
    ]
    chance = random.Random(2)
    for row in slower:
        row["ONLINE.ttft_p99"] *= math.exp(chance.gauss(0, 0.03))
    (variant,) = judge_all(["A", "B"], [rows[:20], slower], measures)["variants"]
    words = {row["figure"]: row["verdict"] for row in variant["judged"]}
    assert words.pop("ONLINE.ttft_p99") == "worse"
    assert set(words.values()) == {"equal"}


# --- the whole way ------------------------------------------------------------------------


def test_seeds_are_paired_and_the_better_one_is_adopted():
    fast = load_scenario(BUSY, ["engine.max_num_seqs=64"])
    seen = []
    found = compare(
        [Variant("A", load_scenario(BUSY)), Variant("B", fast)],
        4,
        progress=lambda *told: seen.append(told),
    )
    assert seen == [(i, 8) for i in range(1, 9)]
    (variant,) = found["variants"]
    assert variant["verdict"] == "adopt"
    first = next(row for row in variant["judged"] if row["figure"] == "ONLINE.ttft_p99")
    values = [
        summarize(run(BUSY, f"run.seed={seed}"))["tiers"]["ONLINE"]["ttft_s"]["p99"]
        for seed in found["seeds"]
    ]
    assert first["before"] == pytest.approx(sum(values) / 4)
    assert objectives_missed(found) == []
    same = compare([Variant("A", fast), Variant("B", fast)], 2)
    assert same["variants"][0]["verdict"] == "no difference"


def test_a_scenario_without_chance_is_called_so():
    source = document(traffic=[stream(arrivals={"process": "constant", "rate": 5}, requests=10)])
    slower = load_scenario(source, ["engine.async_scheduling=false"])
    found = compare([Variant("A", load_scenario(source)), Variant("B", slower)], 2)
    assert "seed changes nothing" in found["note"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def busy(tmp_path):
    path = tmp_path / "busy.yaml"
    path.write_text(json.dumps(BUSY), encoding="utf-8")
    return path


def test_the_command(busy):
    options = ("--seeds", 2, "--jobs", 1)
    told = invoke("compare", busy, "--set", "engine.max_num_seqs=64", *options)
    assert told.exit_code == 0
    assert "engine.max_num_seqs=64: " in told.stdout
    both = invoke(
        "compare",
        busy,
        "--set",
        "engine.max_num_seqs=2 ; policy=fcfs",
        *options,
        "--json",
        "--check",
    )
    assert both.exit_code == 1
    found = json.loads(both.stdout)
    assert found["missed"] == ["engine.max_num_seqs=2, policy=fcfs: ONLINE TTFT p99"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs two configurations"),
        (("--set", "engine.max_num_seq=3"), "max_num_seqs"),
        (("--set", "engine.max_num_seqs=9", "--figure", "ttft"), "is no figure of a run"),
        (("OTHER", "--set", "policy=fcfs"), "--all changes every one"),
        (("missing.yaml",), "cannot be read"),
        (("--objectives", "x.yaml", "--set", "policy=fcfs"), "measured runs"),
    ],
)
def test_mistakes_are_told(busy, arguments, message):
    arguments = [busy if argument == "OTHER" else argument for argument in arguments]
    told = invoke("compare", busy, *arguments)
    assert told.exit_code == 2
    assert message in told.stderr
    assert "Traceback" not in told.stderr


# --- measured runs ------------------------------------------------------------------------


def folder(path, *overrides, requests=400, seed=1):
    """A run in a folder, as `twin run --out` and a replay leave one."""
    source = BUSY | {
        "traffic": [{**BUSY["traffic"][0], "requests": requests}],
        "run": {"seed": seed},
    }
    result = run(source, *overrides, observe=True)
    path.mkdir(parents=True)
    write_folder(path, result, summarize(result), ("summary.json", "requests.parquet"))
    return path


def test_measured_runs_of_the_same_traffic(tmp_path):
    slow, fast = folder(tmp_path / "slow"), folder(tmp_path / "fast", "engine.max_num_seqs=64")
    told = invoke("compare", slow, fast, "--json")
    assert told.exit_code == 0, told.stderr
    found = json.loads(told.stdout)
    assert "drawn together" in found["how"]
    (variant,) = found["variants"]
    assert variant["verdict"] == "adopt"
    row = variant["judged"][0]
    assert row["limit"] == 0.3  # of summary.json
    summary = json.loads((slow / "summary.json").read_text())
    assert row["before"] == pytest.approx(summary["tiers"]["ONLINE"]["ttft_s"]["p99"], rel=1e-9)
    assert invoke("compare", slow, fast, "--check").exit_code == 0
    assert invoke("compare", fast, slow, "--check").exit_code == 1


def test_a_measured_run_against_itself_and_against_another_seed(tmp_path):
    calm = "traffic.0.arrivals.rate=15"
    one, other = folder(tmp_path / "one", calm), folder(tmp_path / "other", calm, seed=2)
    same = compare_measured([("A", read_measured(one)), ("B", read_measured(one))], {})
    assert {row["verdict"] for row in same["variants"][0]["judged"]} == {"equal"}
    found = compare_measured([("A", read_measured(one)), ("B", read_measured(other))], {})
    words = {row["verdict"] for row in found["variants"][0]["judged"]}
    assert words <= {"open", "equal"}
    grown = [(str(seed), read_measured(folder(tmp_path / str(seed), seed=seed))) for seed in (1, 2)]
    found = compare_measured(grown, {})
    assert {row["verdict"] for row in found["variants"][0]["judged"]} == {"none"}
    assert "one run a side tells nothing" in found["how"]


def test_several_measured_runs_a_side(tmp_path):
    for k in range(3):
        folder(tmp_path / "slow" / str(k), requests=60, seed=k)
        folder(tmp_path / "fast" / str(k), "engine.max_num_seqs=64", requests=60, seed=10 + k)
    found = compare_measured(
        [(name, read_measured(tmp_path / name)) for name in ("slow", "fast")],
        {"ONLINE": {"ttft_p50": 1.0}},
    )
    assert "3 and 3 runs, each one value" in found["how"]
    assert found["variants"][0]["judged"][0]["pairs"] == 3


def test_what_is_no_measured_run_is_told(tmp_path, busy):
    run_folder = folder(tmp_path / "run", requests=30)
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((run_folder, tmp_path / "empty"), "holds no requests.parquet"),
        ((run_folder, busy), "is no folder"),
        ((run_folder,), "another folder"),
        ((run_folder, run_folder), "too short"),
        ((run_folder, run_folder, "--seeds", 3), "--seeds: measured runs"),
    ):
        told = invoke("compare", *arguments)
        assert told.exit_code == 2
        assert message in told.stderr
    (tmp_path / "empty" / "requests.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not readable as Parquet"):
        read_measured(tmp_path / "empty")


# --- nobody served, other objectives ------------------------------------------------------

REFUSING = "traffic.0.timeouts.ttft=0.001"  # no client waits for an answer


def served(ttft, offered=10, completed=10):
    return {TTFT: ttft, "ONLINE.offered": offered, "ONLINE.completed": completed}


LOST = served(None, completed=0)


@pytest.mark.parametrize("seeds", [2, 20])
def test_a_configuration_that_serves_nobody_is_rejected(seeds):
    measures = [measure(TTFT, 1.0), measure("gpu_hours")]
    before = [served(0.5 + 0.001 * k) | {"gpu_hours": 3.0} for k in range(seeds)]
    after = [LOST | {"gpu_hours": 1.0} for _ in range(seeds)]
    found = judge_all(["A", "B"], [before, after], measures)
    (variant,) = found["variants"]
    assert variant["verdict"] == "reject"
    row = variant["judged"][0]
    assert (row["verdict"], row["met_before"], row["met"]) == ("worse", True, False)
    assert row["before"] == pytest.approx(0.5, abs=0.02)
    assert (row["after"], row["lost"]) == (None, seeds)
    assert objectives_missed(found) == ["B: ONLINE TTFT p99"]
    back = judge_all(["B", "A"], [after, before], measures)["variants"][0]
    assert back["judged"][0]["verdict"] == "better"
    assert back["verdict"] == "adopt"


def test_a_side_that_serves_nobody_now_and_then_is_not_adopted():
    """The runs that served somebody are faster, and cannot speak for the others."""
    before = [served(0.5 + 0.001 * k) for k in range(10)]
    after = [LOST if k in (2, 7) else served(0.3 + 0.001 * k) for k in range(10)]
    found = judge_all(["A", "B"], [before, after], [measure(TTFT, 1.0)])
    row = found["variants"][0]["judged"][0]
    assert (row["verdict"], row["met"], row["lost"]) == ("open", False, 2)
    assert found["variants"][0]["verdict"] == "undecided"
    assert objectives_missed(found) == ["B: ONLINE TTFT p99"]


def test_a_tier_without_requests_is_neither_kept_nor_missed():
    nobody = served(None, offered=0, completed=0)
    found = judge_all(["A", "B"], [[served(0.5)] * 3, [nobody] * 3], [measure(TTFT, 1.0)])
    row = found["variants"][0]["judged"][0]
    assert (row["verdict"], row["met_before"], row["met"]) == ("none", True, None)
    assert objectives_missed(found) == []


def test_check_fails_where_nobody_is_served(busy, tmp_path):
    told = invoke(
        "compare", busy, "--set", REFUSING, "--all", "objectives.ONLINE.ttft_p99=9", "--seeds", 3,
        "--jobs", 1, "--check",
    )  # fmt: skip
    assert told.exit_code == 1, told.output
    assert "reject" in told.stdout
    assert "MISSED" in told.stdout
    slow, none = folder(tmp_path / "slow"), folder(tmp_path / "none", REFUSING)
    told = invoke("compare", slow, none, "--check")
    assert told.exit_code == 1, told.output
    assert "no request is served" in " ".join(told.stdout.split())


def test_a_branch_is_held_to_the_objectives_of_the_first_and_to_its_own(busy, tmp_path):
    def branch(limit):
        path = tmp_path / f"{limit}.yaml"
        path.write_text(json.dumps(BUSY | {"objectives": {"ONLINE": {"ttft_p99": limit}}}))
        return path

    calm = ("--all", "engine.max_num_seqs=64", "--seeds", 2, "--jobs", 1, "--check", "--json")
    told = invoke("compare", busy, branch(1e-4), *calm)
    assert told.exit_code == 1
    found = json.loads(told.stdout)
    assert found["objectives"] == {"of": str(busy), "limits": {"ONLINE": {"ttft_p99": 0.3}}}
    (variant,) = found["variants"]
    # One yardstick: the same configuration delivers the same goodput whatever it asks of itself.
    goodput = next(row for row in variant["judged"] if row["figure"] == GOODPUT)
    assert goodput["verdict"] == "equal"
    assert goodput["before"] == goodput["after"] > 0
    (own,) = variant["own_objectives"]
    assert (own["limit"], own["met"]) == (1e-4, False)
    assert own["value"] == next(r for r in variant["judged"] if r["figure"] == TTFT)["after"]
    assert found["missed"] == [f"{variant['name']}: its own {own['text']}"]
    assert "of its own objectives it misses ONLINE TTFT p99" in variant["text"]
    # A branch does not pass by asking less of itself.
    told = invoke("compare", branch(1e-4), branch(50), *calm)
    assert told.exit_code == 1
    assert json.loads(told.stdout)["missed"] == [f"{branch(50)}: ONLINE TTFT p99"]
    assert invoke("compare", busy, branch(50), *calm).exit_code == 0


def test_measured_runs_are_held_to_their_own_objectives_too(tmp_path):
    calm = "engine.max_num_seqs=64"
    one = folder(tmp_path / "one", calm)
    other = folder(tmp_path / "other", calm, "objectives.ONLINE.ttft_p99=0.0001")
    told = invoke("compare", one, other, "--check")
    assert told.exit_code == 1
    assert "its own ONLINE TTFT p99 <= 0.1 ms" in told.stderr
    path = tmp_path / "wide.yaml"
    path.write_text(json.dumps(BUSY | {"objectives": {"ONLINE": {"ttft_p99": 9}}}))
    assert invoke("compare", one, other, "--check", "--objectives", path).exit_code == 0
    path.write_text(json.dumps({**BUSY, "objectives": {}}))
    for arguments, message in (
        (("--objectives", path), "has no objectives"),
        (("--figure", "ONLINE.itl_p99"), "gaps between tokens"),
        (("--figure", "met.ONLINE.ttft_p99"), "--figure met.ONLINE.ttft_p99"),
    ):
        told = invoke("compare", one, other, *arguments)
        assert told.exit_code == 2
        assert message in told.stderr


def test_a_check_of_nothing_is_no_success(busy, tmp_path):
    bare = tmp_path / "bare.yaml"
    bare.write_text(json.dumps({**BUSY, "objectives": {}}))
    told = invoke("compare", bare, "--set", "policy=fcfs", "--check")
    assert told.exit_code == 2
    assert "no scenario has objectives" in told.stderr
    options = ("--set", "policy=fcfs", "--seeds", 2, "--jobs", 1, "--check")
    never = (
        "--all",
        "traffic.0.tiers={ONLINE: 1.0, RARE: 1.0e-9}",
        "--all",
        "objectives={RARE: {ttft_p99: 1}}",
    )
    told = invoke("compare", busy, *never, *options)
    assert told.exit_code == 2, told.output
    assert "no objective had anything to judge" in told.stderr


def test_an_interval_without_a_bound_is_called_so():
    found = paired([0.1, 0.1], [0.1, 0.2], 0.999)
    assert found.high > 100
    assert change_text(found, "s") == "cannot be told with 2 pairs"
    told = verdict((TTFT, 1.0, [0.1] * 10, [0.1] * 9 + [0.2]))
    assert "cannot be told" not in told.text
    measures = [measure(TTFT)]
    rows = [[served(0.1), served(0.1)], [served(0.1), served(0.2)]]
    text = judge_all(["A", "B"], rows, measures)["variants"][0]["text"]
    assert (
        text
        == "B: undecided (no difference shows, but ONLINE TTFT p99 cannot be told with 2 pairs; more seeds would tell)"
    )


def test_kept_objectives_are_a_figure_of_which_more_is_better(busy):
    """met.* are shares of the runs: falling from all to none is worse."""
    options = ("--all", "engine.max_num_seqs=64", "--seeds", 5, "--jobs", 1, "--json")
    told = invoke(
        "compare",
        busy,
        "--set",
        "engine.max_num_seqs=1",
        "--figure",
        "met.ONLINE.ttft_p99",
        *options,
    )
    row = json.loads(told.stdout)["variants"][0]["judged"][-1]
    assert (row["unit"], row["more_is_better"]) == ("1", True)
    assert (row["before"], row["after"], row["verdict"]) == (1.0, 0.0, "worse")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "policy=fcfs", "--figure", "ONLIN.ttft_p99"), "no stream has tier ONLIN; there are ONLINE"),
        (("--set", "policy=fcfs", "--figure", "met.ONLINE.e2e_p99"), "no objective e2e_p99 of ONLINE"),
        (("--set", "policy=fcfs", "--figure", "ONLINE.offered"), "neither more nor less"),
        (("--set", "policy=fcfs", "--figure", "simulated_s"), "neither more nor less"),
        (("--set", "run.seed=7"), "seeds are what --seeds and --seed give"),
        (("--set", "policy=fcfs ; run.seed=7"), "seeds are what --seeds and --seed give"),
        (("--set", "run={seed: 7}"), "seeds are what --seeds and --seed give"),
        (("--set", "name=other"), "changes no figure"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_told_before_a_run(busy, arguments, message, monkeypatch):
    monkeypatch.setattr("twin.whatif.compare.run_all", None)
    told = invoke("compare", busy, *arguments)
    assert told.exit_code == 2, told.output
    assert message in told.stderr


def test_a_figure_that_was_asked_for_is_told_without_a_value(busy):
    scenarios = [load_scenario(BUSY), load_scenario(BUSY, ["policy=fcfs"])]
    variants = [Variant(name, of) for name, of in zip("AB", scenarios, strict=True)]
    judged = compare(variants, 2, figures=["cost"])["variants"][0]["judged"]
    assert (judged[-1]["figure"], judged[-1]["verdict"]) == ("cost", "none")
