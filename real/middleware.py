"""What stands between HTTP and vLLM's API: hints are read, bad ones are refused, and a drain is kept.

For `vllm serve --middleware real.middleware.TwinMiddleware`. Its settings are in `--additional-config`, where the
scheduler finds the policy: `{"twin": {"policy": ..., "headers": {"x-tier": "tier"}, "bad_hints": "reject"}}`. With
the environment variable TWIN_CONTROL_TOKEN, which `twin-real serve` sets, `/health` and `/ping` answer 503 until the
server is told that it is ready, and again while it drains. `/twin/status` tells where it stands.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from real.exchange import CURRENT, watch
from real.replies import Replies, with_length
from real.request_hints import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HEALTH = ("/health", "/ping")
ALWAYS = frozenset(
    {
        *HEALTH,
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/is_scaling_elastic_ep",
        "/pause",
        "/resume",
        "/sleep",
        "/start_profile",
        "/stop_profile",
        "/wake_up",
    }
)
"""What may be posted while the server drains: it asks for no tokens, and some of it a drain may need to end."""
TOKEN_VARIABLE = "TWIN_CONTROL_TOKEN"


class TwinMiddleware:
    """ASGI middleware; one per API server."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE)
        self._state = "warming up" if self._token else "ready"
        self._in_flight = 0
        self._reading: set[asyncio.Future[bytes | None]] = set()
        """Requests whose bodies are not there yet."""
        self._settings: Settings | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        kind = scope["type"]
        if kind == "lifespan":
            await self._begin(scope, receive, send)
            return
        if kind == "websocket":
            await self._converse(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if kind != "http":
            await self._app(scope, receive, send)
        elif path.startswith("/twin/"):
            await self._control(scope, path.removeprefix("/twin/"), send)
        elif path in HEALTH and self._state != "ready" and not self._is_ours(scope):
            await _answer(send, 503, {"status": self._state})
        elif scope["method"] == "POST" and path not in ALWAYS and not _is_cancel(path):
            await self._infer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Settings that make no sense end the server before it has started."""
        try:
            self._settings_of(scope)
        except ValueError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"ValueError: {error}"})
            return
        await self._app(scope, receive, send)

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Any request that may ask for tokens. It is accepted once it is there as a whole."""
        body = b"" if self._state == "draining" else await self._body(receive)
        if body is None:
            return
        if self._state == "draining":
            error = _error(503, "the server is shutting down", "ServiceUnavailableError", None)
            await _answer(send, 503, error, [(b"retry-after", b"1"), (b"connection", b"close")])
            return
        self._in_flight += 1
        try:
            settings = self._settings_of(scope)
            if settings.reads_hints:
                exchange, changed, problem = settings.read(scope["headers"], body)
                if problem is not None:
                    param, message = problem
                    await _answer(send, 400, _error(400, message, "BadRequestError", param))
                    return
                if changed is not body:
                    body, scope = changed, with_length(scope, len(changed))
                if exchange.has_deadline:
                    send = Replies(send, exchange)
                CURRENT.set(exchange)
            await self._app(scope, _replay(body, receive), send)
        finally:
            self._in_flight -= 1

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone before it was there. A drain does not wait for it: empty."""
        reading = asyncio.ensure_future(_read(receive))
        self._reading.add(reading)
        try:
            return await reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._state != "draining" or (task is not None and task.cancelling()):
                raise
            return b""
        finally:
            self._reading.discard(reading)

    async def _converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A conversation over a websocket counts as one request."""
        if self._state == "draining":
            await receive()
            await send({"type": "websocket.close", "code": 1001, "reason": "shutting down"})
            return
        self._in_flight += 1
        try:
            settings = self._settings_of(scope)
            if settings.reads_hints:
                CURRENT.set(settings.read(scope["headers"], b"")[0])
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1

    async def _control(self, scope: Scope, action: str, send: Send) -> None:
        """`GET /twin/status` for everybody; `POST /twin/ready` and `/twin/drain` for who started the server."""
        if scope["method"] == "GET" and action == "status":
            await _answer(send, 200, self._status(scope))
        elif scope["method"] == "POST" and action in ("ready", "drain") and self._is_ours(scope):
            self._state = "ready" if action == "ready" else "draining"
            if action == "drain":
                for reading in self._reading:
                    reading.cancel()
            await _answer(send, 200, self._status(scope))
        else:
            await _answer(send, 404, {"detail": "Not Found"})

    def _status(self, scope: Scope) -> dict[str, Any]:
        settings = self._settings_of(scope)
        engine = scope["app"].state.engine_client
        status = {
            "state": self._state,
            "in_flight": self._in_flight,
            # Also those that nobody waits for, such as responses in the background.
            "in_engine": engine.output_processor.get_num_unfinished_requests(),
            "policy_fingerprint": settings.fingerprint,
        }
        return status | ({"is_yours": True} if self._is_ours(scope) else {})

    def _is_ours(self, scope: Scope) -> bool:
        wanted = (self._token or "").encode()
        return bool(wanted) and (b"x-twin-control", wanted) in scope["headers"]

    def _settings_of(self, scope: Scope) -> Settings:
        if self._settings is None:
            state = scope["app"].state
            self._settings = Settings(state.vllm_config.additional_config)
            if self._settings.reads_hints:
                watch(state.engine_client)
        return self._settings


def _is_cancel(path: str) -> bool:
    return path.startswith("/v1/responses/") and path.endswith("/cancel")


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if the client has gone before it was there."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks)


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
