"""Replicas that come and go, told: how many there were, every scaling decision with its reason, and what GPUs cost."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twin.clock import PS, to_ps, to_seconds
from twin.cluster.advice import calmer
from twin.cluster.alone import alone_ttft_ps, longest_within
from twin.cluster.cold_start import PHASES, mean_s
from twin.cluster.cost import GpuTime, cost
from twin.cluster.fleet_log import KINDS, Counts, FleetHistory
from twin.cluster.objects import write_behavior
from twin.cluster.prediction import PredictionSpec
from twin.cluster.scalers import Look
from twin.report.stress import forecast_of, forecast_text, warm_pool_of, warm_pool_text
from twin.report.texts import count, duration, plural, share
from twin.simulation import Result

DECISIONS_KEPT = 500
"""Decisions in the summary at most; `decisions_left_out` counts the rest."""

DECISIONS_SHOWN = 12
"""Decisions in the tables of a terminal."""


# --- as data ------------------------------------------------------------------------------


def cost_of(result: Result, output_tokens: int, good: int) -> dict[str, Any]:
    """GPU time by phase and what it cost, with or without a price."""
    cluster = result.scenario.cluster
    spent = gpu_time(result)
    found = cost(spent, cluster.price_per_gpu_hour, output_tokens, good)
    return {
        "gpu_hours": found.gpu_hours,
        "gpu_seconds": {name: to_seconds(ps) for name, ps in spent.phases().items()},
        "price_per_gpu_hour": found.price_per_gpu_hour,
        "total": found.money,
        "per_million_output_tokens": found.per_million_tokens,
        "per_good_request": found.per_good_request,
    }


def gpu_time(result: Result) -> GpuTime:
    """Of a fleet what its pods were paid for; else every replica for the whole run."""
    if result.fleet is not None:
        return result.fleet.gpu_time
    gpus = result.scenario.hardware.tensor_parallel_size
    busy_ps = sum(engine.busy_ps for engine in result.engines)
    return GpuTime(gpus * busy_ps, gpus * (sum(result.alive_ps) - busy_ps))


def fleet_of(result: Result) -> dict[str, Any] | None:
    """What became of the replicas; None where they were all there from the beginning to the end."""
    fleet = result.fleet
    if fleet is None:
        return None
    end_ps, log = result.simulated_ps, fleet.log
    steps = [step for step in log.steps if step.at_ps <= end_ps]
    changes = decisions(log.looks)
    kinds = {kind: sum(e.kind == kind for e in log.events if e.at_ps <= end_ps) for kind in KINDS}
    starts = [p.ready_ps - p.created_ps for p in fleet.pods if p.ready_ps and p.created_ps]
    return {
        "scaler": result.scenario.cluster.fleet and result.scenario.cluster.fleet.scaler.names,
        "replicas": {name: _figures(steps, name, end_ps) for name in ("wanted", "ready")},
        "pods": len(fleet.pods) * fleet.pods_per_replica,
        "gpus_per_replica": fleet.gpus_per_replica,
        "never_ready": sum(pod.ready_ps is None for pod in fleet.pods),
        "restarts": sum(pod.restarts for pod in fleet.pods),
        "start_s": {
            "mean": sum(starts) / len(starts) / PS if starts else None,
            "max": max(starts) / PS if starts else None,
        },
        "looks": len(log.looks),
        "looks_with_an_error": sum(look.error is not None for look in log.looks),
        "reversals": reversals(changes),
        "calmer": _calmer(result, changes),
        "after_last_arrival": _afterwards(result),
        "events": kinds,
        "obstacle": _obstacle(result),
        "pending": _pending(fleet, end_ps),
        "killed": next((_why_killed(e.text) for e in log.events if e.kind == "killed"), None),
        "warm_pool": warm_pool_of(fleet),
        "forecast": forecast_of(fleet, _prediction(result)),
        "decisions": [_decision(look) for look in changes[:DECISIONS_KEPT]],
        "decisions_left_out": max(0, len(changes) - DECISIONS_KEPT),
        "steps": [
            {"at_s": to_seconds(s.at_ps), "wanted": s.wanted, "present": s.present, "ready": s.ready,
             "draining": s.draining}
            for s in steps
        ],
    }  # fmt: skip


def _prediction(result: Result) -> PredictionSpec | None:
    spec = result.scenario.cluster.fleet
    return None if spec is None else spec.scaler.prediction


def _obstacle(result: Result) -> str | None:
    """What kept every pod from starting."""
    spec = result.scenario.cluster.fleet
    return None if spec is None or spec.obstacle is None else spec.obstacle.why


def _pending(fleet: FleetHistory, end_ps: int) -> dict[str, Any] | None:
    """Pods that waited for GPUs, those that never got any, and the figures of the last one; None if none waited."""
    told = [
        e
        for e in fleet.log.events
        if e.kind == "pending" and e.at_ps <= end_ps and e.text.startswith("Insufficient ")
    ]
    if not told:
        return None
    waited = {e.pod for e in told}
    placed = {p.number for p in fleet.pods if p.placed_ps is not None and p.placed_ps <= end_ps}
    return {"pods": len(waited), "never_placed": len(waited - placed), "why": told[-1].text}


def _why_killed(text: str) -> str:
    """Without the back-off, which is another one each time."""
    return text.partition("; starts again after ")[0]


def _calmer(result: Result, changes: Sequence[Look]) -> dict[str, Any] | None:
    """A `behavior` to try where the count went up and down again and again, as a document of Kubernetes."""
    spec = result.scenario.cluster.fleet
    assert spec is not None
    hpa = spec.scaler.hpa or (spec.scaler.keda and spec.scaler.keda.hpa)
    if not hpa or reversals(changes) < 2:
        return None
    start_s = sum(mean_s(getattr(spec.cold_start, name)) for name in PHASES)
    return write_behavior(calmer(hpa, spec.scaler.controller, start_s))


def _afterwards(result: Result) -> dict[str, float | None] | None:
    """GPU-hours after the last arrival, and how long the replicas took to their final count; None without records."""
    fleet = result.fleet
    if result.kept is None or fleet is None or not len(result.kept):
        return None
    last_ps, end_ps = int(result.kept.columns()["arrival_ps"].max()), result.simulated_ps
    gpu_ps = 0
    for pod in fleet.pods:
        if pod.placed_ps is not None:
            gone_ps = end_ps if pod.gone_ps is None else min(pod.gone_ps, end_ps)
            gpu_ps += fleet.gpus_per_replica * max(0, gone_ps - max(pod.placed_ps, last_ps))
    steps = [step for step in fleet.log.steps if step.at_ps <= end_ps]
    final = steps[-1].present if steps else 0
    reached_ps = next((s.at_ps for s in steps if s.at_ps > last_ps and s.present == final), last_ps)
    return {
        "gpu_hours": gpu_ps / PS / 3600,
        "replicas": final,
        "reached_after_s": to_seconds(reached_ps - last_ps),
    }


def goals_out_of_reach(result: Result) -> Iterator[str]:
    """Objectives that some requests miss even alone on an idle replica, one sentence each."""
    scenario = result.scenario
    if result.kept is None:
        return
    columns = result.kept.columns()
    rows = dict(columns.of_tiers())
    for tier, limits in scenario.objectives.items():
        of_tier = columns["prompt_tokens"][rows.get(tier, [])]
        of_tier = of_tier[of_tier < scenario.engine.max_model_len]
        for name, limit_s in limits.items():
            if not name.startswith("ttft_") or not len(of_tier):
                continue
            longest = longest_within(scenario.step_time, scenario.engine, to_ps(limit_s))
            missed = int((of_tier > longest).sum())
            if not missed:
                continue
            most = int(of_tier.max())
            needed_s = to_seconds(alone_ttft_ps(scenario.step_time, scenario.engine, most))
            yield (
                f"{count(missed)} of {count(len(of_tier))} requests of {tier} miss {name} {limit_s:g} s even alone on "
                f"an idle replica (a prompt of {count(most)} tokens takes {duration(needed_s)}): no number of replicas "
                "helps them; a faster GPU, more tensor parallelism or shorter prompts do"
            )


def decisions(looks: Sequence[Look]) -> list[Look]:
    """The looks worth telling: those that changed the count, or that met an error or a limit not met just before."""
    told: list[Look] = []
    before: dict[str, tuple[str | None, str]] = {}
    for look in looks:
        state = (look.error, look.limit)
        if look.desired != look.current or before.get(look.scaler, (None, "")) != state:
            told.append(look)
        before[look.scaler] = state
    return told


def reversals(looks: Sequence[Look]) -> int:
    """How often a change went against the one before it."""
    ways = [look.desired > look.current for look in looks if look.desired != look.current]
    return sum(a != b for a, b in pairwise(ways))


def _decision(look: Look) -> dict[str, Any]:
    return {
        "at_s": to_seconds(look.at_ps),
        "scaler": look.scaler,
        "from": look.current,
        "to": look.desired,
        "ready": look.ready,
        "proposed": look.proposed,
        "stabilized": look.stabilized,
        "limit": look.limit or None,
        "metric": look.metric,
        "values": dict(look.values),
        "proposals": dict(look.proposals),
        "reason": look.reason,
        "error": look.error,
    }


def _figures(steps: Sequence[Counts], name: str, end_ps: int) -> dict[str, float | int | None]:
    if not steps or not end_ps:
        return {"mean": None, "min": None, "max": None}
    ends = [step.at_ps for step in steps[1:]] + [end_ps]
    area = sum(getattr(s, name) * (end - s.at_ps) for s, end in zip(steps, ends, strict=True))
    values = [getattr(step, name) for step in steps]
    return {"mean": area / end_ps, "min": min(values), "max": max(values)}


# --- as tables ----------------------------------------------------------------------------


def fleet_lines(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Replicas, decisions and cost for a terminal; nothing for fixed replicas without a price."""
    fleet, spent = summary["fleet"], summary["cost"]
    if fleet is not None:
        yield Text("Replicas", "bold")
        yield _indented(_replicas_text(fleet))
        for text in _troubles(fleet):
            yield _indented(text)
        shown = fleet["decisions"][:DECISIONS_SHOWN]
        rows = Table(box=None, show_header=False, padding=(0, 1, 0, 2), pad_edge=True)
        for _ in ("at", "change"):
            rows.add_column(justify="right", no_wrap=True)
        rows.add_column(overflow="fold")
        for row in shown:
            rows.add_row(duration(row["at_s"]), f"{row['from']} -> {row['to']}", row["reason"])
        if shown:
            yield rows
        left = len(fleet["decisions"]) + fleet["decisions_left_out"] - len(shown)
        if left:
            yield _indented(f"and {count(left)} more decisions (--json, --out)")
    if fleet is not None or spent["price_per_gpu_hour"] is not None:
        yield Text(cost_text(spent))


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


