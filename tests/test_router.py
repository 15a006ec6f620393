"""Routers: what they look at, what they remember, and that every one keeps the engine exact."""

import random
from collections import Counter
from dataclasses import dataclass
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import document, run, stream
from twin.clock import PS
from twin.cluster.affinity import SessionAffinity, bound
from twin.cluster.router import PowerOfTwo, RoundRobin, least_connections, least_kv, queue_aware
from twin.cluster.routers import ROUTERS
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.scenario import load_scenario
from twin.workload.request import Request


@dataclass
class Replica:
    index: int
    num_inflight: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


def request(session="a", prompt=((7, 100), (8, 50))):
    return Request(0, 0, prompt, sum(n for _, n in prompt), 1, None, 99, session=session)


def of(*inflight):
    return [Replica(i, n) for i, n in enumerate(inflight)]


loads = st.lists(
    st.builds(Replica, st.just(0), st.integers(0, 5), st.integers(0, 5), st.floats(0, 1)),
    min_size=1,
    max_size=8,
).map(lambda found: [Replica(i, r.num_inflight, r.num_waiting, r.kv_usage) for i, r in enumerate(found)])  # fmt: skip
requests = st.builds(
    request,
    st.sampled_from([None, "a", "b"]),
    st.lists(st.tuples(st.integers(0, 3), st.just(16)), min_size=1, max_size=4).map(tuple),
)


@pytest.mark.parametrize("name", ROUTERS)
@given(seed=st.integers(0, 99), sent=st.lists(st.tuples(requests, loads), max_size=12))
def test_every_router_names_a_replica_and_repeats_itself(name, seed, sent):
    routers = [ROUTERS[name](random.Random(seed), guard=1.25) for _ in range(2)]
    for asked, replicas in sent:
        chosen = {router(asked, replicas) for router in routers}
        assert len(chosen) == 1
        assert 0 <= chosen.pop() < len(replicas)


@given(loads)
def test_round_robin_takes_each_in_turn(replicas):
    router = RoundRobin()
    turns = [router(request(), replicas) for _ in range(2 * len(replicas))]
    assert turns == 2 * list(range(len(replicas)))


@given(loads)
def test_routers_by_state_take_the_first_of_the_emptiest(replicas):
    keys = {
        least_connections: lambda r: r.num_inflight,
        queue_aware: lambda r: (r.num_waiting, r.num_inflight),
        least_kv: lambda r: (r.kv_usage, r.num_inflight),
    }
    for router, key in keys.items():
        found = [key(replica) for replica in replicas]
        assert router(request(), replicas) == found.index(min(found))


def test_power_of_two_never_takes_the_fullest_and_draws_pairs_alike():
    router, replicas = PowerOfTwo(random.Random(1)), of(3, 1, 0, 2)
    taken = Counter(router(request(), replicas) for _ in range(12_000))
    assert 0 not in taken
    # Of the six pairs three have replica 2 in them, two more have replica 1, one more has replica 3.
    assert [round(taken[i] / 2000) for i in (2, 1, 3)] == [3, 2, 1]


# --- affinity -----------------------------------------------------------------------------


def test_a_session_stays_and_only_some_move_when_a_replica_comes():
    router = SessionAffinity(None)
    before = [router(request(f"{i}"), of(0, 0, 0, 0)) for i in range(2000)]
    assert before == [router(request(f"{i}"), of(9, 0, 3, 0)) for i in range(2000)]
    assert min(Counter(before).values()) > 2000 / 4 * 0.6
    after = [router(request(f"{i}"), of(0, 0, 0, 0, 0)) for i in range(2000)]
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {4}
    assert len(moved) < 2000 * 0.35


@given(loads, st.sampled_from([1, 1.25, 2]), requests)
def test_affinity_stays_within_its_guard(replicas, guard, asked):
    limit = bound(replicas, guard)
    assert min(replica.num_inflight for replica in replicas) < limit
    router = SessionAffinity(guard)
    if asked.session is not None:
        assert replicas[router(asked, replicas)].num_inflight < limit


