"""What the contract of the policy says in words, each sentence an example or a property."""

import math
import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parity.twin_host import TwinHost
from tests.parity.workload import Workload, policy_workload
from tests.scheduling.pair import BLOCK_SIZE, MAX_MODEL_LEN, FakeHost, Pair, pair_of
from tests.scheduling.test_policy_machine import long_run
from twin.engine.core import EngineCore
from twin.scheduling import PRESETS, Job, Policy, policy_config

UNDECLARED = MAX_MODEL_LEN


# --- what the policy knows ----------------------------------------------------------------


@given(st.integers(0, 2**20), st.integers(0, 10**6))
def test_a_limit_that_fills_the_model_declares_nothing(seed: int, more: int) -> None:
    """vLLM fills in max_model_len - prompt before the scheduler sees the request: no host may read more into it."""
    for estimator in ("declared", "quantile"):
        config = policy_config({"preset": "tiered", "estimator": estimator, "initial": 1 + seed})
        policy = Policy(config, MAX_MODEL_LEN)
        prompt = 1 + seed % (MAX_MODEL_LEN - 1)
        room = MAX_MODEL_LEN - prompt
        jobs = [Job(n, 0.0, prompt, limit) for n, limit in enumerate((room, room + more))]
        for job in jobs:
            policy.submit(job, 0.0)
        expected = {policy.expected_output(job) for job in jobs}
        assert expected == {min(config.initial, room)}


@pytest.mark.parametrize("estimator", ["declared", "quantile"])
def test_a_declared_limit_bounds_the_estimate(estimator: str) -> None:
    policy = Policy(policy_config({"preset": "fcfs", "estimator": estimator}), MAX_MODEL_LEN)
    for rid, limit in enumerate((10, 256, 300, 7000)):
        job = Job(rid, 0.0, 1, limit)
        policy.submit(job, 0.0)
        learned = 256  # before the first has finished
        expected = limit if estimator == "declared" else min(limit, learned)
        assert policy.expected_output(job) == expected


def test_the_estimate_is_learned_by_tier_from_finished_jobs_only() -> None:
    policy = Policy(policy_config("priority"), MAX_MODEL_LEN)

    def expected(rid: str, tier: str) -> int:
        job = Job(rid, 0.0, 1, UNDECLARED, tier)
        policy.submit(job, 0.0)
        return policy.expected_output(job)

    for n, (reason, output) in enumerate(
        [("finished", 10), ("finished", 30), ("finished", 20), ("aborted", 999), ("timeout", 999)]
    ):
        job = Job(n, 0.0, 1, UNDECLARED, "BATCH")
        policy.submit(job, 0.0)
        policy.gone(job, 0.0, reason, output)
    assert expected("a", "BATCH") == 20
    assert expected("b", "ONLINE") == 256


@pytest.mark.parametrize("estimator", ["declared", "quantile", "oracle"])
def test_at_least_one_token_is_expected(estimator: str) -> None:
    config = policy_config({"preset": "fcfs", "estimator": estimator})
    policy = Policy(config, MAX_MODEL_LEN, truth=lambda rid: 0)
    for rid, (prompt, limit) in enumerate([(MAX_MODEL_LEN, 50), (10, 0), (10, 10)]):
        job = Job(rid, 0.0, prompt, limit)
        policy.submit(job, 0.0)
        assert policy.expected_output(job) >= 1


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("estimator", ["declared", "quantile"])
def test_the_truth_is_not_looked_at(preset: str, estimator: str) -> None:
    def truth(rid: object) -> int:
        raise AssertionError("looked at the truth")

    config = policy_config({"preset": preset, "estimator": estimator})
    policy = Policy(config, MAX_MODEL_LEN, truth)
    for rid in range(50):
        policy.submit(Job(rid, 0.0, 100, UNDECLARED), 0.0)
    policy.begin_step(1.0, FakeHost(4, 99))
    assert policy.head(1.0) is not None


