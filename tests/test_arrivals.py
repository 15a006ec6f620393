"""When requests come: gaps of the stated spread, rates that follow their curve, whole picoseconds, no drift."""

from itertools import islice, pairwise, takewhile
from math import cos, gamma, pi, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import document
from twin.clock import PS
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.workload.arrivals import (
    Batches,
    Bursts,
    Renewal,
    points_curve,
    sine_curve,
    steps_curve,
)
from twin.workload.gaps import Equal, Exponential, Gamma, Table, Weibull

TABLE = Table(((0.0, 0.0), (0.5, 2.0), (0.9, 2.0), (1.0, 60.0)))
GAPS = [Equal(), Exponential(), Gamma(0.4), Gamma(3.0), Weibull(0.4), Weibull(2.0), TABLE]


def instants(process, count, seed="x"):
    return list(islice(process.instants(Random(seed), Random(f"{seed} rate")), count))


def until(process, end_s, seed="x"):
    return list(takewhile(lambda t: t < end_s * PS, process.instants(Random(seed), Random("rate"))))


def mean_and_cv(values):
    mean = sum(values) / len(values)
    return mean, sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / mean


@pytest.mark.parametrize("gaps", GAPS, ids=str)
def test_gaps_have_the_stated_mean_and_spread(gaps):
    found = instants(Renewal(gaps, 4.0), 60_000)
    mean, cv = mean_and_cv([b - a for a, b in pairwise(found)])
    assert mean == pytest.approx(PS / 4, rel=0.03)
    assert cv == pytest.approx(gaps.cv, rel=0.05, abs=1e-9)
    assert all(type(t) is int for t in found[:100])
    assert found == sorted(found)


@pytest.mark.parametrize("cv", [0.05, 0.5, 1.0, 2.0, 5.0, 20.0])
def test_the_shape_of_a_weibull_has_its_cv(cv):
    draw = Weibull(cv).drawn(Random(1))
    scale, shape = draw.args
    mean, second = gamma(1 + 1 / shape), gamma(1 + 2 / shape)
    assert scale * mean == pytest.approx(1)
    assert sqrt(second / mean**2 - 1) == pytest.approx(cv)


def test_a_table_of_gaps_is_followed():
    draw = TABLE.drawn(Random(5))
    mean = 0.5 * 1 + 0.4 * 2 + 0.1 * 31
    drawn = sorted(draw() for _ in range(20_000))
    assert drawn[5000] == pytest.approx(1 / mean, rel=0.05)
    assert drawn[15_000] == pytest.approx(2 / mean)
    assert drawn[19_000] == pytest.approx(31 / mean, rel=0.1)


def test_cv_1_is_poisson():
    assert Gamma(1.0).drawn(Random(1)).args == (1.0, 1.0)
    exponential = Weibull(1.0).drawn(Random(1)).args
    assert exponential == pytest.approx((1.0, 1.0))


# --- rates --------------------------------------------------------------------------------


RATES = {
    "steps": steps_curve(((0, 2.0), (50 * PS, 9.0)), 100 * PS),
    "points": points_curve(((0, 1.0), (40 * PS, 8.0)), 100 * PS),
    "sine": sine_curve(5.0, 0.8, 100 * PS, 30 * PS),
}


def expected(name, t):
    """The rate at t seconds (within 0 to 100)."""
    if name == "steps":
        return 2.0 if t < 50 else 9.0
    if name == "points":
        return 1 + 7 * t / 40 if t < 40 else 8 - 7 * (t - 40) / 60
    return 5 * (1 + 0.8 * cos(2 * pi * (t - 30) / 100))


@pytest.mark.parametrize("gaps", [Equal(), Exponential(), Gamma(2.0), Weibull(0.5)], ids=str)
@pytest.mark.parametrize("name", RATES)
def test_a_rate_is_followed_within_its_period_and_again_in_each(name, gaps):
    periods = 60
    found = until(Renewal(gaps, RATES[name]), 100 * periods)
    for begin in range(0, 100, 10):
        here = sum(begin * PS <= t % (100 * PS) < (begin + 10) * PS for t in found)
        wanted = sum(expected(name, begin + (i + 0.5) / 10) for i in range(100)) / 10 * periods
        # Equal gaps come at the same places of every period.
        noise = 5 * gaps.cv * sqrt(wanted) + 2 if gaps.cv else periods
        assert here == pytest.approx(wanted, abs=noise)


