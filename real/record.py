"""Write down every step of a running engine: what came and went, what was decided, and how long it took.

For `--scheduler-cls real.record.make_recording_scheduler`, with `"record": FILE` beside the policy in
additional_config. One JSON object a line, in the order in which the scheduler was called: `add` (a request came),
`step` (its content, who started with how many cached tokens, who resumed, who lost its place), `first` (time from a
request's arrival to its first token as the scheduler sees it), `abort` (its client has gone) and `end` (with the
content of its blocks). Synchronous scheduling only, where a step lasts until the next one begins.
"""

import json
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from real.hints import CONFIG_KEY
from real.scheduler import PolicyScheduler
from real.vllm_names import check_version

FLUSH_EVERY = 64


def content_of(requests: Any, planned: Any) -> dict[str, int]:
    """What a step holds, under the names of the simulator's step-time formula.

    `requests` are the scheduler's, by id, after it has planned the step.
    """
    tokens = pairs = decodes = context = sampled = 0
    for rid, n in planned.num_scheduled_tokens.items():
        request = requests[rid]
        before = request.num_computed_tokens - n
        tokens += n
        sampled += not request.is_prefill_chunk
        if n == 1 and before >= request.num_prompt_tokens:
            decodes += 1
            context += before + 1
        else:
            pairs += n * before + n * (n + 1) // 2
    return {
        "tokens": tokens,
        "seqs": len(planned.num_scheduled_tokens),
        "decodes": decodes,
        "context": context,
        "pairs": pairs,
        "sampled": sampled,
    }


class Recording:
    """Mixed in front of a scheduler."""

    def __init__(self, vllm_config: Any, **kwargs: Any) -> None:
        self._instant = time.monotonic()
        super().__init__(vllm_config=vllm_config, **kwargs)
        path = vllm_config.additional_config[CONFIG_KEY]["record"]
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - as long as the engine lives
        self._row: dict[str, Any] | None = None
        self._rows = 0
        self._seen: set[str] = set()
        self._alive: dict[str, Any] = {}

    def clock(self) -> float:
        """The policy's time: one instant for all that is asked within one call, so that it can be written down."""
        return self._instant

    def add_request(self, request: Any) -> None:
        """Take a request in, and note it."""
        self._instant = time.monotonic()
        super().add_request(request)
        row = {
            "kind": "add",
            "rid": request.request_id,
            "at_s": self._instant,
            "prompt_tokens": request.num_prompt_tokens,
            "max_tokens": request.max_tokens,
            "priority": request.priority,
        }
        if (tracked := getattr(self, "tracked", {}).get(request.request_id)) is not None:
            job = tracked.job
            names = ("arrival", "tier", "tenant", "ttft_deadline", "deadline")
            row["job"] = {name: getattr(job, name) for name in names}
        self._alive[request.request_id] = request
        self._write(row)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Clients have gone."""
        self._instant = time.monotonic()
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        for rid in list(self.requests) if ids is None else list(ids):
            if rid in self._alive:
                self._write({"kind": "abort", "rid": rid, "at_s": self._instant})
        ended = super().finish_requests(request_ids, finished_status)
        self._note_ends()
        return ended

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule, and note what the step holds. A step ends when the next one is planned."""
        now = self._instant = time.monotonic()
        self._end_row(now)
        planned = super().schedule(*args, **kwargs)
        if planned.num_scheduled_tokens:
            self._row = {"kind": "step", "start_s": now, **content_of(self.requests, planned)}
            self._row |= self._decisions(planned)
        self._note_ends()
        return planned

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in the results, and note when requests got their first token."""
        now = self._instant = time.monotonic()
        if self._row is not None:
            self._row["update_s"] = now
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for group in outputs.values():
            for result in group.outputs:
                if result.new_token_ids and result.request_id not in self._seen:
                    request = self._alive.get(result.request_id)
                    if request is None:
                        continue
                    self._seen.add(result.request_id)
                    ttft_s = time.time() - request.arrival_time
                    self._write({"kind": "first", "rid": result.request_id, "ttft_s": ttft_s})
        self._note_ends()
        if not self.has_unfinished_requests():
            self._end_row(time.monotonic())
            self._file.flush()
        return outputs

    def _decisions(self, planned: Any) -> dict[str, Any]:
        """Who started, with how many tokens from the prefix cache, and who lost its place."""
        started = {
            request.req_id: request.num_computed_tokens for request in planned.scheduled_new_reqs
        }
        return {
            "started": started,
            "resumed": sorted(planned.scheduled_cached_reqs.resumed_req_ids),
            "preempted": sorted(planned.preempted_req_ids or ()),
        }

    def _note_ends(self) -> None:
        """Requests that the scheduler no longer has."""
        for rid in [rid for rid in self._alive if rid not in self.requests]:
            request = self._alive.pop(rid)
            hashes = [bytes(block).hex()[:16] for block in request.block_hashes]
            self._seen.discard(rid)
            self._write(
                {
                    "kind": "end",
                    "rid": rid,
                    "output_tokens": request.num_output_tokens,
                    "status": request.status.name,
                    "blocks": hashes,
                }
            )

    def _end_row(self, now: float) -> None:
        if self._row is not None:
            self._row["duration_s"] = now - self._row["start_s"]
            self._write(self._row)
            self._row = None

    def _write(self, row: dict[str, Any]) -> None:
        # A step is written when it has ended; what happens meanwhile comes after it.
        if self._row is not None and row is not self._row:
            self._row.setdefault("meanwhile", []).append(row)
            return
        later = row.pop("meanwhile", [])
        for one in (row, *later):
            self._file.write(json.dumps(one) + "\n")
        self._rows += 1 + len(later)
        if self._rows % FLUSH_EVERY < 1 + len(later):
            self._file.flush()


class RecordingScheduler(Recording, Scheduler):
    """vLLM's own scheduler, recorded."""


class RecordingPolicyScheduler(Recording, PolicyScheduler):
    """Ours, recorded."""


def make_recording_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """The factory. Raises RuntimeError under a vLLM it does not know, and with async scheduling."""
    check_version()
    if vllm_config.scheduler_config.async_scheduling:
        raise RuntimeError("steps are recorded with --no-async-scheduling only")
    settings = vllm_config.additional_config[CONFIG_KEY]
    policy = settings.get("policy")
    return (RecordingScheduler if policy is None else RecordingPolicyScheduler)(
        vllm_config, **kwargs
    )
