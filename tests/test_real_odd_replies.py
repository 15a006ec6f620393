"""Whatever a server sends is the outcome of one request: nothing it says ends the run, or loses what was measured."""

import asyncio
import json

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed in this environment")

from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from real.calls import Call, Reply, outcome_of
from real.client import LONGEST_WAIT_S, play, retry_after
from real.measured import read_measured, write_measured
from real.measured_report import page, result_of, summary_of
from real.pieces import LONGEST_LINE, MOST_OUTPUT, Events, Lines, take, whole
from real.prompts import Prompts
from real.replay import Manner, replay
from real.server_metrics import parse, series_of
from real.told import error_line, without_prompts, words_line
from tests.test_real_replay import played, scenario
from twin.clock import PS
from twin.cluster.clients import ClientsSpec, Retries
from twin.cluster.cold_start import TriangularTime
from twin.cluster.leaving import Disconnects
from twin.workload.streams import Traffic, open_streams

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def piece(count, finish=None, **more):
    usage = {"prompt_tokens": 20, "completion_tokens": count}
    choice = {"index": 0, "text": "x", "finish_reason": finish, **more}
    return b"data: %s\n\n" % json.dumps({"choices": [choice], "usage": usage}).encode()


def data(text):
    return b"data: %s\n\n" % text.encode()


GOOD = b"".join(piece(i, "length" if i == 5 else None) for i in range(1, 6))


def answer(status, body, kind=b"application/json", extra=b""):
    head = b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n"
    return head % (status, kind, len(body), extra) + body


def page_of(body):
    return answer(200, body, b"text/html")


