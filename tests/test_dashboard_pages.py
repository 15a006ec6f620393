"""The page What if with documents of any kind: as a link, pasted, run. The page's own code, without a browser."""

import copy
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest

from dashboard.jobs import Jobs
from dashboard.links import encode
from dashboard.state import DEFAULT, jobs
from tests.dashboard_server import ROOT
from twin.errors import InputError
from twin.scenario import load_scenario

SMALL = DEFAULT | {"traffic": [{**DEFAULT["traffic"][0], "requests": 20}]}


@pytest.fixture(scope="module", autouse=True)
def _workers():
    yield
    jobs().close()
    jobs.clear()


def changed(path, value, source=SMALL):
    """The scenario with one value replaced, or taken away (None)."""
    document = copy.deepcopy(source)
    here = document
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        here = here[step]
    if value is None:
        del here[last]
    else:
        here[last] = value
    return document


def opened(document):
    """The page as a link to the document shows it."""
    page = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=60)
    page.query_params["s"] = encode(document)
    return page.run()


def ran(page):
    """The page once a run that it asked for is over."""
    return settled(page.button(key="run").click().run())


def settled(page):
    """The page once no job goes on."""
    end = time.monotonic() + 120
    while not all(job.is_over for job in jobs()._jobs.values()):
        assert time.monotonic() < end
        for watched in list(jobs()._jobs):
            jobs().look(watched, page.session_state["session"])
        time.sleep(0.02)
    return page.run()


def told(page):
    """What the page calls wrong, as it reads. An exception box is no answer."""
    assert not page.exception, page.exception[0].message
    return [error.value.replace("\\", "") for error in page.error]


DEEP = "x"
for _ in range(500):
    DEEP = [DEEP]

