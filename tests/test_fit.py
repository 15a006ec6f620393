"""Fits of measured steps: known terms are found again, and what a fit cannot say is refused."""

import os
import random
from pathlib import Path

import pytest

from twin.errors import InputError
from twin.step_time.fit import Step, StepFit, fit_steps, misbooked, profile_of, third
from twin.step_time.profiles import Provenance, parse_profile
from twin.step_time.recorded import held_out, steps_of
from twin.workload.formats.measured import read_table

pytest.importorskip("scipy")

DENSE = ((1, 10e-3), (256, 12e-3), (2048, 80e-3))
TRUTH = StepFit(DENSE, ((0, 0.0), (64, 2e-3)), 1e-5, 5e-9, 2e-10, {}, 1.0, 0)


def content(rng: random.Random) -> dict[str, int]:
    decodes = rng.choice((0, 1, 5, 17, 40, 64))
    chunk = rng.choice((0, 100, 400, 1500))
    decodes = decodes or (0 if chunk else 1)
    return {
        "tokens": decodes + chunk,
        "decodes": decodes,
        "context": sum(rng.randint(10, 3000) for _ in range(decodes)),
        "pairs": chunk * (chunk + 1) // 2 + chunk * rng.choice((0, 512)),
        "sampled": decodes + (chunk > 0) * rng.randint(0, 2),
    }


def steps(noise: float = 0.0, count: int = 600) -> list[Step]:
    rng = random.Random(1)
    found = []
    for i in range(count):
        what = content(rng)
        exact = TRUTH.seconds(Step(seconds=1.0, **what))
        found.append(Step(seconds=exact * (1 + rng.uniform(-noise, noise)), name=f"{i}", **what))
    return found


def test_a_fit_finds_what_the_steps_were_made_of():
    fit = fit_steps(steps(), [n for n, _ in DENSE], (0, 64))
    for (_, found), (_, true) in zip(
        (*fit.dense, *fit.decode), (*DENSE, *TRUTH.decode), strict=True
    ):
        assert found == pytest.approx(true, rel=1e-5, abs=1e-9)
    found = (fit.sampled_s, fit.context_s, fit.pair_s)
    assert found == pytest.approx((TRUTH.sampled_s, TRUTH.context_s, TRUTH.pair_s), rel=1e-4)
    assert set(fit.mape) == {"decode", "context", "mixed"}
    assert max(fit.mape.values()) < 1e-6


def test_a_line_through_a_bend_misses_and_knots_do_not():
    line = fit_steps(steps(), (1, 2048), (0, 64))
    bent = fit_steps(steps(), [n for n, _ in DENSE], (0, 64))
    assert max(line.mape.values()) > 0.05 > max(bent.mape.values())


def test_no_term_is_negative_and_dense_never_falls():
    falling = [
        Step(tokens=n, decodes=0, context=0, pairs=0, seconds=1e-2 / n) for n in range(1, 65)
    ]
    fit = fit_steps(falling, (1, 8, 16, 32, 64), (0, 1))
    levels = [s for _, s in fit.dense]
    assert levels == sorted(levels)
    assert min(fit.sampled_s, fit.context_s, fit.pair_s, *levels) >= 0


def test_dense_of_few_tokens_may_fall_where_that_is_asked_for():
    """As measured on a CPU: two rows take longer than three, and from seven on another kernel runs."""
    levels = {1: 22e-3, 2: 24e-3, 3: 20e-3, 6: 20e-3, 7: 27e-3, 16: 28e-3, 32: 44e-3, 64: 30e-3}
    found = [Step(n, 0, 0, pairs, s + pairs * 1e-9) for n, s in levels.items() for pairs in (0, 9)]
    fit = fit_steps(found, tuple(levels), (0, 1), may_fall_to=8)
    dense = dict(fit.dense)
    assert {n: dense[n] for n in (1, 2, 3, 6, 7, 16)} == pytest.approx(
        {n: levels[n] for n in (1, 2, 3, 6, 7, 16)}, rel=1e-3
    )
    assert dense[16] < dense[32] == dense[64]  # no further
    assert fit.seconds(Step(5, 0, 0, 0, 1.0)) == pytest.approx(20e-3, rel=1e-3)
    rigid = dict(fit_steps(found, tuple(levels), (0, 1)).dense)
    assert sorted(rigid.values()) == list(rigid.values())


