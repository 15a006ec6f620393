"""`twin explain` and `twin schema`: arithmetic that can be checked, and a schema that fits the files."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from tests.runs import document, flat_profile, run, stream
from twin.cli import app
from twin.errors import InputError
from twin.report.explain import explain, render_explain
from twin.report.json_summary import summarize
from twin.report.schema import json_schema, render_schema
from twin.report.tables import WIDTH
from twin.scenario import load_scenario
from twin.scenario_schema import Document
from twin.scheduling import PRESETS, TierConfig

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))
RUNNABLE = [path for path in EXAMPLES if "azure" not in path.name]
STEP_S = 0.01


def twin(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def flat(tmp_path, **changes):
    source = document(hardware={"step_time": flat_profile(tmp_path, 10_000_000_000)}, **changes)
    return load_scenario(source)


def test_memory_adds_up():
    memory = explain(load_scenario(document(engine={"num_gpu_blocks_override": None})))["memory"]
    taken = sum(
        memory[f"{name}_bytes"] for name in ("weights", "activation", "runtime", "graph", "kv")
    )
    assert taken == memory["budget_bytes"]
    assert memory["num_gpu_blocks"] == memory["kv_bytes"] // memory["block_bytes"]
    assert memory["kv_tokens"] == (memory["num_gpu_blocks"] - 1) * 16
    assert f"{memory['num_gpu_blocks']} blocks" in memory["text"]


@pytest.mark.parametrize("mode", ["true", "false"])
def test_the_parts_of_a_step_add_up(mode):
    found = explain(load_scenario(document(), [f"engine.async_scheduling={mode}"]))
    assert len(found["steps"]) == 5
    for step in found["steps"]:
        gpu = sum(
            step[f"{part}_s"]
            for part in ("dense", "prefill_attention", "decode_attention", "sample")
        )
        whole = max(gpu, step["host_s"]) + step["gap_s"] if mode == "true" else gpu + step["host_s"]
        assert step["step_s"] == pytest.approx(whole)
        assert step["padded_tokens"] >= step["tokens"]


def test_the_first_limit_by_hand(tmp_path):
    """8 slots, 20 output tokens, 10 ms a step: 8 requests take 0.2 s, so 40 leave each second."""
    load = explain(flat(tmp_path))["load"]
    [slots, *_] = load["limits"]
    assert (slots["limit"], slots["running"]) == ("slots", 8)
    assert slots["rate"] == pytest.approx(8 / (20 * STEP_S))
    assert slots["tpot_s"] == pytest.approx(STEP_S)
    # The stream asks for 20 a second: half of that.
    assert load["rate_per_replica"] == 20
    assert load["used"] == pytest.approx(0.5)
    assert load["running"] == pytest.approx(load["rate_per_replica"] / 5, abs=1)


@pytest.mark.parametrize(
    ("change", "limit", "running"),
    [
        ({"max_num_seqs": 128, "num_gpu_blocks_override": 129, "max_num_batched_tokens": 4096}, "kv", int(2048 / 110)),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 9000}, "tokens", int(256 / 6)),
    ],
)  # fmt: skip
def test_other_limits_by_hand(tmp_path, change, limit, running):
    [first, *_] = explain(flat(tmp_path, engine=change))["load"]["limits"]
    assert (first["limit"], first["running"]) == (limit, running)


def test_the_limit_is_near_what_a_saturated_run_gives():
    busy = stream(200, 100, arrivals={"process": "poisson", "rate": 100}, requests=600)
    source = document(traffic=[busy])
    [first, *_] = explain(load_scenario(source))["load"]["limits"]
    result = run(source)
    assert summarize(result)["bound"][first["limit"]] > 0.8
    assert len(result.records) / (result.simulated_ps / 1e12) == pytest.approx(
        first["rate"], rel=0.1
    )


def test_the_rate_that_was_written_is_shown_and_others_are_drawn():
    load = {"arrivals": {"process": "poisson", "rate": 3.7}, "requests": 50}
    found = explain(load_scenario(document(traffic=[stream(**load), stream(**load)])))
    assert (found["traffic"]["rate"], found["traffic"]["rate_is"]) == (7.4, "configured")
    text = " ".join(render_explain(found).split())
    assert f"asks for 7.4, {100 * found['load']['used']:.0f} % of capacity" in text
    assert "Capacity is an upper bound, and queues grow before it is reached" in text
    waves = {"mean": 5, "amplitude": 0.5, "period": 10}
    for other in (
        stream(arrivals={"process": "poisson", "rate": {"sine": waves}}),
        stream(sessions={"turns": 3}),
    ):
        found = explain(load_scenario(document(traffic=[other])))
        assert found["traffic"]["rate_is"] == "drawn"


def test_too_much_is_said_to_be_too_much():
    busy = stream(200, 100, arrivals={"process": "poisson", "rate": 100}, requests=600)
    text = " ".join(render_explain(explain(load_scenario(document(traffic=[busy])))).split())
    assert "more than that, so the queue grows" in text
    assert "slots (max_num_seqs) are the first to be used up" in text


def test_shared_prefixes_are_counted_as_far_as_the_cache_is_on():
    talk = stream(50, 20, sessions={"turns": 4, "system_prompt_tokens": 160, "think_time": 0.1})
    source = document(traffic=[talk])
    cached = explain(load_scenario(source))["traffic"]
    assert cached["cached_tokens"] > 0.6 * cached["prompt_tokens"]
    off = explain(load_scenario(source, ["engine.enable_prefix_caching=false"]))["traffic"]
    assert off["cached_tokens"] == 0
    assert off["prompt_tokens"] == cached["prompt_tokens"]


def test_a_closed_loop_has_no_rate_of_its_own():
    users = stream(100, 20, arrivals={"process": "closed", "users": 5, "think_time": 1.0})
    load = explain(load_scenario(document(traffic=[users])))["load"]
    assert load["rate_per_replica"] is load["running"] is None


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_every_example_is_explained_within_80_columns(path):
    answer = twin("explain", path)
    assert answer.exit_code == 0, answer.output
    assert max(map(len, answer.output.splitlines())) <= WIDTH
    found = json.loads(twin("explain", path, "--json").output)
    assert list(found) == [
        "scenario",
        "memory",
        "traffic",
        "steps",
        "measured_context",
        "step_times",
        "max_model_len",
        "load",
    ]


def test_without_a_request_there_is_nothing_to_explain():
    silent = stream(requests=None, duration=1e-6)
    with pytest.raises(InputError, match="no request comes"):
        explain(load_scenario(document(traffic=[silent])))


def test_an_explanation_takes_changes_and_refuses_mistakes():
    one, two = (
        json.loads(
            twin("explain", RUNNABLE[0], "--json", "--set", f"engine.max_num_seqs={n}").output
        )
        for n in (4, 8)
    )
    slots = [
        next(r for r in x["load"]["limits"] if r["limit"] == "slots")["running"] for x in (one, two)
    ]
    assert slots == [4, 8]
    assert twin("explain", "missing.yaml").exit_code == 2


# --- the schema ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema():
    return json_schema()


def test_the_schema_is_valid_and_so_are_the_examples(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(twin("schema", "--json").output) == schema
    validator = jsonschema.Draft202012Validator(schema)
    for path in EXAMPLES:
        validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    validator.validate(document())
    for preset in PRESETS.values():
        policy = json.loads(json.dumps(preset.to_dict()))
        validator.validate(document(policy=policy))


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"max_num_seq": 4}},
        {"engine": {"max_num_seqs": 0}},
        {"run": {"seed": "one"}},
        {"policy": "best"},
        {"policy": {"tiers": [{"name": "a", "ordr": "fcfs"}]}},
        {"traffic": []},
    ],
)
def test_the_schema_finds_what_loading_would_refuse(schema, change):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(document(**change))


def test_every_key_is_listed_with_its_meaning(schema):
    text = render_schema()
    assert max(map(len, text.splitlines())) <= WIDTH
    lines = text.splitlines()
    for key in Document.model_fields:
        assert any(line.split("  ")[0] == key for line in lines), key
    for key in TierConfig.__dataclass_fields__:
        assert any(line.startswith(f"policy.tiers[].{key}  ") for line in lines), key
    assert "engine.gpu_memory_utilization  number > 0 <= 1, default 0.92" in text
    assert "run.sample_period  number" in text
    assert "None = a few hundred times in a run." in " ".join(text.split())
    [gpu] = [i for i, line in enumerate(lines) if line.startswith("hardware.gpu  ")]
    assert lines[gpu + 1].strip() == "Name in the catalogue, or the figures of another GPU."
    assert schema["properties"]["policy"]["anyOf"][0]["enum"][:6] == list(PRESETS)
