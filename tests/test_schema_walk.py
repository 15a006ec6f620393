"""No key of a scenario is idle: changing any of them changes the result, or is refused.

The keys come from the schema itself, so that a new one without an entry here fails.
"""

import dataclasses
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from tests.runs import azure_csv, document, flat_profile, run, stream
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.scenario import load_scenario
from twin.scenario_schema import Document
from twin.scheduling import PolicyConfig, TierConfig


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key that takes a value, as `section.key`; where a section has several forms, their names stand between."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        forms = models_in(field.annotation)
        plain = takes_plain(field.annotation)
        for form in forms:
            several = len(forms) > 1 or plain
            yield from keys(form, f"{path}.{form.__name__}." if several else f"{path}.")
        if not forms or plain:
            yield path


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in models_in(part)]


def takes_plain(annotation: Any) -> bool:
    """Whether a number or a name may stand where a section may."""
    if get_origin(annotation) is Annotated:
        return takes_plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return any(takes_plain(part) for part in get_args(annotation))
    return annotation in (int, float, str)


KEYS = [
    *keys(Document),
    *(f"policy.{f.name}" for f in dataclasses.fields(PolicyConfig)),
    *(f"policy.tiers.{f.name}" for f in dataclasses.fields(TierConfig)),
]


class Case(NamedTuple):
    """One change, as an override, and where it shows: in the `records`, only in the `summary` or in the time `series`,
    or `refused`."""

    change: str
    where: str = "records"
    base: tuple[str, ...] = ()
    """Overrides that both runs have."""


TIERS = "{ONLINE: 0.5, BATCH: 0.3, OFFLINE: 0.2}"
MIXED = f"traffic.0.tiers={TIERS}"
TALK = "traffic.0.sessions={turns: 4, system_prompt_tokens: 160, think_time: 0.1}"
LONG = "traffic.0.prompt_tokens={uniform: [300, 1500]}"
FEW_BLOCKS = "engine.num_gpu_blocks_override=130"
MEMORY = ("engine.num_gpu_blocks_override=null", "engine.gpu_memory_utilization=0.2", LONG,
          "hardware.step_time=flat.json")  # fmt: skip
OWN_GPU = ("hardware={step_time: roofline, gpu: {name: X, memory_bytes: 80000000000, bandwidth: 2e12, "
           "bf16_flops: 1e14}}")  # fmt: skip
OWN_MEMORY = ("engine.num_gpu_blocks_override=null", "engine.gpu_memory_utilization=0.22", LONG)
TRACE = "traffic=[{trace: trace.csv}]"
TRACE_TIERS = "traffic=[{trace: trace.csv, tiers: {ONLINE: 0.5, BATCH: 0.5}}]"
CROWD = ("engine.max_num_seqs=4", "traffic.0.requests=80", LONG)
LEARNED = ("policy={preset: tiered, tiers: {ONLINE: {batch_tokens: 500, max_wait: 0.3}}}",
           "traffic.0.requests=100", "traffic.0.arrivals.rate=10")  # fmt: skip
DURATION = ("traffic.0.requests=null", "traffic.0.duration=2")


def tier(change: str, *base: str, policy: str = "tiered", where: str = "records") -> Case:
    """A change of a tier of a preset."""
    return Case(f"policy.tiers.{change}", where, (f"policy={{preset: {policy}}}", MIXED, *base))


def renewal(change: str, *base: str) -> Case:
    """A change of the arrivals of the base scenario."""
    return Case(f"traffic.0.arrivals.{change}", base=base)


def rate_of(rate: str, change: str) -> Case:
    """A change of a rate that is a curve."""
    return renewal(f"rate.{change}", f"traffic.0.arrivals.rate={rate}")


def arrivals(written: str, change: str) -> Case:
    """A change of other arrivals, of which 40 requests or 3 seconds are taken."""
    return Case(
        f"traffic.0.arrivals.{change}",
        base=("traffic.0.duration=3", f"traffic.0.arrivals={written}"),
    )


def times(key: str, path: str, *base: str) -> dict[str, Case]:
    """The forms of a time at `path`."""
    return {
        key: Case(f"{path}=0.3", base=base),
        f"{key}.ExponentialTime.exponential": Case(f"{path}={{exponential: 0.3}}", base=base),
        f"{key}.UniformTime.uniform": Case(f"{path}={{uniform: [0.1, 0.4]}}", base=base),
        f"{key}.LognormalTime.lognormal.median": Case(
            f"{path}.lognormal.median=0.3",
            base=(*base, f"{path}={{lognormal: {{median: 0.2, p95: 1}}}}"),
        ),
        f"{key}.LognormalTime.lognormal.p95": Case(
            f"{path}.lognormal.p95=0.9",
            base=(*base, f"{path}={{lognormal: {{median: 0.2, p95: 1}}}}"),
        ),
    }


def lengths(key: str, path: str, *base: str) -> dict[str, Case]:
    """The forms of a length at `path`."""
    by_median = (*base, f"{path}={{lognormal: {{median: 40, p95: 150}}}}")
    by_mean = (*base, f"{path}={{lognormal: {{mean: 50, sigma: 0.8}}}}")
    return {
        f"{key}.FixedLength.fixed": Case(f"{path}={{fixed: 39}}", base=base),
        f"{key}.UniformLength.uniform": Case(f"{path}={{uniform: [5, 90]}}", base=base),
        f"{key}.QuantileLength.quantiles": Case(f"{path}={{quantiles: [[0, 5], [0.4, 20], [1, 90]]}}", base=base),
        f"{key}.LognormalLength.lognormal.median": Case(f"{path}.lognormal.median=50", base=by_median),
        f"{key}.LognormalLength.lognormal.p95": Case(f"{path}.lognormal.p95=250", base=by_median),
        f"{key}.LognormalLength.lognormal.max": Case(f"{path}.lognormal.max=60", base=by_median),
        f"{key}.LognormalLength.lognormal.mean": Case(f"{path}.lognormal.mean=60", base=by_mean),
        f"{key}.LognormalLength.lognormal.sigma": Case(f"{path}.lognormal.sigma=1.2", base=by_mean),
    }  # fmt: skip


AGENT = ("traffic.0.sessions={turns: 4, tools: {calls: {uniform: [0, 3]}, time: 0.05, "
         "result_tokens: {fixed: 50}, output_tokens: {fixed: 12}}}")  # fmt: skip