def test_equal_gaps_on_a_ramp_are_where_the_integral_says():
    """The k-th arrival under r(t) = t / 10 is at sqrt(20 k)."""
    ramp = Renewal(Equal(), points_curve(((0, 0.0), (1000 * PS, 100.0)), None))
    found = instants(ramp, 2001)
    assert found[0] == 0
    for k in (1, 2, 10, 500, 2000):
        assert found[k] == pytest.approx(sqrt(20 * k) * PS, rel=1e-12)


def test_the_last_rate_is_held_and_0_ends_the_stream():
    held = until(Renewal(Equal(), steps_curve(((0, 1.0), (10 * PS, 2.0)), None)), 1000)
    assert len(held) == 10 + 990 * 2
    over = Renewal(Exponential(), points_curve(((0, 50.0), (10 * PS, 0.0)), None))
    found = list(over.instants(Random(1)))
    assert len(found) == pytest.approx(250, rel=0.2)
    assert found[-1] <= 10 * PS


def test_a_rate_of_0_is_waited_out():
    found = until(Renewal(Exponential(), steps_curve(((0, 0.0), (7 * PS, 30.0)), 10 * PS)), 100)
    assert all(t % (10 * PS) >= 7 * PS for t in found)
    assert len(found) == pytest.approx(900, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 50)), min_size=1, max_size=6),
    st.sampled_from(GAPS),
    st.integers(0, 5),
)
def test_any_steps_give_ascending_whole_numbers(steps, gaps, seed):
    ends, total = [], 0
    for seconds, rate in steps:
        ends.append((total * PS, rate))
        total += seconds
    curve = steps_curve(tuple(ends), total * PS)
    if not curve.mean:
        return
    found = instants(Renewal(gaps, curve), 200, seed)
    assert found == sorted(found)
    assert all(type(t) is int for t in found)


def test_a_level_curve_gives_what_a_number_gives():
    """But for rounding: each instant on a curve is reached in one step from the one before."""
    level = steps_curve(((0, 4.0), (10**6 * PS, 4.0)), None)
    for gaps in (Exponential(), Gamma(2.0)):
        on_curve, plain = (instants(Renewal(gaps, rate), 5000) for rate in (level, 4.0))
        assert max(abs(a - b) for a, b in zip(on_curve, plain, strict=True)) <= 5000


