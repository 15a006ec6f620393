"""`twin import`: manifests as a scenario, with the article's as the example; each repair shows the next fault."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.runs import run
from twin.cluster.adapter import adapter_queries
from twin.cluster.manifests import guess_model, import_manifests
from twin.errors import InputError
from twin.report.json_summary import summarize
from twin.scenario import load_scenario
from twin.scenario_yaml import parse_all

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def manifests(twin_data):
    path = Path(twin_data).parent / "cases" / "article-manifest.yaml"
    if not path.is_file():
        pytest.skip("the article's manifest is not beside the third-party data")
    return path


@pytest.fixture(scope="module")
def imported(manifests):
    return import_manifests(parse_all(manifests.read_text(encoding="utf-8"), "article"))


def test_what_the_article_says(imported):
    document = imported.document
    assert document["model"] == "meta-llama/Llama-3.1-70B"
    assert document["hardware"] == {"gpu": "H100", "tensor_parallel_size": 1}
    assert document["engine"] == {
        "gpu_memory_utilization": 0.85,
        "max_model_len": 8192,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 16384,
        "enable_prefix_caching": True,
    }
    cluster = document["cluster"]
    assert cluster["replicas"] == 3
    assert cluster["probes"]["liveness"] == {"initialDelaySeconds": 60, "periodSeconds": 30}
    assert cluster["hpa"]["maxReplicas"] == 10
    assert "scaleTargetRef" not in cluster["hpa"]


def test_what_is_wrong_with_it_is_listed(imported):
    told = "\n".join(imported.faults)
    for part in (
        "no argument --scheduler-policy and would not start; it has --scheduling-policy",
        "no argument --disable-log-requests",
        "VLLM_SCHEDULER_WAIT_MS_ONLINE",
        "port 8080 for metrics",
        "every apply sets the count back",
        "no metric vllm_request_queue_length and no rule here defines it",
        "rate(vllm:e2e_request_latency_seconds_bucket[5m])",
    ):
        assert part in told
    left = "\n".join(imported.left_out)
    for part in ("podAntiAffinity", "volumes model-volume", "memory, cpu"):
        assert part in left
    assumed = "\n".join(imported.assumed)
    for part in (
        "model meta-llama/Llama-3.1-70B for /models/llama-3-70b",
        "traffic",
        "cold starts",
        "nodes",
    ):
        assert part in assumed


def twin(*arguments, **options):
    command = [sys.executable, "-m", "twin", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_the_command(manifests, tmp_path):
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "all.yaml").write_bytes(manifests.read_bytes())
    out = tmp_path / "scenario.yaml"
    done = twin("import", folder, "--out", out)
    assert done.returncode == 0
    assert done.stdout == ""
    assert "wrong: vLLM has no argument --scheduler-policy" in done.stderr
    text = out.read_text(encoding="utf-8")
    assert "# assumed: GPU H100" in text
    # As imported it is refused, with the arithmetic.
    refused = twin("run", out)
    assert refused.returncode == 2
    for part in (
        "does not fit on H100",
        "-141.11 GB  weights",
        "71.92 GB  too little, before any KV cache",
    ):
        assert part in refused.stderr
    started = twin("run", out, "--set", "hardware.tensor_parallel_size=4", "--set", "run.until=300")
    assert started.returncode == 0
    assert "pods that never appear: no PriorityClass with name system-high-priority" in " ".join(
        started.stdout.split()
    )


QUEUE = "vllm_request_queue_length"
QUERIES = {
    QUEUE: "vllm:num_requests_waiting",
    "vllm_request_latency_p99_ms": "1000 * histogram_quantile(0.99, "
    "rate(vllm:e2e_request_latency_seconds_bucket[5m]))",
}
REPAIRS = (
    ("hardware.tensor_parallel_size=4", "traffic.0.duration=900"),
    ("cluster.pod.priority_class=llm-online", "cluster.priority_classes=[llm-online]"),
    ("cluster.pod.gpu_products=[NVIDIA-H100-80GB-HBM3]",),
    ("cluster.pod.tolerates_gpu_taint=true",),
    (
        "cluster.probes.startup={periodSeconds: 10, failureThreshold: 60}",
        "cluster.probes.readiness.initialDelaySeconds=0",
    ),
    tuple(f"cluster.metrics.queries.{name}={query}" for name, query in QUERIES.items()),
    (
        f"cluster.metrics.queries={{{QUEUE}: 'vllm:num_requests_waiting'}}",
        f"cluster.hpa.metrics=[{{type: Pods, pods: {{metric: {{name: {QUEUE}}}, "
        "target: {type: AverageValue, averageValue: '5'}}}]",
    ),
)


@pytest.fixture(scope="module")
def ladder(imported):
    """Summaries of the runs with the first n repairs, n = 1, 2, ..."""
    told = []
    for number in range(1, len(REPAIRS) + 1):
        overrides = [text for repair in REPAIRS[:number] for text in repair]
        if number == len(REPAIRS):
            overrides = [text for text in overrides if "latency_p99_ms=" not in text]
        told.append(summarize(run(imported.document, *overrides)))
    return told


def test_pods_that_never_appear(ladder):
    for told, why in zip(
        ladder, ("no PriorityClass", "no node matches", "does not tolerate"), strict=False
    ):
        assert why in told["fleet"]["obstacle"]
        assert told["totals"]["completed"] == 0
        assert told["cost"]["gpu_hours"] == 0


def test_a_crash_loop_because_liveness_comes_before_ready(ladder):
    told = ladder[3]
    assert told["fleet"]["obstacle"] is None
    assert told["fleet"]["restarts"] > 12
    assert "liveness probe" in told["fleet"]["killed"]
    assert told["totals"]["completed"] == 0
    assert told["cost"]["gpu_hours"] > 2.5
    assert told["fleet"]["never_ready"] == 3


def test_it_serves_but_never_scales_without_rules(ladder):
    told = ladder[4]
    assert told["fleet"]["restarts"] == 0
    assert told["totals"]["completed"] > 1000
    assert told["fleet"]["looks_with_an_error"] == told["fleet"]["looks"]
    assert told["fleet"]["replicas"]["wanted"]["max"] == 3


def test_a_latency_per_pod_multiplies_the_replicas(ladder):
    """Nobody waits, and it goes to ten all the same: a long reply takes longer than three seconds at any load."""
    told = ladder[5]
    assert told["fleet"]["replicas"]["wanted"]["max"] == 10
    assert told["tiers"]["ONLINE"]["queue_s"]["p99"] < 1
    up = [row for row in told["fleet"]["decisions"] if row["to"] > row["from"]]
    assert all(row["metric"] == "vllm_request_latency_p99_ms" for row in up)
    assert "ScaleUpLimit" in {row["limit"] for row in up}


def test_the_queue_alone_asks_for_what_is_needed(ladder):
    dear, cheap = ladder[5], ladder[6]
    assert cheap["fleet"]["replicas"]["wanted"]["max"] == 3
    assert cheap["cost"]["gpu_hours"] < 0.5 * dear["cost"]["gpu_hours"]
    ttft = [told["tiers"]["ONLINE"]["ttft_s"]["p99"] for told in (dear, cheap)]
    assert ttft[1] < ttft[0] + 0.1


# --- other manifests ----------------------------------------------------------------------

DEPLOYMENT = """
kind: Deployment
apiVersion: apps/v1
metadata: {name: chat}
spec:
  selector: {matchLabels: {app: chat}}
  template:
    spec:
      terminationGracePeriodSeconds: 90
      tolerations: [{key: nvidia.com/gpu, operator: Exists}]
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.32.0
        command: [vllm, serve, meta-llama/Llama-3.1-8B, --max-num-seqs, "64", --no-enable-prefix-caching,
                  --scheduling-policy=priority, --shutdown-timeout=60]
        lifecycle: {preStop: {exec: {command: [sh, -c, sleep 15]}}}
        resources: {limits: {nvidia.com/gpu: 1}}
        startupProbe: {httpGet: {path: /v1/models, port: 8000}, periodSeconds: 10, failureThreshold: 60}
        readinessProbe: {httpGet: {path: /v1/models, port: 8000}, periodSeconds: 5}
