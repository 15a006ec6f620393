"""What other load generators measured, as records of the simulator.

Read are the results of `vllm bench serve --save-detailed` (vLLM 0.32), of guidellm (0.8, JSON) and of aiperf (0.13,
profile_export.jsonl). None of them writes tiers; all requests are ONLINE.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from real.measured import Measured, shifted
from twin.clock import PS
from twin.errors import InputError
from twin.metrics.records import RequestRecord

TIER = "ONLINE"


def read_results(path: Path) -> tuple[str, list[Measured]]:
    """(tool, requests in order of arrival, the first at 0). Raises InputError for a file that is none of the three."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text in UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    tool, rows = _recognised(path, text)
    try:
        found = list(rows)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InputError(
            f"{path}: looks like a result of {tool}, but has another form: {type(error).__name__} {error}"
        ) from None
    if not found:
        raise InputError(f"{path}: there is no request in this result of {tool}")
    ordered = sorted(shifted(found), key=lambda one: one.record.arrival_ps)
    for index, one in enumerate(ordered):
        one.record.index = index
    return tool, ordered


def _recognised(path: Path, text: str) -> tuple[str, Iterator[Measured]]:
    first: Any = None
    try:
        whole: Any = json.loads(text)
    except ValueError:
        whole = None
        try:
            first = json.loads(text.lstrip().partition("\n")[0])
        except ValueError:
            raise InputError(
                f"{path}: neither JSON nor JSON lines; give a result of vllm bench serve, guidellm or aiperf"
            ) from None
    if isinstance(whole, dict) and "input_lens" in whole and "output_lens" in whole:
        for key in ("ttfts", "itls", "start_times"):
            if key not in whole:
                raise InputError(
                    f"{path}: a result of vllm bench serve without {key}; run it with --save-detailed"
                )
        return "vllm bench serve", _vllm(whole)
    if isinstance(whole, dict) and isinstance(whole.get("benchmarks"), list):
        return "guidellm", _guidellm(whole["benchmarks"])
    row = whole if first is None else first
    if isinstance(row, dict) and "request_start_ns" in (row.get("metadata") or {}):
        return "aiperf", _aiperf(path, text)
    raise InputError(
        f"{path}: is no result of vllm bench serve, guidellm (JSON) or aiperf (profile_export.jsonl)"
    )


def _vllm(result: Mapping[str, Any]) -> Iterator[Measured]:
    count = len(result["input_lens"])
    errors = result.get("errors") or [""] * count
    queued = result.get("queue_times") or [0.0] * count
    latencies = result.get("latencies") or [None] * count
    for i in range(count):
        sent, gaps, error = result["start_times"][i], result["itls"][i], errors[i] or ""
        tokens = result["output_lens"][i]
        is_done = not error and tokens > 0
        ttft = result["ttfts"][i] if is_done else None
        latency = latencies[i]
        if latency is None:
            latency = (ttft or 0.0) + sum(gaps)
        yield _measured(
            i, sent - (queued[i] or 0.0), sent, ttft, _evened(gaps, tokens), latency,
            result["input_lens"][i], tokens, "" if is_done else error or "no tokens",
        )  # fmt: skip


def _guidellm(benchmarks: Sequence[Mapping[str, Any]]) -> Iterator[Measured]:
    index = 0
    for benchmark in benchmarks:
        for state in ("successful", "errored", "incomplete"):
            for row in benchmark["requests"].get(state) or ():
                times = row["info"]["timings"]
                sent = times.get("request_start") or times["resolve_start"]
                due = times.get("targeted_start")
                first = times.get("first_token_iteration")
                last = times.get("last_token_iteration")
                end = times.get("request_end") or times["resolve_end"]
                prompt = _tokens_of(row["input_metrics"])
                output = _tokens_of(row["output_metrics"])
                gaps: list[float] = []
                if first is not None and last is not None and output > 1:
                    gaps = [(last - first) / (output - 1)] * (output - 1)
                error = "" if state == "successful" else str(row["info"].get("error") or state)
                ttft = None if first is None else first - sent
                yield _measured(
                    index, sent if due is None else min(due, sent), sent, ttft, gaps, end - sent,
                    prompt, output, error,
                )  # fmt: skip
                index += 1


def _tokens_of(metrics: Mapping[str, Any] | None) -> int:
    for key in ("text_tokens", "total_tokens", "tokens"):
        if metrics and metrics.get(key) is not None:
            return int(metrics[key])
    return 0


def _aiperf(path: Path, text: str) -> Iterator[Measured]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise InputError(f"{path}:{number}: not JSON") from None
        about, metrics = row["metadata"], row.get("metrics") or {}
        sent, due = about["request_start_ns"], about.get("credit_issued_ns")
        end = about["request_end_ns"]
        output = int(_metric(metrics, "output_sequence_length") or 0)
        ttft, itl = _metric(metrics, "time_to_first_token"), _metric(metrics, "inter_token_latency")
        gaps = [itl] * (output - 1) if itl is not None and output > 1 else []
        problem = row.get("error") or ("cancelled" if about.get("was_cancelled") else None)
        error = problem.get("message") or str(problem) if isinstance(problem, dict) else problem
        yield _measured(
            number - 1, (sent if due is None else min(due, sent)) / 1e9, sent / 1e9, ttft, gaps,
            (end - sent) / 1e9, int(_metric(metrics, "input_sequence_length") or 0), output,
            error or "", session=about.get("conversation_id") or None,
        )  # fmt: skip


_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}


def _metric(metrics: Mapping[str, Any], name: str) -> float | None:
    found = metrics.get(name)
    if found is None:
        return None
    return float(found["value"]) * _UNITS.get(found.get("unit", ""), 1.0)


def _evened(gaps: Iterable[float], tokens: int) -> list[float]:
    """A gap for each token but the first: what came in one piece came at once."""
    listed = list(gaps)
    missing = tokens - 1 - len(listed)
    return listed + [0.0] * missing if missing > 0 else listed[: max(0, tokens - 1)]


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