@asynccontextmanager
async def raw_server(*answers):
    """(url, requests) of a server that writes these bytes, the last of them again and again, and closes."""
    seen = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next((int(x[15:]) for x in lines if x.startswith("content-length:")), 0)
        await reader.readexactly(length)
        seen.append(head.decode())
        writer.write(answers[min(len(seen), len(answers)) - 1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


def run_against(*answers, manner=None, loaded=None, headers=None):
    async def go():
        async with raw_server(*answers) as (url, seen):
            made = loaded or scenario(requests=2, arrivals={"process": "constant", "rate": 20})
            traffic = Traffic(open_streams(made.traffic, made.run.seed))
            done = await replay(
                url, "m", traffic, Prompts(1000), manner or Manner(), headers=headers
            )
            return done, seen

    return asyncio.run(go())


def ended(reply_bytes, **more):
    """(outcome, reason, output tokens, error) of the first of two requests; the second meets a good server."""
    done, _ = run_against(reply_bytes, HEAD + GOOD + DONE, **more)
    first, second = done.measured
    assert (second.record.outcome, second.record.output_tokens) == ("completed", 5)
    return first.record.outcome, first.record.reason, first.record.output_tokens, first.error


@pytest.mark.parametrize(
    ("events", "output", "words"),
    [
        (data("{oops"), 0, "no JSON: {oops"),
        (data("[1,2]"), 0, "no object: [1, 2]"),
        (data('"hi"'), 0, 'no object: "hi"'),
        (data("null"), 0, "no object: null"),
        (data('{"choices":["a"]}'), 0, 'choices has "a"'),
        (data('{"choices":[null]}'), 0, "choices has null"),
        (data('{"choices":[{"delta":"x"}]}'), 0, 'delta is "x"'),
        (data('{"choices":[{"text":"x"}],"usage":[1]}'), 0, "usage is [1]"),
        (data('{"usage":{"completion_tokens":"3"}}'), 0, 'completion_tokens is "3"'),
        (data('{"usage":{"completion_tokens":2.5}}'), 0, "completion_tokens is 2.5"),
        (data('{"usage":{"completion_tokens":10000000000000}}'), 0, "completion_tokens is 1000"),
        (data('{"usage":{"prompt_tokens":-7}}'), 0, "prompt_tokens is -7"),
        (data('{"usage":{"prompt_tokens":100000000000000000000}}'), 0, "prompt_tokens is 1000"),
        (data('{"usage":{"prompt_tokens_details":{"cached_tokens":"16"}}}'), 0, 'is "16"'),
        (data('{"choices":[{"token_ids":7}]}'), 0, "token_ids is 7"),
        (data('{"choices":[{"token_ids":["a"]}]}'), 0, 'token_ids has "a"'),
        (data('{"choices":[{"finish_reason":5}]}'), 0, "finish_reason is 5"),
        (data("[" * 100_000), 0, "no JSON: [[["),
        (piece(2) + data("{oops"), 2, "no JSON: {oops"),
        (piece(3) + DONE, 3, "[DONE] without a finish_reason"),
    ],
)
def test_an_odd_reply_is_the_outcome_of_its_request(events, output, words):
    outcome, reason, tokens, error = ended(HEAD + events + DONE)
    assert (outcome, reason, tokens) == ("aborted", "odd reply", output)
    assert words in error


@pytest.mark.parametrize(
    "stream",
    [
        GOOD,  # without [DONE]
        (GOOD + DONE).replace(b"\n", b"\r"),
        (GOOD + DONE).replace(b"\n", b"\r\n"),
        (GOOD + DONE).replace(b"data: ", b"data:"),
        b": ping\n\nevent: x\nid: 3\n" + GOOD + DONE,
        GOOD.replace(b'{"choices"', b'{"error": null, "choices"') + DONE,
        GOOD.replace(b'"x"', b'"\xc3"') + DONE,
        piece(5, "length", logprobs="y" * 900_000) + DONE,
        GOOD.replace(b', "usage"', b',\ndata: "usage"') + DONE,
        GOOD.replace(b'_tokens": 5', b'_tokens": 5.0') + DONE,
    ],
)
def test_what_server_sent_events_allow_is_a_good_reply(stream):
    outcome, reason, tokens, error = ended(HEAD + stream)
    assert (outcome, reason, tokens, error) == ("completed", "length", 5, "")


@pytest.mark.parametrize(
    ("reply_bytes", "reason", "words"),
    [
        (page_of(b"<html>Login</html>"), "text/html instead of a reply", "<html>Login</html>"),
        (answer(200, b'{"error":{"message":"no such model"}}'), "error in the reply", "no such"),
        (HEAD + data('{"error":{"message":"dead"}}') + DONE, "error in the reply", "dead"),
        (answer(200, b'{"choices":[{"text":"x"}]}'), "odd reply", "--no-stream"),
        (HEAD + piece(1), "disconnected", "without [DONE]"),
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP reply", ""),
        (HEAD.replace(b"Connection", b"Content-Encoding: gzip\r\nConnection") + b"x", None, ""),
        (answer(500, b"\xff\xfe\x00bad", b"text/html; charset=nonsense"), "http 500", "bad"),
        (answer(500, b""), "http 500", "X"),
        (answer(504, b"timeout: upstream did not answer"), "http 504", "timeout: upstream"),
        (answer(500, b"left"), "http 500", "left"),
        (answer(500, b"end_of_run"), "http 500", "end_of_run"),
        (answer(302, b"", extra=b"Location: ftp://u:p@x/y\r\n"), "http 302", "a redirect to ftp://x"),
        (answer(307, b"", extra=b"Location: http://[bad\r\n"), "http 307", "a redirect, which"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "http 204", ""),
    ],
)  # fmt: skip
def test_the_reason_says_what_came(reply_bytes, reason, words):
    outcome, found, _, error = ended(reply_bytes)
    assert outcome == "aborted"
    assert reason is None or found == reason
    assert words in error


def test_a_refusal_in_another_encoding_is_a_refusal():
    found = ended(answer(401, "clé refusée".encode("latin-1"), b"text/plain"))
    assert found[:3] == ("refused", "http 401", 0)
    assert found[3] == "cl\ufffd refus\ufffde"


def test_odd_whole_replies_are_outcomes_too():
    def whole_of(body, kind=b"application/json"):
        manner = Manner(stream=False)
        done, _ = run_against(answer(200, body, kind), manner=manner)
        record = done.measured[0].record
        return record.outcome, record.reason, record.output_tokens

    usage = b'"usage":{"completion_tokens":5}'
    good = b'{"choices":[{"text":"xxxxx","finish_reason":"stop"}],%s}' % usage
    assert whole_of(good) == ("completed", "stop", 5)
    assert whole_of(b"{oops") == ("aborted", "odd reply", 0)
    assert whole_of(b"{}") == ("aborted", "odd reply", 0)
    assert whole_of(b"<html>", b"text/html") == ("aborted", "text/html instead of a reply", 0)


def test_a_line_without_end_is_not_kept_for_ever():
    reply = Reply(Call(0.0, "x", 5), status=200)
    events = Events(reply)
    for _ in range(LONGEST_LINE // (1 << 20) + 2):
        events.feed(b"x" * (1 << 20), 1.0)
    assert events.is_done
    assert reply.error == "a line of more than 16 MiB"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "message", "text", "content", "usage", "completion_tokens", "token_ids", "object",
             "prompt_tokens", "prompt_tokens_details", "cached_tokens", "finish_reason", "stop_reason", "error"]
        ),
        inner,
    ),
    max_leaves=15,
)  # fmt: skip


