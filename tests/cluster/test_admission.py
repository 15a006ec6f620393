"""The gateway's limits and its clients: nothing vanishes, and queues are those of theory."""

import dataclasses
import heapq
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.test_fleet import hpa, rates
from tests.runs import document, flat_profile, run, stream
from tests.test_queueing import STEP_PS, server, waits
from twin.clock import PS
from twin.cluster.admission import Admission, AdmissionSpec, Bucket, Limits
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.scenario import load_scenario
from twin.workload.request import Request

TIERS = {"ONLINE": 0.5, "BATCH": 0.3, "OFFLINE": 0.2}


def request(index, tier="ONLINE", tokens=10):
    return Request(index, 0, ((1, tokens),), tokens, 1, None, 2, tier=tier)


# --- the rules ----------------------------------------------------------------------------


@given(
    st.floats(0.1, 50),
    st.integers(1, 5),
    st.lists(st.integers(0, 3 * PS), min_size=1, max_size=40),
)
def test_a_bucket_lets_in_no_more_than_burst_and_rate(rate, burst, gaps):
    bucket, now_ps, let_in = Bucket(rate, burst), 0, []
    for gap in gaps:
        now_ps += gap
        if bucket.has_token(now_ps):
            bucket.take()
            let_in.append(now_ps)
    cost = max(1, round(PS / rate))
    for i, first in enumerate(let_in):
        for j in range(i, len(let_in)):
            assert (j - i + 1 - burst) * cost <= let_in[j] - first
    assert len(let_in) >= min(burst, len(gaps))


class Naive:
    """The same limits by brute force over a list."""

    def __init__(self, spec):
        self.spec, self.queue, self.sent = spec, [], []

    def rank(self, r):
        order = self.spec.order
        return order.index(r.tier) if r.tier in order else len(order)

    def next(self, replicas):
        spec = self.spec
        for r in sorted(self.queue, key=lambda r: (self.rank(r), r.index)):
            own = spec.tiers.get(r.tier, Limits()).max_inflight
            if own is not None and sum(s.tier == r.tier for s in self.sent) >= own:
                continue
            limits = [spec.limits.max_inflight, spec.per_replica and spec.per_replica * replicas]
            if any(limit is not None and len(self.sent) >= limit for limit in limits):
                return None
            tokens = sum(s.prompt_tokens for s in self.sent) + r.prompt_tokens
            if spec.max_tokens is not None and self.sent and tokens > spec.max_tokens:
                return None
            self.queue.remove(r)
            return r
        return None

    def overflow(self, tier):
        own = self.spec.tiers.get(tier, Limits()).max_queue
        mine = [r for r in self.queue if r.tier == tier]
        gone = None
        if own is not None and len(mine) > own:
            gone = mine[-1]
        elif self.spec.limits.max_queue is not None:
            if len(self.queue) > self.spec.limits.max_queue:
                gone = max(self.queue, key=lambda r: (self.rank(r), r.index))
        if gone is not None:
            self.queue.remove(gone)
        return gone


limit = st.none() | st.integers(1, 4)
limits = st.builds(Limits, limit, st.none() | st.integers(0, 4))
specs = st.builds(
    AdmissionSpec,
    limits,
    limit,
    st.none() | st.integers(5, 60),
    st.none(),
    st.permutations(list(TIERS)).flatmap(lambda p: st.integers(0, 3).map(lambda n: tuple(p[:n]))),
    st.dictionaries(st.sampled_from(list(TIERS)), limits),
)


@given(specs, st.lists(st.tuples(st.sampled_from([*TIERS, "end"]), st.integers(1, 30))))
def test_limits_are_those_of_a_list(spec, calls):
    admission, naive = Admission(spec), Naive(spec)
    for index, (what, number) in enumerate(calls):
        if what == "end":
            if naive.sent:
                gone = naive.sent.pop(number % len(naive.sent))
                assert admission.ended(gone.index)
        else:
            asked = request(index, what, number)
            admission.wait(asked)
            naive.queue.append(asked)
        while True:
            sent = admission.next(2)
            assert sent is naive.next(2)
            if sent is None:
                break
            admission.send(sent)
            naive.sent.append(sent)
        if what != "end":
            assert admission.overflow(what) is naive.overflow(what)
        assert admission.num_waiting == len(naive.queue)
        assert admission.num_inflight == len(naive.sent)
    assert admission.leave_all() == naive.queue


# --- theory -------------------------------------------------------------------------------


