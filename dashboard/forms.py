"""Inputs for the keys of a scenario that people change most; everything else stays as the scenario says it."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from dashboard.state import uploads
from twin.cluster.routers import ROUTERS
from twin.scenario import traffic_presets
from twin.scenario_build import STOCK_POLICIES
from twin.scenario_yaml import plain_copy
from twin.scheduling import PRESETS
from twin.step_time.catalogue import GPUS, MODELS

AS_IT_IS = "as in the scenario"
POISSON, PRESET, TRACE = "random arrivals", "like a published trace", "an uploaded trace"
DTYPES = ("bfloat16", "fp8", "int8", "int4")


class Form:
    """The inputs of one configuration, drawn from a document and written into a copy of it."""

    def __init__(self, document: Mapping[str, Any], key: str) -> None:
        self.document: dict[str, Any] = plain_copy(document)
        self._key = key

    def _name(self, key: str) -> str:
        return f"{self._key}.{key}"

    def _section(self, name: str) -> dict[str, Any]:
        section = self.document.get(name)
        if not isinstance(section, dict):
            section = {}
            self.document[name] = section
        return section

    def number(
        self, section: str, key: str, label: str, least: int, most: int, usual: int, help_text: str
    ) -> None:
        """A whole number of a section."""
        of = self._section(section)
        value = of.get(key)
        value = usual if not isinstance(value, int) or isinstance(value, bool) else value
        shown = min(max(value, least), most)
        of[key] = st.number_input(
            label, least, most, shown, key=self._name(f"{section}.{key}"), help=help_text
        )

    def choice(
        self, label: str, options: list[str], value: Any, key: str, help_text: str = ""
    ) -> str:
        """One of several names; a value that is none of them is offered as it is."""
        if value not in options:
            options = [AS_IT_IS, *options]
        place = options.index(value) if value in options else 0
        return str(st.selectbox(label, options, place, key=self._name(key), help=help_text or None))

    def draw(self) -> dict[str, Any]:
        """All inputs; the document that they say."""
        first, second, third = st.columns(3)
        with first:
            st.markdown("**Traffic**")
            self._traffic()
        with second:
            st.markdown("**Model and engine**")
            self._engine()
        with third:
            st.markdown("**Cluster and objectives**")
            self._cluster()
        self._drop_objectives()
        return self.document

    def _drop_objectives(self) -> None:
        """Objectives of tiers that no request has any more would be an error that nobody made."""
        streams, objectives = self.document.get("traffic"), self.document.get("objectives")
        if not isinstance(streams, list) or not isinstance(objectives, dict):
            return
        shares = [stream.get("tiers") if isinstance(stream, dict) else None for stream in streams]
        if not all(shares):
            return
        known = {tier for share in shares for tier in share or ()}
        for tier in [tier for tier in objectives if tier not in known]:
            del objectives[tier]

    # --- traffic --------------------------------------------------------------------------

    def _traffic(self) -> None:
        streams = self.document.get("traffic")
        stream = streams[0] if isinstance(streams, list) and len(streams) == 1 else None
        kinds = [AS_IT_IS, POISSON, PRESET, TRACE]
        kind = st.selectbox(
            "Requests come", kinds, kinds.index(_kind(stream)), key=self._name("traffic"),
            help="Change the rest of the traffic in the YAML below.",
        )  # fmt: skip
        if kind == POISSON:
            self.document["traffic"] = [self._poisson(stream if _kind(stream) == POISSON else {})]
        elif kind == PRESET:
            self.document["traffic"] = [self._preset(stream if _kind(stream) == PRESET else {})]
        elif kind == TRACE:
            self._trace(stream if _kind(stream) == TRACE else {})
        run = self._section("run")
        seed = run.get("seed", 1)
        run["seed"] = st.number_input(
            "Seed", 0, 2**31, seed if isinstance(seed, int) else 1, key=self._name("run.seed"),
            help="The same seed gives the same requests.",
        )  # fmt: skip

    def _poisson(self, stream: Any) -> dict[str, Any]:
        arrivals = stream.get("arrivals") or {}
        rate = st.number_input(
            "Requests per second",
            0.01,
            10_000.0,
            float(arrivals.get("rate", 10.0)),
            key=self._name("rate"),
        )
        many = st.number_input(
            "Requests", 1, 200_000, stream.get("requests") or 2000, key=self._name("requests")
        )
        found = {
            **stream,
            "arrivals": {**arrivals, "process": "poisson", "rate": rate},
            "requests": many,
        }
        for key, label, usual in (
            ("prompt_tokens", "Prompt tokens, from and to", [64, 2048]),
            ("output_tokens", "Output tokens, from and to", [16, 400]),
        ):
            low, high = (stream.get(key) or {}).get("uniform", usual)
            left, right = st.columns(2)
            a = left.number_input(label, 1, 1_000_000, int(low), key=self._name(f"{key}.0"))
            b = right.number_input(
                "to", 1, 1_000_000, int(high), key=self._name(f"{key}.1"), label_visibility="hidden"
            )
            found[key] = {"uniform": [a, b]}
        return {**found, **self._tiers(stream)}

    def _preset(self, stream: Any) -> dict[str, Any]:
        names = list(traffic_presets())
        name = self.choice("Trace", names, stream.get("preset", "azure-2023-conv"), "preset")
        usual = float(stream.get("rate") or 10.0)
        rate = st.number_input(
            "Requests or conversations per second", 0.01, 10_000.0, usual, key=self._name("rate")
        )
        many = st.number_input(
            "Requests", 1, 200_000, stream.get("requests") or 2000, key=self._name("requests")
        )
        return {**stream, "preset": name, "rate": rate, "requests": many, **self._tiers(stream)}

    def _trace(self, stream: Any) -> None:
        names = list(uploads())
        if not names:
            st.info("Nothing is uploaded yet: the page Upload takes a trace.")
            return
        value = stream.get("trace")
        name = self.choice("Trace", names, value if value in names else names[0], "trace")
        speedup = st.number_input(
            "Times as fast",
            0.001,
            10_000.0,
            float(stream.get("speedup") or 1.0),
            key=self._name("speedup"),
        )
        many = st.number_input(
            "Requests at most",
            1,
            200_000,
            stream.get("requests") or 5000,
            key=self._name("requests"),
        )
        self.document["traffic"] = [
            {**stream, "trace": name, "speedup": speedup, "requests": many, **self._tiers(stream)}
        ]

    def _tiers(self, stream: Any) -> dict[str, Any]:
        """Shares of the three usual tiers; other tiers stay as they are."""
        tiers = stream.get("tiers")
        if stream.get("tier") or (tiers and not set(tiers) <= {"ONLINE", "BATCH", "OFFLINE"}):
            return {}
        shares = tiers or {"ONLINE": 1.0}
        left, right = st.columns(2)
        batch = left.slider(
            "BATCH, %", 0, 100, round(100 * shares.get("BATCH", 0)), key=self._name("batch"),
            help="Share of requests that may wait for seconds.",
        )  # fmt: skip
        offline = right.slider(
            "OFFLINE, %", 0, 100, round(100 * shares.get("OFFLINE", 0)), key=self._name("offline"),
            help="Share of requests that nobody waits for. The rest is ONLINE.",
        )  # fmt: skip
        offline = min(offline, 100 - batch)
        found = {
            "ONLINE": (100 - batch - offline) / 100,
            "BATCH": batch / 100,
            "OFFLINE": offline / 100,
        }
        return {"tiers": {name: share for name, share in found.items() if share}}

    # --- engine ---------------------------------------------------------------------------

    def _engine(self) -> None:
        self.document["model"] = self._kept(
            "model", self.choice("Model", list(MODELS), self.document.get("model"), "model")
        )
        hardware, engine = self._section("hardware"), self._section("engine")
        hardware["gpu"] = self._chosen(hardware, "gpu", "GPU", list(GPUS))
        left, right = st.columns(2)
        with left:
            self.number(
                "hardware",
                "tensor_parallel_size",
                "GPUs a replica",
                1,
                64,
                1,
                "tensor_parallel_size",
            )
        with right:
            hardware["dtype"] = self._chosen(hardware, "dtype", "Weights", list(DTYPES))
        policies = [*PRESETS, *STOCK_POLICIES]
        self.document["policy"] = self._kept(
            "policy",
            self.choice(
                "Policy", policies, self.document.get("policy"), "policy",
                "vllm-fcfs and vllm-priority are an unmodified vLLM.",
            ),
        )  # fmt: skip
        left, right = st.columns(2)
        with left:
            self.number(
                "engine", "max_num_seqs", "max_num_seqs", 1, 4096, 128, "Requests that run at once."
            )
        with right:
            self.number(
                "engine", "max_num_batched_tokens", "max_num_batched_tokens", 1, 1_000_000, 8192,
                "Tokens that one step computes at most.",
            )  # fmt: skip
        engine["enable_prefix_caching"] = st.toggle(
            "Prefix caching",
            bool(engine.get("enable_prefix_caching", True)),
            key=self._name("prefix"),
        )

    def _chosen(self, section: dict[str, Any], key: str, label: str, options: list[str]) -> Any:
        value = section.get(key, options[0])
        found = self.choice(label, options, value, f"{label}.{key}")
        return value if found == AS_IT_IS else found

    def _kept(self, key: str, found: str) -> Any:
        return self.document.get(key) if found == AS_IT_IS else found

    # --- cluster --------------------------------------------------------------------------

    def _cluster(self) -> None:
        cluster = self._section("cluster")
        self.number(
            "cluster",
            "replicas",
            "Replicas",
            0 if "hpa" in cluster else 1,
            64,
            1,
            "At the beginning.",
        )
        router = self.choice(
            "Router", list(ROUTERS), cluster.get("router", "least_connections"), "router"
        )
        if router != AS_IT_IS:
            cluster["router"] = router
        self._autoscaler(cluster)
        self._objectives()

    def _autoscaler(self, cluster: dict[str, Any]) -> None:
        hpa = cluster.get("hpa")
        is_on = st.toggle(
            "Autoscaler (HPA on waiting requests)", hpa is not None, key=self._name("hpa"),
            help="An autoscaling/v2 HorizontalPodAutoscaler; the YAML below takes any other.",
        )  # fmt: skip
        if not is_on:
            cluster.pop("hpa", None)
            return
        spec = hpa if isinstance(hpa, dict) else {}
        columns = st.columns(3)
        least = columns[0].number_input(
            "least", 1, 64, spec.get("minReplicas") or 1, key=self._name("hpa.min")
        )
        most = columns[1].number_input(
            "most", 1, 64, spec.get("maxReplicas") or 6, key=self._name("hpa.max")
        )
        found = {**spec, "minReplicas": least, "maxReplicas": most}
        target = _target(spec)
        if target is not None:
            wanted = columns[2].number_input(
                "waiting each", 1, 1000, target, key=self._name("hpa.target")
            )
            found["metrics"] = [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": "vllm:num_requests_waiting"},
                        "target": {"type": "AverageValue", "averageValue": str(wanted)},
                    },
                }
            ]
        cluster["hpa"] = found

    def _objectives(self) -> None:
        objectives = self._section("objectives")
        st.markdown("**Objectives, seconds** (0 = none)")
        for tier, name, most in (
            ("ONLINE", "ttft_p99", 3600.0), ("ONLINE", "tpot_p99", 60.0), ("BATCH", "e2e_p99", 86_400.0),
        ):  # fmt: skip
            of = objectives.get(tier) if isinstance(objectives.get(tier), dict) else {}
            value = float((of or {}).get(name, 0.0))
            found = st.number_input(
                f"{tier} {name.replace('_', ' ')}", 0.0, most, value, format="%.3f",
                key=self._name(f"objectives.{tier}.{name}"),
            )  # fmt: skip
            limits = {**(of or {}), name: found}
            if not found:
                del limits[name]
            if limits:
                objectives[tier] = limits
            else:
                objectives.pop(tier, None)


def _kind(stream: Any) -> str:
    """Which of the forms of traffic a stream has, if its values are such that the inputs can show them."""
    if not isinstance(stream, dict):
        return AS_IT_IS
    if stream.get("trace") is not None:
        return TRACE if stream["trace"] in uploads() else AS_IT_IS
    if stream.get("preset") is not None:
        return PRESET
    arrivals = stream.get("arrivals")
    is_simple = (
        isinstance(arrivals, dict)
        and arrivals.get("process") == "poisson"
        and isinstance(arrivals.get("rate"), int | float)
        and stream.get("requests") is not None
        and not any(stream.get(key) for key in ("sessions", "prefixes", "reuse", "lengths_from"))
        and all(
            isinstance(stream.get(key), dict) and "uniform" in stream[key]
            for key in ("prompt_tokens", "output_tokens")
        )
    )
    return POISSON if is_simple else AS_IT_IS


def _target(spec: Mapping[str, Any]) -> int | None:
    """The target of an HPA that looks at waiting requests alone, 5 for a new one; None for any other."""
    metrics = spec.get("metrics")
    if metrics is None:
        return 5
    try:
        (metric,) = metrics
        pods = metric["pods"]
        if pods["metric"] == {"name": "vllm:num_requests_waiting"}:
            return max(1, min(1000, int(pods["target"]["averageValue"])))
    except (KeyError, TypeError, ValueError):
        pass
    return None
