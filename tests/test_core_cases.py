"""What users of real servers and other simulators stumbled over; each test names the thread it comes from."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.serve import Service
from tests.runs import at_once, document, flat_profile, run, stream
from twin.clock import PS
from twin.engine.blocks import BlockPool
from twin.engine.config import EngineConfig
from twin.errors import InputError
from twin.report.explain import explain, render_explain
from twin.report.json_summary import summarize
from twin.report.tables import render
from twin.scenario import load_scenario
from twin.step_time.model import constant_step
from twin.workload.request import Request

STEP_PS = PS // 100
"""10 ms."""


def ttft(record):
    return record.first_token_ps - record.arrival_ps


def queue(record):
    return record.first_scheduled_ps - record.arrival_ps


def prefill(record):
    return record.first_token_ps - record.first_scheduled_ps


def p99(values):
    return float(np.percentile(list(values), 99)) / PS


def request(index, arrival_ps, prompt, output, tier="ONLINE"):
    content = ((2 * index, prompt),)
    return Request(index, arrival_ps, content, prompt, output, None, 2 * index + 1, tier)


# --- order ---------------------------------------------------------------------------------


def preempted_and_older(policy=None, scheduling_policy="priority"):
    """A runs, D (more urgent) grows until blocks run out and A gives way; B, stamped before A, came in between."""
    config = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, num_gpu_blocks=33,
        enable_prefix_caching=False, async_scheduling=False, scheduling_policy=scheduling_policy,
    )  # fmt: skip
    urgent = request(0, PS // 2, 160, 300, "URGENT")
    running = request(1, PS, 160, 100)
    older = request(2, 0, 320, 20)
    service = Service([], config, constant_step(STEP_PS), policy, {"URGENT": 0, "ONLINE": 1})
    for late, due_ps in ((urgent, PS // 2), (running, PS), (older, 3 * PS // 2)):
        timer = service.env.timeout(due_ps)
        timer.callbacks.append(lambda _, late=late: service.replica.submit(late))
    service.run()
    return service.record(1), service.record(2)


def test_a_preempted_request_waits_behind_one_stamped_before_it():
    """vllm-project/vllm#41951: under vLLM's priority the key is (priority, arrival), so the older one goes first."""
    preempted, older = preempted_and_older()
    assert preempted.preemptions == 1
    assert preempted.recomputed_tokens >= 160
    stall_ps = max(preempted.itl_ps)
    assert older.finish_ps < preempted.finish_ps
    resumed_ps = preempted.finish_ps - preempted.itl_ps[-1]
    assert older.first_scheduled_ps < resumed_ps
    assert stall_ps > 20 * STEP_PS


def test_other_ways_to_treat_preempted_work_are_options_that_can_be_compared():
    """vllm-project/vllm#41951: vLLM's fcfs puts the preempted one in front; ours goes by arrival."""
    stock, older_stock = preempted_and_older(scheduling_policy="fcfs")
    ours, older_ours = preempted_and_older(policy="fcfs")
    assert stock.preemptions == ours.preemptions == 1
    assert stock.finish_ps <= older_stock.first_scheduled_ps
    assert older_ours.first_scheduled_ps < ours.finish_ps
    assert max(stock.itl_ps) < max(ours.itl_ps)


def test_tiers_sent_to_a_first_come_first_served_server_are_not_silent():
    """vllm-project/vllm#22997: one warning, then the result of equal tiers; none where tiers count."""
    mixed = [stream(tiers={"ONLINE": 0.4, "BATCH": 0.3, "OFFLINE": 0.3})]
    warned, equal = run(document(traffic=mixed)), run(document())
    assert [w.partition(":")[0] for w in warned.warnings] == [
        "tiers have no effect under policy vllm-fcfs"
    ]
    assert {r.tier for r in warned.records} == {"ONLINE", "BATCH", "OFFLINE"}
    assert [replace(r, tier="ONLINE") for r in warned.records] == list(equal.records)
    for policy in ("vllm-priority", "priority"):
        assert run(document(traffic=mixed, policy=policy)).warnings == ()


