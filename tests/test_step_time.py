"""Step times: the formula, its compilation from a profile, the shipped profile, and what is refused."""

import copy
import json
from dataclasses import replace
from fractions import Fraction
from importlib import resources
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.errors import InputError
from twin.scenario import shipped_profiles
from twin.step_time.catalogue import GPUS
from twin.step_time.memory import CAPTURE_SIZES
from twin.step_time.model import StepTime, constant_step
from twin.step_time.profiles import Profile, captured_sizes, parse_profile
from twin.step_time.shipped import Subject, find, missing, pack, subjects

MS = 10**9


def shipped_profile(gpu: str, model: str, tp: int) -> Profile:
    (packed,) = shipped_profiles(gpu)
    found = find(packed, Subject(model, tp, "bfloat16", "bfloat16"), f"{gpu}.json")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def shipped() -> Profile:
    return shipped_profile("H100", "meta-llama/Llama-3.1-8B", 1)


def small() -> dict:
    """A profile with numbers that can be followed by hand."""
    return {
        "provenance": {
            "model": "toy", "gpu": "H100", "tensor_parallel_size": 2, "dtype": "bfloat16", "kv_cache_dtype": "auto",
            "engine": "vLLM 0.32.0", "source": "made up", "licence": "none", "date": "2026-01-01", "script": "none",
            "fit_error": {"dense": 0.01}, "notes": ["one"],
        },
        "max_context": 100,
        "capture_sizes": [1, 2, 4, 8],
        "dense_ps": [[1, 1000], [5, 1010.5], [20, 4000]],
        "comm_ps": [[0, 0], [30, 300]],
        "sample_ps": [[1, 50], [6, 100]],
        "prefill_pair_ps": 1.5,
        "decode_base_ps": [[1, 10], [6, 60]],
        "decode_context_ps": [[1, 2000], [6, 1000]],
        "host_sync_ps": [[0, 500], [6, 1100]],
        "host_async_ps": [[0, 0], [6, 6000]],
        "gap_ps": 70,
        "prefill_base_ps": 0,
        "mixed_context_ps": [],
        "gap_seq_ps": 0,
    }  # fmt: skip


def small_step(**changes) -> StepTime:
    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 6, "async_scheduling": False}
    return parse_profile(small(), "toy.json").compile(**limits | changes)


# The formula


def test_sync_adds_host_and_gpu():
    step = small_step()
    # 3 tokens are computed as 4: dense 1000 + 3/4 * 10.5 = 1007.875 -> 1008, comm 40
    gpu = 1008 + 40 + 60 + 7 * 3 // 2 + 20 + 1800 * 90
    assert step.step_ps(3, 2, 2, 7, 2, 90) == 700 + gpu


def test_async_takes_the_longer_and_adds_the_gap():
    step = small_step(async_scheduling=True)
    gpu = 1008 + 40 + 60
    assert step.step_ps(3, 1, 2, 0, 0, 0) == gpu + 70  # host 1000
    assert step.step_ps(3, 2, 2, 0, 0, 0) == 2000 + 70


def test_nothing_sampled_and_nothing_decoded_cost_nothing():
    assert small_step().step_ps(8, 1, 0, 0, 0, 0) == 600 + small_step().tokens_ps[8]


def test_padding_follows_the_captured_sizes():
    step = small_step()
    assert [step.padded_tokens(n) for n in range(1, 11)] == [1, 2, 4, 4, 6, 6, 8, 8, 9, 10]
    eager = small_step(eager=True)
    assert [eager.padded_tokens(n) for n in range(1, 21)] == list(range(1, 21))
    assert step.tokens_ps[3] == eager.tokens_ps[4]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "expected"),
    [
        (1024, 8192, list(CAPTURE_SIZES)),
        (128, 8192, [n for n in CAPTURE_SIZES if n <= 256]),
        (100, 8192, sorted([n for n in CAPTURE_SIZES if n <= 200] + [100])),
        (300, 8192, sorted([*CAPTURE_SIZES, 300])),
        (256, 100, sorted([n for n in CAPTURE_SIZES if n <= 100] + [100])),
        (1, 8192, [1, 2]),
        (3, 2048, [1, 2, 3, 4]),
    ],
)
def test_captured_sizes_are_those_of_vllm(max_num_seqs, max_num_batched_tokens, expected):
    assert captured_sizes(CAPTURE_SIZES, max_num_seqs, max_num_batched_tokens) == expected