EXPONENTIAL = [i / 20 for i in range(1, 20)]
"""Points of an exponential distribution of lengths, straight lines between."""


def kiefer_wolfowitz(arrivals, services, servers):
    """Waits in one queue with several servers, first come, first served: each takes the one that is free first."""
    free, found = [0] * servers, []
    for arrival, service in zip(arrivals, services, strict=True):
        start = max(arrival, heapq.heappop(free))
        found.append(start - arrival)
        heapq.heappush(free, start + service)
    return found


@pytest.mark.parametrize("servers", [1, 4, 16])
@pytest.mark.parametrize(
    ("load", "mode"), [(0.5, "fast"), (0.7, "fast"), (0.9, "fast"), (0.9, "stepped")]
)
def test_one_queue_at_the_gateway_is_that_of_several_servers(tmp_path, servers, load, mode):
    """Engines that serve one request each behind a gateway that sends on as many: Kiefer and Wolfowitz, exactly."""
    output = {
        "quantiles": [[0, 1], *([p, 1 - 20 * math.log(1 - p)] for p in EXPONENTIAL), [1, 200]]
    }
    source = server(
        tmp_path,
        load,
        servers,
        "least_connections",
        tokens=20.5,
        output_tokens=output,
        requests=800,
    )
    source["cluster"]["admission"] = {"max_inflight": servers}
    records = run(source, f"run.engine_mode={mode}").records
    arrivals = [r.arrival_ps for r in records]
    services = [r.output_tokens * STEP_PS for r in records]
    expected = kiefer_wolfowitz(arrivals, services, servers)
    assert waits(records) == expected
    assert max(expected) > 0 or (servers == 16 and load < 0.9)


@pytest.mark.parametrize(
    ("servers", "load"),
    [(1, 0.5), (1, 0.7), (1, 0.9), (4, 0.5), (4, 0.7), (4, 0.9), (16, 0.7), (16, 0.8), (16, 0.9)],
)
def test_long_runs_of_that_queue_reach_erlangs_formula(servers, load):
    """Mean wait of M/M/c: C(c, a) / (c - a) of a mean service (Erlang C), within 3 %."""
    number, rng = 1_500_000, random.Random(3)
    a, now, arrivals, services = load * servers, 0.0, [], []
    for _ in range(number):
        now += rng.expovariate(a)
        arrivals.append(now)
        services.append(rng.expovariate(1))
    queued = a**servers / math.factorial(servers) / (1 - load)
    waits_at_all = queued / (sum(a**k / math.factorial(k) for k in range(servers)) + queued)
    mean = math.fsum(kiefer_wolfowitz(arrivals, services, servers)) / number
    assert mean == pytest.approx(waits_at_all / (servers - a), rel=0.03)


def test_routers_that_know_more_wait_less(tmp_path):
    """One queue <= least connections <= power of two <= random."""
    means = []
    for router, admission in (
        ("least_connections", {"admission": {"max_inflight": 8}}),
        ("least_connections", {}),
        ("power_of_two", {}),
        ("random", {}),
    ):
        output = {"uniform": [1, 40]}
        source = server(tmp_path, 0.8, 8, router, tokens=20.5, output_tokens=output, requests=4000)
        source["cluster"] |= admission
        found = waits(run(source).records)
        means.append(sum(found) / len(found))
    assert means == sorted(means)
    assert means[3] > 2 * means[2] > 2 * means[1]


# --- in a run -----------------------------------------------------------------------------


def totals(result):
    return summarize(result)["totals"]


def reasons(result):
    return Counter(r.reason for r in result.records if r.outcome == "refused")


def test_shedding_keeps_throughput_and_halves_latency():
    """kaito-project/kaito#2205: 128 clients in a closed loop at an engine of 8 slots, with and without a limit."""
    closed = stream(
        64, 32, requests=1024, arrivals={"process": "closed", "users": 128, "think_time": 1.0}
    )
    free = run(document(traffic=[closed]))
    shed = run(
        document(traffic=[closed], cluster={"admission": {"max_inflight": 8, "max_queue": 8}})
    )
    assert totals(free)["completed"] == 1024
    counts = totals(shed)
    assert counts["refused"] + counts["completed"] == 1024
    assert counts["refused"] > 300
    per_s = [totals(r)["completed"] / (r.simulated_ps / PS) for r in (free, shed)]
    assert per_s[1] == pytest.approx(per_s[0], rel=0.15)
    e2e = [summarize(r)["tiers"]["ONLINE"]["e2e_s"]["mean"] for r in (free, shed)]
    assert e2e[1] < e2e[0] / 2


