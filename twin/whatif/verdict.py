"""From the figures of several replications of A and B to a verdict in words, never on noise.

All intervals of one comparison hold together: each has the level 1 - 0.02 / (judged figures x variants) (Bonferroni).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twin.report.texts import duration
from twin.whatif.figures import Figures, Measure
from twin.whatif.sides import Side, side_of
from twin.whatif.statistics import EQUAL, Difference

ALPHA = 0.02
"""Chance that a comparison of two equal things calls any figure different. Latencies are not quite normal on any scale,
so that the true chance is somewhat larger; benchmarks/what_if_honesty.py counts it."""

TOLERANCE = 0.05
"""A figure that is not decided may be worse by this share and something else still be adopted."""

Differ = Callable[[str, float], Difference | None]
"""(name of a figure, level of the interval) -> the difference, if both sides have it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One figure of a variant beside the baseline."""

    measure: Measure
    difference: Difference | None
    """None where one side has no value."""
    before: Side
    after: Side

    @property
    def word(self) -> str:
        """better, worse, equal (within 1 %), open (the interval allows either), or none (nothing to judge).

        Serving nobody in any replication is worse than whatever was before. Where nobody was served in some of them, a
        difference of the others cannot speak for all.
        """
        before, after = self.before, self.after
        if after.is_gone != before.is_gone:
            gone, other = (after, before) if after.is_gone else (before, after)
            if other.served <= other.lost:
                return "open" if gone.lost and other.lost else "none"
            return "worse" if after.is_gone else "better"
        if after.is_gone:
            return "none"
        word = self._word_of_difference()
        if before.lost != after.lost and word != (
            "worse" if after.lost > before.lost else "better"
        ):
            return "open"
        return word

    def _word_of_difference(self) -> str:
        found = self.difference
        if found is None:
            return "none"
        if found.is_equal:
            return "equal"
        if not found.is_found:
            return "open"
        return "better" if (found.change > 0) == self.measure.more_is_better else "worse"

    @property
    def met_before(self) -> bool | None:
        """Whether the baseline keeps the objective, on average over the replications; None without one."""
        return self.before.met(self.measure.limit)

    @property
    def met_after(self) -> bool | None:
        """Whether the variant does."""
        return self.after.met(self.measure.limit)

    @property
    def is_risky(self) -> bool:
        """Whether it may be worse by more than TOLERANCE, so that nothing can be adopted on the rest.

        An objective that is kept even at the worse end of the interval is no risk.
        """
        found = self.difference
        if self.word != "open":
            return False
        if self.after.lost > self.before.lost or found is None:
            return self.after.lost >= self.before.lost
        worst = -found.low if self.measure.more_is_better else found.high
        scale = 1.0 if found.is_relative else max(abs(found.before), abs(found.after))
        end = found.before * (1 + found.high) if found.is_relative else found.before + found.high
        return worst > TOLERANCE * scale and not (
            self.measure.limit is not None and end <= self.measure.limit
        )

    @property
    def loss(self) -> str:
        """`8.88 before, then no request is served`; empty where every replication served somebody."""
        before, after = self.before, self.after
        if not (before.lost or after.lost):
            return ""
        if after.is_gone and before.is_gone:
            return "no request is served on either side"
        if after.is_gone:
            return (
                f"{value_text(before.value, self.measure.unit)} before, then no request is served"
            )
        if before.is_gone:
            return f"no request is served before, then {value_text(after.value, self.measure.unit)}"
        return (
            f"no request is served in {before.lost} of the runs before, and in {after.lost} after"
        )

    def text(self) -> str:
        """`ONLINE TTFT p99 -38 % [-44, -31]`."""
        found, label = self.difference, self.measure.label
        if self.loss:
            return f"{label}: {self.loss}"
        if found is None:
            return f"{label} nothing to judge"
        if found.change == found.low == found.high == 0:
            return f"{label} equal"
        return f"{label} {change_text(found, self.measure.unit)}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON. `lost` counts the replications in which requests came and none was served."""
        found = self.difference
        told: dict[str, Any] = {
            "figure": self.measure.name,
            "label": self.measure.label,
            "unit": self.measure.unit,
            "more_is_better": self.measure.more_is_better,
            "limit": self.measure.limit,
            "verdict": self.word,
            "met_before": self.met_before,
            "met": self.met_after,
            "before": self.before.value,
            "after": self.after.value,
            "lost_before": self.before.lost,
            "lost": self.after.lost,
            "loss": self.loss,
        }
        if found is not None:
            told |= {
                "before": found.before,
                "after": found.after,
                "change": found.change,
                "low": found.low,
                "high": found.high,
                "relative": found.is_relative,
                "pairs": found.pairs,
            }
        return told


def judge(
    measures: Sequence[Measure],
    differ: Differ,
    family: int,
    before: Sequence[Figures],
    after: Sequence[Figures],
) -> list[Judged]:
    """Every measure of one variant; `family` is how many figures are judged in the whole comparison."""
    level = 1 - ALPHA / max(1, family)
    return [
        Judged(m, differ(m.name, level), side_of(before, m.name), side_of(after, m.name))
        for m in measures
    ]


