"""vLLM's scheduler, recorded, beside the twin's engine that is asked the same."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from real.calibrate import read_recording, recorded_steps
from real.decisions import RecordedKeys, _Driver, read_rows
from real.record import make_recording_scheduler
from real.sweep import Ask
from real.tiny import write_tiny_model
from tests.parity.vllm_host import make_scheduler
from twin.engine.config import EngineConfig
from twin.scheduling import Policy, policy_config

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[1]
CONFIG = EngineConfig(
    max_num_seqs=5, max_num_batched_tokens=96, max_model_len=256, num_gpu_blocks=20, block_size=16,
    enable_prefix_caching=True, async_scheduling=False,
)  # fmt: skip


def record(path, policy, seed):
    """A workload that preempts, hits the prefix cache, loses clients and ends by length and by end of sequence."""
    rng = random.Random(seed)
    settings = {"twin": {"policy": policy, "record": str(path)}}
    scheduler = make_scheduler(CONFIG, make_recording_scheduler, settings)
    hasher = get_request_block_hasher(16, sha256)
    shared = [rng.randrange(1000) for _ in range(64)]
    came = 0
    for _ in range(500):
        while came < 40 and rng.random() < 0.3:
            prompt = shared[: rng.choice((0, 32, 64))] + [
                rng.randrange(1000) for _ in range(rng.randint(1, 90))
            ]
            params = SamplingParams(
                max_tokens=rng.randint(1, 60), ignore_eos=False,
                extra_args={"tier": rng.choice(("ONLINE", "BATCH", "OFFLINE"))},
            )  # fmt: skip
            params.update_from_generation_config({"eos_token_id": 7}, 7)
            scheduler.add_request(
                Request(f"r{came}", prompt, params, None, arrival_time=0.0, block_hasher=hasher)
            )
            came += 1
        if rng.random() < 0.03 and scheduler.requests:
            rid = rng.choice(sorted(scheduler.requests))
            scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests():
            planned = scheduler.schedule()
            rids = list(planned.num_scheduled_tokens)
            if rng.random() < 0.03 and rids:
                scheduler.finish_requests(rng.choice(rids), RequestStatus.FINISHED_ABORTED)
            tokens = [
                [] if rid in scheduler.requests and scheduler.requests[rid].is_prefill_chunk
                else [7 if rng.random() < 0.02 else 1 + rng.randrange(5)]
                for rid in rids
            ]  # fmt: skip
            result = ModelRunnerOutput(rids, {rid: i for i, rid in enumerate(rids)}, tokens)
            scheduler.update_from_output(planned, result)
        elif came == 40:
            break
    scheduler._end_row(0.0)
    scheduler._file.close()
    return read_rows(path)


@pytest.mark.parametrize("policy", [None, "tiered", "fcfs"])
@pytest.mark.parametrize("seed", range(3))
def test_the_twin_decides_as_the_recorded_scheduler(tmp_path, policy, seed):
    rows = record(tmp_path / "rows", policy, seed)
    mine = None if policy is None else Policy(policy_config(policy), CONFIG.max_model_len)
    found = _Driver(rows, CONFIG, mine).run()
    assert found.differences == []
    assert found.equal_steps == found.steps > 50
    assert found.requests == found.same_start == found.same_hit == found.same_order == 40
    assert found.preemptions[0] == found.preemptions[1] == found.same_preemptions
    assert found.hit_tokens[0] == found.hit_tokens[1] > 0
    assert any(row["kind"] == "abort" for row in rows)
    assert {row["status"] for row in rows if row["kind"] == "end"} >= {
        "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_STOPPED",
    }  # fmt: skip
    if policy is None:
        assert found.preemptions[0] > 0
    # Calibrations read the same file.
    steps, firsts = read_recording(tmp_path / "rows")
    assert len(steps) == sum(row["kind"] == "step" for row in rows)
    assert len(firsts) == sum(row["kind"] == "first" for row in rows) > 20
    assert len(recorded_steps(steps)) == len(steps)


def test_another_decision_is_seen(tmp_path):
    rows = record(tmp_path / "rows", None, 0)
    place = next(i for i, row in enumerate(rows) if len(row.get("started", ())) == 1)
    changed = json.loads(json.dumps(rows))
    [rid] = changed[place]["started"]
    changed[place]["started"] = {rid: 999}
    found = _Driver(changed, CONFIG, None).run()
    assert found.same_hit == 39
    changed[place]["started"] = {}
    changed[place]["tokens"] += 1
    found = _Driver(changed, CONFIG, None).run()
    assert found.equal_steps == found.steps - 1
    assert "(server and twin): tokens" in found.differences[0]
    assert found.same_start < 40


def test_keys_go_on_where_the_server_hashed_no_more():
    keys = RecordedKeys("r", ["a"])
    assert keys.upto(3)[0] == "a"
    assert len(set(keys.upto(3))) == 3
    assert RecordedKeys("s", []).upto(1) != keys.upto(2)[1:]


def test_the_engine_in_this_process_repeats_its_steps(tmp_path):
    """A job of two workloads: every repeat has the same steps, and the scheduler's part is within the whole."""
    write_tiny_model(tmp_path)
    asks = [Ask(0, 40, 4), Ask(0, 40, 4), Ask(2, 100, 2, repeats=0, cached=32)]
    job = {
        "engine": {
            "model": str(tmp_path), "load_format": "dummy", "dtype": "float32", "max_model_len": 256,
            "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 40,
            "enable_prefix_caching": True, "async_scheduling": False, "enforce_eager": True,
        },
        "workloads": {"0": [asdict(ask) for ask in asks], "mix": [asdict(Ask(0, 10, 3))]},
        "repeats": 2,
        "vocabulary": 250,
    }  # fmt: skip
    asked, out = tmp_path / "job.json", tmp_path / "steps.jsonl"
    asked.write_text(json.dumps(job))
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "real.engine_steps", str(asked), str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    of = {
        (name, repeat): [r for r in rows if (r["workload"], r["repeat"]) == (name, repeat)]
        for name in ("0", "mix")
        for repeat in (0, 1)
    }
    for name in ("0", "mix"):
        once, again = (
            [
                (r["tokens"], r["decodes"], r["context"], r["pairs"], r["seqs"])
                for r in of[name, repeat]
            ]
            for repeat in (0, 1)
        )
        assert once == again
    first, second, third = of["0", 0][:3]
    # 80 tokens of prompts in steps of at most 64.
    assert (first["tokens"], second["tokens"]) == (64, 17)
    # What is added finds 32 of its 100 tokens: 68 are left, of which 62 fit beside two decodes.
    assert (third["decodes"], third["tokens"]) == (2, 64)
    assert third["pairs"] == 62 * 32 + 62 * 63 // 2
    assert len(of["mix", 0]) == 3
    assert all(0 < row["host_s"] < row["seconds"] for row in rows)
