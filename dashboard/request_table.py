"""A table of requests as somebody uploaded it: looked at column by column before anything is computed from it."""

from typing import Any

import numpy as np
import pandas as pd

from twin.errors import InputError

NUMBERS = ("arrival_s", "first_token_s", "finish_s", "output_tokens")
"""Columns of a table of requests that are compared as numbers; itl_s has lists of them."""


def request_table(name: str, path: str) -> pd.DataFrame:
    """A table of requests. Raises InputError, naming the column, for a file that holds none."""
    try:
        table = pd.read_parquet(path)
    except MemoryError:
        raise
    except Exception as error:  # whatever the reader finds wrong with bytes of any kind
        told = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"{name}: not readable as Parquet: {told[0]}") from None
    if not table.columns.is_unique:
        raise InputError(f"{name}: two columns have the same name")
    if "arrival_s" not in table:
        raise InputError(f"{name}: no column arrival_s; it is no table of requests")
    for column in NUMBERS:
        of = table.get(column)
        if of is not None and not of.isna().all() and not pd.api.types.is_numeric_dtype(of):
            raise InputError(f"{name}: column {column}: must hold numbers, holds {of.dtype}")
    for column, what, is_right in (
        ("itl_s", "lists of numbers", _is_list_of_numbers),
        ("tier", "text", lambda value: isinstance(value, str)),
    ):
        for row, value in enumerate(table.get(column, ())):
            if not is_right(value):
                raise InputError(
                    f"{name}: column {column}: must hold {what}, row {row + 1} holds {str(value)[:40]!r}"
                )
    return table


def _is_list_of_numbers(value: Any) -> bool:
    if value is None:
        return True
    try:
        return np.asarray(value, dtype=np.float64).ndim == 1
    except (TypeError, ValueError):
        return False
