"""The policy against its naive model, call by call, under whatever an engine can do to it."""

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from tests.scheduling.pair import BLOCK_SIZE, MAX_MODEL_LEN, TENANTS, FakeHost, Pair
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


def crowded_tiers(rng: random.Random) -> PolicyConfig:
    """Four ranks without holds, for an engine where nearly every admission takes somebody's place."""
    tiers = [
        {
            "name": name,
            "preemptible": rng.random() < 0.9,
            "promote_after": rng.choice((None, None, 4.0)),
            "victims": rng.choice(("newest", "largest")),
        }
        for name in ("ONLINE", "BATCH", "OFFLINE", "SPARE")
    ]
    return finish(rng, {"tiers": tiers}, caps=0.1)


def finish(rng: random.Random, data: dict[str, Any], caps: float = 0.25) -> PolicyConfig:
    data["initial"] = rng.choice((1, 256, 2000))
    data["window"] = rng.choice((1, 2, 3, 512))
    data["quantile"] = rng.choice((0.1, 0.5, 0.9))
    data["estimator"] = rng.choice(("quantile", "quantile", "declared", "oracle"))
    data["weights"] = {"a": 1, "b": rng.choice((1, 2, 3))}
    for tier in data["tiers"]:
        if rng.random() < caps:
            tier["max_running"] = rng.choice((1, 2, 3))
        if rng.random() < caps:
            tier["max_running_tokens"] = rng.choice((300, 2000, 9000))
    return PolicyConfig.from_dict(data)


def make_pair(rng: random.Random, kind: str, **kwargs: Any) -> Pair:
    """A policy of some kind on an engine that is short of slots or blocks."""
    most = MAX_MODEL_LEN // BLOCK_SIZE
    if kind == "crowded":
        host = FakeHost(rng.choice((4, 8)), most + rng.choice((1, 4)), rng.choice((0, 2, 5)))
        return Pair(crowded_tiers(rng), host, **kwargs)
    config = random_tiers(rng) if kind == "random" else small_preset(rng, kind)
    host = FakeHost(rng.choice((1, 2, 3, 6)), most + rng.choice((1, 4, 16)), rng.choice((0, 1)))
    return Pair(config, host, **kwargs)


KINDS = (*PRESETS, "random", "crowded")
PROMPTS = (1, 3, 100, 250, 256, 600, 1023, 2500, 4096, 8000)
DECLARED = (None, None, 1, 50, 900)
LATE = (0.0, 0.0, 0.0, TICK, 0.5, 2.0)
TIMEOUTS = (0.0, TICK, 0.5, 1.0, 3.0, 6.0)
ASIDE = (0, 0, 0, 1, 2, 5)

ticks = st.integers(0, 12).map(lambda n: n * TICK)
indices = st.integers(0, 63)


class PolicyMachine(RuleBasedStateMachine):
    """Rules are what an engine and its clients do; `Pair` compares after every call."""

    @initialize(kind=st.sampled_from((*KINDS, "random", "random")), seed=st.integers(0, 2**20))
    def configure(self, kind: str, seed: int) -> None:
        self.pair = make_pair(random.Random(f"{seed}/{kind}"), kind)

    def pick(self, index: int, *states: str) -> Any:
        rids = self.pair.in_state(*states)
        return self.pair.jobs[rids[index % len(rids)]] if rids else None

    @rule(
        tier=indices,
        tenant=st.sampled_from(TENANTS),
        prompt=st.sampled_from(PROMPTS),
        declared=st.sampled_from(DECLARED),
        late=st.sampled_from(LATE),
        times=st.sampled_from((1, 2, 4)),
    )
    def submit(
        self, tier: int, tenant: str, prompt: int, declared: int | None, late: float, times: int
    ) -> None:
        name = self.pair.tier_name(tier)
        for _ in range(times):
            self.pair.submit(name, tenant, prompt, declared, late)

    @rule(
        tier=indices,
        prompt=st.sampled_from(PROMPTS),
        ttft=st.sampled_from(TIMEOUTS) | st.none(),
        total=st.sampled_from(TIMEOUTS) | st.none(),
    )
    def submit_with_deadlines(
        self, tier: int, prompt: int, ttft: float | None, total: float | None
    ) -> None:
        self.pair.submit(self.pair.tier_name(tier), "a", prompt, None, 0.0, ttft, total)

    @rule(seconds=ticks, aside=st.sampled_from(ASIDE), budget=st.sampled_from((9, 1)))
    def step(self, seconds: float, aside: int, budget: int) -> None:
        self.pair.step(seconds, aside, budget)

    @rule(seconds=ticks)
    def step_and_go_on(self, seconds: float) -> None:
        """A step after which what runs has made tokens."""
        self.pair.step(seconds)
        for job in [*self.pair.host.running]:
            self.pair.token(job, TICK)

    @rule(seconds=ticks)
    def step_without_blocks(self, seconds: float) -> None:
        self.pair.step(seconds, preempts=True)

    @rule()
    def sleep(self) -> None:
        """With nothing to run an engine sleeps until the policy may answer differently."""
        self.pair.check_wake()
        wake = self.pair.policy.next_wake(self.pair.now)
        if wake < math.inf:
            self.pair.step(wake - self.pair.now)

    @rule(index=indices, tokens=st.sampled_from((1, 2, 200)))
    def finish(self, index: int, tokens: int) -> None:
        if job := self.pick(index, "running"):
            self.pair.finish(job, tokens)

    @precondition(lambda self: self.pair.preempted)
    @rule(index=indices)
    def finish_after_preemption(self, index: int) -> None:
        """Its last token was on its way when the job was preempted."""
        rids = self.pair.preempted_alive()
        if rids:
            self.pair.finish(self.pair.jobs[rids[index % len(rids)]], 1)

    @rule(index=indices, is_meant=st.integers(0, 2))
    def disconnect(self, index: int, is_meant: int) -> None:
        job = self.pick(index, "held", "ready", "running")
        if job and is_meant == 2:
            self.pair.leave(job, "aborted")

    @precondition(lambda self: self.pair.gone_rids)
    @rule()
    def unknown(self) -> None:
        """`gone` of a job that left before is ignored."""
        rid = min(self.pair.gone_rids)
        self.pair.policy.gone(self.pair.jobs[rid], self.pair.now, "finished", 5)
        self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check_end()


