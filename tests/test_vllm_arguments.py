"""Names and values of vLLM's arguments that the check of manifests goes by, also beside the installed vLLM."""

import argparse
import contextlib
import dataclasses
import io

import pytest

from twin.cluster.vllm_arguments import ARGUMENTS, VERSIONS, argument_problem
from twin.cluster.vllm_command import SHORT, arguments_of, name_in
from twin.cluster.vllm_values import (
    ABOVE_0,
    BELOW_1,
    CHOICES,
    FLAGS,
    JSON,
    LEAST,
    MAY_BE_NONE,
    MOST,
    NUMBERS,
    READABLE,
    WHOLE,
    readable_int,
    value_problem,
)

VALUES = {
    "enforce-eager": {None: True, "true": False, "false": False, "": False},
    "no-enable-prefix-caching": {None: True, "1": False},
    "dtype": {"bfloat16": True, "half": True, "bf16": False, "BF16": False, "fp8": False, None: False},
    "kv-cache-dtype": {"auto": True, "fp8": True, "fp8_e4m3": True, "int8": False},
    "scheduling-policy": {"priority": True, "lifo": False},
    "quantization": {"fp8": True, "awq": True, "None": True, "int4": False, "4bit": False},
    "load-format": {"safetensors": True, "safetensor": False},
    "gpu-memory-utilization": {
        "0.9": True, "1": True, ".5": True, "1.5": False, "0": False, "-0.1": False, "90%": False, "nan": False,
    },
    "device-memory-utilization": {"0.9": True, "95": False},
    "max-num-seqs": {"64": True, "0": False, "-1": False, "64.0": False, "1e2": False, "64k": False, "": False},
    "max-model-len": {"8192": True, "8k": True, "8K": True, "1.5k": True, "auto": True, "-1": True, "1.5K": False,
                      "8 k": False, "-2": False, "None": False},
    "max-num-batched-tokens": {"8K": True, "2M": True, "auto": False, "0": False},
    "max-num-queued-reqs": {"0": True, "None": True, "": True, "none": False, "-1": False, "10s": False},
    "kv-cache-memory-bytes": {"10G": True, "10Gi": False, "None": True},
    "shutdown-timeout": {"60": True, "60s": False, "1.5": False, "-1": False},
    "watermark": {"0": True, "0.01": True, "1": False},
    "port": {"8000": True, "http": False, "70000": False, "0": False},
    "tensor-parallel-size": {"2": True, "0": False, "two": False},
    "compilation-config": {'{"mode": 3}': True, "{mode: 3}": False},
    "speculative-config": {'{"method": "ngram"}': True, "ngram": False, "None": True},
    "additional-config": {"anything": True},
    "model": {"x": True},
    "no-such-argument": {"x": True},
}  # fmt: skip
"""Argument -> value -> whether vLLM 0.32 starts with it."""


@pytest.mark.parametrize(
    ("name", "value", "is_taken"),
    [(name, value, taken) for name, values in VALUES.items() for value, taken in values.items()],
)
def test_values_that_vllm_refuses(name, value, is_taken):
    problem = value_problem(name, value)
    assert (problem is None) == is_taken, problem


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "dtype",
            "bf16",
            "must be one of auto, bfloat16, float, float16, float32, half, got 'bf16'; did you mean bfloat16?",
        ),
        ("gpu-memory-utilization", "1.5", "must be > 0 and <= 1, got 1.5"),
        ("max-num-seqs", "0", "must be >= 1, got 0"),
        ("watermark", "1", "must be >= 0 and < 1, got 1"),
        ("max-model-len", "8Ki", "must be a whole number, or one like 32k or 32K, got '8Ki'"),
        ("enforce-eager", "true", "takes no value, got 'true'"),
        ("max-num-seqs", None, "needs a value"),
    ],
)
def test_what_is_said_of_them(name, value, words):
    assert value_problem(name, value) == words


def test_lists_that_each_version_adds_to_are_those_of_their_version_only():
    assert value_problem("kv-cache-dtype", "new", "0.32.0") is not None
    assert value_problem("kv-cache-dtype", "new", "0.33.0") is None
    assert value_problem("dtype", "new", "0.33.0") is not None


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("32k", 32000), ("32K", 32768), ("1.5m", 1500000), ("2G", 2**31)],
)  # fmt: skip
def test_numbers_as_people_write_them(text, number):
    assert readable_int(text) == number


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("--max_num_seqs=4", "max-num-seqs"),
        ("-tp", "tensor-parallel-size"),
        ("-tp=2", "tensor-parallel-size"),
        ("--tensor-par", "tensor-parallel-size"),
        ("--no-enable-pre", "no-enable-prefix-caching"),
        ("--max-num", "max-num"),  # several
        ("--compilation-config.mode=3", "compilation-config.mode"),
        ("--", None),
        ("-c", None),
        ("serve", None),
    ],
)
def test_names_as_vllm_reads_them(word, name):
    assert name_in(word) == name
    if name not in (None, "max-num"):
        assert argument_problem(name) is None