UNBOUNDED = 100.0
"""Above this share the end of an interval of a ratio is no bound worth telling."""


def change_text(found: Difference, unit: str) -> str:
    """`-38 % [-44, -31]`, or the absolute difference with its unit where there is no ratio."""
    if found.is_relative:
        ends = [100 * x for x in (found.change, found.low, found.high)]
        change, low, high = (_signed(x, _digits(found)) for x in ends)
        if found.high > UNBOUNDED and not found.is_found:
            return f"cannot be told with {found.pairs} pairs"
        return f"{change} % [{low}, {'no bound' if found.high > UNBOUNDED else high}]"
    if unit == "s":
        return f"{_duration(found.change)} [{_duration(found.low)}, {_duration(found.high)}]"
    if unit == "1":
        points = [100 * x for x in (found.change, found.low, found.high)]
        change, low, high = (_signed(x, 2) for x in points)
        return f"{change} points [{low}, {high}]"
    values = (f"{x:+.3g}" for x in (found.change, found.low, found.high))
    change, low, high = values
    return f"{change} {unit} [{low}, {high}]".replace("  ", " ")


def _digits(found: Difference) -> int:
    """Decimals of a percentage that the width of its interval warrants, and that tell an end from 0 where it is not."""
    width = 100 * (found.high - found.low)
    digits = 0 if width >= 2 else 1 if width >= 0.2 else 2
    while (
        found.is_found
        and digits < 2
        and not all(round(100 * x, digits) for x in (found.low, found.high))
    ):
        digits += 1
    return digits


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def _duration(seconds: float) -> str:
    sign = "-" if seconds < 0 else "+" if seconds > 0 else ""
    return sign + duration(abs(seconds))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a variant."""

    word: str
    """adopt, reject, trade-off, no difference or undecided."""
    text: str
    """The whole sentence."""


def conclude(name: str, found: Sequence[Judged], replications: str = "seeds") -> Verdict:
    """The sentence over a variant's figures; what is open is told, and decides nothing."""
    better = [j for j in found if j.word == "better"]
    worse = [j for j in found if j.word == "worse"]
    broken = [j for j in worse if j.met_before and j.met_after is False]
    cured = [j for j in better if j.met_before is False and j.met_after]
    missed = [j for j in found if j.met_after is False]
    risky = [j for j in found if j.is_risky]
    if broken:
        word, why = "reject", f"it breaks {_names(broken)}"
    elif better and risky and (not worse or cured):
        word, why = "undecided", f"{_names(better)} better, but {_hidden(risky, replications)}"
    elif better and not worse:
        word, why = "adopt", f"{_names(missed)} still missed" if missed else ""
    elif worse and not better:
        word, why = "reject", ""
    elif better and cured and not missed:
        word, why = "adopt", f"it keeps every objective, at the price of {_names(worse)}"
    elif better:
        word, why = "trade-off", f"{_names(better)} against {_names(worse)}"
    elif all(j.word in ("equal", "none") for j in found):
        word, why = "no difference", f"nothing differs by more than {EQUAL:.0%}".replace("%", " %")
    else:
        is_open = [j for j in found if j.word == "open"]
        word, why = "undecided", f"no difference shows, but {_hidden(is_open, replications)}"
    told = [j.text() for j in (*better, *worse)]
    level = [j for j in found if j.word == "equal"]
    if told and level:
        told.append(f"{_names(level)} equal")
    is_open = [j for j in found if j.word == "open"]
    if told and is_open:
        told.append(f"{_names(is_open)} within the noise")
    head = ", ".join(told)
    tail = word + (f" ({why})" if why else "")
    return Verdict(word, f"{name}: {head}: {tail}" if head else f"{name}: {tail}")


def _names(found: Sequence[Judged]) -> str:
    names = [j.measure.label for j in found]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _hidden(found: Sequence[Judged], replications: str) -> str:
    """How large a difference the widest of open intervals leaves room for."""
    lost = next((j for j in found if j.loss), None)
    if lost is not None:
        return f"{lost.measure.label}: {lost.loss}; more {replications} would tell"
    open_ones = [(j, j.difference) for j in found if j.difference is not None]
    widest, difference = max(open_ones, key=lambda pair: pair[1].could_hide)
    room = difference.could_hide
    if difference.is_relative and room > UNBOUNDED:
        return f"{widest.measure.label} cannot be told with {difference.pairs} pairs; more {replications} would tell"
    size = f"{100 * room:.0f} %" if difference.is_relative else f"{room:.3g} {widest.measure.unit}"
    return f"{widest.measure.label} could differ by up to {size}; more {replications} would tell"


def value_text(value: float | None, unit: str) -> str:
    """A figure for people."""
    if value is None:
        return "-"
    if unit == "s":
        return duration(value)
    if unit == "1":
        return f"{100 * value:.4g} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def over_text(of: Measure, value: float | None) -> str:
    """`ONLINE TTFT p99 1.4 s > 1 s` of an objective that is broken."""
    if value is None:
        return f"{of.label} (requests came and none is served)"
    return f"{of.label} {value_text(value, of.unit)} > {value_text(of.limit, of.unit)}"
