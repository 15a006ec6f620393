"""*Upload*: a trace of one's own, looked at as `twin trace check` does, and kept for this session."""

import streamlit as st

from dashboard.progress import watch
from dashboard.state import LIMITS, ask, keep_upload, uploads
from dashboard.theme import plain
from twin.errors import InputError

PLACE = "upload"
ENDINGS = ["csv", "jsonl", "json", "gz", "parquet"]


def page() -> None:
    """The page."""
    st.title("Upload")
    st.markdown(
        "A trace of requests (Azure, BurstGPT, Mooncake, ShareGPT, our own CSV or JSON lines; gzip too). It stays on "
        "this server until it is stopped, is seen by this browser session alone, and may have "
        f"{LIMITS.upload_bytes >> 20} MiB."
    )
    file = st.file_uploader("Trace", ENDINGS, key="upload.file")
    if file is not None and st.button("Check it", type="primary"):
        try:
            keep_upload(file.name, file.getvalue())
        except InputError as error:
            st.error(plain(str(error)))
            return
        _check(file.name)
    names = list(uploads())
    if names:
        left, right = st.columns([3, 1], vertical_alignment="bottom")
        name = left.selectbox("Uploaded in this session", names, key="upload.name")
        if right.button("Check again"):
            _check(name)
    job = watch(PLACE)
    if job is not None:
        found = job.result["found"]
        if found["malformed"]["total"]:
            st.error(
                f"{found['malformed']['total']:,} lines are malformed; a run stops at the first. They are named below."
            )
        else:
            st.success(
                f"{found['requests']:,} requests, nothing malformed: the page What if can play them."
            )
        st.code(job.result["text"], language=None)


def _check(name: str) -> None:
    # The content is part of the question: another file of the same name is another question.
    ask("check", PLACE, name=name, path=uploads()[name], uploads={name: uploads()[name]})
