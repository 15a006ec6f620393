"""The contract of an order, kept by every order there is, and orders of the user's own by dotted path."""

import random
from pathlib import Path
from typing import Any

import pytest

from twin.scheduling import Job, Policy, PolicyConfig
from twin.scheduling.orders import ORDERS, OrderError, View, resolve_order

MAX_MODEL_LEN = 8192


class SomeView:
    """Facts about jobs that do not depend on the time."""

    def expected_output(self, job: Job) -> int:
        return 1 + job.seq * 17 % 300

    def service(self, tenant: str) -> int:
        return len(tenant) * 1000

    def tag(self, job: Job) -> int:
        return job.seq * 31 % 11 * 1000

    def due(self, job: Job) -> float:
        return float("inf") if job.ttft_deadline is None else job.ttft_deadline


def some_jobs(count: int, names: str = "r") -> list[Job]:
    rng = random.Random(4)
    jobs = []
    for seq in range(count):
        arrival = rng.choice((0.0, 0.5, 0.5, rng.random()))
        deadline = rng.choice((None, arrival, arrival + 1.0))
        prompt = rng.choice((1, 255, 256, 1024, 8000))
        rid = f"{names}{rng.random()}"
        jobs.append(Job(rid, arrival, prompt, 100, tenant="ab"[seq % 2], ttft_deadline=deadline))
        jobs[-1].seq = seq
    return jobs


@pytest.mark.parametrize("name", ORDERS)
class TestEveryOrder:
    def test_keys_end_in_arrival_and_seq(self, name: str) -> None:
        view, order = SomeView(), resolve_order(name)
        jobs = some_jobs(200)
        keys = [order(job, view) for job in jobs]
        for job, key in zip(jobs, keys, strict=True):
            assert isinstance(key, tuple)
            assert key[-2:] == (job.arrival, job.seq)
            assert all(part == part for part in key), "no NaN"
        assert len(set(keys)) == len(keys)
        assert len({len(key) for key in keys}) == 1

    def test_keys_are_static_and_know_no_names(self, name: str) -> None:
        view, order = SomeView(), resolve_order(name)
        keys = [order(job, view) for job in some_jobs(50, "a")]
        assert keys == [order(job, view) for job in some_jobs(50, "z")]

    def test_the_queue_follows_them(self, name: str) -> None:
        """However jobs come in, heads come out in the order of their keys."""
        policy = Policy(PolicyConfig.from_dict({"tiers": [{"name": "*", "order": name}]}), 8192)
        jobs = some_jobs(40)
        for job in jobs:
            policy.submit(job, 1.0)
        order = resolve_order(name)
        expected = sorted(jobs, key=lambda job: order(job, policy))
        heads = []
        while (head := policy.head(1.0)) is not None:
            heads.append(head)
            policy.start(head, 1.0)
        assert heads == expected

    def test_an_old_job_is_not_passed_for_ever_by_equal_ones(self, name: str) -> None:
        """Among jobs that differ in arrival only, the oldest is first."""
        policy = Policy(PolicyConfig.from_dict({"tiers": [{"name": "*", "order": name}]}), 8192)
        for n in range(5):
            policy.submit(Job(n, 1.0 - n / 8, 100, 50), 1.0)
        heads = []
        while (head := policy.head(1.0)) is not None:
            heads.append(head.rid)
            policy.start(head, 1.0)
        assert heads == ([4, 3, 2, 1, 0] if name != "fair" else [0, 1, 2, 3, 4])


def longest(job: Job, view: View) -> tuple[Any, ...]:
    return (-job.prompt_tokens, job.arrival, job.seq)


def without_ties(job: Job, view: View) -> tuple[Any, ...]:
    return (job.prompt_tokens,)


def nan_key(job: Job, view: View) -> tuple[Any, ...]:
    return (float("nan"), job.arrival, job.seq)


def no_tuple(job: Job, view: View) -> Any:
    return job.arrival


def no_such_field(job: Job, view: View) -> Any:
    return (job.output_tokens, job.arrival, job.seq)  # type: ignore[attr-defined]


def leaves(job: Job, view: View) -> Any:
    raise SystemExit(0)


def text_or_number(job: Job, view: View) -> tuple[Any, ...]:
    return ("a" if job.prompt_tokens > 7 else 1, job.arrival, job.seq)


NOT_A_FUNCTION = 3
HERE = "tests.scheduling.test_orders"


def policy_with(order: str) -> Policy:
    return Policy(PolicyConfig.from_dict({"tiers": [{"name": "*", "order": order}]}), MAX_MODEL_LEN)


def test_a_dotted_path_is_an_order() -> None:
    policy = policy_with(f"{HERE}.longest")
    for rid, prompt in enumerate((5, 50, 500, 50)):
        policy.submit(Job(rid, 0.0, prompt, 10), 0.0)
    heads = []
    while (head := policy.head(0.0)) is not None:
        heads.append(head.rid)
        policy.start(head, 0.0)
    assert heads == [2, 1, 3, 0]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("fcsf", "'fcsf' is not one of fcfs, edf, length, shortest, fair and no dotted path"),
        ("no.such.module.order", "'no.such.module.order' cannot be imported: No module named 'no'"),
        (f"{HERE}.missing", "missing' cannot be imported: .*has no attribute 'missing'"),
        (f"{HERE}.NOT_A_FUNCTION", "NOT_A_FUNCTION' is not a function but int"),
    ],
)
def test_an_order_that_is_not_there(order: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_with(order)


@pytest.mark.parametrize(
    ("order", "key"),
    [("without_ties", r"\(7,\)"), ("nan_key", r"\(nan, 0.0, 0\)"), ("no_tuple", "0.0")],
)
def test_a_key_that_leaves_ties_to_chance(order: str, key: str) -> None:
    policy = policy_with(f"{HERE}.{order}")
    with pytest.raises(ValueError, match=rf"{order}' must return a tuple that ends in.*got {key}$"):
        policy.submit(Job("r", 0.0, 7, 10), 0.0)


def test_an_order_that_fails_is_named() -> None:
    policy = policy_with(f"{HERE}.no_such_field")
    with pytest.raises(OrderError, match=r"no_such_field' failed on Job\(.*has no attribute"):
        policy.submit(Job("r", 0.0, 7, 10), 0.0)


def test_an_order_cannot_end_the_program() -> None:
    policy = policy_with(f"{HERE}.leaves")
    with pytest.raises(OrderError, match=r"leaves' failed on Job\(.*SystemExit"):
        policy.submit(Job("r", 0.0, 7, 10), 0.0)


def test_keys_that_cannot_be_compared() -> None:
    policy = policy_with(f"{HERE}.text_or_number")
    policy.submit(Job("r", 0.0, 7, 10), 0.0)
    with pytest.raises(OrderError, match=r"numbers and text only, in the same places.*got \('a', "):
        policy.submit(Job("s", 0.0, 8, 10), 0.0)


@pytest.mark.parametrize("content", ["def f(:", "raise RuntimeError('no')", "raise SystemExit(3)"])
def test_a_module_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    name = f"broken_orders_{len(content)}"
    (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"order '{name}.f' cannot be imported: "):
        policy_with(f"{name}.f")
