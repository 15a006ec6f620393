"""Numbers, stamps and names of trace files, read exactly from their digits or refused."""

import re
from datetime import date
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any

from twin.clock import PS
from twin.workload.formats.rows import MalformedError

MAX_TOKENS = 10**9
MAX_CONTENT = 2**64
"""Content ids lie below it."""
EPOCH_FROM_PS = 10**9 * PS
"""Numeric stamps from here on (September 2001 as an epoch) are dates, smaller ones count from a zero of their own."""
MAX_STAMP_PS = 10**11 * PS

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d):(\d\d)(?:\.(\d{1,12}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?")
_EXACT = Context(prec=80)


def shown(value: Any) -> str:
    """A value as messages quote it, cut where it is long."""
    text = repr(str(value) if isinstance(value, Decimal) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tokens(field: str, value: str | int | None) -> int:
    """A number of tokens, from 1 to MAX_TOKENS. Raises MalformedError."""
    if type(value) is int:
        number = value
    elif isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        number = int(value)
    elif isinstance(value, str) and value != value.strip():
        return tokens(field, value.strip())
    else:
        number = 0
    if 1 <= number <= MAX_TOKENS:
        return number
    raise MalformedError(
        "tokens",
        f"{field}: {shown(value)} must be a whole number of tokens, at least 1 and at most {MAX_TOKENS:,}; "
        "correct the row or remove it",
    )


def content_id(field: str, value: Any) -> int:
    """The id of a piece of content. Raises MalformedError."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    if type(value) is int and 0 <= value < MAX_CONTENT:
        return value
    raise MalformedError(
        "content", f"{field}: {shown(value)} must be a whole number from 0 to 2**64 - 1"
    )


def duration_ps(field: str, value: str | int | Decimal, unit_ps: int = PS) -> int:
    """Picoseconds of a number in some unit, not negative, to the nearest one. Raises MalformedError."""
    if isinstance(value, str):
        text = value.strip()
        if text.isascii() and text.isdigit() and len(text) < 19:
            value = int(text)
        elif _NUMBER.fullmatch(text):
            value = Decimal(text)
    if type(value) is int and value >= 0:
        return value * unit_ps
    if isinstance(value, Decimal) and value.is_finite() and value >= 0:
        if value.adjusted() > 20:
            raise MalformedError("stamp", f"{field}: {shown(value)} is too large for a time")
        return int(_EXACT.multiply(value, Decimal(unit_ps)).to_integral_value())
    raise MalformedError("stamp", f"{field}: {shown(value)} must be a number, not negative")


def instant_ps(field: str, stamp: str) -> tuple[int, bool]:
    """(picoseconds since the year 1, whether a time zone is named) of a date with time. Raises MalformedError."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        raise MalformedError(
            "stamp",
            f"{field}: {shown(stamp)} is no instant; write YYYY-MM-DD HH:MM:SS, with up to 12 decimals and a zone "
            "like +00:00 if you like",
        )
    minute, second, decimals, zone = match.groups()
    try:
        begin, seconds = _minute_seconds(minute), int(second)
    except ValueError as error:
        raise MalformedError("stamp", f"{field}: {stamp!r}: {error}") from None
    if begin is None or seconds > 59:
        raise MalformedError(
            "stamp", f"{field}: {stamp!r} has no such time of day; at most 23:59:59"
        )
    seconds += begin
    if zone and zone != "Z":
        offset = int(zone[1:3]) * 3600 + int(zone[-2:]) * 60
        seconds += offset if zone[0] == "-" else -offset
    return seconds * PS + int((decimals or "").ljust(12, "0")), zone is not None


@lru_cache(maxsize=64)
def _minute_seconds(minute: str) -> int | None:
    """Seconds from the year 1 to a YYYY-MM-DD HH:MM; None if a day has no such minute. Many rows are of one."""
    hours, minutes = int(minute[11:13]), int(minute[14:])
    days = date.fromisoformat(minute[:10]).toordinal()
    return days * 86_400 + hours * 3600 + minutes * 60 if hours < 24 and minutes < 60 else None


def seconds_text(ps: int, unit_ps: int = PS) -> str:
    """Picoseconds as an exact decimal number of seconds, or of another unit that is a power of ten."""
    whole, rest = divmod(ps, unit_ps)
    if not rest:
        return str(whole)
    digits = len(str(unit_ps)) - 1
    return f"{whole}.{rest:0{digits}d}".rstrip("0")


NO_ZONE = "has no time zone"


def _in_minute(stamp: str) -> int:
    """Picoseconds of a stamp, without a zone, since its minute began; -1 where it needs a closer look."""
    seconds, point, decimals = stamp[17:19], stamp[19:20], stamp[20:]
    is_plain = seconds.isdigit() and decimals.isdigit() and stamp.isascii() and point == "."
    if not is_plain or len(decimals) > 12 or seconds > "59":
        return -1
    return int(seconds) * PS + int(decimals.ljust(12, "0"))


class Clock:
    """The stamps of one file as instants: all of one kind, never back in time."""

    __slots__ = (
        "_base_ps",
        "_field",
        "_kind",
        "_last_line",
        "_last_ps",
        "_last_stamp",
        "_minute",
        "_minute_ps",
    )

    def __init__(self, field: str) -> None:
        self._field = field
        self._kind = ""
        self._base_ps = 0
        self._last_ps = 0
        self._last_line = 0
        self._last_stamp: Any = None
        self._minute = ""  # of the last stamp without a zone, up to its seconds
        self._minute_ps = 0

    def date(self, line: int, stamp: str) -> int:
        """Picoseconds after the first row, of a date with time."""
        if stamp[:17] == self._minute:
            # Most rows are of the minute of the one before them.
            after_ps = _in_minute(stamp)
            if after_ps >= 0:
                return self._take(line, stamp, self._minute_ps + after_ps, NO_ZONE)
        now_ps, zoned = instant_ps(self._field, stamp)
        if not zoned:
            self._minute, self._minute_ps = stamp[:17], now_ps - now_ps % (60 * PS)
        return self._take(line, stamp, now_ps, "has a time zone" if zoned else NO_ZONE)

    def number(self, line: int, stamp: str | int | Decimal, unit_ps: int) -> int:
        """Picoseconds of a number: from the clock's own zero, or after the first row if it is an epoch."""
        now_ps = duration_ps(self._field, stamp, unit_ps)
        if now_ps > MAX_STAMP_PS:
            unit = {PS: "seconds", PS // 1000: "milliseconds"}.get(unit_ps, "this unit")
            raise MalformedError(
                "stamp", f"{self._field}: {shown(stamp)} {unit} lie beyond the year 5000; is the unit another?"
            )  # fmt: skip
        if now_ps < EPOCH_FROM_PS:
            return self._take(line, stamp, now_ps, "counts from the start of the trace")
        return self._take(line, stamp, now_ps, "is an epoch")

    def _take(self, line: int, stamp: Any, now_ps: int, kind: str) -> int:
        if kind != self._kind:
            if self._kind:
                raise MalformedError(
                    "clock",
                    f"{self._field}: {shown(stamp)} {kind}, the stamp {shown(self._last_stamp)} of line "
                    f"{self._last_line} {self._kind}; write all stamps the same way",
                )
            self._kind = kind
            self._base_ps = 0 if kind.startswith("counts") else now_ps
        elif now_ps < self._last_ps:
            raise MalformedError(
                "order",
                f"{self._field}: {shown(stamp)} is before {shown(self._last_stamp)} of line {self._last_line}; sort "
                f"the file by {self._field}",
            )
        self._last_ps, self._last_line, self._last_stamp = now_ps, line, stamp
        return now_ps - self._base_ps
