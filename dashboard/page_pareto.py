"""*Pareto*: many configurations, of which none is better in everything; a click opens one."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.page_what_if import open_in_what_if
from dashboard.progress import watch
from dashboard.state import ask, check_length, edited
from dashboard.theme import plain, show, with_unit
from twin.errors import InputError
from twin.whatif.axes import parse_vary
from twin.whatif.documents import to_yaml
from twin.whatif.figures import measure
from twin.whatif.optimize import SEEDS
from twin.whatif.pareto import state_of
from twin.whatif.verdict import value_text

PLACE = "pareto"
USUAL = (
    "cluster.replicas=1:4:1\nengine.max_num_seqs=32,64,128,256\npolicy=tiered,priority,vllm-fcfs"
)
GOALS = [
    "gpus",
    "all.goodput",
    "all.attainment",
    "ONLINE.ttft_p99",
    "ONLINE.tpot_p99",
    "output_tokens_per_s",
    "cost",
]


def page() -> None:
    """The page."""
    st.title("Pareto")
    st.markdown(
        "Which configurations are there of which no other is better in every goal, and keeps the objectives? The "
        "search begins from the inputs of the page What if."
    )
    left, right = st.columns(2)
    text = left.text_area(
        "What may change, one key=values a line", USUAL, key="pareto.vary", height=110
    )
    goals = right.multiselect(
        "Goals, the most important first",
        GOALS,
        ["gpus", "all.goodput"],
        key="pareto.goals",
        max_selections=3,
    )
    trials = right.slider("Configurations at most", 4, 80, 24, key="pareto.trials")
    if st.button("Search", type="primary"):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        try:
            check_length(text)
            for line in lines:
                parse_vary(line)
            for goal in goals:
                measure(goal)
        except InputError as error:
            st.error(plain(str(error)))
            return
        ask("search", PLACE, document=edited(), vary=lines, goals=goals, seeds=SEEDS, trials=trials)
    job = watch(PLACE)
    if job is not None:
        _show(job.result, job.key)


@st.fragment
def _show(result: Mapping[str, Any], key: str) -> None:
    found = result["found"]
    (st.warning if found["chosen"] is None else st.success)(plain(found["text"]))
    searched = len(result["seeds"])
    fresh = max((entry["seeds"] for entry in found["confirmed"]), default=0)
    told = [state_of(found), f"Each under {searched} seeds, fewer where the first left no hope."]
    if result["limit_s"] is not None:
        told.append(f"None was begun after {result['limit_s']:g} s; twin optimize has more time.")
    told.append(
        f"What is said above, and the table, rest on {fresh} other seeds, under which the best of the front were run "
        "again."
        if fresh
        else "Nothing kept every objective, so that nothing was run again."
    )
    st.caption(" ".join(told))
    event = show(
        result["figure"],
        f"Each mark is a configuration, the mean over the {searched} seeds of the search. Diamonds are the front: no "
        "other that keeps every objective is better in all goals. The star is the one to take, chosen under the other "
        "seeds; crosses break an objective. Marks can cover each other. Click one to see its configuration.",
        f"{key}.front",
        420,
        on_select="rerun",
        selection_mode="points",
    )
    rows = pd.DataFrame([_row(entry, found) for entry in found["confirmed"]])
    st.dataframe(rows, hide_index=True)
    if fresh:
        st.caption(f"The front again, means over {fresh} seeds that the search has not seen.")
    points = event["selection"]["points"] if event else []
    keys = [point.get("customdata") for point in points]
    names = list(result["documents"])
    if keys:
        chosen = keys[0][0] if isinstance(keys[0], list) else keys[0]
    else:
        front = [entry["key"] for entry in found["front"]] or names
        taken = found["chosen"]["key"] if found["chosen"] else None
        chosen = st.selectbox(
            "Or choose one by name", front, front.index(taken) if taken in front else 0,
            key=f"{key}.name", format_func=lambda name: name.replace(" ; ", ", "),
        )  # fmt: skip
    _one(chosen, result["documents"][chosen], key)


def _row(entry: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name in found["goals"]:
        goal = measure(name)
        values[with_unit(goal.label, goal.unit)] = value_text(entry["figures"].get(name), goal.unit)
    taken = found["chosen"] is not None and entry["key"] == found["chosen"]["key"]
    return {
        "configuration": entry["key"].replace(" ; ", ", "),
        **values,
        "": "take" if taken else "",
    }


def _one(name: str, document: dict[str, Any], key: str) -> None:
    st.markdown(f"**{plain(name.replace(' ; ', ', '))}**")
    left, right, _ = st.columns([1, 1, 2])
    if left.button("Open in What if", key=f"{key}.open"):
        open_in_what_if(document)
    right.download_button(
        "Download as scenario (YAML)", to_yaml(document), "chosen.yaml", "application/yaml", on_click="ignore",
        key=f"{key}.download",
    )  # fmt: skip
