"""Ctrl-C that ends long work so that what is done stays readable."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
