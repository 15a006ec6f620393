"""What one browser session has, and what all share: jobs, uploads, the configuration being edited."""

import atexit
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import streamlit as st

from dashboard.jobs import Job, Jobs
from dashboard.limits import Limits
from dashboard.links import KEY, decode
from dashboard.safety import Refused, look
from twin.errors import InputError
from twin.scenario_faults import Origin
from twin.scenario_yaml import plain_copy

LIMITS = Limits()

DEFAULT: dict[str, Any] = {
    "name": "what-if",
    "model": "meta-llama/Llama-3.1-8B",
    "hardware": {"gpu": "H100", "tensor_parallel_size": 1, "dtype": "bfloat16"},
    "engine": {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
    },
    "policy": "tiered",
    "traffic": [
        {
            "arrivals": {"process": "poisson", "rate": 40.0},
            "prompt_tokens": {"uniform": [64, 2048]},
            "output_tokens": {"uniform": [16, 400]},
            "requests": 2000,
            "tiers": {"ONLINE": 0.7, "BATCH": 0.2, "OFFLINE": 0.1},
        }
    ],
    "cluster": {"replicas": 2, "router": "least_connections"},
    "objectives": {"ONLINE": {"ttft_p99": 1.0, "tpot_p99": 0.05}, "BATCH": {"e2e_p99": 60.0}},
    "run": {"seed": 1},
}
"""What a page begins with: the chat of examples/chat-8b.yaml, somewhat less of it."""


@st.cache_resource
def jobs() -> Jobs:
    """The jobs of this server."""
    made = Jobs(LIMITS)
    atexit.register(made.close)
    return made


@st.cache_resource
def _upload_root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="twin-uploads-")


def session() -> str:
    """A name for this browser session."""
    return cast(str, st.session_state.setdefault("session", uuid.uuid4().hex))


def uploads() -> dict[str, str]:
    """Traces of this session: the name they were uploaded under -> where they are."""
    return cast(dict[str, str], st.session_state.setdefault("uploads", {}))


def measurements() -> dict[str, str]:
    """Tables of requests of this session that are no traces to play: predicted.parquet and measured.parquet."""
    return cast(dict[str, str], st.session_state.setdefault("measurements", {}))


def keep_upload(name: str, data: bytes, among: dict[str, str] | None = None) -> None:
    """Put a file among the traces of this session, or among others, in place of one of the same name.

    Raises InputError for too many, for one that is too large, and where the server keeps no more.
    """
    if len(data) > LIMITS.upload_bytes:
        raise InputError(
            f"{name}: {len(data):,} bytes; a page takes at most {LIMITS.upload_bytes:,}, twin run any size"
        )
    mine = uploads() if among is None else among
    if name not in mine and len(mine) >= LIMITS.uploads:
        raise InputError(
            f"{len(mine)} traces are uploaded already; a session has at most {LIMITS.uploads}"
        )
    root = Path(_upload_root().name)
    folder = root / session()
    folder.mkdir(exist_ok=True)
    if name in mine:
        Path(mine.pop(name)).unlink(missing_ok=True)
    kept = sum(path.stat().st_size for path in root.glob("*/*"))
    if kept + len(data) > LIMITS.kept_bytes:
        raise InputError(
            f"{name}: all sessions together have uploaded {kept:,} bytes; this server keeps at most "
            f"{LIMITS.kept_bytes:,} until it is started anew"
        )
    # The name of the browser is shown, never used as a path; its ending tells the format.
    ending = "".join(Path(name).suffixes[-2:])
    path = folder / f"{uuid.uuid4().hex}{ending if ending.replace('.', '').isalnum() else ''}"
    path.write_bytes(data)
    mine[name] = str(path)


def base() -> dict[str, Any]:
    """The configuration that the inputs begin from: of the link, or the default."""
    if "base" not in st.session_state:
        text, problem = st.query_params.get(KEY), ""
        try:
            document = decode(text, LIMITS) if text else DEFAULT
        except Refused as error:
            document, problem = DEFAULT, str(error)
        try:
            look(document, uploads(), Origin("link", Path(), {}, {}))
        except InputError as error:
            # Not a scenario yet: what it has of one is in the inputs, and can be put right there.
            problem = str(error)
        restart_with(document)
        st.session_state["link_error"] = problem
    return cast(dict[str, Any], st.session_state["base"])


def restart_with(document: Mapping[str, Any]) -> None:
    """Let the inputs begin from another configuration."""
    st.session_state["base"] = plain_copy(document)
    st.session_state["generation"] = st.session_state.get("generation", 0) + 1
    st.session_state.pop("edited", None)
    st.session_state.pop("link_error", None)


def edited() -> dict[str, Any]:
    """The configuration as the inputs say it now; the base where they were not shown yet."""
    return cast(dict[str, Any], st.session_state.get("edited") or base())


def ask(kind: str, place: str, **payload: Any) -> Job:
    """Begin a job, or find it; `place` is where its key is remembered in this session."""
    job = jobs().ask(kind, {"uploads": dict(uploads()), **payload}, session())
    st.session_state[place] = job.key
    if job.state == "failed":
        st.session_state[f"{place}_failed"] = job.error
    else:
        st.session_state.pop(f"{place}_failed", None)
    return job


def check_length(text: str) -> None:
    """Raises InputError for more changes than a page reads."""
    if len(text) > LIMITS.changes_chars:
        raise InputError(
            f"{len(text):,} characters of changes; a page takes at most {LIMITS.changes_chars:,}, the command line any "
            "number"
        )


def asked(place: str) -> Job | None:
    """The job of a place; None if none was asked for, or if it was forgotten."""
    key = st.session_state.get(place)
    return None if key is None else jobs().look(key, session())
