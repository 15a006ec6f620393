"""What does the twin say of a measured run? The same requests, or the same traffic with the lengths that really came.

Where the times of requests are known beforehand (open loop) the twin is given them as recorded. Where each waits for
another (closed loops, conversations) it is given the traffic, because the server's own speed decides when the next
request comes; of each request it learns the lengths it had at the server.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from real.compare import LEFT_OUT, Run, Table, regime_of, rows_at, setup_of
from real.compare_given import Given
from real.compare_warm import Warmed
from real.measured import REQUESTS, TRACE, read_measured
from twin.clock import PS
from twin.errors import InputError
from twin.metrics.engine_time import QUEUEING
from twin.metrics.record_table import RecordTable
from twin.scenario import Scenario, load_scenario
from twin.simulation import Result, simulate
from twin.workload.formats.choose import FORMATS, format_of, read_trace
from twin.workload.formats.rows import TraceRow
from twin.workload.streams import Traffic, open_streams


def predict(
    source: Path,
    overrides: Sequence[str],
    folder: Path,
    frontend_s: float = 0.0,
    planned: bool | None = None,
    warm: Path | None = None,
    base: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Run:
    """The twin's answer to one measured run.

    `source` is the scenario of the twin (`base` in its place, if given). `frontend_s` is what a request spends outside
    the scheduler. `planned` None chooses by the traffic; `warm` is a trace that the server had served before, which the
    twin plays first. Raises InputError where a file is missing or does not fit, and where no request completed.
    """
    measured, facts = read_measured(folder)
    folder = folder if folder.is_dir() else folder.parent
    if "completed" not in measured["outcome"]:
        raise InputError(
            f"{folder}: none of its {len(measured['outcome'])} requests completed; there is nothing to compare"
        )
    played = facts.get("scenario", {})
    scenario = load_scenario(base if base is not None else source, overrides)
    traffic = played.get("traffic") or scenario.document["traffic"]
    waits = any(_waits(stream) for stream in traffic)
    if planned if planned is not None else waits:
        told = rows_at(measured, np.argsort(measured["index"], kind="stable").tolist())
        not_given = 0
        planned_scenario = _as_played(scenario, traffic, played, frontend_s)
        predicted, result, before, idle_ps = _as_planned(planned_scenario, warm, told, frontend_s)
    else:
        told = _by_arrival(measured)
        not_given = len(measured["outcome"]) - len(told["outcome"])
        predicted, result, before, idle_ps = _as_recorded(scenario, folder, warm, told, frontend_s)
    twin = _engine(result)
    waited_ps = twin.pop("waited_ps") - before.pop("waited_ps", 0)
    alive_ps = sum(result.alive_ps) - idle_ps * len(result.alive_ps)
    return Run(
        name or folder.name,
        setup_of(folder, measured, facts),
        told,
        predicted,
        regime_of(waited_ps / max(1, alive_ps)),
        {**facts, "twin": {key: count - before[key] for key, count in twin.items()}},
        not_given,
    )


def _engine(result: Result) -> Counter[str]:
    names = ("steps", "preemptions", "prefix_hit_tokens", "prefix_query_tokens")
    counts = Counter({name: sum(getattr(e, name) for e in result.engines) for name in names})
    counts["waited_ps"] = sum(e.time.limit_ps[limit] for e in result.engines for limit in QUEUEING)
    return counts


def _waits(stream: Mapping[str, Any]) -> bool:
    """Whether requests of a stream come only once others have ended."""
    arrivals = stream.get("arrivals") or {}
    return bool(stream.get("sessions")) or arrivals.get("process") == "closed"


# --- as planned -----------------------------------------------------------------------------------


def _as_played(
    scenario: Scenario,
    traffic: Sequence[Mapping[str, Any]],
    played: Mapping[str, Any],
    frontend_s: float,
) -> Scenario:
    """The scenario with the traffic and the seed that were played."""
    document = scenario.to_dict()
    document["traffic"] = streams = json.loads(json.dumps(list(traffic)))
    for stream in streams:
        arrivals = stream.get("arrivals") or {}
        think = arrivals.get("think_time") or 0
        # Users wait for what lies outside the scheduler, too.
        if arrivals.get("process") == "closed" and isinstance(think, int | float):
            arrivals["think_time"] = think + frontend_s
    return load_scenario(document, (), played.get("run", {}).get("seed"))


def _as_planned(
    scenario: Scenario, warm: Path | None, told: Table, frontend_s: float
) -> tuple[Table, Result, Counter[str], int]:
    """(the twin's requests in the order of the measured ones, its run, what was counted before them, picoseconds until
    the first).
    """
    document = scenario.to_dict()
    before, counted, offset_ps = _warming(document, warm)
    later = Traffic(open_streams(scenario.traffic, scenario.run.seed))
    until_s = _until_s(document, offset_ps)
    if "unfinished" in told["outcome"]:
        until_s = min(until_s or math.inf, _last_s(told) + offset_ps / PS)
    scenario = load_scenario(_cut(document, until_s), (), scenario.run.seed)
    given = Given(told, len(before))
    result = simulate(scenario, on_offer=given.give, traffic=Warmed(before, offset_ps, later))
    row_of = given.row_of
    order = sorted(row_of, key=row_of.__getitem__)
    order += [i for i in range(len(before), len(result.records)) if i not in row_of]
    predicted = table_of(result.records, order, frontend_s, offset_ps)
    rows = [row_of.get(i) for i in order]
    outcomes = [None if row is None else told["outcome"][row] for row in rows]
    return _masked(predicted, outcomes), result, counted, offset_ps


def _cut(document: Mapping[str, Any], until_s: float | None) -> dict[str, Any]:
    """The scenario cut at another instant; None = not at all."""
    return {**document, "run": {**document.get("run", {}), "until": until_s}}


def _until_s(document: Mapping[str, Any], offset_ps: int) -> float | None:
    """Where a scenario is cut whose traffic begins so much later."""
    until_s: float | None = document.get("run", {}).get("until")
    return None if until_s is None else until_s + offset_ps / PS


def _last_s(told: Table) -> float:
    """The last instant that is known of the run."""
    columns = (told[name] for name in ("arrival_s", "first_token_s", "finish_s"))
    return max(at for at in chain(*columns) if at is not None) or 1e-12


def _warming(
    document: Mapping[str, Any], warm: Path | None
) -> tuple[list[TraceRow], Counter[str], int]:
    """(requests that the server had served, what the twin counts of them, when it is idle again)."""
    if warm is None:
        return [], Counter[str](), 0
    before = _served(warm)
    with TemporaryDirectory(prefix="twin-compare-") as scratch:
        alone = _play(_cut(document, None), before, Path(scratch))
    # The measured requests begin a second after the last of these has ended.
    return before, _engine(alone), (alone.simulated_ps // PS + 2) * PS


# --- as recorded ----------------------------------------------------------------------------------


def _as_recorded(
    scenario: Scenario, folder: Path, warm: Path | None, told: Table, frontend_s: float
) -> tuple[Table, Result, Counter[str], int]:
    """(the twin's requests, its run, what was counted before them, picoseconds until the first)."""
    document, own = scenario.to_dict(), folder / TRACE
    rows = list(read_trace(str(own), format_of(str(own)).format))
    if len(rows) != len(told["index"]):
        raise InputError(
            f"{own}: has {len(rows)} requests, {REQUESTS} beside it {len(told['index'])} with a token; give the folder "
            "as it was written"
        )
    before, counted, offset_ps = _warming(document, warm)
    later = [row._replace(at_ps=row.at_ps + offset_ps) for row in rows]
    with TemporaryDirectory(prefix="twin-compare-") as scratch:
        result = _play(
            _cut(document, _until_s(document, offset_ps)), [*before, *later], Path(scratch)
        )
    keep = range(len(before), len(result.records))
    predicted = table_of(result.records, keep, frontend_s, offset_ps)
    return _masked(predicted, told["outcome"]), result, counted, offset_ps


def _play(document: Mapping[str, Any], rows: Iterable[TraceRow], scratch: Path) -> Result:
    write, path = FORMATS["twin-jsonl"].write, scratch / TRACE
    assert write is not None
    write(str(path), rows)
    return simulate(load_scenario({**document, "traffic": [{"trace": str(path)}]}))


def _served(warm: Path) -> list[TraceRow]:
    """The requests of a trace of any format, with the content ids that a replay of them has."""
    found = format_of(str(warm)).format
    rows = list(read_trace(str(warm), found))
    if found.name.startswith("twin-"):
        return rows
    return [
        row
        if row.prompt is None
        else row._replace(
            prompt=tuple((1 + 2 * content, tokens) for content, tokens in row.prompt),
            reply=None if row.reply is None else 1 + 2 * row.reply,
        )
        for row in rows
    ]


def _by_arrival(measured: Table) -> Table:
    """Those with a reply, as trace.jsonl has them."""
    kept = [i for i, n in enumerate(measured["output_tokens"]) if n]
    return rows_at(measured, sorted(kept, key=lambda i: measured["arrival_s"][i]))


# --- tables ---------------------------------------------------------------------------------------


def table_of(
    records: RecordTable, keep: Iterable[int], frontend_s: float = 0.0, offset_ps: int = 0
) -> dict[str, list[Any]]:
    """Records as a request table; what clients see is later than what the engine does by `frontend_s`."""
    kept = [records[i] for i in keep]

    def at(ps: int | None, later_s: float) -> float | None:
        return None if ps is None else (ps - offset_ps) / PS + later_s

    return {
        "index": [r.index for r in kept],
        "tier": [r.tier for r in kept],
        "outcome": [r.outcome for r in kept],
        "arrival_s": [at(r.arrival_ps, 0.0) for r in kept],
        "first_token_s": [at(r.first_token_ps, frontend_s) for r in kept],
        "finish_s": [at(r.finish_ps, frontend_s) for r in kept],
        "prompt_tokens": [r.prompt_tokens for r in kept],
        "output_tokens": [r.output_tokens for r in kept],
        "prefix_hit_tokens": [r.prefix_hit_tokens for r in kept],
        "preemptions": [r.preemptions for r in kept],
        "itl_s": [[gap / PS for gap in r.itl_ps] for r in kept],
    }


def _masked(predicted: Table, theirs: Sequence[str | None]) -> Table:
    """The twin's table, in which what the server did not complete does not count either.

    `theirs` are the outcomes at the server, None for requests that only the twin had.
    """
    outcomes = [
        ours if at_server in ("completed", None) else LEFT_OUT
        for ours, at_server in zip(predicted["outcome"], theirs, strict=True)
    ]
    return {**predicted, "outcome": outcomes}
