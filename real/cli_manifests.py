"""`twin-real manifests`: a scenario as Kubernetes objects, and what is wrong with anybody's."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from real.cli_manifests_read import Read, read
from real.cli_serve import Overrides, tiny_scenario
from real.manifest_lint.check import lint
from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Cluster, Manifest
from real.manifest_lint.tools import check_queries, promtool
from real.manifest_names import label_pair
from real.manifests import Rendered, render
from real.manifests_numbers import numbers_of
from real.manifests_predict import predict
from real.manifests_setup import FINGERPRINT, Setup
from twin.errors import InputError
from twin.scenario import load_scenario
from twin.terminal import MISSED, complain, errors, write

IMAGES = {False: "vllm-twin:0.1.0", True: "vllm-twin-cpu:0.1.0"}
"""Whether the tiny model is served -> image where none is named."""


def manifests(
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="[SCENARIO]", help="Scenario file (YAML).", show_default=False),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the objects there.", show_default=False),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Say what is wrong with the manifests there.", show_default=False
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty.")
    ] = False,
    namespace: Annotated[str, typer.Option(help="Namespace of the objects.")] = "inference",
    image: Annotated[
        str | None,
        typer.Option(
            help="Image made with k8s/Containerfile.",
            show_default="vllm-twin:0.1.0, with --tiny vllm-twin-cpu:0.1.0",
        ),
    ] = None,
    models_claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim with the weights.")
    ] = "model-weights",
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Where KEDA or prometheus-adapter finds Prometheus.")
    ] = "http://prometheus-operated.monitoring.svc:9090",
    monitoring: Annotated[str, typer.Option(help="Namespace of Prometheus.")] = "monitoring",
    monitor_label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Label that the operator of Prometheus selects PodMonitors and rules by; may be repeated.",
            show_default=False,
        ),
    ] = None,
    proxy: Annotated[
        bool, typer.Option(help="An HAProxy with the scenario's routing and limits.")
    ] = True,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Serve the built-in model on CPUs instead, for a laptop."),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --check: compare the policy with that of a running server.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Render a scenario for Kubernetes (--out), or check manifests (--check); status 1 for faults."""
    with errors():
        if (out is None) == (check is None):
            raise InputError("give either --out DIR (with a scenario) or --check DIR")
        if check is not None:
            if scenario is not None:
                raise InputError(f"--check looks at a folder of manifests, not at {scenario}")
            _check(check, server)
            return
        if scenario is None or out is None:
            raise InputError("--out needs a scenario: twin-real manifests SCENARIO --out DIR")
        if server is not None:
            raise InputError("--server goes with --check")
        image = image or IMAGES[tiny]
        loaded = load_scenario(scenario, overrides or [])
        prediction = predict(loaded)
        loaded = tiny_scenario(loaded) if tiny else loaded
        setup = Setup(
            loaded,
            numbers_of(loaded, prediction.longest_s, has_gpu=not tiny),
            prediction,
            namespace,
            image,
            models_claim,
            prometheus,
            monitoring,
            _labels(monitor_label or []),
            tiny,
        )
        rendered = render(setup, proxy)
        _refuse_faults(rendered)
        _write(out, rendered, force)
        for note in rendered.notes:
            complain(note)


def _labels(written: list[str]) -> dict[str, str]:
    found = {}
    for text in written:
        pair = label_pair(text)
        if pair is None:
            raise InputError(
                f"--monitor-label {text}: is no label; write KEY=VALUE, e.g. release=kube-prometheus-stack"
            )
        found[pair[0]] = pair[1]
    return found


def _refuse_faults(rendered: Rendered) -> None:
    """No fault is written: what the scenario itself makes one is said instead."""
    found = [
        f
        for f in lint([Manifest(item, "rendered") for item in rendered.objects])
        if f.kind == "fault"
    ]
    if found:
        lines = "\n".join(f"  {f.subject}: {f.message}; {f.fix}".rstrip("; ") for f in found)
        raise InputError(f"the scenario asks for what cannot work in a cluster:\n{lines}")


def _write(out: Path, rendered: Rendered, force: bool) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = sorted(p.name for p in out.iterdir() if p.name not in rendered.files)
        if any(out.iterdir()) and not force:
            raise InputError(f"--out {out}: is not empty; --force writes into it")
        for name, text in rendered.files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    for name in others:
        complain(f"left alone: {out / name}, which is not of this rendering")


def _check(folder: Path, server: str | None) -> None:
    files = read(folder)
    found, skipped = _findings(files)
    if server is not None:
        found += _compare(files.manifests, server)
    for finding in found:
        write(f"{finding}\n")
    for text in skipped:
        complain(f"not checked: {text}")
    count = {kind: sum(f.kind == kind for f in found) for kind in ("fault", "needs", "advice")}
    write(f"{count['fault']} faults, {count['needs']} needs, {count['advice']} advice\n")
    if count["fault"]:
        raise typer.Exit(MISSED)


def findings(folder: Path) -> tuple[list[Finding], list[str]]:
    """(what is found in a folder or file of manifests, what was not looked at). Raises InputError for no manifest."""
    return _findings(read(folder))


def _findings(files: Read) -> tuple[list[Finding], list[str]]:
    skipped = list(files.skipped)
    if promtool() is None:
        skipped.append("queries by promtool, which is not installed")
    found = [*files.found, *lint(files.manifests), *check_queries(Cluster(files.manifests))]
    return found, skipped


def _compare(manifests: list[Manifest], server: str) -> list[Finding]:
    """The policy's fingerprint in the manifests beside that of the running server."""
    try:
        with urllib.request.urlopen(f"{server.rstrip('/')}/twin/status", timeout=10) as answer:
            status = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise InputError(f"--server {server}: no answer to /twin/status: {error}") from None
    running = status.get("policy_fingerprint")
    found = []
    for manifest in manifests:
        path = ("metadata", "annotations", FINGERPRINT)
        written = manifest.get(*path)
        if manifest.kind == "Deployment" and written is not None:
            # Without a policy of ours a server has no fingerprint; the annotation names vLLM's own mode.
            if written != running and not (running is None and str(written).startswith("vllm-")):
                found.append(
                    manifest.fault(
                        "fingerprint",
                        path,
                        f"names policy {written}, the server at {server} runs {running or 'that of vLLM'}",
                        "apply the manifests, or render from the scenario that is deployed",
                    )
                )
    return found
