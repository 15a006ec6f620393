"""Seconds and picoseconds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.clock import EXACT_PS, PS, ceil_ps, quotient, times, to_ps, to_seconds


@given(st.integers(-(1 << 66), 1 << 66) | st.integers(-9, 9), st.integers(-(1 << 66), 1 << 66))
def test_a_product_is_one_whatever_its_size(number, ps):
    assert times(number, ps) == number * ps


@given(st.integers(-3, 3), st.sampled_from([0, EXACT_PS, -EXACT_PS, 1 << 62]))
def test_seconds_are_the_nearest_float_on_both_sides_of_each_bound(step, ps):
    assert to_seconds(ps + step) == quotient(ps + step, PS)


@given(st.floats(0, 1e7, allow_nan=False) | st.floats(8999.9999, 9000.0001))
def test_ceil_ps_is_the_first_picosecond_that_the_policy_sees_as_reached(seconds):
    p = ceil_ps(seconds)
    assert to_seconds(p) >= seconds
    assert p == 0 or to_seconds(p - 1) < seconds


@given(st.integers(0, 10**18))
def test_an_instant_handed_out_as_a_float_is_not_late(ps):
    """Many picoseconds share one float once a run is hours long; the first of them is the instant."""
    assert ceil_ps(to_seconds(ps)) <= ps


@pytest.mark.parametrize(
    ("text", "ps"), [("0.1", PS // 10), (0.1, PS // 10), ("1e-12", 1), (3, 3 * PS)]
)
def test_decimal_digits_are_read_exactly(text, ps):
    assert to_ps(text) == ps


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_instant_is_refused(bad):
    with pytest.raises((ValueError, OverflowError)):
        ceil_ps(bad)
