"""A run on a page: what was found, beside its objectives, over time, by tier; and as files."""

import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.theme import plain, show
from twin.report.texts import count, duration, limit, notes, share, trust
from twin.whatif.documents import to_yaml, trimmed

READ_TIMES = {
    "replicas": "Steps are pods; a mark is a decision of the autoscaler, its reason shows under the pointer.",
    "queue": "Requests that wait, stacked by tier: ready to run, or held for a batch. Above 0 for long = overload.",
    "running": "Requests that are being served. At the dotted line every slot is taken.",
    "kv": "Share of the KV blocks in use. At 100 % requests wait for blocks, or lose theirs.",
    "decode": "Tokens generated per second. A tick at the foot is a preemption.",
    "prefill": "Prompt tokens computed per second: high while prompts are read.",
    "goodput": "Requests per second that met every objective of their tier.",
    "preempted": "Requests per second that lost their KV blocks and must be computed again.",
}
READ_SHARES = (
    "The curve says which share of the requests was done within a time. Further left is faster; a dashed line is an "
    "objective."
)
GROUPS = {
    "Queue and replicas": ("replicas", "queue", "running"),
    "Memory and preemptions": ("kv", "preempted"),
    "Tokens and goodput": ("decode", "prefill", "goodput"),
}


def show_result(result: Mapping[str, Any], key: str) -> None:
    """Everything of one run."""
    summary = result["summary"]
    st.success(plain(summary["verdict"]))
    st.caption(f"Trust: {plain(trust(summary))}.")
    for warning in summary["warnings"]:
        st.warning(plain(warning))
    _tiles(summary)
    _downloads(result, key)
    _views(result, key)


def _tiles(summary: Mapping[str, Any]) -> None:
    judged = [
        (f"{tier} {name.replace('_', ' ')}", found)
        for tier, of in summary["objectives"].items()
        for name, found in of.items()
    ]
    tiers = summary["tiers"].values()
    measured = sum(tier["measured"] for tier in tiers)
    good = sum(tier["good"] for tier in tiers)
    rates = [tier["goodput_rps"] for tier in tiers if tier["goodput_rps"] is not None]
    cells: list[tuple[str, str, str | None, str]] = []
    for name, found in judged:
        state = {True: "met", False: "missed", None: "nothing to judge"}[found["met"]]
        colour = "normal" if found["met"] else "inverse" if found["met"] is False else "off"
        sign = "" if found["met"] is not False else "-"
        cells.append(
            (
                name,
                duration(found["value_s"]),
                f"{sign}{state}: limit {limit(found['limit_s'])}",
                colour,
            )
        )
    colours = {"normal": "normal", "inverse": "normal", "off": "off"}
    cells += [
        ("Goodput", f"{sum(rates):.3g}/s" if rates else "-", None, "off"),
        ("Good requests", share(good / measured if measured else None), None, "off"),
        ("GPU-hours", f"{summary['cost']['gpu_hours']:.3g}", None, "off"),
        ("GPUs busy", share(summary["engine"]["busy_share"]), None, "off"),
    ]
    # Row by row, so that a narrow page has them in this order, too.
    for start in range(0, len(cells), 4):
        columns = st.columns(4)
        for column, (name, value, delta, colour) in zip(columns, cells[start:], strict=False):
            column.metric(
                name, value, delta, delta_color=colours[colour], delta_arrow="off", border=True  # type: ignore[arg-type]
            )  # fmt: skip


@st.fragment
def _views(result: Mapping[str, Any], key: str) -> None:
    """What only shows: choosing another view runs nothing again."""
    summary = result["summary"]
    view = st.segmented_control(
        "View", ["Latency by tier", *GROUPS, "Scaling", "Tables", "Configuration"], default="Latency by tier",
        key=f"{key}.view",
    )  # fmt: skip
    lines = result["timelines"]
    if view in GROUPS:
        for name in GROUPS[view]:
            if name in lines:
                show(lines[name], READ_TIMES[name], f"{key}.{name}", 260)
    elif view == "Scaling":
        _scaling(summary)
    elif view == "Tables":
        _tables(summary)
    elif view == "Configuration":
        for note in notes(summary):
            st.markdown(f"- {plain(note)}")
        st.code(to_yaml(result["document"]), language="yaml")
    else:
        columns = st.columns(3)
        for column, (name, figure) in zip(columns, result["distributions"].items(), strict=False):
            with column:
                show(figure, READ_SHARES, f"{key}.{name}")


