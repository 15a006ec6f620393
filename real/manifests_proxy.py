"""The gateway of a scenario as a configuration of HAProxy: routing, limits, refusals, health checks.

Each replica is a server that DNS names; a request waits in HAProxy's own queue while all are full.
"""

import math
from typing import Any

from real.manifests_pod import apart, container_security, pod_security
from real.manifests_setup import CONFIG_HASH, PORT, PROXY_PORT, STATS_PORT, Setup
from real.manifests_text import budget, config_hash, document
from twin.clock import to_seconds
from twin.cluster.admission import AdmissionSpec
from twin.errors import InputError

IMAGE = "haproxy:2.6.12"
RETRY_AFTER_S = 5
"""Where the scenario names none."""

MOST_CONNECTIONS = 4000
"""Of one proxy: each takes two of the files that a container may open, mostly 20,000 or more, at times 8,192; and two
buffers of 16 KiB, 125 MiB of the 256 together."""

THREADS = 2
"""Of one proxy, which else starts one for each CPU of its node."""

BALANCE = {
    "least_connections": "balance leastconn",
    "round_robin": "balance roundrobin",
    "random": "balance random(1)",
    "power_of_two": "balance random(2)",
    "session_affinity": "balance hdr(X-Session-Id)\n    hash-type consistent",
}
"""Router of the twin -> the same rule in HAProxy."""

UNKNOWN_TO_PROXIES = ("least_kv", "queue_aware", "prefix_affinity")
"""Routers that look into engines or prompts."""


def proxy(setup: Setup) -> list[dict[str, Any]]:
    """ConfigMap, Deployment, disruption budget and Service of the proxy. Its Service has the service's name."""
    name = f"{setup.name}-proxy"
    labels = dict(setup.labels("proxy"))
    config_map = document(
        "v1", "ConfigMap", name, labels=labels, data={"haproxy.cfg": config(setup)}
    )
    routers = setup.scenario.cluster.routing.routers
    grace_s = setup.numbers.pre_stop_s + setup.numbers.shutdown_timeout_s + 10
    container = {
        "name": "haproxy",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "ports": [
            {"name": "http", "containerPort": PROXY_PORT},
            {"name": "stats", "containerPort": STATS_PORT},
        ],
        "resources": {
            "requests": {"cpu": "250m", "memory": "256Mi"},
            "limits": {"memory": "256Mi"},
        },
        "securityContext": container_security(read_only=True),
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "stats"}, "periodSeconds": 10},
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "stats"}, "periodSeconds": 5},
        # From the deletion on no new connection should come; then SIGUSR1 lets those that are there end.
        "lifecycle": {"preStop": {"sleep": {"seconds": 10}}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/usr/local/etc/haproxy", "readOnly": True}
        ],
    }
    spec = {
        "replicas": routers,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels, "annotations": {CONFIG_HASH: config_hash(config_map)}},
            "spec": {
                "serviceAccountName": setup.name,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": grace_s + 10,
                "securityContext": pod_security(),
                **({"affinity": apart(setup, "proxy")} if routers > 1 else {}),
                "containers": [container],
                "volumes": [{"name": "config", "configMap": {"name": name}}],
            },
        },
    }  # fmt: skip
    return [
        config_map,
        document("apps/v1", "Deployment", name, labels=labels, spec=spec),
        budget(name, labels),
        document(
            "v1",
            "Service",
            setup.name,
            labels=labels,
            spec={
                "selector": labels,
                "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
            },
        ),
    ]


