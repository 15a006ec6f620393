"""How a replica's state reaches an autoscaler: exporter -> scrape -> rule -> query -> metrics API.

Each stage adds age, and each can fail; what an autoscaler sees then is what it acts on. Scrapes are handed in as they
happen; a question is answered from what was scraped before.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twin.clock import PS
from twin.cluster.promql import LOOKBACK_PS, Number, Query, QueryError, Vector
from twin.cluster.specs import Failed, PodSamples, Reading, Sample, Total

TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
COUNTERS = ("vllm:request_success_total",)
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": TTFT_BOUNDS,
    "vllm:e2e_request_latency_seconds": LATENCY_BOUNDS,
    "vllm:request_queue_time_seconds": LATENCY_BOUNDS,
    "vllm:request_inference_time_seconds": LATENCY_BOUNDS,
}
"""What of vLLM's /metrics the twin serves to autoscalers, with vLLM's buckets."""


def is_exported(name: str) -> bool:
    """Whether a selector of that name finds anything."""
    base, _, suffix = name.rpartition("_")
    if base in HISTOGRAMS and suffix in ("bucket", "count", "sum"):
        return True
    return name in GAUGES or name in COUNTERS


@dataclass(frozen=True)
class MetricsFault:
    """Something on the path is broken for a while."""

    kind: str
    """One of FAULTS."""
    from_ps: int
    until_ps: int
    pods: tuple[int, ...] = ()
    """Numbers of the pods it is about, in the order of their creation; empty = all."""
    query: str | None = None
    """The metric or trigger it is about; None = all."""

    def holds(self, now_ps: int) -> bool:
        """Whether it is broken now."""
        return self.from_ps <= now_ps < self.until_ps


FAULTS = {
    "scrape": "a pod's /metrics does not answer: its series end at once",
    "frozen": "a pod's /metrics answers what it answered before",
    "prometheus": "Prometheus is down: nothing is scraped and no query answered",
    "api": "the metrics API is down: queries fail, scrapes go on",
    "empty": "the query matches no series (a label or a name that is not there)",
    "nan": "the query's value is NaN",
}


class Observations:
    """What one exporter has observed in its histograms."""

    def __init__(self) -> None:
        self._counts = {name: [0] * (len(bounds) + 1) for name, bounds in HISTOGRAMS.items()}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def observe(self, name: str, seconds: float) -> None:
        """One more value; a bucket's bound belongs to it."""
        bounds = HISTOGRAMS[name]
        self._counts[name][bisect_left(bounds, seconds)] += 1
        self._sums[name] += seconds

    def read(self, name: str) -> Number:
        """The value of a series `<histogram>_bucket`, `_count` or `_sum`."""
        base, _, suffix = name.rpartition("_")
        if suffix == "sum":
            return self._sums[base]
        if suffix == "count":
            return float(sum(self._counts[base]))
        total, cumulative = 0, []
        for count in self._counts[base]:
            total += count
            cumulative.append(float(total))
        return tuple(cumulative)


class Store:
    """Prometheus' memory of the pods' series, as far as the queries look back."""

    def __init__(self, labels: Mapping[str, str], window_ps: int) -> None:
        """`labels` are those of every series; `window_ps` is the longest range that is asked for."""
        self._labels = labels
        self._keep_ps = max(window_ps, LOOKBACK_PS)
        self._times: dict[tuple[str, str], list[int]] = {}
        self._values: dict[tuple[str, str], list[Number | None]] = {}
        self._pods: dict[str, None] = {}

    def append(self, pod: str, name: str, at_ps: int, value: Number | None) -> None:
        """A scraped sample; None marks that the series has ended."""
        key = (pod, name)
        times, values = self._times.setdefault(key, []), self._values.setdefault(key, [])
        if value is None and (not values or values[-1] is None):
            return
        self._pods.setdefault(pod)
        times.append(at_ps)
        values.append(value)
        # The past is dropped in slices, so that a scrape costs the same on average.
        if times[0] < at_ps - 4 * self._keep_ps:
            old = bisect_right(times, at_ps - 2 * self._keep_ps)
            del times[:old], values[:old]

    def repeat(self, pod: str, name: str, at_ps: int) -> None:
        """The same sample as before once more."""
        values = self._values.get((pod, name))
        if values:
            self.append(pod, name, at_ps, values[-1])

    def forget(self, pod: str) -> None:
        """The pod is long gone."""
        self._pods.pop(pod, None)
        for key in [key for key in self._times if key[0] == pod]:
            del self._times[key], self._values[key]

    def names(self) -> Sequence[str]:
        return list(self._pods)

    def points(self, pod: str, name: str, since_ps: int, until_ps: int) -> list[tuple[int, Number]]:
        times, values = self._times.get((pod, name), []), self._values.get((pod, name), [])
        low, high = bisect_right(times, since_ps), bisect_right(times, until_ps)
        pairs = zip(times[low:high], values[low:high], strict=True)
        return [(at_ps, value) for at_ps, value in pairs if value is not None]

    def last(self, pod: str, name: str, since_ps: int, until_ps: int) -> Number | None:
        times = self._times.get((pod, name), [])
        at = bisect_right(times, until_ps) - 1
        if at < 0 or times[at] <= since_ps:
            return None
        return self._values[pod, name][at]

    def bounds(self, name: str) -> tuple[float, ...]:
        return HISTOGRAMS[name.removesuffix("_bucket")]

    def label(self, name: str) -> str | None:
        return self._labels.get(name, "") if name not in _UNKNOWN_LABELS else None


