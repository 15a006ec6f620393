"""*Batching wait*: what holding requests for a batch buys, tier by tier."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from dashboard.progress import watch
from dashboard.state import ask, edited
from dashboard.theme import plain, show
from twin.whatif.charts import figure_of

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
    chosen = right.multiselect("Waits, ms", MS, [0, 10, 50, 100, 200], key="waits.ms")
    if st.button("Explore", type="primary"):
        if len(chosen) < 2 or not tiers:
            st.error("Choose at least one tier and two waits.")
            return
        waits = [ms / 1000 for ms in sorted(chosen)]
        ask("waits", PLACE, document=edited(), tiers=tiers, waits=waits, seeds=1)
    job = watch(PLACE)
    if job is not None:
        _show(job.result, job.key)


def _show(result: Mapping[str, Any], key: str) -> None:
    for of in result["tiers"].values():
        (st.info if not of["best"] else st.success)(plain(of["text"]))
    left, right = st.columns(2)
    with left:
        show(
            front_figure(result),
            "Down and to the right is better. Each mark is one wait of one tier; where all marks of a tier lie above "
            "each other, waiting costs time and buys nothing.",
            f"{key}.front",
            360,
        )
    with right:
        show(
            latency_figure(result),
            "How the time to first token of a tier grows with its own wait.",
            f"{key}.latency",
            360,
        )


def front_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """Throughput against the median time to first token, a line a tier."""
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
        "Throughput against latency", traces, "output tokens/s", "TTFT p50 of the tier, ms"
    )


def latency_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """TTFT by wait, a line a tier."""
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
    return figure_of("Time to first token by wait", traces, "longest wait, ms", "TTFT p50, ms")


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
