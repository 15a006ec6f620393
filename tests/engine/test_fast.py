"""The fast engine gives what the stepped one gives, to the byte: records, counters, policy, final state of the pool."""

import random
from dataclasses import asdict, replace
from itertools import accumulate
from math import inf

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy.events import URGENT

from tests.engine.test_runs import findable, in_runs
from tests.parity.workload import Workload, policy_workload, stock_workload
from twin.clock import to_ps
from twin.engine.decodes import Decodes
from twin.engine.fast_core import FastCore
from twin.engine.fast_replica import FastReplica
from twin.engine.jump import add_ends
from twin.engine.replica import Replica
from twin.engine.runs import RunPool
from twin.metrics.records import RequestRecord
from twin.scheduling import PRESETS, policy_config
from twin.step_time.model import StepTime
from twin.workload.request import Request

STOCK = "stock"
KINDS = (STOCK, *PRESETS)
MAX_EVENTS = 60_000
TIERS = ("ONLINE", "BATCH", "OFFLINE")


def step_time(rng: random.Random, is_async: bool) -> StepTime:
    """Steps whose length depends on everything it can depend on, sometimes on a grid that arrivals share."""
    most = 4096
    base, per_token = (
        rng.choice((10**11, 25 * 10**10, 70_000_000_013)),
        rng.choice((0, 10**9, 12_345_678)),
    )
    host = rng.choice((0, 10**11))
    context = rng.choice((0, 10**7, 3_333_333))
    return StepTime(
        tokens_ps=[base + per_token * n for n in range(most)],
        sample_ps=[0] * most,
        decode_base_ps=[0] + [1000] * (most - 1),
        decode_context_ps=[0] + [context] * (most - 1),
        pair_num=rng.choice((0, 10**6)),
        pair_den=1,
        prefill_base_ps=rng.choice((0, 10**8)),
        mixed_context_ps=rng.choice(((), [7_000 + n for n in range(most)])),
        gap_seq_ps=rng.choice((0, 10**7)) if is_async else 0,
        host_ps=[host + 10**8 * n for n in range(most)],
        gap_ps=rng.choice((0, 10**9)) if is_async else 0,
        async_scheduling=is_async,
        padded=[-(-n // 4) * 4 for n in range(most)],
    )


def workload_of(seed: int, kind: str, rng: random.Random) -> Workload:
    workload = stock_workload(seed) if kind == STOCK else policy_workload(seed, kind)
    if kind == STOCK:
        asks = tuple(
            replace(
                ask,
                tier=rng.choice(TIERS),
                ttft_timeout=rng.choice((None, None, 1.0)),
                total_timeout=rng.choice((None, None, 3.0)),
            )
            for ask in workload.asks
        )
        workload = replace(workload, asks=asks)
    # Without full reservation vLLM itself can go round in circles for ever.
    return replace(workload, config=replace(workload.config, scheduler_reserve_full_isl=True))


def serve(cls, workload: Workload, times: StepTime, until_ps: int | None, sample_ps: int | None):
    """Everything that is left of a run: records in the order they came, counters, pool, policy, gauges."""
    env = simpy.Environment(initial_time=0)
    records: list[RequestRecord] = []
    policy = policy_config(workload.policy) if workload.policy else None
    priorities = {tier: i for i, tier in enumerate(TIERS)}
    replica = cls(env, workload.config, times, policy, records.append, 0, priorities)
    env.process(_arrive(env, replica, workload))
    gauges = []
    next_sample = sample_ps
    for _ in range(MAX_EVENTS):
        upcoming = env.peek()
        if upcoming == inf:
            break
        while next_sample is not None and next_sample <= min(upcoming, until_ps or inf):
            gauges.append(replica.gauges(next_sample))
            next_sample += sample_ps
        if until_ps is not None and upcoming >= until_ps:
            break
        env.step()
    replica.finish_run(until_ps)
    stats = asdict(replica.stats)
    return {
        "records": [asdict(replace(r, itl_ps=list(r.itl_ps))) for r in records],
        "stats": stats,
        "pool": pool_of(replica._core),
        "policy": replica.policy.stats() if replica.policy else None,
        "gauges": gauges,
    }


def pool_of(core) -> tuple[int, list[tuple[bytes, int]]]:
    """Free blocks, and the keys of the findable ones in the order in which they would be handed out."""
    pool, size = core.pool, core.config.block_size
    if not pool.caching:
        return pool.num_free, []
    keys = in_runs(pool, size) if isinstance(pool, RunPool) else findable(pool)
    return pool.num_free, keys


def _arrive(env: simpy.Environment, replica: Replica, workload: Workload):
    asks = sorted(workload.asks, key=lambda ask: (ask.arrival, ask.seq))
    for index, ask in enumerate(asks):
        due_ps = to_ps(ask.arrival)
        if due_ps > env.now:
            event = env.event()
            event._ok, event._value = True, None
            env.schedule(event, priority=URGENT, delay=due_ps - env.now)
            yield event
        replica.submit(
            Request(
                index,
                due_ps,
                ask.prompt,
                ask.prompt_tokens,
                ask.output_tokens or 10**6,
                ask.max_tokens,
                ask.reply,
                ask.tier,
                ask.tenant,
                ttft_timeout_ps=None if ask.ttft_timeout is None else to_ps(ask.ttft_timeout),
                total_timeout_ps=None if ask.total_timeout is None else to_ps(ask.total_timeout),
            )
        )


def difference(seed: int, kind: str, fast: type[Replica] = FastReplica) -> str | None:
    """What differs first between the two engines on one workload, None if nothing does."""
    rng = random.Random(f"{seed}/{kind}/fast")
    workload = workload_of(seed, kind, rng)
    times = step_time(rng, workload.config.async_scheduling)
    until_ps = None if rng.random() < 0.7 else to_ps(rng.uniform(0.5, 8))
    sample_ps = None if rng.random() < 0.5 else to_ps(rng.choice((0.25, 0.1, 0.37)))
    stepped = serve(Replica, workload, times, until_ps, sample_ps)
    jumped = serve(fast, workload, times, until_ps, sample_ps)
    for what, expected in stepped.items():
        if jumped[what] != expected:
            return f"{kind} {seed}: {what}"
    return None


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS))
def test_same_bytes(seed, kind):
    assert difference(seed, kind) is None


