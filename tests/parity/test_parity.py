"""vLLM's real scheduler and ours agree at every step, down to block ids, free queue and the state of the policy."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from tests.parity import campaign

pytestmark = pytest.mark.vllm

STOCK_WORKLOADS = 300
WORKLOADS_PER_PRESET = 60


def _run(kind: str, seeds: range) -> None:
    outcome = campaign.run(kind, seeds)
    assert outcome.differences == []
    assert outcome.counts["fall-backs"] == 0
    assert outcome.missing() == []


@pytest.mark.parametrize("first", range(0, STOCK_WORKLOADS, 100))
def test_stock_modes(first: int) -> None:
    _run(campaign.STOCK, range(first, first + 100))


@pytest.mark.parametrize("preset", campaign.kinds()[1:])
def test_same_policy_in_both_hosts(preset: str) -> None:
    _run(preset, range(WORKLOADS_PER_PRESET))
