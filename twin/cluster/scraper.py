"""Prometheus in a fleet: what is scraped of each pod when, and what the autoscaler's queries find in it."""

from collections.abc import Callable, Iterable
from random import Random

from twin.clock import to_seconds
from twin.cluster.cold_start import PhaseTime
from twin.cluster.fleet_pod import FleetPod
from twin.cluster.fleet_spec import FleetSpec
from twin.cluster.metrics_path import HISTOGRAMS, Store, is_exported
from twin.cluster.promql import Number, Vector
from twin.cluster.specs import Failed
from twin.metrics.records import RequestRecord

_TTFT = "vllm:time_to_first_token_seconds"


class Scraper:
    """Keeps the samples of the series that some query selects."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        queries = (spec.path.queries or {}).values()
        self._names = sorted(
            {name for query in queries for name in query.names if is_exported(name)}
        )
        window_ps = max((query.window_ps for query in queries), default=0)
        self._store = Store(spec.labels, window_ps)
        self._observed = {n.rpartition("_")[0] for n in self._names} & set(HISTOGRAMS)
        self._old: list[tuple[int, str]] = []  # (instant, pod) from which its series may be dropped
        self._keep_ps = 4 * max(window_ps, spec.path.scrape_interval_ps)
        interval_ps = spec.path.scrape_interval_ps
        self.offset_ps = int(Random(f"{spec.seed}/scrape").random() * interval_ps)
        """From 0 to the first scrape: autoscaler and Prometheus do not start together."""

    @property
    def is_needed(self) -> bool:
        """Whether anybody asks."""
        return bool(self._names) and bool(self._spec.scaler.names)

    def stream(self, name: str, time: PhaseTime) -> Callable[[], int]:
        """Draws from a distribution, from a stream of its own."""
        return time.drawn(Random(f"{self._spec.seed}/{name}"))

    def observe(self, pod: FleetPod, record: RequestRecord) -> None:
        """A request of the pod has ended: its exporter's counters and histograms."""
        if record.outcome == "completed":
            pod.completed += 1
        if not self._observed:
            return
        seen = record.index in pod.first_tokens_seen
        pod.first_tokens_seen.discard(record.index)
        if _TTFT in self._observed and not seen and record.first_token_ps is not None:
            self._see(pod, _TTFT, record.first_token_ps - record.arrival_ps)
        if record.outcome != "completed" or record.finish_ps is None:
            return
        started_ps = record.first_scheduled_ps
        assert started_ps is not None
        self._see(pod, "vllm:e2e_request_latency_seconds", record.finish_ps - record.arrival_ps)
        self._see(pod, "vllm:request_queue_time_seconds", started_ps - record.arrival_ps)
        self._see(pod, "vllm:request_inference_time_seconds", record.finish_ps - started_ps)

    def _see(self, pod: FleetPod, name: str, took_ps: int) -> None:
        if name in self._observed:
            pod.observed.observe(name, to_seconds(took_ps))

    def scrape(self, pods: Iterable[FleetPod], now_ps: int) -> None:
        """One scrape of every pod whose server answers."""
        while self._old and self._old[0][0] <= now_ps:
            self._store.forget(self._old.pop(0)[1])
        path = self._spec.path
        for pod in pods:
            if pod.replica is None or pod.stops_ps is not None:
                continue
            state = path.scrape_state(pod.number, now_ps)
            if state == "prometheus":
                continue
            if state == "ok" and _TTFT in self._observed:
                self._see_first_tokens(pod, now_ps)
            for name in self._names:
                if state == "frozen":
                    self._store.repeat(pod.name, name, now_ps)
                else:
                    value = None if state == "scrape" else self._read(pod, name, now_ps)
                    self._store.append(pod.name, name, now_ps, value)

    def _see_first_tokens(self, pod: FleetPod, now_ps: int) -> None:
        assert pod.replica is not None
        for request, took_ps in pod.replica.first_tokens(now_ps):
            if request not in pod.first_tokens_seen:
                pod.first_tokens_seen.add(request)
                self._see(pod, _TTFT, took_ps)

    def _read(self, pod: FleetPod, name: str, now_ps: int) -> Number:
        replica = pod.replica
        assert replica is not None
        if name == "vllm:num_requests_waiting":
            return float(replica.num_waiting)
        if name == "vllm:num_requests_running":
            return float(replica.num_running)
        if name == "vllm:kv_cache_usage_perc":
            return replica.gauges(now_ps).kv_used
        if name == "vllm:request_success_total":
            return float(pod.completed)
        return pod.observed.read(name)

    def forget(self, pod: FleetPod, now_ps: int) -> None:
        """The pod is gone: its series end now, and are dropped when no range reaches back to them."""
        for name in self._names:
            self._store.append(pod.name, name, now_ps, None)
        self._old.append((now_ps + self._keep_ps, pod.name))

    def ask(self, metric: str, now_ps: int) -> Vector | Failed:
        """What the query of an autoscaler's metric finds now."""
        return self._spec.path.ask(self._store, metric, now_ps)