def test_lower_tiers_are_shed_first():
    mixed = stream(100, 60, tiers=TIERS, arrivals={"process": "poisson", "rate": 40}, requests=600)
    admission = {"max_inflight": 8, "max_queue": 8, "order": ["ONLINE", "BATCH", "OFFLINE"]}
    result = run(document(traffic=[mixed], policy="priority", cluster={"admission": admission}))
    tiers = summarize(result)["tiers"]
    shares = [tiers[tier]["refused"] / tiers[tier]["offered"] for tier in TIERS]
    assert shares[0] < shares[1] < shares[2]
    assert set(reasons(result)) == {"queue_full", "shed"}


def test_a_limit_of_tokens_turns_long_prompts_away_early():
    """smg-project/smg#2378: long contexts with impatient clients; refused early instead of timed out."""
    long = stream(
        1500, 60, arrivals={"process": "poisson", "rate": 40}, requests=600,
        timeouts={"total": 8.0}, max_tokens=60,
    )  # fmt: skip
    blocks = {"num_gpu_blocks_override": 800}
    free = run(document(traffic=[long], engine=blocks))
    admission = {"max_inflight_tokens": 9000, "max_queue": 10}
    limited = run(document(traffic=[long], engine=blocks, cluster={"admission": admission}))
    assert totals(free)["timed_out"] > 50
    assert totals(limited)["timed_out"] == 0
    assert totals(limited)["refused"] > 0
    assert totals(limited)["completed"] > totals(free)["completed"]


