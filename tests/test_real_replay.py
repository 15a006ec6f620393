"""Traffic played against a server: due times, every way a request can end, and what is written of it."""

import asyncio
import itertools
import json
import time

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed in this environment")

from hypothesis import given
from hypothesis import strategies as st

from real.calls import Call, Reply
from real.client import play
from real.lateness import LIMIT_S, lateness_of, warnings_of
from real.measured import read_measured, trace_rows, write_measured
from real.measured_report import (
    ONLY_SIMULATED,
    length_mismatch,
    page,
    render,
    result_of,
    summary_of,
)
from real.pieces import take
from real.prompts import WORDS, Prompts, as_words
from real.replay import PRIORITIES, Manner, replay
from real.server_metrics import parse, series_of
from tests.fake_server import fake_server, refuse, tokens
from twin.clock import PS
from twin.cluster.clients import ClientsSpec, Retries
from twin.metrics.summary import summarize_tiers
from twin.report.records_file import COLUMNS
from twin.scenario import load_scenario
from twin.simulation import simulate
from twin.workload.streams import Traffic, open_streams

SCENARIO = {
    "name": "small",
    "model": "meta-llama/Llama-3.1-8B",
    "hardware": {"gpu": "H100"},
    "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "max_model_len": 2048},
    "policy": "vllm-fcfs",
    "traffic": [
        {
            "arrivals": {"process": "constant", "rate": 50},
            "prompt_tokens": {"fixed": 20},
            "output_tokens": {"fixed": 5},
            "requests": 20,
        }
    ],
}


def scenario(*overrides, **stream):
    document = json.loads(json.dumps(SCENARIO))
    document["traffic"][0] |= stream
    return load_scenario(document, overrides)


def played(loaded, behave, manner=None, stop_after_s=None):
    async def go():
        async with fake_server(behave) as (url, bodies):
            traffic = Traffic(open_streams(loaded.traffic, loaded.run.seed))
            stop = asyncio.Event()
            if stop_after_s is not None:
                asyncio.get_running_loop().call_later(stop_after_s, stop.set)
            done = await replay(url, "m", traffic, Prompts(1000), manner or Manner(), stop)
            return done, bodies

    return asyncio.run(go())


def ttft(one):
    return (one.record.first_token_ps - one.record.arrival_ps) / PS


# --- when -----------------------------------------------------------------------------------------


