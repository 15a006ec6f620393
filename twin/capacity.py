"""Is there enough traffic to tell anything apart? What is asked for, beside what one replica can take."""

from twin.scenario import Scenario
from twin.step_time.capacity import token_cost
from twin.workload.load import Cost, Load, Slice

ENOUGH = 100
"""Requests from which on the load of a run is judged."""


def replica_cost(scenario: Scenario, prompt_tokens: float, output_tokens: float) -> Cost:
    """What tokens of requests with these mean lengths cost a full replica of the scenario, roughly."""
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


def busiest(load: Load, cost: Cost) -> tuple[float, Slice]:
    """The part of the time that asks most of one replica, and the share of the replica's time that it needs."""
    part = load.busiest((0.0, cost.prompt_token_s, cost.output_token_s))
    return cost.of(part), part


def traffic_warnings(scenario: Scenario, load: Load | None) -> tuple[str, ...]:
    """What to say of recorded traffic after a run: a warning if it never fills one replica.

    `load` is what was asked for; None, or too few requests to tell, and nothing is said.
    """
    if load is None or load.requests < ENOUGH:
        return ()
    prompt, output = load.prompt_tokens / load.requests, load.output_tokens / load.requests
    share, part = busiest(load, replica_cost(scenario, prompt, output))
    return (too_little(share, part.to_s - part.from_s),) if share < 1 else ()


def too_little(share: float, width_s: float) -> str:
    """The warning for traffic that never fills one replica."""
    return (
        f"even the busiest {width_s:g} s ask for {share:.0%} of what one replica can take: hardly anything will "
        "queue, and policies and numbers of replicas will look alike; raise speedup, or choose a busier window"
    )
