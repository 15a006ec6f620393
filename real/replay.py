"""Play a scenario's traffic against a server: each request when it is due, each token timed, nothing lost.

Open loop, closed loop, conversations and traces are what the simulator's `Traffic` makes of them: it says what is due
next, and is told of every end, from which further turns follow. Instants of records count from the start; the arrival
is when a request was due, however late it was sent.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from real.calls import END_OF_RUN, Call, Reply, outcome_of
from real.client import GRACE_S, TIMEOUT_S, Client
from real.measured import Measured
from real.prompts import Prompts, as_words
from real.retrying import Retrying
from twin.clock import PS
from twin.cluster.clients import CLIENT_DISCONNECT, ClientsSpec
from twin.cluster.leaving import Leaving
from twin.metrics.records import RequestRecord
from twin.scenario_build import PRIORITY_TIERS
from twin.workload.request import Request
from twin.workload.streams import Traffic

PRIORITIES = {tier: number for number, tier in enumerate(PRIORITY_TIERS)}
"""Tier -> vLLM's priority; a smaller number is more urgent, here, in the simulator and in vLLM."""
REFUSING = (429, 503)


@dataclass(frozen=True)
class Manner:
    """How requests are sent."""

    endpoint: str = "completions"
    """completions: prompts are token ids, exact in length; chat: words, about as many."""
    stream: bool = True
    exact_lengths: bool = True
    """Every reply is as long as the traffic says (max_tokens, without end of sequence); else the model decides, up to
    the max_tokens that the traffic declares."""
    extensions: bool = True
    """What only vLLM knows is asked for, too: counts with each piece, token ids of what conversations repeat."""
    hints: bool = True
    """Tier, tenant and deadlines go along in vllm_xargs, the tier as `priority`, too; off where neither is known."""
    server_aborts: bool = False
    """The server ends requests whose deadline has passed; else the client hangs up."""
    max_in_flight: int | None = None
    """Requests the client has open at once; those beyond wait in the client, though they are due. None = no limit."""
    until_s: float | None = None
    """No request is sent after this; None = all are."""
    clients: ClientsSpec = field(default_factory=ClientsSpec)
    """What clients do whose request failed, and which of them leave by themselves."""
    timeout_s: float = TIMEOUT_S
    """A request that takes longer is given up."""


