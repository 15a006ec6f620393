"""Records and time series as Parquet files, for notebooks and other tools."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twin.clock import PS
from twin.metrics.percentiles import seconds_of
from twin.metrics.records import RequestRecord
from twin.metrics.timeseries import COUNTERS, TimeSeries
from twin.report.records_file import COLUMNS, TIMES

COUNTS = ("replica", "gateway_waiting", "held", "ready", "running", *COUNTERS)
"""Columns of the time series that are whole numbers, without the tier behind their names."""

TEXT = ("tier", "tenant", "session", "outcome", "reason")


ROWS = 1 << 16
"""Requests that are written together."""


def write_requests(path: Path, records: Sequence[RequestRecord]) -> None:
    """One row a request, in the order of `records`. Times are seconds; `itl_s` lists the gaps between tokens."""
    import pyarrow.parquet as pq

    writer = None
    try:
        for start in range(0, len(records) or 1, ROWS):
            table = _requests(records[start : start + ROWS])
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _requests(records: Sequence[RequestRecord]) -> Any:
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if name in TIMES:
            attribute = name.removesuffix("_s") + "_ps"
            values = [_seconds(getattr(record, attribute)) for record in records]
            columns[name] = pa.array(values, pa.float64())
        else:
            kind = pa.string() if name in TEXT else pa.int64()
            columns[name] = pa.array([getattr(record, name) for record in records], kind)
    gaps = [np.array(record.itl_ps, dtype=np.int64) for record in records]
    ends = np.cumsum([0, *map(len, gaps)], dtype=np.int32)
    every = seconds_of(np.concatenate(gaps)) if gaps else np.empty(0)
    columns["itl_s"] = pa.ListArray.from_arrays(ends, every)
    return pa.table(columns)


def write_series(path: Path, series: TimeSeries) -> None:
    """One row an instant and replica; docs/metrics.md defines the columns."""
    import pyarrow as pa

    rows = list(series.rows())
    columns = {}
    for name in rows[0]:
        is_count = name.split(".")[0] in COUNTS
        columns[name] = pa.array(
            [row[name] for row in rows], pa.int64() if is_count else pa.float64()
        )
    _write(path, columns)


def _write(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, compression="zstd")


def _seconds(ps: int | None) -> float | None:
    return None if ps is None else ps / PS
