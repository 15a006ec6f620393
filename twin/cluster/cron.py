"""Times of a week as cron writes them: minute, hour and day of the week."""

from dataclasses import dataclass

WEEK = 7 * 24 * 60
"""Minutes."""

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


@dataclass(frozen=True)
class Cron:
    """The minutes of a week, from Monday 00:00, at which an expression fires."""

    text: str
    minutes: tuple[int, ...]
    """Ascending, not empty."""

    def until_next(self, minute: int) -> int:
        """Minutes from `minute` of the week until it fires next, 1 to a whole week."""
        return min((at - minute - 1) % WEEK + 1 for at in self.minutes)

    def since_last(self, minute: int) -> int:
        """Minutes since it fired last, 0 if it does in that minute."""
        return min((minute - at) % WEEK for at in self.minutes)


@dataclass(frozen=True)
class Schedule:
    """A floor under the replicas, from each start to the end after it."""

    start: Cron
    end: Cron
    min_replicas: int

    def is_active(self, minute: int) -> bool:
        """Whether it holds in that minute of the week. Unlike a trigger of KEDA, an end without a start is none."""
        return self.start.since_last(minute) < self.end.since_last(minute)


def parse_cron(text: str) -> Cron:
    """The expression as data. Raises ValueError for what is none, and for days of the month and months."""
    fields = text.split()
    if len(fields) != 5:
        raise ValueError(f"{text!r} must have five fields: minute hour * * weekday")
    minute, hour, day, month, weekday = fields
    if (day, month) != ("*", "*"):
        raise ValueError(
            f"{text!r}: days of the month and months are not modelled; write * * there"
        )
    days = {(number + 6) % 7 for number in _values(weekday, 0, 7, text, _DAYS)}
    minutes = sorted(
        (day * 24 + at) * 60 + minute_of
        for day in days
        for at in _values(hour, 0, 23, text)
        for minute_of in _values(minute, 0, 59, text)
    )
    return Cron(text, tuple(minutes))


def _values(field: str, low: int, high: int, text: str, names: tuple[str, ...] = ()) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        if span == "*":
            start, stop = low, high
        else:
            start = _number(first, names, text)
            stop = _number(last, names, text) if dash else (high if slash else start)
        every = _number(step, (), text) if slash else 1
        if every < 1:
            raise ValueError(f"{text!r}: the step of {part!r} must be >= 1, got {every}")
        if not (low <= start <= high and low <= stop <= high):
            raise ValueError(f"{text!r}: {part!r} is not within {low} to {high}")
        if start > stop:
            raise ValueError(
                f"{text!r}: {part!r} begins after its end; write {start}-{high},{low}-{stop}"
            )
        found.update(range(start, stop + 1, every))
    return found


def _number(written: str, names: tuple[str, ...], text: str) -> int:
    if written.lower() in names:
        return names.index(written.lower())
    if not written.isdecimal():
        raise ValueError(f"{text!r}: {written!r} is no number")
    return int(written)
