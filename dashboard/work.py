"""The process that does the work of a page: jobs come in as lines of JSON, progress and results go out as lines.

    python -m dashboard.work MEMORY_BYTES

It opens no file but those of Python, of this project and the uploads that a job names, whatever a scenario says.
"""

import json
import math
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

from dashboard.limits import Limits
from dashboard.safety import admit, check_size, named, with_names
from twin.errors import InputError
from twin.report import charts
from twin.report.json_summary import summarize
from twin.report.scaling import replicas_figure, serving_at
from twin.report.trace_check import render_check
from twin.scenario import Scenario, load_scenario
from twin.simulation import Result, simulate
from twin.validation import compare_by, compare_requests, worst_first
from twin.whatif.axes import parse_vary
from twin.whatif.compare import Variant, compare
from twin.whatif.optimize import make_search, optimize
from twin.whatif.pareto import front_figure
from twin.whatif.waits import explore_waits
from twin.workload.check import check_trace

Tell = Callable[[int, int | None, str], None]


def load(payload: Mapping[str, Any], limits: Limits, changes: list[str] | None = None) -> Scenario:
    """The scenario of a job, checked as one from a stranger. Raises InputError."""
    uploads = payload["uploads"]
    document = admit(payload["document"], uploads, limits)
    if changes:
        from twin.scenario_yaml import apply_override

        for change in changes:
            if change.startswith("policy.") and isinstance(document.get("policy"), str):
                document["policy"] = {"preset": document["policy"]}
            apply_override(document, change)
        document = admit(named(document, uploads), uploads, limits)
    scenario = load_scenario(document)
    check_size(scenario, uploads, limits)
    return scenario


