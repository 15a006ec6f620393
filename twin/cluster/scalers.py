"""Autoscalers at work: each remembers what it must and says at each of its looks how many replicas there should be.

A scaler sees the cluster through a `View` only: pods as the API server shows them, metrics as the path delivers them.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from twin.clock import PS
from twin.cluster.autoscaler import reconcile
from twin.cluster.keda import Answer, KedaSpec, KedaState, QueryTrigger, poll, readings
from twin.cluster.metrics_path import pods_reading, total_reading, trigger_answer
from twin.cluster.promql import Vector
from twin.cluster.ratio_scalers import RatioSpec, RatioState, apa, kpa
from twin.cluster.saturation import Load, SaturationSpec, saturation
from twin.cluster.specs import (
    Controller,
    Decision,
    Failed,
    HpaSpec,
    MetricSpec,
    Pod,
    Reading,
    Scale,
    ScalingLog,
)


@dataclass(frozen=True)
class View:
    """What a scaler may look at."""

    now_ps: int
    minute: int
    """Of the week, from Monday 00:00."""
    pods: Sequence[Pod]
    """Those that the target's selector matches."""
    scale: Scale
    ready: int
    """Pods that are Ready and not deleted."""
    ask: Callable[[str], Vector | Failed]
    """Answer of the metrics path to a metric or trigger."""
    floor: int = 0
    """Replicas that a schedule or a forecast wants at least: it raises the minimum, up to the maximum."""
    floor_of: str = ""
    """Who wants them, for people; empty = nobody."""
    no_forecast: str = ""
    """Why there is no forecast where one is asked for; empty = there is one, or none is asked for."""

    def raised(self, least: int, most: int) -> int:
        """The minimum of an autoscaler whose bounds these are."""
        return max(least, min(self.floor, most))

    def told(self, look: "Look", least: int, most: int) -> "Look":
        """The look of such an autoscaler, with the part of the floor in its reason."""
        raised = self.raised(least, most)
        if raised == least or look.desired > raised:
            return look
        cut = f", of which the maximum leaves {most}" if self.floor > most else ""
        says = f"{self.floor_of} wants {self.floor} at least{cut}"
        return replace(look, reason=f"{look.reason}; {says}")


@dataclass(frozen=True)
class Look:
    """One look of a scaler, and what it came to."""

    at_ps: int
    scaler: str
    current: int
    desired: int
    reason: str
    proposed: int | None = None
    """Before stabilisation and limits, where there are such."""
    stabilized: int | None = None
    limit: str = ""
    """Which limit cut it; empty if none did."""
    metric: str | None = None
    """Whose proposal won."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Metric -> what it showed, in its own unit."""
    proposals: Mapping[str, int | None] = field(default_factory=dict)
    """Metric -> replicas that it alone asks for; None = it could not be read."""
    error: str | None = None
    """A metric that could not be read."""
    ready: int = 0
    """Pods that were Ready when it looked, before what it decided."""


class Scaler(Protocol):
    """Something that decides about replicas."""

    @property
    def loops(self) -> Mapping[str, int]:
        """Name of each of its loops -> its period in picoseconds."""

    def look(self, loop: str, view: View) -> Look:
        """One look of that loop."""


class HpaScaler:
    """A HorizontalPodAutoscaler, reading metrics through an adapter."""

    def __init__(self, spec: HpaSpec, controller: Controller, rivals: Sequence[str] = ()) -> None:
        self._spec = spec
        self._controller = controller
        self._rivals = tuple(rivals)
        self._log = ScalingLog()
        self.loops = {"hpa": controller.sync_period_ps}

    def look(self, loop: str, view: View) -> Look:
        answers = [_reading(metric, view) for metric in self._spec.metrics]
        return self._decide(self._spec, answers, view, loop)

    def _decide(self, spec: HpaSpec, answers: Sequence[Reading], view: View, name: str) -> Look:
        least_of_its_own = spec.min_replicas
        least = view.raised(least_of_its_own, spec.max_replicas)
        spec = replace(spec, min_replicas=least)
        decision = reconcile(
            spec,
            self._log,
            answers,
            view.pods,
            view.scale,
            view.now_ps,
            self._controller,
            self._rivals,
        )
        self._log = decision.log
        look = _told(decision, spec, view.now_ps, name)
        return view.told(look, least_of_its_own, spec.max_replicas)


def _reading(metric: MetricSpec, view: View) -> Reading:
    answer = view.ask(metric.name)
    if metric.kind == "Pods":
        return pods_reading(answer, view.now_ps)
    return total_reading(answer, metric.kind == "External")


def _told(decision: Decision, spec: HpaSpec, now_ps: int, name: str) -> Look:
    values = {
        proposal.metric: proposal.current / 1000
        for proposal in decision.proposals
        if proposal.current is not None
    }
    return Look(
        now_ps,
        name,
        decision.current,
        decision.desired,
        decision.reason,
        decision.proposed,
        decision.stabilized,
        "" if decision.limit == "DesiredWithinRange" else decision.limit,
        decision.metric,
        values,
        {proposal.metric: proposal.replicas for proposal in decision.proposals},
        decision.error,
    )


