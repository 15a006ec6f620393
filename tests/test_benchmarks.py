"""The benchmarks run and can fail; starting is cheap; a run's cost and memory follow what happens in it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import regression, speed, speed_peer
from benchmarks.regression import MOST_PAIRS, CannotCompareError, Comparison, checked_out, compare
from benchmarks.speed_measure import ROOT, floor, measure
from benchmarks.speed_page import PAGE, write_section
from benchmarks.speed_scale import PARTS, week
from benchmarks.speed_startup import start_up
from benchmarks.speed_workloads import POLICIES, WORKLOADS, missing, poisson
from tests.runs import document, run, stream
from twin.scenario import load_scenario

HEAVY = {"pandas", "pyarrow", "plotly", "scipy", "streamlit", "optuna", "joblib", "matplotlib"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Byte code of the processes that measure."""
    return str(tmp_path_factory.mktemp("cache"))


# --- starting -------------------------------------------------------------------------------

IMPORTS = """
import json, sys
import twin.cli
first = {name.partition(".")[0] for name in sys.modules}
sys.argv = ["twin", "run", "examples/chat-8b.yaml", "--set", "traffic.0.requests=5", "--json"]
try:
    twin.cli.main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps([sorted(first), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_heavy_modules_are_imported_only_where_they_are_used():
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, later = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert "typer" in first
    assert not first & (HEAVY | {"numpy", "simpy", "pydantic"})
    assert "numpy" in later
    assert not later & HEAVY


def test_the_time_to_start_is_measured(cache):
    found = start_up(cache, ROOT / "examples" / "chat-8b.yaml", times=1)
    assert 0.05 < found["cpu_s"] < 30
    assert 0.05 < found["least_wall_s"] <= found["wall_s"] < 60


# --- speed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_workload_is_a_scenario(name, policy):
    why = missing(WORKLOADS[name])
    if why is not None:
        pytest.skip(why)
    assert load_scenario(WORKLOADS[name].document, [f"policy={policy}"]).policy_name == policy


def test_speed_is_measured_beside_the_floor(cache):
    found = measure(cache, "time", poisson(300), policies=POLICIES, rounds=1)
    assert set(found["policies"]) == set(POLICIES)
    for best in found["policies"].values():
        assert best["requests"] == best["completed"] == 300
        assert 0 < best["requests"] / best["cpu_s"] < found["floor"]


def test_the_floor_does_not_depend_on_how_long_it_is_run():
    few, many = (max(floor(n) for _ in range(5)) for n in (5_000, 20_000))
    assert few == pytest.approx(many, rel=0.5)


def test_tables_have_a_row_for_each_workload_and_say_what_is_missing(cache):
    tiny = speed.Workload("tiny", poisson(100), 0.5)
    gone = speed.Workload("gone", poisson(100) | {"traffic": [{"trace": "no-such-file.csv"}]})
    workloads = {"w1": tiny, "gone": gone}
    _, _, first, second = speed.speed_table(cache, workloads, rounds=1).splitlines()
    assert first.startswith("| tiny | 100 | ")
    assert second.startswith("| gone | skipped: no trace no-such-file.csv: set TWIN_DATA ")
    assert first.count("|") == second.count("|")
    names, _, shares = speed.parts_table(cache, workloads, samples=100).splitlines()
    assert {"policy", "planning", "boundaries"} <= {name.strip() for name in names.split("|")}
    total = sum(int(cell.strip(" %")) for cell in shares.split("|")[2:-1])
    assert 95 <= total <= 105


def test_a_peer_that_cannot_be_installed_is_said(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(speed_peer, "PYTHON", Path(sys.executable))
    assert speed.peer_text(cache, rounds=1).startswith("AISimulate could not be measured here: ")


def test_peers_are_compared_round_by_round():
    found = speed_peer.Race(10, 1, "gpu", [2.0, 3.0, 9.0], {p: [1.0, 1.0, 3.0] for p in POLICIES})
    assert found.ratios("tiered") == [2, 3, 3]
    assert "| 10 x 1 | tiered | 1.00 | gpu | 3.00 | 3.00 (2.00 to 3.00) |" in speed_peer.table(
        [found]
    )


def test_the_week_is_a_week_at_twenty_requests_a_second():
    scenario = load_scenario(week(7), ["policy=tiered"])
    assert scenario.run.until_ps == 7 * 86_400 * 10**12
    assert not scenario.run.records
    # 86.4 seconds of it, at the peak of the day: 1.6 times 20 a second.
    assert run(week(0.001), "policy=tiered").tally().requests == pytest.approx(86.4 * 32, rel=0.1)


def test_the_page_has_room_for_every_table(tmp_path):
    page = tmp_path / "page.md"
    shutil.copy(PAGE, page)
    for name in ("speed", "parts", "peer", "start-up", *(f"scale by {part}" for part in PARTS)):
        write_section(name, f"TABLE {name}", page)
        write_section(name, f"new TABLE {name}", page)
    text = page.read_text()
    assert text.count("new TABLE") == text.count("TABLE") == 7
    with pytest.raises(ValueError, match=r"page\.md has no marks .*nothing"):
        write_section("nothing", "", page)


# --- slower than before ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "is_slower"),
    [([1.0] * 9, False), ([1.14] * 9, False), ([1.16] * 9, True), ([0.9, 1.0, 5.0], False)],
)
def test_the_median_decides(ratios, is_slower):
    assert Comparison("any", ratios).is_slower(0.15) == is_slower


def test_the_interval_of_the_median():
    nine = Comparison("any", [1.0 + i / 100 for i in range(9)])
    assert nine.interval == (1.01, 1.07)  # covers with 1 - 2 (1 + 9) / 512 = 0.96
    assert nine.is_open(0.05)
    assert not nine.is_open(0.15)
    assert not Comparison("any", [1.0 + i / 100 for i in range(MOST_PAIRS)]).is_open(0.12)
    assert Comparison("any", [1.0, 1.2]).interval == (1.0, 1.2)


def test_a_loop_that_was_planted_is_seen(cache, tmp_path):
    shutil.copytree(ROOT / "twin", tmp_path / "twin")
    place = tmp_path / "twin" / "simulation.py"
    text, begin = place.read_text(), "        self._offered += 1\n"
    assert text.count(begin) == 1
    place.write_text(text.replace(begin, f"        sum(range(30_000))\n{begin}"))
    small = poisson(200) | {"policy": "tiered"}
    found = compare("slow", small, (tmp_path, ROOT), cache, pairs=2, limit=0.15)
    assert found.is_slower(0.15)
    assert min(found.ratios) > 1.5


def test_a_base_is_checked_out_and_removed():
    with checked_out("HEAD") as tree:
        assert (tree / "twin" / "simulation.py").is_file()
    assert not tree.exists()
    listed = ["git", "-C", str(ROOT), "worktree", "list"]
    assert str(tree) not in subprocess.run(listed, capture_output=True, text=True).stdout
    with (
        pytest.raises(CannotCompareError, match="BASE=no-such-commit"),
        checked_out("no-such-commit"),
    ):
        pass
    assert regression.main(["--base", "no-such-commit"]) == 2


# --- what a run costs -----------------------------------------------------------------------


def test_time_in_which_nothing_happens_costs_nothing():
    """A request every ten seconds for an hour, then the same a thousand times as far apart."""
    hour, long = (
        run(
            document(traffic=[stream(requests=360, arrivals={"process": "constant", "rate": rate})])
        )
        for rate in (0.1, 0.0001)
    )
    assert hour.simulated_ps > 3590 * 10**12
    assert long.simulated_ps > 999 * hour.simulated_ps
    assert hour.events == long.events < 10 * 360


ENDED_EARLY = """
import sys
from benchmarks.speed_measure import memory_mb
from tests.runs import document, stream
from twin.simulation import load_scenario, simulate
planned = 20
talks = stream(
    40, 30, arrivals={"process": "poisson", "rate": 30}, requests=planned * int(sys.argv[1]),
    sessions={"turns": planned, "think_time": 1, "system_prompt_tokens": 64}, timeouts={"total": 0.03},
)
engine = {"enable_prefix_caching": True}
result = simulate(load_scenario(document(traffic=[talks], engine=engine), ["run.records=false"]))
ended = {o: sum(tier.ended[o] for tier in result.tally().tiers.values()) for o in ("completed", "timed_out")}
assert ended == {"completed": 0, "timed_out": int(sys.argv[1])}, ended
print(result.events, memory_mb())
"""


def ended_early(sessions):
    """(events, peak MB) of conversations of 20 turns whose clients leave in the first."""
    command = [sys.executable, "-c", ENDED_EARLY, str(sessions)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    events, peak = done.stdout.split()
    return int(events), float(peak)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_sessions_that_end_early_leave_nothing_behind():
    (few_events, few_mb), (many_events, many_mb) = ended_early(2_500), ended_early(12_500)
    assert many_events == pytest.approx(5 * few_events, rel=0.1)
    assert many_mb < few_mb + 2
