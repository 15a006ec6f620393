"""`twin-real manifests --out`: what was simulated is what is rendered, to the byte of the policy, and reads back."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from real.manifest_lint.check import lint
from real.manifest_lint.objects import Manifest
from real.manifest_names import label_problem
from real.manifests import read_scenario, render
from real.manifests_numbers import MARGIN, cold_start_of, numbers_of, start_quantile_s
from real.manifests_pod import GPU
from real.manifests_predict import Prediction, predict
from real.manifests_rules import groups
from real.manifests_scaling import scoped
from real.manifests_setup import FINGERPRINT, Setup
from real.manifests_text import object_name, written
from scripts.render_k8s import PATCHED, WHOLE
from tests.k8s import NAMES, ROOT, SCENARIOS, kubectl, of_kind, rendered, setup_of
from twin.cluster.manifests import arguments_of, import_manifests
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.scenario_yaml import parse_all
from twin.scheduling import PolicyConfig, fingerprint


def command(*words):
    run = [sys.executable, "-m", "real", "manifests", *map(str, words)]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True)


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_reading_back_gives_the_same_scenario(name):
    setup, result = setup_of(name), rendered(name)
    texts = [d for text in result.files.values() for d in parse_all(text, "file")]
    back = read_scenario([d for d in texts if d.get("kind") == "ConfigMap"])
    assert back.to_dict() == setup.scenario.to_dict()
    assert back.policy_fingerprint == setup.scenario.policy_fingerprint


@pytest.mark.parametrize("name", ["chat-8b", "docs-70b"])
def test_rendering_what_was_read_back_gives_the_same_bytes(name):
    setup = setup_of(name)
    back = read_scenario(rendered(name).objects)
    again = Setup(back, numbers_of(back, setup.prediction.longest_s), setup.prediction)
    assert render(again).files == rendered(name).files


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_of_the_server_is_the_scenarios_to_the_byte(name):
    scenario, objects = setup_of(name).scenario, rendered(name).objects
    deployment = of_kind(objects, "Deployment", name)
    pod = deployment["spec"]["template"]
    config = json.loads(dict(arguments_of(pod["spec"]["containers"][0]))["additional-config"])
    policy = config["twin"]["policy"]
    assert json.dumps(policy) == json.dumps(scenario.policy.to_dict())
    marks = [deployment["metadata"]["annotations"], pod["metadata"]["annotations"]]
    assert {mark[FINGERPRINT] for mark in marks} == {fingerprint(PolicyConfig.from_dict(policy))}


@pytest.mark.parametrize("name", ["chat-8b", "docs-70b"])
def test_what_twin_import_reads_off_the_objects_is_what_was_simulated(name):
    """Not from the ConfigMap: from the Deployment, the autoscaler and the PriorityClass themselves."""
    scenario = setup_of(name).scenario
    texts = [text for file, text in rendered(name).files.items() if file != "kustomization.yaml"]
    objects = [d for text in texts for d in parse_all(text, "file") if d.get("kind") != "ConfigMap"]
    found = import_manifests(objects, name)
    assert not found.faults
    own, read = scenario.document, found.document
    # Quantised weights are an argument of another name, which the import leaves to the reader.
    assert read["hardware"]["gpu"] == own["hardware"]["gpu"]
    assert read["hardware"]["tensor_parallel_size"] == own["hardware"]["tensor_parallel_size"]
    for key, value in read["engine"].items():
        wanted = own["engine"][key]
        assert value == wanted or (wanted is None and value == getattr(scenario.engine, key)), key
    cluster, mine = read["cluster"], own["cluster"]
    for probe, keys in cluster["probes"].items():
        assert keys.items() <= ({"failureThreshold": 3} | mine["probes"][probe]).items()
    for key in ("pre_stop", "shutdown_timeout", "termination_grace_period"):
        assert cluster["pod"][key] == mine["pod"][key]
    assert cluster.get("metrics", {}).get("queries", {}) == mine["metrics"]["queries"]
    hpa, keda = cluster.get("hpa"), cluster.get("keda")
    for trigger in (keda or {}).get("triggers", ()):  # queries count the service's own pods only
        query = trigger["metadata"].get("query")
        if query is not None:
            scope = MINE.replace("NAME", name)
            assert query.count(scope) == query.count("vllm:")
            trigger["metadata"]["query"] = query.replace(f"{{{scope}}}", "")
    specs = load_scenario(own | {"cluster": mine | {"hpa": hpa, "keda": keda}}).cluster.fleet.scaler
    assert (specs.hpa, specs.keda) == (
        scenario.cluster.fleet.scaler.hpa,
        scenario.cluster.fleet.scaler.keda,
    )


MINE = 'namespace="inference",pod=~"NAME-[a-z0-9]+-[a-z0-9]{5}"'


@pytest.mark.parametrize("name", NAMES)
def test_kubectl_builds_it_and_loses_nothing(name, tmp_path):
    for file, text in rendered(name).files.items():
        (tmp_path / file).write_text(text)
    built = subprocess.run([kubectl(), "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert not built.stderr

    def named(objects):
        return sorted((o["kind"], o["metadata"]["name"]) for o in objects)

    objects = list(yaml.safe_load_all(built.stdout))
    assert named(objects) == named(rendered(name).objects)
    here = {o["metadata"].get("namespace") for o in objects} - {None}
    assert here == {"inference"}


# --- what is derived ------------------------------------------------------------------------------


def scenario(**changes):
    document = load_scenario(SCENARIOS / "chat-8b.yaml").to_dict()
    document["cluster"] |= {"hpa": None, "metrics": {}, "probes": {}, "pod": {}} | changes.pop(
        "cluster", {}
    )
    return load_scenario(document | changes)


def container_of(setup):
    return of_kind(render(setup).objects, "Deployment", setup.name)["spec"]["template"]["spec"][
        "containers"
    ][0]


def plain_setup(loaded, longest_s=0.0):
    return Setup(loaded, numbers_of(loaded, longest_s), Prediction())


def test_the_startup_probe_allows_the_predicted_start_with_margin():
    """kserve/kserve#5062: a model that takes 240 s to load."""
    phases = {"process": 0, "weights": 240, "compile": 0, "graphs": 0, "warm_up": 0}
    loaded = scenario(cluster={"cold_start": {"phases": phases}})
    container = container_of(plain_setup(loaded))
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert (startup["failureThreshold"] - 1) * startup["periodSeconds"] >= MARGIN * 240
    # Liveness waits for it, and nothing delays a start that is faster.
    assert "initialDelaySeconds" not in {**startup, **liveness, **container["readinessProbe"]}
    assert container["readinessProbe"]["httpGet"]["path"] == "/v1/models"


