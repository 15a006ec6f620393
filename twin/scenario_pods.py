"""Pods of a scenario file as data: how they start, are probed, go, and where they run. Times are seconds."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from twin.scenario_distributions import (
    ExponentialTime,
    Instant,
    LognormalTime,
    Name,
    Section,
    Share,
    UniformTime,
    by_key,
)

Whole = Annotated[int, Field(ge=0, le=10**6)]


class TriangularTime(Section):
    """A time between two, with one that is most likely."""

    triangular: Annotated[list[Instant], Field(min_length=3, max_length=3)]
    """[shortest, most likely, longest], seconds."""

    @model_validator(mode="after")
    def _ordered(self) -> "TriangularTime":
        low, mode, high = self.triangular
        if not low <= mode <= high:
            raise ValueError(
                f"must ascend: [shortest, most likely, longest], got {self.triangular}"
            )
        return self


PhaseTime = Annotated[
    Annotated[Instant, Tag("[number]")]
    | Annotated[TriangularTime, Tag("[triangular]")]
    | Annotated[ExponentialTime, Tag("[exponential]")]
    | Annotated[UniformTime, Tag("[uniform]")]
    | Annotated[LognormalTime, Tag("[lognormal]")],
    by_key("triangular", "uniform", "lognormal", "exponential", number=True),
]


class Phases(Section):
    """How long each phase of a start takes; None = the published figure for the model and storage."""

    image: PhaseTime | None = None
    """Pulling the image."""
    process: PhaseTime | None = None
    """Container and Python, up to the engine's configuration."""
    weights: PhaseTime | None = None
    compile: PhaseTime | None = None
    """Tracing and compilation."""
    graphs: PhaseTime | None = None
    """Capturing CUDA graphs."""
    warm_up: PhaseTime | None = None
    """The rest until the server answers."""


class ColdStart(Section):
    """How long a new replica takes until it serves."""

    storage: Literal["gp3", "gp3-streamer", "io2-streamer", "nvme"] = "nvme"
    """Where the weights are read from: 0.34, 1.1, 2.1 or 3 GB/s."""
    image: Literal["cached", "pull"] = "cached"
    """pull = the node has no image yet."""
    compile_cache: Literal["cold", "cached"] = "cold"
    """cached = vLLM finds what it compiled before."""
    initial: Literal["warm", "cold"] = "warm"
    """warm = the replicas of the beginning are Ready at 0; cold = they start then."""
    phases: Phases = Phases()


class Probe(Section):
    """A startup or liveness probe of the container, in Kubernetes' keys."""

    initialDelaySeconds: Whole = 0
    periodSeconds: Annotated[int, Field(ge=1, le=3600)] = 10
    failureThreshold: Annotated[int, Field(ge=1, le=10_000)] = 3


class ReadinessProbe(Section):
    """A readiness probe. A server that serves goes on serving, so that there is no failureThreshold."""

    initialDelaySeconds: Whole = 0
    periodSeconds: Annotated[int, Field(ge=1, le=3600)] = 10
    successThreshold: Annotated[int, Field(ge=1, le=100)] = 1


class Probes(Section):
    """The probes of the container, just those that are written: without readiness a pod that runs is Ready at once."""

    startup: Probe | None = None
    liveness: Probe | None = None
    readiness: ReadinessProbe | None = None


class Pod(Section):
    """What all pods have in common."""

    pods_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """A replica of several pods is one server over several nodes (LeaderWorkerSet); replicas are counted, not pods."""
    pre_stop: Instant = 0.0
    """Sleep of the preStop hook, before vLLM is told to stop."""
    shutdown_timeout: Instant = 0.0
    """vLLM's --shutdown-timeout: how long it goes on with what runs; 0 = it aborts."""
    termination_grace_period: Instant = 30.0
    """From the deletion to the kill."""
    endpoint_lag: Instant = 0.0
    """How long after its deletion requests still come to a pod."""
    priority_class: Name | None = None
    gpu_products: Annotated[list[Name], Field(min_length=1)] | None = None
    """Values of the label nvidia.com/gpu.product that its node affinity takes; None = any."""
    tolerates_gpu_taint: bool = True


class Nodes(Section):
    """The GPU nodes; without this section there is always room."""

    gpus: Annotated[int, Field(ge=1, le=64)] = 8
    """Of one node."""
    initial: Annotated[int, Field(ge=0, le=10_000)] = 1
    max: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """None = as many as at the beginning."""
    provision: PhaseTime | None = None
    """From the order of a node until it takes pods; None = around 240 s."""
    remove_after: Instant | None = None
    """A node beyond `initial` goes when it has been empty so long; None = it stays."""
    gpu_product: Name | None = None
    """Value of their label nvidia.com/gpu.product."""
    has_gpu_taint: bool = False
    """Whether pods need a toleration."""

    @model_validator(mode="after")
    def _ordered(self) -> "Nodes":
        if self.max is not None and self.max < self.initial:
            raise ValueError(f"max must be >= initial ({self.initial}), got {self.max}")
        return self


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _pods_or_share(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,4}%?", text):
        raise ValueError(
            f"must be a number of pods such as 1, or a share such as 25%, got {text!r}"
        )
    return text


PodsOrShare = Annotated[
    str,
    BeforeValidator(_as_text),
    AfterValidator(_pods_or_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 9999},
                {"type": "string", "pattern": "^[0-9]{1,4}%?$"},
            ]
        }
    ),
]
"""Kubernetes' IntOrString: 1, "1" or "25%"."""


class RollingUpdate(Section):
    """A new revision of the deployment."""

    at: Instant
    max_surge: PodsOrShare = "25%"
    """Pods beyond the replicas: a number, or a share, rounded up."""
    max_unavailable: PodsOrShare = "25%"
    """Pods that may be missing: a number, or a share, rounded down. Not 0 where max_surge is 0."""

    @model_validator(mode="after")
    def _moves(self) -> "RollingUpdate":
        if {self.max_surge.rstrip("%").strip("0"), self.max_unavailable.rstrip("%").strip("0")} == {
            ""
        }:
            raise ValueError(
                "max_unavailable must not be 0 where max_surge is 0: the API server refuses it, as no pod could be "
                f"replaced; got {self.max_surge} and {self.max_unavailable}"
            )
        return self


class WarmPool(Section):
    """What is kept ready before anybody asks for it: sleeping pods, and pods that keep nodes."""

    standby: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Pods that have started and sleep, on GPUs of their own; one that is claimed is replaced by a cold start."""
    claim_probability: Share = 1.0
    """That a sleeper can be claimed for a new replica; else it starts cold."""
    first_wake: PhaseTime = 3.0
    """From the claim until the server answers, for a sleeper that never served."""
    wake: PhaseTime = 3.0
    """The same for one that has served before (returns)."""
    returns: bool = False
    """Whether a replica that is not needed any more goes to sleep in the place of a sleeper that still starts."""
    placeholders: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Pods of low priority that keep the nodes of one replica each, with its image, and give way to any other pod."""

    @model_validator(mode="after")
    def _used(self) -> "WarmPool":
        if not self.standby and not self.placeholders:
            raise ValueError("keeps nothing: set standby or placeholders")
        if not self.standby:
            for key in ("claim_probability", "first_wake", "wake", "returns"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key}: changes nothing without standby")
        if not self.returns and self.wake != type(self).model_fields["wake"].default:
            raise ValueError(
                "wake: changes nothing without returns; first_wake is that of a sleeper that never served"
            )
        return self
