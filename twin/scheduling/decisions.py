"""Why a request is where it is: a log of decisions for the requests somebody asks about."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the log."""

    now: float
    """Seconds on the host's clock."""
    step: int
    """Number of the begin_step call it belongs to."""
    event: str
    """held, ready, skipped, started, set aside, preempted, promoted, first token, abort or gone."""
    detail: str
    """What it depended on."""


class DecisionLog:
    """Decisions about watched requests. Watching none costs one look-up in an empty dict."""

    def __init__(self) -> None:
        self.logs: dict[Hashable, list[Decision]] = {}
        """Decisions by watched request, in the order of `watch`."""
        self._skips: dict[Hashable, Decision] = {}

    def watch(self, rid: Hashable) -> None:
        """Keep what is decided about `rid` from now on."""
        self.logs.setdefault(rid, [])

    def add(self, rid: Hashable, now: float, step: int, event: str, detail: str = "") -> None:
        """Note a decision about a watched request; one equal to the last but for its time is left out."""
        skip = self._skips.pop(rid, None)
        if skip is not None and event != "started":
            self._append(rid, skip)
        self._append(rid, Decision(now, step, event, detail))

    def skip(self, rid: Hashable, now: float, step: int, detail: str) -> None:
        """Note why a watched request is not admitted in this step; forgotten if it is started next after all."""
        skip = self._skips.pop(rid, None)
        if skip is not None:
            self._append(rid, skip)
        self._skips[rid] = Decision(now, step, "skipped", detail)

    def of(self, rid: Hashable) -> list[Decision]:
        """The decisions about `rid`, oldest first; empty if it is not watched."""
        log = [*self.logs.get(rid, ())]
        skip = self._skips.get(rid)
        if skip is not None and not _is_same(log, skip):
            log.append(skip)
        return log

    def _append(self, rid: Hashable, decision: Decision) -> None:
        log = self.logs[rid]
        if not _is_same(log, decision):
            log.append(decision)


def _is_same(log: list[Decision], decision: Decision) -> bool:
    return bool(log) and (log[-1].event, log[-1].detail) == (decision.event, decision.detail)
