"""Kubernetes' own judgement: its API server takes the manifests, and its HPA controller scales beside the twin.

`make k8s-oracle` runs it against the 1.20.2 that scripts/build_control_plane.sh builds. Manifests are converted to that
version's APIs first. Each scaling scenario is simulated; then the real controller is handed the metric that the
twin's autoscaler saw, second by second, in real time, over pods that start as slowly as the twin's. Printed is the way
of the replicas in both. Status 1 if a manifest is refused or the replicas go another way.
"""

import copy
import json
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.control_plane import NAMESPACE, ControlPlane, Kubelet, MetricsApi, is_there
from scripts.render_k8s import WHOLE, rendered
from twin.clock import PS
from twin.scenario import load_scenario
from twin.simulation import simulate

METRIC = "llm-requests-inside"
LATE_S = 4
"""Seconds by which an order of the one may come before or after that of the other: both look once a second, the
controller's status lags behind its pods, and a metric is at most a second old."""

JUMP_S = 3
"""Counts that hold for less are not compared."""

COLD_S = 20


# --- manifests ----------------------------------------------------------------------------


def converted(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """An object in the APIs of 1.20; None for kinds that operators bring."""
    found = copy.deepcopy(dict(item))
    versions = {
        "policy/v1": "policy/v1beta1",
        "autoscaling/v2": "autoscaling/v2beta2",
    }
    group = found["apiVersion"].partition("/")[0]
    if group in ("monitoring.coreos.com", "keda.sh"):
        return None
    found["apiVersion"] = versions.get(found["apiVersion"], found["apiVersion"])
    found.get("spec", {}).pop("unhealthyPodEvictionPolicy", None)
    _old_hooks(found)
    return found


def _old_hooks(value: Any) -> None:
    """preStop sleeps came with 1.29."""
    if isinstance(value, dict):
        sleep = (
            value.get("preStop", {}).get("sleep")
            if isinstance(value.get("preStop"), dict)
            else None
        )
        if sleep is not None:
            value["preStop"] = {"exec": {"command": ["sleep", str(sleep["seconds"])]}}
        for item in value.values():
            _old_hooks(item)
    elif isinstance(value, list):
        for item in value:
            _old_hooks(item)


def dry_run(plane: ControlPlane) -> bool:
    """Every rendered object through the API server's own validation and defaulting; whether it takes all."""
    good = True
    namespace = next(o for o in rendered("chat-8b").objects if o["kind"] == "Namespace")
    plane.call("POST", "/api/v1/namespaces", namespace)  # really: the others go into it
    for folder, name in WHOLE.items():
        objects = [converted(item) for item in rendered(name).objects]
        known = [o for o in objects if o is not None and o["kind"] != "Namespace"]
        documents = {"apiVersion": "v1", "kind": "List", "items": known}
        run = plane.kubectl(
            "create", "--dry-run=server", "--namespace", NAMESPACE, "-f", "-", stdin=json.dumps(documents)
        )  # fmt: skip
        taken = [line for line in run.stdout.splitlines() if "created (server dry run)" in line]
        skipped = objects.count(None)
        print(
            f"  k8s/{folder}: {len(taken)} of {len(known)} objects taken, {skipped} of operators' kinds left out"
        )
        if run.returncode or len(taken) != len(known):
            good = False
            print("    " + "\n    ".join(run.stderr.splitlines()[-5:]))
    return good


def refusals(plane: ControlPlane) -> bool:
    """Faults that no schema sees, to show that the server looks; whether each is refused."""
    objects = [converted(item) for item in rendered("chat-8b").objects]
    hpa = next(o for o in objects if o is not None and o["kind"] == "HorizontalPodAutoscaler")
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "system-high-priority"},
        "value": 1000,
    }
    window = copy.deepcopy(hpa)
    window["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 4000
    kind = copy.deepcopy(hpa)
    kind["spec"]["metrics"][0]["pods"]["target"]["type"] = "AvgValue"
    good = True
    for what, item in (
        ("a reserved name", priority),
        ("a window of 4000 s", window),
        ("AvgValue", kind),
    ):
        run = plane.kubectl(
            "create",
            "--dry-run=server",
            "--namespace",
            NAMESPACE,
            "-f",
            "-",
            stdin=json.dumps(item),
        )
        print(f"  {what}: {'refused' if run.returncode else 'TAKEN'}")
        good &= run.returncode != 0
    return good


# --- scaling ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A load, and the HPA that follows it."""

    title: str
    steps: Sequence[Sequence[float]]
    """[second, requests per second]"""
    duration_s: int
    replicas: int
    behavior: Mapping[str, Any]


CASES = (
    Case(
        "burst with cold start",
        [[0, 3], [15, 16], [60, 3]],
        120,
        2,
        {
            "scaleUp": {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 10}]},
            "scaleDown": {
                "stabilizationWindowSeconds": 20,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 5}],
            },
        },
    ),
    Case(
        "slow decline",
        [[0, 16], [30, 13], [50, 10], [70, 6], [90, 3]],
        150,
        8,
        {
            "scaleDown": {
                "stabilizationWindowSeconds": 10,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 10}],
            }
        },
    ),
)


def hpa_spec(case: Case) -> dict[str, Any]:
    metric = {"metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": "8"}}
    return {
        "minReplicas": 2,
        "maxReplicas": 10,
        "metrics": [{"type": "External", "external": metric}],
        "behavior": dict(case.behavior),
    }