TEXTS = "traffic.0.prefixes={groups: 3, tokens: 96, skew: 1}"
LONG_CONTEXT = "engine={max_num_seqs: 8, max_num_batched_tokens: 512, max_model_len: 131072}"
REPEAT = "traffic.0.reuse={share: [[0, 0], [1, 1]]}"
BURSTS = "{process: bursts, rate: 5, burst_rate: 50, burst: 0.5, pause: 0.5}"
BATCH = "{process: batch, at: [0.5, '00:00:01'], size: 5}"
CLOSED = "{process: closed, users: 4, think_time: 0.1}"
PRESET = "traffic=[{preset: azure-2023-conv, rate: 30, requests: 40}]"
PRESET_TIERS = (
    "traffic=[{preset: azure-2023-conv, rate: 30, requests: 40, tiers: {ONLINE: 0.5, BATCH: 0.5}}]"
)
SYNTHETIC = "traffic.SyntheticStream."
FROM_PRESET = "traffic.PresetStream."
RENEWAL = f"{SYNTHETIC}arrivals.RenewalArrivals."
FROM_TRACE = "traffic.TraceStream."

# --- replicas that come and go ---------------------------------------------------------------

WAITING = "vllm:num_requests_waiting"
METRIC = f"metric: {{name: '{WAITING}'}}, target: {{type: AverageValue, averageValue: '2'}}"
HPA = (
    f"cluster.hpa={{minReplicas: 1, maxReplicas: 4, metrics: [{{type: Pods, pods: {{{METRIC}}}}}]}}"
)
TRIGGER = (
    f"{{type: prometheus, name: queue, metadata: {{query: 'sum({WAITING})', threshold: '4'}}}}"
)
CRON = (
    "{type: cron, name: day, metadata: {start: 0 9 * * *, end: 0 18 * * *, desiredReplicas: '4'}}"
)
KEDA = f"cluster.keda={{minReplicaCount: 1, maxReplicaCount: 4, pollingInterval: 1, triggers: [{TRIGGER}, {CRON}]}}"
ZERO = "{image: 0, process: 0, weights: 0, compile: 0, graphs: 0, warm_up: 0}"
QUICK = (f"cluster.cold_start.phases={ZERO}", "cluster.cold_start.phases.process=0.1",
         "cluster.probes.readiness.periodSeconds=1", "traffic.0.requests=200")  # fmt: skip
WATCHED = (*QUICK, "cluster.metrics.scrape_interval=0.1")
FALLING = ("traffic.0.arrivals.rate={steps: [[0, 60], [3, 4]]}", "traffic.0.requests=210")
SCALED = (HPA, *WATCHED, "cluster.controller.sync_period=0.2")
BY_KEDA = (KEDA, *WATCHED, "cluster.controller.sync_period=0.2")
COLD = ("cluster.cold_start.initial=cold", "cluster.probes.readiness.periodSeconds=5",
        "cluster.holds_requests=true", "run.until=400")  # fmt: skip
PHASED = (
    "cluster.cold_start.initial=cold",
    f"cluster.cold_start.phases={ZERO}",
    "cluster.probes.readiness=null",
)
TWO = ("cluster.replicas=2", "traffic.0.output_tokens.uniform=[50, 400]")
ROLLED = (*TWO, *QUICK, "cluster.rolling_updates=[{at: 1}]")
ONE_GPU = (*TWO, *QUICK, "cluster.nodes={gpus: 1, initial: 1, max: 1, provision: 0.5}")
BROKEN = "cluster.faults=[{kind: crash, at: 0.5}]"
DEAD_GPU = "cluster.faults=[{kind: gpu_loss, at: 0.5, until: 1}]"
SLOW = "cluster.faults=[{kind: slow, at: 0.5, factor: 2}]"
DRAIN = "cluster.faults=[{kind: node_drain, at: 0.5, node: 0}]"
RECLAIM = "cluster.faults=[{kind: spot_reclaim, at: 0.5, pods: [0]}]"
NODES = (*TWO, *QUICK, "cluster.nodes={gpus: 1, initial: 2}")
GROWING = ("cluster.nodes={gpus: 1, initial: 1, max: 2}", "cluster.replicas=2", *PHASED)
ORDERED = ("cluster.nodes={gpus: 1, initial: 1, max: 2, provision: 0.5}", *QUICK,
           "cluster.rolling_updates=[{at: 1, max_surge: '1', max_unavailable: '0'}, "
           "{at: 3, max_surge: '1', max_unavailable: '0'}]")  # fmt: skip


def phase(key: str, path: str, *base: str, requests: str = "200") -> dict[str, Case]:
    """The forms of the time of a phase."""
    base = (*base, f"traffic.0.requests={requests}")
    wide = (*base, f"{path}={{lognormal: {{median: 0.5, p95: 1}}}}")
    return times(key, path, *base) | {
        f"{key}.TriangularTime.triangular": Case(
            f"{path}={{triangular: [0.2, 0.3, 0.7]}}", base=base
        ),
        f"{key}.LognormalTime.lognormal.median": Case(f"{path}.lognormal.median=0.9", base=wide),
        f"{key}.LognormalTime.lognormal.p95": Case(f"{path}.lognormal.p95=400", base=wide),
    }


def ratio(rule: str) -> dict[str, Case]:
    """The keys of an autoscaler of AIBrix."""
    path = f"cluster.{rule}"
    start = (
        f"{path}={{max_replicas: 4, target: 1, period: 0.3, down_cooldown: 0.5}}",
        *WATCHED,
        *FALLING,
    )
    if rule == "kpa":
        windows = (
            f"{path}.stable_window=2",
            f"{path}.panic_window=0.7",
            f"{path}.panic_threshold=1.2",
        )
        start = (*start, *windows, f"{path}.max_replicas=12", f"{path}.target=3")
    by_window = {
        "stable_window": Case(f"{path}.stable_window=0.5", base=start),
        "panic_window": Case(f"{path}.panic_window=0.3", base=start),
        "panic_threshold": Case(f"{path}.panic_threshold=9", base=start),
    }
    cases = {
        "min_replicas": Case(f"{path}.min_replicas=3", base=start),
        "max_replicas": Case(f"{path}.max_replicas=2", base=start),
        "query": Case(f"{path}.query='{WAITING}'", base=start),
        "target": Case(f"{path}.target=6", base=start),
        "period": Case(f"{path}.period=0.7", base=start),
        "tolerance": Case(
            f"{path}.tolerance=0.9", "records" if rule == "apa" else "refused", start
        ),
        "max_rate": Case(f"{path}.max_rate=1.2", base=start),
        "up_cooldown": Case(f"{path}.up_cooldown=2", base=start),
        "down_cooldown": Case(f"{path}.down_cooldown=100", base=start),
        "guard_pending": Case(f"{path}.guard_pending=true", base=start),
        **(
            by_window
            if rule == "kpa"
            else {k: c._replace(where="refused") for k, c in by_window.items()}
        ),
    }
    return {f"cluster.{rule}.{key}": case for key, case in cases.items()}


SATURATION = ("cluster.saturation={max_replicas: 4, period: 0.3}", *WATCHED, *FALLING)
QUEUE = "cluster.admission={max_inflight: 6, max_queue: 500}"
RATE = "cluster.admission={rate: 20, burst: 2}"
OF_BATCH = "cluster.admission.tiers.BATCH."
RETRIES = ("cluster.admission={max_inflight: 4, max_queue: 1, retry_after: 0.2}",
           "cluster.retries={attempts: 4, backoff: 0.1}")  # fmt: skip
