"""Measured requests in the simulator's own tables and charts."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from real.measured import MOST_MISMATCH, Measured, Mismatch, mismatch
from twin.clock import PS
from twin.engine.replica import EngineStats
from twin.errors import InputError
from twin.metrics.record_table import RecordTable
from twin.metrics.records import OUTCOMES
from twin.metrics.timeseries import TimeSeries
from twin.report.folder import write_folder
from twin.report.html import render_html
from twin.report.json_summary import summarize
from twin.report.tables import table, to_text
from twin.report.texts import duration
from twin.scenario import Scenario
from twin.simulation import Result

SHOWN = ("ttft", "tpot", "itl", "e2e")


def result_of(
    scenario: Scenario,
    measured: Sequence[Measured],
    series: TimeSeries,
    changes: dict[str, float],
    wall_s: float,
    interrupted: bool,
) -> Result:
    """A run of the simulator in form. What only a simulator knows (what the time of steps was for) is left empty.

    `changes` are the counters of the server since the start.
    """
    records = [one.record for one in measured]
    ends = [record.finish_ps for record in records if record.finish_ps is not None]
    inside = sum(
        (record.finish_ps or 0) - record.arrival_ps for record in records if record.finish_ps
    )
    whole = {name: round(value) for name, value in changes.items()}
    names = ("steps", "preemptions", "prefix_hit_tokens", "prefix_query_tokens", "scheduled_tokens",
             "prompt_tokens", "generation_tokens")  # fmt: skip
    stats = EngineStats()
    for name in names:
        setattr(stats, name, whole.get(name, 0))
    return Result(
        scenario=scenario,
        kept=RecordTable(records),
        counted=None,
        places={},
        engines=(stats,),
        alive_ps=(0,),
        fleet=None,
        policies=(),
        warnings=(),
        simulated_ps=max(ends, default=0),
        inflight_request_ps=inside,
        events=0,
        wall_s=wall_s,
        interrupted=interrupted,
        decisions={},
        series=series,
        log=(),
    )


def summary_of(result: Result, url: str, warnings: Sequence[str]) -> dict[str, Any]:
    """The summary of a measured run: as of a simulated one, and saying that it is none."""
    summary = summarize(result)
    summary["verdict"] = (
        f"Measured at {url}, not simulated: instants count from the first that was due."
    )
    summary["measured"] = url
    summary["trust"] = None
    summary["warnings"] = [*warnings, *summary["warnings"]]
    return summary


ONLY_SIMULATED = (
    "What bound the run", "What the GPU time was for", "KV pages by length of the prompt", "Estimated wait",
)  # fmt: skip
"""Sections of the page that no client and no /metrics can fill."""


def write_report(folder: Path, result: Result, summary: dict[str, Any]) -> None:
    """summary.json, timeseries.parquet and report.html. Raises InputError where that fails."""
    write_folder(folder, result, summary, ("summary.json", "timeseries.parquet"))
    path = folder / "report.html"
    try:
        path.write_text(page(result, summary), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None


def page(result: Result, summary: dict[str, Any]) -> str:
    """The simulator's page without what only a simulator knows."""
    assert result.series is not None
    used = [one.kv_used for gauges in result.series.gauges for one in gauges]
    mean = sum(used) / len(used) if used else 0.0
    html = render_html(result, {**summary, "engine": {**summary["engine"], "kv_usage_mean": mean}})
    for title in ONLY_SIMULATED:
        html = re.sub(
            rf"<section><h2>{re.escape(title)}</h2>.*?</section>", "", html, flags=re.DOTALL
        )
    html = re.sub(
        r'<div class="tile"><b>[^<]*</b><span>of the time a step ran[^<]*</span></div>', "", html
    )
    html = html.replace("KV blocks used while busy", "KV blocks used (mean of readings)")
    return html.replace("simulated seconds", "seconds").replace("; simulated ", "; measured ", 1)