class KedaScaler(HpaScaler):
    """A ScaledObject: KEDA's own loop between 0 and 1, and the HPA that it makes."""

    def __init__(self, keda: KedaSpec, controller: Controller) -> None:
        super().__init__(keda.hpa, controller)
        self._keda = keda
        self._state = KedaState()
        self.loops = {"keda": keda.polling_interval_ps, "hpa": controller.sync_period_ps}

    def look(self, loop: str, view: View) -> Look:
        answers = [self._answer(trigger.name, view) for trigger in self._keda.triggers]
        replicas = view.scale.replicas
        if loop == "keda":
            least = view.raised(self._keda.min_replicas, self._keda.max_replicas)
            keda = replace(self._keda, min_replicas=least)
            found = poll(keda, self._state, answers, replicas, view.minute, view.now_ps)
            self._state = found.state
            look = Look(view.now_ps, loop, found.current, found.desired, found.reason)
            return view.told(look, self._keda.min_replicas, self._keda.max_replicas)
        given, self._state = readings(
            self._keda, self._state, answers, replicas, view.ready, view.minute
        )
        return self._decide(self._keda.hpa, given, view, loop)

    def _answer(self, name: str, view: View) -> Answer:
        trigger = next(t for t in self._keda.triggers if t.name == name)
        if not isinstance(trigger, QueryTrigger):
            return None
        return trigger_answer(view.ask(name), trigger.ignore_null_values)


class RatioScaler:
    """A PodAutoscaler of AIBrix; `rule` is apa or kpa, the metric is asked for under the name of the rule."""

    def __init__(self, rule: str, spec: RatioSpec, period_ps: int) -> None:
        self._rule = rule
        self._spec = spec
        self._state = RatioState()
        self._totals: deque[tuple[int, float]] = deque()
        self.loops = {rule: period_ps}

    def look(self, loop: str, view: View) -> Look:
        answer = view.ask(self._rule)
        failed = isinstance(answer, Failed)
        values = [] if isinstance(answer, Failed) else _numbers(answer)
        replicas = view.scale.replicas
        least = view.raised(self._spec.min_replicas, self._spec.max_replicas)
        spec = replace(self._spec, min_replicas=least)
        if self._rule == "apa":
            found = apa(spec, self._state, values, replicas, view.ready, view.now_ps)
            shown = sum(values) / len(values) if values else None
        else:
            if not failed:
                self._totals.append((view.now_ps, sum(values)))
            while self._totals and self._totals[0][0] <= view.now_ps - self._spec.stable_window_ps:
                self._totals.popleft()
            stable = self._mean(view.now_ps - self._spec.stable_window_ps)
            panic = self._mean(view.now_ps - self._spec.panic_window_ps)
            found = kpa(spec, self._state, stable, panic, replicas, view.ready, view.now_ps)
            shown = stable
        self._state = found.state
        look = Look(
            view.now_ps,
            loop,
            found.current,
            found.desired,
            found.reason,
            metric=self._rule,
            values={} if shown is None else {self._rule: shown},
            error=answer.why if isinstance(answer, Failed) else None,
        )
        return view.told(look, self._spec.min_replicas, self._spec.max_replicas)

    def _mean(self, since_ps: int) -> float | None:
        values = [value for at_ps, value in self._totals if at_ps > since_ps]
        return sum(values) / len(values) if values else None


class SaturationScaler:
    """llm-d's saturation rule; it asks for `saturation_kv` and `saturation_waiting`."""

    def __init__(self, spec: SaturationSpec, period_ps: int = 30 * PS) -> None:
        self._spec = spec
        self.loops = {"saturation": period_ps}

    def look(self, loop: str, view: View) -> Look:
        kv, waiting = view.ask("saturation_kv"), view.ask("saturation_waiting")
        replicas = view.scale.replicas
        if isinstance(kv, Failed) or isinstance(waiting, Failed):
            why = (
                kv.why
                if isinstance(kv, Failed)
                else waiting.why
                if isinstance(waiting, Failed)
                else ""
            )
            return Look(view.now_ps, loop, replicas, replicas, "nothing done", error=why)
        loads = [Load(_number(kv[pod]), _number(waiting[pod])) for pod in kv if pod in waiting]
        least = view.raised(self._spec.min_replicas, self._spec.max_replicas)
        spec = replace(self._spec, min_replicas=least)
        desired, why = saturation(spec, loads, replicas, view.ready)
        look = Look(view.now_ps, loop, replicas, desired, why)
        return view.told(look, self._spec.min_replicas, self._spec.max_replicas)


class FloorScaler:
    """Nobody but a schedule or a forecast decides: as many replicas as it wants, within the bounds.

    A forecast that is missing is not one of nothing: replicas are then not taken away.
    """

    def __init__(self, least: int, most: int, period_ps: int, name: str) -> None:
        self._least = least
        self._most = most
        self.loops = {name: period_ps}

    def look(self, loop: str, view: View) -> Look:
        current, desired = view.scale.replicas, view.raised(self._least, self._most)
        who = view.floor_of or "nobody"
        why = f"{desired} within {self._least} to {self._most}, {who} wants {view.floor}"
        if view.no_forecast and desired < current:
            desired = max(desired, min(current, self._most))
            why = f"{desired} kept, no forecast: {view.no_forecast}"
        return Look(view.now_ps, loop, current, desired, why)


def _numbers(answer: Vector) -> list[float]:
    return [value for value in answer.values() if not isinstance(value, tuple)]


def _number(value: object) -> float:
    assert isinstance(value, float)
    return value