# --- the bounds of a jump: each, moved by one, is noticed ----------------------------------


class FinishesLate(FastCore):
    def regular_plans(self):
        plans = super().regular_plans()
        return plans + 1 if plans and self.decodes.first_end() == self.known + plans + 1 else plans


class BlocksOneTooFew(FastCore):
    def __init__(self, config, policy=None):
        super().__init__(config, policy)

        class Generous(Decodes):
            def plans_within(self, plan, plans, free_blocks):
                return super().plans_within(plan, plans, free_blocks + 1)

        self.decodes = Generous(config.block_size)


class WaitingForgotten(FastCore):
    def _stays_blocked(self):
        return True


class TimeForgotten(FastReplica):
    def _wake_ps(self, now_ps):
        return super()._wake_ps(now_ps) + 10**11  # about a step


class ArrivalForgotten(FastReplica):
    def _wake_up(self):
        if not self._ends_ps:
            super()._wake_up()


def with_core(core: type[FastCore]) -> type[FastReplica]:
    class Faulty(FastReplica):
        def _make_core(self):
            made = core(self._config, self.policy)
            made.on_detach = self._give_tokens
            return made

    return Faulty


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (with_core(FinishesLate), STOCK),
        (with_core(BlocksOneTooFew), STOCK),
        (with_core(WaitingForgotten), "tiered"),
        (TimeForgotten, "tiered"),
        (ArrivalForgotten, "fcfs"),
    ],
    ids=["finish", "memory", "waiting", "time", "arrival"],
)
def test_a_bound_moved_by_one_is_noticed(fault, kind):
    for seed in range(300):
        try:
            if difference(seed, kind, fault) is not None:
                return
        except (AssertionError, KeyError, RuntimeError, AttributeError, ValueError):
            return
    raise AssertionError("the fault went unnoticed")


# --- jumps ---------------------------------------------------------------------------------

runs = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 10**6), st.integers(0, 1000)),
    min_size=1,
    max_size=4,
)


@given(runs, st.integers(0, 10**9))
def test_the_ends_of_runs_are_sums(runs, start):
    durations = [first + i * growth for count, first, growth in runs for i in range(count)]
    ends = [start]
    add_ends(ends, runs)
    assert ends == list(accumulate(durations, initial=start))
