"""`twin-real profile`: micro-benchmarks of a model's operations become a step-time profile."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from real.cli_serve import Overrides, ScenarioFile
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.terminal import errors, write


def profile(
    scenario: ScenarioFile,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Profile to write, for hardware.step_time (.json).",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    gpu: Annotated[
        str | None,
        typer.Option(help="Its name in the provenance.", show_default="the scenario's, or cpu"),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(min=0.1, help="Nothing is begun after this long; what is left out is named."),
    ] = 7.0,
    python: Annotated[
        str, typer.Option(metavar="PROGRAM", help="Python interpreter that has torch.")
    ] = sys.executable,
) -> None:
    """Time the operations of a model's own shapes with torch, and write them as a step-time profile for the twin.

    Without vLLM and without weights. What an engine adds to its operations is not in it: `twin-real calibrate` measures
    whole steps.
    """
    with errors():
        from real.profile_tables import bandwidths, job_of, profile_of, run_job
        from twin.cli_files import keep_apart

        if device not in ("cuda", "cpu"):
            raise InputError(f"--device {device}: must be cuda or cpu")
        if out.suffix != ".json" or not out.parent.is_dir():
            raise InputError(f"--out {out}: must be a .json file in a folder that is there")
        loaded = load_scenario(scenario, overrides or [])
        tables = out.with_suffix(".tables.json")
        keep_apart({"--out": [out, tables]}, loaded.files)
        job = job_of(loaded, device, 60 * minutes)
        with tempfile.TemporaryDirectory(prefix="twin-profile-") as name:
            found = run_job(job, python, Path(name))
        named = gpu or ("cpu" if device == "cpu" else loaded.hardware.gpu.name)
        kv_dtype = loaded.document["engine"]["kv_cache_dtype"]
        made, wrong = profile_of(found, job, loaded.model, named, kv_dtype)
        out.write_text(json.dumps(made.to_dict(), indent=1) + "\n", encoding="utf-8")
        tables.write_text(json.dumps(found) + "\n", encoding="utf-8")
        rates = ", ".join(
            f"{kind} {rate / 1e9:.1f} GB/s" for kind, rate in bandwidths(found).items()
        )
        lines = [
            f"{found['device']}, torch {found['torch']}: measured in {found['wall_s']:.0f} s",
            f"copies: {rates}",
            "attention: "
            + ", ".join(f"{name} {100 * value:.1f} % off" for name, value in wrong.items()),
            *(f"not measured: {what}" for what in found["skipped"][:10]),
            f"profile: {out}",
        ]
        write("\n".join(lines) + "\n")
