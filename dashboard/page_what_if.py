"""*What if*: a configuration, a click, and what would happen."""

from pathlib import Path

import streamlit as st
import yaml

from dashboard.forms import draw
from dashboard.links import KEY, encode
from dashboard.progress import watch
from dashboard.results import show_result
from dashboard.safety import look, read_untrusted
from dashboard.state import LIMITS, ask, base, restart_with, uploads
from dashboard.theme import sentences
from twin.errors import InputError
from twin.scenario_faults import Origin
from twin.whatif.documents import trimmed

PLACE = "what_if"


def page() -> None:
    """The page."""
    st.title("What if")
    st.markdown("Change something, run it, and see what it does to latency, throughput and cost.")
    document = base()
    with st.expander("Configuration", expanded=True):
        document = draw(document, f"form{st.session_state['generation']}")
        st.session_state["edited"] = document
    _yaml(document)
    left, right = st.columns([1, 3], vertical_alignment="center")
    if left.button("Run", type="primary", key="run"):
        _run(document)
    ran = st.session_state.get("ran")
    if ran is not None and ran != document:
        right.info("The inputs have changed: what is below is of the run before. Run shows theirs.")
    job = watch(PLACE)
    if job is not None:
        right.caption(
            f"Computed in {job.seconds or 0.0:.1f} s. The address of this page now leads back to this configuration."
        )
        _remember(job.key, job.result)
        show_result(job.result, job.key)


def _run(document: dict[str, object]) -> None:
    st.session_state["ran"] = document
    st.session_state.pop("link_error", None)
    st.session_state.pop(PLACE, None)
    st.session_state.pop(f"{PLACE}_failed", None)
    try:
        look(document, uploads(), Origin("scenario", Path(), {}, {}))
    except InputError as error:
        st.session_state[f"{PLACE}_failed"] = str(error)
        return
    ask("run", PLACE, document=document)
    st.query_params[KEY] = encode(document)


def _remember(key: str, result: dict[str, object]) -> None:
    """Runs of this session, for the page Compare."""
    history = st.session_state.setdefault("history", {})
    if key not in history:
        history[key] = {"name": f"run {len(history) + 1}", "document": result["document"]}


def _yaml(document: dict[str, object]) -> None:
    with st.expander("YAML: the whole scenario, to read, to paste, to upload"):
        st.code(
            yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110),
            language="yaml",
        )
        text = st.text_area(
            "Paste a scenario here to begin from it",
            key=f"paste{st.session_state['generation']}",
            height=150,
        )
        file = st.file_uploader(
            "or upload one", ["yaml", "yml"], key=f"file{st.session_state['generation']}"
        )
        if st.button("Begin from this scenario"):
            given = file.getvalue().decode("utf-8", "replace") if file is not None else text
            try:
                found = read_untrusted(given, uploads(), LIMITS)
            except InputError as error:
                st.error(sentences(str(error)))
                return
            restart_with(found)
            st.rerun()


def open_in_what_if(document: dict[str, object]) -> None:
    """Let the page What if begin from a configuration found elsewhere, and go there."""
    restart_with(trimmed(document))
    st.switch_page(st.session_state["pages"]["what_if"])
