"""Which pods does a Deployment make and delete? Kubernetes' rules for replicas, rolling updates and who goes first."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rollout:
    """`strategy.rollingUpdate` with the replicas it is a share of put in."""

    surge: int
    """Pods beyond the replicas."""
    unavailable: int
    """Pods that may be missing."""


def rollout(replicas: int, max_surge: int | float, max_unavailable: int | float) -> Rollout:
    """Counts of `maxSurge` and `maxUnavailable`; floats are shares of the replicas, surge rounded up, the other down.

    Where both come to 0, one pod may be missing, as the Deployment controller decides.
    """
    surge = -int(-(max_surge * replicas) // 1) if isinstance(max_surge, float) else max_surge
    missing = (
        int(max_unavailable * replicas) if isinstance(max_unavailable, float) else max_unavailable
    )
    return Rollout(surge, missing if surge or missing else 1)


@dataclass(frozen=True)
class Member:
    """A pod that is not deleted, as the controller sees it."""

    number: int
    """In the order of creation."""
    is_new: bool
    """Of the revision that is wanted."""
    has_node: bool
    is_running: bool
    ready_since_ps: int | None
    """None = not Ready."""
    node: int | None = None
    restarts: int = 0


def first_to_go(members: Sequence[Member]) -> list[Member]:
    """The members in the order in which a ReplicaSet deletes them.

    Without a node before placed, pending before running, not Ready before Ready, crowded nodes before others, the
    shortest Ready first, more restarts first, the newest first.
    """
    crowd: dict[int | None, int] = {}
    for member in members:
        crowd[member.node] = crowd.get(member.node, 0) + 1
    return sorted(
        members,
        key=lambda m: (
            m.has_node,
            m.is_running,
            m.ready_since_ps is not None,
            -crowd[m.node] if m.node is not None else 0,
            -(m.ready_since_ps or 0),
            -m.restarts,
            -m.number,
        ),
    )


def plan(members: Sequence[Member], wanted: int, limits: Rollout) -> tuple[int, list[int]]:
    """(pods to create, numbers of pods to delete) now, given `wanted` replicas."""
    new = [member for member in members if member.is_new]
    old = [member for member in members if not member.is_new]
    if not old:
        surplus = len(new) - wanted
        return max(0, -surplus), [m.number for m in first_to_go(new)[: max(0, surplus)]]
    room = wanted + limits.surge - len(members)
    create = max(0, min(room, wanted - len(new)))
    surplus_new = [m.number for m in first_to_go(new)[: max(0, len(new) - wanted)]]
    return create, [*surplus_new, *_old_to_go(new, old, wanted - limits.unavailable)]


def _old_to_go(new: Sequence[Member], old: Sequence[Member], least: int) -> list[int]:
    """Pods of the old revision that may go while `least` pods stay available; unhealthy ones first."""
    not_ready = sum(m.ready_since_ps is None for m in new)
    budget = len(new) + len(old) - least - not_ready
    if budget <= 0:
        return []
    ranked = first_to_go(old)
    sick = [m.number for m in ranked if m.ready_since_ps is None][:budget]
    healthy = [m.number for m in ranked if m.ready_since_ps is not None]
    ready = len(healthy) + len(new) - not_ready
    return [*sick, *healthy[: max(0, min(ready - least, budget - len(sick)))]]
