"""The process that does the work of a page: jobs come in as lines of JSON, progress and results go out as lines.

    python -m dashboard.work MEMORY_BYTES

It opens no file but those of Python, of this project and the uploads that a job names, whatever a scenario says.
"""

import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dashboard.guard import Guard, limit_memory
from dashboard.limits import Limits
from dashboard.request_table import request_table
from dashboard.safety import Refused, admit, check_shape, check_size, named, with_names
from twin.errors import InputError
from twin.report import charts
from twin.report.json_summary import summarize
from twin.report.scaling import replicas_figure, serving_at
from twin.report.trace_check import render_check
from twin.scenario import Scenario, load_scenario
from twin.scenario_faults import Origin
from twin.scenario_yaml import apply_override
from twin.simulation import Result, simulate
from twin.validation import compare_by, compare_requests, worst_first
from twin.whatif.axes import Axis, Range, override, overrides_of, parse_vary
from twin.whatif.compare import Variant, compare
from twin.whatif.optimize import make_search, optimize
from twin.whatif.pareto import front_figure
from twin.whatif.runs import Backend
from twin.whatif.waits import explore_waits
from twin.workload.check import check_trace

Tell = Callable[[int, int | None, str], None]


def load(
    payload: Mapping[str, Any],
    limits: Limits,
    changes: Sequence[str] = (),
    seed: int | None = None,
) -> Scenario:
    """The scenario of a job with changes as `--set` takes them, checked as one from a stranger. Raises InputError."""
    uploads = payload["uploads"]
    origin = Origin("scenario", Path(), {}, {})
    check_shape(payload["document"], origin)
    document = admit(payload["document"], uploads)
    for change in (*changes, *(() if seed is None else (f"run.seed={seed}",))):
        if change.startswith("policy.") and isinstance(document.get("policy"), str):
            document["policy"] = {"preset": document["policy"]}
        apply_override(document, change)
    if changes:
        check_shape(document, origin)
        document = admit(named(document, uploads), uploads)
    scenario = load_scenario(document)
    check_size(scenario, uploads, limits)
    return scenario


def backend(payload: Mapping[str, Any], limits: Limits) -> Backend:
    """Runs in this process, each scenario looked at as the job's own: changes may be together what none is alone."""
    uploads = payload["uploads"]

    def looked_at(
        document: Mapping[str, Any], changes: Sequence[str], seed: int | None
    ) -> Scenario:
        own = {"document": named(document, uploads), "uploads": uploads}
        return load(own, limits, changes, seed)

    return Backend(1, load=looked_at)


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
        variants,
        payload["seeds"],
        backend(payload, limits),
        progress=lambda n, of: tell(n, of, f"{n} of {of} runs"),
    )
    return {
        "comparison": found,
        "documents": {v.name: named(v.scenario.to_dict(), payload["uploads"]) for v in variants},
        "version": product_version(),
    }


def search(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """A Pareto front. Raises InputError, before anything runs, for a value that a scenario may not have here."""
    scenario = load(payload, limits)
    axes = [parse_vary(text) for text in payload["vary"]]
    for axis in axes:
        for value in values_of(axis, limits):
            try:
                load(payload, limits, [override(axis.key, value)])
            except Refused:
                raise
            except InputError:
                pass  # It cannot run, at least not alone; the search tells that.
    where = backend(payload, limits)
    made = make_search(
        scenario, axes, payload["goals"], payload["seeds"], payload["trials"],
        limits.search_s, load=where.load,
    )  # fmt: skip
    start, ends = time.monotonic(), [0.0]

    def told(tried: int, most: int, best: str) -> None:
        ends.append(time.monotonic() - start)
        tell(tried, most, f"{tried} of {most} tried; {best}")

    found = optimize(made, backend=where, told=told)
    documents = {
        entry["key"]: named(
            load(payload, limits, overrides_of(axes, entry["point"])).to_dict(), payload["uploads"]
        )
        for entry in found["trials"]
        if entry["figures"]
    }
    return {
        "found": found,
        "figure": front_figure(made, found),
        "documents": documents,
        "seeds": list(made.seeds),
        "limit_s": limits.search_s if ends[-1] > limits.search_s else None,
        "version": product_version(),
    }


def values_of(axis: Axis | Range, limits: Limits) -> tuple[Any, ...]:
    """Every value of an axis, both ends of a range. Raises Refused for more than a page takes."""
    if isinstance(axis, Range):
        ends = (axis.low, axis.high)
        return tuple(map(round, ends)) if axis.is_whole else ends
    if len(axis.values) > limits.values:
        raise Refused(
            f"{axis.key}: has {len(axis.values):,} values; a page takes at most {limits.values} of a key, twin "
            "optimize more"
        )
    return axis.values


def waits(payload: Mapping[str, Any], limits: Limits, tell: Tell) -> dict[str, Any]:
    """What a batching wait buys, tier by tier."""
    scenario = load(payload, limits)
    found = explore_waits(
        scenario,
        payload["tiers"],
        payload["waits"],
        payload["seeds"],
        backend(payload, limits),
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
    tables = {name: request_table(name, path) for name, path in payload["uploads"].items()}
    predicted, measured = tables["predicted.parquet"], tables["measured.parquet"]
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
        except Exception as error:
            # What nobody thought of: the whole of it for who runs the server, no more than its kind for who asked.
            with suppress(OSError):
                traceback.print_exc()
            _say(
                out,
                {
                    "is": "failed",
                    "error": f"an error of the dashboard ({type(error).__name__}), told in full in the log of the "
                    "server; what it was asked for is left undone",
                },
            )


def _say(out: Any, told: Mapping[str, Any]) -> None:
    out.write(json.dumps(told, ensure_ascii=False) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
