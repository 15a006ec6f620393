"""What every command does alike: results to stdout, complaints to stderr, mistakes of the user to status 2."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import typer

from twin.errors import InputError

MISSED, BAD_INPUT, INTERRUPTED = 1, 2, 130
BROKEN_PIPE = 141
"""What a shell reports of a program that wrote to a closed pipe."""


@contextmanager
def errors() -> Iterator[None]:
    """Mistakes of the user become one message and status 2, Ctrl-C becomes 130."""
    try:
        yield
    except InputError as error:
        complain(f"error: {error}")
        raise typer.Exit(BAD_INPUT) from None
    except MemoryError:
        complain(
            "error: not enough memory for this run; fewer replicas, KV blocks or requests need less"
        )
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None


Update = Callable[[int, int | None, str], None]
"""(what is done, what there is in all or None, how that is said)"""


@contextmanager
def progress_bar() -> Iterator[Update | None]:
    """What moves a bar on stderr, which goes when all is done; None where stderr is no terminal."""
    stderr = _open(sys.stderr)
    if stderr is None or not stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(BarColumn(), words, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(
            task, completed=done, total=total, description=text
        )


def wants_color() -> bool:
    """Whether stdout is a terminal that may be written to in colour."""
    stdout = _open(sys.stdout)
    return stdout is not None and stdout.isatty() and "NO_COLOR" not in os.environ


def complain(message: str) -> None:
    """One line on stderr, if there is one: a complaint that cannot be heard changes no exit status."""
    stderr = _open(sys.stderr)
    if stderr is not None:
        with suppress(OSError):
            stderr.write(f"{message}\n")


def write(text: str) -> None:
    """Write to stdout; a reader that has gone (`twin run ... | head`) ends the command quietly."""
    stdout = _open(sys.stdout)
    if stdout is None:
        raise InputError("the result cannot be written: stdout is closed")
    try:
        stdout.write(text)
        stdout.flush()
    except OSError as error:
        # The interpreter flushes once more on leaving; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(BROKEN_PIPE) from None
        raise InputError(f"the result cannot be written: {error.strerror}") from None


def _open(stream: TextIO | None) -> TextIO | None:
    """The stream; None where the shell closed it (`>&-`), which the types of `sys` leave out."""
    return stream
