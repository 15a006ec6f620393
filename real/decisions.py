"""Does the twin decide as the server did? A recording, step by step, beside the twin's engine and policy.

The twin is given what the scheduler was given, in the same order and at the same instants (real.record): requests as
they came, clients that left, and the start and end of each step as measured. What it decides itself is compared: who
starts and in which order, how many tokens of each prompt it finds in its prefix cache, who resumes and who loses its
place, and what each step holds.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twin.engine.config import EngineConfig
from twin.engine.core import EngineCore
from twin.engine.request import EngineRequest
from twin.errors import InputError
from twin.scenario import Scenario
from twin.scheduling import Job, Policy

CONTENT = ("tokens", "seqs", "decodes", "context", "pairs")
TOLD = 20
"""Differences that are kept in words."""


class RecordedKeys:
    """The content of one request's blocks, as the server hashed it."""

    def __init__(self, rid: str, hashes: Sequence[str]) -> None:
        self._keys = list(hashes)
        self._rid = rid

    def upto(self, num_blocks: int) -> list[str]:
        """At least so many; what the server had not computed any more is like nothing else."""
        while len(self._keys) < num_blocks:
            self._keys.append(f"{self._rid}/{len(self._keys)}")
        return self._keys


@dataclass
class Decisions:
    """How far the two agree."""

    requests: int = 0
    steps: int = 0
    equal_steps: int = 0
    """Steps that hold the same in both."""
    same_start: int = 0
    """Requests that started in the same step."""
    same_hit: int = 0
    """Of these, with the same number of tokens from the prefix cache."""
    same_order: int = 0
    """Most requests that started in one order in both: all but those that would have to be moved."""
    preemptions: tuple[int, int] = (0, 0)
    """(server, twin)."""
    same_preemptions: int = 0
    """Of the server's, in the same step of the same request."""
    hit_tokens: tuple[int, int] = (0, 0)
    """(server, twin), at first starts."""
    differences: list[str] = field(default_factory=list)

    def share(self, count: int) -> float:
        """Of the requests."""
        return count / self.requests if self.requests else 1.0

    def text(self) -> str:
        """In words."""
        lines = [
            f"{self.requests} requests, {self.steps} steps; {self.equal_steps} steps hold the same in both",
            f"started in the same step: {100 * self.share(self.same_start):.2f} % of the requests; in the same "
            f"order: {100 * self.share(self.same_order):.2f} %; same prefix hit: "
            f"{100 * self.share(self.same_hit):.2f} %",
            f"preemptions: server {self.preemptions[0]}, twin {self.preemptions[1]}, the same {self.same_preemptions}",
            f"prefix hits: server {self.hit_tokens[0]:,} tokens, twin {self.hit_tokens[1]:,}",
        ]
        return "\n".join([*lines, *self.differences]) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a recording. Raises InputError for a file that is none."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a recording: {error}") from None
    if not any(row.get("kind") == "add" for row in rows):
        raise InputError(f"{path}: holds no requests; record with real.record")
    return rows


def decide(rows: Sequence[Mapping[str, Any]], scenario: Scenario) -> Decisions:
    """Drive the twin along a recording of a server of this scenario."""
    policy = None
    if scenario.policy is not None:
        policy = Policy(scenario.policy, scenario.engine.max_model_len)
    return _Driver(rows, scenario.engine, policy).run()


