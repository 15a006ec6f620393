"""No command may write over what it reads, write two results into one file, or find out at its end that it cannot."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from twin.errors import InputError

Outputs = Mapping[str, Path | Sequence[Path] | None]
"""Option or argument -> the file it writes, the files it writes, or None if it was not given."""


def keep_apart(outputs: Outputs, inputs: Iterable[str | Path]) -> None:
    """Raises InputError if one of the files to be written is one of those to be read, or is to be written twice.

    A file is the same under any name: relative, through links, of another mount. A folder among the inputs stands for
    the files in it. Nothing is opened.
    """
    read = [file for path in inputs for file in _files(Path(path))]
    written: list[tuple[str, Path]] = []
    for option, named in outputs.items():
        paths = [] if named is None else [named] if isinstance(named, Path) else named
        for path in paths:
            for file in read:
                if _is_same(path, file):
                    also = "" if str(file) == str(path) else f" ({file})"
                    raise InputError(
                        f"{option} {path}: is read by this command{also} and would be overwritten; name another file"
                    )
            for other, before in written:
                if _is_same(path, before):
                    raise InputError(
                        f"{option} {path}: {other} writes the same file; name another for one of them"
                    )
            written.append((option, path))


def check_writable(outputs: Mapping[str, Path | None]) -> None:
    """Raises InputError if one of the files cannot be written: a folder, or in a folder that is not there or closed."""
    for option, path in outputs.items():
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir():
            raise InputError(f"{option} {path}: is a folder; name a file in it")
        if not folder.is_dir():
            raise InputError(f"{option} {path}: there is no folder {path.parent}; make it first")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputError(f"{option} {path}: may not be written; name another file")


def _files(path: Path) -> list[Path]:
    try:
        return [p for p in path.iterdir() if not p.is_dir()] if path.is_dir() else [path]
    except OSError:
        return [path]


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        # One of them is not there yet, so that only its name tells.
        return os.path.realpath(one) == os.path.realpath(other)
