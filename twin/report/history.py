"""What Prometheus counts of requests, by engine and instant: histograms in its buckets, and requests by how they ended.

A value is counted from the first instant on that is not before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from twin.metrics.columns import NONE, Columns, Numbers, Rows, gaps_of_steps
from twin.metrics.objectives import Limits, limits_of
from twin.metrics.percentiles import seconds_of
from twin.metrics.records import OUTCOMES
from twin.metrics.timeseries import FIRST_PERIOD_PS
from twin.report.metric_names import TWIN, VLLM, one_two_five
from twin.scenario import Scenario

ENDED = ("stop", "length", "abort")
"""How a request can end in the engine, as vLLM names it."""

Floats: TypeAlias = npt.NDArray[np.float64]
Observed: TypeAlias = tuple[Numbers, Floats, Numbers, Numbers | None]
"""(engine, value, when it was observed, how often or None for once)"""

HISTOGRAMS = tuple(metric for metric in (*VLLM, *TWIN) if metric.kind == "histogram")


class Instants(Protocol):
    """The instants of a history."""

    count: int

    def rows(self, at_ps: Numbers) -> Numbers:
        """The number of the first instant that is not before each; `count` if there is none."""


class Given:
    """Instants that are known beforehand."""

    def __init__(self, at_ps: Numbers) -> None:
        self._at_ps = at_ps
        self.count = len(at_ps)

    def rows(self, at_ps: Numbers) -> Numbers:
        """The number of the first instant that is not before each; `count` if there is none."""
        return np.searchsorted(self._at_ps, at_ps, "left")


class Beats:
    """Multiples of a period which grows so that there are never more than `most`, as that of a Sampler does."""

    def __init__(self, period_ps: int | None, most: int) -> None:
        self.period_ps = FIRST_PERIOD_PS if period_ps is None else period_ps
        self.count = most
        self._factor = 2

    def rows(self, at_ps: Numbers) -> Numbers:
        """The number of the first instant that is not before each."""
        return -(-at_ps // self.period_ps)

    def coarsen(self) -> int:
        """Take a longer period; by what factor."""
        factor, self._factor = self._factor, 7 - self._factor
        self.period_ps *= factor
        return factor


class Grid:
    """Numbers by engine, group, instant and bucket, from the start of each instant's interval."""

    def __init__(self, instants: int, buckets: int) -> None:
        self.counts = np.zeros((0, 0, instants, buckets), dtype=np.int64)
        self.sums = np.zeros((0, 0, instants), dtype=np.float64)

    def add(
        self, engine: Numbers, group: Numbers, row: Numbers, bucket: Numbers, times: Numbers | int
    ) -> None:
        """Count values."""
        self._make_room(engine, group)
        np.add.at(self.counts, (engine, group, row, bucket), times)

    def add_sums(self, engine: Numbers, group: Numbers, row: Numbers, values: Floats) -> None:
        """Add up values that were counted."""
        np.add.at(self.sums, (engine, group, row), values)

    def _make_room(self, engine: Numbers, group: Numbers) -> None:
        engines, groups, instants, buckets = self.counts.shape
        last, most = int(engine.max(initial=-1)), int(group.max(initial=-1))
        if last >= engines or most >= groups:
            # Where engines come and go, room for the next ones too, so that this happens seldom.
            engines = max(engines, last + 1 + last // 2 if engines else last + 1)
            groups = max(groups, most + 1)
            old, before = self.counts.shape[:2], (self.counts, self.sums)
            self.counts = np.zeros((engines, groups, instants, buckets), dtype=np.int64)
            self.sums = np.zeros((engines, groups, instants), dtype=np.float64)
            self.counts[: old[0], : old[1]], self.sums[: old[0], : old[1]] = before

    def coarsen(self, factor: int) -> None:
        """Of each `factor` instants keep the last; instant 0 stays what it is."""
        starts = [0, *range(1, self.counts.shape[2], factor)]
        for name in ("counts", "sums"):
            joined = np.zeros_like(old := getattr(self, name))
            joined[:, :, : len(starts)] = np.add.reduceat(old, starts, axis=2)
            setattr(self, name, joined)


class History:
    """What is counted of the requests of a run. Groups are tiers, by their number in `tiers`."""

    def __init__(self, scenario: Scenario, instants: Instants) -> None:
        self._instants = instants
        self._aborts = scenario.policy is not None
        self._limits: Mapping[str, Limits] = {
            tier: limits_of(named) for tier, named in scenario.objectives.items()
        }
        self.tiers: Sequence[str] = ()
        self.bounds = {
            metric.name: metric.buckets or one_two_five(scenario.engine.max_model_len)
            for metric in HISTOGRAMS
        }
        count = instants.count
        self.grids = {name: Grid(count, len(bounds) + 1) for name, bounds in self.bounds.items()}
        self.grids |= {
            "twin:requests": Grid(count, len(OUTCOMES)),
            "twin:good_requests": Grid(count, 1),
            "vllm:request_success": Grid(count, len(ENDED)),
        }

    def add(self, block: Columns) -> None:
        """More requests."""
        self.tiers = block.tiers
        served = np.flatnonzero(block["replica"] != NONE)
        done = served[block.completed[served]]
        for metric in HISTOGRAMS:
            kind, _, name = metric.name.partition(":")
            if name == "inter_token_latency_seconds":
                for observed in _gaps(block, served):
                    self._observe(metric.name, None, *observed)
                continue
            rows = done
            if name == "time_to_first_token_seconds":
                rows = served[block["first_token_ps"][served] != NONE]
            elif name == "request_time_per_output_token_seconds" and kind == "twin":
                rows = done[block["itl_count"][done] > 0]
            at = "first_token_ps" if name == "time_to_first_token_seconds" else "finish_ps"
            tier = block["tier"][rows] if metric.labels else None
            values = _values(block, rows, name)
            self._observe(metric.name, tier, block["replica"][rows], values, block[at][rows], None)
        self._add_ended(block, served[block["finish_ps"][served] != NONE])

    def finish(self, period_ps: int) -> None:
        """The instants that count are multiples of this period, too."""
        while isinstance(self._instants, Beats) and self._instants.period_ps < period_ps:
            self._join(self._instants)

    @property
    def period_ps(self) -> int:
        """Of what all instants are multiples; 1 if they were given."""
        return self._instants.period_ps if isinstance(self._instants, Beats) else 1

    def _rows(self, at_ps: Numbers) -> Numbers:
        """The instants that count what came then."""
        beats = self._instants
        if isinstance(beats, Beats):
            last_ps = np.array([at_ps.max(initial=0)])
            while beats.rows(last_ps)[0] >= beats.count:
                self._join(beats)
        return beats.rows(at_ps)

    def _join(self, beats: Beats) -> None:
        factor = beats.coarsen()
        for grid in self.grids.values():
            grid.coarsen(factor)

    def _observe(
        self,
        name: str,
        tier: Numbers | None,
        engine: Numbers,
        values: Floats,
        at_ps: Numbers,
        times: Numbers | None,
    ) -> None:
        row = self._rows(at_ps)
        seen = np.flatnonzero(row < self._instants.count)
        engine, values, row = engine[seen], values[seen], row[seen]
        group = np.zeros_like(engine) if tier is None else tier[seen]
        often: Numbers | int = 1 if times is None else times[seen]
        bucket = np.searchsorted(np.array(self.bounds[name]), values, "left")
        grid = self.grids[name]
        grid.add(engine, group, row, bucket, often)
        grid.add_sums(engine, group, row, values * often)

    def _add_ended(self, block: Columns, rows: Rows) -> None:
        """Requests that have ended, counted when their client saw it."""
        row = self._rows(block["finish_ps"][rows])
        rows, row = rows[row < self._instants.count], row[row < self._instants.count]
        engine, tier, outcome = (block[n][rows] for n in ("replica", "tier", "outcome"))
        self.grids["twin:requests"].add(engine, tier, row, outcome, 1)
        good = block.completed[rows]
        for number, name in enumerate(block.tiers):
            for latency, limit_ps in self._limits.get(name, ()):
                good &= (tier != number) | (block.durations(latency)[rows] <= limit_ps)
        nothing = np.zeros_like(engine)
        self.grids["twin:good_requests"].add(engine[good], tier[good], row[good], nothing[good], 1)
        known = [ENDED.index(reason) if reason in ENDED else NONE for reason in block.reasons]
        # A client that hangs up is not counted; a request that the policy ended is.
        rest = ENDED.index("abort") if self._aborts else NONE
        ended = np.where(
            block.completed[rows], np.array(known, dtype=np.int64)[block["reason"][rows]], rest
        )
        counted = ended != NONE
        self.grids["vllm:request_success"].add(
            engine[counted], nothing[counted], row[counted], ended[counted], 1
        )


def _gaps(block: Columns, rows: Rows) -> Iterator[Observed]:
    """Every gap between tokens when it ends, engine by engine."""
    for timeline, own in block.with_gaps(rows):
        if timeline is not None:
            replica = block["replica"][own[0]]
            for gaps, times, at_ps in gaps_of_steps(*block.steps(timeline, own)):
                yield np.full(len(gaps), replica), seconds_of(gaps), at_ps, times
            continue
        gaps, count = block.listed(own), block["itl_count"][own]
        ends = gaps.cumsum()
        before = np.concatenate(([0], ends))[count.cumsum() - count]
        at_ps = ends + np.repeat(block["first_token_ps"][own] - before, count)
        yield np.repeat(block["replica"][own], count), seconds_of(gaps), at_ps, None


def _values(block: Columns, rows: Rows, name: str) -> Floats:
    """What a histogram observes of these requests, seconds or tokens."""

    def since(start: str, end: str) -> Floats:
        return seconds_of(block[end][rows] - block[start][rows])

    match name:
        case "time_to_first_token_seconds":
            return since("arrival_ps", "first_token_ps")
        case "request_time_per_output_token_seconds":
            return since("first_token_ps", "finish_ps") / np.maximum(block["itl_count"][rows], 1)
        case "e2e_request_latency_seconds":
            return since("arrival_ps", "finish_ps")
        case "request_queue_time_seconds":
            return since("arrival_ps", "first_scheduled_ps")
        case "request_prefill_time_seconds":
            return since("first_scheduled_ps", "first_token_ps")
        case "request_decode_time_seconds":
            return since("first_token_ps", "finish_ps")
        case "request_inference_time_seconds":
            return since("first_scheduled_ps", "finish_ps")
        case "request_prefill_kv_computed_tokens":
            computed = block["prompt_tokens"][rows] - block["prefix_hit_tokens"][rows]
            return computed.astype(np.float64)
        case _:
            column = {
                "request_prompt_tokens": "prompt_tokens",
                "request_generation_tokens": "output_tokens",
                "request_num_preemptions": "preemptions",
            }[name]
            return block[column][rows].astype(np.float64)
