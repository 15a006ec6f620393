"""Says in a reply that the scheduler ended it at its deadline, in the form that each of vLLM's APIs has for it.

vLLM's own replies leave it out in places: a stream has no piece for a choice without a token, `/v1/responses` calls an
aborted reply completed, `/v1/messages` one that ended by itself.
"""

import json
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from real.exchange import Exchange

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_LOOKED_AT = re.compile(
    rb'"finish_reason":\s*"|"choices":\s*\[\]|response\.completed|message_delta|message-end|\[DONE\]'
)
"""Events of a stream that may have to be changed; others are only looked at for how the stream names itself."""


class Replies:
    """Sends on what vLLM replies to one request, with what is missing."""

    def __init__(self, send: Send, exchange: Exchange) -> None:
        self._send, self._exchange = send, exchange
        self._start: Message | None = None  # of a reply that is held back until it is whole
        self._body = b""
        self._stream: _Stream | None = None

    async def __call__(self, message: Message) -> None:
        """Send on one message of the reply."""
        if message["type"] == "http.response.start":
            kind = _header(message, b"content-type")
            if kind.startswith(b"text/event-stream"):
                self._stream = _Stream(self._exchange)
            elif kind.startswith(b"application/json"):
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._stream is not None:
            is_last = not message.get("more_body")
            body = self._stream.take(message.get("body", b""), is_last)
            if not body and not is_last:
                return
            message = {**message, "body": body}
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            body = _whole(self._body, self._exchange)
            await self._send(with_length(self._start, len(body)))
            message = {**message, "body": body}
        await self._send(message)


def with_length(message: Message, length: int) -> Message:
    """A start of a reply, or a scope, with this content-length."""
    kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"content-length"]
    return {**message, "headers": [*kept, (b"content-length", b"%d" % length)]}


def _header(message: Message, wanted: bytes) -> bytes:
    for name, value in message.get("headers", ()):
        if name.lower() == wanted:
            return bytes(value).lower()
    return b""


def _whole(body: bytes, exchange: Exchange) -> bytes:
    """A reply that is not streamed."""
    if not exchange.timed_out:
        return body
    try:
        reply = json.loads(body)
    except ValueError:
        return body
    return json.dumps(reply).encode() if _say(reply, exchange) else body


def _say(reply: Any, exchange: Exchange) -> bool:
    """Put the reason into a whole reply; whether its form has a place for it."""
    if not isinstance(reply, dict):
        return False
    reason = next(iter(exchange.timed_out.values()))
    if reply.get("object") == "response":
        reply["status"] = "incomplete"
        reply["incomplete_details"] = {"reason": reason}
    elif reply.get("type") == "message":
        reply["stop_reason"], reply["stop_sequence"] = reason, None
    elif isinstance(reply.get("choices"), list):
        for choice in reply["choices"]:
            if choice.get("finish_reason") == "abort" and choice.get("stop_reason") is None:
                choice["stop_reason"] = exchange.timed_out.get(choice.get("index"), reason)
    elif isinstance(reply.get("finish_reason"), str):  # Cohere's
        reply["finish_reason"] = "TIMEOUT"
    elif isinstance(reply.get("error"), dict):  # scoring, which is nothing without a token
        reply["error"]["message"] = f"{reason}: the request was ended at its deadline"
    else:
        return False
    return True


class _Stream:
    """The events of a stream, changed where they have to be."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._rest = b""  # of an event that is not whole
        self._names: dict[str, Any] | None = None
        """How the pieces of this stream name themselves: id, object, created, model."""
        self._finished: set[int] = set()
        self._is_over = False  # all that was missing has been said, or an error ended the stream

    def take(self, body: bytes, is_last: bool) -> bytes:
        """What to send for this part of the stream."""
        whole, end, self._rest = (self._rest + body).rpartition(b"\n\n")
        sent = b"".join(self._event(event) + b"\n\n" for event in whole.split(b"\n\n") if end)
        if is_last:
            sent, self._rest = sent + self._rest, b""
        return sent

    def _event(self, event: bytes) -> bytes:
        if self._names is not None and not _LOOKED_AT.search(event):
            return event
        found = re.search(rb"^data:", event, re.MULTILINE)
        if found is None:
            return event
        head, data = event[: found.start()], event[found.end() :]
        if data.strip() == b"[DONE]":
            return b"".join(self._missing()) + event
        try:
            content = json.loads(data)
        except ValueError:
            return event
        if not isinstance(content, dict):
            return event
        if "error" in content:
            self._is_over = True
        elif isinstance(content.get("choices"), list):
            return self._of_choices(event, head, content)
        elif self._exchange.timed_out and self._changed(content):
            head = head.replace(b"response.completed", b"response.incomplete")
            return head + b"data: " + json.dumps(content).encode()
        return event

    def _of_choices(self, event: bytes, head: bytes, content: dict[str, Any]) -> bytes:
        choices = content["choices"]
        if self._names is None:
            kept = ("id", "object", "created", "model")
            self._names = {name: content[name] for name in kept if name in content}
        self._finished |= {
            choice.get("index", 0) for choice in choices if choice.get("finish_reason") is not None
        }
        if self._exchange.timed_out and any(
            choice.get("finish_reason") == "abort" and choice.get("stop_reason") is None
            for choice in choices
        ):
            _say(content, self._exchange)
            event = head + b"data: " + json.dumps(content).encode()
        # vLLM sums up the usage when all choices have ended.
        return event if choices else b"".join(self._missing()) + event

    def _missing(self) -> list[bytes]:
        """Pieces for the choices that ended without one."""
        if self._is_over:
            return []
        self._is_over = True
        pieces = []
        for index, reason in sorted(self._exchange.timed_out.items()):
            if index not in self._finished:
                names = self._named()
                is_chat = names["object"] == "chat.completion.chunk"
                content: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
                choice = {"index": index, **content, "logprobs": None}
                choice |= {"finish_reason": "abort", "stop_reason": reason}
                piece = {**names, "choices": [choice]}
                pieces.append(b"data: " + json.dumps(piece).encode() + b"\n\n")
        return pieces

    def _named(self) -> dict[str, Any]:
        """As other pieces of the stream; where there was none, as vLLM would have named it."""
        request_id = self._exchange.request_id or ""
        is_chat = request_id.startswith("chatcmpl-")
        names = {
            "id": request_id if is_chat else request_id.rpartition("-")[0],
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._exchange.model,
        }
        return names | (self._names or {})

    def _changed(self, content: dict[str, Any]) -> bool:
        """Put the reason into an event of another API, where it is the one that tells the end."""
        reason = next(iter(self._exchange.timed_out.values()))
        kind, delta = content.get("type"), content.get("delta")
        if kind == "response.completed" and isinstance(content.get("response"), dict):
            content["type"] = "response.incomplete"
            return _say(content["response"], self._exchange)
        if kind == "message_delta" and isinstance(delta, dict):
            delta["stop_reason"], delta["stop_sequence"] = reason, None
            return True
        if kind == "message-end" and isinstance(delta, dict):
            delta["finish_reason"] = "TIMEOUT"
            return True
        return False
