"""Runs as a whole: what goes in comes out, exactly, always, and they end."""

import dataclasses
import gc
import json
import os
import signal
import threading
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import at_once, azure_csv, check_books, document, flat_profile, run, stream
from twin.clock import PS
from twin.errors import InputError
from twin.report.json_summary import summarize, to_json
from twin.scheduling import PRESETS
from twin.simulation import NoProgressError, load_scenario, simulate

POLICIES = [*PRESETS, "vllm-fcfs", "vllm-priority"]
MIXED = {"ONLINE": 0.6, "BATCH": 0.3, "OFFLINE": 0.1}


def as_bytes(result):
    """All that a run says, but for how long it took."""
    summary = summarize(dataclasses.replace(result, wall_s=1.0))
    records = [dataclasses.asdict(r) | {"itl_ps": list(r.itl_ps)} for r in result.records]
    return to_json(summary) + json.dumps(records)


def counts(result):
    outcomes = ("completed", "refused", "timed_out", "aborted", "unfinished")
    found = [r.outcome for r in result.records]
    return {name: found.count(name) for name in outcomes if name in found}


def busy(**sections):
    """More than one small replica can bear: short of slots and of KV blocks, with clients that leave."""
    traffic = [
        stream(
            {}, {}, requests=60, arrivals={"process": "poisson", "rate": 60}, tiers=MIXED,
            prompt_tokens={"uniform": [20, 700]}, output_tokens={"uniform": [1, 150]},
            timeouts={"ttft": 2.0, "total": 9.0}, tenants={"a": 0.5, "b": 0.5},
        ),
        stream(30, 40, requests=30, sessions={"turns": 3, "system_prompt_tokens": 64, "think_time": 0.2}),
    ]  # fmt: skip
    return document(**{"traffic": traffic, "engine": {"num_gpu_blocks_override": 130}} | sections)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_scenario_and_seed_give_the_same_bytes(policy, asynchronous):
    overrides = [
        f"policy={policy}",
        f"engine.async_scheduling={asynchronous}",
        "cluster.replicas=2",
    ]
    first, second = run(busy(), *overrides), run(busy(), *overrides)
    assert as_bytes(first) == as_bytes(second)
    other = run(busy(), *overrides, "run.seed=2")
    assert as_bytes(other) != as_bytes(first)
    assert sum(counts(first).values()) == len(first.records)


@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([5, 50, 500]),
    blocks=st.integers(129, 300),
    replicas=st.integers(1, 3),
    router=st.sampled_from(["round_robin", "least_connections"]),
    until=st.sampled_from(["null", "0.5", "3"]),
    caching=st.sampled_from(["true", "false"]),
)
def test_books_balance_under_any_load(policy, seed, rate, blocks, replicas, router, until, caching):
    result = run(
        busy(),
        f"policy={policy}",
        f"traffic.0.arrivals.rate={rate}",
        "traffic.0.requests=25",
        f"engine.num_gpu_blocks_override={blocks}",
        f"engine.enable_prefix_caching={caching}",
        f"cluster={{replicas: {replicas}, router: {router}}}",
        f"run={{seed: {seed}, until: {until}}}",
    )
    if until == "null":
        assert "unfinished" not in counts(result)


def test_loading_and_running_stand_in_one_module():
    from twin import simulation

    assert simulation.load_scenario is load_scenario


def test_results_are_by_index_and_name_their_replica():
    result = run(busy(cluster={"replicas": 3}))
    assert [r.index for r in result.records] == list(range(len(result.records)))
    assert {r.replica for r in result.records} == {0, 1, 2}
    assert len(result.engines) == 3
    assert result.simulated_ps == max(r.finish_ps for r in result.records)


def test_vllm_priority_serves_online_first_then_batch_then_offline():
    names = ("OFFLINE", "BATCH", "ONLINE", "OFFLINE", "BATCH", "ONLINE")
    traffic = [at_once(50, 20, tier=name) for name in names]
    for policy, order in (
        ("vllm-fcfs", [0, 1, 2, 3, 4, 5]),
        ("vllm-priority", [2, 5, 1, 4, 0, 3]),
        ("priority", [2, 5, 1, 4, 0, 3]),
    ):
        result = run(document(traffic=traffic, policy=policy, engine={"max_num_seqs": 1}))
        assert [r.index for r in sorted(result.records, key=lambda r: r.finish_ps)] == order


def test_the_oracle_is_told_the_truth():
    result = run(busy(policy={"preset": "tiered_length", "estimator": "oracle"}))
    tiers = result.policies[0]["tiers"].values()
    assert {tier["estimate_mae_tokens"] for tier in tiers if tier["estimates"]} == {0.0}


# --- lengths ------------------------------------------------------------------------------


