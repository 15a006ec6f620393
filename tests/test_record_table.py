"""Records as packed columns: nothing is lost, and figures are those of the records one by one."""

import copy
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_metrics import limits, objectives, records
from twin.clock import PS
from twin.metrics import percentiles
from twin.metrics.columns import Columns
from twin.metrics.estimated_wait import wait_errors
from twin.metrics.objectives import is_good, limits_of
from twin.metrics.percentiles import pooled_stats, stats
from twin.metrics.preemptions import count_preemptions
from twin.metrics.record_table import ROW, RecordTable
from twin.metrics.records import LATENCIES, RequestRecord
from twin.metrics.summary import summarize_tiers
from twin.metrics.tally import Tally
from twin.metrics.token_times import StepGaps, Timeline

counts = st.integers(0, 2**31 - 1)
texts = st.text(max_size=8)


@st.composite
def any_record(draw, index):
    """A record with anything in it that a record may hold."""
    base = draw(records(index=index))
    return replace(
        base, tier=draw(texts), tenant=draw(texts), session=draw(st.none() | texts), stream=draw(st.integers(0, 99)),
        replica=draw(st.none() | st.integers(0, 9999)), prompt_tokens=draw(counts), reason=draw(texts),
        preemptions=draw(counts), recomputed_tokens=draw(st.integers(0, 2**62)), prefix_hit_tokens=draw(counts),
        prefix_query_tokens=draw(counts), stall_ps=draw(st.integers(0, 2**62)),
        estimated_wait_ps=draw(st.none() | st.integers(0, 2**62)),
    )  # fmt: skip


@st.composite
def on_timelines(draw):
    """Records whose tokens came with the steps of two engines, some from a run that was cut."""
    lines = []
    for _ in range(2):
        line = Timeline(draw(st.integers(0, 3)))
        now = 0
        for gap in draw(st.lists(st.integers(0, 3) | st.integers(0, PS), min_size=1, max_size=30)):
            line.add(1, now, gap, 0)
            now += gap
        lines.append(line)
    found = []
    for index in range(draw(st.integers(0, 12))):
        record = draw(records(index=index))
        if record.itl_ps and draw(st.booleans()):
            line = draw(st.sampled_from(lines))
            first = draw(st.integers(line.first, line.last))
            gaps = StepGaps(line, first, draw(st.integers(first, line.last)))
            record = replace(record, itl_ps=gaps, output_tokens=1 + len(gaps), replica=0)
        found.append(record)
    return found


def listed(run):
    """The same records with each gap by itself."""
    return [replace(record, itl_ps=array("q", list(record.itl_ps))) for record in run]


@given(st.data(), st.integers(0, 8))
def test_a_table_gives_back_what_was_put_in_by_index(data, count):
    run = [data.draw(any_record(index)) for index in range(count)]
    table = RecordTable(data.draw(st.permutations(run)))
    assert len(table) == count
    assert list(table) == run == table
    assert [table[i] for i in range(count)] == run
    assert table[2:5] == run[2:5]
    if run:
        assert table[-1] == run[-1]
    with pytest.raises(IndexError):
        table[count]


@given(on_timelines())
def test_gaps_of_steps_come_back_as_they_were(run):
    table = RecordTable(run)
    assert list(table) == run == listed(table)


def test_a_row_is_small():
    assert ROW.size == 128


def test_nothing_can_be_added_while_columns_are_in_use():
    record = next(
        iter(
            RecordTable(
                [RequestRecord(0, "a", "t", None, 0, 0, 0, 0, 0, 0, 1, 1, "completed", "stop")]
            )
        )
    )
    table = RecordTable([record])
    columns = table.columns()
    with pytest.raises(BufferError):
        table.add(record)
    del columns
    table.add(record)
    assert len(table) == 2


