"""Step times by arithmetic: how they move, and how far they are from op tables."""

import dataclasses

import pytest

from tests.runs import document
from twin.errors import InputError
from twin.scenario import load_scenario, shipped_profiles
from twin.step_time.catalogue import GPUS, MODELS, find_gpu, find_model
from twin.step_time.roofline import MEASURED, Parts, roofline
from twin.step_time.shipped import find, subjects

MODEL, MOE = find_model("meta-llama/Llama-3.1-8B"), find_model("Qwen/Qwen3-30B-A3B")
H100 = find_gpu("H100")


def parts(model=MODEL, gpu=H100, tp=1, dtype="bfloat16", kv="auto"):
    return Parts(model, gpu, tp, dtype, kv, MEASURED)


def test_few_tokens_are_bound_by_reading_weights_and_many_by_multiplying():
    read = 2 * MODEL.layers * MODEL.layer_matrix_params / (H100.bandwidth * MEASURED.bandwidth)
    assert parts().dense_s(1) == pytest.approx(read + MODEL.layers * MEASURED.layer_s, rel=0.01)
    assert parts().dense_s(32) < 1.02 * parts().dense_s(1)
    flops = 2 * 8192 * MODEL.layers * MODEL.layer_matrix_params / (H100.bf16_flops * MEASURED.flops)
    assert parts().dense_s(8192) > flops
    assert parts().dense_s(8192) == pytest.approx(2 * parts().dense_s(4096), rel=0.01)


def test_stored_bits_help_reading_and_only_fp8_units_help_multiplying():
    for dtype, share in (("int8", 0.55), ("int4", 0.35)):
        assert parts(dtype=dtype).dense_s(1) < (share + 0.15) * parts().dense_s(1)
        assert parts(dtype=dtype).dense_s(8192) == pytest.approx(parts().dense_s(8192), rel=1e-6)
    assert parts(dtype="fp8").dense_s(8192) < 0.75 * parts().dense_s(8192)
    a100 = find_gpu("A100")
    assert parts(gpu=a100, dtype="fp8").dense_s(8192) == parts(gpu=a100).dense_s(8192)


def test_an_fp8_cache_halves_decode_attention_and_gpus_share_it():
    assert parts(kv="fp8").context_s == pytest.approx(parts().context_s / 2)
    assert parts(tp=4).context_s == pytest.approx(parts().context_s / 4)
    assert parts(tp=16).context_s == pytest.approx(parts().context_s / 8)  # 8 key/value heads
    assert parts().comm_s(100) == 0.0
    assert parts(tp=2).comm_s(8192) > 10 * parts(tp=2).comm_s(1)


def test_a_mixture_reads_the_experts_that_tokens_choose():
    one, many = parts(MOE).dense_s(1), parts(MOE).dense_s(512)
    assert one < 0.25 * many
    every = 2 * MOE.layers * MOE.layer_matrix_params / (H100.bandwidth * MEASURED.bandwidth)
    assert many > every


def test_a_profile_loads_and_says_what_it_is():
    loaded = load_scenario(document(hardware={"gpu": "L4", "step_time": "roofline"}))
    origin = loaded.hardware.profile.provenance
    assert origin.source.startswith("roofline")
    assert "not validated" in origin.notes[0]
    assert "not validated" in loaded.warnings[0]
    assert loaded.to_dict()["hardware"]["step_time"] == "roofline"
    with pytest.raises(InputError, match=r"hardware\.dtype: unknown value 'int3'"):
        roofline(MODEL, H100, 1, "int3", "auto")
    with pytest.raises(InputError, match=r"hardware\.dtype: float32 has no roofline"):
        roofline(MODEL, H100, 1, "float32", "auto")
    with pytest.raises(InputError, match="does not divide the 32 attention heads"):
        roofline(MODEL, H100, 3, "bfloat16", "auto")


def test_the_largest_budget_is_covered():
    profile = roofline(MODEL, dataclasses.replace(H100, name="X"), 1, "bfloat16", "auto")
    assert profile.max_tokens == 65536


def test_it_lies_near_the_op_tables():
    """Median over the 16-bit dense profiles of decode steps and prompts; scripts/fit_roofline.py says more."""
    errors = []
    for packed in shipped_profiles(*GPUS):
        gpu = GPUS[packed["provenance"]["gpu"]]
        for subject in subjects(packed):
            if subject.dtype != "bfloat16" or subject.kv_cache_dtype != "bfloat16":
                continue
            model, tp = MODELS[subject.model], subject.tensor_parallel_size
            both = [
                profile.compile(max_num_batched_tokens=4096, max_num_seqs=64, async_scheduling=True)
                for profile in (roofline(model, gpu, tp, "bfloat16", "auto"), find(packed, subject, "f"))
            ]  # fmt: skip
            for counts in ((64, 64, 64, 0, 64, 64_000), (2048, 1, 1, 2_000_000, 0, 0)):
                told, table = (step.step_ps(*counts) for step in both)
                errors.append(abs(told / table - 1))
    assert sorted(errors)[len(errors) // 2] < 0.15


def test_a_gpu_by_figures_needs_step_times_of_its_own():
    figures = {"name": "H100", "memory_bytes": 85 * 10**9, "bandwidth": 1e12, "bf16_flops": 1e14}
    with pytest.raises(InputError, match=r"H100 is given by figures.*step_time: roofline"):
        load_scenario(document(hardware={"gpu": figures}))
    with pytest.raises(InputError, match="did you mean 'roofline'"):
        load_scenario(document(hardware={"gpu": "H100", "step_time": "Roofline"}))