"""
SCALED = """
kind: ScaledObject
apiVersion: keda.sh/v1alpha1
metadata: {name: chat}
spec:
  scaleTargetRef: {name: chat}
  minReplicaCount: 1
  maxReplicaCount: 5
  triggers:
  - type: prometheus
    metadata: {serverAddress: "http://prometheus", query: "sum(vllm:num_requests_waiting)", threshold: "5"}
"""


def test_a_sound_deployment_runs_as_imported():
    found = import_manifests(list(yaml.safe_load_all(f"{DEPLOYMENT}---{SCALED}")))
    assert found.faults == []
    document = found.document
    assert document["engine"] == {"max_num_seqs": 64, "enable_prefix_caching": False}
    assert document["policy"] == "vllm-priority"
    assert document["cluster"]["pod"] == {
        "gpu_products": ["NVIDIA-H100-80GB-HBM3"],
        "tolerates_gpu_taint": True,
        "termination_grace_period": 90.0,
        "shutdown_timeout": 60.0,
        "pre_stop": 15.0,
    }
    assert load_scenario(document).cluster.fleet.scaler.keda.max_replicas == 5
    assert summarize(run(document, "run.until=400"))["totals"]["completed"] > 500


@pytest.mark.parametrize(
    ("documents", "name", "told"),
    [
        (
            "kind: Service\nmetadata: {name: a}",
            None,
            "no Deployment whose container runs vLLM; found Service",
        ),
        (
            f"{DEPLOYMENT}---{DEPLOYMENT.replace('chat', 'code')}",
            None,
            "several Deployments run vLLM: chat, code",
        ),
        (DEPLOYMENT, "other", "no Deployment called other"),
    ],
)
def test_which_deployment(documents, name, told):
    with pytest.raises(InputError, match=told):
        import_manifests(list(yaml.safe_load_all(documents)), name)
    several = list(yaml.safe_load_all(f"{DEPLOYMENT}---{DEPLOYMENT.replace('chat', 'code')}"))
    assert import_manifests(several, "code").document["name"] == "code"


def test_two_hpas_on_one_deployment():
    hpa = {
        "kind": "HorizontalPodAutoscaler",
        "spec": {
            "scaleTargetRef": {"name": "chat"},
            "maxReplicas": 4,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": "vllm:num_requests_waiting"},
                        "target": {"type": "AverageValue", "averageValue": "5"},
                    },
                }
            ],
        },
    }
    both = [hpa | {"metadata": {"name": name}} for name in ("a", "b")]
    found = import_manifests([*yaml.safe_load_all(DEPLOYMENT), *both])
    assert found.document["cluster"]["hpa_rivals"] == ["b"]
    assert "none of them will" in found.faults[0]


@pytest.mark.parametrize(
    ("written", "name"),
    [("/models/llama-3-70b", "meta-llama/Llama-3.1-70B"), ("Qwen3-14B-Instruct", "Qwen/Qwen3-14B"),
     ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"), ("/models/mine", "/models/mine")],
)  # fmt: skip
def test_models(written, name):
    assert guess_model(written) == name


@pytest.mark.parametrize(
    ("content", "told"), [("a: [", "not readable as YAML"), (b"\xff\xfe\x00", "not text in UTF-8")]
)
def test_files_that_cannot_be_read(tmp_path, content, told):
    path = tmp_path / "a.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = twin("import", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    path.unlink()
    assert "holds no .yaml" in twin("import", tmp_path).stderr
    assert "cannot be read" in twin("import", tmp_path / "none").stderr


# --- values of the wrong type -------------------------------------------------------------

WRONG = ("three", "0x1F", "", 3.7, True, -5, [], ["a"], {}, {"a": 1}, None)


def paths_of(value, path=()):
    """Where the scalars of a document are."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in pairs:
            yield from paths_of(below, (*path, key))
    else:
        yield path


