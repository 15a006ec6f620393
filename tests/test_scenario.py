"""Scenario files: what is read right, and what is refused with place, value, bound and a way out."""

# A case a line, however long its message:
# ruff: noqa: E501

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import MODEL, azure_csv, document, flat_profile, stream
from twin.clock import PS
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.scenario_faults import NOT_MODELLED
from twin.scenario_yaml import parse
from twin.step_time.catalogue import MODELS, config_of
from twin.workload.arrivals import Renewal
from twin.workload.gaps import Equal, Exponential
from twin.workload.lengths import Fixed, Lengths, Uniform
from twin.workload.sessions import Always, Sessions
from twin.workload.streams import TraceStream

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))

TEXT = """\
name: chat
model: meta-llama/Llama-3.1-8B
hardware:
  gpu: H100
engine:
  max_num_seqs: 128
  max_model_len: 8192
policy: tiered
traffic:
  - arrivals: {process: poisson, rate: 6}
    prompt_tokens: {fixed: 512}
    output_tokens: {uniform: [1, 128]}
    requests: 100
    tiers: {ONLINE: 0.7, BATCH: 0.3}
objectives:
  ONLINE: {ttft_p99: 1.0}
"""


def write(folder, text, name="chat.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(source, *overrides, seed=None):
    """The one message with which a scenario is refused."""
    with pytest.raises(InputError) as caught:
        load_scenario(source, overrides, seed)
    return str(caught.value)


# --- what is read -------------------------------------------------------------------------


def test_a_file_becomes_plain_objects(tmp_path):
    scenario = load_scenario(write(tmp_path, TEXT))
    assert scenario.name == "chat"
    assert scenario.model.name == MODEL
    assert (scenario.hardware.gpu.name, scenario.hardware.tensor_parallel_size) == ("H100", 1)
    assert (scenario.engine.max_num_seqs, scenario.engine.max_model_len) == (128, 8192)
    assert scenario.engine.num_gpu_blocks == scenario.hardware.memory.num_gpu_blocks > 20_000
    assert scenario.policy_name == "tiered"
    assert scenario.tiers == ("ONLINE", "BATCH", "OFFLINE")
    [chat] = scenario.traffic
    assert chat.arrivals == Renewal(Exponential(), 6)
    assert chat.lengths == Lengths(Fixed(512), Uniform(1, 128))
    assert chat.clients.tiers == {"ONLINE": 0.7, "BATCH": 0.3}
    assert chat.sessions is None
    assert (scenario.cluster.replicas, scenario.cluster.routing.router) == (1, "least_connections")
    assert scenario.objectives == {"ONLINE": {"ttft_p99": 1.0}}
    assert (scenario.run.seed, scenario.run.until_ps, scenario.run.warmup_ps) == (1, None, 0)
    assert scenario.warnings == ()


def test_seconds_are_exact_picoseconds():
    timeouts = {"ttft": 0.1, "total": 30}
    sessions = {"turns": 2, "system_prompt_tokens": 16, "think_time": 2.5}
    chat = stream(timeouts=timeouts, sessions=sessions, duration=0.3)
    scenario = load_scenario(document(traffic=[chat], run={"until": 0.7, "warmup": 0.2}))
    [chat] = scenario.traffic
    assert chat.clients.ttft_timeout_ps == PS // 10
    assert chat.clients.total_timeout_ps == 30 * PS
    assert chat.sessions == Sessions(Fixed(2), 16, Always(5 * PS // 2))
    assert chat.duration_ps == 3 * PS // 10
    assert (scenario.run.until_ps, scenario.run.warmup_ps) == (7 * PS // 10, PS // 5)


def test_defaults_are_those_of_vllm():
    engine = load_scenario(document(engine={}) | {"engine": {"max_model_len": 8192}}).engine
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (8192, 1024)
    assert (engine.block_size, engine.enable_prefix_caching, engine.async_scheduling) == (
        16,
        True,
        True,
    )
    assert (engine.enable_chunked_prefill, engine.scheduler_reserve_full_isl) == (True, True)
    assert (engine.watermark, engine.long_prefill_token_threshold) == (0.0, 0)
    long = load_scenario(document() | {"engine": {}}).engine
    assert long.max_model_len == 131_072


def test_a_mapping_and_a_file_give_the_same(tmp_path):
    path = write(tmp_path, TEXT)
    assert load_scenario(path) == load_scenario(yaml.safe_load(TEXT))


@pytest.mark.parametrize(
    "policy",
    ["tiered", "vllm-priority", "fair", {"preset": "slo", "tiers": {"ONLINE": {"order": "fcfs"}}}],
)
def test_a_scenario_survives_pickle_and_its_own_data(tmp_path, policy):
    path = azure_csv(tmp_path, [("2023-11-16 18:15:46.68", 374, 44)])
    traffic = [stream(), {"trace": path, "speedup": 2}]
    step_time = flat_profile(tmp_path, 10**10)
    scenario = load_scenario(
        document(policy=policy, traffic=traffic, hardware={"step_time": step_time})
    )
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    assert load_scenario(scenario.to_dict()) == scenario
    assert load_scenario(yaml.safe_load(yaml.safe_dump(scenario.to_dict()))) == scenario


def test_paths_are_relative_to_the_file_and_those_of_options_to_the_working_directory(
    tmp_path, monkeypatch
):
    folder = tmp_path / "scenarios"
    folder.mkdir()
    azure_csv(folder, [("2023-11-16 18:15:46.68", 374, 44)])
    azure_csv(tmp_path, [("2023-11-16 18:15:46.68", 5, 6)])
    path = write(folder, yaml.safe_dump(document(traffic=[{"trace": "trace.csv"}])))
    monkeypatch.chdir(tmp_path)
    [written] = load_scenario(path).traffic
    assert isinstance(written, TraceStream)
    assert Path(written.path) == folder / "trace.csv"
    [given] = load_scenario(path, ["traffic.0.trace=trace.csv"]).traffic
    assert given.path == "trace.csv"
    assert load_scenario(load_scenario(path).to_dict()) == load_scenario(path)


def test_a_model_may_be_a_folder(tmp_path):
    config = (
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_attention_heads": 16, '
        '"num_key_value_heads": 8, "num_hidden_layers": 16, "intermediate_size": 8192, '
        '"vocab_size": 128256, "max_position_embeddings": 4096}'
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(config)
    hardware = {"step_time": flat_profile(tmp_path, 10**10)}
    scenario = load_scenario(document(model=str(folder), hardware=hardware))
    assert (scenario.model.layers, scenario.model.max_position) == (16, 4096)
    assert load_scenario(scenario.to_dict()) == scenario
    (folder / "config.json").write_text("{")
    assert "is not readable as JSON" in refused(document(model=str(folder), hardware=hardware))
    (folder / "config.json").unlink()
    assert "config.json cannot be read: No such file" in refused(document(model=str(folder)))


def test_yaml_is_read_as_people_mean_it(tmp_path):
    text = TEXT.replace("6}", "6e-1}").replace("ONLINE: 0.7, BATCH", "ON: 0.7, NO")
    text = text.replace("tiered", "fcfs").replace("ONLINE: {ttft", "ON: {ttft")
    text = text.replace("name: chat", "name: 2024-01-01")
    scenario = load_scenario(write(tmp_path, text))
    assert scenario.traffic[0].arrivals == Renewal(Exponential(), 0.6)
    assert scenario.traffic[0].clients.tiers == {"ON": 0.7, "NO": 0.3}
    assert scenario.name == "2024-01-01"
    for form in ("\ufeff" + TEXT, TEXT.replace("\n", "\r\n")):
        assert load_scenario(write(tmp_path, form)) == load_scenario(write(tmp_path, TEXT))


def test_anchors_are_taken(tmp_path):
    chat = "{process: constant, rate: 2}, prompt_tokens: &n {fixed: 5}, output_tokens: *n, requests: 3}"
    text = re.sub(r"(?s)  - arrivals.*objectives", f"  - {{arrivals: {chat}\nobjectives", TEXT)
    [read] = load_scenario(write(tmp_path, text)).traffic
    assert read.lengths.output == Fixed(5)
    assert read.arrivals == Renewal(Equal(), 2)


# --- overrides ----------------------------------------------------------------------------


def test_overrides_reach_every_depth(tmp_path):
    scenario = load_scenario(
        write(tmp_path, TEXT),
        [
            "engine.max_num_seqs=64",
            "engine.watermark=0.25",
            "traffic.0.arrivals.rate=12.5",
            "traffic.0.timeouts.ttft=5",
            "policy.tiers.ONLINE.max_wait=0.02",
            "cluster={replicas: 3, router: round_robin}",
            "run.until=null",
            "name=a=b",
        ],
        seed=7,
    )
    assert (scenario.engine.max_num_seqs, scenario.engine.watermark) == (64, 0.25)
    assert scenario.traffic[0].arrivals == Renewal(Exponential(), 12.5)
    assert scenario.traffic[0].clients.ttft_timeout_ps == 5 * PS
    assert scenario.policy.tiers[0].max_wait == 0.02
    assert (scenario.cluster.replicas, scenario.cluster.routing.router) == (3, "round_robin")
    assert scenario.name == "a=b"
    assert scenario.run.seed == 7


def test_a_preset_may_be_named_and_changed_in_one_go(tmp_path):
    overrides = ["policy=priority", "policy.tiers.BATCH.promote_after=7", "policy.window=9"]
    policy = load_scenario(write(tmp_path, TEXT), overrides).policy
    assert policy.tiers[1].promote_after == 7
    assert policy.window == 9


def test_overrides_do_not_touch_the_mapping_they_start_from():
    base = document()
    load_scenario(base, ["engine.max_num_seqs=4", "traffic.0.requests=1"], seed=9)
    assert base == document()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("foo", "write it as key.key=value"),
        ("=3", "write it as key.key=value"),
        ("engine..x=3", "write it as key.key=value"),
        ("engine.max_num_sqs=4", "engine.max_num_sqs: unknown key; did you mean 'max_num_seqs'?"),
        ("engin.max_num_seqs=4", "engin: unknown key; did you mean 'engine'?"),
        ("engine.max_num_seqs=-3", "engine.max_num_seqs: must be >= 1, got -3"),
        ("engine.max_num_seqs.x=3", "engine.max_num_seqs is 128, so that nothing can be set under it"),
        ("engine.max_num_seqs=[1", "not readable as YAML"),
        ("traffic.1.requests=3", "traffic is a list; '1' must be one of its positions, 0 to 0"),
        ("traffic.x.requests=3", "traffic is a list; 'x' must be one of its positions, 0 to 0"),
        ("traffic=[{trace: none.csv}]", "traffic.0.trace: none.csv: cannot be read: No such file"),
        ("policy.tiers.ONLIN.max_wait=1", "policy: preset 'tiered' has no tier 'ONLIN'"),
        ("traffic.0.tiers={ONLINE: 0.5}", "traffic.0: the shares in tiers add up to 0.5, must be 1"),
    ],
)  # fmt: skip
def test_an_override_that_is_wrong_is_named(tmp_path, override, message):
    told = refused(write(tmp_path, TEXT), override)
    assert f"--set {override}" in told
    assert message in told


def test_a_seed_that_is_wrong_is_named(tmp_path):
    assert refused(write(tmp_path, TEXT), seed=-1) == "--seed -1: run.seed: must be >= 0, got -1"


# --- files that are no scenario -----------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty; a scenario is a mapping with keys such as model: and traffic:"),
        ("# nothing\n", "the file is empty"),
        ("- a\n", "found a list"),
        ("hello", "found text"),
        (b"\x00\x01\xff\xfe", "not text in UTF-8"),
        (b"\x89PNG\r\n\x1a\n", "not text in UTF-8"),
        ("a: \x00", "not readable as YAML"),
        ("a: [1, 2", " line 1: not readable as YAML"),
        ("name: x\n\tb: 1\n", " line 2: not readable as YAML"),
        (TEXT + "---\na: 1\n", " line 17: not readable as YAML"),
        (TEXT.replace("name: chat", "name: chat\nname: b"), " line 2: name: written twice, first on line 1"),
        (TEXT + "engine: {}\n", " line 17: engine: written twice, first on line 5"),
        ("a: &x [*x]\n", "nested too deeply"),
        ("? [a, b]\n: 1\n", " line 1: a key must be text"),
        (TEXT.replace("name: chat", "name: !!python/object:os.system x"), " line 1: name: the tag"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
         "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e]\n",
         "more than 100000 values"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_scenario(tmp_path, content, message):
    path = write(tmp_path, content)
    told = refused(path)
    assert told.startswith(path)
    assert message in told
    assert "\n" not in told


def test_files_that_cannot_be_read(tmp_path):
    assert "cannot be read: No such file" in refused(str(tmp_path / "none.yaml"))
    assert "cannot be read: Is a directory" in refused(str(tmp_path))
    assert "''" in refused("")
    assert "cannot be read: embedded null" in refused("a\0b")


# --- values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model: meta", "modle: meta", "line 2: modle: unknown key; did you mean 'model'?"),
        ("model: meta-llama/Llama-3.1-8B\n", "", "model: is missing; it has no default"),
        ("Llama-3.1-8B", "Llama-3-8B", "line 2: model: unknown value .*did you mean 'meta-llama/Llama-3.1-8B'"),
        ("H100", "H10", "line 4: hardware.gpu: unknown value 'H10' .did you mean 'H100'"),
        ("H100", "100", 'line 4: hardware.gpu: must be text, got 100; put it in quotes'),
        ("H100", "{}", "line 4: hardware.gpu.memory_bytes: is missing"),
        ("gpu: H100", "gpu: L4", "line 3: hardware: there is no built-in step-time profile for .*on L4.* Available: .*Llama-3.1-8B on "),
        ("gpu: H100", "{gpu: H100, dtype: int8}", "hardware: there is no built-in step-time profile for .*int8.*roofline"),
        ("gpu: H100", "{gpu: H100, tensor_parallel_size: 3}", "tensor_parallel_size: 3 does not divide the 32 attention heads"),
        ("gpu: H100", "{gpu: H100, dtype: int3}", "hardware.dtype: unknown value 'int3'"),
        ("128\n", "-3\n", "line 6: engine.max_num_seqs: must be >= 1, got -3"),
        ("128\n", "0\n", "line 6: engine.max_num_seqs: must be >= 1, got 0"),
        ("128\n", "1.5\n", "line 6: engine.max_num_seqs: must be a whole number, got 1.5"),
        ("128\n", "'64'\n", "line 6: engine.max_num_seqs: must be a whole number, got '64'; numbers, .* without quotes"),
        ("128\n", "true\n", "line 6: engine.max_num_seqs: must be a whole number, got True"),
        ("128\n", "1:30\n", "line 6: engine.max_num_seqs: must be a whole number, got '1:30'"),
        ("128\n", "9999999999999999999999\n", "line 6: engine.max_num_seqs: must be <= 1000000000"),
        ("128\n", "5000\n", "line 6: engine.max_num_seqs: 5000 is outside the step-time profile .* covers 1 to 1024"),
        ("8192", "200000", "line 7: engine.max_model_len: must be <= 131072, the longest context of"),
        ("8192", "512", "line 11: traffic.0.prompt_tokens: no request of this stream can ever run: every prompt has at least 512 tokens, engine.max_model_len is 512"),
        ("tiered", "tierd", "line 8: policy: 'tierd' is not known; did you mean 'tiered'"),
        ("tiered", "7", "line 8: policy: must be a name or a mapping"),
        ("tiered", "{tiers: [{name: ONLINE, ordr: fcfs}]}", "line 8: policy: unknown key 'ordr' .*did you mean 'order'"),
        ("tiered", "{tiers: [{name: ONLINE, order: nope}]}", "line 8: policy: .*'nope' is not one of fcfs"),
        ("tiered", "{tiers: [{name: ONLINE, max_wait: .nan, batch_size: 2}]}", "line 8: policy: .*max_wait must be above 0 and finite"),
        ("tiered", "{tiers: []}", "line 8: policy: tiers must list at least one tier"),
        ("tiered", "{tiers: [{name: GOLD}]}", "line 14: traffic.0.tiers: the policy has no such tier: 'ONLINE' is not known"),
        ("BATCH: 0.3", "BTCH: 0.3", "line 14: traffic.0.tiers: the policy has no such tier: 'BTCH' .*did you mean 'BATCH'"),
        ("0.3}", "0.2}", "line 10: traffic.0: the shares in tiers add up to 0.9, must be 1"),
        ("0.3}", "-0.3}", "line 14: traffic.0.tiers.BATCH: must be >= 0, got -0.3"),
        ("rate: 6", "rate: 0", "line 10: traffic.0.arrivals.rate: must be >= 1e-06, got 0"),
        ("rate: 6", "rate: .nan", "line 10: traffic.0.arrivals.rate: must be a finite number, got nan"),
        ("rate: 6", "rate: .inf", "line 10: traffic.0.arrivals.rate: must be a finite number, got inf"),
        ("poisson", "poison", "line 10: traffic.0.arrivals.process: .poison. is not known; choose one of constant, poisson"),
        ("{fixed: 512}", "512", "line 11: traffic.0.prompt_tokens: must be a mapping .*write {fixed: 512}"),
        ("{fixed: 512}", "{fixed: 0}", "line 11: traffic.0.prompt_tokens.fixed: must be >= 1, got 0"),
        ("{fixed: 512}", "{fixd: 5}", "line 11: traffic.0.prompt_tokens.*fixd: unknown key; did you mean 'fixed'"),
        ("[1, 128]", "[128, 1]", "line 12: traffic.0.output_tokens: the lower bound 128 is above the upper bound 1"),
        ("[1, 128]", "[1]", "line 12: traffic.0.output_tokens.uniform: must have 2 or more entries, got"),
        ("[1, 128]", "[0, 3]", "line 12: traffic.0.output_tokens.uniform.0: must be >= 1, got 0"),
        ("    requests: 100\n", "", "line 10: traffic.0: would never end; give requests .* or duration"),
        ("requests: 100", "requests: 100\n    tier: ONLINE", "line 10: traffic.0: has both tier and tiers"),
        ("requests: 100", "timeouts: {ttft: 0}", "line 13: traffic.0.timeouts.ttft: must be > 0, got 0"),
        ("requests: 100", "speedup: 2", "line 13: traffic.0.speedup: unknown key here: only streams with a trace"),
        ("requests: 100", "trace: x.csv", "line 10: traffic.0.arrivals: unknown key here: a stream with a trace takes"),
        ("{ttft_p99: 1.0}", "{ttft_p999: 1.0}", "line 16: objectives.ONLINE.ttft_p999: .* is not <metric>_<statistic>"),
        ("{ttft_p99: 1.0}", "{ttft_p99: 0}", "line 16: objectives.ONLINE.ttft_p99: must be > 0"),
        ("ONLINE: {ttft", "OFFLINE: {ttft", "line 16: objectives.OFFLINE: no stream has this tier"),
        ("objectives:", "cluster: {replicas: 0}\nobjectives:", "line 15: cluster.replicas: must be >= 1, got 0"),
        ("objectives:", "cluster: {router: rand}\nobjectives:", "line 15: cluster.router: 'rand' is not known; did you mean 'random'. known: round_robin"),
        ("objectives:", "run: {until: 0}\nobjectives:", "line 15: run.until: must be > 0"),
        ("objectives:", "run: {until: 5, warmup: 5}\nobjectives:", "line 15: run.warmup: must be < run.until .5., got 5"),
        ("objectives:", "run: {seed: -1}\nobjectives:", "line 15: run.seed: must be >= 0, got -1"),
        ("engine:", "engine:\n  version: 0.11.0", "line 6: engine.version: '0.11.0' is not modelled; choose one of 0.32.0, 0.33.0"),
        ("engine:", "engine:\n  version: 0.32", "line 6: engine.version: must be text, got 0.32; put it in quotes"),
        ("engine:", "engine:\n  kv_cache_dtype: fp9", "line 6: engine.kv_cache_dtype: 'fp9' is not known; did you mean 'fp8'"),
        ("engine:", "engine:\n  watermark: 1", "line 6: engine.watermark: must be < 1, got 1"),
        ("engine:", "engine:\n  block_size: 0", "line 6: engine.block_size: must be >= 1, got 0"),
        ("engine:", "engine:\n  gpu_memory_utilization: 0.2", "line 3: hardware: .*does not fit on H100.*weights"),
        ("engine:", "engine:\n  num_gpu_blocks_override: 100", "engine.max_model_len: 8192 tokens need 512 KV blocks of 16, but only 99 of the 100"),
        ("engine:", "engine:\n  max_num_batched_tokens: 64", "line 6: engine.max_num_batched_tokens: must be >= max_num_seqs .128., got 64"),
        ("engine:", "engine:\n  max_num_batched_tokens: 20000", "engine.max_num_batched_tokens: 20000 is outside the step-time profile .* covers 1 to 16384"),
        ("engine:", "engine:\n  max_num_active_seqs: 129", "line 6: engine.max_num_active_seqs: must be <= max_num_seqs .128., got 129"),
        ("engine:", "engine:\n  long_prefill_token_threshold: 9000", "line 6: engine.long_prefill_token_threshold: must be <= max_model_len .8192., got 9000"),
        ("engine:", "engine:\n  long_prefill_token_threshold_adaptive: true", "line 6: engine.long_prefill_token_threshold_adaptive: does nothing"),
        ("engine:", "engine:\n  max_num_scheduled_tokens: 9000", "line 6: engine.max_num_scheduled_tokens: must be <= max_num_batched_tokens .8192., got 9000"),
        ("engine:", "engine:\n  max_num_batched_tokens: 4096\n  enable_chunked_prefill: false", "line 6: engine.max_num_batched_tokens: must be >= max_model_len .8192., got 4096"),
        ("engine:", "engine:\n  max_num_scheduled_tokens: 4096\n  enable_chunked_prefill: false", "line 6: engine.max_num_scheduled_tokens: must be >= max_model_len"),
        ("engine:", "engine:\n  scheduling_policy: fcfs", "line 6: engine.scheduling_policy: unknown key here: write it as the top-level key policy"),
    ],
)  # fmt: skip
def test_a_value_that_is_wrong(tmp_path, old, new, message):
    assert TEXT.count(old) >= 1
    path = write(tmp_path, TEXT.replace(old, new, 1))
    told = refused(path)
    assert told.startswith(path)
    assert re.search(message, told, re.DOTALL), told


def test_all_faults_are_told_one_a_line(tmp_path):
    text = TEXT.replace("128\n", "-3\n").replace("rate: 6", "rate: 0").replace("name:", "nam:")
    told = refused(write(tmp_path, text)).splitlines()
    assert len(told) == 3
    assert [re.search(r"line (\d+)", line)[1] for line in told] == ["6", "10", "1"]


@pytest.mark.parametrize("key", NOT_MODELLED)
@pytest.mark.parametrize("section", ["", "hardware.", "engine.", "traffic.0.", "cluster."])
def test_what_is_not_modelled_is_refused_by_name(key, section):
    told = refused(document(), f"{section}{key}=1")
    assert f"{section}{key}: not modelled: {NOT_MODELLED[key]}" in told


@pytest.mark.parametrize("policy", ["fcfs", "fair", "vllm-fcfs"])
def test_policies_without_tiers_take_any_tier_with_one_warning(policy):
    mixed = [stream(tiers={"GOLD": 0.5, "ONLINE": 0.5})]
    scenario = load_scenario(document(policy=policy, traffic=mixed))
    assert [w for w in scenario.warnings if "tiers have no effect" in w] == list(scenario.warnings)
    assert len(scenario.warnings) == 1
    assert load_scenario(document(policy=policy, traffic=[stream(tier="GOLD")])).warnings == ()


@pytest.mark.parametrize("policy", ["priority", "tiered", "tiered_length", "slo", "vllm-priority"])
def test_policies_with_tiers_warn_of_nothing_and_take_their_own_only(policy):
    mixed = [stream(tiers={"ONLINE": 0.5, "OFFLINE": 0.5})]
    assert load_scenario(document(policy=policy, traffic=mixed)).warnings == ()
    told = refused(document(policy=policy, traffic=[stream(tier="GOLD")]))
    assert "traffic.0.tier: the policy has no such tier: 'GOLD' is not known; known: ONLINE" in told


def test_a_stream_without_a_tier_has_the_policy_s_default():
    policy = {"tiers": [{"name": "A"}, {"name": "B"}], "default_tier": "B"}
    [chat] = load_scenario(document(policy=policy)).traffic
    assert chat.clients.tiers == {"B": 1.0}
    del policy["default_tier"]
    assert "traffic.0.tier: the policy has no such tier: 'ONLINE'" in refused(
        document(policy=policy)
    )


def test_a_profile_of_something_else_is_warned_of(tmp_path):
    hardware = {"step_time": flat_profile(tmp_path, 10**10), "gpu": "H200"}
    [warning] = load_scenario(document(hardware=hardware)).warnings
    assert warning == "the step times were measured with hardware.gpu H100, the scenario says H200"
    hardware["gpu"] = "H100"
    [warning] = load_scenario(
        document(hardware=hardware, engine={"kv_cache_dtype": "fp8"})
    ).warnings
    assert "engine.kv_cache_dtype bfloat16, the scenario says fp8" in warning


def test_the_profile_is_that_of_the_kv_cache():
    for written, stored in (("auto", "bfloat16"), ("fp8", "fp8"), ("fp8_e4m3", "fp8")):
        loaded = load_scenario(document(engine={"kv_cache_dtype": written}))
        assert loaded.hardware.profile.provenance.kv_cache_dtype == stored
        assert not loaded.warnings


def test_16_bit_weights_of_either_kind_share_a_profile():
    assert not load_scenario(document(hardware={"dtype": "float16"})).warnings


def test_a_folder_of_a_known_shape_has_its_profile(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(MODELS[MODEL])))
    loaded = load_scenario(document(model=str(tmp_path)))
    assert loaded.hardware.profile == load_scenario(document()).hardware.profile


def test_a_gpu_may_be_written_out(tmp_path):
    figures = {"name": "X", "memory_bytes": 80 * 10**9, "bandwidth": 2e12, "bf16_flops": 300e12}
    told = refused(document(hardware={"gpu": figures}))
    assert "hardware.gpu: X is given by figures" in told
    assert "hardware.step_time: roofline" in told
    loaded = load_scenario(document(hardware={"gpu": figures, "step_time": "roofline"}))
    assert loaded.hardware.profile.provenance.gpu == "X"
    assert loaded.warnings == (
        "the step times are computed from data sheets (roofline): not validated",
    )
    assert load_scenario(loaded.to_dict()) == loaded
    # The name of a known GPU with other figures is another GPU.
    told = refused(document(hardware={"gpu": figures | {"name": "H100"}}))
    assert "hardware.gpu: H100 is given by figures" in told


def test_a_stream_of_a_trace_that_cannot_run_is_refused_and_one_that_partly_can_is_not(tmp_path):
    rows = [("2023-11-16 18:15:46", 3000, 1), ("2023-11-16 18:15:47", 2048, 1)]
    told = refused(document(traffic=[{"trace": azure_csv(tmp_path, rows)}]))
    assert "traffic.0.trace: no request of this stream can ever run: the shortest prompt" in told
    assert "has 2048 tokens, engine.max_model_len is 2048" in told
    rows.append(("2023-11-16 18:15:48", 2047, 1))
    load_scenario(document(traffic=[{"trace": azure_csv(tmp_path, rows)}]))
    assert "no request" in refused(
        document(traffic=[{"trace": azure_csv(tmp_path, rows), "requests": 2}])
    )


def test_a_system_prompt_counts_when_asking_whether_a_stream_can_run():
    sessions = {"turns": 2, "system_prompt_tokens": 2000}
    load_scenario(document(traffic=[stream(47, sessions=sessions)]))
    told = refused(document(traffic=[stream(48, sessions=sessions)]))
    assert "at least 2048 tokens (2000 of the system prompt and shared text + 48)" in told


def test_messages_about_a_trace_name_the_scenario_and_the_trace(tmp_path):
    trace = azure_csv(tmp_path, [("2023-11-16 18:15:46", 0, 1)])
    path = write(tmp_path, yaml.safe_dump(document(traffic=[{"trace": trace}]), sort_keys=False))
    told = refused(path)
    assert re.match(
        rf"{re.escape(path)} line \d+: traffic.0.trace: {re.escape(trace)} line 2: Context", told
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(tmp_path, path):
    trace = azure_csv(tmp_path, [("2023-11-16 18:15:46.68", 374, 44)])
    streams = yaml.safe_load(path.read_text())["traffic"]
    present = [f"traffic.{i}.trace={trace}" for i, keys in enumerate(streams) if "trace" in keys]
    scenario = load_scenario(path, present)
    assert scenario.name == path.stem
    # One shows what an unmodified server does, which knows no tiers.
    assert [w for w in scenario.warnings if not w.startswith("tiers have no effect")] == []


# --- anything at all ----------------------------------------------------------------------

ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        1e30,
        float("nan"),
        float("inf"),
        "",
        "x",
        "1",
        "*",
        "tiered",
        [],
        [1],
        ["x"],
        {},
        {"x": 1},
    ]
)
FULL = document(
    hardware={"tensor_parallel_size": 1, "dtype": "bfloat16", "step_time": None},
    policy={
        "tiers": [
            {
                "name": "ONLINE",
                "order": "fcfs",
                "groups": [[256, 2], [512, 1]],
                "max_wait": 0.1,
                "rank": 0,
            },
            {
                "name": "B",
                "batch_size": 2,
                "max_wait": 0.1,
                "promote_after": 1.0,
                "victims": "largest",
            },
        ],
        "estimator": "quantile",
        "weights": {"a": 2},
    },
    traffic=[
        stream(
            tiers={"ONLINE": 0.5, "B": 0.5},
            tenants={"a": 1.0},
            timeouts={"ttft": 1.0},
            sessions={"turns": 2, "system_prompt_tokens": 8, "think_time": 1.0},
            max_tokens=9,
            duration=3.0,
        )
    ],
    objectives={"B": {"e2e_p99": 3.0}},
    run={"seed": 1, "until": 9.0, "warmup": 1.0},
)