_UNKNOWN_LABELS = ("namespace", "job", "instance", "service", "container", "endpoint", "cluster")
"""Labels that a scrape configuration sets, about which a scenario says nothing."""


@dataclass(frozen=True)
class Path:
    """The stages between a replica and an autoscaler."""

    scrape_interval_ps: int = 15 * PS
    rule_interval_ps: int = 0
    """Recording rules are evaluated that often; 0 = queries look at the samples themselves."""
    queries: Mapping[str, Query] | None = None
    """Metric of the autoscaler -> query."""
    faults: tuple[MetricsFault, ...] = ()

    def ask(self, store: Store, name: str, now_ps: int) -> Vector | Failed:
        """What the query of that metric gives now."""
        for fault in self.faults:
            if not fault.holds(now_ps) or fault.query not in (None, name):
                continue
            if fault.kind in ("prometheus", "api"):
                return Failed(f"unable to fetch metrics: {FAULTS[fault.kind]}")
            if fault.kind == "empty":
                return {}
        query = (self.queries or {}).get(name)
        if query is None:
            return Failed(f"the server could not find the metric {name}: no rule defines it")
        every = self.rule_interval_ps
        at_ps = now_ps // every * every if every else now_ps
        try:
            found = query.evaluate(store, at_ps)
        except QueryError as error:
            return Failed(str(error))
        if any(
            f.kind == "nan" and f.holds(now_ps) and f.query in (None, name) for f in self.faults
        ):
            return dict.fromkeys(found, math.nan)
        return found

    def scrape_state(self, pod: int, now_ps: int) -> str:
        """What a scrape of the pod finds: ok, scrape, frozen or prometheus."""
        for fault in self.faults:
            about_pod = not fault.pods or pod in fault.pods
            if (
                fault.holds(now_ps)
                and fault.kind in ("scrape", "frozen", "prometheus")
                and about_pod
            ):
                return fault.kind
        return "ok"


def pods_reading(answer: Vector | Failed, now_ps: int) -> Reading:
    """As prometheus-adapter's custom metrics API answers for pods: NaN is 0, an empty answer is no metric."""
    if isinstance(answer, Failed):
        return answer
    samples = {
        pod: Sample(_milli(value), now_ps)
        for pod, value in answer.items()
        if pod is not None and not isinstance(value, tuple)
    }
    if answer and not samples:
        return Failed("the series carry no label pod, so that they belong to none")
    return PodSamples(samples) if samples else Failed("no metrics returned from custom metrics API")


def total_reading(answer: Vector | Failed, is_external: bool) -> Reading:
    """As the adapter answers for an Object (one series) or an External metric (all series are summed)."""
    if isinstance(answer, Failed):
        return answer
    values = [value for value in answer.values() if not isinstance(value, tuple)]
    if is_external and any(not math.isfinite(value) for value in values):
        return Failed("the value is not finite")
    if not is_external and len(values) > 1:
        values = values[:1]
    return Total(tuple(map(_milli, values))) if values else Failed("no metrics returned")


def trigger_answer(answer: Vector | Failed, ignore_null_values: bool) -> int | Failed | None:
    """As KEDA's prometheus scaler reads an answer: one element; several are an error; NaN counts as nothing."""
    if isinstance(answer, Failed):
        return answer
    values = [value for value in answer.values() if not isinstance(value, tuple)]
    if len(values) > 1:
        return Failed(f"the query returned {len(values)} elements; aggregate it, e.g. with sum()")
    if not values:
        return None
    if not math.isfinite(values[0]):
        return 0 if ignore_null_values else Failed(f"the query returned {values[0]}")
    return _milli(values[0])


def silent_pods(answer: Vector | Failed, ready: Sequence[str]) -> list[str]:
    """Ready pods that a per-pod metric says nothing of: labels that do not match, or a scrape that fails."""
    known = {} if isinstance(answer, Failed) else answer
    return [pod for pod in ready if pod not in known]


def _milli(value: float) -> int:
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return 2**63 - 1 if value > 0 else -(2**63)
    return int(value * 1000.0)
