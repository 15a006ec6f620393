"""Replicas that come and go in a run: nothing vanishes, and what happens is what Kubernetes would do."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import document, flat_profile, run, stream
from twin.clock import PS
from twin.errors import InputError
from twin.report.html import render_html
from twin.report.json_summary import summarize
from twin.report.openmetrics import write_openmetrics
from twin.report.scaling import _troubles
from twin.report.tables import render
from twin.scenario import load_scenario
from twin.simulation import NoProgressError, simulate

WAITING = "vllm:num_requests_waiting"
ZERO = dict.fromkeys(("image", "process", "weights", "compile", "graphs", "warm_up"), 0)


def start(seconds, **keys):
    """A cold start of so many seconds, all of it in one phase."""
    return {"phases": ZERO | {"process": seconds}} | keys


def hpa(least=1, most=4, target="5", metric=WAITING, kind="Pods", **behavior):
    details = {
        "metric": {"name": metric},
        "target": {"type": "AverageValue", "averageValue": target},
    }
    spec = {
        "minReplicas": least,
        "maxReplicas": most,
        "metrics": [{"type": kind, kind.lower(): details}],
    }
    return spec | ({"behavior": behavior} if behavior else {})


def rates(*steps, **keys):
    """Requests of 100 + 100 tokens at rates that change: (second, rate)."""
    arrivals = {"process": "poisson", "rate": {"steps": [list(step) for step in steps]}}
    return stream(100, 100, arrivals=arrivals, **keys) | {"requests": None}


def fleet(cluster, traffic=None, **sections):
    """A scenario in which one replica with 8 slots serves about 10 requests a second."""
    return document(traffic=[traffic or stream()], cluster=cluster, **sections)


def changes(result):
    """[(second, replicas)] that were asked for."""
    looks = result.fleet.log.looks
    return [(look.at_ps / PS, look.desired) for look in looks if look.desired != look.current]


def counts(result):
    return summarize(result)["totals"]


BURST = rates((0, 2), (30, 20), (120, 2), duration=400)
SCALED = {
    "hpa": hpa(most=6),
    "cold_start": start(40),
    "probes": {"readiness": {"periodSeconds": 1}},
}


# --- scaling ------------------------------------------------------------------------------


def test_new_replicas_serve_when_they_are_ready():
    """inference-sim/inference-sim#994: GPUs are paid for from scheduling, tokens come only after Ready."""
    result = run(fleet(SCALED, BURST))
    pods = result.fleet.pods
    assert len(pods) > 1
    for pod in pods[1:]:
        assert pod.requests > 0
        assert pod.ready_ps - pod.created_ps == pytest.approx(40 * PS, abs=PS)
        assert pod.placed_ps == pod.created_ps
        first = min(r.first_token_ps for r in result.records if r.replica == pod.replica)
        assert first > pod.ready_ps
    spent = result.fleet.gpu_time
    assert spent.starting_ps == sum(p.ready_ps - p.created_ps for p in pods[1:])
    alive = sum((p.gone_ps or result.simulated_ps) - p.created_ps for p in pods)
    assert spent.total_ps == alive


def test_a_fixed_scenario_of_the_issue():
    """1 -> 3 replicas with a cold start of 60 s: after it both new ones serve, and three GPUs are reserved."""
    want_three = hpa(most=3, target="1", metric="vllm:num_requests_running")
    cluster = {
        "hpa": want_three,
        "cold_start": start(60),
        "probes": {"readiness": {"periodSeconds": 1}},
    }
    result = run(fleet(cluster, rates((0, 8), duration=300)))
    assert changes(result)[0][1] == 3
    at = changes(result)[0][0]
    assert [round(p.ready_ps / PS - at) for p in result.fleet.pods[1:]] == [60, 60]
    assert all(p.requests for p in result.fleet.pods)
    assert all(p.gpu_time.total_ps == result.simulated_ps - p.created_ps for p in result.fleet.pods)


def test_the_same_seed_gives_the_same_run_stepped_or_not():
    fast, again = run(fleet(SCALED, BURST)), run(fleet(SCALED, BURST))
    stepped = run(fleet(SCALED, BURST), "run.engine_mode=stepped")
    assert list(fast.records) == list(again.records) == list(stepped.records)
    assert fast.fleet.log == again.fleet.log == stepped.fleet.log
    assert fast.fleet.pods == stepped.fleet.pods
    assert fast.engines == stepped.engines
    other = run(fleet(SCALED, BURST), "run.seed=2")
    assert list(other.records) != list(fast.records)