def _scaling(summary: Mapping[str, Any]) -> None:
    fleet = summary["fleet"]
    if fleet is None:
        st.info(
            "The replicas are there from the beginning to the end; switch the autoscaler on to see it decide."
        )
        return
    rows = [
        {
            "at, s": decision["at_s"],
            "from": decision["from"],
            "to": decision["to"],
            "ready": decision["ready"],
            "reason": decision["reason"],
        }
        for decision in fleet["decisions"]
    ]
    st.caption(
        "Each look of the autoscaler that changed the number of replicas, or met an error, and why."
    )
    st.dataframe(pd.DataFrame(rows), hide_index=True)


def _tables(summary: Mapping[str, Any]) -> None:
    stat = (
        st.segmented_control("Statistic", ["p50", "p90", "p95", "p99", "mean"], default="p99")
        or "p99"
    )
    rows = [
        {
            "tier": name,
            "offered": f"{tier['offered']:,}",
            "completed": f"{tier['completed']:,}",
            "goodput, requests/s": _figure(tier["goodput_rps"]),
            "attained, %": _figure(tier["attainment"], 100),
            **{
                f"{latency.upper()} {stat}, s": _figure(tier[f"{latency}_s"][stat])
                for latency in ("ttft", "tpot", "e2e", "queue")
            },
        }
        for name, tier in summary["tiers"].items()
    ]
    st.dataframe(pd.DataFrame(rows), hide_index=True)
    meaning = (
        "average" if stat == "mean" else "time within which that share of the requests was done"
    )
    st.caption(
        f"{stat} is the {meaning}. Seconds; attained is the share of the requests that met every objective of their "
        "tier."
    )
    used = {
        "steps": count(summary["engine"]["steps"]),
        "output tokens per second": count(summary["throughput"]["output_tokens_per_s"] or 0),
        **{f"GPU time: {use}": share(value) for use, value in summary["gpu_time"].items()},
    }
    st.dataframe(pd.DataFrame(used.items(), columns=["figure", "value"]), hide_index=True)


def _figure(value: float | None, times: float = 1) -> str:
    """Four digits of it; a dash for none."""
    return "-" if value is None else f"{times * value:.4g}"


# --- files --------------------------------------------------------------------------------


def _downloads(result: Mapping[str, Any], key: str) -> None:
    """Files of the run on screen, whatever the inputs say by now."""
    name = re.sub(r"[^\w.-]+", "-", result["summary"]["scenario"])[:60].strip("-.") or "scenario"
    left, right, _ = st.columns([1, 1, 2])
    left.download_button(
        "Download the result (zip)", archive(result), f"{name}.zip", "application/zip", on_click="ignore",
        key=f"{key}.zip", help="summary.json with configuration, seed and version; scenario.yaml; tiers.csv; "
        "timeseries.csv. Of the run that is shown.",
    )  # fmt: skip
    right.download_button(
        "Download the scenario (YAML)", to_yaml(result["document"]), f"{name}.yaml", "application/yaml",
        on_click="ignore", key=f"{key}.yaml", help="`twin run` takes it, and so does the box YAML above.",
    )  # fmt: skip


def archive(result: Mapping[str, Any]) -> bytes:
    """The run as a zip; the same run gives the same bytes but for its wall time."""
    summary = {
        **result["summary"],
        "scenario_document": trimmed(result["document"]),
        "version": result["version"],
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in (
            ("summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n"),
            ("scenario.yaml", to_yaml(result["document"])),
            ("tiers.csv", _csv(_tier_rows(result["summary"]))),
            ("timeseries.csv", _csv(_series_rows(result["timelines"]))),
        ):
            file.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text)
    return out.getvalue()


def _csv(rows: Iterator[list[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _tier_rows(summary: Mapping[str, Any]) -> Iterator[list[Any]]:
    stats = ("p50", "p90", "p95", "p99", "mean")
    latencies = ("ttft", "tpot", "itl", "e2e", "queue", "prefill")
    counts = (
        "offered",
        "completed",
        "refused",
        "timed_out",
        "aborted",
        "unfinished",
        "goodput_rps",
        "attainment",
    )
    yield ["tier", *counts, *(f"{latency}_{stat}_s" for latency in latencies for stat in stats)]
    for name, tier in summary["tiers"].items():
        values = (tier[f"{latency}_s"][stat] for latency in latencies for stat in stats)
        yield [name, *(tier[key] for key in counts), *values]


def _series_rows(lines: Mapping[str, Any]) -> Iterator[list[Any]]:
    yield ["chart", "line", "time_s", "value"]
    for chart, figure in lines.items():
        for trace in figure["data"]:
            for at, value in zip(trace["x"], trace["y"], strict=True):
                yield [chart, trace.get("name", ""), at, value]
