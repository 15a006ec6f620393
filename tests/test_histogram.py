"""Percentiles from a histogram: near the exact ones, and of the whole if histograms are put together."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twin.metrics.histogram import BOUND, LogHistogram
from twin.metrics.percentiles import PERCENTS, Samples, class_middles, class_of, classes

durations = st.integers(0, 200) | st.integers(0, 2**62)
samples = st.lists(durations, max_size=200)
errors = st.lists(durations | durations.map(int.__neg__), max_size=200)


def histogram(values):
    found = LogHistogram()
    found.add([(np.array(values, dtype=np.int64), None)])
    return found


def exact(values):
    found = Samples()
    found.add([(np.array(values, dtype=np.int64), None)])
    return found


def is_near(found, true):
    return found == true or abs(found - true) <= BOUND * abs(true)


@given(samples)
def test_percentiles_are_within_the_bound_and_the_mean_is_exact(values):
    found, true = histogram(values).stats(), exact(values).stats()
    assert (found.mean, found.count) == (true.mean, true.count)
    for q in PERCENTS:
        a, b = getattr(found, f"p{q}"), getattr(true, f"p{q}")
        assert a is b is None or is_near(a, b)


@given(samples.filter(len), st.lists(st.floats(0, 100), min_size=1, max_size=9))
def test_so_are_curves(values, shares):
    for found, true in zip(
        histogram(values).curve(shares), exact(values).curve(shares), strict=True
    ):
        # Numpy takes the fraction between two ranks from a float, which is less exact than the whole-percent figures.
        assert is_near(found, true) or abs(found - true) <= (BOUND + 1e-9) * abs(true)


@given(errors.filter(len))
def test_values_below_0_are_counted_too(values):
    """Between two values of different sign a percentile may be near 0, so the bound is on the values themselves."""
    found, ordered = histogram(values), sorted(values)
    for q in (10, 50, 90):
        low, rest = divmod(q * (len(values) - 1), 100)
        around = (ordered[low], ordered[low + (rest > 0)])
        slack = BOUND * max(map(abs, around)) / 10**12
        assert abs(found.percentile(q) - exact(values).percentile(q)) <= slack


@given(errors, errors)
def test_two_histograms_merge_to_that_of_both(one, other):
    merged = histogram(one)
    merged.merge(histogram(other))
    assert merged == histogram([*one, *other]) == histogram([*other, *one])
    assert len(merged) == len(one) + len(other)
    assert merged != histogram([*one, *other, 5])


@given(samples.filter(len), st.integers(1, 50))
def test_a_value_that_occurs_often_counts_as_often(values, times):
    found = LogHistogram()
    weights = np.full(len(values), times, dtype=np.int64)
    found.add([(np.array(values, dtype=np.int64), weights)])
    assert found == histogram(values * times)


@given(st.lists(durations, min_size=2, max_size=50), st.sampled_from([3, 7, 10]))
def test_classes_are_in_the_order_of_their_values_and_their_middle_is_near(values, bits):
    ordered = np.array(sorted(values), dtype=np.int64)
    found = class_of(ordered, bits)
    assert all(a <= b for a, b in pairwise(found.tolist()))
    assert found.min() >= 0
    assert found.max() < classes(bits)
    middles = class_middles(bits)[found]
    for value, middle in zip(ordered.tolist(), middles.tolist(), strict=True):
        # A value above 2**53 is rounded to a float before it is classed.
        assert abs(value - middle) <= value * (2.0 ** -(bits + 1) + 2.0**-50)
