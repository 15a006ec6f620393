"""Send requests to a server at their due times and note when each token came."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


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
    """When each token came, as seen here; several at once if the server sends them so."""
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
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout_s) as client:
        start = time.perf_counter()
        await asyncio.gather(*(_make(client, model, reply, start) for reply in replies))
    return replies


async def _make(client: httpx.AsyncClient, model: str, reply: Reply, start: float) -> None:
    call = reply.call
    await asyncio.sleep(max(0.0, start + call.due_s - time.perf_counter()))
    reply.sent_s = time.perf_counter() - start
    try:
        if call.leave_after_s is None:
            await _stream(client, model, reply, start)
        else:
            async with asyncio.timeout(call.leave_after_s):
                await _stream(client, model, reply, start)
    except TimeoutError:
        reply.error = "left"
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"


async def _stream(client: httpx.AsyncClient, model: str, reply: Reply, start: float) -> None:
    call = reply.call
    extra = call.extra | ({"tier": call.tier} if call.tier is not None else {})
    body = {
        "model": model,
        "prompt": call.prompt,
        "max_tokens": call.max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"vllm_xargs": extra} if extra else {}),
        **call.body,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        reply.status = answer.status_code
        if reply.status != 200:
            reply.error = (await answer.aread()).decode("utf-8", "replace")
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.perf_counter() - start
            if line == "data: [DONE]":
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
