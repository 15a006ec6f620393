"""Run a scenario: traffic, router and replicas on one clock. The only place that wires them together."""

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import URGENT

from twin.agenda import Agenda, Entry
from twin.capacity import context_warnings, traffic_warnings
from twin.clock import NEVER_PS, PS, quotient, to_seconds
from twin.cluster.clients import Clients
from twin.cluster.fleet import Fleet
from twin.cluster.fleet_log import FleetHistory
from twin.cluster.gateway import Gateway, unserved
from twin.cluster.timer import Timer
from twin.cluster.waiting import GatewayWaits
from twin.compiled import remade
from twin.engine.fast_replica import FastReplica
from twin.engine.replica import EngineStats, Replica, Stuck
from twin.errors import InputError
from twin.interrupt import stop_on_ctrl_c
from twin.metrics.columns import Columns
from twin.metrics.events import Event as Happening
from twin.metrics.events import Listener, in_order
from twin.metrics.gauges import NOT_YET, Gauges
from twin.metrics.percentiles import Stats
from twin.metrics.record_table import RecordTable
from twin.metrics.records import RequestRecord
from twin.metrics.summary import tally_of
from twin.metrics.tally import REFUSED_NAMED, Tally
from twin.metrics.timeseries import Sampler, TimeSeries
from twin.scenario import Scenario, load_scenario
from twin.scenario_build import PRIORITY_TIERS
from twin.scheduling.decisions import Decision
from twin.scheduling.orders import OrderError
from twin.step_time.trust import Trust, load_of
from twin.subject import trust_of
from twin.workload.load import Load
from twin.workload.request import Request
from twin.workload.source import Arrival, Ended
from twin.workload.streams import Traffic, open_streams

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int; compiled, one of 64 bits

__all__ = ["NoProgressError", "Progress", "Result", "load_scenario", "simulate"]

Progress = Callable[[int, int | None, int], None]
"""(requests that have ended, requests expected in all or None, simulated picoseconds), called now and then."""

EVENTS_PER_LOOK: Final = 128
"""Events between two looks at progress."""

OBJECTS_PER_COLLECTION = 100_000
"""More objects than before, of those that may refer to each other, after which garbage is looked for."""

BLOCK: Final = 4096
"""Records that are counted together, and then dropped, where they are not kept."""

LONGEST_PS: Final = 100 * 86_400 * PS
"""The longest time that is simulated. Instants are kept in 64 bits, which hold 106.75 days of picoseconds."""

PATIENCE_EVENTS: Final = 1_000_000
"""Events a replica may need before a request of the longest context ends, on top of one step a token."""


class NoProgressError(InputError):
    """Requests are inside and nothing can ever end them; the message names those that hold KV blocks."""


