"""What a page lets a search try: every value, both ends of a range, and every combination looked at as a scenario is."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from twin.scenario_yaml import apply_override
from twin.whatif.axes import override

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
    document = {}
    apply_override(document, override("a", [value, {"b": value}]))
    assert document == {"a": [value, {"b": value}]}