@given(st.lists(JSON, max_size=4))
def test_no_json_is_too_odd(chunks):
    reply = Reply(Call(0.0, "x", 9), status=200)
    for at, chunk in enumerate(chunks):
        take(reply, chunk, float(at))
    assert len(reply.token_s) <= MOST_OUTPUT
    assert reply.token_s == sorted(reply.token_s)
    outcome, reason = outcome_of(reply)
    assert outcome in ("completed", "aborted", "timed_out")
    for text in (reason, reply.error):
        text.encode()  # halves of surrogate pairs cannot be written
        assert text == "" or text.isprintable()


@given(
    st.lists(st.binary(max_size=30) | st.sampled_from([b"data: ", b"\n", b"\r", piece(2), DONE]))
)
def test_no_bytes_are_too_odd(parts):
    reply = Reply(Call(0.0, "x", 9), status=200)
    events = Events(reply)
    for at, part in enumerate(parts):
        events.feed(part, float(at))
    events.end(99.0)
    assert reply.error.encode() is not None
    assert outcome_of(reply)[0] in ("completed", "aborted")
    once = Reply(Call(0.0, "x", 9), status=200)
    whole(once, b"".join(parts), 1.0)
    assert once.end_s == 1.0


@given(st.binary(max_size=60) | st.just(GOOD), st.data())
@settings(max_examples=50)
def test_where_the_bytes_are_cut_does_not_matter(content, drawn):
    lines = Lines()
    found, at = [], 0
    while at < len(content):
        size = drawn.draw(st.integers(1, 9))
        found += lines.feed(content[at : at + size])
        at += size
    assert found + lines.end() == content.splitlines()


@given(st.lists(st.text(max_size=80), max_size=5))
def test_no_metrics_are_too_odd(lines):
    parse("\n".join(f"vllm:num_requests_running {line}" for line in lines))


def test_numbers_that_no_metric_can_have_are_unknown():
    text = (
        "vllm:num_requests_running %s\nvllm:num_requests_waiting 2\nvllm:num_preemptions_total %s\n"
    )
    for odd in ("NaN", "+Inf", "-1", "1.2.3", "1e300"):
        found = parse(text % (odd, odd))
        assert found.values == {"waiting": 2}
        assert len(series_of([(0.0, found), (1.0, found)], 1.0).times_ps) == 2
    two = parse('vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running NaN\n')
    assert two.values == {}
    # A server that began anew in between.
    first, second = parse(text % (1, 9)), parse(text % (1, 4))
    assert second.since(first) == {}


