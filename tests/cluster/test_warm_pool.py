"""Capacity that is there before it is asked for: what is woken, refilled, given way and paid for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.test_fleet import BURST, SCALED, ZERO, changes, fleet, hpa, rates, start
from tests.runs import run
from twin.clock import PS
from twin.errors import InputError
from twin.report.html import render_html
from twin.report.json_summary import summarize
from twin.report.tables import render
from twin.scenario import load_scenario

QUICK = {"readiness": {"periodSeconds": 1}}


def pooled(pool, traffic=BURST, **cluster):
    return fleet({**SCALED, "warm_pool": pool, **cluster}, traffic)


def test_cold_woken_and_the_first_wake():
    """llm-d-incubation/llm-d-fast-model-actuation#445: start classes have times of their own; a slot taken is refilled
    at cold-start speed, and an empty pool falls back to cold starts."""
    want = hpa(most=4, target="1", metric="vllm:num_requests_running")
    waves = rates((0, 2), (100, 30), (115, 1), (400, 30), (500, 1), duration=520)
    cluster = {
        "hpa": want,
        "cold_start": start(65),
        "probes": QUICK,
        "controller": {"downscale_stabilization": 0, "sync_period": 5},
        "metrics": {"scrape_interval": 5},
        "warm_pool": {"standby": 1, "first_wake": 31, "wake": 3, "returns": True},
    }
    result = run(fleet(cluster, waves))
    pods = [p for p in result.fleet.pods[1:] if p.ready_ps is not None]
    taken = {True: set(), False: set()}
    for pod in pods:
        taken[pod.is_woken].add(round((pod.ready_ps - pod.created_ps) / PS))
    assert taken[False] == {65}
    assert taken[True] == {
        31,
        3,
    }  # the first wake of a sleeper, and one of a replica that went to sleep
    warm = result.fleet.warm_pool
    assert warm.claims == len(result.fleet.pods) - 1 == warm.woken + warm.found_none
    assert warm.found_none
    assert warm.returned
    told = summarize(result)["fleet"]["warm_pool"]
    assert told["start_s"]["cold"]["mean"] == pytest.approx(65)
    assert told["start_s"]["woken"]["max"] == pytest.approx(31)


def test_a_slot_is_refilled_by_a_whole_cold_start():
    result = run(pooled({"standby": 2, "first_wake": 2}))
    warm = result.fleet.warm_pool
    assert warm.woken == 2
    assert warm.found_none == warm.claims - 2
    assert warm.refills_ps == (40 * PS, 40 * PS)
    events = [(e.at_ps, e.text) for e in result.fleet.log.events if e.kind == "reserve"]
    claimed = next(at for at, text in events if "becomes" in text)
    assert [at - claimed for at, text in events if "sleeps" in text] == [40 * PS, 40 * PS]
    woken = [p for p in result.fleet.pods if p.is_woken]
    assert all(p.ready_ps - p.created_ps <= 3 * PS for p in woken)
    assert all(p.requests for p in woken)


def test_sleepers_are_paid_for():
    alone = summarize(run(fleet(SCALED, BURST)))
    result = run(pooled({"standby": 2, "claim_probability": 0}))
    told = summarize(result)
    assert told["fleet"]["warm_pool"]["woken"] == 0
    assert told["fleet"]["warm_pool"]["unlucky"] == told["fleet"]["warm_pool"]["claims"] > 0
    held_s = told["cost"]["gpu_seconds"]["reserve"]
    assert held_s == pytest.approx(2 * result.simulated_ps / PS)
    assert told["cost"]["gpu_hours"] == pytest.approx(alone["cost"]["gpu_hours"] + held_s / 3600)
    assert "reserve" not in alone["cost"]["gpu_seconds"]


def test_luck_is_as_likely_as_it_says():
    waves = rates(
        *((at + 30 * i, rate) for i in range(40) for at, rate in ((0, 30), (5, 0.1))), duration=1200
    )
    cluster = {
        "hpa": hpa(most=2, target="1"), "controller": {"downscale_stabilization": 0, "sync_period": 5},
        "metrics": {"scrape_interval": 5}, "cold_start": start(1), "probes": QUICK,
        "warm_pool": {"standby": 2, "claim_probability": 0.5, "first_wake": 0},
    }  # fmt: skip
    warm = run(fleet(cluster, waves)).fleet.warm_pool
    assert warm.claims >= 40
    assert warm.woken / warm.claims == pytest.approx(0.5, abs=0.17)


def test_placeholders_keep_nodes_and_images():
    """A pod in the place of one needs neither a node nor an image; the placeholder gets a new node."""
    phases = ZERO | {"image": 100, "process": 10}
    cluster = {
        "hpa": hpa(most=3), "cold_start": {"image": "pull", "phases": phases}, "probes": QUICK,
        "nodes": {"gpus": 1, "initial": 2, "max": 8, "provision": 200},
    }  # fmt: skip
    load = rates((0, 2), (150, 14), duration=420)
    plain = run(fleet(cluster, load)).fleet
    kept = run(fleet(cluster | {"warm_pool": {"placeholders": 1}}, load)).fleet
    first = [fleet_.pods[1].ready_ps - fleet_.pods[1].created_ps for fleet_ in (plain, kept)]
    assert [round(ps / PS) for ps in first] == [110, 10]
    second = [fleet_.pods[2] for fleet_ in (plain, kept)]
    assert all(pod.placed_ps - pod.created_ps == 200 * PS for pod in second)
    assert kept.warm_pool.gave_way == 1
    assert kept.warm_pool.placeholder_ps > 0
    refused = {"hpa": hpa(), "warm_pool": {"placeholders": 1}}
    with pytest.raises(InputError, match="there are no nodes to keep"):
        load_scenario(fleet(refused))


def test_sleepers_take_the_place_of_placeholders_and_go_with_their_node():
    cluster = {
        "replicas": 1, "cold_start": start(20), "probes": QUICK,
        "nodes": {"gpus": 1, "initial": 2, "max": 3, "provision": 30},
        "warm_pool": {"standby": 1},
        "faults": [{"kind": "node_drain", "at": 50, "node": 1}],
    }  # fmt: skip
    log = run(fleet(cluster, rates((0, 2), duration=200))).fleet.log
    told = [(e.at_ps / PS, e.text) for e in log.events if e.kind in ("reserve", "node")]
    assert told == [
        (50, "node 1 takes no more pods"), (50, "standby 0 is drained"),
        (80, "node 2 is there"), (100, "standby 1 sleeps"),
    ]  # fmt: skip


def test_a_new_revision_has_no_use_for_old_sleepers():
    cluster = SCALED | {"warm_pool": {"standby": 1}, "rolling_updates": [{"at": 10}]}
    log = run(fleet(cluster, rates((0, 2), duration=120))).fleet.log
    told = [e.text for e in log.events if e.kind == "reserve"]
    assert told[0] == "standby 0 is of an old revision"
    assert told[-1] == "standby 1 sleeps"


def test_a_floor_by_schedule():
    """Five o'clock to half past: three replicas, ten minutes after the start of the run."""
    cluster = {
        "hpa": hpa(most=4), "cold_start": start(40), "probes": QUICK, "start": "Tue 16:50",
        "schedules": [{"start": "0 17 * * 1-5", "end": "30 17 * * *", "min_replicas": 3}],
    }  # fmt: skip
    result = run(fleet(cluster, rates((0, 1), duration=3600)))
    assert changes(result) == [(600, 3), (2400, 1)]
    assert "below spec.minReplicas" in result.fleet.log.looks[39].reason
    alone = {k: v for k, v in cluster.items() if k != "hpa"}
    assert changes(run(fleet(alone, rates((0, 1), duration=3600)))) == [(600, 3), (2400, 1)]
    sunday = run(fleet(cluster | {"start": "Sun 16:50"}, rates((0, 1), duration=3600)))
    assert changes(sunday) == []


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    standby=st.integers(0, 2),
    placeholders=st.integers(0, 2),
    luck=st.sampled_from([0.0, 0.5, 1.0]),
    returns=st.booleans(),
    kind=st.sampled_from(["crash", "spot_reclaim", "gpu_loss"]),
)
def test_gpus_are_never_lost_or_held_twice(seed, standby, placeholders, luck, returns, kind):
    """What is paid for is what pods and reserves held, nodes are never overbooked, and fast is stepped."""
    if not standby and not placeholders:
        standby = 1
    pool = {"placeholders": placeholders, "standby": standby}
    if standby:
        pool |= {"claim_probability": luck, "first_wake": {"uniform": [1, 4]}, "returns": returns}
    fault = {"kind": kind, "at": 33, "pods": [0]} | ({"until": 40} if kind == "gpu_loss" else {})
    source = pooled(
        pool,
        rates((0, 4), (20, 25), (35, 1), (70, 20), (80, 1), duration=100),
        hpa=hpa(most=4, target="2"),
        cold_start=start(15),
        controller={"downscale_stabilization": 10, "sync_period": 5},
        metrics={"scrape_interval": 5},
        nodes={"gpus": 2, "initial": 2, "max": 4, "provision": 20},
        faults=[fault],
    )
    fast, stepped = (
        run(source, f"run.seed={seed}", f"run.engine_mode={mode}") for mode in ("fast", "stepped")
    )
    assert fast.fleet.log == stepped.fleet.log
    assert fast.fleet.warm_pool == stepped.fleet.warm_pool
    assert list(fast.records) == list(stepped.records)
    history, end_ps = fast.fleet, fast.simulated_ps
    held = sum(
        (end_ps if p.gone_ps is None else min(p.gone_ps, end_ps)) - min(p.placed_ps, end_ps)
        for p in history.pods
        if p.placed_ps is not None
    )
    warm = history.warm_pool
    assert history.gpu_time.total_ps == held + warm.standby_ps + warm.placeholder_ps
    assert history.gpu_time.total_ps <= 8 * end_ps  # four nodes of two
    assert warm.claims == (warm.woken + warm.found_none + warm.unlucky)


