"""The dashboard in a real Chromium: every page, a run made, cancelled, compared, exported, and nobody mixed up."""

import json
import signal
import time
import zipfile
from pathlib import Path

import pytest
import yaml

from dashboard.links import encode
from dashboard.state import DEFAULT
from tests.browser import browser
from tests.dashboard_server import dashboard_server
from tests.runs import azure_csv
from twin.scenario import load_scenario

LONG = DEFAULT | {
    "traffic": [{**DEFAULT["traffic"][0], "requests": 150_000}], "run": {"seed": 1, "engine_mode": "stepped"},
}  # fmt: skip


def small(**keys):
    """The default scenario with fewer requests."""
    return DEFAULT | {"traffic": [{**DEFAULT["traffic"][0], "requests": 150}]} | keys


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a dashboard; what it wrote to its log must be no complaint (streamlit#1326)."""
    log = tmp_path_factory.mktemp("server") / "log"
    with dashboard_server(log) as url:
        yield url
    told = log.read_text()
    for word in ("Traceback", "Error", "ScriptRunContext", "WARNING", "Warning", "refused to open"):
        assert word not in told, told


@pytest.fixture(scope="module")
def window(server, tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def go(window, server, document=None):
    window.open(server + (f"/?s={encode(document)}" if document else "/"))


def done(window):
    window.reads("Computed in")
    window.wait(lambda: window.charts() >= 3, "three charts")


def downloaded(window, ending, within=30):
    folder = Path(window.driver.capabilities["chrome"]["userDataDir"]).parent / "downloads"

    def look():
        found = [path for path in folder.iterdir() if path.name.endswith(ending)]
        return found and found[0]

    path = window.wait(look, ending, within)
    data = path.read_bytes()
    path.unlink()
    return data


def test_a_run_its_views_and_its_files(window, server):
    """streamlit#5827: display widgets run nothing again. streamlit#5586: a file is of the run on screen."""
    go(window, server, small())
    window.click("Run")
    done(window)
    assert "ONLINE ttft p99" in window.text
    for view, shown in (
        ("Queue and replicas", "Requests waiting"),
        ("Memory and preemptions", "KV cache"),
        ("Tokens and goodput", "Good requests per second"),
        ("Scaling", "there from the beginning to the end"),
        ("Configuration", "max_num_batched_tokens: 8192"),
        ("Tables", "attained is the share"),
    ):
        window.click(view)
        window.reads(shown)
    computed = window.text.split("Computed in ")[1].split(" s")[0]
    for stat in ("p50", "p90", "mean"):
        window.click(stat)
        window.reads(f"{stat} is the ")
    # Nothing ran again: it is the same computation, and the server answers at once.
    assert window.text.split("Computed in ")[1].split(" s")[0] == computed
    window.type("Seed", "7")
    window.reads("The inputs have changed")
    window.click("Download the result (zip)")
    archive = downloaded(window, ".zip")
    path = Path(window.driver.capabilities["chrome"]["userDataDir"]).parent / "archive"
    path.write_bytes(archive)
    with zipfile.ZipFile(path) as file:
        summary = json.loads(file.read("summary.json"))
        assert summary["seed"] == 1  # of the run on screen, not of the inputs
        assert load_scenario(yaml.safe_load(file.read("scenario.yaml"))).run.seed == 1
    assert not window.complaints()


def test_a_link_restores_a_configuration(window, server, tmp_path):
    """streamlit#8009: two browsers at once do not see each other's inputs or results."""
    engine = {**DEFAULT["engine"], "max_num_seqs": 77}
    go(window, server, small(run={"seed": 23}, engine=engine))
    assert window.value("Seed") == "23"
    window.click("Run")
    done(window)
    address = window.driver.current_url
    with browser(tmp_path) as other:
        other.open(address)
        assert other.value("Seed") == "23"
        assert other.value("Requests") == "150"
        assert other.value("max_num_seqs") == "77"
        assert "Goodput" not in other.text  # of another session: nothing ran here yet
        other.type("Seed", "99")
        other.click("Run")
        done(other)
        assert "s=" in other.driver.current_url
        assert other.driver.current_url != address
    assert window.value("Seed") == "23"


def test_a_long_run_is_cancelled_and_the_next_one_works(window, server):
    """streamlit#10578: a change during a run is for the next one; cancelling leaves nothing half done."""
    go(window, server, LONG)
    window.click("Run")
    window.reads("of 150,000 requests")
    first = window.text.split(" of 150,000 requests")[0].split()[-1]
    window.wait(
        lambda: window.text.split(" of 150,000 requests")[0].split()[-1] != first, "progress"
    )
    window.type("Seed", "5")
    window.reads("The inputs have changed")
    now = window.text.split(" of 150,000 requests")[0].split()[-1]
    window.wait(
        lambda: window.text.split(" of 150,000 requests")[0].split()[-1] != now, "it goes on"
    )
    window.click("Cancel")
    window.reads("Cancelled. There is no result.")
    assert "Goodput" not in window.text
    window.type("Requests", "100")
    window.click("Run")
    done(window)
    assert "Cancelled" not in window.text


def test_an_error_takes_the_place_of_old_results(window, server):
    """streamlit#9904: what is old never looks new."""
    go(window, server, small())
    window.click("Run")
    done(window)
    window.type("max_num_batched_tokens", "64")
    window.click("Run")
    window.reads("max_num_seqs (128), got 64")
    window.wait(
        lambda: "Goodput" not in window.text and not window.charts(), "the old result to go"
    )


def test_what_is_on_the_screen_is_what_is_asked_for(window, server):
    """No run of the last number that was allowed."""
    go(window, server, small())
    window.click("Run")
    done(window)
    for label, usual in (("Replicas", "2"), ("max_num_batched_tokens", "8192")):
        window.type(label, "0")
        window.reads("The inputs have changed")
        window.click("Run")
        window.reads("1, got 0")
        assert window.value(label) == "0"
        window.wait(lambda: "Goodput" not in window.text, "the old result to go")
        window.type(label, usual)
        window.click("Run")
        done(window)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traffic": [{"trace": "/etc/passwd"}]}, "no trace uploaded in this session"),
        ({"policy": {"tiers": [{"name": "A", "order": "os.system"}]}}, "no built-in order"),
        (
            {"hardware": {"gpu": "H100", "step_time": "/etc/passwd"}},
            "would be a file of the server",
        ),
    ],
)
def test_hostile_links_are_refused_in_the_page(window, server, change, message):
    go(window, server, DEFAULT | change)
    window.click("Run")
    window.reads(message)
    assert "root:" not in window.text
    window.open(f"{server}/?s=nonsense")
    window.reads("this link holds no configuration")


