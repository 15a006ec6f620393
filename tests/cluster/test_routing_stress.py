"""Clients that leave, routers that know too little, replicas that fail: each told, and the same in both engines."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.test_faults import broken, by_replica
from tests.cluster.test_fleet import fleet, hpa, rates, start
from tests.runs import document, run, stream
from twin.clock import PS
from twin.cluster.outliers import Ejection, Outliers
from twin.cluster.saturation import Load, SaturationSpec, saturation
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.report.tables import render
from twin.scenario import load_scenario


def reasons(result):
    return Counter(r.reason for r in result.records)


# --- clients that leave by themselves -------------------------------------------------------


def test_clients_leave_by_themselves():
    chat = stream(100, 200, requests=60, disconnects={"share": 0.5, "after": 1})
    result = run(document(traffic=[chat]))
    left = [r for r in result.records if r.reason == "client_disconnect"]
    assert 20 < len(left) < 40
    assert all(r.outcome == "aborted" and r.finish_ps - r.arrival_ps == PS for r in left)
    told = summarize(result)
    assert told["gateway"]["aborted"] == {"client_disconnect": len(left)}
    assert "client_disconnect: the client left by itself" in render(told)
    assert summarize(run(document()))["gateway"] is None


def test_who_leaves_changes_nobody_else_and_no_policy_knows_before():
    """The draws have a stream of their own, and nothing differs until the first client leaves."""
    plain = stream(100, 60, requests=80)
    leaving = plain | {"disconnects": {"share": 0.3, "after": {"uniform": [0.5, 2]}}}
    for policy in ("vllm-fcfs", "tiered", "slo"):
        stay, go = (run(document(traffic=[t], policy=policy)) for t in (plain, leaving))
        first = min(r.finish_ps for r in go.records if r.reason == "client_disconnect")
        assert [r.arrival_ps for r in stay.records] == [r.arrival_ps for r in go.records]
        before = [(r.index, r.finish_ps) for r in stay.records if r.finish_ps < first]
        assert before
        assert before == [(r.index, r.finish_ps) for r in go.records if r.finish_ps < first]


def test_clients_leave_wherever_their_request_is():
    """In the queue of the gateway, in an engine, or while they wait to ask again."""
    chat = stream(100, 60, requests=200, disconnects={"at": 2})
    cluster = {
        "admission": {"max_inflight": 4, "max_queue": 20},
        "retries": {"attempts": 9, "backoff": 1, "outcomes": ["refused", "aborted"]},
    }
    result = run(document(traffic=[chat], cluster=cluster))
    left = [r for r in result.records if r.reason == "client_disconnect"]
    assert {r.finish_ps for r in left} == {2 * PS}
    assert {r.first_scheduled_ps is None for r in left} == {True, False}
    assert len(left) > 24  # more than fit into engine and queue: some waited to ask again
    assert all(r.arrival_ps > 2 * PS or r.finish_ps <= 2 * PS for r in result.records)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    policy=st.sampled_from(["vllm-fcfs", "tiered", "vllm-priority"]),
    spec=st.sampled_from([{"at": 0.7}, {"share": 0.6, "after": {"exponential": 0.5}}]),
    retries=st.booleans(),
    cut=st.booleans(),
    caching=st.booleans(),
)
def test_nothing_vanishes_whoever_leaves(seed, policy, spec, retries, cut, caching):
    chat = stream(
        60, 40, requests=70, disconnects=spec, tiers={"ONLINE": 0.6, "OFFLINE": 0.4},
        arrivals={"process": "constant", "rate": 50},
    )  # fmt: skip
    cluster = {"replicas": 2, "admission": {"max_inflight": 10, "max_queue": 4}}
    if retries:
        cluster["retries"] = {"attempts": 3, "backoff": 0.05}
    if cut:
        cluster |= {"faults": [{"kind": "partition", "at": 0.5, "until": 0.9, "pods": [0]}]}
        cluster |= {"cold_start": start(1)}
    source = document(traffic=[chat], policy=policy, cluster=cluster)
    source["engine"]["enable_prefix_caching"] = caching
    fast, stepped = (
        run(source, f"run.seed={seed}", f"run.engine_mode={mode}") for mode in ("fast", "stepped")
    )
    assert len(fast.records) == 70
    assert list(fast.records) == list(stepped.records)
    assert fast.engines == stepped.engines
    assert fast.policies == stepped.policies


def test_streams_ask_again_in_their_own_way():
    patient = stream(100, 60, requests=40, tier="ONLINE", retries={"attempts": 9, "backoff": 0.3})
    once = stream(100, 60, requests=40, tier="BATCH", retries={"attempts": 1})
    usual = stream(100, 60, requests=40, tier="OFFLINE")
    cluster = {
        "retries": {"attempts": 2, "backoff": 0.1},
        "admission": {"max_inflight": 3, "max_queue": 0, "retry_after": 0.5,
                      "tiers": {"OFFLINE": {"retry_after": 2}}},
    }  # fmt: skip
    result = run(document(traffic=[patient, once, usual], cluster=cluster))
    most = {s: max(r.attempts for r in result.records if r.stream == s) for s in range(3)}
    assert most[0] > 2
    assert (most[1], most[2]) == (1, 2)
    again = [r for r in result.records if r.stream == 2 and r.outcome == "refused"]
    assert all(r.finish_ps - r.arrival_ps >= 2 * PS for r in again)


# --- S14: a phantom queue --------------------------------------------------------------------


def test_s14_a_phantom_queue_blocks_scaling_down():
    """llm-d-autoscaling#769: the load generator is killed at 40 s. Where the engines cancel the work of closed
    connections the replicas go; where the metrics stand still, they stay for ever."""
    cluster = {
        "replicas": 4,
        "saturation": {"max_replicas": 4, "period": 15},
        "cold_start": start(5),
        "router": "round_robin",
    }
    load = rates((0, 60), duration=40) | {"disconnects": {"at": 40}}
    source = fleet(cluster, load, run={"until": 200})
    freed = run(source)
    assert reasons(freed)["client_disconnect"] > 500
    assert freed.fleet.log.steps[-1].wanted == 1
    frozen = [{"kind": "frozen", "start": 35, "until": 200}]
    stuck = run(source | {"cluster": cluster | {"metrics": {"faults": frozen}}})
    assert stuck.fleet.log.steps[-1].wanted == 4
    # The rule on the queues of the thread: six of seven look saturated, so that none may go.
    loads = [Load(0.3, waiting) for waiting in (213, 78, 40, 32, 20, 10, 0)]
    desired, why = saturation(SaturationSpec(1, 7), loads, 7, 7)
    assert desired == 7
    assert why.startswith("1 of 7 not saturated")
    assert saturation(SaturationSpec(1, 7), [Load(0.0, 0.0)] * 7, 7, 7)[0] == 6


# --- what routers know -----------------------------------------------------------------------


@pytest.mark.parametrize("router", ["queue_aware", "least_kv"])
def test_a_replica_whose_metrics_stand_still(router):
    """It is read while it has nothing to do, and gets everything for as long as it looks idle."""
    stale = {"kind": "stale", "at": 20, "until": 40, "pods": [0]}
    calm = rates((0, 0.1), (20, 45), (40, 2), duration=60)
    blind = run(broken(stale, traffic=calm, router=router, replicas=3))
    sent = by_replica(blind, 22, 40)
    assert sent[0] > 1.8 * max(sent[1], sent[2])
    after = by_replica(blind, 50, 60)
    assert after[0] < 0.6 * sum(after.values())
    # Least connections counts itself and needs no metrics.
    counting = by_replica(run(broken(stale, traffic=calm, replicas=3)), 22, 40)
    assert max(counting.values()) < 0.4 * sum(counting.values())
    wary = run(broken(stale, traffic=calm, router=router, replicas=3, routing={"stale_after": 1}))
    assert by_replica(wary, 22, 40)[0] == 0
    assert "its metrics stand still" in [e.text for e in blind.fleet.log.events]


def test_stale_metrics_block_or_let_through():
    """llm-d/llm-d-router#2547: metrics 300 ms late under a limit of 200 ms: one replica, then four with one stale."""
    routing = {"poll_interval": 0.3, "stale_after": 0.2}
    chat = rates((0, 6), duration=30)
    base = {"replicas": 1, "router": "queue_aware", "routing": routing}
    let = run(document(traffic=[chat], cluster=base))
    assert {r.outcome for r in let.records} == {"completed"}
    told = summarize(let)["gateway"]
    assert 0.2 * len(let.records) < told["sent_stale"] < 0.5 * len(let.records)
    assert "while the state of all replicas was stale" in render(summarize(let))
    strict = base | {"routing": routing | {"when_stale": "refuse"}}
    blocked = run(document(traffic=[chat], cluster=strict))
    assert reasons(blocked)["stale_metrics"] == pytest.approx(len(blocked.records) / 3, rel=0.3)
    stale = {"kind": "stale", "at": 5, "pods": [2]}
    four = run(
        broken(stale, traffic=chat, replicas=4, router="queue_aware",
               routing={"poll_interval": 0.1, "stale_after": 0.2, "when_stale": "refuse"})
    )  # fmt: skip
    assert {r.outcome for r in four.records} == {"completed"}
    assert by_replica(four, 6, 30)[2] == 0
    assert by_replica(four, 0, 5)[2] > 0 or len(by_replica(four, 0, 5)) == 1


