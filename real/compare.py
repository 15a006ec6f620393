"""The twin beside what was measured: the same requests, one table, worst first.

What `twin-real replay` wrote is fed to the twin: requests at the times they were due, with the lengths they had (open
loop), or the traffic itself where each request waits for another (closed loops, conversations). Figures and their
errors are twin.validation's; here are the regimes they are told by, the spread of repeated runs, and what the requests
have in common that are predicted worst.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from real.measured import TRACE, read_measured
from twin.clock import PS
from twin.metrics.engine_time import QUEUEING
from twin.metrics.record_table import RecordTable
from twin.scenario import Scenario, load_scenario
from twin.simulation import Result, simulate
from twin.validation import RATES, STATS, Comparison, compare_requests, worst_first

Table = Mapping[str, Sequence[Any]]

METRICS = (
    *(f"{latency}_{stat}" for latency in ("ttft", "tpot", "e2e") for stat in STATS),
    "itl_p50",
    "itl_p99",
    *RATES,
)
IDLE_SHARE, SATURATED_SHARE = 0.05, 0.5
"""Below the first share of the twin's time in which requests waited for a slot, tokens or KV a run is idle, above the
second one saturated: errors change where waiting begins."""
MOST_MISMATCH = 0.01
"""Share of requests whose lengths may differ from the planned ones before that is the first thing to say."""
FEATURES = {
    "prompt tokens": "prompt_tokens",
    "output tokens": "output_tokens",
    "prompt tokens found in the prefix cache": "prefix_hit_tokens",
    "requests inside when it came": "inside",
    "seconds after the start": "arrival_s",
}


@dataclass(frozen=True)
class Run:
    """One measured run and what the twin says of it."""

    name: str
    group: str
    """Runs of the same traffic have the same."""
    measured: Table
    predicted: Table
    regime: str
    """idle, knee or saturated."""
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A figure of all runs of one traffic together."""

    comparison: Comparison
    """Of the means over the runs."""
    spread: float | None
    """(largest - smallest) / mean of the measured figure over the runs; None with one run."""
    runs: int

    def is_within(self, tolerance: float) -> bool:
        """Whether the error is at most the tolerance, or twice the spread of the runs."""
        return abs(self.comparison.error) <= max(tolerance, 2 * (self.spread or 0.0))


def predict(
    source: Path,
    overrides: Sequence[str],
    folder: Path,
    frontend_s: float = 0.0,
    planned: bool | None = None,
    warm: Path | None = None,
    base: Mapping[str, Any] | None = None,
) -> Run:
    """The twin's answer to one measured run.

    `source` is the scenario of the twin (`base` in its place, if given). `frontend_s` is what a request spends outside
    the scheduler. `planned` None chooses by the traffic; `warm` is a trace that the server had served before, which the
    twin plays first. Raises InputError where a file is missing or does not fit.
    """
    measured, facts = read_measured(folder)
    played = facts.get("scenario", {})
    scenario = load_scenario(base if base is not None else source, overrides)
    traffic = played.get("traffic") or scenario.document["traffic"]
    waits = any(_waits(stream) for stream in traffic)
    if planned if planned is not None else waits:
        scenario = _as_played(scenario, traffic, played.get("run", {}).get("seed"), frontend_s)
        result, offset_s = simulate(scenario, observe=False), 0.0
        keep: Sequence[int] = range(len(result.records))
        told = _by_index(measured)
    else:
        trace, offset_s, before = _trace(folder, warm)
        document = scenario.to_dict()
        document["traffic"] = [{"trace": str(trace)}]
        result = simulate(load_scenario(document), observe=False)
        keep = range(before, len(result.records))
        told = _by_arrival(measured)
    predicted = table_of(result.records, keep, frontend_s, offset_s)
    waited = sum(engine.time.limit_ps[limit] for engine in result.engines for limit in QUEUEING)
    return Run(
        folder.name,
        json.dumps(facts.get("scenario", {}).get("traffic", folder.name), sort_keys=True),
        told,
        predicted,
        regime_of(waited / max(1, sum(result.alive_ps))),
        facts | {"twin": _engine(result)},
    )


def _engine(result: Result) -> dict[str, float]:
    names = ("steps", "preemptions", "prefix_hit_tokens", "prefix_query_tokens")
    return {name: sum(getattr(engine, name) for engine in result.engines) for name in names}


def _waits(stream: Mapping[str, Any]) -> bool:
    """Whether requests of a stream come only once others have ended."""
    arrivals = stream.get("arrivals") or {}
    return bool(stream.get("sessions")) or arrivals.get("process") == "closed"


