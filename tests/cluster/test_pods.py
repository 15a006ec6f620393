"""Starts, probes, nodes and what they cost, without a cluster."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.clock import PS
from twin.cluster.cold_start import (
    BANDWIDTH,
    PHASES,
    ColdStart,
    Starter,
    TriangularTime,
    default_start,
    mean_s,
)
from twin.cluster.cost import GpuTime, cost, total
from twin.cluster.nodes import NodePool, Nodes
from twin.cluster.probes import Fate, Probe, Probes, backoff_ps, fate
from twin.step_time.catalogue import find_model
from twin.step_time.memory import weight_bytes
from twin.workload.sessions import Always

ARTICLE = Probes(liveness=Probe(60 * PS, 30 * PS), readiness=Probe(90 * PS, 10 * PS))


def starts(model, tp=1, storage="nvme", **keys):
    spec = find_model(model)
    options = {"image": "cached", "compiled": "cold", "eager": False} | keys
    read = weight_bytes(spec, 1, "bfloat16")
    start = default_start(spec, read, storage, **options)
    return {name: mean_s(getattr(start, name)) for name in PHASES}, sum(
        mean_s(getattr(start, name)) for name in PHASES
    )


def test_the_article_kills_at_two_minutes_what_needs_longer():
    assert fate(ARTICLE, 233 * PS) == Fate(233 * PS, None, 120 * PS, "liveness")
    assert fate(ARTICLE, 120 * PS).killed_ps is None
    # A warm start waits for the readiness probe's delay.
    assert fate(ARTICLE, 30 * PS).ready_ps == 90 * PS
    assert fate(ARTICLE, 91 * PS).ready_ps == 100 * PS


def test_a_startup_probe_gives_time():
    """production-stack's: 15 s + 60 x 10 s, then liveness."""
    probes = Probes(Probe(15 * PS, 10 * PS, 60), Probe(0, 10 * PS), Probe(0, 5 * PS))
    assert fate(probes, 233 * PS).killed_ps is None
    assert fate(probes, 233 * PS).ready_ps == 235 * PS
    assert fate(probes, 606 * PS) == Fate(606 * PS, None, 605 * PS, "startup")


def test_without_a_readiness_probe_a_pod_is_ready_before_it_serves():
    assert fate(Probes(), 200 * PS).ready_ps == 0
    assert fate(Probes(startup=Probe(0, 10 * PS, 60)), 195 * PS).ready_ps == 200 * PS
    early = fate(Probes(liveness=Probe(60 * PS, 30 * PS)), 200 * PS)
    assert (early.ready_ps, early.killed_ps) == (0, 120 * PS)


probe = st.builds(
    Probe,
    st.integers(0, 100).map(lambda s: s * PS),
    st.integers(1, 40).map(lambda s: s * PS),
    st.integers(1, 20),
)
maybe = st.none() | probe