def test_a_request_ends_at_its_own_length_or_at_the_clients_or_at_the_context():
    traffic = [
        at_once(100, 20),
        at_once(100, 20, max_tokens=7),
        at_once(100, 20, max_tokens=20),
        at_once(2040, 20),
    ]
    result = run(document(traffic=traffic))
    assert [(r.output_tokens, r.reason) for r in result.records] == [
        (20, "stop"),
        (7, "length"),
        (20, "stop"),
        (8, "length"),
    ]


def test_rows_that_cannot_run_are_refused_listed_and_counted(tmp_path):
    rows = [("2023-11-16 18:15:46", n, 5) for n in (100, 2048, 2047, 9000)]
    source = document(traffic=[{"trace": azure_csv(tmp_path, rows)}])
    result = run(source)
    assert [(r.outcome, r.reason) for r in result.records] == [
        ("completed", "stop"),
        ("refused", "too_long"),
        ("completed", "length"),
        ("refused", "too_long"),
    ]
    assert result.places == {1: "traffic.0, line 3", 3: "traffic.0, line 5"}
    refused = result.records[1]
    assert (refused.replica, refused.finish_ps, refused.output_tokens) == (
        None,
        refused.arrival_ps,
        0,
    )
    with pytest.raises(
        InputError, match=r"traffic.0, line 3: a prompt of 2048 tokens must be shorter"
    ):
        simulate(load_scenario(source), strict=True)


def test_a_trace_row_that_is_malformed_is_found_when_its_turn_comes(tmp_path):
    rows = [("2023-11-16 18:15:46", 100, 5), ("2023-11-16 18:15:47", 100, 0)]
    scenario = load_scenario(document(traffic=[{"trace": azure_csv(tmp_path, rows)}]))
    with pytest.raises(InputError, match="line 3: GeneratedTokens: '0' must be"):
        simulate(scenario)


# --- time ---------------------------------------------------------------------------------


def test_until_cuts_the_run_and_what_is_inside_is_unfinished():
    whole = run(busy(policy="priority"))
    cut = run(busy(policy="priority"), "run.until=1.5")
    assert cut.simulated_ps == 3 * PS // 2
    assert counts(cut)["unfinished"] > 0
    assert all(r.arrival_ps < cut.simulated_ps for r in cut.records)
    ended = [r for r in cut.records if r.outcome != "unfinished"]
    assert ended
    same = {r.index: r for r in whole.records}
    assert [same[r.index] for r in ended] == ended
    for r in cut.records:
        if r.outcome == "unfinished":
            assert r.reason == "end_of_run"
            assert list(r.itl_ps) == list(same[r.index].itl_ps)[: len(r.itl_ps)]


def test_until_beyond_the_end_is_the_time_that_was_watched():
    result = run(document(), "run.until=1000")
    assert result.simulated_ps == 1000 * PS
    assert counts(result) == {"completed": 40}


def test_every_step_takes_what_the_profile_says(tmp_path):
    """Ten tokens of one request alone: ten steps, whose ends are the instants of its tokens."""
    hardware = {"step_time": flat_profile(tmp_path, 7 * 10**9)}
    for asynchronous in ("true", "false"):
        source = document(hardware=hardware, traffic=[at_once(100, 10)])
        [r] = run(source, f"engine.async_scheduling={asynchronous}").records
        assert (r.arrival_ps, r.first_scheduled_ps, r.first_token_ps) == (0, 0, 7 * 10**9)
        assert list(r.itl_ps) == [7 * 10**9] * 9


def test_an_arrival_at_the_end_of_a_step_is_in_time_for_the_next(tmp_path):
    hardware = {"step_time": flat_profile(tmp_path, 10**10)}
    second = stream(100, 3, arrivals={"process": "constant", "rate": 100}, requests=3)
    source = document(hardware=hardware, traffic=[second])
    records = run(source, "engine.async_scheduling=false").records
    assert [r.arrival_ps for r in records] == [0, 10**10, 2 * 10**10]
    assert [r.first_scheduled_ps for r in records] == [0, 10**10, 2 * 10**10]
    records = run(source, "engine.async_scheduling=true").records
    assert [r.first_scheduled_ps for r in records] == [0, 2 * 10**10, 3 * 10**10]


# --- sessions -----------------------------------------------------------------------------


def test_turns_follow_replies_and_find_their_prefix():
    talk = stream(
        50, 30, requests=12, sessions={"turns": 4, "system_prompt_tokens": 320, "think_time": 1.5}
    )
    result = run(document(traffic=[talk]))
    assert counts(result) == {"completed": 12}
    by_session = sorted(result.records, key=lambda r: (r.session, r.index))
    for _, group in groupby(by_session, key=lambda r: r.session):
        turns = list(group)
        assert [r.prompt_tokens for r in turns] == [370, 450, 530, 610]
        for before, after in pairwise(turns):
            assert after.arrival_ps == before.finish_ps + 3 * PS // 2
            # All that was computed but what is in the last, partly filled block; the last token never was.
            whole = (before.prompt_tokens + before.output_tokens - 1) // 16 * 16
            assert after.prefix_hit_tokens == whole
    firsts = [r for r in result.records if r.prompt_tokens == 370]
    assert [r.prefix_hit_tokens for r in firsts] == [0, 320, 320]


