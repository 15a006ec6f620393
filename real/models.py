"""Which models are held in memory, and how their files get there before they are asked for."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from real.server import Server, Stopped

Model = TypeVar("Model")

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Held(Generic[Model]):
    """A model that is loaded."""

    model: Model
    size_bytes: int


class ModelCache(Generic[Model]):
    """Models under a memory budget, the least recently used one given up first.

    `size_of(name)` tells the bytes beforehand, so that room is made before `load(name)` and the budget is never
    exceeded. To give a model up, `sleep(model)` is tried first: it says whether the model sleeps now, its memory free,
    to be had back with `wake(model)`. Where it does not, `unload(model)` ends it. A model that `is_alive` denies is
    unloaded when it is asked for, and loaded again.
    """

    def __init__(
        self,
        budget_bytes: int,
        size_of: Callable[[str], int],
        load: Callable[[str], Model],
        unload: Callable[[Model], None],
        sleep: Callable[[Model], bool] = lambda model: False,
        wake: Callable[[Model], None] = lambda model: None,
        is_alive: Callable[[Model], bool] = lambda model: True,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._size_of, self._load, self._unload = size_of, load, unload
        self._sleep, self._wake, self._is_alive = sleep, wake, is_alive
        self.loading: str | None = None
        """The model that is being loaded or woken up."""
        self._held: OrderedDict[str, Held[Model]] = OrderedDict()  # the oldest use first
        self._asleep: dict[str, Model] = {}
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

    def held(self) -> dict[str, Held[Model]]:
        """The models held, the one to be given up next first, without waiting for one that is being loaded."""
        return self._held.copy()

    @property
    def asleep(self) -> list[str]:
        """Models that can be woken up."""
        return list(self._asleep.copy())

    def get_or_load(self, name: str) -> Model:
        """The model, loaded or woken up if it is not held, after others have made room.

        Raises ValueError if it can never fit; what loading raises leaves the cache as it is after making room.
        """
        with self._lock:
            self._forget_dead(name)
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
            self.loading = name
            try:
                if name in self._asleep:
                    model = self._asleep[name]
                    self._wake(model)
                    del self._asleep[name]
                else:
                    model = self._load(name)
            finally:
                self.loading = None
            self._held[name] = Held(model, size)
            return model

    def _forget_dead(self, name: str) -> None:
        held = self._held.get(name)
        model = self._asleep.get(name) if held is None else held.model
        if model is not None and not self._is_alive(model):
            self._held.pop(name, None)
            self._asleep.pop(name, None)
            self._unload(model)

    def evict(self, name: str) -> bool:
        """Give up a model; whether it was held."""
        with self._lock:
            held = self._held.pop(name, None)
            if held is None:
                return False
            if self._sleep(held.model):
                self._asleep[name] = held.model
            else:
                self._unload(held.model)
            return True

    def close(self) -> None:
        """End all models, those asleep, too."""
        with self._lock:
            for model in [*self._asleep.values(), *(held.model for held in self._held.values())]:
                self._unload(model)
            self._asleep.clear()
            self._held.clear()


def server_cache(
    budget_bytes: int,
    sizes: Mapping[str, int],
    start: Callable[[str], Server],
    drain_s: float = 600.0,
    say: Callable[[str], None] = lambda message: None,
) -> ModelCache[Server]:
    """A cache whose models are servers: `start(name)` gives one that is ready. Sleep mode is used where vLLM has it.

    A server that is given up first answers what it has accepted, for at most `drain_s`; `say` is told what came of it.
    """

    def give_up(server: Server) -> bool:
        try:
            left = server.drain(drain_s, say, threading.Event())
        except Stopped as error:
            say(str(error))
            return False
        sleeps = server.fall_asleep()
        lost = f", {left} accepted requests were not answered in {drain_s:g} s" if left else ""
        say(f"{server.url} {'sleeps' if sleeps else 'is stopped'}{lost}")
        return sleeps

    def end(server: Server) -> None:
        if server.stop():
            say(f"{server.url} did not end when it was told to, and was killed")

    def wake(server: Server) -> None:
        server.wake_up()
        server.announce_ready()
        say(f"{server.url} is awake")

    return ModelCache(
        budget_bytes,
        sizes.__getitem__,
        start,
        unload=end,
        sleep=give_up,
        wake=wake,
        is_alive=lambda server: server.is_alive,
    )


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
