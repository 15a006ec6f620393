"""What a process that runs the scenarios of strangers cannot do, whatever they say: open files, take all memory."""

import os
import site
import sys
import sysconfig
import zoneinfo
from contextlib import suppress
from pathlib import Path
from typing import Any

NEEDED = ("/dev/null", "/dev/urandom")
"""What Python opens besides its own files: neither says anything of this machine."""


class Guard:
    """An audit hook that lets this process open what Python and this project consist of, and uploads. Nothing else."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        project = Path(__file__).parents[1]
        places: list[str | Path] = [
            *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
            *zoneinfo.TZPATH,
            project / "twin",
            project / "dashboard",
            # Where an installation that is worked on has its version.
            project / "vllm_twin.egg-info",
        ]
        # Python asks for its own modules in an archive first, there or not.
        self._own = frozenset({*NEEDED, *(entry for entry in sys.path if entry.endswith(".zip"))})
        self._places = tuple(str(Path(place).resolve()) + os.sep for place in places)
        self.uploads: frozenset[str] = frozenset()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raises PermissionError for any other file."""
        if event != "open" or isinstance(arguments[0], int):
            return
        name = os.fsdecode(arguments[0])
        if name in self.uploads or name in self._own:
            return
        path = os.path.realpath(name)
        if not path.startswith(self._places):
            with suppress(OSError):
                sys.stderr.write(f"refused to open {path}\n")
            raise PermissionError(
                "the scenario names a file of the server; the page takes uploads only"
            )


def limit_memory(memory_bytes: int) -> None:
    """Where the system can, no more address space than this."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
