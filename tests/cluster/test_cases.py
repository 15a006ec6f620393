"""What users of autoscalers stumbled over; each test names the thread it comes from.

Others of the kind stand where they belong: tests/cluster/test_fleet.py (inference-sim#994, llm-d-autoscaling#549 and
#1303, aibrix#1661) and tests/cluster/test_keda.py (keda#7770).
"""

import pytest

from tests.cluster.test_fleet import changes, fleet, hpa, rates, start
from tests.runs import flat_profile, run, stream
from twin.clock import PS
from twin.cluster.alone import alone_ttft_ps
from twin.cluster.objects import write_behavior
from twin.report.json_summary import summarize
from twin.scenario import load_scenario

QUICK = {"readiness": {"periodSeconds": 1}}


def test_a_goal_no_replica_count_can_meet():
    """ai-dynamo/dynamo#11624: one long prompt alone misses the target; replicas follow demand and go back to one."""
    long_prompts = rates((0, 0.5), duration=600) | {"prompt_tokens": {"fixed": 32_000}}
    engine = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "max_model_len": 40_000,
        "num_gpu_blocks_override": 20_000,
    }
    cluster = {"hpa": hpa(most=4, target="2"), "cold_start": start(60), "probes": QUICK}
    source = fleet(cluster, long_prompts, engine=engine, run={"until": 1500})
    loaded = load_scenario(source)
    alone_s = alone_ttft_ps(loaded.step_time, loaded.engine, 32_000) / PS
    goal = 0.95 * alone_s
    result = run(source | {"objectives": {"ONLINE": {"ttft_p99": goal}}})
    (told,) = [text for text in summarize(result)["warnings"] if "even alone" in text]
    assert "no number of replicas helps" in told
    assert "requests of ONLINE" in told
    assert result.fleet.log.steps[-1].wanted == 1
    # Alone means alone: that is what such a prompt takes on an idle replica.
    one = run(fleet({}, stream(32_000, 5, requests=1), engine=engine, run={"until": None}))
    record = one.records[0]
    assert record.first_token_ps - record.arrival_ps == alone_ttft_ps(
        loaded.step_time, loaded.engine, 32_000
    )
    within = run(source | {"objectives": {"ONLINE": {"ttft_p99": 1.1 * alone_s}}})
    assert not [text for text in summarize(within)["warnings"] if "even alone" in text]


def test_queue_time_must_drive_scaling():
    """ai-dynamo/dynamo#10528: service times are fine while requests wait 20 s: one timeline shows both proposals."""
    quantile = "histogram_quantile(0.5, rate(vllm:request_{}_time_seconds_bucket[1m]))"
    metrics = [
        {"type": "Pods", "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": target}}}
        for name, target in (("service_s", "2"), ("queue_s", "2"))
    ]  # fmt: skip
    queries = {"service_s": quantile.format("inference"), "queue_s": quantile.format("queue")}
    both = {"minReplicas": 1, "maxReplicas": 6, "metrics": metrics}
    burst = rates((0, 2), (60, 14), (260, 2), duration=400)
    base = {"cold_start": start(60), "probes": QUICK, "metrics": {"queries": queries}}
    told = summarize(run(fleet(base | {"hpa": both}, burst)))["fleet"]
    up = [row for row in told["decisions"] if row["to"] > row["from"]]
    assert up
    for row in up:
        assert row["proposals"]["queue_s"] > row["from"] >= row["proposals"]["service_s"]
    # Alone, the estimate of the service time holds where it is.
    alone = {**both, "metrics": metrics[:1]}
    held = base | {"metrics": {"queries": {"service_s": queries["service_s"]}}}
    assert changes(run(fleet(held | {"hpa": alone}, burst))) == []


def slow(folder):
    """Hardware of which a replica with 8 slots serves 1.6 requests of 100 tokens a second."""
    return {"gpu": "H100", "step_time": flat_profile(folder, 50 * 10**9)}