@pytest.mark.parametrize("policy", ["vllm-fcfs", "fcfs"])
def test_first_come_does_not_mean_first_finished(policy):
    """vllm-project/vllm#4563: admitted R1, R2, R3, finished R2, R3, R1; the record shows both."""
    traffic = [at_once(50, 100), at_once(50, 10), at_once(50, 50)]
    records = run(document(traffic=traffic, policy=policy, engine={"max_num_seqs": 3})).records
    assert [r.arrival_ps for r in records] == [0, 0, 0]
    assert [r.first_scheduled_ps for r in records] == [0, 0, 0]
    assert [r.index for r in sorted(records, key=lambda r: r.finish_ps)] == [1, 2, 0]


def long_prompts(*overrides):
    """Eight replicas: 20 prompts of 100k tokens and more a minute between 60 of 500 tokens."""
    short = stream(500, 200, arrivals={"process": "poisson", "rate": 1}, requests=120, tier="SHORT")
    long = short | {
        "arrivals": {"process": "poisson", "rate": 1 / 3},
        "requests": 40,
        "tier": "LONG",
        "prompt_tokens": {"uniform": [100_000, 130_000]},
        "output_tokens": {"uniform": [200, 900]},
    }
    scenario = document(
        engine={
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "max_model_len": 131_072,
            "num_gpu_blocks_override": 26_000,
        },
        traffic=[short, long],
        cluster={"replicas": 8, "router": "round_robin"},
    )
    records = run(scenario, *overrides).records
    return [[r for r in records if r.tier == tier] for tier in ("SHORT", "LONG")]


def test_very_long_prompts_starve_short_ones_until_their_chunks_are_limited():
    """vllm-project/vllm#57413: TTFT of short requests, split into queue and prefill, with and without a threshold."""
    short, long = long_prompts()
    alone, _ = long_prompts("traffic.1.requests=1", "traffic.1.prompt_tokens={fixed: 500}")
    limited, slowed = long_prompts("engine.long_prefill_token_threshold=2048")
    assert p99(map(ttft, short)) > 20 * p99(map(ttft, alone))
    for record in short:
        assert ttft(record) == queue(record) + prefill(record)
    assert p99(map(queue, short)) > p99(map(prefill, short))
    assert p99(map(ttft, limited)) < 0.5 * p99(map(ttft, short))
    assert np.mean([*map(ttft, slowed)]) > np.mean([*map(ttft, long)])


def test_more_slots_raise_tpot_and_shorten_the_queue():
    """vllm-project/vllm#17598: both are shown; end to end can be better although TPOT is worse."""
    chat = stream(256, 160, arrivals={"process": "poisson", "rate": 16}, requests=500)
    scenario = document(
        traffic=[chat], engine={"max_num_batched_tokens": 8192, "num_gpu_blocks_override": 20_000}
    )
    few, many = (run(scenario, f"engine.max_num_seqs={n}").records for n in (16, 32))

    def mean(values):
        return sum(values) / len(few)

    def tpot(record):
        return sum(record.itl_ps) / len(record.itl_ps)

    assert mean(map(tpot, many)) > mean(map(tpot, few))
    assert mean(map(queue, many)) < mean(map(queue, few))
    assert mean(r.finish_ps for r in many) < mean(r.finish_ps for r in few)


# --- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", ["true", "false"])
@pytest.mark.parametrize("policy", ["vllm-fcfs", "vllm-priority", "fcfs", "tiered"])
def test_two_half_admitted_requests_do_not_block_each_other(policy, whole):
    """vllm-project/vllm#45388: two prompts that do not fit together, admitted whole or chunk by chunk, both end."""
    traffic = [at_once(25_596, 50), at_once(19_196, 50), at_once(500, 20)]
    scenario = document(
        traffic=traffic,
        policy=policy,
        engine={
            "max_model_len": 32_752,
            "max_num_batched_tokens": 2048,
            "num_gpu_blocks_override": 2048,
        },
    )
    result = run(scenario, f"engine.scheduler_reserve_full_isl={whole}")
    assert [r.outcome for r in result.records] == ["completed"] * 3


