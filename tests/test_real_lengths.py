"""Replies of other lengths than planned are the first thing said: every later comparison is biased by them."""

import pytest

pytest.importorskip("plotly", reason="plotly is not installed in this environment")
pytest.importorskip("pyarrow", reason="pyarrow is not installed in this environment")

from real.measured import Measured
from real.measured_report import length_mismatch, lengths_told, render
from twin.clock import PS
from twin.metrics.records import RequestRecord


def request(index, prompt=10, reply=20, outcome="completed"):
    """10 and 20 tokens were planned."""
    record = RequestRecord(
        index, "ONLINE", "default", None, 0, 0, 0, None, PS, 2 * PS, prompt, reply, outcome, "length"
    )  # fmt: skip
    return Measured(record, 0, 20, (10, 20), 200)


def test_the_share_is_of_those_that_completed_prompts_and_replies_apart():
    """A server that ends 40 % of its replies early."""
    early = [request(i, reply=20 if i % 5 < 3 else 7) for i in range(100)]
    assert length_mismatch(early) == pytest.approx(0.4)
    assert lengths_told(early) == (
        "40.0 % of the completed requests had other lengths than planned (0.0 % of the prompts, 40.0 % of the replies)"
    )
    # Words of a chat are not tokens: that says nothing of the replies.
    chat = [request(i, prompt=14) for i in range(100)]
    assert "(100.0 % of the prompts, 0.0 % of the replies)" in lengths_told(chat)
    broken_off = [request(i, reply=3, outcome="aborted") for i in range(50)]
    assert lengths_told([*broken_off, request(50)]) is None
    assert lengths_told(broken_off) is None


def test_up_to_one_in_a_hundred_is_not_worth_the_first_line():
    assert lengths_told([request(i, reply=20 if i else 1) for i in range(100)]) is None
    assert lengths_told([request(i, reply=20 if i else 1) for i in range(99)]).startswith("1.0 %")


def test_what_makes_a_run_doubtful_stands_above_its_tables():
    measured = [request(i, reply=7) for i in range(4)]
    told = lengths_told(measured)
    counts = dict.fromkeys(
        ("offered", "completed", "refused", "timed_out", "aborted", "unfinished", "failed"), 4
    )
    summary = {"tiers": {}, "totals": counts, "warnings": [told, "late"]}
    text = render(summary, measured, {"lateness": None, "cpu_share": 0.0}).splitlines()
    assert text[:2] == [f"warning: {told}", "warning: late"]
