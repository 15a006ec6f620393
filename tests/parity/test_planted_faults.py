"""The harness finds what it should: each rule broken on purpose makes it fail."""

from collections import OrderedDict
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from tests.parity.lockstep import Difference, run_policy, run_stock
from tests.parity.workload import Workload, policy_workload, stock_workload
from twin.engine.blocks import BlockPool
from twin.engine.core import EngineCore, Step
from twin.engine.request import EngineRequest
from twin.scheduling import Policy, policy_config

pytestmark = pytest.mark.vllm

SEEDS = range(400)


class FreeOrder(EngineCore):
    """Blocks are released first block first."""

    def __init__(self, config, policy=None):
        super().__init__(config, policy)

        class Forward(BlockPool):
            def release(self, blocks):
                super().release(blocks[::-1])

        self.pool = Forward(config.num_gpu_blocks, config.enable_prefix_caching)


class AdmitsAfterPreemption(EngineCore):
    """Requests are admitted in a step whose running loop preempted."""

    def schedule(self, now: float) -> Step:
        step = Step()
        budget = self._schedule_running(step, now)
        self._schedule_waiting(step, now, budget)
        self._account(step)
        return step


class LastTokenCached(EngineCore):
    """A prompt may be found in the cache as a whole."""

    def _find_prefix(self, request: EngineRequest) -> list[int]:
        if not self.pool.caching:
            return []
        most = request.num_tokens // self.config.block_size
        return self.pool.find(request.keys.upto(most)[:most])


class WatermarkAlways(EngineCore):
    """The watermark also holds when nothing else runs."""

    def _schedule_waiting(self, step: Step, now: float, budget: int) -> None:
        free = self.pool._free
        reserve = 0 if self.running_requests else self.watermark_blocks
        hidden = [free.popitem()[0] for _ in range(min(reserve, len(free)))]
        super()._schedule_waiting(step, now, budget)
        free.update(OrderedDict.fromkeys(reversed(hidden)))


class NullBlockUsable(EngineCore):
    """Block 0 is handed out like any other."""

    def __init__(self, config, policy=None):
        super().__init__(config, policy)
        self.pool._free[0] = None


class LengthStopUnforeseen(EngineCore):
    """Async scheduling plans a step beyond the last token."""

    @staticmethod
    def _will_have_ended(request: EngineRequest) -> bool:
        return False


FAULTS = [
    FreeOrder,
    AdmitsAfterPreemption,
    LastTokenCached,
    WatermarkAlways,
    NullBlockUsable,
    LengthStopUnforeseen,
]


def _first_caught(attempt: Callable[[int], None]) -> int | None:
    for seed in SEEDS:
        try:
            attempt(seed)
        except Difference:
            return seed
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_in_the_engine_is_caught(fault: type[EngineCore]) -> None:
    def attempt(seed: int) -> None:
        workload = stock_workload(seed)
        run_stock(workload, fault(workload.config))

    seed = _first_caught(attempt)
    assert seed is not None, f"{fault.__name__} went unnoticed in {len(SEEDS)} workloads"
    run_stock(stock_workload(seed))  # without the fault the same workload agrees


class VictimMayReturn(Policy):
    """A job preempted in a step may be admitted in it."""

    def requeue(self, job, now):
        super().requeue(job, now)
        entry = self._returned.pop()
        entry.blocked = False
        self._queue(entry)


class LateRelease(Policy):
    """A timed release comes when the wait is over and a bit."""

    def _release(self, now: float) -> None:
        super()._release(now - 1e-9)


class FreshPromotion(Policy):
    """Ageing starts anew with each preemption."""

    def requeue(self, job, now):
        self._entries[job.rid].waited = 0.0
        super().requeue(job, now)


class UnchargedSlot(Policy):
    """A running job does not count against the caps of its tier."""

    def _count_running(self, entry, jobs: int) -> None:
        pass


@pytest.mark.parametrize(
    "fault",
    [VictimMayReturn, LateRelease, FreshPromotion, UnchargedSlot],
    ids=lambda fault: fault.__name__,
)
def test_policies_that_differ_are_caught(fault: type[Policy]) -> None:
    def attempt(seed: int, policy: type[Policy] = fault) -> Workload:
        workload = policy_workload(seed, "tiered")
        config = workload.config
        own = policy(policy_config(workload.policy), config.max_model_len)
        run_policy(workload, EngineCore(config, own), own)
        return workload

    seed = _first_caught(attempt)
    assert seed is not None, f"{fault.__name__} went unnoticed in {len(SEEDS)} workloads"
    attempt(seed, Policy)
