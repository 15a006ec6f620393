"""What does the log of a vLLM server say of why it ended?"""

import re
import signal
import time
from collections import deque

KEPT_LINES = 1000
RECENT_S = 30.0
"""Before its end; an error older than that did not end a server that was ready."""

_FATAL = re.compile(r"encountered a fatal error|failed to start|WorkerProc hit an exception")
"""After these vLLM writes the traceback of what ended a process."""
_DIED = re.compile(r"\S.*\b(?:died unexpectedly|died with exit code)\b.*")
_ERRORS = (
    re.compile(
        r"\b(?:ValueError|RuntimeError|OSError|ImportError|ModuleNotFoundError|MemoryError|KeyError)\b: .+"
    ),
    re.compile(r"\b[\w.]*(?:Error|Exception)\b: .+"),
    re.compile(r"\bERROR\b.+"),
)
_NOT_THE_CAUSE = re.compile(
    r"Engine core initialization failed|See root cause above|See stack trace|EngineDeadError|WARNING"
)
_OF_THE_ENGINE = re.compile(r"^\((?:EngineCore|Worker)")
_DEAD = "the engine's process is gone and left no word (EngineDeadError); was it killed, for want of memory?"
_NOISE = re.compile(r"nanobind|^ - leaked |^ - \.\.\. skipped")
"""What a library of vLLM's writes whenever a process ends."""
_OF_CLIENTS = re.compile(r"QueueOverflowError|ValidationError|BadRequestError|GracefulHTTPError")
"""What vLLM writes when it refuses a request."""
_PREFIX = re.compile(
    r"^\(.*?\)\s*(?:[A-Z]+ [\d-]+ [\d:]+ \[[^]]*\]\s*)?|^[A-Z]+ [\d-]+ [\d:]+ \[[^]]*\]\s*"
)


class Log:
    """The last lines that a server wrote, and when."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)

    def add(self, line: str) -> None:
        """One more line."""
        if not _NOISE.search(line):
            self._lines.append((time.monotonic(), line.rstrip()))

    def last(self) -> str:
        """The last line that is not empty."""
        lines = (line for _, line in reversed([*self._lines]) if line)
        return next(lines, "it said nothing")

    def find(self, text: str) -> str | None:
        """A line that holds the text, whatever its case."""
        return next((line for _, line in [*self._lines] if text.lower() in line.lower()), None)

    def reason(self, was_ready: bool) -> str:
        """The line that says best why the server ended.

        The error under vLLM's last word on a process that failed; else that a process died, or the engine is gone;
        else, before the server was ready, the first error, and after that the last one of its last seconds that is
        about no single request.
        """
        lines = [*self._lines]
        fatal = [i for i, (_, line) in enumerate(lines) if _FATAL.search(line)]
        if fatal and (found := _first_error([line for _, line in lines[fatal[-1] + 1 :]])):
            return found
        for _, line in reversed(lines):
            if died := _DIED.search(_PREFIX.sub("", line)):
                return died[0].removeprefix("RuntimeError: ")
        if any("EngineDeadError" in line for _, line in lines):
            own = [line for _, line in reversed(lines) if _OF_THE_ENGINE.search(line)]
            return _first_error(own, _ERRORS[:2]) or _DEAD
        if was_ready:
            end = lines[-1][0] if lines else 0.0
            recent = [line for at, line in reversed(lines) if at > end - RECENT_S]
            found = _first_error([line for line in recent if not _OF_CLIENTS.search(line)])
        else:
            found = _first_error([line for _, line in lines])
        return found or self.last()


def ended(status: int) -> str:
    """An exit status in words: a signal by its name."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _first_error(lines: list[str], kinds: tuple[re.Pattern[str], ...] = _ERRORS) -> str | None:
    for kind in kinds:
        for line in lines:
            found = kind.search(line)
            if found and not _NOT_THE_CAUSE.search(line):
                return found[0].strip()
    return None
