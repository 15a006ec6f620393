"""The twin beside what was measured: one row a figure, traffic and regime, worst first.

Figures and their errors are twin.validation's. Here are the regimes they are told by, which runs are taken together,
and the spread of those.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real.measured import Mismatch, mismatch
from twin.validation import QUEUE, RATES, STATS, Comparison, compare_requests, worst_first

Table = Mapping[str, Sequence[Any]]

METRICS = (
    *(f"{latency}_{stat}" for latency in ("ttft", "tpot", "e2e") for stat in STATS),
    "itl_p50",
    "itl_p99",
    *RATES,
    *QUEUE,
)
IDLE_SHARE, SATURATED_SHARE = 0.05, 0.5
"""Below the first share of the twin's time in which requests waited for a slot, tokens or KV a run is idle, above the
second one saturated: errors change where waiting begins."""
OF_ONE_RUN = ("client", "client_limit", "length_mismatch", "server", "wall_s")
"""Facts of a replay that may differ between runs of one set-up."""


@dataclass(frozen=True)
class Run:
    """One measured run and what the twin says of it."""

    name: str
    setup: Mapping[str, Any]
    """What runs must have in common to be taken together."""
    measured: Table
    """The requests of the server; those that the twin was not given are not among them."""
    predicted: Table
    """The same requests in the same order, as far as the twin had them. Those that did not complete at the server have
    the outcome LEFT_OUT."""
    regime: str
    """idle, knee or saturated."""
    facts: Mapping[str, Any]
    not_given: int = 0
    """Requests that got no token and are not given to the twin."""


LEFT_OUT = "left_out"
"""Outcome, in the twin's table, of what the server did not complete: it counts on neither side."""


@dataclass(frozen=True)
class Row:
    """A figure of all runs of one set-up together."""

    comparison: Comparison
    """Of the means over the runs."""
    spread: float | None
    """(largest - smallest) / mean of the measured figure over the runs; None with one run."""
    runs: int

    def is_within(self, tolerance: float) -> bool:
        """Whether the error is at most the tolerance, or twice the spread of the runs."""
        return abs(self.comparison.error) <= max(tolerance, 2 * (self.spread or 0.0))


def setup_of(folder: Path, measured: Table, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in runs that are taken together: the scenario as it was played (with another seed, name or
    objectives it is still the same), the server, how requests were sent, and that the run was not cut short.

    What another tool measured says nothing of it, so that each such run stands alone.
    """
    if "scenario" not in facts:
        return {"folder": str(folder.resolve())}
    scenario = {k: v for k, v in facts["scenario"].items() if k not in ("name", "objectives")}
    scenario["run"] = {k: v for k, v in scenario.get("run", {}).items() if k != "seed"}
    setup = {k: v for k, v in facts.items() if k not in OF_ONE_RUN} | {"scenario": scenario}
    setup["cut short"] = "unfinished" in measured["outcome"]
    if all(stream.get("requests") for stream in scenario.get("traffic", ())):
        setup["requests"] = len(measured["outcome"])
    return setup


def groups_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one set-up together."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(run.setup, sort_keys=True), []).append(run)
    return list(found.values())


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Where two set-ups differ: `key value, other value`."""
    ours, theirs = dict(_flat(a)), dict(_flat(b))
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return [f"{key} {ours.get(key)}, {theirs.get(key)}" for key in keys]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    inside = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, inner in inside:
        path = f"{name}.{key}".lstrip(".")
        if isinstance(inner, Mapping | list) and inner:
            yield from _flat(inner, path)
        else:
            yield path, inner


def regime_of(waiting: float) -> str:
    """idle, knee or saturated, from the share of time in which somebody waited who could have run."""
    if waiting >= SATURATED_SHARE:
        return "saturated"
    return "idle" if waiting < IDLE_SHARE else "knee"


def mismatch_of(run: Run) -> Mismatch | None:
    """How many of the completed requests had other lengths than planned; None where nobody planned."""
    columns = ("prompt_tokens", "output_tokens", "planned_prompt_tokens", "planned_output_tokens")
    if not has_plan(run.measured):
        return None
    rows = zip(run.measured["outcome"], *(run.measured[name] for name in columns), strict=True)
    done = [lengths for outcome, *lengths in rows if outcome == "completed"]
    if not done:
        return None
    return mismatch([(a, b) for a, b, _, _ in done], [(c, d) for _, _, c, d in done])


def has_plan(measured: Table) -> bool:
    """Whether it is known of every request which lengths were asked for."""
    planned = [measured.get(f"planned_{which}_tokens") for which in ("prompt", "output")]
    return all(column is not None and None not in column for column in planned)


def rows_of(runs: Sequence[Run], metrics: Sequence[str] = METRICS) -> list[Row]:
    """One row a set-up, regime and metric, worst first: means over the runs of that set-up, and their spread."""
    groups = groups_of(runs)
    labels = [_label(own) for own in groups]
    rows: list[Row] = []
    for own, label in zip(groups, labels, strict=True):
        if labels.count(label) > 1:
            label += f" [{', '.join(run.name for run in own)}]"
        rows += _together([(run.predicted, run.measured) for run in own], label, metrics)
        for which, wanted in (("prefix hit", True), ("no hit", False)):
            parts = [_where_hit(run, wanted) for run in own]
            if any(_where_hit(run, True)[1]["index"] for run in own) and all(
                part[1]["index"] for part in parts
            ):
                rows += _together(parts, f"{label}, {which}", [m for m in metrics if "ttft" in m])
    order = {id(c): i for i, c in enumerate(worst_first(row.comparison for row in rows))}
    return sorted(rows, key=lambda row: order[id(row.comparison)])


def _label(own: Sequence[Run]) -> str:
    regimes = " ".join(dict.fromkeys(run.regime for run in own))
    return f"{regimes} {_traffic_name(own[0])}".strip()


def _traffic_name(run: Run) -> str:
    streams = run.facts.get("scenario", {}).get("traffic") or []
    told = []
    for stream in streams:
        arrivals = stream.get("arrivals") or {}
        if arrivals.get("process") == "closed":
            told.append(f"{arrivals.get('users')} users")
        elif arrivals.get("rate") is not None:
            told.append(f"{arrivals['rate']}/s")
        elif stream.get("trace"):
            told.append(Path(str(stream["trace"])).name)
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
    return rows_at(run.predicted, rows), rows_at(run.measured, rows)


def rows_at(table: Table, rows: Sequence[int]) -> Table:
    """These rows of a table."""
    return {name: [column[i] for i in rows] for name, column in table.items()}
