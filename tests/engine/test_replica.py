"""When things happen at a replica: exact instants with steps of one length, and what clients see of it."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.serve import Service, requests_of
from tests.parity.workload import policy_workload, stock_workload
from twin.clock import PS, ceil_ps, to_seconds
from twin.engine.config import EngineConfig
from twin.scheduling import PRESETS, PolicyConfig, TierConfig, policy_config
from twin.step_time.model import constant_step
from twin.workload.request import Request

STEP = 10**10 + 7
"""Picoseconds of every step in the small runs: no multiple of anything."""

seeds = st.integers(0, 10**6)
presets = st.sampled_from(sorted(PRESETS))
many = settings(max_examples=2 * settings().max_examples)
modes = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
hosts = pytest.mark.parametrize("policy", [None, "fcfs"], ids=["stock", "policy"])


def engine(is_async, **changes):
    """An engine with room for everything."""
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "num_gpu_blocks": 200,
        "async_scheduling": is_async,
    }
    return EngineConfig(**defaults | changes)


def request(index, arrival_ps, output, max_tokens=None, prompt=8, **changes):
    """A request of its own content. Without `max_tokens` its end comes as a surprise."""
    return Request(
        index=index,
        arrival_ps=arrival_ps,
        prompt=((2 * index + 1, prompt),),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=max_tokens,
        reply=2 * index + 2,
        **changes,
    )


def serve(requests, config, policy=None, **changes):
    return Service(requests, config, constant_step(STEP), policy, **changes).run()


# --- which step a request runs in ---------------------------------------------------------


@modes
@hosts
def test_after_idle_a_request_starts_at_once(is_async, policy):
    """Each of its tokens takes one step, and nothing is added."""
    service = serve(
        [request(0, 12345, 4, 4), request(1, 100 * STEP + 1, 3, 3)], engine(is_async), policy
    )
    first, second = service.record(0), service.record(1)
    assert first.first_scheduled_ps == 12345
    assert first.first_token_ps == 12345 + STEP
    assert list(first.itl_ps) == [STEP] * 3
    assert first.finish_ps == 12345 + 4 * STEP
    assert second.first_scheduled_ps == 100 * STEP + 1
    assert second.finish_ps == 103 * STEP + 1
    assert service.replica.stats.steps == 7
    assert service.replica.stats.busy_ps == 7 * STEP


@modes
@hosts
@pytest.mark.parametrize("into_step", [1, STEP // 2, STEP - 1, STEP])
def test_a_request_that_comes_during_step_k_runs_in_the_next_plan(is_async, policy, into_step):
    """k + 1 in sync mode; k + 2 in async mode, where step k + 1 is planned already when k begins.

    An arrival in the instant in which step k ends is still in the plan made then.
    """
    during = 3
    arrival = (during - 1) * STEP + into_step
    service = serve([request(0, 0, 50), request(1, arrival, 5)], engine(is_async), policy)
    begins = during + 1 if is_async else during  # of step k + 2, k + 1: steps count from 1
    record = service.record(1)
    assert record.first_scheduled_ps == begins * STEP
    assert record.first_token_ps == (begins + 1) * STEP
    assert record.finish_ps == (begins + 5) * STEP


@modes
@hosts
def test_async_plans_two_steps_at_the_instant_the_engine_wakes_up(is_async, policy):
    """The second request comes when step 1 has just begun: in async mode step 2 is planned by then."""
    service = serve([request(0, 0, 9), request(1, 1, 9)], engine(is_async), policy)
    assert service.record(1).first_scheduled_ps == (2 if is_async else 1) * STEP


@modes
@hosts
def test_with_nothing_to_plan_ahead_async_is_as_quick_as_sync(is_async, policy):
    """The only request ends with the step that runs, by length, so that no second step is planned."""
    service = serve([request(0, 0, 9, 1), request(1, 1, 9)], engine(is_async), policy)
    assert service.record(1).first_scheduled_ps == STEP


@modes
@hosts
def test_requests_of_one_instant_run_in_one_step(is_async, policy):
    service = serve([request(i, 77, 3, 3) for i in range(8)], engine(is_async), policy)
    assert {r.first_scheduled_ps for r in service.records} == {77}
    assert {r.finish_ps for r in service.records} == {77 + 3 * STEP}
    assert service.replica.stats.steps == 3


# --- how a request ends -------------------------------------------------------------------


@modes
@hosts
def test_an_end_by_length_plans_no_step_beyond_the_last_token(is_async, policy):
    service = serve([request(0, 0, 200, 3)], engine(is_async), policy)
    assert service.record(0).reason == "length"
    assert service.record(0).finish_ps == 3 * STEP
    assert service.replica.stats.steps == 3
    assert service.replica.stats.scheduled_tokens == 8 + 2


@modes
@hosts
def test_an_end_by_eos_is_foreseen_by_nobody(is_async, policy):
    """In async mode one token more is computed and thrown away."""
    service = serve([request(0, 0, 3)], engine(is_async), policy)
    assert service.record(0).reason == "stop"
    assert service.record(0).finish_ps == 3 * STEP
    assert service.record(0).output_tokens == 3
    assert service.replica.stats.steps == 3 + is_async
    assert service.replica.stats.scheduled_tokens == 8 + 2 + is_async


@modes
@hosts
@pytest.mark.parametrize("max_tokens", [None, 3], ids=["eos", "length"])
@pytest.mark.parametrize("short_of", ["slots", "blocks"])
def test_async_holds_slot_and_blocks_one_step_longer(is_async, policy, max_tokens, short_of):
    """While another request keeps the engine busy, a slot freed by step 3 is used in step 4, or 5 if async."""
    limits = {"slots": {"max_num_seqs": 2}, "blocks": {"num_gpu_blocks": 18}}[short_of]
    config = engine(is_async, **limits, max_model_len=256)
    asked = [
        request(0, 0, 60, 60, prompt=8),
        request(1, 0, 3, max_tokens, prompt=100),
        request(2, 0, 5, 5, prompt=170),
    ]
    service = serve(asked, config, policy)
    assert service.record(1).finish_ps == 3 * STEP
    assert service.record(2).first_scheduled_ps == (4 if is_async else 3) * STEP
    assert [r.preemptions for r in service.records] == [0, 0, 0]


@modes
@hosts
def test_first_come_is_not_first_finished(is_async, policy):
    """Three slots, 100, 10 and 50 tokens, all at once: every instant shows (vllm-project/vllm#4563)."""
    asked = [request(i, 0, tokens) for i, tokens in enumerate((100, 10, 50))]
    service = serve(asked, engine(is_async, max_num_seqs=3), policy)
    assert [r.index for r in service.records] == [1, 2, 0]
    assert [r.first_scheduled_ps for r in service.records] == [0, 0, 0]
    assert [r.finish_ps for r in service.records] == [10 * STEP, 50 * STEP, 100 * STEP]


# --- held jobs ----------------------------------------------------------------------------


def holding(max_wait):
    """A policy that holds jobs for a batch which never fills."""
    tier = TierConfig(name="*", batch_size=1000, max_wait=max_wait)
    return PolicyConfig(tiers=(tier,))


@given(
    arrival_ps=st.integers(0, 10**6 * PS),
    max_wait=st.floats(1e-9, 1e3, exclude_min=True),
    is_async=st.booleans(),
)
def test_a_held_job_starts_in_the_first_picosecond_at_which_its_wait_is_over(
    arrival_ps, max_wait, is_async
):
    """The release instant is a float, and what the policy compares it with is a picosecond's nearest float."""
    service = serve([request(0, arrival_ps, 2, 2)], engine(is_async), holding(max_wait))
    start = service.record(0).first_scheduled_ps
    release = to_seconds(arrival_ps) + max_wait
    assert start == max(arrival_ps, ceil_ps(release))
    assert to_seconds(start) >= release
    assert start == arrival_ps or to_seconds(start - 1) < release
    assert service.record(0).finish_ps == start + 2 * STEP


@modes
def test_a_batch_that_fills_goes_at_once(is_async):
    tier = TierConfig(name="*", batch_size=3, max_wait=1.0)
    asked = [request(i, i * 10**9, 2, 2) for i in range(4)]
    service = serve(asked, engine(is_async), PolicyConfig(tiers=(tier,)))
    starts = [service.record(i).first_scheduled_ps for i in range(4)]
    assert starts[:3] == [2 * 10**9] * 3
    assert starts[3] == PS + 3 * 10**9


@modes
def test_a_job_held_beside_running_ones_starts_with_the_first_plan_after_its_wait(is_async):
    tiers = (TierConfig(name="A"), TierConfig(name="B", batch_size=9, max_wait=0.035))
    asked = [request(0, 0, 100, tier="A"), request(1, 0, 5, tier="B")]
    service = serve(asked, engine(is_async), PolicyConfig(tiers=tiers))
    assert service.record(1).first_scheduled_ps == (5 if is_async else 4) * STEP  # 35 ms are over


# --- clients that leave -------------------------------------------------------------------


@modes
@hosts
@pytest.mark.parametrize("early", [0, 1])
def test_a_token_in_the_very_instant_of_the_deadline_counts(is_async, policy, early):
    """One picosecond less patience, and the client has left before it."""
    asked = [
        request(0, 0, 40),
        request(1, 0, 9, 9, ttft_timeout_ps=STEP - early),
        request(2, 0, 9, 9, total_timeout_ps=9 * STEP - early),
    ]
    service = serve(asked, engine(is_async), policy)
    first, last = service.record(1), service.record(2)
    if early:
        assert (first.outcome, first.reason) == ("timed_out", "timeout:ttft")
        assert (first.finish_ps, first.first_token_ps, first.output_tokens) == (STEP - 1, None, 0)
        assert (last.outcome, last.reason) == ("timed_out", "timeout:total")
        assert (last.finish_ps, last.output_tokens) == (9 * STEP - 1, 8)
        assert list(last.itl_ps) == [STEP] * 7
    else:
        assert (first.outcome, first.finish_ps) == ("completed", 9 * STEP)
        assert (last.outcome, last.finish_ps) == ("completed", 9 * STEP)


@modes
@hosts
def test_a_client_may_leave_in_the_step_in_which_it_came(is_async, policy):
    """The engine has not taken its request in yet."""
    asked = [request(0, 0, 9, 9), request(1, STEP + 5, 9, total_timeout_ps=10)]
    service = serve(asked, engine(is_async), policy)
    record = service.record(1)
    assert (record.outcome, record.finish_ps) == ("timed_out", STEP + 15)
    assert record.first_scheduled_ps is None
    assert service.replica.stats.scheduled_tokens == 8 + 8


@modes
@hosts
def test_a_client_may_leave_at_once(is_async, policy):
    service = serve([request(0, 5, 9, total_timeout_ps=0)], engine(is_async), policy)
    record = service.record(0)
    assert (record.outcome, record.finish_ps, record.output_tokens) == ("timed_out", 5, 0)
    assert service.replica.num_inflight == 0


@modes
@hosts
def test_a_slot_is_never_held_by_nobody(is_async, policy):
    """One slot. Its holder ends at 10 s, one client waits 1 s and leaves, the third waits up to 50 s
    (cristiklein/simpy#7)."""
    second = constant_step(PS)
    asked = [
        request(0, 0, 10, 10),
        request(1, 0, 5, 5, total_timeout_ps=PS),
        request(2, 0, 5, 5, total_timeout_ps=50 * PS),
    ]

    def slots_in_use(service, coming_ps):
        now = service.env.now
        if 0 < now < coming_ps:
            assert service.replica.num_running == (1 if now < 15 * PS else 0)

    service = Service(asked, engine(is_async, max_num_seqs=1), second, policy)
    service.run(watch=slots_in_use)
    assert service.record(0).finish_ps == 10 * PS
    left, third = service.record(1), service.record(2)
    assert (left.outcome, left.finish_ps, left.first_scheduled_ps) == ("timed_out", PS, None)
    assert third.first_scheduled_ps == 10 * PS
    assert (third.outcome, third.finish_ps) == ("completed", 15 * PS)


@modes
@hosts
def test_what_is_inside_at_the_end_is_unfinished(is_async, policy):
    asked = [
        request(0, 0, 100),
        request(1, STEP, 100, total_timeout_ps=2 * STEP),
        request(2, 5 * STEP + 3, 100),
        request(3, 0, 2, 2),
    ]
    service = Service(asked, engine(is_async), constant_step(STEP), policy)
    service.run(until_ps=5 * STEP + 3)
    assert service.replica.num_inflight == 2
    service.replica.finish_run()
    assert service.replica.num_inflight == 0
    assert {r.index: (r.outcome, r.reason) for r in service.records} == {
        0: ("unfinished", "end_of_run"),
        1: ("timed_out", "timeout:total"),
        2: ("unfinished", "end_of_run"),
        3: ("completed", "stop"),
    }
    inside = service.record(0)
    assert (inside.finish_ps, inside.first_token_ps, inside.output_tokens) == (None, STEP, 5)
    assert service.record(2).first_scheduled_ps is None


@modes
@hosts
def test_who_has_left_by_the_end_of_the_run_is_not_unfinished(is_async, policy):
    """The run ends within a step in which a client leaves, before the engine can notice."""
    asked = [request(0, 0, 100, total_timeout_ps=2 * STEP + 5)]
    service = Service(asked, engine(is_async), constant_step(STEP), policy)
    service.run(until_ps=2 * STEP + 10)
    service.replica.finish_run(2 * STEP + 10)
    (record,) = service.records
    assert (record.outcome, record.finish_ps) == ("timed_out", 2 * STEP + 5)
    assert record.output_tokens == 2


@modes
def test_under_priority_a_request_that_gives_way_to_itself_stops_nothing(is_async):
    """The request that runs first has the lowest priority and is short of a block: it preempts itself and vLLM's
    running loop ends with nothing scheduled. The next plan, at the same instant, lets the others go on."""
    config = engine(
        is_async,
        block_size=8,
        num_gpu_blocks=33,
        enable_prefix_caching=False,
        scheduling_policy="priority",
    )
    asked = [
        request(0, 0, 100, 100, prompt=125, tier="low"),
        request(1, 1, 100, 100, prompt=121, tier="high"),
    ]
    service = serve(asked, config, priorities={"high": 0, "low": 1})
    assert [r.outcome for r in service.records] == ["completed"] * 2
    assert service.replica.stats.preemptions > 0


# --- any run ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Steps whose length depends on all that a step is made of."""

    base: int

    def step_ps(self, num_tokens, num_seqs, num_sampled, pairs, num_decodes, sum_context):
        return (
            self.base + 1009 * num_tokens + 101 * num_seqs + 11 * num_sampled + pairs + sum_context
        )

    def padded_tokens(self, num_tokens):
        return num_tokens


def may_not_end(workload):
    """See test_core: vLLM's priority policy without room for the whole request may never end."""
    config = workload.config
    return config.scheduling_policy == "priority" and not config.scheduler_reserve_full_isl


step_times = st.sampled_from([constant_step(PS // 4), constant_step(PS // 10), Uneven(10**10)])
stock_workloads = st.builds(stock_workload, seeds).filter(lambda w: not may_not_end(w))
policy_workloads = st.builds(policy_workload, seeds, presets)


def service_of(workload, step_time, timeouts=True):
    requests = requests_of(workload)
    if not timeouts:
        requests = [replace(r, ttft_timeout_ps=None, total_timeout_ps=None) for r in requests]
    policy = policy_config(workload.policy) if workload.policy else None
    priorities = {"ONLINE": 0, "BATCH": 1, "OFFLINE": 2}
    return Service(requests, workload.config, step_time, policy, priorities)


@many
@given(stock_workloads | policy_workloads, step_times)
def test_every_client_sees_a_sensible_life(workload, step_time):
    service = service_of(workload, step_time).run()
    asked = {request.index: request for request in requests_of(workload)}
    assert sorted(record.index for record in service.records) == sorted(asked)
    assert service.replica.num_inflight == service.replica.num_waiting == 0
    for record in service.records:
        request = asked[record.index]
        instants = [
            record.arrival_ps,
            record.first_scheduled_ps,
            record.first_token_ps,
            record.finish_ps,
        ]
        reached = [instant for instant in instants if instant is not None]
        assert reached == sorted(reached)
        assert all(type(instant) is int for instant in reached)
        assert min(record.itl_ps, default=1) > 0
        tokens = 0 if record.first_token_ps is None else 1 + len(record.itl_ps)
        assert record.output_tokens == tokens
        last = (record.first_token_ps or 0) + sum(record.itl_ps)
        waited, patience = None, [request.ttft_timeout_ps, request.total_timeout_ps]
        if record.first_token_ps is not None:
            waited = record.first_token_ps - record.arrival_ps
        if record.outcome == "completed":
            assert last == record.finish_ps
            assert patience[0] is None or waited <= patience[0]
            assert patience[1] is None or record.finish_ps - record.arrival_ps <= patience[1]
            assert tokens == min(request.output_tokens, request.max_tokens)
        else:
            assert record.outcome == "timed_out"
            gave_up = patience[record.reason == "timeout:total"]
            assert record.finish_ps == record.arrival_ps + gave_up
            assert last <= record.finish_ps
            if record.reason == "timeout:ttft":
                assert tokens == 0


@many
@given(stock_workloads | policy_workloads, step_times)
def test_records_add_up_to_the_engines_counters(workload, step_time):
    service = service_of(workload, step_time, timeouts=False).run()
    stats, records = service.replica.stats, service.records
    assert {record.outcome for record in records} == {"completed"}
    assert stats.preemptions == sum(r.preemptions for r in records)
    assert stats.recomputed_tokens == sum(r.recomputed_tokens for r in records)
    assert stats.prefix_hit_tokens == sum(r.prefix_hit_tokens for r in records)
    assert stats.prefix_query_tokens == sum(r.prefix_query_tokens for r in records)
    assert 0.0 <= stats.kv_waste_mean <= stats.kv_usage_mean <= 1.0
    assert service.replica.kv_usage == 0.0
    assert 0 < stats.busy_ps <= service.env.now


@many
@given(stock_workloads | policy_workloads, step_times)
def test_littles_law(workload, step_time):
    """The number inside, integrated over time, is the sum of all times inside: exactly, in integers."""
    inside_ps = 0

    def watch(service, coming_ps):
        nonlocal inside_ps
        if service.replica.num_inflight:
            inside_ps += service.replica.num_inflight * (coming_ps - service.env.now)

    service = service_of(workload, step_time, timeouts=False).run(watch=watch)
    assert inside_ps == sum(r.finish_ps - r.arrival_ps for r in service.records)


@many
@given(stock_workloads | policy_workloads, step_times)
def test_events_are_one_a_step_and_a_few_a_request(workload, step_time):
    """No event per token. Idle engines add two per arrival, timer or deadline they wake up for."""
    service = service_of(workload, step_time).run()
    requests = len(service.records)
    wakes = 4 * requests  # arrival, total and first-token deadline, release
    promotions = sum(t["promotions"] for t in tiers(service))
    assert service.events <= service.replica.stats.steps + 2 + 3 * (wakes + promotions)


def tiers(service):
    policy = service.replica.policy
    return [] if policy is None else policy.stats()["tiers"].values()


def test_a_long_busy_run_has_hardly_more_events_than_steps():
    asked = [request(i, i * STEP // 3, 60, 60) for i in range(300)]
    service = serve(asked, engine(True, max_num_seqs=64, num_gpu_blocks=1000))
    tokens = sum(record.output_tokens for record in service.records)
    assert service.events <= service.replica.stats.steps + 300 + 5
    assert tokens > 20 * service.events


@many
@given(st.builds(policy_workload, seeds, st.just("fcfs")), step_times)
def test_the_policy_fcfs_is_what_stock_vllm_does(workload, step_time):
    """Time-outs included. Without a prefix cache, since who leaves first decides which blocks are evicted first.

    They notice clients that left at different instants, so that what they expect of the queue meanwhile differs.
    """
    workload = replace(workload, config=replace(workload.config, enable_prefix_caching=False))
    ours = Service(requests_of(workload), workload.config, step_time, "fcfs").run()
    stock = Service(requests_of(workload), workload.config, step_time).run()

    def told(records):
        return sorted(repr(replace(record, estimated_wait_ps=None)) for record in records)

    assert told(ours.records) == told(stock.records)


# --- the same again -----------------------------------------------------------------------


def digest(seed, preset):
    """Fingerprint of all records of a run, in the order in which they ended."""
    workload = policy_workload(seed, preset) if preset else stock_workload(seed)
    service = service_of(workload, Uneven(10**10)).run()
    text = repr(service.records) + repr(service.replica.stats)
    return hashlib.sha256(text.encode()).hexdigest()


def digests():
    """Of runs of all presets."""
    kinds = [*sorted(PRESETS), None]
    return [digest(seed, preset) for seed in range(12) for preset in kinds]


def test_the_same_run_gives_the_same_records():
    assert digests() == digests()


def test_records_do_not_depend_on_the_seed_of_hashes():
    root = Path(__file__).parents[2]
    program = "from tests.engine.test_replica import digests; print(*digests())"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("0", "1234")
    ]
    assert len(outputs[0]) == 12 * (len(PRESETS) + 1)
    assert outputs[0] == outputs[1]
