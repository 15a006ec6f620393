"""How long requests are: the stated quantiles, whole numbers from 1 on, pairs that go together."""

from array import array
from itertools import pairwise
from math import asin, exp, pi
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import azure_csv, document
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.workload.lengths import (
    Fixed,
    Lengths,
    Lognormal,
    Pairs,
    Quantiles,
    Uniform,
    lognormal,
)
from twin.workload.streams import Traffic, open_streams

N = 40_000


def drawn(length, seed=1, count=N):
    draw = length.drawn(Random(seed))
    return sorted(draw() for _ in range(count))


def pairs(lengths, seed=1, count=N):
    draw = lengths.drawn(Random(seed), Random(f"{seed} output"))
    return [draw() for _ in range(count)]


def spearman(found):
    ranks = []
    for column in zip(*found, strict=True):
        order = sorted(range(len(column)), key=column.__getitem__)
        rank = [0] * len(column)
        for place, i in enumerate(order):
            rank[i] = place
        ranks.append(rank)
    mean = (len(found) - 1) / 2
    top = sum((a - mean) * (b - mean) for a, b in zip(*ranks, strict=True))
    return top / sum((a - mean) ** 2 for a in ranks[0])


# --- lognormal ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "median", "mean", "p95"),
    [
        ({"median": 400, "p95": 3000}, 400, None, 3000),
        ({"median": 400, "sigma": 0.8}, 400, 400 * exp(0.32), None),
        ({"mean": 400, "sigma": 0.8}, 400 / exp(0.32), 400, None),
        ({"mean": 400, "p95": 1200}, None, 400, 1200),
    ],
)
def test_a_lognormal_has_what_it_is_given(given, median, mean, p95):
    found = drawn(lognormal(**given))
    for wanted, value in (
        (median, found[N // 2]),
        (mean, sum(found) / N),
        (p95, found[N * 95 // 100]),
    ):
        assert wanted is None or value == pytest.approx(wanted, rel=0.03)
    assert all(type(tokens) is int for tokens in found)


def test_of_two_lognormals_with_a_mean_and_a_p95_the_narrow_one_is_taken():
    assert lognormal(mean=400, p95=1200).sigma < 1.645
    for p95 in (400, 399, 400 * exp(1.3529)):
        with pytest.raises(ValueError, match="no lognormal has the mean 400 and the p95"):
            lognormal(mean=400, p95=p95)


def test_a_cut_lognormal_is_scaled_up_not_clipped():
    free, cut = lognormal(median=400, sigma=1.0), lognormal(median=400, sigma=1.0, most=1000)
    kept = [tokens for tokens in drawn(free) if tokens <= 1000]
    found = drawn(cut)
    assert found[-1] <= 1000
    assert found.count(1000) < 60
    assert found[N // 2] == pytest.approx(kept[len(kept) // 2], rel=0.02)


def test_a_length_is_at_least_1():
    assert drawn(Lognormal(-3.0, 1.0))[0] == 1
    assert drawn(Quantiles(((0.0, 0.2), (1.0, 3.0))))[0] == 1
    assert drawn(Quantiles(((0.0, 0.0), (1.0, 3.0)), fewest=0))[0] == 0


# --- quantiles ----------------------------------------------------------------------------


def test_quantiles_are_met():
    points = ((0.0, 10.0), (0.5, 100.0), (0.5, 200.0), (0.9, 1000.0), (1.0, 5000.0))
    found = drawn(Quantiles(points))
    assert (found[0], found[-1]) == pytest.approx((10, 5000), rel=0.01)
    assert found[N * 89 // 100] == pytest.approx(980, rel=0.02)
    assert found[N // 4] == pytest.approx(55, rel=0.03)
    assert not [tokens for tokens in found if 101 < tokens < 199]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 9))
def test_points_at_halves_give_the_distribution_they_were_made_of(values, seed):
    values.sort()
    points = [(0.0, values[0] - 0.5)]
    for i, value in enumerate(values):
        points += [(i / len(values), value - 0.5), ((i + 1) / len(values), value + 0.5)]
    length = Quantiles(tuple(dict.fromkeys(points)))
    at = length.quantile()
    assert [at((i + 0.5) / len(values)) for i in range(len(values))] == values
    assert set(drawn(length, seed, 200)) <= set(values)
    assert length.least == values[0]


@pytest.mark.parametrize(
    "length", [Fixed(7), Uniform(3, 90), Lognormal(4.0, 1.0, 500), Quantiles(((0.0, 2.0), (1.0, 9.0)))], ids=str
)  # fmt: skip
def test_the_quantile_function_is_that_of_what_is_drawn(length):
    at, found = length.quantile(), drawn(length)
    for percent in (1, 25, 50, 90, 99):
        assert found[N * percent // 100] == pytest.approx(at(percent / 100), rel=0.04, abs=0.6)
    values = [at((i + 0.5) / 1000) for i in range(1000)]
    assert all(a <= b for a, b in pairwise(values))
    assert min(values) >= length.least


# --- pairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.8, 0.3, -0.5])
def test_correlated_lengths_keep_their_distributions(rho):
    alone = Lengths(Lognormal(6.0, 1.0), Uniform(1, 1000))
    together = Lengths(alone.prompt, alone.output, rho)
    found = pairs(together)
    assert spearman(found) == pytest.approx(6 / pi * asin(rho / 2), abs=0.02)
    assert spearman(pairs(alone)) == pytest.approx(0, abs=0.02)
    for column in (0, 1):
        one, other = (sorted(pair[column] for pair in drawn) for drawn in (found, pairs(alone)))
        for percent in (10, 50, 90):
            place = N * percent // 100
            assert one[place] == pytest.approx(other[place], rel=0.05)


def test_pairs_of_a_trace_stay_together(tmp_path):
    rows = [(f"2024-01-01 00:00:0{i}", 10 + i, 100 + i) for i in range(5)]
    stream = {
        "arrivals": {"process": "poisson", "rate": 9},
        "lengths_from": azure_csv(tmp_path, rows),
        "requests": 5000,
    }
    [loaded] = load_scenario(document(traffic=[stream])).traffic
    assert loaded.lengths == Pairs(
        stream["lengths_from"], array("q", range(10, 15)), array("q", range(100, 105))
    )
    assert loaded.lengths.least == 10
    traffic = Traffic(open_streams([loaded], 1))
    found = [traffic.pop().request for _ in range(5000)]
    assert {r.output_tokens - r.prompt_tokens for r in found} == {90}
    counts = [sum(r.prompt_tokens == 10 + i for r in found) for i in range(5)]
    assert min(counts) > 900


# --- in a scenario ------------------------------------------------------------------------


def lengths(prompt, **keys):
    stream = {"arrivals": {"process": "poisson", "rate": 1}, "prompt_tokens": prompt,
              "output_tokens": {"fixed": 5}, "requests": 9}  # fmt: skip
    return load_scenario(document(traffic=[stream | keys])).traffic[0].lengths


def test_what_is_written_is_what_is_meant():
    written = {"lognormal": {"median": 400, "p95": 3000, "max": 1000}}
    assert lengths(written).prompt == lognormal(median=400, p95=3000, most=1000)
    written = {"quantiles": [[0, 5], [0.5, 20], [1, 90]]}
    found = lengths(written, length_correlation=0.4)
    assert found == Lengths(Quantiles(((0.0, 5.0), (0.5, 20.0), (1.0, 90.0))), Fixed(5), 0.4)


@pytest.mark.parametrize(
    ("prompt", "keys", "message"),
    [
        ({"lognormal": {"median": 5}}, {}, "lognormal: needs p95 or sigma, one of them"),
        ({"lognormal": {"median": 5, "mean": 6, "p95": 9}}, {}, "lognormal: needs median or mean, one of them"),
        ({"lognormal": {"median": 5, "p95": 5}}, {}, "lognormal: p95 must be above the median .5., got 5"),
        ({"lognormal": {"mean": 5, "p95": 50}}, {}, "no lognormal has the mean 5 and the p95 50"),
        ({"lognormal": {"median": 5, "sigma": 0}}, {}, "lognormal.sigma: must be > 0"),
        ({"quantiles": [[0, 5], [0.9, 9]]}, {}, "must begin with probability 0 and end with 1"),
        ({"quantiles": [[0, 5], [0.6, 9], [0.5, 9], [1, 9]]}, {}, "quantiles .probabilities. must ascend; 0.5 stands"),
        ({"quantiles": [[0, 5], [0.6, 4], [1, 9]]}, {}, "quantiles .values. must ascend; 4 stands after 5"),
        ({"quantiles": [[0, 0], [1, 9]]}, {}, "the values of quantiles must be >= 0.5, got 0"),
        ({"uniform": [9, 3]}, {}, "the lower bound 9 is above the upper bound 3"),
        ({"normal": 3}, {}, "prompt_tokens.normal: unknown key"),
        (512, {}, "must be a mapping .*; write {fixed: 512}"),
        (None, {}, "traffic.0: prompt_tokens is missing"),
        ({"fixed": 3}, {"lengths_from": "x.csv"}, "has both lengths_from and prompt_tokens; write one"),
        ({"fixed": 3}, {"length_correlation": 1}, "length_correlation: must be <= 0.99"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(prompt, keys, message):
    with pytest.raises(InputError, match=message):
        lengths(prompt, **keys)


@given(low=st.integers(1, 10**6), width=st.integers(0, 10**6), seed=st.integers(0, 2**32))
def test_a_uniform_length_is_what_randint_draws(low, width, seed):
    """So that a seed gives the same requests under every version of Python."""
    ours, theirs = Random(seed), Random(seed)
    draw = Uniform(low, low + width).drawn(ours)
    for _ in range(20):
        assert draw() == theirs.randint(low, low + width)
