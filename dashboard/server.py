"""The process of the server: Streamlit, told what it is told, whether or not anybody reads what it says.

python -m dashboard.server run app.py --server.port 8501 ...
"""

import sys
from contextlib import suppress
from typing import Any


class Heedless:
    """A stream of text whose reader may be gone: what cannot be written is left out, and nothing fails for it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it if that can be; the number of characters taken."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written if that can be."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> None:
    """Serve until a signal ends it."""
    sys.stdout, sys.stderr = Heedless(sys.stdout), Heedless(sys.stderr)
    from streamlit.web.cli import main as streamlit

    streamlit(prog_name="streamlit")


if __name__ == "__main__":
    main()
