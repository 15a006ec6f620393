"""Policies as data: what is refused and how it is said, reading and writing, fingerprints."""

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.test_policy_machine import random_tiers
from twin.scheduling import PRESETS, PolicyConfig, TierConfig, fingerprint, policy_config

HELD = {"batch_size": 2, "max_wait": 1.0}

BAD_TIERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"name": ""}, ["name", "empty"]),
    ({"name": 5}, ["name", "str", "5"]),
    ({"order": 5}, ["order", "str", "5"]),
    ({"batch_size": 0}, ["batch_size", "at least 1", "0"]),
    ({"batch_size": 2.5}, ["batch_size", "int", "2.5"]),
    ({"batch_size": True}, ["batch_size", "int", "True"]),
    ({"batch_tokens": 0, "max_wait": 1.0}, ["batch_tokens", "at least 1", "0"]),
    ({"batch_size": 2}, ["max_wait", "must be set"]),
    ({"batch_tokens": 9}, ["max_wait", "must be set"]),
    ({"groups": ((9, 1),)}, ["max_wait", "must be set"]),
    ({"max_wait": 1.0}, ["max_wait", "1.0", "batch_size above 1"]),
    ({"adaptive": "fill"}, ["adaptive", "fill", "batch_size above 1"]),
    ({**HELD, "max_wait": 0.0}, ["max_wait", "above 0", "0.0"]),
    ({**HELD, "max_wait": -1}, ["max_wait", "above 0", "-1"]),
    ({**HELD, "max_wait": math.nan}, ["max_wait", "above 0", "nan"]),
    ({**HELD, "max_wait": math.inf}, ["max_wait", "finite", "inf"]),
    ({**HELD, "max_wait": "1"}, ["max_wait", "float", "'1'"]),
    ({**HELD, "adaptive": "yes"}, ["adaptive", "none, pressure, fill", "'yes'"]),
    ({"max_running": 0}, ["max_running", "at least 1", "0"]),
    ({"max_running_tokens": -1}, ["max_running_tokens", "at least 1", "-1"]),
    ({"preemptible": 1}, ["preemptible", "bool", "1"]),
    ({"promote_after": 0}, ["promote_after", "above 0", "0"]),
    ({"promote_after": math.nan}, ["promote_after", "above 0", "nan"]),
    ({**HELD, "promote_after": 0.5}, ["promote_after", "0.5", "at least", "max_wait", "1.0"]),
    ({"victims": "oldest"}, ["victims", "newest, largest", "'oldest'"]),
    ({"groups": ((9, 1), (9, 2)), "max_wait": 1.0}, ["groups", "rising", "(9, 2)"]),
    ({"groups": ((9, 0),), "max_wait": 1.0}, ["groups", "at least 1", "(9, 0)"]),
    ({"groups": ((9.5, 1),), "max_wait": 1.0}, ["groups", "whole numbers", "9.5"]),
    ({"groups": (("a", 1),), "max_wait": 1.0}, ["groups", "whole numbers", "'a'"]),
    ({**HELD, "groups": ((9, 1),)}, ["groups", "batch_size (2)"]),
    ({"mix": 1}, ["mix", "at least 2", "1"]),
    ({"rank": -1}, ["rank", "at least 0", "-1"]),
    ({"ttft_target": 0.0}, ["ttft_target", "above 0", "0.0"]),
    ({**HELD, "max_wait": 1e7}, ["max_wait", "at most 1,000,000 seconds"]),
]