def config(setup: Setup) -> str:
    """haproxy.cfg. Raises InputError for a router that no proxy has."""
    scenario = setup.scenario
    router = scenario.cluster.routing.router
    if router in UNKNOWN_TO_PROXIES:
        raise InputError(
            f"cluster.router: {router} looks into the engines, which HAProxy cannot; deploy one that does (llm-d's "
            f"endpoint picker, production-stack's router) and render with --no-proxy, or choose one of "
            f"{', '.join(BALANCE)}"
        )
    admission = scenario.cluster.admission or AdmissionSpec()
    longest_s = setup.numbers.shutdown_timeout_s
    queue_s = longest_s
    if admission.max_wait_ps is not None:
        queue_s = max(1, math.ceil(to_seconds(admission.max_wait_ps)))
    retry_s = RETRY_AFTER_S
    if admission.retry_after_ps is not None:
        retry_s = max(1, math.ceil(to_seconds(admission.retry_after_ps)))
    balance = BALANCE[router]
    guard = scenario.cluster.routing.guard
    if router == "session_affinity" and guard is not None:
        balance += f"\n    hash-balance-factor {round(guard * 100)}"
    limits = "".join(f"    {line}\n" for line in _limits(setup, admission, retry_s))
    tables = "".join(_table(name, seconds) for name, seconds, _ in _buckets(setup, admission))
    engines = f"{setup.name}-pods.{setup.namespace}.svc.cluster.local:{PORT}"
    return f"""\
global
    log stdout format raw local0 info
    nbthread {THREADS}
    maxconn {MOST_CONNECTIONS}
    hard-stop-after {longest_s + 10}s

defaults
    mode http
    log global
    option httplog
    option http-keep-alive
    http-reuse safe
    retries 3
    retry-on conn-failure
    option redispatch 1
    timeout connect 5s
    timeout client {longest_s + 10}s
    timeout server {longest_s + 10}s
    timeout http-request 30s
    timeout queue {queue_s}s
    {_answer("http-error", 503, "no replica is free", retry_s)}

resolvers cluster
    parse-resolv-conf
    accepted_payload_size 8192
    hold valid 5s
    hold obsolete 0s
    hold nx 5s
    hold other 5s
    timeout resolve 1s
    timeout retry 1s

frontend stats
    bind :{STATS_PORT}
    monitor-uri /healthz
    http-request use-service prometheus-exporter if {{ path /metrics }}
    http-request return status 404

frontend api
    bind :{PROXY_PORT}
    # Only what clients need: no /metrics, no endpoint of development or control.
    http-request return status 404 unless {{ path_beg /v1/ }} or {{ path /health }}
{limits}    default_backend engines

backend engines
    {balance}
    option httpchk GET /health
    default-server check inter 2s fall 2 rise 1{_server_limit(setup, admission)}
    server-template engine 1-{_slots(setup)} {engines} resolvers cluster init-addr none
{tables}"""


def _slots(setup: Setup) -> int:
    """Servers at most: replicas, and sleepers that are awake."""
    fleet = setup.scenario.cluster.fleet
    pool = None if fleet is None else fleet.warm_pool
    return max(1, setup.most_replicas) + (
        pool.standby if pool is not None and setup.has_standby else 0
    )


def _server_limit(setup: Setup, admission: AdmissionSpec) -> str:
    """maxconn of each server; a proxy that is one of several has its share."""
    routers = setup.scenario.cluster.routing.routers
    if admission.per_replica is not None:
        return f" maxconn {math.ceil(admission.per_replica / routers)}"
    if admission.limits.max_inflight is not None and not setup.is_scaled:
        replicas = max(1, setup.scenario.cluster.replicas) * routers
        return f" maxconn {math.ceil(admission.limits.max_inflight / replicas)}"
    return ""


def left_out(setup: Setup) -> list[str]:
    """Parts of the gateway that HAProxy has no like of."""
    admission = setup.scenario.cluster.admission or AdmissionSpec()
    told = []
    if admission.limits.max_inflight is not None and setup.is_scaled:
        told.append(
            "cluster.admission.max_inflight: HAProxy limits each server, and an autoscaler changes their number; write "
            "max_inflight_per_replica"
        )
    if admission.max_tokens is not None:
        told.append("cluster.admission.max_inflight_tokens: a proxy does not count tokens")
    for tier, limits in admission.tiers.items():
        for key in ("max_inflight", "max_queue"):
            if getattr(limits, key) is not None:
                told.append(f"cluster.admission.tiers.{tier}.{key}: HAProxy has one queue")
    rated = [tier for tier, limits in admission.tiers.items() if limits.rate is not None]
    for tier in rated[MOST_BUCKETS - (admission.limits.rate is not None) :]:
        told.append(f"cluster.admission.tiers.{tier}.rate: HAProxy keeps {MOST_BUCKETS} counters")
    fleet = setup.scenario.cluster.fleet
    if fleet is not None and fleet.holds_requests:
        told.append("cluster.holds_requests: HAProxy answers 503 while no replica is Ready")
    return told


