"""Send requests to an OpenAI-compatible server and note when each token came."""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from real.address import place_of, same_host
from real.calls import DISCONNECTED, LEFT, TOTAL, TTFT, Call, Reply, body_of
from real.headers import Hidden
from real.pieces import MOST_TEXT, Events, text_of, whole

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GRACE_S = 1.0
"""How long after a deadline that the server is to enforce the client itself hangs up."""
TIMEOUT_S = 600.0
"""How long a request may take in all."""
RESENT = 3
"""How often a request is sent again that met a connection being closed."""
MOST_WHOLE = 1 << 26
"""Bytes of a reply that is not streamed."""
LONGEST_WAIT_S = 86_400.0
"""What a Retry-After is heeded for at most."""


class Client:
    """Connections to one server and one clock, which starts with `start`."""

    def __init__(
        self,
        url: str,
        model: str,
        timeout_s: float = TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url, self._model, self._timeout_s = url.rstrip("/"), model, timeout_s
        self._headers = headers
        self._hidden = Hidden(headers or {})
        self._start = time.perf_counter()

    async def __aenter__(self) -> "Client":
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(self._sent)
        trace.on_connection_reuseconn.append(self._reused)
        trace.on_connection_create_start.append(self._created)
        self._session = aiohttp.ClientSession(
            # Below the 5 s after which vLLM's server closes idle connections: never use one that is being closed.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            trace_configs=[trace],
            read_bufsize=1 << 18,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def _sent(self, session: Any, context: Any, params: Any) -> None:
        context.trace_request_ctx.reply.sent_s = self.now_s

    async def _reused(self, session: Any, context: Any, params: Any) -> None:
        context.trace_request_ctx.is_reused = True

    async def _created(self, session: Any, context: Any, params: Any) -> None:
        context.trace_request_ctx.is_reused = False

    def start(self) -> None:
        """Time counts from now on."""
        self._start = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    async def ask(self, call: Call, into: Reply | None = None) -> Reply:
        """Make a call now, whenever it was due. Whatever goes wrong is in the reply: `into`, where it is given, which
        has what came so far if the caller is cancelled.
        """
        reply = into or Reply(call)
        reply.sent_s = self.now_s
        limits = [(LEFT, call.leave_by_s), (TTFT, call.ttft_by_s), (TOTAL, call.total_by_s)]
        if call.leave_after_s is not None:
            limits.append((LEFT, self.now_s + call.leave_after_s))
        loop = asyncio.get_running_loop()

        def next_limit(names: Sequence[str]) -> tuple[str, float | None]:
            known = [(at, name) for name, at in limits if at is not None and name in names]
            at_s, name = min(known, default=(None, ""))
            return name, None if at_s is None else loop.time() + at_s - self.now_s

        why, at = next_limit((LEFT, TTFT, TOTAL))
        try:
            async with asyncio.timeout_at(at) as limit:

                def on_token() -> None:
                    # The first token has come: its deadline does not count any more.
                    nonlocal why
                    if why == TTFT:
                        why, later = next_limit((LEFT, TOTAL))
                        limit.reschedule(later)

                await self._post(reply, on_token)
        except TimeoutError as error:
            if limit.expired():
                reply.hung_up = reply.error = why
            elif isinstance(error, aiohttp.ConnectionTimeoutError):
                reply.fault, reply.error = "no connection", text_of(str(error))
            else:
                reply.fault = f"no end in {self._timeout_s:g} s"
                reply.error = f"no end: the client gave up after {self._timeout_s:g} s"
        except Exception as error:
            # What a server sends may be wrong in ways that no list of exceptions has.
            reply.fault, reply.error = _fault_of(error), text_of(f"{type(error).__name__}: {error}")
        finally:
            self._hide(reply)
        if reply.end_s is None and reply.error:
            reply.end_s = self.now_s
        return reply

    def _hide(self, reply: Reply) -> None:
        """Servers repeat the keys they refuse."""
        reply.error, reply.fault = self._hidden.hide(reply.error), self._hidden.hide(reply.fault)
        if reply.finish_reason is not None:
            reply.finish_reason = self._hidden.hide(reply.finish_reason)

    async def _post(self, reply: Reply, on_token: Callable[[], None]) -> None:
        """As `_post_once`; again where a connection that was kept open turns out to be closed by the server."""
        for left in reversed(range(RESENT + 1)):
            attempt = _Attempt(reply)
            try:
                return await self._post_once(attempt, on_token)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not left or not attempt.is_reused or reply.status:
                    raise

    async def _post_once(
        self, attempt: "_Attempt", on_token: Callable[[], None], elsewhere: str | None = None
    ) -> None:
        """`elsewhere` is where the server sent the client; the headers of the user do not go there."""
        reply = attempt.reply
        body = body_of(self._model, reply.call)
        async with self._session.post(
            elsewhere or self._url + PATHS[reply.call.endpoint],
            json=body,
            headers=None if elsewhere else self._headers,
            trace_request_ctx=attempt,
            allow_redirects=False,
        ) as answer:
            reply.status = answer.status
            if reply.status in (307, 308) and not elsewhere:
                nearby = same_host(str(answer.url), answer.headers.get("Location"))
                if nearby:
                    reply.status = 0
                    return await self._post_once(attempt, on_token, nearby)
            if reply.status != 200:
                reply.error = text_of(await _read(answer, MOST_TEXT)) or text_of(
                    answer.reason or "no text"
                )
                if 300 <= reply.status < 400:
                    where = place_of(answer.headers.get("Location"))
                    reply.error = f"a redirect{where}, which is not followed"
                reply.end_s = self.now_s
                reply.retry_after_s = retry_after(answer.headers.get("Retry-After"))
                return
            kind = text_of(answer.headers.get("Content-Type", "")).partition(";")[0].strip()[:40]
            if not body.get("stream"):
                content = await _read(answer, MOST_WHOLE)
                whole(reply, content, self.now_s, kind)
                return
            events = Events(reply, kind)
            async for data in answer.content.iter_any():
                before = len(reply.token_s)
                events.feed(data, self.now_s)
                if not before and reply.token_s:
                    on_token()
                if events.is_done:
                    return
            events.end(self.now_s)


class _Attempt:
    """One sending of a request."""

    def __init__(self, reply: Reply) -> None:
        self.reply, self.is_reused = reply, False


async def _read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or its first bytes."""
    parts, size = [], 0
    async for data in answer.content.iter_any():
        parts.append(data)
        size += len(data)
        if size >= most:
            break
    return b"".join(parts)


def _fault_of(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError | ssl.CertificateError):
        return "TLS"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection"
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return DISCONNECTED
    return "no HTTP reply"


def retry_after(text: str | None) -> float | None:
    """Seconds that a Retry-After asks for, a number or a date (RFC 9110, section 10.2.3), at most LONGEST_WAIT_S.

    None where it says neither.
    """
    text = (text or "").strip()
    digits = text.replace(".", "", 1)
    if digits.isascii() and digits.isdigit():
        return min(float(text), LONGEST_WAIT_S)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, seconds), LONGEST_WAIT_S)


async def play(
    url: str, model: str, calls: Sequence[Call], timeout_s: float = TIMEOUT_S
) -> list[Reply]:
    """Make all calls, each when it is due; the replies in the order of the calls."""
    async with Client(url, model, timeout_s) as client:
        client.start()

        async def one(call: Call) -> Reply:
            await asyncio.sleep(max(0.0, call.due_s - client.now_s))
            return await client.ask(call)

        return await asyncio.gather(*(one(call) for call in calls))
