"""What does Prometheus scrape of a service, and how often? PodMonitors for its operator."""

from typing import Any

from real.manifests_setup import Setup
from real.manifests_text import document
from twin.clock import PS


def proxy_monitor(setup: Setup) -> dict[str, Any]:
    """The proxies' own metrics: answers by status, queue."""
    return document(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        f"{setup.name}-proxy",
        labels=setup.monitored("proxy"),
        spec={
            "selector": {"matchLabels": dict(setup.labels("proxy"))},
            "podMetricsEndpoints": [{"port": "stats", "path": "/metrics", "interval": "15s"}],
        },
    )


def pod_monitor(setup: Setup) -> dict[str, Any]:
    """Prometheus operator: scrape every replica as often as the scenario says, with both spellings of the colon."""
    fleet = setup.scenario.cluster.fleet
    interval_ps = 15 * PS if fleet is None else fleet.path.scrape_interval_ps
    colon = {
        "sourceLabels": ["__name__"],
        "regex": "(vllm|twin)_(.+)",
        "replacement": "$1:$2",
        "targetLabel": "__name__",
    }
    endpoint = {
        "port": "http",
        "path": "/metrics",
        "interval": duration(interval_ps),
        "scrapeTimeout": duration(min(interval_ps, 10 * PS)),
        "metricRelabelings": [colon],
    }
    return document(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        setup.name,
        labels=setup.monitored("engine"),
        spec={
            "selector": {"matchLabels": dict(setup.served)},
            "podMetricsEndpoints": [endpoint],
        },
    )


def duration(ps: int) -> str:
    """As Prometheus writes it: 15s, 500ms."""
    return f"{ps // PS}s" if ps % PS == 0 else f"{ps * 1000 // PS}ms"