@given(st.builds(Probes, maybe, maybe, maybe), st.integers(0, 900))
def test_probes_step_by_step(probes, seconds):
    """The arithmetic is what a kubelet that looks once a second does."""
    serving_ps = seconds * PS
    ready = killed = None
    started = probes.startup is None
    failures = dict.fromkeys(("startup", "liveness"), 0)
    for now in range(3000):
        up = now >= seconds

        def is_due(probe, now=now):
            delay, period = probe.initial_delay_ps // PS, probe.period_ps // PS
            return now >= delay and (now - delay) % period == 0

        just_started = False
        if not started and is_due(probes.startup):
            failures["startup"] = 0 if up else failures["startup"] + 1
            started = just_started = up
            if failures["startup"] == probes.startup.failure_threshold:
                killed = killed or now
        if started and probes.liveness and is_due(probes.liveness):
            failures["liveness"] = 0 if up else failures["liveness"] + 1
            if failures["liveness"] == probes.liveness.failure_threshold:
                killed = killed or now
        if killed is not None:
            break
        if started and ready is None:
            readiness = probes.readiness
            if readiness is None or (
                up
                and (
                    is_due(readiness) or (just_started and now >= readiness.initial_delay_ps // PS)
                )
            ):
                ready = now
        if ready is not None and up:
            break
    found = fate(probes, serving_ps)
    assert found.killed_ps == (None if killed is None else killed * PS)
    assert found.ready_ps == (None if ready is None else ready * PS)


def test_backoff_doubles():
    assert [backoff_ps(n) // PS for n in range(9)] == [0, 10, 20, 40, 80, 160, 300, 300, 300]


# --- phases -------------------------------------------------------------------------------


def test_published_starts():
    """Within what was published: 8B in 1-2 minutes with a cached image, 70B in 3-5, more from slow storage."""
    small, seconds = starts("meta-llama/Llama-3.1-8B")
    assert 60 < seconds < 120
    assert small["weights"] == pytest.approx(5.9, rel=0.1)
    _, seconds = starts("meta-llama/Llama-3.1-70B")
    assert 180 < seconds < 300
    slow, _ = starts("meta-llama/Llama-3.1-8B", storage="gp3")
    assert slow["weights"] == pytest.approx(52, rel=0.1)
    assert starts("meta-llama/Llama-3.1-8B", image="pull")[0]["image"] == pytest.approx(330)
    eager, _ = starts("meta-llama/Llama-3.1-8B", eager=True)
    assert eager["compile"] == eager["graphs"] == 0
    cached, _ = starts("meta-llama/Llama-3.1-70B", compiled="cached")
    assert cached["compile"] == pytest.approx(1.1 * 20)
    assert list(BANDWIDTH) == ["gp3", "gp3-streamer", "io2-streamer", "nvme"]


def test_an_unlogged_phase():
    """vllm#20264: the engine says it is done after 34.1 s, the first answer comes after 59."""
    phases = {"process": 8.7, "weights": 0.9, "compile": 7.5, "graphs": 17.0, "warm_up": 24.9}
    start = ColdStart(**{name: Always(round(s * PS)) for name, s in phases.items()})
    drawn = Starter(start, 1).draw(False)
    logged = sum(ps for name, ps in drawn.items() if name != "warm_up")
    assert logged == 34.1 * PS
    assert fate(Probes(readiness=Probe(0, PS)), sum(drawn.values())).ready_ps == 59 * PS


def test_a_triangle():
    draw = TriangularTime(80 * PS, 100 * PS, 150 * PS).drawn(Random(1))
    values = [draw() / PS for _ in range(20_000)]
    assert 80 <= min(values) < 81
    assert 149 < max(values) <= 150
    assert sum(values) / len(values) == pytest.approx(110, abs=0.5)
    assert sum(v < 100 for v in values) / len(values) == pytest.approx(20 / 70, abs=0.01)


def test_a_phase_disturbs_no_other():
    start = default_start(find_model("Qwen/Qwen3-8B"), 16 * 10**9, "nvme", "pull", "cold", False)
    first = [Starter(start, 7).draw(False) for _ in range(2)]
    assert first[0] == first[1]
    other = Starter(ColdStart(process=start.process), 7).draw(False)
    assert other["process"] == first[0]["process"]
    assert Starter(start, 7).draw(True)["image"] == 0
    assert Starter(start, 8).draw(False) != first[0]


# --- nodes and cost -----------------------------------------------------------------------


def test_pods_fill_nodes():
    pool = NodePool(Nodes(gpus_per_node=8, initial=2, most=4))
    placed = [pool.take(4, 1) for _ in range(3)]
    assert placed == [(0,), (0,), (1,)]
    assert pool.take(8, 1) is None
    assert pool.missing(1, 8) == 1
    pool.ordered = 1
    assert pool.missing(1, 8) == 0
    assert pool.missing(9, 8) == 1  # the limit
    pool.give((1,), 4)
    assert pool.is_empty(1)
    assert pool.take(8, 1) == (1,)


def test_a_replica_of_several_pods_goes_whole_or_not_at_all():
    pool = NodePool(Nodes(gpus_per_node=4, initial=3, most=3))
    assert pool.take(4, 2) == (0, 1)
    assert pool.take(4, 2) is None
    assert pool.free == {0: 0, 1: 0, 2: 4}


def test_pods_too_large_for_any_node_order_none():
    assert NodePool(Nodes(gpus_per_node=4, initial=1, most=9)).missing(3, 8) == 0


def test_cost():
    hour = 3600 * PS
    spent = total([GpuTime(hour, hour, hour // 2, 0), GpuTime(0, 0, 0, hour // 2)])
    assert spent.total_ps == 3 * hour
    assert spent.shares() == pytest.approx(
        {"serving": 1 / 3, "idle": 1 / 3, "starting": 1 / 6, "draining": 1 / 6}
    )
    found = cost(spent, 2.5, 3_000_000, 100)
    assert (found.gpu_hours, found.money) == (3.0, 7.5)
    assert found.per_million_tokens == pytest.approx(2.5)
    assert found.per_good_request == pytest.approx(0.075)
    assert cost(spent, None, 1, 1).money is None
    assert cost(GpuTime(), 2.5, 0, 0).per_good_request is None
