"""Traffic: exact instants, separate sources of chance, one order over all streams."""

import math
from fractions import Fraction
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.clock import PS
from twin.metrics.records import RequestRecord
from twin.workload.arrivals import Renewal
from twin.workload.gaps import Equal, Exponential
from twin.workload.lengths import Fixed, Lengths, Uniform
from twin.workload.sessions import Always, Sessions
from twin.workload.source import Clients, Shares
from twin.workload.streams import Traffic, open_streams
from twin.workload.synthetic import SyntheticStream


def poisson(rate):
    return Renewal(Exponential(), rate)


def constant(rate):
    return Renewal(Equal(), rate)


def clients(**changes):
    values = {
        "tiers": {"ONLINE": 1.0},
        "tenants": {"default": 1.0},
        "max_tokens": None,
        "ttft_timeout_ps": None,
        "total_timeout_ps": None,
    }
    return Clients(**values | changes)


def synthetic(**changes):
    values = {
        "clients": clients(),
        "arrivals": poisson(5.0),
        "lengths": Lengths(Fixed(10), Uniform(1, 100)),
        "requests": 20,
        "duration_ps": None,
        "sessions": None,
    }
    return SyntheticStream(**values | changes)


def taken(streams, seed=1):
    """All requests that need no reply before them."""
    traffic = Traffic(open_streams(streams, seed))
    requests = []
    while traffic.next_ps() is not None:
        requests.append(traffic.pop().request)
    return requests


def ended(request, finish_ps, outcome="completed", output_tokens=None):
    return RequestRecord(
        index=request.index,
        tier=request.tier,
        tenant=request.tenant,
        session=request.session,
        stream=request.stream,
        replica=0,
        arrival_ps=request.arrival_ps,
        first_scheduled_ps=None,
        first_token_ps=None,
        finish_ps=finish_ps,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens if output_tokens is None else output_tokens,
        outcome=outcome,
        reason="stop",
    )


# --- distributions ------------------------------------------------------------------------


def test_poisson_has_the_rate_and_the_spread_of_exponential_gaps():
    instants = list(islice(poisson(4.0).instants(Random("x")), 20_000))
    gaps = [b - a for a, b in pairwise([0, *instants])]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(PS / 4, rel=0.02)
    assert spread == pytest.approx(mean, rel=0.03)
    assert all(isinstance(t, int) for t in instants)


def test_constant_arrivals_do_not_drift():
    instants = list(islice(constant(0.3).instants(Random()), 300_001))
    assert instants[0] == 0
    assert instants[1] == round(PS / Fraction("0.3"))
    assert instants[300_000] == 1_000_000 * PS


@given(st.integers(1, 50), st.integers(0, 50), st.integers())
def test_uniform_lengths_reach_both_ends_and_nothing_else(low, width, seed):
    length, rng = Uniform(low, low + width), Random(seed)
    draw = length.drawn(rng)
    drawn = {draw() for _ in range(1000)}
    assert drawn <= set(range(low, low + width + 1))
    assert length.least == low


def test_shares_are_kept():
    shares, rng = Shares({"a": 0.7, "b": 0.2, "c": 0.1, "never": 0.0}), Random(3)
    drawn = [shares.draw(rng) for _ in range(20_000)]
    assert set(drawn) == {"a", "b", "c"}
    assert drawn.count("a") == pytest.approx(14_000, rel=0.02)
    assert drawn.count("c") == pytest.approx(2000, rel=0.06)


# --- streams ------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_traffic_and_another_seed_another():
    streams = [synthetic(), synthetic(arrivals=constant(3.0))]
    assert taken(streams, 1) == taken(streams, 1)
    assert taken(streams, 1) != taken(streams, 2)


def times(requests, stream=0):
    return [r.arrival_ps for r in requests if r.stream == stream]


def lengths(requests, stream=0):
    return [(r.prompt_tokens, r.output_tokens) for r in requests if r.stream == stream]


def who(requests, stream=0):
    return [(r.tier, r.tenant) for r in requests if r.stream == stream]


def test_no_source_of_chance_disturbs_another():
    base = taken([synthetic()])
    mixed = taken([synthetic(clients=clients(tiers={"ONLINE": 0.5, "BATCH": 0.5}))])
    longer = taken([synthetic(lengths=Lengths(Uniform(10, 90), Uniform(1, 100)))])
    joined = taken([synthetic(), synthetic()])
    denser = taken([synthetic(arrivals=poisson(50.0))])
    assert times(base) == times(mixed) == times(longer) == times(joined)
    assert lengths(base) == lengths(mixed) == lengths(joined) == lengths(denser)
    assert [o for _, o in lengths(base)] == [o for _, o in lengths(longer)]
    assert who(base) == who(longer)
    assert {tier for tier, _ in who(mixed)} == {"ONLINE", "BATCH"}
    assert times(joined, 0) != times(joined, 1)


