"""The commands `twin trace ...`: what is in a trace of requests, and from one format to another."""

import typer

app = typer.Typer(name="trace", no_args_is_help=True)


@app.callback()
def trace() -> None:
    """Look at traces of requests and convert them."""
