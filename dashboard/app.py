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
from dashboard.state import base, jobs

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
st.navigation(list(PAGES.values())).run()