FAILING = (*TWO, *QUICK, "cluster.router=round_robin", "traffic.0.requests=null", "traffic.0.duration=4",
           "cluster.replicas=4",
           "cluster.faults=[{kind: partition, at: 0.5, until: 2.5, pods: [0, 1]}]",
           "cluster.routing.ejection={consecutive_5xx: 2, interval: 0.1, base_ejection_time: 0.3, "
           "max_ejection_percent: 50}")  # fmt: skip
PANIC = (*FAILING, "cluster.routing.ejection.max_ejection_percent=100",
         "cluster.faults=[{kind: partition, at: 0.5, until: 2.5, pods: [0, 1, 2]}]")  # fmt: skip
STALE = (*TWO, *QUICK, "cluster.router=queue_aware", "cluster.routing={poll_interval: 0.4, stale_after: 0.5}",
         "cluster.faults=[{kind: stale, at: 0.5, until: 3, pods: [0]}]")  # fmt: skip
ALL_STALE = ("cluster.routing.stale_after=0.2",)
FAULT = "cluster.metrics.faults=[{kind: scrape, start: 0.1, until: 4, pods: [0]}]"
OUTAGE = "cluster.metrics.faults=[{kind: empty, start: 0.1, until: 4}]"
TWO_METRICS = (HPA.replace("metrics: [", "metrics: [{type: External, external: {metric: {name: total}, "
               "target: {type: AverageValue, averageValue: '2'}}}, "), *SCALED[1:],
               f"cluster.metrics.queries={{total: 'sum({WAITING})'}}")  # fmt: skip

FLOOR = "{start: 0 9 * * *, end: 1 9 * * *, min_replicas: 2}"
AGAIN = "{start: 2 9 * * *, end: 5 9 * * *, min_replicas: 2}"
WARM = ("cluster.start='Mon 08:59'", f"cluster.schedules=[{FLOOR}, {AGAIN}]",
        "cluster.warm_pool={standby: 1, first_wake: 1.5}", f"cluster.cold_start.phases={ZERO}",
        "cluster.cold_start.phases.process=150", "cluster.probes.readiness=null",
        "traffic.0.requests=null", "traffic.0.duration=200", "traffic.0.arrivals.rate=15")  # fmt: skip
RETURNS = ("cluster.warm_pool.returns=true", "cluster.warm_pool.wake=0.9")


KEPT = ("cluster.nodes={gpus: 1, initial: 2, max: 6, provision: 2}", *SCALED)
PLANNED = (HPA, *QUICK, "cluster.schedules=[{start: 0 9 * * *, end: 0 18 * * *, min_replicas: 3}]",
           "cluster.controller.sync_period=0.2", "cluster.start='Mon 08:59'",
           "traffic.0.arrivals.rate=3", "traffic.0.requests=500",
           "cluster.controller.downscale_stabilization=0")  # fmt: skip
FORESEEN = (HPA.replace("'2'", "'900'"), *QUICK, "cluster.controller.sync_period=0.2", "traffic.0.requests=300",
            "traffic.0.arrivals.rate={steps: [[0, 60], [3, 4]]}",
            "cluster.prediction={forecaster: last_value, per_replica: 20, interval: 1, horizon: 2, season: 4, "
            "history: [1, 50, 30, 10]}")  # fmt: skip
SEASONAL = (*FORESEEN, "cluster.prediction.forecaster=seasonal_naive")
BY_FORECAST = (*FORESEEN, "cluster.hpa=null", "cluster.controller.sync_period=15",
               "cluster.prediction={forecaster: last_value, per_replica: 20, interval: 1, horizon: 2, season: 4, "
               "history: [90], drives: alone, max_replicas: 4}", "run.until=60",
               "traffic.0.arrivals.rate=10")  # fmt: skip
FORETOLD = (HPA.replace("metrics: [", "metrics: [{type: External, external: {metric: {name: soon}, "
            "target: {type: AverageValue, averageValue: '20'}}}, "), *FORESEEN[1:],
            "cluster.prediction.drives=metric", "cluster.prediction.metric=soon")  # fmt: skip


def clients(key: str, *base: str) -> dict[str, Case]:
    """What the clients of the first stream do: `key` names the form of the stream."""
    soon = {
        f"{key}disconnects.share": Case(
            "traffic.0.disconnects.share=0.4", base=(*base, "traffic.0.disconnects={after: 0.1}")
        ),
        f"{key}disconnects.at": Case(
            "traffic.0.disconnects.at=0.3", base=(*base, "traffic.0.disconnects={at: 0.25}")
        ),
    }
    path = "traffic.0.disconnects.after"
    wide = (*base, "traffic.0.disconnects={after: {lognormal: {median: 0.1, p95: 0.5}}}")
    after = {
        "": Case(f"{path}=0.1", base=(*base, "traffic.0.disconnects={after: 0.2}")),
        ".ExponentialTime.exponential": Case("traffic.0.disconnects={after: {exponential: 0.1}}", base=base),
        ".UniformTime.uniform": Case("traffic.0.disconnects={after: {uniform: [0.02, 0.3]}}", base=base),
        ".TriangularTime.triangular": Case("traffic.0.disconnects={after: {triangular: [0.02, 0.1, 0.3]}}", base=base),
        ".LognormalTime.lognormal.median": Case(f"{path}.lognormal.median=0.05", base=wide),
        ".LognormalTime.lognormal.p95": Case(f"{path}.lognormal.p95=0.3", base=wide),
    }  # fmt: skip
    full = (
        *base,
        "cluster.admission={max_inflight: 1, max_queue: 0, retry_after: 0.2}",
        "traffic.0.retries={attempts: 4, backoff: 0.1}",
    )
    asks = {
        "attempts": "1", "backoff": "0.5", "multiplier": "3", "max_backoff": "0.15", "jitter": "0",
        "outcomes": "[aborted]", "give_up_after": "0.3",
    }  # fmt: skip
    return (
        soon
        | {f"{key}disconnects.after{form}": case for form, case in after.items()}
        | {f"{key}retries.{k}": Case(f"traffic.0.retries.{k}={v}", base=full) for k, v in asks.items()}
        | {f"{key}retries.heeds_retry_after": Case("traffic.0.retries.heeds_retry_after=false", "refused", full)}
    )  # fmt: skip


