"""From one trace format to another, and what would be lost on the way."""

from collections import Counter
from collections.abc import Iterator
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
    """What a conversion did."""

    source: Format
    target: Format
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
    done = Converted(format_of(source, source_format).format, format_for(target, target_format))
    assert done.target.write is not None
    rows = _rows(source, done, selection, speedup, lossy, skip_malformed)
    done.target.write(target, rows)
    return done


def _rows(
    path: str,
    done: Converted,
    selection: Selection,
    speedup: Fraction,
    lossy: bool,
    skip_malformed: bool,
) -> Iterator[TraceRow]:
    start_ps = 0 if selection.window_ps is None else selection.window_ps[0]
    for row in selection.of(done.source.read(path)):
        if isinstance(row, Fault):
            if not skip_malformed:
                raise InputError(place(path, done.source, row))
            done.skipped += 1
            continue
        if start_ps or speedup != 1:
            at_ps = round((row.at_ps - start_ps) / speedup)
            row = row._replace(at_ps=at_ps)
        for lost in losses(done.target, row, first=not done.requests):
            done.lost[lost] += 1
            if not lossy:
                raise InputError(
                    f"{path} line {row.line}: format {done.target.name} cannot hold {HELD.get(lost, lost)}; write "
                    "twin-jsonl, twin-csv or twin-parquet, which can, or drop it with --lossy"
                )
        done.requests += 1
        yield row
    if not done.requests:
        raise InputError(f"{path}: {NO_ROWS}")
