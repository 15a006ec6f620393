"""How near a run is to what was measured."""

import dataclasses
import json

import pytest

from tests.runs import document, stream
from twin.errors import InputError
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

HERE = Subject("a/8B", 8_000, "H100", 1, "bfloat16", "op tables", "light")


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
    scenario = document(model="meta-llama/Llama-3.1-70B", hardware=hardware, traffic=alone)
    light = simulate(load_scenario(scenario)).trust()
    assert (light.distance, light.nearest.subject.load) == (0.0, "light")
    assert light.error("tpot") < 0.1
    crowd = [stream(100, 50, arrivals={"process": "poisson", "rate": 400}, requests=120)]
    busy = simulate(load_scenario(scenario | {"traffic": crowd})).trust()
    assert busy.distance == 1.0
    without = simulate(load_scenario(scenario, ["run.records=false"])).trust()
    assert without == light
