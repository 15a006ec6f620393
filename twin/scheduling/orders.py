"""Orders of the ready queue: (job, view) -> sort key, smallest first.

A key is computed when a job enters the queue and stays until it moves up a rank, so an order must not depend on the
time. It ends in (arrival, seq), which makes it unique. To add one, write a function here and name it in ORDERS, or
give the dotted path of a function of your own in the scenario.
"""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from twin.scheduling.job import Job

LENGTH_BOUNDS = (256, 1024, 4096)
"""Sizes (tokens) that part short, medium, long and very long jobs in order `length`."""


class View(Protocol):
    """What an order may look at beside the job itself."""

    def expected_output(self, job: Job) -> int:
        """Output tokens the estimator expected when the job was submitted."""

    def service(self, tenant: str) -> int:
        """Weighted tokens charged to a tenant so far, in thousandths."""

    def tag(self, job: Job) -> int:
        """Start tag of fair queueing: when its tenant's share is used up to this job."""

    def due(self, job: Job) -> float:
        """When its first token is due: its own deadline, else arrival + ttft_target of its tier, else never."""


Order = Callable[[Job, View], tuple[Any, ...]]


class OrderError(ValueError):
    """A user's order has failed or returned no usable key; the message names it."""


def fcfs(job: Job, view: View) -> tuple[Any, ...]:
    """First come, first served."""
    return (job.arrival, job.seq)


def edf(job: Job, view: View) -> tuple[Any, ...]:
    """Earliest due first token first."""
    return (view.due(job), job.arrival, job.seq)


def length(job: Job, view: View) -> tuple[Any, ...]:
    """Shorter length group first, first come within a group."""
    size = job.prompt_tokens + view.expected_output(job)
    return (sum(size >= bound for bound in LENGTH_BOUNDS), job.arrival, job.seq)


def shortest(job: Job, view: View) -> tuple[Any, ...]:
    """Fewest tokens (prompt plus expected output) first."""
    return (job.prompt_tokens + view.expected_output(job), job.arrival, job.seq)


def fair(job: Job, view: View) -> tuple[Any, ...]:
    """Start-time fair queueing over tenants."""
    return (view.tag(job), job.arrival, job.seq)


ORDERS: dict[str, Order] = {
    "fcfs": fcfs,
    "edf": edf,
    "length": length,
    "shortest": shortest,
    "fair": fair,
}


def resolve_order(name: str) -> Order:
    """The order called `name`, or the function at the dotted path `name`. Raises ValueError if there is none."""
    if name in ORDERS:
        return ORDERS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"order {name!r} is not one of {', '.join(ORDERS)} and no dotted path of a function"
        )
    try:
        order = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a user's module may do
        reason = error if isinstance(error, ImportError | AttributeError) else repr(error)
        raise ValueError(f"order {name!r} cannot be imported: {reason}") from error
    if not callable(order):
        raise ValueError(f"order {name!r} is not a function but {type(order).__name__}")
    return _checked(name, order)


def _checked(name: str, order: Order) -> Order:
    """A user's order, its keys checked.

    Without (arrival, seq) at the end ties would be left to chance; text where another key has a number cannot be
    compared with it.
    """
    shape: list[bool] = []  # of the first key: which parts are text

    def checked(job: Job, view: View) -> tuple[Any, ...]:
        try:
            key = order(job, view)
        except (Exception, SystemExit) as error:
            raise OrderError(f"order {name!r} failed on {job}: {error!r}") from error
        if (
            not isinstance(key, tuple)
            or key[-2:] != (job.arrival, job.seq)
            or any(isinstance(part, float) and math.isnan(part) for part in key)
        ):
            raise OrderError(
                f"order {name!r} must return a tuple that ends in (job.arrival, job.seq) "
                f"and holds no NaN, got {key!r}"
            )
        kinds = [isinstance(part, str) for part in key]
        is_plain = all(isinstance(part, int | float | str) for part in key)
        if not is_plain or kinds != (shape or kinds):
            raise OrderError(
                f"order {name!r} must return numbers and text only, in the same places each time, got {key!r}"
            )
        shape[:] = kinds
        return key

    return checked
