"""What must hold in every step of every run, and small runs whose course is known."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.drive import Planned, Results, Taken, drive, make_core
from tests.parity.twin_host import TwinHost
from tests.parity.workload import Ask, Workload, policy_workload, stock_workload
from twin.engine.config import EngineConfig
from twin.engine.core import EngineCore
from twin.engine.request import Status
from twin.scheduling import PRESETS

seeds = st.integers(0, 10**6)
many = settings(max_examples=5 * settings().max_examples)


def may_not_end(workload):
    """vLLM's priority policy may take turns at preempting for ever when it admits what does not fit as a whole."""
    config = workload.config
    stock_priority = not workload.policy and config.scheduling_policy == "priority"
    return stock_priority and not config.scheduler_reserve_full_isl


stock_workloads = st.builds(stock_workload, seeds).filter(lambda w: not may_not_end(w))
policy_workloads = st.builds(policy_workload, seeds, st.sampled_from(sorted(PRESETS)))
workloads = stock_workloads | policy_workloads


# --- in every step ------------------------------------------------------------------------


def check_blocks(core):
    """Every block but the null block is free or held, and shared ones are held as often as the pool thinks."""
    holders = Counter(block for request in core.requests.values() for block in request.blocks)
    held = sorted([*core.pool.free_order(), *holders])
    assert held == list(range(1, core.config.num_gpu_blocks))
    for block, count in holders.items():
        assert core.pool.count_sole([block]) == (count == 1)


def check_requests(core):
    """Running requests hold what they computed, waiting ones hold nothing, none is longer than it may be."""
    config, running = core.config, core.running_requests
    assert len(running) == len(set(running)) <= config.active_limit
    assert len(running) + len(core.waiting) == len(core.requests)
    for request in core.requests.values():
        assert request.num_tokens <= config.max_model_len
        assert request.num_output_tokens <= request.max_tokens
        assert len(set(request.blocks)) == len(request.blocks)
        if request in running:
            assert request.status is Status.RUNNING
            assert len(request.blocks) * config.block_size >= request.num_computed_tokens
        else:
            assert request.status in (Status.WAITING, Status.PREEMPTED)
            assert request.blocks == []
            assert request.num_computed_tokens == 0


