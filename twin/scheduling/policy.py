"""Who runs next, who waits for whom, who gives way: the one policy, driven by its configuration.

The host calls submit, begin_step, head / start, requeue, first_token and gone in the order of its own loop and hands
in the time. What differs between policies is data (tiers, caps, holds) and small functions (orders, estimators).
"""

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from twin.scheduling.config import ANY_TIER, PolicyConfig
from twin.scheduling.decisions import Decision, DecisionLog
from twin.scheduling.entry import HELD, READY, RUNNING, Entry
from twin.scheduling.estimators import Estimator
from twin.scheduling.fair import FairShare
from twin.scheduling.hold import Hold
from twin.scheduling.job import Host, Job, Plan
from twin.scheduling.orders import ORDERS, resolve_order
from twin.scheduling.planning import Room, choose_victims
from twin.scheduling.ready import ReadyQueues
from twin.scheduling.statistics import TierStatistics

FULL_PRESSURE = 10
"""Waiting jobs of the first tier at which the batching waits are at their shortest."""


class Policy:
    """One engine's policy. Two policies that get the same calls give the same answers.

    `max_model_len` is the engine's; `truth` (rid -> output tokens) exists in simulation only, for the estimator
    `oracle`.
    """

    def __init__(
        self,
        config: PolicyConfig,
        max_model_len: int,
        truth: Callable[[Hashable], int] | None = None,
    ) -> None:
        self.config = config
        tiers = config.tiers
        self._ranks = config.ranks
        self._tier_numbers = {tier.name: i for i, tier in enumerate(tiers)}
        self._estimator = Estimator(config, max_model_len, truth)
        by_rank = dict(zip(reversed(self._ranks), reversed(tiers), strict=True))
        self._orders = [resolve_order(by_rank[rank].order) for rank in sorted(by_rank)]
        self._largest_first = [by_rank[rank].victims == "largest" for rank in sorted(by_rank)]
        self._fair = FairShare(dict(config.weights))
        # An order of the user's may look at tags and service, too.
        self._uses_fair = any(t.order == "fair" or t.order not in ORDERS for t in tiers)
        self._holds = [Hold(tier) if tier.holds else None for tier in tiers]
        self._holding = [(i, hold) for i, hold in enumerate(self._holds) if hold is not None]
        self._entries: dict[Hashable, Entry] = {}
        self._running_jobs = [0] * len(tiers)
        self._running_tokens = [0] * len(tiers)
        self._room = Room(tiers, self._running_jobs, self._running_tokens)  # under the caps, now
        self._ready = ReadyQueues(len(self._orders), len(tiers), self._room)
        self._gives_way = [tier.preemptible for tier in tiers]
        self._promote_after = [tier.promote_after for tier in tiers]
        self._preemptible = [0] * len(self._orders)  # running jobs by rank that may give way
        self._deadlines: list[tuple[float, int, str, Entry]] = []
        self._promotions: list[tuple[float, int, Entry]] = []
        self._returned: list[Entry] = []  # preempted in this step
        self._planned: set[Hashable] = set()
        self._num_held = 0
        self._nothing = Plan()
        self._submitted = 0
        self._step = 0
        self.is_settled = True
        """Whether the last begin_step planned no preemption for a reason that lasts while running jobs only grow: no
        job below a waiting one runs, or all of them together did not suffice for the first one."""
        self._head: Entry | None = None
        self._head_known = False
        self._statistics = [TierStatistics() for _ in tiers]
        self._log = DecisionLog()
        self._watching = False

    # --- what a job goes through ----------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        """A new job. Raises ValueError for a tier that does not exist when there is no default tier."""
        tier = self._tier_number(job)
        job.seq = self._submitted
        self._submitted += 1
        entry = Entry(job, tier, self._ranks[tier], self._estimator.expect(job, tier))
        self._entries[job.rid] = entry
        statistics = self._statistics[tier]
        statistics.submitted += 1
        if job.ttft_deadline is not None:
            heapq.heappush(self._deadlines, (job.ttft_deadline, job.seq, "timeout:ttft", entry))
        if job.deadline is not None:
            heapq.heappush(self._deadlines, (job.deadline, job.seq, "timeout:total", entry))
        self._start_ageing(entry)
        hold = self._holds[tier]
        if hold is None:
            self._make_ready(entry, now)
            statistics.present[READY] += 1
        else:
            statistics.present[HELD] += 1
            self._num_held += 1
            hold.add(entry, now, self.pressure)
            if self._watching:
                self._note(entry, now, "held", "until %.6f or a full batch", hold.release_at)

    def start(self, job: Job, now: float) -> None:
        """The host took the job off the queue."""
        entry = self._entries[job.rid]
        self._ready.remove(entry)
        entry.undo = (entry.waited, entry.waiting_since, entry.promote_at, entry.started)
        if not entry.started:
            statistics = self._statistics[entry.tier]
            statistics.starts += 1
            wait = now - job.arrival
            statistics.waited_s += wait
            if wait > statistics.longest_wait_s:
                statistics.longest_wait_s = wait
        entry.waited += now - entry.waiting_since
        entry.promote_at = math.inf
        entry.started = True
        if entry.tag is not None:
            self._fair.start(entry.tag)
        self._move(entry, RUNNING)
        if self._watching:
            self._note(entry, now, "started", "rank %d", entry.rank)

    def undo_start(self, job: Job, now: float) -> None:
        """A job the host took off but set aside waits again, as if it had not been taken."""
        entry = self._entries[job.rid]
        assert entry.undo is not None
        entry.waited, entry.waiting_since, entry.promote_at, was_started = entry.undo
        statistics = self._statistics[entry.tier]
        if not was_started:
            entry.started = False
            statistics.starts -= 1
            statistics.waited_s -= now - job.arrival
        statistics.undone_starts += 1
        if entry.tag is not None:
            self._fair.undo_start(entry.tag)
        self._move(entry, READY)
        self._put(entry)
        if self._watching:
            self._note(entry, now, "set aside", "a result from before its preemption is in flight")

    def take_back(self, job: Job) -> None:
        """The host takes a submit back that it made in advance; nothing but its age has told on the job."""
        entry = self._entries.pop(job.rid)
        self._unqueue(entry)
        statistics = self._statistics[entry.tier]
        statistics.submitted -= 1
        statistics.promotions -= entry.promotions
        statistics.present[entry.state] -= 1

    def requeue(self, job: Job, now: float) -> None:
        """The host preempted the job. It is not admitted again before the next begin_step."""
        entry = self._entries[job.rid]
        entry.waiting_since = now
        entry.undo = None
        self._start_ageing(entry)
        self._move(entry, READY)
        entry.blocked = True
        self._returned.append(entry)
        planned = job.rid in self._planned
        if planned:
            self._statistics[entry.tier].planned_preemptions += 1
        else:
            self._statistics[entry.tier].reactive_preemptions += 1
        if self._watching:
            self._note(
                entry, now, "preempted", "for a job ranked above" if planned else "out of blocks"
            )

    def first_token(self, job: Job, now: float) -> None:
        """The job's first token is known. One that comes after its deadline does not save it."""
        entry = self._entries[job.rid]
        if job.ttft_deadline is None or now <= job.ttft_deadline:
            entry.has_token = True
        if self._watching:
            self._note(entry, now, "first token")

    def gone(self, job: Job, now: float, reason: str, output_tokens: int) -> None:
        """The job has left: reason "finished", or why it was aborted. Unknown ones are ignored."""
        entry = self._entries.pop(job.rid, None)
        if entry is None:
            return
        if entry.state == RUNNING:
            self._count_running(entry, -1)
        elif not entry.ending:
            self._unqueue(entry)
        if entry.tag is not None:
            used = job.prompt_tokens + output_tokens if entry.started else 0
            self._fair.settle(job.tenant, entry.size, used)
        statistics = self._statistics[entry.tier]
        statistics.present[entry.state] -= 1
        how = (reason, entry.state)
        statistics.ended[how] = statistics.ended.get(how, 0) + 1
        if reason == "finished":
            self._estimator.learn(entry.tier, output_tokens)
            statistics.estimates += 1
            error = entry.expected - output_tokens
            statistics.estimate_error_tokens += error
            statistics.estimate_abs_error_tokens += abs(error)
        self._head_known = False
        if self._watching:
            self._note(entry, now, "gone", "%s, %d tokens", reason, output_tokens)

    # --- what the host asks ---------------------------------------------------------------

    def begin_step(self, now: float, host: Host) -> Plan:
        """A step begins at `now`: who is aborted, who is preempted. Also releases and promotes what is due."""
        self._step += 1
        self.is_settled = True
        if self._planned:
            self._planned = set()
        if self._uses_fair:
            self._fair.begin_step()
        if self._returned:
            for entry in self._returned:
                entry.blocked = False
                self._queue(entry)
            self._returned = []
        plan = self._nothing
        if self._deadlines and self._deadlines[0][0] <= now:
            plan = Plan(self._due_aborts(now))
        if self._promotions:
            self._promote(now)
        if self._num_held:
            self._release(now)
        if self._ready.number and self._anybody_below(self._ready.first_rank()):
            preempt = self._plan_preemptions(host, plan.abort)
            if preempt:
                plan = Plan(plan.abort, preempt)
        self._head_known = False
        if self._watching:
            self._note_waiting(now, host)
        return plan

    def head(self, now: float) -> Job | None:
        """The job to admit next, None if there is none; the same until something changes."""
        job = self.peek()
        if self._ready.capped:
            for entry in self._ready.capped:
                if not entry.was_capped:
                    entry.was_capped = True
                    self._statistics[entry.tier].cap_stops += 1
        return job

    def peek(self) -> Job | None:
        """What `head` would say; asking leaves no trace in the statistics."""
        if not self._head_known:
            self._head = self._ready.head()
            self._head_known = True
        return None if self._head is None else self._head.job

    def next_wake(self, now: float) -> float:
        """The earliest instant from `now` on at which begin_step or head may answer differently, without new calls.

        `now` itself if that is so already (a batch has filled, a preempted job may come back); infinity if never.
        """
        if self._returned:
            return now
        wake = math.inf
        if self._num_held:
            for _, hold in self._holding:
                wake = min(wake, hold.due_at)
        while self._deadlines and not self._is_pending(*self._deadlines[0][2:]):
            heapq.heappop(self._deadlines)
        while self._promotions and not self._is_ageing(*self._promotions[0][::2]):
            heapq.heappop(self._promotions)
        if self._deadlines:
            wake = min(wake, self._deadlines[0][0])
        if self._promotions:
            wake = min(wake, self._promotions[0][0])
        return max(wake, now)

    def run_key(self, job: Job) -> tuple[Any, ...]:
        """Order of the running jobs; the last one gives way when blocks run out."""
        return self._entries[job.rid].run_key

    @property
    def pressure(self) -> float:
        """How much the first tier queues: its waiting jobs / 10, 1 at most."""
        present = self._statistics[0].present
        return min((present[HELD] + present[READY]) / FULL_PRESSURE, 1.0)

    def pressure_without(self, jobs: Iterable[Job]) -> float:
        """`pressure` as if these waiting jobs were not there."""
        present = self._statistics[0].present
        others = sum(self._entries[job.rid].tier == 0 for job in jobs)
        return min((present[HELD] + present[READY] - others) / FULL_PRESSURE, 1.0)

    def stats(self) -> dict[str, Any]:
        """What was done so far: pressure, and counts and means by tier (see `TierStatistics`)."""
        tiers = zip(self.config.tiers, self._statistics, strict=True)
        return {"pressure": self.pressure, "tiers": {t.name: s.to_dict() for t, s in tiers}}

    def tier_of(self, job: Job) -> str:
        """Name of the tier that the policy counts a job of its to."""
        return self.config.tiers[self._entries[job.rid].tier].name

    def state_of(self, rid: Hashable) -> str | None:
        """held, ready or running; None if the job is gone or was never here."""
        entry = self._entries.get(rid)
        return None if entry is None else entry.state

    def watch(self, rid: Hashable) -> None:
        """Log every decision about `rid` from now on."""
        self._watching = True
        self._log.watch(rid)

    def log(self, rid: Hashable) -> list[Decision]:
        """The decisions about a watched request."""
        return self._log.of(rid)

    # --- what an order may look at (`View`) -----------------------------------------------

    def expected_output(self, job: Job) -> int:
        """Output tokens expected of `job` when it was submitted."""
        return self._entries[job.rid].expected

    def service(self, tenant: str) -> int:
        """Weighted tokens charged to `tenant`, in thousandths."""
        return self._fair.service(tenant)

    def tag(self, job: Job) -> int:
        """Start tag of fair queueing; 0 where no tier uses it."""
        return self._entries[job.rid].tag or 0

    def due(self, job: Job) -> float:
        """When the first token of `job` is due."""
        target = self.config.tiers[self._entries[job.rid].tier].ttft_target
        if job.ttft_deadline is not None:
            return job.ttft_deadline
        return math.inf if target is None else job.arrival + target

    # --- queues ---------------------------------------------------------------------------

    def _tier_number(self, job: Job) -> int:
        number = self._tier_numbers.get(job.tier)
        if number is None:
            fallback = ANY_TIER if ANY_TIER in self._tier_numbers else self.config.default_tier
            if fallback is None:
                raise ValueError(
                    f"job {job.rid!r}: tier {job.tier!r} is not one of "
                    f"{', '.join(self._tier_numbers)}"
                )
            number = self._tier_numbers[fallback]
        return number

    def _make_ready(self, entry: Entry, now: float) -> None:
        """A job that is not held, or no longer, enters the ready queue."""
        entry.state = READY
        if self._uses_fair:
            entry.tag = self._fair.enter(entry.job.tenant, entry.size)
        self._age(entry, now)
        self._queue(entry)
        if self._watching:
            self._note(entry, now, "ready", "rank %d", entry.rank)

    def _queue(self, entry: Entry) -> None:
        """A ready job enters the queue of its rank, with new keys."""
        job, rank = entry.job, entry.rank
        entry.key = self._orders[rank](job, self)
        largest = entry.size if self._largest_first[rank] else 0
        entry.run_key = (rank, largest, job.arrival, job.seq)
        self._put(entry)

    def _put(self, entry: Entry) -> None:
        """A ready job enters the queue of its rank, with the keys it has."""
        self._ready.add(entry)
        if entry.rank > 0 and entry.promote_at < math.inf:
            heapq.heappush(self._promotions, (entry.promote_at, entry.job.seq, entry))
        self._head_known = False

    def _unqueue(self, entry: Entry) -> None:
        """Take a waiting job out of whatever it waits in."""
        if entry.state == HELD:
            hold = self._holds[entry.tier]
            assert hold is not None
            hold.remove(entry)
            self._num_held -= 1
        elif entry.blocked:
            self._returned.remove(entry)
        else:
            self._ready.remove(entry)
        self._head_known = False

    def _move(self, entry: Entry, state: str) -> None:
        """Between ready and running, with the counts that caps look at."""
        present = self._statistics[entry.tier].present
        present[entry.state] -= 1
        present[state] += 1
        entry.state = state
        self._count_running(entry, 1 if state == RUNNING else -1)
        self._head_known = False

    def _count_running(self, entry: Entry, jobs: int) -> None:
        self._running_jobs[entry.tier] += jobs
        self._running_tokens[entry.tier] += jobs * entry.size
        if self._gives_way[entry.tier]:
            self._preemptible[entry.rank] += jobs

    # --- time -----------------------------------------------------------------------------

    def _start_ageing(self, entry: Entry) -> None:
        """The job begins to wait (again): when will it have waited for its next promotion?"""
        after = self._promote_after[entry.tier]
        if after is not None:
            left = after * (entry.promotions + 1) - entry.waited
            entry.promote_at = entry.waiting_since + left

    def _age(self, entry: Entry, now: float) -> None:
        """Move the job up a rank for every promotion that is due."""
        after = self._promote_after[entry.tier]
        while after is not None and entry.rank > 0 and now >= entry.promote_at:
            entry.rank -= 1
            entry.promotions += 1
            entry.promote_at += after
            self._statistics[entry.tier].promotions += 1
            if self._watching:
                self._note(entry, now, "promoted", "to rank %d", entry.rank)

    def _promote(self, now: float) -> None:
        heap = self._promotions
        while heap and heap[0][0] <= now:
            promote_at, _, entry = heapq.heappop(heap)
            if self._is_ageing(promote_at, entry):
                self._unqueue(entry)
                self._age(entry, now)
                self._queue(entry)

    def _is_ageing(self, promote_at: float, entry: Entry) -> bool:
        """Whether this timer is still the one the job waits for."""
        return (
            entry.state == READY
            and entry.promote_at == promote_at
            and entry.rank > 0
            and not entry.ending
            and self._entries.get(entry.job.rid) is entry
        )

    def _release(self, now: float) -> None:
        for tier, hold in self._holding:
            statistics = self._statistics[tier]
            while now >= hold.due_at:
                reason, batch = hold.release()
                statistics.releases[reason] = statistics.releases.get(reason, 0) + 1
                statistics.batch_jobs += len(batch)
                statistics.largest_batch = max(statistics.largest_batch, len(batch))
                self._num_held -= len(batch)
                for entry in batch:
                    statistics.batch_tokens += entry.size
                    statistics.held_s += now - entry.job.arrival
                    self._make_ready(entry, now)
                statistics.present[HELD] -= len(batch)
                statistics.present[READY] += len(batch)

    def _is_pending(self, reason: str, entry: Entry) -> bool:
        """Whether a deadline can still pass."""
        return (
            not entry.ending
            and self._entries.get(entry.job.rid) is entry
            and not (reason == "timeout:ttft" and entry.has_token)
        )

    def _due_aborts(self, now: float) -> list[tuple[Job, str]]:
        aborts = []
        heap = self._deadlines
        while heap and heap[0][0] <= now:
            _, _, reason, entry = heapq.heappop(heap)
            if self._is_pending(reason, entry):
                if entry.state != RUNNING:
                    self._unqueue(entry)
                entry.ending = True
                aborts.append((entry.job, reason))
                if self._watching:
                    self._note(entry, now, "abort", reason)
        return aborts

    # --- preemption -----------------------------------------------------------------------

    def _anybody_below(self, rank: int) -> bool:
        """Whether a job that may give way to one of this rank runs."""
        return any(self._preemptible[rank + 1 :])

    def _plan_preemptions(self, host: Host, abort: list[tuple[Job, str]]) -> list[Job]:
        room = self._room.copy()
        room.slots, room.blocks = host.free_slots, host.free_blocks
        if host.watermark_blocks:  # else it does not matter how many run
            room.alive = len(host.running)
        for job, _ in abort:
            entry = self._entries[job.rid]
            if entry.state == RUNNING:
                room.give(entry, host.blocks_of(job))

        def victims_below(rank: int) -> list[Entry]:
            running = [self._entries[job.rid] for job in host.running]
            below = [e for e in running if e.rank > rank and not e.ending]
            victims = [e for e in below if self._gives_way[e.tier]]
            return sorted(victims, key=lambda entry: entry.run_key)

        stopped: set[int] = set()
        waiting = self._ready.in_head_order(stopped)
        chosen = choose_victims(waiting, victims_below, room, host, stopped)
        self.is_settled = not room.taken
        for entry in chosen:
            self._planned.add(entry.job.rid)
            self._statistics[entry.tier].lost_tokens += host.tokens_of(entry.job)[0]
        return [entry.job for entry in chosen]

    # --- decision log ---------------------------------------------------------------------

    def _note(self, entry: Entry, now: float, event: str, detail: str = "", *args: Any) -> None:
        if entry.job.rid in self._log.logs:
            self._log.add(entry.job.rid, now, self._step, event, detail % args)

    def _note_waiting(self, now: float, host: Host) -> None:
        """Why each watched job that waits is not running, unless it is started in this step."""
        for rid in self._log.logs:
            entry = self._entries.get(rid)
            if entry is None or entry.state != READY or entry.ending:
                continue
            ahead = 0
            for other in self._ready.in_head_order():
                if other is entry:
                    break
                ahead += 1
            if not self._room.allows(entry):
                why = "its tier is at its cap"
            elif ahead:
                why = f"{ahead} ahead in the queue"
            elif host.free_slots < 1:
                why = "no free slot"
            else:
                reserve = host.watermark_blocks if host.running else 0
                need, free = host.blocks_for(entry.job) + reserve, host.free_blocks
                why = f"needs {need} blocks, {free} free" if need > free else "the step was full"
            self._log.skip(rid, now, self._step, why)
