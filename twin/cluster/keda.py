"""What does KEDA do beside the HPA that it makes? Polling, activation, cooldown, fallback, schedules.

KEDA itself moves a target only between 0 (or idleReplicaCount) and the first replica; from there on its HPA counts,
with one External metric a trigger. As in KEDA 2.21; see kedacore/keda, pkg/scaling/executor and pkg/fallback.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twin.clock import PS
from twin.cluster.cron import Cron
from twin.cluster.specs import Behavior, Failed, HpaSpec, MetricSpec, Reading, Total


@dataclass(frozen=True)
class QueryTrigger:
    """A trigger of type prometheus."""

    name: str
    query: str
    threshold: int
    """Target of the HPA's metric, thousandths."""
    activation_threshold: int = 0
    """Thousandths: above it the trigger is active."""
    target: str = "AverageValue"
    """metricType: AverageValue or Value."""
    ignore_null_values: bool = True
    """An empty answer is 0 and no failure."""


@dataclass(frozen=True)
class CronTrigger:
    """A trigger of type cron: a floor under the replicas between two times of a week."""

    name: str
    start: Cron
    end: Cron
    desired_replicas: int

    def is_active(self, minute: int) -> bool:
        """Whether `minute` (of the week, from Monday 00:00) lies between a start and the end after it."""
        return self.end.until_next(minute) < self.start.until_next(minute)


Trigger = QueryTrigger | CronTrigger


@dataclass(frozen=True)
class Fallback:
    """What counts while a trigger cannot be read."""

    failure_threshold: int
    """Failures in a row that are still an error; from the next on the fallback holds."""
    replicas: int
    behavior: str = "static"
    """static, currentReplicas, currentReplicasIfHigher or currentReplicasIfLower."""


@dataclass(frozen=True)
class KedaSpec:
    """`spec` of a ScaledObject."""

    triggers: tuple[Trigger, ...]
    min_replicas: int = 0
    max_replicas: int = 100
    idle_replicas: int | None = None
    polling_interval_ps: int = 30 * PS
    cooldown_ps: int = 300 * PS
    fallback: Fallback | None = None
    behavior: Behavior | None = None
    """Of the HPA."""

    def __post_init__(self) -> None:
        if not self.triggers:
            raise ValueError("triggers must not be empty")
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                "minReplicaCount must be >= 0 and <= maxReplicaCount, and maxReplicaCount >= 1, "
                f"got {self.min_replicas} and {self.max_replicas}"
            )
        if self.idle_replicas is not None and not self.idle_replicas < self.min_replicas:
            raise ValueError(
                f"idleReplicaCount must be < minReplicaCount ({self.min_replicas}), got {self.idle_replicas}"
            )
        if len({trigger.name for trigger in self.triggers}) < len(self.triggers):
            raise ValueError("two triggers have the same name")

    @property
    def hpa(self) -> HpaSpec:
        """The HPA that KEDA makes: it has no zero."""
        return HpaSpec(
            max(1, self.min_replicas),
            self.max_replicas,
            tuple(_metric(trigger) for trigger in self.triggers),
            self.behavior,
        )


def _metric(trigger: Trigger) -> MetricSpec:
    if isinstance(trigger, CronTrigger):
        return MetricSpec("External", trigger.name, "AverageValue", 1000)
    return MetricSpec("External", trigger.name, trigger.target, trigger.threshold)


@dataclass(frozen=True)
class KedaState:
    """What KEDA remembers."""

    last_active_ps: int | None = None
    """None = never active: then no cooldown is waited for."""
    failures: Mapping[str, int] | None = None
    """Trigger -> failures in a row of the answers its HPA asked for."""


@dataclass(frozen=True)
class Poll:
    """What one poll came to."""

    current: int
    desired: int
    reason: str
    state: KedaState
    is_active: bool


Answer = int | Failed | None
"""A query's value in thousandths, or why there is none; None = the answer was empty."""


