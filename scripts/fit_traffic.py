#!/usr/bin/env python3
"""Fit the packaged presets of traffic on published traces.

A preset holds our own numbers, no row of a trace: quantiles of lengths and gaps within 2 %, a rate by 5 minutes, one
correlation. Beside them stand the same figures of the trace and of requests made from the preset.

    TWIN_DATA=FOLDER python scripts/fit_traffic.py [--output twin/workload/data]

The same traces give the same bytes.
"""

import argparse
import csv
import gzip
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import pi, sin, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from twin.clock import PS
from twin.scenario_streams import part_of
from twin.workload.arrivals import Renewal
from twin.workload.figures import figures
from twin.workload.formats.choose import format_of, read_trace
from twin.workload.formats.rows import TraceRow
from twin.workload.prefixes import InfiniteCache
from twin.workload.presets import Preset, parse_preset
from twin.workload.quantiles import inverse_cdf, moments
from twin.workload.request import Request
from twin.workload.streams import Traffic, open_streams

TOLERANCE = 0.02
"""How far a line may lie from the quantiles it stands for, relative to them."""

TAIL_TOLERANCE = 0.1

RATE_STEP_S = 300
SAMPLE = 40_000
"""Requests made from a preset to see how well it fits."""

Points = list[list[float]]


class Trace(NamedTuple):
    """What a fit needs of a trace."""

    times: list[int]
    """Picoseconds."""
    prompts: list[int]
    outputs: list[int]


# --- from values to straight lines ------------------------------------------------------------


def simplified(vertices: Sequence[tuple[float, float]], slack: Callable[[float], float]) -> Points:
    """Few of the vertices of a rising line, such that straight lines between them pass all others within the slack.

    Beyond the probability 0.99, where single requests stand, the slack is that of TAIL_TOLERANCE.
    """
    kept = [0]
    start = 0
    while start < len(vertices) - 1:
        p0, v0 = vertices[start]
        low, high = -float("inf"), float("inf")
        best = start + 1
        for i in range(start + 1, len(vertices)):
            p, v = vertices[i]
            room = slack(v) * (TAIL_TOLERANCE / TOLERANCE if p0 >= 0.99 else 1)
            if p == p0:
                if abs(v - v0) > room:
                    break
                best = i
                continue
            slope = (v - v0) / (p - p0)
            if low <= slope <= high:
                best = i
            low = max(low, (v - room - v0) / (p - p0))
            high = min(high, (v + room - v0) / (p - p0))
            if low > high:
                break
        kept.append(best)
        start = best
    return [[round(vertices[i][0], 6), float(f"{vertices[i][1]:.6g}")] for i in kept]


def length_points(values: Iterable[int]) -> Points:
    """Quantiles of whole numbers: values at halves, so that rounding a point between gives the number it stands for."""
    counts = Counter(values)
    n = counts.total()
    often = max(3, n / 500) if n > 100 else 1
    vertices, reached = [(0.0, min(counts) - 0.5)], 0
    for value in sorted(counts):
        if (
            counts[value] >= often
        ):  # by itself; a rare value stands for those down to the one before
            vertices.append((reached / n, value - 0.5))
        reached += counts[value]
        vertices.append((reached / n, value + 0.5))
    return simplified(vertices, lambda value: max(0.25, TOLERANCE * value))


def gap_points(gaps: Sequence[float]) -> Points:
    """Quantiles of gaps over their mean."""
    mean = sum(gaps) / len(gaps)
    ordered = sorted(gap / mean for gap in gaps)
    vertices = [((i + 0.5) / len(ordered), gap) for i, gap in enumerate(ordered)]
    vertices = [(0.0, ordered[0]), *vertices, (1.0, ordered[-1])]
    return simplified(vertices, lambda gap: max(0.002, TOLERANCE * gap))