def _limits(setup: Setup, admission: AdmissionSpec, retry_s: int) -> list[str]:
    """Rules of the frontend, in the order in which they are asked."""
    buckets = _buckets(setup, admission)
    lines = []
    if admission.order or any(name != "all" for name, _, _ in buckets):
        lines += [
            "http-request set-var(txn.tier) req.hdr(X-Tier)",
            f"http-request set-var(txn.tier) str({_default_tier(setup)}) unless {{ req.hdr(X-Tier) -m found }}",
        ]
    for i, (name, _, most) in enumerate(buckets):
        condition = _is_tier(name)
        lines += [
            f"http-request track-sc{i} int(1) table rate_{name}" + (f" if {condition}" if condition else ""),
            f"{_refusal(429, 'too many requests', retry_s)} if {condition} "
            f"{{ sc{i}_gpc0_rate(rate_{name}) ge {most} }}",
        ]  # fmt: skip
    if admission.limits.max_queue is not None:
        most = admission.limits.max_queue // setup.scenario.cluster.routing.routers
        full = f"queue(engines) ge {most}" if most else "be_conn_free(engines) le 0"
        lines.append(f"{_refusal(429, 'the queue is full', retry_s)} if {{ {full} }}")
    for i, (name, _, _) in enumerate(buckets):
        condition = _is_tier(name)
        lines.append(f"http-request sc-inc-gpc0({i})" + (f" if {condition}" if condition else ""))
    lines += [
        f"http-request set-priority-class int({rank}) if {_is_tier(tier)}"
        for rank, tier in enumerate(admission.order)
    ]
    if admission.order:
        others = " ".join(f"!{_is_tier(tier)}" for tier in admission.order)
        lines.append(f"http-request set-priority-class int({len(admission.order)}) if {others}")
    return [line.replace(" if  {", " if {") for line in lines]


def _is_tier(name: str) -> str:
    """The condition that a request has the tier; none for `all`."""
    return "" if name == "all" else f"{{ var(txn.tier) -m str -i {name} }}"


def _default_tier(setup: Setup) -> str:
    policy = setup.scenario.policy
    return (policy and policy.default_tier) or (setup.scenario.tiers or ("ONLINE",))[0]


def _refusal(status: int, why: str, retry_s: int) -> str:
    return _answer("http-request return", status, why, retry_s)


def _answer(directive: str, status: int, why: str, retry_s: int) -> str:
    body = f'{{"error":{{"message":"{why}","code":{status}}}}}'
    return f"{directive} status {status} content-type application/json string '{body}' hdr Retry-After {retry_s}"


MOST_BUCKETS = 3
"""Sticky counters that HAProxy has for a request."""


def _buckets(setup: Setup, admission: AdmissionSpec) -> list[tuple[str, int, int]]:
    """(name, seconds, requests in them) of what has a rate: of all requests, and of tiers.

    HAProxy counts in a sliding window, as long as a bucket takes to fill up and at least a second. A proxy that is one
    of several has its share.
    """
    found = []
    for name, limits in (("all", admission.limits), *admission.tiers.items()):
        if limits.rate is not None:
            seconds = max(1, math.ceil(limits.burst / limits.rate))
            requests = limits.rate * seconds / setup.scenario.cluster.routing.routers
            found.append((name, seconds, max(1, math.floor(requests))))
    return found[:MOST_BUCKETS]


def _table(name: str, seconds: int) -> str:
    return f"""
backend rate_{name}
    stick-table type integer size 1 expire {10 * seconds}s store gpc0,gpc0_rate({seconds}s)
"""
