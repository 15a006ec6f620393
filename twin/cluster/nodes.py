"""Which GPU node takes a pod, and when a new one is ordered.

Nodes are alike and hold whole GPUs. A pod goes to the fullest node that has room (so that nodes become free again); if
none has, a node is ordered unless as many are on their way as the waiting pods need, up to the limit.
"""

from dataclasses import dataclass, field

from twin.cluster.cold_start import NOTHING, PhaseTime


@dataclass(frozen=True)
class Nodes:
    """The node pool of a scenario."""

    gpus_per_node: int = 8
    initial: int = 1
    most: int = 1
    """Nodes at most; `initial` = they do not grow."""
    provision: PhaseTime = NOTHING
    """From the order of a node until pods can be placed on it."""
    remove_after_ps: int | None = None
    """A node beyond `initial` that is empty so long goes away; None = it stays."""


@dataclass
class NodePool:
    """Free GPUs of each node, by number."""

    spec: Nodes
    free: dict[int, int] = field(default_factory=dict)
    ordered: int = 0
    """Nodes on their way."""
    emptied: dict[int, int] = field(default_factory=dict)
    """Node -> when it became empty last."""
    cordoned: set[int] = field(default_factory=set)
    """Nodes that take no pods."""
    lost: set[int] = field(default_factory=set)
    """Cordoned nodes that are gone with the last of their pods."""
    _made: int = 0

    def __post_init__(self) -> None:
        for _ in range(self.spec.initial):
            self.add()

    def add(self) -> int:
        """A node is there; its number."""
        number, self._made = self._made, self._made + 1
        self.free[number] = self.spec.gpus_per_node
        return number

    @property
    def num_gpus(self) -> int:
        """GPUs of the nodes that are there and take pods."""
        return self.spec.gpus_per_node * len(self.free.keys() - self.cordoned)

    def take(self, gpus: int, pods: int) -> tuple[int, ...] | None:
        """The nodes of `pods` pods with so many GPUs each, all of them or, if they do not all fit, None."""
        chosen: list[int] = []
        free = {n: room for n, room in self.free.items() if n not in self.cordoned}
        for _ in range(pods):
            fitting = [(room, number) for number, room in free.items() if room >= gpus]
            if not fitting:
                return None
            _, number = min(fitting)
            free[number] -= gpus
            chosen.append(number)
        self.free |= free
        return tuple(chosen)

    def give(self, nodes: tuple[int, ...], gpus: int) -> None:
        """The pods on these nodes are gone."""
        for number in nodes:
            self.free[number] += gpus
        for number in set(nodes) & self.lost:
            if self.is_empty(number):
                self.remove(number)

    def missing(self, waiting_pods: int, gpus: int) -> int:
        """Nodes to order now for so many pods that wait, beside those on their way."""
        each = self.spec.gpus_per_node // gpus
        if not each:
            return 0
        room = sum(free // gpus for n, free in self.free.items() if n not in self.cordoned)
        needed = -(-max(0, waiting_pods - room) // each) - self.ordered
        return max(0, min(needed, self.spec.most - len(self.free) - self.ordered))

    def is_empty(self, number: int) -> bool:
        """Whether nothing runs there."""
        return self.free.get(number) == self.spec.gpus_per_node

    def remove(self, number: int) -> None:
        """The node goes away."""
        del self.free[number]
        self.cordoned.discard(number)
        self.lost.discard(number)