def test_streams_are_merged_by_instant_then_position_and_numbered_in_that_order():
    streams = [
        synthetic(arrivals=constant(2.0), requests=6),
        synthetic(arrivals=constant(4.0), requests=6),
    ]
    requests = taken(streams)
    assert [r.index for r in requests] == list(range(12))
    assert [(r.arrival_ps * 4 // PS, r.stream) for r in requests] == [
        (0, 0), (0, 1), (1, 1), (2, 0), (2, 1), (3, 1), (4, 0), (4, 1), (5, 1), (6, 0), (8, 0), (10, 0),
    ]  # fmt: skip


def test_requests_are_made_one_at_a_time():
    endless = synthetic(requests=None, duration_ps=10**30)
    traffic = Traffic(open_streams([endless, endless], 1))
    assert [traffic.pop().request.index for _ in range(1000)] == list(range(1000))


def test_duration_ends_a_stream_before_that_instant():
    exact = synthetic(arrivals=constant(10.0), requests=None, duration_ps=PS)
    assert len(taken([exact])) == 10
    both = synthetic(arrivals=constant(10.0), requests=4, duration_ps=PS)
    assert len(taken([both])) == 4


def test_content_is_shared_by_nobody_without_sessions():
    requests = taken([synthetic(), synthetic()])
    ids = [i for r in requests for i in (r.reply, *(content for content, _ in r.prompt))]
    assert len(ids) == len(set(ids))


def test_what_clients_ask_for_is_in_every_request():
    asked = clients(max_tokens=7, ttft_timeout_ps=3, total_timeout_ps=5, tenants={"t": 1.0})
    for r in taken([synthetic(clients=asked)]):
        assert (r.max_tokens, r.ttft_timeout_ps, r.total_timeout_ps, r.tenant) == (7, 3, 5, "t")


# --- sessions -----------------------------------------------------------------------------


def talk(turns=3, requests=6, think_ps=5 * PS, system=32, **changes):
    sessions = Sessions(Fixed(turns), system, Always(think_ps))
    return synthetic(sessions=sessions, requests=requests, arrivals=constant(1.0), **changes)


def test_a_turn_repeats_all_that_was_said_and_comes_a_think_time_after_the_reply():
    traffic = Traffic(open_streams([talk()], 1))
    first = traffic.pop().request
    other = traffic.pop().request
    assert traffic.next_ps() is None
    traffic.on_finish(ended(first, 10 * PS, output_tokens=3))
    assert traffic.next_ps() == 15 * PS
    second = traffic.pop().request
    assert second.session == first.session != other.session
    assert second.index == 2
    assert second.prompt[: len(first.prompt) + 1] == (*first.prompt, (first.reply, 3))
    assert second.prompt_tokens == first.prompt_tokens + 3 + 10
    assert first.prompt[0] == other.prompt[0]
    assert first.prompt[0][1] == 32
    assert first.prompt[1] != other.prompt[1]
    traffic.on_finish(ended(second, 20 * PS))
    third = traffic.pop().request
    traffic.on_finish(ended(third, 30 * PS))
    assert traffic.next_ps() is None


@pytest.mark.parametrize("outcome", ["refused", "timed_out", "aborted"])
def test_a_turn_that_is_not_completed_ends_its_session(outcome):
    traffic = Traffic(open_streams([talk(requests=3)], 1))
    first = traffic.pop().request
    traffic.on_finish(ended(first, 10 * PS, outcome))
    assert traffic.next_ps() is None


def test_requests_counts_the_turns_of_all_sessions():
    traffic = Traffic(open_streams([talk(turns=4, requests=10)], 1))
    assert traffic.expected() == 10
    number = 0
    while traffic.next_ps() is not None:
        request = traffic.pop().request
        number += 1
        traffic.on_finish(ended(request, request.arrival_ps))
    assert number == 10


def test_lengths_of_a_session_do_not_depend_on_when_replies_end():
    def play(delay):
        traffic = Traffic(open_streams([talk(lengths=Lengths(Uniform(1, 50), Uniform(1, 100)))], 1))
        found = {}
        while traffic.next_ps() is not None:
            r = traffic.pop().request
            found[r.session, len(r.prompt)] = (r.prompt[-1][1], r.output_tokens)
            traffic.on_finish(ended(r, r.arrival_ps + delay(r)))
        return found

    assert play(lambda r: PS) == play(lambda r: PS * (9 if r.session == "0-0" else 1))


def test_later_turns_and_first_ones_share_one_order():
    traffic = Traffic(open_streams([talk(think_ps=0), synthetic(arrivals=constant(2.0))], 1))
    first = traffic.pop().request
    traffic.on_finish(ended(first, PS))
    order = [traffic.pop() for _ in range(5)]
    keys = [(a.due_ps, a.stream, a.number, a.turn) for a in order]
    assert keys == sorted(keys)
    assert (PS, 0, 0, 1) in keys


def test_without_a_system_prompt_nothing_of_zero_length_is_in_the_prompt():
    traffic = Traffic(open_streams([talk(system=0)], 1))
    assert [tokens for _, tokens in traffic.pop().request.prompt] == [10]
