"""Figures of a run against their definitions in docs/metrics.md, computed the slow way."""

from array import array
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.clock import PS, to_ps
from twin.metrics.percentiles import PERCENTS, percentile, stats
from twin.metrics.records import RequestRecord
from twin.metrics.summary import (
    LATENCIES,
    OUTCOMES,
    parse_objective,
    summarize_tiers,
    total_counts,
)

TIERS = ("ONLINE", "BATCH", "OFFLINE")
MS = 10**9
durations = st.integers(min_value=0, max_value=10**4 * PS)


@st.composite
def records(draw, index=0):
    """A request at any stage of its life: refused, waiting, prefilling, decoding, done."""
    arrival = draw(st.integers(min_value=0, max_value=100 * PS))
    outcome = draw(st.sampled_from(OUTCOMES))
    stage = 3 if outcome == "completed" else draw(st.integers(0, 2)) if outcome != "refused" else 0
    scheduled = arrival + draw(durations) if stage >= 1 else None
    first = scheduled + draw(durations) if stage >= 2 else None
    gaps = array("q", draw(st.lists(durations, max_size=5)) if first is not None else ())
    last = first + sum(gaps) if first is not None else None
    if outcome == "completed":
        finish = last
    elif outcome == "unfinished":
        finish = None
    else:
        finish = max(arrival, last or scheduled or arrival)
    return RequestRecord(
        index=index, tier=draw(st.sampled_from(TIERS)), tenant="default", session=None, stream=0,
        replica=None if outcome == "refused" else 0, arrival_ps=arrival,
        first_scheduled_ps=scheduled, first_token_ps=first, finish_ps=finish, prompt_tokens=8,
        output_tokens=0 if first is None else 1 + len(gaps), outcome=outcome, reason="",
        itl_ps=gaps, attempts=draw(st.integers(1, 3)),
    )  # fmt: skip


runs = st.lists(records(), max_size=30)
limits = st.floats(min_value=1e-3, max_value=2e4)
objectives = st.dictionaries(
    st.sampled_from(TIERS),
    st.dictionaries(
        st.builds("{}_{}".format, st.sampled_from(LATENCIES), st.sampled_from(["mean", "p99"])),
        limits,
        max_size=3,
    ),
)


def samples(record):
    """Every duration of one request in exact picoseconds, as docs/metrics.md defines them."""
    r = record
    found = {}
    if r.first_token_ps is not None:
        found["ttft"] = [r.first_token_ps - r.arrival_ps]
        found["prefill"] = [r.first_token_ps - r.first_scheduled_ps]
        found["itl"] = list(r.itl_ps)
    if r.output_tokens > 1:
        found["tpot"] = [round_half_up(Fraction(sum(r.itl_ps), r.output_tokens - 1))]
    if r.first_scheduled_ps is not None:
        found["queue"] = [r.first_scheduled_ps - r.arrival_ps]
    if r.outcome == "completed":
        found["e2e"] = [r.finish_ps - r.arrival_ps]
    return {latency: found.get(latency, []) for latency in LATENCIES}


def round_half_up(x):
    return (x + Fraction(1, 2)).__floor__()


def is_good(record, tier_objectives):
    own = samples(record)
    return record.outcome == "completed" and all(
        value <= to_ps(limit)
        for name, limit in tier_objectives.items()
        for value in own[name.split("_")[0]]
    )


@given(st.lists(durations, min_size=1, max_size=200))
def test_percentiles_are_numpys_and_the_mean_is_exact(values):
    column = np.array(values, dtype=np.int64)
    found = stats(column)
    assert found.count == len(values)
    assert found.mean == sum(values) / (len(values) * PS)
    for q in PERCENTS:
        exact = getattr(found, f"p{q}")
        assert exact == percentile(column, q)
        assert exact == pytest.approx(float(np.percentile(column / PS, q)), rel=1e-12, abs=1e-15)


def test_a_sum_beyond_64_bits_does_not_overflow():
    day = 86_400 * PS
    assert stats(np.full(1000, day, dtype=np.int64)).mean == 86_400.0


def test_no_samples_give_no_figures():
    empty = stats(np.empty(0, dtype=np.int64))
    assert empty.count == 0
    assert set(empty.to_dict().values()) == {None}


@given(runs, objectives)
def test_every_request_is_counted_exactly_once(run, wanted):
    tiers = summarize_tiers(run, objectives=wanted, warmup_ps=0, end_ps=100 * PS)
    totals = total_counts(tiers.values())
    assert totals.offered == len(run) == sum(totals.to_dict().values()) - totals.offered
    assert totals.attempts == sum(record.attempts for record in run)
    for tier, summary in tiers.items():
        own = [record for record in run if record.tier == tier]
        assert summary.counts.to_dict() == {"offered": len(own)} | {
            outcome: sum(record.outcome == outcome for record in own) for outcome in OUTCOMES
        }


@given(runs, objectives, st.sampled_from([0, 30 * PS, 200 * PS]))
def test_figures_equal_their_definitions(run, wanted, warmup_ps):
    end_ps = 150 * PS
    tiers = summarize_tiers(run, objectives=wanted, warmup_ps=warmup_ps, end_ps=end_ps)
    for tier, summary in tiers.items():
        own = [r for r in run if r.tier == tier and r.arrival_ps >= warmup_ps]
        assert summary.measured == len(own)
        assert summary.counts.offered == sum(r.tier == tier for r in run)
        for latency in LATENCIES:
            values = [value for record in own for value in samples(record)[latency]]
            assert summary.latency[latency] == stats(np.array(values, dtype=np.int64))
        good = sum(is_good(record, wanted.get(tier, {})) for record in own)
        assert summary.good == good
        assert summary.attainment == (good / len(own) if own else None)
        span = end_ps - warmup_ps
        assert summary.goodput_rps == (good / (span / PS) if span > 0 else None)


