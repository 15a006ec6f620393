"""What users of traffic generators stumbled over; each test names the thread it comes from."""

from itertools import pairwise
from math import exp, log

import pytest

from tests.runs import document, flat_profile, run, stream
from twin.clock import PS
from twin.report.json_summary import summarize
from twin.report.tables import render


def mean_ttft(records):
    return sum(r.first_token_ps - r.arrival_ps for r in records) / len(records) / PS


# --- burstiness ---------------------------------------------------------------------------


def bursty(process, rate, seed):
    """(mean TTFT, requests per second) of a chat server under 400 requests."""
    chat = stream(
        1000,
        100,
        arrivals={"rate": rate} | process,
        requests=600,
        output_tokens={"uniform": [1, 199]},
    )
    engine = {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 20_000,
    }
    result = run(document(traffic=[chat], engine=engine, run={"seed": seed}))
    return mean_ttft(result.records), len(result.records) * PS / result.simulated_ps


def test_the_same_rate_in_bursts_waits_longer():
    """inference-sim/inference-sim#818: CV 3 against Poisson, three seeds, loads 0.3, 0.6 and 0.9 of 31 requests/s.

    The mean TTFT is more than twice as long at each of these loads, 3 to 4.5 times on their geometric mean.
    """
    ratios = []
    for load in (0.3, 0.6, 0.9):
        even, clumped = (
            [bursty(process, load * 31, seed) for seed in (1, 2, 3)]
            for process in ({"process": "poisson"}, {"process": "gamma", "cv": 3})
        )
        (even_ttft, even_rate), (ttft, rate) = (
            [sum(column) / 3 for column in zip(*runs, strict=True)] for runs in (even, clumped)
        )
        # The mean of 1,200 gaps of CV 3 is known to 9 %.
        assert rate == pytest.approx(even_rate, rel=0.17)
        ratios.append(ttft / even_ttft)
    assert min(ratios) > 2
    assert 3 < exp(sum(map(log, ratios)) / len(ratios)) < 4.5


# --- open and closed loop -----------------------------------------------------------------


def slow_server(folder, step_s, **traffic):
    """A run on 16 slots with equal steps; replies have 40 tokens."""
    profile = flat_profile(folder, round(step_s * PS), f"{step_s}.json")
    return run(
        document(
            traffic=[stream(64, 40, **traffic)],
            hardware={"gpu": "H100", "step_time": profile},
            engine={"max_num_seqs": 16, "max_num_batched_tokens": 2048},
        )
    )


def in_flight(records):
    """[(instant, requests inside from then on)]."""
    changes = sorted([(r.arrival_ps, 1) for r in records] + [(r.finish_ps, -1) for r in records])
    level, levels = 0, []
    for instant, change in changes:
        level += change
        levels.append((instant, level))
    return levels


USERS = {"process": "closed", "users": 100, "think_time": 5}


def test_a_closed_loop_slows_down_with_the_server(tmp_path):
    """inference-sim/inference-sim#843: 100 chat users with 5 s of think time; users = rate * (think + response)."""
    rates = []
    for step_s in (0.01, 0.05, 0.1):
        result = slow_server(tmp_path, step_s, arrivals=USERS, requests=2000)
        assert max(level for _, level in in_flight(result.records)) <= 100
        response = sum(r.finish_ps - r.arrival_ps for r in result.records) / 2000 / PS
        [told] = summarize(result)["traffic"]
        assert told["load"] == "closed"
        assert told["offered_rps"] * (response + 5) == pytest.approx(100, rel=0.06)
        assert "closed loop: 100 users, 5 s between requests" in render(summarize(result))
        rates.append(told["offered_rps"])
    assert rates[0] > 1.2 * rates[1] > 1.4 * rates[2]


def test_an_open_loop_does_not(tmp_path):
    """inference-sim/inference-sim#843: 20 requests/s, Poisson, on the server that can do 16: the queue grows."""
    poisson = {"process": "poisson", "rate": 20}
    fast, slow = (
        slow_server(tmp_path, step_s, arrivals=poisson, requests=2000) for step_s in (0.01, 0.025)
    )
    arrivals = [[r.arrival_ps for r in result.records] for result in (fast, slow)]
    assert arrivals[0] == arrivals[1]
    levels = in_flight(slow.records)
    quarters = [max(n for t, n in levels if t <= q * arrivals[1][-1] // 4) for q in (1, 2, 3, 4)]
    assert all(later > earlier + 50 for earlier, later in pairwise(quarters))
    assert max(n for _, n in in_flight(fast.records)) < 40
    [told] = summarize(slow)["traffic"]
    assert (told["load"], told["arrivals"]) == ("open", "poisson, 20/s")
    assert "open loop: poisson, 20/s" in render(summarize(slow))


# --- time-outs ----------------------------------------------------------------------------


def crowd(**keys):
    """512 clients at once on one GPU, 4096 tokens in and 2048 out, one request each."""
    clients = {"process": "closed", "users": 512}
    return run(
        document(
            traffic=[stream(4096, 2048, arrivals=clients, requests=512, **keys)],
            engine={"max_num_seqs": None, "max_num_batched_tokens": None, "max_model_len": 8192,
                    "num_gpu_blocks_override": None},
        )
    )  # fmt: skip


def delivered(result):
    """Tokens per second of complete replies, over the time to the last event."""
    tokens = sum(r.output_tokens for r in result.records if r.outcome == "completed")
    return tokens * PS / result.simulated_ps


def test_there_are_no_hidden_time_outs_that_flatter_throughput():
    """inference-sim/inference-sim#1127: a limit of 300 s nobody had set made 58,220 tokens/s of 2,310."""
    free = crowd()
    assert [r.outcome for r in free.records] == ["completed"] * 512
    assert max(r.finish_ps for r in free.records) == free.simulated_ps
    assert max(r.finish_ps - r.arrival_ps for r in free.records) > 100 * PS

    limited = crowd(timeouts={"total": 100})
    summary = summarize(limited)
    left = summary["totals"]["timed_out"]
    assert 0 < left < 512
    assert left + summary["totals"]["completed"] == 512
    assert limited.simulated_ps >= max(r.finish_ps for r in limited.records)
    assert any(
        f"{left:,} of 512 requests" in text and "time-out" in text for text in summary["warnings"]
    )
    assert "Clients of stream 0 wait 100 s for the whole reply" in render(summary)
    assert any(r.output_tokens for r in limited.records if r.outcome == "timed_out")
    assert delivered(limited) < 1.05 * delivered(free)