# --- replicas that fail ----------------------------------------------------------------------


def test_a_failing_replica_is_ejected():
    cut = {"kind": "partition", "at": 20, "until": 60, "pods": [0]}
    chat = rates((0, 6), duration=120)
    routing = {"ejection": {"consecutive_5xx": 3, "base_ejection_time": 10, "interval": 5}}
    plain = run(broken(cut, traffic=chat))
    ejecting = run(broken(cut, traffic=chat, routing=routing))
    lost = [reasons(r)["connection_refused"] for r in (plain, ejecting)]
    assert lost[0] > 150
    assert lost[1] < 15
    found = summarize(ejecting)["gateway"]["ejections"]
    assert [row["replica"] for row in found] == [0] * len(found)
    lengths = [row["until_s"] - row["at_s"] for row in found]
    assert lengths == sorted(lengths)  # ten seconds more each time
    assert by_replica(ejecting, 100, 120)[0] > 20  # it is back
    assert "ejections" in render(summarize(ejecting))


def test_ejections_by_hand():
    """Envoy's rules: a row of errors, times that grow and shrink, the share that may be ejected, the panic."""
    spec = Ejection(3, 10 * PS, 30 * PS, 80 * PS, 50, 50)
    outliers, present = Outliers(spec), [0, 1, 2, 3]

    def fail(replica, now_s, times=3):
        for _ in range(times):
            outliers.failed(replica, present, now_s * PS)

    fail(0, 1, 2)
    outliers.succeeded(0)
    fail(0, 2, 2)
    assert not outliers.is_ejected(0, 3 * PS)
    fail(0, 3, 1)
    assert outliers.ejections == [(3 * PS, 0, 40 * PS)]  # 33 s, at the next look
    assert outliers.healthy(present, 39 * PS) == [1, 2, 3]
    assert outliers.healthy(present, 40 * PS) == present
    fail(0, 41)
    assert outliers.ejections[-1] == (41 * PS, 0, 110 * PS)  # twice 30 s
    fail(1, 42)
    assert outliers.is_ejected(1, 43 * PS)
    fail(2, 43)
    assert not outliers.is_ejected(2, 44 * PS)  # half of them are out
    assert outliers.healthy(present, 44 * PS) == [2, 3]
    assert outliers.healthy(present[:3], 44 * PS) == [0, 1, 2]  # a panic: one of three is left
    fail(0, 135)
    assert outliers.ejections[-1] == (135 * PS, 0, 170 * PS)  # 25 s in health took two off
    fail(0, 171)
    fail(0, 251)
    fail(0, 341)
    assert outliers.ejections[-1][2] - 341 * PS <= 90 * PS