@given(
    st.booleans(), st.integers(1, 6), st.integers(0, 5000), st.integers(0, 40), st.integers(0, 3000)
)  # fmt: skip
def test_a_series_is_the_sum_of_its_steps(async_scheduling, decodes, context, steps, host_scale):
    data = small()
    data["host_async_ps"] = [[0, 0], [6, host_scale * 1000]]
    step = parse_profile(data, "toy.json").compile(
        max_num_batched_tokens=20, max_num_seqs=6, async_scheduling=async_scheduling
    )
    args = (decodes, decodes, decodes)
    single = [step.step_ps(*args, 0, decodes, context + j * decodes) for j in range(steps)]
    assert step.decode_series(*args, decodes, context, steps) == sum(single)
    equal, each, first, growth = step.decode_runs(*args, decodes, context, steps)
    spelled_out = [first + j * growth for j in range(steps - equal)]
    assert [each] * equal + spelled_out == single


def test_a_series_on_the_shipped_profile(shipped):
    step = shipped.compile(max_num_batched_tokens=2048, max_num_seqs=256, async_scheduling=True)
    for decodes in (1, 7, 64, 256):
        single = [
            step.step_ps(decodes, decodes, decodes, 0, decodes, decodes * (500 + j))
            for j in range(300)
        ]
        assert step.decode_series(decodes, decodes, decodes, decodes, decodes * 500, 300) == sum(
            single
        )


def test_constant_step():
    step = constant_step(12345)
    assert step.step_ps(10**6, 999, 3, 10**9, 7, 10**7) == 12345
    assert step.padded_tokens(10**6) == 10**6
    assert step.decode_series(5, 5, 5, 5, 1000, 9) == 9 * 12345
    with pytest.raises(ValueError, match=r"ps \(0\)"):
        constant_step(0)


# Compiling


def test_tables_are_the_interpolation_rounded_once():
    step = small_step(eager=True)
    dense = [Fraction(1000) + Fraction(21, 8) * (n - 1) for n in range(1, 6)]
    dense += [Fraction(2021, 2) + Fraction(5979, 2) * Fraction(n - 5, 15) for n in range(6, 21)]
    for n, exact in enumerate(dense, 1):
        assert abs(step.tokens_ps[n] - 10 * n - exact) <= Fraction(1, 2)
    assert list(step.sample_ps) == [0, 50, 60, 70, 80, 90, 100]
    assert list(step.decode_context_ps) == [0, 2000, 1800, 1600, 1400, 1200, 1000]
    assert list(step.host_ps) == [500, 600, 700, 800, 900, 1000, 1100]


def test_only_plain_ints_come_out(shipped):
    step = shipped.compile(max_num_batched_tokens=512, max_num_seqs=64, async_scheduling=True)
    for table in (
        step.tokens_ps, step.sample_ps, step.decode_base_ps, step.decode_context_ps, step.host_ps, step.padded,
        [step.pair_num, step.pair_den, step.gap_ps, step.step_ps(9, 2, 2, 36, 1, 80)],
    ):  # fmt: skip
        assert {type(value) for value in table} == {int}


def test_tables_end_at_the_limits():
    step = small_step(max_num_batched_tokens=9, max_num_seqs=3)
    assert len(step.tokens_ps) == 10
    assert len(step.host_ps) == len(step.sample_ps) == len(step.decode_base_ps) == 4
    with pytest.raises(IndexError):
        step.step_ps(10, 1, 1, 0, 1, 5)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"max_num_batched_tokens": 21},
            ["max_num_batched_tokens", "21", "1 to 20", "hardware.step_time"],
        ),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens", "0"]),
        ({"max_num_seqs": 7}, ["max_num_seqs", "7", "1 to 6", "toy on H100"]),
    ],
)
def test_a_limit_beyond_the_range_is_refused(changes, parts):
    with pytest.raises(InputError) as error:
        small_step(**changes)
    assert all(part in str(error.value) for part in parts)