def _replicas_text(fleet: Mapping[str, Any]) -> str:
    ready, wanted, start = fleet["replicas"]["ready"], fleet["replicas"]["wanted"], fleet["start_s"]
    text = f"ready {_number(ready['mean'])} on average ({ready['min']} to {ready['max']})"
    text += f", asked for {wanted['min']} to {wanted['max']}; {count(fleet['pods'])} pods"
    if start["mean"] is not None:
        text += f", started in {duration(start['mean'])} (at most {duration(start['max'])})"
    return text


def _troubles(fleet: Mapping[str, Any]) -> Iterator[str]:
    if fleet["obstacle"]:
        yield f"pods that never appear: {fleet['obstacle']}"
    if fleet["pending"]:
        pending = fleet["pending"]
        pods, never = pending["pods"], pending["never_placed"]
        how = "never placed" if never == pods else f"{count(never)} of them never placed"
        yield f"{plural(pods, 'pod')} Pending: {pending['why']}; {how}"
    if fleet["warm_pool"]:
        yield warm_pool_text(fleet["warm_pool"])
    if fleet["forecast"]:
        yield forecast_text(fleet["forecast"])
    if fleet["restarts"]:
        were = "was" if fleet["restarts"] == 1 else "were"
        yield f"{plural(fleet['restarts'], 'container')} {were} killed: {fleet['killed']}"
    if fleet["looks_with_an_error"]:
        yield (
            f"{count(fleet['looks_with_an_error'])} of {count(fleet['looks'])} looks of the autoscaler met a metric "
            "that could not be read"
        )
    if fleet["calmer"]:
        yield (
            f"the count turned round {count(fleet['reversals'])} times; to try what waits for the effect of its "
            f"orders: --set 'cluster.hpa.behavior={json.dumps(fleet['calmer'])}'"
        )