def test_replicas_that_stay_are_the_fixed_ones():
    """A fleet in which nothing happens gives the records of replicas that are simply there, from the first instant."""
    traffic = stream(100, 50, arrivals={"process": "constant", "rate": 30}, requests=300)
    fixed = run(document(traffic=[traffic], cluster={"replicas": 3}))
    assert fixed.fleet is None
    there = run(fleet({"replicas": 3, "cold_start": {}}, traffic))
    assert list(there.records) == list(fixed.records)
    assert there.engines == fixed.engines
    assert there.fleet.gpu_time.starting_ps == 0
    looked = run(fleet({"replicas": 3, "hpa": hpa(least=3, most=3)}, traffic))
    assert list(looked.records) == list(fixed.records)


def test_watching_changes_nothing():
    plain, watched = run(fleet(SCALED, BURST)), run(fleet(SCALED, BURST), observe=True)
    assert list(plain.records) == list(watched.records)
    widths = {len(gauges) for gauges in watched.series.gauges}
    assert widths == {len(watched.engines)}


def test_no_traffic_no_scaling():
    """llm-d/llm-d-autoscaling#549: an idle run never grows."""
    idle = rates((0, 0.01), duration=600)
    for cluster in (
        {"hpa": hpa()},
        {"saturation": {"max_replicas": 4}},
        {"kpa": {"max_replicas": 4, "target": 4}},
        {"apa": {"max_replicas": 4, "target": 4}},
    ):
        result = run(fleet(cluster, idle, run={"until": 600}))
        assert changes(result) == []


def test_no_cascade_while_pods_load():
    """llm-d/llm-d-autoscaling#549: saturated at one replica, five minutes to load, a look every 30 s."""
    busy = rates((0, 40), duration=280)
    loading = {"cold_start": start(300), "probes": {"readiness": {"periodSeconds": 1}}}
    result = run(fleet({"saturation": {"max_replicas": 9}} | loading, busy, run={"until": 280}))
    assert [replicas for _, replicas in changes(result)] == [2]
    # AIBrix' rule without its guard multiplies what it asked for, whoever is Ready.
    apa = {"max_replicas": 9, "target": 4, "period": 30, "query": "vllm:num_requests_waiting"}
    wild = run(fleet({"apa": apa} | loading, busy, run={"until": 280}))
    assert [replicas for _, replicas in changes(wild)][:3] == [2, 4, 8]
    calm = run(fleet({"apa": apa | {"guard_pending": True}} | loading, busy, run={"until": 280}))
    assert [replicas for _, replicas in changes(calm)] == [2]


def test_a_burst_shorter_than_a_cold_start_is_over_when_help_comes():
    """HPA alone cannot help: the waits are those of one replica, and the bill is not."""
    for cold in (120, 300):
        burst = rates((0, 1), (60, 30), (60 + cold * 0.8, 1), duration=700)
        cluster = {"cold_start": start(cold), "probes": {"readiness": {"periodSeconds": 1}}}
        alone = run(fleet(cluster | {"replicas": 1}, burst, run={"until": 1500}))
        scaled = run(fleet(cluster | {"hpa": hpa(most=8)}, burst, run={"until": 1500}))
        ready_s = min(p.ready_ps for p in scaled.fleet.pods[1:]) / PS
        assert ready_s > 60 + cold
        during = [
            [r.first_token_ps - r.arrival_ps for r in result.records
             if r.first_token_ps and 60 * PS <= r.arrival_ps < (60 + cold * 0.8) * PS]
            for result in (alone, scaled)
        ]  # fmt: skip
        assert during[0] == during[1]
        hours = [result.fleet.gpu_time.total_ps for result in (alone, scaled)]
        assert hours[1] > 2 * hours[0]


# --- starting -----------------------------------------------------------------------------