def places(value, path=()):
    """Every place of a nested value."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from places(child, (*path, key))


def changed(value, path, new):
    """A copy with another value at `path`."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def answer(load, *arguments):
    """What a person is told: nothing, or why not. Any other exception fails the test."""
    try:
        load(*arguments)
    except InputError as error:
        return str(error)
    return None


@settings(max_examples=300)
@given(st.sampled_from([path for path in places(FULL) if path]), ODD)
def test_whatever_is_written_is_taken_or_refused_in_words(path, value):
    assert answer(load_scenario, changed(FULL, path, value)) != ""
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    override = f"{'.'.join(map(str, path))}={text}"
    assert answer(load_scenario, FULL, [override]) != ""


@given(st.text())
def test_any_text_is_taken_or_refused_in_words(text):
    for source in (text, f"{TEXT}{text}\n"):
        told = answer(parse, source, "file")
        assert told is None or told.startswith("file")


# --- what would block, fill the memory or change nothing ----------------------------------


def test_a_pipe_is_no_scenario(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match=r"pipe\.yaml: cannot be read: no regular file"):
        load_scenario(tmp_path / "pipe.yaml")


def test_a_device_is_no_profile():
    with pytest.raises(InputError, match=r"hardware\.step_time: /dev/zero .* no regular file"):
        load_scenario(ROOT / "examples/chat-8b.yaml", ["hardware.step_time=/dev/zero"])


