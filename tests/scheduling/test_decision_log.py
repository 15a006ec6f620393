"""The log of decisions about a request that somebody asks about: what happened to it, when, and why."""

from tests.scheduling.pair import BLOCK_SIZE, Pair, pair_of
from twin.scheduling import Job, Policy, policy_config


def watched(pair: Pair, tier: str = "*", prompt_tokens: int = 10, **times: float) -> Job:
    rid = f"r{len(pair.jobs) * 7919 % 10007}"
    pair.policy.watch(rid)
    job = pair.submit(tier, "a", prompt_tokens, 50, **times)
    assert job.rid == rid
    return job


def events(pair: Pair, job: Job) -> list[str]:
    return [f"{line.event}: {line.detail}" for line in pair.policy.log(job.rid)]


def test_a_life_without_incident() -> None:
    pair = pair_of({"name": "*", "batch_size": 2, "max_wait": 1.0})
    job = watched(pair)
    pair.step(0.5)
    pair.step(0.5)
    pair.token(job, 0.25)
    pair.finish(job, 7)
    log = pair.policy.log(job.rid)
    assert events(pair, job) == [
        "held: until 1.000000 or a full batch",
        "ready: rank 0",
        "started: rank 0",
        "first token: ",
        "gone: finished, 8 tokens",
    ]
    assert [line.now for line in log] == [0.0, 1.0, 1.0, 1.25, 1.25]
    assert [line.step for line in log] == [0, 2, 2, 2, 2]


def test_why_it_does_not_run_yet() -> None:
    pair = pair_of({"name": "*", "max_running": 2}, slots=1, blocks=2)
    first = pair.submit("*", "a", 10, 1)
    second = pair.submit("*", "a", 10, 1)
    job = watched(pair, prompt_tokens=2 * BLOCK_SIZE)
    pair.step(0.0)
    pair.step(1.0)
    pair.step(1.0)
    pair.finish(first, 1)
    pair.step(1.0)
    pair.step(1.0)
    pair.host.num_slots = 2
    pair.step(1.0)
    pair.finish(second, 1)
    pair.step(1.0)
    assert events(pair, job) == [
        "ready: rank 0",
        "skipped: 2 ahead in the queue",
        "skipped: 1 ahead in the queue",
        "skipped: no free slot",
        "skipped: needs 2 blocks, 1 free",
        "started: rank 0",
    ]


def test_a_cap_is_named() -> None:
    pair = pair_of({"name": "*", "max_running": 1})
    pair.submit("*", "a", 10, 1)
    job = watched(pair)
    pair.step(0.0)
    pair.step(0.0)
    assert events(pair, job)[-1] == "skipped: its tier is at its cap"


def test_preemption_promotion_and_being_set_aside() -> None:
    tiers = ({"name": "A"}, {"name": "B", "promote_after": 4.0})
    pair = pair_of(*tiers, slots=1)
    job = watched(pair, "B")
    pair.step(0.0)
    urgent = pair.submit("A", "a", 10, 1)
    pair.step(1.0)
    pair.finish(urgent, 1)
    pair.step(1.0, aside=1)
    pair.step(1.0)
    pair.step(1.0, preempts=True)
    pair.step(3.0, budget=0)
    assert events(pair, job) == [
        "ready: rank 1",
        "started: rank 1",
        "preempted: for a job ranked above",
        "started: rank 1",
        "set aside: a result from before its preemption is in flight",
        "started: rank 1",
        "preempted: out of blocks",
        "promoted: to rank 0",
        "skipped: the step was full",
    ]


def test_an_abort_says_why() -> None:
    pair = pair_of({"name": "*"}, slots=0)
    job = watched(pair, ttft=1.0)
    pair.step(0.0)
    pair.step(1.0)
    assert events(pair, job) == [
        "ready: rank 0",
        "skipped: no free slot",
        "abort: timeout:ttft",
        "gone: timeout:ttft, 0 tokens",
    ]


def test_only_watched_requests_have_a_log() -> None:
    policy = Policy(policy_config("tiered"), 8192)
    policy.watch("b")
    for rid in "abc":
        policy.submit(Job(rid, 0.0, 10, 10), 0.0)
    assert policy.log("a") == policy.log("unheard of") == []
    assert len(policy.log("b")) == 1
    policy.watch("c")
    assert policy.log("c") == [], "from now on"
    policy.watch("b")
    assert len(policy.log("b")) == 1, "watching twice forgets nothing"


def test_watching_changes_no_decision() -> None:
    answers = []
    for watch in (False, True):
        pair = pair_of({"name": "A"}, {"name": "B", "batch_size": 2, "max_wait": 1.0}, slots=2)
        for n in range(12):
            if watch:
                pair.policy.watch(f"r{n * 7919 % 10007}")
            pair.submit("AB"[n % 2], "a", 10, 50)
            pair.step(0.25)
            if n % 3 == 2:
                pair.finish(pair.host.running[0], 1)
        answers.append(pair.trace)
    assert answers[0] == answers[1]