def render(summary: dict[str, Any], measured: Sequence[Measured], client: dict[str, Any]) -> str:
    """What makes it doubtful; what became of the requests; latencies, from when they were due and from when sent."""
    counts = table("Requests", "offered", *(outcome.replace("_", " ") for outcome in OUTCOMES))
    for name, tier in {**summary["tiers"], "all": summary["totals"]}.items():
        counts.add_row(name, *(f"{tier[column]:,}" for column in ("offered", *OUTCOMES)))
    times = table("Latency", "n", "mean", "p50", "p90", "p99")
    for name, tier in summary["tiers"].items():
        for latency in SHOWN:
            stats = tier[f"{latency}_s"]
            if stats["mean"] is None:
                continue
            cells = [duration(stats[stat]) for stat in ("mean", "p50", "p90", "p99")]
            label = f"{name} {latency.upper()}" + (" (due)" if latency == "ttft" else "")
            times.add_row(label, f"{tier['samples'][latency]:,}", *cells)
        if (sent := _sent(measured, name)) is not None:
            times.add_row(f"{name} TTFT (sent)", *sent)
    warned = "".join(f"warning: {text}\n" for text in summary["warnings"])
    lines = [*_failures(measured), client_line(client)]
    tables = (to_text([counts], False), to_text([times], False))
    return warned + "\n".join((*tables, "\n".join(lines))) + "\n"


def _failures(measured: Sequence[Measured]) -> Iterator[str]:
    """What did not complete, by reason, and how long it took: no latency above has these in it."""
    spans: dict[str, list[float]] = {}
    for one in measured:
        record = one.record
        if record.outcome != "completed":
            found = spans.setdefault(f"{record.outcome} ({record.reason})", [])
            if record.finish_ps is not None:
                found.append((record.finish_ps - record.arrival_ps) / PS)
    for what, seconds in sorted(spans.items()):
        count = sum(f"{one.record.outcome} ({one.record.reason})" == what for one in measured)
        after = f", after {duration(min(seconds))} to {duration(max(seconds))}" if seconds else ""
        yield f"{count:,} {what}{after}"


def client_line(client: dict[str, Any]) -> str:
    """How well the client kept its times."""
    late = client["lateness"]
    text = f"client: {100 * client['cpu_share']:.0f} % of a processor"
    if late is not None:
        text += (
            f"; sent {1e3 * late['p50_s']:.1f} ms (p50), {1e3 * late['p99_s']:.1f} ms (p99) after due; "
            f"on time (within {1e3 * client['sent_on_time_limit_s']:g} ms) "
        )
        busiest = late["busiest_on_time"]
        text += (
            f"at up to {busiest} requests in a second" if busiest else "in no second with all of it"
        )
    return text


def _sent(measured: Sequence[Measured], tier: str) -> list[str] | None:
    import numpy as np

    found = [one.sent_ttft_s for one in measured if one.record.tier == tier]
    known = np.array([seconds for seconds in found if seconds is not None])
    if not len(known):
        return None
    stats = [float(known.mean()), *np.percentile(known, [50, 90, 99]).tolist()]
    return [f"{len(known):,}", *(duration(seconds) for seconds in stats)]


def mismatch_of(measured: Sequence[Measured]) -> Mismatch | None:
    """How many of the completed requests had other lengths than planned; None if nobody knows."""
    done = [
        (one.record.prompt_tokens, one.record.output_tokens, one.planned)
        for one in measured
        if one.planned and one.record.outcome == "completed"
    ]
    if not done:
        return None
    return mismatch([(p, o) for p, o, _ in done], [planned for *_, planned in done if planned])


def length_mismatch(measured: Sequence[Measured]) -> float | None:
    """Share of the completed requests whose reply or prompt had another length than planned; None if nobody knows."""
    found = mismatch_of(measured)
    return None if found is None else found.either


def lengths_told(measured: Sequence[Measured]) -> str | None:
    """What is to be said first if more than MOST_MISMATCH of the lengths are not the planned ones."""
    found = mismatch_of(measured)
    return None if found is None or found.either <= MOST_MISMATCH else str(found)


def span_s(measured: Sequence[Measured]) -> float:
    """Seconds from the start to the last end."""
    return max((one.record.finish_ps or 0 for one in measured), default=0) / PS
