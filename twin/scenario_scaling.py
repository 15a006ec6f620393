"""Who scales the replicas of a scenario file, and by what, as data. Times are seconds."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from twin.scenario_distributions import Instant, Name, Seconds, Section, Share
from twin.scenario_pods import Whole

Replicas = Annotated[int, Field(ge=1, le=10_000)]
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


class Schedule(Section):
    """A floor under the replicas at certain times of the week."""

    start: Annotated[str, Field(min_length=1, max_length=100)]
    """Cron: minute hour * * weekday, in the time of cluster.start."""
    end: Annotated[str, Field(min_length=1, max_length=100)]
    """Likewise; from a start to the end after it the floor holds."""
    min_replicas: Replicas


class Prediction(Section):
    """Replicas by what is expected: a forecast of the rate at which requests come to the gateway."""

    forecaster: Name
    """last_value, seasonal_naive, before_peak, holt_winters, or the dotted path of a function of your own."""
    per_replica: Annotated[float, Field(ge=1e-6, le=10**9)]
    """Requests a second that one replica takes."""
    drives: Literal["floor", "metric", "alone"] = "floor"
    """floor = the autoscaler's minimum; metric = an external metric that it reads; alone = there is no autoscaler."""
    metric: Name | None = None
    """Name of that metric, in requests a second."""
    min_replicas: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Of alone; null = 1."""
    max_replicas: Replicas | None = None
    """Of alone, which needs it."""
    interval: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """Over which requests are counted; after each there is a forecast."""
    horizon: Annotated[float, Field(ge=1, le=10**7)] = 600.0
    """How far ahead the highest expected rate counts: as long as a start, and more."""
    season: Annotated[float, Field(ge=1, le=10**7)] = 86_400.0
    history: Annotated[list[Instant], Field(max_length=200_000)] = Field(default=[])
    """Rates a second of the intervals before the run, oldest first, or the name of a file with one a line."""

    @model_validator(mode="after")
    def _fits(self) -> "Prediction":
        if (self.metric is not None) != (self.drives == "metric"):
            raise ValueError(
                "metric: is missing; drives: metric needs its name"
                if self.metric is None
                else f"metric: only drives: metric has one, not {self.drives}"
            )
        for key in ("min_replicas", "max_replicas"):
            if getattr(self, key) is not None and self.drives != "alone":
                raise ValueError(f"{key}: the autoscaler has its own; only drives: alone needs it")
        if self.drives == "alone" and self.max_replicas is None:
            raise ValueError("max_replicas: is missing; drives: alone needs it")
        if self.min_replicas is not None and self.min_replicas > (self.max_replicas or 0):
            raise ValueError(
                f"min_replicas must be <= max_replicas ({self.max_replicas}), got {self.min_replicas}"
            )
        if self.season < self.interval or self.horizon < self.interval:
            raise ValueError(f"season and horizon must be >= interval ({self.interval:g})")
        return self
