"""What stands between HTTP and vLLM's API: headers become request fields, bad ones are refused, and a drain is kept.

For `vllm serve --middleware real.middleware.TwinMiddleware`. Its settings are in `--additional-config`, where the
scheduler finds the policy: `{"twin": {"policy": ..., "headers": {"x-tier": "tier"}, "bad_hints": "reject"}}`. With
the environment variable TWIN_CONTROL_TOKEN, which `twin-real serve` sets, `/health` answers 503 until the server is
told that it is ready, and again while it drains. `/twin/status` tells where it stands.
"""

import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from real.hints import CONFIG_KEY, DEFAULT_POLICY, FIELDS, read_hints
from twin.scheduling import PolicyConfig, fingerprint, policy_config

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HEADERS = {"x-tier": "tier", "x-tenant": "tenant", "x-ttft-s": "ttft_s", "x-total-s": "total_s"}
"""Header -> field of vllm_xargs, where the settings name none."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
TOKEN_VARIABLE = "TWIN_CONTROL_TOKEN"
STREAMS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat.completion.chunk"}
"""Path -> what a piece of a streamed reply calls itself."""


class TwinMiddleware:
    """ASGI middleware; one per API server."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE)
        self._state = "warming up" if self._token else "ready"
        self._in_flight = 0
        self._settings: Settings | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path.startswith("/twin/"):
            await self._control(scope, send)
        elif path == "/health" and self._state != "ready" and not self._is_ours(scope):
            await _answer(send, 503, {"status": self._state})
        elif scope["method"] == "POST" and path in PATHS:
            await self._infer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._state == "draining":
            error = _error(503, "the server is shutting down", "ServiceUnavailableError", None)
            await _answer(send, 503, error, [(b"retry-after", b"1"), (b"connection", b"close")])
            return
        self._in_flight += 1
        try:
            settings = self._settings_of(scope)
            body, receive = await _read(receive)
            names = {name for name, _ in scope["headers"]}
            if settings.rejects or not names.isdisjoint(settings.headers):
                body, problem = settings.apply(scope["headers"], body)
                if problem is not None:
                    await _answer(send, 400, problem)
                    return
                scope["headers"] = [
                    *(pair for pair in scope["headers"] if pair[0] != b"content-length"),
                    (b"content-length", b"%d" % len(body)),
                ]
            if scope["path"] in STREAMS and b'"stream"' in body and settings.enforces_deadlines:
                reason = _reason_without_token(body)
                send = send if reason is None else StreamEnd(send, scope["path"], reason)
            await self._app(scope, _replay(body, receive), send)
        finally:
            self._in_flight -= 1

    async def _control(self, scope: Scope, send: Send) -> None:
        """`GET /twin/status` for everybody; `POST /twin/ready` and `/twin/drain` for who started the server."""
        action = scope["path"].removeprefix("/twin/")
        if scope["method"] == "GET" and action == "status":
            await _answer(send, 200, self._status(scope))
        elif scope["method"] == "POST" and action in ("ready", "drain") and self._is_ours(scope):
            self._state = "ready" if action == "ready" else "draining"
            await _answer(send, 200, self._status(scope))
        else:
            await _answer(send, 404, {"detail": "Not Found"})

    def _status(self, scope: Scope) -> dict[str, Any]:
        settings = self._settings_of(scope)
        return {
            "state": self._state,
            "in_flight": self._in_flight,
            "policy_fingerprint": settings.fingerprint,
        }

    def _is_ours(self, scope: Scope) -> bool:
        wanted = (self._token or "").encode()
        return bool(wanted) and (b"x-twin-control", wanted) in scope["headers"]

    def _settings_of(self, scope: Scope) -> "Settings":
        if self._settings is None:
            additional = scope["app"].state.vllm_config.additional_config or {}
            self._settings = Settings(additional.get(CONFIG_KEY, {}))
        return self._settings


