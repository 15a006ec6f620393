"""Measured steps of an engine become a profile of the twin."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("scipy", reason="scipy is not installed in this environment")

from real.calibrate import (
    Timed,
    calibrate,
    error_of,
    noise_of,
    profile,
    read_recording,
    recorded_steps,
    steps_of,
    total_error,
)
from real.calls import Call, Reply
from real.cli import app
from real.live_steps import DECODES, Trial, steps_seen, trials
from real.sweep import BATCHES, BETWEEN, CHUNKS, CONTEXTS, Limits, sweep, unseen
from real.tiny import text_of
from twin.errors import InputError
from twin.step_time.fit import Step
from twin.step_time.profiles import Provenance, parse_profile

ROOT = Path(__file__).parents[1]
LIMITS = Limits(16, 1024, 2048, 20_000, 32)
ABOUT = Provenance(
    "tiny", "cpu", 1, "float32", "float32", "vLLM", "here", "own", "2026-01-01", "this", {}, ()
)
HOST = (1e-4, 2e-5)


def truth(tokens, seqs, decodes, context, pairs):
    return (
        3e-3
        + 5e-5 * tokens
        + 1e-5 * decodes
        + 1e-6 * context
        + 3e-8 * pairs
        + HOST[0]
        + HOST[1] * seqs
    )


def rows(noise=0.0, repeats=1, count=300):
    rng = random.Random(1)
    for number in range(count):
        decodes = rng.randint(0, 8)
        chunk = rng.choice((0, 16, 256, 700)) if decodes else 300
        context = sum(rng.randint(10, 900) for _ in range(decodes))
        content = {
            "tokens": decodes + chunk, "seqs": decodes + (chunk > 0), "decodes": decodes, "context": context,
            "pairs": chunk * (chunk + 1) // 2, "sampled": 0,
        }  # fmt: skip
        exact = truth(
            *(content[name] for name in ("tokens", "seqs", "decodes", "context", "pairs"))
        )
        for repeat in range(repeats):
            host = HOST[0] + HOST[1] * content["seqs"]
            yield content | {
                "workload": "0", "number": number, "repeat": repeat, "host_s": host,
                "seconds": exact * (1 + rng.uniform(-noise, noise)),
            }  # fmt: skip


def test_a_calibration_finds_what_the_steps_were_made_of():
    steps, noise = steps_of(rows())
    found = calibrate(steps, longest_context=900)
    assert noise == 0.0
    assert found.host == pytest.approx(HOST)
    assert found.fit.pair_s == pytest.approx(3e-8)
    assert found.fit.context_s == pytest.approx(1e-6)
    assert found.mape["all"] < 1e-6
    assert found.largest == {"tokens": 708, "requests": 9, "context": 900}
    assert total_error(found, [t.step for t in steps]) == pytest.approx(0, abs=1e-9)


def test_a_stall_is_not_the_noise_of_the_others():
    assert noise_of([]) == 0
    assert noise_of([0.1] * 99 + [1000.0]) == pytest.approx(0.1)
    assert noise_of([0.1] * 9 + [0.3]) == pytest.approx(0.12)


def test_repeats_are_taken_together_and_tell_the_noise():
    steps, noise = steps_of(rows(noise=0.2, repeats=3))
    assert len(steps) == 300
    assert 0.05 < noise < 0.15
    exact = [t.step for t in steps_of(rows())[0]]
    found = calibrate(steps, noise=noise)
    assert error_of(found, exact)["all"] < 0.05
    assert 0.03 < found.mape["all"] < 0.15


def test_repeats_that_differ_are_refused():
    mixed = [*rows(repeats=1, count=60), *({**r, "repeat": 1, "context": 7} for r in rows(count=1))]
    with pytest.raises(InputError, match="step 0 of workload 0 has another content in each repeat"):
        steps_of(mixed)


def test_too_few_steps_are_refused():
    with pytest.raises(InputError, match="20 steps; at least 50"):
        calibrate(steps_of(rows(count=20))[0])


def test_the_time_of_all_steps_is_what_it_was():
    steps, _ = steps_of(rows())
    disturbed = [
        replace(t, host_s=0.0, step=replace(t.step, seconds=t.step.seconds * (4 if i % 10 == 0 else 1)))
        for i, t in enumerate(steps)
    ]  # fmt: skip
    found = calibrate(disturbed, match_total=True)
    assert total_error(found, [t.step for t in disturbed]) == pytest.approx(0, abs=1e-9)
    assert found.fit.scaled_by > 1.05


def test_the_twin_computes_the_same_times():
    steps, _ = steps_of(rows())
    found = calibrate(steps, frontend_s=0.004, longest_context=900)
    made = profile(found, ABOUT, 1024, 16, 2048)
    made = parse_profile(json.loads(json.dumps(made.to_dict())), "fitted")
    assert "Beyond 708 tokens the last slope goes on." in made.provenance.notes
    assert any("4.00 ms outside the scheduler" in note for note in made.provenance.notes)
    assert made.provenance.fit_error["step_mape"] < 1e-4
    compiled = made.compile(
        max_num_batched_tokens=1024, max_num_seqs=16, async_scheduling=False, eager=True
    )
    for step in (t.step for t in steps[:50]):
        told = compiled.step_ps(
            step.tokens, step.seqs, step.sampled, step.pairs, step.decodes, step.context
        )
        assert told / 1e12 == pytest.approx(step.seconds, rel=2e-3)
    # The scheduler's part is the host's.
    assert compiled.host_ps[10] / 1e12 == pytest.approx(HOST[0] + 10 * HOST[1], rel=1e-3)


# --- the sweep ------------------------------------------------------------------------------------


def test_the_sweep_has_steps_of_every_kind_that_fit():
    workloads = sweep(LIMITS)
    for asks in workloads:
        # What is added has left before the next is.
        assert sum(ask.step == 0 for ask in asks) < LIMITS.max_num_seqs
        assert sum(ask.prompt_tokens + ask.output_tokens for ask in asks) <= LIMITS.kv_tokens
        assert all(ask.prompt_tokens + ask.output_tokens <= LIMITS.max_model_len for ask in asks)
        assert all(ask.cached <= ask.prompt_tokens for ask in asks)
        assert all(ask.cached % LIMITS.block_size == 0 for ask in asks)
    batches = {sum(ask.step == 0 for ask in asks) for asks in workloads}
    assert batches == {b for b in BATCHES if b < 15} | {15}
    assert {asks[0].prompt_tokens for asks in workloads} >= set(CONTEXTS[:5])
    added = [ask for asks in workloads for ask in asks if ask.step]
    assert {ask.prompt_tokens - ask.cached for ask in added} >= {
        c for c in (*CHUNKS, *BETWEEN) if c <= 768
    }
    assert any(ask.cached for ask in added)
    assert sweep(LIMITS) == workloads


def test_an_engine_without_room_is_refused():
    with pytest.raises(ValueError, match=r"only 0 workloads fit into .* max_model_len 20"):
        sweep(Limits(8, 512, 20, 64, 32))


@pytest.mark.parametrize("kind", ["mix", "chat"])
def test_unseen_workloads_fit_and_are_none_of_the_sweep(kind):
    asks = unseen(LIMITS, kind)
    assert len(asks) == 30
    assert all(ask.prompt_tokens + ask.output_tokens <= LIMITS.max_model_len for ask in asks)
    assert asks == unseen(LIMITS, kind)
    assert len({ask.step for ask in asks}) > 3


# --- from outside ---------------------------------------------------------------------------------


def lived(trial, step_s=0.01, mixed_s=0.05, jitter=0.0):
    """(replies, added) as clients would see them: a step every 10 ms, 50 ms for those with a prompt in them."""
    rng = random.Random(2)
    added_at = [DECODES * (i + 1) for i in range(len(trial.chunks))]
    now, times, firsts = 1.0, [], []
    for step in range(DECODES * (len(trial.chunks) + 2)):
        now += mixed_s if step in added_at else step_s
        times.append(now)
        if step in added_at:
            firsts.append(now)
    replies = []
    for _ in range(trial.batch):
        reply = Reply(Call(0.0, [], len(times)))
        reply.token_s = [at + rng.uniform(0, jitter) for at in times]
        replies.append(reply)
    added = []
    for at in firsts:
        reply = Reply(Call(0.0, [], 1), sent_s=at - mixed_s - step_s / 2)
        reply.token_s = [at + rng.uniform(0, jitter)]
        added.append(reply)
    return replies, added


@pytest.mark.parametrize(("batch", "jitter"), [(1, 0.0), (4, 0.0), (8, 0.002)])
def test_clients_tell_steps_apart(batch, jitter):
    trial = Trial(batch, 100, (64, 256))
    steps, spread = steps_seen(trial, *lived(trial, jitter=jitter))
    alone = [t.step for t in steps if t.step.tokens == batch]
    mixed = [t.step for t in steps if t.step.tokens > batch]
    # Between and around the added prompts.
    assert len(alone) == 3
    for step in alone:
        assert step.seconds == pytest.approx(0.01, rel=0.05)
        assert step.pairs == 0
    # Contexts grow by a token a step in each request of the batch.
    contexts = [step.context / batch for step in alone]
    assert contexts == sorted(contexts)
    assert 100 < contexts[0] < contexts[-1] < 100 + 4 * DECODES
    assert [step.tokens - batch for step in mixed] == [64, 256]
    for step in mixed:
        assert step.seconds == pytest.approx(0.05, rel=0.1)
        assert step.pairs == (step.tokens - batch) * (step.tokens - batch + 1) / 2
    assert (max(spread, default=0.0) > 0) == (jitter > 0)


def test_tokens_that_a_stalled_client_sees_bunched_are_no_steps():
    trial = Trial(4, 100, ())
    replies, added = lived(trial)
    for reply in replies:
        reply.token_s = [
            at if not 10 <= i < 22 else reply.token_s[21] for i, at in enumerate(reply.token_s)
        ]
    steps, _ = steps_seen(trial, replies, added)
    assert steps
    assert all(t.step.seconds == pytest.approx(0.01, rel=0.6) for t in steps)


def test_trials_stay_within_the_load_that_is_allowed():
    found = list(trials(LIMITS, 0.5))
    assert {trial.batch for trial in found} == {1, 2, 3, 4, 6, 8}
    assert all(trial.batch * trial.context < LIMITS.kv_tokens / 2 for trial in found)
    assert all(chunk + 8 <= LIMITS.max_num_batched_tokens for t in found for chunk in t.chunks)
    with pytest.raises(InputError, match="no prompt fits into a step"):
        list(trials(Limits(64, 16, 2048, 20_000, 16), 1.0))


# --- recordings -----------------------------------------------------------------------------------


def test_a_recording_is_read_back(tmp_path):
    path = tmp_path / "steps.jsonl"
    written = [{**row, "kind": "step", "duration_s": row["seconds"]} for row in rows(count=3)]
    firsts = [{"kind": "add", "rid": "a"}, {"kind": "first", "rid": "a", "ttft_s": 0.25}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*written, *firsts]))
    steps, ttfts = read_recording(path)
    assert (steps, ttfts) == (written, [0.25])
    assert [t.step for t in recorded_steps(steps)] == [
        Step(r["tokens"], r["decodes"], r["context"], r["pairs"], r["seconds"], r["seqs"], 0, str(i))
        for i, r in enumerate(written)
    ]  # fmt: skip
    assert recorded_steps(steps)[0].host_s == 0.0
    assert isinstance(recorded_steps(steps)[0], Timed)


def test_texts_of_the_tiny_model_have_a_token_a_letter():
    assert len(text_of(99, random.Random(0))) == 99


def test_serving_needs_no_client_library():
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['aiohttp', 'prometheus_client'])); "
        "from real.cli import main; main()"
    )
    command = [sys.executable, "-c", script]
    run = subprocess.run(
        [*command, "serve", "examples/real-demo.yaml", "--print"], cwd=ROOT, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    run = subprocess.run(
        [*command, "demo", "examples/real-demo.yaml"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert (
        run.stderr
        == "error: twin-real demo needs prometheus_client: pip install 'vllm-twin[real]'\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "x.yaml"], "--out x.yaml: must be a .json file in a folder that is there"),
        (["--out", "nowhere/x.json"], "must be a .json file in a folder that is there"),
        (["--out", "x.json", "--set", "engine.version=9"], "engine.version"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(options, words):
    command = [sys.executable, "-m", "real", "calibrate", "examples/real-demo.yaml", "--tiny"]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert words in run.stderr


def test_few_tokens_bend_only_where_they_were_measured():
    """Six and eight tokens say nothing of seven; a profile is always one that the twin reads."""
    steps = [
        Timed(Step(n, n, 100 * n * k, 0, 1e-3 * (5 - n / 8) + 1e-7 * k, n), 0.0)
        for n in (1, 2, 3, 4, 5, 6, 8)
        for k in range(1, 12)
    ]
    found = calibrate(steps, fine=True)
    assert [n for n, _ in found.fit.dense] == [1, 2, 3, 4, 5, 8]
    made = profile(found, ABOUT, 64, 16, 256)
    parse_profile(made.to_dict(), "made")


def test_a_fall_that_no_profile_may_have_is_noise():
    steps = [
        Timed(Step(n, n, 100 * n * k, 0, s, n), 0.0)
        for n, s in ((1, 9e-3), (2, 1e-3), (3, 9e-3), (4, 9e-3), (12, 9e-3))
        for k in range(1, 12)
    ]
    made = profile(calibrate(steps, fine=True), ABOUT, 64, 16, 256)
    parse_profile(made.to_dict(), "made")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(2, 2, 2048, 20_000, 32), "max_num_batched_tokens 2"),
        (Limits(1, 1024, 2048, 20_000, 32), "max_num_seqs 1"),
    ],
)
def test_what_keeps_an_engine_from_being_measured_is_named(limits, words):
    with pytest.raises(ValueError, match=words):
        sweep(limits)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--late", "nan"), "--late nan: must be"),
        (("--minutes", "inf"), "--minutes inf: must be"),
        (("--tiny", "--small"), "leave one out"),
        (("--tiny", "--model", "here"), "leave one out"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, words):
    command = ["calibrate", "examples/compare-demo.yaml", "--out", str(tmp_path / "x.json")]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 2
    assert words in done.stderr
