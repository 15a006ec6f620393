"""What an engine expects a new request to wait, beside what it waited."""

from array import array

import pytest

from tests.runs import document, flat_profile, run, stream
from twin.clock import PS, to_seconds
from twin.metrics.estimated_wait import ENOUGH, WINDOW, WaitEstimate, wait_errors
from twin.metrics.records import RequestRecord
from twin.report.json_summary import summarize

STEP = PS // 100
ROOMY = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "num_gpu_blocks_override": 4000}


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_without_a_queue_it_is_the_wait_for_the_next_step_to_the_picosecond(tmp_path, asynchronous):
    source = document(
        traffic=[stream(100, 20, requests=60)],
        engine=ROOMY,
        hardware={"step_time": flat_profile(tmp_path, STEP)},
    )
    result = run(source, f"engine.async_scheduling={asynchronous}")
    waits = {r.first_scheduled_ps - r.arrival_ps for r in result.records}
    assert len(waits) > 20
    for record in result.records:
        assert record.estimated_wait_ps == record.first_scheduled_ps - record.arrival_ps


def test_behind_a_queue_it_is_near(tmp_path):
    """More than the engine can take, in the order of arrival: the wait grows, and the estimate with it."""
    source = document(
        traffic=[stream(100, 20, requests=800, arrivals={"process": "poisson", "rate": 60})]
    )
    found = summarize(run(source))["estimated_wait"]["ONLINE"]
    assert found["samples"] == 800
    assert found["wait_mean_s"] > 0.5
    assert found["mean_abs_s"] < 0.15 * found["wait_mean_s"]
    assert abs(found["bias_s"]) < found["mean_abs_s"]
    assert found["p10_s"] < found["p50_s"] < found["p90_s"]


def test_a_hold_is_expected_to_its_end():
    hold = "policy={tiers: [{name: '*', batch_size: 8, max_wait: 0.25}]}"
    result = run(
        document(traffic=[stream(requests=10, arrivals={"process": "constant", "rate": 2})]), hold
    )
    for record in result.records:
        assert record.estimated_wait_ps >= PS // 4
        error_ps = record.estimated_wait_ps - (record.first_scheduled_ps - record.arrival_ps)
        assert abs(error_ps) < 3 * STEP


def test_a_request_that_reaches_no_replica_has_none():
    trace = stream(requests=4) | {"prompt_tokens": {"uniform": [1500, 3000]}}
    records = run(document(traffic=[trace])).records
    refused = [r for r in records if r.outcome == "refused"]
    assert refused
    assert {r.estimated_wait_ps for r in refused} == {None}


# --- the estimate by itself ---------------------------------------------------------------------


def served(number, every_ps, tokens=100, tiers=("a",), ranks=None):
    """An estimate after `number` starts, one each `every_ps`, with somebody always waiting."""
    waits = WaitEstimate(ranks or {}, {})
    for i in range(number):
        waits.start(tiers[i % len(tiers)], tokens, i * every_ps)
        waits.planned(True, i * every_ps)
    return waits, (number - 1) * every_ps


@pytest.mark.parametrize("number", [ENOUGH, WINDOW, 3 * WINDOW])
def test_tokens_ahead_take_the_time_they_took_lately(number):
    waits, now_ps = served(number, STEP)
    for _ in range(5):
        waits.wait("a", 100)
    found = waits.estimate("a", 100, False, True, lag_ps=7, now_ps=now_ps)
    assert found == 6 * STEP + 7


def test_a_rate_is_kept_when_the_queue_empties():
    waits, now_ps = served(WINDOW, STEP)
    waits.planned(False, now_ps)
    later = now_ps + 100 * PS
    waits.start("a", 100, later)
    waits.planned(True, later)
    assert waits.estimate("a", 300, True, False, 0, later) == 3 * STEP


def test_what_comes_later_in_the_order_does_not_stand_in_the_way():
    waits, now_ps = served(WINDOW, STEP, tiers=("high", "low"), ranks={"high": 0, "low": 1})
    waits.wait("low", 1000)
    assert waits.estimate("high", 100, True, True, 0, now_ps) == STEP
    # Half of the starts were of the tier before it.
    assert waits.estimate("low", 100, True, True, 0, now_ps) == pytest.approx(22 * STEP, rel=0.05)
    waits.leave("low", 1000)
    assert waits.estimate("low", 100, True, True, 0, now_ps) == pytest.approx(2 * STEP, rel=0.05)


def test_nothing_known_is_no_wait():
    waits = WaitEstimate({}, {"a": 5 * STEP})
    assert waits.estimate("b", 100, True, False, 3, 0) == 3
    assert waits.estimate("a", 100, True, False, 3, 0) == 5 * STEP + 3


def test_errors_by_hand():
    def record(estimated, start):
        return RequestRecord(
            0, "a", "t", None, 0, 0, 0, start, None, None, 1, 0, "completed", "stop", itl_ps=array("q"),
            estimated_wait_ps=estimated,
        )  # fmt: skip

    records = [record(e * PS, s * PS) for e, s in ((1, 2), (4, 2), (3, 3), (0, 4))]
    found = wait_errors([*records, record(None, PS), record(PS, None)])
    assert (found.samples, found.mean_abs_s, found.bias_s) == (4, 7 / 4, -3 / 4)
    assert (found.p50_s, found.wait_mean_s) == (-0.5, 11 / 4)
    assert found.p10_s == pytest.approx(-3.1)
    assert found.p90_s == pytest.approx(1.4)
    assert wait_errors([]).mean_abs_s is None
    assert to_seconds(PS) == 1
