"""Seconds and picoseconds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.clock import PS, ceil_ps, to_ps, to_seconds


@given(st.floats(0, 1e7, allow_nan=False))
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