def cost_text(spent: Mapping[str, Any]) -> str:
    """GPU-hours by phase, and money, as one line."""
    hours, seconds = spent["gpu_hours"], spent["gpu_seconds"]
    whole = sum(seconds.values())
    parts = [f"{name} {share(s / whole if whole else 0)}" for name, s in seconds.items()]
    text = f"GPU-hours {hours:,.3g}: {', '.join(parts)}"
    if spent["total"] is not None:
        text += f"; {spent['total']:,.4g} in all"
        if spent["per_million_output_tokens"] is not None:
            text += f", {spent['per_million_output_tokens']:,.3g} per million output tokens"
        if spent["per_good_request"] is not None:
            text += f", {spent['per_good_request']:,.3g} per good request"
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# --- as a page ----------------------------------------------------------------------------


def fleet_section(summary: Mapping[str, Any]) -> str:
    """Decisions and cost for the report; empty for fixed replicas without a price."""
    fleet, spent = summary["fleet"], summary["cost"]
    if fleet is None:
        return "" if spent["price_per_gpu_hour"] is None else f"<p>{escape(cost_text(spent))}</p>"
    lines = [_replicas_text(fleet), *_troubles(fleet)]
    said = "".join(f"<p>{escape(text)}</p>" for text in (*lines, cost_text(spent)))
    rows = "".join(_row(row) for row in fleet["decisions"])
    head = "".join(
        f"<th>{name}</th>" for name in ("At", "By", "From", "To", "Ready", "Limit", "Why")
    )
    table = (
        f'<div style="overflow-x: auto"><table><tr>{head}</tr>{rows}</table></div>' if rows else ""
    )
    return said + table


