"""llm-d/llm-d-benchmark#261: a client that sends late is told from a slow server, and its times are not fitted."""

import asyncio
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed in this environment")

import real.live_steps
from real import cli_calibrate
from real.live_steps import measure
from real.sweep import Limits
from twin.errors import InputError
from twin.scenario import load_scenario

SCENARIO = Path(__file__).parents[1] / "examples" / "compare-demo.yaml"
LIMITS = Limits(
    max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024, kv_tokens=50_000, block_size=16
)
STEP_S = 0.002


class Server:
    """A client and a server in one: requests leave `late_s` after they should, and get a token each step."""

    late_s = 0.0

    def __init__(self, url, model, **options):
        self._start = time.perf_counter()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    def start(self):
        self._start = time.perf_counter()

    @property
    def now_s(self):
        return time.perf_counter() - self._start

    async def ask(self, call):
        reply = real.live_steps.Reply(call)
        reply.sent_s = self.now_s + self.late_s
        reply.token_s = [reply.sent_s + STEP_S * (i + 2) for i in range(call.max_tokens)]
        await asyncio.sleep(reply.token_s[-1] - self.now_s)
        reply.status, reply.finish_reason = 200, "length"
        return reply


def test_a_client_in_time_is_measured_as_such(monkeypatch):
    monkeypatch.setattr(real.live_steps, "Client", Server)
    live = asyncio.run(measure("http://here", "m", LIMITS, 1000, 6.0, 0.5))
    assert 0 <= live.late_p99_s < 0.03
    assert len(live.steps) >= 50


def test_the_times_of_a_late_one_are_measured_and_refused(monkeypatch):
    monkeypatch.setattr(Server, "late_s", 0.04)
    monkeypatch.setattr(real.live_steps, "Client", Server)
    serving = cli_calibrate.Serving("python", "m", "m")
    words = r"sent more than (\d+\.\d) ms after their time \(--late allows 5 ms\)"
    with pytest.raises(InputError, match=words) as refused:
        cli_calibrate._live(
            load_scenario(SCENARIO), serving, "http://here", "m", 6 / 60, 0.5, 0.005, {}
        )
    assert 40 <= float(re.search(words, str(refused.value))[1]) < 70
