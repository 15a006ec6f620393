"""The command `twin-real`: the shared scheduler on a real engine."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import typer

from real import (
    cli_calibrate,
    cli_compare,
    cli_compare_demo,
    cli_manifests,
    cli_models,
    cli_profile,
    cli_replay,
    cli_serve,
)
from real.vllm_names import VLLM_NAMES, missing_names

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
def check() -> None:
    """Say whether the installed vLLM has every name the plug-in relies on; status 1 if not."""
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        typer.echo(f"vLLM cannot be imported here: {error}", err=True)
        raise typer.Exit(1) from None
    missing = missing_names()
    found = len(VLLM_NAMES) - len(missing)
    typer.echo(f"vLLM {vllm.__version__}: {found} of {len(VLLM_NAMES)} names found")
    for name in missing:
        typer.echo(f"missing: {name}", err=True)
    if missing:
        raise typer.Exit(1)


app.command()(cli_serve.serve)
app.command()(cli_serve.demo)
app.command()(cli_models.models)
app.command()(cli_replay.replay)
app.command()(cli_replay.results)
app.command()(cli_calibrate.calibrate)
app.command()(cli_profile.profile)
app.command()(cli_compare.compare)
app.command("compare-demo")(cli_compare_demo.compare_demo)
app.command()(cli_manifests.manifests)


def main() -> None:
    """Entry point of `twin-real` and `python -m real`."""
    app(prog_name="twin-real")