def test_all_steps_together_take_the_time_they_took():
    disturbed = [
        Step(**{**{f: getattr(s, f) for f in s.__slots__}, "seconds": s.seconds * (4 if i % 10 == 0 else 1)})
        for i, s in enumerate(steps())
    ]  # fmt: skip
    fit = fit_steps(disturbed, [n for n, _ in DENSE], match_total=True)
    told = sum(fit.seconds(step) for step in disturbed)
    assert told == pytest.approx(sum(step.seconds for step in disturbed))
    assert fit.scaled_by != 1.0


def test_kinds_count_equally_if_asked():
    many = [Step(10, 10, 1000, 0, 10e-3) for _ in range(1000)]
    few = [Step(10, 0, 0, 55, 20e-3), *(Step(n, 0, 0, 0, 20e-3) for n in range(1, 9))]
    loud = fit_steps(many + few, (1, 1000), (0, 10))
    fair = fit_steps(many + few, (1, 1000), (0, 10), balance_kinds=True)
    assert fair.mape["context"] < loud.mape["context"]
    assert loud.mape["decode"] < fair.mape["decode"]


def test_a_time_booked_in_the_step_before_is_recognised():
    sound = steps()
    shifted = [
        Step(**{**{f: getattr(s, f) for f in s.__slots__}, "seconds": s.seconds * k})
        for s, k in zip(sound[:2], (1 + 0.96 * sound[1].seconds / sound[0].seconds, 0.04), strict=True)
    ]  # fmt: skip
    assert misbooked(TRUTH, sound) == []
    assert misbooked(TRUTH, [*shifted, *sound[2:]]) == shifted


def test_a_third_is_contiguous_runs():
    chosen = third(100, 5)
    assert chosen[:20] == [True] * 5 + [False] * 10 + [True] * 5
    assert sum(chosen) == 35


def test_too_few_steps_are_refused():
    with pytest.raises(InputError, match="3 steps of different content do not determine"):
        fit_steps([Step(n, n, 10 * n, 0, 1e-3) for n in (1, 2, 3)], (1, 2, 4, 8))
    with pytest.raises(ValueError, match="token_knots"):
        fit_steps(steps(), (5, 5))


def test_a_profile_of_a_fit_gives_its_times():
    fit = fit_steps(steps(), [n for n, _ in DENSE], (0, 64))
    origin = Provenance(
        "m", "g", 1, "bfloat16", "bfloat16", "vLLM 0.32.0", "steps", "own", "2026-01-01", "s", {}, ()
    )  # fmt: skip
    profile = profile_of(fit, origin, max_context=4096, max_num_seqs=128)
    profile = parse_profile(profile.to_dict(), "fit")
    assert profile.provenance.fit_error["decode_steps"] < 0.001
    step = profile.compile(max_num_batched_tokens=2048, max_num_seqs=128, async_scheduling=False)
    for each in steps(count=50):
        told = step.step_ps(
            each.tokens, each.decodes, each.sampled, int(each.pairs), each.decodes, each.context
        )
        assert told == pytest.approx(fit.seconds(each) * 1e12, rel=1e-3)  # fmt: skip


DATA = os.environ.get("TWIN_DATA")


@pytest.mark.skipif(not DATA, reason="TWIN_DATA names no folder with measured steps")
@pytest.mark.parametrize("tp", [1, 2])
def test_steps_of_a_gpu_are_fitted_on_a_third_and_tested_on_the_rest(tp):
    path = Path(DATA, "profiles", "fpm_qwen3_32b", f"tp{tp}_fpm_metrics_phase.csv.gz")
    result = held_out(steps_of(read_table(path), path.name))
    assert {kind: error <= 0.08 for kind, error in result.tested.items()} == {
        "decode": True, "context": True, "mixed": True
    }  # fmt: skip
    assert len(result.left_out) == (4 if tp == 1 else 0)
