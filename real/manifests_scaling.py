"""Who scales, and what tells it how loaded the replicas are: HPA or ScaledObject, adapter rules.

The numbers are the scenario's, key for key. Queries get the labels of the service, so that they count no other.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from real.manifests_scrape import duration
from real.manifests_setup import POD_SUFFIX, Setup
from twin.cluster.fleet_spec import ScalerSpec
from twin.cluster.keda import CronTrigger, KedaSpec, QueryTrigger, Trigger
from twin.cluster.metrics_path import is_exported
from twin.cluster.objects import write_hpa, write_scaled_object
from twin.cluster.prediction import PredictionSpec
from twin.cluster.promql import QueryError, parse_query
from twin.cluster.specs import MetricSpec
from twin.errors import InputError

NOT_RENDERED = {
    "apa": "AIBrix' PodAutoscaler", "kpa": "AIBrix' PodAutoscaler", "saturation": "llm-d's workload-variant-autoscaler",
}  # fmt: skip
"""Autoscalers that bring a controller of their own."""


def scaler(setup: Setup) -> list[dict[str, Any]]:
    """The HPA or the ScaledObject of the scenario; nothing where the replicas are fixed.

    Raises InputError for an autoscaler with a controller of its own.
    """
    fleet = setup.scenario.cluster.fleet
    if fleet is None or not fleet.scaler.names:
        return []
    spec = fleet.scaler
    if spec.hpa is not None:
        for key in ("schedules", "prediction"):
            if getattr(spec, key):
                raise InputError(
                    f"cluster.{key}: an HPA has neither schedules nor forecasts; write cluster.keda in the place of "
                    "cluster.hpa, and both become triggers"
                )
        found = write_hpa(spec.hpa, setup.name, setup.name)
        _shorten(found["spec"])
    elif spec.keda is not None or spec.alone is not None:
        keda = _with_floors(setup, spec)
        found = write_scaled_object(keda, setup.name, setup.name, setup.prometheus)
        queries = {t.name: t.query for t in keda.triggers if isinstance(t, QueryTrigger)}
        for trigger in found["spec"]["triggers"]:
            if trigger["name"] in queries:
                trigger["metadata"]["query"] = scoped(queries[trigger["name"]], _matchers(setup))
        _shorten_keda(found["spec"])
    else:
        (name,) = spec.names
        raise InputError(
            f"cluster.{name}: is run by {NOT_RENDERED[name]}, which has objects of its own; write cluster.hpa or "
            "cluster.keda to have one rendered"
        )
    found["metadata"]["labels"] = dict(setup.labels("engine"))
    return [found]


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "scaleUp": {
        "stabilizationWindowSeconds": 0,
        "selectPolicy": "Max",
        "policies": [
            {"type": "Percent", "value": 100, "periodSeconds": 15},
            {"type": "Pods", "value": 4, "periodSeconds": 15},
        ],
    },
    "scaleDown": {
        "selectPolicy": "Max",
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    },
}
"""What the API server writes where `behavior` says nothing."""


def _shorten(spec: dict[str, Any]) -> None:
    """Leave out of an HPA's spec what the API server writes there itself."""
    behavior = {
        side: {
            key: rules[key]
            for key in (*FIRST, *rules)
            if key in rules and rules[key] != DEFAULTS[side].get(key)
        }
        for side, rules in spec.get("behavior", {}).items()
    }
    behavior = {side: rules for side, rules in behavior.items() if rules}
    spec.pop("behavior", None)
    if behavior:
        spec["behavior"] = behavior


FIRST = ("stabilizationWindowSeconds", "selectPolicy", "policies")


def _shorten_keda(spec: dict[str, Any]) -> None:
    """The same for a ScaledObject, its triggers at the end."""
    if spec.get("fallback", {}).get("behavior") == "static":
        del spec["fallback"]["behavior"]
    config = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
    _shorten(config)
    if not config:
        spec.pop("advanced", None)
    for trigger in spec["triggers"]:
        for key, value in (("activationThreshold", "0"), ("ignoreNullValues", "true")):
            if trigger["metadata"].get(key) == value:
                del trigger["metadata"][key]
    spec["triggers"] = spec.pop("triggers")


def _with_floors(setup: Setup, spec: ScalerSpec) -> KedaSpec:
    """The ScaledObject with schedules and forecast as further triggers: KEDA's HPA takes the most of all of them."""
    more: list[Trigger] = [
        CronTrigger(f"schedule-{i}", s.start, s.end, s.min_replicas)
        for i, s in enumerate(spec.schedules)
    ]
    if spec.prediction is not None:
        more.append(_forecast(setup, spec.prediction))
    if spec.keda is not None:
        return replace(spec.keda, triggers=(*spec.keda.triggers, *more))
    assert spec.alone is not None
    least, most = spec.alone
    return KedaSpec(tuple(more), least, most)


