"""Simulated history as OpenMetrics text with timestamps: what a Prometheus would have scraped.

`promtool tsdb create-blocks-from openmetrics FILE` turns it into blocks that Prometheus serves, so that dashboards,
rules and queries written for a real server can be tried on a simulated one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from twin.clock import PS
from twin.errors import InputError
from twin.metrics.columns import Numbers
from twin.metrics.gauges import CAUSES, LENGTH_GROUPS, TIMEOUTS, Gauges, TierCounts
from twin.metrics.records import OUTCOMES
from twin.report.history import ENDED, HISTOGRAMS, Beats, Floats, Given, History
from twin.report.metric_names import TWIN, VLLM, Metric
from twin.scenario import Scenario
from twin.simulation import Result

MOST_LINES = 400_000
MOST_INSTANTS = 250
"""Instants that are written at most, fewer where the lines would be too many."""

Labels = tuple[tuple[str, str], ...]
Points = Sequence[float]
"""A value for each instant."""


def history_of(scenario: Scenario) -> History:
    """What counts the requests of a run whose records are not kept, for `write_openmetrics`."""
    fleet = scenario.cluster.fleet
    engines = scenario.cluster.replicas if fleet is None else fleet.most_replicas
    most = _most_instants(len(scenario.tiers), max(1, engines))
    return History(scenario, Beats(scenario.run.sample_period_ps, most))


def _most_instants(tiers: int, engines: int) -> int:
    """How many instants are written at most."""
    histograms = sum(tiers if metric.labels else 1 for metric in HISTOGRAMS)
    return min(MOST_INSTANTS, max(20, MOST_LINES // (24 * histograms * engines)))


def write_openmetrics(
    path: Path, result: Result, start_s: float, history: History | None = None
) -> None:
    """Write an observed run that begins at the Unix time `start_s`. Raises InputError where that fails.

    `history` has counted its requests; not needed if their records are kept.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            _write(file, result, start_s, history)
    except OSError as error:
        raise InputError(f"--openmetrics {path}: {error.strerror}") from None


def _write(file: TextIO, result: Result, start_s: float, history: History | None) -> None:
    exposition = _Exposition(result, start_s, history)
    for metric in (*VLLM, *TWIN):
        file.write(f"# TYPE {metric.name} {metric.kind}\n# HELP {metric.name} {metric.help}\n")
        for line in exposition.lines(metric):
            file.write(line)
    file.write("# EOF\n")


