"""`twin import`: the manifests of a deployment as a scenario."""

from pathlib import Path
from typing import Annotated, Any

import typer

from twin.cli_files import check_writable, keep_apart
from twin.errors import InputError
from twin.terminal import complain, errors, write


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder with the manifests of a vLLM deployment (*.yaml, *.yml), or one file.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="The Deployment, where several run vLLM.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the scenario there instead of to stdout."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file of --out where there is one.")
    ] = False,
) -> None:
    """Turn Kubernetes manifests into a scenario, and say what was assumed, wrong and left out."""
    with errors():
        import yaml

        from twin.cluster.manifests import import_manifests
        from twin.scenario_yaml import parse_all

        documents: list[Any] = []
        places: list[str] = []
        files = _files(source)
        keep_apart({"--out": out}, files)
        check_writable({"--out": out})
        if out is not None and out.exists() and not force:
            raise InputError(f"--out {out}: is there already; --force overwrites it")
        for path in files:
            parsed = parse_all(_text(path), str(path))
            documents += parsed
            places += [str(path)] * len(parsed)
        found = import_manifests(documents, name, places)
        lines = [
            *(f"assumed: {text}" for text in found.assumed),
            *(f"wrong: {text}" for text in [*found.faults, *_refused(found.document)]),
            *(f"left out: {text}" for text in found.left_out),
        ]
        head = "".join(f"# {line}\n" for line in lines)
        text = head + yaml.safe_dump(found.document, sort_keys=False, allow_unicode=True, width=100)
        for line in lines:
            complain(line)
        if out is None:
            write(text)
            return
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out {out}: {error.strerror}") from None


def _refused(document: dict[str, Any]) -> list[str]:
    """What `twin run` refuses about the scenario as imported, with the place in the manifests."""
    from twin.cluster.manifests import place_of
    from twin.scenario import load_scenario

    try:
        load_scenario(document)
    except InputError as error:
        told = []
        for line in str(error).splitlines():
            path, _, problem = line.partition(": ")[2].partition(": ")
            if problem and not line.startswith(" "):
                told.append(f"{place_of(path)}: {problem}")
        return told
    return []


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        found = sorted(p for p in source.iterdir() if p.suffix in (".yaml", ".yml") and p.is_file())
        if not found:
            raise InputError(f"{source}: holds no .yaml or .yml file")
        return found
    return [source]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text in UTF-8; a manifest is a YAML file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read: {reason}") from None
