"""What is said of a run whose gateway or whose pods bound it."""

import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cluster.test_faults import QUICK, broken
from tests.cluster.test_fleet import hpa, rates
from tests.runs import document, run
from twin.clock import PS
from twin.cluster.cron import parse_cron
from twin.cluster.forecast import ahead
from twin.errors import InputError
from twin.report.html import render_html
from twin.report.json_summary import summarize, to_json
from twin.report.parquet import write_series
from twin.report.scaling import _row
from twin.report.tables import render
from twin.scenario import load_scenario

LIMITED = rates((0, 6), duration=10)


def said(result):
    return summarize(result)["verdict"]


@pytest.mark.parametrize(
    ("admission", "words"),
    [
        ({"max_inflight": 1}, ("max_inflight 1", "waited there although a pod was Ready")),
        ({"tiers": {"ONLINE": {"max_inflight": 1}}}, ("tiers.ONLINE.max_inflight 1",)),
        ({"rate": 1}, ("were refused: rate_limit",)),
        ({"max_inflight": 1, "max_queue": 0}, ("were refused: queue_full",)),
    ],
)
def test_the_verdict_names_the_gateway(admission, words):
    traffic = LIMITED | {"tier": "ONLINE"}
    result = run(document(traffic=[traffic], cluster={"admission": admission}, run={"until": 12}))
    verdict = said(result)
    assert all(word in verdict for word in words)
    assert "Nothing" not in verdict
    assert "hardly" not in verdict


@pytest.mark.parametrize("kind", ["gpu_loss", "partition", "crash"])
def test_the_verdict_names_the_fault(kind):
    result = run(broken({"kind": kind, "at": 3}, traffic=LIMITED, run_keys={"until": 12}))
    verdict = said(result)
    assert f"{kind} at 3 s (pods 0, 1)" in verdict
    assert "Nothing" not in verdict
    assert "hardly" not in verdict


def test_the_verdict_without_a_cause_outside_is_that_of_the_engines():
    free = run(document(traffic=[LIMITED], cluster={"admission": {"max_inflight": 1000}}))
    plain = run(document(traffic=[LIMITED]))
    assert said(free) == said(plain)


def test_the_queue_at_the_gateway_is_that_of_its_requests():
    """The integral of the queue is the sum of all waits (Little's law, to the picosecond)."""
    result = run(document(traffic=[LIMITED], cluster={"admission": {"max_inflight": 1}}))
    served = [r for r in result.records if r.first_scheduled_ps is not None]
    assert len(served) == len(result.records)
    free = run(document(traffic=[LIMITED], cluster={"admission": {"max_inflight": 1000}}))
    assert free.gateway_waits.request_ps == free.gateway_waits.most == 0
    waits = result.gateway_waits
    assert waits.unfinished == waits.without_pod_ps == 0
    finishes = sorted(r.finish_ps for r in served)
    starts = sorted(r.arrival_ps for r in served)
    # With one in flight, each is sent on when the one before it has ended.
    expected = sum(
        max(0, end - start) for start, end in zip(starts[1:], finishes[:-1], strict=True)
    )
    assert waits.request_ps == expected > PS


# --- who wants replicas -------------------------------------------------------------------


def fails_later(history, season, steps):
    if len(history) > 3:
        raise RuntimeError("no model")
    return [12.0] * steps


def two(history, season, steps):
    return [2.0] * steps


def alone(forecaster, **keys):
    prediction = {
        "forecaster": forecaster, "per_replica": 4, "interval": 5, "horizon": 5, "season": 600,
        "drives": "alone", "max_replicas": 4, **keys,
    }  # fmt: skip
    cluster = QUICK | {"replicas": 2, "prediction": prediction}
    return document(traffic=[rates((0, 6), duration=60)], cluster=cluster)


@pytest.mark.parametrize("forecaster", ["seasonal_naive", f"{__name__}.fails_later"])
def test_no_forecast_takes_no_replica_away(forecaster):
    result = run(alone(forecaster))
    looks = result.fleet.log.looks
    known = [look for look in looks if "no forecast" not in look.reason]
    kept = max([2, *(look.desired for look in known)])
    unknown = [look for look in looks if "no forecast" in look.reason]
    assert unknown
    assert {look.desired for look in unknown} == {kept}
    assert "it cannot tell yet" in unknown[-1].reason or "no model" in unknown[-1].reason
    assert not any(r.outcome == "aborted" for r in result.records)