BAD_POLICIES: list[tuple[dict[str, Any], list[str]]] = [
    ({"tiers": []}, ["tiers", "at least one"]),
    ({"tiers": [{"name": str(i)} for i in range(101)]}, ["tiers", "at most 100", "101"]),
    ({"tiers": "ONLINE"}, ["tiers", "list", "'ONLINE'"]),
    ({"tiers": ["ONLINE"]}, ["tiers[0]", "mapping", "'ONLINE'"]),
    ({"tiers": [{"order": "fcfs"}]}, ["tiers[0]", "no name"]),
    ({"tiers": [{"name": "a"}, {"name": "a"}]}, ["names must differ", "'a'"]),
    ({"tiers": [{"name": "a"}, {"name": "*"}]}, ['"*"', "only one"]),
    ({"tiers": [{"name": "a", "rank": 1}]}, ["ranks", "from 0 without gaps", "1"]),
    ({"tiers": [{"name": "a"}, {"name": "b", "rank": 0}, {"name": "c", "rank": 2}]}, ["ranks"]),
    ({"tiers": [{"name": "a", "rank": 1}, {"name": "b", "rank": 0}]}, ["listed by rank"]),
    (
        {"tiers": [{"name": "a"}, {"name": "b", "rank": 0, "order": "edf"}]},
        ["'a'", "'b'", "share rank 0", "same order"],
    ),
    ({"tiers": [{"name": "a", "groups": 5}]}, ["tiers[0].groups", "5"]),
    ({"tiers": [{"name": "a", "groups": [[1, 2, 3]]}]}, ["tiers[0].groups", "[[1, 2, 3]]"]),
    ({"tiers": [{"name": "a"}], "default_tier": "b"}, ["default_tier", "'b'", "'a'"]),
    ({"tiers": [{"name": "a"}], "estimator": "x"}, ["estimator", "declared, quantile", "'x'"]),
    ({"tiers": [{"name": "a"}], "quantile": 1.0}, ["quantile", "between 0 and 1", "1.0"]),
    ({"tiers": [{"name": "a"}], "quantile": math.nan}, ["quantile", "between 0 and 1", "nan"]),
    ({"tiers": [{"name": "a"}], "window": 0}, ["window", "at least 1", "0"]),
    ({"tiers": [{"name": "a"}], "initial": 0}, ["initial", "at least 1", "0"]),
    ({"tiers": [{"name": "a"}], "weights": [1]}, ["weights", "[1]"]),
    ({"tiers": [{"name": "a"}], "weights": {"t": 0}}, ["weight", "'t'", "at least 1", "0"]),
    ({"tiers": [{"name": "a"}], "weights": {"t": 1.5}}, ["weight", "'t'", "whole", "1.5"]),
    ({"tiers": [{"name": "a"}], "weights": {"t": 1, 2: 3}}, ["weights", "names", "2"]),
]

BAD_SPECS: list[tuple[Any, list[str]]] = [
    ("tierd", ["'tierd'", "tiered"]),
    (None, ["None", "preset"]),
    ({"preset": ["tiered"]}, ["['tiered']", "tiered"]),
    ({"preset": "tiered", "tiers": {"GOLD": {}}}, ["'GOLD'", "ONLINE"]),
    ({"preset": "tiered", "tiers": {"ONLINE": 5}}, ["tiers.ONLINE", "5"]),
    ({"preset": "tiered", "tiers": {"ONLINE": {"max_wait": 0}}}, ["'ONLINE'", "max_wait", "0"]),
]


