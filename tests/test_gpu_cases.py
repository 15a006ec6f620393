"""Cases that users of vLLM and of other simulators reported, where GPUs' times and memory decide."""

import json

import pytest

from tests.runs import MODEL, document, stream
from twin.errors import InputError
from twin.report.explain import explain as explain_scenario
from twin.report.json_summary import summarize
from twin.report.tables import render
from twin.scenario import load_scenario
from twin.simulation import simulate
from twin.step_time.fit import Step, fit_steps, profile_of
from twin.step_time.profiles import Provenance
from twin.whatif.ready import Setup, explain, quantisation, token_budget


def test_a_larger_token_budget_costs_room_and_a_measured_count_wins():
    """vllm-project/vllm#2509: 4 x 24 GB, budgets of 20,480 and 50,000."""
    setup = Setup("Qwen/Qwen3-32B", "RTX4090", 4, 8000, 64, 4)
    small, large = token_budget(setup, [20_480, 50_000])
    assert large.kv_tokens < 0.75 * small.kv_tokens
    assert large.concurrency < small.concurrency
    engine = {"max_num_batched_tokens": 16384, "num_gpu_blocks_override": 758}
    loaded = load_scenario(document(engine=engine))
    assert loaded.engine.num_gpu_blocks == 758 != loaded.hardware.memory.num_gpu_blocks


def test_prefill_heavy_work_gains_nothing_from_4_bit_weights():
    """vllm-project/vllm#7680: 3,000 tokens in, 50 out, 11 users."""
    rows = quantisation(Setup(MODEL, "A100", 1, 3000, 50, 11), ["bfloat16", "int4"])
    half, same_origin, four = rows
    assert four.output_tokens_per_s < 1.15 * same_origin.output_tokens_per_s
    assert four.ttft_s == pytest.approx(same_origin.ttft_s, rel=0.05)
    assert four.kv_tokens > 1.1 * half.kv_tokens
    assert four.kv_used < half.kv_used < 0.1
    told = explain(rows)
    assert "prefill is compute-bound" in told
    assert "more tokens of KV cache, unused here" in told
    assert four.validated == same_origin.validated == "not validated"
    assert four.note == "weight-only, roofline"


def test_a_report_says_which_engine_it_is_a_twin_of(tmp_path):
    """microsoft/vidur#60: name, version, settings; rows that cannot run are listed, no length is scaled."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,5\n0.1,5000,5\n0.2,100,7\n")
    result = simulate(load_scenario(document(traffic=[{"trace": str(trace)}])))
    summary = summarize(result)
    assert summary["engine_version"] == "0.32.0"
    assert summary["step_time"]["engine"].startswith("vLLM ")
    assert set(summary["limits"]) >= {"max_num_seqs", "max_num_batched_tokens", "kv_blocks"}
    (refused,) = summary["refused"]
    assert refused["prompt_tokens"] == 5000
    assert "line 3" in refused["place"]
    assert result.tally().tiers["ONLINE"].output_tokens == 12
    text = render(summary)
    assert "vLLM 0.32.0" in text
    assert "policy vllm-fcfs" in text


def test_shared_prefixes_of_a_prediction_are_in_its_traffic():
    """ai-dynamo/aiconfigurator#1070: what is predicted with hits is asked with the same text, and hits are told.

    Replaying it against a server is `twin-real replay`, which takes the prompts from the same requests.
    """
    talk = {"turns": 1, "system_prompt_tokens": 1024}
    engine = {"max_model_len": 8192, "num_gpu_blocks_override": 4000}
    traffic = [stream(2976, 4, sessions=talk, requests=10)]
    prompts = []
    scenario = load_scenario(document(engine=engine, traffic=traffic))
    result = simulate(scenario, on_offer=lambda request: prompts.append(request.prompt))
    first = {prompt[0][:2] for prompt in prompts}
    assert len(first) == 1
    hits, asked = (sum(getattr(e, f"prefix_{n}_tokens") for e in result.engines) for n in ("hit", "query"))  # fmt: skip
    assert hits / asked == pytest.approx(9 * 1024 / (10 * 4000), rel=0.01)
    assert summarize(result)["engine"]["prefix_hit_tokens"] == hits


def own_profile(tmp_path, gpu: str) -> str:
    """A profile fitted to 60 steps of a server of one's own."""
    steps = [
        Step(n, n, 500 * n, 0, 5e-3 + 2e-5 * n + 5e-9 * 500 * n) for n in range(1, 51)
    ] + [Step(n, 0, 0, n * n / 2, 5e-3 + 2e-5 * n + 1e-10 * n * n) for n in range(100, 2100, 200)]  # fmt: skip
    fit = fit_steps(steps, (1, 64, 2048))
    origin = Provenance(
        MODEL, gpu, 1, "bfloat16", "bfloat16", "vLLM 0.32.0", "60 steps of a server", "own",
        "2026-01-01", "twin-real calibrate", {}, (),
    )  # fmt: skip
    path = tmp_path / "own.json"
    path.write_text(
        json.dumps(profile_of(fit, origin, max_context=4096, max_num_seqs=64).to_dict())
    )
    return str(path)


def test_predictions_have_an_error_bar_which_calibrating_changes(tmp_path):
    """ai-dynamo/aiconfigurator#1205: not calibrated, with the error of the nearest set-up; calibrated, with its own."""
    pytest.importorskip("scipy")
    near = summarize(simulate(load_scenario(document(hardware={"gpu": "H200"}))))
    assert near["trust"]["nearest"]
    hardware = {"gpu": "L40S", "tensor_parallel_size": 4}
    far = summarize(simulate(load_scenario(document(model="Qwen/Qwen3-32B", hardware=hardware))))
    assert far["trust"]["validated"] is False
    assert "not validated: unlike the nearest" in render(far)
    loaded = load_scenario(document(hardware={"gpu": "H200", "step_time": own_profile(tmp_path, "H200")}))  # fmt: skip
    calibrated = summarize(simulate(loaded))
    assert calibrated["trust"]["calibration"]["decode_steps"] < 0.05
    assert "calibrated: step times fitted to measured steps" in render(calibrated)


def test_what_loads_has_a_time_for_every_kind_of_step():
    """ai-dynamo/aiconfigurator#1522: `twin explain` runs one step of each kind; what lacks a table does not load."""
    steps = explain_scenario(load_scenario(document()))["steps"]
    kinds = " ".join(step["kind"] for step in steps)
    for kind in ("1 decode", "prompt of", "decodes, 1 prompt"):
        assert kind in kinds
    assert all(step["step_s"] > 0 for step in steps)
    with pytest.raises(InputError, match="no built-in step-time profile"):
        load_scenario(document(hardware={"dtype": "int8"}))
