"""Closed loops, agents, shared and repeated texts, mixes: who asks what after whom."""

import time
import tracemalloc
from heapq import heappop, heappush
from itertools import pairwise

import pytest

from tests.runs import check_books, document, flat_profile, run, stream
from tests.test_workload import ended, lengths, taken, times, who
from twin.clock import PS
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.workload.formats.rows import TraceRow
from twin.workload.prefixes import InfiniteCache
from twin.workload.streams import Traffic, open_streams
from twin.workload.synthetic import REFUSED_PAUSE_PS

LONG = {"max_model_len": 131_072, "num_gpu_blocks_override": 9000}


def loaded(*streams, seed=1, **engine):
    return load_scenario(document(traffic=list(streams), engine=engine), seed=seed).traffic


def play(streams, service_ps=PS, outcome=lambda r: "completed", seed=1, most=10**6):
    """Requests in the order they came, each answered after service_ps(request)."""
    service = service_ps if callable(service_ps) else lambda r: service_ps
    traffic = Traffic(open_streams(streams, seed))
    inside, found = [], []
    while len(found) < most:
        due_ps = traffic.next_ps()
        if inside and (due_ps is None or inside[0][0] < due_ps):
            finish_ps, _, request = heappop(inside)
            traffic.on_finish(ended(request, finish_ps, outcome(request)))
        elif due_ps is None:
            break
        else:
            request = traffic.pop().request
            found.append(request)
            heappush(inside, (request.arrival_ps + service(request), request.index, request))
    return found


def most_at_once(requests, service_ps):
    steps = sorted(
        [(r.arrival_ps, 1) for r in requests] + [(r.arrival_ps + service_ps, -1) for r in requests]
    )
    inside = most = 0
    for _, step in steps:
        inside += step
        most = max(most, inside)
    return most


# --- closed loop --------------------------------------------------------------------------


def closed(users=5, **keys):
    think = {"think_time": keys.pop("think_time")} if "think_time" in keys else {}
    ramp = {"ramp": keys.pop("ramp")} if "ramp" in keys else {}
    arrivals = {"process": "closed", "users": users} | think | ramp
    return stream(arrivals=arrivals, requests=keys.pop("requests", 100), **keys)


