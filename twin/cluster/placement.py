"""The nodes of a fleet on the simulation's clock: who gets one, when more are ordered, when empty ones go.

Without a node pool there is always room.
"""

from collections.abc import Callable, Sequence
from functools import partial

from twin.cluster.fleet_log import FleetLog
from twin.cluster.nodes import NodePool, Nodes
from twin.cluster.timer import Timer


class Placement:
    """Gives nodes to whatever asks for those of one replica; `provision` draws how long an ordered node takes.

    `on_node` is called when a node has come.
    """

    def __init__(
        self,
        timer: Timer,
        nodes: Nodes | None,
        gpus: int,
        pods_per_replica: int,
        provision: Callable[[], int] | None,
        log: FleetLog,
        on_node: Callable[[], None],
    ) -> None:
        self._timer = timer
        self._pool = None if nodes is None else NodePool(nodes)
        self._gpus = gpus
        self._pods_per_replica = pods_per_replica
        self._provision = provision
        self._log = log
        self._on_node = on_node

    def take(self) -> tuple[int, ...] | None:
        """The nodes of one more replica, none where there is always room; None = they do not fit."""
        if self._pool is None:
            return ()
        return self._pool.take(self._gpus, self._pods_per_replica)

    def shortage(self, replicas: int) -> str | None:
        """What the scheduler says of so many replicas that do not all fit; None where there is always room."""
        if self._pool is None:
            return None
        wanted = replicas * self._gpus * self._pods_per_replica
        return f"Insufficient nvidia.com/gpu: {wanted} wanted, {self._pool.num_gpus} there"

    def order(self, waiting: int) -> None:
        """Order nodes for so many replicas that wait for one, beside those on their way."""
        if not waiting or self._pool is None:
            return
        for _ in range(self._pool.missing(waiting * self._pods_per_replica, self._gpus)):
            self._pool.ordered += 1
            assert self._provision is not None
            self._timer.at(self._provision(), self._node_comes)

    def _node_comes(self) -> None:
        assert self._pool is not None
        self._pool.ordered -= 1
        number = self._pool.add()
        self._log.event(self._timer.now_ps, None, "node", f"node {number} is there")
        self._on_node()

    def give(self, nodes: Sequence[int]) -> None:
        """A replica leaves its nodes."""
        if self._pool is None or not nodes:
            return
        self._pool.give(tuple(nodes), self._gpus)
        limit_ps = self._pool.spec.remove_after_ps
        if limit_ps is None:
            return
        now_ps = self._timer.now_ps
        for number in set(nodes):
            if self._pool.is_empty(number):
                self._pool.emptied[number] = now_ps
                self._timer.at(limit_ps, partial(self._remove, number, now_ps))

    def _remove(self, number: int, since_ps: int) -> None:
        pool = self._pool
        assert pool is not None
        still = pool.is_empty(number) and pool.emptied.get(number) == since_ps
        if still and len(pool.free) > pool.spec.initial:
            pool.remove(number)
            self._log.event(self._timer.now_ps, None, "node", f"node {number} is gone")

    def cordon(self, node: int, is_lost: bool) -> None:
        """The node takes nobody any more; if lost, it is gone with the last that is on it."""
        if self._pool is not None and node in self._pool.free:
            self._pool.cordoned.add(node)
            if is_lost:
                self._pool.lost.add(node)
            self._log.event(self._timer.now_ps, None, "node", f"node {node} takes no more pods")

    def uncordon(self, node: int) -> None:
        """The node takes pods again."""
        if self._pool is not None:
            self._pool.cordoned.discard(node)

    def takes_pods(self, nodes: Sequence[int]) -> bool:
        """Whether none of these nodes is cordoned."""
        return self._pool is None or not self._pool.cordoned.intersection(nodes)
