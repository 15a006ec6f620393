"""Random workloads small enough to run by the thousand and nasty enough to meet every rule."""

import random
from dataclasses import dataclass, field, replace

from twin.engine.config import EngineConfig
from twin.scheduling import PRESETS

GRID = 0.25
"""Instants of a coarse workload are multiples of this, so that arrivals, step ends and timers tie (seconds)."""


@dataclass(frozen=True)
class Ask:
    """One request of a workload. Prompts are (content id, tokens) segments."""

    seq: int
    arrival: float
    prompt: tuple[tuple[int, int], ...]
    reply: int
    output_tokens: int | None
    max_tokens: int
    priority: int = 0
    tier: str = "ONLINE"
    tenant: str = "default"
    ttft_timeout: float | None = None
    total_timeout: float | None = None
    leaves: float | None = None
    """When its client disconnects; None = it stays."""

    @property
    def rid(self) -> str:
        """Ids sort like seq, so that vLLM breaks ties as we do."""
        return f"r{self.seq:06d}"

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prompt)


@dataclass(frozen=True)
class Workload:
    """An engine, what it is asked, and how long its steps take."""

    seed: int
    config: EngineConfig
    asks: tuple[Ask, ...]
    durations: tuple[float, ...]
    """Seconds of step k, taken in turn."""
    depth: int = 1
    """Steps planned and not processed: 1 sync, 2 async. 3, as with pipeline stages, is the only way to find a request
    preempted while two results of it are on their way, so that it must be set aside when it comes up again."""
    policy: dict[str, object] = field(default_factory=dict)


