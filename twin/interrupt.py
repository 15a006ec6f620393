"""Ctrl-C that ends long work so that what is done stays readable."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar, cast

Item = TypeVar("Item")


@contextmanager
def stop_on_ctrl_c(at_once: bool = False) -> Iterator[list[bool]]:
    """A list that is no longer empty once Ctrl-C was pressed, so that long work stops between two of its steps.

    A second Ctrl-C raises KeyboardInterrupt, with `at_once` the first does, too: such an exception can get lost in a
    library, and the list is looked at beside it. Where somebody else minds the signal, and outside the main thread,
    nothing changes.
    """
    pressed: list[bool] = []

    def press(number: int, frame: FrameType | None) -> None:
        is_first = not pressed
        pressed.append(True)
        if at_once or not is_first:
            raise KeyboardInterrupt

    in_charge = threading.current_thread() is threading.main_thread()
    if not in_charge or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
