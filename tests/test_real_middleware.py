"""What happens to a request between HTTP and vLLM's engine, and to its reply on the way back."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from real.hints import read_hints, read_settings
from real.middleware import TOKEN_VARIABLE, TwinMiddleware
from twin.scheduling import PRESETS

TIERED = PRESETS["tiered"]


class Engine:
    """vLLM's engine client: what `generate` was called with, and endings as told."""

    def __init__(self, endings=((None, ""),)):
        self.calls = []
        self.endings = list(endings)
        self.unfinished = 0
        self.closed = 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.unfinished)

    async def generate(self, prompt, sampling_params, request_id, *, priority=0):
        self.calls.append((sampling_params.extra_args, priority))
        try:
            for index, reason in enumerate(self.endings.pop(0) if self.endings else ()):
                finish = "abort" if reason else "length"
                one = SimpleNamespace(index=index, finish_reason=finish, stop_reason=reason)
                yield SimpleNamespace(outputs=[one])
        finally:
            self.closed += 1


class App:
    """Asks the engine for each prompt, answers with `pieces`; keeps the last body and headers.

    `hands_on` is whether the route gives vllm_xargs and priority to the engine, as most do.
    """

    def __init__(self, settings=None, engine=None, pieces=(b"{}",), kind=b"application/json"):
        self.engine = engine or Engine([[]])
        self.state = SimpleNamespace(
            vllm_config=SimpleNamespace(additional_config={"twin": settings or {}}),
            engine_client=self.engine,
        )
        self.body = None
        self.headers = {}
        self.go = asyncio.Event()
        self.go.set()
        self.heard = []
        self.pieces, self.kind = pieces, kind
        self.prompts, self.n, self.hands_on, self.request_id = 1, 1, True, "cmpl-7"

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.body, self.headers = body, dict(scope["headers"])
        await self.go.wait()
        try:
            request = json.loads(body)
            extra, priority = request.get("vllm_xargs"), request.get("priority", 0)
        except (ValueError, AttributeError, RecursionError):
            extra, priority = None, 0
        handed = {"priority": priority} if self.hands_on else {}
        calls = (
            self.engine.generate(
                "x",
                SimpleNamespace(extra_args=extra if self.hands_on else None, n=self.n),
                f"{self.request_id}-{i}",
                **handed,
            )
            for i in range(self.prompts)
        )
        for call in (
            list(calls) if self.hands_on else calls
        ):  # beam search waits for one step at a time
            async for _ in call:
                pass
        start = {"type": "http.response.start", "status": 200}
        await send(start | {"headers": [(b"content-type", self.kind), (b"content-length", b"0")]})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.heard.append((await receive())["type"])

    @property
    def hints(self):
        """What the engine was told of the last call, as the scheduler reads it."""
        extra, priority = self.engine.calls[-1]
        return read_hints(extra or {}, priority, TIERED)


async def ask(
    middleware, app, method="POST", path="/v1/completions", body=b"", headers=(), pieces=1, **more
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
        "headers": [(b"content-length", b"%d" % len(body)), *headers], **more,
    }  # fmt: skip
    await middleware(scope, receive, send)
    content = b"".join(m.get("body", b"") for m in sent)
    length = dict(sent[0]["headers"]).get(b"content-length", b"0")
    assert int(length) in (0, len(content))
    return sent[0]["status"], content


def post(settings=None, request=None, headers=(), body=None, pieces=1, app=None, **more):
    app = app or App(settings)
    body = json.dumps(request).encode() if body is None else body
    status, answer = asyncio.run(
        ask(TwinMiddleware(app), app, body=body, headers=headers, pieces=pieces, **more)
    )
    return app, status, answer


