"""What other load generators measured, as records of the simulator.

Read are the results of `vllm bench serve --save-detailed` (vLLM 0.32), of guidellm (0.8, JSON) and of aiperf (0.13,
profile_export.jsonl). None of them writes tiers; all requests are ONLINE. A time that is before another which it
follows, a number that is none and a count that is not whole are refused, not taken as measured.
"""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from real.measured import Measured, shifted
from twin.clock import PS
from twin.errors import InputError
from twin.metrics.records import RequestRecord

TIER = "ONLINE"
LONGEST_S = 100 * 86_400.0
"""No run is longer; instants are kept in 64 bits of picoseconds."""
MOST_TOKENS = 10_000_000
"""No prompt or reply is longer."""
ROUNDING_S = 0.001
"""An end may be stated this much before what it follows."""
EMPTY_PIECES = 2
"""Pieces of a chat without a token: its role at the beginning and why it stopped at the end."""


class ToolRun(NamedTuple):
    """One run of a load generator. A sweep has several."""

    measured: list[Measured]
    """In order of arrival, the first at 0."""
    unsent: int
    """Requests that were given up before they were sent: nothing was measured of them."""


class _Odd(ValueError):
    """A value that cannot have been measured."""


def read_results(path: Path) -> tuple[str, list[ToolRun]]:
    """(tool, its runs). Raises InputError for a file that is none of the three, or in which nothing was measured."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text in UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    tool, made = _recognised(path, text)
    runs = []
    try:
        for rows in made:
            found = list(rows)
            measured = [one for one in found if one is not None]
            runs.append(ToolRun(_in_order(measured), len(found) - len(measured)))
    except _Odd as error:
        raise InputError(f"{path}: {error}") from None
    except InputError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path}: looks like a result of {tool}, but has another form: {type(error).__name__} {error}"
        ) from None
    if not any(run.measured for run in runs):
        raise InputError(f"{path}: there is no request in this result of {tool}")
    return tool, runs


def _in_order(measured: Sequence[Measured]) -> list[Measured]:
    ordered = sorted(shifted(measured), key=lambda one: one.record.arrival_ps)
    for one in ordered:
        last_ps = max(one.record.arrival_ps, one.record.finish_ps or 0)
        if last_ps > LONGEST_S * PS:
            raise _Odd(
                f"request {one.record.index} ends {last_ps / PS:.6g} s after the first one was due; at most "
                f"{LONGEST_S:,.0f} s (100 days) can be. Are all times of one clock, in seconds?"
            )
    for index, one in enumerate(ordered):
        one.record.index = index
    return ordered


Rows = Iterator[Measured | None]
"""None = a request that was never sent."""


def _recognised(path: Path, text: str) -> tuple[str, list[Rows]]:
    first: Any = None
    try:
        whole: Any = json.loads(text)
    except RecursionError:
        raise InputError(f"{path}: JSON that is nested too deep for a result") from None
    except ValueError:
        whole = None
        try:
            first = json.loads(text.lstrip().partition("\n")[0])
        except (ValueError, RecursionError):
            raise InputError(
                f"{path}: neither JSON nor JSON lines; give a result of vllm bench serve, guidellm or aiperf"
            ) from None
    if isinstance(whole, dict) and "input_lens" in whole and "output_lens" in whole:
        for key in ("ttfts", "itls", "start_times"):
            if key not in whole:
                raise InputError(
                    f"{path}: a result of vllm bench serve without {key}; run it with --save-detailed"
                )
        return "vllm bench serve", [_vllm(whole)]
    if isinstance(whole, dict) and isinstance(whole.get("benchmarks"), list):
        return "guidellm", [_guidellm(benchmark) for benchmark in whole["benchmarks"]]
    row = whole if first is None else first
    about = row.get("metadata") if isinstance(row, dict) else None
    if isinstance(about, dict) and "request_start_ns" in about:
        return "aiperf", [_aiperf(path, text)]
    raise InputError(
        f"{path}: is no result of vllm bench serve, guidellm (JSON) or aiperf (profile_export.jsonl)"
    )


def _vllm(result: Mapping[str, Any]) -> Rows:
    lists = _lists_of(result)
    # The first piece of a chat is its role, which `ttfts` and `itls` count like a token.
    is_chat = str(result.get("backend") or result.get("endpoint_type") or "").endswith("-chat")
    for i in range(len(lists["input_lens"])):
        place = f"request {i}"
        sent = _number(lists["start_times"][i], f"{place}: start_times")
        wait_s = _span(lists["queue_times"][i] or 0.0, f"{place}: queue_times")
        pieces = lists["itls"][i]
        if not isinstance(pieces, list):
            raise _Odd(f"{place}: itls: {pieces!r:.60}: must be a list of seconds, [] for none")
        gaps = [_span(gap, f"{place}: itls") for gap in pieces]
        tokens = _count(lists["output_lens"][i], f"{place}: output_lens")
        error = _text(lists["errors"][i])
        is_done = not error and tokens > 0
        ttft = _span(lists["ttfts"][i], f"{place}: ttfts") if is_done else None
        streamed_s = (ttft or 0.0) + sum(gaps)
        latency = lists["latencies"][i]
        latency = streamed_s if latency is None else _span(latency, f"{place}: latencies")
        if ttft is not None:
            _follows(latency, ttft, f"{place}: latencies", "ttfts")
            _follows(latency, streamed_s, f"{place}: latencies", "ttfts and all itls")
            gaps = _gaps_of(gaps, tokens, EMPTY_PIECES if is_chat else 0, place)
        yield _measured(
            i, sent - wait_s, sent, ttft, gaps, latency,
            _count(lists["input_lens"][i], f"{place}: input_lens"), tokens,
            "" if is_done else error or "no tokens",
        )  # fmt: skip


def _lists_of(result: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The lists of `vllm bench serve`, all with a value for each request."""
    lists: dict[str, list[Any]] = {}
    for key in ("input_lens", "output_lens", "start_times", "ttfts", "itls"):
        lists[key] = result[key]
    count = len(lists["input_lens"]) if isinstance(lists["input_lens"], list) else 0
    for key, absent in (("errors", ""), ("queue_times", 0.0), ("latencies", None)):
        lists[key] = result.get(key) or [absent] * count
    for key, values in lists.items():
        if not isinstance(values, list):
            raise _Odd(f"{key}: {values!r:.60}: must be a list with a value for each request")
        if len(values) != count:
            raise _Odd(
                f"request {min(count, len(values))}: {key}: there are {len(values):,} values, but {count:,} of "
                "input_lens; give a file with one of each for each request, as the tool wrote it"
            )
    return lists


