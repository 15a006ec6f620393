"""Where the time of an engine went: against a model that looks at every step, and by hand."""

import json
from collections import Counter
from fractions import Fraction

import pytest

from tests.runs import at_once, document, flat_profile, run, stream
from twin.capacity import Means, limits_of
from twin.clock import PS
from twin.engine.replica import Replica
from twin.metrics.engine_time import LIMITS, USES, time_shares
from twin.report.json_summary import summarize
from twin.report.verdict import verdict
from twin.simulation import load_scenario, simulate

STEP = PS // 100
MIXED = {"ONLINE": 0.5, "BATCH": 0.3, "OFFLINE": 0.2}
ENGINE = {"max_num_seqs": 128, "max_num_batched_tokens": 8192}


def shares(result):
    engines = [(engine.time, engine.busy_ps) for engine in result.engines]
    return time_shares(engines, result.simulated_ps)


def flat(tmp_path, *overrides, **sections):
    """A run under 10 ms a step."""
    profile = flat_profile(tmp_path, STEP)
    return run(document(**sections), f"hardware.step_time={profile}", *overrides)


CASES = {
    "stock": (),
    "sync": ("engine.async_scheduling=false",),
    "short of KV": ("engine.num_gpu_blocks_override=129",),
    "policy": ("policy=tiered", "engine.max_num_seqs=4"),
    "clients leave": ("traffic.0.timeouts.total=0.6", "engine.max_num_seqs=4"),
    "clients leave a policy": (
        "traffic.0.timeouts.total=0.6",
        "policy=priority",
        "engine.max_num_seqs=4",
    ),
    "short of KV, clients leave": (
        "engine.num_gpu_blocks_override=129",
        "traffic.0.timeouts.ttft=0.5",
    ),
    "cut": ("run.until=1.234",),
}


@pytest.mark.parametrize("mode", ["stepped", "fast"])
@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_uses_of_the_time_are_those_of_a_model_that_looks_at_every_step(
    overrides, mode, monkeypatch
):
    """The model shares each step among its tokens with fractions, and judges each request when the run is over."""
    steps = []
    begin = Replica._begin

    def watched(replica, step):
        padded = replica._step_time.padded_tokens(step.num_tokens)
        alive = {r: r.rid in replica._lives for r in step.scheduled}
        steps.append((step, padded, alive, replica._now_ps))
        begin(replica, step)

    monkeypatch.setattr(Replica, "_begin", watched)
    busy = document(
        traffic=[
            stream(200, 60, arrivals={"process": "poisson", "rate": 30}, requests=80, tiers=MIXED)
            | {"output_tokens": {"uniform": [5, 120]}}
        ]
    )
    reference = run(busy, *overrides, "run.engine_mode=stepped")
    result = reference if mode == "stepped" else run(busy, *overrides)
    outcome = {record.index: record.outcome for record in reference.records}

    spent: Counter[str] = Counter()
    for step, padded, alive, at_ps in steps:
        duration_ps = max(0, min(step.duration_ps, result.simulated_ps - at_ps))
        each = Fraction(duration_ps, padded)
        spent["padded"] += each * (padded - step.num_tokens)
        for request, tokens in step.scheduled.items():
            if not alive[request] or outcome[request.rid] == "timed_out":
                spent["wasted"] += each * tokens
            else:
                again = (step.again or {}).get(request, 0)
                spent["recomputed"] += each * again
                spent["useful"] += each * (tokens - again)
    spent["idle"] = result.simulated_ps - sum(spent.values())
    found = shares(result).uses
    assert list(found) == list(USES)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    # What a client that left had of the step that the end of the run cuts counts as a whole.
    cut = max(step.duration_ps for step, *_ in steps) if "timed_out" in outcome.values() else 0
    for use, share in found.items():
        slack = cut / result.simulated_ps if use in ("wasted", "useful") else 1e-9
        assert share == pytest.approx(
            float(spent[use] / result.simulated_ps), abs=max(slack, 1e-9)
        ), use
    assert sum(shares(result).limits.values()) == pytest.approx(1, abs=1e-12)


def test_each_use_occurs_in_those_cases():
    seen: Counter[str] = Counter()
    busy = stream(200, 60, arrivals={"process": "poisson", "rate": 30}, requests=80)
    busy["output_tokens"] = {"uniform": [5, 120]}
    for overrides in CASES.values():
        found = shares(run(document(traffic=[busy]), *overrides)).uses
        seen.update(use for use, share in found.items() if share > 0)
    assert set(seen) == set(USES)


def test_by_hand_one_request(tmp_path):
    """A prompt in one step, four decodes, and the step that was planned before the last token was known to be it."""
    result = flat(tmp_path, traffic=[at_once(100, 5)])
    assert result.simulated_ps == 5 * STEP
    assert shares(result).uses == {
        "useful": 1.0, "recomputed": 0.0, "padded": 0.0, "wasted": 0.0, "idle": 0.0,
    }  # fmt: skip
    longer = flat(tmp_path, "run.until=0.1", traffic=[at_once(100, 5)])
    assert longer.engines[0].busy_ps == 6 * STEP
    assert shares(longer).uses == pytest.approx(
        {"useful": 0.5, "recomputed": 0.0, "padded": 0.0, "wasted": 0.1, "idle": 0.4}
    )