def test_a_preempted_request_makes_progress_when_it_returns():
    """inference-sim/inference-sim#1057: few blocks, two long shared prefixes, outputs that fill what is left."""
    outputs = {"uniform": [100, 600]}

    def shared(rate, requests, **keys):
        arrivals = {"process": "poisson", "rate": rate}
        prompts = {"prompt_tokens": {"uniform": [50, 400]}, "output_tokens": outputs}
        return stream(arrivals=arrivals, requests=requests, **keys) | prompts

    prefix = {"turns": 1, "system_prompt_tokens": 16_000}
    traffic = [
        shared(2.84, 142, sessions=prefix),
        shared(2.84, 142, sessions=prefix),
        shared(2.32, 116),
    ]
    engine = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 20_000,
        "num_gpu_blocks_override": 2204,
    }
    result = run(document(traffic=traffic, engine=engine))
    assert [r.outcome for r in result.records] == ["completed"] * 400
    preempted = [r for r in result.records if r.preemptions]
    assert len(preempted) > 100
    # Far less is computed again than was thrown away: freed blocks stay findable until they are used.
    thrown_away = sum(r.preemptions * r.prompt_tokens for r in preempted)
    assert sum(r.recomputed_tokens for r in preempted) < 0.2 * thrown_away
    assert max(r.preemptions for r in preempted) < 20


def test_a_hole_ends_the_prefix():
    """llm-d/llm-d-inference-sim#701: of cached blocks 1, 2, 3 the first is evicted; then nothing is hit."""
    pool = BlockPool(8, caching=True)
    blocks = pool.take(3)
    for block, key in zip(blocks, "abc", strict=True):
        pool.publish(block, key)
    assert pool.find("abc") == blocks
    pool.release(blocks[:1])
    pool.take(pool.num_free)
    assert pool.find("abc") == []


# --- what is known of models and hardware --------------------------------------------------


def test_a_missing_profile_is_an_error_before_the_run():
    """casys-kaist/LLMServingSim#4: names the missing pair and those there are."""
    with pytest.raises(InputError) as caught:
        load_scenario(document(model="Qwen/Qwen3-8B", hardware={"gpu": "L4"}))
    told = str(caught.value)
    assert "no built-in step-time profile for Qwen/Qwen3-8B on L4, TP 1, bfloat16" in told
    assert "Available: Qwen/Qwen3-8B on " in told
    assert "hardware.step_time: roofline" in told


@pytest.mark.parametrize(
    ("override", "bounds"),
    [
        ("engine.max_num_seqs=2048", "2048 is outside the step-time profile .* covers 1 to 1024"),
        ("engine.max_num_batched_tokens=16385", "16385 is outside .* covers 1 to 16384"),
        ("engine.max_model_len=131073", "must be <= 131072"),
    ],
)
def test_limits_beyond_the_profile_are_refused_with_their_bounds(override, bounds):
    """microsoft/vidur#36: nothing is extrapolated silently."""
    engine = {"max_num_batched_tokens": 4096, "num_gpu_blocks_override": 20_000}
    with pytest.raises(InputError, match=bounds):
        load_scenario(document(engine=engine), [override])