def test_reasons_name_the_schedule_and_the_forecast():
    always = [{"start": "0 0 * * *", "end": "59 23 * * *", "min_replicas": 6}]
    scaled = {"hpa": hpa(most=3), "controller": {"sync_period": 5}}
    base = document(traffic=[rates((0, 1), duration=20)], cluster=QUICK | scaled)
    timed = {"schedules": always, "start": "Mon 10:00"}
    by_time = {**base, "cluster": {**base["cluster"], **timed}}
    result = run(by_time)
    reason = result.fleet.log.looks[0].reason
    assert reason.endswith("; the schedule wants 6 at least, of which the maximum leaves 3")
    warnings = summarize(result)["warnings"]
    assert any("min_replicas 6" in text and "maximum of 3" in text for text in warnings)
    foreseen = {
        "forecaster": f"{__name__}.two",
        "per_replica": 1,
        "interval": 5,
        "horizon": 5,
        "season": 5,
    }
    by_rate = {**base, "cluster": {**base["cluster"], "prediction": foreseen}}
    assert (
        run(by_rate)
        .fleet.log.looks[0]
        .reason.endswith("below spec.minReplicas; the forecast of 2/s wants 2 at least")
    )


def endless(history, season, steps):
    return [1e308] * steps


def quits(history, season, steps):
    sys.exit(5)


@pytest.mark.parametrize(
    ("forecaster", "words"),
    [(endless, "1e+308, which is no rate"), (quits, "SystemExit: 5")],
)
def test_a_forecaster_that_cannot_be_right_has_failed(forecaster, words):
    assert words in ahead(forecaster, [1.0], 1, 2)
    result = run(alone(f"{__name__}.{forecaster.__name__}"))
    forecast = summarize(result)["fleet"]["forecast"]
    assert words in forecast["error"]
    to_json(summarize(result))


# --- what happened to single requests -----------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 3])
def test_there_is_an_event_for_each_attempt_that_failed(attempts):
    keys = {"admission": {"max_inflight": 3, "max_queue": 2}}
    if attempts > 1:
        keys["retries"] = {"attempts": attempts, "backoff": 0.5}
    traffic = rates((0, 8), duration=20) | {"timeouts": {"ttft": 0.4}}
    fault = {"kind": "crash", "at": 5}
    result = run(broken(fault, traffic=traffic, run_keys={"until": 40}, **keys), observe=True)
    told = Counter((e.kind, e.details["reason"]) for e in result.log)
    ends = Counter((r.outcome, r.reason) for r in result.records)
    words = {"refused": "refusal", "aborted": "abort", "timed_out": "timeout"}
    last = Counter({(words[o], why): n for (o, why), n in ends.items() if o in words})
    assert {("refusal", "queue_full"), ("abort", "pod_crash"), ("timeout", "timeout:ttft")} <= set(
        told
    )
    further = sum(r.attempts - 1 for r in result.records)
    assert sum(told.values()) == sum(last.values()) + further
    assert attempts > 1 or told == last
    assert {e.request for e in result.log} <= {r.index for r in result.records}


# --- the queue at the gateway -------------------------------------------------------------


@pytest.mark.parametrize(
    "limit",
    [
        {"max_inflight": 2},
        {"max_inflight_per_replica": 2},
        {"max_inflight_tokens": 400},
        {"tiers": {"ONLINE": {"max_inflight": 2}}},
    ],
)
def test_the_queue_at_the_gateway_is_seen(limit, tmp_path):
    traffic = LIMITED | {"tier": "ONLINE"}
    source = document(traffic=[traffic], cluster={"admission": limit}, run={"until": 8})
    result = run(source, observe=True)
    summary = summarize(result)
    queue = summary["gateway"]["queue"]
    assert len(queue["limits"]) == 1
    outside = [r for r in result.records if r.outcome == "unfinished" and r.replica is None]
    assert queue["unfinished"] == len(outside) > 1
    assert result.series.gateway[-1] == len(outside)
    assert max(result.series.gateway) <= queue["most"]
    write_series(tmp_path / "series.parquet", result.series)
    assert "gateway_waiting" in pq.read_schema(tmp_path / "series.parquet").names
    assert "Requests waiting at the gateway" in render_html(result, summary)
    assert "still at the gateway at the end" in render(summary)


def test_without_a_gateway_that_keeps_requests_nothing_is_said_of_it():
    result = run(document(traffic=[LIMITED]), observe=True)
    assert result.series.gateway is None
    assert summarize(result)["gateway"] is None
    assert "gateway_waiting" not in next(iter(result.series.rows()))


# --- faults and attempts, told ------------------------------------------------------------


def test_faults_are_told_as_they_came():
    faults = [
        {"kind": "crash", "at": 1000},
        {"kind": "crash", "at": 6, "pods": [99]},
        {"kind": "crash", "at": 5, "pods": [0, 99]},
        {"kind": "slow", "at": 2, "until": 4, "factor": 1.5},
    ]
    result = run(broken(*faults, traffic=LIMITED, run_keys={"until": 20}))
    summary = summarize(result)
    told = summary["gateway"]["faults"]
    assert [(f["kind"], f["at_s"], f["struck"]) for f in told] == [
        ("slow", 2, [0, 1]), ("crash", 5, [0]), ("crash", 6, []), ("crash", 1000, []),
    ]  # fmt: skip
    assert [f["came"] for f in told] == [True, True, True, False]
    assert told[0]["factor"] == 1.5
    lost = sum(r.reason == "pod_crash" for r in result.records)
    assert told[1]["requests"] == lost > 0
    text = " ".join(render(summary).split())
    assert "slow by 1.5 until 4 s: pods 0, 1 with" in text
    assert f"crash: pod 0 with {lost} request" in text
    assert "; not there: pod 99" in text
    warnings = " ".join(summary["warnings"])
    assert "cluster.faults.0: crash at 1,000 s never came: the run ended at 20.0 s" in warnings
    assert "cluster.faults.1: crash at 6 s struck nobody: no pod 99 was there and ran" in warnings


