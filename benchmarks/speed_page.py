"""docs/performance.md: prose by hand, tables written by the benchmarks between two marks each."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.speed_measure import ROOT

PAGE = ROOT / "docs" / "performance.md"


def machine(may_be_compiled: bool = True) -> str:
    """Where, when and of which source a table is."""
    is_compiled = may_be_compiled and os.environ.get("TWIN_COMPILED")
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)
        cpu = found[1].strip() if found else cpu
    return (
        f"{cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; "
        f"Python {platform.python_version()}, SimPy {version('simpy')}, "
        f"twin {'compiled' if is_compiled else 'as pure Python'}; "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit()}"
    )


def commit() -> str:
    """Of the working tree, and whether the twin differs from it."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "twin")
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if not done.returncode else "unknown"


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Put `text` between the marks of that name. Raises ValueError if the page has none."""
    begin, end = f"<!-- {name}: written by a command -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page.name} has no marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