class _Driver:
    def __init__(
        self, rows: Sequence[Mapping[str, Any]], config: EngineConfig, policy: Policy | None
    ) -> None:
        self._rows, self._policy = rows, policy
        self._core = EngineCore(config, policy)
        self._ends = {row["rid"]: row for row in rows if row["kind"] == "end"}
        self._found = Decisions(requests=sum(row["kind"] == "add" for row in rows))
        self._starts: tuple[list[str], list[str]] = ([], [])
        self._started: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._hits: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._seq = 0
        self._done: set[int] = set()  # rows that were carried out before their turn

    def run(self) -> Decisions:
        """All rows in their order."""
        for number, row in enumerate(self._rows):
            match row["kind"]:
                case "add":
                    self._add(row)
                case "abort" if number not in self._done:
                    self._abort(row)
                case "step":
                    self._step(row, number)
        return self._result()

    def _abort(self, row: Mapping[str, Any]) -> None:
        request = self._core.requests.get(row["rid"])
        if request is not None:
            self._core.abort(request, row["at_s"], "client")

    def _add(self, row: Mapping[str, Any]) -> None:
        rid, end = row["rid"], self._ends.get(row["rid"])
        job = None
        if self._policy is not None:
            about = row["job"]
            job = Job(rid, about["arrival"], row["prompt_tokens"], row["max_tokens"], about["tier"],
                      about["tenant"], about["ttft_deadline"], about["deadline"])  # fmt: skip
        # Where the model would have ended a reply that was cut off nobody knows; after what it had, in any case.
        is_whole = end is not None and end["status"] == "FINISHED_STOPPED"
        tokens = end["output_tokens"] if end is not None and is_whole else None
        keys = RecordedKeys(rid, () if end is None else end["blocks"])
        self._core.add(
            EngineRequest(
                rid, self._seq, row["at_s"], row["prompt_tokens"], row["max_tokens"],
                tokens, keys if self._core.config.enable_prefix_caching else None,
                row["priority"], job,
            ),
            row["at_s"],
        )  # fmt: skip
        self._seq += 1

    def _step(self, row: Mapping[str, Any], place: int) -> None:
        number = self._found.steps
        self._found.steps += 1
        planned = self._core.schedule(row["start_s"])
        ours = {
            "tokens": planned.num_tokens, "seqs": planned.num_seqs, "decodes": planned.num_decodes,
            "context": planned.decode_context, "pairs": planned.prefill_pairs,
        }  # fmt: skip
        theirs = {name: row[name] for name in CONTENT}
        started = {str(r.rid): r for r in planned.admitted if str(r.rid) not in self._started[1]}
        victims = [str(r.rid) for r in (*planned.planned_preempted, *planned.preempted)]
        if ours == theirs and set(started) == set(row["started"]):
            self._found.equal_steps += 1
        elif len(self._found.differences) < TOLD:
            self._found.differences.append(_told(number, theirs, ours, row, started, victims))
        for rid, hit in row["started"].items():
            self._starts[0].append(rid)
            self._started[0][rid], self._hits[0][rid] = number, hit
        for rid, request in started.items():
            self._starts[1].append(rid)
            self._started[1][rid], self._hits[1][rid] = number, request.prefix_hit_tokens or 0
        both = Counter(victims) & Counter(row["preempted"])
        self._found.same_preemptions += sum(both.values())
        a, b = self._found.preemptions
        self._found.preemptions = (a + len(row["preempted"]), b + len(victims))
        update_s = row.get("update_s", row["start_s"] + row["duration_s"])
        # vLLM looks for clients that left while a step ran before it takes in the results.
        for later in range(place + 1, len(self._rows)):
            found = self._rows[later]
            if found["kind"] == "step" or found.get("at_s", 0.0) > update_s:
                break
            if found["kind"] == "abort":
                self._done.add(later)
                self._abort(found)
        self._core.update(planned, update_s)

    def _result(self) -> Decisions:
        found, (theirs, ours) = self._found, self._started
        found.same_start = sum(ours.get(rid) == step for rid, step in theirs.items())
        found.same_hit = sum(self._hits[1].get(rid) == hit for rid, hit in self._hits[0].items())
        place = {rid: number for number, rid in enumerate(self._starts[1])}
        found.same_order = _longest_rise([place[rid] for rid in self._starts[0] if rid in place])
        never = found.requests - len(theirs)
        both_never = sum(1 for rid in self._never() if rid not in ours)
        # Requests that started on neither side agree, too.
        if never:
            found.same_start += both_never
            found.same_hit += both_never
            found.same_order += both_never
        found.hit_tokens = (sum(self._hits[0].values()), sum(self._hits[1].values()))
        return found

    def _never(self) -> Iterator[str]:
        for row in self._rows:
            if row["kind"] == "add" and row["rid"] not in self._started[0]:
                yield row["rid"]


def _longest_rise(places: Sequence[int]) -> int:
    """Length of the longest rising subsequence."""
    ends: list[int] = []
    for place in places:
        at = bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(ends)


def _told(
    number: int,
    theirs: Mapping[str, int],
    ours: Mapping[str, int],
    row: Mapping[str, Any],
    started: Mapping[str, EngineRequest],
    victims: Sequence[str],
) -> str:
    content = ", ".join(
        f"{name} {theirs[name]} and {ours[name]}" for name in CONTENT if theirs[name] != ours[name]
    )
    parts = [f"step {number} (server and twin): {content or 'the same content'}"]
    if set(row["started"]) != set(started):
        parts.append(f"started {sorted(row['started'])} and {sorted(started)}")
    if sorted(row["preempted"]) != sorted(victims):
        parts.append(f"preempted {row['preempted']} and {victims}")
    return "; ".join(parts)
