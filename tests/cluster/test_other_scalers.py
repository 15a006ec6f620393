"""AIBrix' and llm-d's rules."""

import pytest

from twin.clock import PS
from twin.cluster.ratio_scalers import RatioSpec, RatioState, apa, kpa
from twin.cluster.saturation import Load, SaturationSpec, saturation

SPEC = RatioSpec(1, 20, 10.0)


@pytest.mark.parametrize(
    ("values", "replicas", "wanted"),
    [([10.9], 4, 4), ([9.1], 4, 4), ([15], 4, 6), ([100], 4, 8), ([5], 4, 2), ([0], 9, 4),
     ([100] * 3, 15, 20), ([], 4, 4)],
)  # fmt: skip
def test_apa(values, replicas, wanted):
    """Up at most twofold, down at most by half, tolerance 10 % both ways, then the bounds."""
    assert apa(SPEC, RatioState(), values, replicas, replicas, 0).desired == wanted


def test_apa_cools_down_before_it_shrinks():
    state = RatioState(last_change_ps=0)
    assert apa(SPEC, state, [1], 4, 4, 299 * PS).desired == 4
    found = apa(SPEC, state, [1], 4, 4, 300 * PS)
    assert found.desired == 2
    assert found.state.last_change_ps == 300 * PS
    assert apa(SPEC, state, [90], 4, 4, 1 * PS).desired == 8


def test_kpa_stable_and_panic():
    calm = kpa(SPEC, RatioState(), 35.0, 40.0, 2, 2, 0)
    assert (calm.desired, calm.state.panic_since_ps) == (4, None)
    burst = kpa(SPEC, RatioState(), 30.0, 61.0, 4, 4, 0)
    assert (burst.desired, burst.state.panic_since_ps) == (7, 0)
    # Within the stable window after the last panic nothing shrinks.
    held = kpa(SPEC, burst.state, 10.0, 5.0, 7, 7, 100 * PS)
    assert held.desired == 7
    assert "no shrinking" in held.reason
    over = kpa(SPEC, burst.state, 10.0, 5.0, 7, 7, 300 * PS)
    assert over.desired == 3
    assert kpa(SPEC, RatioState(), None, None, 3, 3, 0).desired == 3


def test_saturation_goes_one_at_a_time_and_waits_for_pending_pods():
    """llm-d-autoscaling#549: no further replica is ordered while enough are pending."""
    spec = SaturationSpec(1, 10)
    full = [Load(0.95, 12)]
    assert saturation(spec, full, 1, 1)[0] == 2
    assert "pending" in saturation(spec, full, 2, 1)[1]
    assert saturation(spec, full, 2, 1)[0] == 2
    idle = [Load(0.0, 0)] * 3
    assert saturation(spec, idle, 3, 3)[0] == 2
    # Two are needed that are not saturated, and the load must fit the rest.
    assert saturation(spec, [Load(0.0, 0)], 1, 1)[0] == 1
    assert saturation(spec, [Load(0.6, 0), Load(0.6, 0)], 2, 2)[0] == 2
    assert saturation(spec, [], 3, 3)[0] == 3


def test_saturation_by_a_queue_that_does_not_move():
    """llm-d-autoscaling#769: queues of clients that are gone keep six of seven replicas saturated."""
    loads = [Load(0.2, n) for n in (213, 78, 40, 32, 20, 9, 0)]
    replicas, why = saturation(SaturationSpec(1, 7), loads, 7, 7)
    assert replicas == 7
    assert "1 of 7 not saturated" in why
