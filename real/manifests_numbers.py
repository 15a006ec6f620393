"""What must a manifest say in seconds and bytes, so that pods live long enough and requests end? Taken from the twin.

How long a start takes, how long the longest request runs, how much memory a server needs beside its GPU: the numbers
that people guess, derived from the scenario's own models.
"""

import math
from dataclasses import dataclass
from random import Random

from twin.capacity import Means, steady_step_s
from twin.clock import PS, to_seconds
from twin.cluster.cold_start import PHASES, ColdStart, Starter, default_start
from twin.cluster.fleet_spec import FleetSpec
from twin.scenario import Scenario
from twin.step_time.memory import weight_bytes
from twin.workload.lengths import Lengths, Pairs
from twin.workload.streams import Stream
from twin.workload.synthetic import MixedStream
from twin.workload.trace import TraceStream, rows_of

MARGIN = 1.5
"""Budget of the startup probe in terms of the p99 of a predicted start, and of a drain in terms of the longest
request."""

STARTS = 4001
"""Starts that are drawn for the p99."""

SHARE = 0.999
"""Replies longer than this share of all are not waited for when a pod goes, unless the lengths have an end."""

LONGEST_DRAIN_S = 3600
"""A drain is not made longer, however long requests wait in an overloaded scenario."""

ENDPOINT_S = 15
"""preStop sleep where the scenario names none: until every proxy has noticed (DNS 5 s, health checks 2 x 2 s)."""

TIDY_S = 10
"""Of the grace period, after the last request: processes end, files are closed."""

PROCESS_BYTES = 6 * 2**30
"""Allowance for the API server and the engine's process: Python, CUDA context, kernels."""

WORKER_BYTES = 4 * 2**30
"""Allowance for each further GPU's worker."""

SHM_BYTES = 2**30
"""Of /dev/shm for each GPU: NCCL's buffers and vLLM's message queues."""

CPU_KV_BYTES = 2**30
"""KV cache of a server without a GPU, in RAM."""


@dataclass(frozen=True)
class Numbers:
    """Seconds and bytes of one pod."""

    start_s: float
    """p99 of a container's start."""
    startup_failures: int
    """failureThreshold of a startup probe every 10 s."""
    longest_s: float
    """The longest request, waiting included."""
    longest_tokens: int
    """The longest reply."""
    pre_stop_s: int
    shutdown_timeout_s: int
    grace_s: int
    memory_bytes: int
    """RAM of the container, /dev/shm included."""
    shm_bytes: int
    weights_bytes: int
    """Of the whole model."""

    @property
    def startup_s(self) -> int:
        """What the startup probe allows."""
        return (self.startup_failures - 1) * 10


def numbers_of(scenario: Scenario, simulated_s: float, has_gpu: bool = True) -> Numbers:
    """The numbers of a scenario's pods. What the scenario says itself wins over what would be derived.

    `simulated_s` is the longest request of a simulated run; 0 = none is known.
    """
    start_s = start_quantile_s(cold_start_of(scenario), 0.99, scenario.run.seed)
    running_s, tokens = longest_request(scenario)
    longest_s = min(max(running_s, simulated_s), LONGEST_DRAIN_S / MARGIN)
    fleet = scenario.cluster.fleet
    pre_stop_ps = fleet.template.pre_stop_ps if fleet else 0
    timeout_ps = fleet.template.shutdown_timeout_ps if fleet else 0
    grace_ps = fleet.template.grace_ps if fleet else 0
    pre_stop_s = math.ceil(pre_stop_ps / PS) or ENDPOINT_S
    shutdown_s = math.ceil(timeout_ps / PS) or _rounded(MARGIN * longest_s)
    needed = pre_stop_s + shutdown_s + TIDY_S
    gpus = scenario.hardware.tensor_parallel_size
    weights = weight_bytes(scenario.model, 1, scenario.hardware.dtype)
    shm = SHM_BYTES * gpus
    memory = PROCESS_BYTES + WORKER_BYTES * (gpus - 1) + weights + shm
    return Numbers(
        start_s=start_s,
        startup_failures=math.ceil(MARGIN * start_s / 10) + 1,
        longest_s=longest_s,
        longest_tokens=tokens,
        pre_stop_s=pre_stop_s,
        shutdown_timeout_s=shutdown_s,
        grace_s=max(needed, math.ceil(grace_ps / PS)),
        memory_bytes=memory if has_gpu else PROCESS_BYTES + CPU_KV_BYTES + shm,
        shm_bytes=shm,
        weights_bytes=weights,
    )


