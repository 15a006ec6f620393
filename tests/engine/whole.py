"""Everything that is left of a random run, to be compared: records, counters, policy, final state of the pool."""

import random
from dataclasses import asdict, replace
from math import inf
from typing import Any

import simpy
from simpy.events import URGENT

from tests.engine.test_runs import findable, in_runs
from tests.parity.workload import Workload, policy_workload, stock_workload
from twin.clock import to_ps
from twin.engine.fast_replica import FastReplica
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


def left_of(seed: int, kind: str, cls: type[Replica] = FastReplica) -> dict[str, Any]:
    """What is left of the workload of a seed on this kind of replica."""
    rng = random.Random(f"{seed}/{kind}/fast")
    workload = workload_of(seed, kind, rng)
    times = step_time(rng, workload.config.async_scheduling)
    until_ps = None if rng.random() < 0.7 else to_ps(rng.uniform(0.5, 8))
    sample_ps = None if rng.random() < 0.5 else to_ps(rng.choice((0.25, 0.1, 0.37)))
    return serve(cls, workload, times, until_ps, sample_ps)


def difference(seed: int, kind: str, fast: type[Replica] = FastReplica) -> str | None:
    """What differs first between the two engines on one workload, None if nothing does."""
    jumped = left_of(seed, kind, fast)
    for what, expected in left_of(seed, kind, Replica).items():
        if jumped[what] != expected:
            return f"{kind} {seed}: {what}"
    return None
