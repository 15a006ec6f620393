"""Things that break: whatever it is and whenever, every request ends once, and fast is stepped."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.test_fleet import ZERO, hpa, rates
from tests.runs import document, flat_profile, run, stream
from tests.test_queueing import STEP_PS
from twin.clock import PS
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.scenario import load_scenario

QUICK = {
    "cold_start": {"phases": ZERO | {"process": 5}},
    "probes": {"readiness": {"periodSeconds": 1}},
}


def broken(*faults, traffic=None, replicas=2, run_keys=None, **cluster):
    """Requests of 100 + 100 tokens at 6 a second on replicas of 8 slots, each of which serves about 10 of them."""
    return document(
        traffic=[traffic or rates((0, 6), duration=60)],
        cluster=QUICK | {"replicas": replicas, "faults": list(faults)} | cluster,
        run=run_keys or {},
    )


def reasons(result):
    return Counter(r.reason for r in result.records)


def by_replica(result, since_s, until_s):
    return Counter(r.replica for r in result.records if since_s * PS <= r.arrival_ps < until_s * PS)


def test_a_crash_aborts_what_is_inside_and_the_pod_comes_back():
    result = run(broken({"kind": "crash", "at": 20, "pods": [0]}))
    lost = [r for r in result.records if r.reason == "pod_crash"]
    assert lost
    assert all(r.outcome == "aborted" and r.finish_ps == 20 * PS and r.replica == 0 for r in lost)
    assert len(result.engines) == 3  # the restarted container has an engine of its own
    assert result.fleet.pods[0].restarts == 1
    assert result.alive_ps[0] == 20 * PS
    assert set(by_replica(result, 21, 24)) == {1}
    assert set(by_replica(result, 30, 60)) == {1, 2}
    steps = [stats.steps for stats in result.engines]
    assert all(steps)


def test_clients_that_ask_again_survive_a_crash():
    again = {"retries": {"attempts": 3, "backoff": 0.2}}
    result = run(broken({"kind": "crash", "at": 20, "pods": [0]}, **again))
    assert {r.outcome for r in result.records} == {"completed"}
    assert {r.attempts for r in result.records} == {1, 2}


def test_health_is_200_on_a_dead_gpu():
    """vllm-project/vllm#36960: the pod stays Ready, requests pile up there, and the autoscaler adds pods elsewhere."""
    dead = {"kind": "gpu_loss", "at": 20, "pods": [0]}
    scaled = {
        "router": "round_robin",
        "hpa": hpa(least=2, most=5, target="5"),
        "controller": {"sync_period": 5},
    }
    busy = rates((0, 6), duration=120)
    result = run(broken(dead, traffic=busy, run_keys={"until": 120}, **scaled))
    stuck = [r for r in result.records if r.outcome == "unfinished" and r.replica == 0]
    assert len(stuck) > 60
    assert max(r.arrival_ps for r in stuck) > 110 * PS  # it is still sent some
    assert all(
        r.finish_ps is None or r.finish_ps <= 20 * PS for r in result.records if r.replica == 0
    )
    assert result.fleet.pods[0].deleted_ps is None
    assert max(look.desired for look in result.fleet.log.looks) == 5
    # The right cure: somebody who notices that nothing comes, and a container that starts again.
    cured = run(broken(dead | {"until": 40}, traffic=busy, **scaled))
    assert reasons(cured)["gpu_lost"] > 10
    assert {r.outcome for r in cured.records} == {"completed", "aborted"}
    # Counting what is in flight avoids the pod, because nothing ever comes back from it.
    wary = run(broken(dead, traffic=busy, run_keys={"until": 120}))
    assert sum(r.outcome == "unfinished" for r in wary.records) < len(stuck) / 2


