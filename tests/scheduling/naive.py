"""What would the policy answer if it kept no index at all? Plain lists, everything worked out anew at each question.

Written from the contract alone, to be compared with `twin.scheduling.Policy` call by call.
"""

import copy
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from twin.scheduling import Host, Job, Plan, PolicyConfig, TierConfig
from twin.scheduling.orders import LENGTH_BOUNDS, resolve_order

ADAPTIVE_ARRIVALS = 16
FULL_PRESSURE = 10


@dataclass(eq=False)
class Item:
    """One job and what happened to it."""

    job: Job
    seq: int
    tier: int
    rank: int
    expected: int
    state: str = "held"
    key: tuple[Any, ...] = ()
    tag: int | None = None
    charge: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)
    since: float = 0.0
    ever_started: bool = False
    token_in_time: bool = False
    blocked: bool = False
    ending: bool = False
    before_start: "Item | None" = None

    @property
    def size(self) -> int:
        return self.job.prompt_tokens + self.expected

    @property
    def age(self) -> tuple[float, int]:
        return (self.job.arrival, self.seq)


class NaivePolicy:
    """The same calls as `Policy`."""

    def __init__(
        self,
        config: PolicyConfig,
        max_model_len: int,
        truth: Callable[[Hashable], int] | None = None,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.truth = truth
        self.num_submitted = 0
        self.items: list[Item] = []
        self.outputs: list[list[int]] = [[] for _ in config.tiers]
        self.arrivals: list[list[float]] = [[] for _ in config.tiers]
        self.oldest: list[Item | None] = [None for _ in config.tiers]
        self.release_at = [math.inf for _ in config.tiers]
        self.last: dict[str, int] = {}
        self.started_tags: list[int] = []

    # --- questions ------------------------------------------------------------------------

    def item(self, rid: Hashable) -> Item | None:
        return next((item for item in self.items if item.job.rid == rid), None)

    def of_tier(self, tier: int, *states: str) -> list[Item]:
        return [i for i in self.items if i.tier == tier and i.state in states]

    def state_of(self, rid: Hashable) -> str | None:
        item = self.item(rid)
        return None if item is None else item.state

    def run_key(self, job: Job) -> tuple[Any, ...]:
        item = self.item(job.rid)
        assert item is not None
        largest = self.tier_at(item.rank).victims == "largest"
        return (item.rank, item.size if largest else 0, *item.age)

    def tier_at(self, rank: int) -> TierConfig:
        return self.config.tiers[self.config.ranks.index(rank)]

    def queue(self) -> list[Item]:
        """All that may be admitted, best first."""
        ready = [i for i in self.items if i.state == "ready" and not i.blocked and not i.ending]
        return sorted(ready, key=lambda i: (i.rank, i.key))

    def is_capped(self, item: Item, running: list[Item]) -> bool:
        tier = self.config.tiers[item.tier]
        same = [i for i in running if i.tier == item.tier]
        if tier.max_running is not None and len(same) >= tier.max_running:
            return True
        tokens = sum(i.size for i in same)
        limit = tier.max_running_tokens
        return limit is not None and bool(same) and tokens + item.size > limit

    def head(self, now: float) -> Job | None:
        running = [i for i in self.items if i.state == "running"]
        stopped: set[int] = set()
        for item in self.queue():
            if item.tier not in stopped and not self.is_capped(item, running):
                return item.job
            stopped.add(item.tier)
        return None

    def next_wake(self, now: float) -> float:
        times = [math.inf]
        for item in self.items:
            if item.ending:
                continue
            times += [instant for instant, _ in self.deadlines(item)]
            if item.blocked:
                times.append(now)
            elif item.state == "ready":
                times.append(self.promotion_at(item))
        for tier in range(len(self.config.tiers)):
            times.append(now if self.full_batch(tier) else self.release_at[tier])
        return max(now, min(times))

    @property
    def pressure(self) -> float:
        return min(len(self.of_tier(0, "held", "ready")) / FULL_PRESSURE, 1.0)

    # --- estimates and fair shares --------------------------------------------------------

    def estimate(self, job: Job, tier: int) -> int:
        room = self.max_model_len - job.prompt_tokens  # as much or more declares nothing
        bound = min(job.max_tokens, room)
        if self.config.estimator == "oracle":
            assert self.truth is not None
            guess = self.truth(job.rid)
        elif self.config.estimator == "declared" and job.max_tokens == bound < room:
            guess = bound
        else:
            window = sorted(self.outputs[tier][-self.config.window :])
            at = int(self.config.quantile * (len(window) - 1))
            guess = window[at] if window else self.config.initial
        return max(1, min(guess, bound))

    def expected_output(self, job: Job) -> int:
        item = self.item(job.rid)
        assert item is not None
        return item.expected

    def service(self, tenant: str) -> int:
        return self.last.get(tenant, 0)

    def tag(self, job: Job) -> int:
        item = self.item(job.rid)
        assert item is not None
        return item.tag or 0

    def due(self, job: Job) -> float:
        item = self.item(job.rid)
        assert item is not None
        if job.ttft_deadline is not None:
            return job.ttft_deadline
        target = self.config.tiers[item.tier].ttft_target
        return math.inf if target is None else job.arrival + target

    def price(self, tenant: str, tokens: int) -> int:
        return tokens * 1000 // dict(self.config.weights).get(tenant, 1)

    def make_key(self, item: Item) -> tuple[Any, ...]:
        order = self.tier_at(item.rank).order
        if order == "fcfs":
            return item.age
        if order == "edf":
            return (self.due(item.job), *item.age)
        if order == "length":
            return (len([b for b in LENGTH_BOUNDS if item.size >= b]), *item.age)
        if order == "shortest":
            return (item.size, *item.age)
        if order == "fair":
            return (item.tag, *item.age)
        return resolve_order(order)(item.job, self)

    def enter_ready(self, item: Item) -> None:
        if item.tag is None:
            tenant = item.job.tenant
            item.tag = max([self.service(tenant), *self.started_tags])
            item.charge = self.price(tenant, item.size)
            self.last[tenant] = item.tag + item.charge
        item.state = "ready"
        item.key = self.make_key(item)

    # --- jobs come and go -----------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        names = [tier.name for tier in self.config.tiers]
        name = job.tier if job.tier in names else self.config.default_tier
        tier = 0 if names == ["*"] else names.index(name or job.tier)
        expected = self.estimate(job, tier)
        item = Item(job, self.num_submitted, tier, self.config.ranks[tier], expected)
        item.since = job.arrival
        self.num_submitted += 1
        self.items.append(item)
        self.arrivals[tier].append(job.arrival)
        if self.config.tiers[tier].holds:
            self.look_at_oldest(tier)
            self.adapt(tier, now)
        else:
            self.enter_ready(item)
            self.promote(item, now)

    def start(self, job: Job, now: float) -> None:
        item = self.item(job.rid)
        assert item is not None
        assert item.state == "ready"
        item.before_start = copy.copy(item)
        item.waits = [*item.waits, (item.since, now)]
        item.ever_started = True
        item.state = "running"
        assert item.tag is not None
        self.started_tags.append(item.tag)

    def undo_start(self, job: Job, now: float) -> None:
        item = self.item(job.rid)
        assert item is not None
        assert item.tag is not None
        assert item.before_start is not None
        self.started_tags.remove(item.tag)
        self.items[self.items.index(item)] = item.before_start

    def requeue(self, job: Job, now: float) -> None:
        item = self.item(job.rid)
        assert item is not None
        item.since = now
        item.state = "ready"
        item.blocked = True

    def first_token(self, job: Job, now: float) -> None:
        item = self.item(job.rid)
        if item is not None:
            item.token_in_time = job.ttft_deadline is None or now <= job.ttft_deadline

    def gone(self, job: Job, now: float, reason: str, output_tokens: int) -> None:
        item = self.item(job.rid)
        if item is None:
            return
        self.items.remove(item)
        self.look_at_oldest(item.tier)
        if reason == "finished":
            self.outputs[item.tier].append(output_tokens)
        if item.tag is not None:
            actual = self.price(job.tenant, job.prompt_tokens + output_tokens)
            self.last[job.tenant] += (actual if item.ever_started else 0) - item.charge

    # --- holds ----------------------------------------------------------------------------

    def held(self, tier: int) -> list[Item]:
        held = [i for i in self.of_tier(tier, "held") if not i.ending]
        return sorted(held, key=lambda i: i.age)

    def look_at_oldest(self, tier: int) -> None:
        oldest = (self.held(tier) or [None])[0]
        if oldest is not self.oldest[tier]:
            wait = self.config.tiers[tier].max_wait
            self.oldest[tier] = oldest
            self.release_at[tier] = (
                math.inf if oldest is None or wait is None else oldest.job.arrival + wait
            )

    def adapt(self, tier: int, now: float) -> None:
        config, oldest = self.config.tiers[tier], self.oldest[tier]
        assert oldest is not None
        assert config.max_wait is not None
        stored = self.release_at[tier]
        if config.adaptive == "pressure":
            shorter = oldest.job.arrival + config.max_wait * (1 - 0.5 * self.pressure)
            self.release_at[tier] = min(stored, shorter)
        recent = self.arrivals[tier][-ADAPTIVE_ARRIVALS:]
        if config.adaptive == "fill" and len(recent) >= 2:
            gap = (recent[-1] - recent[0]) / (len(recent) - 1)
            if recent[-1] + self.jobs_missing(tier) * gap > stored:
                self.release_at[tier] = min(stored, now)

    def group(self, item: Item) -> int:
        groups = self.config.tiers[item.tier].groups
        fits = [i for i, (bound, _) in enumerate(groups) if item.size < bound]
        return fits[0] if fits else len(groups) - 1

    def members(self, tier: int, group: int) -> list[Item]:
        return [i for i in self.held(tier) if self.group(i) == group]

    def jobs_missing(self, tier: int) -> float:
        config, held = self.config.tiers[tier], self.held(tier)
        if config.groups:
            members = [len(self.members(tier, g)) for g in range(len(config.groups))]
            return min(n - m for m, (_, n) in zip(members, config.groups, strict=True) if m)
        missing = config.batch_size - len(held) if config.batch_size > 1 else math.inf
        if config.batch_tokens is not None:
            tokens = sum(i.size for i in held)
            missing = min(missing, (config.batch_tokens - tokens) / (tokens / len(held)))
        return missing

    def full_batch(self, tier: int) -> list[Item]:
        """What a tier releases because a batch is full; empty if none is."""
        config, held = self.config.tiers[tier], self.held(tier)
        for group, (_, jobs) in enumerate(config.groups):
            if len(self.members(tier, group)) >= jobs:
                return self.members(tier, group)[:jobs]
        if config.groups:
            return []
        by_number = config.batch_size > 1 and len(held) >= config.batch_size
        limit = config.batch_tokens
        by_tokens = limit is not None and sum(i.size for i in held) >= limit
        return self.batch(tier) if by_number or by_tokens else []

    def batch(self, tier: int) -> list[Item]:
        """The oldest jobs, as many as both limits allow, at least one."""
        config, held = self.config.tiers[tier], self.held(tier)
        jobs = config.batch_size if config.batch_size > 1 else len(held)
        tokens = math.inf if config.batch_tokens is None else config.batch_tokens
        fitting = [n for n in range(1, jobs + 1) if sum(i.size for i in held[:n]) <= tokens]
        return held[: max(fitting, default=1)]

    def late_batch(self, tier: int) -> list[Item]:
        """What a tier releases because its oldest job has waited enough."""
        config, oldest = self.config.tiers[tier], self.oldest[tier]
        if not config.groups:
            return self.batch(tier)
        assert oldest is not None
        shortest, second = self.members(tier, 0), self.members(tier, 1)
        if shortest and second:
            each = min(len(shortest) + len(second), config.mix) // 2
            return shortest[:each] + second[:each]
        return self.members(tier, self.group(oldest))[:1]

    def release(self, tier: int, now: float) -> None:
        while True:
            batch = self.full_batch(tier)
            if not batch and now >= self.release_at[tier]:
                batch = self.late_batch(tier)
            if not batch:
                return
            for item in batch:
                self.enter_ready(item)
                self.promote(item, now)
            self.look_at_oldest(tier)

    # --- a step ---------------------------------------------------------------------------

    def deadlines(self, item: Item) -> list[tuple[float, str]]:
        job, found = item.job, []
        if job.ttft_deadline is not None and not item.token_in_time:
            found.append((job.ttft_deadline, "timeout:ttft"))
        if job.deadline is not None:
            found.append((job.deadline, "timeout:total"))
        return sorted(found)

    def waited(self, item: Item) -> float:
        return sum(end - start for start, end in item.waits)

    def promotion_at(self, item: Item) -> float:
        """When the job next moves up a rank if it goes on waiting."""
        after = self.config.tiers[item.tier].promote_after
        if after is None or item.rank == 0:
            return math.inf
        moves = self.config.ranks[item.tier] - item.rank + 1
        return item.since + (moves * after - self.waited(item))

    def promote(self, item: Item, now: float) -> None:
        while now >= self.promotion_at(item):
            item.rank -= 1
            item.key = self.make_key(item)

    def begin_step(self, now: float, host: Host) -> Plan:
        for item in self.items:
            if item.blocked:
                item.blocked = False
                self.enter_ready(item)
        passed = []
        for item in self.items:
            due = [(t, reason) for t, reason in self.deadlines(item) if now >= t]
            if due:
                item.ending = True
                passed.append((*due[0], item))
        passed.sort(key=lambda p: (p[0], p[2].seq))
        for item in self.queue():
            self.promote(item, now)
        for tier in range(len(self.config.tiers)):
            self.look_at_oldest(tier)
            self.release(tier, now)
        aborts = [item for _, _, item in passed]
        return Plan(
            [(item.job, reason) for _, reason, item in passed],
            [item.job for item in self.plan_preemptions(host, aborts)],
        )

    def plan_preemptions(self, host: Host, aborts: list[Item]) -> list[Item]:
        running = [i for i in self.items if i.state == "running" and i not in aborts]
        free_slots = host.free_slots + len([i for i in aborts if i.state == "running"])
        free = host.free_blocks
        free += sum(host.blocks_of(i.job) for i in aborts if i.state == "running")
        victims: list[Item] = []
        admitted: list[Item] = []
        stopped: set[int] = set()

        def fits(item: Item, more: list[Item]) -> bool:
            others = [i for i in running if i not in victims + more] + admitted
            slots = free_slots + len(victims + more) - len(admitted)
            blocks = free + sum(host.blocks_of(i.job) for i in victims + more)
            blocks -= sum(host.blocks_for(i.job) for i in admitted)
            need = host.blocks_for(item.job) + (host.watermark_blocks if others else 0)
            return slots >= 1 and need <= blocks

        for item in self.queue():
            others = [i for i in running if i not in victims] + admitted
            if item.tier in stopped or self.is_capped(item, others):
                stopped.add(item.tier)
                continue
            weaker = [
                i
                for i in sorted(running, key=lambda i: self.run_key(i.job), reverse=True)
                if i not in victims and i.rank > item.rank and self.config.tiers[i.tier].preemptible
            ]
            enough = [n for n in range(len(weaker) + 1) if fits(item, weaker[:n])]
            if not enough:
                break
            victims += weaker[: enough[0]]
            admitted.append(item)
        return victims