def random_config(rng: random.Random, version: str = "0.32.0") -> EngineConfig:
    """An engine that is short of something: tokens, slots or blocks."""
    block_size = rng.choice((2, 4, 8, 16))
    max_num_seqs = rng.choice((1, 2, 3, 5, 8, 16))
    max_model_len = block_size * rng.choice((2, 4, 6, 10))
    chunked = rng.random() < 0.85
    budget = rng.choice((max_num_seqs, 8, 16, 40, 100))
    budget = max(budget, max_num_seqs)
    if not chunked:
        budget = max(budget, max_model_len)
    smallest = -(-max_model_len // block_size) + 1
    num_blocks = smallest + rng.choice((0, 0, 1, 2, 5, 12, 40))
    threshold = rng.choice((0, 0, 0, 1, 3, block_size, max_model_len // 2)) if chunked else 0
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        num_gpu_blocks=num_blocks,
        block_size=block_size,
        version=version,
        max_num_active_seqs=rng.randint(1, max_num_seqs) if rng.random() < 0.15 else None,
        max_num_scheduled_tokens=rng.randint(1, budget)
        if rng.random() < 0.15 and chunked
        else None,
        enable_prefix_caching=rng.random() < 0.6,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=min(threshold, max_model_len),
        long_prefill_token_threshold_adaptive=threshold > 0 and rng.random() < 0.4,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice((0.0, 0.0, 0.0, 0.05, 0.2)),
        async_scheduling=rng.random() < 0.5,
        scheduling_policy="fcfs",
    )


def random_asks(rng: random.Random, config: EngineConfig, count: int) -> tuple[Ask, ...]:
    """Requests with shared prefixes, later turns that contain earlier replies, ties and client disconnects."""
    coarse = rng.random() < 0.6
    gap = rng.choice((0.0, 0.1, 0.5, 1.5))
    now = 0.0
    shared = tuple((1 + i, rng.randint(1, config.max_model_len // 2)) for i in range(3))
    asks: list[Ask] = []
    for seq in range(count):
        now += rng.expovariate(1.0) * gap
        arrival = round(now / GRID) * GRID if coarse else now
        reply = 1000 + 2 * seq
        prompt = _prompt(rng, config, asks, shared, own=reply + 1)
        room = config.max_model_len - sum(tokens for _, tokens in prompt)
        max_tokens = room if rng.random() < 0.25 else rng.randint(1, room)
        output = rng.choice((None, rng.randint(1, room), rng.randint(1, max(1, room // 2)), 1))
        leaves = arrival + rng.choice((0.0, GRID, 1.0, 4.0)) if rng.random() < 0.07 else None
        asks.append(
            Ask(seq, arrival, prompt, reply, output, max_tokens, rng.randint(0, 2), leaves=leaves)
        )
    return tuple(asks)


def _prompt(
    rng: random.Random,
    config: EngineConfig,
    asks: list[Ask],
    shared: tuple[tuple[int, int], ...],
    own: int,
) -> tuple[tuple[int, int], ...]:
    longest = config.max_model_len - 1
    parts: list[tuple[int, int]] = []
    kind = rng.random()
    if kind < 0.35:
        parts = [shared[rng.randrange(len(shared))]]
    elif kind < 0.55 and asks:
        earlier = asks[rng.randrange(len(asks))]
        limit = min(earlier.max_tokens, earlier.output_tokens or earlier.max_tokens)
        # One token less than the reply: its last one is an end token with content of its own.
        parts = [*earlier.prompt, (earlier.reply, max(limit - 1, 1))]
    elif kind < 0.62 and asks:
        return asks[rng.randrange(len(asks))].prompt
    parts.append((own, rng.randint(1, longest)))
    return _cut(parts, longest)


def _cut(parts: list[tuple[int, int]], longest: int) -> tuple[tuple[int, int], ...]:
    kept, total = [], 0
    for content, tokens in parts:
        tokens = min(tokens, longest - total)
        if tokens <= 0:
            break
        kept.append((content, tokens))
        total += tokens
    return tuple(kept)


def random_durations(rng: random.Random) -> tuple[float, ...]:
    """Step lengths, often on the grid of the arrivals."""
    if rng.random() < 0.6:
        return tuple(GRID * rng.choice((1, 1, 1, 2)) for _ in range(7))
    return tuple(rng.uniform(0.01, 0.6) for _ in range(11))


def _random_depth(rng: random.Random, config: EngineConfig) -> int:
    if not config.async_scheduling:
        return 1
    return 3 if rng.random() < 0.25 else 2


def stock_workload(seed: int, version: str = "0.32.0") -> Workload:
    """A workload for an engine without a policy of ours."""
    rng = random.Random(f"{seed}/stock")
    config = random_config(rng, version)
    config = replace(config, scheduling_policy=rng.choice(("fcfs", "priority")))
    asks = random_asks(rng, config, rng.choice((3, 8, 20, 40)))
    return Workload(seed, config, asks, random_durations(rng), _random_depth(rng, config))


def policy_workload(seed: int, preset: str, version: str = "0.32.0") -> Workload:
    """A workload for the shared policy: a preset with numbers small enough that all its rules are met."""
    rng = random.Random(f"{seed}/{preset}")
    config = random_config(rng, version)
    asks = random_asks(rng, config, rng.choice((4, 10, 25, 50)))
    tenants = ("a", "b", "c")
    urgent = rng.random()
    asks = tuple(
        replace(
            ask,
            tier=rng.choices(("ONLINE", "BATCH", "OFFLINE"), (0.2 + urgent, 0.5, 0.5))[0],
            tenant=rng.choice(tenants),
            ttft_timeout=rng.choice((GRID, 1.0, 3.0)) if rng.random() < 0.12 else None,
            total_timeout=rng.choice((0.5, 2.0, 6.0)) if rng.random() < 0.12 else None,
        )
        for ask in asks
    )
    durations, depth = random_durations(rng), _random_depth(rng, config)
    return Workload(seed, config, asks, durations, depth, _small_policy(rng, preset, config))


def _small_policy(rng: random.Random, preset: str, config: EngineConfig) -> dict[str, object]:
    """The preset with waits, batches and ages scaled to workloads of a few seconds and a few tokens."""
    data = PRESETS[preset].to_dict()
    data["initial"] = rng.choice((1, 4, config.max_model_len // 2))
    data["window"] = rng.choice((2, 8, 512))
    data["estimator"] = rng.choice(("quantile", "quantile", "declared"))
    if preset == "fair":
        data["weights"] = {"a": 1, "b": rng.choice((1, 2, 3))}
    bound = config.max_model_len
    for tier in data["tiers"]:
        if tier["max_wait"] is not None:
            tier["max_wait"] = GRID * rng.choice((1, 2, 4, 8))
            tier["adaptive"] = rng.choice(("none", "pressure", "fill"))
        if tier["batch_tokens"] is not None:
            tier["batch_size"] = rng.choice((1, 2, 3, 5))
            tier["batch_tokens"] = rng.choice((bound // 2, bound, 3 * bound))
        if tier["groups"]:
            tier["groups"] = [
                [max(1, bound // 4), 3],
                [max(2, bound // 2), 2],
                [bound, 1 + rng.randrange(2)],
            ]
            tier["mix"] = rng.choice((2, 4, 12))
        if tier["promote_after"] is not None:
            tier["promote_after"] = (tier["max_wait"] or GRID) * rng.choice((1, 2, 5))
        if tier["ttft_target"] is not None:
            tier["ttft_target"] = rng.choice((0.5, 1.0, 5.0))
        if rng.random() < 0.2:
            tier["max_running"] = rng.choice((1, 2, 4))
        if rng.random() < 0.2:
            tier["max_running_tokens"] = rng.choice((bound // 2, bound, 2 * bound))
        if tier["rank"] is None and rng.random() < 0.3:
            tier["victims"] = rng.choice(("newest", "largest"))
    return data