def test_open_loop_sends_each_when_it_is_due():
    done, bodies = played(scenario(), tokens(gap_s=0.02))
    assert [one.record.index for one in done.measured] == list(range(20))
    assert [one.record.arrival_ps for one in done.measured] == [i * PS // 50 for i in range(20)]
    assert all(one.record.outcome == "completed" for one in done.measured)
    assert all(0 <= one.lateness_s < 0.3 for one in done.measured)
    assert len(bodies) == 20
    # Replies take 0.1 s, five arrivals: it did not wait for them.
    assert all(len(one.record.itl_ps) == 4 for one in done.measured)
    assert all(sum(one.record.itl_ps) >= 0.07 * PS for one in done.measured)
    assert done.wall_s > 19 / 50
    assert done.cpu_share > 0


def test_one_instant_for_all_shows_in_the_planned_time_only():
    loaded = scenario(arrivals={"process": "batch", "at": [0], "size": 100}, requests=100)
    first_s = 0.05
    done, _ = played(loaded, tokens(first_s=first_s), Manner(max_in_flight=10))
    planned = sorted(ttft(one) for one in done.measured)
    sent = sorted(one.sent_ttft_s for one in done.measured)
    assert len(planned) == 100
    # Ten at a time: the last ten wait for nine rounds.
    assert planned[-1] > 9 * first_s
    assert sent[50] < planned[50] / 2
    assert lateness_of(done.measured).p99_s > 8 * first_s
    assert "at most 10 open at once" in warnings_of(done, 10)[0]


def test_a_stall_shows_in_the_planned_time_of_all_that_were_due_meanwhile():
    stall_s, begun = 5.0, []

    async def behave(stream):
        begun.append(time.monotonic())
        left = begun[0] + stall_s - time.monotonic()
        return await tokens(first_s=max(0.0, left))(stream)

    done, _ = played(scenario(), behave, Manner(max_in_flight=1))
    planned, sent = [ttft(one) for one in done.measured], [one.sent_ttft_s for one in done.measured]
    # Due every 20 ms; the first one blocks for 5 s.
    assert min(planned[:15]) > 4.5
    assert sorted(sent)[10] < min(planned[:10])
    assert planned[0] == pytest.approx(stall_s, abs=0.3)


def test_a_refusal_shows_in_the_planned_time_of_who_asks_again():
    asked = []

    async def behave(stream):
        # Each is refused three times: 0.1 s later it asks again.
        asked.append(tuple(stream.body["prompt"]))
        answer = tokens() if asked.count(asked[-1]) > 3 else refuse(503)
        return await answer(stream)

    retries = Retries(50, PS // 10, 1.0, PS // 10, 0.0, frozenset({"refused"}), True, None, 1)
    done, bodies = played(scenario(requests=3), behave, Manner(clients=ClientsSpec(retries)))
    assert all(one.record.outcome == "completed" for one in done.measured)
    assert all(one.record.attempts == 4 for one in done.measured)
    assert len(bodies) == 12
    assert min(ttft(one) for one in done.measured) >= 0.3
    assert all(one.sent_ttft_s <= ttft(one) - 0.3 for one in done.measured)


def test_retry_after_is_heeded():
    asked = []

    async def behave(stream):
        asked.append(time.monotonic())
        answer = refuse(429, {"Retry-After": "0.4"}) if len(asked) == 1 else tokens()
        return await answer(stream)

    retries = Retries(2, PS // 1000, 1.0, PS, 0.0, frozenset({"refused"}), True, None, 1)
    played(scenario(requests=1), behave, Manner(clients=ClientsSpec(retries)))
    assert asked[1] - asked[0] >= 0.4


def test_a_closed_loop_waits_for_its_replies():
    open_now, most = 0, 0

    async def behave(stream):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        result = await tokens(first_s=0.01)(stream)
        open_now -= 1
        return result

    loaded = scenario(arrivals={"process": "closed", "users": 3, "think_time": 0}, requests=12)
    done, _ = played(loaded, behave)
    assert len(done.measured) == 12
    assert most <= 4  # a server may hear of the next before it has left the last
    ends = sorted(one.record.finish_ps for one in done.measured)
    later = sorted(one.record.arrival_ps for one in done.measured)[3:]
    assert all(arrival >= end for arrival, end in zip(later, ends, strict=False))


def test_a_stop_counts_what_is_open():
    done, _ = played(scenario(), tokens(first_s=30.0), stop_after_s=0.3)
    assert done.interrupted
    assert {one.record.outcome for one in done.measured} == {"unfinished"}
    assert 5 <= len(done.measured) < 20
    assert all(one.record.finish_ps is None for one in done.measured)


def test_a_fault_of_our_own_ends_the_run(monkeypatch):
    def fails(self, *arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(Prompts, "tokens", fails)
    with pytest.raises(ZeroDivisionError):
        played(scenario(), tokens())


def test_nothing_is_sent_after_the_end():
    done, bodies = played(scenario(), tokens(), Manner(until_s=0.1))
    assert len(bodies) == len(done.measured) == 6


# --- what comes of a request ----------------------------------------------------------------------


async def _cut(stream):
    await stream.token(2)
    await asyncio.sleep(0.05)
    return stream.disconnect()


async def _aborted(stream):
    await stream.token()
    await stream.token(finish_reason="abort", stop_reason="timeout:total")
    return await stream.done()


async def _unended(stream):
    await stream.token()
    return stream.response


async def _error_in_the_stream(stream):
    await stream.token()
    await stream.piece(error={"message": "engine died", "code": 500})
    return await stream.done()


@pytest.mark.parametrize(
    ("behave", "outcome", "reason", "output"),
    [
        (tokens(), "completed", "length", 5),
        (tokens(finish="stop"), "completed", "stop", 5),
        (refuse(429), "refused", "http 429", 0),
        (refuse(503), "refused", "http 503", 0),
        (refuse(400), "refused", "http 400", 0),
        (refuse(500), "aborted", "http 500", 0),
        (_cut, "aborted", "disconnected", 2),
        (_unended, "aborted", "disconnected", 1),
        (_error_in_the_stream, "aborted", "error in the reply", 1),
        (_aborted, "timed_out", "timeout:total", 2),
    ],
)
def test_every_end_has_its_outcome(behave, outcome, reason, output):
    done, _ = played(scenario(requests=2), behave)
    for one in done.measured:
        record = one.record
        assert (record.outcome, record.reason) == (outcome, reason)
        assert record.output_tokens == output
        assert record.finish_ps >= record.arrival_ps
        assert (record.first_token_ps is not None) == (output > 0)


def test_nobody_listens():
    async def go():
        return await play("http://127.0.0.1:9", "m", [Call(0.0, [1], 1)])

    [reply] = asyncio.run(go())
    assert (reply.status, reply.error.partition(":")[0]) == (0, "ClientConnectorError")


@pytest.mark.parametrize(
    ("timeouts", "behave", "reason", "tokens_seen"),
    [
        ({"ttft": 0.15}, tokens(first_s=2.0), "timeout:ttft", 0),
        ({"total": 0.2}, tokens(gap_s=0.15), "timeout:total", 2),
        ({"ttft": 0.15, "total": 0.4}, tokens(gap_s=0.15), "timeout:total", 3),
    ],
)
def test_clients_leave_at_their_deadline(timeouts, behave, reason, tokens_seen):
    done, bodies = played(scenario(requests=1, timeouts=timeouts), behave)
    [one] = done.measured
    assert (one.record.outcome, one.record.reason) == ("timed_out", reason)
    assert one.record.output_tokens <= tokens_seen
    limit = timeouts[reason.partition(":")[2]]
    assert limit <= one.record.finish_ps / PS < limit + 1.0
    assert "vllm_xargs" not in bodies[0] or "ttft_s" not in bodies[0]["vllm_xargs"]


def test_a_reply_in_time_is_not_cut_by_the_deadline_of_its_first_token():
    done, _ = played(scenario(requests=1, timeouts={"ttft": 0.3}), tokens(gap_s=0.15))
    assert done.measured[0].record.outcome == "completed"


def test_tiers_and_deadlines_go_along():
    loaded = scenario(
        requests=30,
        timeouts={"ttft": 2, "total": 5},
        tiers={"ONLINE": 0.4, "BATCH": 0.3, "OFFLINE": 0.3},
        tenants={"a": 0.5, "b": 0.5},
    )
    done, bodies = played(loaded, tokens(), Manner(server_aborts=True))
    tiers = {one.record.tier for one in done.measured}
    assert tiers == {"ONLINE", "BATCH", "OFFLINE"}
    for one, body in zip(done.measured, bodies, strict=True):
        extra = body["vllm_xargs"]
        assert (extra["tier"], extra["tenant"]) == (one.record.tier, one.record.tenant)
        assert body["priority"] == {"ONLINE": 0, "BATCH": 1, "OFFLINE": 2}[one.record.tier]
        # What is left of it when the request leaves.
        assert 1.5 < extra["ttft_s"] <= 2.0
        assert 4.5 < extra["total_s"] <= 5.0
    _, bodies = played(loaded, tokens(), Manner(hints=False))
    assert not any({"vllm_xargs", "priority"} & set(body) for body in bodies)


def test_priorities_are_those_of_the_simulator():
    """The most urgent tier has the smallest number, in the client, in the twin and in a server's order."""
    assert sorted(PRIORITIES, key=PRIORITIES.get) == ["ONLINE", "BATCH", "OFFLINE"]
    result = simulate(
        scenario(
            "policy=vllm-priority",
            arrivals={"process": "batch", "at": [0], "size": 90},
            requests=90,
            tiers={"OFFLINE": 0.4, "ONLINE": 0.3, "BATCH": 0.3},
        )
    )
    last = {}
    for record in result.records:
        last[record.tier] = max(last.get(record.tier, 0), record.first_token_ps)
    assert sorted(last, key=last.get) == sorted(PRIORITIES, key=PRIORITIES.get)


# --- tokens ---------------------------------------------------------------------------------------


def stream_of(*chunks):
    reply = Reply(Call(0.0, "x", 9))
    for at, chunk in enumerate(chunks, 1):
        take(reply, chunk, float(at))
    return reply


def delta(**content):
    return {"choices": [{"index": 0, "delta": content, "finish_reason": None}]}


ROLE = delta(role="assistant", content="")
THOUGHT = [delta(reasoning_content=word) for word in ("let", "me", "see")]
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def test_thinking_tokens_are_tokens():
    whole = stream_of(ROLE, *THOUGHT, delta(content="yes"), END)
    assert (whole.token_s, whole.finish_reason) == ([2.0, 3.0, 4.0, 5.0], "stop")
    cut = stream_of(ROLE, *THOUGHT, END)
    assert cut.ttft_s == 2.0
    assert stream_of(ROLE, delta(reasoning="hm"), END).ttft_s == 2.0
    assert stream_of(ROLE, delta(tool_calls=[{"index": 0}]), END).ttft_s == 2.0
    assert stream_of(ROLE, END).ttft_s is None


def test_usage_counts_better_than_pieces():
    def piece(total, text="x"):
        choice = {"index": 0, "text": text, "finish_reason": None}
        return {"choices": [choice], "usage": {"completion_tokens": total, "prompt_tokens": 3}}

    several = stream_of(piece(1), piece(4), piece(4, ""), {"usage": {"completion_tokens": 4}})
    assert several.token_s == [1.0, 2.0, 2.0, 2.0]
    assert several.prompt_tokens == 3
    text = {"choices": [{"index": 0, "text": "abc", "finish_reason": None}]}
    at_end = stream_of(text, text, {"choices": [], "usage": {"completion_tokens": 5}})
    assert at_end.token_s == [1.0, 2.0, 2.0, 2.0, 2.0]
    role = {**ROLE, "usage": {"completion_tokens": 0}}
    assert stream_of(role, {**THOUGHT[0], "usage": {"completion_tokens": 1}}).token_s == [2.0]


def test_whole_replies_have_no_times_of_tokens():
    async def behave(stream):
        from aiohttp import web

        assert not stream.body.get("stream")
        usage = {"completion_tokens": 5, "prompt_tokens": 20}
        choice = {"text": "x" * 5, "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": usage})

    done, _ = played(scenario(requests=2), behave, Manner(stream=False))
    for one in done.measured:
        assert (one.record.outcome, one.record.output_tokens) == ("completed", 5)
        assert one.record.first_token_ps is None
        assert len(one.record.itl_ps) == 0


def test_lengths_are_forced_and_a_mismatch_is_told():
    done, bodies = played(scenario(requests=5), tokens())
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in bodies)
    assert length_mismatch(done.measured) == 0.0

    async def early(stream):
        number = len(stream.body["prompt"])
        assert number == 20
        for i in range(2 if next(counter) % 5 < 2 else 5):
            await stream.token(finish_reason="stop" if i == 1 else None)
        return await stream.done()

    counter = itertools.count()
    done, bodies = played(scenario(requests=20), early, Manner(exact_lengths=False))
    assert not any("ignore_eos" in body or body["max_tokens"] for body in bodies)
    assert length_mismatch(done.measured) == pytest.approx(0.4)
    # The twin is told what really came.
    assert sorted({row.output_tokens for row in trace_rows(done.measured)}) == [2, 5]


def test_conversations_repeat_what_the_server_said():
    loaded = scenario(sessions={"turns": 3, "think_time": 0.01}, requests=6)
    done, bodies = played(loaded, tokens())
    assert len(bodies) == 6
    by_session = {}
    for one in done.measured:
        by_session.setdefault(one.record.session, []).append(one)
    prompts = {len(body["prompt"]): body["prompt"] for body in bodies}
    assert set(prompts) >= {20, 45, 70}
    said = [100, 101, 102, 103, 104]
    assert all(body["prompt"][20:25] == said for body in bodies if len(body["prompt"]) >= 45)
    assert all(body["prompt"][45:50] == said for body in bodies if len(body["prompt"]) == 70)
    for turns in by_session.values():
        for before, after in itertools.pairwise(turns):
            assert after.record.arrival_ps >= before.record.finish_ps + PS // 100


# --- content --------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 60), st.integers(64, 200_000))
def test_an_id_is_always_the_same_tokens(one, other, length, vocabulary):
    prompts = Prompts(vocabulary)
    piece = prompts.piece(one, length)
    assert len(piece) == length
    assert piece == Prompts(vocabulary).piece(one, length)
    assert piece[: length // 2] == prompts.piece(one, length // 2)
    assert all(prompts.low <= token < prompts.low + prompts.size < vocabulary for token in piece)
    if one != other and length >= 8:
        assert piece != prompts.piece(other, length)


def test_prompts_are_as_long_as_they_are_said_to_be():
    prompts = Prompts(1000)
    shared = ((7, 30), (8, 10))
    first = prompts.tokens(shared, 50, {}, 0)
    second = prompts.tokens(shared, 50, {}, 1)
    assert len(first) == 50
    assert first[:40] == second[:40]
    assert first[40:] != second[40:]
    assert prompts.tokens(((7, 30),), 30, {7: [5, 6]}, 0)[:2] == [5, 6]
    assert len(prompts.tokens(((7, 30),), 30, {7: [5, 6]}, 0)) == 30
    with pytest.raises(ValueError, match="must be >= 64"):
        Prompts(63)
    words = as_words(first)
    assert len(words.split()) == 50
    assert set(words.split()) <= set(WORDS)


# --- files ----------------------------------------------------------------------------------------


def test_what_is_written_is_what_the_twin_writes_and_reads(tmp_path):
    loaded = scenario(tiers={"ONLINE": 0.5, "BATCH": 0.5})
    done, _ = played(loaded, tokens(gap_s=0.002))
    write_measured(tmp_path, done.measured, {"url": "here"})
    columns, facts = read_measured(tmp_path)
    assert facts == {"url": "here"}
    assert list(columns)[: len(COLUMNS) + 1] == [*COLUMNS, "itl_s"]
    assert columns["max_tokens"] == [5] * 20
    for one, due, sent, token in zip(
        done.measured,
        columns["arrival_s"],
        columns["sent_s"],
        columns["first_token_s"],
        strict=True,
    ):
        assert due <= sent <= token
        assert token == one.record.first_token_ps / PS
    again = scenario(f"traffic=[{{trace: {tmp_path / 'trace.jsonl'}}}]")
    records = list(simulate(again).records)
    assert [r.arrival_ps for r in records] == [one.record.arrival_ps for one in done.measured]
    assert [r.tier for r in records] == [one.record.tier for one in done.measured]
    assert all((r.prompt_tokens, r.output_tokens) == (20, 5) for r in records)


def test_failures_are_not_mixed_into_latencies():
    """Eight replies with a first token after 0.1 s; two that fail after 0.5 s without one."""

    async def behave(stream):
        if next(counter) % 5 == 4:
            await asyncio.sleep(0.5)
            return await refuse(500)(stream)
        return await tokens(first_s=0.1)(stream)

    counter = itertools.count()
    done, _ = played(scenario(requests=10), behave)
    records = [one.record for one in done.measured]
    tier = summarize_tiers(records, objectives={}, warmup_ps=0, end_ps=PS)["ONLINE"]
    assert (tier.counts.completed, tier.counts.aborted) == (8, 2)
    assert tier.latency["ttft"].count == 8
    assert tier.latency["ttft"].mean == pytest.approx(0.1, abs=0.08)
    failed = [r for r in records if r.outcome == "aborted"]
    assert all((r.finish_ps - r.arrival_ps) / PS >= 0.5 for r in failed)
    series = series_of([], 1.0)
    result = result_of(scenario(), done.measured, series, {}, 1.0, False)
    summary = summary_of(result, "http://here", ["beware"])
    span = result.simulated_ps / PS
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(40 / span)
    client = {"cpu_share": 0.1, "lateness": None, "sent_on_time_limit_s": LIMIT_S}
    text = render(summary, done.measured, client)
    assert "2 aborted (http 500), after 5" in text
    assert "warning: beware" in text
    html = page(result, summary)
    assert "Requests and objectives" in html
    assert "simulated seconds" not in html
    assert not any(f"<h2>{title}</h2>" in html for title in ONLY_SIMULATED)
    assert "a step ran" not in html.partition("<script>")[0]
    assert summary["verdict"].startswith("Measured at http://here, not simulated")


def test_metrics_of_a_server_become_a_time_series():
    text = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:prefix_cache_hits_total{engine="0"} %d
vllm:prompt_tokens_total{engine="0"} %d
vllm:iteration_tokens_total_sum{engine="0"} %d
twin:num_requests_held{tier="BATCH"} 1.0
twin:num_requests_ready{tier="BATCH"} 1.0
twin:num_requests_running{tier="ONLINE"} 3.0
python_info 1.0
"""
    first, second = parse(text % (10, 100, 90)), parse(text % (30, 200, 210))
    assert second.since(first) == {
        "prefix_hit_tokens": 20,
        "prompt_tokens": 100,
        "scheduled_tokens": 120,
    }
    series = series_of([(0.0, first), (1.0, second)], 1.0)
    row = list(series.rows())[-1]
    assert (row["held.BATCH"], row["ready.BATCH"], row["running.ONLINE"]) == (1, 1, 3)
    assert row["prefill_tokens_per_s"] == 80
    assert row["decode_tokens_per_s"] == 40
