"""*Batching wait*: what holding requests for a batch buys, tier by tier."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.progress import watch
from dashboard.state import ask, edited
from dashboard.theme import plain, show
from twin.whatif.charts import figure_of
from twin.whatif.waits import SEEDS

PLACE = "waits"
MS = [0, 5, 10, 25, 50, 100, 150, 200]


def page() -> None:
    """The page."""
    st.title("Batching wait")
    st.markdown(
        "A tier may hold its requests for a while, so that more of them start together. Each tier's wait is varied "
        "alone, from 0 to 200 ms; the others stay as the policy of the page What if has them."
    )
    left, right = st.columns(2)
    tiers = left.multiselect(
        "Tiers", ["ONLINE", "BATCH", "OFFLINE"], ["ONLINE", "BATCH"], key="waits.tiers"
    )
    chosen = right.multiselect("Waits, ms", MS, [0, 10, 50, 200], key="waits.ms")
    seeds = left.slider(
        "Seeds",
        2,
        20,
        SEEDS,
        key="waits.seeds",
        help="Each wait meets the same arrivals under each seed. Twice as many make intervals about 0.7 times as wide.",
    )
    if st.button("Explore", type="primary"):
        if len(chosen) < 2 or not tiers:
            st.error("Choose at least one tier and two waits.")
            return
        waits = [ms / 1000 for ms in sorted(chosen)]
        ask("waits", PLACE, document=edited(), tiers=tiers, waits=waits, seeds=seeds)
    job = watch(PLACE)
    if job is not None:
        _show(job.result, job.key)


def _show(result: Mapping[str, Any], key: str) -> None:
    many = len(result["seeds"])
    for of in result["tiers"].values():
        (st.success if of["verdict"] == "gain" else st.info)(plain(of["text"]))
    st.caption(
        f"Rests on {many} seeds of this traffic, the same for every wait; all intervals hold together with 98 %. What "
        "they leave open is not called a gain."
    )
    left, right = st.columns(2)
    with left:
        show(
            front_figure(result),
            f"Down and to the right is better. Each mark is one wait of one tier, the mean of {many} seeds; where all "
            "marks of a tier lie above each other, waiting costs time and buys nothing.",
            f"{key}.front",
            360,
        )
    with right:
        show(
            latency_figure(result),
            f"How the time to first token of a tier grows with its own wait; means of {many} seeds.",
            f"{key}.latency",
            360,
        )
    st.dataframe(pd.DataFrame(_rows(result)), hide_index=True)
    st.caption("Means over the seeds; the difference is from the shortest wait, with its interval.")


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for tier, of in result["tiers"].items():
        for point in of["points"]:
            yield {
                "tier": tier,
                "wait, ms": 1000 * point["wait_s"],
                "output tokens/s": point["throughput"],
                "difference": point.get("change", ""),
                "TTFT p50, s": point["p50"],
                "TTFT p99, s": point["p99"],
                "goodput, requests/s": point["goodput"],
            }


def front_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """Throughput against the median time to first token, a line a tier."""
    many = len(result["seeds"])
    traces = [
        _line(
            tier,
            number,
            [point["throughput"] for point in of["points"]],
            [None if point["p50"] is None else 1000 * point["p50"] for point in of["points"]],
            [f"{1000 * point['wait_s']:g} ms" for point in of["points"]],
        )
        for number, (tier, of) in enumerate(result["tiers"].items())
    ]
    return figure_of(
        f"Throughput against latency, means of {many} seeds",
        traces,
        "output tokens/s",
        "TTFT p50 of the tier, ms",
    )


def latency_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """TTFT by wait, a line a tier."""
    many = len(result["seeds"])
    traces = [
        _line(
            tier,
            number,
            [1000 * point["wait_s"] for point in of["points"]],
            [None if point["p50"] is None else 1000 * point["p50"] for point in of["points"]],
            None,
        )
        for number, (tier, of) in enumerate(result["tiers"].items())
    ]
    return figure_of(
        f"Time to first token by wait, means of {many} seeds",
        traces,
        "longest wait, ms",
        "TTFT p50, ms",
    )


def _line(
    tier: str, number: int, x: list[Any], y: list[Any], text: list[str] | None
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers+text" if text else "lines+markers",
        "name": tier,
        "x": x,
        "y": y,
        "text": text,
        "textposition": "top center",
        "line": {"color": f"var(--tier{number % 6})", "width": 2},
    }
