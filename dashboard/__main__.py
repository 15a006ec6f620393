"""`python -m dashboard`: serve the dashboard, on this machine alone unless told otherwise."""

import argparse
import os
import socket
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

from dashboard.limits import Limits


def main() -> None:
    """Start Streamlit with settings that fit a server of untrusted scenarios."""
    parser = argparse.ArgumentParser(prog="python -m dashboard", description=__doc__)
    parser.add_argument("--port", type=int, default=8501)
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="where to listen; any but loopback is open to the network",
    )
    options = parser.parse_args()
    problem = why_not(options.address, options.port)
    if problem:
        parser.error(problem)
    if not is_loopback(options.address):
        sys.stderr.write(
            f"warning: {options.address} can be reached from the network, and there is no log-in; put a proxy with one "
            "in front\n"
        )
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [
        sys.executable, "-m", "dashboard.server", "run", str(Path(__file__).with_name("app.py")),
        "--server.port", str(options.port), "--server.address", options.address,
        "--server.headless", "true", "--server.fileWatcherType", "none",
        "--server.maxUploadSize", str(Limits().upload_bytes >> 20),
        "--browser.gatherUsageStats", "false", "--client.toolbarMode", "viewer",
        "--client.showErrorDetails", "none", "--logger.level", "warning",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": path}
    if os.name == "posix":
        # In the place of this process: whatever ends it ends the server, and no signal need be passed on.
        os.execve(command[0], command, environment)
    try:
        code = subprocess.call(command, env=environment)
    except KeyboardInterrupt:
        code = 0
    sys.exit(code)


def why_not(address: str, port: int) -> str:
    """Why nobody can listen there, in a sentence; empty if one can."""
    if not 1 <= port <= 65_535:
        return f"--port must be 1 to 65535, got {port}"
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        socket.create_server(place[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"--address {address} --port {port}: cannot listen there: {reason}"
    return ""


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return address == "localhost" or ip_address(address).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    main()
