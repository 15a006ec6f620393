"""Ctrl-C and SIGTERM that end long work so that what is done stays readable."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar, cast

Item = TypeVar("Item")


@contextmanager
def stop_on_ctrl_c(at_once: bool = False) -> Iterator[list[bool]]:
    """A list that is no longer empty once Ctrl-C was pressed, so that long work stops between two of its steps.

    A second Ctrl-C raises KeyboardInterrupt, with `at_once` the first does, too: such an exception can get lost in a
    library, and the list is looked at beside it. SIGTERM, which systems send that want a place back, does the same.
    Where somebody else minds a signal, and outside the main thread, nothing changes.
    """
    pressed: list[bool] = []

    def press(number: int, frame: FrameType | None) -> None:
        is_first = not pressed
        pressed.append(True)
        if at_once or not is_first:
            raise KeyboardInterrupt

    defaults: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    ours = [number for number, handler in defaults.items() if signal.getsignal(number) is handler]
    if threading.current_thread() is not threading.main_thread() or signal.SIGINT not in ours:
        yield pressed
        return
    for number in ours:
        signal.signal(number, press)
    try:
        yield pressed
    finally:
        for number in ours:
            signal.signal(number, defaults[number])


LOOKS_S = 1.0
"""How often a worker looks whether its parent is still there."""


def end_with_parent() -> None:
    """For a worker process: it ends soon after the process that started it, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOKS_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes and threads that are started in here do not hear Ctrl-C, which is this thread's to mind."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    # Whoever starts it later lets the signal through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def from_a_thread(items: Iterable[Item]) -> Iterator[Item]:
    """The items, taken in a thread of their own; what raises there is raised here.

    Python raises KeyboardInterrupt wherever the main thread is: inside a library that may be between the taking of a
    lock and its giving back, and whoever needs the lock next waits for ever. Here it is in the wait for the next item.
    The thread and the processes that it starts do not hear Ctrl-C; left behind, the thread ends with the process.
    """
    taken: SimpleQueue[tuple[bool, Item | BaseException | None]] = SimpleQueue()

    def take() -> None:
        try:
            for item in items:
                taken.put((True, item))
            taken.put((False, None))
        except BaseException as error:
            taken.put((False, error))

    with deaf_children():
        threading.Thread(target=take, daemon=True).start()
    while True:
        is_item, found = taken.get()
        if is_item:
            yield cast(Item, found)
        elif found is None:
            return
        else:
            raise cast(BaseException, found)
