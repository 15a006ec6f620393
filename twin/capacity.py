"""Is there enough traffic to tell anything apart? What is asked for, beside what one replica can take."""

from twin.scenario import Scenario
from twin.step_time.capacity import token_cost
from twin.workload.load import Cost, Load, Slice


def replica_cost(scenario: Scenario, prompt_tokens: float, output_tokens: float) -> Cost:
    """What tokens of requests with these mean lengths cost a full replica of the scenario, roughly and cautiously."""
    engine = scenario.engine
    return Cost(
        *token_cost(
            scenario.step_time,
            engine.max_num_batched_tokens,
            engine.max_num_seqs,
            (engine.num_gpu_blocks - 1) * engine.block_size,
            prompt_tokens,
            output_tokens,
        )
    )


def busiest(load: Load, width_ps: int, from_ps: int, to_ps: int, cost: Cost) -> tuple[float, Slice]:
    """The part of the time that asks most of one replica, and the share of the replica's time that it needs."""
    parts = load.slices(width_ps, from_ps, to_ps)
    return max(((cost.of(part), part) for part in parts), key=lambda found: found[0])


def too_little(share: float, width_s: float) -> str:
    """The warning for traffic that never fills one replica."""
    return (
        f"even the busiest {width_s:g} s ask for {share:.0%} of what one replica can take: nothing will queue, and "
        "every policy and every number of replicas will look alike; raise speedup, or choose a busier window"
    )
