"""How far is a prediction from what was measured? Two request tables in, one table of errors out, worst first.

A request table is a mapping from the columns of `requests.parquet` (docs/report.md) to sequences of equal length, one
entry a request, times in seconds; a pandas DataFrame is one, too. Only the columns a metric needs must be there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twin.metrics.columns import NONE
from twin.metrics.records import OUTCOMES
from twin.simulation import Result
from twin.step_time.trust import Regime, Subject, load_of
from twin.subject import subject_of

STATS = ("mean", "p50", "p90", "p95", "p99")
"""Statistics that are compared of each latency."""

LATENCIES = ("ttft", "tpot", "itl", "e2e")
"""Latencies that are compared, as docs/metrics.md defines them."""

RATES = ("requests_per_s", "output_tokens_per_s")
"""Rates that are compared: what completed, between the first arrival and the last finish."""

QUEUE = ("queue_mean", "queue_max")
"""Depths of the queue that are compared: requests that have come and have no token yet, of those that complete; their
mean between the first arrival and the last finish, and the most at once."""

RequestTable = Mapping[str, Any]
"""Column -> values, one a request."""


@dataclass(frozen=True)
class Comparison:
    """One figure, predicted and measured."""

    metric: str
    """`<latency>_<statistic>` in seconds, one of RATES per second, or one of QUEUE in requests."""
    regime: str
    """What the requests have in common: load, cache state, tier, ..."""
    predicted: float
    measured: float
    requests: int
    """Measured requests behind the figure."""

    @property
    def error(self) -> float:
        """Relative error of the prediction: predicted / measured - 1; infinite where nothing was measured (0)."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else math.inf
        return self.predicted / self.measured - 1

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return {
            "metric": self.metric,
            "regime": self.regime,
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
            "requests": self.requests,
        }


def compare_requests(
    predicted: RequestTable,
    measured: RequestTable,
    regime: str,
    metrics: Sequence[str] = (),
) -> list[Comparison]:
    """The two tables as wholes, one row a metric that both have, worst first.

    Args:
        predicted: What the twin gave, the columns of its requests.parquet.
        measured: What a server gave, the same columns.
        regime: Name for what these requests have in common.
        metrics: Only these (`ttft_p50`, `requests_per_s`, ...); empty = all.

    Only requests that completed count, in each table by itself. A metric whose columns are missing in a table, or for
    which no request has a value, gives no row.
    """
    found = (figures(predicted), figures(measured))
    number = int(_completed(measured).sum())
    rows = [
        Comparison(name, regime, found[0][name], value, number)
        for name, value in found[1].items()
        if name in found[0] and (not metrics or name in metrics)
    ]
    return worst_first(rows)


def compare_by(
    predicted: RequestTable,
    measured: RequestTable,
    column: str,
    metrics: Sequence[str] = (),
) -> list[Comparison]:
    """The two tables group by group of equal values in `column` (tier, replica, ...), regime `column=value`.

    Worst first over all groups. A group that only one table has gives no row. Raises KeyError without the column.
    """
    rows: list[Comparison] = []
    theirs = np.asarray(measured[column])
    ours = np.asarray(predicted[column])
    for value in dict.fromkeys(theirs.tolist()):
        rows += compare_requests(
            _where(predicted, ours == value),
            _where(measured, theirs == value),
            f"{column}={value}",
            metrics,
        )
    return worst_first(rows)


def table_of(result: Result) -> RequestTable:
    """The request table of a run of the twin, without the gaps between tokens. Raises InputError if none was kept."""
    columns = result.records.columns()

    def seconds(name: str) -> npt.NDArray[np.float64]:
        ps = columns[name]
        return np.where(ps == NONE, np.nan, ps / 1e12)

    times = ("arrival", "first_scheduled", "first_token", "finish")
    return {
        **{f"{name}_s": seconds(f"{name}_ps") for name in times},
        **{name: columns[name] for name in ("prompt_tokens", "output_tokens")},
        "tier": [columns.tiers[number] for number in columns["tier"]],
        "outcome": [OUTCOMES[number] for number in columns["outcome"]],
    }


@dataclass(frozen=True)
class Outcome:
    """A measured run beside the twin's."""

    group: str
    name: str
    rows: tuple[Comparison, ...]
    """One a measured metric, worst first."""
    subject: Subject
    num_gpu_blocks: int
    order: float
    """Rate or concurrency."""
    assumed: bool = False
    """Something about the run was assumed that decides its errors, so that it is no evidence."""

    def error(self, metric: str) -> float:
        """Relative error of a metric that was measured."""
        return next(row.error for row in self.rows if row.metric == metric)


def outcome_of(
    group: str,
    name: str,
    order: float,
    measured: Mapping[str, float],
    result: Result,
    assumed: bool = False,
) -> Outcome:
    """What was measured of a run beside the twin's run of it."""
    scenario, table = result.scenario, table_of(result)
    found = figures(table)
    number = int(_completed(table).sum())
    waited = _numbers(table, "first_scheduled_s") - _numbers(table, "arrival_s")
    load = load_of(float(np.nanmean(waited)), found["e2e_mean"])
    rows = [Comparison(m, group, found[m], value, number) for m, value in measured.items()]
    return Outcome(
        group,
        name,
        tuple(worst_first(rows)),
        subject_of(scenario, load),
        scenario.engine.num_gpu_blocks,
        order,
        assumed,
    )


