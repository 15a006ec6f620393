"""What users of routers, gateways, warm pools and predictors stumbled over.

Where each thread is tested, and here those at the size that the thread gives.
"""

from collections import Counter
from importlib import import_module
from statistics import mean

import pytest

from tests.cluster.test_fleet import fleet, hpa, rates, start
from tests.runs import document, run, stream
from twin.clock import PS
from twin.report.json_summary import summarize

WHERE = {
    "kaito-project/kaito#2205": "cluster.test_user_cases.test_shedding_at_the_size_of_the_thread",
    "chutesai/e2ee-proxy#6": "cluster.test_user_cases.test_hits_by_router_and_replicas",
    "inference-sim/inference-sim#507": "cluster.test_user_cases.test_staleness_is_a_setting",
    "ai-dynamo/dynamo#14513": "cluster.test_prediction.test_a_broken_forecaster_never_wins",
    "ai-dynamo/dynamo#14238": "cluster.test_prediction.test_last_value_and_no_prediction_at_the_same_service",
    "llm-d/llm-d-autoscaling#1118": "cluster.test_user_cases.test_a_burst_shorter_than_a_start",
    "llm-d-incubation/llm-d-fast-model-actuation#445":
        "cluster.test_warm_pool.test_cold_woken_and_the_first_wake",
    "smg-project/smg#2378": "cluster.test_admission.test_a_limit_of_tokens_turns_long_prompts_away_early",
    "vllm-project/production-stack#166": "test_router.test_several_routers_know_less",
    "llm-d/llm-d-router#2547": "cluster.test_routing_stress.test_stale_metrics_block_or_let_through",
    "tinfoilsh/confidential-model-router#429":
        "test_router.test_a_burst_between_two_polls_lands_on_one_replica",
    "scaling S14": "cluster.test_routing_stress.test_s14_a_phantom_queue_blocks_scaling_down",
    "scaling S23": "cluster.test_faults.test_health_is_200_on_a_dead_gpu",
}  # fmt: skip
"""Thread -> the test that shows it."""


@pytest.mark.parametrize("name", WHERE.values())
def test_every_case_has_its_test(name):
    module, _, function = name.rpartition(".")
    assert callable(getattr(import_module(f"tests.{module}"), function))


def imbalance(result):
    """Requests of the fullest replica over the mean."""
    counts = Counter(r.replica for r in result.records if r.replica is not None)
    return max(counts.values()) / mean(counts[i] for i in range(len(result.engines)))


def online(result):
    return summarize(result)["tiers"]["ONLINE"]


def test_shedding_at_the_size_of_the_thread():
    """1,024 clients, 4,096 requests of 512 + 64 tokens on about 120 slots; then refused when as many wait as run."""
    closed = stream(512, 64, requests=4096, arrivals={"process": "closed", "users": 1024})
    engine = {"max_num_seqs": 120, "max_num_batched_tokens": 8192, "num_gpu_blocks_override": 8000}
    free = run(document(traffic=[closed], engine=engine))
    guard = {"admission": {"max_inflight": 120, "max_queue": 120}}
    # A client that is refused asks for something else a little later.
    patient = closed | {"arrivals": closed["arrivals"] | {"think_time": {"exponential": 1.0}}}
    shed = run(document(traffic=[patient], engine=engine, cluster=guard))
    told = [summarize(result) for result in (free, shed)]
    counts = told[1]["totals"]
    assert counts["refused"] + counts["completed"] == 4096 == told[0]["totals"]["completed"]
    assert counts["refused"] > 1000
    # While both are full: requests that end between a tenth and half of the shorter run.
    rates_ = []
    until = min(free.simulated_ps, shed.simulated_ps)
    for result in (free, shed):
        done = sum(
            r.outcome == "completed" and 0.1 * until < r.finish_ps < 0.5 * until
            for r in result.records
        )
        rates_.append(done)
    assert rates_[1] == pytest.approx(rates_[0], rel=0.03)
    means = [online(result)["e2e_s"]["mean"] for result in (free, shed)]
    assert means[1] < means[0] / 2


