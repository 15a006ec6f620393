"""Simulated history as OpenMetrics text with timestamps: what a Prometheus would have scraped.

`promtool tsdb create-blocks-from openmetrics FILE` turns it into blocks that Prometheus serves, so that dashboards,
rules and queries written for a real server can be tried on a simulated one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from twin.clock import PS
from twin.errors import InputError
from twin.metrics.gauges import Gauges
from twin.metrics.records import RequestRecord
from twin.metrics.summary import is_good, limits_of
from twin.report.metric_names import TWIN, VLLM, Metric, one_two_five
from twin.simulation import Result

MOST_LINES = 400_000
MOST_INSTANTS = 250
"""Instants that are written at most, fewer where the lines would be too many."""

Labels = tuple[tuple[str, str], ...]
Points = Sequence[float]
"""A value for each instant."""


@dataclass(frozen=True)
class Observed:
    """Values of a histogram and when they were observed."""

    at_ps: Sequence[int]
    values: Sequence[float]


def write_openmetrics(path: Path, result: Result, start_s: float) -> None:
    """Write an observed run that begins at the Unix time `start_s`. Raises InputError where that fails."""
    try:
        with path.open("w", encoding="utf-8") as file:
            _write(file, result, start_s)
    except OSError as error:
        raise InputError(f"--openmetrics {path}: {error.strerror}") from None


def _write(file: TextIO, result: Result, start_s: float) -> None:
    exposition = _Exposition(result, start_s)
    for metric in (*VLLM, *TWIN):
        file.write(f"# TYPE {metric.name} {metric.kind}\n# HELP {metric.name} {metric.help}\n")
        for line in exposition.lines(metric):
            file.write(line)
    file.write("# EOF\n")


class _Exposition:
    """A run, ready to be read metric by metric."""

    def __init__(self, result: Result, start_s: float) -> None:
        series = result.series
        assert series is not None, "the run was not observed"
        self._result = result
        self._scenario = result.scenario
        self._tiers = list(dict.fromkeys([*series.tiers, *(r.tier for r in result.records)]))
        self._engines = range(len(result.engines))
        chosen = self._choose(len(series.times_ps))
        self._at = np.array([series.times_ps[i] for i in chosen], dtype=np.int64)
        self._gauges = [series.gauges[i] for i in chosen]
        self._stamps = [_number(start_s + at_ps / PS) for at_ps in self._at.tolist()]
        self._records: list[list[RequestRecord]] = [[] for _ in self._engines]
        for record in result.records:
            if record.replica is not None:
                self._records[record.replica].append(record)
        self._limits = {t: limits_of(named) for t, named in self._scenario.objectives.items()}

    def _choose(self, instants: int) -> list[int]:
        """Positions of the instants to write, the last one always among them."""
        histograms = sum(
            len(self._tiers) if metric.labels else 1
            for metric in (*VLLM, *TWIN)
            if metric.kind == "histogram"
        )
        most = MOST_LINES // (24 * histograms * len(self._result.engines))
        step = -(-instants // min(MOST_INSTANTS, max(20, most)))
        return list(range((instants - 1) % step, instants, step))

    def lines(self, metric: Metric) -> Iterator[str]:
        """All samples of a metric, series by series in the order of time."""
        if metric.kind == "histogram":
            bounds = metric.buckets or one_two_five(self._scenario.engine.max_model_len)
            for labels, observed in self._histogram(metric):
                yield from self._buckets(metric.name, labels, bounds, observed)
            return
        for labels, points in self._series(metric):
            head = f"{metric.exposed}{_braces(labels)}"
            for stamp, value in zip(self._stamps, points, strict=True):
                yield f"{head} {_number(value)} {stamp}\n"

    # --- gauges and counters --------------------------------------------------------------

    def _series(self, metric: Metric) -> Iterator[tuple[Labels, Points]]:
        """(labels, values) of each series of a gauge or counter."""
        for engine in self._engines:
            base = self._base(engine)
            for own, points in self._of_engine(metric.name, engine):
                yield base + own, points

    def _base(self, engine: int) -> Labels:
        return (("model_name", self._scenario.model.name), ("engine", str(engine)))

    def _of_engine(self, name: str, engine: int) -> Iterator[tuple[Labels, Points]]:
        if name in _GAUGES:
            read = _GAUGES[name]
            yield (), [read(gauges[engine]) for gauges in self._gauges]
        elif name in _BY_TIER:
            by_tier = _BY_TIER[name]
            for tier in self._tiers:
                yield (("tier", tier),), [by_tier(gauges[engine], tier) for gauges in self._gauges]
        elif name in ("twin:requests", "twin:good_requests", "vllm:request_success"):
            yield from self._ended(name, engine)
        elif name == "vllm:num_requests_waiting_by_reason":
            waiting = [float(sum(gauges[engine].waiting.values())) for gauges in self._gauges]
            yield (("reason", "capacity"),), waiting
            yield (("reason", "deferred"),), [0.0] * len(waiting)
        else:
            for own, value in _constants(self._result, name):
                yield own, [value] * len(self._gauges)

    def _ended(self, name: str, engine: int) -> Iterator[tuple[Labels, Points]]:
        """Requests that have ended, counted when their client saw it."""
        groups: dict[Labels, list[int]] = {}
        if name == "vllm:request_success":
            groups = {(("finished_reason", reason),): [] for reason in ("stop", "length", "abort")}
        for record in self._records[engine]:
            if record.finish_ps is not None:
                labels = self._group(name, record)
                if labels is not None:
                    groups.setdefault(labels, []).append(record.finish_ps)
        for labels, ends_ps in sorted(groups.items()):
            found = np.searchsorted(np.sort(np.array(ends_ps, dtype=np.int64)), self._at, "right")
            yield labels, found.astype(float).tolist()

    def _group(self, name: str, record: RequestRecord) -> Labels | None:
        if name == "twin:requests":
            return (("tier", record.tier), ("outcome", record.outcome))
        if name == "twin:good_requests":
            good = is_good(record, self._limits.get(record.tier, ()))
            return (("tier", record.tier),) if good else None
        if record.outcome == "completed":
            return (("finished_reason", record.reason),)
        # A client that hangs up is not counted; a request that the policy ended is.
        return (("finished_reason", "abort"),) if self._scenario.policy is not None else None

    # --- histograms -----------------------------------------------------------------------

    def _histogram(self, metric: Metric) -> Iterator[tuple[Labels, Observed]]:
        name = metric.name.partition(":")[2]
        for engine in self._engines:
            records = self._records[engine]
            if metric.labels:
                for tier in self._tiers:
                    own = [record for record in records if record.tier == tier]
                    yield (*self._base(engine), ("tier", tier)), _observe(name, own, False)
            else:
                yield self._base(engine), _observe(name, records, True)

    def _buckets(
        self, name: str, labels: Labels, bounds: Sequence[float], observed: Observed
    ) -> Iterator[str]:
        counts, sums = _cumulate(self._at, bounds, observed)
        heads = [
            f"{name}_bucket{_braces((*labels, ('le', _bound(bound))))}"
            for bound in (*bounds, np.inf)
        ]
        own = _braces(labels)
        for stamp, row, total in zip(self._stamps, counts.tolist(), sums.tolist(), strict=True):
            for head, number in zip(heads, row, strict=True):
                yield f"{head} {number} {stamp}\n"
            yield f"{name}_count{own} {row[-1]} {stamp}\n{name}_sum{own} {_number(total)} {stamp}\n"


_GAUGES: dict[str, Callable[[Gauges], float]] = {
    "vllm:num_requests_running": lambda now: sum(now.running.values()),
    "vllm:num_requests_waiting": lambda now: sum(now.waiting.values()),
    "vllm:kv_cache_usage_perc": lambda now: now.kv_used,
    "vllm:prefix_cache_queries": lambda now: now.prefix_query_tokens,
    "vllm:prefix_cache_hits": lambda now: now.prefix_hit_tokens,
    "vllm:num_preemptions": lambda now: now.preemptions,
    "vllm:prompt_tokens": lambda now: now.prompt_tokens,
    "vllm:generation_tokens": lambda now: now.generation_tokens,
    "twin:policy_pressure": lambda now: now.pressure or 0.0,
    "twin:kv_cache_wasted_perc": lambda now: now.kv_wasted,
    "twin:kv_cache_cached_perc": lambda now: now.kv_cached,
    "twin:engine_steps": lambda now: now.steps,
    "twin:engine_busy_seconds": lambda now: now.busy_ps / PS,
    "twin:prefill_tokens": lambda now: now.prefill_tokens,
    "twin:decode_tokens": lambda now: now.decode_tokens,
    "twin:padded_tokens": lambda now: now.padded_tokens,
    "twin:recomputed_tokens": lambda now: now.recomputed_tokens,
}

_BY_TIER: dict[str, Callable[[Gauges, str], float]] = {
    "twin:num_requests_held": lambda now, tier: now.held.get(tier, 0),
    "twin:num_requests_ready": lambda now, tier: now.waiting.get(tier, 0) - now.held.get(tier, 0),
    "twin:num_requests_running": lambda now, tier: now.running.get(tier, 0),
    "twin:released_batches": lambda now, tier: now.released.get(tier, (0, 0))[0],
    "twin:released_requests": lambda now, tier: now.released.get(tier, (0, 0))[1],
}


def _constants(result: Result, name: str) -> Iterator[tuple[Labels, float]]:
    """What does not change in a run."""
    scenario = result.scenario
    engine, hardware, memory = scenario.engine, scenario.hardware, scenario.hardware.memory
    if name == "vllm:cache_config_info":
        values: Mapping[str, Any] = {
            "block_size": engine.block_size,
            "num_gpu_blocks": engine.num_gpu_blocks,
            "enable_prefix_caching": engine.enable_prefix_caching,
        }
        yield tuple((key, str(value)) for key, value in values.items()), 1.0
    elif name == "twin:model_info":
        values = {
            "gpu": hardware.gpu.name,
            "tensor_parallel_size": hardware.tensor_parallel_size,
            "dtype": hardware.dtype,
            "policy": scenario.policy_name,
            "policy_fingerprint": scenario.policy_fingerprint,
            "engine_version": engine.version,
        }
        yield tuple((key, str(value)) for key, value in values.items()), 1.0
    else:
        assert name == "twin:gpu_memory_bytes", name
        for use, size in (
            ("weights", memory.weights_bytes),
            ("activations", memory.activation_bytes),
            ("runtime", memory.runtime_bytes),
            ("graphs", memory.graph_bytes),
            ("kv_cache", memory.block_bytes * engine.num_gpu_blocks),
        ):
            yield (("use", use),), float(size)


def _observe(name: str, records: Iterable[RequestRecord], as_vllm: bool) -> Observed:
    """Values of one histogram. All but TTFT and ITL are observed when a request has completed."""
    at_ps: list[int] = []
    values: list[float] = []
    for record in records:
        first_ps, start_ps, end_ps = (
            record.first_token_ps,
            record.first_scheduled_ps,
            record.finish_ps,
        )
        if name == "time_to_first_token_seconds":
            if first_ps is not None:
                at_ps.append(first_ps)
                values.append((first_ps - record.arrival_ps) / PS)
        elif name == "inter_token_latency_seconds":
            token_ps = first_ps or 0
            for gap_ps in record.itl_ps:
                token_ps += gap_ps
                at_ps.append(token_ps)
                values.append(gap_ps / PS)
        elif record.outcome == "completed":
            assert first_ps is not None
            assert start_ps is not None
            assert end_ps is not None
            gaps = len(record.itl_ps)
            if name == "request_time_per_output_token_seconds" and not gaps and not as_vllm:
                continue
            at_ps.append(end_ps)
            values.append(
                {
                    "request_time_per_output_token_seconds": (end_ps - first_ps) / (gaps or 1) / PS,
                    "e2e_request_latency_seconds": (end_ps - record.arrival_ps) / PS,
                    "request_queue_time_seconds": (start_ps - record.arrival_ps) / PS,
                    "request_prefill_time_seconds": (first_ps - start_ps) / PS,
                    "request_decode_time_seconds": (end_ps - first_ps) / PS,
                    "request_inference_time_seconds": (end_ps - start_ps) / PS,
                    "request_prompt_tokens": float(record.prompt_tokens),
                    "request_generation_tokens": float(record.output_tokens),
                    "request_num_preemptions": float(record.preemptions),
                    "request_prefill_kv_computed_tokens": float(
                        record.prompt_tokens - record.prefix_hit_tokens
                    ),
                }[name]
            )
    return Observed(at_ps, values)


def _cumulate(
    instants: npt.NDArray[np.int64], bounds: Sequence[float], observed: Observed
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Counts by (instant, bucket) and sums by instant, both from the start of the run."""
    at = np.array(observed.at_ps, dtype=np.int64)
    values = np.array(observed.values, dtype=np.float64)
    # The first instant that sees a value, and the first bucket that holds it.
    rows = np.searchsorted(instants, at, "left")
    columns = np.searchsorted(np.array(bounds), values, "left")
    seen = rows < len(instants)
    counts = np.zeros((len(instants), len(bounds) + 1), dtype=np.int64)
    np.add.at(counts, (rows[seen], columns[seen]), 1)
    sums = np.zeros(len(instants))
    np.add.at(sums, rows[seen], values[seen])
    return counts.cumsum(axis=0).cumsum(axis=1), sums.cumsum()


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _bound(bound: float) -> str:
    """As Prometheus' client writes it: 0.3, 1.0, 100000.0, 1e+06, +Inf."""
    if np.isinf(bound):
        return "+Inf"
    return f"{bound:g}" if bound >= 1e6 else repr(float(bound))


def _number(value: float) -> str:
    whole = float(value)
    return str(int(whole)) if whole.is_integer() and abs(whole) < 1e15 else repr(whole)
