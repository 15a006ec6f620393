"""Which requests of a run are predicted worst, and what do they have in common?"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from real.compare import Run, Table

FEATURES = {
    "prompt tokens": "prompt_tokens",
    "output tokens": "output_tokens",
    "prompt tokens found in the prefix cache": "prefix_hit_tokens",
    "requests inside when it came": "inside",
    "seconds after the start": "arrival_s",
}


@dataclass(frozen=True)
class Misses:
    """The requests of a run that are predicted worst, and what sets them apart."""

    rows: list[dict[str, Any]]
    """The worst ones, by how much their time to first token is off."""
    differs: list[str]
    """Sentences on what the worst tenth has that the others have not."""


def misses_of(run: Run, most: int = 10) -> Misses:
    """Of the requests that both have."""
    theirs, ours = run.measured, run.predicted
    if len(theirs["arrival_s"]) != len(ours["arrival_s"]):
        return Misses([], ["the twin and the server did not serve the same number of requests"])
    inside = _inside(theirs)
    found = []
    for i, (a, b) in enumerate(zip(theirs["first_token_s"], ours["first_token_s"], strict=True)):
        if a is None or b is None:
            continue
        measured_s, predicted_s = a - theirs["arrival_s"][i], b - ours["arrival_s"][i]
        found.append((abs(predicted_s - measured_s), i, measured_s, predicted_s))
    found.sort(reverse=True)
    rows = [
        {
            "request": theirs["index"][i],
            "tier": theirs["tier"][i],
            "ttft_measured_s": measured_s,
            "ttft_predicted_s": predicted_s,
            "prompt_tokens": theirs["prompt_tokens"][i],
            "hit_measured": theirs.get("prefix_hit_tokens", [0] * (i + 1))[i],
            "hit_predicted": ours["prefix_hit_tokens"][i],
            "preemptions_predicted": ours["preemptions"][i],
            "inside": inside[i],
        }
        for _, i, measured_s, predicted_s in found[:most]
    ]
    worst = {i for _, i, _, _ in found[: max(3, len(found) // 10)]}
    return Misses(rows, _differences(theirs, inside, worst, {i for _, i, _, _ in found}))


def _differences(
    table: Table, inside: Sequence[int], worst: set[int], every: set[int]
) -> list[str]:
    columns = {**table, "inside": inside}
    told, rest = [], every - worst
    if not rest or not worst:
        return []
    for name, column in FEATURES.items():
        if column not in columns:
            continue
        values = [value or 0 for value in columns[column]]
        ours = statistics.fmean(values[i] for i in worst)
        others = statistics.fmean(values[i] for i in rest)
        spread = statistics.pstdev(values[i] for i in every) or 1.0
        if abs(ours - others) > 0.8 * spread:
            text = f"{name}: {ours:.4g} in the worst tenth, {others:.4g} otherwise"
            told.append((abs(ours - others) / spread, text))
    return [text for _, text in sorted(told, reverse=True)]


def _inside(table: Table) -> list[int]:
    """Requests in the system at each arrival."""
    ends = np.sort([t for t in table["finish_s"] if t is not None])
    arrivals = np.array(table["arrival_s"], dtype=float)
    before = np.searchsorted(np.sort(arrivals), arrivals, side="left")
    return (before - np.searchsorted(ends, arrivals, side="right")).tolist()