def test_compare_finds_and_exports(window, server):
    go(window, server, small(engine={**DEFAULT["engine"], "max_num_seqs": 8}))
    window.reads("Configuration")
    window.click("Compare", "a span, a")
    window.reads("B against A under the same seeds")
    window.click("Compare", "button")
    window.reads("all intervals hold together with 98 %")
    assert "engine.max_num_seqs=256: ONLINE TTFT p99 -" in window.text
    assert ": adopt" in window.text
    window.click("Open B in What if")
    window.reads("Change something, run it")
    assert window.value("max_num_seqs") == "256"
    assert not window.complaints()


def test_pareto_opens_a_point_by_a_click(window, server):
    go(window, server, small())
    window.reads("Configuration")
    window.click("Pareto", "a span, a")
    window.type("What may change, one key=values a line", "engine.max_num_seqs=8,128")
    window.reads("Goals, the most important first")
    window.click("Search")
    window.reads("Take engine.max_num_seqs=128")
    window.reads("Each under 2 seeds")
    window.reads("rest on 5 other seeds")
    marks = window.wait(lambda: window.all(".js-plotly-plot .points path.point"), "marks")
    window.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", marks[0])
    from selenium.webdriver import ActionChains

    ActionChains(window.driver).move_to_element(marks[0]).click().perform()
    window.wait(lambda: "Or choose one by name" not in window.text, "the mark to be chosen")
    window.click("Download as scenario (YAML)")
    chosen = load_scenario(yaml.safe_load(downloaded(window, ".yaml")))
    assert chosen.engine.max_num_seqs in (8, 128)
    window.click("Open in What if")
    window.reads("Change something, run it")
    assert window.value("max_num_seqs") == str(chosen.engine.max_num_seqs)
    assert not window.complaints()


