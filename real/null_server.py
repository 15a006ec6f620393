"""A server without a model: it answers each request at once with as many tokens as were asked for.

To find out what a client can do. `python -m real.null_server` prints where it listens.
"""

import asyncio
import json
import socket

from aiohttp import web


async def answer(request: web.Request) -> web.StreamResponse:
    """A completion, streamed or whole."""
    body = await request.json()
    tokens = body.get("max_tokens") or 16
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
    if not body.get("stream"):
        choice = {"index": 0, "text": "x " * tokens, "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for count in range(1, tokens + 1):
        reason = "length" if count == tokens else None
        choice = {"index": 0, "text": "x ", "finish_reason": reason}
        piece = {"choices": [choice], "usage": {**usage, "completion_tokens": count}}
        await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def serve() -> None:
    """Listen on a free port of this machine until the process ends."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await web.SockSite(runner, listening).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
