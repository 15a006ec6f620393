"""The plug-in on vLLM's scheduler without a model: what goes wrong, and what vLLM does beside a plain request."""

import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import real.scheduler
from real.waiting import ArrivalOrder
from tests.parity.vllm_host import make_scheduler
from twin.engine.config import EngineConfig
from twin.scheduling import Policy

pytestmark = pytest.mark.vllm

METHODS = (
    "submit",
    "start",
    "requeue",
    "undo_start",
    "first_token",
    "gone",
    "begin_step",
    "head",
    "run_key",
)


class Engine:
    """vLLM's scheduler under a policy, with virtual time and a model that says 0."""

    def __init__(self, policy="tiered", is_async=False, **limits):
        engine = {
            "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 256, "num_gpu_blocks": 40,
            "block_size": 16, "async_scheduling": is_async,
        } | limits  # fmt: skip
        self.config = EngineConfig(**engine)
        self.scheduler = make_scheduler(
            self.config, real.scheduler.make_scheduler, {"twin": {"policy": policy}}
        )
        self.now = 100.0
        self.scheduler.clock = lambda: self.now
        self.scheduler.arrival_of = lambda request: request.arrival_time
        self.depth = 2 if is_async else 1
        self.in_flight = []
        self.replies = {}
        self.ends = {}
        self.started = []
        self.hasher = get_request_block_hasher(16, sha256)

    def add(
        self, rid, prompt=20, max_tokens=8, resumable=False, structured=False, extra=None, **more
    ):
        request = Request(
            rid,
            [hash((rid, i)) % 1000 for i in range(prompt)],
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args=extra,
                structured_outputs=StructuredOutputsParams(regex="0*") if structured else None,
            ),
            None,
            arrival_time=self.now,
            block_hasher=self.hasher,
            resumable=resumable,
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, *rids):
        self.scheduler.finish_requests(list(rids), RequestStatus.FINISHED_ABORTED)

    def step(self, seconds=0.01):
        """One turn of the engine's loop: plan as many steps as may be in flight, take in the first."""
        while len(self.in_flight) < self.depth:
            planned = self.scheduler.schedule()
            self.started += [r.req_id for r in planned.scheduled_new_reqs]
            sampled = {
                rid: not self.scheduler.requests[rid].is_prefill_chunk
                for rid in planned.num_scheduled_tokens
            }
            self.in_flight.append((planned, sampled))
            if not planned.num_scheduled_tokens:
                break
        planned, sampled = self.in_flight.pop(0)
        self.now += seconds
        rids = list(planned.num_scheduled_tokens)
        tokens = [[0] if sampled[rid] else [] for rid in rids]
        outputs = self.scheduler.update_from_output(
            planned, ModelRunnerOutput(rids, {rid: i for i, rid in enumerate(rids)}, tokens)
        )
        for group in outputs.values():
            for result in group.outputs:
                self.replies.setdefault(result.request_id, 0)
                self.replies[result.request_id] += len(result.new_token_ids)
                if result.finish_reason is not None:
                    self.ends.setdefault(result.request_id, []).append(
                        (str(result.finish_reason), result.stop_reason)
                    )
        return planned

    def run(self, most=2000):
        steps = 0
        while self.scheduler.has_unfinished_requests():
            self.step()
            steps += 1
            assert steps < most, self.scheduler.requests
        for _ in range(3):
            self.step()
        return steps

    def check_empty(self):
        """Nothing is left in any table, and all blocks are free."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.tracked
        assert not scheduler.waiting.waiting
        assert not scheduler.waiting.compiling
        assert not scheduler._without_token
        assert not scheduler._to_tell
        assert (
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            == self.config.num_gpu_blocks - 1
        )
        if not isinstance(scheduler.policy, ArrivalOrder):
            assert not scheduler.policy._entries
            for tier in scheduler.policy.stats()["tiers"].values():
                assert tier["submitted"] == sum(tier["ended"].values())
                assert tier["held"] == tier["ready"] == tier["running"] == 0


def tier(name, **more):
    return {"extra": {"tier": name, **more}}


# --- a policy that fails ----------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_policy_that_raises_gives_way_to_arrival_order(monkeypatch, caplog, method, is_async):
    caplog.set_level("ERROR", logger="vllm.twin")
    rng = random.Random(method)
    failed = 0
    for at in (1, 2, 3, 5, 9, 17, 33):
        engine = Engine(is_async=is_async)
        original, calls = getattr(Policy, method), []

        def failing(self, *args, original=original, calls=calls, at=at):
            calls.append(1)
            if len(calls) >= at:
                raise ZeroDivisionError(f"made to fail in call {at}")
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Policy, method, failing)
            for i in range(14):
                name = rng.choice(["ONLINE", "BATCH", "OFFLINE"])
                engine.add(f"r{i}", rng.randint(1, 120), rng.randint(1, 30), **tier(name))
                if rng.random() < 0.5:
                    engine.step()
            engine.abort("r3")
            engine.run()
        failed += engine.scheduler.policy_errors
        assert engine.scheduler.policy_errors == (len(calls) >= at)
        ended = {rid: ends[0][0] for rid, ends in engine.ends.items()}
        assert all(reason in ("length", "abort") for reason in ended.values())
        assert len(ended) >= 13
        engine.check_empty()
    assert failed or method == "undo_start"  # nothing is set aside without a result in flight
    if failed:
        assert "made to fail" in caplog.text


# --- clocks -------------------------------------------------------------------------------------


def test_a_wall_clock_that_is_set_moves_no_timer(monkeypatch):
    engine = Engine()
    del engine.scheduler.arrival_of
    wall = SimpleNamespace(now=1_000_000.0)
    monkeypatch.setattr(real.scheduler.time, "time", lambda: wall.now)

    def arrive(rid, seconds_ago, **more):
        request = engine.add(rid, max_tokens=200, **more)
        engine.abort(rid)
        request.status, request.arrival_time = RequestStatus.WAITING, wall.now - seconds_ago
        engine.scheduler.add_request(request)
        return engine.scheduler.tracked[rid].job

    job = arrive("a", 0.25, **tier("ONLINE", total_s=1.0))
    assert job.arrival == pytest.approx(engine.now - 0.25)
    wall.now -= 7200.0
    assert job.deadline == pytest.approx(100.75)
    late = arrive("b", -3600.0, **tier("ONLINE", total_s=1.0))  # stamped before the clock went back
    assert late.arrival == engine.now
    wall.now += 1e6
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.ends == {
        "a": [("abort", "timeout:total")],
        "b": [("abort", "timeout:total")],
    }
    assert engine.now == pytest.approx(101.0, abs=0.03)
    for _ in range(2):
        engine.step()
    engine.check_empty()


# --- what else vLLM does ------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_time_outs_and_clients_that_leave(is_async):
    engine = Engine(is_async=is_async, max_num_seqs=2)
    for i in range(6):
        engine.add(f"r{i}", max_tokens=100, client_index=i % 2, **tier("ONLINE", ttft_s=0.05))
    engine.add("t", max_tokens=100, **tier("BATCH", total_s=0.3))
    for _ in range(5):
        engine.step()
    engine.abort("r0", "nobody", "r5")
    engine.run()
    assert {rid: ends[0] for rid, ends in engine.ends.items()} == {
        "r1": ("length", None),
        **{f"r{i}": ("abort", "timeout:ttft") for i in (2, 3, 4)},
        "t": ("abort", "timeout:total"),
    }
    engine.check_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_whose_grammar_is_compiled_costs_nobody_a_slot(is_async):
    engine = Engine("priority", is_async, max_num_seqs=2)
    for i in range(2):
        engine.add(f"off{i}", max_tokens=60, **tier("OFFLINE"))
    engine.step()
    future = Future()
    asked = engine.add("json", structured=True, max_tokens=4, **tier("ONLINE"))
    asked.structured_output_request.grammar = future
    hopeless = engine.add("hung", structured=True, **tier("ONLINE", total_s=0.2))
    hopeless.structured_output_request.grammar = Future()
    for _ in range(10):
        engine.step()
    stats = engine.scheduler.policy.stats()["tiers"]
    assert stats["OFFLINE"]["planned_preemptions"] == 0
    assert engine.scheduler.get_request_counts() == (2, 2)
    grammar = SimpleNamespace(
        accept_tokens=lambda rid, tokens: True,
        is_terminated=lambda: False,
        fill_bitmask=lambda *a: None,
    )
    future.set_result(grammar)
    engine.step()
    engine.run()
    assert engine.scheduler.policy.stats()["tiers"]["OFFLINE"]["planned_preemptions"] == 1
    assert engine.replies == {"off0": 60, "off1": 60, "json": 4, "hung": 0}
    assert engine.ends["hung"] == [("abort", "timeout:total")]
    engine.check_empty()


def test_a_grammar_that_does_not_compile_fails_its_request_only():
    engine = Engine("priority")
    future = Future()
    engine.add("bad", structured=True).structured_output_request.grammar = future
    engine.add("good")
    engine.step()
    future.set_exception(ValueError("no grammar"))
    engine.run()
    assert engine.ends["bad"][0][0] == "error"
    assert engine.replies["good"] == 8
    ended = engine.scheduler.policy.stats()["tiers"]["ONLINE"]["ended"]
    assert ended == {"error ready": 1, "finished running": 1}
    engine.check_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_streaming_session_is_one_job_over_all_its_turns(is_async):
    engine = Engine("priority", is_async)
    engine.add("s", max_tokens=4, resumable=True, **tier("OFFLINE"))
    for turn in range(3):
        engine.run() if is_async is None else None
        for _ in range(12):
            engine.step()
        assert len(engine.ends["s"]) == turn + 1
        assert engine.scheduler.policy.state_of("s") == "running"
        assert engine.scheduler._host.free_slots == 3
        engine.add(f"other{turn}", max_tokens=3)
        engine.add("s", max_tokens=4, resumable=True, **tier("OFFLINE"))
    for _ in range(12):
        engine.step()
    assert engine.replies["s"] == 16
    engine.add("s", resumable=False)  # the end of the session
    engine.run()
    assert engine.replies["other2"] == 3
    engine.check_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_sessions_are_preempted_and_aborted_like_others(is_async):
    rng = random.Random(1)
    for _ in range(20):
        engine = Engine("priority", is_async, num_gpu_blocks=18, max_num_seqs=3)
        open_turns = {}
        for i in range(60):
            if rng.random() < 0.25:
                rid = rng.choice(["s0", "s1", "s2"])
                if open_turns.get(rid, 0) < 3:
                    engine.add(
                        rid,
                        rng.randint(1, 40),
                        rng.randint(1, 12),
                        resumable=True,
                        **tier("OFFLINE"),
                    )
                    open_turns[rid] = open_turns.get(rid, 0) + 1
            if rng.random() < 0.3:
                engine.add(f"r{i}", rng.randint(1, 60), rng.randint(1, 20), **tier("ONLINE"))
            if rng.random() < 0.05:
                rid = rng.choice(["s0", "s1"])
                engine.abort(rid)
                open_turns[rid] = 3  # an id that was aborted is not used again
            engine.step()
        for _ in range(200):
            engine.step()
        engine.abort("s0", "s1", "s2")
        engine.run()
        assert engine.scheduler.policy_errors == 0
        for rid, ends in engine.ends.items():
            if rid.startswith("r"):
                assert [reason for reason, _ in ends] == ["length"]
        engine.check_empty()


def test_nobody_gives_way_while_admission_is_paused():
    engine = Engine("priority", max_num_seqs=2)
    for i in range(2):
        engine.add(f"off{i}", max_tokens=20, **tier("OFFLINE"))
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add("on", **tier("ONLINE"))
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.replies == {"off0": 20, "off1": 20}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.replies["on"] == 8
    engine.check_empty()


def test_all_running_requests_reset_at_once_come_back():
    engine = Engine("tiered")
    for i in range(6):
        engine.add(f"r{i}", max_tokens=30, **tier("BATCH"))
    for _ in range(10):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.replies == {f"r{i}": 30 for i in range(6)}
    engine.check_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_base_is_the_one_the_engine_asks_for(is_async):
    scheduler = Engine(is_async=is_async).scheduler
    assert isinstance(scheduler, real.scheduler.AsyncScheduler) == is_async


@pytest.mark.parametrize(
    ("extra", "priority", "expected"),
    [
        (None, 0, "ONLINE"),
        ({"tier": "BATCH"}, 2, "BATCH"),
        ({}, 2, "OFFLINE"),
        ({"tier": "nonsense", "ttft_s": "soon", "tenant": [1]}, 0, "ONLINE"),
        ({"priority": ""}, 2, "ONLINE"),  # how the API server tells of a priority that is none
    ],
)
def test_the_tier_of_a_request(extra, priority, expected):
    engine = Engine()
    engine.add("r", extra=extra, priority=priority)
    assert engine.scheduler.tracked["r"].job.tier == expected
    engine.run()
    assert engine.replies["r"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (3, "additional_config.twin must be an object"),
        ({"polcy": "tiered"}, "additional_config.twin.polcy is not known"),
        ({"bad_hints": "rejct"}, "bad_hints must be one of default, reject"),
        ({"headers": {"x": "bogus"}}, "header x: 'bogus' is none of"),
    ],
)
def test_settings_that_make_no_sense_end_the_engine_before_it_starts(settings, message):
    with pytest.raises(ValueError, match=message):
        make_scheduler(Engine().config, real.scheduler.make_scheduler, {"twin": settings})


def test_bad_hints_are_complained_about_once(caplog):
    caplog.set_level("WARNING", logger="vllm.twin")
    engine = Engine()
    for i in range(50):
        engine.add(f"r{i}", extra={"tier": f"x{i}", "ttft_s": -1})
    assert len([r for r in caplog.records if r.name == "vllm.twin"]) == 2
    engine.run()
    engine.check_empty()


def test_metrics_that_cannot_be_written_stop_nobody(monkeypatch, caplog, tmp_path):
    caplog.set_level("ERROR", logger="vllm.twin")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    engine = Engine()
    assert engine.scheduler._exporter is not None

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(real.scheduler.Exporter, "first_token", full)
    for i in range(6):
        engine.add(f"r{i}")
    engine.run()
    assert engine.replies == {f"r{i}": 8 for i in range(6)}
    assert engine.scheduler._exporter is None
    assert engine.scheduler.policy_errors == 0
    assert caplog.text.count("metrics by tier failed") == 1
    engine.check_empty()


def test_what_is_not_modelled_is_said():
    parallel = SimpleNamespace(pipeline_parallel_size=2, data_parallel_size=1)
    config = SimpleNamespace(
        parallel_config=parallel,
        speculative_config=object(),
        lora_config=None,
        kv_transfer_config=None,
    )
    found = real.scheduler.not_modelled(config)
    assert found == "speculative decoding, pipeline parallelism"
    assert real.scheduler.not_modelled(Engine().scheduler.vllm_config) == ""