def test_other_chance_is_not_disturbed():
    """A pool that nothing can be claimed from leaves the replicas as they are."""
    spread = {"cold_start": {"phases": ZERO | {"process": {"uniform": [20, 60]}}}}
    alone = run(fleet(SCALED | spread, BURST))
    beside = run(pooled({"standby": 1, "claim_probability": 0}, **spread))
    assert list(alone.records) == list(beside.records)
    assert [p.ready_ps for p in alone.fleet.pods] == [p.ready_ps for p in beside.fleet.pods]


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({}, "keeps nothing: set standby or placeholders"),
        ({"placeholders": 1, "returns": True}, "returns: changes nothing without standby"),
        ({"standby": 1, "wake": 1}, "wake: changes nothing without returns"),
        ({"standby": -1}, "must be >= 0"),
    ],
)
def test_what_changes_nothing_is_refused(pool, message):
    with pytest.raises(InputError, match=message):
        load_scenario(pooled(pool))


def test_it_is_told():
    result = run(pooled({"standby": 1}), observe=True)
    summary = summarize(result)
    text = render(summary)
    assert "warm pool: 1 of 5 new replicas woken" in text
    assert "reserve" in text
    assert "warm pool: 1 of 5" in render_html(result, summary)
    plain = summarize(run(fleet(SCALED, BURST)))
    assert plain["fleet"]["warm_pool"] is None
    assert "warm pool" not in render(plain)
