"""CPU time of a step: the policy and its adapter beside vLLM's own scheduler, without model or worker.

    python -m benchmarks.policy_overhead [--steps 300] [--rounds 5]

schedule + update of a batch that decodes, in process time, with more requests waiting that do not fit. Both schedulers
run in turn in one process, so that what disturbs the machine disturbs both.
"""

import argparse
import statistics
import time

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

import real.scheduler
from tests.parity.vllm_host import make_scheduler
from twin.engine.config import EngineConfig

PROMPT = 64


def loaded(policy: str | None, running: int, waiting: int, is_async: bool):
    """A scheduler whose batch is full and decodes, with `waiting` more requests in its queue."""
    config = EngineConfig(
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        num_gpu_blocks=running * 520,
        enable_prefix_caching=False,  # with it vLLM's part costs more
        async_scheduling=is_async,
    )
    if policy is None:
        scheduler = make_scheduler(config)
    else:
        scheduler = make_scheduler(
            config, real.scheduler.make_scheduler, {"twin": {"policy": policy}}
        )
    tiers = ("ONLINE", "BATCH", "OFFLINE")
    for i in range(running + waiting):
        # What runs is urgent and what waits is not, or all would change places first.
        tier = tiers[i % 2] if i < running else "OFFLINE"
        scheduler.add_request(
            Request(
                f"r{i:06d}",
                [(i * 7919 + j) % 1000 for j in range(PROMPT)],
                SamplingParams(max_tokens=8000, ignore_eos=True, extra_args={"tier": tier}),
                None,
                arrival_time=time.time(),
            )
        )
    until = time.monotonic() + 60
    while len(scheduler.running) < running:  # holds let go by and by
        step(scheduler)
        assert time.monotonic() < until, len(scheduler.running)
    return scheduler


def step(scheduler) -> float:
    """One step; seconds of CPU in the scheduler."""
    begun = time.process_time()
    planned = scheduler.schedule()
    spent = time.process_time() - begun
    rids = list(planned.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[rid].is_prefill_chunk else [0] for rid in rids]
    result = ModelRunnerOutput(rids, {rid: i for i, rid in enumerate(rids)}, tokens)
    begun = time.process_time()
    scheduler.update_from_output(planned, result)
    return spent + time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=["tiered", "priority", "slo"])
    args = parser.parse_args()
    print(
        f"{'running':>8}{'waiting':>8}{'mode':>7}{'stock us':>10}"
        + "".join(f"{p:>22}" for p in args.policies)
    )
    for is_async in (False, True):
        for running in (32, 128):
            for waiting in (0, 10_000):
                schedulers = {
                    p: loaded(p, running, waiting, is_async) for p in [None, *args.policies]
                }
                costs: dict = {p: [] for p in schedulers}
                for _ in range(args.rounds):
                    for policy, scheduler in schedulers.items():
                        spent = [step(scheduler) for _ in range(args.steps)]
                        costs[policy].append(statistics.median(spent))
                stock = min(costs[None])
                line = f"{running:>8}{waiting:>8}{'async' if is_async else 'sync':>7}{stock * 1e6:>10.0f}"
                for policy in args.policies:
                    ours = min(costs[policy])
                    line += f"{ours * 1e6:>12.0f} ({100 * (ours / stock - 1):+5.1f} %)"
                print(line, flush=True)


if __name__ == "__main__":
    main()