def test_prefix_affinity_takes_the_longest_known_beginning():
    router = ROUTERS["prefix_affinity"](random.Random(1), None)
    shared, long = ((1, 100), (2, 10)), ((1, 100), (2, 10), (3, 5))
    assert router(request(prompt=shared), of(1, 0, 2)) == 1
    assert router(request(prompt=((4, 9),)), of(0, 5, 0)) == 0
    assert router(request(prompt=long), of(0, 9, 0)) == 1  # however loaded
    guarded = ROUTERS["prefix_affinity"](random.Random(1), 1.25)
    assert guarded(request(prompt=shared), of(1, 0, 2)) == 1
    assert guarded(request(prompt=long), of(0, 9, 0)) == 0
    # Both have it now, the second all of it.
    assert guarded(request(prompt=shared), of(2, 1, 2)) == 1
    assert guarded(request(prompt=long), of(2, 1, 2)) == 0


TALK = stream(
    64, 30, requests=60, arrivals={"process": "poisson", "rate": 25},
    sessions={"turns": 4, "system_prompt_tokens": 160, "think_time": 0.3},
)  # fmt: skip


def hit_share(result):
    engine = summarize(result)["engine"]
    return engine["prefix_hit_tokens"] / engine["prefix_query_tokens"]


def test_hits_fall_with_replicas_unless_conversations_stay_together():
    """chutesai/e2ee-proxy#6: round robin forgets, affinity does not."""
    shares = {
        (router, replicas): hit_share(
            run(document(traffic=[TALK], cluster=cluster | {"replicas": replicas}))
        )
        for router, cluster in {
            "round robin": {"router": "round_robin"},
            "session": {"router": "session_affinity", "routing": {"guard": None}},
            "prefix, guarded": {"router": "prefix_affinity"},
        }.items()
        for replicas in (1, 4)
    }
    assert shares["round robin", 4] < shares["round robin", 1] - 0.2
    for router in ("session", "prefix, guarded"):
        assert shares[router, 4] > shares[router, 1] - 0.08


def imbalance(result):
    """Requests of the fullest replica over the mean."""
    counts = Counter(record.replica for record in result.records)
    return max(counts.values()) / mean(counts[i] for i in range(len(result.engines)))


def test_without_a_guard_one_prefix_draws_everybody_to_one_replica():
    cluster = {"replicas": 4, "router": "prefix_affinity"}
    busy = TALK | {"requests": 300, "arrivals": {"process": "poisson", "rate": 40}}
    guarded = run(document(traffic=[busy], cluster=cluster))
    free = run(document(traffic=[busy], cluster=cluster | {"routing": {"guard": None}}))
    assert imbalance(free) == 4
    assert imbalance(guarded) < 1.6
    ttft = [summarize(result)["tiers"]["ONLINE"]["ttft_s"]["p90"] for result in (guarded, free)]
    assert ttft[0] < ttft[1] / 2


# --- what a router knows ------------------------------------------------------------------


def delayed(poll, router="least_connections"):
    burst = stream(100, 60, arrivals={"process": "poisson", "rate": 60}, requests=900)
    cluster = {"replicas": 4, "router": router, "routing": {"poll_interval": poll}}
    return run(document(traffic=[burst], cluster=cluster))


def test_late_signals_make_it_worse():
    """inference-sim/inference-sim#507: what a router sees late, it acts on late."""
    results = [delayed(poll) for poll in (0, 1, 5)]
    p90 = [summarize(result)["tiers"]["ONLINE"]["ttft_s"]["p90"] for result in results]
    assert p90[0] < p90[1] < p90[2]
    assert p90[1] > 2 * p90[0]


def test_a_burst_between_two_polls_lands_on_one_replica():
    """tinfoilsh/confidential-model-router#429: sixty requests in five seconds, seen after 15 s and after 1 s."""
    burst = stream(50, 400, arrivals={"process": "constant", "rate": 12}, requests=60)
    spread = {}
    for poll in (15, 1):
        cluster = {"replicas": 4, "router": "queue_aware", "routing": {"poll_interval": poll}}
        records = run(document(traffic=[burst], cluster=cluster)).records
        spread[poll] = Counter(record.replica for record in records)
    assert max(spread[15].values()) == 60
    assert len(spread[1]) == 4


