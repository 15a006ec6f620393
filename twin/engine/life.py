"""A request at a replica as its client lives through it: tokens as they come, patience as it runs out."""

from array import array
from collections.abc import Sequence

from twin.engine.request import EngineRequest
from twin.metrics.records import RequestRecord
from twin.metrics.token_times import StepGaps
from twin.workload.request import Request


class Life:
    """Instants of one request, in picoseconds, until its record is written."""

    __slots__ = (
        "cut",
        "deadline_ps",
        "engine",
        "estimated_wait_ps",
        "first_scheduled_ps",
        "first_token_ps",
        "is_impatient",
        "itl_ps",
        "last_token_ps",
        "queued_tokens",
        "request",
        "stall_ps",
        "stalled_since_ps",
        "ttft_deadline_ps",
    )

    def __init__(self, request: Request, engine: EngineRequest) -> None:
        self.request = request
        self.engine = engine
        self.first_scheduled_ps: int | None = None
        self.first_token_ps: int | None = None
        self.last_token_ps = 0
        self.itl_ps: Sequence[int] = ()
        self.estimated_wait_ps: int | None = None
        self.queued_tokens = 0  # of its prompt, while it waits for its first start
        self.stalled_since_ps: int | None = None  # while it is preempted
        self.stall_ps = 0
        arrival, ttft, total = request.arrival_ps, request.ttft_timeout_ps, request.total_timeout_ps
        self.ttft_deadline_ps = None if ttft is None else arrival + ttft
        self.deadline_ps = None if total is None else arrival + total
        self.is_impatient = ttft is not None or total is not None or request.may_leave
        """Whether its client may leave before the end."""
        self.cut: tuple[int, str, str] | None = None
        """When, with what outcome and why its connection broke."""

    def token(self, now_ps: int) -> None:
        """A token comes."""
        if self.first_token_ps is None:
            self.first_token_ps = now_ps
        else:
            self.own_gaps().append(now_ps - self.last_token_ps)
        self.last_token_ps = now_ps

    def tokens(self, steps: StepGaps) -> None:
        """A token comes from each of these steps."""
        if self.last_token_ps:
            gaps = self.own_gaps()
            gaps.append(steps.timeline.end(steps.first) - self.last_token_ps)
            gaps.extend(steps.to_array())
        else:
            if self.first_token_ps is None:
                self.first_token_ps = steps.timeline.end(steps.first)
            self.itl_ps = steps
        self.last_token_ps = steps.timeline.end(steps.last)

    def own_gaps(self) -> "array[int]":
        """The gaps between its tokens, to be added to."""
        gaps = self.itl_ps
        if isinstance(gaps, StepGaps):
            gaps = gaps.to_array()
        elif not isinstance(gaps, array):
            gaps = array("q", gaps)
        self.itl_ps = gaps
        return gaps

    def starts(self, now_ps: int) -> None:
        """A step that computes for it begins after it had waited."""
        if self.first_scheduled_ps is None:
            self.first_scheduled_ps = now_ps
        self._end_stall(now_ps)

    def _end_stall(self, now_ps: int) -> None:
        if self.stalled_since_ps is not None:
            self.stall_ps += max(0, now_ps - self.stalled_since_ps)
            self.stalled_since_ps = None

    def left(self, now_ps: int) -> tuple[int, str, str] | None:
        """When, with what outcome and why the client left, if it has by `now_ps`; a token at that instant counts."""
        ends = [] if self.cut is None else [self.cut]
        first, limit = self.first_token_ps, self.ttft_deadline_ps
        if limit is not None and limit <= now_ps and (first is None or first > limit):
            ends.append((limit, "timed_out", "timeout:ttft"))
        if self.deadline_ps is not None and self.deadline_ps < now_ps:
            ends.append((self.deadline_ps, "timed_out", "timeout:total"))
        return min(ends, default=None)

    def record(
        self, replica: int, finish_ps: int | None, outcome: str, reason: str
    ) -> RequestRecord:
        """What is kept. Tokens that came after the client had left were not delivered."""
        first, last = self.first_token_ps, self.last_token_ps
        if finish_ps is not None and first is not None and last > finish_ps:
            own = self.own_gaps()
            while own and last > finish_ps:
                last -= own.pop()
            if last > finish_ps:
                first = None
        gaps = self.itl_ps if isinstance(self.itl_ps, StepGaps) else self.own_gaps()
        if finish_ps is not None:
            self._end_stall(finish_ps)
        request, engine = self.request, self.engine
        return RequestRecord(
            index=request.index,
            tier=request.tier,
            tenant=request.tenant,
            session=request.session,
            stream=request.stream,
            replica=replica,
            arrival_ps=request.arrival_ps,
            first_scheduled_ps=self.first_scheduled_ps,
            first_token_ps=first,
            finish_ps=finish_ps,
            prompt_tokens=request.prompt_tokens,
            output_tokens=0 if first is None else len(gaps) + 1,
            outcome=outcome,
            reason=reason,
            preemptions=engine.num_preemptions,
            recomputed_tokens=engine.recomputed_tokens,
            prefix_hit_tokens=engine.prefix_hit_tokens or 0,
            prefix_query_tokens=0 if engine.prefix_hit_tokens is None else request.prompt_tokens,
            itl_ps=gaps,
            stall_ps=self.stall_ps,
            estimated_wait_ps=self.estimated_wait_ps,
        )
