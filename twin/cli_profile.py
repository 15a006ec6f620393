"""`twin profile`: which step times come with the twin, and how to build others from op tables."""

import json
import tempfile
from datetime import UTC, datetime
from datetime import date as Date
from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_files import check_writable
from twin.errors import InputError
from twin.terminal import errors, write

ORIGIN = ("gpu", "engine", "source", "date")
"""Parts of a profile's provenance that `list` tells."""

app = typer.Typer(name="profile", no_args_is_help=True, help="Step-time profiles.")


@app.command("list")
def list_profiles(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the step-time profiles that come with the twin, and what they are made of."""
    with errors():
        from twin.scenario import shipped_profiles
        from twin.step_time.catalogue import GPUS
        from twin.step_time.shipped import subjects

        rows = [
            {**{key: packed["provenance"][key] for key in ORIGIN}, **subject._asdict()}
            for packed in shipped_profiles(*GPUS)
            for subject in subjects(packed)
        ]  # fmt: skip
        if as_json:
            write(json.dumps(rows, indent=2) + "\n")
        else:
            write(_table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    """One line for each model and GPU: the numbers of GPUs by types of weights and KV cache."""
    from twin.report.tables import paragraph, table, to_text

    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    for row in rows:
        types = f"{_short(row['dtype'])}/{_short(row['kv_cache_dtype'])}"
        by_type = found.setdefault((row["model"], row["gpu"]), {})
        by_type.setdefault(types, []).append(row["tensor_parallel_size"])
    made = table("Model", "GPU", "TP by weights/KV")
    made.columns[-1].justify = "left"
    for (model, gpu), by_type in sorted(found.items()):
        alike: dict[str, list[str]] = {}
        for types, sizes in by_type.items():
            alike.setdefault(",".join(map(str, sizes)), []).append(types)
        made.add_row(
            model.rsplit("/", 1)[-1],
            gpu,
            "; ".join(f"{' '.join(types)}: {sizes}" for sizes, types in alike.items()),
        )
    origins = dict.fromkeys(tuple(row[key] for key in ORIGIN[1:]) for row in rows)
    told = "; ".join(
        f"{engine}, {source}, {day} ({', '.join(_gpus(rows, (engine, source, day)))})"
        for engine, source, day in origins
    )
    return to_text([made, paragraph(f"Step times: {told}.")], False)


def _gpus(rows: list[dict[str, Any]], origin: tuple[str, ...]) -> list[str]:
    """The GPUs whose profiles have this engine, source and date."""
    return sorted({row["gpu"] for row in rows if tuple(row[key] for key in ORIGIN[1:]) == origin})


def _day(text: str) -> Date:
    try:
        return Date.fromisoformat(text)
    except ValueError:
        raise InputError(f"--date {text}: must be a day, YYYY-MM-DD") from None


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16"}.get(dtype, dtype)


@app.command()
def build(
    model: Annotated[
        str, typer.Option(help="Name in the catalogue, or a folder with a config.json.")
    ],
    gpu: Annotated[str, typer.Option(help="Name in the catalogue.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the profile is written.")],
    tp: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    dtype: Annotated[str, typer.Option(help="Type of the weights: bfloat16 or fp8.")] = "bfloat16",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache: auto, bfloat16 or fp8.")
    ] = "auto",
    date: Annotated[
        str | None,
        typer.Option(
            help="Day of generation for the provenance; default: today.", show_default=False
        ),
    ] = None,
) -> None:
    """Build a step-time profile from op tables (extra `profiles`), for hardware.step_time."""
    with errors():
        from twin.scenario import read_model
        from twin.step_time.catalogue import check_tensor_parallel, config_of, find_gpu
        from twin.step_time.memory import kv_blocks
        from twin.step_time.op_tables import build as build_profile
        from twin.step_time.op_tables import open_kernels
        from twin.step_time.shipped import stored_dtype, stored_kv_dtype

        check_writable({"--output": output})
        day = datetime.now(tz=UTC).date() if date is None else _day(date)
        shape, hardware = read_model(model), find_gpu(gpu)
        check_tensor_parallel(shape, tp)
        kv = stored_kv_dtype(kv_cache_dtype)
        plan = kv_blocks(shape, hardware, tp, dtype, kv_cache_dtype, 0.92, 2048, 256, 16)
        with tempfile.TemporaryDirectory() as folder:
            config = json.dumps(config_of(shape))
            Path(folder, "config.json").write_text(config, encoding="utf-8")
            kernels = open_kernels(folder, gpu, tp, stored_dtype(dtype), kv, bool(shape.experts))
            profile = build_profile(
                kernels, shape, hardware, tp, stored_dtype(dtype), kv, plan.num_gpu_blocks * 16,
                day.isoformat(),
            )  # fmt: skip
        output.write_text(json.dumps(profile.to_dict(), indent=1) + "\n", encoding="utf-8")
        errors_of = ", ".join(
            f"{name.replace('_', ' ')} {100 * value:.1f} %"
            for name, value in profile.provenance.fit_error.items()
            if name.endswith("_mean")
        )
        write(f"{output}: {profile.subject()}; {errors_of}\n")