def _gaps_of(gaps: Sequence[float], tokens: int, most_empty: int, place: str) -> list[float]:
    """A gap for each token but the first: what came in one piece came at once."""
    wanted = tokens - 1
    surplus = len(gaps) - wanted
    if surplus > most_empty:
        allowed = f" and {most_empty} of pieces without a token" if most_empty else ""
        raise _Odd(
            f"{place}: itls: there are {len(gaps):,} gaps, but output_lens is {tokens:,}: at most {wanted:,} between "
            f"its tokens{allowed}; give a file whose output_lens counts every token that came"
        )
    if surplus > 0:
        return [sum(gaps[:2]), *gaps[2:]][:wanted]
    return [*gaps, *[0.0] * -surplus]


def _guidellm(benchmark: Mapping[str, Any]) -> Rows:
    index = 0
    for state in ("successful", "errored", "incomplete"):
        for row in benchmark["requests"].get(state) or ():
            times = row["info"]["timings"]
            place, index = f"{state} request {index}", index + 1
            sent = _first(times, ("request_start", "resolve_start"), place)
            if sent is None and state == "incomplete":
                yield None
                continue
            end = _first(times, ("request_end", "resolve_end"), place)
            if sent is None or end is None:
                raise _Odd(f"{place}: timings: when it began and ended is not said")
            due = _first(times, ("targeted_start",), place)
            first = _first(times, ("first_token_iteration",), place)
            last = _first(times, ("last_token_iteration",), place)
            prompt = _tokens_of(row["input_metrics"], f"{place}: input_metrics")
            output = _tokens_of(row["output_metrics"], f"{place}: output_metrics")
            gaps: list[float] = []
            if first is not None and last is not None:
                span_s = _span(last - first, f"{place}: from the first token to the last")
                if output > 1:
                    gaps = [span_s / (output - 1)] * (output - 1)
            error = "" if state == "successful" else _text(row["info"].get("error")) or state
            ttft = None
            if first is not None:
                ttft = _span(first - sent, f"{place}: from the start to the first token")
            latency = _span(end - sent, f"{place}: from the start to the end")
            ended = "resolve_end" if times.get("request_end") is None else "request_end"
            for token, what in ((first, "first"), (last, "last")):
                if token is not None:
                    _follows(latency, token - sent, f"{place}: {ended}", f"{what}_token_iteration")
            yield _measured(
                index - 1, sent if due is None else min(due, sent), sent, ttft, gaps, latency, prompt, output, error,
            )  # fmt: skip


def _first(times: Mapping[str, Any], names: Sequence[str], place: str) -> float | None:
    """The first of these instants that is said; 0 is an instant."""
    for name in names:
        if times.get(name) is not None:
            return _number(times[name], f"{place}: {name}")
    return None


