"""The result of a run for people: tables on a terminal, at most 80 columns wide.

Everything shown comes from the summary that `twin.report.json_summary` makes, so the tables and
`--json` cannot differ.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from twin.metrics.records import OUTCOMES
from twin.report.scaling import fleet_lines
from twin.report.stress import gateway_lines
from twin.report.texts import LISTED, count, duration, limit, notes, plural, share, trust

WIDTH = 80
LATENCY_NAMES = {
    "ttft": "TTFT",
    "queue": "  queue",
    "prefill": "  prefill",
    "tpot": "TPOT",
    "e2e": "E2E",
}
"""Latencies as people call them; TTFT is the sum of the two parts under it."""

_GLUE = "\ue000"
"""Stands for a space at which no line may end: rich breaks lines at no-break spaces too."""


def render(summary: Mapping[str, Any], color: bool = False) -> str:
    """The whole report as text that ends in a newline; `color` adds terminal styles."""
    blocks: list[list[RenderableType]] = [
        _header(summary),
        [_requests(summary)],
        [_latencies(summary)],
        [_objectives(summary)],
        _policy(summary),
        list(fleet_lines(summary)),
        list(gateway_lines(summary)),
        _refused(summary),
        _warnings(summary),
        _engine(summary),
    ]
    return "\n".join(to_text(block, color) for block in blocks if block)


def render_advice(advice: Mapping[str, Any], color: bool = False) -> str:
    """Which single changes helped most, as text that ends in a newline."""
    parts: list[RenderableType] = [paragraph(advice["text"])]
    if advice["best"]:
        made = table("Single change", "this run", "with it", "good/s")
        made.columns[0].max_width = 36
        for row in advice["best"]:
            made.add_row(row["change"], row["before"], row["after"], row["goodput"])
        parts.append(made)
    return to_text(parts, color)


def to_text(parts: Sequence[RenderableType], color: bool = False) -> str:
    """`parts` one below the other, wrapped at WIDTH columns."""
    out = StringIO()
    console = Console(
        file=out, width=WIDTH, force_terminal=color, markup=False, highlight=False, emoji=False
    )
    for part in parts:
        console.print(part)
    lines = out.getvalue().replace(_GLUE, " ").splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def table(*columns: str) -> Table:
    """An empty table: the first column is text, the others are numbers."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, name in enumerate(columns):
        made.add_column(
            name, justify="right" if i else "left", overflow="fold", max_width=None if i else 14
        )
    return made


def _header(summary: Mapping[str, Any]) -> list[RenderableType]:
    gpus, replicas = summary["tensor_parallel_size"], summary["replicas"]
    where = f"{gpus} x {summary['gpu']}" if gpus > 1 else summary["gpu"]
    lines: list[RenderableType] = []
    if summary["interrupted"]:
        lines.append(Text("INTERRUPTED: the figures cover the run up to there.", "bold red"))
    lines += [
        Text.assemble(
            (summary["scenario"], "bold"),
            f": {summary['model']} on {where}, {plural(replicas, 'replica')}, "
            f"vLLM {summary['engine_version']}",
        ),
        Text(
            f"policy {summary['policy']} ({summary['policy_fingerprint']}), "
            f"seed {summary['seed']}, simulated {duration(summary['simulated_s'])}"
        ),
    ]
    lines.append(paragraph(summary["verdict"], "bold"))
    return lines + [paragraph(text) for text in notes(summary)]


def _requests(summary: Mapping[str, Any]) -> Table:
    made = table("Requests", "offered", *(outcome.replace("_", " ") for outcome in OUTCOMES))
    rows = dict(summary["tiers"])
    if len(rows) > 1:
        rows["all"] = summary["totals"]
    for name, tier in rows.items():
        cells = [count(tier[column]) for column in ("offered", *OUTCOMES)]
        made.add_row(name, *cells, end_section=False)
    return made


def _latencies(summary: Mapping[str, Any]) -> Table:
    """By tier and latency; means last, since they can fall while everybody waits longer."""
    made = table("Latency", "of", "samples", "p50", "p90", "p99", "mean")
    made.columns[1].justify = "left"
    for tier, figures in summary["tiers"].items():
        for i, (latency, name) in enumerate(LATENCY_NAMES.items()):
            of = figures[f"{latency}_s"]
            made.add_row(
                "" if i else tier,
                name,
                count(figures["samples"][latency]),
                *(duration(of[stat]) for stat in ("p50", "p90", "p99", "mean")),
            )
    return made


def _objectives(summary: Mapping[str, Any]) -> Table:
    made = table("Goodput", "good/s", "attained")
    made.add_column("objectives", overflow="fold")
    for name, tier in summary["tiers"].items():
        goodput = tier["goodput_rps"]
        judged = summary["objectives"].get(name, {})
        made.add_row(
            name,
            "-" if goodput is None else f"{goodput:.3g}",
            share(tier["attainment"]),
            Text("\n").join(_judged(objective, found) for objective, found in judged.items())
            if judged
            else Text("none: every completed one is good", "dim"),
        )
    return made