class _Exposition:
    """A run, ready to be read metric by metric."""

    def __init__(self, result: Result, start_s: float, history: History | None) -> None:
        series = result.series
        assert series is not None, "the run was not observed"
        self._result = result
        self._scenario = result.scenario
        self._engines = range(len(result.engines))
        found = result.tally().tiers
        self._tiers = list(dict.fromkeys([*series.tiers, *found]))
        if history is None:
            chosen = self._choose(len(series.times_ps))
        else:
            history.finish(series.period_ps)
            last = len(series.times_ps) - 1
            chosen = [
                i for i, at_ps in enumerate(series.times_ps[:-1]) if at_ps % history.period_ps == 0
            ] + [last]
        at_ps = [series.times_ps[i] for i in chosen]
        if history is None:
            history = History(result.scenario, Given(np.array(at_ps, dtype=np.int64)))
            history.add(result.records.columns())
        self._history = history
        self._gauges = [series.gauges[i] for i in chosen]
        self._stamps = [_number(start_s + ps / PS) for ps in at_ps]

    def _choose(self, instants: int) -> list[int]:
        """Positions of the instants to write, the last one always among them."""
        step = -(-instants // _most_instants(len(self._tiers), len(self._engines)))
        return list(range((instants - 1) % step, instants, step))

    def lines(self, metric: Metric) -> Iterator[str]:
        """All samples of a metric, series by series in the order of time."""
        if metric.kind == "histogram":
            yield from self._histogram(metric)
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
        elif name in _COUNTED or name in _COUNTED_BY:
            yield from self._counted_by_policy(name, engine)
        elif name in _BY_LENGTH:
            for i, length in enumerate(LENGTH_GROUPS):
                found = [gauges[engine].kv_by_length[i] for gauges in self._gauges]
                yield (("length", length),), [float(group[_BY_LENGTH[name]]) for group in found]
        elif name == "twin:kv_blocks_used":
            usable = self._scenario.engine.num_gpu_blocks - 1
            yield (), [float(round(gauges[engine].kv_used * usable)) for gauges in self._gauges]
        elif name in ("twin:requests", "twin:good_requests", "vllm:request_success"):
            yield from self._ended(name, engine)
        elif name == "vllm:num_requests_waiting_by_reason":
            waiting = [float(sum(gauges[engine].waiting.values())) for gauges in self._gauges]
            yield (("reason", "capacity"),), waiting
            yield (("reason", "deferred"),), [0.0] * len(waiting)
        else:
            for own, value in _constants(self._result, name):
                yield own, [value] * len(self._gauges)

    def _counted_by_policy(self, name: str, engine: int) -> Iterator[tuple[Labels, Points]]:
        """What the policy counts by tier; 0 in the stock modes."""
        for tier in self._tiers:
            found = [gauges[engine].counts.get(tier, NOTHING) for gauges in self._gauges]
            if name in _COUNTED:
                yield (("tier", tier),), [float(_COUNTED[name](counts)) for counts in found]
            else:
                label, values, read = _COUNTED_BY[name]
                for i, value in enumerate(values):
                    yield (("tier", tier), (label, value)), [float(read(c)[i]) for c in found]

    def _ended(self, name: str, engine: int) -> Iterator[tuple[Labels, Points]]:
        """Requests that have ended, counted when their client saw it."""
        if name == "vllm:request_success":
            counts, _ = self._counted(name, engine, 0)
            for reason in sorted(ENDED):
                yield (("finished_reason", reason),), counts[:, ENDED.index(reason)].tolist()
            return
        for tier in sorted(self._history.tiers):
            counts, _ = self._counted(name, engine, self._history.tiers.index(tier))
            if name == "twin:good_requests":
                if counts.any():
                    yield (("tier", tier),), counts[:, 0].tolist()
                continue
            for outcome in sorted(OUTCOMES):
                points = counts[:, OUTCOMES.index(outcome)]
                if points.any():
                    yield (("tier", tier), ("outcome", outcome)), points.tolist()

    # --- histograms -----------------------------------------------------------------------

    def _counted(self, name: str, engine: int, group: int) -> tuple[Numbers, Floats]:
        """Counts by (instant, bucket) and sums by instant, both from the start of the run."""
        grid, instants = self._history.grids[name], len(self._stamps)
        if engine >= grid.counts.shape[0] or group >= grid.counts.shape[1]:
            return np.zeros((instants, grid.counts.shape[3]), np.int64), np.zeros(instants)
        counts, sums = grid.counts[engine, group].cumsum(axis=0), grid.sums[engine, group].cumsum()
        # The end of the run has what came after the last multiple of the period.
        return (
            np.concatenate((counts[: instants - 1], counts[-1:])),
            np.concatenate((sums[: instants - 1], sums[-1:])),
        )

    def _histogram(self, metric: Metric) -> Iterator[str]:
        for engine in self._engines:
            if not metric.labels:
                yield from self._buckets(metric.name, self._base(engine), engine, 0)
                continue
            for tier in self._tiers:
                tiers = self._history.tiers
                group = tiers.index(tier) if tier in tiers else len(tiers)
                labels = (*self._base(engine), ("tier", tier))
                yield from self._buckets(metric.name, labels, engine, group)

    def _buckets(self, name: str, labels: Labels, engine: int, group: int) -> Iterator[str]:
        found, sums = self._counted(name, engine, group)
        counts = found.cumsum(axis=1)
        heads = [
            f"{name}_bucket{_braces((*labels, ('le', _bound(bound))))}"
            for bound in (*self._history.bounds[name], np.inf)
        ]
        own = _braces(labels)
        for stamp, row, total in zip(self._stamps, counts.tolist(), sums.tolist(), strict=True):
            for head, number in zip(heads, row, strict=True):
                yield f"{head} {number} {stamp}\n"
            yield f"{name}_count{own} {row[-1]} {stamp}\n{name}_sum{own} {_number(total)} {stamp}\n"


NOTHING = TierCounts(0, 0, 0, 0, 0.0, (0, 0), (0, 0))
"""Of a tier that the policy does not know."""

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
}

_COUNTED: dict[str, Callable[[TierCounts], float]] = {
    "twin:requests_submitted": lambda counts: counts.submitted,
    "twin:released_batches": lambda counts: counts.batches,
    "twin:released_requests": lambda counts: counts.requests,
    "twin:released_tokens": lambda counts: counts.tokens,
    "twin:batching_wait_seconds": lambda counts: counts.held_s,
}

_COUNTED_BY: dict[str, tuple[str, Sequence[str], Callable[[TierCounts], Sequence[int]]]] = {
    "twin:preemptions": ("cause", CAUSES, lambda counts: counts.preempted),
    "twin:timeouts": ("reason", TIMEOUTS, lambda counts: counts.timed_out),
}

_BY_LENGTH = {
    "twin:num_requests_running_by_length": 0,
    "twin:kv_tokens_held_by_length": 1,
    "twin:kv_tokens_empty_by_length": 2,
}
"""Metric -> place in Gauges.kv_by_length."""


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
    elif name == "twin:policy_info":
        yield (
            (
                ("policy", scenario.policy_name),
                ("policy_fingerprint", scenario.policy_fingerprint),
                ("engine_version", engine.version),
            ),
            1.0,
        )
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