def test_a_slow_metric_times_a_fast_loop(tmp_path):
    """kubernetes/kubernetes#109920: capacity takes five minutes to show; the run proposes what removes the flapping."""
    wave = rates(
        *((1200 * i + at, rate) for i in range(3) for at, rate in ((0, 2.4), (500, 0.6))),
        duration=3600,
    )
    cluster = {"hpa": hpa(most=30, target="5"), "cold_start": start(300), "probes": QUICK,
               "pod": {"shutdown_timeout": 60, "termination_grace_period": 90}}  # fmt: skip
    hardware = slow(tmp_path)
    told = summarize(run(fleet(cluster, wave, hardware=hardware)))["fleet"]
    assert told["replicas"]["wanted"]["max"] == 30
    assert told["reversals"] >= 2
    assert told["calmer"] is not None
    calm = dict(cluster, hpa=cluster["hpa"] | {"behavior": told["calmer"]})
    after = summarize(run(fleet(calm, wave, hardware=hardware)))["fleet"]
    assert after["replicas"]["wanted"]["max"] <= 4
    assert after["reversals"] < told["reversals"]
    assert (
        write_behavior(load_scenario(fleet(calm, wave)).cluster.fleet.scaler.hpa.behavior)
        == told["calmer"]
    )


def test_slow_scale_down_costs_money(tmp_path):
    """vllm-project/aibrix#593: seven replicas after a burst, then idle for half an hour, by algorithm."""
    burst = rates((0, 10), duration=120)
    ways = {
        "HPA": {"hpa": hpa(most=7)},
        "HPA -1/120 s": {
            "hpa": hpa(
                most=7,
                scaleDown={"policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}]},
            )
        },
        "APA": {"apa": {"max_replicas": 7, "target": 4}},
        "KPA": {"kpa": {"max_replicas": 7, "target": 4}},
        "saturation": {"saturation": {"max_replicas": 7}},
    }
    hours, seconds = {}, {}
    for name, way in ways.items():
        cluster = way | {"cold_start": start(20), "probes": QUICK}
        source = fleet(cluster, burst, hardware=slow(tmp_path), run={"until": 2400})
        told = summarize(run(source))["fleet"]
        after = told["after_last_arrival"]
        hours[name], seconds[name] = after["gpu_hours"], after["reached_after_s"]
        assert after["replicas"] == 1, name
    assert seconds["HPA"] < seconds["HPA -1/120 s"]
    assert hours["HPA"] < hours["HPA -1/120 s"]
    assert seconds["HPA -1/120 s"] > 6 * 120
    assert min(hours.values()) > 0
    assert len({round(h, 3) for h in hours.values()}) > 3


def test_a_trace_with_a_start_of_two_minutes():
    """llm-d-autoscaling#1044: the KV cache fills before anybody waits, and the second pod comes two minutes later."""
    engine = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
        "num_gpu_blocks_override": 600,
    }
    kv = "vllm:kv_cache_usage_perc"
    cluster = {
        "hpa": hpa(most=2, target="800m", metric=kv),
        "cold_start": start(120),
        "probes": QUICK,
    }
    load = rates((0, 2), (60, 30), duration=400) | {
        "prompt_tokens": {"fixed": 200},
        "output_tokens": {"fixed": 150},
    }
    result = run(fleet(cluster, load, engine=engine, run={"sample_period": 1}), observe=True)
    series = result.series
    full = next(
        t for t, g in zip(series.times_ps, series.gauges, strict=True) if g[0].kv_used > 0.9
    )
    queued = next(
        t
        for t, g in zip(series.times_ps, series.gauges, strict=True)
        if sum(g[0].waiting.values()) > 20
    )
    ordered = changes(result)[0][0]
    ready = result.fleet.pods[1].ready_ps / PS
    assert 60 * PS < full < queued
    assert full / PS < ordered < full / PS + 35
    assert ready - ordered == pytest.approx(120, abs=1)
