"""`twin-real manifests --check`: what servers are told, what their memory holds, who reaches them, what they mount."""

import copy

import pytest

from tests.k8s import broken, pod, vllm

MODEL = "meta-llama/Llama-3.1-8B"


def told(change, rule):
    """Messages and fixes of the faults by a rule after a change to the rendered 8B service; no other fault is there."""
    rules, found = broken(change)
    assert rules <= {rule}, [str(f) for f in found]
    return [f"{f.message}; {f.fix}".rstrip("; ") for f in found if f.kind == "fault"]


def with_arguments(*words, model=None, without=()):
    """A change that adds arguments, and takes others away by their beginnings."""

    def change(by_kind, objects):
        args = [a for a in vllm(by_kind)["args"] if not a.startswith(tuple(without) or ("\0",))]
        if model is not None:
            args[0] = model
        vllm(by_kind)["args"] = [*args, *words]

    return change


# --- values -----------------------------------------------------------------------------------


REFUSED = {
    ("--gpu-memory-utilization=1.5",): "must be > 0 and <= 1, got 1.5",
    ("--dtype", "bf16"): "must be one of auto, bfloat16, float, float16, float32, half, got 'bf16'",
    ("--enforce-eager=true",): "takes no value, got 'true'",
    ("--enforce-eager", "true"): "takes no value, got 'true'",
    ("--max-num-seqs=64.0",): "must be a whole number, got '64.0'",
    ("--max-num-seqs",): "needs a value",
    ("--max-model-len=8Ki",): "must be a whole number, or one like 32k or 32K, got '8Ki'",
    ("--shutdown-timeout=60s",): "must be a whole number, got '60s'",
    ("--tensor-parallel-size", "0"): "must be >= 1, got 0",
    ("--compilation-config={mode: 3}",): "must be JSON, got '{mode: 3}'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_values_that_vllm_refuses(words):
    name = words[0].partition("=")[0]
    (text,) = told(with_arguments(*words, without=(name,)), "argument-value")
    message, _, hint = text.partition("; ")
    assert message == f"{name} {REFUSED[words]}: vLLM would not start"
    assert hint == ("did you mean bfloat16?" if name == "--dtype" else "")


PAIRS = {
    ("--max-num-batched-tokens=64",): "--max-num-seqs (128) is above --max-num-batched-tokens (64)",
    ("--no-enable-chunked-prefill", "--max-num-batched-tokens=4k"): (
        "--max-model-len (8192) is above --max-num-batched-tokens (4000) with --no-enable-chunked-prefill"
    ),
    ("--long-prefill-token-threshold=9000",): "--long-prefill-token-threshold (9000) is above --max-model-len (8192)",
}  # fmt: skip


@pytest.mark.parametrize("words", PAIRS)
def test_pairs_that_vllm_refuses(words):
    (text,) = told(with_arguments(*words, without=("--max-num-batched",)), "argument-value")
    assert text.startswith(f"{PAIRS[words]}: vLLM would not start; ")


@pytest.mark.parametrize(
    "words",
    [
        ("--max-model-len=8k",),
        ("--max-model-len=auto",),
        ("-tp", "1"),
        ("--max_num_seqs", "64"),
        ("--compilation-config.mode=3",),
        ("--compilation-config.cudagraph_mode", "NONE"),
        ("--max-num-queued-reqs=None",),
        ("--gpu-memory-util=0.8",),
        ("--max-num-seqs=$(SEQUENCES)",),
        ("--kv-cache-dtype=fp8",),
        ("--api-key", "$(KEY)"),
    ],
)
def test_other_ways_to_write_what_vllm_takes_are_no_faults(words):
    key = words[0].partition("=")[0].replace("_", "-")
    assert told(with_arguments(*words, without=(key,)), "none") == []


def test_a_command_line_for_a_shell_is_read_too():
    def change(by_kind, objects):
        line = " ".join(vllm(by_kind)["args"][:1])
        line += " --dtype bf16 --port ${PORT} --hf-overrides '{\"a\": 1}' --shutdown-timeout 120"
        vllm(by_kind).update(command=["/bin/sh", "-c", f"exec vllm serve {line}"])
        del vllm(by_kind)["args"]

    (text,) = told(change, "argument-value")
    assert text.startswith("--dtype must be one of")


# --- the model's own limits -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "longest", "limit"),
    [
        ("/models/meta-llama/Llama-3.1-8B", 131072, None),
        ("/models/meta-llama/Llama-3.1-8B", 131073, 131072),
        ("meta-llama/Llama-3.1-8B-Instruct", "132K", 131072),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", 131073, 131072),
        ("Qwen/Qwen3-8B", 40961, 40960),
        ("Qwen/Qwen3-8B-AWQ", 40961, 40960),
        # Others of that size have a limit of their own, which nothing here knows.
        ("Qwen/Qwen3-8B-Base", 131073, None),
        ("Qwen/Qwen2.5-8B", 131073, None),
        ("someone/llama-8b-1m", 131073, None),
    ],
)
def test_contexts_beyond_the_model(model, longest, limit):
    change = with_arguments(f"--max-model-len={longest}", model=model, without=("--max-model-len",))
    found = told(change, "argument-value")
    assert len(found) == (limit is not None)
    if limit is not None:
        assert (
            f"was trained for ({limit}): vLLM would not start; --max-model-len of {limit} or less"
            in found[0]
        )