def test_waits_fidelity_and_an_upload(window, server, tmp_path):
    go(window, server, small())
    window.type("Seed", "31")
    window.click("Batching wait", "a span, a")
    window.click("Explore")
    window.reads("Rests on 5 seeds of this traffic")
    window.reads("Throughput against latency, means of 5 seeds")
    window.wait(lambda: window.charts() >= 2, "two charts")
    window.click("Fidelity", "a span, a")
    window.reads("Step times of meta-llama/Llama-3.1-8B on H100")
    window.reads("played through the twin, the worst first")
    window.click("Upload", "a span, a")
    good = azure_csv(tmp_path, [(f"2023-11-16 18:00:{i:02}", 50, 5) for i in range(40)], "good.csv")
    window.upload(Path(good), "Check it")
    window.click("Check it")
    window.reads("40 requests, nothing malformed")
    assert str(tmp_path) not in window.text
    window.click("What if", "a span, a")
    window.wait(lambda: window.value("Seed") == "31", "what was typed before")
    window.click(
        "YAML: the whole scenario, to read, to paste, to upload", "summary, summary p, summary span"
    )
    source = {"traffic": [{"trace": "good.csv", "requests": 40}], "objectives": {}}
    text = yaml.safe_dump(DEFAULT | source)
    window.type("Paste a scenario here to begin from it", text)
    window.click("Begin from this scenario")
    window.wait(lambda: window.value("Requests at most") == "40", "the trace in the inputs")
    window.click("Run")
    done(window)
    assert not window.complaints()


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1400, True)])
def test_narrow_and_dark(server, tmp_path, width, dark):
    with browser(tmp_path, width, 1400, dark) as window:
        go(window, server, small())
        window.click("Run")
        done(window)
        page = window.driver.execute_script(
            "return [document.documentElement.scrollWidth, innerWidth, "
            "getComputedStyle(document.querySelector('.stApp')).backgroundColor]"
        )
        assert page[0] <= page[1]
        shade = sum(int(part) for part in page[2].strip("rgba()").split(",")[:3])
        assert (shade < 200) == dark
        wide = window.driver.execute_script(
            "return [...document.querySelectorAll('.main-svg')].filter("
            "s => s.getBoundingClientRect().right > innerWidth + 1).length"
        )
        assert wide == 0
        assert not window.complaints()


def processes():
    """(pid, pid of the parent, command line) of all that run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if words:
            yield int(folder.name), parent, words


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc, as on Linux")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_nothing_is_left_whatever_ends_it(tmp_path, name):
    """Neither the server nor the processes that do the runs, one of which is in the middle of one."""
    with (
        dashboard_server(tmp_path / "log", getattr(signal, name)) as url,
        browser(tmp_path) as window,
    ):
        go(window, url, LONG)
        window.click("Run")
        window.reads("Cancel")
        port = url.rsplit(":", 1)[1].encode()
        servers = {pid for pid, _, words in processes() if port in words and b"dashboard" in words}
        assert len(servers) == 1
        workers = {pid for pid, parent, _ in processes() if parent in servers}
        assert len(workers) == 2
    until = time.monotonic() + 10
    while (servers | workers) & {pid for pid, _, _ in processes()}:
        assert time.monotonic() < until
        time.sleep(0.05)