HOSTILE = [
    ("run.seed", -5, "run.seed: must be >= 0"),
    ("run.seed", 10**30, "run.seed: must be"),
    ("run.seed", True, "run.seed: must be a whole number"),
    ("run", [1], "run: must be a mapping"),
    ("traffic.0.arrivals.rate", 0, "traffic.0.arrivals.rate: must be >="),
    ("traffic.0.arrivals.rate", float("nan"), "traffic.0.arrivals.rate: must be a finite number"),
    ("traffic.0.arrivals", [1], "traffic.0.arrivals: must be a mapping"),
    ("traffic.0.requests", 300_000, "traffic has 300,000 requests; the page runs at most 200,000"),
    ("traffic.0.requests", "many", "traffic.0.requests: must be a whole number"),
    ("traffic.0.tiers", {"ONLINE": 7, "BATCH": 3}, "traffic.0.tiers.ONLINE: must be <= 1"),
    ("traffic.0.tiers", {"ONLINE": "a", "BATCH": "b"}, "traffic.0.tiers.ONLINE: must be a number"),
    ("traffic.0.tiers", ["ONLINE"], "traffic.0.tiers: must be a mapping"),
    (
        "traffic.0.prompt_tokens",
        {"uniform": ["a", "b"]},
        "traffic.0.prompt_tokens.uniform.0: must be",
    ),
    ("traffic.0.prompt_tokens", {"uniform": [5]}, "traffic.0.prompt_tokens.uniform: must have 2"),
    ("traffic.0.prompt_tokens", 7, "write {fixed: 7}"),
    ("traffic.0", {"preset": {"a": 1}}, "traffic.0.preset: must be text"),
    ("traffic.0", {"preset": "azure-2023-conv", "rate": "x"}, "traffic.0.rate: must be a number"),
    ("traffic.0", {"preset": "azure-2023-conv", "rate": 1e9}, "traffic.0.rate: must be <= 1000000"),
    (
        "traffic.0",
        {"trace": "x.csv", "speedup": -3},
        "traffic.0.trace: 'x.csv' is no trace uploaded",
    ),
    (
        "traffic.0",
        {"trace": ["/etc/passwd"]},
        "traffic.0.trace: ['/etc/passwd'] is no trace uploaded",
    ),
    ("traffic.0", 5, "traffic.0: must be a mapping"),
    ("traffic", "/etc/passwd", "traffic: '/etc/passwd' would be a file of the server"),
    ("traffic", [], "traffic: must have 1"),
    ("objectives.ONLINE.ttft_p99", "x", "objectives.ONLINE.ttft_p99: must be a number"),
    ("objectives.ONLINE.ttft_p99", -1, "objectives.ONLINE.ttft_p99: must be > 0"),
    (
        "objectives.ONLINE.ttft_p99",
        float("inf"),
        "objectives.ONLINE.ttft_p99: must be a finite number",
    ),
    ("objectives", {"NIGHT": {"ttft_p99": 1.0}}, "objectives.NIGHT"),
    ("objectives", [1], "objectives: must be a mapping"),
    ("cluster.hpa", {"minReplicas": 100, "maxReplicas": 200}, "cluster.hpa"),
    ("cluster.hpa", {"minReplicas": 1, "maxReplicas": 4}, "cluster.hpa"),
    ("cluster.hpa", {"minReplicas": "x"}, "cluster.hpa"),
    ("cluster.hpa", "/etc/passwd", "cluster.hpa: '/etc/passwd' would be a file of the server"),
    ("cluster.hpa", [[[1]]], "cluster.hpa"),
    ("cluster.router", [1], "cluster.router: must be text"),
    ("cluster.replicas", 100, "cluster: 100 replicas; the page runs at most 64"),
    ("cluster", "x", "cluster: must be a mapping"),
    ("engine.max_num_seqs", 64.5, "engine.max_num_seqs: must be a whole number"),
    ("engine.max_num_seqs", 10**9, "max_num_batched_tokens"),
    ("engine.enable_prefix_caching", "no", "engine.enable_prefix_caching: must be true or false"),
    ("engine", "x", "engine: must be a mapping"),
    ("hardware.gpu", {"a": 1}, "hardware.gpu.name: is missing"),
    ("model", [1], "model: [1] is not in the catalogue"),
    ("policy", {"tiers": [{"name": "A", "order": "os.system"}]}, "no built-in order"),
    ("policy", 7, "policy"),
    ("name", 5, "name: must be text"),
    ("name", "\ud800", "name: 'ud800' is no text in Unicode"),
    ("name", DEEP, "is nested more than 30 deep"),
]


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE)
def test_a_link_to_no_scenario_is_answered_in_the_page(path, value, message):
    """With one sentence and the place, when it is opened or, what only loading shows, when it is run."""
    document = changed(path, value)
    try:
        page = opened(document)
    except UnicodeEncodeError:  # encode() makes no such link; a stranger can
        page = opened_as_written(document)
    first = told(page)
    if not first:
        first = told(ran(page))
    assert any(message in line for line in first), first
    assert not page.success
    if path != "name":
        assert repr(page.session_state["edited"]) == repr(document)


def opened_as_written(document):
    """A link that escapes what is no text, as JSON can."""
    import base64
    import json
    import zlib

    page = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=60)
    packed = zlib.compress(json.dumps(document).encode())
    page.query_params["s"] = base64.urlsafe_b64encode(packed).decode().rstrip("=")
    return page.run()


VALID = [
    changed("engine", None),
    changed("cluster", None),
    changed("run", None),
    changed("hardware.dtype", None),
    changed("engine.max_num_seqs", 8192),
    changed("run.seed", 10**12),
    changed("traffic.0.arrivals.rate", 1e6),
    changed("traffic.0.arrivals.rate", 40),
    changed("traffic.0.tiers", {"ONLINE": 0.995, "BATCH": 0.005}),
    changed("traffic.0.tiers", {"ONLINE": 0.334, "BATCH": 0.333, "OFFLINE": 0.333}),
    changed("traffic.0.prompt_tokens", {"fixed": 7}),
    changed("traffic.0", {"preset": "azure-2023-conv", "requests": 20, "tiers": {"ONLINE": 0.5, "BATCH": 0.5}}),
    changed("objectives.ONLINE.ttft_p99", 5000.0),
    changed("objectives.ONLINE.ttft_p99", 0.0004),
    changed("policy", {"preset": "tiered"}),
    changed("name", "<img src=x onerror=alert(1)> $x^2$ :red[a]\n/../x"),
    changed(
        "cluster", {"replicas": 1, "hpa": {"minReplicas": 0, "maxReplicas": 60, "metrics": [{"type": "Pods", "pods": {
            "metric": {"name": "vllm:num_requests_waiting"},
            "target": {"type": "AverageValue", "averageValue": "2500m"}}}]}},
    ),
]  # fmt: skip