def test_a_wait_at_the_gateway_ends():
    source = document(
        traffic=[stream(100, 200, requests=60)],
        cluster={"admission": {"max_inflight": 4, "max_wait": 0.5}},
    )
    result = run(source)
    late = [r for r in result.records if r.reason == "queue_timeout"]
    assert late
    assert all(r.finish_ps - r.arrival_ps == PS // 2 for r in late)
    assert all(
        r.first_scheduled_ps - r.arrival_ps < 0.6 * PS for r in result.records if r.output_tokens
    )


# --- clients that ask again ---------------------------------------------------------------


def test_retries_are_attempts_of_one_request():
    cluster = {
        "admission": {"max_inflight": 4, "max_queue": 0, "retry_after": 0.5},
        "retries": {"attempts": 5, "backoff": 0.1, "jitter": 0},
    }
    result = run(document(traffic=[stream(100, 60, requests=80)], cluster=cluster), observe=True)
    counts = totals(result)
    assert counts["offered"] == 80
    assert summarize(result)["attempts"] > 80
    for r in result.records:
        if r.outcome == "refused":
            # Four waits for Retry-After, then the back-off of 0.8 s, which is longer.
            assert r.attempts == 5
            assert r.finish_ps - r.arrival_ps == 3 * PS // 2 + round(0.8 * PS)
        elif r.attempts > 1:
            assert r.first_scheduled_ps - r.arrival_ps >= (r.attempts - 1) * PS // 2
    assert {e.request for e in result.log} <= set(range(80))


def storm(retries, admission=None, until=240):
    """Twenty seconds of overload, then the load before; clients leave after 4 s without a whole reply."""
    rate = {"steps": [[0, 8], [60, 40], [80, 8]]}
    chat = stream(
        200, 60, requests=None, duration=until, timeouts={"total": 4.0},
        arrivals={"process": "poisson", "rate": rate},
    )  # fmt: skip
    cluster = {"retries": retries} | ({"admission": admission} if admission else {})
    return run(document(traffic=[chat], cluster=cluster, run={"until": until}))


def test_a_limit_as_low_as_the_slots_blinds_an_autoscaler_of_queues():
    """What waits at the gateway waits in no engine, and the HPA sees engines."""
    most = {}
    for inside in (8, 20):
        cluster = {
            "hpa": hpa(most=3, target="5"),
            "admission": {"max_inflight_per_replica": inside, "max_queue": 5},
        }
        result = run(document(traffic=[rates((0, 30), duration=60)], cluster=cluster))
        most[inside] = max(look.desired for look in result.fleet.log.looks)
        assert reasons(result)["queue_full"] > 100
    assert most == {8: 1, 20: 3}


EAGER = {"attempts": 50, "backoff": 0.2, "multiplier": 1, "outcomes": ["timed_out", "refused"]}


def after(result, second):
    """Share of the requests from `second` on that were completed at the first attempt."""
    found = [r for r in result.records if second * PS <= r.arrival_ps < (second + 60) * PS]
    return sum(r.outcome == "completed" and r.attempts == 1 for r in found) / len(found)


def test_a_retry_storm_outlives_its_cause_and_a_limit_ends_it():
    """Eager retries keep the engine at work for clients that leave; a bounded queue lets what begins also end."""
    gentle = EAGER | {"multiplier": 2}
    limit = {"max_inflight": 16, "max_queue": 16}
    eager, slower = storm(EAGER), storm(gentle)
    assert after(eager, 0) == 1
    for result in (eager, slower):
        assert (
            after(result, 180) == 0
        )  # 100 s after the overload, at 45 % of what the engine can do
    assert after(storm(EAGER, limit), 120) > 0.95
    cured = storm(gentle, limit)
    assert after(cured, 120) > 0.95
    assert totals(cured)["completed"] > 0.99 * totals(cured)["offered"]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.integers(5, 60),
    admission=st.none()
    | st.fixed_dictionaries(
        {"max_inflight": st.integers(1, 20)},
        optional={
            "max_queue": st.integers(0, 10),
            "max_wait": st.floats(0.05, 2),
            "rate": st.floats(1, 50),
            "max_inflight_tokens": st.integers(100, 3000),
            "order": st.just(["BATCH", "ONLINE"]),
            "tiers": st.just({"OFFLINE": {"max_inflight": 2, "max_queue": 3, "rate": 5}}),
        },
    ),
    retries=st.none()
    | st.fixed_dictionaries(
        {
            "attempts": st.integers(2, 5),
            "backoff": st.floats(0.01, 1),
            "outcomes": st.lists(
                st.sampled_from(["refused", "timed_out", "aborted"]), min_size=1, unique=True
            ),
        },
        optional={"give_up_after": st.floats(0.1, 3), "jitter": st.floats(0, 1)},
    ),
    until=st.none() | st.floats(0.5, 3),
    policy=st.sampled_from(["vllm-fcfs", "tiered"]),
    flat=st.booleans(),
)
def test_nothing_vanishes_whatever_the_limits(
    tmp_path_factory, seed, rate, admission, retries, until, policy, flat
):
    """Offered = the sum of the outcomes, Little's law holds, and fast is stepped; also where instants coincide."""
    process = "constant" if flat else "poisson"
    chat = stream(
        60, 30, requests=60, tiers=TIERS, timeouts={"ttft": 0.7},
        arrivals={"process": process, "rate": rate},
    )  # fmt: skip
    source = document(
        traffic=[chat],
        policy=policy,
        cluster={"replicas": 2} | ({"admission": admission} if admission else {})
        | ({"retries": retries} if retries else {}),
        run={"until": until},
    )  # fmt: skip
    if flat:
        folder = tmp_path_factory.mktemp("flat")
        source["hardware"]["step_time"] = flat_profile(folder, STEP_PS)
    fast, stepped = (
        run(source, f"run.seed={seed}", f"run.engine_mode={mode}") for mode in ("fast", "stepped")
    )
    counts = totals(fast)
    offered = counts.pop("offered")
    assert offered == sum(counts.values()) == len(fast.records)
    assert summarize(fast)["attempts"] == sum(r.attempts for r in fast.records) >= offered
    assert list(fast.records) == list(stepped.records)
    assert fast.engines == stepped.engines
    most = retries["attempts"] if retries else 1
    assert all(1 <= r.attempts <= most for r in fast.records)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"admission": {"max_queue": 3}}, "cluster.admission.max_queue: changes nothing"),
        ({"admission": {"max_inflight": 3, "order": ["X"]}}, "no stream has this tier"),
        ({"admission": {"max_inflight": 3, "burst": 3}}, "changes nothing without rate"),
        ({"admission": {"max_inflight": 3, "retry_after": 3}}, "no client heeds it"),
        ({"retries": {"attempts": 1}}, "cluster.retries.attempts: must be >= 2, got 1"),
    ],
)
def test_what_changes_nothing_is_refused(cluster, message):
    with pytest.raises(InputError, match=message):
        load_scenario(document(cluster=cluster))


def test_without_limits_and_failures_nothing_changes():
    plain = run(document())
    guarded = run(
        document(cluster={"admission": {"max_inflight": 1000}, "retries": {"attempts": 3}})
    )
    assert list(plain.records) == list(guarded.records)
    assert dataclasses.asdict(plain.engines[0]) == dataclasses.asdict(guarded.engines[0])
