"""`twin-real compare-demo`: serve, calibrate, replay and compare on this machine, in one go."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from real.cli_calibrate import calibrate
from real.cli_compare import compare
from real.cli_replay import replay
from real.cli_serve import (
    FAILED,
    NO_KEY,
    Overrides,
    Python,
    ScenarioFile,
    prepared,
    server_environment,
)
from real.command import Serving, serve_command
from real.preflight import check_vllm, free_port
from real.server import Server, Stopped, say_to_stderr
from real.tiny import NAME
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.terminal import complain, errors


def compare_demo(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for everything that is written.")
    ] = Path("compare-demo"),
    minutes: Annotated[float, typer.Option(min=0.2, help="For the calibration.")] = 1.0,
    python: Python = sys.executable,
) -> None:
    """Start the tiny model, measure its steps, send the scenario's requests, and hold the twin beside what came."""
    with errors():
        loaded = load_scenario(scenario, overrides or [])
        check_vllm(python, loaded.engine.version)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {out}: {error.strerror}") from None
        serving = Serving(python=python, model="", name=NAME, port=free_port())
        steps, measured = out / "steps.json", out / "measured"
        with prepared(loaded, serving, tiny=True) as (served, serving):
            server = Server(serve_command(served, serving), serving.host, serving.port, None)
            try:
                server.start(server_environment(serving) | NO_KEY)
                server.wait_until_up(say_to_stderr)
                server.warm_up(NAME, served.engine.max_model_len, say_to_stderr)
                server.announce_ready()
                # However late the client is on a busy machine: a demo goes on, and the comparison says it.
                calibrate(
                    scenario, steps, overrides, url=server.url, tiny=True, model=NAME,
                    minutes=minutes, late=math.inf,
                )  # fmt: skip
                replay(
                    scenario, server.url, overrides, model=NAME, out=measured, force=True, tiny=True
                )
            except Stopped as error:
                complain(f"error: {error}")
                raise typer.Exit(FAILED) from None
            finally:
                server.stop()
        compare(scenario, [measured], overrides, step_time=steps, tiny=True, out=out, force=True)
