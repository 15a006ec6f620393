"""What a hold releases together, and when: each sentence of the contract an example."""

import math

import pytest

from tests.scheduling.pair import MAX_MODEL_LEN, pair_of

BATCH = {"name": "*", "batch_size": 3, "batch_tokens": 1000, "max_wait": 1.0, "adaptive": "none"}


def test_a_full_batch_goes_at_once() -> None:
    pair = pair_of(BATCH, estimator="declared")
    for _ in range(4):
        pair.submit("*", "a", 100, 1)
    assert pair.policy.next_wake(0.0) == 0.0
    pair.step(0.0)
    assert pair.states() == ["running"] * 3 + ["held"]
    assert pair.policy.next_wake(0.0) == 1.0


def test_further_batches_that_are_due_go_in_the_same_step() -> None:
    pair = pair_of(BATCH, estimator="declared")
    for _ in range(7):
        pair.submit("*", "a", 100, 1)
    pair.step(0.0)
    assert pair.states() == ["running"] * 6 + ["held"]


def test_a_release_stops_at_the_token_limit() -> None:
    pair = pair_of(BATCH, estimator="declared")
    for prompt in (399, 499, 599):
        pair.submit("*", "a", prompt, 1)
    pair.step(0.0)
    assert pair.states() == ["running", "running", "held"]


def test_a_job_above_the_token_limit_goes_alone() -> None:
    pair = pair_of(BATCH, estimator="declared")
    pair.submit("*", "a", 1999, 1)
    pair.submit("*", "a", 10, 1)
    pair.step(0.0)
    assert pair.states() == ["running", "held"]


def test_a_lone_job_goes_when_it_has_waited() -> None:
    pair = pair_of(BATCH)
    pair.submit("*", "a", 10, 1, late=0.25)
    assert pair.policy.next_wake(0.0) == 0.75
    pair.step(math.nextafter(0.75, 0.0))
    assert pair.states() == ["held"]
    pair.step(0.75 - pair.now)
    assert pair.states() == ["running"]


def test_tokens_alone_are_no_limit_by_number() -> None:
    pair = pair_of({**BATCH, "batch_size": 1}, estimator="declared")
    for _ in range(9):
        pair.submit("*", "a", 100, 1)
    pair.step(0.0)
    assert pair.states() == ["held"] * 9
    pair.submit("*", "a", 90, 1)
    pair.step(0.0)
    assert pair.states() == ["running"] * 10


def test_pressure_shortens_the_wait_by_up_to_half() -> None:
    pair = pair_of({**BATCH, "batch_size": 99, "batch_tokens": None, "adaptive": "pressure"})
    for waiting in range(1, 15):
        pair.submit("*", "a", 1, 1)
        assert pair.policy.next_wake(0.0) == 1.0 - 0.5 * min(waiting / 10, 1.0)


def test_fill_does_not_wait_for_a_batch_that_cannot_fill() -> None:
    pair = pair_of({**BATCH, "adaptive": "fill"})
    pair.submit("*", "a", 1, 1)
    assert pair.policy.next_wake(pair.now) == 1.0, "the rate is not known yet"
    pair.now = 0.25
    pair.submit("*", "a", 1, 1)
    assert pair.policy.next_wake(pair.now) == 1.0, "the third would come at 0.5"
    pair.step(0.75)
    pair.now = 2.0
    pair.submit("*", "a", 1, 1)
    assert pair.policy.next_wake(pair.now) == 2.0, "two more would come at 4.0"


def test_fill_takes_the_rate_of_the_last_sixteen_arrivals() -> None:
    pair = pair_of({**BATCH, "batch_size": 99, "batch_tokens": None, "adaptive": "fill"})
    pair.submit("*", "a", 1, 1)
    pair.now = 50.0
    for _ in range(15):
        pair.now += 1 / 1024
        pair.submit("*", "a", 1, 1)
        assert pair.policy.next_wake(pair.now) == pair.now, "the long gap is among them"
        pair.step(0.0)
    pair.now += 1 / 1024
    pair.submit("*", "a", 1, 1)
    assert pair.policy.next_wake(pair.now) == pair.now + 1.0


GROUPS = {
    "name": "*",
    "groups": [[256, 16], [1024, 8], [4096, 4], [8192, 2]],
    "max_wait": 1.0,
}


def test_a_full_group_goes_at_once() -> None:
    pair = pair_of(GROUPS, estimator="declared")
    for prompt in (100, 5000, 100, 9000 % MAX_MODEL_LEN, 5000):
        pair.submit("*", "a", prompt, 1)
    pair.step(0.0)
    assert pair.states() == ["held", "running", "held", "held", "running"]


@pytest.mark.parametrize(
    ("short", "medium", "mix", "released"),
    [(3, 4, 12, 6), (1, 7, 12, 5), (10, 7, 12, 12), (2, 2, 2, 2), (1, 1, 12, 2)],
)
def test_the_two_shortest_groups_mix(short: int, medium: int, mix: int, released: int) -> None:
    """min(both together, mix) // 2 of each."""
    pair = pair_of({**GROUPS, "mix": mix}, estimator="declared")
    for prompt, count in ((100, short), (500, medium)):
        for _ in range(count):
            pair.now += 1 / 64
            pair.submit("*", "a", prompt, 1)
    pair.step(1.0 + 1 / 64 - pair.now)
    assert pair.states().count("running") == released


def test_a_late_job_of_a_longer_group_goes_alone() -> None:
    pair = pair_of(GROUPS, estimator="declared")
    for prompt in (2000, 2000, 500):
        pair.submit("*", "a", prompt, 1)
        pair.now += 0.25
    pair.step(1.0 - pair.now)
    assert pair.states() == ["running", "held", "held"]


def test_no_held_job_is_past_its_wait_after_a_step() -> None:
    """Mixing takes from the shortest groups, however old a longer job is; so it is repeated."""
    pair = pair_of({**GROUPS, "mix": 2}, estimator="declared")
    for prompt in (2000, 100, 500, 100, 500, 100):
        pair.submit("*", "a", prompt, 1)
    pair.step(1.0)
    assert pair.states() == ["running"] * 6
