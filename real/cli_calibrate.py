"""`twin-real calibrate`: the steps of an engine become a step-time profile."""

import json
import math
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from real.address import base_of
from real.cli_serve import Overrides, Python, ScenarioFile, prepared, server_environment
from real.command import Serving
from real.headers import Headers, headers_of
from real.preflight import check_model, check_vllm
from real.server import say_to_stderr
from real.tiny import NAME, VOCABULARY
from twin.errors import InputError
from twin.interrupt import stop_on_ctrl_c
from twin.scenario import Scenario, load_scenario
from twin.terminal import complain, errors, progress_bar, write


def calibrate(
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
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure a live server from outside instead, in about five minutes and without a restart.",
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Of the built-in model with random weights, on a CPU.")
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="Of a larger built-in model with random weights.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder of the model, where it is not what the scenario names; its name with --url."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="What it runs on, for the provenance.", show_default="the scenario's"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each step is measured.")] = 5,
    minutes: Annotated[
        float, typer.Option(min=0.2, help="How long a live server is measured at most.")
    ] = 5.0,
    load: Annotated[
        float,
        typer.Option(
            min=0.05, max=1.0, help="Share of a live server's slots that is used at most."
        ),
    ] = 0.5,
    late: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Refuse to fit if 1 % of the requests were sent later than this after their time.",
        ),
    ] = 0.005,
    header: Headers = None,
    python: Python = sys.executable,
) -> None:
    """Measure how long an engine's steps take on a designed sweep, and fit a step-time profile for the twin.

    In-process the result is tested on two workloads that the sweep does not have; both errors are printed and written
    beside the profile (FILE.calibration.json). With --url it has no such test.
    """
    with errors():
        from twin.cli_files import keep_apart

        if out.suffix != ".json" or not out.parent.is_dir():
            raise InputError(f"--out {out}: must be a .json file in a folder that is there")
        if not late >= 0:
            raise InputError(f"--late {late:g}: must be a number of seconds from 0 on, or inf")
        if minutes == math.inf or math.isnan(minutes):
            raise InputError(f"--minutes {minutes:g}: must be a finite number")
        if tiny and small:
            raise InputError("--tiny and --small: two built-in models; leave one out")
        if (tiny or small) and model is not None and url is None:
            raise InputError(
                f"--model {model}: --tiny and --small bring their own model; leave one out"
            )
        loaded = load_scenario(scenario, overrides or [])
        headers = headers_of(header)
        if url is not None:
            url = base_of(url)
        beside = out.with_suffix(".calibration.json")
        keep_apart({"--out": [out, beside]}, loaded.files)
        _check_writable(out, beside)
        serving = Serving(
            python, model or loaded.model.name, NAME if tiny or small else loaded.model.name
        )
        with (
            stop_on_ctrl_c(at_once=True),
            prepared(loaded, serving, tiny or small, small) as (served, serving),
        ):
            if url is None:
                found, facts = _in_process(served, serving, repeats)
            else:
                found, facts = _live(served, serving, url, model, minutes, load, late, headers)
            made = _profile(
                served, serving, found, facts["source"], gpu or ("cpu" if serving.dummy else None)
            )
        # What was measured is told even if it cannot be written any more.
        write(_told(found, facts))
        for path, content in ((out, made.to_dict()), (beside, {**found.to_dict(), **facts})):
            try:
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise InputError(f"--out {path}: {error.strerror}") from None
        write(f"profile: {out}\n")
        _warn(found, facts)


def _check_writable(*paths: Path) -> None:
    """Raise InputError now, not after minutes of measuring."""
    try:
        for path in paths:
            if path.exists():
                path.open("ab").close()
        with tempfile.TemporaryFile(dir=paths[0].parent):
            pass
    except OSError as error:
        raise InputError(f"--out {paths[0]}: cannot be written: {error.strerror}") from None


def _in_process(served: Scenario, serving: Serving, repeats: int) -> tuple[Any, dict[str, Any]]:
    from real.calibrate import calibrate, error_of, steps_of, total_error
    from real.engine_job import limits_of, time_steps
    from real.sweep import sweep, unseen

    check_vllm(serving.python, served.engine.version)
    check_model(serving.model)
    limits = limits_of(served)
    try:
        designed = {f"{i}": asks for i, asks in enumerate(sweep(limits))}
    except ValueError as error:
        raise InputError(f"engine: {error}") from None
    tests = {kind: unseen(limits, kind) for kind in ("mix", "chat")}
    vocabulary = 250 if serving.dummy else served.model.vocab - served.model.vocab // 20
    say_to_stderr(
        f"measuring {len(designed)} workloads {repeats} times, and two for the test: a few minutes, more where steps "
        "are long"
    )
    with tempfile.TemporaryDirectory(prefix="twin-calibrate-") as name, progress_bar() as update:
        rows = list(
            time_steps(
                served, serving, {**designed, **tests}, repeats, vocabulary, Path(name),
                server_environment(serving),
                update and (lambda done, of: update(done, of, f"{done} of {of} workloads played")),
            )
        )  # fmt: skip
    steps, noise = steps_of(row for row in rows if row["workload"] in designed)
    found = calibrate(steps, noise=noise, longest_context=limits.max_model_len, fine=True)
    facts: dict[str, Any] = {"source": f"{len(steps)} steps of the in-process engine", "tests": {}}
    for kind in tests:
        own, own_noise = steps_of(row for row in rows if row["workload"] == kind)
        whole = [timed.step for timed in own]
        facts["tests"][kind] = {
            "steps": len(whole),
            "noise": own_noise,
            "mape": error_of(found, whole)["all"],
            "total_error": total_error(found, whole),
            "total_s": sum(step.seconds for step in whole),
        }
    return found, facts


