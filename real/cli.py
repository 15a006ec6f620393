"""The command `twin-real`: the shared scheduler on a real engine."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from real import (
    cli_calibrate,
    cli_compare,
    cli_compare_demo,
    cli_manifests,
    cli_models,
    cli_profile,
    cli_replay,
    cli_results,
    cli_serve,
)
from real.preflight import child_environment
from real.vllm_names import tell_names
from twin.errors import InputError
from twin.terminal import errors

app = typer.Typer(name="twin-real", no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(version("vllm-twin"))
    except PackageNotFoundError:
        typer.echo("vllm-twin runs from its sources, not installed")
    raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """The shared scheduler on a real vLLM engine."""


@app.command()
def check(
    python: Annotated[
        str,
        typer.Option(metavar="PROGRAM", help="Python interpreter that has vLLM, if not this one."),
    ] = sys.executable,
) -> None:
    """Say whether the installed vLLM has every name the plug-in relies on; status 1 if not."""
    with errors():
        raise typer.Exit(tell_names() if python == sys.executable else _tell_names_of(python))


def _tell_names_of(python: str) -> int:
    script = "import sys; from real.vllm_names import tell_names; sys.exit(tell_names())"
    try:
        return subprocess.run([python, "-c", script], env=child_environment({})).returncode
    except OSError as error:
        raise InputError(f"--python {python}: cannot be run: {error.strerror}") from None


app.command()(cli_serve.serve)
app.command()(cli_serve.demo)
app.command()(cli_models.models)
app.command()(cli_replay.replay)
app.command()(cli_results.results)
app.command()(cli_calibrate.calibrate)
app.command()(cli_profile.profile)
app.command()(cli_compare.compare)
app.command("compare-demo")(cli_compare_demo.compare_demo)
app.command()(cli_manifests.manifests)


def main() -> None:
    """Entry point of `twin-real` and `python -m real`."""
    app(prog_name="twin-real")