class Settings:
    """What is done with the hints of a request."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._config: PolicyConfig | None = None
        if settings.get("policy", DEFAULT_POLICY) is not None:
            self._config = policy_config(settings.get("policy", DEFAULT_POLICY))
        self.rejects = settings.get("bad_hints") == "reject" and self._config is not None
        """Whether a hint that makes no sense is answered 400; else the scheduler takes the default."""
        named = settings.get("headers", HEADERS)
        self.headers = {name.lower().encode("latin-1"): field for name, field in named.items()}

    @property
    def enforces_deadlines(self) -> bool:
        """Whether the scheduler aborts requests whose time has passed."""
        return self._config is not None

    @property
    def fingerprint(self) -> str | None:
        """Of the policy; None where vLLM's own order rules."""
        return None if self._config is None else fingerprint(self._config)

    def apply(
        self, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[bytes, dict[str, Any] | None]:
        """The body with the headers' fields in it, and the error to answer instead, if any.

        A header wins over the body: a gateway sets the one, a client the other. A body that is not understood is left
        to vLLM to refuse.
        """
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            return body, None
        if not isinstance(request, dict):
            return body, None
        extra = request.get("vllm_xargs") or {}
        if not isinstance(extra, dict):
            return body, None
        found = {
            self.headers[name]: value.decode("latin-1")
            for name, value in headers
            if name in self.headers
        }
        if self.rejects:
            assert self._config is not None
            priority = request.get("priority")
            priority = priority if isinstance(priority, int) else 0
            _, wrong = read_hints({**extra, **found}, priority, self._config)
            for name, problem in wrong.items():
                return body, _error(
                    400, f"vllm_xargs.{name} {problem}", "BadRequestError", f"vllm_xargs.{name}"
                )
        if found:
            request["vllm_xargs"] = {**extra, **found}
            body = json.dumps(request).encode()
        return body, None


class StreamEnd:
    """Says in a streamed reply why it ended without a token.

    vLLM sends no piece without text before the first token, not even the one with the reason of the end.
    """

    def __init__(self, send: Send, path: str, reason: str) -> None:
        self._send, self._path, self._reason = send, path, reason
        self._looks = False
        self._id = "twin"

    async def __call__(self, message: Message) -> None:
        """Send on, with the missing piece before the end of the stream."""
        if message["type"] == "http.response.start":
            self._looks = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        elif self._looks:
            body = message.get("body", b"")
            if b'"finish_reason":"' in body or b'"error":' in body:
                self._looks = False
            else:
                if found := re.search(rb'"id":"([^"]+)"', body):
                    self._id = found[1].decode("utf-8", "replace")
                if (end := body.rfind(b"data: [DONE]")) >= 0:
                    message = {**message, "body": body[:end] + self._piece() + body[end:]}
        await self._send(message)

    def _piece(self) -> bytes:
        content: dict[str, Any] = {"text": ""} if self._path == "/v1/completions" else {"delta": {}}
        choice = {"index": 0, **content, "finish_reason": "abort", "stop_reason": self._reason}
        piece = {"id": self._id, "object": STREAMS[self._path], "choices": [choice]}
        return b"data: " + json.dumps(piece).encode() + b"\n\n"


def _reason_without_token(body: bytes) -> str | None:
    """Which deadline of a request passes first, if it has one: the reason if it ends without a token."""
    if b"ttft_s" not in body and b"total_s" not in body:
        return None
    try:
        extra = json.loads(body).get("vllm_xargs") or {}
        limits = {name: float(extra[name]) for name in ("ttft_s", "total_s") if name in extra}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    if not limits:
        return None
    return "timeout:" + min(limits, key=lambda name: limits[name]).removesuffix("_s")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise ValueError for a field that no hint has."""
    for name, field in headers.items():
        if field not in FIELDS:
            raise ValueError(f"header {name}: {field!r} is none of {', '.join(FIELDS)}")


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The whole body, and what follows it."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the client has gone: so be it for the app, too

            async def gone(message: Message = message) -> Message:
                return message

            return b"".join(chunks), gone
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks), receive


def _replay(body: bytes, receive: Receive) -> Receive:
    """First the body, then what follows, which is how a disconnect is heard of."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _error(code: int, message: str, kind: str, param: str | None) -> dict[str, Any]:
    """An error in the form of vLLM's own."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _answer(
    send: Send, status: int, content: Any, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    body = json.dumps(content).encode()
    named = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send(
        {"type": "http.response.start", "status": status, "headers": named + (headers or [])}
    )
    await send({"type": "http.response.body", "body": body})
