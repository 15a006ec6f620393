"""Traces as traffic: which rows, when, whose, and what their prompts share."""

from fractions import Fraction
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import azure_csv, document, run, stream
from tests.test_trace_check import TRACES
from twin.clock import PS
from twin.engine.blocks import BlockKeys
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.report.tables import render
from twin.scenario import load_scenario
from twin.workload.check import Selection, check_trace
from twin.workload.convert import convert
from twin.workload.formats import own
from twin.workload.formats.choose import count_rows, format_of, read_trace
from twin.workload.formats.rows import TraceRow
from twin.workload.source import Clients
from twin.workload.streams import Traffic, open_streams
from twin.workload.trace import OWN, TraceStream, rows_of, spread

CLIENTS = Clients({"ONLINE": 1.0}, {"default": 1.0}, None, None, None)


def trace(path, speedup="1", requests=None, **changes):
    return TraceStream(CLIENTS, path, Fraction(speedup), requests, **changes)


def taken(*streams, seed=1):
    traffic = Traffic(open_streams(streams, seed))
    requests = []
    while traffic.next_ps() is not None:
        requests.append(traffic.pop().request)
    return requests


def times(requests):
    return [request.arrival_ps for request in requests]


def written(folder, *rows, name="trace.jsonl"):
    path = str(folder / name)
    own.JSONL.write(path, rows)
    return path


def row(at_s, tokens=100, output=5, **known):
    return TraceRow(0, round(at_s * PS), tokens, output, **known)


@pytest.fixture
def ten(tmp_path):
    """A request every 0.7 s."""
    return azure_csv(
        tmp_path,
        [(f"2023-11-16 18:15:{7 * i // 10:02d}.{7 * i % 10}", 5 + i, 6) for i in range(10)],
    )


# --- which rows and when ------------------------------------------------------------------