def test_the_p99_of_a_start_is_that_of_the_starts_the_twin_draws():
    """Against the exact distribution: of the sum of a fixed time and one uniform one."""
    phases = {
        "process": 10,
        "weights": {"uniform": [100, 200]},
        "compile": 0,
        "graphs": 0,
        "warm_up": 5,
    }
    loaded = scenario(cluster={"cold_start": {"phases": phases}})
    found = start_quantile_s(cold_start_of(loaded), 0.99, 1)
    assert found == pytest.approx(10 + 199 + 5, abs=0.5)


def test_a_drain_is_as_long_as_the_longest_simulated_request_with_margin():
    traffic = load_scenario(SCENARIOS / "chat-8b.yaml").to_dict()["traffic"]
    loaded = scenario(traffic=[traffic[0] | {"duration": 60}])
    prediction = predict(loaded)
    numbers = numbers_of(loaded, prediction.longest_s)
    assert numbers.shutdown_timeout_s >= MARGIN * prediction.longest_s > 5
    assert numbers.grace_s > numbers.pre_stop_s + numbers.shutdown_timeout_s
    spec = of_kind(render(Setup(loaded, numbers, prediction)).objects, "Deployment", "chat-8b")
    pod = spec["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == numbers.grace_s
    written_timeout = dict(arguments_of(pod["containers"][0]))["shutdown-timeout"]
    assert written_timeout == str(numbers.shutdown_timeout_s)


def test_what_the_scenario_says_wins_over_what_would_be_derived():
    setup = setup_of("chat-8b")
    written_pod = setup.scenario.document["cluster"]["pod"]
    assert setup.numbers.pre_stop_s == written_pod["pre_stop"]
    assert setup.numbers.shutdown_timeout_s == written_pod["shutdown_timeout"]
    assert not [note for note in rendered("chat-8b").notes if note.startswith("derived")]
    assert [n for n in render(plain_setup(scenario())).notes if n.startswith("derived")]


def test_memory_holds_weights_and_shared_memory():
    eight, seventy = setup_of("chat-8b").numbers, setup_of("docs-70b").numbers
    assert eight.weights_bytes < eight.memory_bytes - eight.shm_bytes < 2 * eight.weights_bytes
    assert seventy.weights_bytes < seventy.memory_bytes
    assert seventy.memory_bytes > 70e9  # 70B in FP8
    limits = container_of(setup_of("docs-70b"))["resources"]
    assert limits["limits"]["nvidia.com/gpu"] == limits["requests"]["nvidia.com/gpu"] == 2
    assert "cpu" not in limits["limits"]


def test_queries_are_scoped_in_every_selector_and_nowhere_else():
    assert scoped("sum(vllm:a)", 'x="1"') == 'sum(vllm:a{x="1"})'
    found = scoped(
        'vllm:num_requests_waiting{engine="0"} + rate(vllm:num_requests_waiting_total[1m])', 'x="1"'
    )
    assert found == (
        'vllm:num_requests_waiting{engine="0",x="1"} + rate(vllm:num_requests_waiting_total{x="1"}[1m])'
    )


def test_names_and_texts_that_yaml_or_kubernetes_would_mistake():
    assert object_name("04 Auto_scaling/!") == "llm-04-auto-scaling"
    assert len(object_name("x" * 90)) == 40
    alike = ["x" * 90, "x" * 91, "x" * 40, "東京", "大阪", "!", "?", "chat ß", "chat ä", "chat"]
    assert len({object_name(name) for name in alike}) == len(alike)
    assert not [name for name in alike if label_problem(object_name(name))]
    document = {"a": "yes", "b": "1e3", "c": "0x1", "d": "12:30", "e": "plain", "f": "two\nlines\n"}
    text = written([document])
    assert yaml.safe_load(text) == document
    assert parse_all(text, "text") == [document]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": {"router": "prefix_affinity"}}, "looks into the engines"),
        ({"cluster": {"pod": {"pods_per_replica": 2}}, "hardware": {"gpu": "H100", "tensor_parallel_size": 2}},
         "LeaderWorkerSet"),
        ({"cluster": {"kpa": {"max_replicas": 4, "target": 20}}}, "AIBrix"),
        ({"cluster": {"pod": {"priority_class": "system-high-priority"}}}, "reserved"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused_with_the_way_out(changes, words):
    with pytest.raises(InputError, match=words):
        render(plain_setup(scenario(**changes)))


def test_a_metric_that_no_rule_defines_is_refused():
    metric = {
        "type": "Pods",
        "pods": {
            "metric": {"name": "queue"},
            "target": {"type": "AverageValue", "averageValue": 5},
        },
    }
    loaded = scenario(cluster={"hpa": {"maxReplicas": 3, "metrics": [metric]}})
    with pytest.raises(InputError, match=r"cluster\.metrics\.queries"):
        render(plain_setup(loaded))


def test_a_probe_that_kills_starts_is_not_written(tmp_path):
    source = SCENARIOS / "chat-8b.yaml"
    run = command(source, "--set", "cluster.probes.startup.failureThreshold=3", "--set",
                  "traffic.0.duration=5", "--out", tmp_path / "o")  # fmt: skip
    assert run.returncode == 2
    assert "startupProbe kills a container after 20 s" in run.stderr
    assert not (tmp_path / "o").exists()


def test_the_command_writes_a_folder_once(tmp_path):
    words = [SCENARIOS / "laptop.yaml", "--tiny", "--out", tmp_path / "o"]
    first = command(*words)
    assert first.returncode == 0, first.stderr
    names = {p.name for p in (tmp_path / "o").iterdir()}
    assert {"kustomization.yaml", "deployment.yaml", "proxy.yaml", "scenario.yaml"} <= names
    assert "priorityclass.yaml" not in names
    again = command(*words)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert command(*words, "--force").returncode == 0
    for wrong in (
        [],
        ["--out", tmp_path],
        ["--check", tmp_path / "none"],
        [*words, "--check", tmp_path],
    ):
        run = command(*wrong)
        assert run.returncode == 2, run.stdout
        assert run.stderr.startswith("error: ")


DIGEST = f"sha256:{'0f' * 32}"


@pytest.mark.parametrize(
    ("image", "pinned"),
    [
        ("reg:5000/a/b:1.2.3", {"name": "reg:5000/a/b", "newTag": "1.2.3"}),
        (f"reg:5000/a/b@{DIGEST}", {"name": "reg:5000/a/b", "digest": DIGEST}),
        (f"reg:5000/a/b:1.2.3@{DIGEST}", {"name": "reg:5000/a/b", "digest": DIGEST}),
    ],
)
def test_kustomize_keeps_tag_and_digest_of_the_image(image, pinned, tmp_path):
    files = render(replace(setup_of("laptop"), image=image)).files
    assert yaml.safe_load(files["kustomization.yaml"])["images"] == [pinned]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    built = subprocess.run([kubectl(), "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    deployment = of_kind(list(yaml.safe_load_all(built.stdout)), "Deployment", "laptop")
    used = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert used.startswith(pinned["name"])
    assert used.endswith(pinned.get("digest", pinned.get("newTag")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"namespace": "In_ference"}, "--namespace: must be of lower-case letters"),
        ({"namespace": "n" * 64}, "--namespace: must be at most 63"),
        ({"monitoring_namespace": "a.b"}, "--monitoring: must be"),
        ({"models_claim": "Weights"}, "--models-claim: must be"),
        ({"image": "Reg/UPPER:1"}, "is no name of an image"),
        ({"image": "a b:1"}, "is no name of an image"),
        ({"image": "reg:5000/a/b"}, "name a tag"),
        ({"image": "a@sha256:12"}, "is no name of an image"),
    ],
)
def test_names_that_kubernetes_refuses_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        render(replace(setup_of("laptop"), **changes))


def test_every_alert_says_whose_it_is():
    setup = replace(setup_of("chat-8b"), namespace="tenant-b")
    alerts = [rule for group in groups(setup) for rule in group["rules"] if "alert" in rule]
    assert len(alerts) >= 7
    for alert in alerts:
        assert alert["labels"]["service"] == "chat-8b"
        assert alert["labels"]["namespace"] == "tenant-b"


def test_where_a_fallback_is_written_lost_metrics_lead_to_it():
    """With ignoreNullValues true, as by default, no series means no load, and the minimum instead."""
    overlay = of_kind(rendered("docs-70b").objects, "ScaledObject")
    component = yaml.safe_load((ROOT / "k8s/components/keda/scaledobject.yaml").read_text())
    for found in (overlay, component):
        assert found["spec"]["fallback"]["replicas"] > found["spec"]["minReplicaCount"]
        for trigger in found["spec"]["triggers"]:
            if trigger["type"] == "prometheus":
                assert trigger["metadata"]["ignoreNullValues"] == "false"


@pytest.mark.parametrize(
    ("pod", "is_own", "is_serving"),
    [
        ("docs-70b-7d9c5b7f4d-x2v4z", True, True),
        ("docs-70b-standby-7d9c5b7f4d-x2v4z", False, True),
        ("docs-70b-proxy-7d9c5b7f4d-x2v4z", False, False),
        ("docs-70b-placeholder-7d9c5b7f4d-x2v4z", False, False),
        ("docs-70b-eu-7d9c5b7f4d-x2v4z", False, False),
        ("eu-docs-70b-7d9c5b7f4d-x2v4z", False, False),
    ],
)
def test_queries_count_the_pods_of_the_deployment_and_no_others(pod, is_own, is_serving):
    """Prometheus matches whole values. A service whose name begins alike is another one."""
    setup = setup_of("docs-70b")
    assert bool(re.fullmatch(setup.pods, pod)) == is_own
    assert bool(re.fullmatch(setup.serving_pods, pod)) == is_serving
    scaled = of_kind(rendered("docs-70b").objects, "ScaledObject")["spec"]["triggers"]
    assert f'pod=~"{setup.pods}"' in scaled[0]["metadata"]["query"]
    rules = json.dumps(groups(setup))
    assert rules.count("pod=~") == rules.count(json.dumps(f'pod=~"{setup.serving_pods}"')[1:-1])
    for board in ("operations", "tiers"):
        text = (ROOT / "k8s" / "dashboards" / f"{board}.json").read_text()
        for found in re.findall(r'pod=~\\"\$service(.+?)\\"', text):
            own = re.fullmatch("docs-70b" + found, pod)
            assert bool(own) == (is_serving if "proxy" not in found else "-proxy-" in pod)


def test_a_name_that_is_not_the_scenarios_is_said():
    setup = setup_of("laptop")
    document = setup.scenario.to_dict() | {"name": "Köln Chat"}
    result = render(replace(setup, scenario=load_scenario(document)))
    (note,) = [note for note in result.notes if "named" in note]
    name = of_kind(result.objects, "ServiceAccount")["metadata"]["name"]
    assert name.startswith("k-ln-chat-")
    assert name in note
    assert "Köln Chat" in note
    assert not [note for note in rendered("laptop").notes if "are named" in note]


def test_a_namespace_that_every_cluster_has_is_not_rendered():
    for name, wanted in (("default", 0), ("tenant-b", 1)):
        result = render(replace(setup_of("laptop"), namespace=name))
        assert sum(o["kind"] == "Namespace" for o in result.objects) == wanted
        kustomization = yaml.safe_load(result.files["kustomization.yaml"])
        assert kustomization["namespace"] == name
        assert sorted(kustomization["resources"]) == sorted(
            set(result.files) - {"kustomization.yaml"}
        )


def test_two_sleepers_get_a_budget():
    document = setup_of("docs-70b").scenario.to_dict()
    document["cluster"]["warm_pool"]["standby"] = 2
    objects = render(replace(setup_of("docs-70b"), scenario=load_scenario(document))).objects
    assert not [f for f in lint([Manifest(o, "file") for o in objects]) if f.kind == "fault"]
    budget = of_kind(objects, "PodDisruptionBudget", "docs-70b-standby")["spec"]
    sleepers = of_kind(objects, "Deployment", "docs-70b-standby")["spec"]
    assert budget["selector"] == sleepers["selector"]
    assert (sleepers["replicas"], budget["maxUnavailable"]) == (2, 1)


# --- the files that are shipped -------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "name"), WHOLE.items())
def test_the_shipped_overlay_is_what_its_scenario_renders(folder, name):
    """After a change of the renderer, of the scenario or of the figures of the twin: make k8s."""
    there = {
        p.name: p.read_text() for p in (ROOT / "k8s" / folder).iterdir() if p.suffix == ".yaml"
    }
    assert there == dict(rendered(name).files)


@pytest.mark.parametrize("overlay", PATCHED)
def test_the_patches_of_an_overlay_make_what_the_scenario_with_its_gpu_renders(overlay):
    _, overrides = PATCHED[overlay]
    loaded = load_scenario(SCENARIOS / "chat-8b.yaml", overrides)
    prediction = predict(loaded)
    setup = Setup(loaded, numbers_of(loaded, prediction.longest_s), prediction)
    built = subprocess.run(
        [kubectl(), "kustomize", str(ROOT / "k8s" / "overlays" / overlay)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    wanted = {(o["kind"], o["metadata"]["name"]): o for o in render(setup).objects}
    for found in yaml.safe_load_all(built.stdout):
        own = wanted.pop((found["kind"], found["metadata"]["name"]))
        found["metadata"].pop("namespace", None)
        assert found == own
    assert not wanted


def test_schedules_and_forecasts_become_triggers_of_keda():
    """KEDA's HPA takes the most of all triggers: a floor under the replicas, as in the simulation."""
    cluster = load_scenario(SCENARIOS / "docs-70b.yaml").to_dict()["cluster"]
    cluster["schedules"] = [{"start": "50 8 * * 1-5", "end": "0 10 * * 1-5", "min_replicas": 3}]
    cluster["prediction"] = {"forecaster": "seasonal_naive", "per_replica": 0.8, "horizon": 600}
    document = load_scenario(SCENARIOS / "docs-70b.yaml").to_dict() | {"cluster": cluster}
    loaded = load_scenario(document)
    scaled = of_kind(render(plain_setup(loaded)).objects, "ScaledObject")
    before = of_kind(rendered("docs-70b").objects, "ScaledObject")
    known = len(before["spec"]["triggers"])
    assert scaled["spec"]["triggers"][:known] == before["spec"]["triggers"]
    schedule, forecast = scaled["spec"]["triggers"][known:]
    assert schedule["metadata"] == {
        "timezone": "Etc/UTC", "start": "50 8 * * 1-5", "end": "0 10 * * 1-5", "desiredReplicas": "3",
    }  # fmt: skip
    assert forecast["metadata"]["threshold"] == "0.8"
    assert "[600s:60s] offset 85800s" in forecast["metadata"]["query"]
    cluster["prediction"]["forecaster"] = "holt_winters"
    with pytest.raises(InputError, match="no query of Prometheus"):
        render(plain_setup(load_scenario(document | {"cluster": cluster})))
    hpa = load_scenario(SCENARIOS / "chat-8b.yaml").to_dict()
    hpa["cluster"]["schedules"] = cluster["schedules"]
    with pytest.raises(InputError, match=r"cluster\.keda"):
        render(plain_setup(load_scenario(hpa)))


def test_sleepers_are_reached_through_the_door_only_and_counted_by_nobody():
    """Endpoints of development on loopback; the autoscaler's pods are not those of the standby."""
    objects = rendered("docs-70b").objects
    standby = of_kind(objects, "Deployment", "docs-70b-standby")["spec"]
    pod = standby["template"]["spec"]
    [vllm, _, door] = pod["containers"]
    arguments = dict(arguments_of(vllm))
    assert (arguments["host"], arguments["enable-sleep-mode"]) == ("127.0.0.1", "true")
    assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in vllm["env"]
    assert "ports" not in vllm
    text = of_kind(objects, "ConfigMap", "docs-70b-standby")["data"]["haproxy.cfg"]
    assert "status 404 unless { path_beg /v1/ } or { path /health /metrics }" in text
    assert door["ports"] == [{"name": "http", "containerPort": 8000}]
    replicas = of_kind(objects, "Deployment", "docs-70b")["spec"]
    labels = standby["template"]["metadata"]["labels"]
    assert not replicas["selector"]["matchLabels"].items() <= labels.items()
    # Awake they are behind the same Service.
    served = of_kind(objects, "Service", "docs-70b-pods")["spec"]["selector"]
    assert served.items() <= labels.items()
    assert served.items() <= replicas["template"]["metadata"]["labels"].items()
    assert "is_sleeping" in vllm["readinessProbe"]["exec"]["command"][-1]


def test_placeholders_give_way_and_hold_one_replicas_gpus():
    objects = rendered("docs-70b").objects
    spec = of_kind(objects, "Deployment", "docs-70b-placeholder")["spec"]
    pod = spec["template"]["spec"]
    assert spec["replicas"] == setup_of("docs-70b").scenario.cluster.fleet.warm_pool.placeholders
    low, own = (
        of_kind(objects, "PriorityClass", n) for n in ("docs-70b-placeholder", "docs-70b-serving")
    )
    assert low["value"] < 0 < own["value"]
    assert low["preemptionPolicy"] == "Never"
    assert own["preemptionPolicy"] == "PreemptLowerPriority"
    assert pod["containers"][0]["resources"]["limits"][GPU] == 2
    serving = of_kind(objects, "Deployment", "docs-70b")["spec"]["template"]["spec"]
    assert (
        pod["containers"][0]["image"] == serving["containers"][0]["image"]
    )  # so that it is on the node