@pytest.mark.parametrize(
    "change", ["engine.num_gpu_blocks_override=1000000000", "cluster.replicas=9999"]
)
def test_more_blocks_than_memory_are_refused(change):
    with pytest.raises(InputError, match=r"KV blocks on each of .* more than the 50000000"):
        load_scenario(ROOT / "examples/chat-8b.yaml", [change])


def test_tags_are_refused_on_lists_and_mappings():
    with pytest.raises(InputError, match="the tag !foo is not taken here"):
        load_scenario(ROOT / "examples/chat-8b.yaml", ["traffic=!foo []"])


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ("{preset: fcfs, weights: {a: 2}}", "policy.weights"),
        ("{preset: tiered, estimator: oracle, window: 9}", "policy.window"),
        ("{preset: tiered, tiers: {ONLINE: {mix: 4}}}", "mix of tier ONLINE"),
        ("{preset: tiered, tiers: {BATCH: {ttft_target: 2}}}", "ttft_target of tier BATCH"),
        ("{preset: tiered, tiers: {ONLINE: {promote_after: 5}}}", "promote_after of tier ONLINE"),
    ],
)
def test_keys_of_a_policy_that_change_nothing_are_said(policy, key):
    scenario = load_scenario(ROOT / "examples/chat-8b.yaml", [f"policy={policy}"])
    assert [
        warning for warning in scenario.warnings if warning.startswith(f"{key} changes nothing")
    ]


@pytest.mark.parametrize("preset", ["fcfs", "priority", "tiered", "tiered_length", "slo", "fair"])
def test_presets_have_no_idle_keys(preset):
    scenario = load_scenario(ROOT / "examples/chat-8b.yaml", [f"policy={preset}"])
    assert not [warning for warning in scenario.warnings if "changes nothing" in warning]
