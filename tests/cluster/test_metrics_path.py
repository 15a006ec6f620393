"""Exporter -> scrape -> rule -> query -> metrics API: the figures are those of Prometheus, and each stage can break."""

import math
import random
import subprocess

import pytest
import yaml

from tests.tools import prometheus
from twin.clock import PS
from twin.cluster.autoscaler import reconcile
from twin.cluster.keda import KedaSpec, KedaState, QueryTrigger, readings
from twin.cluster.metrics_path import (
    COUNTERS,
    FAULTS,
    GAUGES,
    HISTOGRAMS,
    MetricsFault,
    Observations,
    Path,
    Store,
    is_exported,
    pods_reading,
    silent_pods,
    total_reading,
    trigger_answer,
)
from twin.cluster.promql import QueryError, bucket_quantile, parse_query
from twin.cluster.specs import (
    Failed,
    HpaSpec,
    MetricSpec,
    Pod,
    PodSamples,
    Sample,
    Scale,
    ScalingLog,
    Total,
)
from twin.report import metric_names

WAITING = "vllm:num_requests_waiting"
TTFT = "vllm:time_to_first_token_seconds_bucket"
MINUTE = 60 * PS


def filled(pods=2, minutes=12, scrape_s=15):
    """A store with gauges and a histogram of each pod; the second pod restarts half-way."""
    store, rng = Store({"model_name": "m", "engine": "0"}, 10 * MINUTE), random.Random(1)
    for i in range(pods):
        seen = Observations()
        for second in range(0, minutes * 60 + 1, scrape_s):
            if i == 1 and second == minutes * 30:
                seen = Observations()
            for _ in range(rng.randrange(6)):
                seen.observe(TTFT.removesuffix("_bucket"), rng.lognormvariate(-1, 1.5))
            store.append(f"pod-{i}", WAITING, second * PS, float(rng.randrange(30)))
            store.append(f"pod-{i}", TTFT, second * PS, seen.read(TTFT))
    return store


QUERIES = (
    f"sum({WAITING})",
    f"max({WAITING})",
    f"avg by (pod) ({WAITING})",
    f'{WAITING}{{pod="pod-1"}}',
    f'{WAITING}{{model_name="m",pod=~"pod-[01]"}}',
    f'sum({WAITING}{{model="m"}})',
    f"sum(max_over_time({WAITING}[1m]))",
    f"avg_over_time({WAITING}[2m])",
    f"2 * sum({WAITING}) + 1",
    f"sum({WAITING}) / count({WAITING})",
    f'sum({WAITING}{{pod="none"}}) or vector(0)',
    f"histogram_quantile(0.99, sum by (le) (rate({TTFT}[5m])))",
    f"1000 * histogram_quantile(0.5, sum by (le, pod) (rate({TTFT}[3m])))",
    f"histogram_quantile(0.9, increase({TTFT}[50s]))",
)


def test_prometheus_gives_the_same(tmp_path):
    """promtool evaluates the same queries on the same series."""
    _, promtool = prometheus()
    store = filled()
    labels = 'model_name="m",engine="0"'
    series = []
    for pod in store.names():
        gauge = store.points(pod, WAITING, -1, 720 * PS)
        series.append((f'{WAITING}{{{labels},pod="{pod}"}}', [value for _, value in gauge]))
        bounds = [*store.bounds(TTFT), "+Inf"]
        points = store.points(pod, TTFT, -1, 720 * PS)
        for i, bound in enumerate(bounds):
            name = f'{TTFT}{{{labels},pod="{pod}",le="{bound}"}}'
            series.append((name, [value[i] for _, value in points]))
    tests = []
    for text in QUERIES:
        found = parse_query(text).evaluate(store, 667 * PS)
        samples = []
        for pod, value in found.items():
            names = {} if pod is None else {"pod": pod}
            if pod is not None and text.startswith(
                (WAITING, "avg_over", "histogram_quantile(0.9, inc")
            ):
                names |= {"model_name": "m", "engine": "0"}
            shown = ",".join(f'{k}="{v}"' for k, v in sorted(names.items()))
            name = WAITING if text.startswith(WAITING) else ""
            samples.append({"labels": f"{name}{{{shown}}}", "value": value})
        tests.append({"expr": text, "eval_time": "667s", "exp_samples": samples})
    document = {
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": name, "values": " ".join(f"{value:g}" for value in values)}
                    for name, values in series
                ],
                "promql_expr_test": tests,
            }
        ],
    }
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    done = subprocess.run(
        [promtool, "test", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_buckets_are_those_of_the_exporter():
    ours = {m.name: m for m in (*metric_names.VLLM,)}
    for name, bounds in HISTOGRAMS.items():
        assert ours[name].buckets == bounds
    for name in (*GAUGES, *COUNTERS):
        assert name.removesuffix("_total") in ours


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "ends too early|expected"),
        ("sum(", "expected"),
        ("sum(x) by", "expected"),
        ("irate(x[1m])", "the function irate is not modelled"),
        ("x[5m]", "a range belongs into a function"),
        ("rate(x)", "needs a range"),
        ("sum without (pod) (x)", "without is not modelled"),
        ("x y", "should end here"),
        ("x{a>1}", "not understood"),
        ("histogram_quantile(0.9, x)", "needs the buckets of one histogram"),
        ("x offset 5m", "should end here"),
    ],
)
def test_queries_that_are_refused(text, told):
    with pytest.raises(QueryError, match=told):
        parse_query(text)


