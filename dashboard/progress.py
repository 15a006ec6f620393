"""A job while it runs: a bar, a button that ends it, and what became of it."""

import streamlit as st

from dashboard.jobs import Job
from dashboard.state import asked, jobs, session
from dashboard.theme import sentences

LOOK_S = 0.3


def watch(place: str) -> Job | None:
    """Show a job that runs, or why there is no result; the job if it is done."""
    refused = st.session_state.get(f"{place}_failed")
    if refused:
        st.error(sentences(refused))
        return None
    job = asked(place)
    if job is None:
        if st.session_state.get(place):
            st.info("This result is not kept any more; run it again.")
        return None
    if not job.is_over:
        _running(place)
        return None
    if job.state == "failed":
        st.error(sentences(job.error))
        return None
    if job.state == "cancelled":
        st.warning("Cancelled. There is no result.")
        return None
    return job


@st.fragment(run_every=LOOK_S)
def _running(place: str) -> None:
    job = asked(place)
    if job is None or job.is_over:
        st.rerun()
    assert job is not None
    share = min(1.0, job.done / job.total) if job.total else 0.0
    waiting = "waiting for a free worker" if job.state == "waiting" else "running"
    left, right = st.columns([5, 1], vertical_alignment="center")
    left.progress(share, text=job.text or waiting)
    if right.button("Cancel", key=f"{place}_cancel"):
        jobs().cancel(job.key, session())
        st.session_state[f"{place}_failed"] = "Cancelled. There is no result."
        st.rerun()
