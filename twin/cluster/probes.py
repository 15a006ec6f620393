"""When is a container ready, or killed? The kubelet's probes as arithmetic over one start.

A server that loads a model answers nothing until it is up, and then everything; so one instant decides all probes.
Instants are picoseconds from the start of the container.
"""

from dataclasses import dataclass

from twin.clock import PS


@dataclass(frozen=True)
class Probe:
    """`httpGet` probe of a container, with Kubernetes' defaults."""

    initial_delay_ps: int = 0
    period_ps: int = 10 * PS
    failure_threshold: int = 3
    success_threshold: int = 1

    def first_at(self, instant_ps: int) -> int:
        """The first time it is sent at or after an instant."""
        late_ps = max(0, instant_ps - self.initial_delay_ps)
        return self.initial_delay_ps - -late_ps // self.period_ps * self.period_ps

    @property
    def patience_ps(self) -> int:
        """When it gives up on a container that never answers."""
        return self.initial_delay_ps + (self.failure_threshold - 1) * self.period_ps


@dataclass(frozen=True)
class Probes:
    """The probes of a container; None = it has none of the kind."""

    startup: Probe | None = None
    liveness: Probe | None = None
    readiness: Probe | None = None


@dataclass(frozen=True)
class Fate:
    """What becomes of one start of a container."""

    serving_ps: int
    """When its server answers, if it lives so long."""
    ready_ps: int | None
    """When the pod is Ready; before `serving_ps` where nothing probes readiness. None = killed before."""
    killed_ps: int | None
    """When the kubelet kills it; None = it lives."""
    killed_by: str | None = None
    """startup or liveness."""


def fate(probes: Probes, serving_ps: int) -> Fate:
    """What the probes make of a container whose server answers from `serving_ps` on.

    A probe that is due in that very instant succeeds. Liveness and readiness wait for the startup probe; readiness is
    also asked as soon as that one succeeds.
    """
    startup, liveness, readiness = probes.startup, probes.liveness, probes.readiness
    started_ps = 0
    if startup is not None:
        if serving_ps > startup.patience_ps:
            return Fate(serving_ps, None, startup.patience_ps, "startup")
        started_ps = startup.first_at(serving_ps)
    elif liveness is not None and serving_ps > liveness.patience_ps:
        ready_ps = _ready(readiness, 0, serving_ps)
        killed_ps = liveness.patience_ps
        early = ready_ps if ready_ps < killed_ps else None
        return Fate(serving_ps, early, killed_ps, "liveness")
    return Fate(serving_ps, _ready(readiness, started_ps, serving_ps), None)


def _ready(readiness: Probe | None, started_ps: int, serving_ps: int) -> int:
    if readiness is None:
        return started_ps
    from_ps = max(started_ps, serving_ps)
    first_ps = readiness.first_at(from_ps)
    if started_ps and from_ps == started_ps >= readiness.initial_delay_ps:
        first_ps = started_ps
    return first_ps + (readiness.success_threshold - 1) * readiness.period_ps


BACKOFFS_PS = (0, 10 * PS, 20 * PS, 40 * PS, 80 * PS, 160 * PS, 300 * PS)
"""Waits before a container is started again: the first at once, then doubling up to five minutes."""

BACKOFF_RESET_PS = 600 * PS
"""A container that ran so long is not counted as crashing."""


def backoff_ps(restarts: int) -> int:
    """The wait before restart number `restarts` (0 = the first) of a container that keeps being killed."""
    return BACKOFFS_PS[min(restarts, len(BACKOFFS_PS) - 1)]
