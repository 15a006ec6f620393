"""What must be said before the figures of a comparison: what makes them doubtful, and what they leave out."""

import json
from collections.abc import Iterator, Sequence

from real.compare import LEFT_OUT, Run, differences, groups_of, mismatch_of
from real.measured import MOST_MISMATCH
from twin.report.texts import plural

LATE_S = 0.005
"""How late 1 % of the requests may have been sent before it is said."""
SHOWN = 4
"""Differences of two set-ups that are named."""


def notes(runs: Sequence[Run], is_warmed: bool, frontend_s: float) -> list[str]:
    """Sentences, lengths first. `is_warmed` says that the twin had served something before."""
    told = [note for run in runs for note in _lengths(run)]
    told += [note for run in runs for note in _counts(run)]
    told += _apart(runs)
    told += [note for run in runs for note in _conditions(run, is_warmed)]
    if frontend_s:
        told.append(
            f"{1e3 * frontend_s:.2f} ms outside the scheduler are added to the twin's latencies"
        )
    return told


def _lengths(run: Run) -> Iterator[str]:
    found = mismatch_of(run)
    if found is not None and found.either > MOST_MISMATCH:
        yield f"{run.name}: {found}; the twin is told those they had"


def _counts(run: Run) -> Iterator[str]:
    """Requests that only one side has, or completed."""
    measured, predicted = run.measured["outcome"], run.predicted["outcome"]
    failed = sum(outcome != "completed" for outcome in measured)
    if failed:
        yield (
            f"{run.name}: {failed:,} of {plural(len(measured), 'request')} did not complete at the server; they are "
            "load for the twin, too, and count in no figure"
        )
    if run.not_given:
        yield (
            f"{run.name}: {plural(run.not_given, 'request')} got no token and cannot be given to the twin, which has "
            "less load for that"
        )
    if len(predicted) != len(measured):
        yield (
            f"{run.name}: the server had {plural(len(measured), 'request')}, the twin {len(predicted):,}"
        )
    both = zip(predicted, measured, strict=False)
    lost = sum(
        ours not in ("completed", LEFT_OUT) for ours, theirs in both if theirs == "completed"
    )
    if lost:
        yield f"{run.name}: {plural(lost, 'request')} that the server completed did not complete in the twin"


def _apart(runs: Sequence[Run]) -> Iterator[str]:
    """Runs of one traffic that are not taken together, and why."""
    firsts: dict[str, Run] = {}
    for first, *_ in groups_of(runs):
        scenario = first.setup.get("scenario")
        if scenario is None:
            continue
        traffic = json.dumps(scenario.get("traffic"), sort_keys=True)
        other = firsts.setdefault(traffic, first)
        if other is not first:
            found = differences(other.setup, first.setup)
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            yield (
                f"{other.name} and {first.name} had the same traffic, and are not taken together: "
                f"{'; '.join(found[:SHOWN])}{more}"
            )


def _conditions(run: Run, is_warmed: bool) -> Iterator[str]:
    start = run.facts.get("server", {}).get("cache_at_start", "unknown")
    twin = "warmed" if is_warmed else "cold"
    if start != twin and not (start == "warm" and is_warmed):
        hint = "; give the twin what it had served with --warm" if start == "warm" else ""
        yield f"{run.name}: the server's prefix cache was {start} at the start, the twin's {twin}{hint}"
    late = run.facts.get("client", {}).get("lateness")
    if late and late["p99_s"] > LATE_S and not run.facts.get("max_in_flight"):
        yield f"{run.name}: 1 % of the requests were sent more than {1e3 * late['p99_s']:.1f} ms after their time"
