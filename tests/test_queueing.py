"""Theory where theory exists: an engine reduced to a server is a queue whose waits are known."""

import random

import numpy as np
import pytest

from tests.runs import document, flat_profile, run, stream

STEP_PS = 10_000_000_000
"""10 ms."""


def lindley(arrivals_ps, services_ps):
    """Waits in a queue with one server: W(n+1) = max(0, W(n) + service(n) - gap(n))."""
    steps = services_ps[:-1] - np.diff(arrivals_ps)
    walk = np.concatenate([[0], np.cumsum(steps)])
    return walk - np.minimum.accumulate(np.minimum(walk, 0))


def test_lindley_is_the_recursion():
    rng = random.Random(7)
    arrivals = np.cumsum([rng.randrange(1, 20) for _ in range(500)])
    services = np.array([rng.randrange(1, 20) for _ in range(500)])
    wait, expected = 0, [0]
    for service, gap in zip(services[:-1].tolist(), np.diff(arrivals).tolist(), strict=True):
        wait = max(0, wait + service - gap)
        expected.append(wait)
    assert lindley(arrivals, services).tolist() == expected


def server(folder, load, replicas=1, router="round_robin", **traffic):
    """An engine that serves one request at a time, one step a token, and a Poisson stream that loads it to `load`."""
    tokens = traffic.pop("tokens", 1)
    rate = load * replicas * 1e12 / STEP_PS / tokens
    arrivals = {"process": "poisson", "rate": rate}
    return document(
        hardware={"step_time": flat_profile(folder, STEP_PS)},
        engine={"max_num_seqs": 1, "async_scheduling": False},
        traffic=[stream(16, 1, **{"arrivals": arrivals, "requests": 3000} | traffic)],
        cluster={"replicas": replicas, "router": router},
    )


def waits(records):
    return [r.first_scheduled_ps - r.arrival_ps for r in records]


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_waits_of_a_single_server_follow_lindley_to_the_picosecond(tmp_path, load):
    records = run(server(tmp_path, load)).records
    arrivals = np.array([r.arrival_ps for r in records])
    expected = lindley(arrivals, np.full(len(records), STEP_PS))
    assert waits(records) == expected.tolist()
    assert max(expected) > 0


def test_services_of_different_length_do_too(tmp_path):
    output = {"uniform": [1, 9]}
    records = run(server(tmp_path, 0.8, tokens=5, output_tokens=output, requests=1500)).records
    arrivals = np.array([r.arrival_ps for r in records])
    services = np.array([r.output_tokens * STEP_PS for r in records])
    assert set(services // STEP_PS) == set(range(1, 10))
    assert waits(records) == lindley(arrivals, services).tolist()


def test_round_robin_gives_each_replica_a_queue_of_its_own(tmp_path):
    records = run(server(tmp_path, 0.8, replicas=3, requests=1500)).records
    for replica in range(3):
        mine = [r for r in records if r.replica == replica]
        assert [r.index % 3 for r in mine] == [replica] * len(mine)
        arrivals = np.array([r.arrival_ps for r in mine])
        assert waits(mine) == lindley(arrivals, np.full(len(mine), STEP_PS)).tolist()


@pytest.mark.parametrize(
    ("output", "better"),
    [({"fixed": 5}, "round_robin"), ({"uniform": [1, 50]}, "least_connections")],
)
def test_router_that_fits_the_services_waits_less(tmp_path, output, better):
    """Equal services in turn meet the replica with the least work; unequal ones do not."""
    means = {}
    for router in ("least_connections", "round_robin"):
        tokens = output.get("fixed", 25.5)
        scenario = server(
            tmp_path, 0.8, 3, router, tokens=tokens, output_tokens=output, requests=1500
        )
        means[router] = np.mean(waits(run(scenario).records))
    assert min(means, key=means.get) == better


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_two_million_arrivals_reach_the_formula_of_the_m_d_1_queue(load):
    """Mean wait of Poisson arrivals at a server of constant service D: D * load / (2 * (1 - load))."""
    number = 2_000_000
    gaps = np.random.default_rng(1).exponential(STEP_PS / load, number)
    arrivals = np.cumsum(np.rint(gaps).astype(np.int64))
    mean = lindley(arrivals, np.full(number, STEP_PS, dtype=np.int64)).mean()
    formula = STEP_PS * load / (2 * (1 - load))
    assert mean == pytest.approx(formula, rel=0.02)