FLEET = {
    **{
        f"cluster.routing.ejection.{k}": Case(f"cluster.routing.ejection.{k}={v}", base=base)
        for k, v, base in (
            ("consecutive_5xx", "4", FAILING),
            ("interval", "1", FAILING),
            ("base_ejection_time", "0.9", FAILING),
            ("max_ejection_time", "0.3", FAILING),
            ("max_ejection_percent", "25", FAILING),
            ("healthy_panic_threshold", "10", PANIC),
        )
    },
    "cluster.routing.stale_after": Case("cluster.routing.stale_after=9", base=STALE),
    "cluster.routing.when_stale": Case("cluster.routing.when_stale=refuse", base=(*STALE, *ALL_STALE)),
    "cluster.admission.tiers.retry_after": Case(
        "cluster.admission.tiers={ONLINE: {retry_after: 3}}", base=RETRIES
    ),
    "cluster.warm_pool.standby": Case("cluster.warm_pool.standby=2", base=WARM),
    "cluster.warm_pool.claim_probability": Case("cluster.warm_pool.claim_probability=0", base=WARM),
    **phase("cluster.warm_pool.first_wake", "cluster.warm_pool.first_wake", *WARM, requests="null"),
    **phase("cluster.warm_pool.wake", "cluster.warm_pool.wake", *WARM, *RETURNS, requests="null"),
    "cluster.warm_pool.returns": Case("cluster.warm_pool.returns=true", base=WARM),
    "cluster.warm_pool.placeholders": Case("cluster.warm_pool={placeholders: 2}", base=KEPT),
    "cluster.schedules.start": Case("cluster.schedules.0.start='1 9 * * *'", base=PLANNED),
    "cluster.schedules.end": Case("cluster.schedules.0.end='1 9 * * *'", base=PLANNED),
    "cluster.schedules.min_replicas": Case("cluster.schedules.0.min_replicas=2", base=PLANNED),
    "cluster.prediction.forecaster": Case("cluster.prediction.forecaster=before_peak", base=FORESEEN),
    "cluster.prediction.per_replica": Case("cluster.prediction.per_replica=40", base=FORESEEN),
    "cluster.prediction.drives": Case("cluster.prediction.drives=alone", "refused", FORESEEN),
    "cluster.prediction.metric": Case("cluster.prediction.metric=other", "refused", FORETOLD),
    "cluster.prediction.min_replicas": Case("cluster.prediction.min_replicas=3", base=BY_FORECAST),
    "cluster.prediction.max_replicas": Case(
        "cluster.prediction.max_replicas=2", base=(*BY_FORECAST, "cluster.prediction.per_replica=3")
    ),
    "cluster.prediction.interval": Case("cluster.prediction.interval=2", base=FORESEEN),
    "cluster.prediction.horizon": Case("cluster.prediction.horizon=1", base=SEASONAL),
    "cluster.prediction.season": Case("cluster.prediction.season=2", base=SEASONAL),
    "cluster.prediction.history": Case("cluster.prediction.history=[1, 1, 1, 90]", base=SEASONAL),
    "cluster.hpa": Case(HPA.replace("'2'", "'9'"), base=SCALED),
    "cluster.hpa_rivals": Case("cluster.hpa_rivals=[other]", base=SCALED),
    "cluster.keda": Case(KEDA.replace("'4'", "'3'"), base=BY_KEDA),
    **ratio("apa"),
    **ratio("kpa"),
    "cluster.saturation.min_replicas": Case("cluster.saturation.min_replicas=3", base=SATURATION),
    "cluster.saturation.max_replicas": Case("cluster.saturation.max_replicas=2", base=SATURATION),
    "cluster.saturation.period": Case("cluster.saturation.period=0.7", base=SATURATION),
    "cluster.saturation.kv_threshold": Case("cluster.saturation.kv_threshold=0.01", base=SATURATION),
    "cluster.saturation.queue_threshold": Case("cluster.saturation.queue_threshold=60", base=SATURATION),
    "cluster.saturation.spare_kv": Case("cluster.saturation.spare_kv=0.79", base=SATURATION),
    "cluster.saturation.spare_queue": Case("cluster.saturation.spare_queue=0", base=SATURATION),
    "cluster.controller.sync_period": Case("cluster.controller.sync_period=0.7", base=SCALED),
    "cluster.controller.tolerance": Case("cluster.controller.tolerance=1", base=SCALED),
    "cluster.controller.downscale_stabilization": Case(
        "cluster.controller.downscale_stabilization=0", base=(*SCALED, *FALLING)
    ),
    "cluster.metrics.scrape_interval": Case("cluster.metrics.scrape_interval=1", base=SCALED),
    "cluster.metrics.rule_interval": Case("cluster.metrics.rule_interval=1", base=SCALED),
    "cluster.metrics.queries": Case(
        f"cluster.metrics.queries={{'{WAITING}': 'vllm:num_requests_running'}}", base=SCALED
    ),
    "cluster.metrics.faults.kind": Case(
        "cluster.metrics.faults.0.kind=nan",
        base=(*SCALED, OUTAGE, "cluster.metrics.faults.0.start=2", "cluster.controller.downscale_stabilization=0"),
    ),
    "cluster.metrics.faults.start": Case("cluster.metrics.faults.0.start=1", base=(*SCALED, OUTAGE)),
    "cluster.metrics.faults.until": Case("cluster.metrics.faults.0.until=1", base=(*SCALED, OUTAGE)),
    "cluster.metrics.faults.pods": Case("cluster.metrics.faults.0.pods=[9]", base=(*SCALED, FAULT)),
    "cluster.metrics.faults.metric": Case(
        "cluster.metrics.faults.0.metric=total", base=(*TWO_METRICS, OUTAGE)
    ),
    "cluster.cold_start.storage": Case("cluster.cold_start.storage=gp3", base=COLD),
    "cluster.cold_start.image": Case("cluster.cold_start.image=pull", base=(*COLD, "run.until=800")),
    "cluster.cold_start.compile_cache": Case("cluster.cold_start.compile_cache=cached", base=COLD),
    "cluster.cold_start.initial": Case(
        "cluster.cold_start.initial=warm", base=(*COLD, "cluster.cold_start.image=cached")
    ),
    **phase("cluster.cold_start.phases.image", "cluster.cold_start.phases.image", *PHASED),
    **phase("cluster.cold_start.phases.process", "cluster.cold_start.phases.process", *PHASED),
    **phase("cluster.cold_start.phases.weights", "cluster.cold_start.phases.weights", *PHASED),
    **phase("cluster.cold_start.phases.compile", "cluster.cold_start.phases.compile", *PHASED),
    **phase("cluster.cold_start.phases.graphs", "cluster.cold_start.phases.graphs", *PHASED),
    **phase("cluster.cold_start.phases.warm_up", "cluster.cold_start.phases.warm_up", *PHASED),
    "cluster.probes.startup.initialDelaySeconds": Case(
        "cluster.probes.startup.initialDelaySeconds=200",
        base=(*COLD, "cluster.probes.startup={failureThreshold: 60}"),
    ),
    "cluster.probes.startup.periodSeconds": Case(
        "cluster.probes.startup.periodSeconds=77",
        base=(*COLD, "cluster.probes.startup={failureThreshold: 60}"),
    ),
    "cluster.probes.startup.failureThreshold": Case(
        "cluster.probes.startup.failureThreshold=60", base=(*COLD, "cluster.probes.startup={periodSeconds: 10}")
    ),
    "cluster.probes.liveness.initialDelaySeconds": Case(
        "cluster.probes.liveness.initialDelaySeconds=500", base=(*COLD, "cluster.probes.liveness={periodSeconds: 10}")
    ),
    "cluster.probes.liveness.periodSeconds": Case(
        "cluster.probes.liveness.periodSeconds=200", base=(*COLD, "cluster.probes.liveness={periodSeconds: 10}")
    ),
    "cluster.probes.liveness.failureThreshold": Case(
        "cluster.probes.liveness.failureThreshold=60", base=(*COLD, "cluster.probes.liveness={periodSeconds: 10}")
    ),
    "cluster.probes.readiness.initialDelaySeconds": Case("cluster.probes.readiness.initialDelaySeconds=200", base=COLD),
    "cluster.probes.readiness.periodSeconds": Case("cluster.probes.readiness.periodSeconds=77", base=COLD),
    "cluster.probes.readiness.successThreshold": Case("cluster.probes.readiness.successThreshold=3", base=COLD),
    "cluster.pod.pods_per_replica": Case(
        "cluster.pod.pods_per_replica=2",
        base=("hardware={gpu: H100, tensor_parallel_size: 2, step_time: flat.json}", "cluster.replicas=3",
              "cluster.nodes={gpus: 3, initial: 2}", *QUICK),
    ),
    "cluster.pod.pre_stop": Case("cluster.pod.pre_stop=1", base=ROLLED),
    "cluster.pod.shutdown_timeout": Case("cluster.pod.shutdown_timeout=20", base=ROLLED),
    "cluster.pod.termination_grace_period": Case(
        "cluster.pod.termination_grace_period=0.1", base=(*ROLLED, "cluster.pod.shutdown_timeout=20")
    ),
    "cluster.pod.endpoint_lag": Case("cluster.pod.endpoint_lag=0.5", base=ROLLED),
    "cluster.pod.priority_class": Case("cluster.pod.priority_class=gone"),
    "cluster.priority_classes": Case("cluster.priority_classes=[llm]", base=("cluster.pod.priority_class=llm",)),
    "cluster.pod.gpu_products": Case("cluster.pod.gpu_products=[B]", base=("cluster.nodes.gpu_product=A",)),
    "cluster.pod.tolerates_gpu_taint": Case(
        "cluster.pod.tolerates_gpu_taint=false", base=("cluster.nodes.has_gpu_taint=true",)
    ),
    "cluster.nodes.gpus": Case("cluster.nodes.gpus=2", base=ONE_GPU),
    "cluster.nodes.initial": Case("cluster.nodes.initial=2", base=(*ONE_GPU, "cluster.nodes.max=2")),
    "cluster.nodes.max": Case("cluster.nodes.max=2", base=ONE_GPU),
    **phase("cluster.nodes.provision", "cluster.nodes.provision", *GROWING),
    "cluster.nodes.remove_after": Case("cluster.nodes.remove_after=0", base=ORDERED),
    "cluster.nodes.gpu_product": Case(
        "cluster.nodes.gpu_product=B", base=("cluster.pod.gpu_products=[A]", "cluster.nodes.gpus=8")
    ),
    "cluster.nodes.has_gpu_taint": Case(
        "cluster.nodes.has_gpu_taint=true", base=("cluster.pod.tolerates_gpu_taint=false", "cluster.nodes.gpus=8")
    ),
    "cluster.rolling_updates.at": Case("cluster.rolling_updates.0.at=2", base=ROLLED),
    "cluster.rolling_updates.max_surge": Case("cluster.rolling_updates.0.max_surge='100%'", base=ROLLED),
    "cluster.rolling_updates.max_unavailable": Case("cluster.rolling_updates.0.max_unavailable='100%'", base=ROLLED),
    "cluster.faults.kind": Case("cluster.faults.0.kind=partition", base=(*TWO, *QUICK, BROKEN)),
    "cluster.faults.at": Case("cluster.faults.0.at=0.7", base=(*TWO, *QUICK, BROKEN)),
    "cluster.faults.until": Case("cluster.faults.0.until=2", base=(*TWO, *QUICK, DEAD_GPU)),
    "cluster.faults.pods": Case("cluster.faults.0.pods=[1]", base=(*TWO, *QUICK, BROKEN)),
    "cluster.faults.node": Case("cluster.faults.0.node=1", base=(*NODES, DRAIN)),
    "cluster.faults.factor": Case("cluster.faults.0.factor=9", base=(*TWO, *QUICK, SLOW)),
    "cluster.faults.notice": Case(
        "cluster.faults.0.notice=0.1",
        base=(*TWO, *QUICK, "cluster.pod.shutdown_timeout=20", RECLAIM),
    ),
    "cluster.holds_requests": Case(
        "cluster.holds_requests=true", base=("cluster.cold_start.initial=cold", "run.until=400")
    ),
    "cluster.start": Case("cluster.start='Mon 12:00'", base=BY_KEDA),
    "cluster.price_per_gpu_hour": Case("cluster.price_per_gpu_hour=2", "summary"),
}  # fmt: skip

