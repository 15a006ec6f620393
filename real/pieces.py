"""The pieces of a reply, taken in as they come.

They are data from outside. Whatever bytes and whatever JSON a server sends, nothing is raised: what makes no sense is
noted in the reply as its `fault` and `error`, beside all that came before it.
"""

import json
from typing import Any

from real.calls import DISCONNECTED, Reply

CHANNELS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Parts of a piece of a chat reply that hold generated tokens."""
MOST_OUTPUT, MOST_PROMPT = 1_000_000, 100_000_000
"""Tokens of a reply and of a prompt; what a server counts beyond is no count."""
LONGEST_LINE = 1 << 24
"""Bytes of one line of a stream."""
LONGEST_REASON = 60
"""Characters of a finish_reason."""
SHOWN = 80
"""Characters that are shown of an odd value."""
MOST_TEXT = 20_000
"""Bytes that are looked at of what is only to be shown."""
ODD, ERROR = "odd reply", "error in the reply"
"""Faults: what came is none of the API; the server says so itself."""


class _OddError(Exception):
    pass


class Lines:
    """Bytes as they come become lines, which end with CR, LF or both, wherever the bytes were cut."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, without their ends."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if not data:
            return []
        self._after_cr = data.endswith(b"\r")
        if b"\n" not in data and b"\r" not in data:
            self._rest += data
            return []
        lines = (bytes(self._rest) + data).splitlines(keepends=True)
        self._rest = bytearray()
        if not lines[-1].endswith((b"\n", b"\r")):
            self._rest += lines.pop()
        return [line.rstrip(b"\r\n") for line in lines]

    @property
    def unended(self) -> int:
        """Bytes of the line that is not whole."""
        return len(self._rest)

    def end(self) -> list[bytes]:
        """The last line, where nothing ended it."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest] if rest else []


class Events:
    """The stream of one reply: bytes in, pieces taken in by `reply`. `kind` is its content type."""

    def __init__(self, reply: Reply, kind: str = "text/event-stream") -> None:
        self._reply, self._kind, self._lines = reply, kind, Lines()
        self._head = bytearray()  # of what has no data lines
        self._is_stream = False
        self._pending: list[bytes] = []  # data lines that are no JSON each by itself
        self.is_done = False
        """[DONE] has come, or what came makes no sense: nothing more is read."""

    def feed(self, data: bytes, now: float) -> None:
        """Take in what came at `now`."""
        if not self._is_stream and len(self._head) < MOST_TEXT:
            self._head += data
        self._take(self._lines.feed(data), now)
        if self._lines.unended > LONGEST_LINE and not self.is_done:
            self._odd(f"a line of more than {LONGEST_LINE >> 20} MiB")

    def end(self, now: float) -> None:
        """The stream has ended at `now`, with or without [DONE]."""
        if not self.is_done:
            self._take([*self._lines.end(), b""], now)
        reply = self._reply
        if not self.is_done and not reply.error:
            reply.end_s = now
            if not self._is_stream and self._head:
                self._no_stream(bytes(self._head))
                return
            if reply.finish_reason is None:
                reply.fault, reply.error = (
                    DISCONNECTED,
                    "disconnected: the stream ended without [DONE]",
                )

    def _no_stream(self, head: bytes) -> None:
        reply = self._reply
        try:
            content = decoded(head)
        except _OddError:
            reply.fault, reply.error = instead(self._kind), text_of(head)
            return
        if isinstance(content, dict) and content.get("choices"):
            self._odd("a whole reply where a stream was asked for; --no-stream asks for whole ones")
            return
        take(reply, content, 0.0)
        if not reply.error:
            self._odd(text_of(head))

    def _take(self, lines: list[bytes], now: float) -> None:
        for line in lines:
            if self.is_done:
                return
            if not line:
                self._whole(now)
            elif line.startswith(b"data:"):
                self._is_stream = True
                data = line[5:].strip()
                if data == b"[DONE]":
                    self._reply.end_s, self.is_done = now, True
                    if self._reply.finish_reason is None and not self._reply.error:
                        self._odd("[DONE] without a finish_reason")
                elif data:
                    self._pending.append(data)
                    # One line is one piece with all servers; several are one only if none is JSON by itself.
                    if len(self._pending) == 1 and data.endswith(b"}"):
                        self._try(data, now)

    def _try(self, data: bytes, now: float) -> None:
        try:
            content = decoded(data)
        except _OddError:
            return
        self._pending.clear()
        self._piece(content, now)

    def _whole(self, now: float) -> None:
        if not self._pending:
            return
        data = b"\n".join(self._pending)
        self._pending.clear()
        try:
            content = decoded(data)
        except _OddError as error:
            self._odd(str(error))
            return
        self._piece(content, now)

    def _piece(self, content: Any, now: float) -> None:
        take(self._reply, content, now)
        self.is_done = self._reply.fault == ODD

    def _odd(self, text: str) -> None:
        self._reply.fault, self._reply.error, self.is_done = ODD, text, True


def whole(reply: Reply, data: bytes, now: float, kind: str = "application/json") -> None:
    """Take in a reply that is not streamed, which came at `now`. `kind` is its content type."""
    reply.end_s = now
    try:
        take(reply, decoded(data), now)
    except _OddError as error:
        is_json = kind.endswith("json")
        reply.fault, reply.error = (ODD, str(error)) if is_json else (instead(kind), text_of(data))
    if not reply.error and reply.finish_reason is None:
        reply.fault, reply.error = ODD, f"no choice with a finish_reason: {text_of(data)}"


def instead(kind: str) -> str:
    """The fault of a reply of another content type."""
    return f"{kind or 'no content type'} instead of a reply"


def decoded(data: bytes) -> Any:
    """JSON; characters that were cut by the server do not matter."""
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise _OddError(f"no JSON: {text_of(data)}") from None


def text_of(data: bytes | str) -> str:
    """What a server said, as one printable line of text that can be written into any file."""
    data = data[:MOST_TEXT]
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    text = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in text).strip()


def take(reply: Reply, chunk: Any, now: float) -> None:
    """Take in a piece of a reply, or a whole one, that came at `now`. Raises nothing, whatever it is.

    Tokens are those that the server's usage counts; where it does not tell with each piece, a piece with text of any
    channel counts as one token, and what the usage at the end tells beyond these as having come with the last piece.
    A piece without text, such as the first one with the role alone, brings none.
    """
    try:
        _take(reply, chunk, now)
    except _OddError as error:
        reply.fault, reply.error = ODD, str(error)


def _take(reply: Reply, chunk: Any, now: float) -> None:
    if not isinstance(chunk, dict):
        raise _OddError(f"no object: {_shown(chunk)}")
    told = chunk if chunk.get("object") == "error" else chunk.get("error")
    if told:
        reply.fault, reply.error = ERROR, text_of(_message(told))
        return
    usage = _part(chunk, "usage", dict) or {}
    known = _count(usage, "completion_tokens", MOST_OUTPUT)
    prompt = _count(usage, "prompt_tokens", MOST_PROMPT)
    details = _part(usage, "prompt_tokens_details", dict) or {}
    cached = _count(details, "cached_tokens", MOST_PROMPT)
    pieces = 0
    choices = _part(chunk, "choices", list) or []
    for choice in choices:
        if not isinstance(choice, dict):
            raise _OddError(f"choices has {_shown(choice)}, which is no object")
        part = _part(choice, "delta", dict) or _part(choice, "message", dict) or choice
        pieces += bool(choice.get("text")) or any(part.get(channel) for channel in CHANNELS)
        reply.token_ids += _ids(choice)
        reason = _part(choice, "finish_reason", str)
        if reason is not None:
            reply.finish_reason = text_of(reason)[:LONGEST_REASON]
            reply.stop_reason = choice.get("stop_reason")
    if known is not None and (choices or not reply.token_s):
        reply.is_counted = True
        reply.token_s += [now] * (known - len(reply.token_s))
    elif known is not None:
        reply.token_s += [reply.token_s[-1]] * (known - len(reply.token_s))
    elif not reply.is_counted:
        reply.token_s += [now] * pieces
    reply.prompt_tokens = reply.prompt_tokens if prompt is None else prompt
    reply.cached_tokens = reply.cached_tokens if cached is None else cached
    if (reply.cached_tokens or 0) > (reply.prompt_tokens or MOST_PROMPT):
        raise _OddError(f"cached_tokens is {cached} of {prompt} prompt_tokens")


def _part(owner: dict[str, Any], name: str, kind: type) -> Any:
    """A field, or None. Raises _OddError where it is of another kind."""
    value = owner.get(name)
    if value is not None and not isinstance(value, kind):
        raise _OddError(f"{name} is {_shown(value)}")
    return value


def _count(usage: dict[str, Any], name: str, most: int) -> int | None:
    value = usage.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value or not 0 <= value <= most or value != int(value):
        raise _OddError(f"{name} is {_shown(value)}, which is no count of tokens")
    return int(value)


def _ids(choice: dict[str, Any]) -> list[int]:
    found: list[int] = _part(choice, "token_ids", list) or []
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 1 << 31:
            raise _OddError(f"token_ids has {_shown(one)}, which is no token id")
    return found


def _message(told: Any) -> str:
    try:
        return json.dumps(told)
    except (ValueError, RecursionError):
        return "an error that cannot be shown"


def _shown(value: Any) -> str:
    try:
        text = text_of(json.dumps(value))
    except (ValueError, RecursionError):
        text = "a value that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