def value_of(trigger: Trigger, answer: Answer, minute: int) -> int | Failed:
    """The trigger's metric in thousandths. A schedule needs no answer."""
    if isinstance(trigger, CronTrigger):
        return 1000 * (trigger.desired_replicas if trigger.is_active(minute) else 1)
    if answer is None:
        return 0 if trigger.ignore_null_values else Failed("the query returned nothing")
    return answer


def poll(
    spec: KedaSpec,
    state: KedaState,
    answers: Sequence[Answer],
    replicas: int,
    minute: int,
    now_ps: int,
) -> Poll:
    """One look of KEDA's own loop: `answers` are those to the triggers, `replicas` is spec.replicas of the target."""
    active = []
    failed = []
    for trigger, answer in zip(spec.triggers, answers, strict=True):
        if isinstance(trigger, CronTrigger):
            if trigger.is_active(minute):
                active.append(trigger.name)
            continue
        value = value_of(trigger, answer, minute)
        if isinstance(value, Failed):
            failed.append(trigger.name)
        elif value > trigger.activation_threshold:
            active.append(trigger.name)
    floor, idle, fallback = spec.min_replicas, spec.idle_replicas, spec.fallback
    if active:
        state = replace(state, last_active_ps=now_ps)
        desired, why = replicas, f"{active[0]} is active"
        if replicas == 0 or (idle is not None and replicas <= idle):
            desired = max(1, floor)
        return Poll(replicas, desired, why, state, True)
    if failed and fallback is None:
        return Poll(replicas, replicas, f"{failed[0]} cannot be read", state, False)
    if failed and fallback is not None and fallback.replicas:
        desired = _fallback_replicas(fallback, replicas)
        return Poll(replicas, desired, f"{failed[0]} cannot be read: fallback", state, False)
    bottom = idle if idle is not None else 0
    if replicas > bottom and (idle is not None or floor == 0):
        last = state.last_active_ps
        if last is None or last + spec.cooldown_ps < now_ps:
            never = "no trigger was ever active, so that no cooldown is waited for"
            why = never if last is None else "no trigger active for the cooldown"
            return Poll(replicas, bottom, why, state, False)
        return Poll(replicas, replicas, "cooling down", state, False)
    if idle is None and replicas < floor:
        return Poll(replicas, floor, "below minReplicaCount", state, False)
    return Poll(replicas, replicas, "no trigger active", state, False)


def readings(
    spec: KedaSpec,
    state: KedaState,
    answers: Sequence[Answer],
    replicas: int,
    ready: int,
    minute: int,
) -> tuple[list[Reading], KedaState]:
    """(what KEDA's metrics API answers its HPA, what to remember).

    Failures in a row beyond the threshold become the fallback.
    """
    counts = dict(state.failures or {})
    found: list[Reading] = []
    for trigger, answer in zip(spec.triggers, answers, strict=True):
        value = value_of(trigger, answer, minute)
        if not isinstance(value, Failed):
            counts[trigger.name] = 0
            found.append(Total((value,)))
            continue
        counts[trigger.name] = counts.get(trigger.name, 0) + 1
        fallback = spec.fallback
        if fallback is None or counts[trigger.name] <= fallback.failure_threshold:
            found.append(value)
        else:
            found.append(_fallback(fallback, _metric(trigger), replicas, ready))
    return found, replace(state, failures=counts)


def _fallback_replicas(fallback: Fallback, replicas: int) -> int:
    if fallback.behavior == "currentReplicas":
        return replicas
    if fallback.behavior == "currentReplicasIfHigher":
        return max(replicas, fallback.replicas)
    if fallback.behavior == "currentReplicasIfLower":
        return min(replicas, fallback.replicas)
    return fallback.replicas


def _fallback(fallback: Fallback, metric: MetricSpec, replicas: int, ready: int) -> Reading:
    """The value at which the HPA asks for the fallback's replicas: Value targets are divided by the ready pods."""
    wanted = _fallback_replicas(fallback, replicas)
    if metric.target == "AverageValue":
        return Total((metric.value * wanted,))
    if not ready:
        return Failed("a fallback of a Value target needs a ready pod")
    return Total((-(-metric.value * wanted // ready),))
