"""What breaks in the cluster of a scenario file, and when, as data. Times are seconds."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from twin.scenario_distributions import Instant, Seconds, Section
from twin.scenario_pods import Whole


class ClusterFault(Section):
    """Something in the cluster breaks."""

    kind: Literal["crash", "gpu_loss", "slow", "partition", "stale", "spot_reclaim", "node_drain"]
    """What breaks; docs/cluster.md tells what each does."""
    at: Instant
    until: Seconds | None = None
    """When it is over; null = never. Of gpu_loss, slow, partition, stale and node_drain."""
    pods: list[Whole] = Field(default=[])
    """Numbers of the pods it strikes; empty = all that are there. Not of node_drain."""
    node: Whole | None = None
    """Number of the node, of node_drain."""
    factor: Annotated[float, Field(gt=1, le=1000)] | None = None
    """How many times as long everything takes, of slow."""
    notice: Instant | None = None
    """Seconds from the notice to the end of the machine, of spot_reclaim; null = 120."""

    @model_validator(mode="after")
    def _fits(self) -> "ClusterFault":
        lasting = ("gpu_loss", "slow", "partition", "stale", "node_drain")
        for key, kinds in (
            ("until", lasting),
            ("node", ("node_drain",)),
            ("factor", ("slow",)),
            ("notice", ("spot_reclaim",)),
        ):
            if getattr(self, key) is not None and self.kind not in kinds:
                raise ValueError(f"{key}: only {', '.join(kinds)} has it, not {self.kind}")
        if self.until is not None and self.until <= self.at:
            raise ValueError(f"until must be later than at ({self.at:g}), got {self.until:g}")
        if self.pods and self.kind == "node_drain":
            raise ValueError("pods: node_drain is about a node; write node")
        for key, kind in (("node", "node_drain"), ("factor", "slow")):
            if self.kind == kind and getattr(self, key) is None:
                raise ValueError(f"{key}: is missing; {kind} needs it")
        return self