def assert_says(message: str, parts: list[str]) -> None:
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize(("values", "parts"), BAD_TIERS)
def test_bad_tier(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        TierConfig(**{"name": "BATCH", **values})
    assert_says(str(error.value), parts)
    assert "name" in values or "'BATCH'" in str(error.value)


@pytest.mark.parametrize(("data", "parts"), BAD_POLICIES)
def test_bad_policy(data: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        PolicyConfig.from_dict(data)
    assert_says(str(error.value), parts)


@pytest.mark.parametrize(("spec", "parts"), BAD_SPECS)
def test_bad_spec(spec: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        policy_config(spec)
    assert_says(str(error.value), parts)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"unknown key 'max_waits' in tiers.1.*did you mean 'max_wa"
    ):
        PolicyConfig.from_dict({"tiers": [{"name": "a"}, {"name": "b", "max_waits": 1}]})
    with pytest.raises(ValueError, match=r"unknown key 'weight' in policy.*did you mean 'weights'"):
        PolicyConfig.from_dict({"tiers": [{"name": "a"}], "weight": {}})
    with pytest.raises(ValueError, match=r"unknown key 'zzz'.*known: name, order"):
        PolicyConfig.from_dict({"tiers": [{"name": "a", "zzz": 1}]})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plain_data(name: str) -> None:
    config = PRESETS[name]
    data = json.loads(json.dumps(config.to_dict()))
    assert PolicyConfig.from_dict(data) == config
    assert policy_config(name) == policy_config({"preset": name}) == config
    assert policy_config(data) == config


@given(st.integers(0, 2**30))
def test_round_trip(seed: int) -> None:
    config = random_tiers(random.Random(seed))
    again = PolicyConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert fingerprint(again) == fingerprint(config)


def test_preset_with_changes() -> None:
    changed = policy_config({"preset": "tiered", "window": 9, "tiers": {"BATCH": {"max_wait": 2}}})
    assert changed.window == 9
    assert changed.tiers[1] == dataclasses.replace(PRESETS["tiered"].tiers[1], max_wait=2)
    assert changed.tiers[::2] == PRESETS["tiered"].tiers[::2]


TIER = TierConfig(name="a", batch_size=2, batch_tokens=9, max_wait=1.0, promote_after=8.0)
GROUPED = TierConfig(name="a", groups=((9, 2),), max_wait=1.0)
OTHER_TIER: dict[str, Any] = {
    "name": "b",
    "order": "edf",
    "batch_size": 3,
    "batch_tokens": None,
    "max_wait": 2.0,
    "adaptive": "fill",
    "max_running": 3,
    "max_running_tokens": 3,
    "preemptible": False,
    "promote_after": None,
    "victims": "largest",
    "groups": ((9, 3),),
    "mix": 2,
    "ttft_target": 1.0,
}
OTHER_POLICY: dict[str, Any] = {
    "tiers": (TIER, TierConfig(name="z")),
    "estimator": "declared",
    "quantile": 0.4,
    "window": 3,
    "initial": 3,
    "weights": (("t", 2),),
    "default_tier": "a",
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TierConfig)])
def test_fingerprint_depends_on_each_field_of_a_tier(field: str) -> None:
    if field == "rank":
        one, other = (
            PolicyConfig(tiers=(TierConfig(name="a"), TierConfig(name="b", rank=rank)))
            for rank in (0, 1)
        )
    else:
        tier = GROUPED if field == "groups" else TIER
        one = PolicyConfig(tiers=(tier,))
        other = PolicyConfig(tiers=(dataclasses.replace(tier, **{field: OTHER_TIER[field]}),))
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PolicyConfig)])
def test_fingerprint_depends_on_each_field_of_a_policy(field: str) -> None:
    one = PolicyConfig(tiers=(TIER,))
    other = dataclasses.replace(one, **{field: OTHER_POLICY[field]})
    assert fingerprint(one) != fingerprint(other)


def test_fingerprint_depends_on_nothing_else() -> None:
    data = PRESETS["tiered_length"].to_dict()
    data["weights"] = {"x": 2, "y": 3}
    plain = fingerprint(PolicyConfig.from_dict(data))
    shuffled = {key: data[key] for key in reversed(data)}
    shuffled["weights"] = {"y": 3, "x": 2}
    assert fingerprint(PolicyConfig.from_dict(shuffled)) == plain
    for rank, tier in enumerate(data["tiers"]):
        tier["rank"] = rank  # as by default
        tier["promote_after"] = tier["promote_after"] and int(tier["promote_after"])
    assert fingerprint(PolicyConfig.from_dict(data)) == plain
    assert len({fingerprint(config) for config in PRESETS.values()}) == len(PRESETS)
    assert len(plain) == 12
    assert int(plain, 16) >= 0