def _as_played(
    scenario: Scenario, traffic: Sequence[Mapping[str, Any]], seed: int | None, frontend_s: float
) -> Scenario:
    """The scenario with the traffic that was played, whose users wait for what lies outside the scheduler, too."""
    document = scenario.to_dict()
    document["traffic"] = streams = json.loads(json.dumps(list(traffic)))
    for stream in streams:
        arrivals = stream.get("arrivals") or {}
        if arrivals.get("process") == "closed":
            think = arrivals.get("think_time") or 0
            if isinstance(think, int | float):
                arrivals["think_time"] = think + frontend_s
    return load_scenario(document, (), seed)


def _trace(folder: Path, warm: Path | None) -> tuple[Path, float, int]:
    """(trace for the twin, seconds by which the measured requests come later in it, requests before them)."""
    own = folder / TRACE
    if warm is None:
        return own, 0.0, 0
    before = [json.loads(line) for line in warm.read_text(encoding="utf-8").splitlines()]
    offset_s = math.ceil(max(row["arrival_s"] for row in before)) + 600.0
    later = [json.loads(line) for line in own.read_text(encoding="utf-8").splitlines()]
    joined = folder / "warmed.jsonl"
    with joined.open("w", encoding="utf-8") as file:
        for row in before:
            file.write(json.dumps(row) + "\n")
        for row in later:
            file.write(
                json.dumps({**row, "arrival_s": round(row["arrival_s"] + offset_s, 12)}) + "\n"
            )
    return joined, offset_s, len(before)


def table_of(
    records: RecordTable, keep: Iterable[int], frontend_s: float = 0.0, offset_s: float = 0.0
) -> dict[str, list[Any]]:
    """Records as a request table; what clients see is later than what the engine does by `frontend_s`."""
    kept = [records[i] for i in keep]

    def at(ps: int | None, later_s: float) -> float | None:
        return None if ps is None else ps / PS - offset_s + later_s

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


def _by_index(measured: Table) -> Table:
    return _rows(measured, np.argsort(measured["index"], kind="stable").tolist())


def _by_arrival(measured: Table) -> Table:
    """Those with a reply, as trace.jsonl has them."""
    kept = [i for i, n in enumerate(measured["output_tokens"]) if n]
    return _rows(measured, sorted(kept, key=lambda i: measured["arrival_s"][i]))


def _rows(table: Table, rows: Sequence[int]) -> Table:
    return {name: [column[i] for i in rows] for name, column in table.items()}


def regime_of(waiting: float) -> str:
    """idle, knee or saturated, from the share of time in which somebody waited who could have run."""
    if waiting >= SATURATED_SHARE:
        return "saturated"
    return "idle" if waiting < IDLE_SHARE else "knee"


def mismatch_of(run: Run) -> float | None:
    """Share of the requests whose lengths differ from the planned ones; None where nobody planned."""
    wanted = run.measured.get("planned_output_tokens")
    if wanted is None or None in wanted:
        return None
    prompts = run.measured["planned_prompt_tokens"]
    got = zip(run.measured["prompt_tokens"], run.measured["output_tokens"], strict=True)
    differ = [
        pair != want for pair, want in zip(got, zip(prompts, wanted, strict=True), strict=True)
    ]
    return sum(differ) / len(differ) if differ else 0.0