def test_clients_leave_a_dead_gpu():
    impatient = rates((0, 6), duration=60, timeouts={"ttft": 3.0, "total": 10.0})
    dead = {"kind": "gpu_loss", "at": 20, "pods": [0]}
    result = run(broken(dead, traffic=impatient, router="round_robin", run_keys={"until": 100}))
    late = [r for r in result.records if r.outcome == "timed_out" and r.replica == 0]
    assert len(late) > 100
    assert {r.reason for r in late} == {"timeout:ttft", "timeout:total"}
    assert all(r.finish_ps - r.arrival_ps in (3 * PS, 10 * PS) for r in late)
    assert all(r.outcome != "unfinished" for r in result.records)


def test_a_slow_replica_is_slow_for_as_long_as_it_is():
    slow = {"kind": "slow", "at": 20, "until": 40, "factor": 3, "pods": [0]}
    result = run(broken(slow, router="round_robin"))

    def tpot(since_s, until_s, replica):
        found = [
            (r.finish_ps - r.first_token_ps) / (r.output_tokens - 1)
            for r in result.records
            if since_s * PS <= r.arrival_ps and r.finish_ps < until_s * PS and r.replica == replica
        ]
        return sum(found) / len(found)

    assert tpot(20, 40, 0) == pytest.approx(3 * tpot(0, 20, 0), rel=0.25)
    assert tpot(45, 60, 0) == pytest.approx(tpot(0, 20, 0), rel=0.1)
    assert tpot(20, 40, 1) == pytest.approx(tpot(0, 20, 1), rel=0.1)


def test_a_partition_breaks_connections_and_makes_a_black_hole():
    """A pod that refuses looks idle, so that least connections sends everybody there until it is reached again."""
    cut = {"kind": "partition", "at": 20, "until": 30, "pods": [0]}
    result = run(broken(cut))
    counts = reasons(result)
    assert counts["partition"] > 0
    assert counts["connection_refused"] > 40
    assert all(r.finish_ps == 20 * PS for r in result.records if r.reason == "partition")
    refused = [r for r in result.records if r.reason == "connection_refused"]
    assert all(20 * PS <= r.arrival_ps <= 30 * PS for r in refused)
    in_turn = run(broken(cut, router="round_robin"))
    assert reasons(in_turn)["connection_refused"] == pytest.approx(30, abs=8)
    tried = run(broken(cut, router="round_robin", retries={"attempts": 9, "backoff": 0.1}))
    assert {r.outcome for r in tried.records} == {"completed"}


@pytest.mark.parametrize(("notice", "shutdown", "lost"), [(10, 60, 0), (0.2, 60, 1), (10, 0, 1)])
def test_a_reclaimed_machine_gives_as_much_time_as_its_notice(notice, shutdown, lost):
    reclaim = {"kind": "spot_reclaim", "at": 20, "notice": notice, "pods": [0]}
    busy = rates((0, 14), duration=30)
    result = run(broken(reclaim, traffic=busy, pod={"shutdown_timeout": shutdown}))
    assert (reasons(result)["spot_reclaim"] > 0) == bool(lost)
    pod = result.fleet.pods[0]
    assert pod.deleted_ps == 20 * PS
    assert pod.gone_ps <= (20 + notice) * PS
    assert len(result.fleet.pods) == 3  # the deployment makes another
    assert result.fleet.pods[2].created_ps == 20 * PS


def test_a_drained_node_takes_no_pods_until_it_is_back():
    drain = {"kind": "node_drain", "at": 20, "node": 0, "until": 40}
    nodes = {"nodes": {"gpus": 1, "initial": 2}, "pod": {"shutdown_timeout": 30}}
    result = run(broken(drain, traffic=rates((0, 4), duration=60), **nodes))
    old, _, new = result.fleet.pods
    assert old.deleted_ps == 20 * PS
    assert new.placed_ps == 40 * PS
    assert {r.outcome for r in result.records} == {"completed"}
    grows = {"nodes": {"gpus": 1, "initial": 2, "provision": 8}}
    ordered = run(broken({"kind": "spot_reclaim", "at": 20, "pods": [0]}, **grows))
    reclaimed = ordered.fleet.pods[0]
    assert ordered.fleet.pods[2].placed_ps == reclaimed.gone_ps + 8 * PS  # a machine in its place


