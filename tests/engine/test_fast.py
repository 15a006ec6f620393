"""The fast engine gives what the stepped one gives, to the byte: records, counters, policy, final state of the pool."""

from bisect import bisect_left
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.whole import KINDS, STOCK, difference
from twin.engine.decodes import Decodes
from twin.engine.fast_core import FastCore
from twin.engine.fast_replica import FastReplica
from twin.engine.jump import Jump
from twin.metrics.token_times import Timeline


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS))
@example(seed=912448, kind="slo")
def test_same_bytes(seed, kind):
    """The example is cut before a boundary for which a request was submitted, and promoted, already."""
    assert difference(seed, kind) is None


# --- the bounds of a jump: each, moved by one, is noticed ----------------------------------


class FinishesLate(FastCore):
    def regular_plans(self):
        plans = super().regular_plans()
        return plans + 1 if plans and self.decodes.first_end() == self.known + plans + 1 else plans


class BlocksOneTooFew(FastCore):
    def __init__(self, config, policy=None):
        super().__init__(config, policy)

        class Generous(Decodes):
            def plans_within(self, plan, plans, free_blocks):
                return super().plans_within(plan, plans, free_blocks + 1)

        self.decodes = Generous(config.block_size)


class WaitingForgotten(FastCore):
    def _stays_blocked(self, first):
        return True


class TimeForgotten(FastReplica):
    def _wake_ps(self, now_ps):
        return super()._wake_ps(now_ps) + 10**11  # about a step


class ArrivalForgotten(FastReplica):
    def _wake_up(self):
        if self._jump is None:
            super()._wake_up()


def with_core(core: type[FastCore]) -> type[FastReplica]:
    class Faulty(FastReplica):
        def _make_core(self):
            made = core(self._config, self.policy)
            made.on_detach = self._give_tokens
            return made

    return Faulty


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (with_core(FinishesLate), STOCK),
        (with_core(BlocksOneTooFew), STOCK),
        (with_core(WaitingForgotten), "tiered"),
        (TimeForgotten, "tiered"),
        (ArrivalForgotten, "fcfs"),
    ],
    ids=["finish", "memory", "waiting", "time", "arrival"],
)
def test_a_bound_moved_by_one_is_noticed(fault, kind):
    for seed in range(300):
        try:
            if difference(seed, kind, fault) is not None:
                return
        except (AssertionError, KeyError, RuntimeError, AttributeError, ValueError):
            return
    raise AssertionError("the fault went unnoticed")


# --- jumps ---------------------------------------------------------------------------------

runs = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 10**6), st.integers(0, 1000)),
    min_size=1,
    max_size=4,
)


@given(runs, st.integers(0, 10**9), st.data())
def test_a_jump_knows_what_a_list_of_ends_would(runs, start, data):
    durations = [first + i * growth for count, first, growth in runs for i in range(count)]
    ends = list(accumulate(durations, initial=start))
    jump = Jump(start)
    for run in runs:
        jump.add(*run)
    steps = len(durations)
    assert jump.steps == steps
    assert [jump.end(step) for step in range(steps + 1)] == ends
    first = data.draw(st.integers(1, steps))
    last = data.draw(st.integers(first - 1, steps))
    stride = data.draw(st.integers(1, 20))
    delays = [ends[-1] - end for end in ends[first : last + 1 : stride]]
    assert jump.sum_delays(first, last, steps, stride) == sum(delays)
    instant = data.draw(st.sampled_from(ends)) + data.draw(st.integers(-1, 1))
    assert jump.find(instant, first) == bisect_left(ends, instant, first)
    last = max(first, last)
    timeline = Timeline(first)
    jump.note(timeline, first, last)
    assert timeline.last == last
    assert timeline.ends(first, last).tolist() == ends[first : last + 1]
    assert [timeline.end(step) for step in range(first, last + 1)] == ends[first : last + 1]
    gaps = [end - begin for begin, end in pairwise(ends[first : last + 1])]
    assert timeline.gaps(first, last).tolist() == gaps


def test_a_jump_ends_before_64_bits_do():
    """What no run can reach: steps are left out, or one of them cut."""
    jump = Jump(86 * 10**17)
    assert jump.add(1, 10**17, 0)
    assert not jump.add(10**6, 10**14, 10**6)
    assert 1 < jump.steps < 10**4
    assert jump.end(1) < jump.end(jump.steps) < 1 << 63
    steps = jump.steps
    assert jump.add(1, 10**20, 0)
    assert jump.steps == steps + 1
    assert jump.end(steps) < jump.end(steps + 1) < 1 << 63
    long = Jump(0)
    assert long.add(10**6, 10**9, 3)
    assert long.end(10**6) == 10**15 + 3 * (10**6 * (10**6 - 1) // 2)
    assert long.find(long.end(777_777), 1) == 777_777
    delays = [long.end(10**6) - long.end(step) for step in range(999_000, 10**6)]
    assert long.sum_delays(999_000, 10**6, 10**6) == sum(delays)


@given(st.lists(runs, min_size=1, max_size=8), st.data())
def test_a_timeline_forgets_what_nobody_asks_for(parts, data):
    timeline, ends, before = Timeline(7), [10**6], 7
    for part in parts:
        jump = Jump(ends[-1] + data.draw(st.sampled_from((0, 0, 5))))
        for run in part:
            jump.add(*run)
        jump.note(timeline, 1, jump.steps)
        ends += [jump.end(step) for step in range(1, jump.steps + 1)]
        before = data.draw(st.integers(before, timeline.last))
        timeline.forget(before)
        assert timeline.first <= before
        low = data.draw(st.integers(before, timeline.last))
        assert timeline.ends(low, timeline.last).tolist() == ends[low - 6 :]
        assert timeline.end(low) == ends[low - 6]
        gaps = [end - begin for begin, end in pairwise(ends[low - 6 :])]
        assert timeline.gaps(low, timeline.last).tolist() == gaps