def test_arguments_of_a_container():
    command = ["vllm", "serve", "m", "-tp", "2", "--enforce-eager", "--max-num-seqs", "8"]
    found = dict(arguments_of({"command": command, "args": ["--dtype=half", "--port", "-1"]}))
    assert found == {
        "model": "m",
        "tensor-parallel-size": "2",
        "enforce-eager": "true",
        "max-num-seqs": "8",
        "dtype": "half",
        "port": "-1",
    }
    shell = {"command": ["sh", "-c", "exec vllm serve m --dtype half -tp 4"]}
    assert dict(arguments_of(shell)) == {
        "model": "m",
        "dtype": "half",
        "tensor-parallel-size": "4",
    }


def test_the_lists_are_of_arguments_that_there_are():
    listed = (FLAGS | WHOLE | READABLE | NUMBERS | JSON | set(CHOICES)) - {"headless"}
    assert listed <= ARGUMENTS[VERSIONS[0]]
    assert set(SHORT.values()) <= ARGUMENTS[VERSIONS[0]]
    assert {*LEAST, *ABOVE_0, *MOST, *BELOW_1} <= WHOLE | READABLE | NUMBERS
    kinds = [FLAGS, WHOLE, READABLE, NUMBERS, JSON, set(CHOICES)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))


# --- beside the installed vLLM --------------------------------------------------------------------


@pytest.fixture(scope="module")
def parser():
    pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


GROWING = {
    "all2all-backend", "collect-detailed-traces", "gdn-prefill-backend", "kda-decode-backend", "kda-prefill-backend",
    "linear-backend", "log-level", "mamba-ssu-algorithm", "max-lora-rank", "moe-backend", "sparse-indexer-topk-backend",
    "spec-method",
}  # fmt: skip
"""Choices that are not listed: they change with every version."""

ELSEWHERE = {"quantization", "load-format"}
"""Lists that are no choices of the parser: it takes every text, and the configuration refuses later."""


@pytest.mark.vllm
def test_flags_and_choices_are_those_of_the_installed_one(parser):
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    flags, choices, short = set(), {}, {}
    for action in parser._actions:
        names = [o[2:] for o in action.option_strings if o.startswith("--")]
        longs = [name for name in names if f"no-{name}" in names or not name.startswith("no-")]
        kinds = (argparse.BooleanOptionalAction, argparse._StoreTrueAction)
        for name in longs:
            if isinstance(action, kinds):
                flags.add(name)
            if action.choices:
                choices[name] = {str(c) for c in action.choices if c is not None}
            short |= {o: name for o in action.option_strings if not o.startswith("--")}
    assert flags == FLAGS
    assert {k: v for k, v in choices.items() if k not in GROWING} == {
        k: set(v) for k, v in CHOICES.items() if k not in ELSEWHERE
    }
    assert short == SHORT | {"-h": "help", "-n": "nnodes", "-r": "node-rank"}
    assert set(CHOICES["quantization"]) == set(QUANTIZATION_METHODS)
    assert set(CHOICES["load-format"]) == set(_LOAD_FORMAT_TO_MODEL_LOADER)


SAMPLES = (
    "1",
    "0.5",
    "32K",
    "32k",
    "1.5k",
    "auto",
    "None",
    "none",
    "",
    '{"a": 1}',
    "[1]",
    "x",
    "true",
    "-1",
    "10s",
)


@pytest.mark.vllm
def test_the_parser_refuses_the_same_values(parser):
    """Bounds aside, which the configuration has; and values within JSON, of which only the form is judged here."""
    for name in sorted(FLAGS | WHOLE | READABLE | NUMBERS | set(CHOICES) - ELSEWHERE):
        for value in SAMPLES:
            refused = _refuses(parser, ["m", f"--{name}={value}"])
            problem = value_problem(name, value)
            if problem is not None and " >= " not in problem and " > " not in problem:
                assert refused, (name, value, problem)
            elif problem is None:
                assert not refused, (name, value)
    for name in sorted(JSON):
        for value in ("x", "{a: 1}", "{"):
            assert value_problem(name, value)
            assert _refuses(parser, ["m", f"--{name}={value}"]), (name, value)


def _refuses(parser, words):
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            parser.parse_args(words)
        except (SystemExit, ValueError):
            return True
    return False


@pytest.mark.vllm
def test_bounds_are_those_of_the_installed_one(parser):
    import vllm.config

    bounds = {"ge": {}, "gt": {}, "le": {}, "lt": {}}
    listed = WHOLE | READABLE | NUMBERS
    for name in dir(vllm.config):
        kind = getattr(vllm.config, name)
        if not dataclasses.is_dataclass(kind) or name == "SpeculativeConfig":
            continue
        for field, info in getattr(kind, "__pydantic_fields__", {}).items():
            argument = field.replace("_", "-")
            for found in info.metadata if argument in listed else ():
                for key, values in bounds.items():
                    if hasattr(found, key):
                        values[argument] = getattr(found, key)
    at_least = bounds["ge"] | {k: v + 1 for k, v in bounds["gt"].items() if k not in NUMBERS}
    # The configuration has no bounds of its port; device- is another name of gpu-memory-utilization.
    assert {k: v for k, v in LEAST.items() if k != "port"} == at_least
    assert set(ABOVE_0) - {"device-memory-utilization"} == bounds["gt"].keys() & NUMBERS
    assert {
        k: v for k, v in MOST.items() if k not in ("port", "device-memory-utilization")
    } == bounds["le"]
    assert dict.fromkeys(BELOW_1, 1) == bounds["lt"]
    assert {"max-num-queued-reqs"} <= MAY_BE_NONE