def with_value(value, path, new):
    """A copy with another value at the path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = with_value(value[path[0]], path[1:], new)
    return copy


def test_a_scalar_of_another_type_is_one_line_and_no_traceback(manifests):
    documents = parse_all(manifests.read_text(encoding="utf-8"), "article")
    told = {}
    for path in paths_of(documents):
        for new in WRONG:
            try:
                import_manifests(with_value(documents, path, new), None, ["a.yaml"] * 2)
            except InputError as error:
                told[path, repr(new)] = str(error)
    assert len(told) > 200
    assert not any("\n" in text for text in told.values())
    replicas = told[(0, "spec", "replicas"), "'three'"]
    assert replicas == (
        "a.yaml: Deployment inference-service-online: spec.replicas: must be a whole number, without quotes, "
        "got 'three'"
    )


def test_every_section_of_another_type(manifests):
    documents = parse_all(manifests.read_text(encoding="utf-8"), "article")
    sections = {path[:n] for path in paths_of(documents) for n in range(1, len(path))}
    for path in sections:
        for new in ("three", 3, True, [3], ["a"], {"a": 1}, {3: 1}, [{}], [None]):
            with contextlib.suppress(InputError):
                import_manifests(with_value(documents, path, new))


@pytest.mark.parametrize("argument", ["--tensor-parallel-size=abc", "--shutdown-timeout=soon"])
def test_an_argument_that_must_be_a_number(argument):
    text = DEPLOYMENT.replace("--shutdown-timeout=60", argument)
    with pytest.raises(InputError, match=f"argument {argument.partition('=')[0]}: must be a"):
        import_manifests(list(yaml.safe_load_all(text)))


def test_what_a_run_would_refuse_is_said_with_the_manifests_place(tmp_path):
    path = tmp_path / "a.yaml"
    text = DEPLOYMENT.replace('--max-num-seqs, "64"', "--max-num-seqs=-5")
    path.write_text(text.replace("periodSeconds: 5}", "initialDelaySeconds: -60}"))
    out = tmp_path / "out.yaml"
    done = twin("import", path, "--out", out)
    assert done.returncode == 0
    assert "wrong: argument --max-num-seqs: must be >= 1, got -5\n" in done.stderr
    place = "Deployment: containers: readinessProbe.initialDelaySeconds"
    assert f"wrong: {place}: must be >= 0, got -60\n" in done.stderr
    before = out.read_bytes()
    scaled = SCALED.replace("minReplicaCount: 1", "minReplicaCount: 7")
    path.write_text(f"{DEPLOYMENT}---{scaled}")
    again = twin("import", path, "--out", out)
    assert again.returncode == 2
    assert "is there already; --force overwrites it" in again.stderr
    assert out.read_bytes() == before
    forced = twin("import", path, "--out", out, "--force")
    assert forced.returncode == 0
    assert out.read_bytes() != before
    assert "wrong: ScaledObject: spec" in forced.stderr


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("sum by (<<.GroupBy>>) (<<.Series>>{<<.LabelMatchers>>})", "vllm:a"),
        ("sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)", "vllm:a"),
        ('sum by (<<.GroupBy>>) (vllm:a{engine="0",<<.LabelMatchers>>} + vllm:b{<<.LabelMatchers>>})',
         'vllm:a{engine="0"} + vllm:b'),
        ("max_over_time(<<.Series>>{<<.LabelMatchers>>}[1m])", "max_over_time(vllm:a[1m])"),
        ("avg(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)", None),
    ],
)  # fmt: skip
def test_rules_of_the_adapter_say_what_a_metric_is(rule, expected):
    entry = {
        "seriesQuery": 'vllm:a{pod!=""}',
        "name": {"matches": ".*", "as": "load"},
        "metricsQuery": rule,
    }
    wanted = {} if expected is None else {"load": expected}
    assert (
        adapter_queries([{"rules": {"custom": [entry]}}, {"kind": "Pod", "rules": [entry]}, None])
        == wanted
    )
    assert adapter_queries([{"rules": [entry]}]) == wanted
    assert (
        adapter_queries(
            [{"externalRules": [entry]}, {"rules": "x"}, {"rules": {"custom": [1, {}]}}]
        )
        == wanted
    )
