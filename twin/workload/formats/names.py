"""Names of tiers, tenants, sessions and requests in trace files."""

from typing import Any

from twin.errors import InputError
from twin.workload.formats.rows import MalformedError
from twin.workload.formats.values import shown

LONGEST_NAME = 200


def name_or_none(field: str, value: Any) -> str | None:
    """A name as it stands, None for nothing or an empty one; whole numbers count as names. Raises MalformedError."""
    if value is None or value == "":
        return None
    if type(value) is int:
        return str(value)
    if isinstance(value, str) and len(value) <= LONGEST_NAME:
        return value
    raise MalformedError(
        "value", f"{field}: {shown(value)} must be text of at most {LONGEST_NAME} characters"
    )


def csv_field(field: str, name: str) -> str:
    """A name as a field of a CSV line. Raises InputError for one that spans lines."""
    if not name:
        return ""
    if "\n" in name or "\r" in name:
        raise InputError(
            f"{field}: {shown(name)} has a line end, which a line of CSV cannot hold; write twin-jsonl or twin-parquet"
        )
    if '"' in name or "," in name:
        return '"' + name.replace('"', '""') + '"'
    return name