def test_idle_histograms_are_nan():
    assert math.isnan(bucket_quantile(0.99, (1.0, 2.0), (0.0, 0.0, 0.0)))
    assert bucket_quantile(0.99, (1.0, 2.0), (0.0, 0.0, 5.0)) == 2.0
    assert bucket_quantile(0.5, (1.0, 2.0), (4.0, 4.0, 4.0)) == 0.5


# --- the path -----------------------------------------------------------------------------

PATH = Path(queries={"queue": parse_query(WAITING), "total": parse_query(f"sum({WAITING})")})


def scraped(path, levels, until_s, every_s=15):
    """A store after scrapes of pods at the levels that `levels(pod, second)` tells."""
    store = Store({}, 0)
    for second in range(0, until_s + 1, every_s):
        for pod in range(2):
            state = path.scrape_state(pod, second * PS)
            if state == "scrape":
                store.append(f"pod-{pod}", WAITING, second * PS, None)
            elif state == "frozen":
                store.repeat(f"pod-{pod}", WAITING, second * PS)
            elif state == "ok":
                store.append(f"pod-{pod}", WAITING, second * PS, levels(pod, second))
    return store


def broken(kind, **keys):
    fault = MetricsFault(kind, 100 * PS, 400 * PS, **keys)
    return Path(queries=PATH.queries, faults=(fault,))


def test_a_value_is_as_old_as_its_scrape_and_rule():
    store = scraped(PATH, lambda pod, second: float(second), 300)
    assert PATH.ask(store, "queue", 104 * PS) == {"pod-0": 90.0, "pod-1": 90.0}
    slow = Path(rule_interval_ps=60 * PS, queries=PATH.queries)
    assert slow.ask(store, "total", 119 * PS) == {None: 120.0}
    assert slow.ask(store, "total", 120 * PS) == {None: 240.0}


def test_a_metric_that_no_rule_defines():
    """The article's HPA without an adapter: FailedGetPodsMetric, for ever."""
    answer = PATH.ask(Store({}, 0), "vllm_request_queue_length", 0)
    assert isinstance(answer, Failed)
    assert "no rule defines it" in answer.why
    spec = HpaSpec(2, 10, (MetricSpec("Pods", "vllm_request_queue_length", "AverageValue", 5000),))
    reading = pods_reading(answer, 0)
    found = reconcile(spec, ScalingLog(), [reading], [Pod("a"), Pod("b")], Scale(2, 2), 0)
    assert found.desired == 2
    assert "FailedGetPodsMetric" in {c.reason for c in found.conditions}


def test_series_of_a_pod_that_does_not_answer_end_at_once():
    path = broken("scrape", pods=(1,))
    store = scraped(path, lambda pod, second: 9.0, 300)
    answer = path.ask(store, "queue", 120 * PS)
    assert answer == {"pod-0": 9.0}
    assert silent_pods(answer, ["pod-0", "pod-1"]) == ["pod-1"]
    # The HPA counts the silent pod as idle on the way up: 9 of 10 wanted on the other is within tolerance.
    reading = pods_reading(answer, 120 * PS)
    assert reading == PodSamples({"pod-0": Sample(9000, 120 * PS)})


