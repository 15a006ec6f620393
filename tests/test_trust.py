"""How near a run is to what was measured."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.runs import document, stream
from twin.cli_ready import app
from twin.errors import InputError
from twin.report.texts import trust as said
from twin.scenario import load_scenario, validated_regimes
from twin.simulation import simulate
from twin.step_time.trust import (
    FAR,
    Regime,
    Subject,
    distance,
    load_of,
    nearest,
    origin_of,
    parse_regimes,
    regimes_data,
)
from twin.whatif import ready

HERE = Subject(
    "a/8B", 8_000, "H100", 1, "bfloat16", "bfloat16", 8192, "vllm-fcfs", "op tables", "light"
)


def but(**changes):
    return dataclasses.replace(HERE, **changes)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (HERE, 0.0),
        (but(model="b/8B"), 0.0),
        (but(gpu="A100"), 1.0),
        (but(params=32_000), 2.0),
        (but(params=2_000), 2.0),
        (but(tensor_parallel_size=4), 1.0),
        (but(dtype="fp8"), 0.5),
        (but(kv_cache_dtype="fp8"), 0.5),
        (but(policy="tiered"), 0.5),
        (but(max_num_batched_tokens=2048), 0.5),
        (but(load="queued"), 1.0),
        (but(origin="roofline"), float("inf")),
        (but(gpu="A100", dtype="fp8", load="queued"), 2.5),
    ],
)
def test_distance(other, expected):
    assert distance(HERE, other) == distance(other, HERE) == expected


def regime(subject, name="r", runs=3):
    return Regime(subject, name, runs, {"ttft_p50": 0.1, "ttft_mean": 0.2, "tpot_mean": 0.03}, {})


def test_the_nearest_regime_counts_and_far_ones_do_not():
    near, far = regime(but(gpu="A100"), "near"), regime(but(gpu="A100", load="queued"), "far")
    trust = nearest(HERE, [far, near])
    assert (trust.nearest.name, trust.distance, trust.validated) == ("near", 1.0, True)
    assert (trust.error("ttft"), trust.error("tpot"), trust.error("e2e")) == (0.2, 0.03, None)
    assert trust.differs == ("GPU H100, not A100",)
    assert not nearest(HERE, [far]).validated, "another GPU and another load"
    away = nearest(HERE, [regime(but(params=64_000))])
    assert away.distance > FAR
    assert not away.validated
    assert away.error("ttft") is None
    assert away.to_dict()["errors"] == {}
    assert away.to_dict()["nearest"] == "r"


def test_nothing_of_the_origin_is_no_regime():
    trust = nearest(but(origin="roofline"), [regime(HERE)])
    assert trust.nearest is None
    assert trust.to_dict()["distance"] is None


def test_of_equally_near_ones_the_one_with_more_runs_counts():
    found = nearest(HERE, [regime(HERE, "a", 1), regime(HERE, "b", 9), regime(HERE, "c", 9)])
    assert found.nearest.name == "b"


def test_loads_and_origins():
    assert (load_of(0.0, 1.0), load_of(0.2, 1.0), load_of(0.0, 0.0)) == ("light", "queued", "light")
    assert origin_of("roofline: x") == "roofline"
    assert origin_of("summed from the op tables of NVIDIA") == "op tables"
    assert origin_of("layer tables of LLMServingSim") == "layer tables"
    assert origin_of("5000 steps of a live server") == "fit"


def test_regimes_come_back_as_they_were_written():
    written = json.loads(json.dumps(regimes_data([regime(HERE)])))
    (found,) = parse_regimes(written, "f")
    assert found == regime(HERE)
    with pytest.raises(InputError, match="f: no table of validated regimes"):
        parse_regimes({"regimes": [{"subject": {}}]}, "f")


def test_the_shipped_regimes_name_models_and_errors():
    regimes = validated_regimes()
    assert {r.subject.gpu for r in regimes} == {"A100", "H100", "RTXPRO6000"}
    assert {r.subject.origin for r in regimes} == {"op tables", "layer tables"}
    assert all(r.errors and r.runs and r.subject.load in ("light", "queued") for r in regimes)


def test_a_run_knows_its_load_and_its_nearest_regime():
    hardware = {"gpu": "H100", "tensor_parallel_size": 4, "dtype": "fp8"}
    alone = [stream(100, 20, arrivals={"process": "constant", "rate": 1}, requests=10)]
    engine = {"max_num_batched_tokens": 8192, "kv_cache_dtype": "fp8"}
    scenario = document(
        model="meta-llama/Llama-3.1-70B", hardware=hardware, traffic=alone, engine=engine
    )
    light = simulate(load_scenario(scenario)).trust()
    assert (light.distance, light.nearest.subject.load) == (0.0, "light")
    assert light.error("tpot") < 0.1
    crowd = [stream(100, 50, arrivals={"process": "poisson", "rate": 400}, requests=120)]
    busy = simulate(load_scenario(scenario | {"traffic": crowd})).trust()
    assert (busy.distance, busy.differs) == (1.0, ("queued load, not light",))
    without = simulate(load_scenario(scenario, ["run.records=false"])).trust()
    assert without == light


def told(trust):
    return said({"trust": trust.to_dict()})


def test_the_sentence_tells_a_median_from_a_bound():
    many = Regime(HERE, "many", 15, {"ttft_mean": 0.11, "ttft_p50": 0.1}, {"ttft_mean": 0.99})
    text = told(nearest(HERE, [many]))
    assert text.startswith("half of 15 runs of many had TTFT within 11.0 % (worst 99.0 %)")
    assert text.endswith("no p90, p95 or p99 was ever compared")
    one = Regime(but(gpu="A100"), "one", 1, {"ttft_mean": 0.11}, {"ttft_mean": 0.11})
    text = told(nearest(HERE, [one]))
    assert text.startswith("1 run of one was off by: TTFT 11.0 %")
    assert text.endswith("This run has GPU H100, not A100: 1 away, at most 1 counts")
    text = told(nearest(but(load="queued"), [one]))
    assert text.startswith("not validated: unlike the nearest measured set-up, one (1 run), it has")
    assert "GPU H100, not A100; queued load, not light: 2 away, at most 1 counts" in text


def test_step_times_of_something_else_are_not_validated(tmp_path):
    loaded = load_scenario(document(hardware={"gpu": "H100"}))
    data = loaded.hardware.profile.to_dict()
    path = tmp_path / "profile.json"
    changes = (
        ("gpu", "A100", "hardware.gpu A100, not H100"),
        ("model", "Qwen/Qwen3-8B", "model Qwen/Qwen3-8B, not meta-llama/Llama-3.1-8B"),
        ("tensor_parallel_size", 2, "hardware.tensor_parallel_size 2, not 1"),
        ("dtype", "fp8", "hardware.dtype fp8, not bfloat16"),
    )
    for key, value, expected in changes:
        for source in (data["provenance"]["source"], "5000 steps of a live server"):
            origin = data["provenance"] | {key: value, "source": source}
            path.write_text(json.dumps(data | {"provenance": origin}))
            hardware = {"gpu": "H100", "step_time": str(path)}
            trust = simulate(load_scenario(document(hardware=hardware))).trust()
            assert (trust.validated, trust.calibration, trust.foreign) == (False, {}, (expected,))
            assert told(trust) == f"not validated: the step times are of {expected}"


def test_ready_questions_tell_errors_of_what_they_show():
    trusted = nearest(HERE, [regime(HERE, runs=29)])
    result = SimpleNamespace(trust=lambda: trusted)
    assert ready._trust(result, "ttft") == "TTFT 20% in 29 runs"
    assert ready._trust(result, "ttft", "tpot", "e2e") == "TTFT 20%, TPOT 3% in 29 runs"
    assert ready._trust(result, "e2e") == "not validated"
    trusted = nearest(but(params=64_000), [regime(HERE)])
    assert ready._trust(result, "ttft") == "not validated"


def test_one_type_by_roofline_is_one_row():
    setup = ready.Setup("meta-llama/Llama-3.1-8B", "H100", 1, 100, 4, 2)
    (row,) = ready.quantisation(setup, ["int8", "int8"])
    assert (row.name, row.note) == ("int8", "weight-only, roofline")


def test_a_loss_of_nothing_is_refused():
    done = CliRunner().invoke(app, ["quantisation", "--quality", "int8"])
    assert done.exit_code == 2
    assert "--quality int8: write int8=LOSS" in done.output