def test_hits_by_router_and_replicas():
    """1, 2, 4, 8 replicas at the same load each: the hit rate falls under round robin and least connections only."""
    routers = {
        "round_robin": {}, "least_connections": {}, "session_affinity": {"routing": {"guard": None}},
    }  # fmt: skip
    hits = {}
    for router, keys in routers.items():
        for replicas in (1, 2, 4, 8):
            talk = stream(
                64, 20, requests=20 * replicas, arrivals={"process": "poisson", "rate": 2 * replicas},
                sessions={"turns": 5, "system_prompt_tokens": 160, "think_time": 0.3},
            )  # fmt: skip
            result = run(
                document(traffic=[talk], cluster={"router": router, "replicas": replicas, **keys})
            )
            engine = summarize(result)["engine"]
            hits[router, replicas] = engine["prefix_hit_tokens"] / engine["prefix_query_tokens"]
            assert imbalance(result) >= 1
            assert online(result)["ttft_s"]["p50"] > 0
    for router in ("round_robin", "least_connections"):
        falling = [hits[router, n] for n in (1, 2, 4, 8)]
        assert falling == sorted(falling, reverse=True)
        assert falling[3] < falling[0] - 0.2
    flat = [hits["session_affinity", n] for n in (1, 2, 4, 8)]
    assert max(flat) - min(flat) < 0.06


def test_staleness_is_a_setting():
    """Four replicas, seen at once, 1 s and 15 s late: balance and first tokens get worse."""
    found = []
    for poll in (0, 1, 15):
        busy = stream(100, 60, arrivals={"process": "poisson", "rate": 50}, requests=1500)
        cluster = {"replicas": 4, "routing": {"poll_interval": poll}}
        result = run(document(traffic=[busy], cluster=cluster))
        found.append((online(result)["ttft_s"]["p90"], imbalance(result)))
    assert [p90 for p90, _ in found] == sorted(p90 for p90, _ in found)
    assert found[2][1] > 1.2 > found[0][1]
    assert found[2][0] > 3 * found[0][0]


def test_a_burst_shorter_than_a_start():
    """15, 2, 10, 15, 5, 2 requests/s on replicas for 10 that start in 103 s: capacity comes after the burst; what a
    warm pool, a higher minimum and a limit do is in cost and attainment."""
    steps = [(60 * i, rate) for i, rate in enumerate((20, 3, 14, 20, 7, 3))]
    load = rates(*steps, duration=360, timeouts={"ttft": 10.0})
    base = {
        "hpa": hpa(most=4),
        "cold_start": start(103),
        "probes": {"readiness": {"periodSeconds": 1}},
    }
    ways = {
        "HPA": {},
        "warm": {"warm_pool": {"standby": 1, "first_wake": 3}},
        "minimum": {"replicas": 2, "hpa": hpa(least=2, most=4)},
        "limit": {"admission": {"max_inflight_per_replica": 16, "max_queue": 10}},
    }
    objectives = {"ONLINE": {"ttft_p99": 2.0}}
    told, results = {}, {}
    for name, way in ways.items():
        results[name] = run(fleet(base | way, load, objectives=objectives, run={"until": 360}))
        told[name] = summarize(results[name])
    first = results["HPA"].fleet.pods[1]
    assert (
        first.created_ps < 60 * PS < 103 * PS < first.ready_ps
    )  # ordered in the burst, Ready after it
    attained = {name: t["tiers"]["ONLINE"]["attainment"] for name, t in told.items()}
    hours = {name: t["cost"]["gpu_hours"] for name, t in told.items()}
    assert attained["warm"] > attained["HPA"] + 0.05
    assert attained["minimum"] > attained["HPA"] + 0.05
    assert told["limit"]["totals"]["refused"] > 0
    assert online(results["limit"])["ttft_s"]["p99"] < online(results["HPA"])["ttft_s"]["p99"]
    assert all(value > 0 for value in hours.values())