# --- hints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 3])
def test_headers_win_over_the_body(pieces):
    request = {"prompt": "x", "vllm_xargs": {"tier": "ONLINE", "own": 3, "ttft_s": 4}}
    headers = [(b"x-tier", b"BATCH"), (b"x-tenant", "café".encode()), (b"x-total-s", b"2.5")]
    app, status, _ = post(request=request, headers=headers, pieces=pieces)
    assert status == 200
    assert json.loads(app.body) == request
    assert app.engine.calls[-1][0]["own"] == 3
    hints, wrong = app.hints
    assert (hints.tier, hints.tenant, hints.ttft_s, hints.total_s) == ("BATCH", "café", 4, 2.5)
    assert wrong == {}
    assert app.heard == ["http.disconnect"]


PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/messages", "/invocations", "/generative_scoring", "/inference/v1/generate", "/cohere/v2/chat",
    "/v1/audio/transcriptions", "/v1/systemone", "/a/route/to/come",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_every_route_reads_and_refuses_hints(path):
    app, status, _ = post(request={}, headers=[(b"x-tier", b"OFFLINE")], path=path)
    assert (status, app.hints[0].tier) == (200, "OFFLINE")
    strict = {"bad_hints": "reject"}
    assert post(strict, {"vllm_xargs": {"tier": "NOPE"}}, path=path)[1] == 400
    assert post(strict, {}, headers=[(b"x-tier", b"NOPE")], path=path)[1] == 400


def test_a_route_under_a_prefix_is_the_same_route(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    app = App()
    more = {"method": "GET", "root_path": "/api"}
    status, _ = asyncio.run(ask(TwinMiddleware(app), app, path="/api/health", **more))
    assert status == 503


@pytest.mark.parametrize(
    ("request_", "headers"),
    [
        ({"vllm_xargs": {"tier": "OFFLINE", "total_s": 9}, "priority": 1}, []),
        ({"priority": 2}, [(b"x-total-s", b"9")]),
        ({}, [(b"x-vllm-priority", b"2"), (b"x-total-s", b"9")]),
    ],
)
def test_a_route_that_hands_nothing_on_to_the_engine_has_hints_all_the_same(request_, headers):
    """Beam search asks the engine anew for every token; one deadline holds for all of them."""
    app = App(engine=Engine([[None], [None], [None]]))
    app.hands_on, app.prompts = False, 3
    post(request=request_, headers=headers, app=app)
    found = [read_hints(extra, priority, TIERED) for extra, priority in app.engine.calls]
    assert [hints.tier for hints, _ in found] == ["OFFLINE"] * 3
    assert found[0][0].total_s == 9
    left = [hints.total_s for hints, _ in found]
    assert 8 < left[2] < left[1] < 9
    assert all(wrong == {} for _, wrong in found)


def test_only_the_first_call_has_a_deadline_for_the_first_token():
    app = App(engine=Engine([[None], [None]]))
    app.hands_on, app.prompts = False, 2
    post(request={"vllm_xargs": {"ttft_s": 3, "total_s": 1e-9}}, app=app)
    first, second = (read_hints(extra, 0, TIERED)[0] for extra, _ in app.engine.calls)
    assert (first.ttft_s, second.ttft_s) == (3, None)
    assert 0 < second.total_s <= 1e-9


def test_a_body_without_hints_is_left_alone():
    app, _, _ = post(body=b'{"prompt" :  "x"}', headers=[(b"x-other", b"1")])
    assert app.body == b'{"prompt" :  "x"}'


def test_headers_of_one_s_own_replace_the_built_in_ones():
    headers = [(b"x-tier", b"BATCH"), (b"x-class", b"OFFLINE")]
    app, _, _ = post({"headers": {"X-Class": "tier"}}, {"prompt": "x"}, headers)
    assert app.hints[0].tier == "OFFLINE"


@pytest.mark.parametrize(
    ("xargs", "field"),
    [
        ({"tier": "NONE"}, "tier"),
        ({"tier": ["BATCH"]}, "tier"),
        ({"tier": {"a": 1}}, "tier"),
        ({"tier": ""}, "tier"),
        ({"tier": "\ud800"}, "tier"),
        ({"tenant": "\ud800"}, "tenant"),
        ({"tenant": True}, "tenant"),
        ({"tenant": "x" * 1000}, "tenant"),
        ({"ttft_s": "soon"}, "ttft_s"),
        ({"ttft_s": -1}, "ttft_s"),
        ({"ttft_s": True}, "ttft_s"),
        ({"total_s": "nan"}, "total_s"),
        ({"total_s": "1e999"}, "total_s"),
        ({"total_s": [1]}, "total_s"),
        ({"total_s": 10**30}, "total_s"),
        ({"teir": "BATCH"}, "tier"),
        ({"Tenant": "shop"}, "tenant"),
        ({"ttft": 3}, "ttft_s"),
        ({"total-s": 3}, "total_s"),
    ],
)
def test_bad_hints_are_refused_or_defaulted_as_configured(xargs, field):
    request = {"prompt": "x", "vllm_xargs": xargs}
    app, status, answer = post({"bad_hints": "reject"}, request)
    if xargs != {"total_s": 10**30}:  # finite, and above 0
        assert status == 400
        assert json.loads(answer)["error"]["param"] == f"vllm_xargs.{field}"
        assert app.body is None
    app, status, _ = post({"bad_hints": "default"}, request)
    assert status == 200
    hints, wrong = app.hints
    assert list(wrong) == [field]
    assert (hints.tier, hints.tenant, hints.ttft_s, hints.total_s) == (
        "ONLINE", "default", None, None,
    )  # fmt: skip
    # Nothing that vLLM would refuse in words of its own, or could not hand to its other process.
    json.dumps(app.engine.calls[-1][0]).encode()
    for value in json.loads(app.body)["vllm_xargs"].values():
        assert isinstance(value, str | int | float)


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        (b"x-tier", b"NOPE", "X-Tier"),
        (b"x-total-s", b"soon", "X-Total-S"),
        (b"x-vllm-priority", b"abc", "X-Vllm-Priority"),
        (b"x-vllm-priority", b"1.5", "X-Vllm-Priority"),
        (b"x-vllm-priority", b"", "X-Vllm-Priority"),
        (b"x-vllm-priority", b"9" * 40, "X-Vllm-Priority"),
        (b"x-vllm-priority", b"9" * 5000, "X-Vllm-Priority"),
    ],
)
def test_a_bad_header_is_named_as_one(name, value, param):
    app, status, answer = post({"bad_hints": "reject"}, {}, [(name, value)])
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param)
    assert f"header {param} must be" in error["message"] or f"{param} must be" in error["message"]
    app, status, _ = post({}, {}, [(name, value)])
    hints, wrong = app.hints
    assert (status, hints.tier, hints.total_s, len(wrong)) == (200, "ONLINE", None, 1)
    assert abs(app.engine.calls[-1][1]) < 2**63