class Demand(Protocol):
    """What a run asks of its traffic, as twin.workload.streams.Traffic answers it."""

    load: Load | None

    def expected(self) -> int | None: ...
    def next_ps(self) -> int | None: ...
    def next(self) -> Arrival | None: ...
    def pop(self) -> Arrival: ...
    def on_finish(self, record: Ended) -> bool: ...


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    scenario: Scenario
    kept: RecordTable | None
    """None if run.records is false."""
    counted: Tally | None
    """What was counted while the run went on; None if the records are kept."""
    places: dict[int, str]
    """Refused requests: index -> where it stands in the traffic; of the first ones if records are not kept."""
    engines: tuple[EngineStats, ...]
    """By replica; of a fleet, every one there ever was."""
    alive_ps: tuple[int, ...]
    """How long each of them was there."""
    fleet: FleetHistory | None
    """What became of replicas that come and go; None where they do not."""
    policies: tuple[dict[str, Any], ...]
    """Statistics of each replica's policy; empty in the stock modes."""
    warnings: tuple[str, ...]
    simulated_ps: int
    """When the last request ended, or run.until, or where the run was interrupted."""
    inflight_request_ps: int
    """Requests in the system, integrated over time: by Little's law the sum of all times in the system."""
    events: int
    """Events of the simulation."""
    wall_s: float
    """Seconds the run took."""
    interrupted: bool
    """Ctrl-C ended it; what was inside is `unfinished`."""
    decisions: dict[int, list[Decision]]
    """Watched requests: index -> what the policy decided about it; empty in the stock modes."""
    series: TimeSeries | None
    """Metrics over time, if the run was observed."""
    log: tuple[Happening, ...]
    """What happened to single requests, if the run was observed and records are kept."""
    ejections: tuple[tuple[int, int, int], ...] = ()
    """(instant, replica, until) of each time that a router left out a replica that failed."""
    sent_stale: int = 0
    """Attempts that were sent on while the state of all replicas was stale."""
    gateway_waits: GatewayWaits = field(default_factory=GatewayWaits)
    """The queue at the gateway."""
    followed: tuple[tuple[str, str, int], ...] = ()
    """(outcome, reason, attempts) of attempts that were followed by another."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def records(self) -> RecordTable:
        """One for every request that was offered, by index. Raises InputError if they were not kept."""
        if self.kept is None:
            raise InputError("run.records is false: there is no record of single requests")
        return self.kept

    def trust(self) -> Trust:
        """How wrong the latencies may be: the errors of the nearest set-up that was measured, and its distance."""
        tiers = self.tally().tiers.values()
        waited, whole = (
            _sum_s(tier.latency[name].stats() for tier in tiers) for name in ("queue", "e2e")
        )
        return trust_of(self.scenario, load_of(waited, whole))

    def tally(self) -> Tally:
        """What is counted of the requests."""
        if self.counted is not None:
            return self.counted
        scenario = self.scenario
        return tally_of(self.records, scenario.objectives, scenario.run.warmup_ps)


def _sum_s(stats: Iterable[Stats]) -> float:
    """Seconds of all samples together."""
    return sum(one.mean * one.count for one in stats if one.mean is not None)


def simulate(
    scenario: Scenario,
    progress: Progress | None = None,
    strict: bool = False,
    watch: Collection[int] = (),
    observe: bool = False,
    on_offer: Callable[[Request], None] | None = None,
    on_block: Callable[[Columns], None] | None = None,
    traffic: Demand | None = None,
) -> Result:
    """The run of a scenario. The same scenario and seed give the same result, byte for byte (but for wall_s).

    Requests that cannot run (prompt_tokens >= max_model_len) are refused as vLLM's API does, or, if `strict`, end the
    run with InputError. What the policy decides about the requests in `watch` (by index) is kept in `decisions`; with
    `observe`, metrics over time and events are kept too. Neither changes anything else. `on_offer` is told of each
    request as it arrives, `on_block` of records before they are dropped, if run.records is false: memory then does not
    grow with the number of requests, and no events are kept. `traffic` is played in place of the scenario's.
    Ctrl-C ends the run early.
    Raises InputError for a trace that turns out to be malformed and NoProgressError if requests are left that nothing
    can ever end.
    """
    start = time.perf_counter()
    run = _Run(scenario, strict, watch, observe, on_offer, on_block, traffic)
    with stop_on_ctrl_c() as pressed, _few_collections():
        interrupted = run.go(progress, pressed)
    return run.result(time.perf_counter() - start, interrupted)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Python looks for garbage that refers to itself less often: a run has many objects and leaves hardly any such."""
    often = gc.get_threshold()
    if 0 < often[0] < OBJECTS_PER_COLLECTION:
        gc.set_threshold(OBJECTS_PER_COLLECTION, *often[1:])
    try:
        yield
    finally:
        gc.set_threshold(*often)


