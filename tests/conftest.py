"""What all tests share: hypothesis profiles and the place of third-party data."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# "ci" repeats the same examples on every run; "search" looks for new ones:
# HYPOTHESIS_PROFILE=search python -m pytest tests/...
# How long an example takes and how many are thrown away says more about the machine than about the test.
LOOSE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=LOOSE
)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell lets what it starts in the background ignore Ctrl-C; tests of Ctrl-C need it heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def twin_data() -> Path:
    """Folder of third-party traces and tables, which are not part of this repository."""
    name = os.environ.get("TWIN_DATA")
    if not name:
        pytest.skip("third-party data: the environment variable TWIN_DATA names no folder")
    folder = Path(name)
    if not folder.is_dir():
        pytest.fail(f"TWIN_DATA={name} is not a folder", pytrace=False)
    return folder