@dataclass(frozen=True)
class Replayed:
    """A run, as its clients saw it."""

    measured: list[Measured]
    """By index."""
    wall_s: float
    cpu_s: float
    """Of this process."""
    interrupted: bool
    followed: tuple[tuple[str, str, int], ...] = ()
    """(outcome, reason, attempts) of attempts that were followed by another."""

    @property
    def cpu_share(self) -> float:
        """Of one processor."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


async def replay(
    url: str,
    model: str,
    traffic: Traffic,
    prompts: Prompts,
    manner: Manner,
    stop: asyncio.Event | None = None,
    headers: Mapping[str, str] | None = None,
) -> Replayed:
    """Send the traffic. What is still open when `stop` is set is given up and counted unfinished."""
    async with Client(url, model, manner.timeout_s, headers) as client:
        player = _Player(client, traffic, prompts, manner)
        spent, begun = time.process_time(), time.perf_counter()
        client.start()
        interrupted = await player.play(stop or asyncio.Event())
        wall_s = time.perf_counter() - begun
        return Replayed(
            sorted(player.measured, key=lambda one: one.record.index),
            wall_s,
            time.process_time() - spent,
            interrupted,
            tuple((*why, number) for why, number in sorted(player.followed.items())),
        )


class _Player:
    def __init__(self, client: Client, traffic: Traffic, prompts: Prompts, manner: Manner) -> None:
        self._client, self._traffic, self._prompts, self._manner = client, traffic, prompts, manner
        self.measured: list[Measured] = []
        self._replies: dict[int, list[int]] = {}  # content id of a reply -> its tokens
        self._open: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._gate = asyncio.Semaphore(manner.max_in_flight or 1 << 30)
        self._leaving = Leaving(manner.clients.leaving, manner.clients.seed)
        self._retrying = Retrying(manner.clients)
        self.followed: Counter[tuple[str, str]] = Counter()

    async def play(self, stop: asyncio.Event) -> bool:
        """All of it; whether it was stopped."""
        halt = asyncio.create_task(stop.wait())
        halt.add_done_callback(lambda task: self._changed.set())
        try:
            while not stop.is_set():
                if self._failure is not None:
                    raise self._failure
                due_ps = self._traffic.next_ps()
                if due_ps is None or self._is_after_end(due_ps):
                    if not self._open:
                        return False
                    await self._changed.wait()
                    self._changed.clear()
                    continue
                wait_s = due_ps / PS - self._client.now_s
                if wait_s > 0:
                    await self._wait(wait_s)
                    continue
                self._begin(self._traffic.pop().request)
                # Whoever can be sent is sent before more is made ready, so that a burst leaves evenly.
                await asyncio.sleep(0)
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            return True
        finally:
            halt.cancel()

    def _is_after_end(self, due_ps: int) -> bool:
        return self._manner.until_s is not None and due_ps / PS > self._manner.until_s

    async def _wait(self, seconds: float) -> None:
        """Until the next request is due, or an end may have brought an earlier one."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
                self._changed.clear()
        except TimeoutError:
            pass

    def _begin(self, request: Request) -> None:
        task = asyncio.create_task(self._one(request))
        self._open.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._open.discard(task)
        self._changed.set()
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()

    async def _one(self, request: Request) -> None:
        attempts, due_ps = 1, request.arrival_ps
        stay_ps = self._leaving.delay_ps(request, due_ps)
        leave_ps = None if stay_ps is None else due_ps + stay_ps
        while True:
            reply = Reply(Call(due_ps / PS, "", 0))
            try:
                async with self._gate:
                    reply = Reply(self._call(request, due_ps, leave_ps))
                    await self._client.ask(reply.call, reply)
            except asyncio.CancelledError:
                reply.hung_up = reply.error = END_OF_RUN
            measured = self._measured(request, reply, attempts)
            wait_ps = self._retrying.wait_ps(measured.record, reply.retry_after_s, attempts)
            if wait_ps is None:
                break
            due_ps = (measured.record.finish_ps or 0) + wait_ps
            is_left = leave_ps is not None and leave_ps < due_ps
            until_ps = leave_ps if leave_ps is not None and is_left else due_ps
            try:
                await asyncio.sleep(max(0.0, until_ps / PS - self._client.now_s))
            except asyncio.CancelledError:
                measured = _ended(measured, "unfinished", END_OF_RUN, None)
                break
            if is_left:
                measured = _ended(measured, "aborted", CLIENT_DISCONNECT, until_ps)
                break
            self.followed[measured.record.outcome, measured.record.reason] += 1
            attempts += 1
        if reply.token_ids:
            self._replies[request.reply] = reply.token_ids
        self.measured.append(measured)
        if measured.record.outcome != "unfinished":
            self._traffic.on_finish(measured.record)

    def _call(self, request: Request, due_ps: int, leave_ps: int | None) -> Call:
        manner = self._manner
        ids = self._prompts.tokens(
            request.prompt, request.prompt_tokens, self._replies, request.index
        )
        body: dict[str, object] = {}
        limit = request.max_tokens
        if manner.exact_lengths:
            limit = min(request.output_tokens, limit or request.output_tokens)
        extra: dict[str, object] = {}
        by_s: dict[str, float | None] = {"ttft": None, "total": None}
        timeouts = (("ttft", request.ttft_timeout_ps), ("total", request.total_timeout_ps))
        for name, timeout_ps in timeouts:
            if timeout_ps is None:
                continue
            deadline_s = (due_ps + timeout_ps) / PS
            by_s[name] = deadline_s
            if manner.hints and manner.server_aborts:
                by_s[name] = deadline_s + GRACE_S
                extra[f"{name}_s"] = max(1e-3, deadline_s - self._client.now_s)
        if manner.hints:
            if request.tenant != "default":
                extra["tenant"] = request.tenant
            if request.tier in PRIORITIES:
                body["priority"] = PRIORITIES[request.tier]
        says_ids = manner.extensions and manner.endpoint == "completions"
        if request.session is not None and says_ids:
            body["return_token_ids"] = True
        if limit is None:
            body["max_tokens"] = None
        is_chat = manner.endpoint == "chat"
        return Call(
            due_ps / PS,
            as_words(ids) if is_chat else ids,
            limit or 0,
            request.tier if manner.hints else None,
            extra,
            manner.stream,
            body=body,
            endpoint=manner.endpoint,
            ttft_by_s=by_s["ttft"],
            total_by_s=by_s["total"],
            leave_by_s=None if leave_ps is None else leave_ps / PS,
            forced=manner.exact_lengths,
            counted=manner.extensions,
        )

    def _measured(self, request: Request, reply: Reply, attempts: int) -> Measured:
        outcome, reason = outcome_of(reply)
        tokens = [round(at * PS) for at in reply.token_s]
        finish_ps = None if reply.end_s is None else round(reply.end_s * PS)
        if outcome == "completed" and tokens and self._manner.stream:
            finish_ps = tokens[-1]  # the last token; what closes the stream comes after it
        prompt_tokens = reply.prompt_tokens or request.prompt_tokens
        record = RequestRecord(
            index=request.index,
            tier=request.tier,
            tenant=request.tenant,
            session=request.session,
            stream=request.stream,
            replica=0 if reply.status not in (0, *REFUSING) else None,
            arrival_ps=request.arrival_ps,
            first_scheduled_ps=None,
            first_token_ps=tokens[0] if tokens and self._manner.stream else None,
            finish_ps=None if outcome == "unfinished" else finish_ps,
            prompt_tokens=prompt_tokens,
            output_tokens=len(tokens),
            outcome=outcome,
            reason=reason,
            prefix_hit_tokens=reply.cached_tokens or 0,
            prefix_query_tokens=0 if reply.cached_tokens is None else prompt_tokens,
            itl_ps=array("q", [b - a for a, b in pairwise(tokens)])
            if self._manner.stream
            else array("q"),
            attempts=attempts,
        )
        sent_ps = round(reply.sent_s * PS) if reply.sent_s else None
        limit = reply.call.max_tokens or None
        planned = (request.prompt_tokens, request.output_tokens)
        return Measured(record, sent_ps, limit, planned, reply.status, reply.error[:500], request)


def _ended(measured: Measured, outcome: str, reason: str, finish_ps: int | None) -> Measured:
    record = replace(measured.record, outcome=outcome, reason=reason, finish_ps=finish_ps)
    return replace(measured, record=record)