@given(on_timelines(), objectives, st.sampled_from([0, 30 * PS]))
def test_figures_do_not_depend_on_how_gaps_are_kept(run, wanted, warmup_ps):
    def figures(records):
        return summarize_tiers(records, objectives=wanted, warmup_ps=warmup_ps, end_ps=100 * PS)

    assert figures(run) == figures(listed(run))


@given(on_timelines())
def test_the_durations_of_steps_are_those_of_listed_gaps(run):
    columns, plain = (RecordTable(records).columns() for records in (run, listed(run)))
    for latency in LATENCIES:
        assert columns.durations(latency).tolist() == plain.durations(latency).tolist()


@given(
    on_timelines(),
    st.dictionaries(st.builds("{}_p99".format, st.sampled_from(LATENCIES)), limits, max_size=3),
)
def test_one_request_is_judged_as_all_together(run, wanted):
    every = dict.fromkeys({record.tier for record in run}, wanted)
    tiers = summarize_tiers(run, objectives=every, warmup_ps=0, end_ps=100 * PS)
    good = sum(is_good(record, limits_of(wanted)) for record in run)
    assert sum(tier.good for tier in tiers.values()) == good


@st.composite
def weighted_parts(draw):
    """Parts of values near one another or far apart, some with how often each occurs."""
    low = draw(st.sampled_from([0, 1, 100, 7 * 10**9, 2**53, 2**60]))
    wide = draw(st.sampled_from([0, 1, 50, 10**7, 2**60]))
    parts = []
    for values in draw(st.lists(st.lists(st.integers(low, low + wide), max_size=30), max_size=4)):
        times = st.lists(st.integers(1, 20), min_size=len(values), max_size=len(values))
        weights = draw(st.none() | times)
        parts.append(
            (
                np.array(values, dtype=np.int64),
                None if weights is None else np.array(weights, dtype=np.int64),
            )
        )
    return parts


@given(weighted_parts(), st.sampled_from([1, 20, 10**6]))
def test_pooled_percentiles_are_those_of_all_values_in_one_array(parts, few):
    every = [v if w is None else np.repeat(v, w) for v, w in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(percentiles, "FEW", few)
        found = pooled_stats(lambda: iter(parts))
    assert found == stats(np.concatenate([*every, np.empty(0, dtype=np.int64)]))


@given(st.data(), st.integers(0, 30), st.integers(1, 7), objectives)
def test_blocks_add_up_to_the_whole(data, count, size, wanted):
    """Counts do so exactly; `test_histogram` has the percentiles."""
    run = [
        replace(
            data.draw(records(index=index)), preemptions=data.draw(st.integers(0, 30)), replica=0
        )
        for index in range(count)
    ]
    run = data.draw(st.permutations(run))
    whole, parts = (Tally(wanted, 30 * PS, is_exact) for is_exact in (True, False))
    whole.add(RecordTable(run).columns())
    table = RecordTable()
    for start in range(0, count, size):
        for record in run[start : start + size]:
            table.add(record)
        parts.add(table.take())
    assert told(whole) == told(parts)
    preempted = sorted((r for r in run if r.preemptions), key=lambda r: (-r.preemptions, r.index))
    assert (
        count_preemptions(run).worst == (preempted[0].index if preempted else None) == parts.worst
    )


def told(tally):
    """What of a tally does not depend on how spreads are kept."""
    found = {
        name: value
        for name, value in vars(tally).items()
        if name not in ("_spread", "is_exact", "tiers")
    }
    for name, tier in tally.tiers.items():
        own = copy.copy(vars(tier))
        waits = vars(own.pop("waits"))
        means = {
            latency: (s.stats().mean, s.stats().count) for latency, s in own.pop("latency").items()
        }
        found[name] = own | means | {k: v for k, v in waits.items() if k != "errors"}
    return found


def test_no_records_have_no_figures():
    block = RecordTable().columns()
    assert isinstance(block, Columns)
    assert len(block) == 0
    assert wait_errors([]).samples == 0
    assert count_preemptions([]).requests == 0
    assert summarize_tiers([], objectives={}, warmup_ps=0, end_ps=0) == {}
