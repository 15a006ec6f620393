"""Sweeps: every combination once, whatever happens in between, and the same bytes in the end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.runs import document, run, stream
from twin.cli import app
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.whatif.asked import may_change_tiers
from twin.whatif.axes import Range, grid, label_of, override, parse_axis, parse_vary
from twin.whatif.figures import figures_of, measure
from twin.whatif.page import render_page
from twin.whatif.runs import NO_MEMORY, Backend
from twin.whatif.store import FileJournal, basis_of, check_basis, write_table
from twin.whatif.sweep import Point, Row, plan, sweep
from twin.whatif.sweep_tables import render_sweep

ROOT = Path(__file__).parents[1]
SMALL = document(traffic=[stream(requests=30)], objectives={"ONLINE": {"ttft_p99": 0.3}})
VARY = ("engine.max_num_seqs=2,4,8", "traffic.0.arrivals.rate=10:30:10")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1,2,4", (1, 2, 4)),
        ("a=tiered,vllm-fcfs", ("tiered", "vllm-fcfs")),
        ("a=true,false", (True, False)),
        ("a=[{fixed: 5}, {uniform: [1, 9]}]", ({"fixed": 5}, {"uniform": [1, 9]})),
        ("a=1:10:3", (1, 4, 7, 10)),
        ("a=0.1:0.5:0.1", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("a=16:256:*2", (16, 32, 64, 128, 256)),
        ("a=0.5:2:*2", (0.5, 1.0, 2.0)),
        ("a=5", (5,)),
        ('a="00:01",x', ("00:01", "x")),
    ],
)
def test_values_as_they_are_written(text, values):
    axis = parse_axis(text)
    assert axis.values == values
    assert list(map(type, axis.values)) == list(map(type, values))


def test_ranges_for_a_search():
    assert parse_vary("a=1:64") == Range("a", 1, 64, False, True)
    assert parse_vary("a=0.01:1:log") == Range("a", 0.01, 1, True, False)
    with pytest.raises(InputError, match="needs a step"):
        parse_axis("a=1:64")


@pytest.mark.parametrize(
    "text",
    ["a", "=1", "a=", "a..b=1", "a=1:x:2", "a=5:1:1", "a=1:5:0", "a=1:5:-1", "a=0:8:*2", "a=1:8:*1", "a=1,1",
     "a=1:2:x", "a=[1", "a=0:1000000:1", "a=1,", "a=1,,2", "a=,1", "a=0:1:log"],
)  # fmt: skip
def test_other_forms_are_refused(text):
    with pytest.raises(InputError, match="--vary"):
        parse_vary(text)


def test_labels_and_overrides():
    assert label_of("engine.max_num_seqs") == "max_num_seqs"
    assert label_of("policy.tiers.0.max_wait") == "tiers.0.max_wait"
    assert label_of("traffic.0.speedup") == "speedup"
    for value in (0.05, None, True, {"fixed": 3}, [1, 2], "tiered"):
        loaded = load_scenario(SMALL, [override("name", value)] if isinstance(value, str) else [])
        assert loaded is not None
    assert override("a", {"b": [1, None]}) == "a={b: [1, null]}"
    with pytest.raises(InputError, match="combinations"):
        grid([parse_axis("a=1:200:1"), parse_axis("b=1:200:1")])


@pytest.fixture(scope="module")
def small_plan():
    return plan(load_scenario(SMALL), [parse_axis(text) for text in VARY], 2)


def table(folder):
    return pq.read_table(folder / "sweep.parquet").to_pandas()


def test_every_row_is_that_of_its_own_run(tmp_path, small_plan):
    told = []
    with FileJournal(tmp_path, small_plan) as journal:
        sweep(small_plan, journal, Backend(1), lambda *values: told.append(values))
        write_table(tmp_path, small_plan, journal.rows())
    assert [values[:2] for values in told] == [(i, 18) for i in range(1, 19)]
    assert told[-1][2] == 0  # nothing left
    rows = table(tmp_path)
    assert len(rows) == 18
    row = rows[
        (rows["engine.max_num_seqs"] == 4)
        & (rows["traffic.0.arrivals.rate"] == 20)
        & (rows.seed == 2)
    ]
    alone = figures_of(
        run(SMALL, "engine.max_num_seqs=4", "traffic.0.arrivals.rate=20", "run.seed=2")
    )
    assert row["ONLINE.ttft_p99"].item() == alone["ONLINE.ttft_p99"]
    assert row["gpu_hours"].item() == alone["gpu_hours"]


class Broken(Exception):
    """What ends a sweep in the middle."""


def test_what_was_made_is_not_made_again_and_the_bytes_are_the_same(tmp_path, small_plan):
    def folder(name, stops):
        made = []
        for stop in stops:
            with FileJournal(tmp_path / name, small_plan) as journal:

                def told(done, *_, stop=stop):
                    if done == stop:
                        raise Broken

                before = set(journal.rows())
                with suppress(Broken):
                    sweep(small_plan, journal, Backend(1), told)
                made += sorted(set(journal.rows()) - before)
                write_table(tmp_path / name, small_plan, journal.rows())
        return made, (tmp_path / name / "sweep.parquet").read_bytes()

    at_once, whole = folder("whole", [None])
    in_parts, parts = folder("parts", [1, 7, 8, None])
    assert sorted(at_once) == sorted(in_parts) == list(range(18))
    assert whole == parts


def test_a_line_cut_short_is_run_again_and_a_broken_one_is_told(tmp_path, small_plan):
    with FileJournal(tmp_path, small_plan) as journal:
        journal.add(Row(3, {"gpu_hours": 1.0}, None))
        journal.add(Row(4, None, "refused"))
    path = tmp_path / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with FileJournal(tmp_path, small_plan) as journal:
        assert set(journal.rows()) == {3}
        journal.add(Row(5, {}, None))
    with FileJournal(tmp_path, small_plan) as journal:
        assert set(journal.rows()) == {3, 5}
        with pytest.raises(InputError, match="another sweep is writing"):
            FileJournal(tmp_path, small_plan).__enter__()
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(InputError, match="line 1"), FileJournal(tmp_path, small_plan):
        pass


def test_folders_of_something_else_are_refused(tmp_path, small_plan):
    with FileJournal(tmp_path / "a", small_plan):
        pass
    other = plan(load_scenario(SMALL), [parse_axis(VARY[0])], 2)
    with (
        pytest.raises(InputError, match=r"holds another sweep .other values"),
        FileJournal(tmp_path / "a", other),
    ):
        pass
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="not empty"), FileJournal(tmp_path / "b", small_plan):
        pass


def test_points_that_cannot_run_are_rows_with_their_reason(tmp_path):
    made = plan(load_scenario(SMALL), [parse_axis("engine.max_num_seqs=8,100000")], 1)
    with FileJournal(tmp_path, made) as journal:
        sweep(made, journal, Backend(1))
        write_table(tmp_path, made, journal.rows())
        page = render_page(made, journal.rows())
    rows = table(tmp_path)
    assert rows.error.isna().tolist() == [True, False]
    assert "max_num_seqs" in rows.error[1]
    assert "refused" in page


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ([], "--vary is missing"),
        (["engine.max_num_seq=1,2"], "none of its values can run"),
        (["engine.max_num_seqs=1,2", "engine.max_num_seqs=4"], "given twice"),
    ],
)
def test_plans_that_make_no_sense(vary, message):
    with pytest.raises(InputError, match=message):
        plan(load_scenario(SMALL), [parse_axis(text) for text in vary], 1)


def command(scenario, out, *options):
    vary = [word for text in VARY for word in ("--vary", text)]
    return [
        sys.executable,
        "-m",
        "twin",
        "sweep",
        str(scenario),
        "--out",
        str(out),
        *vary,
        *options,
    ]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "small.yaml"
    path.write_text(json.dumps(SMALL), encoding="utf-8")
    return path


def wait_for_rows(process, journal, least):
    end = time.monotonic() + 120
    while not journal.exists() or journal.read_bytes().count(b"\n") < least:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_broken_off_and_gone_on_with(scenario, tmp_path, number, small_plan):
    """kill -9 leaves the journal, Ctrl-C a table as well; both go on to the same bytes."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(scenario, out, "--seeds", "2", "--jobs", "2"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,  # a pipe would be open for as long as the workers are there
        stderr=subprocess.DEVNULL,
    )
    wait_for_rows(process, out / "runs.jsonl", 4)
    os.kill(process.pid, number)
    process.wait(60)
    there = (out / "runs.jsonl").read_bytes().count(b"\n")
    assert there >= 4
    if number == signal.SIGINT and process.returncode == 130:
        # Ctrl-C may come while the last row is written.
        assert there - 1 <= len(table(out)) <= there
    done = subprocess.run(
        command(scenario, out, "--seeds", "2", "--jobs", "1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{there} of 18 runs are there from before" in done.stderr or there == 18
    numbers = [json.loads(line)["number"] for line in (out / "runs.jsonl").read_text().splitlines()]
    assert sorted(numbers) == list(range(18))
    with FileJournal(tmp_path / "whole", small_plan) as journal:
        sweep(small_plan, journal, Backend(1))
        write_table(tmp_path / "whole", small_plan, journal.rows())
    loaded = table(out).drop(columns=[]), table(tmp_path / "whole")
    assert loaded[0].equals(loaded[1])


def test_the_command_tells_how_long_it_will_take(scenario, tmp_path):
    done = CliRunner().invoke(
        app, command(scenario, tmp_path / "out", "--seeds", "1", "--jobs", "1")[3:]
    )
    assert done.exit_code == 0, done.stderr
    assert "9 runs to make" in done.stderr
    assert "simulated seconds a second" in done.stderr
    assert "left" in done.stderr
    page = (tmp_path / "out" / "sweep.html").read_text()
    for name in ("curve", "heat", "tornado"):
        assert f'id="chart-{name}"' in page
    bad = CliRunner().invoke(
        app,
        ["sweep", str(scenario), "--out", str(tmp_path / "x"), "--vary", "a=1", "--figure", "b"],
    )
    assert bad.exit_code == 2
    assert "is no figure" in bad.stderr


@pytest.mark.skipif(
    "ray" not in sys.modules and not __import__("importlib.util").util.find_spec("ray"),
    reason="no Ray",
)
def test_the_same_on_ray(scenario, tmp_path, small_plan):
    done = subprocess.run(
        command(scenario, tmp_path / "ray", "--seeds", "2", "--jobs", "2", "--ray", "local"),
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with FileJournal(tmp_path / "here", small_plan) as journal:
        sweep(small_plan, journal, Backend(1))
        write_table(tmp_path / "here", small_plan, journal.rows())
    assert table(tmp_path / "ray").equals(table(tmp_path / "here"))


def test_figures_have_names_units_and_a_better_side():
    assert measure("ONLINE.ttft_p99").label == "ONLINE TTFT p99"
    assert measure("all.goodput").more_is_better
    assert not measure("gpu_hours").more_is_better
    for name in ("ttft_p99", "ONLINE.gpus", "x", "ONLINE.ttft_p98", "goodput", "all.ttft_p99"):
        with pytest.raises(InputError, match="no figure"):
            measure(name)


# --- what a sweep rests on ----------------------------------------------------------------


def traced(folder, prompts):
    """A scenario that plays a trace, and the trace."""
    trace = folder / "tr.csv"
    rows = [f"2023-11-16 18:15:{k / 20:09.6f},{prompts},20" for k in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    path = folder / "traced.yaml"
    path.write_text(json.dumps(document(traffic=[{"trace": str(trace)}])))
    return path


def test_a_sweep_is_not_gone_on_with_over_a_changed_file(tmp_path):
    path = traced(tmp_path, 100)
    arguments = ["sweep", str(path), "--out", str(tmp_path / "out"), "--jobs", "1", "--seeds", "1"]
    vary = ["--vary", "engine.max_num_seqs=4,8"]
    told = CliRunner().invoke(app, [*arguments, *vary])
    assert told.exit_code == 0, told.output
    traced(tmp_path, 101)
    told = CliRunner().invoke(app, [*arguments, *vary])
    assert told.exit_code == 2
    assert f"other contents of {tmp_path / 'tr.csv'}" in told.stderr
    traced(tmp_path, 100)
    again = CliRunner().invoke(app, [*arguments, *vary])
    assert again.exit_code == 0
    assert "2 of 2 runs are there from before" in again.stderr


def test_a_basis_has_every_file_that_is_read_and_the_twin_itself(tmp_path):
    scenario = load_scenario(traced(tmp_path, 100))
    other = tmp_path / "other.csv"
    other.write_bytes((tmp_path / "tr.csv").read_bytes() + b"2023-11-16 18:15:09.0,5,5\n")
    axis = parse_axis(f"traffic.0.trace=[{tmp_path / 'tr.csv'}, {other}]")
    found = basis_of(scenario, [axis])
    assert set(found) == {"twin", str(tmp_path / "tr.csv"), str(other)}
    assert len(set(found.values())) == 3
    made = plan(scenario, [axis], 1, found)
    assert made.mark() != plan(scenario, [axis], 1, found | {"twin": "another"}).mark()
    check_basis(found, scenario, [axis])
    other.write_bytes(b"x")
    with pytest.raises(InputError, match=r"other.csv changed while this ran"):
        check_basis(found, scenario, [axis])


@pytest.mark.parametrize(
    "line",
    [
        '{"number": 99, "figures": {}, "error": null}',
        '{"number": "0", "figures": {}, "error": null}',
        '{"number": true, "figures": {}, "error": null}',
        '{"number": 0, "figures": "abc", "error": null}',
        '{"number": 0, "figures": {"gpus": "1"}, "error": null}',
        '{"number": 0, "figures": null, "error": null}',
        '{"number": 0, "figures": null, "error": 7}',
        "[1]",
        "7",
    ],
)
def test_damaged_rows_are_told_with_their_line(tmp_path, small_plan, line):
    with FileJournal(tmp_path, small_plan) as journal:
        journal.add(Row(3, {"gpu_hours": 1.0}, None))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write(line + "\n")
    with (
        pytest.raises(InputError, match=r"line 2: is no row of a sweep"),
        FileJournal(tmp_path, small_plan),
    ):
        pass


def test_a_plan_that_was_never_written_whole_does_not_lock_the_folder(tmp_path, small_plan):
    (tmp_path / ".sweep.json.part").write_text("{")
    with FileJournal(tmp_path, small_plan) as journal:
        assert journal.rows() == {}
    assert not (tmp_path / ".sweep.json.part").exists()


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv[:2] = ["twin"]
from twin.cli import main
main()
"""
"""A command that may not write files larger than so many bytes, as on a disk that is full."""


def on_a_full_disk(size, *arguments):
    return subprocess.run(
        [sys.executable, "-c", FULL, str(size), *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def test_a_full_disk_is_told_in_a_sentence(scenario, tmp_path):
    options = ["--vary", "engine.max_num_seqs=4,8", "--seeds", "3", "--jobs", "1"]
    done = on_a_full_disk(9_000, "sweep", scenario, "--out", tmp_path / "sweep", *options)
    assert done.returncode == 2, done.stderr
    assert f"error: --out {tmp_path / 'sweep'}: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    search = ["optimize", scenario, "--out", tmp_path / "study", *options, "--trials"]
    done = on_a_full_disk(50_000_000, *search, 1)
    size = (tmp_path / "study" / "study.db").stat().st_size
    done = on_a_full_disk(size, *search, 2)
    assert done.returncode == 2, done.stderr
    assert "error: --storage sqlite:///" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("key", ["run.seed", "name", "run.records", "run.engine_mode"])
def test_keys_that_change_nothing_are_not_varied(key):
    with pytest.raises(InputError, match=f"--vary {key}: "):
        plan(load_scenario(SMALL), [parse_axis(f"{key}=1,2")], 1)


def test_a_figure_of_a_tier_that_is_not_there_is_told_before_a_run(scenario, tmp_path):
    told = CliRunner().invoke(
        app, [*command(scenario, tmp_path / "out")[3:], "--figure", "ONLIN.ttft_p99"]
    )
    assert told.exit_code == 2
    assert "no stream has tier ONLIN; there are ONLINE" in told.stderr
    assert not (tmp_path / "out").exists()


def test_tiers_are_not_looked_at_where_values_may_bring_others():
    for text, may in (
        ("traffic.0.arrivals.rate=1,2", False),
        ("policy=tiered,priority", False),
        ("traffic.0.tiers=[{A: 1.0}, {B: 1.0}]", True),
        ("traffic.0.tier=A,B", True),
        ("traffic.0.trace=a.csv,b.csv", True),
    ):
        assert may_change_tiers([parse_axis(text)]) == may


def test_the_mean_of_a_point_is_not_that_of_its_lucky_seeds():
    served = {"ONLINE.ttft_p99": 0.2, "ONLINE.offered": 9.0, "ONLINE.completed": 9.0}
    nobody = {"ONLINE.ttft_p99": None, "ONLINE.offered": 9.0, "ONLINE.completed": 0.0}
    empty = {"ONLINE.ttft_p99": None, "ONLINE.offered": 0.0, "ONLINE.completed": 0.0}
    assert Point((1,), (served, nobody), None).mean("ONLINE.ttft_p99") is None
    assert Point((1,), (served, empty), None).mean("ONLINE.ttft_p99") == 0.2
    made = plan(load_scenario(SMALL), [parse_axis("engine.max_num_seqs=4,8")], 2)
    rows = {k: Row(k, row, None) for k, row in enumerate((served, nobody, served, empty))}
    for text in (render_sweep(made, rows, measure("ONLINE.ttft_p99")), render_page(made, rows)):
        assert text.count("none served") == 1


@pytest.mark.parametrize("pause", [0.1, 0.3, 0.6, 1.0])
def test_ctrl_c_while_workers_start_is_one_message(scenario, tmp_path, pause):
    process = subprocess.Popen(
        command(scenario, tmp_path / "out", "--seeds", "60", "--jobs", "2"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for_rows(process, tmp_path / "out" / "runs.jsonl", 1)
    time.sleep(pause)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert "interrupted: " in told


def test_runs_that_nobody_waits_for_are_ended(small_plan):
    """Four times in a row: whoever leaves early waits for no worker, and the next one gets fresh ones."""
    told = json.dumps(small_plan.scenario.to_dict())
    code = f"""
import json, time
from twin.whatif.runs import Backend, Task, run_all
document = json.loads({told!r})
tasks = [Task(k, document, (), k) for k in range(12)]
for again in range(4):
    runs = run_all(tasks, Backend(2))
    assert next(runs).figures
    time.sleep(again / 30)
    runs.close()
print(sorted(run.number for run in run_all(tasks, Backend(2))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(range(12))
    assert done.stderr == ""


def test_a_run_without_memory_is_tried_again(small_plan, tmp_path):
    """Lack of memory is the machine's, not the configuration's: it is told, and not kept."""
    with FileJournal(tmp_path, small_plan) as journal:
        journal.add(Row(0, None, NO_MEMORY))
        journal.add(Row(1, None, "refused"))
        assert set(journal.rows()) == {0, 1}
    with FileJournal(tmp_path, small_plan) as journal:
        assert set(journal.rows()) == {1}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_a_worker_that_is_killed_leaves_a_table(scenario, tmp_path):
    out = tmp_path / "out"
    long = ["--set", "traffic.0.requests=3000", "--seeds", "2", "--jobs", "2"]
    process = subprocess.Popen(
        command(scenario, out, *long), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    wait_for_rows(process, out / "runs.jsonl", 2)
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    worker = next(c for c in children if b"LokyProcess" in Path(f"/proc/{c}/cmdline").read_bytes())
    os.kill(int(worker), signal.SIGKILL)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert "a worker process was ended from outside" in errors
    assert "of 18 runs are kept; the same command goes on" in errors
    assert "Traceback" not in errors
    assert len(table(out)) >= 2
    assert "has every run" in text


def test_a_search_is_not_written_among_the_files_of_a_sweep(scenario, tmp_path, small_plan):
    with FileJournal(tmp_path / "swept", small_plan):
        pass
    for folder, words in (("swept", "holds a sweep"), ("file", "is a file; name a folder")):
        (tmp_path / "file").write_text("")
        done = CliRunner().invoke(
            app,
            ["optimize", str(scenario), "--out", str(tmp_path / folder), "--vary", "engine.max_num_seqs=2,4"],
        )  # fmt: skip
        assert done.exit_code == 2
        assert words in done.stderr


def test_sigterm_is_heard_like_ctrl_c(scenario, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(scenario, out, "--seeds", "2", "--jobs", "2"), cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_rows(process, out / "runs.jsonl", 3)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 or len(table(out)) == 18, errors
    assert "the same command goes on" in errors or len(table(out)) == 18
