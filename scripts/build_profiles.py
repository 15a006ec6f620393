#!/usr/bin/env python3
"""Build the step-time profiles that come with the twin, one file a GPU, from the op tables of the extra `profiles`.

    python scripts/build_profiles.py --date 2026-01-31 --output twin/step_time/data

Models, GPUs and numbers of GPUs are listed below; a combination whose weights do not fit is left out. The same package
and arguments give the same bytes.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from twin.errors import InputError
from twin.step_time.catalogue import GPUS, MODELS, ModelSpec, check_tensor_parallel, config_of
from twin.step_time.memory import kv_blocks
from twin.step_time.op_tables import SYSTEMS, build, open_kernels
from twin.step_time.profiles import Profile
from twin.step_time.shipped import pack

TENSOR_PARALLEL = (1, 2, 4, 8)
DTYPES = (("bfloat16", "bfloat16"), ("bfloat16", "fp8"), ("fp8", "bfloat16"), ("fp8", "fp8"))
"""(weights, KV cache)."""


def profiles(gpu: str, models: list[str], date: str, folder: Path) -> Iterator[Profile]:
    for name in models:
        model = MODELS[name]
        path = folder / name.replace("/", "--")
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config_of(model)))
        for tp in TENSOR_PARALLEL:
            for dtype, kv_dtype in DTYPES:
                tokens = most_tokens(model, gpu, tp, dtype, kv_dtype)
                if tokens is None:
                    continue
                try:
                    kernels = open_kernels(str(path), gpu, tp, dtype, kv_dtype, bool(model.experts))
                    yield build(kernels, model, GPUS[gpu], tp, dtype, kv_dtype, tokens, date)
                except InputError as error:
                    print(str(error).replace(str(path), name))


def most_tokens(model: ModelSpec, gpu: str, tp: int, dtype: str, kv_dtype: str) -> int | None:
    """Tokens of KV cache that fit; None if not even a prompt of 2048 tokens does, or the model cannot be split so."""
    try:
        check_tensor_parallel(model, tp)
        plan = kv_blocks(model, GPUS[gpu], tp, dtype, kv_dtype, 0.92, 2048, 256, 16)
    except InputError:
        return None
    tokens = plan.num_gpu_blocks * 16
    return tokens if tokens >= 2048 else None


def text_of(found: list[Profile]) -> str:
    """The file of a GPU: a line for each innermost list of numbers, and for each list of pairs."""
    text = json.dumps(pack(found), indent=1)
    text = re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text)
    text = re.sub(r"\],\s+\[", "], [", text)
    return re.sub(r"(\d),\s+(?=\d)", r"\1, ", text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--date", required=True, help="day of generation, YYYY-MM-DD")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for gpu in args.gpu:
            found = list(profiles(gpu, args.model, args.date, Path(folder)))
            text = text_of(found)
            path = args.output / f"{gpu}.json"
            path.write_text(text)
            print(f"{path}: {len(found)} profiles, {len(text):,} bytes", flush=True)


if __name__ == "__main__":
    main()
