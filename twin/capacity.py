"""What one replica can take, and whether there is enough traffic to tell anything apart."""

from dataclasses import dataclass

from twin.clock import to_seconds
from twin.scenario import Scenario
from twin.step_time.capacity import token_cost
from twin.workload.load import Cost, Load, Slice

ENOUGH = 100
"""Requests from which on the load of a run is judged."""


@dataclass(frozen=True, slots=True)
class Means:
    """Mean tokens of a request."""

    prompt_tokens: float
    cached_tokens: float
    """Of the prompt, found in the prefix cache."""
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Limit:
    """What a replica comes to when one of its limits is used up."""

    name: str
    """slots, tokens or kv."""
    running: int
    """Requests that run at once then."""
    rate: float | None
    """Requests that leave per second then; None where another limit is met long before."""
    step_s: float | None
    """What a step takes then."""


def limits_of(scenario: Scenario, means: Means) -> tuple[Limit, ...]:
    """How many requests each limit lets run in one replica, fewest first, and the rate at which as many leave.

    With R running, each on its way through `output` steps, a step decodes R tokens and computes R * new / output prompt
    tokens, those that the cache lacks. It takes d(R), so requests leave at R / (output * d(R)). The first rate is an
    upper bound of what a replica takes: prompts are really computed whole, in steps that are longer for everybody, and
    not always are all places taken.
    """
    engine, prompt, output = scenario.engine, means.prompt_tokens, means.output_tokens
    kv_tokens = (engine.num_gpu_blocks - 1) * engine.block_size
    at_most = {
        "slots": engine.active_limit,
        "tokens": int(engine.token_budget / (1 + (prompt - means.cached_tokens) / output)),
        "kv": int(kv_tokens / (prompt + output / 2)),
    }
    found = []
    for name in sorted(at_most, key=lambda name: at_most[name]):
        running = max(1, at_most[name])
        rate = step_s = None
        if running <= min(at_most["slots"], max(1, at_most["tokens"])):
            step_s = steady_step_s(scenario, running, means)
            rate = running / (output * step_s)
        found.append(Limit(name, at_most[name], rate, step_s))
    return tuple(found)


def steady_step_s(scenario: Scenario, running: int, means: Means) -> float:
    """Seconds of a step with so many running, each with its part of the prompts to compute."""
    times, engine = scenario.step_time, scenario.engine
    prompt, cached, output = means.prompt_tokens, means.cached_tokens, means.output_tokens
    new = round(running * (prompt - cached) / output)
    tokens = min(running + new, engine.token_budget)
    pairs = round(new * (prompt + cached) / 2)
    context = round(running * (prompt + output / 2))
    return to_seconds(times.step_ps(tokens, running, running, pairs, running, context))


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


def context_warnings(scenario: Scenario, longest: int) -> tuple[str, ...]:
    """What to say of a run whose longest context had so many tokens: a warning if the profile knows none so long."""
    known = scenario.hardware.profile.max_context
    if longest <= known:
        return ()
    return (
        f"attention beyond {known:,} tokens of context is extrapolated: the step-time profile was measured up to "
        f"there, the longest request of the run had {longest:,}",
    )


def too_little(share: float, width_s: float) -> str:
    """The warning for traffic that never fills one replica."""
    return (
        f"even the busiest {width_s:g} s ask for {share:.0%} of what one replica can take: hardly anything will "
        "queue, and policies and numbers of replicas will look alike; raise speedup, or choose a busier window"
    )
