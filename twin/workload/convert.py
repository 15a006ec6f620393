"""From one trace format to another, and what would be lost on the way."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from twin.errors import InputError
from twin.workload.check import EVERYTHING, Selection
from twin.workload.formats.choose import NO_ROWS, format_for, format_of, place
from twin.workload.formats.rows import HELD, Fault, Format, TraceRow, losses

ORIGINAL = Fraction(1)
"""The speed-up that changes nothing."""


@dataclass
class Converted:
    """What was written, so far."""

    source: str
    """Name of the format it comes from, "" if from a run."""
    target: str
    """Name of the format it was written in."""
    requests: int = 0
    skipped: int = 0
    """Malformed lines left out."""
    lost: Counter[str] = field(default_factory=Counter)
    """What the target cannot hold -> requests that had it."""


def convert(
    source: str,
    target: str,
    source_format: str | None = None,
    target_format: str | None = None,
    selection: Selection = EVERYTHING,
    speedup: Fraction = ORIGINAL,
    lossy: bool = False,
    skip_malformed: bool = False,
) -> Converted:
    """Write the requests of one file to another, row by row.

    With a window, instants count from its start; then `speedup` divides them. The file appears when all is written.
    Raises InputError for malformed lines (unless they are to be skipped), for what the target format cannot hold
    (unless `lossy`), and for files that cannot be read or written.
    """
    read, made = format_of(source, source_format).format, format_for(target, target_format)
    done = Converted(read.name, made.name)
    rows = _whole(source, read, selection, done, skip_malformed)
    if "replies" in read.holds and "replies" not in made.holds:
        rows = _without_unused_replies(rows, _asked(source, read, selection))
    _write(source, target, made, _at_speed(rows, selection, speedup), done, lossy)
    return done


def export(
    scenario: str, target: str, made: Format, rows: Iterable[TraceRow], lossy: bool
) -> Converted:
    """Write rows that come from the run of a scenario, under the same conditions as `convert`."""
    done = Converted("", made.name)
    _write(scenario, target, made, rows, done, lossy)
    return done


def _write(
    source: str, target: str, made: Format, rows: Iterable[TraceRow], done: Converted, lossy: bool
) -> None:
    assert made.write is not None
    made.write(target, _held(source, made, rows, done, lossy))


def _whole(
    path: str, read: Format, selection: Selection, done: Converted, skip_malformed: bool
) -> Iterator[TraceRow]:
    for row in selection.of(read.read(path)):
        if not isinstance(row, Fault):
            yield row
        elif skip_malformed:
            done.skipped += 1
        else:
            raise InputError(place(path, read, row))


def _asked(path: str, read: Format, selection: Selection) -> set[int]:
    """Ids of all content that prompts have."""
    rows = (row for row in selection.of(read.read(path)) if not isinstance(row, Fault))
    return {content for row in rows for content, _ in row.prompt or ()}


def _without_unused_replies(rows: Iterator[TraceRow], asked: set[int]) -> Iterator[TraceRow]:
    """A reply that no prompt contains need not be held."""
    for row in rows:
        yield row if row.reply is None or row.reply in asked else row._replace(reply=None)


def _at_speed(
    rows: Iterator[TraceRow], selection: Selection, speedup: Fraction
) -> Iterator[TraceRow]:
    start_ps = 0 if selection.window_ps is None else selection.window_ps[0]
    if not start_ps and speedup == 1:
        return rows
    return (row._replace(at_ps=round((row.at_ps - start_ps) / speedup)) for row in rows)


def _held(
    path: str, made: Format, rows: Iterable[TraceRow], done: Converted, lossy: bool
) -> Iterator[TraceRow]:
    for row in rows:
        for lost in losses(made, row, first=not done.requests):
            done.lost[lost] += 1
            if not lossy:
                where = f"line {row.line}" if done.source else f"request {done.requests}"
                raise InputError(
                    f"{path} {where}: format {made.name} cannot hold {HELD.get(lost, lost)}; write twin-jsonl, "
                    "twin-csv or twin-parquet, which can, or drop it with --lossy"
                )
        done.requests += 1
        yield row
    if not done.requests:
        raise InputError(f"{path}: {NO_ROWS}")