@pytest.mark.parametrize("records", ["true", "false"])
def test_a_long_limit_alone_is_no_reason_to_warn(records):
    """A request beyond the measured context is told of; that one might come is said by `twin explain`."""
    engine = {
        "max_model_len": 40_000,
        "max_num_batched_tokens": 4096,
        "num_gpu_blocks_override": 4000,
    }
    for prompt, words in ((32_748, []), (32_749, ["extrapolated", "of the run had 32,769"])):
        scenario = document(engine=engine, traffic=[stream(50, 5), at_once(prompt, 20)])
        told = " ".join(run(scenario, f"run.records={records}").warnings)
        assert all(word in told for word in words)
        assert ("extrapolated" in told) == bool(words)
        text = " ".join(render_explain(explain(load_scenario(scenario))).split())
        assert "up to 40,000, would be extrapolated" in text
    short = load_scenario(document(traffic=[at_once(50, 5)]))
    assert "extrapolated" not in render_explain(explain(short))


# --- clients and time ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm-fcfs", "vllm-priority", "fcfs", "priority"])
def test_a_slot_is_held_by_nobody_who_has_left(tmp_path, policy):
    """cristiklein/simpy#7: the second client leaves after 1 s of waiting, the third gets the slot at 10 s."""
    scenario = document(
        hardware={"step_time": flat_profile(tmp_path, STEP_PS)},
        engine={"max_num_seqs": 1, "async_scheduling": False},
        policy=policy,
        traffic=[
            at_once(100, 1000),
            at_once(100, 1000, timeouts={"ttft": 1}),
            at_once(100, 10, timeouts={"ttft": 50}),
        ],
    )
    first, second, third = run(scenario).records
    assert first.finish_ps == 10 * PS
    assert (second.outcome, second.finish_ps, second.first_scheduled_ps) == ("timed_out", PS, None)
    assert (third.outcome, third.first_scheduled_ps) == ("completed", 10 * PS)


def test_slots_in_use_are_the_running_requests_at_any_time():
    """cristiklein/simpy#7: counted after every event, with clients that leave while they wait and while they run."""
    config = EngineConfig(
        max_num_seqs=3, max_num_batched_tokens=256, max_model_len=1024, num_gpu_blocks=200
    )
    requests = [request(i, i * STEP_PS // 3, 20, 5 + i % 40) for i in range(200)]
    for number, each in enumerate(requests):
        each.ttft_timeout_ps = 40 * STEP_PS if number % 3 else None
        each.total_timeout_ps = 60 * STEP_PS if number % 2 else None
    seen = set()

    def watch(service, since_ps):
        replica = service.replica
        seen.add(replica.num_running)
        # A slot is held by a request that has not ended, and every such request runs or waits.
        running = {request.rid for request in replica._core.running_requests}
        assert len(running) == replica.num_running <= 3
        assert running <= replica._lives.keys()
        assert replica.num_running + replica.num_waiting == replica.num_inflight
        assert replica._core.free_slots == 3 - replica.num_running

    service = Service(requests, config, constant_step(STEP_PS)).run(watch=watch)
    assert seen == {0, 1, 2, 3}
    assert service.replica.num_inflight == service.replica.num_running == 0
    assert service.replica._core.free_blocks == 199
    assert {r.outcome for r in service.records} == {"completed", "timed_out"}


def test_events_are_counted_in_steps_not_tokens():
    """hunterhayes.dev, benchmark: events are what costs, so none per token; the report says what a run took."""
    chat = stream(200, 100, arrivals={"process": "poisson", "rate": 100}, requests=1500)
    engine = {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 20_000,
    }
    result = run(document(traffic=[chat], engine=engine))
    tokens = sum(r.output_tokens for r in result.records)
    steps = sum(replica.steps for replica in result.engines)
    assert result.events <= steps + 3 * len(result.records)
    assert result.events < 0.1 * tokens
    assert re.search(r"[\d,]+ requests/s, .* per 1,000", render(summarize(result)))


def test_every_case_names_its_thread():
    """The docstrings are the list of sources."""
    cases = [value for name, value in globals().items() if name.startswith("test_")]
    threads = {m[0] for case in cases if (m := re.search(r"[\w.-]+/[\w.-]+#\d+", case.__doc__))}
    assert len(threads) == 11