def test_a_crash_loop():
    """Liveness at 60 s, three times 30 s: a start of 150 s never ends, and the restarts back off."""
    probes = {"liveness": {"initialDelaySeconds": 60, "periodSeconds": 30}, "readiness": {}}
    cluster = {"cold_start": start(150, initial="cold"), "probes": probes}
    result = run(fleet(cluster, rates((0, 1), duration=900)))
    killed = [e.at_ps / PS for e in result.fleet.log.events if e.kind == "killed"]
    assert killed[:5] == [120, 240, 370, 510, 670]
    assert counts(result)["completed"] == 0
    assert {r.reason for r in result.records} == {"no_ready_pod"}
    assert any("crash in a loop" in text for text in result.warnings)
    told = summarize(result)["fleet"]
    assert told["restarts"] == told["events"]["killed"]
    late = [e for e in result.fleet.log.events if e.kind == "killed"]
    assert len(late) >= told["restarts"]
    assert "starts again" not in told["killed"]
    cured = probes | {"startup": {"periodSeconds": 10, "failureThreshold": 30}}
    healed = run(fleet(cluster | {"probes": cured}, rates((0, 1), duration=900)))
    assert healed.fleet.pods[0].restarts == 0
    assert counts(healed)["completed"] > 700


def test_a_pod_that_is_ready_too_early_is_a_hole_for_requests():
    cluster = {"replicas": 2, "cold_start": start(30), "probes": {"readiness": None},
               "rolling_updates": [{"at": 10}]}  # fmt: skip
    result = run(fleet(cluster, rates((0, 4), duration=60)))
    reasons = {r.reason for r in result.records if r.outcome == "refused"}
    assert reasons == {"connection_refused"}
    assert any("without a readiness probe" in text for text in result.warnings)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"pod": {"priority_class": "system-high-priority"}}, "no PriorityClass with name system-high-priority"),
        ({"pod": {"gpu_products": ["H100"]}, "nodes": {"gpu_product": "NVIDIA-H100-80GB-HBM3"}}, "no node matches"),
        ({"pod": {"tolerates_gpu_taint": False}, "nodes": {"has_gpu_taint": True}}, "does not tolerate"),
    ],
)  # fmt: skip
def test_pods_that_never_appear(keys, told):
    result = run(fleet(keys))
    assert counts(result)["completed"] == 0
    assert any(told in text for text in result.warnings)
    assert told in summarize(result)["fleet"]["obstacle"]
    assert result.fleet.gpu_time.total_ps == 0


def test_requests_are_held_until_somebody_serves():
    cluster = {"cold_start": start(20, initial="cold"), "holds_requests": True}
    result = run(fleet(cluster))
    assert counts(result)["completed"] == 40
    assert min(r.first_token_ps for r in result.records) >= 20 * PS
    impatient = stream(timeouts={"ttft": 3})
    left = run(fleet(cluster, impatient))
    assert counts(left)["timed_out"] == 40
    assert {r.finish_ps - r.arrival_ps for r in left.records} == {3 * PS}


def test_held_for_ever_is_said():
    cluster = {"pod": {"priority_class": "gone"}, "holds_requests": True}
    result = run(fleet(cluster, run={"until": 60}))
    assert counts(result)["unfinished"] == 40
    with pytest.raises(NoProgressError, match="40 are held at the gateway"):
        run(fleet(cluster))


def test_nodes_bound_what_can_start():
    cluster = {"hpa": hpa(most=6), "cold_start": start(10), "nodes": {"gpus": 2, "initial": 1}}
    result = run(fleet(cluster, BURST))
    ready = max(step.ready for step in result.fleet.log.steps)
    wanted = max(step.wanted for step in result.fleet.log.steps)
    assert (ready, wanted) == (2, 6)
    pending = [e for e in result.fleet.log.events if e.kind == "pending"]
    assert [e.pod for e in pending] == [2, 3, 4, 5]
    told = summarize(result)["fleet"]
    assert told["obstacle"] is None
    assert told["pending"] == {
        "pods": 4,
        "never_placed": 4,
        "why": "Insufficient nvidia.com/gpu: 6 wanted, 2 there",
    }
    assert "4 pods Pending: Insufficient nvidia.com/gpu: 6 wanted, 2 there" in " ".join(
        _troubles(told)
    )
    growing = cluster | {"nodes": {"gpus": 2, "initial": 1, "max": 3, "provision": 100}}
    more = run(fleet(growing, BURST))
    assert max(step.ready for step in more.fleet.log.steps) == 6
    nodes = [e.at_ps / PS for e in more.fleet.log.events if e.kind == "node"]
    assert nodes[0] - changes(more)[0][0] == pytest.approx(100)
    assert summarize(more)["fleet"]["pending"]["never_placed"] == 0


