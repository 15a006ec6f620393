"""`twin-real results`: what other load generators measured, in the form of a replay."""

from pathlib import Path
from typing import Annotated, Any

import typer

from twin.errors import InputError
from twin.terminal import errors, write


def results(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Results of `vllm bench serve --save-detailed`, guidellm (JSON) or aiperf (profile_export.jsonl).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.", show_default=False)],
    force: Annotated[
        bool, typer.Option("--force", help="Let --out write into a folder that is not empty.")
    ] = False,
) -> None:
    """Write what another load generator measured as `compare` takes it: requests.parquet, trace.jsonl, replay.json.

    With several files, or a file with several runs (a sweep of guidellm), each run has a folder of its own in DIR.
    """
    with errors():
        from real.measured import FACTS, REQUESTS, TRACE, write_measured
        from real.results import ToolRun, read_results
        from twin.cli_files import keep_apart
        from twin.report.folder import check_folder

        found: list[tuple[Path, str, int, ToolRun]] = []
        for file in files:
            tool, runs = read_results(file)
            found += [(file, tool, number, run) for number, run in enumerate(runs)]
        folders = [out] if len(found) == 1 else [out / name for name in _names(found)]
        names = (REQUESTS, TRACE, FACTS)
        keep_apart({"--out": [folder / name for folder in folders for name in names]}, files)
        check_folder(out, force)
        for folder, (*_, run) in zip(folders, found, strict=True):
            try:
                if run.measured:
                    folder.mkdir(exist_ok=True)
            except OSError as error:
                raise InputError(f"--out {folder}: {error.strerror}") from None
        for folder, (file, tool, number, run) in zip(folders, found, strict=True):
            more = f", {run.unsent:,} never sent and left out" if run.unsent else ""
            if not run.measured:
                write(f"{folder}: no request of {tool}{more}\n")
                continue
            facts = {"tool": tool, "file": str(file), "run": number, "unsent": run.unsent}
            write_measured(folder, run.measured, facts)
            done = sum(one.record.outcome == "completed" for one in run.measured)
            write(f"{folder}: {len(run.measured):,} requests of {tool}, {done:,} completed{more}\n")


def _names(found: list[tuple[Path, str, int, Any]]) -> list[str]:
    """A name for each run, after its file: no two alike."""
    several = {file for file, _, number, _ in found if number}
    names: list[str] = []
    for file, _, number, _ in found:
        name = wanted = file.stem + (f"-{number}" if file in several else "")
        count = 1
        while name in names:
            count += 1
            name = f"{wanted}-{count}"
        names.append(name)
    return names
