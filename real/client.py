"""Send requests to an OpenAI-compatible server and note when each token came."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CHANNELS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Parts of a piece of a chat reply that hold generated tokens."""
GRACE_S = 1.0
"""How long after a deadline that the server is to enforce the client itself hangs up."""


@dataclass(frozen=True)
class Call:
    """One request to make."""

    due_s: float
    """Seconds after the start."""
    prompt: Any
    """Text, or token ids."""
    max_tokens: int
    tier: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """More of vllm_xargs."""
    stream: bool = True
    """Token by token, or the whole reply at once."""
    leave_after_s: float | None = None
    """The client hangs up so many seconds after it has sent the request."""
    body: dict[str, Any] = field(default_factory=dict)
    """More of the request."""
    endpoint: str = "completions"
    """One of PATHS."""
    ttft_by_s: float | None = None
    """The client hangs up without a first token, so many seconds after the start."""
    total_by_s: float | None = None
    """The client hangs up without a whole reply, so many seconds after the start."""


@dataclass
class Reply:
    """What came of it. Seconds after the start."""

    call: Call
    sent_s: float = 0.0
    """When the head of the request was written to the connection."""
    status: int = 0
    """Of HTTP; 0 = no answer."""
    error: str = ""
    """`left` if the client hung up as told, `timeout:ttft` or `timeout:total` if it did so at a deadline."""
    token_s: list[float] = field(default_factory=list)
    """When each token came, as seen here; several at once if the server sends them so, all if it does not stream."""
    token_ids: list[int] = field(default_factory=list)
    """Where the server tells them."""
    end_s: float | None = None
    """When the reply was complete, the refusal was read, or the connection ended."""
    finish_reason: str | None = None
    stop_reason: Any = None
    prompt_tokens: int | None = None
    """As the server counted them."""
    cached_tokens: int | None = None
    """Of these, found in the prefix cache, where the server tells."""
    retry_after_s: float | None = None
    """What a refusal asked for."""
    is_counted: bool = False
    """Whether the server told how many tokens each piece brought; else a piece counts as one."""

    @property
    def ttft_s(self) -> float | None:
        """From the due time to the first token."""
        return self.token_s[0] - self.call.due_s if self.token_s else None

    @property
    def e2e_s(self) -> float | None:
        """From the due time to the end of the reply."""
        return None if self.end_s is None else self.end_s - self.call.due_s


class Client:
    """Connections to one server and one clock, which starts with `start`."""

    def __init__(
        self,
        url: str,
        model: str,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url, self._model, self._timeout_s = url, model, timeout_s
        self._headers = headers
        self._start = time.perf_counter()

    async def __aenter__(self) -> "Client":
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(self._sent)
        self._session = aiohttp.ClientSession(
            base_url=self._url,
            headers=self._headers,
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
        context.trace_request_ctx.sent_s = self.now_s

    def start(self) -> None:
        """Time counts from now on."""
        self._start = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    async def ask(self, call: Call) -> Reply:
        """Make a call now, whenever it was due. Whatever goes wrong is in the reply."""
        reply = Reply(call, sent_s=self.now_s)
        left, by_s = "left", None
        if call.leave_after_s is not None:
            by_s = self.now_s + call.leave_after_s
        for reason, deadline in (("timeout:ttft", call.ttft_by_s), ("timeout:total", call.total_by_s)):  # fmt: skip
            if deadline is not None and (by_s is None or deadline < by_s):
                left, by_s = reason, deadline
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                if by_s is not None:
                    limit.reschedule(loop.time() + by_s - self.now_s)

                def on_token() -> None:
                    # The first token has come: only the deadline of the whole reply counts from now on.
                    nonlocal left
                    if left == "timeout:ttft":
                        left, by_s = "timeout:total", call.total_by_s
                        limit.reschedule(None if by_s is None else loop.time() + by_s - self.now_s)

                await self._post(reply, on_token)
        except TimeoutError as error:
            is_ours = by_s is not None and self.now_s >= by_s - 1e-3
            reply.error = left if is_ours else f"no end: {error or 'timed out'}"
        except (aiohttp.ClientError, OSError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        if reply.end_s is None and reply.error:
            reply.end_s = self.now_s
        return reply

    async def _post(self, reply: Reply, on_token: Callable[[], None]) -> None:
        call = reply.call
        body = body_of(self._model, call)
        async with self._session.post(
            PATHS[call.endpoint], json=body, trace_request_ctx=reply
        ) as answer:
            reply.status = answer.status
            if reply.status != 200:
                reply.error = await answer.text()
                reply.end_s = self.now_s
                reply.retry_after_s = _seconds(answer.headers.get("Retry-After"))
                return
            if not body.get("stream"):
                content = await answer.json()
                reply.end_s = self.now_s
                take(reply, content, reply.end_s)
                return
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                now, data = self.now_s, line[5:].strip()
                if data == b"[DONE]":
                    reply.end_s = now
                    return
                before = len(reply.token_s)
                take(reply, json.loads(data), now)
                if not before and reply.token_s:
                    on_token()
        if not reply.error:
            reply.error = "disconnected: the stream ended without [DONE]"


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def body_of(model: str, call: Call) -> dict[str, Any]:
    """The request as JSON."""
    extra = call.extra | ({"tier": call.tier} if call.tier is not None else {})
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": call.max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if call.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": call.prompt}]
    else:
        body["prompt"] = call.prompt
    if call.stream:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"stream": True, "stream_options": options}
    if extra:
        body["vllm_xargs"] = extra
    return body | call.body


def take(reply: Reply, chunk: dict[str, Any], now: float) -> None:
    """Take in a piece of a reply, or a whole one, that came at `now`.

    Tokens are those that the server's usage counts; where it does not tell with each piece, a piece with text of any
    channel counts as one token, and what the usage at the end tells beyond these as having come with the last piece.
    A piece without text, such as the first one with the role alone, brings none.
    """
    if "error" in chunk:
        reply.error = json.dumps(chunk["error"])
        return
    usage = chunk.get("usage") or {}
    known = usage.get("completion_tokens")
    pieces = 0
    for choice in chunk.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        pieces += bool(choice.get("text")) or any(part.get(channel) for channel in CHANNELS)
        if choice.get("token_ids"):
            reply.token_ids += choice["token_ids"]
        if choice.get("finish_reason") is not None:
            reply.finish_reason = choice["finish_reason"]
            reply.stop_reason = choice.get("stop_reason")
    if known is not None and (chunk.get("choices") or not reply.token_s):
        reply.is_counted = True
        reply.token_s += [now] * (known - len(reply.token_s))
    elif known is not None:
        reply.token_s += [reply.token_s[-1]] * (known - len(reply.token_s))
    elif not reply.is_counted:
        reply.token_s += [now] * pieces
    if usage:
        reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
        details = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = details.get("cached_tokens", reply.cached_tokens)


async def play(
    url: str, model: str, calls: Sequence[Call], timeout_s: float = 600.0
) -> list[Reply]:
    """Make all calls, each when it is due; the replies in the order of the calls."""
    async with Client(url, model, timeout_s) as client:
        client.start()

        async def one(call: Call) -> Reply:
            await asyncio.sleep(max(0.0, call.due_s - client.now_s))
            return await client.ask(call)

        return await asyncio.gather(*(one(call) for call in calls))