def test_a_router_sees_the_state_of_the_last_poll(monkeypatch):
    """What it sees at any arrival is what an onlooker read at the last multiple of the interval."""
    seen = []

    def watch(asked, replicas):
        seen.append((asked.arrival_ps, [r.num_inflight for r in replicas]))
        return least_connections(asked, replicas)

    monkeypatch.setitem(ROUTERS, "least_connections", lambda rng, guard: watch)
    records = list(delayed(0.5).records)
    for at_ps, inflight in seen[::7]:
        poll_ps = at_ps - at_ps % (PS // 2)
        expected = [
            sum(r.replica == i and r.arrival_ps < poll_ps <= r.finish_ps for r in records)
            for i in range(4)
        ]
        assert inflight == expected
    assert any(any(inflight) for _, inflight in seen)


def test_several_routers_know_less():
    """vllm-project/production-stack#166: each sees its own requests; imbalance grows with their number."""
    waits = []
    for routers in (1, 2, 8):
        busy = stream(
            100, 60, arrivals={"process": "poisson", "rate": 70}, requests=1200,
            output_tokens={"uniform": [5, 120]},
        )  # fmt: skip
        cluster = {"replicas": 4, "routing": {"routers": routers}}
        summary = summarize(run(document(traffic=[busy], cluster=cluster)))
        waits.append(summary["tiers"]["ONLINE"]["queue_s"]["mean"])
    assert waits[0] < waits[1] < waits[2]


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"router": "round_robin", "routing": {"guard": 2}}, "guard"),
        ({"router": "random", "routing": {"poll_interval": 1}}, "poll_interval"),
        ({"router": "random", "routing": {"routers": 2}}, "routers"),
    ],
)
def test_what_a_router_does_not_look_at_is_refused(cluster, key):
    with pytest.raises(InputError, match=f"cluster.routing.{key}: changes nothing for router"):
        load_scenario(document(cluster=cluster))


# --- exactness ----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    router=st.sampled_from(list(ROUTERS)),
    seed=st.integers(0, 10_000),
    rate=st.integers(5, 80),
    blocks=st.integers(130, 300),
    poll=st.sampled_from([0, 0.05, 0.7]),
    routers=st.integers(1, 3),
    policy=st.sampled_from(["vllm-fcfs", "tiered"]),
)
def test_fast_is_stepped_under_every_router(router, seed, rate, blocks, poll, routers, policy):
    """Whatever a router asks of a replica, both engines answer the same at the same instant."""
    chat = TALK | {"arrivals": {"process": "poisson", "rate": rate}, "timeouts": {"ttft": 2.0}}
    routing = {}
    if router not in ("round_robin", "random"):
        routing["poll_interval"] = poll
    if router not in ("random", "least_kv", "queue_aware"):
        routing["routers"] = routers
    source = document(
        traffic=[chat],
        policy=policy,
        engine={"num_gpu_blocks_override": blocks},
        cluster={"replicas": 3, "router": router, "routing": routing},
    )
    fast, stepped = (
        run(source, f"run.seed={seed}", f"run.engine_mode={mode}") for mode in ("fast", "stepped")
    )
    assert list(fast.records) == list(stepped.records)
    assert fast.engines == stepped.engines


def test_least_connections_in_a_run_sends_a_request_to_the_replica_with_the_fewest():
    long = stream(100, 400, arrivals={"process": "constant", "rate": 1000}, requests=3)
    late = stream(100, 10, arrivals={"process": "constant", "rate": 1000}, requests=1)
    traffic = [long, late]
    records = run(document(traffic=traffic, cluster={"replicas": 2})).records
    assert [r.replica for r in records] == [0, 1, 0, 1]
    assert [r.stream for r in records] == [0, 1, 0, 0]