def _forecast(setup: Setup, spec: PredictionSpec) -> QueryTrigger:
    """A forecast as a query over what Prometheus has kept. Raises InputError for what PromQL cannot say."""
    if spec.metric is not None:
        raise InputError(
            "cluster.prediction.drives: metric is what a service of your own would export; write floor, which "
            "becomes a trigger over the requests that Prometheus has seen"
        )
    own = f'namespace="{setup.namespace}",pod=~"{setup.name}-proxy{POD_SUFFIX}",proxy="api"'
    series = f"haproxy_frontend_http_requests_total{{{own}}}"
    rate = f"sum(rate({series}[{duration(spec.interval_ps)}]))"
    if spec.forecaster == "seasonal_naive":
        back_ps = spec.season_ps - spec.horizon_ps
        window = f"[{duration(spec.horizon_ps)}:{duration(spec.interval_ps)}]"
        query = f"max_over_time({rate}{window} offset {duration(back_ps)})"
    elif spec.forecaster == "last_value":
        query = rate
    else:
        raise InputError(
            f"cluster.prediction.forecaster: {spec.forecaster} is no query of Prometheus; last_value and "
            f"seasonal_naive are, before_peak is a schedule (cluster.schedules), and others need a service of their own"
        )
    return QueryTrigger("forecast", query, round(spec.per_replica * 1000))


def _matchers(setup: Setup) -> str:
    return f'namespace="{setup.namespace}",pod=~"{setup.pods}"'


def scoped(query: str, matchers: str) -> str:
    """The query with the matchers added to every selector of vLLM's series and ours."""
    try:
        names = parse_query(query).names
    except QueryError:  # with an offset or a subquery, which only Prometheus evaluates
        names = frozenset(re.findall(r"(?:vllm|twin):[\w:]+", query))
    for name in sorted(names, key=len, reverse=True):
        # The braces that follow a name are its own matchers; a longer name is not this one.
        pattern = rf"(?<![\w:]){re.escape(name)}(?![\w:])(?:\s*\{{([^}}]*)\}})?"
        query = re.sub(pattern, _adding(name, matchers), query)
    return query


def _adding(name: str, matchers: str) -> Callable[[re.Match[str]], str]:
    """What makes the new selector of one that was found."""

    def selector(found: re.Match[str]) -> str:
        own = (found[1] or "").strip().rstrip(",")
        return f"{name}{{{','.join(part for part in (own, matchers) if part)}}}"

    return selector


# --- prometheus-adapter -------------------------------------------------------------------


def adapter_values(setup: Setup) -> dict[str, Any] | None:
    """Values for the Helm chart of prometheus-adapter: a rule for each metric of the HPA; None without an HPA."""
    fleet = setup.scenario.cluster.fleet
    hpa = None if fleet is None else fleet.scaler.hpa
    if fleet is None or hpa is None:
        return None
    rules: dict[str, list[dict[str, Any]]] = {}
    for metric in hpa.metrics:
        query = (fleet.path.queries or {}).get(metric.name)
        if query is None:
            raise InputError(
                f"cluster.hpa: no rule defines the metric {metric.name}, so that it can never be read; write a query "
                "for it under cluster.metrics.queries, e.g. vllm:num_requests_waiting"
            )
        section = "external" if metric.kind == "External" else "custom"
        rules.setdefault(section, []).append(_rule(metric, query.text, sorted(query.names)))
    return {"prometheus": address(setup.prometheus), "rules": {"default": False, **rules}}


def address(url: str) -> dict[str, Any]:
    """Where the adapter finds Prometheus, as its chart takes it apart. Raises InputError for what is no URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"--prometheus {url}: must be http://HOST:PORT or https://HOST:PORT")
    found: dict[str, Any] = {"url": f"{parts.scheme}://{parts.hostname}", "port": port or 0}
    return found | ({"path": parts.path} if parts.path.strip("/") else {})


def _rule(metric: MetricSpec, query: str, names: list[str]) -> dict[str, Any]:
    first = names[0]
    found: dict[str, Any] = {"seriesQuery": f'{first}{{namespace!="",pod!=""}}'}
    found["resources"] = {
        "overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}
    }
    found["name"] = {"matches": f"^{re.escape(first)}$", "as": metric.name}
    # A plain series becomes the adapter's own template; labels of the selector come in with LabelMatchers.
    if is_exported(query):
        inner = "<<.Series>>{<<.LabelMatchers>>}"
    else:
        inner = scoped(_without(query, metric), "<<.LabelMatchers>>")
    outer = inner if inner.startswith("sum(") and inner.endswith(")") else None
    summed = outer[len("sum(") : -1] if outer and _is_one_call(outer) else inner
    found["metricsQuery"] = f"sum by (<<.GroupBy>>) ({summed})"
    return found


def _is_one_call(text: str) -> bool:
    """Whether the last parenthesis closes the first."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and depth == 0:
            return i == len(text) - 1
    return False


def _without(query: str, metric: MetricSpec) -> str:
    """The query without the matchers of the metric's selector, which the adapter adds itself."""
    for label, value in metric.selector:
        query = re.sub(rf',?{re.escape(label)}="{re.escape(value)}"', "", query)
    return query.replace("{}", "")


def queries_of(setup: Setup) -> Iterator[tuple[str, str]]:
    """(metric or trigger, its query with the service's labels) of the autoscaler."""
    fleet = setup.scenario.cluster.fleet
    if fleet is not None:
        for name, query in (fleet.path.queries or {}).items():
            yield name, scoped(query.text, _matchers(setup))
