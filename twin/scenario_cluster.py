"""`cluster:` of a scenario file as data: replicas, pods, who scales them and by what.

Autoscaling objects stand in it as they are deployed: `hpa` is the spec of an autoscaling/v2 HorizontalPodAutoscaler,
`keda` that of a ScaledObject. Times are seconds.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from twin.scenario_breakage import ClusterFault
from twin.scenario_clients import Retries
from twin.scenario_distributions import Instant, Name, Seconds, Section
from twin.scenario_pods import (
    ColdStart,
    Nodes,
    Pod,
    Probes,
    ReadinessProbe,
    RollingUpdate,
    WarmPool,
)
from twin.scenario_scaling import (
    Controller,
    Metrics,
    Positive,
    Prediction,
    Ratio,
    Saturation,
    Schedule,
)


class Ejection(Section):
    """Outlier detection by consecutive errors, with Envoy's names and defaults."""

    consecutive_5xx: Annotated[int, Field(ge=1, le=10**6)] = 5
    """Errors of a replica in a row, without a success between."""
    interval: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    """An ejection ends at one of its multiples; each without an ejection takes one off the count of ejections."""
    base_ejection_time: Annotated[float, Field(ge=0.1, le=10**6)] = 30.0
    """Times the number of ejections that count."""
    max_ejection_time: Annotated[float, Field(ge=0.1, le=10**6)] = 300.0
    max_ejection_percent: Annotated[int, Field(ge=0, le=100)] = 10
    """Of the replicas; one may always be ejected."""
    healthy_panic_threshold: Annotated[int, Field(ge=0, le=100)] = 50
    """Percent of the replicas: where fewer are left, requests go to all."""


class Routing(Section):
    """What the router knows, and how far affinity goes."""

    poll_interval: Instant = 0.0
    """How often the state of the replicas is read, seconds; 0 = routers see it as it is."""
    routers: Annotated[int, Field(ge=1, le=1000)] = 1
    """Copies of the router; each knows what it sent itself, and requests come to one of them at random."""
    guard: Annotated[float, Field(ge=1, le=1000)] | None = 1.25
    """Affinity sends no request to a replica with more than this times the mean load; null = however loaded."""
    stale_after: Seconds | None = None
    """State of a replica that was read longer ago is stale; null = routers go by it however old it is."""
    when_stale: Literal["avoid", "refuse"] | None = None
    """avoid = a stale replica gets requests only where none is fresh; refuse = then they are refused; null = avoid."""
    ejection: Ejection | None = None
    """Replicas that fail are left out for a while; null = never."""

    @model_validator(mode="after")
    def _used(self) -> "Routing":
        if self.when_stale is not None and self.stale_after is None:
            raise ValueError("when_stale: changes nothing without stale_after")
        return self


class Limits(Section):
    """Limits of the gateway, of all requests or of those of one tier; null = none."""

    max_inflight: Annotated[int, Field(ge=1, le=10**7)] | None = None
    """Requests sent to replicas that have not ended; further ones wait at the gateway."""
    max_queue: Annotated[int, Field(ge=0, le=10**7)] | None = None
    """Requests that wait at the gateway; further ones are refused."""
    rate: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    """Requests a second that a token bucket lets in."""
    burst: Annotated[int, Field(ge=1, le=10**7)] = 1
    """Requests that a full bucket lets in at once."""
    retry_after: Seconds | None = None
    """Seconds in the header Retry-After of a refusal; null = that of all requests, or none."""

    @model_validator(mode="after")
    def _used(self) -> "Limits":
        if self.burst != 1 and self.rate is None:
            raise ValueError(f"burst: {self.burst} changes nothing without rate")
        return self


class Admission(Limits):
    """What the gateway lets through to the replicas."""

    max_inflight_per_replica: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """max_inflight as a multiple of the replicas that take requests."""
    max_inflight_tokens: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Prompt and declared output tokens of all requests in flight; a larger request goes alone."""
    max_wait: Seconds | None = None
    """A request that has waited so long at the gateway is refused."""
    order: list[Name] = Field(default=[])
    """Tiers from the first to the last to be sent on from the queue, and the other way round to be shed."""
    tiers: dict[Name, Limits] = Field(default={})
    """Limits by tier, beside those of all."""


_DAYS = "|".join(
    "".join(f"[{c.upper()}{c}]" for c in day)
    for day in ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
)
_TIME_OF_WEEK = rf"^({_DAYS}) ([01][0-9]|2[0-3]):[0-5][0-9]$"


class Cluster(Section):
    """Where requests go."""

    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """At the beginning; an autoscaler changes them."""
    router: Name = "least_connections"
    """Name in twin.cluster.routers.ROUTERS."""
    routing: Routing = Routing()
    admission: Admission | None = None
    """None = the gateway sends everything on at once."""
    retries: Retries | None = None
    """None = clients do not ask again."""
    hpa: Any = None
    """`spec` of an autoscaling/v2 HorizontalPodAutoscaler, or the name of a file that holds one."""
    hpa_rivals: list[Name] = Field(default=[])
    """Other HPAs whose target selects the same pods: then none of them scales."""
    keda: Any = None
    """`spec` of a KEDA ScaledObject, or the name of a file that holds one."""
    apa: Ratio | None = None
    kpa: Ratio | None = None
    saturation: Saturation | None = None
    controller: Controller = Controller()
    metrics: Metrics = Metrics()
    cold_start: ColdStart | None = None
    """None = without probes and an autoscaler nothing starts; else the published figures of a local NVMe disk."""
    probes: Probes = Probes(readiness=ReadinessProbe(periodSeconds=5))
    """Without this section there is one probe: readiness, every 5 s."""
    pod: Pod = Pod()
    priority_classes: list[Name] = Field(default=[])
    """PriorityClasses of the cluster beside the two it always has."""
    nodes: Nodes | None = None
    warm_pool: WarmPool | None = None
    """None = nothing is kept ready."""
    schedules: list[Schedule] = Field(default=[])
    prediction: Prediction | None = None
    """None = nobody looks ahead."""
    rolling_updates: list[RollingUpdate] = Field(default=[])
    faults: list[ClusterFault] = Field(default=[])
    holds_requests: bool = False
    """Whether the gateway keeps requests while no pod is Ready; else it refuses them."""
    start: Annotated[str, Field(json_schema_extra={"pattern": _TIME_OF_WEEK})] = "Mon 00:00"
    """Day and time of the week at second 0, for schedules: Mon to Sun in any case, and HH:MM."""
    price_per_gpu_hour: Positive | None = None
    """In any currency; None = GPU-hours only."""

    @field_validator("start")
    @classmethod
    def _is_time_of_week(cls, text: str) -> str:
        if not re.fullmatch(_TIME_OF_WEEK, text):
            raise ValueError(
                f"must be a day and a time of day such as Mon 08:50, with Mon to Sun and 00:00 to 23:59, got {text!r}"
            )
        return text.capitalize()
