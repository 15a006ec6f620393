"""What happens to a request between HTTP and vLLM's API."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from real.hints import read_hints
from real.middleware import TOKEN_VARIABLE, TwinMiddleware
from twin.scheduling import PRESETS

TIERED = PRESETS["tiered"]


class App:
    """Answers 200 with what it got; keeps the last body and headers."""

    def __init__(self, settings=None):
        self.state = SimpleNamespace(
            vllm_config=SimpleNamespace(additional_config={"twin": settings or {}})
        )
        self.body = None
        self.headers = {}
        self.go = asyncio.Event()
        self.go.set()
        self.heard = []

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.body, self.headers = body, dict(scope["headers"])
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        self.heard.append((await receive())["type"])


async def ask(
    middleware, app, method="POST", path="/v1/completions", body=b"", headers=(), pieces=1
):
    size = -(-len(body) // pieces) or 1
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    messages.append({"type": "http.disconnect"})
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "app": app,
        "headers": [(b"content-length", b"%d" % len(body)), *headers],
    }  # fmt: skip
    await middleware(scope, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent)


def post(settings=None, request=None, headers=(), body=None, pieces=1):
    app = App(settings)
    body = json.dumps(request).encode() if body is None else body
    status, answer = asyncio.run(
        ask(TwinMiddleware(app), app, body=body, headers=headers, pieces=pieces)
    )
    return app, status, answer


@pytest.mark.parametrize("pieces", [1, 3])
def test_headers_become_fields_and_win_over_the_body(pieces):
    request = {"prompt": "x", "vllm_xargs": {"tier": "ONLINE", "own": 3}}
    headers = [(b"x-tier", b"BATCH"), (b"x-tenant", b"shop"), (b"x-total-s", b"2.5")]
    app, status, _ = post(request=request, headers=headers, pieces=pieces)
    assert status == 200
    found = json.loads(app.body)
    assert found["vllm_xargs"] == {"tier": "BATCH", "own": 3, "tenant": "shop", "total_s": "2.5"}
    assert int(app.headers[b"content-length"]) == len(app.body)
    hints, wrong = read_hints(found["vllm_xargs"], 0, TIERED)
    assert (hints.tier, hints.tenant, hints.total_s, wrong) == ("BATCH", "shop", 2.5, {})
    assert app.heard == ["http.disconnect"]


def test_without_headers_the_body_is_left_alone():
    app, _, _ = post(body=b'{"prompt" :  "x"}', headers=[(b"x-other", b"1")])
    assert app.body == b'{"prompt" :  "x"}'


def test_headers_of_one_s_own_replace_the_built_in_ones():
    headers = [(b"x-tier", b"BATCH"), (b"x-class", b"OFFLINE")]
    app, _, _ = post({"headers": {"X-Class": "tier"}}, {"prompt": "x"}, headers)
    assert json.loads(app.body)["vllm_xargs"] == {"tier": "OFFLINE"}


@pytest.mark.parametrize(
    ("xargs", "field"),
    [
        ({"tier": "NONE"}, "tier"),
        ({"tier": ["BATCH"]}, "tier"),
        ({"tier": ""}, "tier"),
        ({"tenant": "x" * 1000}, "tenant"),
        ({"ttft_s": "soon"}, "ttft_s"),
        ({"ttft_s": -1}, "ttft_s"),
        ({"total_s": "nan"}, "total_s"),
        ({"total_s": "1e999"}, "total_s"),
        ({"total_s": [1]}, "total_s"),
        ({"total_s": True}, "total_s"),
    ],
)
def test_bad_hints_are_refused_or_defaulted_as_configured(xargs, field):
    request = {"prompt": "x", "vllm_xargs": xargs}
    app, status, answer = post({"bad_hints": "reject"}, request)
    assert status == 400
    assert json.loads(answer)["error"]["param"] == f"vllm_xargs.{field}"
    assert app.body is None
    app, status, _ = post({"bad_hints": "default"}, request)
    assert status == 200
    hints, wrong = read_hints(xargs, 0, TIERED)
    assert list(wrong) == [field]
    assert (hints.tier, hints.tenant, hints.ttft_s, hints.total_s) == (
        "ONLINE",
        "default",
        None,
        None,
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"vllm_xargs": "x"}',
        b'{"vllm_xargs": 3}',
    ],
)
def test_what_is_not_understood_is_vllm_s_to_refuse(body):
    app, status, _ = post({"bad_hints": "reject"}, body=body, headers=[(b"x-tier", b"BATCH")])
    assert (status, app.body) == (200, body)


@pytest.mark.parametrize(
    ("priority", "tier"),
    [(0, "ONLINE"), (1, "BATCH"), (2, "OFFLINE"), (9, "OFFLINE"), (-3, "ONLINE")],
)
def test_priorities_mean_tiers(priority, tier):
    assert read_hints({}, priority, TIERED)[0].tier == tier
    assert read_hints({"tier": "BATCH"}, priority, TIERED)[0].tier == "BATCH"


def test_the_default_tier_is_the_policy_s():
    config = PRESETS["tiered"].to_dict() | {"default_tier": "OFFLINE"}
    assert read_hints({}, 0, type(TIERED).from_dict(config))[0].tier == "OFFLINE"
    assert read_hints({"tier": "mine"}, 5, PRESETS["fcfs"])[0].tier == "mine"


def test_ready_after_the_warm_up_and_refusing_while_draining(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    ours = [(b"x-twin-control", b"secret")]

    async def story():
        app = App()
        middleware = TwinMiddleware(app)

        async def get(path, headers=(), method="GET"):
            status, answer = await ask(middleware, app, method, path, headers=headers)
            return status, json.loads(answer)

        assert await get("/health") == (503, {"status": "warming up"})
        assert (await get("/health", ours))[0] == 200
        assert (await get("/twin/ready", method="POST"))[0] == 404
        assert (await get("/twin/ready", [(b"x-twin-control", b"")], "POST"))[0] == 404
        assert (await get("/twin/ready", ours, "POST"))[0] == 200
        assert (await get("/health"))[0] == 200

        app.go.clear()
        running = asyncio.create_task(ask(middleware, app, body=b"{}"))
        await asyncio.sleep(0)
        status = (await get("/twin/status"))[1]
        assert (status["state"], status["in_flight"]) == ("ready", 1)
        assert (await get("/twin/drain", ours, "POST"))[1]["state"] == "draining"
        refused, answer = await ask(middleware, app, body=b"{}")
        assert refused == 503
        assert json.loads(answer)["error"]["code"] == 503
        app.go.set()
        assert (await get("/health"))[0] == 503
        assert (await running)[0] == 200
        assert (await get("/twin/status"))[1]["in_flight"] == 0

    asyncio.run(story())


def test_without_twin_real_serve_nobody_need_announce_anything(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    app = App({"policy": None})
    middleware = TwinMiddleware(app)
    assert asyncio.run(ask(middleware, app, "GET", "/health"))[0] == 200
    headers = [(b"x-twin-control", b"")]
    assert asyncio.run(ask(middleware, app, "POST", "/twin/drain", headers=headers))[0] == 404
    status = json.loads(asyncio.run(ask(middleware, app, "GET", "/twin/status"))[1])
    assert status == {"state": "ready", "in_flight": 0, "policy_fingerprint": None}


def streamed(path, request, pieces, kind=b"text/event-stream; charset=utf-8"):
    """What a client reads of a reply in these pieces."""
    app = App()

    async def reply(scope, receive, send):
        await receive()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        )
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    body = json.dumps({"stream": True, **request}).encode()
    return asyncio.run(ask(TwinMiddleware(reply), app, path=path, body=body))[1]


USAGE = b'data: {"id":"cmpl-7","choices":[],"usage":{}}\n\n'
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("xargs", "reason"),
    [
        ({"ttft_s": 0.3}, "timeout:ttft"),
        ({"ttft_s": 2, "total_s": "1"}, "timeout:total"),
        ({"total_s": 1}, "timeout:total"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_ends_without_a_token_says_why(path, xargs, reason):
    answer = streamed(path, {"vllm_xargs": xargs}, [USAGE, END])
    assert answer.startswith(USAGE)
    assert answer.endswith(END)
    piece = json.loads(answer[len(USAGE) : -len(END)].removeprefix(b"data: "))
    assert piece["id"] == "cmpl-7"
    assert piece["choices"][0]["finish_reason"] == "abort"
    assert piece["choices"][0]["stop_reason"] == reason


@pytest.mark.parametrize(
    ("request_", "pieces", "kind"),
    [
        ({}, [USAGE, END], b"text/event-stream"),
        ({"vllm_xargs": {"ttft_s": "soon"}}, [USAGE, END], b"text/event-stream"),
        (
            {"vllm_xargs": {"ttft_s": 1}},
            [b'data: {"finish_reason":"stop"}\n\n', END],
            b"text/event-stream",
        ),
        ({"vllm_xargs": {"ttft_s": 1}}, [b'data: {"error":{}}\n\n', END], b"text/event-stream"),
        ({"vllm_xargs": {"ttft_s": 1}}, [b'{"text": "data: [DONE]"}'], b"application/json"),
    ],
)
def test_other_replies_are_sent_as_they_are(request_, pieces, kind):
    assert streamed("/v1/completions", request_, pieces, kind) == b"".join(pieces)
