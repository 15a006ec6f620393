"""The report of a run as one HTML page that opens anywhere, without a network."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from twin.metrics.engine_time import LIMITS, USES
from twin.metrics.records import LATENCIES, OUTCOMES
from twin.report import charts
from twin.report.scaling import fleet_section, replicas_figure, serving_at
from twin.report.stress import forecast_figure, gateway_section
from twin.report.tables import LATENCY_NAMES
from twin.report.texts import count, duration, limit, notes, plural, share, trust
from twin.report.verdict import WORTH_TELLING
from twin.simulation import Result

EVENTS_LISTED = 50
"""Preemptions listed one by one; events.jsonl has all."""

USE_NAMES = {
    "useful": "useful work",
    "recomputed": "computed again after a preemption",
    "padded": "padding to a captured size",
    "wasted": "in vain: the client left, or the reply had ended",
    "idle": "idle",
}
LIMIT_NAMES = {
    "slots": "waiting for a slot",
    "tokens": "steps full of tokens",
    "kv": "waiting for KV blocks",
    "policy": "held by the policy",
    "compute": "nobody waited",
    "idle": "nothing to do",
}


def write_html(path: Path, result: Result, summary: Mapping[str, Any]) -> None:
    """Write the report of an observed run; `summary` is `summarize(result)`, with `advice` if there is any."""
    path.write_text(render_html(result, summary), encoding="utf-8")


def render_html(result: Result, summary: Mapping[str, Any]) -> str:
    """The page. The same run gives the same page."""
    series, scenario = result.series, result.scenario
    assert series is not None, "the run was not observed"
    tiers = list(summary["tiers"])
    figures = charts.distributions(result.tally(), tiers, scenario.objectives)
    slots = summary["limits"]["max_num_seqs"]
    serving = None if result.fleet is None else serving_at(result.fleet, series.times_ps)
    lines = charts.timelines(series, result.log, tiers, slots, serving)
    histogram = summary["preemptions"]["histogram"]
    if not histogram:
        del lines["preempted"]
    if result.fleet is not None:
        lines = {"replicas": replicas_figure(result.fleet, result.simulated_ps)} | lines
        if summary["fleet"]["forecast"]:
            lines = {"forecast": forecast_figure(summary["fleet"]["forecast"])} | lines
    scaling = fleet_section(summary)
    parts = [
        _head(summary),
        _tiles(summary),
        section("What bound the run", _shares(summary["bound"], (*LIMITS, "idle"), LIMIT_NAMES)),
        section("What the GPU time was for", _shares(summary["gpu_time"], USES, USE_NAMES)),
        _advice(summary),
        section("Requests and objectives", _requests(summary) + _objectives(summary)),
        section("Latency", _latencies(summary) + _charts(figures, "charts")),
        section("Over time", _charts(lines, "times"), anchor="timelines"),
    ]
    if scaling:
        title = "Cost" if result.fleet is None else "Replicas and cost"
        parts.append(section(title, scaling))
    stress = gateway_section(summary)
    if stress:
        parts.append(section("Refusals, attempts and faults", stress))
    if histogram:
        figures["histogram"] = charts.preemption_histogram(histogram)
        drawn = chart("histogram", figures["histogram"])
        parts.append(section("Preemptions", _preemptions(result, summary, series.period_ps, drawn)))
    parts += [
        section("KV pages by length of the prompt", _pages(summary)),
        section("Estimated wait", _waits(summary)),
        section("The run", _run(summary, scenario.to_dict())),
    ]
    return page(summary["scenario"], "\n".join(parts), figures | lines)


def page(title: str, body: str, figures: Mapping[str, Any]) -> str:
    """A whole page that opens offline: a body of HTML, and the figures that its charts show, by name."""
    from plotly.offline import get_plotlyjs

    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    # The theme is set before anything is painted, and again by the script when the reader changes it.
    theme = (
        "document.documentElement.dataset.theme = new URLSearchParams(location.search).get('theme') || "
        "(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<script>{theme}</script>\n<style>\n{_asset('page.css')}</style>\n"
        f"</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="figures">{data}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("twin.report") / name).read_text(encoding="utf-8")


def section(title: str, body: str, anchor: str = "") -> str:
    """A part of a page; `body` is HTML."""
    place = f' id="{anchor}"' if anchor else ""
    return f"<section{place}><h2>{escape(title)}</h2>{body}</section>"


def _head(summary: Mapping[str, Any]) -> str:
    gpus = summary["tensor_parallel_size"]
    where = f"{gpus} × {summary['gpu']}" if gpus > 1 else summary["gpu"]
    facts = (
        f"{summary['model']} on {where}, {plural(summary['replicas'], 'replica')}, "
        f"vLLM {summary['engine_version']}; policy {summary['policy']} ({summary['policy_fingerprint']}); "
        f"seed {summary['seed']}; simulated {duration(summary['simulated_s'])}"
    )
    cut = ""
    if summary["interrupted"]:
        cut = '<p class="warning">Interrupted: the figures cover the run up to there.</p>'
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in summary["warnings"])
    return (
        f'<header><h1>{escape(summary["scenario"])}</h1><p class="facts">{escape(facts)}</p>'
        f'{cut}<p class="verdict" id="verdict">{escape(summary["verdict"])}</p>'
        f'<p class="facts" id="trust">Trust: {escape(trust(summary))}.</p>{warnings}</header>'
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    judged = [found["met"] for tier in summary["objectives"].values() for found in tier.values()]
    tiers, engine = summary["tiers"].values(), summary["engine"]
    delivered = summary["throughput"]["output_tokens_per_s"]
    measured = sum(tier["measured"] for tier in tiers)
    good = sum(tier["good"] for tier in tiers)
    rates = [tier["goodput_rps"] for tier in tiers if tier["goodput_rps"] is not None]
    tiles = [("-", "objectives: none given")]
    if judged:
        state = "met" if all(met is not False for met in judged) else "missed"
        kept = sum(met is True for met in judged)
        tiles = [(f'<em class="{state}">{kept} of {len(judged)}</em>', "objectives met")]
    totals = summary["totals"]
    lost = totals["refused"] + totals["aborted"]
    if summary["gateway"] is not None and lost >= WORTH_TELLING * max(1, totals["offered"]):
        shown = f'<em class="missed">{count(lost)} of {count(totals["offered"])}</em>'
        tiles.insert(0, (shown, "requests refused or aborted"))
    tiles += [
        (f"{sum(rates):.3g}/s" if rates else "-", "good requests (goodput)"),
        (share(good / measured if measured else None), "of requests good (attainment)"),
        ("-" if delivered is None else f"{count(delivered)}/s", "output tokens delivered"),
        (share(engine["busy_share"]), "of the time a step ran (GPUs busy)"),
        (share(engine["kv_usage_mean"]), "KV blocks used while busy"),
        (
            share(_ratio(summary["preemptions"]["preempted"], summary["preemptions"]["requests"])),
            "of requests preempted",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(name)}</span></div>'
        for value, name in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _preempted(summary: Mapping[str, Any]) -> float | None:
    return _ratio(summary["preemptions"]["preempted"], summary["preemptions"]["requests"])


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _shares(shares: Mapping[str, float], names: Sequence[str], texts: Mapping[str, str]) -> str:
    if not shares:
        return "<p>The run has no time.</p>"
    bar = "".join(
        f'<i style="width:{100 * shares[name]:.3f}%;background:var(--{name})" title="{texts[name]}"></i>'
        for name in names
        if shares[name] > 0
    )
    legend = "".join(
        f'<li><i style="background:var(--{name})"></i>{escape(texts[name])} <b>{share(shares[name])}</b></li>'
        for name in names
    )
    return f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul>'


def table_html(
    head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1, kind: str = ""
) -> str:
    """A table of escaped cells; a row whose first cell is not empty begins a group."""
    columns = "".join(
        f"<th{' class=text' if i < text_columns else ''}>{escape(name)}</th>"
        for i, name in enumerate(head)
    )
    body = []
    for row in rows:
        cells = "".join(
            f"<td{' class=text' if i < text_columns else ''}>{cell}</td>"
            for i, cell in enumerate(row)
        )
        body.append(f"<tr{' class=group' if row[0] else ''}>{cells}</tr>")
    return (
        f'<div class="wide {kind}"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _requests(summary: Mapping[str, Any]) -> str:
    rows = dict(summary["tiers"])
    if len(rows) > 1:
        rows["all"] = summary["totals"]
    outcomes = [outcome.replace("_", " ") for outcome in OUTCOMES]
    return table_html(
        ["Tier", "offered", "good/s", "attained", *outcomes],
        (
            [
                escape(name),
                count(tier["offered"]),
                "" if tier.get("goodput_rps") is None else f"{tier['goodput_rps']:.3g}",
                share(tier["attainment"]) if "attainment" in tier else "",
                *(count(tier[outcome]) for outcome in OUTCOMES),
            ]
            for name, tier in rows.items()
        ),
    )


def _objectives(summary: Mapping[str, Any]) -> str:
    rows = []
    for tier, judged in summary["objectives"].items():
        for i, (name, found) in enumerate(judged.items()):
            word = {True: "met", False: "missed", None: "nothing to judge"}[found["met"]]
            rows.append(
                [
                    "" if i else escape(tier),
                    escape(name),
                    duration(found["value_s"]),
                    limit(found["limit_s"]),
                    f'<span class="{word}">{word}</span>',
                    count(found["without"]),
                ]
            )
    if not rows:
        return "<p>No objectives are given: every completed request is good.</p>"
    return "<br>" + table_html(
        ["Tier", "objective", "found", "limit", "", "ended without one"], rows, 2
    )


def _latencies(summary: Mapping[str, Any]) -> str:
    names = {**LATENCY_NAMES, "itl": "ITL"}
    rows = []
    for tier, figures in summary["tiers"].items():
        for i, latency in enumerate(sorted(LATENCIES, key=list(names).index)):
            of = figures[f"{latency}_s"]
            name = names[latency].replace("  ", "&ensp;")
            cells = (duration(of[stat]) for stat in ("p50", "p90", "p95", "p99", "mean"))
            rows.append(
                ["" if i else escape(tier), name, count(figures["samples"][latency]), *cells]
            )
    head = ["Tier", "latency", "samples", "p50", "p90", "p95", "p99", "mean"]
    within = (
        "" if summary["percentiles"] == "exact" else f" Percentiles are {summary['percentiles']}."
    )
    note = (
        '<p class="soft">TTFT is queue plus prefill. The mean stands last: it falls when more requests dilute a few '
        f"slow ones.{within}</p>"
    )
    return table_html(head, rows, 2, "latency") + note


def _charts(figures: Mapping[str, Any], kind: str) -> str:
    return f'<div class="{kind}">{"".join(map(chart, figures, figures.values()))}</div>'


def chart(name: str, figure: Mapping[str, Any]) -> str:
    """The place of the figure called `name`."""
    caption = escape(figure["title"])
    return f'<figure><figcaption>{caption}</figcaption><div class="chart" id="chart-{name}"></div></figure>'


def _preemptions(result: Result, summary: Mapping[str, Any], period_ps: int, drawn: str) -> str:
    found, engine = summary["preemptions"], summary["engine"]
    events = [event for event in result.log if event.kind == "preemption"]
    text = (
        f"{count(found['preempted'])} of {plural(found['requests'], 'request')} "
        f"({share(_preempted(summary))}) lost their KV blocks, "
        f"{plural(engine['preemptions'], 'time')} in all, at most {count(found['most'])} times each; "
        f"{plural(engine['recomputed_tokens'], 'token')} had to be computed again."
    )
    if result.kept is None:
        return f"<p>{text}</p>{drawn}<p class=soft>Single ones are not told: records were not kept.</p>"
    width = 10 * period_ps / 1e12
    rows = "".join(
        f'<tr data-at="{event.at_ps / 1e12:.6f}" data-width="{width:g}"><td>{event.at_ps / 1e12:,.3f} s</td>'
        f'<td class="say">{escape(charts.describe(event))}</td></tr>'
        for event in events[:EVENTS_LISTED]
    )
    more = len(events) - EVENTS_LISTED
    rest = f"<p class=soft>and {count(more)} more in events.jsonl</p>" if more > 0 else ""
    return (
        f"<p>{text}</p>{drawn}"
        f"<details><summary>The first {plural(min(len(events), EVENTS_LISTED), 'preemption')}: a click shows the time "
        f'around one above</summary><div class="wide"><table><tbody>{rows}</tbody></table></div>{rest}</details>'
    )


def _pages(summary: Mapping[str, Any]) -> str:
    groups = summary["kv_by_length"]
    engine = summary["engine"]
    rows = [
        [
            group,
            "-" if of["requests"] is None else f"{of['requests']:.3g}",
            "-" if of["held_tokens"] is None else f"{of['held_tokens']:,.1f}",
            "-" if of["empty_tokens"] is None else f"{of['empty_tokens']:.2f}",
            share(of["waste"]),
        ]
        for group, of in groups.items()
    ]
    text = (
        f"Of the whole KV cache {share(engine['kv_usage_mean'])} was in use while the engines worked, and "
        f"{share(engine['kv_waste_mean'])} was held but empty: the part of each request's last page that no token "
        "fills yet."
    )
    head = ["Prompt", "running at once", "token slots each", "of them empty", "empty"]
    return f"<p>{escape(text)}</p>" + table_html(head, rows)


def _waits(summary: Mapping[str, Any]) -> str:
    rows = [
        [
            escape(tier),
            count(found["samples"]),
            duration(found["wait_mean_s"]),
            duration(found["mean_abs_s"]),
            *(_signed(found[name]) for name in ("bias_s", "p10_s", "p50_s", "p90_s")),
        ]
        for tier, found in summary["estimated_wait"].items()
    ]
    head = ["Tier", "samples", "mean wait", "mean error", "bias", "error p10", "p50", "p90"]
    text = (
        "When a request arrived, the twin estimated its queue time from its own state at that instant. "
        "This is how far it was off (above 0: too long)."
    )
    return f"<p>{text}</p>" + table_html(head, rows)


def _signed(seconds: float | None) -> str:
    if seconds is None or abs(seconds) < 5e-6:
        return "-" if seconds is None else "0 s"
    return f"{'−' if seconds < 0 else '+'}{duration(abs(seconds))}"


def _advice(summary: Mapping[str, Any]) -> str:
    advice = summary.get("advice")
    if advice is None:
        return ""
    rows = [
        [escape(row["change"]), escape(row["before"]), escape(row["after"])]
        for row in advice["best"]
    ]
    table = table_html(["Change", "this run", "with the change"], rows) if rows else ""
    return section("Which single change helps most", f"<p>{escape(advice['text'])}</p>{table}")


def _run(summary: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    said = "".join(f"<p>{escape(text)}</p>" for text in notes(summary))
    text = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
    return f"{said}<details><summary>The scenario, with every default</summary><pre>{escape(text)}</pre></details>"