def test_the_oracle_needs_the_truth() -> None:
    config = policy_config({"preset": "fcfs", "estimator": "oracle"})
    with pytest.raises(ValueError, match=r"oracle knows the true output lengths.*simulation only"):
        Policy(config, MAX_MODEL_LEN)
    policy = Policy(config, MAX_MODEL_LEN, truth=lambda rid: 17)
    job = Job("r", 0.0, 10, UNDECLARED)
    policy.submit(job, 0.0)
    assert policy.expected_output(job) == 17


def decisions(workload: Workload, steps: int) -> tuple[list[Any], set[str]]:
    """What the engine does under the policy in its first steps, and who has finished by then."""
    config = workload.config
    core = EngineCore(config, Policy(policy_config(workload.policy), config.max_model_len))
    host = TwinHost(core, config)
    arrivals = deque(sorted(workload.asks, key=lambda ask: (ask.arrival, ask.seq)))
    taken: list[Any] = []
    finished: set[str] = set()
    in_flight: deque[Any] = deque()
    now = 0.0
    while len(taken) < steps and (arrivals or in_flight or host.has_requests()):
        while arrivals and arrivals[0].arrival <= now:
            ask = arrivals.popleft()
            host.add(ask, now, job_of(ask))
        while len(in_flight) < workload.depth and host.has_requests() and len(taken) < steps:
            step = host.schedule(now)
            taken.append(
                (
                    now,
                    [(request.rid, tokens) for request, tokens in step.scheduled.items()],
                    [(request.rid, reason) for request, reason in step.aborted],
                    [request.rid for request in (*step.planned_preempted, *step.preempted)],
                )
            )
            if not step.scheduled:
                break
            in_flight.append(step)
        if in_flight:
            now += workload.durations[len(taken) % len(workload.durations)]
            outputs = host.update(in_flight.popleft(), now)
            finished |= {rid for rid, _, reason in outputs if reason is not None}
        else:
            coming = arrivals[0].arrival if arrivals else math.inf
            wake = min(coming, core.policy.next_wake(now))
            if wake == math.inf:
                break
            now = max(now, wake)
    return taken, finished


