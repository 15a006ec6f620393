"""Start-time fair queueing: shares follow weights, and neither a long queue nor idleness buys anything."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.scheduling import Job, Policy, PolicyConfig
from twin.scheduling.fair import FairShare

MAX_MODEL_LEN = 8192
OUTPUT = 100


class EmptyHost:
    """An engine that runs nothing and has room."""

    max_model_len = MAX_MODEL_LEN
    free_blocks = 100
    free_slots = 1
    watermark_blocks = 0
    running: tuple[Job, ...] = ()

    def blocks_of(self, job: Job) -> int:
        return 0

    def tokens_of(self, job: Job) -> tuple[int, int]:
        return (0, 0)

    def blocks_for(self, job: Job) -> int:
        return 1


class OneSlot:
    """Serves one job at a time, to the end."""

    def __init__(self, **config: object) -> None:
        data = {"tiers": [{"name": "*", "order": "fair"}], "estimator": "declared", **config}
        self.policy = Policy(PolicyConfig.from_dict(data), MAX_MODEL_LEN)
        self.submitted = 0

    def submit(self, tenant: str, prompt_tokens: int = 100) -> Job:
        job = Job(self.submitted, 0.0, prompt_tokens, OUTPUT, tenant=tenant)
        self.submitted += 1
        self.policy.submit(job, 0.0)
        return job

    def serve(self, output_tokens: int = OUTPUT) -> Job:
        self.policy.begin_step(0.0, EmptyHost())
        job = self.policy.head(0.0)
        assert job is not None
        self.policy.start(job, 0.0)
        self.policy.gone(job, 0.0, "finished", output_tokens)
        return job


@pytest.mark.parametrize("served", [0, 1, 7, 999])
def test_a_thousand_queued_jobs_delay_another_tenant_by_one(served: int) -> None:
    slot = OneSlot()
    rng = random.Random(served)
    for _ in range(1000):
        slot.submit("a", rng.randrange(1, 4000))
    for _ in range(served):
        slot.serve()
    own = slot.submit("b", 4000)
    assert own in [slot.serve(), slot.serve()]


def test_a_thousand_queued_jobs_never_delay_by_more() -> None:
    """Not only the first job of the other tenant: each that finds none of its own before it."""
    slot = OneSlot()
    for _ in range(1000):
        slot.submit("a")
    for _ in range(200):
        own = slot.submit("b")
        assert own in [slot.serve(), slot.serve()]


def test_an_idle_tenant_earns_no_credit() -> None:
    slot = OneSlot()
    for _ in range(600):
        slot.submit("a")
    for _ in range(500):
        slot.serve()
    for _ in range(50):
        slot.submit("b")
    tenants = Counter(slot.serve().tenant for _ in range(40))
    assert abs(tenants["a"] - tenants["b"]) <= 1


@given(st.integers(0, 2**30), st.sampled_from([(1, 3), (1, 1), (2, 5)]))
def test_service_follows_the_weights(seed: int, weights: tuple[int, int]) -> None:
    """While both queue, their service by weight differs by at most one largest job of each (Goyal, Vin and Cheng)."""
    rng = random.Random(seed)
    slot = OneSlot(weights={"a": weights[0], "b": weights[1]})
    for tenant in "ab":
        for _ in range(150):
            slot.submit(tenant, rng.randrange(1, 4000))
    largest = (4000 + OUTPUT) / weights[0] + (4000 + OUTPUT) / weights[1]
    tokens = {"a": 0, "b": 0}
    for _ in range(150):
        job = slot.serve()
        tokens[job.tenant] += job.prompt_tokens + OUTPUT
        assert abs(tokens["a"] / weights[0] - tokens["b"] / weights[1]) <= largest


def test_one_to_three_in_the_long_run() -> None:
    """Tenants that always have four jobs queued, of random sizes."""
    rng = random.Random(7)
    slot = OneSlot(weights={"a": 1, "b": 3})
    for _ in range(4):
        slot.submit("a", rng.randrange(1, 2000))
        slot.submit("b", rng.randrange(1, 2000))
    tokens = Counter[str]()
    for _ in range(20_000):
        job = slot.serve()
        tokens[job.tenant] += job.prompt_tokens + OUTPUT
        slot.submit(job.tenant, rng.randrange(1, 2000))
    assert tokens["b"] / tokens["a"] == pytest.approx(3.0, rel=0.01)


def test_a_tenant_pays_for_what_it_used() -> None:
    """The charge is the expected size; what comes out is settled when the job leaves."""
    slot = OneSlot()
    slot.submit("a")
    assert slot.policy.service("a") == 200_000
    slot.serve(output_tokens=10)
    assert slot.policy.service("a") == 110_000
    never_started = slot.submit("a")
    assert slot.policy.service("a") == 310_000
    slot.policy.gone(never_started, 0.0, "aborted", 0)
    assert slot.policy.service("a") == 110_000


def test_a_preempted_job_keeps_its_tag_and_is_charged_once() -> None:
    slot = OneSlot()
    first, second = slot.submit("a"), slot.submit("b")
    slot.policy.start(first, 0.0)
    for _ in range(3):
        slot.policy.requeue(first, 0.0)
        slot.policy.begin_step(0.0, EmptyHost())
        assert slot.policy.head(0.0) is first, "tags tie, it came first"
        slot.policy.start(first, 0.0)
    assert slot.policy.service("a") == 200_000
    assert slot.policy.tag(first) == slot.policy.tag(second) == 0


def test_a_job_set_aside_has_not_started() -> None:
    """It moves the virtual time only once it really starts, also when others start in between."""
    slot = OneSlot()
    jobs = [slot.submit("a"), slot.submit("a"), slot.submit("a")]
    for job in jobs:
        slot.policy.start(job, 0.0)
    slot.policy.undo_start(jobs[0], 0.0)
    slot.policy.undo_start(jobs[2], 0.0)
    assert slot.policy.head(0.0) is jobs[0]
    slot.policy.begin_step(0.0, EmptyHost())
    assert slot.policy.tag(slot.submit("b")) == slot.policy.tag(jobs[1])


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10**6)), min_size=1, max_size=30),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 10**9)),
)
def test_integers_only(asks: list[tuple[str, int]], weights: dict[str, int]) -> None:
    share = FairShare(weights)
    for tenant, size in asks:
        tag = share.enter(tenant, size)
        share.start(tag)
        share.begin_step()
        share.settle(tenant, size, size // 2)
        assert type(tag) is int
        assert type(share.service(tenant)) is int


def test_accounts_of_tenants_long_gone_are_forgotten() -> None:
    """Tenants that come once would be a leak. Their next tag is the virtual time, as if they were new."""
    slot = OneSlot()
    for n in range(10_000):
        for _ in range(2):
            slot.submit(f"tenant {n}")
        for _ in range(2):
            slot.serve()
    assert sum(slot.policy.service(f"tenant {n}") > 0 for n in range(10_000)) <= 2048
    assert slot.policy.tag(slot.submit("tenant 0")) == slot.policy.tag(slot.submit("new")) > 0