def test_what_is_odd_can_be_written(tmp_path):
    odd = piece(1) + data('{"choices":[{"text":"x","finish_reason":"\\ud800\\u0007"}],"usage":{}}')
    done, _ = run_against(HEAD + odd + DONE, answer(500, b"\xff" * 5000))
    write_measured(tmp_path, done.measured, {})
    columns, _ = read_measured(tmp_path)
    assert columns["outcome"] == ["completed", "aborted"]
    assert columns["reason"] == ["?", "http 500"]
    assert columns["error"] == ["", "\ufffd" * 500]
    result = result_of(scenario(), done.measured, series_of([], 1.0), {}, 1.0, False)
    assert "http 500" in page(result, summary_of(result, "http://here", []))


def test_a_connection_that_the_server_is_closing_is_no_failure():
    """A server that closes a connection for being idle just as the next request arrives on it."""
    heard = []

    async def handle(reader, writer):
        for number in range(2):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            lines = head.decode().lower().split("\r\n")
            length = next(int(x[15:]) for x in lines if x.startswith("content-length:"))
            await reader.readexactly(length)
            heard.append(number)
            if number == 0:
                writer.write(answer(200, GOOD + DONE, b"text/event-stream"))
                await writer.drain()
        writer.close()

    async def go():
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await play(url, "m", [Call(0.3 * i, [1], 5) for i in range(4)])

    replies = asyncio.run(go())
    assert [outcome_of(reply)[0] for reply in replies] == ["completed"] * 4
    # The second, third and fourth met the connection of the one before, and were sent again.
    assert heard == [0, 1, 0, 1, 0, 1, 0]
    assert all(reply.ttft_s < 0.2 for reply in replies)


KEYS = {"X-Api-Key": "secret-4711"}


def redirected(status, place):
    """(the request, what the server heard that was asked, and the one that the redirect names, where it is)."""

    async def go():
        async with raw_server(HEAD + GOOD + DONE) as (near, heard):
            target = place(near)
            away = answer(status, b"", extra=f"Location: {target}/v1/completions\r\n".encode())
            async with raw_server(away) as (url, first):
                traffic = Traffic(open_streams(scenario(requests=1).traffic, 1))
                done = await replay(url, "m", traffic, Prompts(1000), Manner(), headers=KEYS)
                return done.measured[0], first, heard, target

    return asyncio.run(go())


def test_redirects_to_another_host_are_not_followed():
    one, _, heard, target = redirected(307, lambda url: url.replace("127.0.0.1", "localhost"))
    assert heard == []
    assert (one.record.outcome, one.record.reason) == ("aborted", "http 307")
    assert one.error == f"a redirect to {target}, which is not followed"


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_on_the_same_host_is_followed_once_without_the_headers_of_the_user(status):
    """`twin-real models` answers so: each of its models has a port of its own."""
    one, first, heard, _ = redirected(status, lambda url: url)
    assert one.record.outcome == "completed"
    assert len(first) == len(heard) == 1
    assert KEYS["X-Api-Key"] in first[0]
    assert KEYS["X-Api-Key"] not in heard[0]


def test_redirects_in_a_circle_end():
    one, first, _, _ = redirected(307, lambda url: "")
    assert one.record.outcome == "aborted"
    assert 2 <= len(first) <= 8


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, None), ("", None), ("nan", None), ("inf", None), ("-3", None), ("soon", None), ("1e400", None),
        ("0.5", 0.5), ("120", 120.0), ("99999999999", LONGEST_WAIT_S), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)  # fmt: skip
def test_retry_after_in_seconds(said, seconds):
    assert retry_after(said) == seconds


def test_retry_after_as_a_date():
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert retry_after(later) == pytest.approx(60, abs=2)