@pytest.mark.parametrize("document", VALID)
def test_what_runs_is_what_the_link_says(document):
    """Inputs that nobody touches leave it as it is, whatever they can show of it."""
    page = opened(document)
    assert not told(page)
    assert page.session_state["edited"] == document
    assert yaml.safe_load(page.code[0].value) == document
    page = ran(page)
    problem = refused(document)
    assert (problem in told(page)[0]) if problem else not told(page)
    if not problem:
        (entry,) = page.session_state["history"].values()
        assert load_scenario(entry["document"]) == load_scenario(document)


def refused(document):
    """What `twin run` has against it, without the place; empty for nothing."""
    try:
        load_scenario(document)
    except InputError as error:
        return str(error).partition(": ")[2]
    return ""


KEYS = st.sampled_from(["rate", "uniform", "metrics", "order", "process", "ONLINE"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["tiered", "/etc/passwd", "uniform", "H100", 10**400, -1, "2500m"]),
    lambda below: st.lists(below, max_size=3)
    | st.dictionaries(KEYS | st.text(max_size=3), below, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value, path=()):
    """Every path of a document."""
    yield path
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in pairs:
        yield from places(item, (*path, key))


PLACES = [".".join(map(str, path)) for path in places(SMALL) if path]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PLACES), ANYTHING)
def test_any_document_is_answered(path, value):
    """Opened as a link and run: a result, or a sentence. Never an exception, and never another scenario."""
    document = changed(path, value)
    page = opened(document)
    if not told(page) or "nested" not in told(page)[0]:
        assert repr(page.session_state["edited"]) == repr(document)
    page = ran(page)
    assert told(page) or page.success
    assert not any("an error of the dashboard" in line for line in told(page)), (
        document,
        told(page),
    )


def one_page(name):
    """A page alone, as the address of it opens it."""
    import importlib

    from dashboard.state import base

    base()
    importlib.import_module(f"dashboard.page_{name}").page()


@pytest.mark.parametrize("name", ["compare", "pareto", "waits", "fidelity", "upload"])
@pytest.mark.parametrize(
    "document", [{}, changed("name", DEEP), changed("traffic", "/etc/passwd"), changed("engine", 7), SMALL]
)  # fmt: skip
def test_other_pages_open_with_any_link(name, document):
    page = AppTest.from_function(one_page, default_timeout=60, args=(name,))
    page.query_params["s"] = encode(document)
    page.run()
    told(page)
    if name == "fidelity":
        page = settled(page)
        assert bool(told(page)) == (document != SMALL and document.get("name") != DEEP)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "scenario: no mapping"),
        ("[1,2]", "scenario: no mapping"),
        ("a:\t- b", "scenario line 1: not readable as YAML"),
        ("a: 1\na: 2", "scenario line 2: a: written twice"),
        ("a: &a [*a]", "scenario: nested too deeply"),
        ("!!python/object/apply:os.system ['id']", "the tag"),
        ("name: 2020-01-01\nmodel: meta-llama/Llama-3.1-8B", "hardware: is missing"),
        ("1: 2\nmodel: meta-llama/Llama-3.1-8B", "1: unknown key"),
        ("run: {seed: -1}", "scenario line 1: run.seed: must be >= 0"),
        ("name: x\npolicy:\n  tiers: [{name: A, order: os.system}]", "no built-in order"),
        (
            "name: x\ntraffic: /etc/passwd",
            "scenario line 2: traffic: '/etc/passwd' would be a file",
        ),
        ('name: "\\ud800"', "no text in Unicode"),
        ("[" * 3000, "scenario"),
        ("a: " + "[" * 100 + "]" * 100, "nested"),
        ("x" * 300_000, "more than 200,000 bytes"),
        ("a: \x00", "scenario"),
    ],
)
def test_text_that_is_no_scenario_is_answered_and_changes_nothing(text, message):
    page = opened(SMALL)
    page.text_area[0].set_value(text).run()
    next(
        button for button in page.button if button.label == "Begin from this scenario"
    ).click().run()
    assert any(message in line for line in told(page)), told(page)
    assert page.session_state["edited"] == SMALL


