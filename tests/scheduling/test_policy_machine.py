"""The policy against its naive model, call by call, under whatever an engine can do to it."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.scheduling.pair import MAX_MODEL_LEN, TENANTS, FakeHost, Pair
from twin.scheduling import PRESETS, PolicyConfig

ORDERS = ("fcfs", "edf", "length", "shortest", "fair", "tests.scheduling.pair.least_served")
TICK = 1 / 16
"""Instants are multiples of this, so that sums of them are exact and timers tie (seconds)."""


def small_preset(rng: random.Random, name: str) -> PolicyConfig:
    """The preset with numbers that a handful of jobs in a few seconds meet."""
    data = PRESETS[name].to_dict()
    for tier in data["tiers"]:
        if tier["max_wait"] is not None:
            tier["max_wait"] = rng.choice((0.25, 0.5, 1.0))
            tier["adaptive"] = rng.choice(("none", "pressure", "fill"))
        if tier["batch_tokens"] is not None:
            tier["batch_size"] = rng.choice((1, 2, 3, 5))
            tier["batch_tokens"] = rng.choice((300, 2000, 9000))
        if tier["groups"]:
            tier["groups"] = [[256, 3], [1024, 2], [4096, rng.choice((1, 2))], [MAX_MODEL_LEN, 2]]
            tier["mix"] = rng.choice((2, 3, 4, 12))
        if tier["promote_after"] is not None:
            tier["promote_after"] = rng.choice((1.0, 2.0, 3.5))
        if tier["ttft_target"] is not None:
            tier["ttft_target"] = rng.choice((0.5, 1.0, 5.0))
    return finish(rng, data)


def random_tiers(rng: random.Random) -> PolicyConfig:
    """Tiers of which every field is drawn."""
    ranks = [0]
    for _ in range(rng.randrange(4)):
        ranks.append(ranks[-1] + rng.choice((0, 1, 1)))
    shared = [
        {"order": rng.choice(ORDERS), "victims": rng.choice(("newest", "largest"))} for _ in ranks
    ]
    tiers: list[dict[str, Any]] = []
    for name, rank in zip(("ONLINE", "BATCH", "OFFLINE", "SPARE"), ranks, strict=False):
        tier: dict[str, Any] = {"name": name, "rank": rank, **shared[rank]}
        hold = rng.choice(("none", "jobs", "tokens", "both", "groups"))
        if hold in ("jobs", "both"):
            tier["batch_size"] = rng.choice((2, 3, 4))
        if hold in ("tokens", "both"):
            tier["batch_tokens"] = rng.choice((300, 2000, 9000))
        if hold == "groups":
            bounds = sorted(rng.sample((200, 256, 700, 1024, 4096), rng.choice((1, 2, 3))))
            tier["groups"] = [[bound, rng.choice((1, 2, 3))] for bound in bounds]
            tier["mix"] = rng.choice((2, 3, 12))
        if hold != "none":
            tier["max_wait"] = rng.choice((0.25, 0.5, 1.0))
            tier["adaptive"] = rng.choice(("none", "pressure", "fill"))
        if rng.random() < 0.6:
            tier["promote_after"] = rng.choice((1.0, 1.5, 2.0))
        if rng.random() < 0.5:
            tier["ttft_target"] = rng.choice((0.5, 2.0))
        tier["preemptible"] = rng.random() < 0.7
        tiers.append(tier)
    return finish(rng, {"tiers": tiers})


def finish(rng: random.Random, data: dict[str, Any]) -> PolicyConfig:
    data["initial"] = rng.choice((1, 256, 2000))
    data["window"] = rng.choice((1, 2, 3, 512))
    data["quantile"] = rng.choice((0.1, 0.5, 0.9))
    data["estimator"] = rng.choice(("quantile", "quantile", "declared", "oracle"))
    data["weights"] = {"a": 1, "b": rng.choice((1, 2, 3))}
    for tier in data["tiers"]:
        if rng.random() < 0.25:
            tier["max_running"] = rng.choice((1, 2, 3))
        if rng.random() < 0.25:
            tier["max_running_tokens"] = rng.choice((300, 2000, 9000))
    return PolicyConfig.from_dict(data)


def make_pair(rng: random.Random, kind: str, **kwargs: Any) -> Pair:
    """A policy of some kind on an engine that is short of slots or blocks."""
    config = random_tiers(rng) if kind == "random" else small_preset(rng, kind)
    smallest = MAX_MODEL_LEN // 256
    host = FakeHost(rng.choice((1, 2, 3, 6)), smallest + rng.choice((1, 4, 16)), rng.choice((0, 1)))
    return Pair(config, host, **kwargs)


KINDS = (*PRESETS, "random", "random", "random")
PROMPTS = (1, 3, 100, 250, 256, 600, 1023, 2500, 4096, 8000)
TIMEOUTS = (None, None, None, None, 0.0, TICK, 0.5, 1.0, 3.0)

ticks = st.integers(0, 12).map(lambda n: n * TICK)
indices = st.integers(0, 63)


class PolicyMachine(RuleBasedStateMachine):
    """Rules are what an engine and its clients do; `Pair` compares after every call."""

    @initialize(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**20))
    def configure(self, kind: str, seed: int) -> None:
        self.pair = make_pair(random.Random(f"{seed}/{kind}"), kind)

    def pick(self, index: int, state: str | None = None) -> Any:
        pair = self.pair
        rids = [r for r in pair.alive() if state in (None, pair.policy.state_of(r))]
        return pair.jobs[rids[index % len(rids)]] if rids else None

    @rule(
        tier=indices,
        tenant=st.sampled_from(TENANTS),
        prompt=st.sampled_from(PROMPTS),
        declared=st.sampled_from((None, None, 1, 50, 900)),
        late=st.sampled_from((0.0, 0.0, 0.0, TICK, 0.5, 2.0)),
        ttft=st.sampled_from(TIMEOUTS),
        total=st.sampled_from(TIMEOUTS),
        times=st.sampled_from((1, 1, 2, 5)),
    )
    def submit(
        self,
        tier: int,
        tenant: str,
        prompt: int,
        declared: int | None,
        late: float,
        ttft: float | None,
        total: float | None,
        times: int,
    ) -> None:
        tiers = self.pair.config.tiers
        room = MAX_MODEL_LEN - prompt
        for _ in range(times):
            self.pair.submit(
                tiers[tier % len(tiers)].name,
                tenant,
                prompt,
                room if declared is None else min(declared, room),
                late,
                ttft,
                total,
            )

    @rule(seconds=ticks, aside=st.sampled_from((0, 0, 1, 2, 5)), budget=st.sampled_from((9, 1)))
    def step(self, seconds: float, aside: int, budget: int) -> None:
        self.pair.step(seconds, aside, budget)

    @rule(seconds=ticks)
    def step_without_blocks(self, seconds: float) -> None:
        self.pair.step(seconds, preempts=True)

    @rule()
    def sleep(self) -> None:
        """With nothing to run an engine sleeps until the policy may answer differently."""
        self.pair.check_wake()
        wake = self.pair.policy.next_wake(self.pair.now)
        if wake < self.pair.now + 100.0:
            self.pair.step(wake - self.pair.now)

    @rule(index=indices)
    def token(self, index: int) -> None:
        if job := self.pick(index, "running"):
            self.pair.token(job)

    @rule(index=indices, tokens=st.sampled_from((1, 2, 200)))
    def finish(self, index: int, tokens: int) -> None:
        if job := self.pick(index, "running"):
            self.pair.token(job)
            self.pair.host.output[job.rid] += tokens - 1
            self.pair.leave(job, "finished")

    @precondition(lambda self: self.pair.preempted)
    @rule(index=indices)
    def finish_after_preemption(self, index: int) -> None:
        """Its last token was on its way when the job was preempted."""
        rids = sorted(self.pair.preempted - self.pair.gone_rids)
        if rids:
            job = self.pair.jobs[rids[index % len(rids)]]
            self.pair.token(job)
            self.pair.leave(job, "finished")

    @rule(index=indices)
    def disconnect(self, index: int) -> None:
        if job := self.pick(index):
            self.pair.leave(job, "aborted")

    @rule()
    def unknown(self) -> None:
        """`gone` of a job that left before is ignored."""
        for rid in sorted(self.pair.gone_rids)[:1]:
            self.pair.policy.gone(self.pair.jobs[rid], self.pair.now, "finished", 5)
            self.pair.check()

    @invariant()
    def agree(self) -> None:
        self.pair.check()


PolicyMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples, stateful_step_count=40
)
test_policy_machine = pytest.mark.timeout(600)(PolicyMachine.TestCase)