@given(runs, objectives)
def test_objectives_are_judged_on_their_statistic(run, wanted):
    tiers = summarize_tiers(run, objectives=wanted, warmup_ps=0, end_ps=100 * PS)
    for tier, names in wanted.items():
        own = [record for record in run if record.tier == tier]
        for name, limit in names.items():
            latency, stat = parse_objective(name)
            found = tiers[tier].objectives[name]
            value = getattr(tiers[tier].latency[latency], stat)
            short = [r for r in own if r.outcome != "completed" and not samples(r)[latency]]
            assert (found.limit_s, found.value_s) == (limit, value)
            assert found.without == len(short)
            expected = value <= limit if value is not None else (False if short else None)
            assert found.met is expected


REQUEST = RequestRecord(
    index=0, tier="ONLINE", tenant="default", session=None, stream=0, replica=0, arrival_ps=0,
    first_scheduled_ps=5 * MS, first_token_ps=20 * MS, finish_ps=50 * MS, prompt_tokens=8,
    output_tokens=3, outcome="completed", reason="stop", itl_ps=array("q", [10 * MS, 20 * MS]),
)  # fmt: skip


def one(**changes):
    return replace(REQUEST, **changes)


def test_the_durations_of_one_request():
    [tier] = summarize_tiers([one()], objectives={}, warmup_ps=0, end_ps=2 * PS).values()
    means = {name: tier.latency[name].mean for name in LATENCIES}
    assert means == {
        "ttft": 0.02, "tpot": 0.015, "itl": 0.015, "e2e": 0.05, "queue": 0.005, "prefill": 0.015,
    }  # fmt: skip
    assert (tier.good, tier.goodput_rps, tier.attainment) == (1, 0.5, 1.0)


def test_a_limit_that_is_just_reached_is_met():
    wanted = {"ONLINE": {"ttft_p99": 0.02, "tpot_mean": 0.015, "e2e_p50": 0.05, "itl_p99": 0.02}}
    [tier] = summarize_tiers([one()], objectives=wanted, warmup_ps=0, end_ps=PS).values()
    assert tier.good == 1
    assert all(judged.met for judged in tier.objectives.values())


def test_without_objectives_every_completed_request_is_good():
    run = [one(), one(outcome="timed_out", first_token_ps=None, output_tokens=0, itl_ps=array("q"))]
    [tier] = summarize_tiers(run, objectives={}, warmup_ps=0, end_ps=PS).values()
    assert (tier.good, tier.attainment) == (1, 0.5)


def test_a_client_that_left_without_a_token_is_named_beside_the_statistic_it_is_missing_from():
    gone = one(outcome="timed_out", first_token_ps=None, output_tokens=0, itl_ps=array("q"))
    wanted = {"ONLINE": {"ttft_p99": 0.1}}
    [tier] = summarize_tiers([one(), gone], objectives=wanted, warmup_ps=0, end_ps=PS).values()
    judged = tier.objectives["ttft_p99"]
    assert (judged.met, judged.without, tier.attainment) == (True, 1, 0.5)
    [tier] = summarize_tiers([gone], objectives=wanted, warmup_ps=0, end_ps=PS).values()
    assert tier.objectives["ttft_p99"].met is False


def test_one_token_replies_meet_a_limit_on_the_gaps_they_do_not_have():
    single = one(output_tokens=1, itl_ps=array("q"), finish_ps=20 * MS)
    wanted = {"ONLINE": {"tpot_p99": 0.001, "itl_p99": 0.001}}
    [tier] = summarize_tiers([single], objectives=wanted, warmup_ps=0, end_ps=PS).values()
    assert tier.good == 1
    assert [judged.met for judged in tier.objectives.values()] == [None, None]


def test_an_itl_objective_asks_every_gap_of_a_good_request():
    wanted = {"ONLINE": {"itl_mean": 0.016}}
    [tier] = summarize_tiers([one()], objectives=wanted, warmup_ps=0, end_ps=PS).values()
    assert tier.objectives["itl_mean"].met
    assert tier.good == 0


def test_a_tier_with_an_objective_and_no_request_is_shown_unjudged():
    tiers = summarize_tiers([], objectives={"BATCH": {"e2e_p99": 1}}, warmup_ps=0, end_ps=PS)
    assert tiers["BATCH"].objectives["e2e_p99"].met is None
    assert tiers["BATCH"].attainment is None


def test_tiers_come_in_the_order_of_the_policy_and_then_by_name():
    run = [one(tier=tier) for tier in ("b", "OFFLINE", "a", "ONLINE")]
    tiers = summarize_tiers(
        run, objectives={}, warmup_ps=0, end_ps=PS, order=("ONLINE", "BATCH", "OFFLINE")
    )
    assert list(tiers) == ["ONLINE", "OFFLINE", "a", "b"]


@pytest.mark.parametrize("name", ["ttft", "ttft_p42", "p99", "latency_p99", "ttft_p99_", ""])
def test_unknown_objectives_are_refused_with_what_exists(name):
    with pytest.raises(ValueError, match="a metric out of ttft, tpot"):
        parse_objective(name)