def test_speedup_divides_the_instants(ten):
    assert times(taken(trace(ten, "3"))) == [round(Fraction(7 * i * PS, 30)) for i in range(10)]
    assert times(taken(trace(ten, "0.5", 2))) == [0, 14 * PS // 10]


def test_a_window_is_taken_before_the_first_rows_and_the_run_starts_at_it(ten):
    windowed = taken(trace(ten, "2", 3, window_ps=(2 * PS, 6 * PS)))
    assert [request.prompt_tokens for request in windowed] == [8, 9, 10]
    assert times(windowed) == [PS // 20, PS * 8 // 20, PS * 15 // 20]
    assert len(taken(trace(ten, window_ps=(0, 21 * PS // 10)))) == 3


def test_a_window_without_requests_is_refused(ten):
    with pytest.raises(InputError, match=r"no request between 7 s and 9 s; .* is at 6.3 s"):
        taken(trace(ten, window_ps=(7 * PS, 9 * PS)))


def test_a_request_that_is_refused_can_be_found_in_the_file(ten):
    traffic = Traffic(open_streams([trace(ten)], 1))
    assert [traffic.pop().line for _ in range(3)] == [2, 3, 4]
    assert traffic.expected() == count_rows(ten, format_of(ten).format) == 10


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30).map(sorted),
    st.integers(1, 20),
    st.integers(),
)
def test_ticks_are_spread_in_order_and_within_the_tick(stamps, tick, seed):
    rows = [TraceRow(i, stamp, i + 1, 1) for i, stamp in enumerate(stamps)]
    out = list(spread(rows, tick, Random(seed)))
    assert [r.line for r in out] == list(range(len(rows)))
    at = [r.at_ps for r in out]
    assert at == sorted(at)
    for before, after in zip(rows, out, strict=True):
        later = [r.at_ps for r in rows if r.at_ps > before.at_ps]
        assert before.at_ps <= after.at_ps < min([before.at_ps + tick, *later])


def test_ticks_are_spread_evenly_on_average_and_the_same_for_a_seed(tmp_path):
    path = written(tmp_path, *(row(3 * (i // 10)) for i in range(5000)))
    plain, once, again, other = (
        times(taken(spec, seed=seed))
        for spec, seed in [
            (trace(path), 1),
            (trace(path, tick_ps=3 * PS), 1),
            (trace(path, tick_ps=3 * PS), 1),
            (trace(path, tick_ps=3 * PS), 2),
        ]
    )
    assert once == again != other
    late = [at - tick for at, tick in zip(once, plain, strict=True)]
    assert sum(late) / len(late) == pytest.approx(1.5 * PS, rel=0.03)
    assert min(late) >= 0
    assert max(late) < 3 * PS


# --- whose --------------------------------------------------------------------------------


FULL = row(
    0, tier="BATCH", tenant="acme", session="s", max_tokens=9, ttft_timeout_ps=PS, total_timeout_ps=5
)  # fmt: skip


def test_what_a_row_says_of_itself_is_taken_where_the_scenario_is_silent(tmp_path):
    path = written(tmp_path, FULL, row(1))
    said, silent = taken(trace(path, own=frozenset(OWN)))
    assert (said.tier, said.tenant, said.max_tokens) == ("BATCH", "acme", 9)
    assert (said.ttft_timeout_ps, said.total_timeout_ps, said.session) == (PS, 5, "0-s")
    assert (silent.tier, silent.tenant, silent.max_tokens) == ("ONLINE", "default", None)
    ignored, _ = taken(trace(path))
    assert (ignored.tier, ignored.tenant, ignored.max_tokens) == ("ONLINE", "default", None)


def test_scenario_keys_win_over_what_rows_say(tmp_path):
    path = written(tmp_path, FULL, FULL)
    scenario = load_scenario(document(traffic=[{"trace": path}], policy="tiered"))
    assert scenario.traffic[0].own == set(OWN)
    keys = {"tier": "OFFLINE", "tenants": {"a": 1.0}, "max_tokens": 3, "timeouts": {"ttft": 1}}
    scenario = load_scenario(document(traffic=[{"trace": path, **keys}], policy="tiered"))
    assert scenario.traffic[0].own == {"total_timeout_ps"}


def test_sessions_of_two_streams_are_not_mixed_up(tmp_path):
    path = written(tmp_path, FULL)
    assert [request.session for request in taken(trace(path), trace(path))] == ["0-s", "1-s"]


def test_a_tier_that_the_policy_lacks_is_found_with_its_line(tmp_path):
    path = written(tmp_path, row(0), row(1, tier="GOLD"))
    with pytest.raises(
        InputError, match=r"line 2: tier: the policy has no tier 'GOLD', only ONLINE, "
    ):
        run(document(traffic=[{"trace": path}], policy="tiered"))
    result = run(
        document(traffic=[{"trace": path}], policy="fcfs", objectives={"GOLD": {"ttft_p99": 9}})
    )
    assert [record.tier for record in result.records] == ["ONLINE", "GOLD"]


# --- what prompts share -------------------------------------------------------------------


def blocks(request, size=16):
    """Keys of all full blocks of prompt and reply."""
    end = request.prompt_tokens + request.output_tokens
    return BlockKeys(request.prompt, request.reply, size).upto(end // size)


def shared(one, other):
    return sum(a == b for a, b in zip(blocks(one), blocks(other), strict=False))


def test_equal_content_is_equal_in_the_block_pool_and_nothing_else_is(tmp_path):
    path = written(
        tmp_path,
        row(0, 100, 60, prompt=((1, 64), (2, 36)), reply=3),
        row(1, 196, 9, prompt=((1, 64), (2, 36), (3, 60), (4, 36))),
        row(2, 100, 9, prompt=((1, 64),)),
        row(3, 100, 9, prompt=((1, 64),)),
        row(4, 100, 9),
        row(5, 100, 9, prompt=((2, 36), (1, 64))),
    )
    first, turn, rest, again, unknown, swapped = taken(trace(path))
    assert shared(first, turn) == 160 // 16
    assert shared(first, rest) == shared(rest, again) == 4
    for other in (first, turn, rest, again):
        assert not shared(unknown, other)
        assert not shared(swapped, other)


def test_two_streams_of_one_file_share_nothing(tmp_path):
    path = written(tmp_path, row(0, prompt=((1, 64),), reply=2), row(1, prompt=((1, 64),)))
    one = taken(trace(path), trace(path), trace(path))
    ids = [{i for i, _ in r.prompt} | {r.reply} for r in one]
    groups = {
        s: set().union(*(i for i, r in zip(ids, one, strict=True) if r.stream == s))
        for s in range(3)
    }
    assert not groups[0] & groups[1]
    assert not groups[1] & groups[2]
    assert not groups[0] & groups[2]


def test_content_of_a_trace_meets_no_content_made_up(tmp_path):
    path = written(tmp_path, *(row(i, 100, prompt=((i, 64),)) for i in range(50)))
    scenario = load_scenario(document(traffic=[stream(), {"trace": path}, stream()]))
    requests = taken(*scenario.traffic)
    ids = [i for r in requests for i in (r.reply, *(content for content, _ in r.prompt))]
    assert len(ids) == len(set(ids)) == 80 * 2 + 50 * 3


def test_a_trace_without_prefixes_has_no_hits_and_the_report_says_why(ten):
    result = run(document(traffic=[stream(), {"trace": ten}]))
    summary = summarize(result)
    assert summary["engine"]["prefix_hit_tokens"] == 0
    assert summary["trace_prefixes"] == [{"stream": 1, "assumed_share": None}]
    assert "unknown in the trace of" in render(summary)


def test_an_assumed_share_is_one_common_text_and_shown(tmp_path):
    path = azure_csv(tmp_path, [(f"2023-11-16 18:15:{i:02d}", 320, 6) for i in range(50)])
    result = run(document(traffic=[{"trace": path, "assumed_prefix_share": 0.4}]))
    summary = summarize(result)
    assert summary["engine"]["prefix_hit_tokens"] == 49 * 128
    assert summary["trace_prefixes"] == [{"stream": 0, "assumed_share": 0.4}]
    assert "40.0 % of stream 0" in render(summary)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_any_share_gives_whole_prompts(ten, share):
    for request in taken(trace(ten, assumed_prefix_share=Fraction(str(share)))):
        assert sum(tokens for _, tokens in request.prompt) == request.prompt_tokens
        assert all(tokens > 0 for _, tokens in request.prompt)


def test_a_share_is_refused_where_the_trace_knows(tmp_path):
    path = written(tmp_path, row(0, prompt=((1, 64),)))
    with pytest.raises(
        InputError, match=r"traffic.0.trace: .* line 1: the trace says which prefixes"
    ):
        load_scenario(document(traffic=[{"trace": path, "assumed_prefix_share": 0.4}]))
    late = written(tmp_path, row(0), row(1, prompt=((1, 64),)), name="late.jsonl")
    with pytest.raises(InputError, match="line 2: the trace says which prefixes"):
        run(document(traffic=[{"trace": late, "assumed_prefix_share": 0.4}]))


# --- the scenario -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "zip"}, r"traffic.0.format: format 'zip' is not known; known: azure"),
        ({"format": "mooncake"}, r"traffic.0.trace: .*trace.csv line 1: not readable as JSON"),
        ({"window": [3, 2]}, r"window"),
        ({"window": [3, 3]}, r"window"),
        ({"window": [100, 200]}, r"traffic.0.trace: .*no request between 100 s and 200 s"),
        ({"spread_ticks": 0}, r"spread_ticks: must be > 0"),
        ({"assumed_prefix_share": 1.5}, r"assumed_prefix_share: must be <= 1"),
    ],
)
def test_keys_of_a_trace_that_cannot_be(ten, keys, message):
    with pytest.raises(InputError, match=message):
        load_scenario(document(traffic=[{"trace": ten, **keys}]))


def test_traffic_that_never_fills_a_replica_is_said_to_tell_nothing_apart(tmp_path):
    """A trace whose head runs at 0.034 requests/s and whose middle at 3.17, in bins of three minutes."""
    head = [row(i / 0.034, 4000, 100) for i in range(2448)]
    middle = [row(72_000 + i / 3.17, 4000, 100) for i in range(3000)]
    path = written(tmp_path, *head, *middle)
    scenario = document(engine={"max_model_len": 8192, "num_gpu_blocks_override": None})
    for window, low in (([0, 72_000], True), ([72_000, 72_200], False)):
        speed = 1 if low else 8
        keys = {"trace": path, "window": window, "requests": 300, "speedup": speed}
        warnings = run(scenario | {"traffic": [keys]}).warnings
        assert any("policies and numbers of replicas will look alike" in w for w in warnings) == low


def test_rows_are_read_once_they_are_needed(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,6\nbroken\n")
    assert len(list(rows_of(trace(str(path), requests=1)))) == 1


def test_a_cache_that_forgets_nothing_gives_the_attainable_hits(twin_data):
    """Requests far apart, more KV blocks than the trace has: hits are exactly what `trace check` says."""
    path = str(twin_data / "traces" / "sharegpt300_llama31_hashed.jsonl")
    endless = {"num_gpu_blocks_override": 100_000, "max_model_len": 8192}
    keys = {"trace": path, "speedup": 0.001}
    engine = summarize(run(document(engine=endless, traffic=[keys])))["engine"]
    attainable = check_trace(path)[0]["prefixes"]
    assert engine["prefix_hit_tokens"] == attainable["hit_tokens"]
    share = engine["prefix_hit_tokens"] / engine["prefix_query_tokens"]
    assert share == attainable["attainable_share"]


LARGE = {
    "max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 131_072,
    "num_gpu_blocks_override": None,
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_published_traces_are_converted_and_run(twin_data, tmp_path, name):
    path = str(twin_data / "traces" / name)
    sixty, copy = Selection(None, 60), str(tmp_path / "copy.parquet")
    convert(path, copy, selection=sixty)
    convert(copy, str(tmp_path / "back"), target_format=TRACES[name][0])
    once, again = (
        [r._replace(line=0) for r in islice(read_trace(p, format_of(p).format), 60)]
        for p in (path, str(tmp_path / "back"))
    )
    assert once == again
    results = [
        run(document(engine=LARGE, traffic=[{"trace": p, "requests": 60, "speedup": 4}]))
        for p in (path, copy)
    ]
    assert results[0].records == results[1].records
    summary = summarize(results[0])
    assert summary["totals"]["completed"] + summary["totals"]["refused"] == 60
    attainable = check_trace(path, selection=sixty)[0]["prefixes"]
    assert 0 <= summary["engine"]["prefix_hit_tokens"] <= attainable["hit_tokens"]
    assert bool(summary["trace_prefixes"]) == (attainable["known"] == "no")
    if attainable["hit_tokens"] > 10_000:
        assert summary["engine"]["prefix_hit_tokens"] > attainable["hit_tokens"] / 2


def test_the_azure_conversation_trace(twin_data):
    requests = taken(trace(str(twin_data / "traces" / "azure2023_conv.csv")))
    assert len(requests) == 19_366
    assert times(requests[:2]) == [0, 4_314_579_000_000]
    assert (requests[0].prompt_tokens, requests[0].output_tokens) == (374, 44)
    assert requests[-1].arrival_ps == 3_501_721_937_000_000
    assert times(requests) == sorted(times(requests))