def test_by_hand_padding(tmp_path):
    """With graphs for 8 tokens, a decode of one request computes seven more."""
    path = flat_profile(tmp_path, STEP)
    with open(path, encoding="utf-8") as file:
        profile = json.load(file)
    profile["capture_sizes"] = [8]
    padded = tmp_path / "padded.json"
    padded.write_text(json.dumps(profile), encoding="utf-8")
    result = flat(
        tmp_path,
        f"hardware.step_time={padded}",
        "engine.async_scheduling=false",
        traffic=[at_once(100, 5)],
    )
    assert shares(result).uses == pytest.approx(
        {
            "useful": (1 + 4 / 8) / 5,
            "recomputed": 0,
            "padded": 4 * 7 / 8 / 5,
            "wasted": 0,
            "idle": 0,
        }
    )


# --- limits -------------------------------------------------------------------------------------

LONG = stream(100, 200, arrivals={"process": "constant", "rate": 10_000}, requests=16)

LIMITED = {
    "slots": ("engine.max_num_seqs=4",),
    "tokens": ("engine.max_num_seqs=64", "engine.max_num_batched_tokens=64", "traffic.0.prompt_tokens={fixed: 1500}"),
    "kv": ("traffic.0.output_tokens={fixed: 400}", "engine.num_gpu_blocks_override=129"),
    "policy": ("policy={tiers: [{name: '*', batch_size: 64, max_wait: 3.0}]}",),
    "compute": ("engine.max_num_seqs=64",),
    "idle": ("traffic.0.arrivals={process: constant, rate: 0.1}", "traffic.0.requests=3"),
}  # fmt: skip


@pytest.mark.parametrize("limit", [*LIMITS, "idle"])
def test_what_bound_a_run_is_found_and_said(limit):
    source = document(traffic=[LONG], engine={"max_num_seqs": 64, "num_gpu_blocks_override": 4000})
    scenario = load_scenario(source, LIMITED[limit])
    result = simulate(scenario)
    found = shares(result).limits
    assert list(found) == [*LIMITS, "idle"]
    assert max(found, key=found.__getitem__) == limit
    said = summarize(result)["verdict"]
    begins = {
        "slots": "Slots bound the run: in ",
        "tokens": "Tokens per step bound the run: in ",
        "kv": "KV blocks bound the run: in ",
        "policy": "The policy bound the run: in ",
        "compute": "Nothing kept requests waiting: hardly anybody waited",
        "idle": "Nothing bound the run: the GPUs had no work in ",
    }
    assert said.startswith(begins[limit])
    assert said.endswith(".")


def test_a_server_that_is_hardly_used_is_not_called_bound():
    """A step runs nearly all the time, of one or two requests: no limit holds anybody back."""
    calm = stream(100, 100, arrivals={"process": "constant", "rate": 1.5}, requests=40)
    result = run(document(traffic=[calm]))
    summary = summarize(result)
    assert summary["engine"]["busy_share"] > 0.5
    most = limits_of(result.scenario, Means(100, 0, 100))[0].rate
    served = 40 / summary["simulated_s"]
    assert summary["used_share"] == pytest.approx(served / most)
    assert summary["used_share"] < 0.2
    said = summary["verdict"]
    assert said.startswith("Nothing kept requests waiting")
    assert f"about {100 * summary['used_share']:.0f} % of the most its replicas take" in said
    assert "at least one ran in " in said
    assert "bound" not in said


def test_steps_that_are_too_slow_for_an_objective_are_named():
    calm = stream(100, 100, arrivals={"process": "constant", "rate": 1.5}, requests=40)
    hard = {"ONLINE": {"tpot_p99": 0.001, "ttft_p99": 10}}
    said = summarize(run(document(traffic=[calm], objectives=hard)))["verdict"]
    assert said.startswith("Steps were too slow: ")
    assert said.endswith("they took too long for ONLINE tpot_p99.")


def test_limits_by_hand(tmp_path):
    """Two requests, one slot: the second waits for the five steps of the first."""
    two = stream(100, 5, arrivals={"process": "constant", "rate": 10**6}, requests=2)
    result = flat(
        tmp_path,
        "engine.max_num_seqs=1",
        "engine.async_scheduling=false",
        traffic=[two],
        engine=ENGINE,
    )
    found = result.engines[0].time.limit_ps
    assert {name: ps // STEP for name, ps in found.items() if ps} == {"slots": 4, "compute": 6}


def test_a_held_request_without_a_step_is_the_policy_s_doing(tmp_path):
    result = flat(
        tmp_path,
        "policy={tiers: [{name: '*', batch_size: 2, max_wait: 0.5}]}",
        traffic=[at_once(100, 5)],
    )
    assert result.engines[0].time.held_ps == PS // 2
    assert shares(result).limits["policy"] == pytest.approx(0.5 / 0.55)
    assert shares(result).uses["idle"] == pytest.approx(0.5 / 0.55)


def test_a_run_without_time_has_a_verdict_too():
    assert "no time" in verdict({}, {"max_num_seqs": 1, "max_num_batched_tokens": 1})
