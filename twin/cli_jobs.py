"""What the commands that make many runs share: where runs are made, and which packages that takes."""

import os
from typing import Any

from twin.errors import InputError

JOBS_HELP = "Runs at once; default: one a processor."
RAY_HELP = "Run on this Ray cluster; 'local' starts one on this machine."


def needs_packages(command: str, *names: str) -> None:
    """Raises InputError that names the extra, where a package is not installed."""
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InputError(
            f"{command} needs {' and '.join(missing)}; pip install 'vllm-twin[optimize,report]' brings what is missing"
        )


def backend(jobs: int | None, ray: str | None) -> Any:
    """Where runs are to be made."""
    from twin.whatif.runs import Backend

    address = None if ray is None else "" if ray == "local" else ray
    return Backend(jobs or os.cpu_count() or 1, address)