def test_a_scenario_can_be_pasted():
    page = opened(SMALL)
    wanted = changed("run.seed", 9, changed("engine", None))
    page.text_area[0].set_value(yaml.safe_dump(wanted)).run()
    next(
        button for button in page.button if button.label == "Begin from this scenario"
    ).click().run()
    assert not told(page)
    assert page.session_state["edited"] == wanted


def test_an_input_changes_its_own_value_and_nothing_else():
    page = opened(changed("engine", None))
    fields = {
        "Requests per second": ("traffic", 0, "arrivals", "rate"),
        "Requests": ("traffic", 0, "requests"),
        "Seed": ("run", "seed"),
        "GPUs a replica": ("hardware", "tensor_parallel_size"),
        "max_num_seqs": ("engine", "max_num_seqs"),
        "max_num_batched_tokens": ("engine", "max_num_batched_tokens"),
        "Replicas": ("cluster", "replicas"),
        "ONLINE ttft p99": ("objectives", "ONLINE", "ttft_p99"),
        "BATCH e2e p99": ("objectives", "BATCH", "e2e_p99"),
    }
    wanted = changed("engine", None)
    for number, (label, path) in enumerate(fields.items(), 3):
        field = next(one for one in page.number_input if one.label == label)
        field.set_value(number).run()
        here = wanted
        for step in path[:-1]:
            here = here[step] if isinstance(here, list) else here.setdefault(step, {})
        here[path[-1]] = number
        assert page.session_state["edited"] == wanted
    # Emptied again, it has its default; 0 is no objective.
    next(one for one in page.number_input if one.label == "max_num_seqs").set_value(None).run()
    del wanted["engine"]["max_num_seqs"]
    next(one for one in page.number_input if one.label == "BATCH e2e p99").set_value(0.0).run()
    del wanted["objectives"]["BATCH"]
    assert page.session_state["edited"] == wanted
    page.toggle[0].set_value(False).run()
    wanted["engine"]["enable_prefix_caching"] = False
    assert page.session_state["edited"] == wanted


def test_shares_are_cut_with_a_message_and_objectives_go_with_their_tier():
    page = opened(SMALL)
    batch, offline = (
        next(one for one in page.number_input if one.label == f"{tier}, %") for tier in ("BATCH", "OFFLINE")
    )  # fmt: skip
    assert (batch.value, offline.value) == (20.0, 10.0)
    batch.set_value(95.5).run()
    assert "OFFLINE is taken as 4.5 %" in page.warning[0].value
    assert page.session_state["edited"]["traffic"][0]["tiers"] == {"BATCH": 0.955, "OFFLINE": 0.045}
    assert "objectives of ONLINE are left out" in page.info[0].value
    assert set(page.session_state["edited"]["objectives"]) == {"BATCH"}
    next(one for one in page.number_input if one.label == "BATCH, %").set_value(20.0).run()
    assert page.session_state["edited"] == SMALL


def test_views_ask_for_nothing(monkeypatch):
    """streamlit#5827: another view of a result begins no job and asks for none."""
    page = ran(opened(SMALL))
    assert page.success
    monkeypatch.setattr(Jobs, "ask", lambda *_: pytest.fail("it asked"))
    for name, shown in (
        ("Queue and replicas", "Requests that wait"), ("Tables", "attained is the share"), ("Latency by tier", "curve"),
    ):  # fmt: skip
        (view,) = (one for one in page.get("button_group") if one.label == "View")
        view.set_value(name).run()
        assert not told(page)
        assert any(shown in caption.value for caption in page.caption)


def test_what_is_typed_is_what_is_judged():
    """No input keeps an old value behind a new one on the screen."""
    for label, message in (
        ("Requests", "traffic.0.requests: must be >= 1, got 0"),
        ("Replicas", "cluster.replicas"),
    ):
        page = opened(SMALL)
        next(one for one in page.number_input if one.label == label).set_value(0).run()
        assert any(message in line for line in told(ran(page)))
        assert not page.success