def rows_of(runs: Sequence[Run], metrics: Sequence[str] = METRICS) -> list[Row]:
    """One row a traffic, regime and metric, worst first: means over the runs of that traffic, and their spread."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    rows: list[Row] = []
    for own in groups.values():
        label = " ".join(dict.fromkeys(run.regime for run in own))
        label = f"{label} {_traffic_name(own[0])}".strip()
        rows += _together([(run.predicted, run.measured) for run in own], label, metrics)
        for which, wanted in (("prefix hit", True), ("no hit", False)):
            parts = [_where_hit(run, wanted) for run in own]
            if any(_where_hit(run, True)[1]["index"] for run in own) and all(
                part[1]["index"] for part in parts
            ):
                rows += _together(parts, f"{label}, {which}", [m for m in metrics if "ttft" in m])
    order = {id(c): i for i, c in enumerate(worst_first(row.comparison for row in rows))}
    return sorted(rows, key=lambda row: order[id(row.comparison)])


def _traffic_name(run: Run) -> str:
    streams = run.facts.get("scenario", {}).get("traffic") or []
    told = []
    for stream in streams:
        arrivals = stream.get("arrivals") or {}
        if arrivals.get("process") == "closed":
            told.append(f"{arrivals['users']} users")
        elif arrivals.get("rate") is not None:
            told.append(f"{arrivals['rate']}/s")
        elif stream.get("trace"):
            told.append(Path(stream["trace"]).name)
    return "(" + " + ".join(told) + ")" if told else ""


def _together(
    pairs: Sequence[tuple[Table, Table]], label: str, metrics: Sequence[str]
) -> list[Row]:
    found: dict[str, list[Comparison]] = {}
    for predicted, measured in pairs:
        for row in compare_requests(predicted, measured, label, metrics):
            found.setdefault(row.metric, []).append(row)
    made = []
    for metric, rows in found.items():
        measured_values = [row.measured for row in rows]
        mean = statistics.fmean(measured_values)
        spread = None
        if len(rows) > 1 and mean:
            spread = (max(measured_values) - min(measured_values)) / mean
        whole = Comparison(
            metric,
            label,
            statistics.fmean(row.predicted for row in rows),
            mean,
            sum(row.requests for row in rows),
        )
        made.append(Row(whole, spread, len(rows)))
    return made


def _where_hit(run: Run, wanted: bool) -> tuple[Table, Table]:
    """The requests that the server found something, or nothing, in its prefix cache for, in both tables."""
    hits = [(n or 0) > 0 for n in run.measured.get("prefix_hit_tokens", [])]
    if len(hits) != len(run.predicted["index"]):
        return {"index": []}, {"index": []}
    rows = [i for i, hit in enumerate(hits) if hit == wanted]
    return _rows(run.predicted, rows), _rows(run.measured, rows)


@dataclass(frozen=True)
class Misses:
    """The requests of a run that are predicted worst, and what sets them apart."""

    rows: list[dict[str, Any]]
    """The worst ones, by how much their time to first token is off."""
    differs: list[str]
    """Sentences on what the worst tenth has that the others have not."""


def misses_of(run: Run, most: int = 10) -> Misses:
    """Of the requests that both have."""
    theirs, ours = run.measured, run.predicted
    if len(theirs["arrival_s"]) != len(ours["arrival_s"]):
        return Misses([], ["the twin and the server did not serve the same number of requests"])
    inside = _inside(theirs)
    found = []
    for i, (a, b) in enumerate(zip(theirs["first_token_s"], ours["first_token_s"], strict=True)):
        if a is None or b is None:
            continue
        measured_s, predicted_s = a - theirs["arrival_s"][i], b - ours["arrival_s"][i]
        found.append((abs(predicted_s - measured_s), i, measured_s, predicted_s))
    found.sort(reverse=True)
    rows = [
        {
            "request": theirs["index"][i],
            "tier": theirs["tier"][i],
            "ttft_measured_s": measured_s,
            "ttft_predicted_s": predicted_s,
            "prompt_tokens": theirs["prompt_tokens"][i],
            "hit_measured": theirs.get("prefix_hit_tokens", [0] * (i + 1))[i],
            "hit_predicted": ours["prefix_hit_tokens"][i],
            "preemptions_predicted": ours["preemptions"][i],
            "inside": inside[i],
        }
        for _, i, measured_s, predicted_s in found[:most]
    ]
    worst = {i for _, i, _, _ in found[: max(3, len(found) // 10)]}
    return Misses(rows, _differences(theirs, inside, worst, {i for _, i, _, _ in found}))


def _differences(
    table: Table, inside: Sequence[int], worst: set[int], every: set[int]
) -> list[str]:
    columns = {**table, "inside": inside}
    told, rest = [], every - worst
    if not rest or not worst:
        return []
    for name, column in FEATURES.items():
        if column not in columns:
            continue
        values = [value or 0 for value in columns[column]]
        ours = statistics.fmean(values[i] for i in worst)
        others = statistics.fmean(values[i] for i in rest)
        spread = statistics.pstdev(values[i] for i in every) or 1.0
        if abs(ours - others) > 0.8 * spread:
            text = f"{name}: {ours:.4g} in the worst tenth, {others:.4g} otherwise"
            told.append((abs(ours - others) / spread, text))
    return [text for _, text in sorted(told, reverse=True)]


def _inside(table: Table) -> list[int]:
    """Requests in the system at each arrival."""
    ends = np.sort([t for t in table["finish_s"] if t is not None])
    arrivals = np.array(table["arrival_s"], dtype=float)
    before = np.searchsorted(np.sort(arrivals), arrivals, side="left")
    return (before - np.searchsorted(ends, arrivals, side="right")).tolist()