def test_a_priority_beyond_64_bits_in_the_body():
    app, status, _ = post({}, {"priority": 10**40})
    assert (status, app.hints[0].tier, list(app.hints[1])) == (200, "ONLINE", ["priority"])
    status, answer = post({"bad_hints": "reject"}, {"priority": 10**40})[1:]
    assert (status, json.loads(answer)["error"]["param"]) == (400, "priority")


def test_null_says_nothing():
    for settings in ({}, {"bad_hints": "reject"}):
        app, status, _ = post(settings, {"vllm_xargs": {"tier": None, "own": 1}})
        assert (status, app.hints[1]) == (200, {})
        assert json.loads(app.body)["vllm_xargs"] == {"own": 1}


def test_keys_of_others_are_let_through():
    xargs = {"time": 3, "kv_transfer_params": "x", "rate": 1, "session_id": "a", "timer": 0}
    app, status, _ = post({"bad_hints": "reject"}, {"vllm_xargs": xargs})
    assert (status, app.hints[1]) == (200, {})


def test_under_vllm_s_own_order_nothing_is_read():
    headers = [(b"x-tier", b"NOPE"), (b"x-vllm-priority", b"3")]
    app, status, _ = post({"policy": None}, {"vllm_xargs": {"tier": [1]}}, headers)
    assert (status, app.engine.calls) == (200, [({"tier": [1]}, 0)])


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
        b'{"vllm_xargs": null}',
        b'{"vllm_xargs": {"tier": "BATCH"}',
    ],
)
def test_what_is_not_understood_is_vllm_s_to_refuse(body):
    app = App({"bad_hints": "reject"})
    app.prompts = 0
    _, status, _ = post(body=body, headers=[(b"x-tier", b"BATCH")], app=app)
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


