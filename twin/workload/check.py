"""What is in a trace file, and what is wrong with it, line by line."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from twin.clock import PS, to_seconds
from twin.interrupt import stop_on_ctrl_c
from twin.workload.formats.choose import NO_ROWS, Detected, count_rows, format_of
from twin.workload.formats.files import ends_in_a_line_end
from twin.workload.formats.rows import FAULT_KINDS, Fault, Rows, TraceRow
from twin.workload.load import Gaps, Load
from twin.workload.names import Names
from twin.workload.prefixes import InfiniteCache

RATE_BOUNDS = (0.001, 10_000.0)
"""Mean requests per second outside of which the unit of the stamps is probably wrong."""
QUANTILES = (5, 25, 50, 75, 90, 95, 99)
WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400)
"""Seconds of a bin of the rate profile; longer ones are multiples of the last."""
MOST_SLICES = 16
LISTED_NAMES = 20
TICK_UNIT_PS = PS // 100
MOST_STEPS = 10_000
"""Different steps between stamps that are counted; a coarse clock has few."""
DAY = 86_400
LONGEST_PROMPT = 10_000_000
IDLE_SHARE, IDLE_RATE = 0.1, 0.2
"""The beginning is called idle if this share of the time runs at less than this multiple of the mean rate."""


@dataclass(frozen=True)
class Selection:
    """Which rows of a file are looked at."""

    window_ps: tuple[int, int] | None = None
    """Only instants from the first on and before the second; None = all."""
    first: int | None = None
    """At most so many requests; None = all."""

    def of(self, rows: Rows) -> Rows:
        """The rows within; malformed lines are passed on, as nothing is known of their instants."""
        if self.window_ps is not None:
            rows = _within(rows, *self.window_ps)
        return rows if self.first is None else _first(rows, self.first)


EVERYTHING = Selection()


def _within(rows: Rows, from_ps: int, to_ps: int) -> Rows:
    for row in rows:
        if isinstance(row, Fault) or from_ps <= row.at_ps < to_ps:
            yield row
        elif row.at_ps >= to_ps:
            return


def _first(rows: Rows, count: int) -> Rows:
    for row in rows:
        if not isinstance(row, Fault):
            if not count:
                return
            count -= 1
        yield row


LINES_PER_LOOK = 1 << 14
"""Lines between two looks at progress."""

Progress = Callable[[int, int], None]
"""(lines looked at, lines of the file), called now and then."""


def check_trace(
    path: str,
    name: str | None = None,
    selection: Selection = EVERYTHING,
    listed: int = 20,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], Load]:
    """Everything that can be said of a trace, as plain data (seconds, tokens), and what it asks for when.

    `name` forces the format. Of the malformed lines the first `listed` are named, the rest counted. Raises InputError
    for a file that cannot be opened or is like no known format. Ctrl-C ends the look early: what was read until then
    is told, with `interrupted`.
    """
    detected = format_of(path, name)
    looked = _Looked(detected, listed)
    rows = detected.format.read(path)
    if progress is not None:
        rows = _watched(rows, progress, count_rows(path, detected.format))
    with stop_on_ctrl_c() as pressed:
        for item in selection.of(rows):
            if isinstance(item, Fault):
                looked.fault(item)
            else:
                looked.row(item)
            if pressed:
                break
    if not (looked.rows or looked.faults or pressed):
        looked.fault(Fault(1, "empty", NO_ROWS))
    whole_lines = bool(pressed) or detected.format.kind == "parquet" or ends_in_a_line_end(path)
    found = {"file": path, "interrupted": bool(pressed)} | looked.result(whole_lines)
    return found, looked.load


def _watched(rows: Rows, progress: Progress, total: int) -> Rows:
    for number, row in enumerate(rows):
        if number % LINES_PER_LOOK == 0:
            progress(number, total)
        yield row


class _Looked:
    """What was seen so far."""

    def __init__(self, detected: Detected, listed: int) -> None:
        self.format, self.why = detected
        self.rows = 0
        self.faults: Counter[str] = Counter()
        self._listed = listed
        self._named: list[Fault] = []
        self.load = Load()
        self._gaps = Gaps()
        self._first_ps = self._last_ps = 0
        self._stamps = 0
        self._steps: Counter[int] = Counter()
        """Steps from one stamp to the next other one, in TICK_UNIT_PS."""
        self._prompt: Counter[int] = Counter()
        self._output: Counter[int] = Counter()
        self._cache = InfiniteCache()
        self._last_row: TraceRow | None = None
        self._at_stamp: set[tuple[object, ...]] = set()
        """All that rows of the last stamp say, if there are several."""
        self._repeated = 0
        self._repeated_line = 0
        self._beyond = 0
        self._beyond_line = 0
        self._few_ids = 0
        self._few_ids_line = 0
        self._names = Names()

    def fault(self, fault: Fault) -> None:
        """A malformed line."""
        self.faults[fault.kind] += 1
        if len(self._named) < self._listed:
            self._named.append(fault)

    def row(self, row: TraceRow) -> None:
        """A request."""
        at_ps = row.at_ps
        if not self.rows:
            self._first_ps, self._stamps = at_ps, 1
        elif at_ps == self._last_ps:
            self._compare(row)
        else:
            self._at_stamp.clear()
            if len(self._steps) < MOST_STEPS:
                self._steps[round((at_ps - self._last_ps) / TICK_UNIT_PS)] += 1
            self._stamps += 1
        self.rows += 1
        self._last_ps, self._last_row = at_ps, row
        self._gaps.add(at_ps)
        self.load.add(at_ps, row.prompt_tokens, row.output_tokens)
        self._prompt[row.prompt_tokens] += 1
        self._output[row.output_tokens] += 1
        if row.max_tokens is not None and row.output_tokens > row.max_tokens:
            self._beyond += 1
            self._beyond_line = self._beyond_line or row.line
        if row.prompt is not None:
            self._cache.add(row)
            block = self.format.block_tokens
            if block and row.prompt_tokens - len(row.prompt) * block >= block:
                self._few_ids += 1
                self._few_ids_line = self._few_ids_line or row.line
        self._names.add(row)

    def _compare(self, row: TraceRow) -> None:
        """A row of the same instant as the last one: does it say the same as any of this instant?"""
        if not self._at_stamp and self._last_row is not None:
            self._at_stamp.add(self._last_row[2:])
        if row[2:] in self._at_stamp:
            self._repeated += 1
            self._repeated_line = self._repeated_line or row.line
        self._at_stamp.add(row[2:])

    def result(self, whole_lines: bool) -> dict[str, Any]:
        """All of it, as plain data."""
        found: dict[str, Any] = {
            "format": self.format.name,
            "format_title": self.format.title,
            "detected": self.why,
            "requests": self.rows,
            "repeated_lines": self._repeated,
            "malformed": {
                "total": self.faults.total(),
                "kinds": {kind: self.faults[kind] for kind in FAULT_KINDS if self.faults[kind]},
                "listed": [
                    {"line": fault.line, "kind": fault.kind, "problem": fault.problem}
                    for fault in self._named
                ],
            },
        }
        if self.rows:
            found["time"] = self._time()
            found["prompt_tokens"] = lengths(self._prompt)
            found["output_tokens"] = lengths(self._output)
            found["prefixes"] = self._prefixes()
            found |= self._names.result(LISTED_NAMES)
        found["warnings"] = list(self._warnings(found, whole_lines))
        return found

    def _time(self) -> dict[str, Any]:
        span_ps = self._last_ps - self._first_ps
        span_s = to_seconds(span_ps)
        rate = self.rows / span_s if span_ps else None
        busiest = self.load.busiest()
        dispersion = {f"{w}_s": self.load.dispersion(w * PS) for w in (1, 10, 60)}
        return {
            "first_s": to_seconds(self._first_ps),
            "span_s": span_s,
            "mean_rate": rate,
            "gap_cv": self._gaps.cv,
            "dispersion": dispersion,
            "busiest": {
                "window_s": busiest.to_s - busiest.from_s,
                "from_s": busiest.from_s,
                "rate": busiest.rate,
                "times_mean": None if rate is None else busiest.rate / rate,
            },
            "tick_s": self._tick_s(),
            "stamps": self._stamps,
            "profile": [
                {
                    "from_s": part.from_s,
                    "to_s": part.to_s,
                    "requests": part.requests,
                    "rate": part.rate,
                    "prompt_tokens": part.prompt_tokens,
                    "output_tokens": part.output_tokens,
                }
                for part in self.load.slices(profile_width(span_s) * PS)
            ],
        }

    def _tick_s(self) -> float | None:
        """The step of a clock so coarse that most requests share their stamp with others; None if it is not."""
        if self._stamps < 2 or self.rows < 1.5 * self._stamps:
            return None
        ((step, times),) = self._steps.most_common(1)
        if step * TICK_UNIT_PS < PS // 10 or times < self._stamps / 2:
            return None
        return to_seconds(step * TICK_UNIT_PS)

    def _prefixes(self) -> dict[str, Any]:
        known = self._cache.rows
        if not known:
            return {"known": "no", "requests": 0, "hit_tokens": 0, "attainable_share": None}
        hits = self._cache.hit_tokens()
        return {
            "known": "yes" if known == self.rows else "partly",
            "requests": known,
            "hit_tokens": hits,
            "attainable_share": hits / self._cache.prompt_tokens,
        }

    def _warnings(self, found: Mapping[str, Any], whole_lines: bool) -> Iterator[str]:
        if self._few_ids:
            yield (
                f"hash_ids: {self._few_ids:,} prompts are longer than their ids say, the first in line "
                f"{self._few_ids_line}: blocks have {self.format.block_tokens} tokens in format {self.format.name}; is "
                "the format another? The rest of such a prompt counts as text of its own"
            )
        if self._beyond:
            yield (
                f"output_tokens beyond the declared max_tokens: {self._beyond:,}, the first in line "
                f"{self._beyond_line}; such replies end at max_tokens, as in vLLM"
            )
        yield from self._names.warnings()
        if self._repeated:
            yield (
                f"lines that say the same as another of their instant: {self._repeated:,}, the first is "
                f"line {self._repeated_line}; they look alike or are there twice, and all of them count"
            )
        if not whole_lines:
            yield "the last line has no line end: if the file was cut short, its last number is too"
        if not self.rows:
            return
        longest = found["prompt_tokens"]["max"]
        if longest > LONGEST_PROMPT:
            yield f"the longest prompt has {longest:,} tokens, more than any model takes"
        time = found["time"]
        rate = time["mean_rate"]
        if rate is None and self.rows > 1:
            yield "all requests come at one instant"
        if rate is not None and not RATE_BOUNDS[0] <= rate <= RATE_BOUNDS[1]:
            low, high = RATE_BOUNDS
            yield (
                f"the mean rate is {rate:.3g} requests/s, outside {low:g} to {high:,.0f}: is the unit of the stamps "
                f"that of format {self.format.name}?"
            )
        if time["first_s"] > DAY:
            yield (
                f"the first request comes after {time['first_s'] / DAY:.1f} days; a window leaves the time before it "
                "out, and another unit of the stamps would explain it"
            )
        if time["tick_s"] is not None:
            yield (
                f"stamps come in ticks of {time['tick_s']:g} s, {self.rows / self._stamps:.1f} requests at each; "
                f"spread_ticks: {time['tick_s']:g} in the scenario spreads them, and the spread of gaps is that of the "
                "ticks"
            )
        if rate is not None:
            yield from _idle_start(self.load, rate)


def _idle_start(load: Load, rate: float) -> Iterator[str]:
    span_ps = load.last_ps - load.first_ps
    if span_ps < 100 * PS:
        return
    head_ps = int(span_ps * IDLE_SHARE)
    head = load.slices(head_ps, load.first_ps + head_ps)[0]
    if head.rate < IDLE_RATE * rate:
        yield (
            f"the beginning is nearly idle: {head.rate:.3g} requests/s in the first {head.to_s - head.from_s:,.0f} s, "
            f"{rate:.3g} on average; choose a window in which something happens"
        )


def profile_width(span_s: float) -> int:
    """Seconds of a bin, so that there are at most MOST_SLICES of them."""
    for width in WIDTHS:
        if span_s < width * MOST_SLICES:
            return width
    return WIDTHS[-1] * -int(-span_s // (WIDTHS[-1] * MOST_SLICES))


def lengths(counts: Mapping[int, int]) -> dict[str, float]:
    """Mean, spread and quantiles of lengths given as length -> how often.

    A quantile is the smallest length that at least so many percent of the requests do not exceed.
    """
    values = sorted(counts)
    n = sum(counts.values())
    total = sum(value * times for value, times in counts.items())
    square = sum(value * value * times for value, times in counts.items())
    found: dict[str, float] = {"mean": total / n, "min": values[0]}
    marks = [(q, -(-q * n // 100)) for q in QUANTILES]
    reached = 0
    for value in values:
        reached += counts[value]
        while marks and reached >= marks[0][1]:
            found[f"p{marks.pop(0)[0]}"] = value
    return found | {"max": values[-1], "std": sqrt(n * square - total**2) / n}