def test_a_run_without_a_replica_says_so():
    told = summarize(run(fleet({"pod": {"priority_class": "gone"}})))
    assert told["totals"]["refused"] == 40
    assert told["verdict"] == "40 of 40 requests were refused: no_ready_pod 40 (no pod was Ready)."


def test_ready_of_a_decision_is_from_before_it():
    cluster = {"hpa": hpa(most=3), "cold_start": start(1), "probes": {"readiness": None}}
    result = run(fleet(cluster, BURST))
    decisions = summarize(result)["fleet"]["decisions"]
    down = [row for row in decisions if row["to"] < row["from"]]
    assert down
    assert all(row["ready"] == row["from"] for row in down)
    assert decisions[0]["ready"] == decisions[0]["from"] == 1


def test_replicas_are_not_pods(tmp_path):
    """llm-d/llm-d-autoscaling#1303: a replica of 2 pods x 4 GPUs; load doubles: 2 replicas, 4 pods, 16 GPUs."""
    step_time = flat_profile(tmp_path, 30 * 10**9)
    hardware = {"gpu": "H100", "tensor_parallel_size": 8, "step_time": step_time}
    cluster = {
        "hpa": hpa(most=3, target="8", metric="vllm:num_requests_running"),
        "cold_start": start(20),
        "pod": {"pods_per_replica": 2},
        "nodes": {"gpus": 4, "initial": 4},
    }
    doubling = rates((0, 2), (60, 4), duration=300)
    result = run(fleet(cluster, doubling, hardware=hardware), "engine.max_num_seqs=64")
    assert changes(result)[0][1] == 2
    assert len(changes(result)) == 1
    told = summarize(result)["fleet"]
    assert (len(result.fleet.pods), told["pods"], told["gpus_per_replica"]) == (2, 4, 8)
    assert told["replicas"]["ready"]["max"] == 2
    alive = sum(result.simulated_ps - pod.created_ps for pod in result.fleet.pods)
    assert result.fleet.gpu_time.total_ps == 8 * alive


def test_pods_too_large_for_their_nodes_are_refused(tmp_path):
    cluster = {"nodes": {"gpus": 4}, "cold_start": start(1)}
    hardware = {
        "gpu": "H100",
        "tensor_parallel_size": 8,
        "step_time": flat_profile(tmp_path, 10**9),
    }
    with pytest.raises(InputError, match="a pod asks for 8 GPUs"):
        load_scenario(fleet(cluster, hardware=hardware))


# --- going --------------------------------------------------------------------------------

LONG = stream(100, 400, arrivals={"process": "poisson", "rate": 3}, requests=90)
ROLLED = {"replicas": 2, "cold_start": start(2), "probes": {"readiness": {"periodSeconds": 1}},
          "rolling_updates": [{"at": 10, "max_surge": "1", "max_unavailable": "0"}]}  # fmt: skip


def test_a_rolling_update_without_drain_aborts_streams():
    result = run(fleet(ROLLED, LONG))
    aborted = [r for r in result.records if r.outcome == "aborted"]
    assert aborted
    assert {r.reason for r in aborted} == {"pod_deleted"}
    pods = result.fleet.pods
    assert [pod.gone_ps is not None for pod in pods] == [True, True, False, False]
    for record in aborted:
        (pod,) = [p for p in pods if p.replica == record.replica]
        assert record.finish_ps == pod.gone_ps
    ready = [step.ready for step in result.fleet.log.steps]
    assert min(ready) >= 2


@pytest.mark.parametrize(
    "drain",
    [
        {"shutdown_timeout": 20, "termination_grace_period": 30},
        {"pre_stop": 20, "termination_grace_period": 30},
    ],
)
def test_a_drain_lets_streams_end(drain):
    result = run(fleet(ROLLED | {"pod": drain}, LONG))
    assert counts(result)["completed"] == 90
    for pod in result.fleet.pods[:2]:
        ends = [r.finish_ps for r in result.records if r.replica == pod.replica]
        assert pod.gone_ps >= max(ends)
        if "shutdown_timeout" in drain:
            # It goes when its last stream has ended, not at the time-out.
            assert pod.gone_ps == max(max(ends), pod.deleted_ps)
        else:
            assert pod.gone_ps - pod.deleted_ps == 20 * PS
        arrivals = [r.arrival_ps for r in result.records if r.replica == pod.replica]
        assert max(arrivals) <= pod.deleted_ps


