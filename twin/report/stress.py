"""What happened under stress, told: refusals and aborts by reason, further attempts, faults, the warm pool, forecasts.

Each part is there only where it was used.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

from twin.clock import to_seconds
from twin.cluster.admission import AdmissionSpec
from twin.cluster.fleet_log import FleetHistory
from twin.cluster.prediction import PredictionSpec, realised
from twin.metrics.tally import Tally
from twin.report.texts import count, duration, limit, plural, share
from twin.simulation import Result

POINTS_KEPT = 2000
"""Forecasts in the summary at most, the first ones; `points_left_out` counts the rest."""

EJECTIONS_KEPT = 200
"""Ejections in the summary at most; `ejections_left_out` counts the rest."""

MEANINGS = {
    "rate_limit": "beyond the rate of a token bucket",
    "queue_full": "the queue at the gateway was full",
    "shed": "pushed out of that queue by a tier before it",
    "queue_timeout": "waited too long at the gateway",
    "no_ready_pod": "no pod was Ready",
    "connection_refused": "sent to a pod that does not answer",
    "stale_metrics": "the state of all replicas was stale",
    "too_long": "the prompt does not fit",
    "client_disconnect": "the client left by itself",
    "pod_crash": "its pod crashed",
    "gpu_lost": "its pod's GPU was lost",
    "partition": "the connection to its pod broke",
    "pod_deleted": "its pod was deleted",
    "spot_reclaim": "its machine was taken back",
    "node_drain": "its node was drained",
}
"""Reason of a record -> what people call it."""


# --- as data ------------------------------------------------------------------------------


def gateway_of(result: Result, tally: Tally) -> dict[str, Any] | None:
    """Refusals and aborts by reason, attempts, faults and ejections; None where nothing of the kind was."""
    ended = {
        outcome: {
            reason: number for (o, reason), number in sorted(tally.ends.items()) if o == outcome
        }
        for outcome in ("refused", "aborted")
    }
    attempts = sum(tier.attempts for tier in tally.tiers.values())
    faults = _faults(result)
    further = attempts - tally.requests
    queue = _queue(result)
    others = faults or result.ejections or result.sent_stale
    if not (any(ended.values()) or further or others or queue):
        return None
    return {
        **ended,
        **({} if queue is None else {"queue": queue}),
        "further_attempts": further,
        "attempts_each": attempts / tally.requests if tally.requests else None,
        **({"followed": _followed(result)} if result.followed else {}),
        "faults": faults,
        "ejections": [
            {"at_s": to_seconds(at), "replica": replica, "until_s": to_seconds(until)}
            for at, replica, until in result.ejections[:EJECTIONS_KEPT]
        ],
        "ejections_left_out": max(0, len(result.ejections) - EJECTIONS_KEPT),
        "sent_stale": result.sent_stale,
    }


def _followed(result: Result) -> list[dict[str, Any]]:
    return [
        {"outcome": outcome, "reason": reason, "attempts": number}
        for outcome, reason, number in result.followed
    ]


def _faults(result: Result) -> list[dict[str, Any]]:
    """The faults of the scenario in the order of time, each with whom it struck."""
    spec, history = result.scenario.cluster.fleet, result.fleet
    if spec is None or history is None:
        return []
    strikes = {strike.fault: strike for strike in history.log.strikes}
    told = []
    for number, fault in sorted(enumerate(spec.faults), key=lambda entry: entry[1].at_ps):
        strike = strikes.get(number)
        is_drain, is_slow = fault.kind == "node_drain", fault.kind == "slow"
        notice_ps = fault.notice_ps if fault.kind == "spot_reclaim" else None
        told.append(
            {
                "fault": number,
                "kind": fault.kind,
                "at_s": to_seconds(fault.at_ps),
                "until_s": None if fault.until_ps is None else to_seconds(fault.until_ps),
                "pods": list(fault.pods),
                "node": fault.node if is_drain else None,
                "factor": fault.factor if is_slow else None,
                "notice_s": None if notice_ps is None else to_seconds(notice_ps),
                "came": strike is not None,
                "struck": [] if strike is None else list(strike.pods),
                "requests": None if strike is None else strike.requests,
            }
        )
    return told


def _queue(result: Result) -> dict[str, Any] | None:
    """Who waited at the gateway, and for what; None where nobody could, or nobody did and no limit was set."""
    admission, waits = result.scenario.cluster.admission, result.gateway_waits
    if admission is None and not waits.request_ps:
        return None
    spent_ps = result.simulated_ps
    return {
        "limits": limits_of(admission),
        "limited_share": waits.limited_ps / spent_ps if spent_ps else None,
        "without_pod_share": waits.without_pod_ps / spent_ps if spent_ps else None,
        "mean": waits.request_ps / spent_ps if spent_ps else None,
        "most": waits.most,
        "unfinished": waits.unfinished,
    }


def limits_of(admission: AdmissionSpec | None) -> list[str]:
    """The limits that make requests wait, with their keys."""
    if admission is None:
        return []
    found = {
        "max_inflight": admission.limits.max_inflight,
        "max_inflight_per_replica": admission.per_replica,
        "max_inflight_tokens": admission.max_tokens,
    } | {f"tiers.{t}.max_inflight": own.max_inflight for t, own in admission.tiers.items()}
    return [f"{key} {count(value)}" for key, value in found.items() if value is not None]


def warm_pool_of(fleet: FleetHistory) -> dict[str, Any] | None:
    """What the warm pool did, and starts by class; None where nothing was kept ready."""
    warm = fleet.warm_pool
    if warm is None:
        return None
    starts: dict[str, list[int]] = {"cold": [], "woken": []}
    for pod in fleet.pods:
        if pod.ready_ps is not None and pod.created_ps:
            starts["woken" if pod.is_woken else "cold"].append(pod.ready_ps - pod.created_ps)
    hour_ps = to_seconds(1) / 3600 * fleet.gpus_per_replica
    return {
        "claims": warm.claims,
        "woken": warm.woken,
        "found_none": warm.found_none,
        "unlucky": warm.unlucky,
        "returned": warm.returned,
        "gave_way": warm.gave_way,
        "start_s": {name: _spread(taken) for name, taken in starts.items()},
        "refill_s": _spread(warm.refills_ps),
        "standby_gpu_hours": warm.standby_ps * hour_ps,
        "placeholder_gpu_hours": warm.placeholder_ps * hour_ps,
    }


def _spread(taken_ps: Any) -> dict[str, Any]:
    found = [to_seconds(ps) for ps in taken_ps]
    mean = sum(found) / len(found) if found else None
    return {"count": len(found), "mean": mean, "max": max(found, default=None)}


def forecast_of(fleet: FleetHistory, spec: PredictionSpec | None) -> dict[str, Any] | None:
    """Forecasts beside what came; None where there were none."""
    log = fleet.forecasts
    if spec is None or not log:
        return None
    errors = [f.rate - came for f, came in realised(log, spec.steps) if f.rate is not None]
    failed = [f.error for f in log if f.error is not None]
    number = len(errors)
    return {
        "forecaster": spec.forecaster,
        "horizon_s": to_seconds(spec.steps * spec.interval_ps),
        "forecasts": len(log),
        "unknown": sum(f.rate is None and f.error is None for f in log),
        "failed": len(failed),
        "error": failed[0] if failed else None,
        "compared": number,
        "mean_error": sum(map(abs, errors)) / number if number else None,
        "bias": sum(errors) / number if number else None,
        "too_low": sum(error < 0 for error in errors) / number if number else None,
        "points": [
            {"at_s": to_seconds(f.at_ps), "observed": f.observed, "expected": f.rate,
             "replicas": f.replicas}
            for f in log[:POINTS_KEPT]
        ],
        "points_left_out": max(0, len(log) - POINTS_KEPT),
    }  # fmt: skip


def stress_warnings(result: Result) -> Iterator[str]:
    """What was asked for and could not be, a sentence each."""
    fleet = result.scenario.cluster.fleet
    if fleet is None:
        return
    for fault in _faults(result):
        name = f"cluster.faults.{fault['fault']}: {fault['kind']} at {limit(fault['at_s'])}"
        if not fault["came"]:
            yield f"{name} never came: the run ended at {duration(to_seconds(result.simulated_ps))}"
        elif not fault["struck"]:
            whom = f" {', '.join(map(str, fault['pods']))}" if fault["pods"] else ""
            where = "" if fault["node"] is None else f" on node {fault['node']}"
            yield f"{name} struck nobody: no pod{whom}{where} was there and ran"
    most = fleet.most_replicas
    for i, schedule in enumerate(fleet.scaler.schedules):
        if schedule.min_replicas > most:
            yield (
                f"cluster.schedules.{i}: min_replicas {schedule.min_replicas} is more than the maximum of {most} that "
                "the autoscaler has; raise the maximum, or it stays there"
            )


# --- as text ------------------------------------------------------------------------------


def warm_pool_text(warm: Mapping[str, Any]) -> str:
    """The warm pool in one sentence."""
    start = warm["start_s"]
    parts = [f"{count(warm['woken'])} of {plural(warm['claims'], 'new replica')} woken"]
    if start["woken"]["mean"] is not None:
        parts[0] += f" (Ready in {duration(start['woken']['mean'])}"
        cold = start["cold"]["mean"]
        parts[0] += ")" if cold is None else f", the others in {duration(cold)})"
    if warm["found_none"]:
        parts.append(f"{count(warm['found_none'])} found none asleep")
    if warm["unlucky"]:
        parts.append(f"{count(warm['unlucky'])} could not claim theirs")
    if warm["returned"]:
        parts.append(f"{count(warm['returned'])} went back to sleep")
    if warm["gave_way"]:
        parts.append(f"{plural(warm['gave_way'], 'placeholder')} gave way")
    hours = warm["standby_gpu_hours"] + warm["placeholder_gpu_hours"]
    return f"warm pool: {', '.join(parts)}; {hours:,.3g} GPU-hours held"


def forecast_text(found: Mapping[str, Any]) -> str:
    """The forecasts in one sentence."""
    text = f"forecasts by {found['forecaster']}, {duration(found['horizon_s'])} ahead: "
    if found["failed"]:
        return f"{text}{count(found['failed'])} of {count(found['forecasts'])} failed: {found['error']}"
    if not found["compared"]:
        return f"{text}none could be compared with what came"
    return (
        f"{text}off by {found['mean_error']:.3g}/s on average (bias {found['bias']:+.3g}/s), too low "
        f"{share(found['too_low'])} of the time; {count(found['unknown'])} could not tell"
    )


def gateway_lines(summary: Mapping[str, Any]) -> Iterator[Any]:
    """Ends by reason, attempts, faults and ejections for a terminal."""
    found = summary["gateway"]
    if found is None or not any(_rows(found)):
        return
    rows = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for row in _rows(found):
        rows.add_row(*row)
    yield rows


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(number, what, why)"""
    for outcome in ("refused", "aborted"):
        for reason, number in found[outcome].items():
            yield count(number), outcome, f"{reason}: {MEANINGS.get(reason, reason)}"
    queue = found.get("queue")
    if queue is not None and queue["most"]:
        limits = ", ".join(queue["limits"]) or "no pod Ready"
        shared = (queue["limited_share"] or 0) + (queue["without_pod_share"] or 0)
        yield (
            count(queue["most"]),
            "at the gateway",
            f"at most at once, {queue['mean']:.3g} on average, somebody in {share(shared)} of the time ({limits})",
        )
        if queue["unfinished"]:
            yield count(queue["unfinished"]), "unfinished", "still at the gateway at the end"
    if found["further_attempts"]:
        text = f"{found['attempts_each']:.3g} attempts a request"
        followed = found.get("followed", ())  # who measured may not know after what
        why = ", ".join(f"{row['reason']} {count(row['attempts'])}" for row in followed)
        if why:
            text += f"; after {why}"
        yield count(found["further_attempts"]), "further attempts", text
    for fault in found["faults"]:
        yield duration(fault["at_s"]), "fault", _fault_text(fault)
    ejections = len(found["ejections"]) + found["ejections_left_out"]
    if ejections:
        replicas = sorted({row["replica"] for row in found["ejections"]})
        yield count(ejections), "ejections", f"replicas {', '.join(map(str, replicas))}"
    if found["sent_stale"]:
        yield count(found["sent_stale"]), "sent on", "while the state of all replicas was stale"