def regimes_of(outcomes: Iterable[Outcome]) -> list[Regime]:
    """The errors by set-up and kind of load: medians and largest of the sizes of each metric's errors.

    Runs of which something was assumed are left out.
    """
    groups: dict[Subject, list[Outcome]] = {}
    for outcome in (o for o in outcomes if not o.assumed):
        groups.setdefault(outcome.subject, []).append(outcome)
    found = []
    for subject, runs in groups.items():
        sizes: dict[str, list[float]] = {}
        for run in runs:
            for row in run.rows:
                sizes.setdefault(row.metric, []).append(abs(row.error))
        model = subject.model.rsplit("/", 1)[-1]
        name = (
            f"{model} {subject.dtype} on {subject.tensor_parallel_size} x {subject.gpu}, {subject.load} load, "
            f"step times by {subject.origin}"
        )
        found.append(
            Regime(
                subject,
                name,
                len(runs),
                {metric: round(float(np.median(v)), 4) for metric, v in sizes.items()},
                {metric: round(max(v), 4) for metric, v in sizes.items()},
            )
        )
    return sorted(found, key=lambda regime: regime.name)


def knee(points: Iterable[tuple[float, float]]) -> float:
    """The highest rate at which the median TTFT is under twice that of the lowest rate; points are (rate, TTFT)."""
    ordered = sorted(points)
    idle = ordered[0][1]
    return max(rate for rate, ttft in ordered if ttft < 2 * idle)


def worst_first(rows: Iterable[Comparison]) -> list[Comparison]:
    """The rows by size of their error, largest first; equal ones by regime and metric."""
    return sorted(rows, key=lambda row: (-abs(row.error), row.regime, row.metric))


def figures(table: RequestTable) -> dict[str, float]:
    """What is compared of one table: metric -> value. Percentiles are linear between ranks, as in `twin run`."""
    done = _completed(table)
    result: dict[str, float] = {}
    for latency in LATENCIES:
        values = _latency(table, latency, done)
        if values is not None and len(values):
            result[f"{latency}_mean"] = float(values.mean())
            for stat in STATS[1:]:
                result[f"{latency}_{stat}"] = float(np.percentile(values, int(stat[1:])))
    if done.any() and _has(table, "arrival_s", "finish_s"):
        finish = _numbers(table, "finish_s")[done]
        span = float(finish.max() - _numbers(table, "arrival_s").min())
        if span > 0:
            result["requests_per_s"] = float(done.sum()) / span
            if _has(table, "output_tokens"):
                result["output_tokens_per_s"] = (
                    float(_numbers(table, "output_tokens")[done].sum()) / span
                )
            if _has(table, "first_token_s"):
                result |= _queue(table, done, span)
    return result


def _queue(table: RequestTable, done: npt.NDArray[np.bool_], span_s: float) -> dict[str, float]:
    """Figures of QUEUE; none where no request has a first token."""
    came = _numbers(table, "arrival_s")[done]
    began = _numbers(table, "first_token_s")[done]
    came, began = np.sort(came[~np.isnan(began)]), np.sort(began[~np.isnan(began)])
    if not len(came):
        return {}
    # The most are waiting when one has just come.
    waiting = np.searchsorted(came, came, "right") - np.searchsorted(began, came, "right")
    return {
        "queue_mean": float((began - came).sum()) / span_s,
        "queue_max": float(waiting.max()),
    }


def _latency(
    table: RequestTable, latency: str, done: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64] | None:
    """The values of a latency of the requests in `done`; None where the table lacks a column for it."""
    match latency:
        case "ttft" if _has(table, "arrival_s", "first_token_s"):
            values = _numbers(table, "first_token_s") - _numbers(table, "arrival_s")
        case "tpot" if _has(table, "first_token_s", "finish_s", "output_tokens"):
            gaps = _numbers(table, "output_tokens") - 1
            span = _numbers(table, "finish_s") - _numbers(table, "first_token_s")
            values = np.divide(span, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0)
        case "itl" if _has(table, "itl_s"):
            lists = [
                np.asarray(gaps, dtype=np.float64)
                for gaps, is_done in zip(table["itl_s"], done.tolist(), strict=True)
                if is_done and gaps is not None
            ]
            return np.concatenate(lists) if lists else np.empty(0)
        case "e2e" if _has(table, "arrival_s", "finish_s"):
            values = _numbers(table, "finish_s") - _numbers(table, "arrival_s")
        case _:
            return None
    values = values[done]
    return values[~np.isnan(values)]


def _completed(table: RequestTable) -> npt.NDArray[np.bool_]:
    """Which requests completed; all of them where the table does not say."""
    if _has(table, "outcome"):
        return np.asarray([outcome == "completed" for outcome in table["outcome"]], dtype=np.bool_)
    some = next(name for name in ("arrival_s", "finish_s", "prompt_tokens") if _has(table, name))
    return np.ones(len(table[some]), dtype=np.bool_)


def _has(table: RequestTable, *columns: str) -> bool:
    return all(column in table for column in columns)


def _numbers(table: RequestTable, column: str) -> npt.NDArray[np.float64]:
    """A column as floats, NaN for what is missing."""
    values = [math.nan if value is None else value for value in table[column]]
    return np.asarray(values, dtype=np.float64)


def _where(table: RequestTable, wanted: npt.NDArray[np.bool_]) -> RequestTable:
    """The requests of a table for which `wanted` holds."""
    keep = np.flatnonzero(wanted).tolist()
    return {name: [list(table[name])[i] for i in keep] for name in table}