def test_no_more_requests_are_in_flight_than_users():
    found = play(loaded(closed(5, think_time=0.5)), 3 * PS)
    assert len(found) == 100
    assert most_at_once(found, 3 * PS) == 5
    by_user = [found[i::5] for i in range(5)]
    for mine in by_user:
        assert {b.arrival_ps - a.arrival_ps for a, b in pairwise(mine)} == {7 * PS // 2}


def test_users_appear_over_the_ramp():
    found = play(loaded(closed(4, ramp=2, requests=4)))
    assert times(found) == [0, PS // 2, PS, 3 * PS // 2]


def test_fewer_requests_than_users():
    assert len(play(loaded(closed(50, requests=7)))) == 7


def test_duration_ends_a_closed_loop():
    written = closed(3, think_time=1, requests=None, duration=10)
    found = play(loaded(written), PS)
    assert times(found)[-1] < 10 * PS
    assert len(found) == 15


@pytest.mark.parametrize("outcome", ["timed_out", "aborted", "refused"])
def test_a_user_goes_on_whatever_became_of_the_request(outcome):
    found = play(
        loaded(closed(2, requests=20)),
        lambda r: 0 if outcome == "refused" else PS,
        lambda r: outcome,
    )
    assert len(found) == 20
    if outcome == "refused":
        assert times(found)[-1] == 9 * REFUSED_PAUSE_PS


def test_think_times_are_drawn():
    for think, low, high in (
        ({"exponential": 2.0}, 0, 40),
        ({"uniform": [1, 3]}, 1, 3),
        ({"lognormal": {"median": 2, "p95": 4}}, 0.1, 30),
    ):
        found = times(play(loaded(closed(1, think_time=think, requests=2000)), 0))
        gaps = [(b - a) / PS for a, b in pairwise(found)]
        assert low <= min(gaps)
        assert max(gaps) <= high
        assert sorted(gaps)[len(gaps) // 2] == pytest.approx(
            2 if "exponential" not in think else 1.39, rel=0.1
        )


def test_a_user_of_a_closed_loop_holds_one_conversation_at_a_time():
    talk = {"turns": 3, "think_time": 0.25}
    found = play(loaded(closed(2, think_time=2, requests=12, sessions=talk)), PS)
    assert len(found) == 12
    assert most_at_once(found, PS) == 2
    mine = [r for r in found if r.session in ("0-0", "0-2")]
    assert times(mine) == [n * PS // 4 for n in (0, 5, 10, 22, 27, 32)]


def test_the_kth_request_is_the_same_however_fast_replies_are():
    written = loaded(closed(3, output_tokens={"uniform": [1, 90]}, tiers={"A": 0.5, "B": 0.5}))
    slow, fast = play(written, 9 * PS), play(written, lambda r: r.output_tokens * PS)
    assert lengths(slow) == lengths(fast)
    assert who(slow) == who(fast)


def test_a_closed_loop_in_a_run(tmp_path):
    written = document(
        traffic=[closed(6, think_time=0.1, requests=60)],
        hardware={"gpu": "H100", "step_time": flat_profile(tmp_path, PS // 100)},
        engine={"max_num_seqs": 2},
    )
    result = run(written)
    check_books(result)
    assert len(result.records) == 60
    inside = sorted(
        [(r.arrival_ps, 1) for r in result.records] + [(r.finish_ps, -1) for r in result.records]
    )
    level = 0
    for _, change in inside:
        level += change
        assert level <= 6


# --- agents -------------------------------------------------------------------------------


AGENT = {
    "turns": 2,
    "system_prompt_tokens": 50,
    "think_time": 10,
    "tools": {
        "calls": 3,
        "time": 0.5,
        "result_tokens": {"fixed": 7},
        "output_tokens": {"fixed": 4},
    },
}


def test_an_agent_calls_its_tools_before_it_answers():
    found = play(loaded(stream(100, 20, requests=8, sessions=AGENT)), PS)
    assert len({r.session for r in found}) == 1
    assert [r.output_tokens for r in found] == [4, 4, 4, 20] * 2
    start = found[0].arrival_ps
    assert [(r.arrival_ps - start) * 2 // PS for r in found] == [0, 3, 6, 9, 31, 34, 37, 40]
    first = [50, 100]
    assert [t for _, t in found[0].prompt] == first
    assert [t for _, t in found[1].prompt] == [*first, 4, 7]
    assert [t for _, t in found[4].prompt] == [*first, 4, 7, 4, 7, 4, 7, 20, 100]
    for before, after in pairwise(found):
        assert after.prompt[: len(before.prompt)] == before.prompt
        assert after.prompt[len(before.prompt)][0] == before.reply
        assert after.prompt_tokens == sum(t for _, t in after.prompt)


def test_calls_and_turns_are_drawn():
    sessions = AGENT | {"turns": {"uniform": [1, 3]}}
    sessions["tools"] = AGENT["tools"] | {"calls": {"quantiles": [[0, 0], [1, 2]]}}
    found = play(loaded(stream(100, 20, requests=3000, sessions=sessions)), 0)
    turns, calls = {}, {}
    for r in found:
        turns[r.session] = turns.get(r.session, 0) + (r.output_tokens == 20)
        calls[r.session] = calls.get(r.session, 0) + (r.output_tokens == 4)
    assert set(turns.values()) >= {1, 2, 3}
    assert sum(turns.values()) / len(turns) == pytest.approx(2, rel=0.05)
    assert sum(calls.values()) / sum(turns.values()) == pytest.approx(1, rel=0.05)


def test_plans_do_not_depend_on_the_time_of_replies():
    sessions = AGENT | {"turns": {"uniform": [1, 3]}, "think_time": {"exponential": 3}}
    written = loaded(
        stream(100, 20, requests=200, sessions=sessions, output_tokens={"uniform": [1, 60]})
    )

    def plans(service):
        found = {}
        for r in play(written, service):
            found.setdefault(r.session, []).append((r.prompt[-1][1], r.output_tokens))
        return found

    assert plans(PS) == plans(lambda r: PS * (1 + r.index % 7))


# --- texts that are shared ----------------------------------------------------------------


def hits(requests):
    """Share of the prompt tokens that an infinite cache would have."""
    cache = InfiniteCache()
    for r in requests:
        cache.add(TraceRow(0, r.arrival_ps, r.prompt_tokens, r.output_tokens, r.prompt))
    return cache.hit_tokens() / cache.prompt_tokens


def test_prompts_begin_with_one_of_the_shared_texts():
    found = taken(loaded(stream(100, 5, requests=7000, prefixes={"groups": 7, "tokens": 160})))
    assert {r.prompt[0][1] for r in found} == {160}
    assert {len(r.prompt) for r in found} == {2}
    counts = {}
    for r in found:
        counts[r.prompt[0][0]] = counts.get(r.prompt[0][0], 0) + 1
    assert len(counts) == 7
    assert min(counts.values()) > 850
    assert hits(found) == pytest.approx(160 / 260, rel=0.01)


def test_skew_makes_some_texts_popular():
    found = taken(
        loaded(stream(100, 5, requests=9000, prefixes={"groups": 3, "tokens": 16, "skew": 1}))
    )
    counts = {}
    for r in found:
        counts[r.prompt[0][0]] = counts.get(r.prompt[0][0], 0) + 1
    shares = sorted(counts.values(), reverse=True)
    assert [n / 9000 for n in shares] == pytest.approx([6 / 11, 3 / 11, 2 / 11], rel=0.06)


def test_a_system_prompt_comes_before_the_shared_text():
    sessions = {"turns": 1, "system_prompt_tokens": 32}
    found = taken(
        loaded(stream(9, 5, requests=50, sessions=sessions, prefixes={"groups": 2, "tokens": 64}))
    )
    assert [t for _, t in found[0].prompt] == [32, 64, 9]
    assert len({r.prompt[0][0] for r in found}) == 1
    assert len({r.prompt[1][0] for r in found}) == 2


def test_prompts_repeat_as_much_as_is_said():
    written = {"share": [[0, 0], [0.3, 0], [1, 0.8]], "memory": 200}
    found = taken(
        loaded(
            stream(1, 5, requests=6000, prompt_tokens={"uniform": [200, 4000]}, reuse=written),
            **LONG,
        )
    )
    assert hits(found) == pytest.approx(0.28, rel=0.04)
    assert all(sum(t for _, t in r.prompt) == r.prompt_tokens for r in found)
    assert all(t > 0 for r in found for _, t in r.prompt)
    seen = {}
    for r in found:
        back = [r.index - seen[c] for c, _ in r.prompt if c in seen]
        assert not back or min(back) <= 200
        seen.update((c, r.index) for c, _ in r.prompt)


def test_reuse_changes_nothing_else():
    plain, repeated = (
        taken(loaded(stream(1, 5, prompt_tokens={"uniform": [200, 900]}, **keys), **LONG))
        for keys in ({}, {"reuse": {"share": [[0, 0], [1, 1]]}})
    )
    assert times(plain) == times(repeated)
    assert lengths(plain) == lengths(repeated)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reuse": {"share": [[0, 0], [1, 2]]}}, "the values of share must be <= 1, got 2"),
        ({"reuse": {"share": [[0, 0], [1, 1]]}, "prefixes": {"groups": 1, "tokens": 5}}, "reuse goes neither with"),
        ({"prefixes": {"groups": 1, "tokens": 2000}}, "at least 2100 tokens .2000 of the system prompt"),
        ({"sessions": {"turns": 0}}, "sessions: turns must be >= 1, got 0"),
        ({"sessions": {"turns": {"uniform": [0, 3]}}}, "turns must be >= 1, got 0"),
        ({"sessions": {"turns": {"quantiles": [[0, 0.2], [1, 3]]}}}, "turns must be >= 1, got 0.2"),
        ({"sessions": {"turns": 2, "tools": {"calls": 2}}}, "tools.(result|output)_tokens: is missing"),
        ({"requests": None}, "would never end; give requests"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(InputError, match=message):
        loaded(stream(**keys))


# --- presets of several clients -----------------------------------------------------------


def test_a_mix_has_its_clients_in_their_shares_and_one_count_of_requests():
    [mixed] = loaded(
        {"preset": "servegen-large", "rate": 50, "requests": 20_000, "steady": True}, **LONG
    )
    found = taken([mixed])
    assert len(found) == 20_000
    assert [r.index for r in found] == list(range(20_000))
    assert times(found) == sorted(times(found))
    counts = {}
    for r in found:
        counts[r.tenant] = counts.get(r.tenant, 0) + 1
    for tenant, share in mixed.clients.tenants.items():
        assert counts.get(tenant, 0) / 20_000 == pytest.approx(share, rel=0.5, abs=0.004)
    assert found[-1].arrival_ps / PS == pytest.approx(400, rel=0.1)
    ids = [c for r in found for c in (r.reply, *(c for c, _ in r.prompt))]
    assert len(ids) == len(set(ids))


def test_a_mix_ends_at_its_duration():
    [mixed] = loaded(
        {"preset": "servegen-reason", "rate": 50, "duration": 20, "tenant": "one"}, **LONG
    )
    found = taken([mixed])
    assert 0 < times(found)[-1] < 20 * PS
    assert {r.tenant for r in found} == {"one"}


# --- cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrivals",
    [
        {"process": "gamma", "cv": 3, "rate": {"sine": {"mean": 100, "amplitude": 0.5}}},
        {"process": "batch", "at": [0], "size": 1_000_000},
        {"process": "bursts", "rate": 10, "burst_rate": 300, "burst": 5, "pause": 10},
    ],
    ids=lambda a: a["process"],
)
def test_memory_does_not_grow_with_requests(arrivals):
    written = stream(
        arrivals=arrivals,
        prompt_tokens={"lognormal": {"median": 300, "p95": 1500}},
        length_correlation=0.3,
        requests=1_000_000,
        reuse={"share": [[0, 0], [1, 0.5]], "memory": 50},
    )
    traffic = Traffic(open_streams(loaded(written), 1))
    for _ in range(2000):
        traffic.pop()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(6000):
            traffic.pop()
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_requests_are_made_fast():
    written = stream(
        arrivals={"process": "gamma", "cv": 3, "rate": {"sine": {"mean": 100, "amplitude": 0.5}}},
        prompt_tokens={"quantiles": [[0, 5], [0.5, 200], [1, 1500]]},
        output_tokens={"lognormal": {"median": 100, "p95": 300}},
        tiers={"A": 0.6, "B": 0.4},
        requests=60_000,
    )
    traffic = Traffic(open_streams(loaded(written), 1))
    start = time.process_time()
    while traffic.next_ps() is not None:
        traffic.pop()
    # About 200,000 a second on a core of a laptop; a tenth is asked for, as machines that run tests are busy.
    assert 60_000 / (time.process_time() - start) > 20_000