FAULTS = st.one_of(
    st.fixed_dictionaries({"kind": st.just("crash")}),
    st.fixed_dictionaries({"kind": st.just("gpu_loss"), "until": st.integers(4, 9)}),
    st.fixed_dictionaries({"kind": st.just("slow"), "factor": st.sampled_from([1.5, 4])}),
    st.fixed_dictionaries({"kind": st.just("partition"), "until": st.integers(4, 9)}),
    st.fixed_dictionaries({"kind": st.just("spot_reclaim"), "notice": st.sampled_from([0, 0.4, 3])}),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    faults=st.lists(
        st.tuples(FAULTS, st.sampled_from([0.5, 1, 1.25, 2, 3.5]), st.sampled_from([[], [0], [1], [2]])),
        max_size=4,
    ),
    drain=st.none() | st.integers(0, 2),
    seed=st.integers(0, 1000),
    flat=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from(["vllm-fcfs", "tiered", "vllm-priority"]),
    retries=st.booleans(),
    shutdown=st.sampled_from([0, 2]),
    router=st.sampled_from(["least_connections", "round_robin", "least_kv", "prefix_affinity"]),
    until=st.none() | st.just(2.75),
)  # fmt: skip
def test_nothing_vanishes_whatever_breaks(
    tmp_path_factory, faults, drain, seed, flat, caching, policy, retries, shutdown, router, until
):
    """Also where everything happens at one instant: steps of 10 ms, faults at their multiples, steady arrivals."""
    chat = stream(
        60, 40, requests=90, timeouts={"ttft": 2.0}, tiers={"ONLINE": 0.6, "OFFLINE": 0.4},
        arrivals={"process": "constant" if flat else "poisson", "rate": 25},
    )  # fmt: skip
    written = [fault | {"at": at, "pods": pods} for fault, at, pods in faults]
    if drain is not None:
        written.append({"kind": "node_drain", "at": 1, "node": drain, "until": 3})
    source = broken(
        *written,
        traffic=chat,
        replicas=3,
        router=router,
        nodes={"gpus": 1, "initial": 3, "max": 5, "provision": 1},
        pod={"shutdown_timeout": shutdown},
        run_keys={"until": until},
        **({"retries": {"attempts": 3, "backoff": 0.05}} if retries else {}),
    )
    source |= {"policy": policy}
    source["engine"] |= {"enable_prefix_caching": caching}
    if flat:
        folder = tmp_path_factory.mktemp("flat")
        source["hardware"]["step_time"] = flat_profile(folder, STEP_PS)
    fast, stepped = (
        run(source, f"run.seed={seed}", f"run.engine_mode={mode}") for mode in ("fast", "stepped")
    )
    counts = summarize(fast)["totals"]
    assert counts.pop("offered") == sum(counts.values()) == len(fast.records)
    assert until or len(fast.records) == 90
    assert list(fast.records) == list(stepped.records)
    assert fast.engines == stepped.engines
    assert fast.policies == stepped.policies
    assert fast.fleet.log == stepped.fleet.log


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"kind": "crash", "until": 5},
            "until: only gpu_loss, slow, partition, stale, node_drain has it",
        ),
        ({"kind": "slow"}, "factor: is missing; slow needs it"),
        ({"kind": "gpu_loss"}, "requests on a lost GPU never end"),
        ({"kind": "node_drain", "node": 0}, "there are no nodes to drain"),
        ({"kind": "partition", "until": 1}, "until must be later than at"),
    ],
)
def test_faults_that_cannot_be_are_refused(fault, message):
    with pytest.raises(InputError, match=message):
        load_scenario(broken({"at": 2} | fault))
