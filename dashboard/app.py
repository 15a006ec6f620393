"""The dashboard. `python -m dashboard` starts it; every page asks worker processes and holds no model of its own."""

import streamlit as st

from dashboard import (
    page_compare,
    page_fidelity,
    page_pareto,
    page_upload,
    page_waits,
    page_what_if,
)
from dashboard.state import base, edited, jobs, restart_with
from dashboard.theme import sentences

st.set_page_config(page_title="vllm-twin: what if", layout="wide")
jobs()
base()
PAGES = {
    "what_if": st.Page(page_what_if.page, title="What if", default=True),
    "compare": st.Page(page_compare.page, title="Compare", url_path="compare"),
    "pareto": st.Page(page_pareto.page, title="Pareto", url_path="pareto"),
    "waits": st.Page(page_waits.page, title="Batching wait", url_path="batching-wait"),
    "fidelity": st.Page(page_fidelity.page, title="Fidelity", url_path="fidelity"),
    "upload": st.Page(page_upload.page, title="Upload", url_path="upload"),
}
st.session_state["pages"] = PAGES
page = st.navigation(list(PAGES.values()))
if st.session_state.get("page", page.title) != page.title and page is PAGES["what_if"]:
    # Inputs that were not shown for a while have forgotten what was typed into them.
    restart_with(edited())
st.session_state["page"] = page.title
if st.session_state.get("link_error"):
    st.error(sentences(st.session_state["link_error"]))
page.run()