def check_plan(core, step):
    """The step keeps to its tokens, to the limit per request and to the rule of who may enter."""
    config = core.config
    assert sum(step.scheduled.values()) == step.num_tokens <= config.token_budget
    limit = config.long_prefill_token_threshold
    if limit and config.long_prefill_token_threshold_adaptive:
        limit = max(limit, config.max_num_batched_tokens // max(1, len(core.requests)))
    if limit and len(core.requests) > 1:
        assert max(step.scheduled.values(), default=0) <= limit
    assert all(tokens >= 1 for tokens in step.scheduled.values())
    assert step.sampled <= step.scheduled.keys() <= set(core.running_requests)
    entered = len(step.admitted)
    assert list(step.admitted) == core.running_requests[len(core.running_requests) - entered :]
    assert not (step.admitted and step.preempted)
    gone = {*step.preempted, *step.planned_preempted, *(request for request, _ in step.aborted)}
    assert not gone & {*step.scheduled, *step.admitted}


def check_work(step):
    """What the duration depends on, token by token."""
    decodes, context, pairs = 0, 0, 0
    for request, tokens in step.scheduled.items():
        computed = request.num_computed_tokens - tokens
        keys = [position + 1 for position in range(computed, computed + tokens)]
        if tokens == 1 and computed >= request.num_prompt_tokens:
            decodes += 1
            context += sum(keys)
        else:
            pairs += sum(keys)
    assert (step.num_decodes, step.decode_context, step.prefill_pairs) == (decodes, context, pairs)


def check_caps(core):
    """No tier runs more jobs than it may."""
    if core.policy is None:
        return
    for tier in core.policy.config.tiers:
        running = [job for job in core.running if tier.name in ("*", job.tier)]
        assert len(running) <= (tier.max_running or math.inf)


def came_and_ended(log):
    """(requests that came, why each of those that ended did)."""
    came, ended = set(), {}
    for entry in log:
        if isinstance(entry, Taken) and entry.event == "came":
            came.add(entry.rid)
            continue
        if isinstance(entry, Taken):
            ends = [(entry.rid, "left")]
        elif isinstance(entry, Planned):
            ends = entry.aborted
        elif isinstance(entry, Results):
            ends = [(rid, reason) for rid, reason in entry.tokens if reason is not None]
        else:
            continue
        for rid, reason in ends:
            assert rid not in ended, "ended twice"
            ended[rid] = reason
    return came, ended


@many
@given(workloads)
def test_every_step_keeps_the_rules(workload):
    def check(core, step, log):
        check_blocks(core)
        check_requests(core)
        if isinstance(log[-1], Planned):
            check_plan(core, step)
            check_work(step)
            check_caps(core)

    drive(workload, check=check)


@many
@given(workloads)
def test_nothing_vanishes(workload):
    def check(core, step, log):
        came, ended = came_and_ended(log)
        assert came == {*ended, *core.requests}
        assert not ended.keys() & core.requests.keys()

    # Books are kept from scratch at every call, so long runs are left to the check at the end.
    short = len(workload.asks) <= 10
    log = drive(workload, check=check) if short else drive(workload)
    came, ended = came_and_ended(log)
    assert came == set(ended) == {ask.rid for ask in workload.asks}


@many
@given(workloads)
def test_who_finishes_has_all_its_tokens_and_nobody_has_more(workload):
    log = drive(workload)
    _, ended = came_and_ended(log)
    tokens = Counter(rid for e in log if isinstance(e, Results) for rid, _ in e.tokens)
    for ask in workload.asks:
        whole = min(ask.max_tokens, ask.output_tokens or math.inf)
        assert tokens[ask.rid] <= whole
        if ended[ask.rid] in ("stop", "length"):
            assert tokens[ask.rid] == whole
            assert (ended[ask.rid] == "stop") == (whole == ask.output_tokens)


# --- progress -----------------------------------------------------------------------------


def goes_on(core, step):
    """Whether the first running request computes, or waits for the result that ends it."""
    first = core.running_requests[0]
    return first in step.scheduled or core._will_have_ended(first)


@many
@given(workloads.filter(lambda w: w.config.scheduling_policy == "fcfs"))
def test_the_first_running_request_always_goes_on(workload):
    workload = replace(workload, depth=min(workload.depth, 2))

    def check(core, step, log):
        if isinstance(log[-1], Planned) and core.running_requests:
            assert goes_on(core, step)

    drive(workload, check=check)


@many
@given(st.builds(stock_workload, seeds).filter(lambda w: w.config.scheduling_policy == "fcfs"))
def test_preemption_costs_no_more_steps_than_the_first_request_at_each_time_has_tokens(workload):
    """First come, first served: whoever is first computes in every step and is never a victim, so no livelock."""
    log = drive(workload)
    steps = sum(bool(entry.scheduled) for entry in log if isinstance(entry, Planned))
    assert steps <= sum(
        ask.prompt_tokens + min(ask.max_tokens, ask.output_tokens or math.inf) + 2 * workload.depth
        for ask in workload.asks
    )


def test_a_preempted_request_makes_progress_when_it_returns():
    """Two long shared prefixes and outputs that fill the KV cache (inference-sim/inference-sim#1057, scaled down)."""
    config = EngineConfig(
        max_num_seqs=32,
        max_num_batched_tokens=128,
        max_model_len=400,
        num_gpu_blocks=139,
        block_size=4,
    )
    asks = []
    for seq in range(150):
        prompt = ((9000 + seq, 20),)
        if seq % 7 < 5:  # 71 %
            prompt = ((1 + seq % 2, 256), *prompt)
        asks.append(Ask(seq, seq * 0.5, prompt, 1000 + seq, 60 + seq % 50, 110))
    without_token, worst, hits = Counter(), 0, 0

    def check(core, step, log):
        nonlocal worst, hits
        if isinstance(log[-1], Results):
            for rid, _ in log[-1].tokens:
                without_token[rid] = 0
            return
        for request in step.preempted:
            without_token[request.rid] += 1
            worst = max(worst, without_token[request.rid])
        for request in step.admitted:
            if request.num_preemptions:
                hits += request.num_computed_tokens - step.scheduled[request]

    workload = Workload(0, config, tuple(asks), (0.05,), depth=2)
    core = make_core(workload)
    _, ended = came_and_ended(drive(workload, core, check))
    assert Counter(ended.values()) == {"stop": 150}
    assert core.num_preemptions > 50
    assert hits > 50 * 256 / 2  # most of what was thrown away is found again
    assert worst <= 3


# --- steps that repeat --------------------------------------------------------------------


class Forecast(EngineCore):
    """Before a step of decodes only, says for how many steps nothing will change, and is held to it.

    All running requests have one token to compute and all are scheduled. That goes on until one ends or the free
    blocks run out, if none can be admitted meanwhile and nothing comes from outside.
    """

    def __init__(self, config):
        super().__init__(config)
        self.kept = self.tight = 0
        self._left = 0
        self._batch = None

    def add(self, request, now):
        self._left, self._batch = 0, None
        super().add(request, now)

    def abort(self, request, now, reason):
        self._left, self._batch = 0, None
        super().abort(request, now, reason)

    def schedule(self, now):
        over = self._batch if self._left == 0 else None
        if self._left == 0:
            self._left = self._steps_alike()
            self._batch = (
                [(request, 1) for request in self.running_requests] if self._left else None
            )
        step = super().schedule(now)
        quiet = not (step.admitted or step.preempted)
        alike = quiet and list(step.scheduled.items())
        if over is not None:
            assert alike != over, "it could have gone on"
            self.tight += 1
        if self._left:
            assert alike == self._batch, "something changed"
            self._left -= 1
            self.kept += 1
        return step

    def _steps_alike(self):
        config, running = self.config, self.running_requests
        lag = 1 if config.async_scheduling else 0
        ahead = [r.num_tokens + r.num_output_placeholders for r in running]
        if any(known - r.num_computed_tokens != 1 for r, known in zip(running, ahead, strict=True)):
            return 0
        full = len(running) in (config.active_limit, config.token_budget)
        if not running or len(running) > config.token_budget or (self.waiting and not full):
            return 0
        ends = [math.inf]
        for request, known in zip(running, ahead, strict=True):
            longest = request.num_prompt_tokens + request.max_tokens
            ends.append(min(longest, config.max_model_len) - known)
            if request.output_tokens is not None:
                ends.append(request.num_prompt_tokens + request.output_tokens + lag - known)
        return max(0, min(*ends, self._steps_until_blocks_run_out()))

    def _steps_until_blocks_run_out(self):
        size, running = self.config.block_size, self.running_requests
        slack = [len(r.blocks) * size - r.num_computed_tokens for r in running]
        steps = 0
        while (
            len(running) * ((steps + 1) // size) + sum(s < (steps + 1) % size for s in slack)
            <= self.pool.num_free
        ):
            steps += 1
        return steps


@many
@given(st.builds(stock_workload, seeds).filter(lambda w: not may_not_end(w)))
def test_decode_steps_repeat_until_one_ends_or_blocks_run_out(workload):
    workload = replace(workload, depth=min(workload.depth, 2))
    drive(workload, Forecast(workload.config))


def test_most_decode_steps_are_forecast():
    """The forecast is worth having, and where it stops something does change."""
    kept = tight = steps = 0
    for seed in range(60):
        workload = stock_workload(seed)
        if may_not_end(workload):
            continue
        workload = replace(workload, depth=min(workload.depth, 2))
        core = Forecast(workload.config)
        log = drive(workload, core)
        steps += sum(bool(entry.scheduled) for entry in log if isinstance(entry, Planned))
        kept, tight = kept + core.kept, tight + core.tight
    assert (
        kept > steps / 20
    )  # these engines are short of everything, so most of their steps change something
    assert tight > 100


# --- small runs whose course is known -----------------------------------------------------


def plain(**changes):
    """An engine with room for everything, one step a second."""
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "num_gpu_blocks": 200,
        "block_size": 4,
        "async_scheduling": False,
    }
    return EngineConfig(**defaults | changes)


def course(config, asks):
    """(order of admission, order of finishing) of a run with one step a second."""
    depth = 2 if config.async_scheduling else 1
    log = drive(Workload(0, config, tuple(asks), (1.0,), depth))
    admitted = [rid for entry in log if isinstance(entry, Planned) for rid in entry.admitted]
    _, ended = came_and_ended(log)
    return admitted, list(ended)


def ask(seq, arrival, prompt, output, **changes):
    return Ask(seq, arrival, ((100 + seq, prompt),), 200 + seq, output, output, **changes)


@pytest.mark.parametrize("is_async", [False, True])
def test_first_come_is_not_first_finished(is_async):
    """Three slots, 100, 10 and 50 tokens, all at once (vllm-project/vllm#4563)."""
    config = plain(max_num_seqs=3, async_scheduling=is_async)
    asks = [ask(seq, 0.0, 8, tokens) for seq, tokens in enumerate((100, 10, 50))]
    admitted, finished = course(config, asks)
    assert admitted == ["r000000", "r000001", "r000002"]
    assert finished == ["r000001", "r000002", "r000000"]


@pytest.mark.parametrize("reserve", [True, False])
def test_two_half_admitted_requests_do_not_block_each_other(reserve):
    """Together they are larger than the KV cache (vllm-project/vllm#45388, scaled down)."""
    config = plain(num_gpu_blocks=33, max_num_batched_tokens=16, scheduler_reserve_full_isl=reserve)
    admitted, finished = course(config, [ask(0, 0.0, 100, 10), ask(1, 0.0, 75, 10)])
    assert finished == ["r000000", "r000001"]
    assert len(admitted) == (2 if reserve else 3)


def test_under_priority_a_preempted_request_loses_its_place_to_an_older_one():
    """vLLM sorts by (priority, arrival), whatever was computed already (vllm-project/vllm#41951)."""
    config = plain(num_gpu_blocks=33, scheduling_policy="priority", enable_prefix_caching=False)
    core = EngineCore(config)
    host = TwinHost(core, config)
    first = ask(0, 0.0, 16, 40, priority=0)  # grows until it needs what A holds, then ends
    a, b = ask(1, 1.0, 48, 60, priority=1), ask(2, 0.5, 90, 30, priority=1)
    host.add(first, 0.0)
    host.add(a, 1.0)
    admitted, preempted = [], []
    for second in range(400):
        if second == 3:
            host.add(
                b, 3.0
            )  # its stamp is older than A's; it fits when `first` has ended, as A does then
        step = core.schedule(float(second))
        admitted += [request.rid for request in step.admitted]
        preempted += [request.rid for request in step.preempted]
        core.update(step, second + 1.0)
    assert not core.has_requests()
    assert preempted == [a.rid]
    assert admitted == [first.rid, a.rid, b.rid, a.rid]
    assert core.recomputed_tokens > a.prompt_tokens
