"""Ctrl-C that ends long work between two steps, so that what is done stays readable."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_ctrl_c() -> Iterator[list[bool]]:
    """A list that is no longer empty once Ctrl-C was pressed, so that long work stops between two of its steps.

    A second Ctrl-C interrupts at once. Where somebody else minds the signal, and outside the main
    thread, nothing changes.
    """
    pressed: list[bool] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    in_charge = threading.current_thread() is threading.main_thread()
    if not in_charge or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
