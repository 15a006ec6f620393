"""A dashboard of one's own, for tests and measurements that drive it."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tools import free_port

ROOT = Path(__file__).parents[1]
PATIENCE_S = 90


def until_it_answers(process: subprocess.Popen, port: int, log: Path = Path(os.devnull)) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health") as answer:
                assert answer.read() == b"ok"
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)


@contextmanager
def dashboard_server(log: Path, ended_by: int = signal.SIGTERM) -> Iterator[str]:
    """Its address, once it answers; what it says goes into a file; a signal ends it."""
    port = free_port()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "dashboard", "--port", str(port)], cwd=ROOT, stdout=file, stderr=file,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            until_it_answers(process, port, log)
            yield url
        finally:
            process.send_signal(ended_by)
            process.wait(20)
