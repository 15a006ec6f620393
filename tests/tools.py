"""Programs that tests drive and that pip does not bring. With CI set they may not be missing."""

import os
import shutil
import socket
from pathlib import Path

import pytest


def prometheus() -> tuple[str, str]:
    """Paths of Prometheus and promtool."""
    binary = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    promtool = binary and shutil.which("promtool", path=str(Path(binary).parent))
    if binary is None or promtool is None:
        missing(
            "no Prometheus: install the package prometheus, or name its binary in the variable PROMETHEUS"
        )
    return str(binary), str(promtool)


def haproxy() -> tuple[str, dict[str, str]]:
    """Path of HAProxy, and the environment it needs where its package was unpacked and not installed."""
    binary = os.environ.get("HAPROXY") or shutil.which("haproxy")
    if binary is None or shutil.which(binary) is None:
        missing(
            "no HAProxy: install the package haproxy, or name its binary in the variable HAPROXY"
        )
    libraries = sorted(str(p) for p in Path(str(binary)).parents[1].glob("lib/*-linux-gnu"))
    return str(binary), os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def chromium() -> str:
    """Path of a Chromium that can be driven without a screen."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None or shutil.which(found) is None:
        missing(
            "no Chromium: install the package chromium, or name its binary in the variable CHROMIUM"
        )
    return str(found)


def missing(why: str) -> None:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