def _fault_text(fault: Mapping[str, Any]) -> str:
    """What one fault was, whom it struck and how many requests were there."""
    parts = [fault["kind"]]
    if fault["node"] is not None:
        parts.append(f"of node {fault['node']}")
    if fault["factor"] is not None:
        parts.append(f"by {fault['factor']:g}")
    if fault["notice_s"] is not None:
        parts.append(f"with {limit(fault['notice_s'])} of notice")
    if fault["until_s"] is not None:
        parts.append(f"until {limit(fault['until_s'])}")
    text = " ".join(parts)
    if not fault["came"]:
        return f"{text}: never came, the run was over"
    if not fault["struck"]:
        return f"{text}: struck nobody"
    text += f": {_pods(fault['struck'])}"
    if fault["requests"] is not None:
        text += f" with {plural(fault['requests'], 'request')}"
    absent = sorted(set(fault["pods"]) - set(fault["struck"]))
    return text + (f"; not there: {_pods(absent)}" if absent else "")


def _pods(numbers: Sequence[int]) -> str:
    return f"{'pod' if len(numbers) == 1 else 'pods'} {', '.join(map(str, numbers))}"


def gateway_section(summary: Mapping[str, Any]) -> str:
    """The same for the report; empty where nothing of the kind was."""
    found = summary["gateway"]
    if found is None:
        return ""
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(found)
    )
    return f'<div style="overflow-x: auto"><table>{rows}</table></div>' if rows else ""


def forecast_figure(found: Mapping[str, Any]) -> dict[str, Any]:
    """What was expected and what came, over time; each forecast stands at the instant it was made."""
    points = found["points"]
    traces = []
    for key, title, color, dash in (
        ("observed", "came", "--kv", "solid"),
        ("expected", "expected within the horizon", "--limit", "dot"),
    ):
        line = {"color": f"var({color})", "width": 2, "dash": dash, "shape": "hv"}
        traces.append(
            {"type": "scatter", "mode": "lines", "name": title, "line": line,
             "x": [p["at_s"] for p in points], "y": [p[key] for p in points]}
        )  # fmt: skip
    return {
        "title": "Forecast",
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "simulated seconds"}},
            "yaxis": {"title": {"text": "requests/s"}, "rangemode": "tozero"},
            "showlegend": True,
            "hovermode": "x unified",
        },
    }
