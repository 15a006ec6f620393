"""Send requests to a server at their due times and note when each token came."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


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


@dataclass
class Reply:
    """What came of it. Seconds after the start."""

    call: Call
    sent_s: float = 0.0
    status: int = 0
    """Of HTTP; 0 = no answer."""
    error: str = ""
    token_s: list[float] = field(default_factory=list)
    """When each token came, as seen here; several at once if the server sends them so, all if it does not stream."""
    end_s: float | None = None
    finish_reason: str | None = None
    stop_reason: Any = None

    @property
    def ttft_s(self) -> float | None:
        """From the due time to the first token."""
        return self.token_s[0] - self.call.due_s if self.token_s else None

    @property
    def e2e_s(self) -> float | None:
        """From the due time to the end of the reply."""
        return None if self.end_s is None else self.end_s - self.call.due_s


async def play(
    url: str, model: str, calls: Sequence[Call], timeout_s: float = 600.0
) -> list[Reply]:
    """Make all calls, each when it is due; the replies in the order of the calls."""
    replies = [Reply(call) for call in calls]
    async with aiohttp.ClientSession(
        base_url=url,
        # Below the 5 s after which vLLM's server closes idle connections: never use one that is being closed.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    ) as client:
        start = time.perf_counter()
        await asyncio.gather(*(_make(client, model, reply, start) for reply in replies))
    return replies


async def _make(client: aiohttp.ClientSession, model: str, reply: Reply, start: float) -> None:
    call = reply.call
    await asyncio.sleep(max(0.0, start + call.due_s - time.perf_counter()))
    reply.sent_s = time.perf_counter() - start
    try:
        async with asyncio.timeout(call.leave_after_s):
            await _post(client, _body(model, call), reply, start)
    except TimeoutError:
        reply.error = "left"
    except aiohttp.ClientError as error:
        reply.error = f"{type(error).__name__}: {error}"


def _body(model: str, call: Call) -> dict[str, Any]:
    extra = call.extra | ({"tier": call.tier} if call.tier is not None else {})
    body: dict[str, Any] = {
        "model": model,
        "prompt": call.prompt,
        "max_tokens": call.max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if call.stream:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"stream": True, "stream_options": options}
    if extra:
        body["vllm_xargs"] = extra
    return body | call.body


async def _post(
    client: aiohttp.ClientSession, body: dict[str, Any], reply: Reply, start: float
) -> None:
    async with client.post("/v1/completions", json=body) as answer:
        reply.status = answer.status
        if reply.status != 200:
            reply.error = await answer.text()
            return
        if not body.get("stream"):
            content = await answer.json()
            reply.end_s = time.perf_counter() - start
            _take(reply, content, reply.end_s)
            return
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter() - start
            if line.startswith(b"data: [DONE]"):
                reply.end_s = now
                break
            _take(reply, json.loads(line[6:]), now)


def _take(reply: Reply, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        reply.error = json.dumps(chunk["error"])
        return
    tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
    reply.token_s += [now] * (tokens - len(reply.token_s))
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") is not None:
            reply.finish_reason = choice["finish_reason"]
            reply.stop_reason = choice.get("stop_reason")
