"""Which models are held in memory, and how their files get there before they are asked for."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

Model = TypeVar("Model")

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Held(Generic[Model]):
    """A model in the cache."""

    model: Model
    size_bytes: int


class ModelCache(Generic[Model]):
    """Models under a memory budget, the least recently used one given up first.

    `load(name)` returns the model, `unload(name, model)` gives its memory back: ends a server, or sends it to sleep
    where the platform can. `size_of(name)` tells the bytes beforehand, so that room is made before a model is loaded
    and the budget is never exceeded.
    """

    def __init__(
        self,
        budget_bytes: int,
        size_of: Callable[[str], int],
        load: Callable[[str], Model],
        unload: Callable[[str, Model], None],
    ) -> None:
        self.budget_bytes = budget_bytes
        self._size_of, self._load, self._unload = size_of, load, unload
        self._held: OrderedDict[str, Held[Model]] = OrderedDict()  # the oldest use first
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        """What the models held take together."""
        with self._lock:
            return sum(held.size_bytes for held in self._held.values())

    @property
    def names(self) -> list[str]:
        """Models held, the one to be given up next first."""
        with self._lock:
            return list(self._held)

    def get_or_load(self, name: str) -> Model:
        """The model, loaded if it is not held, after others have made room. Raises ValueError if it can never fit."""
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return self._held[name].model
            size = self._size_of(name)
            if size > self.budget_bytes:
                raise ValueError(
                    f"model {name} takes {size:,} bytes, the budget is {self.budget_bytes:,}; raise the budget"
                )
            while self.used_bytes + size > self.budget_bytes:
                self.evict(next(iter(self._held)))
            self._held[name] = Held(self._load(name), size)
            return self._held[name].model

    def evict(self, name: str) -> bool:
        """Give up a model; whether it was held."""
        with self._lock:
            held = self._held.pop(name, None)
            if held is None:
                return False
            self._unload(name, held.model)
            return True


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights, in the order they are read."""
    return sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES)


def weight_bytes(folder: Path) -> int:
    """Bytes of a model's weights on disk."""
    return sum(path.stat().st_size for path in weight_files(folder))


def prefetch(folder: Path) -> Iterator[tuple[Path, int]]:
    """Bring the weights into the page cache, file by file: (file, bytes). Reads where the kernel takes no hint."""
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            while file.read(CHUNK_BYTES):
                pass
        yield path, size


def prefetch_in_background(folder: Path, say: Callable[[str], None]) -> threading.Thread:
    """The same beside the start of the server, which imports for many seconds before it reads weights."""

    def work() -> None:
        try:
            size = sum(size for _, size in prefetch(folder))
        except OSError as error:
            say(f"weights were not read ahead: {error}")
        else:
            say(f"weights read ahead: {size:,} bytes")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