# --- settings -------------------------------------------------------------------------------------

BAD_SETTINGS = [
    (3, "additional_config.twin must be an object"),
    (
        {"polcy": "tiered"},
        "additional_config.twin.polcy is not known; known are bad_hints, headers",
    ),
    ({"bad_hints": "rejct"}, "bad_hints must be one of default, reject, got 'rejct'"),
    ({"headers": {"x": "bogus"}}, "header x: 'bogus' is none of tier, tenant"),
    ({"headers": {"x y": "tier"}}, "'x y' cannot be the name of a header"),
    ({"headers": {"": "tier"}}, "'' cannot be the name of a header"),
    ({"headers": {"x-漢": "tier"}}, "'x-漢' cannot be the name of a header"),
    ({"headers": {"x-a": "tier", "X-A": "tenant"}}, "header X-A is there twice"),
    ({"headers": ["x"]}, "headers must map names of headers to fields"),
    ({"policy": "no-such"}, "no-such"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_settings_that_make_no_sense_end_the_server_before_it_starts(settings, message):
    app = App()
    app.state.vllm_config.additional_config = {"twin": settings}
    sent = []

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message)

    asyncio.run(TwinMiddleware(app)({"type": "lifespan", "app": app}, receive, send))
    [failed] = sent
    assert failed["type"] == "lifespan.startup.failed"
    assert message in failed["message"]


@pytest.mark.parametrize("config", [{}, {"other": 3}, {"twin": {"record": "x"}}, None, "text"])
def test_settings_of_others_are_theirs(config):
    assert read_settings(config) in ({}, {"record": "x"})


# --- ready and draining ---------------------------------------------------------------------------


def test_ready_after_the_warm_up_and_refusing_while_draining(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    ours = [(b"x-twin-control", b"secret")]

    async def story():
        app = App()
        middleware = TwinMiddleware(app)

        async def get(path, headers=(), method="GET"):
            status, answer = await ask(middleware, app, method, path, headers=headers)
            return status, json.loads(answer)

        for path in ("/health", "/ping"):
            assert await get(path) == (503, {"status": "warming up"})
            assert (await get(path, method="POST"))[0] == 503
        assert (await get("/health", ours))[0] == 200
        assert (await get("/twin/ready", method="POST"))[0] == 404
        assert (await get("/twin/ready", [(b"x-twin-control", b"")], "POST"))[0] == 404
        assert (await get("/twin/ready", ours, "POST"))[0] == 200
        assert (await get("/health"))[0] == (await get("/ping"))[0] == 200
        assert "is_yours" not in (await get("/twin/status"))[1]
        assert (await get("/twin/status", ours))[1]["is_yours"] is True

        app.go.clear()
        running = [asyncio.create_task(ask(middleware, app, path=p, body=b"{}")) for p in PATHS]
        await asyncio.sleep(0.05)
        status = (await get("/twin/status"))[1]
        assert (status["state"], status["in_flight"]) == ("ready", len(PATHS))
        assert (await get("/twin/drain", ours, "POST"))[1]["state"] == "draining"
        for path in PATHS:
            refused, answer = await ask(middleware, app, path=path, body=b"{}")
            assert refused == 503
            assert json.loads(answer)["error"]["code"] == 503
        app.go.set()
        # What a drain may need to end is still done.
        for path in ("/resume", "/wake_up", "/abort_requests", "/v1/responses/resp_1/cancel"):
            assert (await ask(middleware, app, path=path))[0] == 200
        assert (await get("/health"))[0] == (await get("/ping"))[0] == 503
        assert {(await task)[0] for task in running} == {200}
        assert (await get("/twin/status"))[1]["in_flight"] == 0

    asyncio.run(story())


def test_what_the_engine_still_does_for_nobody_who_waits_is_told():
    app = App()
    app.engine.unfinished = 3
    middleware = TwinMiddleware(app)
    status = json.loads(asyncio.run(ask(middleware, app, "GET", "/twin/status"))[1])
    assert (status["in_flight"], status["in_engine"]) == (0, 3)


def test_a_request_is_accepted_once_its_body_is_there(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")

    async def story(last):
        app = App()
        middleware = TwinMiddleware(app)
        rest, sent = asyncio.Queue(), []
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": app}
        rest.put_nowait({"type": "http.request", "body": b'{"prompt"', "more_body": True})

        async def send(message):
            sent.append(message)

        asking = asyncio.create_task(middleware(scope | {"headers": []}, rest.get, send))
        await asyncio.sleep(0.01)
        ours = [(b"x-twin-control", b"secret")]
        status = json.loads((await ask(middleware, app, path="/twin/drain", headers=ours))[1])
        assert status["in_flight"] == 0
        if last is not None:
            rest.put_nowait(last)
        await asyncio.wait_for(asking, 5)
        assert app.body is None
        return sent[0]["status"] if sent else None

    assert asyncio.run(story({"type": "http.request", "body": b': "x"}'})) == 503
    assert asyncio.run(story(None)) == 503  # vLLM, when it ends, waits for whoever has no answer


def test_a_client_that_goes_before_its_body_is_there_has_asked_nothing():
    async def story():
        app, rest = App(), asyncio.Queue()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": app}
        rest.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        rest.put_nowait({"type": "http.disconnect"})
        await TwinMiddleware(app)(scope | {"headers": []}, rest.get, None)
        return app.body

    assert asyncio.run(story()) is None


def test_a_task_that_is_cancelled_while_it_reads_ends():
    async def story():
        app, rest = App(), asyncio.Queue()
        middleware = TwinMiddleware(app)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": app}
        asking = asyncio.create_task(middleware(scope | {"headers": []}, rest.get, None))
        await asyncio.sleep(0.01)
        middleware._state = "draining"
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(story())


def test_a_websocket_counts_and_is_refused_while_draining(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")

    async def story():
        app, seen, sent = App(), [], []

        async def talk(scope, receive, send):
            seen.append(json.loads((await ask(middleware, app, "GET", "/twin/status"))[1]))
            async for _ in app.engine.generate("x", SimpleNamespace(extra_args=None, n=1), "rt"):
                pass

        middleware = TwinMiddleware(talk)
        scope = {"type": "websocket", "path": "/v1/realtime", "app": app}
        scope["headers"] = [(b"x-tier", b"OFFLINE")]

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message):
            sent.append(message)

        await middleware(scope, receive, send)
        assert seen[0]["in_flight"] == 1
        assert app.hints[0].tier == "OFFLINE"
        ours = [(b"x-twin-control", b"secret")]
        status = json.loads((await ask(middleware, app, path="/twin/drain", headers=ours))[1])
        assert status["in_flight"] == 0
        await middleware(scope, receive, send)
        assert sent[0]["type"] == "websocket.close"
        assert len(seen) == 1

    asyncio.run(story())


def test_without_twin_real_serve_nobody_need_announce_anything(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    app = App({"policy": None})
    middleware = TwinMiddleware(app)
    assert asyncio.run(ask(middleware, app, "GET", "/health"))[0] == 200
    headers = [(b"x-twin-control", b"")]
    assert asyncio.run(ask(middleware, app, "POST", "/twin/drain", headers=headers))[0] == 404
    status = json.loads(asyncio.run(ask(middleware, app, "GET", "/twin/status"))[1])
    assert status["state"] == "ready"
    assert status["policy_fingerprint"] is None


# --- replies that end at a deadline ---------------------------------------------------------------

USAGE = b'data: {"id":"cmpl-7","object":"text_completion","created":5,"model":"m","choices":[],"usage":{}}\n\n'
END = b"data: [DONE]\n\n"
LATE = {"vllm_xargs": {"ttft_s": 0.3, "total_s": 9}, "model": "m"}


def replied(endings, pieces, request=LATE, kind=b"text/event-stream; charset=utf-8", **changes):
    """What a client reads of a reply in these pieces, after the engine has ended calls in these ways."""
    app = App(engine=Engine(endings), pieces=pieces, kind=kind)
    vars(app).update({"prompts": len(endings), **changes})
    return post(request=request, app=app)[2]


def events(answer):
    assert answer.endswith(b"\n\n")
    return [
        json.loads(event.partition(b"data: ")[2])
        for event in answer.split(b"\n\n")
        if event and b"[DONE]" not in event
    ]


def piece(index, finish=None, kind="text_completion", stop=None):
    text = {"text": "a"} if kind == "text_completion" else {"delta": {"content": "a"}}
    choice = {"index": index, **text, "finish_reason": finish, "stop_reason": stop}
    content = {"id": "cmpl-7", "object": kind, "created": 5, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize("reason", ["timeout:ttft", "timeout:total"])
@pytest.mark.parametrize("pieces", [[USAGE, END], [END]])
def test_a_stream_that_ends_without_a_token_says_why(reason, pieces):
    answer = replied([[reason]], pieces)
    added, *others = events(answer)
    assert {name: added[name] for name in ("id", "object", "model")} == {
        "id": "cmpl-7", "object": "text_completion", "model": "m",
    }  # fmt: skip
    assert added["created"] > 0
    [choice] = added["choices"]
    assert (choice["index"], choice["text"]) == (0, "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", reason)
    assert answer.endswith(b"".join(pieces))
    assert len(others) == len(pieces) - 1


def test_every_choice_of_a_stream_ends_once():
    """Of three prompts with two choices each: one ended, one cut with tokens, the others without."""
    why = "timeout:ttft"
    told = [piece(0), piece(0, "length"), piece(1), piece(1, "abort", stop="timeout:total"), USAGE]
    answer = replied([[None, "timeout:total"], [why, why], [why, why]], [*told, END], n=2)
    ends = [c for e in events(answer) for c in e["choices"] if c["finish_reason"]]
    assert [(c["index"], c["finish_reason"]) for c in ends] == [
        (0, "length"), (1, "abort"), (2, "abort"), (3, "abort"), (4, "abort"), (5, "abort"),
    ]  # fmt: skip
    assert {c["stop_reason"] for c in ends[2:]} == {why}


def test_a_chat_with_several_choices():
    kind = "chat.completion.chunk"
    roles = [piece(i, kind=kind) for i in range(3)]
    answer = replied([["timeout:ttft"] * 3], [*roles, END], n=3)
    added = events(answer)[3:]
    assert [e["choices"][0]["index"] for e in added] == [0, 1, 2]
    assert all(e["object"] == kind and e["choices"][0]["delta"] == {} for e in added)
    assert all((e["id"], e["created"], e["model"]) == ("cmpl-7", 5, "m") for e in added)
    alone = replied([["timeout:ttft"]], [END], request_id="chatcmpl-9")
    [added] = events(alone)
    assert (added["id"], added["object"]) == ("chatcmpl-9-0", kind)


def test_a_stream_cut_anywhere_is_the_same():
    pieces = [piece(0), piece(0, "abort", stop="timeout:total"), USAGE, END]
    whole = replied([["timeout:total", "timeout:ttft"]], pieces, n=2)
    text = b"".join(pieces)
    for size in (1, 7, 50):
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        assert [e["choices"] for e in events(replied([["timeout:total", "timeout:ttft"]], cut, n=2))] == [
            e["choices"] for e in events(whole)
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "endings", "pieces", "kind"),
    [
        ({}, [["timeout:total"]], [USAGE, END], b"text/event-stream"),
        (LATE, [[None]], [piece(0), piece(0, "stop"), USAGE, END], b"text/event-stream"),
        (LATE, [["client gone"]], [USAGE, END], b"text/event-stream"),
        (LATE, [["timeout:ttft"]], [b'data: {"error":{}}\n\n', END], b"text/event-stream"),
        (LATE, [["timeout:ttft"]], [b'{"text": "data: [DONE]"}'], b"text/plain"),
        (LATE, [[None]], [b'{"choices" : []}'], b"application/json"),
        (LATE, [["timeout:ttft"]], [b"not json"], b"application/json"),
        (LATE, [["timeout:ttft"]], [b'{"text": "heard"}'], b"application/json"),
    ],
)
def test_other_replies_are_sent_as_they_are(request_, endings, pieces, kind):
    assert replied(endings, pieces, request_, kind) == b"".join(pieces)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            {"object": "response", "status": "completed", "incomplete_details": None},
            {"status": "incomplete", "incomplete_details": {"reason": "timeout:total"}},
        ),
        ({"type": "message", "stop_reason": "end_turn"}, {"stop_reason": "timeout:total"}),
        ({"type": "message", "content": []}, {"stop_reason": "timeout:total"}),
        (
            {"choices": [{"index": 0, "finish_reason": "abort", "stop_reason": None}]},
            {"choices": [{"index": 0, "finish_reason": "abort", "stop_reason": "timeout:total"}]},
        ),
        ({"id": "c", "finish_reason": "COMPLETE"}, {"finish_reason": "TIMEOUT"}),
        (
            {"error": {"message": "No logprobs available", "code": 400}},
            {
                "error": {
                    "message": "timeout:total: the request was ended at its deadline",
                    "code": 400,
                }
            },
        ),
    ],
)
def test_a_whole_reply_says_so_in_the_way_of_its_api(reply, expected):
    pieces = [json.dumps(reply).encode()]
    answer = json.loads(replied([["timeout:total"]], pieces, kind=b"application/json"))
    assert {name: answer[name] for name in expected} == expected
    assert set(answer) == {*reply, *expected, *(["stop_sequence"] if "type" in reply else [])}


def test_a_streamed_response_is_incomplete():
    response = b'{"object":"response","status":"completed"}'
    done = b"event: response.completed\n"
    done += b'data: {"type":"response.completed","response":%s}\n\n' % response
    [event] = events(replied([["timeout:total"]], [done]))
    assert event["type"] == "response.incomplete"
    assert event["response"]["incomplete_details"] == {"reason": "timeout:total"}
    assert replied([["timeout:total"]], [done]).startswith(b"event: response.incomplete\n")
    assert replied([[None]], [done]) == done


def test_a_streamed_message_ends_with_the_reason():
    delta = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{}}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    found = events(replied([["timeout:ttft"]], [delta, stop]))
    assert found[0]["delta"] == {"stop_reason": "timeout:ttft", "stop_sequence": None}
    assert found[1] == {"type": "message_stop"}


def test_text_that_looks_like_an_end_is_none():
    told = json.loads(piece(0)[6:])
    told["choices"][0]["text"] = "data: [DONE] response.completed"
    event = b"data: " + json.dumps(told).encode() + b"\n\n"
    answer = replied([[None]], [event, piece(0, "stop"), END])
    assert answer == event + piece(0, "stop") + END


def test_a_reply_that_is_given_up_ends_the_engine_s_work():
    """The generator that notes endings passes the end of its reader on."""
    from real.exchange import CURRENT, Exchange, watch

    async def story():
        engine = Engine([[None, None]])
        watch(engine)
        watch(engine)
        CURRENT.set(Exchange({"ttft_s": 1}, None, None))
        reading = engine.generate("x", SimpleNamespace(extra_args=None, n=2), "r")
        await anext(reading)
        await reading.aclose()
        return engine.closed

    assert asyncio.run(story()) == 1