@pytest.mark.parametrize(
    "stretched",
    [
        with_arguments('--hf-overrides={"rope_scaling": {}}', "--max-model-len=140000"),
        lambda k, o: (
            vllm(k)["args"].append("--max-model-len=140000"),
            vllm(k)["env"].append({"name": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "value": "1"}),
        ),
    ],
)
def test_contexts_that_are_stretched_on_purpose(stretched):
    assert told(stretched, "none") == []


def test_tensor_parallelism_that_does_not_divide_the_heads():
    def change(by_kind, objects):
        for kind in ("requests", "limits"):
            vllm(by_kind)["resources"][kind]["nvidia.com/gpu"] = 3
        with_arguments("--tensor-parallel-size=3", without=("--tensor-parallel",))(by_kind, objects)

    (text,) = told(change, "argument-value")
    assert text == (
        f"--tensor-parallel-size (3) does not divide the 32 heads of {MODEL}: vLLM would not start; "
        "--tensor-parallel-size of 2"
    )


# --- memory -----------------------------------------------------------------------------------


def limited(memory, *words, model=None):
    def change(by_kind, objects):
        for kind in ("requests", "limits"):
            vllm(by_kind)["resources"][kind]["memory"] = memory
        with_arguments(*words, model=model)(by_kind, objects)

    return change


def test_a_memory_limit_below_the_weights():
    """8,030,261,248 parameters of two bytes; 6 GiB for processes and 1 GiB of /dev/shm."""
    (text,) = told(limited("14Gi"), "memory")
    assert text == (
        f"the limit 14Gi is below the 15.0 GiB of bfloat16 weights of {MODEL}, which pass through RAM while they are "
        "loaded and count against it: a start that is slow or killed; at least 22Gi"
    )
    assert told(limited("15Gi"), "none") == []
    # Made FP8 of files in 16 bits, they are read as those.
    assert told(limited("14Gi", "--quantization=fp8"), "memory") == [text]
    assert len(told(limited("14.9Gi"), "memory")) == 1


@pytest.mark.parametrize(
    "change",
    [
        limited("14Gi", "--quantization=fp8", model="x/Llama-3.1-8B-FP8"),  # 8.5 GiB
        limited("14Gi", model="x/Llama-3.1-8B-Instruct-quantized.w8a8"),
        limited("14Gi", "--load-format=dummy"),
        limited("14Gi", model="someone/else"),
        limited("14Gi", model="meta-llama/Llama-3.1-8B-AWQ"),
    ],
)
def test_limits_of_models_that_are_smaller_or_not_known(change):
    assert told(change, "none") == []