def _judged(objective: str, found: Mapping[str, Any]) -> Text:
    word, style = {
        True: ("met", "green"),
        False: ("MISSED", "bold red"),
        None: ("nothing to judge", "yellow"),
    }[found["met"]]
    sign = ">" if found["met"] is False and found["value_s"] is not None else "<="
    text = Text(f"{objective} {duration(found['value_s'])} {sign} {limit(found['limit_s'])} ")
    text.append(word, style)
    if found["without"]:
        text.append(f" ({count(found['without'])} ended without one)", "yellow")
    return text


def _refused(summary: Mapping[str, Any]) -> list[RenderableType]:
    refused = summary["totals"]["refused"]
    if not refused:
        return []
    lines = [f"{plural(refused, 'request')} refused:"]
    for row in summary["refused"][:LISTED]:
        place = f" ({row['place']})" if row["place"] else ""
        lines.append(
            f"  request {row['index']}{place}: {row['reason']}, "
            f"{plural(row['prompt_tokens'], 'prompt token')}"
        )
    if refused > LISTED:
        lines.append(f"  and {count(refused - LISTED)} more")
    return [Text("\n".join(lines))]


def _policy(summary: Mapping[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if summary["policy_stats"]:
        made = table(
            "Policy",
            "batches",
            "jobs each",
            "held",
            "promoted",
            "preempted",
            "out of KV",
            "estimate",
        )
        for tier, did in summary["policy_stats"].items():
            made.add_row(
                "all" if tier == "*" else tier,
                count(sum(did["releases"].values())),
                _mean(did["batch_size_mean"]),
                duration(did["batching_wait_mean_s"]),
                count(did["promotions"]),
                count(did["planned_preemptions"]),
                count(did["reactive_preemptions"]),
                _error(did["estimate_mae_tokens"]),
            )
        parts.append(made)
    return parts


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else count(value)


def _error(tokens: float | None) -> str:
    return "-" if tokens is None else f"+-{count(tokens)} tok"


def _engine(summary: Mapping[str, Any]) -> list[RenderableType]:
    engine, origin = summary["engine"], summary["step_time"]
    queried = engine["prefix_query_tokens"]
    hits = f"hits {share(engine['prefix_hit_tokens'] / queried)} of " if queried else ""
    made = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (
        ("Delivered", _delivered(summary["throughput"])),
        ("Engine", f"{plural(engine['steps'], 'step')}, busy {share(engine['busy_share'])}"),
        ("GPU time", ", ".join(f"{use} {share(x)}" for use, x in summary["gpu_time"].items())),
        (
            "KV",
            f"{share(engine['kv_usage_mean'])} used while busy, "
            f"{share(engine['kv_waste_mean'])} empty in last pages",
        ),
        ("Prefix", f"{hits}{plural(queried, 'prompt token')} looked up{_prefixes(summary)}"),
        ("Preempted", _preempted(summary)),
        ("Waits", _estimated(summary)),
        ("Step times", f"{origin['engine']}, {origin['source']}, {origin['date']}"),
        ("Trust", trust(summary)),
        ("Took", _speed(summary["wall_s"], summary["requests_per_wall_s"])),
    ):
        made.add_row(name, _glue(value))
    return [made]


def _delivered(throughput: Mapping[str, float | None]) -> str:
    requests, tokens = throughput["requests_per_s"], throughput["output_tokens_per_s"]
    if requests is None or tokens is None:
        return "-"
    return f"{requests:.3g} requests/s, {count(tokens)} output tokens/s"


def _preempted(summary: Mapping[str, Any]) -> str:
    engine, found = summary["engine"], summary["preemptions"]
    if not engine["preemptions"]:
        return "nobody"
    return (
        f"{count(found['preempted'])} of {plural(found['requests'], 'request')}, "
        f"{plural(engine['preemptions'], 'time')} in all, at most {count(found['most'])} each; "
        f"{plural(engine['recomputed_tokens'], 'token')} recomputed"
    )


def _estimated(summary: Mapping[str, Any]) -> str:
    """How far the queue time was off that the twin told each request at its arrival."""
    told = [
        f"{tier} +-{duration(found['mean_abs_s'])} of {duration(found['wait_mean_s'])}"
        + (", not reliable here" if found["mean_abs_s"] > found["wait_mean_s"] else "")
        for tier, found in summary["estimated_wait"].items()
        if found["samples"]
    ]
    return f"estimated at arrival: {', '.join(told)}" if told else "none to estimate"


def _prefixes(summary: Mapping[str, Any]) -> str:
    told = []
    for stream in summary["trace_prefixes"]:
        if stream["assumed_share"] is None:
            told.append(f"; unknown in the trace of stream {stream['stream']}")
        else:
            told.append(
                f"; {share(stream['assumed_share'])} of stream {stream['stream']} assumed shared"
            )
    return "".join(told)


def _speed(wall_s: float, rate: float | None) -> str:
    each = "" if not rate else f": {count(rate)} requests/s, {duration(1000 / rate)} per 1,000"
    return f"{duration(wall_s)} of wall time{each}"


def _warnings(summary: Mapping[str, Any]) -> list[RenderableType]:
    return [paragraph(f"Warning: {text}", "yellow") for text in dict.fromkeys(summary["warnings"])]


def paragraph(text: str, style: str = "") -> Text:
    """A sentence for people, wrapped without parting a figure from its unit."""
    return Text(textwrap.fill(_glue(text), WIDTH), style)


def _glue(text: str) -> str:
    return re.sub(r"(?<=\d) (?=(ms|s|%)\b|%)", _GLUE, text)