CASES = FLEET | clients(SYNTHETIC) | clients(FROM_PRESET, PRESET) | clients(FROM_TRACE, TRACE) | {
    "name": Case("name=other", "summary"),
    "model": Case(
        "model=Qwen/Qwen3-8B", base=(*MEMORY, "engine.gpu_memory_utilization=0.205")
    ),
    "hardware.gpu": Case("hardware.gpu=H200", base=MEMORY),
    "hardware.gpu.Gpu.name": Case("hardware.gpu.name=Y", "summary", base=(OWN_GPU,)),
    "hardware.gpu.Gpu.memory_bytes": Case("hardware.gpu.memory_bytes=90000000000", base=(OWN_GPU, *OWN_MEMORY)),
    "hardware.gpu.Gpu.bandwidth": Case("hardware.gpu.bandwidth=3e12", base=(OWN_GPU,)),
    "hardware.gpu.Gpu.bf16_flops": Case("hardware.gpu.bf16_flops=2e14", base=(OWN_GPU,)),
    "hardware.gpu.Gpu.fp8_flops": Case(
        "hardware.gpu.fp8_flops=2e14", base=(OWN_GPU, "hardware.dtype=fp8")
    ),
    "hardware.gpu.Gpu.link_bandwidth": Case(
        "hardware.gpu.link_bandwidth=5e11", base=(OWN_GPU, "hardware.tensor_parallel_size=2")
    ),
    "hardware.tensor_parallel_size": Case("hardware.tensor_parallel_size=2", base=MEMORY),
    "hardware.dtype": Case("hardware.dtype=fp8", base=MEMORY),
    "hardware.step_time": Case("hardware.step_time=flat.json"),
    "engine.version": Case("engine.version=0.31.0", "refused"),
    "engine.max_num_seqs": Case("engine.max_num_seqs=4"),
    "engine.max_num_active_seqs": Case("engine.max_num_active_seqs=4"),
    "engine.max_num_batched_tokens": Case("engine.max_num_batched_tokens=64"),
    "engine.max_num_scheduled_tokens": Case("engine.max_num_scheduled_tokens=64"),
    "engine.max_model_len": Case("engine.max_model_len=110"),
    "engine.block_size": Case("engine.block_size=32", base=(LONG, FEW_BLOCKS)),
    "engine.gpu_memory_utilization": Case("engine.gpu_memory_utilization=0.5", base=MEMORY),
    "engine.num_gpu_blocks_override": Case("engine.num_gpu_blocks_override=130", base=(LONG,)),
    "engine.kv_cache_dtype": Case("engine.kv_cache_dtype=fp8", base=MEMORY),
    "engine.enable_prefix_caching": Case("engine.enable_prefix_caching=false", base=(TALK,)),
    "engine.enable_chunked_prefill": Case(
        "engine.enable_chunked_prefill=false", base=(LONG, "engine.max_num_batched_tokens=2048")
    ),
    "engine.long_prefill_token_threshold": Case("engine.long_prefill_token_threshold=32"),
    "engine.long_prefill_token_threshold_adaptive": Case(
        "engine.long_prefill_token_threshold_adaptive=true",
        base=("engine.long_prefill_token_threshold=8",),
    ),
    "engine.scheduler_reserve_full_isl": Case(
        "engine.scheduler_reserve_full_isl=false", base=(LONG, FEW_BLOCKS)
    ),
    "engine.watermark": Case("engine.watermark=0.3", base=(LONG, FEW_BLOCKS)),
    "engine.async_scheduling": Case("engine.async_scheduling=false"),
    "engine.enforce_eager": Case("engine.enforce_eager=true"),
    "policy": Case("policy=tiered", base=(MIXED,)),
    "policy.tiers": Case("policy.tiers=[{name: '*', max_running: 2}]", base=("policy={preset: fcfs}",)),
    "policy.estimator": Case(
        "policy.estimator=declared",
        base=("policy={preset: tiered_length}", MIXED, "traffic.0.max_tokens=1500"),
    ),
    "policy.quantile": Case("policy.quantile=0.95", base=LEARNED),
    "policy.window": Case("policy.window=1", base=LEARNED),
    "policy.initial": Case("policy.initial=4000", base=("policy={preset: tiered}", MIXED)),
    "policy.weights": Case(
        "policy.weights={a: 50}", base=("policy={preset: fair}", "traffic.0.tenants={a: 0.5, b: 0.5}")
    ),
    "policy.default_tier": Case("policy.default_tier=BATCH", base=("policy={preset: priority}",)),
    "policy.tiers.name": tier("ONLINE.name=FIRST", where="refused"),
    "policy.tiers.order": tier("ONLINE.order=shortest", policy="priority"),
    "policy.tiers.batch_size": tier("ONLINE.batch_size=2", "policy.tiers.ONLINE.max_wait=0.3"),
    "policy.tiers.batch_tokens": tier("ONLINE.batch_tokens=500", "policy.tiers.ONLINE.max_wait=0.3"),
    "policy.tiers.max_wait": tier("ONLINE.max_wait=0.3"),
    "policy.tiers.adaptive": tier("ONLINE.adaptive=fill"),
    "policy.tiers.max_running": tier("BATCH.max_running=1"),
    "policy.tiers.max_running_tokens": tier("BATCH.max_running_tokens=300"),
    "policy.tiers.preemptible": tier(
        "OFFLINE.preemptible=false", *CROWD, "traffic.0.arrivals.rate=4", policy="priority"
    ),
    "policy.tiers.promote_after": tier("OFFLINE.promote_after=0.4"),
    "policy.tiers.victims": tier("BATCH.victims=largest", *CROWD),
    "policy.tiers.groups": tier(
        "ONLINE.groups=[[150, 2], [900, 2]]", "policy.tiers.ONLINE.max_wait=0.5", policy="tiered_length"
    ),
    "policy.tiers.mix": tier("ONLINE.mix=2", "policy.tiers.ONLINE.max_wait=0.3", policy="tiered_length"),
    "policy.tiers.rank": tier("OFFLINE.rank=1", policy="tiered"),
    "policy.tiers.ttft_target": tier("BATCH.ttft_target=1000", policy="slo"),
    "cluster.replicas": Case("cluster.replicas=2"),
    "cluster.router": Case("cluster.router=round_robin", base=("cluster.replicas=2",)),
    "cluster.routing.poll_interval": Case("cluster.routing.poll_interval=0.3", base=("cluster.replicas=2",)),
    "cluster.routing.routers": Case("cluster.routing.routers=3", base=("cluster.replicas=2",)),
    "cluster.routing.guard": Case(
        "cluster.routing.guard=null", base=(TALK, "cluster={replicas: 2, router: prefix_affinity}")
    ),
    "cluster.admission.max_inflight": Case("cluster.admission.max_inflight=5", base=("cluster.admission.rate=1000",)),
    "cluster.admission.max_queue": Case("cluster.admission.max_queue=1", base=(QUEUE,)),
    "cluster.admission.rate": Case("cluster.admission.rate=8", base=(RATE,)),
    "cluster.admission.burst": Case("cluster.admission.burst=5", base=(RATE,)),
    "cluster.admission.tiers.max_inflight": Case(OF_BATCH + "max_inflight=1", base=(MIXED, QUEUE)),
    "cluster.admission.tiers.max_queue": Case(OF_BATCH + "max_queue=0", base=(MIXED, QUEUE)),
    "cluster.admission.tiers.rate": Case(OF_BATCH + "rate=4", base=(MIXED, OF_BATCH + "rate=8")),
    "cluster.admission.tiers.burst": Case(OF_BATCH + "burst=5", base=(MIXED, OF_BATCH + "rate=8")),
    "cluster.admission.max_inflight_per_replica": Case("cluster.admission.max_inflight_per_replica=3"),
    "cluster.admission.max_inflight_tokens": Case("cluster.admission.max_inflight_tokens=700"),
    "cluster.admission.max_wait": Case("cluster.admission.max_wait=0.3", base=(QUEUE,)),
    "cluster.admission.order": Case("cluster.admission.order=[OFFLINE]", base=(QUEUE, MIXED)),
    "cluster.admission.retry_after": Case("cluster.admission.retry_after=3", base=RETRIES),
    "cluster.retries.attempts": Case("cluster.retries.attempts=2", base=RETRIES),
    "cluster.retries.backoff": Case("cluster.retries.backoff=0.5", base=RETRIES),
    "cluster.retries.multiplier": Case("cluster.retries.multiplier=3", base=RETRIES),
    "cluster.retries.max_backoff": Case("cluster.retries.max_backoff=0.15", base=RETRIES),
    "cluster.retries.jitter": Case("cluster.retries.jitter=0", base=RETRIES),
    "cluster.retries.outcomes": Case("cluster.retries.outcomes=[aborted]", base=RETRIES),
    "cluster.retries.heeds_retry_after": Case(
        "cluster.retries.heeds_retry_after=false", base=(*RETRIES, "cluster.admission.max_queue=0"), where="refused"
    ),
    "cluster.retries.give_up_after": Case("cluster.retries.give_up_after=0.3", base=RETRIES),
    "objectives": Case("objectives.ONLINE.ttft_p99=0.001", "summary"),
    "run.seed": Case("run.seed=2"),
    "run.until": Case("run.until=1.5"),
    "run.warmup": Case("run.warmup=1.5", "summary"),
    "run.engine_mode": Case("run.engine_mode=stepped", "summary"),
    "run.records": Case("run.records=false"),
    "run.sample_period": Case("run.sample_period=0.5", "series"),
    SYNTHETIC + "tier": Case("traffic.0.tier=BATCH"),
    SYNTHETIC + "tiers": Case(MIXED),
    SYNTHETIC + "tenant": Case("traffic.0.tenant=acme"),
    SYNTHETIC + "tenants": Case("traffic.0.tenants={a: 0.5, b: 0.5}"),
    SYNTHETIC + "max_tokens": Case("traffic.0.max_tokens=9"),
    SYNTHETIC + "timeouts.ttft": Case("traffic.0.timeouts.ttft=0.05"),
    SYNTHETIC + "timeouts.total": Case("traffic.0.timeouts.total=0.5"),
    SYNTHETIC + "requests": Case("traffic.0.requests=39"),
    SYNTHETIC + "duration": Case("traffic.0.duration=1.5", base=DURATION),
    RENEWAL + "process": renewal("process=constant"),
    RENEWAL + "rate": renewal("rate=60"),
    RENEWAL + "rate.SineRate.sine.mean": rate_of("{sine: {mean: 20, amplitude: 0.9}}", "sine.mean=30"),
    RENEWAL + "rate.SineRate.sine.amplitude": rate_of("{sine: {mean: 20, amplitude: 0.9}}", "sine.amplitude=0"),
    RENEWAL + "rate.SineRate.sine.period": rate_of("{sine: {mean: 20, amplitude: 0.9}}", "sine.period=3"),
    RENEWAL + "rate.SineRate.sine.peak": rate_of("{sine: {mean: 20, amplitude: 0.9, period: 4}}", "sine.peak=2"),
    RENEWAL + "rate.StepsRate.steps": rate_of("{steps: [[0, 30], [0.5, 5]]}", "steps=[[0, 30], [0.5, 9]]"),
    RENEWAL + "rate.StepsRate.repeat": rate_of("{steps: [[0, 30], [0.5, 5]]}", "repeat=1"),
    RENEWAL + "rate.PointsRate.points": rate_of("{points: [[0, 30], [0.5, 5]]}", "points=[[0, 30], [0.5, 9]]"),
    RENEWAL + "rate.PointsRate.repeat": rate_of("{points: [[0, 30], [0.5, 5]]}", "repeat=1"),
    RENEWAL + "cv": renewal("cv=3", "traffic.0.arrivals={process: gamma, rate: 20, cv: 2}"),
    RENEWAL + "gaps": renewal(
        "gaps=[[0, 1], [0.9, 1], [1, 20]]", "traffic.0.arrivals={process: gaps, rate: 20, gaps: [[0, 1], [1, 1]]}"
    ),
    RENEWAL + "tick": renewal("tick=0.5"),
    SYNTHETIC + "arrivals.BurstArrivals.process": arrivals(BURSTS, "process=batch")._replace(where="refused"),
    SYNTHETIC + "arrivals.BurstArrivals.rate": arrivals(BURSTS, "rate=0"),
    SYNTHETIC + "arrivals.BurstArrivals.burst_rate": arrivals(BURSTS, "burst_rate=90"),
    SYNTHETIC + "arrivals.BurstArrivals.burst": arrivals(BURSTS, "burst=0.2"),
    SYNTHETIC + "arrivals.BurstArrivals.pause": arrivals(BURSTS, "pause=0.2"),
    SYNTHETIC + "arrivals.BurstArrivals.lengths": arrivals(BURSTS, "lengths=fixed"),
    SYNTHETIC + "arrivals.BatchArrivals.process": arrivals(BATCH, "process=closed")._replace(where="refused"),
    SYNTHETIC + "arrivals.BatchArrivals.at": arrivals(BATCH, "at=[0.5]"),
    SYNTHETIC + "arrivals.BatchArrivals.size": arrivals(BATCH, "size=6"),
    SYNTHETIC + "arrivals.BatchArrivals.every": arrivals(BATCH, "every=1.5"),
    SYNTHETIC + "arrivals.ClosedArrivals.process": arrivals(CLOSED, "process=bursts")._replace(where="refused"),
    SYNTHETIC + "arrivals.ClosedArrivals.users": arrivals(CLOSED, "users=3"),
    SYNTHETIC + "arrivals.ClosedArrivals.ramp": arrivals(CLOSED, "ramp=1"),
    **times(SYNTHETIC + "arrivals.ClosedArrivals.think_time", "traffic.0.arrivals.think_time",
            f"traffic.0.arrivals={CLOSED}"),
    **lengths(SYNTHETIC + "prompt_tokens", "traffic.0.prompt_tokens"),
    **lengths(SYNTHETIC + "output_tokens", "traffic.0.output_tokens"),
    SYNTHETIC + "length_correlation": Case(
        "traffic.0.length_correlation=0.9", base=("traffic.0.prompt_tokens={uniform: [5, 90]}",)
    ),
    SYNTHETIC + "lengths_from": Case("traffic.0.lengths_from=other.csv", base=(
        "traffic=[{arrivals: {process: poisson, rate: 20}, lengths_from: trace.csv, requests: 20}]",
    )),
    SYNTHETIC + "sessions.turns": Case("traffic.0.sessions.turns=5", base=(TALK,)),
    SYNTHETIC + "sessions.turns.UniformCount.uniform": Case(
        "traffic.0.sessions.turns={uniform: [2, 6]}", base=(TALK,)
    ),
    SYNTHETIC + "sessions.turns.QuantileCount.quantiles": Case(
        "traffic.0.sessions.turns={quantiles: [[0, 1], [1, 6]]}", base=(TALK,)
    ),
    SYNTHETIC + "sessions.system_prompt_tokens": Case(
        "traffic.0.sessions.system_prompt_tokens=0", base=(TALK,)
    ),
    **times(SYNTHETIC + "sessions.think_time", "traffic.0.sessions.think_time", TALK),
    SYNTHETIC + "sessions.tools.calls": Case("traffic.0.sessions.tools.calls=1", base=(AGENT,)),
    SYNTHETIC + "sessions.tools.calls.UniformCount.uniform": Case(
        "traffic.0.sessions.tools.calls={uniform: [1, 2]}", base=(AGENT,)
    ),
    SYNTHETIC + "sessions.tools.calls.QuantileCount.quantiles": Case(
        "traffic.0.sessions.tools.calls={quantiles: [[0, 0], [1, 5]]}", base=(AGENT,)
    ),
    **times(SYNTHETIC + "sessions.tools.time", "traffic.0.sessions.tools.time", AGENT),
    **lengths(SYNTHETIC + "sessions.tools.result_tokens", "traffic.0.sessions.tools.result_tokens", AGENT),
    **lengths(SYNTHETIC + "sessions.tools.output_tokens", "traffic.0.sessions.tools.output_tokens", AGENT),
    SYNTHETIC + "prefixes.groups": Case("traffic.0.prefixes.groups=4", base=(TEXTS,)),
    SYNTHETIC + "prefixes.tokens": Case("traffic.0.prefixes.tokens=80", base=(TEXTS,)),
    SYNTHETIC + "prefixes.skew": Case("traffic.0.prefixes.skew=4", base=(TEXTS,)),
    SYNTHETIC + "reuse.share": Case("traffic.0.reuse.share=[[0, 0], [1, 0]]", base=(REPEAT,)),
    SYNTHETIC + "reuse.memory": Case("traffic.0.reuse.memory=1", base=(REPEAT, LONG, FEW_BLOCKS)),
    FROM_PRESET + "preset": Case("traffic.0.preset=azure-2023-code", base=(PRESET,)),
    FROM_PRESET + "rate": Case("traffic.0.rate=40", base=(PRESET,)),
    FROM_PRESET + "duration": Case("traffic.0.duration=0.5", base=(PRESET,)),
    FROM_PRESET + "steady": Case("traffic.0.steady=true", base=(PRESET,)),
    FROM_PRESET + "ticks": Case(
        "traffic.0.ticks=false", base=("traffic=[{preset: mooncake-conversation, requests: 40}]", LONG_CONTEXT)
    ),
    FROM_PRESET + "requests": Case("traffic.0.requests=30", base=(PRESET,)),
    FROM_PRESET + "tier": Case("traffic.0.tier=BATCH", base=(PRESET,)),
    FROM_PRESET + "tiers": Case("traffic.0.tiers={ONLINE: 0.1, BATCH: 0.9}", base=(PRESET_TIERS,)),
    FROM_PRESET + "tenant": Case("traffic.0.tenant=acme", base=(PRESET,)),
    FROM_PRESET + "tenants": Case("traffic.0.tenants={a: 0.5, b: 0.5}", base=(PRESET,)),
    FROM_PRESET + "max_tokens": Case("traffic.0.max_tokens=9", base=(PRESET,)),
    FROM_PRESET + "timeouts.ttft": Case("traffic.0.timeouts.ttft=0.01", base=(PRESET,)),
    FROM_PRESET + "timeouts.total": Case("traffic.0.timeouts.total=0.1", base=(PRESET,)),
    FROM_TRACE + "tier": Case("traffic.0.tier=BATCH", base=(TRACE,)),
    FROM_TRACE + "tiers": Case("traffic.0.tiers={ONLINE: 0.1, BATCH: 0.9}", base=(TRACE_TIERS,)),
    FROM_TRACE + "tenant": Case("traffic.0.tenant=acme", base=(TRACE,)),
    FROM_TRACE + "tenants": Case("traffic.0.tenants={a: 0.5, b: 0.5}", base=(TRACE,)),
    FROM_TRACE + "max_tokens": Case("traffic.0.max_tokens=9", base=(TRACE,)),
    FROM_TRACE + "timeouts.ttft": Case("traffic.0.timeouts.ttft=0.01", base=(TRACE,)),
    FROM_TRACE + "timeouts.total": Case("traffic.0.timeouts.total=0.1", base=(TRACE,)),
    FROM_TRACE + "requests": Case("traffic.0.requests=5", base=(TRACE,)),
    FROM_TRACE + "trace": Case("traffic.0.trace=other.csv", base=(TRACE,)),
    FROM_TRACE + "speedup": Case("traffic.0.speedup=2", base=(TRACE,)),
    FROM_TRACE + "format": Case("traffic.0.format=sharegpt", base=("traffic=[{trace: hashed.jsonl}]",)),
    FROM_TRACE + "window": Case("traffic.0.window=[0.2, 0.9]", base=(TRACE,)),
    FROM_TRACE + "spread_ticks": Case("traffic.0.spread_ticks=0.05", base=(TRACE,)),
    FROM_TRACE + "assumed_prefix_share": Case("traffic.0.assumed_prefix_share=0.5", base=(TRACE,)),
}  # fmt: skip