def cold_start_of(scenario: Scenario) -> ColdStart:
    """The phases of a start: the scenario's, or the published ones of a cached image and a local NVMe disk."""
    if scenario.cluster.fleet is not None:
        return scenario.cluster.fleet.cold_start
    weights = weight_bytes(scenario.model, 1, scenario.hardware.dtype)
    eager = bool(scenario.document["engine"]["enforce_eager"])
    return default_start(scenario.model, weights, "nvme", "cached", "cold", eager)


def start_quantile_s(start: ColdStart, share: float, seed: int) -> float:
    """A quantile of a container's start, its image there, seconds; from drawn starts of streams of their own."""
    starter = Starter(start, seed)
    inside = [name for name in PHASES if name != "image"]
    drawn = [starter.draw(is_restart=True) for _ in range(STARTS)]
    totals = sorted(sum(phases[name] for name in inside) for phases in drawn)
    return to_seconds(totals[math.ceil(share * STARTS) - 1])


def node_s(fleet: FleetSpec | None) -> float:
    """What a pod may wait for its node and its image, p99, seconds; 0 where both are there."""
    if fleet is None:
        return 0.0
    rng = Random("node")
    waits = [fleet.cold_start.image.drawn(rng)]
    if fleet.nodes is not None and fleet.nodes.most > fleet.nodes.initial:
        waits.append(fleet.nodes.provision.drawn(rng))
    totals = sorted(sum(draw() for draw in waits) for _ in range(STARTS))
    return to_seconds(totals[math.ceil(0.99 * STARTS) - 1])


def longest_request(scenario: Scenario) -> tuple[float, int]:
    """(seconds, output tokens) of the longest request once it runs, on a replica whose slots are all taken.

    A client that leaves ends it earlier, if all clients do.
    """
    found = [_longest_reply(stream, scenario) for stream in scenario.traffic]
    prompt, output = max(found, key=lambda pair: pair[1])
    running = max(1, min(scenario.engine.active_limit, scenario.engine.token_budget))
    step_s = steady_step_s(scenario, running, Means(prompt, 0.0, output))
    chunks = math.ceil(prompt / scenario.engine.token_budget)
    seconds = (output + chunks) * step_s
    limits = [stream.clients.total_timeout_ps for stream in scenario.traffic]
    known = [limit for limit in limits if limit is not None]
    if len(known) == len(limits):
        seconds = min(seconds, max(known) / PS)
    return seconds, output


def _longest_reply(stream: Stream, scenario: Scenario) -> tuple[int, int]:
    """(prompt, output) tokens of a stream's longest reply, within what the engine and the client allow."""
    most = scenario.engine.max_model_len
    if isinstance(stream, TraceStream):
        rows = [(row.prompt_tokens, row.output_tokens) for row in rows_of(stream)]
        pairs = [pair for pair in rows if pair[0] < most]
        prompt, output = max(pairs, key=lambda pair: pair[1]) if pairs else (1, 1)
    else:
        parts = stream.parts if isinstance(stream, MixedStream) else (stream,)
        tools = [p.sessions.tools for p in parts if p.sessions and p.sessions.tools]
        found = [_of_lengths(part.lengths) for part in parts]
        found += [(1, tool.output_tokens.quantile()(SHARE)) for tool in tools]
        prompt, output = max(found, key=lambda pair: pair[1])
    declared = stream.clients.max_tokens
    output = output if declared is None else min(output, declared)
    output = min(output, most - 1)
    return min(prompt, most - output), output


def _of_lengths(lengths: Lengths | Pairs) -> tuple[int, int]:
    if isinstance(lengths, Pairs):
        longest = max(range(len(lengths.outputs)), key=lambda i: lengths.outputs[i])
        return lengths.prompts[longest], lengths.outputs[longest]
    return lengths.prompt.quantile()(0.5), lengths.output.quantile()(SHARE)


def _rounded(seconds: float) -> int:
    """Up to the next ten seconds."""
    return max(10, math.ceil(seconds / 10) * 10)