def test_a_dead_gpu_fails_nobody_and_is_not_ejected():
    dead = {"kind": "gpu_loss", "at": 20, "pods": [0]}
    routing = {"ejection": {"consecutive_5xx": 1}}
    source = broken(dead, router="round_robin", routing=routing, run_keys={"until": 60})
    result = run(source)
    assert not summarize(result)["gateway"]["ejections"]
    assert by_replica(result, 40, 60)[0] > 40


def test_a_metrics_outage_holds_the_replicas():
    """Nothing is scraped and no query answered from 60 s on: the HPA changes nothing, whatever comes."""
    outage = {"metrics": {"faults": [{"kind": "prometheus", "start": 60, "until": 200}]}}
    cluster = {"hpa": hpa(most=4), "cold_start": start(5)}
    load = rates((0, 2), (70, 20), (150, 2), duration=220)
    seen = [run(fleet(cluster | extra, load)).fleet.log.looks for extra in ({}, outage)]
    during = [{look.desired for look in looks if 75 * PS < look.at_ps < 200 * PS} for looks in seen]
    assert max(during[0]) == 4
    assert during[1] == {1}


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"routing": {"when_stale": "refuse"}}, "changes nothing without stale_after"),
        ({"routing": {"ejection": {"consecutive_5xx": 0}}}, "must be >= 1, got 0"),
    ],
)
def test_what_changes_nothing_is_refused(cluster, message):
    with pytest.raises(InputError, match=message):
        load_scenario(document(cluster=cluster))
    with pytest.raises(InputError, match="either after or at"):
        load_scenario(document(traffic=[stream(disconnects={"share": 0.5})]))