def test_the_grace_period_ends_a_drain():
    drain = {"shutdown_timeout": 60, "termination_grace_period": 1}
    result = run(fleet(ROLLED | {"pod": drain}, LONG))
    assert counts(result)["aborted"] > 0
    deleted = [p for p in result.fleet.pods if p.deleted_ps is not None]
    assert {p.gone_ps - p.deleted_ps for p in deleted} == {PS}
    assert any("what still runs then is lost" in text for text in result.warnings)


def test_endpoints_that_lag_need_a_pre_stop():
    lagging = {"endpoint_lag": 3, "shutdown_timeout": 20}
    result = run(fleet(ROLLED | {"pod": lagging}, LONG))
    assert {r.reason for r in result.records if r.outcome == "refused"} == {"connection_refused"}
    patient = run(fleet(ROLLED | {"pod": lagging | {"pre_stop": 5}}, LONG))
    assert counts(patient)["completed"] == 90


def test_scaling_down_takes_the_youngest():
    result = run(fleet(SCALED, BURST, run={"until": 1500}))
    gone = [pod.number for pod in result.fleet.pods if pod.gone_ps is not None]
    left = [pod.number for pod in result.fleet.pods if pod.gone_ps is None]
    assert gone
    assert left == [0]


# --- two on one target --------------------------------------------------------------------


def test_two_autoscalers_on_one_deployment_are_refused():
    """vllm-project/aibrix#1661: refused at load with both names."""
    both = {"hpa": hpa(), "kpa": {"max_replicas": 3, "target": 4}}
    with pytest.raises(InputError, match="hpa and kpa would both set the replicas"):
        load_scenario(fleet(both))


def test_a_rival_hpa_stops_both():
    result = run(fleet(SCALED | {"hpa_rivals": ["other"]}, BURST))
    assert changes(result) == []
    assert "AmbiguousSelector" not in summarize(result)["fleet"]["decisions"][0]["reason"]
    assert "several autoscalers" in summarize(result)["fleet"]["decisions"][0]["reason"]


def test_two_targets_keep_their_own_state():
    """vllm-project/aibrix#436: the state of one deployment's autoscaler is not that of another's."""
    alone = [run(fleet(SCALED, traffic)) for traffic in (BURST, stream())]
    again = [run(fleet(SCALED, traffic)) for traffic in (stream(), BURST)]
    assert alone[0].fleet.log == again[1].fleet.log
    assert alone[1].fleet.log == again[0].fleet.log


# --- invariants ---------------------------------------------------------------------------

clusters = st.fixed_dictionaries(
    {
        "replicas": st.integers(1, 3),
        "cold_start": st.builds(
            lambda seconds, initial: start(seconds, initial=initial),
            st.floats(0, 6).map(lambda s: round(s, 2)),
            st.sampled_from(["warm", "cold"]),
        ),
        "probes": st.fixed_dictionaries(
            {
                "liveness": st.none() | st.just({"periodSeconds": 1, "failureThreshold": 4}),
                "readiness": st.none() | st.just({"periodSeconds": 1}),
            }
        ),
        "pod": st.fixed_dictionaries(
            {
                "pre_stop": st.sampled_from([0, 0.5, 3]),
                "shutdown_timeout": st.sampled_from([0, 0.3, 5]),
                "termination_grace_period": st.sampled_from([0, 2, 30]),
                "endpoint_lag": st.sampled_from([0, 0.7]),
            }
        ),
        "nodes": st.none() | st.builds(
            lambda gpus, more: {"gpus": gpus, "initial": 1, "max": 1 + more, "provision": 1, "remove_after": 1},
            st.integers(1, 3),
            st.integers(0, 3),
        ),
        "rolling_updates": st.lists(
            st.builds(
                lambda at, surge, missing: {"at": at, "max_surge": surge, "max_unavailable": missing},
                st.sampled_from([0, 1, 1.5, 4]),
                st.sampled_from(["0", "1", "100%"]),
                st.sampled_from(["0", "50%", "100%"]),
            ),
            max_size=2,
        ),
        "holds_requests": st.booleans(),
    }
)  # fmt: skip


