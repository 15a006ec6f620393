"""No decision looks into the future: true output lengths of requests that have not ended decide nothing."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.drive import Planned, Results, Taken, drive, make_core
from tests.engine.serve import Service, requests_of
from tests.parity.workload import policy_workload, stock_workload
from twin.clock import PS
from twin.scheduling import PRESETS, policy_config
from twin.step_time.model import constant_step

seeds = st.integers(0, 10**6)
many = settings(max_examples=2 * settings().max_examples)


def with_other_ends(workload, log, cut, rng):
    """The workload with other true output lengths for all requests that have not ended in `log[:cut]`.

    None of them ends earlier than one token after what it has by then, which nobody could have known.
    """
    tokens, ended = Counter(), set()
    for entry in log[:cut]:
        if isinstance(entry, Results):
            tokens.update(rid for rid, _ in entry.tokens)
            ended.update(rid for rid, reason in entry.tokens if reason is not None)
        elif isinstance(entry, Planned):
            ended.update(rid for rid, _ in entry.aborted)
        elif isinstance(entry, Taken) and entry.event == "left":
            ended.add(entry.rid)
    longest = workload.config.max_model_len
    asks = [
        ask
        if ask.rid in ended
        else replace(
            ask, output_tokens=rng.choice((None, tokens[ask.rid] + rng.randint(1, longest)))
        )
        for ask in workload.asks
    ]
    return replace(workload, asks=tuple(asks))


def truth_of(workload):
    return {ask.rid: ask.output_tokens or ask.max_tokens for ask in workload.asks}


def two_futures(workload, rng, oracle=False):
    """Logs of the workload and of one that is the same up to a random step's results, and where that is."""
    one = drive(workload, make_core(workload, truth_of(workload) if oracle else None))
    cut = rng.choice([i for i, entry in enumerate(one) if isinstance(entry, Results)])
    other = with_other_ends(workload, one, cut, rng)
    two = drive(other, make_core(other, truth_of(other) if oracle else None))
    return one, two, cut


def ends_surely(workload):
    """See test_core: vLLM's priority policy without room for the whole request may never end."""
    config = workload.config
    return config.scheduling_policy == "fcfs" or config.scheduler_reserve_full_isl


@many
@given(st.builds(policy_workload, seeds, st.sampled_from(sorted(PRESETS))), seeds)
def test_the_policy_knows_no_future(workload, seed):
    """Admissions, preemptions, aborts, timers and every step's schedule are those of the other future."""
    one, two, cut = two_futures(workload, random.Random(seed))
    assert one[:cut] == two[:cut]


@given(st.builds(stock_workload, seeds).filter(ends_surely), seeds)
def test_stock_vllm_knows_no_future(workload, seed):
    one, two, cut = two_futures(workload, random.Random(seed))
    assert one[:cut] == two[:cut]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_other_future_does_differ(preset):
    """Later on it shows: what comes at and after the cut is another run, more often than not."""
    pairs = [two_futures(policy_workload(seed, preset), random.Random(seed)) for seed in range(30)]
    assert sum(one[cut:] != two[cut:] for one, two, cut in pairs) > 15


@pytest.mark.parametrize("preset", ["fair", "tiered", "tiered_length"])
def test_the_oracle_knows_the_future(preset):
    """The estimator that is told the truth decides by it, so that the tests above could fail."""

    def gives_itself_away(seed):
        workload = policy_workload(seed, preset)
        workload.policy["estimator"] = "oracle"
        one, two, cut = two_futures(workload, random.Random(seed), oracle=True)
        return one[:cut] != two[:cut]

    assert any(gives_itself_away(seed) for seed in range(50))


# --- the same at a replica, which knows the truth -----------------------------------------


def serve(workload, requests):
    service = Service(
        requests, workload.config, constant_step(PS // 4), policy_config(workload.policy)
    )
    for request in requests:
        service.replica.policy.watch(request.index)
    return service.run()


def decisions(service, requests, before_ps):
    """All that the policy decided before an instant, by request."""
    logs = [service.replica.policy.log(request.index) for request in requests]
    return [[entry for entry in log if entry.now < before_ps / PS] for log in logs]


def delivered(record, before_ps):
    """Tokens that the client had before an instant."""
    if record.first_token_ps is None:
        return 0
    instant, count = record.first_token_ps, 0
    for gap in [*record.itl_ps, 0]:
        count += instant < before_ps
        instant += gap
    return count


@given(st.builds(policy_workload, seeds, st.sampled_from(sorted(PRESETS))), seeds)
def test_a_replica_tells_its_policy_no_future(workload, seed):
    rng = random.Random(seed)
    requests = requests_of(workload)
    one = serve(workload, requests)
    cut_ps = rng.choice(one.records).finish_ps
    records = {record.index: record for record in one.records}
    longest = workload.config.max_model_len
    others = [
        request
        if records[request.index].finish_ps < cut_ps
        else replace(
            request,
            output_tokens=delivered(records[request.index], cut_ps) + rng.randint(1, longest),
        )
        for request in requests
    ]
    two = serve(workload, others)
    assert decisions(one, requests, cut_ps) == decisions(two, others, cut_ps)
    assert done(one, cut_ps) == done(two, cut_ps)


def done(service, before_ps):
    return [
        record
        for record in service.records
        if record.outcome == "completed" and record.finish_ps < before_ps
    ]