def test_room_for_a_context_depends_on_the_type_of_the_cache():
    """100,000 tokens of 128 KiB are 13.1 GB; --gpu-memory-utilization=0.33 gives 28.0 GB, the weights take 16.1."""
    longest = ("--max-model-len=100000", "--gpu-memory-utilization=0.33")
    without = ("--max-model-len", "--gpu-memory-utilization")
    (text,) = told(with_arguments(*longest, without=without), "memory")
    assert text.startswith(
        "one request of --max-model-len=100000 needs more KV cache than there is"
    )
    for further in ("--kv-cache-dtype=fp8", "--kv-cache-memory-bytes=20G"):
        assert told(with_arguments(*longest, further, without=without), "none") == []


# --- walls ------------------------------------------------------------------------------------


def wall(by_kind):
    return by_kind["NetworkPolicy", "chat-8b"]["spec"]


@pytest.mark.parametrize(
    ("change", "is_shut"),
    [
        (lambda s: s.pop("ingress"), True),
        (lambda s: s.update(ingress=[]), True),
        (lambda s: s.update(ingress=[{"from": [{"podSelector": {}}], "ports": [{"port": 9000}]}]), True),
        (lambda s: s.update(ingress=[{"ports": [{"port": 8000, "protocol": "UDP"}]}]), True),
        (lambda s: s.update(ingress=[{"ports": [{"port": "web"}]}]), True),
        (lambda s: s.update(ingress=[{}]), False),
        (lambda s: s.update(ingress=[{"ports": [{"port": 8000}]}]), False),
        (lambda s: s.update(ingress=[{"ports": [{"port": 7000, "endPort": 9000}]}]), False),
        (lambda s: s.update(ingress=[{"ports": [{"protocol": "TCP"}]}]), False),
        (lambda s: (s.update(policyTypes=["Egress"]), s.pop("ingress")), False),
        (lambda s: (s.pop("policyTypes"), s.pop("ingress")), True),
    ],
)  # fmt: skip
def test_a_policy_that_admits_nobody(change, is_shut):
    found = told(lambda k, o: change(wall(k)), "network-policy")
    assert len(found) == is_shut
    if is_shut:
        assert "admits nobody to " in found[0]
        assert "neither clients nor Prometheus reach chat-8b" in found[0]


def test_what_another_policy_admits_counts():
    def change(by_kind, objects):
        second = copy.deepcopy(by_kind["NetworkPolicy", "chat-8b"])
        second["metadata"]["name"] = "second"
        objects.append(second)
        wall(by_kind)["ingress"] = []

    assert told(change, "none") == []


def shut_in(by_kind, objects):
    wall(by_kind)["egress"] = []


def test_a_policy_that_lets_nothing_out_before_a_model_of_a_hub():
    def change(by_kind, objects):
        shut_in(by_kind, objects)
        vllm(by_kind)["env"] = [e for e in vllm(by_kind)["env"] if e["name"] != "HF_HUB_OFFLINE"]
        vllm(by_kind)["args"][0] = "meta-llama/Llama-3.1-8B"

    (text,) = told(change, "network-policy")
    assert text.startswith(
        "lets nothing out, not even to DNS: chat-8b looks for meta-llama/Llama-3.1-8B at its hub"
    )
    assert told(shut_in, "none") == []  # the weights are on a volume


# --- claims -----------------------------------------------------------------------------------


def claim(name):
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "50Gi"}}},
    }


def test_a_claim_that_is_called_otherwise():
    (text,) = told(lambda k, o: o.append(claim("weights")), "claim")
    assert text == (
        "PersistentVolumeClaim model-weights is not among these files, weights is and no pod uses it; "
        "claimName: weights"
    )


def test_claims_that_other_pods_mount_say_nothing_of_one_that_is_elsewhere():
    def change(by_kind, objects):
        objects.append(claim("cache"))
        volume = {"name": "more", "persistentVolumeClaim": {"claimName": "cache"}}
        pod(by_kind)["volumes"].append(volume)

    assert told(change, "none") == []
    _, found = broken(change)
    (needed,) = [f for f in found if f.rule == "claim"]
    assert needed.kind == "needs"