def _row(row: Mapping[str, Any]) -> str:
    error = row["error"]
    why = row["reason"] + (f" ({error})" if error and error not in row["reason"] else "")
    cells = (
        duration(row["at_s"]), row["scaler"], row["from"], row["to"], row["ready"], row["limit"] or "", why,
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def serving_at(fleet: FleetHistory, times_ps: Sequence[int]) -> list[int]:
    """How many engines were there at each of these instants."""
    spans = [(pod.serving_ps, pod.gone_ps) for pod in fleet.pods if pod.serving_ps is not None]
    return [
        sum(start <= at and (gone is None or at < gone) for start, gone in spans) for at in times_ps
    ]


def replicas_figure(fleet: FleetHistory, end_ps: int) -> dict[str, Any]:
    """Replicas asked for, present and Ready over time, with a mark for each decision that changed them."""
    steps = [step for step in fleet.log.steps if step.at_ps <= end_ps]
    times = [to_seconds(step.at_ps) for step in steps] + [to_seconds(end_ps)]
    traces = []
    for name, title, color, dash in (
        ("wanted", "asked for", "--limit", "dot"),
        ("present", "pods", "--cached", "solid"),
        ("ready", "ready", "--kv", "solid"),
    ):
        values = [getattr(step, name) for step in steps]
        line = {"color": f"var({color})", "width": 2, "dash": dash, "shape": "hv"}
        traces.append(
            {"type": "scatter", "mode": "lines", "name": title, "line": line, "x": times,
             "y": values + values[-1:]}
        )  # fmt: skip
    changed = [look for look in decisions(fleet.log.looks) if look.desired != look.current]
    traces.append(
        {
            "type": "scatter", "mode": "markers", "name": "decision",
            "x": [to_seconds(look.at_ps) for look in changed],
            "y": [look.desired for look in changed],
            "text": [f"{look.current} -> {look.desired}: {look.reason}" for look in changed],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 8, "color": "var(--mark)"},
        }
    )  # fmt: skip
    return {
        "title": "Replicas",
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "simulated seconds"}, "range": [0, times[-1]]},
            "yaxis": {"title": {"text": "replicas"}, "rangemode": "tozero"},
            "showlegend": True,
            "hovermode": "x unified",
        },
    }
