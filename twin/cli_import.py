"""`twin import`: the manifests of a deployment as a scenario."""

from pathlib import Path
from typing import Annotated

import typer

from twin.cli_files import keep_apart
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
) -> None:
    """Turn Kubernetes manifests into a scenario, and say what was assumed, wrong and left out."""
    with errors():
        import yaml

        from twin.cluster.manifests import import_manifests
        from twin.scenario_yaml import parse_all

        documents = []
        files = _files(source)
        keep_apart({"--out": out}, files)
        for path in files:
            documents += parse_all(_text(path), str(path))
        found = import_manifests(documents, name)
        lines = [
            *(f"assumed: {text}" for text in found.assumed),
            *(f"wrong: {text}" for text in found.faults),
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
