"""Ctrl-C and the threads that it does not reach."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from twin.interrupt import deaf_children, from_a_thread


def test_items_and_errors_come_from_the_thread():
    def items():
        yield threading.current_thread()
        yield None
        raise ValueError("the third")

    taken = from_a_thread(items())
    assert next(taken) is not threading.current_thread()
    assert next(taken) is None
    with pytest.raises(ValueError, match="the third"):
        next(taken)
    assert list(from_a_thread([])) == []


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks")
def test_what_is_started_by_the_thread_does_not_hear_ctrl_c():
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"

    def started():
        yield subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout

    assert list(from_a_thread(started())) == ["True\n"]
    assert list(started()) == ["False\n"]
    with deaf_children():
        assert list(started()) == ["True\n"]
    assert list(started()) == ["False\n"]


def test_ctrl_c_falls_on_the_wait():
    """However busy the thread is with locks, they are given back."""
    code = """
import os, signal, sys, threading, time
from twin.interrupt import from_a_thread

lock = threading.Lock()

def items():
    for k in range(10**9):
        with lock:
            time.sleep(0.001)
        yield k

try:
    for item in from_a_thread(items()):
        if not item:  # not before: while modules are being imported, Python can lose the exception
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
except KeyboardInterrupt:
    assert lock.acquire(timeout=5)
    sys.exit(130)
"""
    begun = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 130
    assert time.monotonic() - begun < 30
