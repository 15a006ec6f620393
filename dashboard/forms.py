"""Inputs for the keys of a scenario that people change most; everything else stays as the scenario says it."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import streamlit as st

from dashboard.fields import AS_IT_IS, Fields
from dashboard.state import uploads
from dashboard.theme import plain
from twin.cluster.routers import ROUTERS
from twin.scenario import traffic_presets
from twin.scenario_build import STOCK_POLICIES
from twin.scenario_yaml import plain_copy
from twin.scheduling import PRESETS
from twin.step_time.catalogue import GPUS, MODELS

POISSON, PRESET, TRACE = "random arrivals", "like a published trace", "an uploaded trace"
DTYPES = ("bfloat16", "fp8", "int8", "int4")
STREAM = ("traffic", 0)
USUAL_SCALER: dict[str, Any] = {
    "minReplicas": 1,
    "maxReplicas": 6,
    "metrics": [
        {
            "type": "Pods",
            "pods": {
                "metric": {"name": "vllm:num_requests_waiting"},
                "target": {"type": "AverageValue", "averageValue": "5"},
            },
        }
    ],
}
TARGET = ("metrics", 0, "pods", "target", "averageValue")


def draw(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """All inputs; the document that they say. Untouched ones leave what it says, and what it does not say, as it is."""
    fields = Fields(document, key)
    first, second, third = st.columns(3)
    with first:
        st.markdown("**Traffic**")
        gone = _traffic(fields)
    with second:
        st.markdown("**Model and engine**")
        _engine(fields)
    with third:
        st.markdown("**Cluster and objectives**")
        _cluster(fields)
        _objectives(fields, gone)
    return fields.document


# --- traffic ------------------------------------------------------------------------------


def _traffic(fields: Fields) -> list[str]:
    """Its inputs; the tiers that they have left without requests."""
    streams = fields.at("traffic")
    stream = streams[0] if isinstance(streams, list) and len(streams) == 1 else None
    kinds = [AS_IT_IS, POISSON, PRESET, TRACE]
    own = _kind(stream)
    kind = st.selectbox(
        "Requests come", kinds, kinds.index(own), key=fields.name("kind"),
        help="Change the rest of the traffic in the YAML below.",
    )  # fmt: skip
    if kind not in (own, AS_IT_IS):
        started = _begun(kind, stream)
        if started is None:
            st.info("Nothing is uploaded yet: the page Upload takes a trace.")
            kind = AS_IT_IS
        else:
            fields.put([started], "traffic")
    if kind == POISSON:
        fields.number("Requests per second", *STREAM, "arrivals", "rate", is_whole=False)
        fields.number("Requests", *STREAM, "requests")
        _lengths(fields, "Prompt tokens, from", "prompt_tokens")
        _lengths(fields, "Output tokens, from", "output_tokens")
    elif kind == PRESET:
        fields.choice("Trace", list(traffic_presets()), *STREAM, "preset")
        fields.number("Requests or conversations per second", *STREAM, "rate", is_whole=False)
        fields.number("Requests", *STREAM, "requests")
    elif kind == TRACE:
        fields.choice("Trace", list(uploads()), *STREAM, "trace")
        fields.number("Times as fast", *STREAM, "speedup", is_whole=False)
        fields.number("Requests at most", *STREAM, "requests")
    gone = [] if kind == AS_IT_IS else _tiers(fields)
    fields.number("Seed", "run", "seed", help_text="The same seed gives the same requests.")
    return gone


def _kind(stream: Any) -> str:
    """Which of the forms of traffic that have inputs a stream has."""
    if not isinstance(stream, dict):
        return AS_IT_IS
    if stream.get("trace") is not None:
        return TRACE
    if stream.get("preset") is not None:
        return PRESET
    arrivals = stream.get("arrivals")
    is_simple = isinstance(arrivals, dict) and arrivals.get("process") == "poisson"
    others = ("sessions", "prefixes", "reuse", "lengths_from")
    return POISSON if is_simple and not any(map(stream.get, others)) else AS_IT_IS


def _begun(kind: str, before: Any) -> dict[str, Any] | None:
    """A stream of another kind for the same tiers; None where nothing is uploaded that it could play."""
    kept = before if isinstance(before, dict) else {}
    asked = {key: kept[key] for key in ("tier", "tiers") if kept.get(key) is not None}
    if kind == POISSON:
        return {
            "arrivals": {"process": "poisson", "rate": 10.0},
            "prompt_tokens": {"uniform": [64, 2048]},
            "output_tokens": {"uniform": [16, 400]},
            "requests": 2000,
            **asked,
        }
    if kind == PRESET:
        return {"preset": "azure-2023-conv", "rate": 10.0, "requests": 2000, **asked}
    if not uploads():
        return None
    return {"trace": next(iter(uploads())), "requests": 5000, **asked}


def _lengths(fields: Fields, label: str, key: str) -> None:
    pair = fields.at(*STREAM, key, "uniform")
    if not isinstance(fields.at(*STREAM, key), dict) or not (
        isinstance(pair, list) and len(pair) == 2
    ):
        fields.as_it_is(label, *STREAM, key)
        return
    left, right = st.columns(2)
    with left:
        fields.number(label, *STREAM, key, "uniform", 0)
    with right:
        fields.number("to", *STREAM, key, "uniform", 1)


def _tiers(fields: Fields) -> list[str]:
    """Shares of the three usual tiers, in per cent of all; anything else stays as it is. Tiers that have none left."""
    tiers, label = fields.at(*STREAM, "tiers"), "Tiers"
    if fields.at(*STREAM, "tier") is not None:
        fields.as_it_is("Tier", *STREAM, "tier")
        return []
    if tiers is not None and not _is_usual(tiers):
        fields.as_it_is(label, *STREAM, "tiers")
        return []
    whole = sum(tiers.values()) if tiers else 1.0
    found, moved = {}, False
    for column, tier, who in zip(
        st.columns(2), ("BATCH", "OFFLINE"), ("may wait for seconds", "nobody waits for"), strict=True
    ):  # fmt: skip
        with column:
            percent = round(100 * (tiers or {}).get(tier, 0.0) / whole, 9)
            found[tier] = fields.ask_number(
                f"{tier}, %", percent, False, (*STREAM, "share", tier),
                f"Share of requests that {who}. The rest is ONLINE.", empty="0",
            ) or 0.0  # fmt: skip
            moved |= found[tier] != percent
    if not moved:
        return []
    for tier, most in (("BATCH", 100.0), ("OFFLINE", 100.0 - min(100.0, found["BATCH"]))):
        if found[tier] > most:
            st.warning(f"{tier} is taken as {most:g} %: no more is left of all requests.")
            found[tier] = most
    found["ONLINE"] = 100.0 - found["BATCH"] - found["OFFLINE"]
    shares = {
        tier: round(found[tier] / 100, 12) for tier in ("ONLINE", "BATCH", "OFFLINE") if found[tier]
    }
    fields.put(shares, *STREAM, "tiers")
    gone = [tier for tier in tiers or () if tier not in shares]
    for tier in gone:
        if fields.at("objectives", tier) is not None:
            st.info(plain(f"The objectives of {tier} are left out with its requests."))
            fields.drop("objectives", tier)
    return gone


def _is_usual(tiers: Any) -> bool:
    """Whether shares of the three tiers can be shown as inputs."""
    return (
        isinstance(tiers, dict)
        and set(tiers) <= {"ONLINE", "BATCH", "OFFLINE"}
        and all(type(share) in (int, float) and 0 <= share < math.inf for share in tiers.values())
        and 0 < sum(tiers.values()) < math.inf
    )


# --- engine -------------------------------------------------------------------------------


def _engine(fields: Fields) -> None:
    fields.choice("Model", list(MODELS), "model")
    fields.choice("GPU", list(GPUS), "hardware", "gpu")
    left, right = st.columns(2)
    with left:
        fields.number("GPUs a replica", "hardware", "tensor_parallel_size")
    with right:
        fields.choice("Weights", list(DTYPES), "hardware", "dtype")
    fields.choice(
        "Policy", [*PRESETS, *STOCK_POLICIES], "policy",
        help_text="vllm-fcfs and vllm-priority are an unmodified vLLM.",
    )  # fmt: skip
    fields.number("max_num_seqs", "engine", "max_num_seqs", help_text="Requests that run at once.")
    fields.number(
        "max_num_batched_tokens", "engine", "max_num_batched_tokens",
        help_text="Tokens that one step computes at most.",
    )  # fmt: skip
    fields.toggle("Prefix caching", True, "engine", "enable_prefix_caching")


# --- cluster ------------------------------------------------------------------------------


def _cluster(fields: Fields) -> None:
    fields.number("Replicas", "cluster", "replicas", help_text="At the beginning.")
    fields.choice("Router", list(ROUTERS), "cluster", "router")
    cluster = fields.at("cluster")
    if cluster is not None and not isinstance(cluster, dict):
        return
    written = fields.at("cluster", "hpa")
    is_on = st.toggle(
        "Autoscaler (HPA on waiting requests)", written is not None, key=fields.name("hpa"),
        help="An autoscaling/v2 HorizontalPodAutoscaler; the YAML below takes any other.",
    )  # fmt: skip
    if not is_on:
        if written is not None:
            fields.drop("cluster", "hpa")
        return
    if written is None:
        fields.put(plain_copy(USUAL_SCALER), "cluster", "hpa")
    elif not isinstance(written, dict):
        fields.as_it_is("Autoscaler", "cluster", "hpa")
        return
    columns = st.columns(3)
    with columns[0]:
        fields.number("least", "cluster", "hpa", "minReplicas")
    with columns[1]:
        fields.number("most", "cluster", "hpa", "maxReplicas")
    target = _target(fields)
    if target is None:
        return
    path = ("cluster", "hpa", *TARGET)
    with columns[2]:
        found = fields.ask_number("waiting each", target, True, path)
    if found not in (None, target):
        fields.put(str(found), *path)


def _target(fields: Fields) -> int | None:
    """The target of an HPA that looks at waiting requests alone and says it as a whole number; None for any other."""
    metrics = fields.at("cluster", "hpa", "metrics")
    metric = fields.at("cluster", "hpa", "metrics", 0, "pods", "metric")
    value = fields.at("cluster", "hpa", *TARGET)
    if not (isinstance(metrics, list) and len(metrics) == 1 and isinstance(value, str)):
        return None
    is_waiting = metric == {"name": "vllm:num_requests_waiting"}
    return (
        int(value)
        if is_waiting and value.isascii() and value.isdigit() and len(value) < 10
        else None
    )


def _objectives(fields: Fields, gone: Collection[str]) -> None:
    st.markdown("**Objectives, seconds** (0 = none)")
    for tier, name in (("ONLINE", "ttft_p99"), ("ONLINE", "tpot_p99"), ("BATCH", "e2e_p99")):
        if tier in gone:
            continue
        path = ("objectives", tier, name)
        written = fields.at(*path)
        found = fields.ask_number(
            f"{tier} {name.replace('_', ' ')}", written, False, path, empty="none"
        )
        if found == written:
            continue
        if found:
            fields.put(found, *path)
            continue
        fields.drop(*path)
        if not fields.at("objectives", tier):
            fields.drop("objectives", tier)