def rate_steps(times: Sequence[int], seconds: int) -> dict[str, Any]:
    """Requests per second by steps of so many seconds; what is left at the end joins the last step."""
    step = seconds * PS
    steps = max(1, times[-1] // step)
    counts = Counter(min(t // step, steps - 1) for t in times)
    length = dict.fromkeys(range(steps), step) | {steps - 1: times[-1] - (steps - 1) * step}
    rates = [[i * seconds, round(counts[i] * PS / length[i], 4)] for i in range(steps)]
    return {"steps": rates, "repeat": round(times[-1] / PS, 3)}


def stretched_cv(rate: dict[str, Any], cv: float) -> float:
    """The CV that gaps at rate 1 need so that under these steps they have `cv`.

    In a step of rate r and share w of the time there are w r of the arrivals, with E gap = 1 / r and
    E gap**2 = (1 + c**2) / r**2; so (1 + cv**2) = (1 + c**2) E[r] E[1 / r], E over time.
    """
    steps, end = rate["steps"], rate["repeat"]
    marks = [t for t, _ in steps] + [end]
    widths = [b - a for a, b in pairwise(marks)]
    mean = sum(w * r for w, (_, r) in zip(widths, steps, strict=True)) / end
    slow = sum(w / r for w, (_, r) in zip(widths, steps, strict=True)) / end
    return sqrt((1 + cv**2) / (mean * slow) - 1)


def copula(a: Sequence[int], b: Sequence[int]) -> float:
    """The correlation of a Gaussian copula with Spearman's rank correlation of two columns."""
    ranks = [_ranks(column) for column in (a, b)]
    means = [sum(column) / len(column) for column in ranks]
    moved = [[x - mean for x in column] for column, mean in zip(ranks, means, strict=True)]
    spreads = [sqrt(sum(x * x for x in column)) for column in moved]
    spearman = sum(x * y for x, y in zip(*moved, strict=True)) / (spreads[0] * spreads[1])
    return round(2 * sin(pi * spearman / 6), 3)


def _ranks(column: Sequence[int]) -> list[float]:
    counts = Counter(column)
    rank, reached = {}, 0
    for value in sorted(counts):
        rank[value] = reached + (counts[value] - 1) / 2
        reached += counts[value]
    return [rank[value] for value in column]


def shares(preset_rows: Iterable[TraceRow]) -> tuple[list[tuple[float, int]], list[int]]:
    """Of each row: (share of the prompt that begins an earlier one, prompt tokens); and how many rows back that was."""
    seen: dict[int, int] = {}
    found, distances = [], []
    for number, row in enumerate(preset_rows):
        shared, back = 0, 0
        assert row.prompt is not None
        for content, tokens in row.prompt:
            if content not in seen:
                break
            shared, back = shared + tokens, number - seen[content]
        for content, _ in row.prompt:
            seen[content] = number
        found.append((shared / row.prompt_tokens, row.prompt_tokens))
        if back:
            distances.append(back)
    return found, distances


def share_points(found: Sequence[tuple[float, int]]) -> Points:
    """Quantiles of the shares, each weighted by its prompt's tokens, so that their mean is the share of all tokens."""
    total = sum(tokens for _, tokens in found)
    vertices, reached = [(0.0, min(found)[0])], 0
    for share, tokens in sorted(found):
        reached += tokens
        vertices.append((reached / total, share))
    points = simplified(vertices, lambda share: max(0.003, TOLERANCE * share))
    return [[p, min(1.0, round(value, 4))] for p, value in points]


# --- traces -----------------------------------------------------------------------------------


def open_text(path: Path) -> Iterator[str]:
    """Lines of a file, plain or packed."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        yield from file


def rows_in(path: Path) -> list[TraceRow]:
    """All rows of a trace."""
    return list(read_trace(str(path), format_of(str(path)).format))


def trace_of(rows: Sequence[TraceRow]) -> Trace:
    """Columns of a trace."""
    return Trace(
        [row.at_ps - rows[0].at_ps for row in rows],
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
    )


def measured(trace: Trace) -> dict[str, Any]:
    """The figures of a trace."""
    zipped = zip(trace.times, trace.prompts, trace.outputs, strict=True)
    return figures(Request(0, t, (), p, o, None, 0) for t, p, o in zipped)


def lengths_of(trace: Trace) -> dict[str, Any]:
    """The part of a stream that says how long requests are."""
    return {
        "prompt_tokens": {"quantiles": length_points(trace.prompts)},
        "output_tokens": {"quantiles": length_points(trace.outputs)},
        "length_correlation": copula(trace.prompts, trace.outputs),
    }


def azure(data: Path, kind: str, title: str) -> dict[str, Any]:
    trace = trace_of(rows_in(data / f"traces/azure2023_{kind}.csv"))
    found = measured(trace)
    if kind == "code":
        gaps = [b - a for a, b in pairwise(trace.times)]
        arrivals: dict[str, Any] = {
            "process": "gaps",
            "rate": round(found["rate"], 4),
            "gaps": gap_points(gaps),
        }
        note = (
            "Gaps are as measured: most requests come in clumps with pauses of up to "
            f"{max(gaps) / PS:.0f} s between. With independent gaps the counts by 10 s and by 60 s spread nearly as in "
            "the trace."
        )
    else:
        rate = rate_steps(trace.times, RATE_STEP_S)
        cv = round(stretched_cv(rate, found["cv"]), 3)
        arrivals = {"process": "gamma", "rate": rate, "cv": cv}
        note = "The rate follows the recorded hour in steps of 5 minutes and repeats it; steady: true leaves it level."
    return {
        "name": f"azure-2023-{kind}",
        "title": title,
        "source": "Azure/AzurePublicDataset, commit b469a113, data/AzureLLMInferenceTrace_"
        f"{kind}.csv; P. Patel et al., Splitwise, ISCA 2024",
        "licence": "CC-BY-4.0",
        "rows": len(trace.times),
        "notes": [note, "The trace says nothing of prefixes: no prompt shares one."],
        "streams": [{"arrivals": arrivals, **lengths_of(trace)}],
        "trace": found,
    }


def mooncake(data: Path, kind: str, title: str, memory: int) -> dict[str, Any]:
    rows = rows_in(data / f"traces/mooncake_{kind}.jsonl.gz")
    trace = trace_of(rows)
    found = measured(trace)
    cache = InfiniteCache()
    for row in rows:
        cache.add(row)
    hits = found["attainable_hits"] = cache.hit_tokens() / cache.prompt_tokens
    reused, distances = shares(rows)
    if kind == "conversation":
        arrivals: dict[str, Any] = {
            "process": "poisson",
            "rate": rate_steps(trace.times, RATE_STEP_S),
            "tick": 3.0,
        }
        notes = [
            "Stamps of the trace are whole multiples of 3 s, about 10 requests at each, and so are those of the "
            "preset; that is where the CV comes from. ticks: false makes it a Poisson process.",
        ]
    else:
        cv = round(found["cv"], 3)
        arrivals = {"process": "gamma", "rate": round(found["rate"], 4), "cv": cv}
        notes = []
    notes.append(
        "A prompt repeats the beginning of an earlier one as often, and as much of it, as in the trace (by tokens); "
        f"which one is drawn from the last {memory}; in the trace 90 % lie within "
        f"{sorted(distances)[len(distances) * 9 // 10]} requests."
    )
    stream = {"arrivals": arrivals, **lengths_of(trace), "reuse": {}}
    scale = 1.0
    for _ in range(4):
        scaled = [(min(1.0, share * scale), tokens) for share, tokens in reused]
        stream["reuse"] = {"share": share_points(scaled), "memory": memory}
        scale *= hits / attainable(played(replace(part_of(stream), requests=len(rows))))
    return {
        "name": f"mooncake-{kind}",
        "title": title,
        "source": f"kvcache-ai/Mooncake, commit 3b5a5941, FAST25-release/traces/{kind}_trace.jsonl; R. Qin et al., "
        "Mooncake, FAST 2025",
        "licence": "Apache-2.0",
        "rows": len(rows),
        "notes": notes,
        "streams": [stream],
        "trace": found,
    }


def sharegpt(data: Path, kind: str, model: str) -> dict[str, Any]:
    path = {"llama31": "llama-3.1-8b", "qwen3": "qwen3-32b"}[kind]
    trace = trace_of(rows_in(data / f"traces/sharegpt300_{kind}_hashed.jsonl"))
    found = measured(trace)
    arrivals = {
        "process": "gamma",
        "rate": round(found["rate"], 4),
        "cv": round(found["cv"], 3),
    }
    return {
        "name": f"sharegpt-{kind}",
        "title": f"300 conversations of ShareGPT, first turns, in tokens of {model}",
        "source": f"casys-kaist/LLMServingSim, commit 5daddb21, workloads/sharegpt-{path}-300-sps10.jsonl",
        "licence": "MIT",
        "rows": len(trace.times),
        "notes": [
            "The set was chosen by its makers (replies of 512 tokens and more) and its times were made up at 10 a "
            "second.",
            "With 300 requests the p99 rests on three of them.",
        ],
        "streams": [{"arrivals": arrivals, **lengths_of(trace)}],
        "trace": found,
    }


def arxiv(data: Path) -> dict[str, Any]:
    table = csv.DictReader(open_text(data / "traces/arxiv_summarization_lengths.csv.gz"))
    pairs = [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in table]
    trace = Trace(list(range(len(pairs))), [p for p, _ in pairs], [o for _, o in pairs])
    return {
        "name": "arxiv-summarization",
        "title": "Summaries of arXiv papers: long prompts, short replies, at most 4,096 tokens together",
        "source": "microsoft/vidur, commit 7d475133, "
        "data/processed_traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        "licence": "MIT",
        "rows": len(pairs),
        "notes": [
            "Lengths only: say the rate; arrivals are Poisson.",
            "Prompt and reply are drawn with a rank correlation, so that a few add up to more than 4,096 tokens.",
        ],
        "streams": [{"arrivals": {"process": "poisson", "rate": 1.0}, **lengths_of(trace)}],
        "trace": measured(trace) | {"rate": None, "cv": None},
    }


def agentic(data: Path, benchmark: str, name: str, title: str) -> dict[str, Any]:
    sessions = defaultdict(list)
    for row in csv.DictReader(open_text(data / "traces/agentic_exgentic_lengths.csv")):
        # The first call of each session is a probe of 8 tokens.
        if row["benchmark"] == benchmark and row["role"] == "agent" and int(row["call_index"]):
            sessions[row["session"]].append(
                (int(row["prompt_tokens"]), int(row["completion_tokens"]))
            )
    calls = [pair for session in sessions.values() for pair in session]
    opening = min(session[0][0] for session in sessions.values()) - 1
    grown = [
        max(1, after[0] - sum(before))
        for session in sessions.values()
        for before, after in pairwise(session)
    ]
    outputs = {"quantiles": length_points(output for _, output in calls)}
    trace = Trace(list(range(len(calls))), [p for p, _ in calls], [o for _, o in calls])
    found = measured(trace)
    stream: dict[str, Any] = {
        "arrivals": {"process": "poisson", "rate": 1.0},
        "prompt_tokens": {
            "quantiles": length_points(session[0][0] - opening for session in sessions.values())
        },
        "output_tokens": outputs,
        "sessions": {
            "turns": 1,
            "system_prompt_tokens": opening,
            "tools": {
                "calls": {"quantiles": length_points(len(s) - 1 for s in sessions.values())},
                "time": {"lognormal": {"median": 1.0, "p95": 5.0}},
                "result_tokens": {"quantiles": length_points(grown)},
                "output_tokens": outputs,
            },
        },
    }
    scale = 1.0
    for _ in range(5):
        sizes = {"quantiles": length_points(max(1, round(tokens * scale)) for tokens in grown)}
        stream["sessions"]["tools"]["result_tokens"] = sizes
        made = [r.prompt_tokens for r in played(replace(part_of(stream), requests=SAMPLE // 2))]
        excess = sum(made) / len(made) - found["prompt_tokens"]["mean"]
        if abs(excess) < TOLERANCE * found["prompt_tokens"]["mean"]:
            break
        growth = (
            sum(grown) / len(grown) * (sum(map(len, sessions.values())) / len(sessions) - 1) / 2
        )
        scale -= excess / growth
    return {
        "name": name,
        "title": title,
        "source": "inference-sim/inference-sim, commit c3589467, traces/exgentic",
        "licence": "Apache-2.0",
        "rows": len(calls),
        "notes": [
            f"{len(sessions)} sessions of an agent; each call is a request whose prompt is all that came before and "
            "the tool's result. The rate counts sessions: say it.",
            "How long tools took is not in the source; a median of 1 s and 5 s at p95 are our assumption.",
            "Tokens that the next prompt has beyond the last prompt and reply count as the tool's result"
            + (
                "."
                if scale == 1
                else f", times {scale:.2f}: long results and many calls do not go together, and so the mean prompt "
                "comes out."
            ),
        ],
        "streams": [stream],
        "trace": found | {"rate": None, "cv": None},
    }


def servegen(data: Path, workload: str, name: str, title: str) -> dict[str, Any]:
    rates = [
        float(row["total_rate_rps"])
        for row in csv.DictReader(open_text(data / "traces/servegen_total_rate_10min.csv"))
        if row["workload"] == workload
    ]
    clients = {
        row["client_id"]: row
        for row in csv.DictReader(open_text(data / "traces/servegen_clients.csv"))
        if row["workload"] == workload
    }
    quantiles: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for row in csv.DictReader(open_text(data / "traces/servegen_length_quantiles.csv")):
        if row["workload"] == workload:
            quantiles[row["client_id"]][row["field"]] = row
    days = len(rates) // 144
    by_hour = [
        sum(rates[day * 144 + hour * 6 + i] for day in range(days) for i in range(6)) / (6 * days)
        for hour in range(24)
    ]
    mean = sum(by_hour) / 24
    total = sum(float(clients[client]["total_requests"]) for client in quantiles)
    everyone = sum(float(row["total_requests"]) for row in clients.values())
    streams, told = [], []
    for client, fields in quantiles.items():
        about = clients[client]
        share = float(about["total_requests"]) / total
        points = {kind: _servegen_points(fields[f"{kind}_tokens"]) for kind in ("input", "output")}
        arrivals = {
            "process": about["dominant_pattern"].lower(),
            "rate": {
                "steps": [[h * 3600, float(f"{r * share:.4g}")] for h, r in enumerate(by_hour)],
                "repeat": 86400,
            },
            "cv": round(float(about["median_cv"]), 3),
        }
        streams.append(
            {
                "arrivals": arrivals,
                "prompt_tokens": {"quantiles": points["input"]},
                "output_tokens": {"quantiles": points["output"]},
                "tenant": f"client-{client}",
            }
        )
        told.append(
            {
                "tenant": f"client-{client}",
                "share": round(share, 4),
                "cv": round(float(about["median_cv"]), 3),
                **{
                    key: {q: float(fields[field][q]) for q in ("mean", "p50", "p90", "p99")}
                    for key, field in (
                        ("prompt_tokens", "input_tokens"),
                        ("output_tokens", "output_tokens"),
                    )
                },
            }
        )
    return {
        "name": name,
        "title": title,
        "source": "alibaba/ServeGen, commit f891d118, data/ (rates by 10 minutes and quantiles of lengths by client "
        "taken from it)",
        "licence": "Apache-2.0",
        "rows": round(total),
        "notes": [
            f"The {len(streams)} largest of {len(clients)} clients, {100 * total / everyone:.0f} % of the requests, "
            "scaled to the rate of all; each is a tenant with its own burstiness and lengths.",
            f"The rate is that of the mean day of {days}, by hour; the rate of all clients changes together here.",
            "CV is the median over windows of 10 minutes, of a client's own gaps; the mix of all is nearer to Poisson.",
            "Lengths are curves between the published quantiles p5 to p99; the longest is set so that the mean comes "
            "out, within 1 to 4 times the p99.",
        ],
        "streams": streams,
        "trace": {"rate": round(mean, 4), "clients": told},
    }


def _servegen_points(row: dict[str, str]) -> Points:
    """Lines through the published quantiles; the longest length makes up what the mean lacks."""
    marks = (
        (0.05, "p5"),
        (0.25, "p25"),
        (0.5, "p50"),
        (0.75, "p75"),
        (0.9, "p90"),
        (0.95, "p95"),
        (0.99, "p99"),
    )
    points = [(p, float(row[key])) for p, key in marks]
    points = _curved([(0.0, max(1.0, round(points[0][1] / 2, 1))), *points])
    last = points[-1][1]
    below = sum((q - p) * (a + b) / 2 for (p, a), (q, b) in pairwise(points))
    longest = (float(row["mean"]) - below) / 0.005 - last
    points = [*points, (1.0, min(max(longest, last), 4 * last))]
    return [[round(p, 6), float(f"{value:.6g}")] for p, value in points]


def _curved(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """With points between those that are far apart, so that the lines follow an exponential."""
    found = [points[0]]
    for (p, a), (q, b) in pairwise(points):
        if b > 1.2 * a:
            found += [(p + (q - p) * i / 4, a * (b / a) ** (i / 4)) for i in (1, 2, 3)]
        found.append((q, b))
    return found


# --- how well ---------------------------------------------------------------------------------


def fit(preset: Preset) -> dict[str, Any]:
    """The figures of requests made from a preset, as far as they compare with those of its trace."""
    if "clients" in preset.trace:
        return {
            "rate": float(f"{mix_rate(preset):.5g}"),
            "clients": [_client(written) for written in preset.streams],
        }
    spec = part_of(preset.streams[0])
    # Whole traces, so that a rate that repeats is seen from its start to its end.
    spec = replace(spec, requests=-(-SAMPLE // preset.rows) * preset.rows)
    found = figures(sorted(played(spec), key=lambda r: r.arrival_ps))
    arrivals = preset.streams[0]["arrivals"]
    if preset.rate is None:
        found |= {"rate": None, "cv": None}
    elif "gaps" in arrivals:
        # Exactly, as a sample of rare long gaps says little of their spread.
        found |= {"rate": arrivals["rate"], "cv": moments(tuple(map(tuple, arrivals["gaps"])))[1]}
    if spec.reuse is not None:
        found["attainable_hits"] = attainable(played(replace(spec, requests=preset.rows)))
    return found


def attainable(requests: Iterable[Request]) -> float:
    """Share of the prompt tokens that a cache that forgets nothing would have."""
    cache = InfiniteCache()
    for r in requests:
        cache.add(TraceRow(0, r.arrival_ps, r.prompt_tokens, r.output_tokens, r.prompt))
    return cache.hit_tokens() / cache.prompt_tokens


def _client(written: Any) -> dict[str, Any]:
    """Exactly: what a client's distributions say of themselves."""
    part = part_of(written)
    assert isinstance(part.arrivals, Renewal)
    found: dict[str, Any] = {"tenant": written["tenant"], "cv": part.arrivals.gaps.cv}
    for key in ("prompt_tokens", "output_tokens"):
        points = tuple(map(tuple, written[key]["quantiles"]))
        at = inverse_cdf(points)
        found[key] = {"mean": moments(points)[0], "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}
    return found


def mix_rate(preset: Preset) -> float:
    """Requests per second of all parts."""
    parts = [part_of(written).arrivals for written in preset.streams]
    return sum(part.mean_rate for part in parts if isinstance(part, Renewal))


def played(spec: Any) -> Iterator[Request]:
    """The requests of a stream whose replies end at once."""
    traffic = Traffic(open_streams([spec], 1))
    while traffic.next_ps() is not None:
        request = traffic.pop().request
        yield request
        traffic.on_finish(Done(request))


class Done:
    """A request that has ended as it should, at once."""

    outcome = "completed"

    def __init__(self, request: Request) -> None:
        self.stream, self.session = request.stream, request.session
        self.finish_ps, self.output_tokens = request.arrival_ps, request.output_tokens


def rounded(value: Any) -> Any:
    """Floats of nested figures to 5 digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def to_text(data: dict[str, Any]) -> str:
    """JSON with the points of a table on as few lines as 100 columns allow."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+(-?[\d.e+-]+),\s+(-?[\d.e+-]+)\s+\]", r"[\1, \2]", text)

    def filled(match: re.Match[str]) -> str:
        indent, pairs = match[1], re.findall(r"\[[^\[\]]+\]", match[2])
        lines, line = [], indent
        for i, pair in enumerate(pairs):
            piece = pair + ("," if i + 1 < len(pairs) else "")
            if len(line) + len(piece) + 1 > 100 and line != indent:
                lines.append(line.rstrip())
                line = indent
            line += piece + " "
        return "[\n" + "\n".join([*lines, line.rstrip()]) + match[3]

    return re.sub(r"\[\n( +)((?:\[[^\[\]]+\],?\s*)+)(\n *\])", filled, text) + "\n"


def presets(data: Path) -> Iterator[dict[str, Any]]:
    """All of them, without the fit."""
    yield azure(data, "conv", "Conversations on Azure, one hour of 16 November 2023")
    yield azure(data, "code", "Code completion on Azure, one hour of 16 November 2023")
    yield mooncake(data, "conversation", "Conversations of Kimi, one hour", 1200)
    yield mooncake(
        data, "synthetic", "Long documents and tool use made up by Mooncake, 17 minutes", 400
    )
    yield sharegpt(data, "llama31", "Llama 3.1")
    yield sharegpt(data, "qwen3", "Qwen 3")
    yield arxiv(data)
    yield agentic(
        data, "tau2_retail_10", "agentic-retail", "Agent of a shop with tools (tau2 retail)"
    )
    yield agentic(
        data,
        "appworld_test_normal_10",
        "agentic-appworld",
        "Agent with many apps, prompts of 90,000 tokens",
    )
    for workload, name, title in (
        (
            "language/m-large",
            "servegen-large",
            "Clients of a large language model, mean day of two weeks",
        ),
        (
            "language/m-mid",
            "servegen-mid",
            "Clients of a middle-sized language model, mean day of two weeks",
        ),
        (
            "language/m-small",
            "servegen-small",
            "Clients of a small language model, mean day of two weeks",
        ),
        ("reason/deepseek-r1", "servegen-reason", "Clients of DeepSeek-R1, one day"),
    ):
        yield servegen(data, workload, name, title)


def main() -> None:
    """Write one file a preset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("twin/workload/data"))
    output = parser.parse_args().output
    data = os.environ.get("TWIN_DATA")
    if data is None:
        sys.exit("the environment variable TWIN_DATA must name the folder of the traces")
    output.mkdir(parents=True, exist_ok=True)
    for made in presets(Path(data)):
        made["trace"] = rounded(made["trace"])
        made["fit"] = rounded(fit(parse_preset({**made, "fit": {}})))
        (output / f"{made['name']}.json").write_text(to_text(made), encoding="utf-8")


if __name__ == "__main__":
    main()
