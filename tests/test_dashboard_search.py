"""What a page lets a search try: every value, both ends of a range, every combination is looked at like a scenario."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import twin.whatif.runs
from dashboard.limits import Limits
from dashboard.safety import Refused
from dashboard.work import load, search, values_of
from tests.runs import azure_csv, document, stream
from twin.errors import InputError
from twin.scenario_yaml import apply_override
from twin.whatif.axes import Axis, Range, override

LIMITS = Limits()
TIERS = {"tiers": [{"name": "ONLINE"}]}
SMALL = document(
    traffic=[stream(requests=20)], policy=TIERS, objectives={"ONLINE": {"e2e_p99": 9.0}}
)
PLAIN = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=12)
NESTED = st.recursive(
    PLAIN, lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3)
)  # fmt: skip


@given(NESTED)
@example("A, order: os.system}, {name: B")
@example("x ; policy=tiered")
@example("true")
@example("1e3")
@example("...")
@example("a: b")
@example("\u2028\U0001f600\t\x85")
def test_a_change_is_read_back_as_it_was_meant(value):
    """Nothing in a text can become a key of its own."""
    changed = {}
    apply_override(changed, override("a", [value, {"b": value}]))
    assert changed == {"a": [value, {"b": value}]}


def searched(*vary, source=SMALL, uploads=None, trials=4):
    payload = {
        "document": source, "uploads": uploads or {}, "vary": vary, "goals": ["all.goodput"], "seeds": 1,
        "trials": trials,
    }  # fmt: skip
    return search(payload, LIMITS, lambda *_: None)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("hardware.step_time=[/proc/self/environ]", "would be a file of the server"),
        ("hardware.step_time=roofline,/dev/stdin", "would be a file of the server"),
        ("cluster.hpa=[/proc/self/status]", "would be a file of the server"),
        ("cluster.keda=[/usr/share/zoneinfo/tzdata.zi]", "would be a file of the server"),
        ("cluster={keda: /etc/passwd},{replicas: 2}", "would be a file of the server"),
        ("cluster.prediction.history=[/etc/passwd]", "would be a file of the server"),
        ("traffic=[/etc/passwd]", "would be a file of the server"),
        ("traffic.0.trace=[/etc/passwd]", "no trace uploaded"),
        ("traffic.0.lengths_from=[../x.csv]", "no trace uploaded"),
        ("model=[meta-llama/Llama-3.1-8B, /etc]", "not in the catalogue"),
        ("policy.tiers.0.order=fcfs,os.system", "no built-in order"),
        ("policy=[tiered, {tiers: [{name: A, order: os.system}]}]", "no built-in order"),
        ('policy.tiers.0.name=["A, order: os.system}, {name: B", x]', None),
        ("cluster.replicas=1,65", "at most 64"),
        ("cluster.replicas=100:200", "at most 64"),
        ("cluster.replicas=1:200", "at most 64"),
        ("traffic.0.requests=100:300000", "at most 200,000"),
        ("traffic.0.requests=300000:100000000:log", "at most 200,000"),
        ("engine.num_gpu_blocks_override=[6000000]", "KV blocks"),
        ("engine.max_num_seqs=1:300:1", "at most 200 of a key"),
    ],
)
def test_no_value_is_less_admitted_than_a_scenario(vary, message, monkeypatch):
    monkeypatch.setattr(twin.whatif.runs, "simulate", lambda *_: pytest.fail("it was run"))
    if message is None:
        with pytest.raises(InputError, match=r"could run|can run"):
            searched(vary)
        return
    with pytest.raises(Refused, match=message):
        searched(vary)
    with pytest.raises(Refused, match=message):
        searched("engine.max_num_seqs=8,16", vary)


def test_changes_that_are_harmless_alone_are_looked_at_together(monkeypatch):
    """The second cannot be made without the first, and would name code; together they have too many requests."""
    monkeypatch.setattr(twin.whatif.runs, "simulate", lambda *_: pytest.fail("it was run"))
    both = "policy.tiers=[{name: ONLINE}, {name: BATCH}]", "policy.tiers.1.order=os.system"
    with pytest.raises(Refused, match="no built-in order"):
        load({"document": SMALL, "uploads": {}}, LIMITS, both)
    with pytest.raises(InputError, match="none of its values can run"):
        searched(
            "policy.tiers=[[{name: ONLINE}, {name: BATCH}]]", "policy.tiers.1.order=[os.system]"
        )
    source = SMALL | {"traffic": [stream(requests=20), stream(requests=20)]}
    with pytest.raises(InputError, match=r"could run.*at most 200,000"):
        searched("traffic.0.requests=[150000]", "traffic.1.requests=[150000]", source=source)


def test_what_may_run_is_run_and_uploads_go_by_name(tmp_path):
    trace = azure_csv(tmp_path, [(f"2023-11-16 18:00:{i:02}", 10, 5) for i in range(20)])
    found = searched(
        "traffic.0=[{trace: mine.csv}, {trace: mine.csv, speedup: 2}]", "engine.max_num_seqs=4,64",
        uploads={"mine.csv": trace},
    )  # fmt: skip
    assert len(found["documents"]) == 4
    assert found["seeds"] == [SMALL.get("run", {}).get("seed", 1)]
    for entry in found["documents"].values():
        assert entry["traffic"][0]["trace"] == "mine.csv"
        assert str(tmp_path) not in str(entry)


def test_values_of_an_axis():
    assert values_of(Axis("a", (1, 2)), LIMITS) == (1, 2)
    assert values_of(Range("a", 1.0, 9.0, False, True), LIMITS) == (1, 9)
    assert values_of(Range("a", 0.5, 9.0, True, False), LIMITS) == (0.5, 9.0)