def document(case: Case) -> dict[str, Any]:
    """The scenario: a small model server whose load in requests inside is what the HPA goes by."""
    phases = dict.fromkeys(("image", "process", "compile", "graphs", "warm_up"), 0)
    return {
        "name": "oracle",
        "model": "meta-llama/Llama-3.1-8B",
        "hardware": {"gpu": "H100"},
        "engine": {"max_num_seqs": 64, "max_model_len": 4096},
        "policy": "vllm-fcfs",
        "traffic": [
            {
                "arrivals": {
                    "process": "constant",
                    "rate": {"steps": [list(s) for s in case.steps]},
                },
                "prompt_tokens": {"fixed": 300},
                "output_tokens": {"fixed": 500},
                "duration": case.duration_s,
            }
        ],
        "cluster": {
            "replicas": case.replicas,
            "hpa": hpa_spec(case),
            "controller": {"sync_period": 1},
            "metrics": {
                "scrape_interval": 1,
                "queries": {METRIC: "sum(vllm:num_requests_running + vllm:num_requests_waiting)"},
            },
            "cold_start": {"phases": phases | {"weights": COLD_S}},
            "probes": {"readiness": {"periodSeconds": 1}},
        },
        "run": {"until": case.duration_s, "sample_period": 1},
    }


Way = list[tuple[float, int]]
"""(second, replicas wanted from then on)"""


def simulated(case: Case) -> tuple[Way, list[float]]:
    """(the way of the replicas in the twin, requests inside at each second)"""
    result = simulate(load_scenario(document(case)), observe=True)
    assert result.series is not None
    assert result.fleet is not None
    way = [(0.0, case.replicas)]
    for counts in result.fleet.log.steps:
        if counts.wanted != way[-1][1]:
            way.append((counts.at_ps / PS, counts.wanted))
    inside = [0.0] * (case.duration_s + 1)
    for at_ps, engines in zip(result.series.times_ps, result.series.gauges, strict=True):
        second = round(at_ps / PS)
        if second <= case.duration_s:
            inside[second] = float(
                sum(sum(e.running.values()) + sum(e.waiting.values()) for e in engines)
            )
    return way, inside


def real(case: Case, inside: Sequence[float], plane: ControlPlane, api: MetricsApi) -> Way:
    """The way of the replicas under the real controller, handed the same requests inside."""
    apps = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
    scalers = f"/apis/autoscaling/v2beta2/namespaces/{NAMESPACE}/horizontalpodautoscalers"
    name = "oracle"
    labels = {"app": name}
    container = {"name": "x", "image": "x:1"}
    kubelet = Kubelet(plane, 0.0)
    try:
        plane.call(
            "POST",
            apps,
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name},
                "spec": {
                    "replicas": case.replicas,
                    "selector": {"matchLabels": labels},
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": {"containers": [container]},
                    },
                },
            },
        )
        until = time.monotonic() + 30
        while plane.call("GET", f"{apps}/{name}")["status"].get("readyReplicas", 0) < case.replicas:
            if time.monotonic() > until:
                raise RuntimeError("the first pods do not become Ready")
            time.sleep(0.2)
        kubelet.cold_start_s = COLD_S
        api.begin(lambda seconds: inside[min(int(seconds), len(inside) - 1)])
        began = time.monotonic()
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
        plane.call(
            "POST",
            scalers,
            {
                "apiVersion": "autoscaling/v2beta2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": {"name": name},
                "spec": hpa_spec(case) | {"scaleTargetRef": target},
            },
        )
        way = [(0.0, case.replicas)]
        while (now := time.monotonic() - began) < case.duration_s:
            wanted = plane.call("GET", f"{apps}/{name}")["spec"]["replicas"]
            if wanted != way[-1][1]:
                way.append((now, wanted))
            time.sleep(0.1)
        return way
    finally:
        kubelet.close()
        for path in (f"{scalers}/{name}", f"{apps}/{name}"):
            try:
                plane.call("DELETE", path)
            except urllib.error.HTTPError:
                continue


def table(case: Case, twin: Way, controller: Way) -> Iterator[str]:
    """Both ways side by side."""
    yield f"  {case.title}: {case.duration_s} s, target 8 requests inside a replica, cold start {COLD_S} s"
    yield "    twin                  controller"
    for i in range(max(len(twin), len(controller))):
        cells = []
        for way in (twin, controller):
            cells.append(f"{way[i][0]:6.1f} s  {way[i][1]:2d}" if i < len(way) else "")
        yield f"    {cells[0]:<20}  {cells[1]}"


def settled(way: Way) -> Way:
    """Without counts that held for less than JUMP_S: one sees a rising load in two looks, the other in one."""
    return [
        step
        for step, after in zip(way, [*way[1:], (float("inf"), 0)], strict=True)
        if after[0] - step[0] >= JUMP_S
    ]


def agree(twin: Way, controller: Way) -> bool:
    """The same counts in the same order, each at about the same time."""
    twin, controller = settled(twin), settled(controller)
    if [n for _, n in twin] != [n for _, n in controller]:
        return False
    return all(abs(a - b) <= LATE_S for (a, _), (b, _) in zip(twin, controller, strict=True))


def main() -> int:
    binaries = Path(sys.argv[1]).resolve() / "bin"
    if not is_there(binaries):
        print(
            f"no control plane in {binaries}: run scripts/build_control_plane.sh", file=sys.stderr
        )
        return 2
    good = True
    with (
        tempfile.TemporaryDirectory(prefix="twin-oracle-") as folder,
        ControlPlane(binaries, Path(folder)) as plane,
    ):
        print(f"{plane.version()}: server-side dry run of what is rendered")
        good &= dry_run(plane)
        print("and of what must be refused")
        good &= refusals(plane)
        print("The HPA controller beside the twin")
        api = MetricsApi(plane, METRIC)
        for case in CASES:
            twin, inside = simulated(case)
            controller = real(case, inside, plane, api)
            print("\n".join(table(case, twin, controller)))
            same = agree(twin, controller)
            print(f"    {'the same way' if same else 'ANOTHER WAY'}")
            good &= same
        api.close()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
