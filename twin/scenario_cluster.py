"""`cluster:` of a scenario file as data: replicas, pods, who scales them and by what.

Autoscaling objects stand in it as they are deployed: `hpa` is the spec of an autoscaling/v2 HorizontalPodAutoscaler,
`keda` that of a ScaledObject. Times are seconds.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from twin.scenario_distributions import (
    ExponentialTime,
    Instant,
    LognormalTime,
    Name,
    Seconds,
    Section,
    Share,
    UniformTime,
    by_key,
)

Replicas = Annotated[int, Field(ge=1, le=10_000)]
Whole = Annotated[int, Field(ge=0, le=10**6)]
Positive = Annotated[float, Field(gt=0, le=10**9)]
Period = Annotated[float, Field(ge=0.1, le=10**9)]
"""Seconds between two looks. No controller looks more often than ten times a second, and each look costs the run time:
far shorter ones would never come to its end."""


def _off_or_period(value: float) -> float:
    if 0 < value < 0.1:
        raise ValueError(f"must be 0, or >= 0.1 (no component looks more often), got {value:g}")
    return value


PeriodOrOff = Annotated[float, Field(ge=0, le=3600), AfterValidator(_off_or_period)]
"""As Period; 0 = not at all."""


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


class Controller(Section):
    """Flags of kube-controller-manager."""

    sync_period: Period = 15.0
    """At least 0.1 s: each look costs the run time, and no controller looks more often."""
    tolerance: Share = 0.1
    downscale_stabilization: Instant = 300.0


class Fault(Section):
    """Something on the path of the metrics is broken for a while."""

    kind: Literal["scrape", "frozen", "prometheus", "api", "empty", "nan"]
    """What is broken; docs/autoscaling.md tells what each does."""
    start: Instant
    until: Seconds
    pods: list[Whole] = Field(default=[])
    """Numbers of the pods it is about, for scrape and frozen; empty = all."""
    metric: Name | None = None
    """The metric or trigger it is about; None = all."""

    @model_validator(mode="after")
    def _ordered(self) -> "Fault":
        if self.until <= self.start:
            raise ValueError(f"until must be later than start ({self.start:g}), got {self.until:g}")
        if self.pods and self.kind not in ("scrape", "frozen"):
            raise ValueError(f"pods: only scrape and frozen are about pods, not {self.kind}")
        if self.metric and self.kind in ("scrape", "frozen"):
            raise ValueError(f"metric: {self.kind} is about pods, not about a metric")
        return self


class Metrics(Section):
    """How the state of replicas reaches the autoscaler."""

    scrape_interval: Annotated[float, Field(ge=0.1, le=3600)] = 15.0
    """At least 0.1 s: each scrape costs the run time, and Prometheus is not run faster."""
    rule_interval: PeriodOrOff = 0.0
    """Recording rules are evaluated that often, at least 0.1 s as for scrapes; 0 = queries look at the samples
    themselves."""
    queries: dict[Name, Annotated[str, Field(min_length=1, max_length=2000)]] = Field(default={})
    """Metric of the autoscaler -> PromQL. A metric with the name of one of vLLM's needs none."""
    faults: list[Fault] = Field(default=[])


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


class Ratio(Section):
    """AIBrix' PodAutoscaler, kpa or apa."""

    min_replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    max_replicas: Replicas
    query: Annotated[str, Field(min_length=1, max_length=2000)] = "vllm:num_requests_running"
    """Of a value for each pod."""
    target: Positive
    """Of that value, per pod."""
    period: Period = 10.0
    """Between two looks, at least 0.1 s: each costs the run time."""
    tolerance: Share = 0.1
    """Of apa."""
    max_rate: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """At most so many times the replicas at once, and at least the replicas divided by it."""
    up_cooldown: Instant = 0.0
    down_cooldown: Instant = 300.0
    stable_window: Seconds = 180.0
    """Of kpa."""
    panic_window: Seconds = 60.0
    """Of kpa."""
    panic_threshold: Positive = 2.0
    """Of kpa."""
    guard_pending: bool = False
    """Do not grow while pods are not Ready."""


class Saturation(Section):
    """llm-d's saturation rule."""

    min_replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    max_replicas: Replicas
    period: Period = 30.0
    """Between two looks, at least 0.1 s: each costs the run time."""
    kv_threshold: Share = 0.8
    queue_threshold: Positive = 5.0
    spare_kv: Share = 0.1
    spare_queue: Instant = 3.0


class Routing(Section):
    """What the router knows, and how far affinity goes."""

    poll_interval: Instant = 0.0
    """How often the state of the replicas is read, seconds; 0 = routers see it as it is."""
    routers: Annotated[int, Field(ge=1, le=1000)] = 1
    """Copies of the router; each knows what it sent itself, and requests come to one of them at random."""
    guard: Annotated[float, Field(ge=1, le=1000)] | None = 1.25
    """Affinity sends no request to a replica with more than this times the mean load; null = however loaded."""


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
    retry_after: Seconds | None = None
    """Seconds in the header Retry-After of a refusal."""


class Retries(Section):
    """What clients do whose request fails: they ask again after a back-off."""

    attempts: Annotated[int, Field(ge=2, le=1000)]
    """In all, the first included."""
    backoff: Seconds = 1.0
    """Before the second attempt."""
    multiplier: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Of the back-off, from one attempt to the next."""
    max_backoff: Seconds = 60.0
    jitter: Share = 0.5
    """Share of the back-off that is drawn."""
    outcomes: Annotated[list[Literal["refused", "aborted", "timed_out"]], Field(min_length=1)] = (
        Field(default=["refused", "aborted"])
    )
    """After which they ask again."""
    heeds_retry_after: bool = True
    give_up_after: Seconds | None = None
    """No attempt begins later than so long after the first."""


class ClusterFault(Section):
    """Something in the cluster breaks."""

    kind: Literal["crash", "gpu_loss", "slow", "partition", "spot_reclaim", "node_drain"]
    """What breaks; docs/cluster.md tells what each does."""
    at: Instant
    until: Seconds | None = None
    """When it is over; null = never. Of gpu_loss, slow, partition and node_drain."""
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
        lasting = ("gpu_loss", "slow", "partition", "node_drain")
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