def test_a_node_that_never_is_cannot_be_drained():
    nodes = {"gpus": 1, "initial": 2, "max": 3}
    with pytest.raises(InputError, match=r"faults\.0\.node: there are never more than 3 nodes"):
        run(broken({"kind": "node_drain", "at": 3, "node": 99}, nodes=nodes))


def test_the_reasons_of_attempts_that_others_followed():
    keys = {
        "admission": {"max_inflight": 3, "max_queue": 2},
        "retries": {"attempts": 4, "backoff": 0.5},
    }
    result = run(broken({"kind": "crash", "at": 5}, traffic=rates((0, 8), duration=10), **keys))
    summary = summarize(result)
    gateway = summary["gateway"]
    ended = {row["reason"]: row["attempts"] for row in gateway["followed"]}
    assert sum(ended.values()) == gateway["further_attempts"]
    assert {"queue_full", "pod_crash"} <= ended.keys()
    assert f"queue_full {ended['queue_full']}" in " ".join(render(summary).split())


# --- warnings -----------------------------------------------------------------------------


def warned(**cluster):
    return " ".join(load_scenario(broken(**cluster)).warnings)


def test_a_warm_pool_that_helps_nobody_is_warned_of():
    nodes = {"gpus": 1, "initial": 2, "max": 3}
    scaled = {"hpa": hpa(most=3)}
    assert "no sleeper is ever claimed" in warned(
        warm_pool={"standby": 1, "claim_probability": 0}, **scaled
    )
    crowded = warned(warm_pool={"standby": 2}, nodes=nodes, **scaled)
    assert "hold 3 replicas at most, 2 of them serve" in crowded
    assert "1 of 2 sleepers find no room" in crowded
    assert "warm_pool" not in warned(warm_pool={"standby": 1}, nodes=nodes, **scaled)


def test_tiers_that_only_the_gateway_tells_apart():
    mixed = LIMITED | {"tiers": {"ONLINE": 0.5, "BATCH": 0.5}}
    mixed.pop("tier", None)

    def said_of(admission):
        cluster = {"admission": admission}
        found = load_scenario(document(traffic=[mixed], cluster=cluster)).warnings
        return " ".join(text for text in found if text.startswith("tiers"))

    assert "served alike by the engines (the gateway tells them apart)" in said_of(
        {"max_inflight": 4, "order": ["ONLINE", "BATCH"]}
    )
    assert "tiers have no effect under policy vllm-fcfs" in said_of({"max_inflight": 4})


# --- messages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("*/0 * * * *", r"the step of '\*/0' must be >= 1, got 0"),
        ("0 17-5 * * *", "'17-5' begins after its end; write 17-23,0-5"),
        ("60 * * * *", "'60' is not within 0 to 59"),
    ],
)
def test_what_is_wrong_with_a_cron_expression(expression, message):
    with pytest.raises(ValueError, match=message):
        parse_cron(expression)


def test_an_unknown_key_under_a_name_of_the_user_is_told_the_known_ones():
    admission = {"max_inflight": 4, "tiers": {"ONLINE": {"max_wait": 3}}}
    with pytest.raises(InputError, match=r"tiers\.ONLINE\.max_wait: unknown key.*max_inflight"):
        load_scenario(document(traffic=[LIMITED], cluster={"admission": admission}))


def test_the_reason_of_a_decision_is_told_once():
    error = "metric x cannot be read: no metrics"
    row = {"at_s": 1, "scaler": "hpa", "from": 1, "to": 1, "ready": 1, "limit": "",
           "reason": f"nothing done: {error}", "error": error}  # fmt: skip
    assert _row(row).count("cannot be read") == 1
    assert _row(row | {"reason": "nothing done"}).count("cannot be read") == 1


# --- the example --------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_example_is_that_of_the_page_and_uses_every_section():
    path = ROOT / "examples" / "05-stress.yaml"
    text = path.read_text()
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert text[text.index("name:") :] in page
    summary = summarize(run(path, "run.until=170", "traffic.0.duration=170"))
    gateway = summary["gateway"]
    assert gateway["queue"]["most"] > 0
    assert gateway["followed"]
    assert [fault["came"] for fault in gateway["faults"]] == [True, True, False]
    assert summary["fleet"]["warm_pool"]["claims"] > 0
    assert summary["fleet"]["forecast"]["forecasts"] > 10
    assert all(fault["struck"] for fault in gateway["faults"] if fault["came"])


def test_a_history_without_a_name_is_refused():
    with pytest.raises(InputError, match=r"prediction\.history: is empty; write the name"):
        load_scenario(alone("last_value", history=""))