def test_a_server_that_asks_for_the_impossible_is_asked_again():
    retries = Retries(2, PS // 1000, 1.0, PS, 0.0, frozenset({"refused"}), True, None, 1)
    for odd in (b"nan", b"inf"):
        busy = answer(429, b"busy", extra=b"Retry-After: %s\r\n" % odd)
        done, seen = run_against(
            busy, HEAD + GOOD + DONE, manner=Manner(clients=ClientsSpec(retries)), loaded=scenario(requests=1)
        )  # fmt: skip
        assert len(seen) == 2
        assert (done.measured[0].record.outcome, done.measured[0].record.attempts) == (
            "completed",
            2,
        )
        assert done.followed == (("refused", "http 429", 1),)


# --- clients --------------------------------------------------------------------------------------


def test_streams_have_retries_of_their_own():
    loaded = scenario(requests=2, retries={"attempts": 3, "backoff": 0.01, "outcomes": ["refused"]})
    manner = Manner(clients=loaded.cluster.clients)
    done, seen = run_against(answer(503, b"busy"), manner=manner, loaded=loaded)
    assert [one.record.attempts for one in done.measured] == [3, 3]
    assert len(seen) == 6
    assert done.followed == (("refused", "http 503", 4),)


def test_clients_leave_by_themselves():
    async def stalls(stream):
        await stream.token()
        await asyncio.sleep(30)

    leaving = {0: Disconnects(1.0, after=TriangularTime(PS // 5, PS // 5, PS // 5))}
    manner = Manner(clients=ClientsSpec(leaving=leaving))
    done, _ = played(scenario(requests=3), stalls, manner)
    for one in done.measured:
        record = one.record
        assert (record.outcome, record.reason) == ("aborted", "client_disconnect")
        assert record.output_tokens == 1
        assert (record.finish_ps - record.arrival_ps) / PS == pytest.approx(0.2, abs=0.15)


def test_a_stop_keeps_what_had_come_of_open_requests():
    async def stalls(stream):
        await stream.token()
        await stream.token()
        await asyncio.sleep(30)

    done, _ = played(scenario(requests=2), stalls, stop_after_s=0.5)
    for one in done.measured:
        record = one.record
        assert (record.outcome, record.reason, one.status) == ("unfinished", "end_of_run", 200)
        assert record.output_tokens == 2
        assert record.finish_ps is None
        assert record.arrival_ps <= one.sent_ps < record.first_token_ps < PS


def test_a_request_without_end_is_given_up():
    async def stalls(stream):
        await stream.token()
        await asyncio.sleep(30)

    done, _ = played(scenario(requests=1), stalls, Manner(timeout_s=0.3))
    record = done.measured[0].record
    assert (record.outcome, record.reason) == ("aborted", "no end in 0.3 s")


def test_any_server_takes_plain_requests():
    from tests.fake_server import tokens

    manner = Manner(exact_lengths=False, extensions=False, hints=False)
    loaded = scenario(requests=2, max_tokens=5, sessions={"turns": 2, "think_time": 0})
    _, bodies = played(loaded, tokens(), manner)
    assert bodies
    for body in bodies:
        assert set(body) == {
            "model",
            "prompt",
            "max_tokens",
            "temperature",
            "stream",
            "stream_options",
        }
        assert body["stream_options"] == {"include_usage": True}


def test_what_is_told_first():
    done, _ = run_against(answer(401, b"who are you?"))
    assert error_line(done.measured) == "2 of 2 requests that failed were told: who are you?"
    done, _ = run_against(
        HEAD + GOOD + DONE, loaded=scenario(prompt_tokens={"fixed": 10}, requests=2)
    )
    assert error_line(done.measured) is None
    assert words_line(done.measured) == (
        "prompts of words had 20.0 tokens on average, 10.0 were planned"
    )
    assert [one.planned for one in without_prompts(done.measured)] == [(20, 5), (20, 5)]