def job_of(ask: Any) -> Job:
    total = None if ask.total_timeout is None else ask.arrival + ask.total_timeout
    ttft = None if ask.ttft_timeout is None else ask.arrival + ask.ttft_timeout
    return Job(
        ask.rid, ask.arrival, ask.prompt_tokens, ask.max_tokens, ask.tier, ask.tenant, ttft, total
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_no_decision_knows_the_future(preset: str) -> None:
    """Were the unfinished requests of some instant to go on for longer, all decisions until then would be the same."""
    changed = 0
    for seed in range(12):
        workload = policy_workload(seed, preset)
        for steps in (5, 15, 40):
            taken, finished = decisions(workload, steps)
            longer = tuple(
                ask if ask.rid in finished else replace(ask, output_tokens=None)
                for ask in workload.asks
            )
            changed += longer != workload.asks
            assert decisions(replace(workload, asks=longer), steps) == (taken, finished)
    assert changed > 20


# --- caps ---------------------------------------------------------------------------------


def test_a_cap_stops_its_tier_and_no_other() -> None:
    pair = pair_of({"name": "A", "max_running": 2}, {"name": "B"})
    for tier in "AAABA":
        pair.submit(tier, "a", 10, 1)
    pair.step(0.0)
    assert pair.states() == ["running", "running", "ready", "running", "ready"]


def test_the_first_job_beyond_a_cap_blocks_smaller_ones_of_its_tier() -> None:
    pair = pair_of({"name": "*", "max_running_tokens": 1000}, estimator="declared")
    for prompt in (599, 499, 99):
        pair.submit("*", "a", prompt, 1)
    pair.step(0.0)
    assert pair.states() == ["running", "ready", "ready"]


def test_a_job_above_the_token_cap_runs_alone() -> None:
    pair = pair_of({"name": "*", "max_running_tokens": 1000}, estimator="declared")
    first = pair.submit("*", "a", 99, 1)
    pair.submit("*", "a", 5000, 1)
    pair.submit("*", "a", 99, 1)
    pair.step(0.0)
    assert pair.states() == ["running", "ready", "ready"]
    pair.finish(first, 1)
    pair.step(0.0)
    assert pair.states()[1:] == ["running", "ready"]


# --- deadlines ----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.parametrize("hold", [{}, {"batch_size": 2, "max_wait": 50.0}])
def test_deadlines_pass_wherever_a_job_is(slots: int, hold: dict[str, Any]) -> None:
    pair = pair_of({"name": "*", **hold}, slots=slots)
    job = pair.submit("*", "a", 10, 50, ttft=2.0, total=3.0)
    pair.step(1.0)
    assert pair.policy.next_wake(1.0) == 2.0
    assert pair.step(1.0).abort == [(job, "timeout:ttft")]
    assert pair.states() == [None]


def test_a_first_token_in_time_leaves_the_total_deadline() -> None:
    pair = pair_of({"name": "*"})
    job = pair.submit("*", "a", 10, 50, ttft=2.0, total=3.0)
    pair.step(1.0)
    pair.token(job, 1.0)
    assert pair.policy.next_wake(pair.now) == 3.0
    assert pair.step(1.0).abort == [(job, "timeout:total")]


def test_a_first_token_that_is_late_saves_nothing() -> None:
    pair = pair_of({"name": "*"})
    job = pair.submit("*", "a", 10, 50, ttft=1.0)
    pair.step(0.0)
    pair.token(job, 1.5)
    assert pair.policy.next_wake(pair.now) == 1.5
    assert pair.step(0.0).abort == [(job, "timeout:ttft")]


# --- who gives way ------------------------------------------------------------------------

THREE = ({"name": "A"}, {"name": "B"}, {"name": "C"})


def running_pair(tiers: tuple[dict[str, Any], ...], names: str, **limits: int) -> Pair:
    pair = pair_of(*tiers, estimator="declared", **limits)
    for name in names:
        pair.submit(name, "a", BLOCK_SIZE, 1)
    pair.step(0.0)
    assert pair.states() == ["running"] * len(names)
    return pair


def test_the_newest_of_the_lowest_tier_gives_its_slot() -> None:
    pair = running_pair(THREE, "CBCA", slots=4)
    pair.submit("B", "a", 10, 1)
    assert [job.seq for job in pair.step(0.0).preempt] == [2]
    assert pair.states() == ["running", "running", "ready", "running", "running"]


def test_no_one_gives_way_to_an_equal_or_lower_rank() -> None:
    pair = running_pair(THREE, "ABB", slots=3)
    pair.submit("B", "a", 10, 1)
    pair.submit("C", "a", 10, 1)
    assert pair.step(0.0).preempt == []


def test_a_tier_that_is_not_preemptible_gives_nothing() -> None:
    tiers = ({"name": "A"}, {"name": "B", "preemptible": False}, {"name": "C"})
    pair = running_pair(tiers, "CB", slots=2)
    pair.submit("A", "a", 10, 1)
    pair.submit("A", "a", 10, 1)
    assert [job.seq for job in pair.step(0.0).preempt] == [0]


def test_if_all_victims_do_not_suffice_none_is_taken() -> None:
    pair = running_pair(THREE, "CAA", blocks=4)
    pair.submit("A", "a", 3 * BLOCK_SIZE, 1)
    assert pair.step(0.0).preempt == []
    pair.submit("B", "a", 10, 1)
    assert pair.step(0.0).preempt == [], "nothing behind a head that does not fit"


def test_the_largest_gives_way_where_the_tier_says_so() -> None:
    tiers = ({"name": "A"}, {"name": "B", "victims": "largest"})
    pair = pair_of(*tiers, slots=3, estimator="declared")
    for prompt in (100, 900, 500):
        pair.submit("B", "a", prompt, 1)
    pair.step(0.0)
    pair.submit("A", "a", 10, 1)
    assert [job.seq for job in pair.step(0.0).preempt] == [1]


def test_the_watermark_is_kept_only_beside_others() -> None:
    pair = running_pair(THREE, "C", slots=9, blocks=2)
    pair.host.watermark_blocks = 1
    pair.submit("A", "a", 2 * BLOCK_SIZE, 1)
    assert len(pair.step(0.0).preempt) == 1, "alone it needs no reserve"
    assert pair.states() == ["ready", "running"]


def test_an_abort_makes_room_before_anyone_is_preempted() -> None:
    pair = pair_of(*THREE, slots=2)
    pair.submit("C", "a", 10, 1)
    pair.submit("B", "a", 10, 1, total=1.0)
    pair.step(0.0)
    pair.submit("A", "a", 10, 1)
    plan = pair.step(1.0)
    assert (len(plan.abort), plan.preempt) == (1, [])
    assert pair.states() == ["running", None, "running"]


def test_after_an_abort_the_last_victim_leaves_no_one_to_reserve_for() -> None:
    pair = pair_of({"name": "A"}, {"name": "B"}, blocks=4)
    pair.submit("B", "a", 2 * BLOCK_SIZE, 1, total=1.0)
    pair.submit("B", "a", 2 * BLOCK_SIZE, 1)
    pair.step(0.0)
    pair.host.watermark_blocks = 1
    pair.submit("A", "a", 4 * BLOCK_SIZE, 1)
    plan = pair.step(1.0)
    assert (len(plan.abort), len(plan.preempt)) == (1, 1)
    assert pair.states() == [None, "ready", "running"]


# --- ageing -------------------------------------------------------------------------------


def serve_online(seed: int, promote_after: float | None) -> tuple[Pair, list[Job], int]:
    """One slot with as many ONLINE jobs as it can serve, and now and then a job of the other tiers; those jobs, and
    how many waited at most."""
    rng = random.Random(seed)
    ageing = {"promote_after": promote_after}
    pair = pair_of(
        {"name": "ONLINE"}, {"name": "BATCH", **ageing}, {"name": "OFFLINE", **ageing}, slots=1
    )
    background, most = [], 0
    for n in range(200):
        for _ in range(2 if n < 3 else rng.choice((0, 1, 1, 2))):
            pair.submit("ONLINE", "a", 10, 1)
        if n % 40 == 5:
            background.append(pair.submit(rng.choice(("BATCH", "OFFLINE")), "a", 10, 1))
        most = max(most, len(pair.alive()))
        pair.step(1.0)
        for job in [*pair.host.running]:
            pair.finish(job, 1)
    return pair, background, most


@pytest.mark.parametrize("seed", range(5))
def test_every_tier_makes_progress_with_ageing(seed: int) -> None:
    pair, background, most = serve_online(seed, promote_after=10.0)
    # Two ranks take 20 s; from then on it waits for older jobs only, and those wait already.
    bound = 20.0 + most
    old = [job for job in background if job.arrival + bound < pair.now]
    assert len(old) >= 3
    assert not {job.rid for job in old} & {*pair.alive()}


def test_without_ageing_the_lowest_tiers_may_starve() -> None:
    """The test above has teeth."""
    left = 0
    for seed in range(5):
        pair, background, _ = serve_online(seed, promote_after=None)
        left += len({job.rid for job in background} & {*pair.alive()})
    assert left >= 10


def test_held_time_counts_and_promotion_comes_at_the_release() -> None:
    pair = pair_of(
        {"name": "A"},
        {"name": "B", "batch_size": 2, "max_wait": 1.0, "promote_after": 1.0},
        slots=0,
    )
    job = pair.submit("B", "a", 10, 1)
    pair.step(1.0)
    assert pair.policy.run_key(job)[0] == 0


def test_a_promoted_job_keeps_its_tier_for_caps() -> None:
    pair = pair_of({"name": "A"}, {"name": "B", "max_running": 1, "promote_after": 1.0}, slots=9)
    jobs = [pair.submit("B", "a", 10, 50) for _ in range(2)]
    pair.step(0.0)
    pair.step(1.0)
    assert pair.policy.run_key(jobs[1])[0] == 0
    pair.submit("A", "a", 10, 50)
    pair.step(0.0)
    assert pair.states() == ["running", "ready", "running"]


def test_long_runs_leave_nobody_behind() -> None:
    """With no arrivals any more everything that waits runs, whatever came before."""
    for seed in range(10):
        pair = long_run(seed, "random", actions=80, end=False)
        for _ in range(200):
            pair.step(min(max(pair.policy.next_wake(pair.now) - pair.now, 0.0), 1.0))
            for job in [*pair.host.running]:
                pair.finish(job, 1)
            if not pair.alive():
                break
        assert pair.alive() == []
