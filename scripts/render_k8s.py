"""Writes what k8s/ holds that comes from scenarios: the base, its overlays. `make k8s` runs it.

An overlay for another GPU is a kustomization over the base with patches: the differences between the two renderings.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real.cli_manifests import IMAGES
from real.cli_serve import tiny_scenario
from real.manifests import Rendered, render
from real.manifests_numbers import numbers_of
from real.manifests_predict import predict
from real.manifests_setup import Setup
from real.manifests_text import written
from twin.scenario import load_scenario

ROOT = Path(__file__).parents[1] / "k8s"

WHOLE = {"base": "chat-8b", "overlays/docs-70b": "docs-70b", "overlays/cpu-kind": "laptop"}
"""Folder -> scenario."""

PATCHED = {
    "h100": (
        "The place for names and settings of your own, e.g.\n"
        "images: [{name: vllm-twin, newName: registry.example.com/llm/vllm-twin, newTag: 0.1.0}]",
        (),
    ),
    "h200": ("", ("hardware.gpu=H200",)),
    "a100": (
        "It takes twice as many, and longer.",
        (
            "hardware.gpu=A100",
            "cluster.replicas=4",
            "cluster.hpa.minReplicas=4",
            "cluster.hpa.maxReplicas=14",
            "cluster.pod.shutdown_timeout=240",
            "cluster.pod.termination_grace_period=270",
        ),
    ),
}
"""Overlay of the base -> what is said of it, and the changes to the base's scenario."""


def rendered(name: str, overrides: tuple[str, ...] = ()) -> Rendered:
    loaded = load_scenario(ROOT / "scenarios" / f"{name}.yaml", overrides)
    prediction, tiny = predict(loaded), name == "laptop"
    scenario = tiny_scenario(loaded) if tiny else loaded
    numbers = numbers_of(scenario, prediction.longest_s, has_gpu=not tiny)
    return render(Setup(scenario, numbers, prediction, image=IMAGES[tiny], tiny=tiny))


def differences(base: Any, wanted: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """JSON patch operations from one value to another of the same shape."""
    if isinstance(base, dict) and isinstance(wanted, dict) and list(base) == list(wanted):
        for key in base:
            step = str(key).replace("~", "~0").replace("/", "~1")
            yield from differences(base[key], wanted[key], f"{path}/{step}")
    elif isinstance(base, list) and isinstance(wanted, list) and len(base) == len(wanted):
        for i, (a, b) in enumerate(zip(base, wanted, strict=True)):
            yield from differences(a, b, f"{path}/{i}")
    elif base != wanted:
        yield {"op": "replace", "path": path, "value": wanted}


def write_overlay(folder: Path, comment: str, overrides: tuple[str, ...], base: Rendered) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.yaml"):
        old.unlink()
    patches = []
    for before, after in zip(base.objects, rendered("chat-8b", overrides).objects, strict=True):
        found = list(differences(before, after))
        if found:
            kind, name = before["kind"], before["metadata"]["name"]
            own = name.removeprefix("chat-8b").strip("-")
            file = "-".join(filter(None, (kind.lower(), own))) + ".yaml"
            (folder / file).write_text(written([found]))  # type: ignore[list-item]
            patches.append({"path": file, "target": {"kind": kind, "name": name}})
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base"],
    }
    if patches:
        kustomization["patches"] = patches
    changes = "\n".join(f"  --set {change}" for change in overrides)
    head = "k8s/base" + (f" with\n{changes}" if changes else "")
    text = written([kustomization], "\n".join(filter(None, (head, comment))))
    (folder / "kustomization.yaml").write_text(text)


def main() -> None:
    for folder, name in WHOLE.items():
        there = ROOT / folder
        there.mkdir(parents=True, exist_ok=True)
        for old in there.glob("*.yaml"):
            old.unlink()
        for file, text in rendered(name).files.items():
            (there / file).write_text(text)
    base = rendered("chat-8b")
    for overlay, (comment, overrides) in PATCHED.items():
        write_overlay(ROOT / "overlays" / overlay, comment, overrides, base)


if __name__ == "__main__":
    main()