def test_a_prometheus_that_is_down():
    path = broken("prometheus")
    store = scraped(path, lambda pod, second: float(second), 600)
    assert isinstance(path.ask(store, "total", 200 * PS), Failed)
    # Back again, its last samples are older than the lookback until it has scraped.
    assert path.ask(store, "total", 400 * PS) == {}
    assert path.ask(store, "total", 405 * PS) == {None: 810.0}


def test_a_metrics_api_that_is_down_forgets_nothing():
    path = broken("api")
    store = scraped(path, lambda pod, second: float(second), 600)
    assert isinstance(path.ask(store, "total", 200 * PS), Failed)
    assert path.ask(store, "total", 400 * PS) == {None: 780.0}


def test_stale_values_look_fresh():
    path = broken("frozen")
    store = scraped(path, lambda pod, second: float(second), 600)
    assert path.ask(store, "total", 399 * PS) == {None: 180.0}


def test_labels_that_belong_to_no_pod():
    """kserve#5701, kserve#5527: the metric exists, no sample is matched, and nothing is ever scaled."""
    store = scraped(PATH, lambda pod, second: 50.0, 60)
    mismatched = Path(queries={"queue": parse_query(f'{WAITING}{{pod="x-rank-0"}}')})
    answer = mismatched.ask(store, "queue", 60 * PS)
    assert silent_pods(answer, ["pod-0", "pod-1"]) == ["pod-0", "pod-1"]
    assert isinstance(pods_reading(answer, 0), Failed)
    summed = Path(queries={"queue": parse_query(f"sum({WAITING})")}).ask(store, "queue", 60 * PS)
    assert "belong to none" in pods_reading(summed, 0).why


def test_an_empty_answer_by_way_of_the_adapter_and_of_keda():
    """The same missing series: the adapter fails and holds the count, KEDA reads 0 and lets it shrink."""
    path = broken("empty")
    store = scraped(path, lambda pod, second: 50.0, 300)
    answer = path.ask(store, "total", 200 * PS)
    assert total_reading(answer, True) == Failed("no metrics returned")
    spec = KedaSpec((QueryTrigger("total", f"sum({WAITING})", 5000),), 1, 10)
    given, _ = readings(spec, KedaState(), [trigger_answer(answer, True)], 8, 8, 0)
    assert given == [Total((0,))]


def test_nan_by_way_of_the_adapter_and_of_keda():
    path = broken("nan")
    store = scraped(path, lambda pod, second: 50.0, 300)
    per_pod = path.ask(store, "queue", 200 * PS)
    assert pods_reading(per_pod, 0) == PodSamples({f"pod-{i}": Sample(0, 0) for i in range(2)})
    total = path.ask(store, "total", 200 * PS)
    assert isinstance(total_reading(total, True), Failed)
    assert trigger_answer(total, True) == 0
    assert isinstance(trigger_answer(total, False), Failed)


def test_an_unaggregated_query_is_an_error_of_keda_with_two_pods():
    """production-stack's default query: fine with one replica, an error from the second on."""
    store = scraped(PATH, lambda pod, second: 50.0, 60)
    assert "2 elements" in trigger_answer(PATH.ask(store, "queue", 60 * PS), True).why
    # And its label model= is one that vLLM does not set.
    labelled = Path(queries={"queue": parse_query(f'sum({WAITING}{{model="m"}})')})
    assert trigger_answer(labelled.ask(store, "queue", 60 * PS), True) is None


def test_a_fault_of_one_query_is_not_one_of_the_others():
    path = broken("empty", query="total")
    store = scraped(path, lambda pod, second: 1.0, 300)
    assert path.ask(store, "total", 200 * PS) == {}
    assert path.ask(store, "queue", 200 * PS) == {"pod-0": 1.0, "pod-1": 1.0}
    assert set(FAULTS) == {"scrape", "frozen", "prometheus", "api", "empty", "nan"}


def test_names_that_are_gone():
    assert is_exported(WAITING)
    assert is_exported(TTFT)
    assert not is_exported("vllm:gpu_cache_usage_perc")
    assert not is_exported("vllm_num_requests_waiting")


def test_the_past_is_dropped():
    store = Store({}, 0)
    for second in range(0, 40_000, 15):
        store.append("a", WAITING, second * PS, 1.0)
    assert len(store.points("a", WAITING, -1, 10**6 * PS)) < 200
    store.forget("a")
    assert store.names() == []