PolicyMachine.TestCase.settings = settings(stateful_step_count=50)
TestPolicyMachine = PolicyMachine.TestCase


def happen(rng: random.Random, pair: Pair) -> None:
    """One thing that can happen, with weights that keep an engine busy for long."""
    dice = rng.random()
    seconds = rng.randrange(13) * TICK
    running = pair.in_state("running")
    if dice < 0.35 and len(pair.alive()) < 4 + 2 * pair.host.num_slots:
        deadlines = [rng.choice(TIMEOUTS) if rng.random() < 0.15 else None for _ in range(2)]
        prompts = PROMPTS if len(pair.config.tiers) < 4 else PROMPTS[4:]
        tier, prompt = pair.tier_name(rng.randrange(64)), rng.choice(prompts)
        for _ in range(rng.choice((1, 1, 2, 5))):
            declared, late = rng.choice(DECLARED), rng.choice(LATE)
            pair.submit(tier, rng.choice(TENANTS), prompt, declared, late, *deadlines)
    elif dice < 0.60:
        pair.step(seconds, rng.choice(ASIDE), rng.choice((9, 9, 1)))
    elif dice < 0.64:
        pair.step(seconds, preempts=True)
    elif dice < 0.74:
        if rng.random() < 0.3:
            pair.check_wake()
        wake = pair.policy.next_wake(pair.now)
        if wake < math.inf:
            pair.step(wake - pair.now)
    elif dice < 0.80 and running:
        pair.token(pair.jobs[rng.choice(running)], seconds)
    elif dice < 0.95 and running:
        pair.finish(pair.jobs[rng.choice(running)], rng.choice((1, 2, 200)))
    elif dice < 0.97 and (rids := pair.preempted_alive()):
        pair.finish(pair.jobs[rng.choice(rids)], 1)
    elif dice > 0.99 and pair.alive():
        pair.leave(pair.jobs[rng.choice(pair.alive())], "aborted")


def long_run(seed: int, kind: str, actions: int = 150, end: bool = True, **kwargs: Any) -> Pair:
    """Random happenings; at the `end` everybody leaves."""
    rng = random.Random(f"{seed}/{kind}")
    pair = make_pair(rng, kind, **kwargs)
    for _ in range(actions):
        happen(rng, pair)
    if end:
        pair.check_end()
    return pair


EVENTS = ("undone_starts", "promotions", "planned_preemptions", "reactive_preemptions", "cap_stops")


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs(kind: str) -> None:
    """Busy engines, and a count of what happened to them: a rule that is never met is not tested."""
    met: Counter[str] = Counter()
    for seed in range(60 if kind == "random" else 25):
        for tier in long_run(seed, kind).policy.stats()["tiers"].values():
            met.update({name: tier[name] for name in EVENTS})
            met.update(tier["ended"])
            met.update({f"release {reason}": n for reason, n in tier["releases"].items()})
    expected = {"undone_starts", "reactive_preemptions", "finished ready"}
    expected |= {
        f"timeout:{why} {state}" for why in ("ttft", "total") for state in ("ready", "running")
    }
    if kind not in ("fcfs", "fair"):
        expected |= {"promotions", "planned_preemptions"}
    if kind in ("tiered", "tiered_length", "random"):
        expected |= {"timeout:ttft held", "release size"}
    if kind in ("tiered", "random"):
        expected |= {"release time", "release tokens"}
    if kind in ("tiered_length", "random"):
        expected |= {"release mix", "release single"}
    assert not {event for event in expected if met[event] == 0}


def test_same_calls_give_the_same_answers() -> None:
    """Whatever the requests are called."""
    for seed in range(10):
        one, other = (long_run(seed, "random", spread_ids=spread) for spread in (True, False))
        assert one.trace == other.trace
        assert one.policy.stats() == other.policy.stats()