def test_without_prefix_caching_nothing_is_found():
    talk = stream(50, 30, requests=4, sessions={"turns": 4, "system_prompt_tokens": 320})
    result = run(document(traffic=[talk]), "engine.enable_prefix_caching=false")
    assert {r.prefix_hit_tokens for r in result.records} == {0}


def test_a_session_that_outgrows_the_context_is_refused_there_and_ends():
    talk = stream(300, 200, requests=10, sessions={"turns": 10})
    result = run(document(traffic=[talk]))
    assert counts(result) == {"completed": 4, "refused": 1}
    assert result.places == {4: "traffic.0, session 0, turn 4"}


# --- clients ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm-fcfs", "tiered"])
def test_clients_that_leave_are_gone_at_their_deadline(tmp_path, policy):
    hardware = {"step_time": flat_profile(tmp_path, 10**10)}
    traffic = [
        at_once(100, 100, timeouts={"total": 0.5055}),
        at_once(100, 100, timeouts={"ttft": 0.005}),
        at_once(100, 30, timeouts={"ttft": 0.5, "total": 0.5}),
    ]
    result = run(document(hardware=hardware, traffic=traffic, policy=policy))
    slow, late, fine = result.records
    assert (slow.outcome, slow.reason) == ("timed_out", "timeout:total")
    assert slow.finish_ps == 505_500_000_000
    assert 40 <= slow.output_tokens <= 50
    assert (late.outcome, late.reason, late.output_tokens) == ("timed_out", "timeout:ttft", 0)
    assert late.finish_ps == 5 * 10**9
    assert fine.outcome == "completed"


# --- a run always ends --------------------------------------------------------------------


def test_a_run_that_stands_still_names_who_holds_the_blocks(monkeypatch):
    """An engine that plans nothing although a request waits: the run ends and says so."""
    from twin.engine.replica import Replica

    monkeypatch.setattr(Replica, "_wake_up", lambda self: None)
    with pytest.raises(NoProgressError) as caught:
        simulate(load_scenario(document(traffic=[at_once(100, 5)])))
    told = str(caught.value)
    assert "no progress" in told
    assert "1 requests are inside" in told
    assert "replica 0: 0 running, 1 waiting, 399 of 399 KV blocks free; holding: nobody" in told


def test_a_run_that_turns_in_circles_ends_too(monkeypatch):
    """An engine that computes the same tokens again and again: steps without end."""
    from twin import simulation
    from twin.engine.core import EngineCore

    def forget(self, step, now):
        for request in step.scheduled:
            request.num_computed_tokens = 0
        return []

    monkeypatch.setattr(simulation, "PATIENCE_EVENTS", 1000)
    monkeypatch.setattr(EngineCore, "update", forget)
    overrides = ["engine.async_scheduling=false", "run.engine_mode=stepped"]
    scenario = load_scenario(document(traffic=[at_once(100, 5)]), overrides)
    with pytest.raises(NoProgressError, match=r"none has ended in \d+ events"):
        simulate(scenario)


def test_ctrl_c_leaves_a_result_that_can_be_read():
    scenario = load_scenario(busy())

    def progress(ended, expected, now_ps):
        if ended > 10:
            raise KeyboardInterrupt

    result = simulate(scenario, progress)
    check_books(result)
    assert result.interrupted
    assert len(result.records) > 10
    assert counts(result)["unfinished"] > 0
    assert to_json(summarize(result))


def test_a_signal_stops_the_run_between_two_events_and_is_given_back():
    scenario = load_scenario(busy())
    result = simulate(scenario, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    check_books(result)
    assert result.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert as_bytes(run(busy())) == as_bytes(run(busy()))


def test_runs_work_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(simulate(load_scenario(document()))))
    thread.start()
    thread.join()
    assert as_bytes(results[0]) == as_bytes(run(document()))


def test_progress_is_told():
    seen = []
    result = run(busy(), progress=lambda *told: seen.append(told))
    assert seen
    assert [now for *_, now in seen] == sorted(now for *_, now in seen)
    assert {expected for _, expected, _ in seen} == {90}
    assert seen[-1][0] <= len(result.records)


def test_garbage_is_looked_for_after_a_run_as_before_it():
    often = gc.get_threshold()
    seen = []
    run(document(), progress=lambda *_: seen.append(gc.get_threshold()))
    assert gc.get_threshold() == often
    assert seen
    assert all(during[0] > often[0] for during in seen)