def run(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """A run: its summary, its charts, and the whole configuration behind them."""
    scenario = load(payload, limits)

    def progress(ended: int, expected: int | None, now_ps: int) -> None:
        of = "" if expected is None else f" of {expected:,}"
        tell(ended, expected, f"{ended:,}{of} requests, {now_ps / 1e12:,.1f} s simulated")

    result = simulate(scenario, progress, observe=True)
    summary = summarize(result)
    return {
        "summary": summary,
        "distributions": charts.distributions(
            result.tally(), list(summary["tiers"]), scenario.objectives
        ),
        "timelines": timelines(result, summary),
        "document": named(scenario.to_dict(), payload["uploads"]),
        "version": product_version(),
    }


def timelines(result: Result, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Charts over time; of a fleet its replicas first, each decision with its reason."""
    assert result.series is not None
    fleet = result.fleet
    serving = None if fleet is None else serving_at(fleet, result.series.times_ps)
    slots = summary["limits"]["max_num_seqs"]
    lines = charts.timelines(result.series, result.log, list(summary["tiers"]), slots, serving)
    if not summary["preemptions"]["histogram"]:
        del lines["preempted"]
    if fleet is not None:
        lines = {"replicas": replicas_figure(fleet, result.simulated_ps)} | lines
    return lines


def product_version() -> str:
    """Of this project, as installed."""
    try:
        return version("vllm-twin")
    except PackageNotFoundError:
        return "from its sources"


def compare_two(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """A configuration against others of it, under paired seeds."""
    base = load(payload, limits)
    variants = [Variant(payload["name"], base)]
    for entry in payload["variants"]:
        own = {**payload, "document": entry.get("document", payload["document"])}
        variants.append(Variant(entry["name"], load(own, limits, entry["changes"])))
    found = compare(
        variants, payload["seeds"], progress=lambda n, of: tell(n, of, f"{n} of {of} runs")
    )
    return {
        "comparison": found,
        "documents": {v.name: named(v.scenario.to_dict(), payload["uploads"]) for v in variants},
        "version": product_version(),
    }


def search(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """A Pareto front."""
    scenario = load(payload, limits)
    axes = [parse_vary(text) for text in payload["vary"]]
    for axis in axes:
        # What a search tries must be as harmless as what it starts from.
        for value in getattr(axis, "values", ()):
            load(payload, limits, [f"{axis.key}={json.dumps(value)}"]) if axis.key.split(".")[0] not in (
                "engine", "cluster", "hardware"
            ) else None  # fmt: skip
    made = make_search(scenario, axes, payload["goals"], payload["seeds"], payload["trials"])
    found = optimize(made, told=lambda n, of, best: tell(n, of, f"{n} of {of} tried; {best}"))
    documents = {
        entry["key"]: named(
            load_scenario(scenario.to_dict(), entry["key"].split(" ; ")).to_dict(),
            payload["uploads"],
        )
        for entry in found["trials"]
        if entry["figures"]
    }
    return {
        "found": found,
        "figure": front_figure(made, found),
        "documents": documents,
        "version": product_version(),
    }


def waits(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """What a batching wait buys, tier by tier."""
    scenario = load(payload, limits)
    found = explore_waits(
        scenario,
        payload["tiers"],
        payload["waits"],
        payload["seeds"],
        progress=lambda n, of: tell(n, of, f"{n} of {of} runs"),
    )
    return {**found, "version": product_version()}


def check(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """What is in an uploaded trace, as `twin trace check` says it."""
    (path,) = payload["uploads"].values()
    found, _ = check_trace(path, None, progress=lambda n, of: tell(n, of, f"{n:,} of {of:,} lines"))
    return {"text": with_names(render_check(found), payload["uploads"]), "found": found}


def origin(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """What the step times of a configuration rest on."""
    scenario = load(payload, limits)
    told = scenario.hardware.profile.provenance
    return {
        "model": scenario.model.name,
        "gpu": scenario.hardware.gpu.name,
        "engine": told.engine,
        "source": told.source,
        "date": told.date,
        "notes": list(told.notes),
        "fit_error": dict(told.fit_error),
        "warnings": list(scenario.warnings),
    }


def validate(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """Two tables of requests beside each other: all of them, and tier by tier."""
    tables = {}
    for name, path in payload["uploads"].items():
        try:
            tables[name] = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{name}: not readable as Parquet: {str(error).splitlines()[0]}"
            ) from None
    predicted, measured = tables["predicted.parquet"], tables["measured.parquet"]
    if "arrival_s" not in measured or "arrival_s" not in predicted:
        raise InputError("both files need the column arrival_s; they are no tables of requests")
    rows = compare_requests(predicted, measured, "all")
    if "tier" in predicted and "tier" in measured:
        rows = worst_first([*rows, *compare_by(predicted, measured, "tier")])
    told = [row.to_dict() for row in rows]
    return {
        "rows": [
            {**row, "error": row["error"] if math.isfinite(row["error"]) else None} for row in told
        ]
    }


KINDS = {
    "origin": origin,
    "validate": validate,
    "run": run,
    "compare": compare_two,
    "search": search,
    "waits": waits,
    "check": check,
}


def main() -> None:
    """Do jobs until stdin is closed."""
    memory_bytes = int(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What a library prints must not be taken for an answer.
    os.dup2(2, 1)
    # Ctrl-C is for the server; this process ends when its stdin is closed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory(memory_bytes)
    limits = Limits()
    guard = Guard()
    sys.addaudithook(guard)
    for line in sys.stdin:
        job = json.loads(line)
        uploads = job["payload"]["uploads"]
        guard.uploads = frozenset(uploads.values())

        def tell(done: int, total: int | None, text: str) -> None:
            _say(out, {"is": "progress", "done": done, "total": total, "text": text})

        try:
            result = KINDS[job["kind"]](job["payload"], limits, tell)
            _say(out, {"is": "done", "result": result})
        except InputError as error:
            _say(out, {"is": "failed", "error": with_names(str(error), uploads)})
        except MemoryError:
            _say(out, {"is": "failed", "error": "the run needed more memory than a page may take"})
        except PermissionError as error:
            _say(out, {"is": "failed", "error": str(error)})


def _say(out: Any, told: Mapping[str, Any]) -> None:
    out.write(json.dumps(told, ensure_ascii=False) + "\n")
    out.flush()


def limit_memory(memory_bytes: int) -> None:
    """Where the system can, no more address space than this."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


class Guard:
    """An audit hook that lets this process open what Python and this project consist of, and uploads. Nothing else."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        self._places = tuple(
            str(Path(place).resolve())
            for place in (
                sys.prefix, sys.base_prefix, paths["stdlib"], paths["purelib"], Path(__file__).parents[1] / "twin",
                Path(__file__).parent, "/usr/share/zoneinfo", "/dev", "/proc", "/sys",
                # Where an installation that is worked on has its version.
                Path(__file__).parents[1] / "vllm_twin.egg-info",
            )
        )  # fmt: skip
        self.uploads: frozenset[str] = frozenset()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raises PermissionError for any other file."""
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        name = os.fsdecode(arguments[0])
        if name in self.uploads:
            return
        path = os.path.realpath(name)
        if not any(path == place or path.startswith(place + os.sep) for place in self._places):
            sys.stderr.write(f"refused to open {path}\n")
            raise PermissionError(
                "the scenario names a file of the server; the page takes uploads only"
            )


if __name__ == "__main__":
    main()