def test_bursts_have_their_rates_and_lengths():
    bursts = Bursts(1.0, 21.0, 10 * PS, 30 * PS, False)
    assert bursts.mean == 6.0
    found = until(Renewal(Exponential(), bursts), 40_000)
    assert len(found) == pytest.approx(240_000, rel=0.05)
    by_10_s = [0] * 4000
    for t in found:
        by_10_s[t // (10 * PS)] += 1
    mean, cv = mean_and_cv(by_10_s)
    assert (cv * mean) ** 2 / mean > 30  # a Poisson process has 1
    regular = until(Renewal(Exponential(), Bursts(0.0, 20.0, 10 * PS, 30 * PS, True)), 4000)
    assert all(t % (40 * PS) >= 30 * PS for t in regular)
    assert len(regular) == pytest.approx(20_000, rel=0.05)


def test_the_state_of_bursts_and_the_arrivals_are_separate_chances():
    def run(seed, rate_seed):
        process = Renewal(Exponential(), Bursts(0.0, 20.0, PS, PS, False))
        return list(islice(process.instants(Random(seed), Random(rate_seed)), 50))

    assert run(1, 1) == run(1, 1)
    assert run(1, 1) != run(1, 2)
    assert run(1, 1) != run(2, 1)


def test_ticks_put_instants_back_to_whole_multiples():
    plain, ticked = (instants(Renewal(Exponential(), 4.0, tick), 1000) for tick in (0, 3 * PS))
    assert ticked == [t - t % (3 * PS) for t in plain]


def test_batches_come_at_once_at_their_hours():
    once = list(Batches((2 * PS, 5 * PS), 3, None).instants(Random()))
    assert once == [2 * PS] * 3 + [5 * PS] * 3
    daily = Batches((2 * PS,), 2, 10 * PS)
    assert daily.mean_rate == 0.2
    assert list(islice(daily.instants(Random()), 6)) == [2 * PS] * 2 + [12 * PS] * 2 + [22 * PS] * 2


# --- in a scenario ------------------------------------------------------------------------


def arrivals(written, **keys):
    stream = {
        "arrivals": written,
        "prompt_tokens": {"fixed": 5},
        "output_tokens": {"fixed": 5},
        "requests": 9,
    }
    return load_scenario(document(traffic=[stream | keys])).traffic[0].arrivals


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"process": "gamma", "rate": 2, "cv": 3}, Renewal(Gamma(3.0), 2.0)),
        ({"process": "weibull", "rate": 2, "cv": 0.5}, Renewal(Weibull(0.5), 2.0)),
        ({"process": "gaps", "rate": 2, "gaps": [[0, 1], [1, 3]]}, Renewal(Table(((0.0, 1.0), (1.0, 3.0))), 2.0)),
        ({"process": "poisson", "rate": 2, "tick": 0.1}, Renewal(Exponential(), 2.0, PS // 10)),
        ({"process": "poisson", "rate": {"steps": [[0, 1], [5, 2]]}},
         Renewal(Exponential(), steps_curve(((0, 1.0), (5 * PS, 2.0)), None))),
        ({"process": "constant", "rate": {"points": [[0, 1], [5, 2]], "repeat": 9}},
         Renewal(Equal(), points_curve(((0, 1.0), (5 * PS, 2.0)), 9 * PS))),
        ({"process": "poisson", "rate": {"sine": {"mean": 3, "amplitude": 0.5}}},
         Renewal(Exponential(), sine_curve(3, 0.5, 86_400 * PS, 0))),
        ({"process": "bursts", "rate": 0, "burst_rate": 9, "burst": 2, "pause": 3, "lengths": "fixed"},
         Renewal(Exponential(), Bursts(0, 9, 2 * PS, 3 * PS, True))),
        ({"process": "batch", "at": [0, "02:00", "23:30:10"], "size": 4, "every": 86_400},
         Batches((0, 7200 * PS, 84_610 * PS), 4, 86_400 * PS)),
    ],
)  # fmt: skip
def test_what_is_written_is_what_is_meant(written, meant):
    assert arrivals(written) == meant


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"process": "gamma", "rate": 2}, "arrivals: process gamma needs cv"),
        ({"process": "poisson", "rate": 2, "cv": 1}, "arrivals: process poisson has no cv; remove it"),
        ({"process": "gamma", "rate": 2, "cv": 0}, "arrivals.cv: must be >= 0.01, got 0"),
        ({"process": "gaps", "rate": 2}, "arrivals: process gaps needs gaps"),
        ({"process": "gaps", "rate": 2, "gaps": [[0, 0], [1, 0]]}, "all gaps are 0"),
        ({"process": "gaps", "rate": 2, "gaps": [[0, 2], [1, 1]]}, "must ascend; 1 stands after 2"),
        ({"process": "gaps", "rate": 2, "gaps": [[0.1, 2], [1, 3]]}, "gaps must begin with probability 0"),
        ({"process": "poisson", "rate": 0}, "arrivals.rate: must be >= 1e-06, got 0"),
        ({"process": "poisson", "rate": "fast"}, "arrivals.rate: must be a number, got 'fast'"),
        ({"process": "poisson", "rate": {"steps": [[1, 2]]}}, "rate: the first entry of steps must be at 0 seconds"),
        ({"process": "poisson", "rate": {"steps": [[0, 0]]}}, "the highest rate in steps must be >= 1e-06"),
        ({"process": "poisson", "rate": {"points": [[0, 1], [0, 2]]}}, "the entries of points must ascend"),
        ({"process": "poisson", "rate": {"points": [[0, 1], [5, 2]], "repeat": 5}}, "repeat must be later than"),
        ({"process": "poisson", "rate": {"sine": {"mean": 1, "amplitude": 2}}}, "amplitude: must be <= 1, got 2"),
        ({"process": "poisson", "rate": {"wave": 1}}, "arrivals.rate.(wave|sine): "),
        ({"process": "bursts", "rate": 1, "burst_rate": 9, "burst": 0, "pause": 3}, "burst: must be > 0"),
        ({"process": "bursts", "rate": 0, "burst_rate": 1, "burst": 1e-4, "pause": 3}, "fewer than one request"),
        ({"process": "batch", "at": ["25:00"], "size": 1}, "'25:00' is no time of day; at most 23:59:59"),
        ({"process": "batch", "at": ["noon"], "size": 1}, "'noon' is no time of day; write \"HH:MM\""),
        ({"process": "batch", "at": [5, 3], "size": 1}, "the instants in at must ascend"),
        ({"process": "batch", "at": [5], "size": 1, "every": 5}, "every must be later than the last instant"),
        ({"process": "closed", "users": 0}, "arrivals.users: must be >= 1"),
        ({"process": "closed", "users": 5, "rate": 2}, "arrivals.rate: unknown key here: other forms of arrivals"),
        ({"process": "posson", "rate": 1}, "arrivals.process: 'posson' is not known; choose one of constant, poisson"),
        ({"rate": 1}, "arrivals.process: is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(written, message):
    with pytest.raises(InputError, match=message) as caught:
        arrivals(written)
    assert str(caught.value).startswith("scenario: traffic.0.arrivals")
