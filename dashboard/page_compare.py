"""*Compare*: two configurations on the same traffic, with intervals and a verdict."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.page_what_if import open_in_what_if
from dashboard.progress import watch
from dashboard.state import ask, check_length, edited
from dashboard.theme import plain, show, with_unit
from twin.errors import InputError
from twin.whatif.charts import figure_of
from twin.whatif.documents import to_yaml
from twin.whatif.tables import difference_of
from twin.whatif.verdict import change_text, value_text

PLACE = "compare"
WORDS = {"open": "within the noise", "none": "nothing to judge"}
IDEAS = {
    "twice as many slots": "engine.max_num_seqs=256",
    "policy priority": "policy=priority",
    "unmodified vLLM": "policy=vllm-fcfs",
    "one replica more": "cluster.replicas=3",
    "no prefix caching": "engine.enable_prefix_caching=false",
    "weights in FP8": "hardware.dtype=fp8",
    "something else": "",
}


def page() -> None:
    """The page."""
    st.title("Compare")
    st.markdown(
        "B against A under the same seeds: same arrivals, same lengths. What differs by more than chance is called "
        "better or worse, and nothing else is."
    )
    choices: dict[str, Any] = {"the inputs of What if": edited()}
    for entry in st.session_state.get("history", {}).values():
        choices[entry["name"]] = entry["document"]
    left, right = st.columns(2)
    a = left.selectbox("A", list(choices), key="compare.a")
    b = right.selectbox(
        "B is", ["A with changes", *(name for name in choices if name != a)], key="compare.b"
    )
    changes = []
    if b == "A with changes":
        idea = right.selectbox("Change", list(IDEAS), key="compare.idea")
        text = right.text_area(
            "Changes, one key=value a line", IDEAS[idea], key=f"compare.changes.{idea}", height=80
        )
        changes = [line.strip() for line in text.splitlines() if line.strip()]
    seeds = left.slider(
        "Seeds",
        2,
        40,
        5,
        key="compare.seeds",
        help="Twice as many make the intervals about 0.7 times as wide.",
    )
    if st.button("Compare", type="primary"):
        name = ", ".join(changes) if b == "A with changes" else b
        if b == "A with changes" and not changes:
            st.error("B is A as it is: write a change, e.g. engine.max_num_seqs=64")
            return
        try:
            check_length("\n".join(changes))
        except InputError as error:
            st.error(plain(str(error)))
            return
        variant: dict[str, Any] = {"name": name, "changes": changes}
        if b != "A with changes":
            variant["document"] = choices[b]
        ask("compare", PLACE, document=choices[a], name=a, variants=[variant], seeds=seeds)
    job = watch(PLACE)
    if job is not None:
        _show(job.result, job.key)


def _show(result: Mapping[str, Any], key: str) -> None:
    comparison = result["comparison"]
    for variant in comparison["variants"]:
        say = {"adopt": st.success, "reject": st.error}.get(variant["verdict"], st.info)
        say(plain(variant["text"]))
        rows = [row for row in variant["judged"] if "change" in row or row["loss"]]
        table = pd.DataFrame(
            {
                "figure": [with_unit(row["label"], row["unit"]) for row in rows],
                "A": [value_text(row["before"], row["unit"]) for row in rows],
                "B": [value_text(row["after"], row["unit"]) for row in rows],
                "difference": [_difference(row) for row in rows],
                "verdict": [WORDS.get(row["verdict"], row["verdict"]) for row in rows],
                "objective of B": [
                    "" if row["met"] is None else "met" if row["met"] else "missed" for row in rows
                ],
            }
        )
        st.dataframe(table, hide_index=True)
        figure = interval_figure(variant["name"], rows)
        if figure is not None:
            show(
                figure,
                "Each bar is the interval of a difference: one that touches 0 may be chance. "
                f"{len(comparison['seeds'])} seeds; all intervals hold together with 98 %.",
                f"{key}.{variant['name']}",
                90 + 30 * len(rows),
            )
        document = result["documents"][variant["name"]]
        left, right, _ = st.columns([1, 1, 2])
        if left.button("Open B in What if", key=f"{key}.open"):
            open_in_what_if(document)
        right.download_button(
            "Download B (YAML)",
            to_yaml(document),
            "variant.yaml",
            "application/yaml",
            on_click="ignore",
        )
    if comparison["note"]:
        st.warning(comparison["note"])


def _difference(row: Mapping[str, Any]) -> str:
    """In figures, with the interval, or why there is none."""
    told = change_text(difference_of(row), row["unit"]) if "change" in row else ""
    return "; ".join(filter(None, (told, row["loss"])))


def interval_figure(name: str, rows: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The relative differences with their intervals; None without any."""
    shown = [row for row in rows if row.get("relative")][::-1]
    if not shown:
        return None
    colors = {"better": "var(--good)", "worse": "var(--bad)"}
    percent = [100 * row["change"] for row in shown]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": percent,
        "y": [row["label"] for row in shown],
        "marker": {
            "size": 9,
            "color": [colors.get(row["verdict"], "var(--limit)") for row in shown],
        },
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [100 * row["high"] - p for row, p in zip(shown, percent, strict=True)],
            "arrayminus": [p - 100 * row["low"] for row, p in zip(shown, percent, strict=True)],
            "color": "var(--limit)",
        },
        "hovertemplate": "%{y}: %{x:+.1f} %<extra></extra>",
    }
    figure = figure_of(f"{name} against A", [trace], "difference, %", "")
    figure["layout"]["yaxis"] = {"type": "category", "automargin": True}
    figure["layout"]["shapes"] = [
        {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": "var(--limit)", "width": 1, "dash": "dot"}}
    ]  # fmt: skip
    return figure
