"""Metrics over time: right at every instant, and without any effect on the run."""

import itertools

import pytest

from tests.runs import document, flat_profile, run, stream
from twin.clock import PS
from twin.metrics.gauges import LENGTH_GROUPS, Gauges, length_group
from twin.metrics.timeseries import FEWEST_INSTANTS, FORESIGHT, MOST_INSTANTS, Sampler
from twin.report.json_summary import summarize

MIXED = {"ONLINE": 0.5, "BATCH": 0.3, "OFFLINE": 0.2}
BUSY = document(
    traffic=[
        stream(200, 60, arrivals={"process": "poisson", "rate": 30}, requests=80, tiers=MIXED)
        | {"output_tokens": {"uniform": [5, 120]}}
    ],
    objectives={"ONLINE": {"ttft_p99": 0.1}},
)
CASES = {
    "stock": (),
    "tiered": ("policy=tiered",),
    "short of KV": ("engine.num_gpu_blocks_override=129",),
    "clients leave": ("traffic.0.timeouts.total=1.0", "policy=tiered"),
    "two replicas": ("cluster.replicas=2", "run.until=1.7"),
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_a_run_is_the_same_observed_or_not_and_in_either_engine(overrides):
    plain = run(BUSY, *overrides)
    seen = run(BUSY, *overrides, observe=True)
    stepped = run(BUSY, *overrides, "run.engine_mode=stepped", observe=True)
    assert seen.records == plain.records == stepped.records
    assert seen.engines == plain.engines == stepped.engines
    assert seen.policies == plain.policies == stepped.policies
    assert seen.events == plain.events
    assert seen.series == stepped.series
    assert seen.log == stepped.log
    assert plain.series is None
    assert plain.log == ()


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_the_last_row_has_what_the_run_ended_with(overrides):
    result = run(BUSY, *overrides, observe=True)
    rows = list(result.series.rows())
    replicas = len(result.engines)
    for replica, stats in enumerate(result.engines):
        own = rows[replica::replicas]
        last = own[-1]
        assert last["time_s"] == result.simulated_ps / PS
        for name in (
            "steps",
            "preemptions",
            "recomputed_tokens",
            "prefix_query_tokens",
            "padded_tokens",
        ):
            assert last[name] == getattr(stats, name)
        spans = [b["time_s"] - a["time_s"] for a, b in itertools.pairwise(own)]
        for counter, rate in (
            ("decode_tokens", "decode_tokens_per_s"),
            ("preemptions", "preemptions_per_s"),
        ):
            total = sum(span * row[rate] for span, row in zip(spans, own[1:], strict=True))
            assert total == pytest.approx(getattr(stats, counter))
        busy = sum(span * row["busy"] for span, row in zip(spans, own[1:], strict=True))
        assert busy == pytest.approx(stats.busy_ps / PS)
    good = sum(result.series.good[-1].values())
    assert good == sum(tier["good"] for tier in summarize(result)["tiers"].values())


def test_requests_are_counted_where_their_records_say_they_were(tmp_path):
    """Without async scheduling and preemption a request runs from the start of its first step to its end."""
    profile = flat_profile(tmp_path, 10_000_000_000)
    result = run(
        BUSY, f"hardware.step_time={profile}", "engine.async_scheduling=false", observe=True
    )
    assert result.engines[0].preemptions == 0
    seen = {"waiting": 0, "running": 0}
    for at_ps, [gauges] in zip(result.series.times_ps, result.series.gauges, strict=True):
        is_last = at_ps == result.simulated_ps
        for tier in MIXED:
            own = [r for r in result.records if r.tier == tier]
            waiting = sum(r.arrival_ps < at_ps <= r.first_scheduled_ps for r in own)
            running = sum(r.first_scheduled_ps < at_ps <= r.finish_ps for r in own) * (not is_last)
            assert gauges.waiting.get(tier, 0) == waiting
            assert gauges.running.get(tier, 0) == running
            seen["waiting"] += waiting
            seen["running"] += running
    assert all(seen.values())


def test_held_and_ready_requests_are_told_apart():
    longer = [f"policy.tiers.{tier}.max_wait=0.4" for tier in MIXED]
    result = run(BUSY, "policy=tiered", "engine.max_num_seqs=4", *longer, observe=True)
    rows = list(result.series.rows())
    for tier in MIXED:
        assert any(row[f"held.{tier}"] for row in rows)
        assert any(row[f"ready.{tier}"] for row in rows)
        assert all(row[f"ready.{tier}"] >= 0 for row in rows)
    held_by_all = run(
        BUSY, "policy={tiers: [{name: '*', batch_size: 4, max_wait: 0.1}]}", observe=True
    )
    assert {row["held.ONLINE"] for row in held_by_all.series.rows()} == {None}


def test_a_request_wastes_half_a_page_whatever_its_length():
    lengths = {"prompt_tokens": {"uniform": [20, 1500]}}
    changes = ("engine.num_gpu_blocks_override=4000", "traffic.0.requests=300")
    varied = document(traffic=[BUSY["traffic"][0] | lengths])
    result = run(varied, *changes, observe=True)
    groups = result.series.kv_by_length()
    assert list(groups) == list(LENGTH_GROUPS)
    for name in ("short", "medium", "long"):
        assert groups[name]["empty_tokens"] == pytest.approx(7.5, abs=1.5)
        assert groups[name]["waste"] == pytest.approx(
            groups[name]["empty_tokens"] / groups[name]["held_tokens"]
        )
    assert groups["short"]["waste"] > groups["medium"]["waste"] > groups["long"]["waste"]
    assert groups["ultra"] == {
        "requests": 0.0, "held_tokens": None, "empty_tokens": None, "waste": None,
    }  # fmt: skip


def test_kv_is_used_wasted_cached_or_free():
    result = run(BUSY, "engine.num_gpu_blocks_override=200", observe=True)
    for [gauges] in result.series.gauges:
        assert 0 <= gauges.kv_wasted <= gauges.kv_used
        assert gauges.kv_used + gauges.kv_cached <= 1 + 1e-12
    assert max(gauges.kv_cached for [gauges] in result.series.gauges) > 0.1


@pytest.mark.parametrize(
    ("tokens", "group"), [(1, 0), (255, 0), (256, 1), (1023, 1), (1024, 2), (4095, 2), (4096, 3)]
)
def test_length_groups(tokens, group):
    assert length_group(tokens) == group


# --- the instants -----------------------------------------------------------------------------

NOTHING = Gauges(
    waiting={}, held={}, counts={}, pressure=None,
    running={}, kv_used=0.0, kv_wasted=0.0, kv_cached=0.0, kv_by_length=(), steps=0, busy_ps=0,
    prefill_tokens=0, decode_tokens=0, padded_tokens=0, prompt_tokens=0, generation_tokens=0, preemptions=0,
    recomputed_tokens=0, prefix_query_tokens=0, prefix_hit_tokens=0,
)  # fmt: skip


def sampled(end_ps, period_ps=None, replicas=1, **options):
    """The series of a run of that length, and how often the engines were read."""
    read = []

    def gauges(now_ps):
        read.append(now_ps)
        return (NOTHING,) * replicas

    sampler = Sampler(gauges, replicas, (), {}, 0, period_ps, **options)
    for i in range(1, 1001):
        sampler.catch_up(end_ps * i // 1000)
    return sampler.finish(end_ps), len(read)


@pytest.mark.parametrize("seconds", [3, 10, 77, 1000, 12_345, 10**6, 10**8])
@pytest.mark.parametrize("replicas", [1, 100_000])
@pytest.mark.parametrize("knows", [True, False])
def test_a_run_of_any_length_ends_with_a_few_hundred_instants_at_a_round_period(
    seconds, replicas, knows
):
    end_ps = seconds * PS
    done = {"share_done": lambda now_ps: now_ps / end_ps} if knows else {}
    series, read = sampled(end_ps, replicas=replicas, **done)
    period_ps, times = series.period_ps, series.times_ps
    assert times == [*range(0, end_ps, period_ps), end_ps]
    most = MOST_INSTANTS if replicas == 1 else FEWEST_INSTANTS
    assert len(times) <= most + 1
    assert seconds < 10 or len(times) > most / 10
    assert f"{period_ps:e}"[0] in "12"
    assert read <= len(times) + (4 * FORESIGHT if knows else 20 * most)


def test_a_period_of_ones_own_is_kept():
    series, _ = sampled(10 * PS, period_ps=PS // 1000)
    assert series.period_ps == PS // 1000
    assert len(series.times_ps) == 10_001


def test_timers_after_the_last_request_leave_no_instants():
    sampler = Sampler(lambda now_ps: (NOTHING,), 1, (), {}, 0, PS)
    sampler.catch_up(100 * PS)
    assert sampler.finish(PS * 5 // 2).times_ps == [0, PS, 2 * PS, PS * 5 // 2]
