"""*Fidelity*: how far predictions are from what was measured, and what the step times of the inputs rest on."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.progress import watch
from dashboard.state import ask, asked, edited, keep_upload, measurements
from dashboard.theme import plain
from twin.errors import InputError
from twin.scenario import validated_regimes

PLACE, ORIGIN = "fidelity", "origin"


def page() -> None:
    """The page."""
    st.title("Fidelity")
    st.markdown(
        "How far to trust a figure: what its step times rest on, and how far the twin was from a measured server."
    )
    st.subheader("What the inputs of What if rest on")
    document = edited()
    if st.session_state.get("origin_of") != document or asked(ORIGIN) is None:
        # Once: what has failed would be begun anew with each look at it.
        ask("origin", ORIGIN, document=document)
        st.session_state["origin_of"] = document
    job = watch(ORIGIN)
    if job is not None:
        _origin(job.result)
    st.subheader("Predicted beside measured")
    _regimes()
    st.subheader("Your own measurements")
    st.markdown(
        "Hold a run of the twin against requests that you measured: both as requests.parquet, as twin run --out and "
        "twin-real replay --out write them."
    )
    left, right = st.columns(2)
    predicted = left.file_uploader(
        "Predicted (requests.parquet)", ["parquet"], key="fidelity.predicted"
    )
    measured = right.file_uploader(
        "Measured (requests.parquet)", ["parquet"], key="fidelity.measured"
    )
    if st.button("Hold them against each other", disabled=predicted is None or measured is None):
        assert predicted is not None
        assert measured is not None
        try:
            for side, file in (("predicted", predicted), ("measured", measured)):
                keep_upload(f"{side}.parquet", file.getvalue(), measurements())
        except InputError as error:
            st.error(plain(str(error)))
            return
        ask("validate", PLACE, uploads=dict(measurements()))
    job = watch(PLACE)
    if job is not None:
        _table(job.result["rows"])


def _regimes() -> None:
    """The table of `twin validate` that comes with the twin."""
    regimes = validated_regimes()
    if not regimes:
        st.info("No measured regime ships with this version.")
        return
    rows = [
        {
            "measured set-up": regime.name,
            "runs": regime.runs,
            "figure": metric,
            "median error, %": 100 * error,
            "largest error, %": 100 * regime.largest[metric] if metric in regime.largest else None,
        }
        for regime in regimes
        for metric, error in regime.errors.items()
    ]
    table = pd.DataFrame(rows).sort_values("median error, %", ascending=False)
    st.dataframe(table, hide_index=True)
    st.caption(
        "Published measurements that were played through the twin, the worst first: the size of predicted / measured - "
        "1, its median and its largest over the runs of a set-up. A run of yours is told the errors of the nearest of "
        "them, or that it is not validated; docs/fidelity.md has every row and the causes of misses."
    )


def _origin(result: Mapping[str, Any]) -> None:
    st.markdown(
        f"Step times of {result['model']} on {result['gpu']}: {result['engine']}, {result['source']}, {result['date']}."
    )
    for warning in result["warnings"]:
        st.warning(plain(warning))
    st.markdown("\n".join(f"- {plain(note)}" for note in result["notes"]))
    if result["fit_error"]:
        rows = pd.DataFrame(result["fit_error"].items(), columns=["part", "error of the fit"])
        st.dataframe(rows, hide_index=True)
        st.caption(
            "How far the fitted times are from the op tables or steps they were fitted on, as relative errors."
        )
    else:
        st.markdown(
            "They are not fitted on measured steps; twin-real calibrate fits a profile of your own GPU."
        )


def _table(rows: list[Mapping[str, Any]]) -> None:
    table = pd.DataFrame(
        {
            "regime": [row["regime"] for row in rows],
            "figure": [row["metric"] for row in rows],
            "predicted": [row["predicted"] for row in rows],
            "measured": [row["measured"] for row in rows],
            "error, %": [None if row["error"] is None else 100 * row["error"] for row in rows],
            "requests": [row["requests"] for row in rows],
        }
    )
    st.dataframe(table, hide_index=True)
    st.caption(
        "The worst first. Latencies are seconds, rates per second, queues requests without a token yet; the error is "
        "predicted / measured - 1: above 0 the twin says too much. Only requests that completed count."
    )
