"""A small OpenAI-compatible server in the test's own event loop, which does what it is told."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


class Stream:
    """One reply being streamed."""

    def __init__(self, request, body):
        self.request, self.body, self.response = request, body, None
        self.sent = 0

    async def start(self):
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await self.response.prepare(self.request)

    async def piece(self, **chunk):
        if self.response is None:
            await self.start()
        await self.response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async def token(self, count=1, finish_reason=None, **more):
        self.sent += count
        ids = list(range(100 + self.sent - count, 100 + self.sent))
        choice = {"index": 0, "text": "x", "finish_reason": finish_reason, **more}
        if self.body.get("return_token_ids"):
            choice["token_ids"] = ids
        await self.piece(choices=[choice], usage=self.usage())

    def usage(self):
        return {"prompt_tokens": len(self.body.get("prompt", "")), "completion_tokens": self.sent}

    async def done(self):
        await self.response.write(b"data: [DONE]\n\n")
        return self.response

    def disconnect(self):
        self.request.transport.close()
        return self.response


Behaviour = Callable[[Stream], Awaitable[web.StreamResponse]]


def tokens(gap_s=0.0, first_s=0.0, finish="length") -> Behaviour:
    """As many tokens as asked for, after a while and so far apart."""

    async def answer(stream):
        await asyncio.sleep(first_s)
        count = stream.body["max_tokens"]
        for i in range(count):
            if i:
                await asyncio.sleep(gap_s)
            await stream.token(finish_reason=finish if i == count - 1 else None)
        return await stream.done()

    return answer


def refuse(status, headers=None) -> Behaviour:
    async def answer(stream):
        content = {"error": {"message": "too busy"}}
        return web.json_response(content, status=status, headers=headers)

    return answer


@asynccontextmanager
async def fake_server(behave: Behaviour):
    """(url, bodies of the requests as they came); `behave` answers each."""
    bodies = []

    async def handle(request):
        body = await request.json()
        bodies.append(body)
        return await behave(Stream(request, body))

    app = web.Application(client_max_size=1 << 24)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    await web.SockSite(runner, listening).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", bodies
    finally:
        await runner.cleanup()