def test_every_key_has_a_case():
    assert sorted(CASES) == sorted(KEYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Working directory with the files that the cases name."""
    folder = tmp_path_factory.mktemp("walk")
    flat_profile(folder, 20_000_000_000)
    rows = [(f"2023-11-16 18:15:{46 + i // 10}.{i % 10}", 100 + 40 * i, 30) for i in range(12)]
    azure_csv(folder, rows)
    azure_csv(folder, rows[:6], "other.csv")
    hashed = '{"timestamp": %d, "input_length": 1040, "output_length": 9, "hash_ids": [0, 1, 2]}\n'
    (folder / "hashed.jsonl").write_text("".join(hashed % (900 * i) for i in range(6)))
    return folder


def base_document() -> dict[str, Any]:
    """Forty requests at once too many for eight slots."""
    chat = stream(100, 40, arrivals={"process": "poisson", "rate": 40}) | {
        "output_tokens": {"uniform": [5, 80]},
    }
    return document(traffic=[chat], engine={"max_num_seqs": 8})


@pytest.mark.parametrize("key", KEYS)
def test_a_change_is_seen(key, folder, monkeypatch):
    monkeypatch.chdir(folder)
    case = CASES[key]
    if case.where == "refused":
        load_scenario(base_document(), case.base)
        with pytest.raises(InputError):
            load_scenario(base_document(), [*case.base, case.change])
        return
    before = run(base_document(), *case.base, observe=case.where == "series")
    after = run(base_document(), *case.base, case.change, observe=case.where == "series")
    same_records = before.kept == after.kept
    assert same_records == (case.where in ("summary", "series"))
    if case.where == "series":
        assert before.series.times_ps != after.series.times_ps
        return
    assert not (same_records and shown(before) == shown(after))


def shown(result):
    """The summary without what differs between any two runs."""
    return summarize(dataclasses.replace(result, wall_s=1.0))