class _Run:
    """The state of one run."""

    def __init__(
        self,
        scenario: Scenario,
        strict: bool,
        watch: Collection[int],
        observe: bool,
        on_offer: Callable[[Request], None] | None,
        on_block: Callable[[Columns], None] | None,
        traffic: Demand | None,
    ) -> None:
        self._scenario = scenario
        self._on_offer = on_offer
        self._on_block = on_block
        self._strict = strict
        self._watch = tuple(watch)
        self._env = simpy.Environment(initial_time=0)
        self._agenda = Agenda(self._env)
        self._traffic = traffic or Traffic(open_streams(scenario.traffic, scenario.run.seed))
        self._offered = self._ended = 0
        self._table = RecordTable()
        self._counted = None
        if not scenario.run.records:
            self._counted = Tally(scenario.objectives, scenario.run.warmup_ps, is_exact=False)
        self._places: dict[int, str] = {}
        # The instants at which requests left, added up, less those at which they came.
        self._in_system_ps = 0
        self._longest = 0
        self._events = 0
        self._log: list[Happening] = []
        is_logged = observe and scenario.run.records
        self._listener: Listener | None = self._note if is_logged else None
        self._armed_ps: int | None = None
        self._when_due = self._on_due
        self._timer = Timer(self._env)
        self._gateway = self._make_gateway()
        cluster = scenario.cluster
        self._clients = Clients(
            cluster.clients, cluster.admission, self._gateway, self._timer, self._left
        )
        self._replicas: list[Replica] = []
        self._fleet = self._make_fleet()
        if self._fleet is None:
            self._replicas = [self._replica(i) for i in range(scenario.cluster.replicas)]
            self._gateway.retarget(self._replicas)
        self._sampler = self._make_sampler() if observe else None
        self._arm()

    def _make_gateway(self) -> Gateway:
        cluster = self._scenario.cluster
        holds = cluster.fleet is not None and cluster.fleet.holds_requests
        may_leave = bool(cluster.clients.leaving)
        return Gateway(
            cluster.routing, cluster.admission, holds, self._on_record, self._timer, may_leave
        )

    def _note(self, event: Happening) -> None:
        """Something has happened to a request, or to an attempt at it."""
        index = self._clients.original(event.request)
        self._log.append(event if index == event.request else replace(event, request=index))

    def _make_fleet(self) -> Fleet | None:
        """The replicas that come and go; None where they are all there from the beginning to the end."""
        spec = self._scenario.cluster.fleet
        if spec is None:
            return None
        return Fleet(self._timer, spec, self._gateway, self._join, self._is_over)

    def _join(self, index: int) -> Replica:
        """A replica of the fleet begins."""
        replica = self._replica(index)
        if self._watch:
            self._replicas.append(replica)
        return replica

    @property
    def _alive(self) -> list[Replica]:
        return self._replicas if self._fleet is None else self._fleet.replicas

    def _is_over(self) -> bool:
        """Whether no request is inside and none will come, in a run that ends with its last request."""
        is_cut = self._scenario.run.until_ps is not None
        return not is_cut and not self._inflight and self._traffic.next_ps() is None

    def _replica(self, index: int) -> Replica:
        scenario = self._scenario
        # A decision log has a line for every step in which something was decided.
        is_stepped = bool(self._watch) or scenario.run.engine_mode == "stepped"
        replica = (Replica if is_stepped else FastReplica)(
            self._env,
            scenario.engine,
            scenario.step_time,
            scenario.policy,
            self._on_record,
            index,
            {tier: number for number, tier in enumerate(PRIORITY_TIERS)},
            self._listener,
        )
        if replica.policy is not None:
            for request in self._watch:
                replica.policy.watch(request)
        return replica

    def _make_sampler(self) -> Sampler:
        scenario = self._scenario
        return Sampler(
            self._gauges,
            max(1, self._scenario.cluster.replicas),
            scenario.tiers,
            scenario.objectives,
            scenario.run.warmup_ps,
            scenario.run.sample_period_ps,
            self._share_done,
            self._read_gateway if self._may_wait_outside else None,
        )

    @property
    def _may_wait_outside(self) -> bool:
        """Whether a request can wait at the gateway."""
        cluster = self._scenario.cluster
        holds = cluster.fleet is not None and cluster.fleet.holds_requests
        return cluster.admission is not None or holds

    def _read_gateway(self) -> int:
        return self._gateway.num_held

    def _share_done(self, now_ps: int) -> float:
        """How far the run is, as far as one can tell; 0 where one cannot."""
        until_ps = self._scenario.run.until_ps
        expected = self._traffic.expected()
        return max(
            quotient(now_ps, until_ps) if until_ps else 0.0,
            self._offered / expected if expected else 0.0,
        )

    def _gauges(self, now_ps: int) -> tuple[Gauges, ...]:
        if self._fleet is not None:
            return self._fleet.gauges(now_ps)
        return tuple(replica.gauges(now_ps) for replica in self._replicas)

    # --- requests in ----------------------------------------------------------------------

    def _arm(self) -> None:
        """Wake up when the next request is due, before whatever else happens at that instant.

        A reply may bring a request that is due before the one waited for; its own event is then put in front, and the
        later one finds nothing new and costs nothing.
        """
        due_ps = self._traffic.next_ps()
        if due_ps is not None and due_ps > LONGEST_PS:
            if self._end_ps > LONGEST_PS:
                raise self._too_long(due_ps)
            return
        if due_ps is not None and (self._armed_ps is None or due_ps < self._armed_ps):
            self._armed_ps = due_ps
            self._agenda.put(Entry(self._when_due), URGENT, due_ps - self._now_ps)

    def _on_due(self, entry: Entry) -> None:
        traffic, now_ps = self._traffic, self._now_ps
        self._armed_ps = None
        while traffic.next_ps() == now_ps:
            self._offer(traffic.pop())
        self._arm()

    def _offer(self, arrival: Arrival) -> None:
        request = arrival.request
        if self._on_offer is not None:
            self._on_offer(request)
        self._offered += 1
        self._in_system_ps -= request.arrival_ps
        if request.prompt_tokens >= self._scenario.engine.max_model_len:
            self._refuse(arrival)
            return
        self._clients.ask(request)

    def _refuse(self, arrival: Arrival) -> None:
        request, limit = arrival.request, self._scenario.engine.max_model_len
        place = _place(arrival)
        if self._strict:
            raise InputError(
                f"{place}: a prompt of {request.prompt_tokens} tokens must be shorter than engine.max_model_len "
                f"({limit}); raise max_model_len, or run without --strict to count such requests as refused"
            )
        if self._counted is None or len(self._places) < REFUSED_NAMED:
            self._places[request.index] = place
        record = unserved(request, request.arrival_ps, "refused", "too_long")
        if self._listener is not None:
            details = {
                "reason": record.reason,
                "prompt_tokens": request.prompt_tokens,
                "place": place,
            }
            self._listener(
                Happening(self._now_ps, "refusal", None, request.index, request.tier, details)
            )
        self._on_record(record)

    # --- requests out ---------------------------------------------------------------------

    def _on_record(self, attempt: RequestRecord) -> None:
        if self._listener is not None:
            self._tell_end(attempt, self._listener)
        self._gateway.ended(attempt)
        if self._fleet is not None:
            self._fleet.ended(attempt)
        record = self._clients.ended(attempt)
        if record is not None:
            self._keep(record)

    def _left(self, record: RequestRecord) -> None:
        """A client has left between two attempts."""
        if self._listener is not None:
            self._tell_end(record, self._listener)
        self._keep(record)

    def _tell_end(self, record: RequestRecord, listener: Listener) -> None:
        """An event for a request that the gateway or a pod ended; a time-out in an engine is told there."""
        at_ps, reason = record.finish_ps, record.reason
        details: dict[str, Any] = {"reason": reason}
        match record.outcome:
            case "refused" if (
                reason != "too_long"
            ):  # that one was told with its place in the traffic
                kind = "refusal"
                details["prompt_tokens"] = record.prompt_tokens
            case "timed_out" if record.replica is None:
                kind = "timeout"
                details["left_s"] = None if at_ps is None else to_seconds(at_ps)
            case "aborted":
                kind = "abort"
                details["output_tokens"] = record.output_tokens
            case _:
                return
        now_ps = self._now_ps if at_ps is None else at_ps
        listener(Happening(now_ps, kind, record.replica, record.index, record.tier, details))

    def _keep(self, record: RequestRecord) -> None:
        """A request has ended for good."""
        self._ended += 1
        self._in_system_ps += self._now_ps
        context = record.prompt_tokens + record.output_tokens
        if context > self._longest and record.first_scheduled_ps is not None:
            self._longest = context
        self._table.add(record)
        if self._sampler is not None:
            self._sampler.record(record)
        if record.outcome != "unfinished" and self._traffic.on_finish(record):
            self._arm()

    def _settle(self) -> None:
        """Count the records there are and drop them."""
        assert self._counted is not None
        block = self._table.take()
        self._counted.add(block)
        if self._on_block is not None:
            self._on_block(block)
        for replica in self._alive:
            replica.forget_past()

    @property
    def _inflight(self) -> int:
        return self._offered - self._ended

    # --- the run --------------------------------------------------------------------------

    def go(self, progress: Progress | None, pressed: list[bool]) -> bool:
        """Let time pass until the end; whether it was interrupted."""
        until_ps = self._scenario.run.until_ps
        try:
            self._let_pass(progress, pressed)
        except EmptySchedule:
            if self._inflight and until_ps is None:
                raise self._no_progress("nothing more will happen") from None
        except Stuck:
            raise self._no_progress("the engine plans at one instant without end") from None
        except OrderError as error:
            raise InputError(f"policy: {error}") from error
        except KeyboardInterrupt:
            return True
        return bool(pressed)

    def _let_pass(self, progress: Progress | None, pressed: list[bool]) -> None:
        agenda, sampler = self._agenda, self._sampler
        stop_ps: i64 = min(self._end_ps, LONGEST_PS)
        gateway, is_polled = self._gateway, bool(self._scenario.cluster.routing.poll_ps)
        patience = PATIENCE_EVENTS + 2 * self._scenario.engine.max_model_len
        fleet = self._scenario.cluster.fleet
        patience *= len(self._replicas) if fleet is None else fleet.most_replicas
        expected = self._traffic.expected() if progress is not None else None
        ended = looked = 0
        while not pressed:
            upcoming: int = agenda.next_ps()
            if upcoming >= stop_ps and upcoming != NEVER_PS:
                if self._end_ps > LONGEST_PS:
                    raise self._too_long(upcoming)
                return
            if sampler is not None and sampler.next_ps <= upcoming < NEVER_PS:
                sampler.catch_up(upcoming)
            if is_polled and gateway.next_poll_ps <= upcoming < NEVER_PS:
                gateway.catch_up(upcoming)
            agenda.step()
            self._events += 1
            if self._events % EVENTS_PER_LOOK:
                continue
            if self._counted is not None and len(self._table) >= BLOCK:
                self._settle()
            if progress is not None:
                progress(self._ended, expected, self._now_ps)
            if self._ended != ended or not self._inflight:
                ended, looked = self._ended, self._events
            elif self._events - looked > patience:
                raise self._no_progress(f"none has ended in {self._events - looked} events")

    @property
    def _end_ps(self) -> int:
        """When the run is cut; never if it ends with its last request."""
        until_ps = self._scenario.run.until_ps
        return NEVER_PS if until_ps is None else until_ps

    def _too_long(self, at_ps: int) -> InputError:
        """Something would happen at an instant that is not simulated any more."""
        most = f"{to_seconds(LONGEST_PS):,.0f} s (100 days)"
        ahead = self._traffic.next()
        if ahead is not None and ahead.due_ps <= at_ps:
            return InputError(
                f"{_place(ahead)} is due at {to_seconds(at_ps):,.0f} s; at most {most} are simulated. Is the unit of "
                "the trace right, or the rate too low? Raise rate or speedup, choose a window, or cut the run before "
                "with run.until"
            )
        return InputError(
            f"the replicas would go on beyond {most}, and no more are simulated. Do steps really take so long? "
            "Correct step_time, or cut the run before with run.until"
        )

    def _no_progress(self, why: str) -> NoProgressError:
        holders = "; ".join(r.holders() for r in self._alive if r.num_inflight)
        if self._gateway.num_held:
            holders = (
                f"{self._gateway.num_held} are held at the gateway, no pod is Ready; {holders}"
            )
        return NoProgressError(
            f"no progress at {to_seconds(self._now_ps):.6g} s: {self._inflight} requests are inside, {why}. {holders}. "
            "Give the engine more KV blocks, or the policy a way for one of them to go first"
        )

    def result(self, wall_s: float, interrupted: bool) -> Result:
        """Close the books: whatever is inside is unfinished."""
        scenario = self._scenario
        if interrupted:
            simulated_ps = self._now_ps
        elif scenario.run.until_ps is not None:
            simulated_ps = scenario.run.until_ps
        else:
            simulated_ps = self._last_finish_ps()
        inflight_request_ps = self._in_system_ps + self._inflight * simulated_ps
        series = None if self._sampler is None else self._sampler.finish(simulated_ps)
        fleet = self._fleet
        gateway_waits = self._gateway.finish_run(simulated_ps)
        if fleet is not None:
            fleet.finish_run(simulated_ps)
            series = None if series is None else series.padded(NOT_YET)
        else:
            for replica in self._replicas:
                replica.finish_run(simulated_ps)
        for record in self._clients.finish_run():
            self._keep(record)
        if self._counted is not None:
            self._settle()
        return Result(
            scenario=scenario,
            kept=self._table if self._counted is None else None,
            counted=self._counted,
            places=self._places,
            engines=tuple(r.stats for r in self._replicas) if fleet is None else fleet.engines,
            alive_ps=(simulated_ps,) * len(self._replicas)
            if fleet is None
            else fleet.alive_ps(simulated_ps),
            policies=tuple(r.policy.stats() for r in self._replicas if r.policy is not None)
            if fleet is None
            else fleet.policies(),
            fleet=None if fleet is None else fleet.history(simulated_ps),
            warnings=(
                *scenario.warnings,
                *traffic_warnings(scenario, self._traffic.load),
                *context_warnings(scenario, self._longest),
            ),
            ejections=tuple(self._gateway.ejections),
            sent_stale=self._gateway.sent_stale,
            gateway_waits=gateway_waits,
            followed=tuple((*why, n) for why, n in sorted(self._clients.followed.items())),
            simulated_ps=simulated_ps,
            inflight_request_ps=inflight_request_ps,
            events=self._events,
            wall_s=wall_s,
            interrupted=interrupted,
            decisions={index: self._decisions(index) for index in self._watch},
            series=series,
            log=tuple(in_order(self._log)),
        )

    def _last_finish_ps(self) -> int:
        """When the last of the requests that have ended left; 0 if none has."""
        finish_ps = self._table.columns()["finish_ps"]
        before_ps = 0 if self._counted is None else self._counted.last_finish_ps
        return max(before_ps, int(finish_ps.max(initial=0)))

    def _decisions(self, index: int) -> list[Decision]:
        """The log of the one replica that knows the request; empty in the stock modes."""
        policies = (replica.policy for replica in self._replicas)
        return [line for policy in policies if policy is not None for line in policy.log(index)]

    @property
    def _now_ps(self) -> int:
        return self._env._now  # type: ignore[return-value]  # SimPy calls its time a float


def _place(arrival: Arrival) -> str:
    """Where a request stands in the traffic, for people."""
    place = f"traffic.{arrival.stream}, "
    if arrival.line is not None:
        return place + f"line {arrival.line}"
    if arrival.request.session is not None:
        return place + f"session {arrival.number}, turn {arrival.turn}"
    return place + f"request {arrival.number}"