def test_rounding_that_matters_is_refused():
    data = small()
    data["decode_context_ps"] = [[1, 10], [6, 12]]
    with pytest.raises(InputError, match=r"decode_context_ps: 10\.4 ps at 2 decodes"):
        parse_profile(data, "toy.json").compile(
            max_num_batched_tokens=20, max_num_seqs=6, async_scheduling=False
        )


# The shipped profile


def kernel_ms(profile: Profile, *counts: int) -> float:
    """GPU part of a step, in milliseconds."""
    step = profile.compile(max_num_batched_tokens=8192, max_num_seqs=256, async_scheduling=True)
    return (step.step_ps(*counts) - step.gap_ps - step.gap_seq_ps * counts[1]) / MS


PREFILL = (512, 1, 1, 512 * 513 // 2, 0, 0)
DECODE = (64, 64, 64, 0, 64, 64 * 1024)
MIXED = (576, 65, 65, 512 * 513 // 2, 64, 64 * 1024)


@pytest.mark.parametrize(
    ("gpu", "model", "tp", "references"),
    [
        ("H100", "meta-llama/Llama-3.1-8B", 1, (12.0, 10.3, 17.0)),
        ("A100", "meta-llama/Llama-3.1-8B", 1, (36.0, 17.8, 45.5)),
        ("H100", "meta-llama/Llama-3.1-70B", 4, (37.3, 19.1, 43.8)),
    ],
)
def test_kernel_times_meet_the_reference(gpu, model, tp, references):
    """The reference is what the kernel tables' own composition gives (bfloat16), without host overhead."""
    profile = shipped_profile(gpu, model, tp)
    for counts, reference in zip((PREFILL, DECODE, MIXED), references, strict=True):
        assert kernel_ms(profile, *counts) == pytest.approx(reference, rel=0.02)


def test_shipped_profile_is_monotone_and_covers_its_range(shipped):
    assert (shipped.max_tokens, shipped.max_num_seqs, shipped.max_context) == (16384, 1024, 32768)
    assert len(shipped.dense_ps) >= 12
    step = shipped.compile(max_num_batched_tokens=16384, max_num_seqs=1024, async_scheduling=False)
    for table in (step.tokens_ps, step.sample_ps, step.host_ps):
        assert list(table) == sorted(table)
    times = [step.step_ps(n, n, n, 0, n, 1000 * n) for n in range(1, 400)]
    assert all(later > 0.97 * earlier for earlier, later in pairwise(times))


def test_host_overhead_is_added_in_sync_mode_and_hidden_in_async(shipped):
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
    counts = (64, 64, 64, 0, 64, 64 * 1024)
    sync = shipped.compile(**limits, async_scheduling=False).step_ps(*counts)
    hidden = shipped.compile(**limits, async_scheduling=True).step_ps(*counts)
    assert sync - hidden == 64 * (
        8_000_000 - 8_000_000
    )  # 8 us that sync adds, 8 us that async cannot hide


def test_shipped_profile_round_trips(shipped):
    assert parse_profile(json.loads(json.dumps(shipped.to_dict())), "again") == shipped


def test_the_profile_of_several_gpus():
    """Four GPUs hold a model that fits on none, at about 20 ms a step; talking costs more the more there is to say."""
    profile = shipped_profile("H100", "meta-llama/Llama-3.1-70B", 4)
    step = profile.compile(max_num_batched_tokens=8192, max_num_seqs=64, async_scheduling=True)
    assert 14e9 < step.step_ps(1, 1, 1, 0, 1, 1000) < 20e9
    talk = dict(profile.comm_ps)
    assert talk[1] < 0.2 * talk[16384]
    assert talk[16384] < 0.3 * dict(profile.dense_ps)[16384]


# Finding and reading profiles


def test_every_shipped_profile_is_sound():
    """Each compiles over its whole range, and says how far it is from the tables."""
    number = 0
    for packed in shipped_profiles(*GPUS):
        for subject in subjects(packed):
            profile = find(packed, subject, "shipped")
            step = profile.compile(
                max_num_batched_tokens=16384, max_num_seqs=1024, async_scheduling=False
            )
            assert step.tokens_ps[1] > 10**9
            assert {"dense_vs_tables_mean", "decode_attention_vs_tables_mean"} <= set(
                profile.provenance.fit_error
            )
            number += 1
            if number % 7 == 0:  # a sample of them, byte for byte
                assert parse_profile(profile.to_dict(), "again") == profile
    assert number > 400


def test_shipped_profiles_are_small():
    folder = resources.files("twin.step_time") / "data"
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 3_000_000


def test_profiles_that_share_too_little_are_not_packed(shipped):
    other = replace(shipped, gap_ps=5)
    with pytest.raises(ValueError, match=r"gap_ps of meta-llama/Llama-3\.1-8B on H100"):
        pack([shipped, other])
    assert find(pack([shipped]), Subject("x", 1, "fp8", "fp8"), "f") is None


def test_a_missing_profile_is_named_with_those_there_are():
    told = str(missing(shipped_profiles(*GPUS), "L4", Subject("Qwen/Qwen3-8B", 2, "int4", "fp8")))
    for part in (
        "Qwen/Qwen3-8B on L4, TP 2, int4, KV fp8",
        "Qwen/Qwen3-8B on L40S, TP 2, fp8, KV fp8",
        "hardware.step_time",
        "twin profile list",
    ):
        assert part in told


def test_a_profile_without_comm_is_one_gpu():
    data = small() | {"comm_ps": []}
    profile = parse_profile(data, "toy.json")
    assert profile.to_dict() == data
    assert profile.max_tokens == 20


def test_decodes_beside_a_prompt_take_longer():
    data = small() | {"mixed_context_ps": [[1, 3], [6, 8]]}
    mixed = parse_profile(data, "toy.json").compile(
        max_num_batched_tokens=20, max_num_seqs=6, async_scheduling=False
    )
    assert mixed.step_ps(3, 2, 2, 7, 2, 90) == small_step().step_ps(3, 2, 2, 7, 2, 90) + 4 * 90
    assert mixed.step_ps(2, 2, 2, 0, 2, 90) == small_step().step_ps(2, 2, 2, 0, 2, 90)
    assert mixed.slowed(3.0).mixed_context_ps[2] == 12


def test_async_scheduling_cannot_hide_a_part_of_each_request():
    data = small() | {"gap_seq_ps": 11}
    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 6}
    profile = parse_profile(data, "toy.json")
    step = profile.compile(**limits, async_scheduling=True)
    plain = small_step(async_scheduling=True)
    assert step.step_ps(3, 2, 2, 7, 2, 90) == plain.step_ps(3, 2, 2, 7, 2, 90) + 22
    assert step.decode_series(2, 2, 2, 2, 90, 5) == plain.decode_series(2, 2, 2, 2, 90, 5) + 5 * 22
    sync = profile.compile(**limits, async_scheduling=False)
    assert sync.step_ps(3, 2, 2, 7, 2, 90) == small_step().step_ps(3, 2, 2, 7, 2, 90)


def test_a_step_with_a_prompt_pays_a_launch():
    data = small() | {"prefill_base_ps": 500}
    with_launch = parse_profile(data, "toy.json").compile(
        max_num_batched_tokens=20, max_num_seqs=6, async_scheduling=False
    )
    for counts in ((3, 2, 2, 7, 2, 90), (3, 1, 1, 1, 0, 0)):
        assert with_launch.step_ps(*counts) == small_step().step_ps(*counts) + 500
    assert with_launch.step_ps(2, 2, 2, 0, 2, 90) == small_step().step_ps(2, 2, 2, 0, 2, 90)
    slow = with_launch.slowed(2.0)
    assert slow.step_ps(8, 1, 1, 2, 0, 0) == 2 * with_launch.step_ps(8, 1, 1, 2, 0, 0)


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (["dense_ps"], [], ["dense_ps", "starts at count 0 or 1"]),
        (["dense_ps"], [[2, 5]], ["dense_ps", "starts at count 0 or 1"]),
        (["dense_ps"], [[1, 5], [1, 6]], ["dense_ps[1][0]", "1", "more than"]),
        (["dense_ps"], [[1, 0]], ["dense_ps[0][1]", "at least 1 ps"]),
        (["dense_ps"], [[1, float("nan")]], ["dense_ps[0][1]", "nan"]),
        (["dense_ps"], [[1, "5"]], ["dense_ps[0][1]", "'5'"]),
        (["dense_ps"], [[1, True]], ["dense_ps[0][1]", "True"]),
        (["dense_ps"], {"1": 5}, ["dense_ps", "a list"]),
        (["dense_ps"], [[1, 2, 3]], ["dense_ps[0]", "a pair"]),
        (["sample_ps"], [[1, -5]], ["sample_ps[0][1]", "-5"]),
        (["sample_ps"], [[0, 5]], ["sample_ps", "reaches at least count 1"]),
        (["host_sync_ps"], None, ["host_sync_ps", "a list"]),
        (["prefill_pair_ps"], float("inf"), ["prefill_pair_ps", "inf"]),
        (["gap_ps"], -1, ["gap_ps", "-1"]),
        (["gap_ps"], 1e30, ["gap_ps: 1e+30", "from 0 to"]),
        (["dense_ps"], [[1, 1e41]], ["dense_ps[0][1]: 1e+41", "from 0 to"]),
        (["prefill_base_ps"], 1e17, ["prefill_base_ps", "from 0 to"]),
        (["dense_ps"], [[1, 1000], [20, 500]], ["dense_ps: 20 tokens take 500 ps, 1 took 1000"]),
        (
            ["dense_ps"],
            [[1, 999], [8, 499]],
            ["dense_ps: 8 tokens take 499 ps, 1 took 999", "0.5 times"],
        ),
        (["dense_ps"], [[1, 1], [8, 1000], [9, 899]], ["9 tokens take 899 ps", "0.9 times"]),
        (["max_context"], 0, ["max_context", "at least 1"]),
        (["max_context"], 1.5, ["max_context", "1.5"]),
        (["capture_sizes"], [4, 2], ["capture_sizes", "rising"]),
        (["provenance"], [], ["provenance", "a mapping"]),
        (["provenance", "model"], "", ["provenance.model", "non-empty"]),
        (["provenance", "tensor_parallel_size"], "2", ["tensor_parallel_size", "'2'"]),
        (["provenance", "fit_error"], {"x": "y"}, ["fit_error.x", "'y'"]),
        (["provenance", "fit_error"], None, ["fit_error", "a mapping"]),
        (["provenance", "notes"], [1], ["notes[0]"]),
        (["gap"], 1, ["unknown key 'gap'", "'gap_ps'"]),
        (["provenance", "license"], "x", ["unknown key 'license'", "'licence'"]),
    ],
)
def test_bad_profiles_are_refused_with_place_value_and_bound(path, value, parts):
    data = copy.deepcopy(small())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError) as error:
        parse_profile(data, "toy.json")
    assert str(error.value).startswith("toy.json: ")
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("key", sorted(small()))
def test_a_missing_key_is_named(key):
    data = small()
    del data[key]
    with pytest.raises(InputError, match=f"toy.json: missing key '{key}'"):
        parse_profile(data, "toy.json")


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_document_that_is_no_mapping_is_refused(value):
    with pytest.raises(InputError, match=r"toy\.json"):
        parse_profile(value, "toy.json")