@settings(max_examples=25)
@given(clusters, st.booleans(), st.integers(1, 3))
def test_nothing_vanishes_whatever_happens(cluster, is_scaled, seed):
    """Books balance, pods' lives are in order, and jumping over steps changes nothing."""
    if is_scaled:
        cluster = cluster | {
            "hpa": hpa(target="1"),
            "controller": {"sync_period": 0.5, "downscale_stabilization": 1},
            "metrics": {"scrape_interval": 0.3},
        }
    traffic = rates((0, 30), (2, 5), duration=6, timeouts={"total": 4})
    source = fleet(cluster, traffic, run={"until": 14, "seed": seed})
    result = run(source)
    if result.fleet is None:
        return
    for pod in result.fleet.pods:
        instants = [pod.created_ps, pod.placed_ps, pod.serving_ps, pod.deleted_ps, pod.gone_ps]
        known = [at for at in instants if at is not None]
        assert known[0] == pod.created_ps == min(known)
        assert pod.deleted_ps is None or pod.gone_ps is None or pod.deleted_ps <= pod.gone_ps
        assert min(dataclasses.astuple(pod.gpu_time)) >= 0
        if pod.gone_ps is not None:
            inside = [r for r in result.records if r.replica == pod.replica is not None]
            assert all(r.finish_ps is not None and r.finish_ps <= pod.gone_ps for r in inside)
    for record in result.records:
        if record.outcome == "aborted":
            assert record.reason == "pod_deleted"
        if record.outcome == "refused":
            assert record.reason in ("no_ready_pod", "connection_refused")
    stepped = run(source, "run.engine_mode=stepped")
    assert list(stepped.records) == list(result.records)
    assert stepped.fleet == result.fleet


# --- told ---------------------------------------------------------------------------------


def test_the_report_shows_decisions_and_their_reasons(tmp_path):
    """In the tables, within 80 columns; in the page, with replicas over time beside the queue."""
    result = run(fleet(SCALED | {"price_per_gpu_hour": 2.5}, BURST), observe=True)
    told = summarize(result)
    lines = render(told).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    first = told["fleet"]["decisions"][0]
    assert first["to"] > first["from"]
    assert f"{first['from']} -> {first['to']}" in text
    assert "above target asks for" in text
    assert "per million output tokens" in text
    page = render_html(result, told)
    figures = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    assert list(figures).index("replicas") < list(figures).index("queue")
    marks = next(trace for trace in figures["replicas"]["data"] if trace["name"] == "decision")
    assert marks["x"][0] == first["at_s"]
    assert "above target" in marks["text"][0]
    assert "Replicas and cost" in page
    slots = next(trace for trace in figures["running"]["data"] if trace["name"] == "slots")
    assert slots["y"][0] == 8
    assert max(slots["y"]) == 8 * told["fleet"]["replicas"]["ready"]["max"]
    hours = told["cost"]["gpu_seconds"]
    assert sum(hours.values()) / 3600 == pytest.approx(told["cost"]["gpu_hours"])
    write_openmetrics(tmp_path / "h.om", result, 0)


def test_fixed_replicas_have_a_price_too():
    told = summarize(run(document(cluster={"replicas": 2, "price_per_gpu_hour": 3})))
    assert told["fleet"] is None
    assert told["cost"]["gpu_hours"] == pytest.approx(2 * told["simulated_s"] / 3600)
    assert told["cost"]["total"] == pytest.approx(3 * told["cost"]["gpu_hours"])
    assert "per good request" in " ".join(render(told).split())


def test_without_records_the_fleet_is_told_all_the_same():
    kept, dropped = (
        run(fleet(SCALED, BURST)),
        simulate(load_scenario(fleet(SCALED, BURST), ["run.records=false"])),
    )
    assert dropped.fleet == kept.fleet
    told = summarize(dropped)
    assert told["totals"] == summarize(kept)["totals"]
    assert told["fleet"]["after_last_arrival"] is None
    assert told["cost"]["gpu_hours"] == summarize(kept)["cost"]["gpu_hours"]