def _live(
    served: Scenario,
    serving: Serving,
    url: str,
    model: str | None,
    minutes: float,
    load: float,
    late: float,
    headers: Mapping[str, str],
) -> tuple[Any, dict[str, Any]]:
    import asyncio

    from real.calibrate import calibrate
    from real.engine_job import limits_of
    from real.live_steps import measure
    from real.told import first_model

    limits = limits_of(served)
    vocabulary = VOCABULARY if serving.dummy else served.model.vocab
    say_to_stderr(f"measuring {url} for at most {minutes:g} minutes")
    live = asyncio.run(
        measure(
            url, model or first_model(url, headers), limits, vocabulary, 60 * minutes, load, headers
        )
    )
    if live.late_p99_s > late:
        raise InputError(
            f"calibration: 1 % of the requests were sent more than {1e3 * live.late_p99_s:.1f} ms after their time "
            f"(--late allows {1e3 * late:g} ms): this client is too busy for its times to be those of the server; run "
            "it on another machine, or with fewer things beside it"
        )
    found = calibrate(
        live.steps, noise=live.noise, frontend_s=live.frontend_s, longest_context=live.longest
    )
    facts = {
        "source": f"{len(live.steps)} steps of a live server, seen by its clients",
        "seconds": live.seconds,
        "late_p99_s": live.late_p99_s,
        "tests": {},
    }
    return found, facts


def _profile(served: Scenario, serving: Serving, found: Any, source: str, gpu: str | None) -> Any:
    from real.calibrate import profile
    from twin.step_time.profiles import Provenance

    hardware, engine = served.hardware, served.engine
    about = Provenance(
        model="tiny" if serving.dummy else served.model.name,
        gpu=gpu or hardware.gpu.name,
        tensor_parallel_size=hardware.tensor_parallel_size,
        dtype=hardware.dtype,
        kv_cache_dtype=served.document["engine"]["kv_cache_dtype"],
        engine=f"vLLM {engine.version}",
        source=source,
        licence="own measurement",
        date=datetime.now(UTC).date().isoformat(),
        script="twin-real calibrate",
        fit_error={},
        notes=(),
    )
    return profile(
        found, about, engine.max_num_batched_tokens, engine.max_num_seqs, engine.max_model_len
    )


POOR = 0.15
"""Error of a step, as a share, from which on a fit says little; a third of it is that for all steps together."""


def _warn(found: Any, facts: dict[str, Any]) -> None:
    """Say what makes the profile a poor one."""
    poor = [("fit", found.mape["all"], 0.0)]
    poor += [
        (f"unseen workload {kind}", test["mape"], test["total_error"])
        for kind, test in facts["tests"].items()
    ]
    names = [name for name, step, whole in poor if step > POOR or abs(whole) > POOR / 3]
    if names:
        complain(
            f"warning: {', '.join(names)}: a step is off by more than {POOR:.0%}, or all together by more than "
            f"{POOR / 3:.0%}; measure again on a quieter machine, or with more --repeats (--minutes with --url)"
        )


def _told(found: Any, facts: dict[str, Any]) -> str:
    noise = f"{100 * found.noise:.1f} %" if found.noise else "unknown, as nothing was repeated"
    lines = [
        f"{facts['source']}, noise of one measurement {noise}",
        "fit: "
        + ", ".join(f"{name} {100 * value:.1f} %" for name, value in found.mape.items())
        + " mean absolute error of a step",
        "measured up to " + ", ".join(f"{n:,} {name}" for name, n in found.largest.items()),
    ]
    if found.host[0] or found.host[1]:
        lines.append(
            f"scheduler and update: {1e6 * found.host[0]:.0f} us a step and {1e6 * found.host[1]:.1f} us a request"
        )
    if found.frontend_s:
        lines.append(f"outside the scheduler: {1e3 * found.frontend_s:.2f} ms before a first token")
    for kind, test in facts["tests"].items():
        lines.append(
            f"unseen workload {kind}: {test['steps']} steps, {100 * test['mape']:.1f} % of a step, "
            f"{100 * test['total_error']:+.1f} % of all {test['total_s']:.2f} s (noise {100 * test['noise']:.1f} %)"
        )
    return "\n".join(lines) + "\n"
