"""Steps of a server become a profile of the twin."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from real.calibrate import TERMS, fit_steps, median_gap, profile_of, read_rows, sweep, text_of
from twin.step_time.profiles import parse_profile

ROOT = Path(__file__).parents[1]
TRUTH = {"base": 3e-3, "tokens": 5e-5, "decodes": 2e-5, "context": 1e-6, "pairs": 3e-8}


def rows(noise=0.0, truth=TRUTH, count=400):
    rng = random.Random(1)
    for _ in range(count):
        decodes = rng.randint(0, 8)
        chunk = rng.choice((0, 16, 256, 700))
        context = sum(rng.randint(10, 900) for _ in range(decodes))
        row = {
            "tokens": decodes + chunk,
            "seqs": decodes + (chunk > 0),
            "decodes": decodes,
            "context": context,
            "pairs": chunk * (chunk + 1) // 2,
        }
        exact = truth["base"] + sum(truth[name] * row[name] for name in TERMS[1:])
        yield row | {"kind": "step", "duration_s": exact * (1 + rng.uniform(-noise, noise))}


def test_a_fit_finds_what_the_steps_were_made_of():
    fit = fit_steps(list(rows()), 0.005)
    assert fit.seconds == pytest.approx(TRUTH, rel=1e-6)
    assert (fit.mape, fit.scaled_by) == pytest.approx((0.0, 1.0), abs=1e-9)
    noisy = fit_steps(list(rows(noise=0.2)), 0.0)
    for exact in list(rows())[:50]:
        told = noisy.seconds["base"] + sum(noisy.seconds[name] * exact[name] for name in TERMS[1:])
        assert told == pytest.approx(exact["duration_s"], rel=0.05)
    assert 0.05 < noisy.mape < 0.15


def test_all_steps_together_take_the_time_they_took():
    disturbed = [
        row | {"duration_s": row["duration_s"] * (4 if i % 10 == 0 else 1)}
        for i, row in enumerate(rows())
    ]
    fit = fit_steps(disturbed, 0.0)
    told = sum(
        fit.seconds["base"] + sum(fit.seconds[name] * row[name] for name in TERMS[1:])
        for row in disturbed
    )
    assert told == pytest.approx(sum(row["duration_s"] for row in disturbed))
    assert fit.scaled_by > 1.05


def test_no_term_is_negative():
    truth = TRUTH | {"decodes": -1e-5, "context": 0.0}
    fit = fit_steps(list(rows(truth=truth)), 0.0)
    assert min(fit.seconds.values()) == 0.0
    assert fit.mape < 0.02


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match=r"only \d+ kinds of steps; at least 50"):
        fit_steps(list(rows(count=20)), 0.0)


def test_the_twin_computes_the_same_times():
    fit = fit_steps(list(rows()), 0.0)
    profile = parse_profile(
        json.loads(json.dumps(profile_of(fit, "tiny", "cpu", "0.32.0", 1024, 64))), "fitted"
    )
    steps = profile.compile(
        max_num_batched_tokens=1024, max_num_seqs=16, async_scheduling=False, eager=True
    )
    for row in list(rows())[:50]:
        found = steps.step_ps(
            row["tokens"], row["seqs"], row["seqs"], row["pairs"], row["decodes"], row["context"]
        )
        assert found / 1e12 == pytest.approx(row["duration_s"], rel=1e-3)


def test_a_recording_is_read_back(tmp_path):
    path = tmp_path / "steps.jsonl"
    written = list(rows(count=3))
    firsts = [{"kind": "first", "ttft_s": 0.25}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*written, *firsts]))
    assert read_rows(path) == (written, [0.25])
    assert median_gap([0.3, 0.5, 0.4], [0.25]) == pytest.approx(0.15)


def test_the_sweep_fits_the_engine_and_repeats_no_prompt():
    calls = list(sweep(8, 600, random.Random(0)))
    assert max(len(call.prompt) for call in calls) == 512
    by_due = {call.due_s for call in calls}
    assert max(sum(call.due_s == due for call in calls) for due in by_due) == 8
    longer = [call.prompt for call in calls if len(call.prompt) > 8]
    assert len(set(longer)) == len(longer)
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
