"""Capacity that is there before it is asked for, as data: what is kept, one piece of it, and what became of all.

A sleeper is a vLLM server that has been through its whole cold start and then sleeps (`--enable-sleep-mode`, /sleep) on
GPUs of its own until somebody claims it and wakes it. A placeholder is a pod of low priority with the server's image: a
pod that finds no node takes its place, and the image is there. Both are paid for.
"""

from dataclasses import dataclass

from twin.cluster.cold_start import NOTHING, PhaseTime


@dataclass(frozen=True)
class WarmPoolSpec:
    """What is kept ready."""

    standby: int = 0
    """Sleeping pods, those that are still starting included."""
    claim_probability: float = 1.0
    """That a sleeper can be claimed for a new replica: the activator is up, and node and GPU are the right ones."""
    first_wake: PhaseTime = NOTHING
    """From the claim until the server answers, for one that never served: kernels are compiled on the way."""
    wake: PhaseTime = NOTHING
    """The same for one that has served before."""
    returns: bool = False
    """Whether a replica that is not needed any more goes to sleep in the place of a sleeper that still starts."""
    placeholders: int = 0
    """Pods that keep the nodes of one replica each."""


@dataclass
class Reserve:
    """One sleeper or placeholder. Instants are picoseconds, None where not reached."""

    number: int
    """Among its kind, in the order of creation."""
    is_placeholder: bool
    created_ps: int
    placed_ps: int | None = None
    nodes: tuple[int, ...] = ()
    usable_ps: int | None = None
    """When it sleeps, or when a placeholder's image is there; in the future while it starts."""
    gone_ps: int | None = None
    """When it was claimed, had to give way or was removed."""
    has_served: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{'placeholder' if self.is_placeholder else 'standby'} {self.number}"

    def held_ps(self, end_ps: int) -> int:
        """How long it had its nodes until `end_ps`."""
        if self.placed_ps is None:
            return 0
        gone_ps = end_ps if self.gone_ps is None else min(self.gone_ps, end_ps)
        return max(0, gone_ps - self.placed_ps)


@dataclass(frozen=True)
class WarmHistory:
    """What the reserves did in a run."""

    claims: int
    """New replicas that asked for a sleeper."""
    woken: int
    """Of these, those that got one."""
    found_none: int
    """Those for which none slept: the pool was empty, or its sleepers were still starting."""
    unlucky: int
    """Those whose sleeper could not be claimed."""
    wakes_ps: tuple[int, ...]
    """From claim to answer, by claim."""
    refills_ps: tuple[int, ...]
    """From the need of a new sleeper until it slept: a whole cold start, and the wait for a node."""
    returned: int
    """Replicas that went back to sleep."""
    gave_way: int
    """Placeholders whose nodes a pod took."""
    standby_ps: int
    """Time in which sleepers had nodes, added up; times the GPUs of a replica it is what they cost."""
    placeholder_ps: int
