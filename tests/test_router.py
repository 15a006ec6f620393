"""Routers: pure functions of the loads, ties broken by position."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import document, run, stream
from twin.cluster.router import ROUTERS, least_connections, round_robin


@dataclass
class Replica:
    num_inflight: int


loads = st.lists(st.integers(0, 5), min_size=1, max_size=8).map(lambda ns: [Replica(n) for n in ns])


@pytest.mark.parametrize("name", ROUTERS)
@given(routed=st.integers(0, 1000), replicas=loads)
def test_every_router_names_a_replica_and_repeats_itself(name, routed, replicas):
    chosen = ROUTERS[name](routed, replicas)
    assert 0 <= chosen < len(replicas)
    assert ROUTERS[name](routed, replicas) == chosen


@given(loads)
def test_round_robin_takes_each_in_turn(replicas):
    turns = [round_robin(i, replicas) for i in range(2 * len(replicas))]
    assert turns == 2 * list(range(len(replicas)))


@given(st.integers(0, 1000), loads)
def test_least_connections_takes_the_first_of_the_emptiest(routed, replicas):
    inflight = [replica.num_inflight for replica in replicas]
    assert least_connections(routed, replicas) == inflight.index(min(inflight))


def test_least_connections_in_a_run_sends_a_request_to_the_replica_with_the_fewest():
    long = stream(100, 400, arrivals={"process": "constant", "rate": 1000}, requests=3)
    late = stream(100, 10, arrivals={"process": "constant", "rate": 1000}, requests=1)
    traffic = [long, late]
    records = run(document(traffic=traffic, cluster={"replicas": 2})).records
    assert [r.replica for r in records] == [0, 1, 0, 1]
    assert [r.stream for r in records] == [0, 1, 0, 0]