def _tokens_of(metrics: Mapping[str, Any] | None, place: str) -> int:
    for key in ("text_tokens", "total_tokens", "tokens"):
        if metrics and metrics.get(key) is not None:
            return _count(metrics[key], f"{place}: {key}")
    return 0


def _aiperf(path: Path, text: str) -> Rows:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{path}:{number}: not JSON") from None
        place = f"line {number}"
        about, metrics = row["metadata"], row.get("metrics") or {}
        sent = _number(about["request_start_ns"], f"{place}: request_start_ns")
        end = _number(about["request_end_ns"], f"{place}: request_end_ns")
        due = about.get("credit_issued_ns")
        due = sent if due is None else min(_number(due, f"{place}: credit_issued_ns"), sent)
        prompt, output = (
            _count(
                _metric(metrics, f"{which}_sequence_length", _COUNTED, place) or 0,
                f"{place}: {which}",
            )
            for which in ("input", "output")
        )
        ttft = _metric(metrics, "time_to_first_token", _UNITS, place)
        itl = _metric(metrics, "inter_token_latency", _UNITS, place)
        gaps = [itl] * (output - 1) if itl is not None and output > 1 else []
        latency = _span((end - sent) / 1e9, f"{place}: from request_start_ns to request_end_ns")
        stated = _metric(metrics, "request_latency", _UNITS, place)
        if ttft is not None:
            for end_s, what in ((latency, "request_end_ns"), (stated, "request_latency")):
                if end_s is not None:
                    _follows(end_s, ttft, f"{place}: {what}", "time_to_first_token")
                    _follows(end_s, ttft + sum(gaps), f"{place}: {what}", "the last token")
        problem = row.get("error") or ("cancelled" if about.get("was_cancelled") else None)
        if isinstance(problem, dict):
            problem = problem.get("message") or problem
        yield _measured(
            number - 1, due / 1e9, sent / 1e9, ttft, gaps, latency,
            prompt, output, _text(problem), session=_text(about.get("conversation_id")) or None,
        )  # fmt: skip


_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
_COUNTED = {"tokens": 1.0}


def _metric(
    metrics: Mapping[str, Any], name: str, units: Mapping[str, float], place: str
) -> float | None:
    found = metrics.get(name)
    if found is None:
        return None
    unit = found.get("unit")
    if not isinstance(unit, str) or unit not in units:
        raise _Odd(f"{place}: {name}: unit: {unit!r:.60}: must be one of {', '.join(units)}")
    return _span(found["value"], f"{place}: {name}") * units[unit]


def _follows(end_s: float, before_s: float, place: str, what: str) -> None:
    """Refuse an end that is before what it follows, both in seconds after the request was sent."""
    if end_s < before_s - ROUNDING_S:
        raise _Odd(
            f"{place}: {end_s:.6g} s after the request was sent: must not be before {what}, {before_s:.6g} s after "
            "it; are both of one clock and unit?"
        )


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Odd(f"{place}: {value!r:.60}: must be a finite number")
    return value


def _span(value: Any, place: str) -> float:
    seconds = _number(value, place)
    if seconds < 0:
        raise _Odd(f"{place}: {seconds:g}: must be 0 or more")
    return seconds


def _count(value: Any, place: str) -> int:
    number = _span(value, place)
    if number != int(number) or number > MOST_TOKENS:
        raise _Odd(f"{place}: {number:g}: must be a whole number up to {MOST_TOKENS:,}")
    return int(number)


def _text(value: Any) -> str:
    """What a tool says of a failure, whatever form it has."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _measured(
    index: int,
    due_s: float,
    sent_s: float,
    ttft_s: float | None,
    gaps_s: Sequence[float],
    latency_s: float,
    prompt_tokens: int,
    output_tokens: int,
    error: str,
    session: str | None = None,
) -> Measured:
    for what, seconds in (("time to first token", ttft_s or 0.0), ("reply", sum(gaps_s))):
        if seconds > LONGEST_S:
            raise _Odd(f"request {index}: {what}: {seconds:g} s; at most {LONGEST_S:,.0f} s can be")
    sent_ps = round(sent_s * PS)
    first_ps = None if ttft_s is None else sent_ps + round(ttft_s * PS)
    gaps = array("q", [round(gap * PS) for gap in gaps_s])
    finish_ps = sent_ps + round(latency_s * PS)
    if not error and first_ps is not None and gaps:
        finish_ps = first_ps + sum(gaps)
    record = RequestRecord(
        index, TIER, "default", session, 0, 0, round(due_s * PS), None, first_ps, finish_ps,
        prompt_tokens, output_tokens, "aborted" if error else "completed", "error" if error else "length",
        itl_ps=gaps if first_ps is not None else array("q"),
    )  # fmt: skip
    return Measured(record, sent_ps, status=0 if error else 200, error=error[:500])
